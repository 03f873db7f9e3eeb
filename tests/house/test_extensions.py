"""How a notebook becomes a page: the directives one by one, then a small book built by Sphinx."""

import builtins
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib.pyplot as plt
import pytest
from docutils import nodes
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from pybtex.database import parse_file, parse_string

import pages
from gbattn.conventions import Record, put_to_test

sys.path.insert(0, str(Path(__file__).parents[2] / "_ext"))
import author_years
import claim_boxes
import code_folds
import math_lines
import nbdev_pages
import offline
import provenance
import short_route

EXTENSIONS = Path(nbdev_pages.__file__).parent


def shown(source, **metadata):
    """What becomes of a code cell: its source, its metadata, and the complaints about it."""
    cell, trouble = nbdev_pages.page_cell(new_code_cell(source, metadata=metadata), flags=["slow", "gpu"])
    return (cell["source"], cell["metadata"], trouble) if cell else (None, {}, trouble)


def test_what_a_claim_prints_becomes_a_box_between_what_is_printed_beside_it(capsys):
    decided = dict(statistic="the <least> difference", threshold="below -1", observed="-2 (-3e-2 to -1)\n\nn = 7")
    print("before")
    put_to_test(prediction="two rounds " + "win and " * 12 + "win", **decided, holds=False)
    print("between")
    put_to_test(prediction="open", **decided, holds=None)
    put_to_test(prediction="zero", **decided, holds=True, proved=True)
    printed = capsys.readouterr().out
    parts = claim_boxes.parts_of(nodes.literal_block(printed, printed, classes=["output", "stream"]))
    assert [part.astext() for part in parts[:3:2]] == ["before", "between"]
    assert [part["classes"] for part in parts[:3:2]] == [["output", "stream"]] * 2
    first, second = (part.astext() for part in parts[1:4:2])
    assert parts[4].astext().count("sd-bg-muted") == 1 and "proved, checked</span> Zero</p>" in parts[4].astext()
    assert "did not hold</span> Two rounds " + "win and " * 12 + "win</p>" in first
    assert "<dt>measured</dt><dd>the &lt;least&gt; difference</dd>" in first and "<dd>below −1</dd>" in first
    assert "<dd>−2 (−3e-2 to −1) n = 7</dd>" in first and "open</span> Open</p>" in second


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_words_of_every_badge_are_legible(theme):
    """A contrast of 4.5, as the guidelines want it, of each badge that a verdict has, and of that of what was seen."""
    style = (EXTENSIONS.parent / "_static" / "book.css").read_text()
    rule = re.search(rf'html\[data-theme="{theme}"\] {{(.*?)\n}}', style, re.S)[1]
    colours = dict(re.findall(r"--sd-color-([\w-]+): #(\w{6});", rule))
    assert {*claim_boxes.BADGES.values(), "info"} == {name for name in colours if not name.endswith("-text")}
    for name in (*claim_boxes.BADGES.values(), "info"):
        assert contrast(colours[name], colours[f"{name}-text"]) >= 4.5, f"{name} in the {theme} theme"


def contrast(*colours):
    """The ratio of the luminances of two colours, as WCAG 2 defines it: from 1 to 21."""
    assert len(colours) == 2
    values = ([int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)] for colour in colours)
    linear = lambda c: c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
    dark, light = sorted(sum(w * linear(c) for w, c in zip((0.2126, 0.7152, 0.0722), one)) for one in values)
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_the_guidelines():
    assert contrast("000000", "ffffff") == pytest.approx(21)
    assert contrast("e89217", "ffffff") == pytest.approx(2.45, abs=0.01)


@pytest.mark.parametrize(
    "prediction, shown",
    [
        ("ν = 0 is best", "ν = 0 is best"),
        ("a = 1 is best", "a = 1 is best"),
        ("a share below a* stays", "A share below a* stays"),
        ("D is larger", "D is larger"),
        ("two rounds win", "Two rounds win"),
    ],
)
def test_a_symbol_at_the_head_of_a_claim_is_no_word_and_gets_no_capital(prediction, shown, capsys):
    put_to_test(prediction=prediction, statistic="s", threshold="t", observed="o", holds=True)
    (box,) = claim_boxes.parts_of(nodes.literal_block(text=capsys.readouterr().out))
    assert f"</span> {shown}</p>" in box.astext()


def test_claims_under_a_caption_become_one_table(capsys):
    print("before\n\n== What we predicted ==\n")
    put_to_test(prediction="it wins", statistic="a number", threshold="above -1", observed="2", holds=True)
    put_to_test(prediction="ν = 0 is best", statistic="another", threshold="below 0", observed="1", holds=None)
    print("after")
    before, table, after = claim_boxes.parts_of(nodes.literal_block(text=capsys.readouterr().out))
    assert (before.astext(), after.astext()) == ("before", "after")
    shown = table.astext()
    assert shown.count("<tr>") == 3 and "<th>What we predicted</th>" in shown and "claim" not in shown
    summary = '<summary>rule<span class="sr-only">: It wins</span></summary>'
    assert f"<td>It wins <details>{summary}a number: above −1</details></td>" in shown
    assert "held</span></td><td>2</td>" in shown and "open</span></td><td>1</td>" in shown and "<td>ν = 0" in shown


