"""On each page of the short route, a line above its title that leads to the others, see _templates/layout.html, and
at its foot the one before and the next in the place of the chapters around it. From the first page one goes to the
first of them."""

import re

ROUTE = ("01_least_squares", "03_smoothers", "05_boosting", "08_boosted", "17a_models", "18_perplexity")
CHAPTER = re.compile(r"0?(\d+[a-z]?)_")


def add_route(app, pagename, templatename, context, doctree):
    """The stops of the route for the page's template: number, title, and address, which the page itself has not."""
    folder, _, name = pagename.rpartition("/")
    if name not in (*ROUTE, "index") or name == "index" and not folder:
        return
    stops = []
    for one in ROUTE:
        page = f"{folder}/{one}" if folder else one
        if page in app.env.titles:
            address = app.builder.get_relative_uri(pagename, page) if one != name else ""
            stops.append((CHAPTER.match(one)[1], app.env.titles[page].astext(), address))
    here = next((i for i, (*_, address) in enumerate(stops) if not address), -1)
    if name in ROUTE:
        context["short_route"] = stops
    around = {"prev": stops[max(here - 1, 0) : max(here, 0)], "next": stops[here + 1 : here + 2]}
    for side, found in around.items():
        for number, title, address in found:
            context[side] = {"link": address, "title": f"On the short route: {number}. {title}"}


def setup(app):
    app.connect("html-page-context", add_route)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
