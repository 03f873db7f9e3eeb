"""On a phone the rows of a table are cards: each cell below the other, with its column's heading.

The last columns, where the verdicts stand, would lie beyond the edge of the screen.  _static/book.css draws the cards;
here each cell is told its heading, and what is no table to look at stays one to a screen reader.  Long lists stay
tables, and so do tables of two columns and those whose rows fit on one line of a phone.  In all of them a heading says
whether it is one of a column or of a row.
"""

from __future__ import annotations

import re
from html import escape, unescape

ROWS, COLUMNS = 14, 3  # at most, and at least
LINE, PADDING = 34, 2  # letters on a line of a phone, and what stands between columns
NARROW = 4  # book.css gives more columns than these a width that no phone has
TABLE = re.compile(r'<table class="table">(.*?)</table>', re.DOTALL)
HEAD, ROW, CELL = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL), re.compile(r"<tr\b"), re.compile(r"<td\b")
INSIDE = re.compile(r"<td\b[^>]*>(.*?)</td>", re.DOTALL)
TOP, UNSAID = re.compile(r"<thead\b.*?</thead>", re.DOTALL), re.compile(r"<th\b(?![^>]*\bscope=)")


def text_of(cell: str) -> str:
    return unescape(re.sub(r"<[^>]*>", "", cell)).strip()


def fits_a_phone(heads: list[str], rows: list[str]) -> bool:
    """Whether each row has room on one line; a heading may be broken between words."""
    widths = [max(map(len, head.split()), default=0) for head in heads]
    for row in rows:
        widths = [max(width, len(text_of(cell))) for width, cell in zip(widths, INSIDE.findall(row), strict=True)]
    return len(heads) <= NARROW and sum(widths) + PADDING * len(heads) <= LINE


def with_cards(table: re.Match) -> str:
    """A table whose cells know their headings, if it is one for cards."""
    head, bar, body = table[1].partition("<tbody>")
    heads, rows = [text_of(one) for one in HEAD.findall(head)], ROW.split(body)[1:]
    is_plain = bar and 'class="math' not in head and all(len(CELL.findall(row)) == len(heads) for row in rows)
    if not is_plain or len(heads) < COLUMNS or len(rows) > ROWS or fits_a_phone(heads, rows):
        return table[0]
    labels = iter([escape(one) for one in heads] * len(rows))
    body = CELL.sub(lambda _: f'<td role="cell" data-label="{next(labels)}"', body)
    head = re.sub(r"<th\b", '<th role="columnheader"', head.replace("<thead>", '<thead role="rowgroup">'))
    inside = ROW.sub('<tr role="row"', head + '<tbody role="rowgroup">' + body)
    return f'<table class="table cards" role="table">{inside}</table>'


def with_scopes(html: str) -> str:
    """A page whose headings stand for their column at the top of a table, else for their row, if they do not say."""
    html = TOP.sub(lambda top: UNSAID.sub('<th scope="col"', top[0]), html)
    return UNSAID.sub('<th scope="row"', html)


def add_cards(app, pagename, templatename, context, doctree):
    if doctree is not None:
        context["body"] = with_scopes(TABLE.sub(with_cards, context["body"]))


def setup(app):
    app.connect("html-page-context", add_cards)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