def test_what_is_no_whole_claim_stays_as_it_is_printed():
    text = "prediction  it holds\nverdict     held\n"
    assert [part.astext() for part in claim_boxes.parts_of(nodes.literal_block(text, text))] == [text.strip()]


@pytest.mark.parametrize(
    "directives, tags",
    [
        ("", []),
        ("#| export\n", ["export"]),
        ("#|export\n", ["export"]),
        ("# | exporti\n", ["export"]),
        ("#| exports\n", ["export"]),
        ("#| export other_module\n", ["export"]),
        ("#| eval: false\n", ["skip-execution"]),
        ("#| eval:false\n", ["skip-execution"]),
        ("#| eval: true\n", []),
        ("#| slow\n", ["skip-execution"]),
        ("#| gpu\n", ["skip-execution"]),
        ("#| echo: false\n", ["remove-input"]),
        ("#| output: false\n", ["remove-output"]),
        ("#| code-fold: true\n", ["hide-input"]),
        ("#| hide\n", ["remove-cell"]),
        ("#| hide\n\n#| export\n", ["remove-cell", "export"]),
        ("#| default_exp least_squares\n", ["remove-cell"]),
    ],
)
def test_a_directive_becomes_a_tag_and_goes(directives, tags):
    source, metadata, trouble = shown(directives + "x = 1\n#| not at the head")
    assert source == "x = 1\n#| not at the head"
    assert metadata["tags"] == tags
    assert trouble == []


@pytest.mark.parametrize(
    "source", ["#| default_exp x", "#| hide\n", "", "#| hide\n#| eval: false\n!pip install x", "#| hide\n#| gpu\nx = 1"]
)
def test_a_cell_with_nothing_to_show_or_run_is_dropped(source):
    assert shown(source) == (None, {}, [])


def test_tags_that_were_there_stay():
    assert shown("#| export\nx = 1", tags=["kept"])[1]["tags"] == ["kept", "export"]


def page_of(*sources):
    """The code cells of a page, from those of a notebook."""
    cells = [json.loads(json.dumps(new_code_cell(source))) for source in sources]
    return nbdev_pages.page_of({"cells": cells, "metadata": {}})[0]["cells"]


@pytest.mark.parametrize(
    "unseen, seen",
    [
        ("import math", "math.pi"),
        ("from math import pi as x", "print(x)"),
        ("def f(): ...", "[f() for _ in range(2)]"),
        ("x = 1", "def g():\n    return x"),
        ("for x in (1, 2): ...", "class C:\n    y = x"),
    ],
)
def test_an_unseen_cell_is_folded_where_a_seen_one_needs_it(unseen, seen):
    first, last = page_of(f"#| hide\n{unseen}", seen)
    assert first["metadata"]["tags"] == ["hide-input", "remove-output"] and last["metadata"]["tags"] == []


@pytest.mark.parametrize(
    "code, title",
    [
        ("import math", "imports"),
        ("import math\ndef f(): ...", "imports and the function f"),
        ('def f():\n    """Return `x`.\n\n    More."""', "the function f: Return x"),
        ("x = 1\ndef f(): ...\nclass C: ...", "the class C and the function f"),
        ("def _check_x(): ...\ndef f(): ...\ndef check_y(): ...", "the function f and the checks _check_x and check_y"),
        ("\n".join(f"def f{i}(): ..." for i in range(5)), "the functions f0, f1, f2 and others"),
        ("x = y = 1\nx: int = 2\n(z, *_), w.v = f([u for u in 'ab'])", "how x, y, z and _ are computed"),
        ("A = 1", "the constant A"),
        ("A, B = 1, 2", "the constants A and B"),
        ("#| label: fig-f\n# A comment.\nx = 1\nplot()", "how the figure is made"),
        ("from support.playgrounds import play\nplay('fit')", "imports and how the figure is made"),
        ("x = 1\nassert put_to_test(x)", "how the claim is tested"),
        ("def f():\n    return put_to_test(1)", "the function f"),
        ("def f(): ...\nput_to_test(f())", "how the claim is tested"),
        ("# The sentences above,\n# in Python.\nx = 1", "the sentences above, in Python"),
        ("# DyT of `this`.\n\n# And of x.\nx = 1", "DyT of this"),
        ("# A comment\nimport math\ndef f(): ...", "a comment"),
        ("x = 1\nquote(f(x))", "the numbers that the text quotes"),
        ("x = load_records('a')", "what is read from the records"),
        ("import math\nfigure_style()", "imports and the settings of the page"),
        ("if profile() == 'full':\n    x = f()", "the runs at the size of the profile"),
        ("short_table(x)", "how the table is made"),
        ("assert f(x)", "the checks of the text"),
        ("print(g(f(x)))", "the call of f and g"),
        ("print(1)", "what runs here"),
    ],
)
def test_a_fold_says_what_it_holds(code, title):
    folded = "#| code-fold: true\n" + code
    prompts = lambda metadata: {k: v for k, v in metadata["mystnb"].items() if k.startswith("code_prompt")}
    titled = {"code_prompt_show": f"Show {title}", "code_prompt_hide": f"Hide {title}"}
    for source in (folded, folded.replace("#|", "#| export\n#|", 1)):
        assert prompts(page_of(source)[0]["metadata"]) == titled
    assert "code_prompt_show" not in page_of(code)[0]["metadata"].get("mystnb", {})


