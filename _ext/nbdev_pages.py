"""Turn nbdev notebooks into clean book pages.

A notebook of this book speaks to nbdev in comment lines at the head of its
code cells (``#| export``, ``#| label: fig-hat-matrix``).  A reader should not
see them, so this Sphinx extension reads them when the page is read, takes them
out, and says the same in myst-nb's own words, the metadata of the cell.  The
file on disk, and so the download link, stays the notebook as it was written.

=========================  ==================================================
in the notebook            on the page
=========================  ==================================================
``hide``, ``default_exp``  the cell runs unseen (with ``eval: false``: is gone); if a
                           cell that a reader sees needs it, its code is folded
``eval: false``            shown, not run; so is a test flag of settings.ini
``echo: false``            output only
``output: false``          code only
``code-fold: true``        the code is folded; a folded export says what it defines
``export`` and kin         the badge "in the library" (see _static/book.css), with
                           docstrings down to their summary: all of it is on the
                           library page
``label``, ``fig-cap``     a numbered figure; the caption may hold MyST
``fig-alt``                what a screen reader says
=========================  ==================================================

Whatever is not in this table is a warning, and the book is built with warnings
as errors.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
from configparser import ConfigParser
from pathlib import Path

from sphinx.util import logging

log = logging.getLogger(__name__)

DIRECTIVE = re.compile(r"\s*#\s*\|\s*(?P<name>[\w-]+)\s*:?\s*(?P<value>.*?)\s*$")

# name -> the tag that the bare word sets
MARKS = {
    "hide": "remove-cell",
    "default_exp": "remove-cell",
    "export": "export",
    "exporti": "export",
    "exports": "export",
}
# name -> (the value that acts, the tag it sets)
SWITCHES = {
    "eval": ("false", "skip-execution"),
    "echo": ("false", "remove-input"),
    "output": ("false", "remove-output"),
    "code-fold": ("true", "hide-input"),
}
FIGURE = ("label", "fig-cap", "fig-alt")


def unquote(value: str) -> str:
    r"""The text inside YAML quotes, taken as it stands.

    The value is never parsed as YAML: a double-quoted ``\tau`` would become a
    tab and "au", and an unquoted caption could hold no colon.
    """
    if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1].replace("''", "'") if value[0] == "'" else value[1:-1]
    return value


def split_cell(source: str) -> tuple[dict[str, str], str]:
    """The directives at the head of a code cell, and the code below them."""
    lines = source.splitlines(keepends=True)
    directives = {}
    for i, line in enumerate(lines):
        if found := DIRECTIVE.match(line):
            directives[found["name"]] = unquote(found["value"])
        elif line.strip():
            return directives, "".join(lines[i:])
    return directives, ""


def tags_of(directives: dict[str, str], flags=()) -> list[str]:
    """The myst-nb tags that say what the directives said."""
    marks = {**MARKS, **dict.fromkeys(flags, "skip-execution")}
    tags = [marks[name] for name in directives if name in marks]
    tags += [tag for name, (acts, tag) in SWITCHES.items() if directives.get(name) == acts]
    return list(dict.fromkeys(tags))


def figure_of(directives: dict[str, str]) -> dict:
    """The myst-nb metadata of a figure: its name and caption, the image's alt text."""
    figure = {"name": directives.get("label"), "caption": directives.get("fig-cap")}
    figure = {key: value for key, value in figure.items() if value}
    alt = directives.get("fig-alt")
    return ({"figure": figure} if figure else {}) | ({"image": {"alt": alt}} if alt else {})


def complaints(directives: dict[str, str], flags=()) -> list[str]:
    """What is wrong with the directives of one cell, and what to do about it."""
    known = {*MARKS, *SWITCHES, *FIGURE, *flags}
    found = [
        f"'#| {name}' is no directive of this book; correct the spelling, or teach it to _ext/nbdev_pages.py"
        for name in directives
        if name not in known
    ]
    found += [
        f"'#| {name}: {directives[name]}' is neither true nor false; write one of the two"
        for name in SWITCHES
        if directives.get(name, "true") not in ("true", "false")
    ]
    label = directives.get("label")
    if label is not None and not label.startswith("fig-"):
        found.append(f"the label '{label}' should begin with 'fig-', so that {{numref}} reads well")
    if label is not None:
        found += [
            f"the figure '{label}' has no '#| {name}: …'; {why}"
            for name, why in (
                ("fig-cap", "write its caption on one line"),
                ("fig-alt", "say in a sentence what a reader who cannot see it should know"),
            )
            if not directives.get(name)
        ]
    elif "fig-cap" in directives:
        found.append("a caption without '#| label: fig-…' cannot be referred to; add the label")
    return found


