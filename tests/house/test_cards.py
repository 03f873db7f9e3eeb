"""Rows of results as cards on a phone: which tables, what their cells know, and that nothing is lost."""

import re
import sys
from pathlib import Path

import pytest
from bs4 import BeautifulSoup

sys.path.insert(0, str(Path(__file__).parents[2] / "_ext"))
import cards


def table(heads, rows):
    row = lambda kind, cells: "".join(f'<{kind} class="text-right"><p>{one}</p></{kind}>\n' for one in cells)
    head = f'<thead>\n<tr class="row-odd">{row("th", heads)}</tr>\n</thead>\n'
    body = "".join(f'<tr class="row-even">{row("td", one)}</tr>\n' for one in rows)
    return f'<table class="table">\n{head}<tbody>\n{body}</tbody>\n</table>'


def of(html):
    return cards.TABLE.sub(cards.with_cards, html)


HEADS = ["", "mean &amp; <em>interval</em>", "by the “rule”"]
LONG = "open, as three seeds are too few to decide it"
RESULT = table(HEADS, [["one", "−1.0", "held"], ["two", "", LONG]])


def test_a_cell_knows_its_heading_and_keeps_its_words():
    soup = BeautifulSoup(of(RESULT), "html.parser")
    assert [cell["data-label"] for cell in soup.find_all("td")] == ["", "mean & interval", "by the “rule”"] * 2
    assert soup.get_text() == BeautifulSoup(RESULT, "html.parser").get_text()
    assert soup.find("td")["class"] == ["text-right"] and soup.find("table")["class"] == ["table", "cards"]


def test_to_a_screen_reader_it_stays_a_table():
    soup = BeautifulSoup(of(RESULT), "html.parser")
    roles = {
        "table": "table",
        "thead": "rowgroup",
        "tbody": "rowgroup",
        "tr": "row",
        "th": "columnheader",
        "td": "cell",
    }
    assert all(one["role"] == role for name, role in roles.items() for one in soup.find_all(name))


def test_a_table_of_claims_has_no_classes_and_is_one_too():
    bare = re.sub(r' class="[^"]*"', "", RESULT).replace("<table>", '<table class="table">')
    soup = BeautifulSoup(of(bare), "html.parser")
    assert [cell["data-label"] for cell in soup.find_all("td")] == ["", "mean & interval", "by the “rule”"] * 2
    assert soup.get_text() == BeautifulSoup(bare, "html.parser").get_text()
    assert {head["role"] for head in soup.find_all("th")} == {"columnheader"}


def test_a_heading_says_whether_it_is_of_a_column_or_of_a_row():
    said = '<tr><th colspan="3" scope="rowgroup">all</th></tr>'
    rows = "<tr><th>one</th><td>2</td></tr>"
    for shown in (of(RESULT), RESULT):
        soup = BeautifulSoup(cards.with_scopes(shown.replace("</tbody>", f"{said}{rows}</tbody>")), "html.parser")
        assert [head["scope"] for head in soup.find_all("th")] == ["col"] * 3 + ["rowgroup", "row"]


@pytest.mark.parametrize(
    "other",
    [
        table(HEADS[:2], [["one", "−1.0"]]),
        table(HEADS, [["one", "−1.0", LONG]] * 15),
        table(['<span class="math">D</span>', "a", "b"], [["one", "−1.0", LONG]]),
        table(HEADS, [["one", LONG]]),
        table(["", "two", "three words here"], [["boosted", "<b>−1.0</b>", "held &amp; seen"]] * 3),
    ],
    ids=["two columns", "a long list", "a formula as heading", "cells without a heading", "one that fits"],
)
def test_another_table_stays_as_it_is(other):
    assert of(other) == other
    assert of(RESULT + other).endswith(other)


@pytest.mark.parametrize("n, is_cards", [(4, False), (5, True)])
def test_columns_that_the_style_makes_wide_are_cards_even_if_short(n, is_cards):
    assert ("cards" in of(table(["a"] * n, [["1"] * n] * 2))) == is_cards


def test_the_style_shows_the_headings_and_what_is_wide_is_said_alike():
    style = (Path(__file__).parents[2] / "_static" / "book.css").read_text()
    assert re.search(r"table\.cards tbody td::before {[^}]*attr\(data-label\)", style)
    assert f"table:has(th:nth-child({cards.NARROW + 1})) td {{ min-width" in style
