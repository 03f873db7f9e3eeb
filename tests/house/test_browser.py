"""The book in a browser, from a disk, with no network: on a desk, on a phone, by day and by night."""

import io
import re
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from PIL import Image

import pages
from gbattn.conventions import colour_of

sys.path.insert(0, str(Path(__file__).parents[2] / "_ext"))
import code_folds
import panels
import provenance

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
PHONE = {"width": 390, "height": 844}
VIEWS = {
    "on a desk": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "on a phone": {"viewport": PHONE, "color_scheme": "light"},
    "on a phone in dark mode": {"viewport": PHONE, "color_scheme": "dark"},
}

SETTLE = "async () => { await window.MathJax?.startup?.promise }"
LOOK = """() => ({
    equations: [...document.querySelectorAll('mjx-merror, [data-mjx-error]')].map(
        e => e.closest('[data-mjx-error]')?.dataset.mjxError || e.textContent),
    untypeset: [...document.querySelectorAll('.math')].filter(
        e => /\\\\[([]/.test(e.textContent) && !e.querySelector('mjx-container')).map(e => e.textContent.trim()),
    width: document.documentElement.scrollWidth,
    room: document.documentElement.clientWidth,
    widest: [...document.querySelectorAll('body *')]
        .map(e => [e.getBoundingClientRect().right, e.tagName.toLowerCase() + '.' + e.className])
        .sort((a, b) => b[0] - a[0])[0]?.[1],
    spilt: [...document.querySelectorAll('svg[role=img]')].flatMap(svg => {
        const boxes = [...svg.querySelectorAll('rect')].map(box => box.getBoundingClientRect());
        const spills = (t, b) => t.top < b.bottom && t.bottom > b.top && t.left < b.right && t.right > b.left
            && (t.left < b.left || t.right > b.right || t.top < b.top || t.bottom > b.bottom);
        return [...svg.querySelectorAll('text')].filter(
            text => boxes.some(box => spills(text.getBoundingClientRect(), box))).map(text => text.textContent);
    }),
    dark: document.documentElement.dataset.theme === 'dark',
})"""


class Visit(NamedTuple):
    """What was seen of one page in one view."""

    page: str
    view: str
    seen: dict
    requests: list[str]  # those that would have left the machine
    errors: list[str]  # raised by the page's own scripts


@pytest.fixture(scope="module")
def browser():
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pages.skip_or_fail(f"None of {', '.join(NAMES)} is installed: on Debian, apt-get install chromium.")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=FLAGS)
        yield chromium
        chromium.close()


@contextmanager
def tab(browser, **view):
    """A page with no network, and the lists of what it asked for and of what went wrong in it."""
    context = browser.new_context(offline=True, **view)
    page, requests, errors = context.new_page(), [], []
    context.on("request", lambda r: None if r.url.startswith(("file:", "data:", "blob:")) else requests.append(r.url))
    page.on("pageerror", lambda error: errors.append(error.message))
    try:
        yield page, requests, errors
    finally:
        context.close()


def visits_of(browser, site):
    """Every page in every view."""
    found = []
    for view, options in VIEWS.items():
        with tab(browser, **options) as (page, requests, errors):
            for name, path in pages.page_files(site).items():
                del requests[:], errors[:]
                page.goto(path.as_uri())
                page.evaluate(SETTLE)
                found.append(Visit(name, view, page.evaluate(LOOK), list(requests), list(errors)))
    return found


@pytest.fixture(scope="module")
def visits(browser):
    return visits_of(browser, pages.built_site())


# ---- The laws: each takes what was seen and returns the sentences of what is wrong ----


def equations_render(visits):
    broken = [
        f"{v.page}: an equation renders as an error, '{error}': correct its TeX, or define the macro it uses."
        for v in visits
        for error in v.seen["equations"]
    ]
    broken += [
        f"{v.page}: '{tex[:60]}' was not typeset: is MathJax loaded on this page?"
        for v in visits
        for tex in v.seen["untypeset"]
    ]
    return list(dict.fromkeys(broken))


