"""The laws of the built pages.

A law takes the folder of the site and returns the sentences of what breaks it.
"""

import gzip
import os
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from bs4 import BeautifulSoup

SITE = Path(__file__).parents[2] / "_build" / "html"
REPOSITORY = "https://github.com/gbattn/gbattn"
ADDRESS = "https://gbattn.github.io/gbattn/"
WORDS = 6
# Written by Sphinx, not by an author.
MACHINE_MADE = ("search",)


def skip_or_fail(reason):
    """What a test cannot look at is skipped, with the reason; never where the project is judged."""
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{reason} (In CI this test is never skipped.)")
    pytest.skip(reason)


def built_site():
    if not (SITE / "index.html").exists():
        skip_or_fail("The book is not built: run 'make book' first.")
    return SITE


def page_files(site):
    """The pages: every HTML file but those that only point to another."""
    files = (p for p in sorted(site.rglob("*.html")) if "_static" not in p.parts and "_sources" not in p.parts)
    return {p.relative_to(site).as_posix(): p for p in files if not soup(p).find("meta", {"http-equiv": "Refresh"})}


@cache
def parsed(path, stamp):
    return BeautifulSoup(path.read_text(), "html.parser")


def soup(path):
    return parsed(path, path.stat().st_mtime_ns)


def authored(site):
    return {name: path for name, path in page_files(site).items() if Path(name).stem not in MACHINE_MADE}


def article(page):
    return page.find("article") or page


# ---- The laws ----


def pages_have_titles(site):
    return [
        f"{name} has no {what}: a page begins with one '# Title'."
        for name, path in authored(site).items()
        for what, found in (
            ("<title>", (soup(path).title or "") and soup(path).title.get_text(strip=True)),
            ("<h1>", article(soup(path)).find("h1")),
        )
        if not found
    ]


DIRECTIVE = re.compile(r"^\s*#\s*\|.*$", re.M)


def no_directive_shows(site):
    return [
        f"{name} shows the nbdev directive '{found[0].strip()}': it belongs at the very top of its cell, "
        "above any comment, where _ext/nbdev_pages.py takes it out."
        for name, path in authored(site).items()
        for found in DIRECTIVE.finditer(article(soup(path)).get_text())
    ]


def alt_of(image):
    """The text alternative of an image or of a drawing in the page."""
    return image.get("alt" if image.name == "img" else "aria-label", "")


def is_file_name(alt, image):
    name = Path(urlsplit(image.get("src", "")).path).name
    return bool(name and name in alt) or bool(re.search(r"\.(svg|png|jpe?g|gif)$", alt.strip()))


def images_speak(site):
    found = []
    for name, path in authored(site).items():
        page = soup(path)
        inside = set(map(id, article(page).find_all(["img", "svg"])))
        for image in page.find_all(["img", "svg"]):
            hidden = image.get("aria-hidden") == "true" or image.find_parent(attrs={"aria-hidden": "true"})
            if hidden or (image.name == "svg" and image.find_parent("svg")):
                continue
            alt, what = alt_of(image), image.get("src") or f"<{image.name}>"
            if not alt.strip() or is_file_name(alt, image):
                found.append(f"{name}: the image {what} has no alt text; say what it shows.")
            elif id(image) in inside and len(alt.split()) < WORDS:
                found.append(f"{name}: the alt text '{alt}' is too short; say in a sentence what {what} shows.")
            elif image.name == "svg" and image.get("role") != ("group" if image.find("a") else "img"):
                found.append(f"{name}: an <svg> with an aria-label also needs role='img', or it is not read out.")
    return found


LOADERS = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src",
    "embed": "src", "input": "src", "object": "data", "link": "href", "image": "href", "use": "href",
}  # fmt: skip
LINKS_THAT_LOAD_NOTHING = {"canonical", "next", "prev", "index", "search", "author", "license", "alternate"}
CSS_LOADS = re.compile(r"""@import\s*(?:url\()?["']?([^"')\s;]+)|url\(\s*["']?([^"')]+)""")


def loads_of(page):
    """Every address that a page loads by itself."""
    for tag in page.find_all(list(LOADERS)):
        if tag.name == "link" and set(tag.get("rel", [])) <= LINKS_THAT_LOAD_NOTHING:
            continue
        yield from filter(None, [tag.get(LOADERS[tag.name]), tag.get("xlink:href"), tag.get("poster")])
        yield from (part.split()[0] for part in tag.get("srcset", "").split(",") if part.strip())
    for style in [*page.find_all("style"), *page.find_all(style=True)]:
        yield from css_loads(style.get("style") or style.get_text())


