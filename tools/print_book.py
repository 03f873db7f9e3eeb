"""Print the built book as PDF: the short book, the first page with its route of chapters, or all of it.

The articles of the pages stand one after another in one page, which Chromium prints: a link between two of them is
one inside the PDF, any other leads to the site. What opens on a click is open, but folded code stays out.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import urljoin, urlsplit

import yaml
from bs4 import BeautifulSoup

sys.path.append(str(Path(__file__).resolve().parents[1] / "_ext"))
from short_route import ROUTE

SHORT = ["index", *ROUTE]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--allow-file-access-from-files"]
FOOT = '<div style="font-size: 8pt; width: 100%; text-align: center"><span class="pageNumber"></span></div>'
SCALE = 0.8
PAPER = {"format": "A4", "margin": {"top": "18mm", "bottom": "20mm", "left": "18mm", "right": "18mm"}, "scale": SCALE}
WIDTH = round((210 - 36) / 25.4 * 96 / SCALE)  # of the text, in pixels of CSS
# Beyond the theme's style for print: no navigation is there, and what scrolls on a screen has no room to.
STYLE = """
.bd-article h1:first-of-type { display: block !important; }
html { scrollbar-gutter: auto; } body { display: block; min-height: 0; background: none; }
.bd-article { break-before: page; padding: 0 !important; max-width: none; overflow: visible; }
.bd-article pre { white-space: break-spaces !important; overflow-wrap: anywhere; overflow: visible; max-height: none; }
h1, h2, h3, h4 { break-after: avoid; break-inside: avoid; }
.bd-article :is(figure, tr, svg, .admonition-title) { break-inside: avoid; }
.bd-article img { max-width: 100%; max-height: 62rem; width: auto; } /* a page is 76 high */
.bd-article a.headerlink, .play :is(label, button), .toggle-button, .copybtn, .first-steps { display: none !important; }
.bd-article :is(div.math, span.math, .output, .pst-scrollable-table-container) { overflow: visible !important; }
h1, h2, h3, h4 { white-space: break-spaces; } /* a bookmark would have no space where a line ends */
.title-page { text-align: center; padding-top: 30vh; } .title-page h1 { font-size: 2.6rem; }
.contents { break-before: page; } .contents ol { list-style: none; padding: 0; line-height: 1.7; }
"""
# A wide table, formula or drawing gets as small as the page is wide; code has wrapped.
SHRINK = """() => {
    const wide = document.querySelectorAll('table, div.math mjx-container, .unbroken, svg, img')
    for (const one of wide) {
        const box = one.getBoundingClientRect(), room = document.body.getBoundingClientRect().right - box.left
        if (box.width > room + 1) one.style.zoom = room / box.width * 0.995
    }
}"""
OVER = """() => {
    const edge = document.body.getBoundingClientRect().right + 1
    const unseen = 'mjx-assistive-mml, .visually-hidden, script, style'
    const seen = one => !one.closest(unseen) && one.getClientRects().length
    const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT), range = document.createRange()
    const found = []
    for (let text; (text = texts.nextNode());) {
        if (!text.textContent.trim() || !seen(text.parentElement)) continue
        range.selectNodeContents(text)
        if ([...range.getClientRects()].some(box => box.right > edge)) found.push(text.textContent.trim().slice(0, 80))
    }
    return found
}"""


def reading_order(toc):
    """The pages of the book, the first one first."""
    book = yaml.safe_load(Path(toc).read_text("utf-8"))
    pages = [book["root"], *(page["file"] for part in book["parts"] for page in part["chapters"])]
    return [Path(page).name for page in pages]


def article(site, name, names, address):
    """The article of a page: its places are named after the page, its files are those of the site."""
    page = BeautifulSoup((site / "nbs" / f"{name}.html").read_text("utf-8"), "html.parser").find("article")
    here = (site / "nbs" / f"{name}.html").as_uri()
    for folded in page.select("details.above-input, details.below-input"):
        folded.decompose()
    for box in page.select("details, .dropdown, .toggle"):
        box["open"] = ""
        box["class"] = [one for one in box.get("class", []) if one not in ("dropdown", "toggle", "toggle-hidden")]
    for tag in page.select("[id]"):
        if not tag.find_parent(class_="play") and "play" not in tag.get("class", []):
            tag["id"] = f"{name}--{tag['id']}"
    for tag in page.select("[src]"):
        tag["src"] = urljoin(here, tag["src"])
    for link in page.select("a[href]"):
        link.attrs.pop("target", None)
        parts = urlsplit(link["href"])
        there = Path(parts.path).stem if parts.path else name
        if parts.scheme:
            continue
        is_inside = there in names and (not parts.path or re.fullmatch(r"[^/]*\.html", parts.path))
        inside = f"#{there}--{parts.fragment}" if parts.fragment else f"#{there}"
        link["href"] = inside if is_inside else urljoin(f"{address}nbs/{name}.html", link["href"])
    page["id"] = name
    return page


def whole(site, names, config):
    """All pages in one: a title page, the contents, and the articles."""
    first = BeautifulSoup((site / "nbs" / f"{names[0]}.html").read_text("utf-8"), "html.parser")
    here = (site / "nbs" / f"{names[0]}.html").as_uri()
    address = config["html"]["baseurl"]
    articles = [article(site, name, names, address) for name in names]
    titles = [one.find("h1").get_text().removesuffix("#").strip() for one in articles]
    sheets = [urljoin(here, link["href"]) for link in first.select("link[rel=stylesheet]")]
    mathjax = first.find("script", string=re.compile("window.MathJax"))
    program = first.find("script", src=re.compile("mathjax"))["src"]
    entries = "".join(f'<li><a href="#{name}">{title}</a></li>' for name, title in zip(names, titles))
    return f"""<!doctype html><html lang="en" data-theme="light"><head><meta charset="utf-8">
