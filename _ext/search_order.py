"""The search puts a page whose title has the words before all others, and the library's pages after them."""

from pathlib import Path


def setup(app):
    weights = str(Path(__file__).with_suffix(".js"))
    app.connect("config-inited", lambda app, config: setattr(config, "html_search_scorer", weights))
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
