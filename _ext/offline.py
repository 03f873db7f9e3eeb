"""Take out of the theme what a book without a network cannot use, and out of the site what no page loads.

Jupyter Book always loads sphinx-thebe, which runs cells on a rented kernel.  Its
script is fetched from a network, and its set-up raises a JavaScript error on
every page.  This book runs in Colab or at home instead.

Sphinx's search fetches each page it found, to quote from it.  A page opened from
a disk may not fetch another, so there the search lists titles only.

Of MathJax, which comes with every input and output that it knows, pages load one
program, its fonts and the TeX extensions.  The theme draws its icons twice, from a
font and from a script that is larger than all others together: the font is enough.

Pygments marks each name and each bracket, and the style draws these two like any
other text: the marks alone are an eighth of the site.  Matplotlib writes a drawing with
line breaks, metadata and hundred-thousandths of a point: a sixth of its size.
"""

import re
import shutil
from pathlib import Path

TITLES_ONLY_FROM_DISK = "if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;"


LEFT_OUT = {"init_thebe_core", "update_thebe_context"}


def leave_thebe_out(app, config):
    for listeners in list(app.events.listeners.values()):
        for listener in list(listeners):
            if getattr(listener.handler, "__name__", "") in LEFT_OUT:
                app.disconnect(listener.id)


MATHJAX = ("tex-chtml.js", "output/chtml/fonts", "input/tex/extensions")
UNSEEN = re.compile(r'<span class="[np]">([^<]*)</span>')  # names and punctuation
ICONS = re.compile(r"\s*<script [^>]*fontawesome\.js[^>]*></script>")

OUTLINE = re.compile(r' d="[^"]*"')
DIGITS = re.compile(r"(\.\d\d)\d+")
ASIDES = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|(?<=>)\s+(?=<)", re.DOTALL)


def slim(drawing):
    """A drawing of Matplotlib, whose letters are outlines, to a hundredth of a point."""
    short = OUTLINE.sub(lambda found: DIGITS.sub(r"\1", found[0]).replace("\n", " "), drawing)
    return ASIDES.sub("", short)


def leave_out_what_no_page_loads(app, error):
    if error or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    mathjax = static / "mathjax"
    loaded = tuple(str(mathjax / name) for name in MATHJAX)
    unused = [file for file in mathjax.rglob("*.*") if file.is_file() and not str(file).startswith(loaded)]
    unused += [*static.rglob("*.map"), *static.rglob("webfonts/*.ttf"), *static.glob("scripts/fontawesome.js*")]
    for file in set(unused):
        file.unlink()
    shutil.rmtree(static / "locales", ignore_errors=True)  # the theme's own, from which it has translated already
    for page in Path(app.outdir).rglob("*.html"):
        text = ICONS.sub("", page.read_text("utf-8"))
        page.write_text(UNSEEN.sub(r"\1", text), "utf-8")
    for file in (Path(app.outdir) / "_images").glob("*.svg"):
        text = file.read_text("utf-8")
        if "Matplotlib" in text:
            file.write_text(slim(text), "utf-8")


def setup(app):
    app.connect("config-inited", leave_thebe_out)
    app.connect("build-finished", leave_out_what_no_page_loads)
    app.add_js_file(None, body=TITLES_ONLY_FROM_DISK)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
