"""The decorator that holds the theorems is itself held."""

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from claims import Disagreement, claim, compare

numbers = st.floats(-10, 10)


def made(sides, mutant=lambda x: (x, x + 1.0), **options):
    """The test that `claim` makes of a claim called thm-tried."""

    def test_thm_tried(x):
        """A claim."""
        return sides(x)

    return claim(numbers, **dict(tolerance=1e-10) | options, mutant=mutant)(test_thm_tried)


def test_a_true_claim_with_a_false_mutant_passes():
    made(lambda x: (x + x, 2 * x))()


def test_a_false_claim_fails_and_says_by_how_much():
    with pytest.raises(Disagreement, match="1e-06"):
        made(lambda x: (x, x + 1e-6))()


def test_a_claim_false_on_few_inputs_fails():
    with pytest.raises(Disagreement):
        made(lambda x: (abs(x), x))()


def test_a_mutant_that_survives_fails_with_the_label():
    with pytest.raises(AssertionError, match="thm-tried"):
        made(lambda x: (x, x), mutant=lambda x: (x, x + 1e-14))()


def test_a_mutant_must_be_rejected_for_its_values():
    with pytest.raises(AssertionError, match="shapes"):
        made(lambda x: (x, x), mutant=lambda x: (np.ones(2), np.ones(3)))()


def test_a_mutant_that_crashes_is_no_mutant():
    with pytest.raises(ZeroDivisionError):
        made(lambda x: (x, x), mutant=lambda x: 1 / 0)()


def test_a_bound_may_be_loose_but_not_broken():
    def above(x):
        return x + 1.0, x

    made(lambda x: (x, x + 1.0), mutant=above, relation="<=")()
    with pytest.raises(Disagreement, match="off by 1"):
        made(above, mutant=above, relation="<=")()


def test_the_tolerance_grows_with_the_right_side_only_above_one():
    compare(1e6 + 1e-5, 1e6, tolerance=1e-10)
    with pytest.raises(Disagreement):
        compare(1e-3 + 1e-9, 1e-3, tolerance=1e-10)


@pytest.mark.parametrize("value", [np.nan, np.inf, [1.0, np.nan]])
def test_nan_and_infinity_fail(value):
    with pytest.raises(Disagreement):
        compare(np.asarray(value), np.asarray(value), tolerance=1e-10)


@pytest.mark.parametrize("relation", ["==", "<="])
@pytest.mark.parametrize("right", [[np.inf, 1.0], [-np.inf, 1.0], [np.nan, 1.0]])
def test_a_right_side_that_is_not_finite_allows_nothing(relation, right):
    with pytest.raises(Disagreement):
        compare(np.zeros(2), np.asarray(right), tolerance=1e-10, relation=relation)


@pytest.mark.parametrize("value", [np.float32(1), torch.ones(3), 1, True, 1 + 0j])
def test_only_double_precision_is_compared(value):
    with pytest.raises(AssertionError, match="float64"):
        compare(value, value, tolerance=1.0)


def test_tensors_arrays_and_numbers_are_all_welcome():
    compare(torch.ones(2, dtype=torch.float64, requires_grad=True), np.ones(2), tolerance=1e-10)
    compare(1.0, np.float64(1), tolerance=1e-10)


def test_nothing_is_broadcast():
    with pytest.raises(AssertionError, match="shapes"):
        compare(np.ones((2, 1)), np.ones(2), tolerance=1.0)


def test_an_empty_side_claims_nothing():
    with pytest.raises(AssertionError, match="empty"):
        compare(np.ones(0), np.ones(0), tolerance=1.0)


def test_the_made_test_keeps_its_name_and_sentence_and_asks_for_no_fixture():
    test = made(lambda x: (x, x))
    assert test.__name__ == "test_thm_tried"
    assert test.__doc__ == "A claim."
    assert test.__code__.co_argcount == 0


def test_a_claim_states_itself():
    with pytest.raises(TypeError):
        claim(numbers, tolerance=1e-10, mutant=None)(lambda x: (x, x))


def test_only_two_relations_exist():
    with pytest.raises(ValueError, match="'>='"):
        claim(numbers, tolerance=1e-10, mutant=None, relation=">=")
