"""Where, when and with what a number was measured stands behind a small mark, not in the middle of a sentence.

A page quotes the provenance of a record, "2026-11-21, x86_64 CPU, 2 threads, torch 2.13.0+cpu", with
``{glue:text}`experiment.provenance```. In a sentence or a caption it becomes a mark whose words come on hover, on a tap
and when it has the focus of the keyboard; a screen reader reads them, and on paper they stand where they stood.
See .provenance in _static/book.css.
"""

import re
from html import escape

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

# As gbattn.conventions writes it: a source if there is one, a date, a device and, of our own runs, threads and torch.
PROVENANCE = re.compile(r"(?:.*, )?\d{4}-\d\d-\d\d, [^,]+, \d+ threads?, torch \S+")

# what stands before, what stands after -> what of both goes from the page and comes back on paper
AROUND = (
    (re.compile(r"\s*\($"), re.compile(r"^(\.?\))")),  # alone in brackets
    (re.compile(r"\s*[;,]\s*$"), re.compile(r"^()")),  # the last of a list
    (re.compile(r"(?<=[.!?])\s+$"), re.compile(r"^(\.)")),  # a sentence of its own
)
FIRST = re.compile(r"(\s*)\($"), re.compile(r"^[;,]\s*")  # of a list in brackets, which begins after it


def mark(words: str, before: str = "", after: str = "") -> nodes.raw:
    """The mark of a provenance; what stood before and after it is for paper."""
    joints = [f'<span class="provenance-on-paper">{escape(text)}</span>' if text else "" for text in (before, after)]
    inside = f'{joints[0]}<span class="provenance-on-screen">Measured </span>{escape(words)}{joints[1]}'
    html = f'<span class="provenance" tabindex="0" role="note"><span class="provenance-text">{inside}</span></span>'
    return nodes.raw("", html, format="html")


def around(words: str, before: str, after: str) -> tuple[str, list[nodes.Node], str]:
    """The text before the mark, the mark with what moves with it, and the text after."""
    for left, right in AROUND:
        found = left.search(before), right.search(after)
        if all(found):
            kept = before[: found[0].start()], after[found[1].end() :]
            return kept[0], [mark(words, found[0][0], found[1][1])], kept[1]
    found = FIRST[0].search(before), FIRST[1].search(after)
    if all(found):
        return before[: found[0].start()], [mark(words, ", ")], f" ({after[found[1].end() :]}"
    return before, [mark(words)], after


class MarkProvenance(SphinxPostTransform):
    default_priority = 700  # when numbers are quoted, before terms and formulas cut the text
    formats = ("html",)

    def run(self, **options):
        for quoted in list(self.document.findall(nodes.inline)):
            words, parent = quoted.astext(), quoted.parent
            if not PROVENANCE.fullmatch(words) or len(parent) == 1:  # alone in a cell of a table it interrupts nothing
                continue
            here = parent.index(quoted)
            before, after = (
                parent[i].astext() if 0 <= i < len(parent) and isinstance(parent[i], nodes.Text) else ""
                for i in (here - 1, here + 1)
            )
            left, marked, right = around(words, before, after)
            made = [*([nodes.Text(left)] if left else []), *marked, *([nodes.Text(right)] if right else [])]
            parent[here - bool(before) : here + 1 + bool(after)] = made


def setup(app):
    app.add_post_transform(MarkProvenance)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
