"""How a test holds a theorem of the book.

A claim is a function of one drawn problem that returns the two sides of the
theorem.  It is worth something only if a false version of it, the mutant, is
caught by the same check, so each claim comes with one::

    @claim(problems(), tolerance=1e-10, mutant=lambda p: (hat(p), hat(p) + 1e-3))
    def test_thm_score_is_hat(p):
        \"""With whitened keys the score matrix is the hat matrix.\"""
        return scores(p), hat(p)

The name of the test is the theorem's label with - replaced by _.
"""

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings

EXAMPLES = 60


class Disagreement(AssertionError):
    """The two sides of a claim differ by more than it allows."""


def as_float64(value, side):
    """A side of the claim as an array; anything but double precision is refused."""
    array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    assert array.dtype == np.float64, f"the {side} side is {array.dtype}; a claim is checked in float64"
    assert array.size, f"the {side} side is empty, so it claims nothing"
    return array


def compare(left, right, tolerance, relation="=="):
    """Raise unless left == right (or left <= right) to within tolerance * max(1, max|right|), and right is finite."""
    left, right = as_float64(left, "left"), as_float64(right, "right")
    assert left.shape == right.shape, f"the sides have shapes {left.shape} and {right.shape}"
    if not np.isfinite(right).all():  # an infinite right side would allow everything
        raise Disagreement("the right side is not finite")
    allowed = tolerance * max(1.0, np.abs(right).max())
    with np.errstate(invalid="ignore"):  # NaN fails below
        excess = (np.abs(left - right) if relation == "==" else left - right).max()
    if not excess <= allowed:
        raise Disagreement(f"left {relation} right is off by {excess:.3g}; {allowed:.3g} is allowed")


def over(inputs, check, examples, phases=tuple(Phase)):
    """Run the check on drawn inputs, the same ones every time."""

    @settings(
        max_examples=examples,
        phases=phases,
        derandomize=True,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(inputs)
    def run(problem):
        check(problem)

    run()


def claim(inputs, *, tolerance, mutant, relation="==", examples=EXAMPLES):
    """Make one test of a claim: it holds on drawn inputs, and its mutant does not.

    Parameters
    ----------
    inputs : hypothesis strategy
        Draws the one argument of the claim and of its mutant.
    tolerance : float
        Relative to max(1, max|right|).
    mutant : callable
        A false version of the claim: the same argument, two sides again.
    relation : "==" or "<="
        What the claim says of left and right, entry by entry.
    examples : int
        How many problems are drawn.
    """
    if relation not in ("==", "<="):
        raise ValueError(f"relation is {relation!r}; a claim says '==' or '<='")

    def decorate(sides):
        label = sides.__name__.removeprefix("test_").replace("_", "-")
        if not (sides.__doc__ or "").strip():
            raise TypeError(f"the test of {label} has no docstring; state the claim in one sentence")

        def check(compute):
            return lambda problem: compare(*compute(problem), tolerance, relation)

        def test():
            over(inputs, check(sides), examples)
            try:  # one rejected example is enough: no need to shrink it
                over(inputs, check(mutant), examples, phases=(Phase.generate,))
            except Disagreement:
                return
            raise AssertionError(f"the check of {label} accepts a false version of the claim, so it checks nothing")

        # Not functools.wraps: pytest would take the claim's argument for a fixture.
        test.__name__, test.__qualname__ = sides.__name__, sides.__qualname__
        test.__doc__, test.__module__ = sides.__doc__, sides.__module__
        return test

    return decorate
