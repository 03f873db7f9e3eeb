"""The page that says how the book stands: what it reads off pages and records, and what the built one says."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils import nodes

import pages

sys.path.insert(0, str(Path(__file__).parents[2] / "_ext"))
import status

PRINTED = """prediction  the first is ahead of
            the second
statistic   a number
threshold   below 0
observed    {n}
verdict     {verdict}
"""


def page(*content):
    document = nodes.container()
    document.extend(content)
    return document


def test_a_claim_has_the_verdict_that_its_page_prints():
    blocks = [PRINTED.format(n=n, verdict=verdict) for n, verdict in enumerate(("held", "did not hold"), 1)]
    blocks = ["\n".join(blocks), PRINTED.format(n=3, verdict="proved, checked")]
    blocks += ["E9: it grows\n   not known yet: 3 of 10 runs are in\n", "verdict = held\nopen: a file\n"]
    found = status.claims_in(page(*(nodes.literal_block(text=text) for text in blocks)))
    ahead = "the first is ahead of the second"
    found = [found[:2] for found in found]
    verdicts = ("held", "did not hold", "proved, checked")
    assert found == [*((ahead, verdict) for verdict in verdicts), ("E9: it grows", "not known yet")]


def test_a_claim_knows_the_section_in_which_it_stands():
    block = nodes.literal_block(text=PRINTED.format(n=1, verdict="open"))
    inner = nodes.section("", nodes.container("", block), ids=["inner"])
    ((_, verdict, place),) = status.claims_in(page(nodes.section("", inner, ids=["outer"])))
    assert verdict == "open" and place["ids"] == ["inner"]


def word(text, kind=nodes.strong, around=nodes.entry, **attributes):
    place = around("", nodes.paragraph("", "", kind(text=text, **attributes)))
    return nodes.row("", nodes.entry(), place)


def test_a_verdict_in_a_table_or_on_a_badge_counts_and_one_in_a_sentence_does_not():
    found = status.verdicts_in(
        page(
            nodes.literal_block(text=PRINTED.format(n=1, verdict="held")),
            word("held"),
            nodes.literal_block(text=PRINTED.format(n=2, verdict="proved, checked")),
            word("open after Holm"),
            word("seen", nodes.emphasis),
            word("opened"),
            nodes.row("", nodes.entry("", nodes.paragraph("", "", nodes.strong(text="held")))),  # what the word means
            word("did\u00a0not\u00a0hold"),  # as a table that keeps it on one line has it
            word("did not hold", around=nodes.list_item),
            word("did not hold", nodes.inline, nodes.list_item, classes=["sd-badge"]),
        )
    )
    assert found == {"held": 2, "proved, checked": 1, "open": 1, "seen": 1, "did not hold": 2}


def in_a_cell(*parts):
    """A cell of chapter 18, as Sphinx has stored it: lines end with HTML, spaces do not break."""
    lines = nodes.Text("−7.0,\u00a0n\u00a0=\u00a06"), nodes.raw("", "<br>", format="html")
    return nodes.row("", nodes.entry(), nodes.entry("", nodes.paragraph("", "", *lines, *parts)))


def test_better_and_worse_in_a_table_are_held_and_did_not_hold_if_they_were_planned():
    found = status.verdicts_in(
        page(
            in_a_cell(nodes.strong(text="better"), nodes.Text(",\u00a0planned")),
            in_a_cell(nodes.strong(text="worse"), nodes.Text(",\u00a0planned")),
            in_a_cell(nodes.Text("worse,\u00a0"), nodes.emphasis(text="seen")),
            in_a_cell(nodes.Text("open\u00a0after\u00a0Holm")),
            word("worse, planned"),
            word("**better**, **worse**, planned"),
            word("better, planned", around=nodes.list_item),
        )
    )
    assert found == {"held": 1, "did not hold": 2, "seen": 1, "open": 1}


def test_a_count_tells_how_many_of_its_claims_the_second_table_has():
    shown = [status.counted(*one) for one in (("did not hold", 10, 1), ("open", 1, 0), ("held", 7, 2), ("open", 0, 0))]
    assert shown == ["10 (1)", "1 (0)", "7", ""]


def test_an_experiment_is_missing_until_its_last_record_is_in():
    experiments = {name: SimpleNamespace(question=f"{name}?", planned=n) for name, n in (("a", 2), ("b", 2), ("c", 0))}
    report = SimpleNamespace(experiments=experiments, records=lambda name: ["one", "two"][: 2 if name == "a" else 1])
    assert status.missing_runs(report) == [("b", "b?", 1, 2)]


@pytest.fixture(scope="module")
def built():
    return pages.soup(pages.built_site() / "nbs" / "status.html").find("article")


def rows(table):
    return [[cell.get_text() for cell in row.find_all("td")] for row in table.select("tbody tr:has(td)")]


def test_the_route_comes_first_and_each_page_has_its_group():
    names = ("index", "nbs/18_perplexity", "nbs/06a_positions", "nbs/30_pretrained", "nbs/22_test_time", "nbs/notation")
    places = [status.GROUPS.index(status.group_of(name)) for name in names]
    assert places == [0, 0, 1, 1, 2, 3]
    shown = status.table(["page", "held"], {"The short route": [["a", "1"]], "More": [], "": [["b", "2"]]})
    assert shown.count("<th colspan") == 1 and '<th colspan="2" scope="rowgroup">The short route</th>' in shown
    assert shown.index("<td>a</td>") < shown.index("<td>b</td>")


def test_the_built_page_has_each_notebook_and_each_verdict_that_it_prints(built):
    found = built.find("table")
    links = [row.find("a")["href"] for row in found.select("tbody tr:has(td)")]
    site = pages.built_site()
    notebooks = {f"{path.stem}.html" for path in (site.parents[1] / "nbs").glob("*.ipynb")}
    assert notebooks <= {*links} and all(row[1].isdigit() for row, to in zip(rows(found), links) if to in notebooks)
    for link, row in zip(links, rows(found)):
        text = pages.soup(site / "nbs" / link).find("article").get_text()
        for verdict, shown in zip(status.VERDICTS, row[2:]):
            count = int(shown.split()[0]) if shown else 0
            assert count >= text.count(f"\nverdict     {verdict}\n"), f"{link}: {verdict}"
    held, failed, still_open = rows(found)[links.index("18_perplexity.html")][2:5]
    assert held and failed and still_open, "the cells of chapter 18 say it in other words than _ext/status.py reads"


def test_the_built_page_names_the_claims_that_did_not_hold_and_the_runs_that_are_missing(built):
    _, claims, runs = built.find_all("table")
    assert {verdict for _, verdict, _ in rows(claims)} <= {"did not hold", "open", "not known yet"} and rows(claims)
    assert all("#" in row.find("a")["href"] for row in claims.select("tbody tr:has(td)"))
    assert [head.get_text() for head in built.find("table").select("tbody th")] == [*status.GROUPS]
    assert all(int(done) < int(planned) for *_, done, planned in rows(runs))
    assert "torch" in built.get_text() and "cores of" in built.get_text()


def test_every_sentence_of_a_claim_is_on_the_built_page_and_every_claim_has_one(built):
    shown = [sentence for sentence, *_ in rows(built.find_all("table")[1])]
    written = status.sentences()
    stale = [claim for claim, sentence in written.items() if sentence not in shown]
    assert not stale, f"nbs/support/claims.toml has claims that no page prints as not held: {stale}"
    bare = [claim for claim in shown if claim not in written.values()]
    assert not bare, f"give these claims a sentence in nbs/support/claims.toml: {bare}"
