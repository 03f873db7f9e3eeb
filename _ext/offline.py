"""Take out of the theme what a book without a network cannot use.

Jupyter Book always loads sphinx-thebe, which runs cells on a rented kernel.  Its
script is fetched from a network, and its set-up raises a JavaScript error on
every page.  This book runs in Colab or at home instead.

Sphinx's search fetches each page it found, to quote from it.  A page opened from
a disk may not fetch another, so there the search lists titles only.
"""

TITLES_ONLY_FROM_DISK = "if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;"


LEFT_OUT = {"init_thebe_core", "update_thebe_context"}


def leave_thebe_out(app, config):
    for listeners in list(app.events.listeners.values()):
        for listener in list(listeners):
            if getattr(listener.handler, "__name__", "") in LEFT_OUT:
                app.disconnect(listener.id)


def setup(app):
    app.connect("config-inited", leave_thebe_out)
    app.add_js_file(None, body=TITLES_ONLY_FROM_DISK)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
