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
RESULT = table(HEADS, [["one", "−1.0", "held"], ["two", "", "open"]])


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


@pytest.mark.parametrize(
    "other",
    [
        table(HEADS[:2], [["one", "−1.0"]]),
        table(HEADS, [["one", "−1.0", "held"]] * 15),
        table(['<span class="math">D</span>', "a", "b"], [["one", "−1.0", "held"]]),
        table(HEADS, [["one", "−1.0"]]),
    ],
    ids=["two columns", "a long list", "a formula as heading", "cells without a heading"],
)
def test_another_table_stays_as_it_is(other):
    assert of(other) == other
    assert of(RESULT + other).endswith(other)


def test_the_pages_are_there():
    nbs = Path(__file__).parents[2] / "nbs"
    assert all((nbs / f"{name}.ipynb").is_file() for name in cards.PAGES)
    style = (nbs.parent / "_static" / "book.css").read_text()
    assert re.search(r"table\.cards tbody td::before {[^}]*attr\(data-label\)", style)