def with_short_docstrings(code: str) -> str:
    """The code with each docstring cut to its first paragraph, so that a reader sees the code."""
    lines = code.splitlines()
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, documented) and ast.get_docstring(node)]
    for node in sorted(nodes, key=lambda node: -node.lineno):  # from below, so that line numbers stay true
        docstring = node.body[0]
        first, last = docstring.lineno - 1, docstring.end_lineno
        summary = next((i for i in range(first, last) if not lines[i].strip()), None)
        if summary is not None:
            lines[first:last] = [*lines[first : summary - 1], lines[summary - 1] + '"""']
    return "\n".join(lines)


def title_of(code: str, is_figure: bool = False) -> str:
    """What a fold holds, in words.

    A figure or the test of a claim is called so.  Else a comment at the head of the cell is its title, and without
    one the title says what kind of thing the cell makes: functions and classes, a table, the numbers of the text,
    what is read from records, checks, or values.  Imports come first.
    """
    body = ast.parse(code).body
    imports = ["imports"] if any(isinstance(x, (ast.Import, ast.ImportFrom)) for x in body) else []
    definitions = [x for x in body if isinstance(x, DEFINITIONS)]
    inside = [x for node in body if node not in definitions for x in ast.walk(node)]
    calls = {name for x in inside if isinstance(x, ast.Call) for name in [called(x)] if not hasattr(builtins, name)}
    if is_figure or "play" in calls:
        found = "how the figure is made"
    elif "put_to_test" in calls:
        found = "how the claim is tested"
    elif comment := re.match(r"(#.*\n)+", code.lstrip()):
        first, *rest = re.sub(r"\n?# *", " ", comment[0]).strip().rstrip(".").split(" ")
        imports, found = [], " ".join([first.lower() if first.istitle() else first, *rest])
    else:
        found = defined(definitions) if definitions else made(body, calls)
    return " and ".join(x for x in [*imports, found] if x).replace("`", "") or "what runs here"


DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def called(call: ast.Call) -> str:
    """The name by which a call calls."""
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def defined(definitions) -> str:
    """The functions and classes of a cell, by their kinds."""
    classes = [x.name for x in definitions if isinstance(x, ast.ClassDef)]
    functions = [x.name for x in definitions if not isinstance(x, ast.ClassDef)]
    checks = [name for name in functions if re.match("_?check_", name)]
    others = [name for name in functions if name not in checks]
    kinds = (("class", "classes", classes), ("function", "functions", others), ("check", "checks", checks))
    told = " and ".join(f"the {one if len(names) == 1 else many} {some(names)}" for one, many, names in kinds if names)
    summary = (ast.get_docstring(definitions[0]) or "").split("\n\n")[0]
    summary = " ".join(summary.split()).rstrip(".")
    return f"{told}: {summary}" if len(definitions) == 1 and 0 < len(summary) <= 72 else told


def made(body, calls) -> str:
    """What a cell without a definition makes: by what it calls, else by the names that it assigns."""
    statements = [x for x in body if not isinstance(x, (ast.Import, ast.ImportFrom))]
    targets = [t for x in body for t in getattr(x, "targets", [x.target] if isinstance(x, ast.AnnAssign) else [])]
    stored = [x for target in targets for x in ast.walk(target)]
    names = [x.id for x in stored if isinstance(getattr(x, "ctx", None), ast.Store) and hasattr(x, "id")]
    kinds = {
        "the numbers that the text quotes": {"quote", "quote_all"} & calls,
        "how the table is made": any("table" in name for name in calls),
        "what is read from the records": {"load_records", "read_records"} & calls,
        "the runs at the size of the profile": "profile" in calls,
        "the settings of the page": {"figure_style", "set_default_dtype"} & calls,
        "the checks of the text": statements and all(isinstance(x, ast.Assert) for x in statements),
        f"the constant{'s' * (len({*names}) > 1)} {some(names)}": names and all(x.isupper() for x in names),
        f"how {some(names)} {'is' if len({*names}) == 1 else 'are'} computed": names,
        f"the call of {some(sorted(calls))}": calls,
    }
    return next((kind for kind, holds in kinds.items() if holds), "")


def some(names) -> str:
    """Each name once, and at most four of them, as a list in words."""
    *names, last = dict.fromkeys(names) or [""]
    if len(names) > 3:
        names, last = names[:3], "others"
    return f"{', '.join(names)} and {last}" if names else last


def prompts(code: str, is_figure: bool = False) -> dict[str, str]:
    """The words on a fold of this code, closed and open, as myst-nb takes them."""
    title = title_of(code, is_figure)
    return {f"code_prompt_{do.lower()}": f"{do} {title}" for do in ("Show", "Hide")}


def scopes(table: symtable.SymbolTable):
    """A table of symbols and those inside it."""
    yield table
    for child in table.get_children():
        yield from scopes(child)


