"""Lead from the first use of a glossary term on a page to its definition.

A term of two or more words is linked, and those words of one that the field does not share (``WORDS``).  The first
use in running text counts: not in a heading, a caption, code, a formula or another link.  A page that sets a term
in italics or bold, or in a heading, explains it itself, and leads nowhere.
"""

import re
from functools import cache

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms.post_transforms import SphinxPostTransform

WORDS = """AdamW APJN CKA contraction crosstalk Derf DyT FLOP idempotent innovation interference L2-boosting
leverage logits mutant Nadaraya–Watson nat non-normal perplexity Post-LN Pre-LN pseudo-residual ridge roofline
row-stochastic SDPA shrinkage smoother stump top-p twicing warm-up whitening""".split()
EXPLAINS = (nodes.title, nodes.emphasis, nodes.strong)
NO_TEXT = (nodes.title, nodes.caption, nodes.literal, nodes.reference, nodes.math, nodes.table, nodes.raw)
NO_TEXT += (nodes.FixedTextElement, nodes.citation, nodes.emphasis, nodes.strong, addnodes.desc, addnodes.pending_xref)


def plural(term):
    """A pattern for a term and its simple plural."""
    start = re.escape(term).replace("’", "['’]")
    for one, many in [("y", "ies"), ("ix", "ices")]:
        if term.endswith(one):
            return f"{start.removesuffix(one)}(?:{one}|{many})"
    return f"{start}(?:e?s)?"


def pattern_of(terms):
    """The longest of the terms that begins at a place; a term with capitals is written so everywhere."""
    longest = sorted(terms, key=len, reverse=True)
    written = [plural(term) if term != term.lower() else f"(?i:{plural(term)})" for term in longest]
    either = "|".join(f"(?P<t{i}>{one})" for i, one in enumerate(written))
    return re.compile(rf"(?<![\w-])(?:{either})(?![\w-])"), longest


def inside(node, kinds):
    while node is not None and not isinstance(node, kinds):
        node = node.parent
    return node is not None


class Glossary:
    """The terms that are linked, with the place and the text of each definition."""

    def __init__(self, env):
        self.terms = {}
        for document in {docname for (kind, _), (docname, _) in env.domains["std"].objects.items() if kind == "term"}:
            for item in env.get_doctree(document).findall(nodes.definition_list_item):
                for term in item.findall(nodes.term):
                    name = term.astext()
                    if term["ids"] and "," not in name and (len(name.split()) > 1 or name in WORDS):
                        self.terms[name] = document, term["ids"][0], title_of(item)
        self.pattern, self.longest = pattern_of(self.terms)

    def term(self, found):
        return self.longest[int(found.lastgroup[1:])]

    def explained(self, document):
        """What a page explains itself."""
        texts = [node.astext() for node in document.findall(lambda node: isinstance(node, EXPLAINS))]
        return {self.term(found) for text in texts for found in self.pattern.finditer(text)}


@cache
def glossary_of(env):
    return Glossary(env)


def title_of(item):
    """The definition in one line, unless a formula would stand in it as its source."""
    definition = next(iter(item.findall(nodes.definition)))
    return "" if definition.next_node(nodes.math) else " ".join(definition.astext().split())


class LinkTerms(SphinxPostTransform):
    default_priority = 800  # after references and before formulas are tied to their commas

    def run(self, **options):
        glossary = glossary_of(self.env)
        here = self.env.docname
        if not glossary.terms or here in {document for document, *_ in glossary.terms.values()}:
            return
        done = glossary.explained(self.document)
        for text in list(self.document.findall(nodes.Text)):
            if inside(text, nodes.paragraph) and not inside(text, NO_TEXT):
                pieces = self.pieces(glossary, text.astext(), done)
                if len(pieces) > 1:
                    text.parent.replace(text, pieces)

    def pieces(self, glossary, text, done):
        """The text cut where a term is new, with a link in its place."""
        pieces, end = [], 0
        for found in glossary.pattern.finditer(text):
            term = glossary.term(found)
            if term not in done:
                done.add(term)
                pieces += [nodes.Text(text[end : found.start()]), self.link(found[0], *glossary.terms[term])]
                end = found.end()
        return [*pieces, nodes.Text(text[end:])]

    def link(self, text, document, anchor, title):
        address = self.app.builder.get_relative_uri(self.env.docname, document) + f"#{anchor}"
        link = nodes.reference("", text, internal=True, refuri=address, classes=["glossary-link"])
        if title:
            link["reftitle"] = title
        return link


def setup(app):
    app.add_post_transform(LinkTerms)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