def no_request_leaves(visits):
    asked = ((v, url) for v in visits for url in v.requests)
    return list(dict.fromkeys(f"{v.page} asked the network for {url}: a page reads offline." for v, url in asked))


def scripts_run(visits):
    failed = ((v, error) for v in visits for error in v.errors)
    return list(dict.fromkeys(f"{v.page}: a script of the page failed with '{error}'." for v, error in failed))


def nothing_is_wider_than_the_screen(visits):
    return [
        f"{v.page} is {v.seen['width']} pixels wide {v.view}, which has room for {v.seen['room']} "
        f"(look at {v.seen['widest']}): let it scroll in a box of its own, see _static/book.css."
        for v in visits
        if v.seen["width"] > v.seen["room"]
    ]


def words_stay_in_their_boxes(visits):
    """In a drawing that is part of the page, and so has the letters that the reader's machine has."""
    return [
        f"{v.page}: '{text}' runs out of its box {v.view}: make the box wider or the words fewer."
        for v in visits
        for text in v.seen["spilt"]
    ]


LAWS = [
    equations_render,
    no_request_leaves,
    scripts_run,
    nothing_is_wider_than_the_screen,
    words_stay_in_their_boxes,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_this_book_keeps(visits, law):
    broken = law(visits)
    assert not broken, "\n\n" + "\n".join(broken)


def test_dark_mode_follows_the_reader(visits):
    wrong = [f"{v.page} {v.view}" for v in visits if v.seen["dark"] != ("dark" in v.view)]
    assert not wrong, f"These pages do not follow the reader's choice of light or dark: {wrong}"


def results_of(page, site, word):
    page.goto(f"{(site / 'search.html').as_uri()}?q={word}")
    page.wait_for_function(
        "document.querySelector('#search-results .search-summary')?.innerText.match(/found|did not/)"
    )
    return page.locator("#search-results li a").all_inner_texts()


def test_search_finds_pages_with_no_network(browser):
    with tab(browser) as (page, requests, errors):
        found = results_of(page, pages.built_site(), "whitening")
        assert found, "Searching the book for 'whitening' from a disk finds nothing."
        assert not requests, f"The search asked the network for {requests}."
        assert not errors, f"The search failed with {errors}."


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("twicing", "7. Twicing: "),
        ("boosting", "5. Boosting: "),
        ("MultiHeadAttention", "gbattn.layers.MultiHeadAttention"),
    ],
)
def test_search_has_first_what_bears_the_name(browser, words, first):
    with tab(browser) as (page, _, _):
        assert results_of(page, pages.built_site(), words)[0].startswith(first)


def test_search_says_when_there_is_nothing(browser):
    with tab(browser) as (page, _, _):
        assert results_of(page, pages.built_site(), "zzyzzx") == []


# ---- What a reader has who unpacks the site, and one who waits for its scripts ----


def test_the_site_reads_from_its_zip(browser, tmp_path):
    """Formulas are set, the figure to play with moves and no script complains, from a disk with no network."""
    site = pages.built_site()
    packed = shutil.make_archive(tmp_path / "book", "zip", site.parent, site.name)
    shutil.unpack_archive(packed, tmp_path)
    for name in ("01_least_squares", "08_boosted", "18_perplexity"):
        with tab(browser, **VIEWS["on a desk"]) as (page, requests, errors):
            page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
            page.goto((tmp_path / site.name / "nbs" / f"{name}.html").as_uri())
            page.evaluate(SETTLE)
            assert page.locator("mjx-container mjx-math").count() and not page.evaluate(LOOK)["untypeset"]
            figure = page.locator(".play").first
            before = figure.locator("svg").inner_html()
            figure.locator("input[type=range], select").first.press("ArrowRight")
            assert figure.locator("svg").inner_html() != before, f"The figure of {name} does not move."
            assert not requests and not errors, f"{name} asked for {requests}, and failed with {errors}."


