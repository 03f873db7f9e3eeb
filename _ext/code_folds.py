"""Folded cells that follow one another open together, at one line that says what all of them hold.

A figure of this book often stands after three cells whose code is folded: imports, numbers that the text quotes, the
drawing itself. Three bars in a row say nothing that one line does not.

A screen reader reads that line as the name of the fold, and where several on a page have the same, the heading above it
too. What opens on a click otherwise, a proof or a solution, has its title as its name.
"""

from __future__ import annotations

from collections import Counter
from html import escape

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

    That is the last, if it makes something that the page shows, and else the first. A page that begins with what its
    library's module imports begins with its setup.
    """
    if "what the library's module imports" in titles:
        return "the setup of this page"
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


def heading_above(node: nodes.Node) -> str:
    while node is not None and not (isinstance(node, nodes.section) and isinstance(node[0], nodes.title)):
        node = node.parent
    return node[0].astext() if node else ""


def tell_apart(folds: list[HideCodeCellNode]) -> None:
    """Give each of several folds of one title the heading above it and, if that is the same too, a number."""
    titles = Counter(fold["prompt_show"] for fold in folds)
    used = Counter()
    for fold in folds:
        if titles[fold["prompt_show"]] > 1:
            place = f", in {heading_above(fold)}"
            used[fold["prompt_show"], place] += 1
            number = used[fold["prompt_show"], place]
            fold["place"] = place if number == 1 else f"{place}, {number}"


def visit_fold(self, node: HideCodeCellNode) -> None:
    """As myst-nb writes it, but with no label that hides the title from a screen reader."""
    place = f'<span class="sr-only">{escape(node["place"])}</span>' if node.get("place") else ""
    self.body.append(f'<details class="admonition hide {" ".join(node["classes"])}">\n<summary>\n')
    for state, words in (("collapsed", node["prompt_show"]), ("expanded", node["prompt_hide"])):
        self.body.append(f'<p class="{state} admonition-title">{escape(words)}{place}</p>\n')
    self.body.append("</summary>\n")


def depart_fold(self, node: HideCodeCellNode) -> None:
    self.body.append("</details>\n")


# The buttons of sphinx-togglebutton are there when the page is loaded.
NAMED = """addEventListener('load', () => document.querySelectorAll('.toggle-button').forEach(
    button => button.setAttribute('aria-label', button.parentElement.textContent.trim())));"""


class MergeFolds(SphinxPostTransform):
    """After myst-nb has folded cells: one fold for each run of them."""

    default_priority = 201
    formats = ("html",)

    def run(self, **kwargs):
        parents = {id(n.parent): n.parent for n in self.document.findall(HideCodeCellNode)}
        for holder in {id(cell.parent): cell.parent for cell in parents.values()}.values():
            for run in runs_of(holder):
                merge(run)
        tell_apart(list(self.document.findall(HideCodeCellNode)))


def setup(app):
    app.add_node(HideCodeCellNode, override=True, html=(visit_fold, depart_fold))
    app.add_post_transform(MergeFolds)
    app.add_js_file(None, body=NAMED)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