def test_an_unseen_cell_that_is_folded_has_such_a_title():
    first, _ = page_of("#| hide\nimport math\ndef f(): ...", "f, math")
    assert first["metadata"]["mystnb"]["code_prompt_show"] == "Show imports and the function f"


@pytest.mark.parametrize(
    "unseen, seen",
    [
        ("assert 2 > 1", "print(2)"),
        ("x = 1", "print(2)"),
        ("x = 1", "import x\nx"),
        ("x = 1", "def f(x):\n    return x"),
        ("def f():\n    x = 1", "x = 2\ndef g():\n    y = x"),
        ("x = 1", "#| echo: false\nx"),
    ],
)
def test_an_unseen_cell_that_no_reader_needs_stays_unseen(unseen, seen):
    assert page_of(f"#| hide\n{unseen}", seen)[0]["metadata"]["tags"] == ["remove-cell"]


def test_a_name_comes_from_the_last_cell_that_binds_it_and_what_that_needs_is_folded_too():
    cells = page_of("#| hide\nx = 1", "x = 2", "#| hide\ny = 1", "#| hide\ny = x", "#| hide\nz = 3", "print(y)")
    assert ["remove-cell" in cell["metadata"]["tags"] for cell in cells] == [True, False, True, False, True, False]


@pytest.mark.parametrize("path", sorted((EXTENSIONS.parent / "nbs").glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_page_shows_where_each_of_its_names_comes_from(path):
    notebook, _ = nbdev_pages.page_of(json.loads(path.read_text()))
    seen = [
        nbdev_pages.names_of(cell["source"])
        for cell in notebook["cells"]
        if cell["cell_type"] == "code" and not {"remove-cell", "remove-input"} & set(cell["metadata"]["tags"])
    ]
    bound, taken = (set().union(*(names[i] for names in seen)) for i in range(2))
    assert taken - bound <= set(dir(builtins))


@pytest.mark.parametrize(
    "written, read",
    [
        ("A ratio: $a$ to $b$", "A ratio: $a$ to $b$"),
        (r"'The time $\tau$, and Tukey''s twicing: twice'", r"The time $\tau$, and Tukey's twicing: twice"),
        (r'"The time $\tau$ of \'twicing\'"', r"The time $\tau$ of \'twicing\'"),
        ("Colon at the end:", "Colon at the end:"),
        ("'Tukey' and 'Friedman", "'Tukey' and 'Friedman"),
        ("# a hash, and | a bar", "# a hash, and | a bar"),
    ],
)
def test_a_caption_is_taken_as_it_stands(written, read):
    _, metadata, trouble = shown(f"#| label: fig-x\n#| fig-cap: {written}\n#| fig-alt: {written}\nplot()")
    assert metadata["mystnb"] == {"figure": {"name": "fig-x", "caption": read}, "image": {"alt": read}}
    assert trouble == []


@pytest.mark.parametrize(
    "source, sentence",
    [
        ("#| exprot\nx", "'#| exprot' is no directive of this book"),
        ("#| fig-alt-text: x\nx", "'#| fig-alt-text' is no directive"),
        ("#| eval: no\nx", "'#| eval: no' is neither true nor false"),
        ("#| label: fig-x\n#| fig-cap: c\nx", "'fig-x' has no '#| fig-alt"),
        ("#| label: fig-x\n#| fig-alt: a\nx", "'fig-x' has no '#| fig-cap"),
        ("#| label: fig-x\n#| fig-cap:\n#| fig-alt: a\nx", "'fig-x' has no '#| fig-cap"),
        ("#| label: plot\n#| fig-cap: c\n#| fig-alt: a\nx", "'plot' should begin with 'fig-'"),
        ("#| fig-cap: c\nx", "a caption without '#| label"),
    ],
)
def test_a_mistake_is_named(source, sentence):
    (trouble,) = shown(source)[2]
    assert sentence in trouble


# ---- A small book ----

CONF = f"""
import sys
sys.path.insert(0, {str(EXTENSIONS)!r})
extensions = ["myst_nb", "sphinx.ext.mathjax", "nbdev_pages", "paper_versus_code", "math_lines", "chapter_numbers"]
extensions += ["code_folds", "glossary_links", "sphinxcontrib.bibtex", "author_years", "provenance"]
bibtex_bibfiles = ["works.bib"]
bibtex_reference_style = "author_year"
bibtex_default_style = "author_year"
nb_execution_mode = "off"
numfig = True
myst_enable_extensions = ["dollarmath"]
root_doc = "index"
html_theme = "basic"
exclude_patterns = ["_build", "jupyter_execute"]
"""
BOX = """# Chapter {n}

```{{admonition}} Paper versus {against}: point {n}
:class: paper-versus-code
:name: pvc-{n}

The paper says $a^{n}$, see {{numref}}`fig-line` or ($b$), and

$$ a = b $$ (eq-{n})
```
"""
INTRODUCED = """
Here hat matrices, a map.

## Linear maps, and a hat

Hat matrices, and one more hat matrix; this is a **round**.
"""
ALIKE = """@misc{b, author = {Zoe Xu and Ann Bly and Al Cox}, title = {{The} Second}, year = {2025}}
@misc{a, author = {Ed Xu and Bo Day and Di Ek}, title = {The {First}}, year = {2025}}
@misc{c, author = {Zoe Xu and Ann Bly}, title = {A Linear Memory}, year = {2025}}"""
GLOSSARY = """# Terms

```{glossary}
hat matrix
  What a least-squares fit does to the data. Elsewhere: projection.

linear memory
  A sum of products, $k v$.

linear
  Of a map.

map
  Of a city: see [the boxes](boxes.md).

round
  Too plain a word to be linked.

APJN
  A norm. A hat matrix has one. [Chapter 1](07_first.ipynb).
```
"""
TERMS = """# Pages about hat matrices

`linear memory`, hat matrices and a round of the *APJN*.

## How much they hold: an APJN

Two Linear memories, [the linear memory](boxes), and the linear memory again, $a$: not a linear memory-map.
"""
SVG = {"image/svg+xml": '<svg xmlns="http://www.w3.org/2000/svg"/>'}
FIGURE = new_code_cell(
    "#| label: fig-line\n#| fig-cap: 'A line: $x$ times two'\n#| fig-alt: A rising line\n#| code-fold: true\nplot()",
    outputs=[{"output_type": "display_data", "data": SVG, "metadata": {}}],
)
MEASURED = "2026-11-21, x86_64 CPU, 2 threads, torch 2.13.0+cpu"
GLUED = new_code_cell(
    "#| label: fig-glued\n#| fig-cap: 'Medians of 5 runs ({glue:text}`it.provenance`). Line: $x$'\n"
    "#| fig-alt: A line\nplot()",
    outputs=[
        {"output_type": "display_data", "data": SVG, "metadata": {}},
        {
            "output_type": "display_data",
            "data": {"application/papermill.record/text/plain": repr(MEASURED)},
            "metadata": {"scrapbook": {"name": "it.provenance", "mime_prefix": "application/papermill.record/"}},
        },
    ],
)
TOLD = """# Measured

It is fast (5 seeds; {glue:text}`it.provenance`). So is the next.

| where |
|---|
| {glue:text}`it.provenance` |
"""
FOLDED = [
    new_code_cell("#| code-fold: true\n# What is drawn\ny = 1"),
    new_code_cell("#| code-fold: true\nimport math"),
]
TITLED, TEXT = "#| code-fold: true\nimport math", new_markdown_cell("Text.")
AGAIN = [
    new_code_cell(TITLED),
    TEXT,
    new_code_cell(TITLED),
    new_markdown_cell("## Later\n\nText."),
    new_code_cell(TITLED),
]


def build(folder, *options):
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-b", "html", *options, ".", "_build"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


CHECKED = """def double(y):
    '''Return twice y, a number.'''
    require(y)
    if y < 0:
        raise ArgumentError("y")
    if y > 3:
        y = 3
    return 2 * y
"""


@pytest.fixture(scope="module")
def small_book(tmp_path_factory):
    folder = tmp_path_factory.mktemp("book")
    cells = {
        "07_first": [
            new_markdown_cell(BOX.format(n=1, against="code") + INTRODUCED),
            new_code_cell("#| hide\nsecret = 1"),
        ],
        "09_measured": [new_markdown_cell(TOLD), GLUED, *AGAIN],
        "03b_second": [
            new_markdown_cell(BOX.format(n=2, against="here")),
            *FOLDED,
            FIGURE,
            new_code_cell("#| export\nx = 1"),
            new_code_cell("#| export\n" + CHECKED),
        ],
    }
    for name, content in cells.items():
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}, "language_info": {"name": "python"}}
        notebook = new_notebook(cells=content, metadata=kernel)
        (folder / f"{name}.ipynb").write_text(json.dumps(notebook))
    (folder / "conf.py").write_text(CONF)
    contents = "\n".join([*cells, "boxes", "glossary", "terms", "works"])
    (folder / "index.md").write_text(f"# Book\n\n```{{toctree}}\n:numbered:\n{contents}\n```\n")
    (folder / "glossary.md").write_text(GLOSSARY)
    (folder / "works.bib").write_text(ALIKE)
    (folder / "works.md").write_text("# Works\n\n{cite:p}`a` and {cite:t}`b`\n\n```{bibliography}\n:all:\n```\n")
    (folder / "terms.md").write_text(TERMS)
    (folder / "boxes.md").write_text("# Boxes\n\n```{paper-versus-code-list}\n```\n")
    assert build(folder) == ""
    return folder