def names_of(code: str) -> tuple[set[str], set[str]]:
    """The names that a cell binds, and those that it takes from the cells before it."""
    top = symtable.symtable(code, "cell", "exec")
    imported = {s.get_name() for s in top.get_symbols() if s.is_imported()}
    bound = imported | {s.get_name() for s in top.get_symbols() if s.is_assigned()}
    taken = {
        s.get_name()
        for table in scopes(top)
        for s in table.get_symbols()
        if s.is_referenced() and (table is top or s.is_global()) and s.get_name() not in imported
    }
    return bound, taken


def needed(cells: list[dict]) -> set[int]:
    """The unseen cells that bind what a reader meets: each name comes from the last cell before that binds it, or,
    in a function that is called later, from the first one after."""
    code = {i: names_of(cell["source"]) for i, cell in enumerate(cells) if cell["cell_type"] == "code"}
    unseen = {i for i in code if "remove-cell" in cells[i]["metadata"]["tags"]}
    found, open_cells = set(), [i for i in code if i not in unseen and is_code_shown(cells[i])]
    while open_cells:
        i = open_cells.pop()
        for name in code[i][1]:
            places = [*range(i - 1, -1, -1), *range(i + 1, len(cells))]
            source = next((j for j in places if j in code and name in code[j][0]), None)
            if source in unseen - found:
                found.add(source)
                open_cells.append(source)
    return found


def is_code_shown(cell: dict) -> bool:
    """Whether a reader sees the code of a cell, if only on a click."""
    return "remove-input" not in cell["metadata"]["tags"]


def fold(cell: dict) -> dict:
    """An unseen cell with its code folded and without its output."""
    tags = [tag for tag in cell["metadata"]["tags"] if tag != "remove-cell"] + ["hide-input", "remove-output"]
    return {**cell, "metadata": {**cell["metadata"], "tags": tags, "mystnb": prompts(cell["source"])}}


def page_cell(cell: dict, flags=()) -> tuple[dict | None, list[str]]:
    """A cell as the page wants it (None: not at all), and complaints about it."""
    source = "".join(cell["source"])  # a notebook may store a list of lines
    if cell["cell_type"] != "code":
        return cell, []
    directives, code = split_cell(source)
    tags = tags_of(directives, flags)
    trouble = complaints(directives, flags)
    if not code.strip() or {"remove-cell", "skip-execution"} <= set(tags):
        return None, trouble
    if "export" in tags:
        code = with_short_docstrings(code)
    metadata = dict(cell.get("metadata", {}))
    metadata["tags"] = list(dict.fromkeys([*metadata.get("tags", []), *tags]))
    on_page = figure_of(directives)
    if "hide-input" in tags:
        on_page |= prompts(code, is_figure="figure" in on_page)
    if on_page:
        metadata["mystnb"] = {**metadata.get("mystnb", {}), **on_page}
    return {**cell, "source": code, "metadata": metadata}, trouble


def page_of(notebook: dict, flags=()) -> tuple[dict, list[str]]:
    """The notebook as the page wants it, and complaints that name the cell."""
    cells, trouble = [], []
    for number, cell in enumerate(notebook["cells"], start=1):
        shown, wrong = page_cell(cell, flags)
        first_line = next(iter("".join(cell["source"]).strip().splitlines()), "")
        trouble += [f"cell {number} ({first_line[:40]}): {what}" for what in wrong]
        cells += [shown] if shown else []
    for i in needed(cells):
        cells[i] = fold(cells[i])
    # The cache of executed notebooks compares code and kernel, not tags.  A cell that may
    # no longer run is told to it as another kernel, or the page would keep its old output.
    kernel = {"name": "python3", "display_name": "Python 3"} | notebook["metadata"].get("kernelspec", {})
    kernel["skipped"] = [i for i, cell in enumerate(cells) if "skip-execution" in cell["metadata"].get("tags", [])]
    return {**notebook, "metadata": {**notebook["metadata"], "kernelspec": kernel}, "cells": cells}, trouble


def test_flags(root: Path) -> list[str]:
    """The flags of slow tests that settings.ini names: such a cell is shown, not run."""
    settings = ConfigParser(delimiters=["="], interpolation=None)
    settings.read(root / "settings.ini")
    return settings.get("DEFAULT", "tst_flags", fallback="").replace("|", " ").split()


def read_notebook(app, docname: str, source: list[str]) -> None:
    """Sphinx is about to parse a page: hand it the notebook without nbdev's words."""
    path = Path(app.env.doc2path(docname))
    if path.suffix != ".ipynb":
        return
    notebook, trouble = page_of(json.loads(source[0]), test_flags(Path(app.srcdir)))
    for what in trouble:
        log.warning("%s, %s", path.relative_to(app.srcdir), what, location=docname, type="nbdev")
    source[0] = json.dumps(notebook)


def setup(app):
    app.connect("source-read", read_notebook)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
