"""Draw the figure of the first page once more, as the picture of the README and of a page that is shared.

The code is that of nbs/index.ipynb; README and previews want pixels on white, and of this size.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "_static" / "fit_the_residual.png"
PIXELS = 1200  # wide

sys.path.insert(0, str(ROOT / "nbs"))  # where a notebook finds `support`


def cells():
    """The code cells of the first page, in order."""
    notebook = json.loads((ROOT / "nbs" / "index.ipynb").read_text("utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def draw(file):
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context():
        setup = next(code for code in cells() if "figure_style()" in code)
        figure = next(code for code in cells() if "fig-alt" in code)
        exec(f"{setup}\n{figure}", {})
        drawn = plt.gcf()
        drawn.savefig(file, dpi=PIXELS / drawn.get_figwidth(), facecolor="white", metadata={"Software": None})
        plt.close(drawn)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else PICTURE)
