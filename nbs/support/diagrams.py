"""What data does in a layer or in a step, as boxes and arrows. A caption and an alternative text say the same."""

import matplotlib.pyplot as plt

from gbattn.conventions import colour_of


def diagram(
    boxes: dict[str, tuple], arrows: str, *, size: tuple[float, float]
) -> None:
    """Draw boxes and the arrows between them.

    Parameters
    ----------
    boxes : dict
        By a short name: x and y of the middle, the text, and, for a coloured frame, a method that `colour_of` knows.
        A box without a text is a place where an arrow ends.
    arrows : str
        One a line, ``start > end``, or with a bend (a fraction of its length, to the left if positive),
        ``start > end 0.2``.
    size : tuple of float
        Width and height in inches.
    """
    fig, ax = plt.subplots(figsize=size)
    drawn = {}
    for name, (x, y, text, *method) in boxes.items():
        frame = colour_of(*method) if method else "none"
        style = dict(boxstyle="round,pad=0.45", fc="none", ec=frame, lw=1.4)
        drawn[name] = ax.text(x, y, text, ha="center", va="center", bbox=style)
    across, up = zip(*(box[:2] for box in boxes.values()))
    ax.set(
        xlim=(min(across) - 0.8, max(across) + 0.8),
        ylim=(min(up) - 0.6, max(up) + 0.6),
    )
    ax.axis("off")
    fig.canvas.draw()  # frames have their sizes from here on
    for line in arrows.strip().splitlines():
        start, end, *bend = line.replace(">", " ").split()
        style = dict(
            arrowstyle="-|>",
            lw=1.1,
            color="C7",
            mutation_scale=11,
            shrinkA=1,
            shrinkB=1,
        )
        style |= {
            f"patch{side}": drawn[name].get_bbox_patch()
            for side, name in zip("AB", (start, end))
        }
        style |= dict(connectionstyle=f"arc3,rad={bend[0] if bend else 0}")
        ax.annotate("", boxes[end][:2], boxes[start][:2], arrowprops=style)
    plt.show()
