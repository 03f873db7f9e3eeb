"""The library pages list what there is: every public name once, by module, and the front door first."""

import importlib
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import gbattn

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "nbs" / "api.md").read_text()
LISTED = [
    name
    for path in sorted((ROOT / "nbs").glob("api_*.md"))
    for name in re.findall(r"automodule:: (gbattn[\w.]*)\n   :members:", path.read_text())
]
FRONT = PAGE.partition("## The front door")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"```python\n(.*?)```", FRONT, re.S)


def modules():
    """The modules that a reader imports: one a chapter, and those written by hand."""
    for path in sorted((ROOT / "gbattn").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        if path.name == "__init__.py" and parts[1:-1] not in ((), ("ground",), ("lab",)):
            yield ".".join(parts[:-1])
        if not path.name.startswith("_"):
            yield ".".join(parts)


def test_the_pages_have_each_module_once():
    assert Counter(LISTED) == Counter(modules())


def test_the_first_page_leads_to_the_others():
    assert {path.name for path in (ROOT / "nbs").glob("api_*.md")} == set(re.findall(r"\((api_\w+\.md)\)", PAGE))


@pytest.mark.parametrize("module", [*modules()])
def test_a_public_name_has_a_docstring(module):
    pytest.importorskip("transformers") if module.endswith("pretrained") else None
    found = importlib.import_module(module)
    names = getattr(found, "__all__", [name for name in vars(found) if not name.startswith("_")])
    own = [vars(found).get(name) for name in names]
    assert all(x.__doc__ for x in own if getattr(x, "__module__", None) == module and callable(x))


def test_the_front_door_comes_first_with_an_example_of_each_name():
    assert PAGE.index("## The front door") < PAGE.index("(api_")
    for name in gbattn.__all__:
        assert len(re.findall(rf"\*\*{name}\*\*", FRONT)) == 1
        assert any(re.search(rf"\b{name}\(|, {name}\)", example) for example in EXAMPLES), name


def test_the_examples_run():
    names = {name: getattr(gbattn, name) for name in gbattn.__all__} | {"torch": torch, "x": torch.randn(2, 16, 64)}
    for example in EXAMPLES:
        exec(example, names)
