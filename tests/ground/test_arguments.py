"""What an argument may be, and the error that names the one that is not."""

import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused

from gbattn.ground import arguments
from gbattn.ground.arguments import ArgumentError, divisor_of, require


def test_an_error_is_its_three_fields():
    require(True, "x", 1, "anything")
    with pytest.raises(ArgumentError) as caught:
        require(False, "depth", -1, "a positive integer")
    error = caught.value
    assert isinstance(error, ValueError) and str(error) == "depth: got -1; want a positive integer"
    assert (error.argument, error.got, error.want) == ("depth", -1, "a positive integer")
    again = pickle.loads(pickle.dumps(error))  # from the process of another run
    assert type(again) is ArgumentError and again.args == error.args and str(again) == str(error)


@pytest.mark.parametrize(
    ("x", "number", "integer", "count"),
    [
        (3, True, True, True),
        (np.int32(3), True, True, True),
        (0, True, True, False),
        (-2, True, True, False),
        (2.0, True, False, False),
        (np.float32(0.5), True, False, False),
        (math.inf, False, False, False),
        (10**400, False, True, True),
        (math.nan, False, False, False),
        (True, False, False, False),
        (np.True_, False, False, False),
        ("3", False, False, False),
        (None, False, False, False),
        (1j, False, False, False),
    ],
    ids=repr,
)
def test_what_counts_as_a_number(x, number, integer, count):
    assert arguments.is_number(x) is number
    assert arguments.is_integer(x) is integer
    assert arguments.is_count(x) is count


@pytest.mark.parametrize("value", ["False", "yes", None, 0, 1, np.bool_(True), torch.tensor(True)], ids=repr)
def test_a_flag_is_true_or_false(value):
    for flag in (True, False):
        arguments.check_flag("causal", flag)
    with refused("causal"):
        arguments.check_flag("causal", value)


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        (arguments.NUMBER, [0, -1.5, np.float32(2)], [True, None, "1", math.inf, math.nan]),
        (arguments.POSITIVE, [1, 0.5], [0, -1, math.inf, torch.ones(2)]),
        (arguments.NOT_NEGATIVE, [0, 0.5], [-1e-9, math.nan]),
        (arguments.FRACTION, [0, 1, 0.5], [1.01, -0.01, "half"]),
        (arguments.PROBABILITY, [0, 0.99], [1, -0.1]),
        (arguments.COUNT, [1, np.int64(3)], [0, 1.0, True, None]),
        (arguments.up_to(3), [1, np.int64(3)], [0, 4, 10**400, 1.0, True]),
        (arguments.LENGTH, [0, 2], [-1, 0.0, False]),
        (arguments.SEED, [0, 2**32 - 1], [2**32, -1]),
        (arguments.FLAG, [True, False], [0, 1, "False", None]),
        (arguments.one_of("a", "b", None), ["a", "b", None], ["c", ["a"], False]),
        (arguments.one_of(False, True), [False, True], [0, 1, None, "True"]),
        (arguments.optional(arguments.COUNT), [None, 3], [0, "3"]),
        (arguments.list_of(arguments.COUNT), [[], [1, 2]], [None, (1,), [1, 0]]),
    ],
)
def test_a_rule_is_a_test_and_its_words(rule, good, bad):
    for value in good:
        arguments.check(size=(value, rule))
    for value in bad:
        with refused("size") as caught:
            arguments.check(size=(value, rule))
        assert caught.value.want == rule[1]


def test_checks_name_the_first_argument_that_breaks_its_rule():
    with refused("b") as caught:
        arguments.check(a=(1, arguments.COUNT), b=(torch.ones(2, 2), arguments.COUNT), c=(0, arguments.COUNT))
    assert caught.value.got == "shape (2, 2), torch.float32"  # and not its numbers
    config = SimpleNamespace(a=1, b="x")
    with refused("b"):
        arguments.check_fields(config, {"a": arguments.COUNT, "b": arguments.one_of("y", "z")})
    rules = {"a.b": arguments.COUNT}
    arguments.check_entries("file", {"a": {"b": 1}}, rules, "copy it")
    for found in ({}, [], {"a": 1}, {"a": {}}):
        with refused("file, a.b") as caught:
            arguments.check_entries("file", found, rules, "copy it")
        assert caught.value.got == "nothing" and caught.value.want.endswith(": copy it")


def test_a_compiler_traces_checks_of_sizes_that_change():
    def half(x, p):
        arguments.check(size=(x.shape[0], arguments.COUNT), p=(p, arguments.PROBABILITY))
        return x / 2

    compiled = torch.compile(half, fullgraph=True, dynamic=True, backend="eager")
    for n in (2, 3, 5):
        assert torch.equal(compiled(torch.ones(n), 0.5), torch.ones(n) / 2)


def test_a_divisor_is_a_positive_integer_that_divides():
    holds, want = divisor_of("D", 8)
    assert [n for n in (-2, 0, 1, 2, 2.0, True, 3, 8, 16) if holds(n)] == [1, 2, 8] and want() == "a divisor of D = 8"


def test_a_keyword_that_nothing_reads_is_refused():
    arguments.check_keywords(dict(known=1, unknown=None), "known", "other")
    with refused("unknown"):
        arguments.check_keywords(dict(known=1, unknown=2), "known", "other")


def test_numbers_of_layers_are_different_ones_in_order():
    assert arguments.check_numbers_of_layers(None, 3) == [0, 1, 2]
    assert arguments.check_numbers_of_layers((i for i in (np.int64(2), 0)), 3) == [0, 2]
    for layers in ([], [3], [-1], [0, 0], [0.0], [True], 1, ["0"]):
        with refused("layers"):
            arguments.check_numbers_of_layers(layers, 3)
