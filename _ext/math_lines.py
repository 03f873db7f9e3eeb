"""Where a line of text may break in a formula and beside it, and before a sign for per cent.

A browser breaks no line within a typeset formula, so a long one would run off a telephone: it is cut before its
relations, and where that is not enough before the signs of its sums, as TeX would do in print. A browser does
break on either side of a formula, so a line would begin with the full stop of the sentence before: the marks that touch
a formula stay with it, and so does a number with its sign.
"""

import re

from docutils import nodes
from sphinx.transforms.post_transforms import SphinxPostTransform

OPENS = re.compile(r"[(\[“‘]+$")
CLOSES = re.compile(r"^[,.;:!?)\]”’]+")

TOKEN = re.compile(r"\\(?:[A-Za-z]+|.)|\S", re.DOTALL)
DEEPER = {"{", "(", "[", r"\{", r"\left", r"\begin", r"\lvert", r"\lVert", r"\langle", r"\lfloor", r"\lceil"}
HIGHER = {"}", ")", "]", r"\}", r"\right", r"\end", r"\rvert", r"\rVert", r"\rangle", r"\rfloor", r"\rceil"}
RELATIONS = {"=", "<", ">", r"\le", r"\leq", r"\ge", r"\geq", r"\approx", r"\propto", r"\ne", r"\equiv", r"\sim"}
RELATIONS |= {r"\to", r"\mapsto", r"\leftarrow", r"\rightarrow", r"\Rightarrow", r"\Leftrightarrow", r"\ll", r"\gg"}
SUMS = {"+", "-", r"\pm"}
UNSEEN = {"{", "}", "^", "_", "&"}
LETTERS = 20  # of a formula that may stay in one piece


def letters_of(tex: str) -> int:
    """About how many letters wide a formula is: a name of a function counts as one, what draws nothing not at all."""
    plain = re.sub(
        r"\\(?:left|right|big|Big|bigl|bigr|mathbb|mathbf|mathrm|mathcal|text|operatorname|,|;|!|quad)\b", "", tex
    )
    return sum(token not in UNSEEN for token in TOKEN.findall(plain))


def cut_before(tex: str, marks: set[str], lead: str = "") -> list[str]:
    """The pieces of a formula, each but the first beginning with one of the marks that stand in no bracket."""
    pieces, start, depth, before = [], 0, 0, ""
    for found in TOKEN.finditer(tex):
        token = found[0]
        depth += (token in DEEPER) - (token in HIGHER)
        if depth < 0:
            return [tex]
        alone = before not in RELATIONS | SUMS | {"", ":", r"\not", ",", "_", "^", r"\quad"}
        if token in marks and depth == 0 and alone:
            pieces.append(tex[start : found.start()])
            start = found.start()
        before = token
    if depth or r"\\" in tex:  # an interval that is open on one side, or lines of its own
        return [tex]
    pieces.append(tex[start:])
    return [pieces[0], *(lead + piece for piece in pieces[1:])]


def lines_of(tex: str) -> list[str]:
    """The pieces of a formula between which a line may break."""
    if letters_of(tex) <= LETTERS:
        return [tex]
    return [
        part
        for piece in cut_before(tex, RELATIONS)
        for part in (cut_before(piece, SUMS, lead="{}") if letters_of(piece) > LETTERS else [piece])
    ]


class BreakFormulas(SphinxPostTransform):
    """Put a long formula into pieces with a space between them."""

    default_priority = 890  # before the marks are joined to what they touch

    def run(self, **options):
        for math in list(self.document.findall(nodes.math)):
            first, *others = lines_of(math.astext())
            if not others or isinstance(math.parent, nodes.title):
                continue
            here, made = math.parent.index(math), []
            for tex in (first, *others):
                piece = math.copy()
                piece += nodes.Text(tex.strip())
                made += [nodes.Text(" "), piece]
            math.parent[here : here + 1] = made[1:]


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


class KeepPercent(SphinxPostTransform):
    """Let no line begin with the sign of the number before."""

    default_priority = 900

    def run(self, **options):
        for text in list(self.document.findall(nodes.Text)):
            if " %" in text and not isinstance(text.parent, (nodes.FixedTextElement, nodes.literal, nodes.math)):
                text.parent.replace(text, nodes.Text(text.replace(" %", "\N{NO-BREAK SPACE}%")))


def setup(app):
    app.add_post_transform(BreakFormulas)
    app.add_post_transform(KeepPercent)
    app.add_post_transform(KeepPunctuation)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
