"""Tell what a glossary term means where a page first uses it, and lead from its entry to where it is introduced.

The definition stands over the line on hover, on the first tap and when the term has the focus of the keyboard; a
screen reader reads it with the term; the term is a link to its entry.  See .glossary-term in _static/book.css.

A term of two or more words is linked, and those words of one that the field does not share (``WORDS``).  The first
use in running text counts: not in a heading, a caption, code, a formula or another link.  A page that sets a term
in italics or bold, or in a heading, explains it itself, and leads nowhere.

A definition without a link of its own ends with the section of a chapter that introduces its term: the first that sets
it in bold; else the first whose heading has it; else the one whose text uses it most.
"""

import re
from collections import Counter
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
                        self.terms[name] = document, term["ids"][0], told(item)
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


def told(item):
    """The definition as it stands over a line: without the names that others use, and without the chapter."""
    pieces = []
    for piece in next(iter(item.findall(nodes.paragraph))).children:
        if isinstance(piece, (nodes.reference, addnodes.pending_xref)):
            if re.fullmatch(r"Chapter \w+|Lab notebook", piece.astext()):
                break
            piece = nodes.Text(piece.astext())
        text, *others = piece.astext().split(" Elsewhere:")
        pieces.append(nodes.Text(text) if isinstance(piece, nodes.Text) else piece.deepcopy())
        if others:
            break
    if pieces and isinstance(pieces[-1], nodes.Text):
        pieces[-1] = nodes.Text(pieces[-1].rstrip())
    return pieces


class glossary_term(nodes.inline):
    """The first use of a term; its definition is an attribute, as it is no text of the page, nor of its search."""


def visit_term(self, node):
    link = {"class": "reference internal glossary-link", "href": node["refuri"], "aria-describedby": node["anchor"]}
    self.body += ['<span class="glossary-term" tabindex="-1">', self.starttag(node, "a", "", **link)]


def depart_term(self, node):
    self.body.append(f'</a><span class="glossary-text" role="tooltip" id="{node["anchor"]}">')
    for piece in node["told"]:
        piece.walkabout(self)
    self.body.append("</span></span>")


class LinkTerms(SphinxPostTransform):
    formats = ("html",)
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

    def link(self, text, document, anchor, definition):
        here = self.env.docname
        if any(piece.next_node(nodes.math, include_self=True) for piece in definition):
            self.env.get_domain("math").data["has_equations"][here] = True  # else the page has no MathJax
        address = self.app.builder.get_relative_uri(here, document) + f"#{anchor}"
        return glossary_term("", text, refuri=address, anchor=f"told-{anchor}", told=definition)


CHAPTER = re.compile(r"(?:.*/)?\d+[a-z]?_[^/]*$")


def section_of(node):
    """The section in which a node stands: one with a heading, as the boxes of theorems are sections without."""
    while node is not None and not (isinstance(node, nodes.section) and isinstance(node[0], nodes.title)):
        node = node.parent
    return node


def texts_of_chapters(env):
    """The bold texts, headings and paragraphs of all chapters, in reading order: kind, text, page and section."""
    found, kinds = [], (nodes.strong, nodes.title, nodes.paragraph)
    for docname in filter(CHAPTER.match, env.collect_relations()):
        for node in env.get_doctree(docname).findall(lambda node: isinstance(node, kinds)):
            section = section_of(node)
            if section and section[0].astext() != "Exercises":
                found.append((type(node), " ".join(node.astext().split()), docname, section))
    return found


def introduction(term, texts):
    """The page and the section that introduce a term, or None."""
    pattern, uses = pattern_of([term])[0], Counter()
    bold, headings = [], []
    for kind, text, *place in texts:
        if kind is nodes.strong and pattern.fullmatch(text.strip(".,:;")):
            bold.append(place)
        elif kind is nodes.title and pattern.search(text):
            headings.append(place)
        elif kind is nodes.paragraph:
            uses[tuple(place)] += len(pattern.findall(text))
    most = [place for place, number in uses.most_common(1) if number]
    return next(iter([*bold, *headings, *most]), None)


class LinkChapters(SphinxPostTransform):
    """At the end of each definition of a glossary, the section that introduces its term."""

    default_priority = 800

    def run(self, **options):
        for glossary in list(self.document.findall(addnodes.glossary)):
            texts = texts_of_chapters(self.env)
            for item in glossary.findall(nodes.definition_list_item):
                term, definition = (next(item.findall(kind)) for kind in (nodes.term, nodes.definition))
                has_link = definition.next_node(nodes.reference)
                if place := not has_link and introduction(term.astext(), texts):
                    definition[-1] += [nodes.Text(" "), self.link(*place)]

    def link(self, docname, section):
        anchor = section["ids"][0]
        numbers = self.env.toc_secnumbers.get(docname, {})
        number = ".".join(map(str, numbers.get(f"#{anchor}", numbers.get("", ()))))
        address = self.app.builder.get_relative_uri(self.env.docname, docname) + f"#{anchor}"
        title = section.next_node(nodes.title).astext()
        text = f"{'Section' if '.' in number else 'Chapter'}\u00a0{number}."
        return nodes.reference("", text, internal=True, refuri=address, reftitle=title)


def setup(app):
    app.add_node(glossary_term, html=(visit_term, depart_term))
    app.add_post_transform(LinkChapters)
    app.add_post_transform(LinkTerms)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
