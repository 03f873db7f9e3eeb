"""On each page of the short route, a line above its title that leads to the others, see _templates/layout.html, and
at its foot the next of them in the place of the next chapter."""

import re

ROUTE = ("01_least_squares", "03_smoothers", "05_boosting", "08_boosted", "17a_models", "18_perplexity")
CHAPTER = re.compile(r"0?(\d+[a-z]?)_")


def add_route(app, pagename, templatename, context, doctree):
    """The stops of the route for the page's template: number, title, and address, which the page itself has not."""
    folder, _, name = pagename.rpartition("/")
    if name not in ROUTE:
        return
    stops = []
    for one in ROUTE:
        page = f"{folder}/{one}" if folder else one
        if page in app.env.titles:
            address = app.builder.get_relative_uri(pagename, page) if one != name else ""
            stops.append((CHAPTER.match(one)[1], app.env.titles[page].astext(), address))
    context["short_route"] = stops
    here = next(i for i, (*_, address) in enumerate(stops) if not address)
    for number, title, address in stops[here + 1 : here + 2]:
        context["next"] = {"link": address, "title": f"On the short route: {number}. {title}"}


def setup(app):
    app.connect("html-page-context", add_route)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