def text_before_scripts(browser, path):
    """What a page shows while none of its scripts has come."""
    with tab(browser) as (page, _, _):
        page.route(re.compile(r"\.js(\?|$)"), lambda route: None)
        page.goto(path.as_uri(), wait_until="commit")
        page.wait_for_timeout(2000)
        painted = page.evaluate("performance.getEntriesByName('first-contentful-paint').length")
        return page.evaluate("document.body?.innerText || ''") if painted else ""


def test_the_text_shows_before_any_script(browser, tmp_path):
    assert "Three points, by hand" in text_before_scripts(browser, pages.built_site() / "nbs" / "01_least_squares.html")
    (tmp_path / "slow.html").write_text("<script src='slow.js'></script><p>Three points, by hand</p>")
    assert text_before_scripts(browser, tmp_path / "slow.html") == ""


# ---- Shades in tables ----


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in colour)]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("view", ["on a phone", "on a phone in dark mode"])
def test_letters_on_a_shaded_cell_are_legible(browser, view):
    """The darkest shade of chapter 24's tables, as it is seen: a contrast of 4.5, as the guidelines want it."""
    with tab(browser, **VIEWS[view]) as (page, _, _):
        page.goto((pages.built_site() / "nbs" / "notation.html").as_uri())
        shade = ",".join(str(int(colour_of("Sinkhorn")[i : i + 2], 16)) for i in (1, 3, 5))
        cell = f'<table><tr><td id="shaded" style="background:rgba({shade},0.75)">0.917</td></tr></table>'
        page.evaluate("cell => document.querySelector('article').insertAdjacentHTML('afterbegin', cell)", cell)
        seen = Image.open(io.BytesIO(page.locator("#shaded").screenshot())).convert("RGB")
        letters = page.evaluate("getComputedStyle(document.getElementById('shaded')).color.match(/\\d+/g).map(Number)")
    dark, light = sorted([luminance(letters), luminance(max(seen.getcolors(2**24))[1])])
    assert (light + 0.05) / (dark + 0.05) >= 4.5


# ---- What the book's style does, on small pages ----

STYLE = (Path(__file__).parents[2] / "_static" / "book.css").read_text()


@contextmanager
def styled(browser, tmp_path, body, **view):
    """A page that has the book's style alone."""
    path = tmp_path / "styled.html"
    colours = ":root {--pst-color-background: #fff; --pst-color-text-base: #222; --pst-color-surface: #eee}"
    head = f"<meta charset=utf-8><meta name=viewport content='width=device-width'><style>{colours}{STYLE}</style>"
    path.write_text(f"<!doctype html><html data-theme=light>{head}<article class=bd-article>{body}</article>")
    with tab(browser, viewport=PHONE, **view) as (page, _, errors):
        page.goto(path.as_uri())
        yield page
        assert not errors


def darkest(locator, left, right):
    """The darkest shade in a part of a box, from 0 to 255."""
    seen = Image.open(io.BytesIO(locator.screenshot())).convert("L")
    return seen.crop((int(left * seen.width), 2, int(right * seen.width), seen.height - 2)).getextrema()[0]


def test_a_box_has_a_shadow_where_it_is_cut_and_none_where_it_ends(browser, tmp_path):
    box = "<div class=pst-scrollable-table-container><div style='width:{}px;height:9rem'></div></div>"
    with styled(browser, tmp_path, box.format(800) + box.format(100)) as page:
        cut, whole = page.locator(".pst-scrollable-table-container").all()
        assert darkest(cut, 0.97, 1) < 220 and darkest(cut, 0, 0.03) > 240
        assert darkest(whole, 0, 1) > 240
        cut.evaluate("box => { box.scrollLeft = 200 }")
        assert darkest(cut, 0.97, 1) < 220 and darkest(cut, 0, 0.03) < 220
        cut.evaluate("box => { box.scrollLeft = 800 }")
        assert darkest(cut, 0.97, 1) > 240 and darkest(cut, 0, 0.03) < 220