<title>{config["title"]}</title>{"".join(f'<link rel="stylesheet" href="{sheet}">' for sheet in sheets)}
<style>{STYLE}</style>{mathjax}<script defer src="{urljoin(here, program)}"></script></head>
<body class="bd-content"><main>
<section class="title-page"><h1>{titles[0]}</h1>
<p>{config["author"]}, {config["copyright"]}</p><p>{address}</p></section>
<section class="contents"><p class="h1">Contents</p><ol>{entries}</ol></section>
{"".join(map(str, articles))}</main></body></html>"""


def print_pages(site, names, config, target):
    """Write the PDF; return the words that run over the edge of a page."""
    from playwright.sync_api import sync_playwright

    together = target.with_suffix(".html")
    together.write_text(whole(site, names, config), "utf-8")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        sys.exit(f"None of {', '.join(BROWSERS)} is installed: on Debian, apt-get install chromium.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        page = browser.new_page(viewport={"width": WIDTH, "height": 1000})
        page.set_default_timeout(600_000)
        page.emulate_media(media="print", color_scheme="light")
        page.goto(together.as_uri())
        page.evaluate("async () => { await window.MathJax?.startup?.promise; await document.fonts.ready }")
        page.evaluate(SHRINK)
        over = page.evaluate(OVER)
        page.pdf(path=target, display_header_footer=True, header_template="<i></i>", footer_template=FOOT,
                 print_background=True, outline=True, tagged=True, **PAPER)  # fmt: skip
        browser.close()
    together.unlink()
    return over


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("_build"), help="where html/ is, and the PDFs go")
    parser.add_argument("--short", action="store_true", help="print the short book alone")
    options = parser.parse_args()
    config = yaml.safe_load(Path("_config.yml").read_text("utf-8"))
    folder = options.folder.absolute()
    books = {"gbattn-short.pdf": SHORT, "gbattn.pdf": reading_order("_toc.yml")}
    for name in list(books)[: 1 if options.short else 2]:
        over = print_pages(folder / "html", books[name], config, folder / name)
        print(f"{folder / name}" + "".join(f"\n  runs over the edge: {words}" for words in over))