def page(folder, name):
    return pages.soup(folder / "_build" / f"{name}.html")


def test_a_cell_of_the_library_is_shown_whole(small_book):
    assert CHECKED.strip() in page(small_book, "03b_second").get_text()


def test_no_directive_is_left_on_the_page(small_book):
    text = page(small_book, "03b_second").get_text()
    assert "#|" not in text and "x = 1" in text
    assert "secret" not in page(small_book, "07_first").get_text()


def test_an_exported_cell_wears_the_badge(small_book):
    cell, _ = page(small_book, "03b_second").select("div.cell.tag_export")
    assert "x = 1" in cell.get_text()


def test_a_labelled_cell_is_a_figure_numbered_by_its_file_with_alt_text(small_book):
    figure = page(small_book, "03b_second").find("figure", id="fig-line")
    assert figure.find("img")["alt"] == "A rising line"
    caption = figure.find("figcaption")
    assert caption.find(class_="caption-number").get_text().strip() == "Fig. 3b.1"
    assert "A line:" in caption.get_text() and caption.find(class_="math").get_text() == r"\(x\)"


def test_folded_cells_in_a_row_open_together_above_what_the_last_shows(small_book):
    (fold,) = page(small_book, "03b_second").select("details.hide")
    closed, is_open = (p.get_text() for p in fold.select("summary p"))
    assert (closed, is_open) == tuple(f"{do} how the figure is made (and 2 more cells)" for do in ("Show", "Hide"))
    titles = [p.get_text() for p in fold.select(".code-fold-part")]
    assert titles == ["What is drawn", "Imports", "How the figure is made"]
    assert [pre.get_text().strip() for pre in fold.select("pre")] == ["# What is drawn\ny = 1", "import math", "plot()"]
    assert fold.parent.find("figure", id="fig-line")


