"""What numbers and arrays of them may be."""

import numpy as np
import pytest
from refusals import refused

from gbattn.ground.arrays import check_numbers, joint_arrays, within_float64


def positive(x):
    return x > 0


@pytest.mark.parametrize("value", [1, 2.5, [1, 2], np.ones((2, 3)), np.int32(3)])
def test_numbers_are_returned_in_double_precision(value):
    found = check_numbers("q", value, "numbers above 0", positive)
    assert found.dtype == np.float64 and np.array_equal(found, value)


@pytest.mark.parametrize("value", ["1", True, None, [True], 10**400, [[1], [2, 3]], -1, [1, 0], np.nan])
def test_what_is_no_number_or_breaks_the_rule_is_refused(value):
    with refused("q"):
        check_numbers("q", value, "numbers above 0", positive)


def test_arrays_take_the_shape_to_which_they_broadcast():
    q, p = joint_arrays(q=[1, 2], p=[[3], [4]])
    assert q.tolist() == [[1, 2], [1, 2]] and p.tolist() == [[3, 3], [4, 4]]
    with refused("q, p"):
        joint_arrays(q=[1, 2], p=[1, 2, 3])


@pytest.mark.parametrize("spoil", [lambda x: x * 1e308, lambda x: x / 0, lambda x: np.log(-x)])
def test_a_number_that_float64_cannot_hold_is_refused(spoil):
    x = np.array([10.0])
    with refused("depth"), within_float64("depth", "9", "fewer blocks"):
        spoil(x)
    with within_float64("depth", "9", "fewer blocks"):
        assert (2 * x).item() == 20
