"""Run every notebook as Colab would: with its packages, the library from the wheel, each alone in an empty folder.

    python tools/try_colab.py [NOTEBOOK ...] [--python PYTHON] [--at-once 1]

The versions are those of `colab-*.txt`, in this folder. In place of GitHub stands this working tree, and where the
first cell has pip install the clone, pip installs its wheel and may change none of these versions.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from try_extras import ROOT, bare, built, fresh_python

(PINS,) = Path(__file__).parent.glob("colab-*.txt")
BOOK = "https://github.com/gbattn/gbattn"
LIMIT = 600  # seconds for a notebook

# Of what it is asked to install, pip takes the extras.
PIP = """#!/bin/sh
for asked; do :; done
exec "{python}" -P -m pip install --quiet --constraint "{pins}" "{wheel}[${{asked##*[}}"
"""


def first_cell(path):
    return "".join(json.loads(path.read_text("utf-8"))["cells"][0]["source"])


def committed(tree, folder):
    """A repository of a folder as it is, without what git ignores."""
    git = ["git", f"--git-dir={folder}", f"--work-tree={tree}", "-c", "user.name=book", "-c", "user.email=book"]
    for words in ("init --quiet", "add --all", "-c commit.gpgsign=false commit --quiet --no-verify -m book"):
        subprocess.run([*git, *words.split()], cwd=tree, check=True)
    return folder


def pip_of_the_wheel(python, wheel, folder):
    """Put a program pip into a folder of its own, run it once, and return the folder."""
    folder.mkdir()
    pip = folder / "pip"
    pip.write_text(PIP.format(python=python, pins=PINS, wheel=wheel))
    pip.chmod(0o755)
    extras = re.search(r'extras, book = "(\[[\w,]+\])"', first_cell(ROOT / "nbs" / "index.ipynb"))[1]
    subprocess.run([pip, "install", f"book{extras}"], env=bare(), check=True)
    return folder


def variables(folder, programs, book):
    """What a notebook finds around it: a home of its own, no index of packages, the book in place of GitHub."""
    found = bare()
    path = ":".join([*map(str, programs), found["PATH"]])
    found |= {"HOME": str(folder), "PATH": path, "PIP_NO_INDEX": "1", "GIT_CONFIG_COUNT": "1"}
    return found | {"GIT_CONFIG_KEY_0": f"url.file://{book}.insteadOf", "GIT_CONFIG_VALUE_0": BOOK}


def tried(path, folder, environment):
    """Run a notebook in an empty folder; the seconds that it took, and its first error."""
    content = folder / "content"
    content.mkdir(parents=True)
    notebook = json.loads(path.read_text("utf-8"))
    notebook["cells"][0]["source"] = first_cell(path).replace("/content", str(content))
    (content / path.name).write_text(json.dumps(notebook), "utf-8")
    options = dict(cwd=content, env=environment, capture_output=True, text=True, timeout=LIMIT)
    begun = time.monotonic()
    try:
        done = subprocess.run(["jupyter", "execute", path.name], **options)
        error = done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired:
        error = f"It did not end within {LIMIT} seconds."
    error = re.sub(r"\x1b\[[\d;]*m", "", error.rpartition("CellExecutionError: ")[2])  # colours
    return time.monotonic() - begun, error[-3000:]


def main():
    names = sorted(path.stem for path in (ROOT / "nbs").glob("*.ipynb"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help=f"some of {', '.join(names)}; all by default")
    parser.add_argument("--python", default=sys.executable, help="Python for the notebooks; this one by default")
    parser.add_argument("--at-once", type=int, default=2, help="notebooks at once (default: 2)")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.notebooks) - set(names)):
        parser.error(f"no notebook {', '.join(unknown)}; there are {', '.join(names)}")
    print(PINS.read_text("utf-8").partition("\n\n")[0], flush=True)
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gbattn-colab-") as place, ThreadPoolExecutor(asked.at_once) as pool:
        place = Path(place)
        python, install = fresh_python(place, asked.python)
        subprocess.run([*install, "-r", PINS], check=True)
        programs = pip_of_the_wheel(python, built(place), place / "programs"), python.parent
        book = committed(ROOT, place / "book.git")
        subprocess.run([python, "--version"], check=True)
        runs = {}
        for name in asked.notebooks or names:
            folder = place / name
            environment = variables(folder, programs, book)
            runs[pool.submit(tried, ROOT / "nbs" / f"{name}.ipynb", folder, environment)] = name
        for done in as_completed(runs):
            seconds, error = done.result()
            print(f"{runs[done]}: {'failed' if error else 'ok'}, {seconds:.0f} s", *filter(None, [error]), sep="\n")
            sys.stdout.flush()
            failed += bool(error)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
