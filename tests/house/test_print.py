"""The short book as PDF: its titles are text, links inside it lead somewhere, and no word runs over the edge."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import yaml
from bs4 import BeautifulSoup

import pages

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("print_book", ROOT / "tools" / "print_book.py")
print_book = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(print_book)
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())


def printed(site, names, folder):
    """The objects of a PDF without its streams, and the words that run over the edge."""
    if not any(map(shutil.which, print_book.BROWSERS)):
        pages.skip_or_fail("Chromium is not installed: on Debian, apt-get install chromium.")
    over = print_book.print_pages(site, names, CONFIG, folder / "book.pdf")
    return re.sub(rb"stream\n.*?endstream", b"", (folder / "book.pdf").read_bytes(), flags=re.S), over


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    return printed(pages.built_site(), print_book.SHORT, tmp_path_factory.mktemp("short"))


def bookmarks(pdf):
    """The titles of a PDF's outline, which Chromium makes of the headings that it has printed as text."""
    found = []
    for plain, coded in re.findall(rb"<</Title (?:\(((?:\\.|[^\\)])*)\)|<([0-9A-F]+)>)\n/Dest", pdf):
        text = bytes.fromhex(coded.decode()).decode("utf-16") if coded else re.sub(rb"\\(.)", rb"\1", plain).decode()
        found.append(" ".join(text.split()))
    return found


def places(pdf):
    """Where its links lead, and the places that it has."""
    return set(re.findall(rb"/Dest /([^\s/]+)", pdf)), set(re.findall(rb"/([^\s/]+) \[\d+ 0 R /XYZ", pdf))


def title_of(name):
    heading = pages.soup(pages.built_site() / "nbs" / f"{name}.html").find("h1")
    return " ".join(heading.get_text().removesuffix("#").split())


def test_each_page_has_its_title_as_text(short):
    titles = bookmarks(short[0])
    of_pages = [title_of(name) for name in print_book.SHORT]
    assert [title for title in titles[1:] if title in of_pages] == of_pages and len(titles) > 40


def test_links_lead_to_places_inside_or_to_the_site(short):
    used, there = places(short[0])
    assert used <= there and {name.encode() for name in print_book.SHORT} <= used
    links = set(re.findall(rb"/URI \(([^)]*)\)", short[0]))
    assert f"{pages.ADDRESS}nbs/07_twicing.html".encode() in links and not any(b"file:" in link for link in links)
    for name in print_book.SHORT:
        assert f"{pages.ADDRESS}nbs/{name}.html".encode() not in links


def test_no_word_runs_over_the_edge(short):
    assert short[1] == []


def test_all_links_inside_the_whole_book_have_a_place():
    names = print_book.reading_order(ROOT / "_toc.yml")
    page = BeautifulSoup(print_book.whole(pages.built_site(), names, CONFIG), "html.parser")
    ids = [tag["id"] for tag in page.select("[id]")]
    inside = {link["href"][1:] for link in page.select("a[href^='#']")}
    assert inside <= {*ids} and len(inside) > 1000
    assert not page.select("details:not([open]), .dropdown, .toggle, .above-input")


PAGE = """<html><head><link rel="stylesheet" href="../style.css"><script>window.MathJax = {}</script>
<script src="../mathjax.js"></script></head>
<body><article class="bd-article"><h1 id="{name}">{name}</h1>{body}</article></body></html>"""


def test_what_is_too_wide_is_noticed_and_what_can_shrink_does(tmp_path):
    (tmp_path / "nbs").mkdir()
    bodies = {
        "long": f"<pre>{'x' * 400}</pre><p style='width: 9cm; white-space: nowrap'>{'word ' * 60}</p>",
        "wide": f"<table><tr>{'<td>cell</td>' * 60}</tr></table>",
    }
    for name, body in bodies.items():
        (tmp_path / "nbs" / f"{name}.html").write_text(PAGE.replace("{name}", name).replace("{body}", body))
    assert [words[:9] for words in printed(tmp_path, ["long", "wide"], tmp_path)[1]] == ["word word"]