def test_no_two_folds_of_a_page_have_one_name(small_book):
    summaries = page(small_book, "09_measured").select("details.hide summary")
    assert not any(summary.has_attr("aria-label") for summary in summaries)
    assert [summary.select_one(".collapsed").get_text() for summary in summaries] == [
        "Show imports, in Measured",
        "Show imports, in Measured, 2",
        "Show imports, in Later",
    ]
    assert all(summary.select_one(".sr-only") for summary in summaries)


@pytest.mark.parametrize(
    "titles, line",
    [
        (["the class A: a summary", "the class A", "imports"], "the class A; imports"),
        (list("abc"), "a (and 2 more cells)"),
        (["what the library's module imports", "a"], "the setup of this page"),
        (["a", "b", "imports and how the figure is made"], "imports and how the figure is made (and 2 more cells)"),
    ],
)
def test_one_line_for_several_titles(titles, line):
    assert code_folds.title_of(titles) == line


def test_the_boxes_are_gathered_in_reading_order_with_the_way_back(small_book):
    gathered = page(small_book, "boxes")
    boxes = gathered.select("div.paper-versus-code")
    assert [re.search(r"point (\d)", box.get_text())[1] for box in boxes] == ["1", "2"]
    ways = [box.select_one(".paper-versus-code-source a") for box in boxes]
    assert [(way["href"], way.get_text()) for way in ways] == [
        ("07_first.html#pvc-1", "7. Chapter 1"),
        ("03b_second.html#pvc-2", "3b. Chapter 2"),
    ]
    assert boxes[0].select_one("a[href='03b_second.html#fig-line']").get_text() == "Fig. 3b.1"
    assert not boxes[0].find_all(id=True) and not boxes[0].find_all(class_="eqno")
    assert gathered.find("script", src=re.compile("mathjax", re.I)), "the equations of the boxes need MathJax"


def test_a_formula_keeps_its_punctuation(small_book):
    kept = [span.get_text() for span in page(small_book, "07_first").select(".unbroken")]
    assert kept == [r"\(a^1\),", r"(\(b\)),"]
    assert " or (" in page(small_book, "07_first").get_text()


def test_where_a_number_was_measured_stands_behind_a_mark(small_book):
    """Which the keyboard reaches; alone in a cell of a table it stays text."""
    seen = page(small_book, "09_measured")
    marks = seen.select(".provenance")
    assert [mark.get_text() for mark in marks] == [f"; Measured {MEASURED}", f" (Measured {MEASURED})"]
    assert all(mark["tabindex"] == "0" for mark in marks)
    for paper in seen.select(".provenance-on-paper"):
        paper.decompose()
    assert f"(5 seeds{marks[0].get_text()}). So" in seen.get_text()
    assert f"Medians of 5 runs{marks[1].get_text()}. Line:" in seen.find("figcaption").get_text()
    assert seen.select_one("td").get_text() == MEASURED


@pytest.mark.parametrize(
    ("before", "after", "on_screen"),
    [
        ("5 seeds (", "). Rings", "5 seeds*. Rings"),
        ("5 seeds (n = 2; ", ").", "5 seeds (n = 2*)."),
        ("or more. (", ".)", "or more.*"),
        ("the answer. ", ".", "the answer.*"),
        ("Medians; ", "; from this page", "Medians*; from this page"),
        ("came out (", "; before, 3 nats).", "came out* (before, 3 nats)."),
        ("measured on ", ".", "measured on *."),
    ],
)
def test_a_mark_takes_the_brackets_that_hold_nothing_else_and_paper_has_them_back(before, after, on_screen):
    left, (mark,), right = provenance.around(MEASURED, before, after)
    assert f"{left}*{right}" == on_screen
    on_paper = re.sub(r'<span class="provenance-on-screen">.*?</span>|<[^>]*>', "", mark.astext())
    whole = before + MEASURED + after if "came" not in before else f"came out, {MEASURED} (before, 3 nats)."
    assert left + on_paper + right == whole