def css_loads(text):
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    return [a or b for a, b in CSS_LOADS.findall(text)]


def is_remote(address):
    return bool(re.match(r"(https?|wss?|ftp):|//", address.strip(), re.I))


def local_target(base, address):
    """The file that a relative address names, seen from the file `base`."""
    return (base.parent / unquote(urlsplit(address).path)).resolve() if urlsplit(address).path else base


def nothing_is_loaded_from_the_network(site):
    found, sheets = [], set()
    for name, path in page_files(site).items():
        for address in loads_of(soup(path)):
            if is_remote(address):
                found.append(f"{name} loads {address}: a page reads with no network, so serve it from the site.")
            elif address.startswith("data:"):
                continue
            elif not local_target(path, address).exists():
                found.append(f"{name} loads {address}, which is not there.")
            elif urlsplit(address).path.endswith(".css"):
                sheets.add(local_target(path, address))
    for sheet in sorted(sheets):
        found += [
            f"{sheet.name} loads {address}: a page reads with no network, so serve it from the site."
            for address in css_loads(sheet.read_text())
            if is_remote(address)
        ]
    return found


def links_of(page):
    return [a["href"] for a in page.find_all("a", href=True)]


@cache
def anchors_of(path, stamp):
    page = parsed(path, stamp)
    named = page.find_all("a", attrs={"name": True})
    return {tag["id"] for tag in page.find_all(id=True)} | {tag["name"] for tag in named}


def anchors(path):
    return anchors_of(path, path.stat().st_mtime_ns)


def links_lead_somewhere(site):
    found = []
    for name, path in page_files(site).items():
        for href in links_of(soup(path)):
            if is_remote(href) or href.startswith(("mailto:", "javascript:", "data:")) or href in ("", "#"):
                continue
            target, fragment = local_target(path, href), unquote(urlsplit(href).fragment)
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                found.append(f"{name} links to {href}, and there is no such file.")
            elif fragment and target.suffix == ".html" and fragment not in anchors(target):
                found.append(f"{name} links to {href}: that page has no place called '{fragment}'.")
    return found


def pages_link_home(site):
    """Repository and issues on every page; on a notebook's page, that notebook in Colab and to download."""
    found, written = [], SITE.parents[1] if site == SITE else site
    for name, path in authored(site).items():
        links = links_of(soup(path))
        if not any(href.rstrip("/") == REPOSITORY for href in links):
            found.append(f"{name} has no link to the repository; see html and repository in _config.yml.")
        if not any(href.startswith(f"{REPOSITORY}/issues") for href in links):
            found.append(f"{name} has no link to open an issue; see html in _config.yml.")
        notebook = Path(name).with_suffix(".ipynb").as_posix()
        if (written / notebook).exists():
            colab = f"https://colab.research.google.com/github/gbattn/gbattn/blob/main/{notebook}"
            if colab not in links:
                found.append(f"{name} has no button that opens {notebook} in Colab; see launch_buttons in _config.yml.")
            if f"{REPOSITORY}/raw/main/{notebook}" not in links:
                found.append(f"{name} has no button that downloads {notebook}; see _ext/offline.py.")
    return found


PREVIEW = ("og:title", "og:description", "og:image", "og:image:alt", "og:url")


def preview_of(page):
    """What a chat or a search engine reads of a page: the Open Graph tags, and the description."""
    tags = page.find_all("meta", content=True)
    return {tag.get("property") or tag.get("name"): tag["content"].strip() for tag in tags}


def pages_can_be_shared(site):
    """Title, description and picture, on each page and on the pointer at the address of the site."""
    found = []
    for name, path in {**authored(site), "index.html": site / "index.html"}.items():
        preview = preview_of(soup(path))
        for tag in (*PREVIEW, "description"):
            if not preview.get(tag):
                found.append(f"{name} has no {tag}: see sphinxext.opengraph in _config.yml and _ext/front_page.py.")
        if not preview.get("og:url", ADDRESS).startswith(ADDRESS):
            found.append(f"{name} says that its address is {preview['og:url']}, which is not under {ADDRESS}.")
        image = preview.get("og:image", "")
        if image and not (image.startswith(ADDRESS) and (site / image.removeprefix(ADDRESS)).is_file()):
            found.append(f"{name} is shared with the picture {image}, which the site does not have.")
    return found