def test_panels_stand_below_each_other_on_a_phone_and_are_one_image_on_a_desk(browser, tmp_path):
    image = "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' width='800' height='200'/%3E"
    pieces = panels.windows("x.svg", "Two panels", "Left and right.", 600, 150, [0, 240, 600])
    body = f'<div class=cell_output><figure>{pieces}<img class=whole alt="Two panels" src="{image}"></figure></div>'
    with styled(browser, tmp_path, body) as page:
        first, second = (window.bounding_box() for window in page.locator(".panels i").all())
        assert not page.locator("img").is_visible() and second["y"] > first["y"] + first["height"]
        assert first["width"] == 320 and first["width"] / first["height"] == pytest.approx(240 / 150, rel=0.01)
        assert second["x"] + second["width"] <= PHONE["width"]
        assert second["width"] / second["height"] == pytest.approx(360 / 150, rel=0.01)
        figure = page.locator("figure")
        assert figure.evaluate("e => e.scrollWidth == e.clientWidth")
        page.set_viewport_size({"width": 1280, "height": 900})
        assert page.locator("img").is_visible() and not page.locator(".panels").is_visible()


def test_a_row_of_results_is_a_card_on_a_phone_and_its_verdict_is_in_sight(browser, tmp_path):
    heads, cells = ("_".join(["a_heading_that_is_long"] * 3), "verdict"), ("−0.1 (−0.2 to +0.1, five pairs)", "held")
    columns = "".join(f"<th>{one}</th>" for one in ("", *heads))
    row = "".join(f'<td data-label="{one}"><p>{cell}</p></td>' for one, cell in zip(("", *heads), ("boosted", *cells)))
    html = f"<table class='table {{}}'><thead><tr>{columns}</tr></thead><tbody><tr>{row}</tr></tbody></table>"
    body = "".join(f"<div class=pst-scrollable-table-container>{html.format(name)}</div>" for name in ("cards", ""))
    with styled(browser, tmp_path, body) as page:
        box, plain = page.locator(".pst-scrollable-table-container").all()
        assert box.evaluate("e => e.scrollWidth == e.clientWidth") and darkest(box, 0.97, 1) > 240
        tops = [cell.bounding_box()["y"] for cell in box.locator("td").all()]
        assert tops == sorted(set(tops)) and box.get_by_text("held").is_visible()
        label = "e => getComputedStyle(e, '::before').content"
        assert box.locator("td").last.evaluate(label) == '"verdict"'
        assert box.locator("td").first.evaluate(label) == "none"  # its heading is empty
        assert plain.locator("td").last.evaluate(label) == "none"
        assert plain.evaluate("e => e.scrollWidth > e.clientWidth")
        page.set_viewport_size({"width": 1280, "height": 900})
        assert len({cell.bounding_box()["y"] for cell in box.locator("td").all()}) == 1


def test_where_a_number_was_measured_is_told_to_the_keyboard_and_to_a_finger(browser, tmp_path):
    words = "2026-11-21, x86_64 CPU, 2 threads, torch 2.13.0+cpu"
    body = f"<p>{'Words. ' * 30}5 seeds{provenance.mark(words, ' (', ')').astext()}. {'Words. ' * 30}</p>"
    with styled(browser, tmp_path, body, has_touch=True) as page:
        mark, told = page.locator(".provenance"), page.locator(".provenance-text")
        is_seen = lambda: told.evaluate("e => getComputedStyle(e).opacity") == "1"
        assert not is_seen()
        page.keyboard.press("Tab")
        assert is_seen() and told.inner_text() == f"Measured {words}"
        box = told.bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= PHONE["width"]
        page.keyboard.press("Tab")
        assert not is_seen()
        mark.tap()
        assert is_seen() and page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.emulate_media(media="print")
        assert f"5 seeds ({words}). Words." in page.locator("p").inner_text()


