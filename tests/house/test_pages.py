"""The laws of the pages: held by the built book, and shown to reject a broken site."""

import pytest

import pages


@pytest.mark.parametrize("law", pages.LAWS, ids=lambda law: law.__name__)
def test_this_book_keeps(law):
    broken = law(pages.built_site())
    assert not broken, "\n\n" + "\n".join(broken)


# ---- A site of one page in order, and what happens when one thing in it is wrong ----

ALT = "A line that rises from left to right"
HOME = pages.REPOSITORY
COLAB = "https://colab.research.google.com/github/gbattn/gbattn/blob/main/nbs/01_first.ipynb"
PREVIEW = f"""<meta property="og:title" content="First">
<meta property="og:description" content="A line rises."><meta name="description" content="A line rises.">
<meta property="og:image" content="{pages.ADDRESS}_static/line.png"><meta property="og:image:alt" content="{ALT}">
<meta property="og:url" content="{pages.ADDRESS}nbs/01_first.html">"""
PAGE = f"""<html><head><title>First</title>
{PREVIEW}
<link rel="canonical" href="https://example.org/nbs/01_first.html">
<link rel="stylesheet" href="../_static/book.css?v=1"><style>p {{ background: url(data:image/png;base64,AA) }}</style>
<script src="../_static/book.js"></script></head>
<body><a href="{HOME}">code</a><a href="{HOME}/issues/new?title=x">issue</a><a href="{COLAB}">run</a>
<a href="{HOME}/raw/main/nbs/01_first.ipynb">download</a>
<img src="../_static/logo.svg" alt="gbattn">
<article><h1 id="first">First</h1>
<p>See <a href="#first">above</a>, <a href="01_first.html#first">here</a>, <a href="https://example.org">there</a>.</p>
<pre>x = 1  # a | b</pre><details><summary>Show x</summary></details><details><summary>Show y</summary></details>
<img src="../_static/line.svg" alt="{ALT}">
<svg role="img" aria-label="{ALT}"><path/></svg><svg aria-hidden="true"><path/></svg>
</article><p class="cite-page">Authors. First. {pages.ADDRESS}nbs/01_first.html</p></body></html>"""

STYLE = """html[data-theme="light"] .highlight { background: #fefefe; color: #080808 }
html[data-theme="light"] .highlight .n { color: #080808 }
html[data-theme="dark"] .highlight { background: #2b2b2b; color: #F8F8F2 }
html[data-theme="dark"] .highlight .p { color: #F8F8F2 }"""


