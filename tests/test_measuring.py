"""How the benchmarks take turns, and what they make of the times. Nothing here is timed."""

import math
import random
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
from measuring import Times, take_turns


@pytest.mark.parametrize(("turns", "low", "high"), [(3, 1, 3), (6, 1, 6), (9, 2, 8), (15, 4, 12), (45, 16, 30)])
def test_a_ratio_has_the_interval_of_the_sign_test(turns, low, high):
    order = random.Random(turns).sample(range(1, turns + 1), turns)
    ratio = Times(tuple(float(i) for i in order)).over(Times((1.0,) * turns))
    assert ratio == ((turns + 1) / 2, low, high)


def test_the_interval_covers_the_median_as_often_as_it_says():
    draw, ones = random.Random(0), Times((1.0,) * 15)
    ratios = (Times(tuple(math.exp(draw.gauss(0, 0.1)) for _ in range(15))).over(ones) for _ in range(2000))
    share = sum(ratio.low <= 1 <= ratio.high for ratio in ratios) / 2000
    assert 0.95 < share < 0.98  # 0.965, since turns come whole


def test_a_drift_of_the_machine_cancels_in_a_ratio_and_not_in_the_medians():
    drift = (1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0)
    half = Times((1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0))  # the second of each turn meets the change one turn later
    assert Times(drift).over(half).median == 1.0
    assert Times(drift).median / half.median == 2.0
    assert not Times(drift).over(half).known_to(0.5)
    assert Times(drift).over(Times(drift)).known_to(0.0)


def test_turns_alternate_and_go_on_until_the_times_are_enough():
    said = []
    methods = {name: lambda name=name: said.append(name) for name in "ab"}
    timed = take_turns(methods, 2, settle=0.0, patience=5, enough=lambda times: len(times["a"].seconds) == 4)
    assert said == ["a", "b"] * 4
    assert [len(times.seconds) for times in timed.values()] == [4, 4]
    assert len(take_turns(methods, 2, settle=0.0, patience=3, enough=lambda times: False)["b"].seconds) == 6
    assert len(take_turns(methods, 2, settle=0.0)["b"].seconds) == 2
