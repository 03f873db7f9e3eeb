"""On a phone the rows of the tables of results are cards: each cell below the other, with its column's heading.

Their last columns, where the verdicts stand, would lie beyond the edge of the screen.  _static/book.css draws the
cards; here each cell is told its heading, and what is no table to look at stays one to a screen reader.  Long lists
stay tables, and so do tables of two columns, which fit.
"""

from __future__ import annotations

import re
from html import escape, unescape

PAGES = ("18_perplexity", "30_pretrained")
ROWS, COLUMNS = 14, 3  # at most, and at least
TABLE = re.compile(r'<table class="table">(.*?)</table>', re.DOTALL)
HEAD, ROW, CELL = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL), re.compile(r"<tr\b"), re.compile(r"<td\b")


def with_cards(table: re.Match) -> str:
    """A table whose cells know their headings, if it is one for cards."""
    head, bar, body = table[1].partition("<tbody>")
    heads = [escape(unescape(re.sub(r"<[^>]*>", "", one)).strip()) for one in HEAD.findall(head)]
    rows = ROW.split(body)[1:]
    is_plain = bar and 'class="math' not in head and all(len(CELL.findall(row)) == len(heads) for row in rows)
    if not is_plain or len(heads) < COLUMNS or len(rows) > ROWS:
        return table[0]
    labels = iter(heads * len(rows))
    body = CELL.sub(lambda _: f'<td role="cell" data-label="{next(labels)}"', body)
    head = re.sub(r"<th\b", '<th role="columnheader"', head.replace("<thead>", '<thead role="rowgroup">'))
    inside = ROW.sub('<tr role="row"', head + '<tbody role="rowgroup">' + body)
    return f'<table class="table cards" role="table">{inside}</table>'


def add_cards(app, pagename, templatename, context, doctree):
    if doctree is not None and pagename.rpartition("/")[2] in PAGES:
        context["body"] = TABLE.sub(with_cards, context["body"])


def setup(app):
    app.connect("html-page-context", add_cards)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