@pytest.fixture(scope="module")
def route_book(tmp_path_factory):
    folder = tmp_path_factory.mktemp("route")
    conf = f"import sys\nsys.path.insert(0, {str(EXTENSIONS)!r})\nextensions = ['myst_parser', 'short_route']\n"
    conf += f"html_theme = 'sphinx_book_theme'\ntemplates_path = [{str(EXTENSIONS.parent / '_templates')!r}]\n"
    (folder / "conf.py").write_text(conf + "root_doc = 'nbs/index'\n")
    (folder / "nbs").mkdir()
    for name in ("02_memory", "status", *short_route.ROUTE):
        (folder / "nbs" / f"{name}.md").write_text(f"# About {name}\n")
    groups = "".join(f"```{{toctree}}\n:caption: Pages {one}\n:glob:\n{one}*\n```\n" for one in "01s")
    (folder / "nbs" / "index.md").write_text(f"# Book\n\n{groups}")
    build(folder)
    return folder


def test_a_page_of_the_short_route_leads_to_the_others(route_book):
    (route,) = page(route_book, "nbs/03_smoothers").select("nav.short-route")
    assert " ".join(route.get_text().split()) == "Short route: 1 · 3 · 5 · 5b · 8 · 17a · 18"
    assert route.find(attrs={"aria-current": "page"}).get_text() == "3"
    others = [f"{name}.html" for name in short_route.ROUTE if name != "03_smoothers"]
    assert [link["href"] for link in route.select("a")] == others
    assert route.a["title"] == "About 01_least_squares"
    assert not any(page(route_book, f"nbs/{name}").select(".short-route") for name in ("02_memory", "index"))
    before = lambda name: page(route_book, f"nbs/{name}").select_one("a.left-prev")
    after = lambda name: page(route_book, f"nbs/{name}").select_one("a.right-next")
    assert (
        after("01_least_squares")["href"] == "03_smoothers.html" and after("02_memory")["href"] == "03_smoothers.html"
    )
    assert "On the short route: 5. About 05_boosting" in after("03_smoothers").get_text()
    assert "On the short route: 1. About 01_least_squares" in before("03_smoothers").get_text()
    assert "On the short route: 1. About 01_least_squares" in after("index").get_text()
    assert after("18_perplexity")["href"] == "status.html"  # the next page of the book


@pytest.mark.parametrize(
    ("name", "opened"),
    [("nbs/02_memory", "0"), ("nbs/17a_models", "1"), ("nbs/status", "s"), ("nbs/index", ""), ("search", "")],
)
def test_the_contents_begin_with_the_short_route_and_only_the_group_of_the_page_is_open(route_book, name, opened):
    contents = page(route_book, name).select_one(".bd-sidebar-primary nav")
    stops, folds = contents.ul.find_all("a"), contents.find_all("details")
    assert [stop.get_text().partition(". ")[2] for stop in stops] == [f"About {one}" for one in short_route.ROUTE]
    files = [(route_book / "_build" / name).parent / stop["href"] for stop in stops if stop["href"] != "#"]
    assert all(file.is_file() for file in files)
    assert [stop["href"] for stop in stops if "aria-current" in stop.attrs] == ["#"] * (len(stops) - len(files))
    assert len(contents.select("[aria-current]")) == len(contents.select("li.current")) == (opened != "")
    assert (len(stops) - len(files)) == (name.removeprefix("nbs/") in short_route.ROUTE)
    assert [fold.summary.get_text() for fold in folds] == ["Pages 0", "Pages 1", "Pages s"]
    assert [fold.summary.get_text()[-1] for fold in folds if "open" in fold.attrs] == [*opened]


def test_the_pages_of_the_short_route_are_there():
    assert all((EXTENSIONS.parent / "nbs" / f"{name}.ipynb").is_file() for name in short_route.ROUTE)


def test_a_provenance_is_what_the_library_writes():
    known = Record("it", {}, {}).quotable["provenance"]
    assert provenance.PROVENANCE.fullmatch(known) and not provenance.PROVENANCE.fullmatch("2026-11-21, a device")


@pytest.mark.parametrize(
    ("tex", "lines"),
    [
        ("F = 0", ["F = 0"]),  # short
        (r"a_1 + a_2 + a_3 = b_1 + b_2 + b_3 \le c d e", ["a_1 + a_2 + a_3 ", "= b_1 + b_2 + b_3 ", r"\le c d e"]),
        (
            r"\mathbb E[a + b = c + d + e + f] + \sum_{i = 1}^n x",
            [r"\mathbb E[a + b = c + d + e + f] ", r"{}+ \sum_{i = 1}^n x"],
        ),
        (r"f\colon [0, 1) \to (a, b, c, d, e, f, g) = h", [r"f\colon [0, 1) ", r"\to (a, b, c, d, e, f, g) ", "= h"]),
        ("]0, 1[ = a + b + c + d + e + f + g + h + i + j", ["]0, 1[ = a + b + c + d + e + f + g + h + i + j"]),
        ("abcdefghijkl := mnopqrstuvwxyz", ["abcdefghijkl := mnopqrstuvwxyz"]),
        ("(a + b + c)(d + e + f)(g + h) - ij", ["(a + b + c)(d + e + f)(g + h) ", "{}- ij"]),
    ],
)
def test_a_long_formula_breaks_outside_its_brackets(tex, lines):
    assert math_lines.lines_of(tex) == lines


