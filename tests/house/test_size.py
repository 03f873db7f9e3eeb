"""How large the house is, what of it a reader sees, and how much of it is checks: each number is measured, and held.

Where a limit is looser than the aim beside it, it says how far the house has come; it may only be tightened.
"""

import ast
import re
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from nbdev_pages import called, split_cell, tags_of, with_short_docstrings

import gbattn

ROOT = Path(__file__).parents[2]
MODULES = [path for path in sorted((ROOT / "gbattn").rglob("*.py")) if path.name not in ("_modidx.py", "__init__.py")]


def lines_of(node, text):
    """The lines of a definition, without docstrings, blank lines and comments."""
    start = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    lines = set(range(start, node.end_lineno + 1))
    for inner in ast.walk(node):
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(inner):
            lines -= set(range(inner.body[0].lineno, inner.body[0].end_lineno + 1))
    source = text.splitlines()
    return [i for i in lines if source[i - 1].strip() and not source[i - 1].lstrip().startswith("#")]


def definitions(kinds):
    for path in MODULES:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds):
                yield f"{path.relative_to(ROOT)}, {node.name}", len(lines_of(node, text))


def longest(found, most):
    return {name: n for name, n in found if n > most}


def test_modules_are_short():
    """At most 900 lines."""
    assert not longest(((str(path.relative_to(ROOT)), len(path.read_text().splitlines())) for path in MODULES), 900)


def test_classes_are_short():
    """Aim: 250 lines without docstrings."""
    assert not longest(definitions(ast.ClassDef), 250)


def test_functions_are_short():
    """Aim: 60 lines without docstrings."""
    assert not longest(definitions((ast.FunctionDef, ast.AsyncFunctionDef)), 60)


def exported_cells():
    """(how it is shown, its code on the page) of each cell that writes the library."""
    for path in sorted((ROOT / "nbs").glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            head, body = split_cell(cell.source) if cell.cell_type == "code" else ({}, "")
            if "export" in head:
                tags = tags_of(head)
                shown = "hidden" if "remove-cell" in tags else "folded" if "hide-input" in tags else "open"
                yield shown, with_short_docstrings(body).strip()


def test_a_reader_sees_what_a_page_exports():
    """Aim: 40 % open."""
    cells = [(shown, len(code.splitlines())) for shown, code in exported_cells()]
    seen = sum(n for shown, n in cells if shown == "open")
    assert seen / sum(n for _, n in cells) >= 0.4


def test_folded_cells_are_short():
    """At most 40 lines; longer ones are cut where a reader would. A class is not cut for the page."""
    for shown, code in exported_cells():
        if shown != "open" and len(code.splitlines()) > 40:
            classes = [isinstance(node, ast.ClassDef) for node in ast.parse(code).body]
            functions = [isinstance(node, ast.FunctionDef) for node in ast.parse(code).body]
            assert sum(classes) == 1 and not any(functions), code[:200]


CHECKS = re.compile(r"_?check\w*$|_?require$")


def is_check(node):
    """Whether a statement does nothing but check an argument of a caller."""
    if isinstance(node, ast.Raise):
        return isinstance(node.exc, ast.Call) and called(node.exc) == "ArgumentError"
    if isinstance(node, ast.If):
        return not node.orelse and all(map(is_check, node.body))
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and bool(CHECKS.match(called(call)))


def as_one(tree, text):
    """A module as one definition."""
    return ast.ClassDef("module", [], [], tree.body, [], lineno=1, end_lineno=len(text.splitlines()))


def test_checks_are_a_small_part_of_the_code():
    """Aim: a tenth."""
    checks = code = 0
    for path in MODULES:
        if path.parent.name == "ground":
            continue
        text = path.read_text()
        tree = ast.parse(text)
        code += len(lines_of(as_one(tree, text), text))
        checks += sum(node.end_lineno - node.lineno + 1 for node in ast.walk(tree) if is_check(node))
    assert checks / code <= 0.1


def frames(call):
    """The frames of this library's Python in one call, after a first one."""
    call()
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event == "call" and str(ROOT / "gbattn") in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(
    ("layer", "most"),
    [(gbattn.MultiHeadAttention, 20), (gbattn.TwicingAttention, 30), (gbattn.GradientBoostedAttention, 40)],
)
def test_a_call_of_a_layer_passes_few_frames(layer, most):
    layer, x = layer(64, 4), torch.randn(2, 16, 64)
    assert frames(lambda: layer(x, causal=True)) <= most


def test_a_call_of_a_model_passes_few_frames():
    sizes = dict(vocab_size=64, max_length=16, d_model=64, n_layers=2, n_heads=4)
    model = gbattn.LanguageModel(gbattn.ModelConfig(**sizes, attention="boosted"))
    tokens = torch.randint(64, (2, 16))
    assert frames(lambda: model(tokens)) <= 130
