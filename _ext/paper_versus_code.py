"""Gather the book's paper-versus-code boxes on one page.

A chapter that finds a paper and code at odds says so in a box::

    ```{admonition} Paper versus code: one forward pass
    :class: paper-versus-code
    :name: pvc-one-pass
    …
    ```

A box that sets a paper's claim against what the book measured or proved, with no code beside it, is titled
"Paper versus here: …"; its class is the same.

``{paper-versus-code-list}`` is replaced by every such box of the book, in
reading order, each with the way back to where it stands.  The boxes are taken
from the pages Sphinx has already read and stored, so nothing has to be kept in
step between builds.
"""

from __future__ import annotations

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

log = logging.getLogger(__name__)

BOX = "paper-versus-code"
TITLES = "Paper versus code: ", "Paper versus here: "


class box_list(nodes.General, nodes.Element):
    """The place where the boxes go."""


class BoxList(SphinxDirective):
    def run(self):
        self.env.metadata[self.env.docname]["lists_boxes"] = True
        return [box_list()]


def boxes_in(document):
    return [box for box in document.findall(nodes.admonition) if BOX in box["classes"]]


def without_anchors(box: nodes.Element, docname: str) -> nodes.Element:
    """A copy of a box that can stand on another page beside the original."""
    copy = box.deepcopy()
    for node in copy.findall(nodes.Element):
        node["ids"], node["names"] = [], []
        if isinstance(node, nodes.math_block):  # its number belongs to the original
            node["number"] = node["label"] = None
        if isinstance(node, addnodes.pending_xref):
            node["refdoc"] = docname
    return copy


def way_back(app, here: str, there: str, box: nodes.Element) -> nodes.paragraph:
    """'From 1. Least squares', linked to the box in its chapter."""
    number = app.env.toc_secnumbers.get(there, {}).get("", ())
    title = app.env.titles[there]
    link = nodes.reference("", "", internal=True)
    link["refuri"] = f"{app.builder.get_relative_uri(here, there)}#{box['ids'][0]}"
    link += nodes.Text("".join(f"{n}." for n in number) + " " * bool(number))
    link += [child.deepcopy() for child in title.children]
    return nodes.paragraph("", "", nodes.Text("From "), link, classes=[f"{BOX}-source"])


class GatherBoxes(SphinxPostTransform):
    """Runs before references are resolved, so that those in the boxes are too."""

    default_priority = 1

    def run(self, **options):
        here = self.env.docname
        for place in list(self.document.findall(box_list)):
            gathered = []
            for there in self.env.collect_relations():  # in reading order
                for box in boxes_in(self.env.get_doctree(there)) if there != here else ():
                    copy = without_anchors(box, here)
                    copy += way_back(self.app, here, there, box)
                    gathered.append(copy)
            nothing = nodes.paragraph(text="No chapter has one yet.")
            place.replace_self(gathered or [nothing])


def check_boxes(app, document) -> None:
    """A box says what its paper is set against, and one without a name has no anchor to go back to."""
    for box in boxes_in(document):
        if not box[0].astext().startswith(TITLES):
            wanted = " or ".join(f"'{title}…'" for title in TITLES)
            log.warning("the box '%s' is not titled %s", box[0].astext(), wanted, location=box, type=BOX)
        if not box["names"]:
            log.warning(
                "the box '%s' has no ':name: pvc-…', so the page of all boxes cannot link back to it; add one",
                box[0].astext(),
                location=box,
                type=BOX,
            )
            box["ids"] = box["ids"] or [nodes.make_id(box[0].astext())]


def pages_with_lists(app, env) -> list[str]:
    """Any page may have gained or lost a box, so the list is always written anew."""
    pages = [docname for docname, about in env.metadata.items() if about.get("lists_boxes")]
    # MathJax is loaded where Sphinx saw an equation; those in the boxes arrive too late for it.
    env.get_domain("math").data["has_equations"].update(dict.fromkeys(pages, True))
    return pages


def setup(app):
    app.add_node(box_list)
    app.add_directive(f"{BOX}-list", BoxList)
    app.add_post_transform(GatherBoxes)
    app.connect("doctree-read", check_boxes)
    app.connect("env-updated", pages_with_lists)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
