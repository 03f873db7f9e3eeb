"""Take out of the theme what a book without a network cannot use, and out of the site what no page loads.

Jupyter Book always loads sphinx-thebe, which runs cells on a rented kernel.  Its
script is fetched from a network, and its set-up raises a JavaScript error on
every page.  This book runs in Colab or at home instead.

Sphinx's search fetches each page it found, to quote from it.  A page opened from
a disk may not fetch another, so there the search lists titles only.

A page shows its text before its scripts are there: they wait until it is read.

Of MathJax, which comes with every input and output that it knows, pages load what
_config.yml names: TeX with AMS macros, the fonts, and what a screen reader reads.  The
theme draws its icons twice, from a font and from a script that is larger than all
others together: the font is enough.

A notebook is downloaded from the repository, as it is opened in Colab: a copy of each
would be a seventh of the site.

Pygments marks each name, bracket and operator, and the style draws the first two like
any other text: so are operators then, and the marks go, a fifth of the code on a page.
Matplotlib writes a drawing with line breaks, metadata, a name for each part, the style
of each mark and hundred-thousandths of a point: a third of its size.
"""

import re
import shutil
from collections import Counter
from pathlib import Path

TITLES_ONLY_FROM_DISK = "if (location.protocol === 'file:') DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;"


LEFT_OUT = {"init_thebe_core", "update_thebe_context"}


def leave_out(app, config):
    config.mathjax_path = "mathjax/startup.js"  # not the bundle that sphinx-mathjax-offline sets, a third of it a menu
    for listeners in list(app.events.listeners.values()):
        for listener in list(listeners):
            if getattr(listener.handler, "__name__", "") in LEFT_OUT:
                app.disconnect(listener.id)


def download_from_the_repository(app, pagename, templatename, context, doctree):
    source = f"{app.config.html_theme_options['repository_url']}/raw/main/{pagename}"
    buttons = [button for group in context["header_buttons"] for button in group.get("buttons", [])]
    for button in buttons:
        if button.get("label") == "download-source-button":
            button["url"] = source + context["page_source_suffix"]


MATHJAX = ("startup.js", "core.js", "input/tex.js", "output/chtml", "a11y/assistive-mml.js")
# Names, numbers, punctuation, operators, white space; in a line of text, code that has no place to break at.
UNSEEN = (
    re.compile(r'<span class="(?:[npow]|nn|m[if]|nb|bp)">([^<]*)</span>'),
    re.compile(r'<span class="pre">([\w.]*(?:\(\))?)</span>'),
)
# Marks that both themes draw in one colour: parts of strings, and keywords.
COLOURS = {"s": "s[12aeid]", "k": "kc|kn|ow"}
BESIDE = re.compile(r'<span class="([sk])">[^<]*</span>(?:<span class="\1">[^<]*</span>)+')
# White space that no reader sees: at the start of lines, but for text that is laid out as it is written.
INDENT = re.compile(r"\n\s+")
VERBATIM = re.compile(r"(<(?:pre|script|style|textarea)\b.*?</(?:pre|script|style|textarea)>)", re.DOTALL)
ICONS = re.compile(r"\s*<script [^>]*fontawesome\.js[^>]*></script>")
# In the order in which they stand: a module that is written in the page waits, too.
LATE = re.compile(r"<script(?= (?:data-[^>]*)?src=)"), re.compile(r"<script(?=>[^<]*DOCUMENTATION_OPTIONS)")


def without_weight(page):
    """A page without the scripts and the marks that it does not use, its scripts after its text."""
    page = UNSEEN[1].sub(r"\1", UNSEEN[0].sub(r"\1", ICONS.sub("", page)))
    for short, names in COLOURS.items():
        page = re.sub(rf'<span class="(?:{names})">', f'<span class="{short}">', page)
    page = BESIDE.sub(lambda found: re.sub(r'</span><span class="\w">', "", found[0]), page)
    page = "".join(part if i % 2 else INDENT.sub("\n", part) for i, part in enumerate(VERBATIM.split(page)))
    return LATE[1].sub('<script type="module"', LATE[0].sub('<script defer="defer"', page))