@pytest.fixture
def site(tmp_path):
    files = {
        "nbs/01_first.html": PAGE,
        "_static/book.css": "/* url(https://example.org/old) */ p { background: url('line.svg') }",
        "_static/book.js": "",
        "_static/pygments.css": STYLE,
        "_static/logo.svg": "",
        "_static/line.svg": "",
        "_static/line.png": "",
        "nbs/01_first.ipynb": "{}",
        "searchindex.js": 'Search.setIndex({"docnames": ["nbs/01_first"]})',
        "search.html": "<title>Search</title>",
        "index.html": PREVIEW + '<meta http-equiv="Refresh" content="0; url=nbs/01_first.html" />',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def spoil(site, old, new, name="nbs/01_first.html"):
    path = site / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize("law", pages.LAWS, ids=lambda law: law.__name__)
def test_a_site_in_order_breaks_no_law(site, law):
    assert law(site) == []


@pytest.mark.parametrize(
    "law, old, new, sentence",
    [
        (pages.pages_have_titles, "<title>First</title>", "", "has no <title>"),
        (pages.pages_have_titles, "<h1 id", "<h2 id", "has no <h1>"),
        (pages.no_directive_shows, "<pre>", "<pre># a comment\n#| export\n", "shows the nbdev directive '#| export'"),
        (pages.no_directive_shows, "<pre>", "<pre>\n# |hide\n", "shows the nbdev directive '# |hide'"),
        (pages.images_speak, f'line.svg" alt="{ALT}"', 'line.svg"', "line.svg has no alt text"),
        (pages.images_speak, f'line.svg" alt="{ALT}"', 'line.svg" alt=""', "line.svg has no alt text"),
        (pages.images_speak, f'line.svg" alt="{ALT}"', 'line.svg" alt="../_static/line.svg"', "has no alt text"),
        (pages.images_speak, f'line.svg" alt="{ALT}"', 'line.svg" alt="A line"', "'A line' is too short"),
        (pages.images_speak, 'alt="gbattn"', "", "logo.svg has no alt text"),
        (pages.images_speak, f' aria-label="{ALT}"', "", "<svg> has no alt text"),
        (pages.images_speak, 'svg role="img"', "svg", "also needs role='img'"),
        (pages.links_lead_somewhere, "01_first.html#first", "02_second.html", "there is no such file"),
        (pages.links_lead_somewhere, "01_first.html#first", "01_first.html#last", "no place called 'last'"),
        (pages.links_lead_somewhere, 'href="#first"', 'href="#last"', "no place called 'last'"),
        (pages.pages_link_home, f'href="{HOME}"', "href=''", "no link to the repository"),
        (pages.pages_link_home, f"{HOME}/issues", f"{HOME}/pulls", "no link to open an issue"),
        (pages.pages_can_be_shared, "og:title", "og:tilte", "has no og:title"),
        (pages.pages_can_be_shared, 'name="description"', 'name="keywords"', "has no description"),
        (pages.pages_can_be_shared, "_static/line.png", "_static/line.jpg", "line.jpg, which the site does not have"),
        (pages.pages_can_be_shared, pages.ADDRESS + "nbs", "https://example.org/nbs", "its address is https://example"),
        (pages.pages_link_home, COLAB, COLAB.replace("01_first", "02_second"), "no button that opens nbs/01_first"),
        (pages.pages_link_home, f"{HOME}/raw", "_sources", "no button that downloads nbs/01_first"),
        (pages.pages_say_how_they_are_cited, "Authors. First. ", "Authors. ", "does not say how it is cited"),
        (pages.pages_say_how_they_are_cited, '<p class="cite-page">', "<p>", "does not say how it is cited"),
        (pages.pages_say_how_they_are_cited, "First. ", "First?. ", "two marks at the end of its title"),
        (pages.no_return_value_of_a_drawing_shows, "<pre>", "<pre>Text(0, 1, 'y')</pre><pre>", "Text(0, 1, 'y')"),
        (pages.no_warning_of_the_machine_shows, "<pre>", "<pre>/x/site-packages/a.py:21: Warning: b</pre><pre>", ": b"),
        (pages.folds_have_names, "Show y", "Show x", "2 folds are called 'Show x'"),
        (pages.folds_have_names, "<summary>Show y", "<summary aria-label='Toggle'>Show y", "calls a fold 'Toggle'"),
    ],
)
def test_a_page_that_breaks(site, law, old, new, sentence):
    spoil(site, old, new)
    broken = law(site)
    assert len(broken) == 1 and "nbs/01_first.html" in broken[0] and sentence in broken[0], broken


REMOTE = "https://cdn.example.org/x"


@pytest.mark.parametrize(
    "tag",
    [
        f'<script src="{REMOTE}"></script>',
        '<script src="//cdn.example.org/x"></script>',
        f'<link rel="stylesheet" href="{REMOTE}">',
        f'<link rel="preconnect" href="{REMOTE}">',
        f'<img alt="" src="{REMOTE}">',
        f'<img alt="" srcset="a.png 1x, {REMOTE} 2x">',
        f'<iframe src="{REMOTE}"></iframe>',
        f'<video poster="{REMOTE}"></video>',
        f'<object data="{REMOTE}"></object>',
        f'<style>@import "{REMOTE}";</style>',
        f"<style>@font-face {{ src: url({REMOTE}) }}</style>",
        f"<p style=\"background: url('{REMOTE}')\">",
        f'<svg><image xlink:href="{REMOTE}"/></svg>',
    ],
)
def test_a_page_that_needs_the_network(site, tag):
    spoil(site, "</article>", tag + "</article>")
    broken = [sentence for sentence in pages.nothing_is_loaded_from_the_network(site) if "a.png" not in sentence]
    assert len(broken) == 1 and "a page reads with no network" in broken[0] and "cdn.example.org" in broken[0], broken


def test_a_style_sheet_that_needs_the_network(site):
    spoil(site, "url('line.svg')", f"url({REMOTE})", "_static/book.css")
    (broken,) = pages.nothing_is_loaded_from_the_network(site)
    assert "book.css loads https://cdn.example.org/x" in broken


def test_a_style_that_draws_names_in_a_colour_of_their_own(site):
    spoil(site, ".n { color: #080808", ".n { color: #00622F", "_static/pygments.css")
    (broken,) = pages.unmarked_code_looks_as_if_marked(site)
    assert "in the light theme code marked 'n' is not drawn like the rest" in broken


@pytest.mark.parametrize(
    "limit, sentence", [("MEGABYTES", "The site has 0.0 MB"), ("KILOBYTES", "nbs/01_first.html has 1 kB compressed")]
)
def test_a_site_that_is_heavy(site, monkeypatch, limit, sentence):
    monkeypatch.setattr(pages, limit, 0.5 if limit == "KILOBYTES" else 1e-6)
    (broken,) = [said for said in pages.the_site_is_light(site) if "search.html" not in said]
    assert sentence in broken and "see what grew" in broken


def test_a_page_that_loads_a_missing_file(site):
    (site / "_static" / "book.js").unlink()
    (broken,) = pages.nothing_is_loaded_from_the_network(site)
    assert "loads ../_static/book.js, which is not there" in broken


def test_a_page_that_the_search_does_not_know(site):
    spoil(site, "nbs/01_first", "nbs/other", "searchindex.js")
    (broken,) = pages.the_book_can_be_searched(site)
    assert "does not know nbs/01_first.html" in broken


def test_a_book_without_search(site):
    (site / "search.html").unlink()
    (broken,) = pages.the_book_can_be_searched(site)
    assert "no search page" in broken


def test_an_address_that_says_nothing(site):
    spoil(site, PREVIEW, "", "index.html")
    broken = pages.pages_can_be_shared(site)
    assert len(broken) == 6 and all(sentence.startswith("index.html has no ") for sentence in broken), broken


def test_in_ci_nothing_is_skipped(monkeypatch, tmp_path):
    monkeypatch.setattr(pages, "SITE", tmp_path)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make book"):
        pages.built_site()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="make book"):
        pages.built_site()
