"""Say what a page is about where it is shared, in a chat, in a list of results, and how it is cited.

sphinxext-opengraph writes the tags.  The description that it makes runs from the first sentence into whatever comes
next, a figure's alt text or a list; here it is the first paragraph, which is a chapter's claim.

And the address of the site itself has the title, the description and the picture of the first page.  That page is
nbs/index.html, and the index.html above it only points there.  Who shares the address of the site shares that file,
and what reads it for a preview follows no pointer.
"""

import re
from html import escape
from pathlib import Path

import yaml
from docutils import nodes

POINTER = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{head}
<link rel="canonical" href="{address}">
<meta http-equiv="Refresh" content="0; url={page}">
</head>
<body><p><a href="{page}">{title}</a></p></body>
</html>
"""
SHARED = re.compile(r'<meta [^>]*(?:property="og:|name="(?:description|twitter:))[^>]*>')


def describe_by_first_paragraph(app, pagename, templatename, context, doctree):
    paragraph = next(iter(doctree.findall(nodes.paragraph)), None) if doctree else None
    if paragraph is not None:
        text = " ".join(paragraph.astext().split())
        context["meta"] = {**(context["meta"] or {}), "og:description": escape(text, quote=False)}
        context["metatags"] += f'<meta name="description" content="{escape(text)}" />\n'


def cite(app, pagename, templatename, context, doctree):
    """How the page is cited, for _templates/layout.html: by the authors of CITATION.cff."""
    if doctree is None:
        return
    book = yaml.safe_load((Path(__file__).parents[1] / "CITATION.cff").read_text("utf-8"))
    authors = escape(", ".join(author["name"] for author in book["authors"]))
    address = app.config.html_baseurl + app.builder.get_target_uri(pagename)
    where = f'In <em>{escape(book["title"])}</em>. <a href="{address}">{address}</a>'
    stop = "" if context["title"].endswith(("?", "!")) else "."
    context["citation"] = f"{authors} ({app.config.copyright}). {context['title']}{stop} {where}"


def point_to_the_first_page(app, error):
    if error or app.builder.format != "html" or app.config.root_doc == "index":
        return
    target = app.builder.get_target_uri(app.config.root_doc)
    page = (Path(app.outdir) / target).read_text("utf-8")
    title = re.search(r"<title>(.*?)</title>", page, re.S)[1].strip()
    head = "\n".join([f"<title>{title}</title>", *SHARED.findall(page)])
    address = app.config.html_baseurl + target
    pointer = POINTER.format(head=head, page=target, title=title, address=address)
    (Path(app.outdir) / "index.html").write_text(pointer, "utf-8")


def setup(app):
    app.connect("html-page-context", describe_by_first_paragraph, priority=400)  # before the tags are written
    app.connect("html-page-context", cite)
    app.connect("build-finished", point_to_the_first_page)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
