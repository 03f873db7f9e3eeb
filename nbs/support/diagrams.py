"""What data does in a layer or in a step, as boxes and arrows, and which chapter needs which. A caption and an
alternative text say the same."""

import json
import re
from functools import cache
from html import escape
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from IPython.display import HTML

from gbattn.conventions import colour_of


def diagram(
    boxes: dict[str, tuple],
    arrows: str,
    *,
    size: tuple[float, float],
    repeated: tuple[float, float, float, float, str] | None = None,
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
    repeated : tuple, optional
        What occurs several times, in a dotted frame: its left, right, lower and upper edge, and how often.
    """
    fig, ax = plt.subplots(figsize=size)
    if repeated:
        left, right, low, high, times = repeated
        edges = [left, right, right, left, left], [low, low, high, high, low]
        ax.plot(*edges, color="C7", lw=1, ls=":")
        ax.text(right - 0.15, high - 0.1, times, ha="right", va="top")
    drawn = {}
    for name, (x, y, text, *method) in boxes.items():
        frame = colour_of(*method) if method else "none"
        style = dict(boxstyle="round,pad=0.45", fc="none", ec=frame, lw=1.4)
        if method:  # room beside the words
            text = "\n".join(f" {line} " for line in text.split("\n"))
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


# What the layers of chapter 18 compute, from below: of the first row a block with its network, of the second the
# attention alone. A box is its place, its text and, for a frame, its method.
_X, _NET = (0, 8.6, "$x$"), "reference"
_PLAIN = [(0, 12.1, "attention\n64", "softmax attention"), (0, 14.1, "network\n256", _NET)]
_BLOCKS = {
    "standard": (0, [_X, *_PLAIN]),
    "shift": (
        2.9,
        [
            _X,
            (0.5, 9.7, "K, V"),
            (0.5, 10.7, "shift", _NET),
            *_PLAIN,
            (-0.6, 9.7, "Q"),
        ],
    ),
    "wider": (
        6.1,
        [
            _X,
            (0, 12.1, "   attention   \n72 or 80", "softmax attention"),
            (0, 14.1, "    network    \n312", _NET),
        ],
    ),
    "stack": (
        9.3,
        [
            _X,
            (0, 10.3, "attention\n64", "softmax attention"),
            (0, 12.0, "network\n144", _NET),
            (0, 13.7, "attention\n64", "softmax attention"),
            (0, 15.4, "network\n144", _NET),
        ],
    ),
}
_ROUNDS = {  # what is left, and what the second attention makes of it and of x
    "twicing": (0, "$V - F$", "", ""),
    "boosted": (4, "$x - F$", "Q, K, V", ""),
    "boosted, input": (8, "$x - F$", "Q", "K, V"),
}


def line_up() -> None:
    """Draw the layers of chapter 18 side by side."""
    boxes, arrows = {}, ["shift0 > shift5", "shift5 > shift3"]
    for title, (left, found) in _BLOCKS.items():
        boxes[title] = left, 16.8, rf"$\bf{{{title}}}$"
        names = [f"{title}{i}" for i in range(len(found))]
        boxes |= {name: (left + x, *box) for name, (x, *box) in zip(names, found)}
        arrows += [f"{a} > {b}" for a, b in zip(names, names[1:]) if b != "shift5"]
    for title, (left, rest, reads, also) in _ROUNDS.items():
        again, add = ("attention", "boosted attention"), r"$F + g \odot c$"
        if title == "twicing":
            again, add = ("same\nweights", "softmax attention"), "$F + c$"
        found = {
            "title": (0.7, 7, rf"$\bf{{{title}}}$".replace(" ", r"\ ")),
            "x": (0.85, 0, "$x$"),
            "first": (0, 1.3, "attention", "softmax attention"),
            "F": (0, 2.7, "$F$"),
            "rest": (1.5, 2.7, rest),
            "second": (1.5, 4.8, *again),
            "sum": (0.4, 6.2, add),
        }
        lines = "x first,first F,x rest,F rest,F sum,second sum"
        for name, x, text in (("Q", 1.5, reads), ("K", 2.5, also)):
            found |= {name: (x, 3.65, text)} if text else {}
        lines += ",rest Q,Q second" if reads else ",rest second"
        lines += ",x K,K second" if also else ""
        of = title.replace(", ", "_")
        boxes |= {of + name: (left + x, *box) for name, (x, *box) in found.items()}
        for line in lines.split(","):
            start, end = line.split()
            arrows.append(f"{of}{start} > {of}{end}")
    diagram(boxes, "\n".join(arrows), size=(5.3, 7.4))


class Chapter(NamedTuple):
    """A chapter as the map of prerequisites has it: its page, its title, and the numbers of those that it needs."""

    page: str
    title: str
    needs: set[str]


def chapters() -> dict[str, Chapter]:
    """Read the chapters by number, with what the box of each says that a reader needs first.

    Chapter 0 is left out: it comes before all others.
    """
    number = lambda name: name.split("_")[0].lstrip("0")
    found = {}
    for path in sorted(Path(__file__).parents[1].glob("[0-9]*.ipynb")):
        cells = json.loads(path.read_text("utf-8"))["cells"]
        text = "\n".join(
            "".join(c["source"]) for c in cells if c["cell_type"] == "markdown"
        )
        title = re.search(r"^# (.*)$", text, re.M)[1]
        box = re.search(r"\*\*You need\*\*(.*?)\n\n", text, re.S)[1]
        needs = set(map(number, re.findall(r"\((\w+)\.ipynb", box)))
        found[number(path.stem)] = Chapter(path.stem, title, needs - {""})
    del found[""]
    return found


def _rows(needs: dict[str, set[str]]) -> tuple[list[list], list[tuple]]:
    """The chapters in rows, each below those that it needs, and the lines between neighbouring rows.

    A line is left out where others lead the same way; one that skips rows passes through places of its own.
    """

    @cache
    def above(one):
        return needs[one].union(*map(above, needs[one]))

    @cache
    def depth(one):
        return 1 + max(map(depth, needs[one]), default=-1)

    below = {
        one: [other for other in needs if one in needs[other]] for one in needs
    }
    row_of = {
        one: depth(one)
        if needs[one] or not below[one] or one == "1"
        else min(map(depth, below[one])) - 1
        for one in needs
    }
    rows, lines = [[] for _ in range(1 + max(row_of.values()))], []
    for one, row in row_of.items():
        rows[row].append(one)
        for other in needs[one] - set().union(*map(above, needs[one])):
            last = other
            for between in range(row_of[other] + 1, row):
                place = other, one, between
                rows[between].append(place)
                lines.append((last, place))
                last = place
            lines.append((last, one))
    return rows, lines


def _places(rows: list[list], lines: list[tuple]) -> dict:
    """Where each chapter and each place of a line stands across its row, from 0 to 1: near its neighbours."""
    x = {one: (i + 0.5) / len(row) for row in rows for i, one in enumerate(row)}
    ends = [(0, 1), (1, 0)]
    for sweep in range(16):
        here, there = ends[sweep % 2]
        for row in rows if sweep % 2 else rows[::-1]:
            for one in row:
                near = [x[line[there]] for line in lines if line[here] == one]
                x[one] = sum(near) / len(near) if near else x[one]
            row.sort(key=x.get)
            x |= {one: (i + 0.5) / len(row) for i, one in enumerate(row)}
    return x


def _circle(number: str, chapter: Chapter, x: int, y: int, on_route) -> str:
    """A chapter of the map: its number in a circle that is a link, and below it, where there is room, its subject."""
    title = escape(f"{number} {chapter.title}", quote=True)
    subject = chapter.page.split("_", 1)[1].replace("_", " ").capitalize()
    return (
        f"<a href='{chapter.page}.html' class='{'on-route' if on_route else 'beside'}' aria-label='{title}'>"
        f"<title>{title}</title><circle cx='{x}' cy='{y}' r='19'/><text x='{x}' y='{y + 6}'>{number}</text>"
        f"<text class='subject' x='{x}' y='{y + 31}'>{subject}</text></a>"
    )


def needs_map(route: tuple[str, ...] = ("1", "3", "5", "5b", "8", "17a", "18")) -> HTML:
    """Return the chapters, each below those that its box names as needed, as a drawing whose circles are links."""
    found = chapters()
    rows, lines = _rows({one: chapter.needs for one, chapter in found.items()})
    across, place = _places(rows, lines), {}
    for y, row in enumerate(rows):
        place |= {one: (round(20 + 700 * across[one]), 28 + 58 * y) for one in row}
    paths = "".join(
        "<path d='M{} {}C{} {} {} {} {} {}'/>".format(
            *place[a],
            place[a][0],
            place[a][1] + 29,
            place[b][0],
            place[b][1] - 29,
            *place[b],
        )
        for a, b in lines
    )
    circles = "".join(
        _circle(one, chapter, *place[one], one in route)
        for one, chapter in found.items()
    )
    return HTML(
        f"<svg class='needs-map' viewBox='0 0 740 {64 + 58 * (len(rows) - 1)}' role='group' "
        "aria-label='Map of prerequisites, from top to bottom: a line leads to each chapter from those that its own "
        "box names under You need.'>"
        "<style>.needs-map {width: 100%; max-width: 46rem; height: auto} "
        ".needs-map a {text-decoration: none} "
        ".needs-map path {fill: none; stroke: #8a8f98; stroke-width: 1.5} "
        ".needs-map circle {fill: var(--pst-color-background, #fff); stroke: #0072b2; stroke-width: 1.6} "
        ".needs-map text {font: 15px sans-serif; text-anchor: middle; fill: var(--pst-color-text-base, #222)} "
        ".needs-map .subject {font-size: 11px; paint-order: stroke; stroke-width: 4px; stroke-linejoin: round; "
        "stroke: var(--pst-color-background, #fff)} "
        "@media (max-width: 576px) {.needs-map {width: 46rem; max-width: none}} "
        ".needs-map .on-route circle {fill: #0072b2} "
        ".needs-map .on-route text:not(.subject) {fill: #fff; font-weight: 600}"
        f"</style>{paths}{circles}</svg>"
    )
