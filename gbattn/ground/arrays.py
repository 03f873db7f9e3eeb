"""Numbers and NumPy arrays of them: what they may be, and what float64 can hold."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from gbattn.ground.arguments import ArgumentError, require


def check_numbers(name: str, value: object, want: str, holds: Callable) -> np.ndarray:
    """Return the values as float64, if they are numbers and `holds` is true of each."""
    try:
        real = np.asarray(value).dtype.kind in "iufO"  # no truth values, no strings
        numbers = np.asarray(value, dtype=float)
    except (OverflowError, TypeError, ValueError):
        real = False
    require(real, name, repr(value), want)
    good = np.broadcast_to(holds(numbers), numbers.shape)
    if not good.all():
        raise ArgumentError(name, f"{numbers[~good].flat[0]:g}", want)
    return numbers


def joint_arrays(**values: object) -> list[np.ndarray]:
    """Return the values as float64, in the shape to which they broadcast."""
    anything = lambda x: True
    arrays = [check_numbers(name, x, "numbers", anything) for name, x in values.items()]
    try:
        return np.broadcast_arrays(*arrays)
    except ValueError:
        got = ", ".join(str(array.shape) for array in arrays)
        raise ArgumentError(", ".join(values), got, "shapes that broadcast") from None


@contextmanager
def within_float64(name: str, got: str, want: str) -> Iterator[None]:
    """Inside, a number that overflows or is undefined raises an `ArgumentError` of these words."""
    try:
        with np.errstate(over="raise", divide="raise", invalid="raise"):
            yield
    except ArithmeticError:
        raise ArgumentError(name, f"{got} leaves float64", want) from None