def test_a_number_keeps_its_sign_for_per_cent_but_not_in_code(tmp_path):
    conf = f"import sys\nsys.path.insert(0, {str(EXTENSIONS)!r})\nextensions = ['myst_parser', 'math_lines']\n"
    (tmp_path / "conf.py").write_text(conf)
    (tmp_path / "index.md").write_text("# Signs\n\nFrom **6** %, that is 7 %, in `8 % 3`.\n\n    9 % 2\n")
    build(tmp_path)
    text = page(tmp_path, "index").find("h1").parent.get_text()
    assert "6\u00a0%, that is 7\u00a0%, in 8 % 3." in text and "9 % 2" in text


def told_with(link):
    """What a screen reader reads with a link."""
    return link.find_parent("p").find(id=link["aria-describedby"], role="tooltip").get_text()


def test_the_first_use_of_a_term_leads_to_its_definition(small_book):
    links = page(small_book, "terms").select("a.glossary-link")
    found = [(" ".join(link.get_text().split()), link["href"], told_with(link)) for link in links]
    assert found == [("Linear memories", "glossary.html#term-linear-memory", r"A sum of products, \(k v\).")]
    assert page(small_book, "glossary").find(id="term-linear-memory")
    assert not page(small_book, "glossary").select("a.glossary-link")
    assert not page(small_book, "works").select("a.glossary-link")


def test_a_definition_leads_to_the_section_that_introduces_its_term(small_book):
    links = {a["href"]: a.get_text() for a in page(small_book, "glossary").select("dd a[href]")}
    place = "07_first.html#linear-maps-and-a-hat"
    assert links == {place: "Section\u00a07.1.", "boxes.html": "the boxes", "07_first.html": "Chapter 1"}
    items = {dt.get_text().strip("¶# "): dt.find_next("dd").a for dt in page(small_book, "glossary").select("dt")}
    found = {term: link and link["href"] for term, link in items.items()}
    wanted = dict.fromkeys(["hat matrix", "linear", "round"], place)
    assert found == wanted | {"linear memory": None, "map": "boxes.html", "APJN": "07_first.html"}


def test_a_page_leads_to_a_definition_that_it_does_not_give(small_book):
    path = small_book / "terms.md"
    path.write_text(TERMS.replace("Pages about hat matrices", "Pages").replace("*APJN*", "APJN").replace("an APJN", ""))
    assert build(small_book) == ""
    links = page(small_book, "terms").select("a.glossary-link")
    definitions = ["What a least-squares fit does to the data.", "A norm. A hat matrix has one."]
    assert [link.get_text().split()[0] for link in links] == ["hat", "APJN", "Linear"]
    assert [told_with(link) for link in links] == [*definitions, r"A sum of products, \(k v\)."]
    assert links[0].parent["tabindex"] == "-1", "a finger shows the definition without following the link"
    index = (small_book / "_build" / "searchindex.js").read_text()
    assert re.search(r'"product": \d', index), "the search finds a definition in the glossary alone"
    path.write_text(TERMS)
    assert build(small_book) == ""


def test_a_definition_begins_with_words_and_comes_before_any_reference():
    """Those of the book: no formula first, no 'See', no link in the first sentence."""
    text = (EXTENSIONS.parent / "nbs" / "glossary.md").read_text()
    entries = dict(re.findall(r"\n(\S.*)\n  (\S.*)", text))
    assert len(entries) > 100
    broken = [term for term, told in entries.items() if re.match(r"\$|See |[^.;]*\]\(", told)]
    assert not broken


def test_a_changed_box_reaches_the_list_in_the_next_build(small_book):
    path = small_book / "07_first.ipynb"
    before = path.read_text()
    path.write_text(before.replace("point 1", "point 7"))
    assert build(small_book) == ""
    assert "point 7" in page(small_book, "boxes").get_text()
    path.write_text(before)
    assert build(small_book) == ""


@pytest.mark.parametrize(
    "source, sentence",
    [
        ("#| exprot\nx = 1", "spoilt.ipynb, cell 2 (#| exprot): '#| exprot' is no directive of this book"),
        ("#| label: fig-y\n#| fig-cap: c\nx = 1", "cell 2 (#| label: fig-y): the figure 'fig-y' has no '#| fig-alt"),
    ],
)
def test_a_mistake_fails_the_build(small_book, source, sentence):
    path = small_book / "spoilt.ipynb"
    cells = [new_markdown_cell("---\norphan: true\n---\n# Spoilt"), new_code_cell(source)]
    path.write_text(json.dumps(new_notebook(cells=cells, metadata={"language_info": {"name": "python"}})))
    try:
        assert sentence in build(small_book, "-W", "--keep-going")
    finally:
        path.unlink()


