"""A claim that a cell puts to the test stands on the page as a box: verdict and prediction first, then what decided.

`gbattn.conventions.put_to_test` prints five lines of plain text, which a notebook shows as they are.  Claims after a
line ``== a caption ==`` of the same output become one table instead, each with its rule on a click.
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
CAPTION = re.compile(r"^== (.*) ==$", re.M)
WORD = re.compile(r"(a )?[a-z]{2}")  # what may get a capital: a word, or an article before one; ν or x stays a symbol


def badge_of(verdict: str) -> str:
    """A verdict as a badge."""
    colour = BADGES[verdict]
    return f'<span class="sd-sphinx-override sd-badge sd-bg-{colour} sd-bg-text-{colour}">{verdict}</span>'


def capital(text: str) -> str:
    """A text with a capital, if a word begins it."""
    return text[:1].upper() + text[1:] if WORD.match(text) else text


def told(claim: re.Match) -> list[str]:
    """The five texts of a printed claim, in HTML."""
    prediction, *rest = (escape(MINUS.sub("−", " ".join(text.split()))) for text in claim.groups())
    return [capital(prediction), *rest]


def box_of(claim: re.Match) -> nodes.raw:
    """The box of a printed claim."""
    prediction, *rows, verdict = told(claim)
    head = f"<p>{badge_of(verdict)} {prediction}</p>"
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in zip(WORDS, rows, strict=True))
    return nodes.raw("", f'<div class="claim">{head}<dl>{rows}</dl></div>', format="html")


def table_of(caption: str, claims: list[re.Match]) -> nodes.raw:
    """One table of several printed claims."""
    rows = []
    for prediction, statistic, threshold, observed, verdict in map(told, claims):
        summary = f'<summary>rule<span class="sr-only">: {prediction}</span></summary>'
        rule = f"<details>{summary}{statistic}: {threshold}</details>"
        cells = f"{prediction} {rule}", badge_of(verdict), observed
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    head = "".join(f"<th>{name}</th>" for name in (escape(caption), "verdict", "found"))
    inside = f'<table class="table"><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return nodes.raw("", f'<div class="pst-scrollable-table-container">{inside}</div>', format="html")


def parts_of(block: nodes.literal_block) -> list[nodes.Node]:
    """The boxes of a printed text, or their table, and what it has before, between and after them."""
    text, parts, at = block.astext() + "\n", [], 0
    caption, claims = CAPTION.search(text), [*CLAIM.finditer(text)]
    pieces = [(claim.span(), box_of(claim)) for claim in claims]
    if caption and claims:
        pieces = [((caption.start(), claims[-1].end()), table_of(caption[1], claims))]
    for (start, end), shown in [*pieces, ((None, None), None)]:
        between = text[at:start].strip("\n")
        if between:
            parts.append(nodes.literal_block(between, between, **block.non_default_attributes()))
        parts += [shown] if shown else []
        at = end
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
