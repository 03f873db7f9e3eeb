"""The layers compute what they computed before they were rebuilt."""

import json
from pathlib import Path

import pytest

from layer_numbers import numbers

BEFORE = json.loads((Path(__file__).parents[1] / "support" / "layer_numbers.json").read_text())


@pytest.fixture(scope="module")
def now():
    return numbers()


def test_no_case_is_new_or_gone(now):
    assert now.keys() == BEFORE.keys()


@pytest.mark.parametrize("layer", sorted({title.split()[0] for title in BEFORE}))
def test_outputs_gradients_and_starts_are_the_same_numbers(layer, now):
    for title, before in BEFORE.items():
        if title.split()[0] == layer:
            for x, y in zip(before, now[title], strict=True):
                if not x.lstrip("-").startswith("0x"):
                    assert x == y, title  # a name, or the kind of an error
                else:
                    assert float.fromhex(y) == pytest.approx(float.fromhex(x), rel=1e-11, abs=1e-11), title
