"""Keep the comma after a formula on the formula's line, and the bracket before it.

A browser may break a line on either side of a typeset formula, so a line would
begin with the full stop of the sentence before.
"""

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

OPENS = re.compile(r"[(\[“‘]+$")
CLOSES = re.compile(r"^[,.;:!?)\]”’]+")


class KeepPunctuation(SphinxPostTransform):
    """Put a formula and the marks that touch it into one span that does not break."""

    default_priority = 900  # when all text is there

    def run(self, **options):
        for math in list(self.document.findall(nodes.math)):
            parent, here = math.parent, math.parent.index(math)
            unbroken = nodes.inline(classes=["unbroken"])
            unbroken += self.cut(parent, here - 1, OPENS) + [math.deepcopy()] + self.cut(parent, here + 1, CLOSES)
            if len(unbroken) > 1:
                parent[here] = unbroken

    @staticmethod
    def cut(parent, place, marks):
        """Take the marks off the text at this place of the parent."""
        text = parent[place] if 0 <= place < len(parent) else None
        found = marks.search(text.astext()) if isinstance(text, nodes.Text) else None
        if not found:
            return []
        parent[place] = nodes.Text(marks.sub("", text.astext()))
        return [nodes.Text(found[0])]


def setup(app):
    app.add_post_transform(KeepPunctuation)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