def test_a_box_without_a_name_fails_the_build(small_book):
    path = small_book / "spoilt.md"
    path.write_text("# Spoilt\n\n```{admonition} Paper versus code: x\n:class: paper-versus-code\nText.\n```\n")
    try:
        assert "the box 'Paper versus code: x' has no ':name: pvc-…'" in build(small_book, "-W", "--keep-going")
        path.write_text(path.read_text().replace("code: x", "us: x"))
        assert "'Paper versus us: x' is not titled 'Paper versus code: …' or" in build(small_book, "-W", "--keep-going")
    finally:
        path.unlink()


def test_a_box_called_paper_versus_code_shows_code():
    """Of the paper or of what others use; any other sets the paper against what stands here."""
    box = re.compile(r"```{admonition} Paper versus code: (.*)\n:class: paper-versus-code\n((?:(?!```).*\n)*)")
    books = [json.loads(path.read_text()) for path in (EXTENSIONS.parent / "nbs").glob("*.ipynb")]
    found = [one for book in books for cell in book["cells"] for one in box.findall("".join(cell["source"]))]
    code = re.compile(r"\b[Cc]ode\b|\bscript\b|repository|PyTorch|\btorch\b")
    assert found and not [title for title, text in found if not code.search(text)]


def test_works_of_one_author_and_year_differ_by_a_letter():
    works = parse_string(ALIKE, "bibtex").entries
    for _ in range(2):  # the second time as another build finds them
        author_years.tell_apart(works.values())
        labels = [author_years.citation(works[key]) for key in "abc"]
        assert labels == ["Xu et al., 2025a", "Xu et al., 2025b", "Xu and Bly, 2025"]


def test_the_bibliography_labels_a_work_as_pages_cite_it(small_book):
    works = page(small_book, "works")
    labels = [label.get_text() for label in works.select(".citation .label")]
    assert labels == ["[Xu et al., 2025a]", "[Xu and Bly, 2025]", "[Xu et al., 2025b]"]
    assert works.p.get_text() == "[Xu et al., 2025a] and Xu et al. [2025b]"


def test_no_two_works_of_the_book_are_cited_alike():
    works = parse_file(EXTENSIONS.parent / "references.bib").entries.values()
    author_years.tell_apart(works)
    labels = [author_years.citation(work) for work in works]
    assert len(set(labels)) == len(labels)


def test_a_drawing_gets_slim_and_keeps_its_outlines():
    figure, ax = plt.subplots()
    ax.plot(range(9), [1 / (k + 3) for k in range(9)], "o-")
    written = io.StringIO()
    figure.savefig(written, format="svg")
    plt.close(figure)
    drawings = written.getvalue(), offline.slim(written.getvalue())
    assert len(drawings[1]) < 0.75 * len(drawings[0])
    before, after = map(outlines, drawings)
    assert len(before) == len(after) > 40
    for words, short in zip(before, after, strict=True):
        for word, number in zip(words, short, strict=True):
            assert word == number or abs(float(word) - float(number)) < 0.01


def test_a_style_that_several_parts_have_is_named_once():
    drawing = '<svg><style>*{a: b}</style><g style="c: 1"/><g style="d: 2"/><g style="c: 1"/></svg>'
    once = '<svg><style>*{a: b}.s0{c: 1}</style><g class="s0"/><g style="d: 2"/><g class="s0"/></svg>'
    assert offline.styles_by_name(drawing) == once


def test_a_lighter_page_reads_as_before():
    string = (
        '<span class="sa">f</span><span class="s2">&quot;a </span><span class="si">{</span><span class="n">b</span>'
    )
    code = (
        f'<pre>\n  <span class="kn">from</span> <span class="nn">x</span>\n\n  {string}<span class="mi">1</span></pre>'
    )
    lighter = offline.without_weight(f"<p>\n   one\n  two</p>\n  {code}\n\n  <p>end</p>")
    code_after = '<pre>\n  <span class="k">from</span> x\n\n  <span class="s">f&quot;a {</span>b1</pre>'
    assert lighter == f"<p>\none\ntwo</p>\n{code_after}\n<p>end</p>"


def outlines(drawing):
    """What a drawing draws, in order: the words of each path, where it is used with the place that it gets."""
    elements = list(ElementTree.fromstring(drawing).iter())
    words = lambda text: re.findall(r"[A-Za-z]|[-.\d]+", text)
    named = {element.get("id"): words(element.get("d")) for element in elements if element.get("d")}
    found = []
    for element in elements:
        if element.tag.endswith("}use"):
            target = element.get("href", element.get("{http://www.w3.org/1999/xlink}href")).removeprefix("#")
            moved = words(element.get("transform", "").removeprefix("translate").replace(" 0)", ""))
            found.append(named[target] + [element.get("x", moved[0] if moved else "0"), element.get("y", "0")])
        elif element.get("d") and not element.get("id"):
            found.append(words(element.get("d")))
    return found
