"""What a stranger sees first, the first page and the README: its code runs, its numbers are those of the records."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import t
from test_browser import browser, styled  # noqa: F401

import gbattn.conventions
import pages

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "_ext"))
README = (ROOT / "README.md").read_text()
CELLS = json.loads((ROOT / "nbs" / "index.ipynb").read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
PROSE = "\n".join("".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "markdown")


def code_with(mark):
    (code,) = (code for code in CODE if mark in code)
    return code


SETUP, FINDINGS, LAYER = (code_with(mark) for mark in ("figure_style()", "rows = {", "boosted = "))


# ---- The same words in both places ----


def test_both_begin_with_the_same_question():
    titles = {text.lstrip().splitlines()[0] for text in (README, PROSE)}
    assert titles == {"# Attention is regression. What happens if you fit the residual?"}


def test_the_six_lines_run_and_are_the_same_in_both():
    (in_readme,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert ast.dump(ast.parse(in_readme)) == ast.dump(ast.parse(LAYER))
    assert len(ast.parse(in_readme).body) == 6
    names = {}
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        exec(in_readme, names)
    finally:
        torch.set_default_dtype(before)
    assert names["y"].shape == names["z"].shape == names["x"].shape == (8, 128, 256)
    assert names["shifted"].key_shift is not None
    assert len(names["boosted"].explain(names["x"]).rounds) == 2


IN_BOOK = re.compile(
    r"^::::\{grid-item-card\} (?P<claim>[^\n]+)\n(?P<text>[^\n]+)\n:::\{card-footer\}\n"
    r"(?P<verdict>[\w,; ]+) · (?P<rest>.*)$",
    re.M,
)
IN_README = re.compile(r"^- \*\*(?P<claim>[^*]+)\.\*\* [^*]+ \*(?P<verdict>[\w,; ]+)\*(?P<rest>.*)$", re.M)


def findings_of(pattern, text):
    return [
        (found["verdict"].lower(), found["claim"], re.findall(r"\w+\.ipynb", found["rest"]))
        for found in pattern.finditer(text)
    ]


def test_both_have_the_same_findings_with_the_same_verdicts():
    in_book = findings_of(IN_BOOK, PROSE)
    assert in_book == findings_of(IN_README, README)
    assert len(in_book) == 3
    assert {verdict for verdict, *_ in in_book} == {"planned, and as expected", "planned; a smaller gain was expected"}
    assert all(len(chapters) == 1 for _, _, chapters in in_book)


def test_the_readme_has_no_measured_number():
    findings = README.split("## What came out")[1].split("\n## ")[0]
    assert not re.findall(r"\d+(?:[.,]\d+)?\s?%|\d\.\d", findings), "a README cannot quote: leave numbers to the page"


# ---- The numbers, once more and by another way ----


@pytest.fixture(scope="module")
def found():
    """What the first page quotes, by name, and what its chart draws."""
    quotes = {}

    def note(record, field, format=""):
        quotes[field] = f"{record.quotable[field]:{format}}"

    names, before = {}, torch.get_default_dtype()
    try:
        exec("\n".join(line for line in SETUP.splitlines() if "figure_style()" not in line), names)
        assert names["quote"] is gbattn.conventions.quote
        names["quote"] = note
        exec(FINDINGS, names)
    finally:
        torch.set_default_dtype(before)
    return quotes, names["rows"]


def test_every_number_of_the_findings_is_quoted_and_every_quote_is_used(found):
    assert set(re.findall(r"\{glue:text\}`findings\.(\w+)`", PROSE)) == set(found[0])
    assert not re.findall(r"\d\.\d|\d+ %", "\n".join(m["text"] for m in IN_BOOK.finditer(PROSE)))


def test_every_row_is_drawn_once_or_quoted(found):
    quotes, rows = found
    code = code_with("headline_bars(\n")
    groups = ast.literal_eval(code[code.index("rows,") + len("rows,") :].strip().removesuffix(")").rstrip(", \n"))
    drawn = [name for labels in groups.values() for name in labels.values()]
    assert len(set(drawn)) == len(drawn) and {*drawn} | quotes.keys() == rows.keys()


def losses(arm, *experiments):
    folders = [ROOT / "results" / "18_perplexity" / name for name in experiments]
    runs = [json.loads(path.read_text()) for folder in folders for path in folder.glob(f"{arm}-seed*.json")]
    return {run["settings"]["seed"]: run["measured"]["test_loss"] for run in runs}


def percent(first, baseline):
    """The paired difference in per cent of perplexity and the ends of its 95 % interval."""
    apart = np.array([first[seed] - baseline[seed] for seed in first.keys() & baseline.keys()])
    half = t.ppf(0.975, len(apart) - 1) * apart.std(ddof=1) / len(apart) ** 0.5
    return [100 * (math.exp(x) - 1) for x in (apart.mean(), apart.mean() - half, apart.mean() + half)]


BOOSTED, PLAIN = "boosted_residual", ("standard", "mini-warm", "shift-plain")
SHIFTED = "shift", "shift-again"


@pytest.mark.parametrize(
    ("name", "first", "baseline"),
    [
        ("shift", ("standard_shift", "shift-new"), ("standard", "shift-new-plain")),
        ("second", (BOOSTED, "shift-new-plain"), ("standard", "shift-new-plain")),
        ("wider", ("wider_flops", "mini-warm-flops"), PLAIN),
        ("flops", ("boosted_shift", "shift-length"), ("wider_flops_shift", "shift-length")),
        ("long", ("boosted_shift", "shift-length"), ("standard_shift", "shift-length")),
        ("here", ("boosted_shift", *SHIFTED), ("standard_shift", *SHIFTED)),
        ("flops_here", ("boosted_shift", *SHIFTED), ("wider_flops_shift", *SHIFTED)),
    ],
)
def test_a_finding_has_the_numbers_of_its_records(found, name, first, baseline):
    quotes, rows = found
    wanted = percent(losses(*first), losses(*baseline))
    row = rows[name]
    assert [100 * math.expm1(x) for x in (row.difference, row.low, row.high)] == pytest.approx(wanted, abs=1e-6)
    assert name not in quotes or quotes[name] == f"{abs(wanted[0]):.1f}"


def test_the_map_leads_down_to_a_chapter_from_all_that_the_boxes_name_and_from_no_other():
    from support.diagrams import _rows, chapters, needs_map

    found = chapters()
    lines = _rows({one: chapter.needs for one, chapter in found.items()})[1]
    named = lambda one: found[one].needs.union(*map(named, found[one].needs))
    above = lambda one: {one}.union(*(above(upper) for upper, lower in lines if lower == one))
    assert named("8") == {"1", "2", "3", "5", "5b", "6", "6a", "6b", "6c"}
    assert all(above(one) & {*found} == named(one) | {one} for one in found)
    assert all(f"href='{chapter.page}.html'" in needs_map().data for chapter in found.values())


def test_a_circle_of_the_map_has_its_title_and_has_room_for_its_subject():
    from bs4 import BeautifulSoup

    from support.diagrams import chapters, needs_map

    links = BeautifulSoup(needs_map().data, "html.parser").find_all("a")
    wanted = [f"{number} {chapter.title}" for number, chapter in chapters().items()]
    assert [link["aria-label"] for link in links] == [link.title.get_text() for link in links] == wanted
    subjects = [link.find("text", class_="subject") for link in links]
    ends = sorted((int(t["y"]), int(t["x"]) - 3 * len(t.string), int(t["x"]) + 3 * len(t.string)) for t in subjects)
    assert ends[0][0] == 59 and len({t.string for t in subjects}) == len(links)
    assert all(y != other or right < left for (y, _, right), (other, left, _) in zip(ends, ends[1:]))
    assert all(0 <= left and right <= 740 for _, left, right in ends)


def test_the_map_scrolls_on_a_phone_with_its_subjects_and_circles_for_a_finger(browser, tmp_path):  # noqa: F811
    from support.diagrams import needs_map

    body = f"<div class=cell_output><div class=output>{needs_map().data}</div></div>"
    with styled(browser, tmp_path, body) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
        assert page.locator(".output").evaluate("e => e.scrollWidth > e.clientWidth")
        assert min(circle.bounding_box()["width"] for circle in page.locator(".needs-map circle").all()) >= 24
        for subject in page.locator(".needs-map .subject").all():
            assert subject.is_visible() and subject.bounding_box()["height"] >= 11
        page.set_viewport_size({"width": 1280, "height": 900})
        assert page.locator(".output").evaluate("e => e.scrollWidth == e.clientWidth")


# ---- The figure ----


def test_the_picture_is_what_the_first_page_draws(tmp_path):
    from matplotlib.image import imread

    again = tmp_path / "again.png"
    command = [sys.executable, "tools/draw_first_figure.py", again]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    drawn, committed = imread(again), imread(ROOT / "_static" / "fit_the_residual.png")
    assert drawn.shape == committed.shape == (630, 1200, 4)
    assert abs(drawn - committed).mean() < 0.002, "run: python tools/draw_first_figure.py"


def test_the_figure_says_what_chapter_3_computes():
    """0.4, 1, 1.6; −0.24, 0, 0.24; 0.16, 1, 1.84: in exact fractions, by hand."""
    A = np.array([[16, 8, 1], [25 / 4, 50 / 4, 25 / 4], [1, 8, 16]]) / 25
    slope = np.array([0.0, 1.0, 2.0])
    one, missed = A @ slope, slope - A @ slope
    alt = re.search(r"fig-alt: '(.*)'", code_with("kernel_smoother("))[1].replace("−", "-")
    for row in (slope, one, missed, A @ missed, one + A @ missed):
        low, middle, high = (f"{round(x, 9) + 0:g}" for x in row)
        assert f"{low}, {middle} and {high}" in alt


# ---- The links ----


def test_the_readme_leads_to_files_of_the_repository_from_wherever_it_is_shown():
    """As on the page of the package, where no file lies beside it and headings have no anchors."""
    found = [link or source for link, source in re.findall(r"\]\(([^)\s]+)\)|src=\"([^\"]+)\"", README)]
    relative = [address for address in found if not pages.is_remote(address)]
    assert not relative, f"README.md leads to {relative}, which only a clone has"
    raw = f"{pages.REPOSITORY}/main/".replace("github.com", "raw.githubusercontent.com")
    places = f"{pages.REPOSITORY}/blob/main/", raw, f"{pages.REPOSITORY}#"
    ours = [(place, address.removeprefix(place)) for address in found for place in places if address.startswith(place)]
    assert (places[0], "nbs/index.ipynb") in ours and (raw, "_static/fit_the_residual.png") in ours
    titles = {re.sub(r"\W+", "-", title.lower()) for title in re.findall(r"^#+ (.*)$", README, re.M)}
    missing = [name for place, name in ours if not ((ROOT / name).is_file() or place[-1] == "#" and name in titles)]
    assert not missing, f"README.md leads to {missing}, which are not there"
    elsewhere = [x for x in found if not x.startswith(places)]
    colab = "https://colab.research.google.com/github/gbattn/gbattn/blob/main/"
    assert all(x == pages.REPOSITORY or (ROOT / x.removeprefix(colab)).is_file() for x in elsewhere)


def test_four_buttons_and_a_route():
    page = pages.soup(pages.built_site() / "nbs" / "index.html")
    buttons = [button["href"] for button in page.select(".first-steps a.sd-btn")]
    assert buttons == [
        "01_least_squares.html#three-points-by-hand",
        "#short-route",
        "https://colab.research.google.com/github/gbattn/gbattn/blob/main/nbs/01_least_squares.ipynb",
        pages.REPOSITORY,
    ]
    route = [a["href"].split("_")[0] for a in page.select("#a-route-of-seven-chapters ol a[href]:not(.glossary-link)")]
    assert route == ["01", "03", "05", "05b", "08", "17a", "18"]


def test_the_route_is_the_same_in_the_list_on_the_map_and_in_the_readme():
    from bs4 import BeautifulSoup
    from short_route import ROUTE

    from support.diagrams import needs_map

    listed = PROSE.split("(short-route)=")[1].split("\n**You need**")[0]
    assert re.findall(r"^\d\. \[[^]]*\]\((\w+)\.ipynb", listed, re.M) == [*ROUTE]
    filled = BeautifulSoup(needs_map().data, "html.parser").find_all("a", class_="on-route")
    assert {link["href"].removesuffix(".html") for link in filled} == {*ROUTE}
    assert re.findall(r"nbs/(\w+)\.ipynb", re.search(r"^A short route: .*$", README, re.M)[0]) == [*ROUTE]


# ---- What is shared ----

CONF = """
import sys
sys.path.insert(0, {extensions!r})
extensions = ["myst_parser", "sphinxext.opengraph", "front_page"]
project = "A book"
root_doc = "nbs/index"
html_theme = "basic"
smartquotes = False
html_baseurl = ogp_site_url = "https://example.org/"
ogp_image = "_static/picture.png"
ogp_social_cards = {{"enable": False}}
"""
PAGE = """# A question & an answer?

A *first* paragraph, with "quotes" and a < b. It has two sentences.

- A list
"""


def test_the_address_of_the_site_is_shared_like_the_first_page(tmp_path):
    (tmp_path / "conf.py").write_text(CONF.format(extensions=str(ROOT / "_ext")))
    (tmp_path / "nbs").mkdir()
    (tmp_path / "nbs" / "index.md").write_text(PAGE)
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ".", "_build"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    site = tmp_path / "_build"
    page, pointer = (pages.preview_of(pages.soup(site / name)) for name in ("nbs/index.html", "index.html"))
    said = 'A first paragraph, with "quotes" and a < b. It has two sentences.'
    assert page["og:description"] == page["description"] == said
    assert page["og:image"] == "https://example.org/_static/picture.png"
    assert {key: pointer.get(key) for key in pages.PREVIEW} == {key: page.get(key) for key in pages.PREVIEW}
    assert pointer["description"] == said
    (refresh,) = pages.soup(site / "index.html").find_all("meta", {"http-equiv": "Refresh"})
    assert refresh["content"] == "0; url=nbs/index.html"
