"""A claim that a cell puts to the test stands on the page as a box: verdict and prediction first, then what decided.

`gbattn.conventions.put_to_test` prints five lines of plain text, which a notebook shows as they are.
"""

from __future__ import annotations

import re
from html import escape

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

LINES = ("prediction", "statistic", "threshold", "observed", "verdict")
CLAIM = re.compile("".join(rf"^{name:12}(.*(?:\n {{12}}.*)*)\n" for name in LINES), re.M)
MINUS = re.compile(r"(?<![\w-])-(?=[\d.])")
BADGES = {"held": "success", "did not hold": "danger", "open": "secondary", "proved, checked": "muted"}
# How the box names what a cell calls statistic, threshold and observed.
WORDS = ("measured", "needed", "found")


def box_of(claim: re.Match) -> nodes.raw:
    """The box of a printed claim."""
    prediction, *rows, verdict = (escape(MINUS.sub("−", " ".join(text.split()))) for text in claim.groups())
    badge = f'<span class="sd-sphinx-override sd-badge sd-bg-{BADGES[verdict]} sd-bg-text-{BADGES[verdict]}">'
    head = f"<p>{badge}{verdict}</span> {prediction[:1].upper()}{prediction[1:]}</p>"
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in zip(WORDS, rows, strict=True))
    return nodes.raw("", f'<div class="claim">{head}<dl>{rows}</dl></div>', format="html")


def parts_of(block: nodes.literal_block) -> list[nodes.Node]:
    """The boxes of a printed text, and what it has before, between and after them."""
    text, parts, at = block.astext() + "\n", [], 0
    for claim in [*CLAIM.finditer(text), None]:
        between = text[at : claim.start() if claim else None].strip("\n")
        if between:
            parts.append(nodes.literal_block(between, between, **block.non_default_attributes()))
        if claim:
            parts.append(box_of(claim))
            at = claim.end()
    return parts


class BoxClaims(SphinxPostTransform):
    default_priority = 200
    formats = ("html",)

    def run(self, **kwargs):
        for block in list(self.document.findall(nodes.literal_block)):
            if CLAIM.search(block.astext() + "\n"):
                at = block.parent.index(block)
                block.parent[at : at + 1] = parts_of(block)  # replace_self would hand its classes on


def setup(app):
    app.add_post_transform(BoxClaims)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