NUMBERS = re.compile(r' (?:d|x|y)="[^"]*"|translate\([^)]*\)')
DIGITS = re.compile(r"(\.\d\d)\d+")
BETWEEN = re.compile(r"\s+(?=[A-Za-z])|(?<=[A-Za-z])\s+|(?<=\d)\s+(?=\s)")
ASIDES = re.compile(r"<metadata>.*?</metadata>|<!--.*?-->|(?<=>)\s+(?=<)", re.DOTALL)
NAME = re.compile(r'( id="|#)([\w-]+)')
MOVED = re.compile(r'(<use href="#\w+") transform="translate\((\S+) 0\)"')
ALIKE = re.compile(r"<g((?: clip-path=[^>]*)?)>((?:<use [^>]*/>){2,})</g>")
STYLE = re.compile(r' style="[^"]*"')


def style_once(found):
    """A row of marks that look alike, with their style at its head, unless the row would be transparent as one."""
    styles = STYLE.findall(found[2])
    if len(styles) != found[2].count("<use") or len({*styles}) > 1 or re.search(r"[\s\"]opacity", styles[0]):
        return found[0]
    return f"<g{found[1]}{styles[0]}>{STYLE.sub('', found[2])}</g>"


def styles_by_name(drawing):
    """A drawing whose styles, where several parts have the same, stand at its head, by a name each."""
    counts = Counter(STYLE.findall(drawing))
    names = {style: f"s{i}" for i, style in enumerate(style for style, times in counts.items() if times > 1)}
    rules = "".join(f".{name}{{{style[8:-1]}}}" for style, name in names.items())
    drawing = STYLE.sub(lambda found: f' class="{names[found[0]]}"' if found[0] in names else found[0], drawing)
    return drawing.replace("</style>", f"{rules}</style>", 1)


def slim(drawing):
    """A drawing of Matplotlib, whose letters are outlines, to a hundredth of a point."""
    short = NUMBERS.sub(lambda found: DIGITS.sub(r"\1", found[0]), ASIDES.sub("", drawing))
    short = re.sub(r'(?<= d=")[^"]*', lambda found: BETWEEN.sub("", found[0]).strip(), short)
    named = {name for start, name in NAME.findall(short) if start != "#"}
    used = dict.fromkeys(name for start, name in NAME.findall(short) if start == "#" and name in named)
    names = {name: f"n{i}" for i, name in enumerate(used)}
    short = re.sub(r' id="([\w.-]+)"', lambda found: found[0] if found[1] in names else "", short)
    short = NAME.sub(lambda found: found[1] + names.get(found[2], found[2]), short)
    return styles_by_name(ALIKE.sub(style_once, MOVED.sub(r'\1 x="\2"', short.replace("xlink:href", "href"))))


def leave_out_what_no_page_loads(app, error):
    if error or app.builder.format != "html":
        return
    static = Path(app.outdir) / "_static"
    mathjax = static / "mathjax"
    loaded = tuple(str(mathjax / name) for name in MATHJAX)
    unused = [file for file in mathjax.rglob("*.*") if file.is_file() and not str(file).startswith(loaded)]
    unused += [*static.rglob("*.map"), *static.rglob("webfonts/*.ttf"), *static.glob("scripts/fontawesome.js*")]
    # Alphabets that no formula of the book is written in.
    unused += [font for name in ("Fraktur", "SansSerif", "Script") for font in static.rglob(f"MathJax_{name}-*.woff")]
    for file in set(unused):
        file.unlink()
    shutil.rmtree(static / "locales", ignore_errors=True)  # the theme's own, from which it has translated already
    for page in Path(app.outdir).rglob("*.html"):
        page.write_text(without_weight(page.read_text("utf-8")), "utf-8")
    for file in (Path(app.outdir) / "_images").glob("*.svg"):
        text = file.read_text("utf-8")
        if "Matplotlib" in text:
            file.write_text(slim(text), "utf-8")


def setup(app):
    app.connect("config-inited", leave_out)
    app.connect("html-page-context", download_from_the_repository, priority=502)  # after the theme's buttons
    app.connect("build-finished", leave_out_what_no_page_loads)
    app.add_js_file(None, body=TITLES_ONLY_FROM_DISK)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