def test_what_a_term_means_is_told_to_the_keyboard_and_to_a_finger_before_its_link_is_followed(browser, tmp_path):
    told = "<span class=glossary-text role=tooltip id=told-hat>What a fit does to the data.</span>"
    link = "<a class=glossary-link aria-describedby=told-hat href='#x'>hat</a>"
    term = f"<span class=glossary-term tabindex=-1>{link}{told}</span>"
    body = f"<p>{'Words. ' * 30}A {term}. {'Words. ' * 30}</p>"
    with styled(browser, tmp_path, body, has_touch=True, is_mobile=True) as page:
        link, told = page.locator("a"), page.locator(".glossary-text")
        assert not told.is_visible() and "data" not in page.locator("p").inner_text()
        page.keyboard.press("Tab")
        assert told.is_visible() and link.evaluate("e => e == document.activeElement")
        box = told.bounding_box()
        assert 0 <= box["x"] and box["x"] + box["width"] <= PHONE["width"]
        page.keyboard.press("Tab")
        assert not told.is_visible()
        place = link.bounding_box()
        tap = lambda: page.touchscreen.tap(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        tap()
        assert told.is_visible() and not page.evaluate("location.hash")
        page.wait_for_timeout(400)  # else it is one double tap
        tap()
        assert page.evaluate("location.hash") == "#x"
        page.emulate_media(media="print")
        assert not told.is_visible()
    with styled(browser, tmp_path, body) as page:
        page.locator("a").hover()
        assert page.locator(".glossary-text").is_visible()
        page.locator("a").click()
        assert page.evaluate("location.hash") == "#x"


def test_what_opens_on_a_click_is_called_by_its_title(browser, tmp_path):
    button = "<button class=toggle-button aria-label='Toggle hidden content'></button>"
    body = f"<p class=admonition-title>Solution to Exercise 1 {button}</p><script>{code_folds.NAMED}</script>"
    with styled(browser, tmp_path, body) as page:
        page.wait_for_load_state("load")
        assert page.get_by_role("button", name="Solution to Exercise 1", exact=True).count() == 1


# ---- A small site in which everything is wrong ----

BROKEN = {
    "equation.html": "<mjx-container><mjx-merror data-mjx-error='Undefined control sequence'>x</mjx-merror>",
    "untypeset.html": r"<span class='math'>\(x^2\)</span>",
    "asks.html": "<img alt='' src='https://cdn.example.org/x.svg'>",
    "fetches.html": "<script>fetch('https://cdn.example.org/data').catch(() => {})</script>",
    "script.html": "<script>undefinedFunction()</script>",
    "wide.html": "<pre class='long'>" + "x" * 400 + "</pre>",
    "spilt.html": "<svg role='img'><rect width='60' height='20'/><text y='15'>much more than fits</text>"
    "<text x='90' y='15'>beside a box</text></svg>",
    "fine.html": r"<div style='overflow:auto'><pre>" + "x" * 400 + "</pre></div>",
}


@pytest.fixture(scope="module")
def broken_visits(browser, tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    for name, body in BROKEN.items():
        (site / name).write_text(f"<!doctype html><meta name=viewport content='width=device-width'>{body}")
    return visits_of(browser, site)


@pytest.mark.parametrize(
    "law, expected",
    [
        (
            equations_render,
            ["equation.html: an equation renders as an error, 'Undefined control", "untypeset.html: '\\(x"],
        ),
        (
            no_request_leaves,
            ["asks.html asked the network for https://cdn.ex", "fetches.html asked the network for https"],
        ),
        (scripts_run, ["script.html: a script of the page failed with 'undefinedFunction"]),
        (nothing_is_wider_than_the_screen, ["wide.html is"]),
        (words_stay_in_their_boxes, ["spilt.html: 'much more than fits' runs out of its box"]),
    ],
)
def test_a_broken_site(broken_visits, law, expected):
    broken = law(broken_visits)
    assert {name for name in expected if any(name in sentence for sentence in broken)} == set(expected), broken
    assert {sentence.split(".html")[0] for sentence in broken} == {name.split(".html")[0] for name in expected}, broken
