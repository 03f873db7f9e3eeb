"""Folded cells that follow one another open together, at one line that says what all of them hold.

A figure of this book often stands after three cells whose code is folded: imports, numbers that the text quotes, the
drawing itself. Three bars in a row say nothing that one line does not.
"""

from __future__ import annotations

from docutils import nodes
from myst_nb.sphinx_ import HideCodeCellNode
from sphinx.transforms.post_transforms import SphinxPostTransform


def fold_of(node: nodes.Node) -> HideCodeCellNode | None:
    """The fold with which a cell begins."""
    is_cell = isinstance(node, nodes.container) and node.get("nb_element") == "cell_code"
    first = node.children[0] if is_cell and node.children else None
    return first if isinstance(first, HideCodeCellNode) and "above-input" in first["classes"] else None


def runs_of(parent: nodes.Element) -> list[list[nodes.container]]:
    """The runs of folded cells under a node: a cell that shows an output is the last of its run."""
    runs, is_open = [], False
    for child in parent.children:
        if fold_of(child) is None:
            is_open = False
        else:
            runs = [*runs[:-1], [*runs[-1], child]] if is_open else [*runs, [child]]
            is_open = len(child.children) == 1
    return [run for run in runs if len(run) > 1]


def title_of(titles: list[str]) -> str:
    """One line for several titles: two of them in their short form, of more the one that matters and how many more.

    That is the last, if it makes something that the page shows, and else the first.
    """
    short = list(dict.fromkeys(title.split(": ")[0] for title in titles))
    if len(short) < 3:
        return "; ".join(short)
    main = short[-1] if "how the" in short[-1] else short[0]
    return f"{main} (and {len(titles) - 1} more cells)"


def merge(run: list[nodes.container]) -> None:
    """Move the code of a run into the fold of its last cell, each piece under its own title."""
    *before, last = run
    titles = [fold_of(cell)["prompt_show"].removeprefix("Show ") for cell in run]
    pieces = []
    for cell, title in zip(run, titles, strict=True):
        heading = nodes.paragraph("", title[:1].upper() + title[1:], classes=["code-fold-part"])
        pieces += [heading, *fold_of(cell).children]
    fold = fold_of(last)
    fold.children = []
    fold.extend(pieces)
    fold["prompt_show"], fold["prompt_hide"] = (f"{do} {title_of(titles)}" for do in ("Show", "Hide"))
    for cell in before:
        last["ids"] = [*cell["ids"], *last["ids"]]
        cell.parent.remove(cell)


class MergeFolds(SphinxPostTransform):
    """After myst-nb has folded cells: one fold for each run of them."""

    default_priority = 201
    formats = ("html",)

    def run(self, **kwargs):
        parents = {id(n.parent): n.parent for n in self.document.findall(HideCodeCellNode)}
        for holder in {id(cell.parent): cell.parent for cell in parents.values()}.values():
            for run in runs_of(holder):
                merge(run)


def setup(app):
    app.add_post_transform(MergeFolds)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