def the_book_can_be_searched(site):
    """A search page, and an index that knows every page."""
    index = site / "searchindex.js"
    if not (site / "search.html").exists() or not index.exists():
        return ["the site has no search page or no search index; a theme option has turned it off."]
    known = index.read_text()
    return [
        f"the search does not know {name}: it is not in searchindex.js."
        for name in authored(site)
        if f'"{name.removesuffix(".html")}"' not in known
    ]


def pages_say_how_they_are_cited(site):
    """By title and address, after the text."""
    found = []
    for name, path in authored(site).items():
        line = soup(path).select_one(".cite-page")
        title = (soup(path).title or line).get_text().split(" — ")[0].strip() if line else None
        if not line or ADDRESS + name not in line.get_text() or title not in line.get_text():
            found.append(f"{name} does not say how it is cited: see cite in _ext/front_page.py.")
        elif re.search(r"[?!]\.", line.get_text()):
            found.append(f"{name} is cited with two marks at the end of its title: see cite in _ext/front_page.py.")
    return found


def folds_have_names(site):
    """What opens on a click says what it holds, and no two on a page say the same."""
    found = []
    for name, path in authored(site).items():
        summaries = article(soup(path)).find_all("summary")
        labelled = [one["aria-label"] for one in summaries if one.has_attr("aria-label")]
        words = [" ".join((one.find(class_="collapsed") or one).get_text().split()) for one in summaries]
        found += [f"{name}: a screen reader calls a fold {label!r} instead of its title." for label in labelled]
        found += [f"{name}: {words.count(one)} folds are called {one!r}." for one in {*words} if words.count(one) > 1]
    return found


RETURNED = re.compile(r"\[?(<matplotlib|<Figure|<\w+ at 0x|(Text|Line2D)\()")


def _blocks(site):
    """The name of a page and the text of a block of code or output, for each block."""
    pages = authored(site).items()
    return [(name, block.get_text().strip()) for name, path in pages for block in article(soup(path)).find_all("pre")]


def no_return_value_of_a_drawing_shows(site):
    """A cell that draws ends with a semicolon, or matplotlib's object stands beside its figure."""
    found = [(name, text) for name, text in _blocks(site) if RETURNED.match(text)]
    return [f"{name} shows {text[:40]!r}: end that cell with a semicolon." for name, text in found]


WARNED = re.compile(r"site-packages\S+:\d+: \w*Warning")


def no_warning_of_the_machine_shows(site):
    """What a package warns of says where the book was built, and nothing of the book."""
    found = [(name, text) for name, text in _blocks(site) if WARNED.search(text)]
    return [f"{name} shows the warning {text[-60:]!r}: filter it in the page's first cell." for name, text in found]


MEGABYTES, KILOBYTES = 16, 200  # of the site, and of a page that a server compresses


def the_site_is_light(site):
    cure = "see what grew, and what _ext/offline.py leaves out"
    megabytes = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
    found = [f"The site has {megabytes:.1f} MB, more than {MEGABYTES}: {cure}."] if megabytes > MEGABYTES else []
    weights = {name: len(gzip.compress(path.read_bytes())) / 1e3 for name, path in page_files(site).items()}
    heavy = {name: weight for name, weight in weights.items() if weight > KILOBYTES}
    return found + [f"{name} has {kb:.0f} kB compressed, more than {KILOBYTES}: {cure}." for name, kb in heavy.items()]


def unmarked_code_looks_as_if_marked(site):
    """_ext/offline.py takes the marks of names (n) and punctuation (p) out of code: all have one colour. So it does
    with those of operators, which the style gives the colour of strings."""
    style = (site / "_static" / "pygments.css").read_text()
    colour = lambda theme, of: re.findall(
        rf'data-theme="{theme}"\] \.highlight{of} {{[^}}]*?(?<![-\w])color: (#\w+)', style
    )
    return [
        f"_static/pygments.css: in the {theme} theme code marked '{mark}' is not drawn like the rest: keep its marks."
        for theme in ("light", "dark")
        for mark in "np"
        if (marked := colour(theme, rf" \.{mark}")) and marked != colour(theme, "")
    ]


LAWS = [
    unmarked_code_looks_as_if_marked,
    pages_have_titles,
    no_directive_shows,
    images_speak,
    nothing_is_loaded_from_the_network,
    links_lead_somewhere,
    pages_link_home,
    pages_can_be_shared,
    the_book_can_be_searched,
    pages_say_how_they_are_cited,
    folds_have_names,
    no_return_value_of_a_drawing_shows,
    no_warning_of_the_machine_shows,
    the_site_is_light,
]
