"""On each page the short route, at the head of the contents, see _templates/sbt-sidebar-nav.html.

On a page of the route there is also a line above its title that leads to the others, see _templates/layout.html, and
at its foot the one before and the next in the place of the chapters around it. From the first page one goes to the
first of them.
"""

import re

ROUTE = ("01_least_squares", "03_smoothers", "05_boosting", "05b_heads", "08_boosted", "17a_models", "18_perplexity")
CHAPTER = re.compile(r"0?(\d+[a-z]?)_")


def add_route(app, pagename, templatename, context, doctree):
    """The stops of the route for the templates: number, title, and address, which the page itself has not."""
    pages = {name.rpartition("/")[2]: name for name in app.env.titles}
    stops = []
    for page in (pages[one] for one in ROUTE if one in pages):
        address = app.builder.get_relative_uri(pagename, page) if page != pagename else ""
        stops.append((CHAPTER.search(page)[1], app.env.titles[page].astext(), address))
    here = next((i for i, (*_, address) in enumerate(stops) if not address), -1)
    context |= {"short_route": stops, "on_short_route": here >= 0}
    if here < 0 and pagename != app.config.root_doc:
        return
    around = {"prev": stops[max(here - 1, 0) : max(here, 0)], "next": stops[here + 1 : here + 2]}
    for side, found in around.items():
        for number, title, address in found:
            context[side] = {"link": address, "title": f"On the short route: {number}. {title}"}


def setup(app):
    app.connect("html-page-context", add_route)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
