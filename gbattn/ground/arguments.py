"""What an argument may be, and the error that names the one that is not: no array, no torch."""

import math
import os
import reprlib
import sys
from collections.abc import Callable, Iterable
from numbers import Integral, Real

from gbattn.ground.terminal import printable


class ArgumentError(ValueError):
    """A bad argument: its message is ``argument: got …; want …``. All three are attributes, so that nobody needs to
    read them out of the message.

    Parameters
    ----------
    argument : str
        The name of the argument, as the caller wrote it, or of the file that is at fault.
    got : object
        What was passed: a short description, not the array itself.
    want : str
        What would be accepted.
    """

    def __init__(self, argument: str, got: object, want: str):
        super().__init__(argument, got, want)
        self.argument, self.got, self.want = argument, got, want

    def __str__(self) -> str:
        return printable(f"{self.argument}: got {self.got}; want {self.want}")


def require(condition: bool, argument: str, got: object, want: str) -> None:
    """Raise the `ArgumentError` of these three unless `condition` holds."""
    if not condition:
        raise ArgumentError(argument, got, want)


def is_number(x: object) -> bool:
    """Whether x is a finite real number of Python or NumPy, but not a bool."""
    if not isinstance(x, Real) or isinstance(x, bool):
        return False
    if isinstance(x, float):  # what torch.compile can follow where it is a symbol
        return bool(-math.inf < x < math.inf)
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer of more than 308 digits
        return False


def is_integer(x: object) -> bool:
    """Whether x is an integer of Python or NumPy, but not a bool."""
    return isinstance(x, Integral) and not isinstance(x, bool)


def is_count(x: object) -> bool:
    """Whether x is a positive integer of Python or NumPy, but not a bool."""
    return is_integer(x) and int(x) > 0


Rule = tuple[Callable[[object], bool], str]


def number(want: str, holds: Callable[[float], bool]) -> Rule:
    """The rule for a finite number for which `holds` is true."""
    return lambda x: is_number(x) and holds(x), want


def integer(want: str, holds: Callable[[int], bool]) -> Rule:
    """The rule for an integer for which `holds` is true."""
    return lambda x: is_integer(x) and holds(x), want


def one_of(*choices: object) -> Rule:
    """The rule of a string, True, False or None among `choices`."""
    names = tuple(choice for choice in choices if isinstance(choice, str))
    others = tuple(choice for choice in choices if not isinstance(choice, str))

    def holds(x):
        return x in names if isinstance(x, str) else any(x is one for one in others)

    return holds, "one of " + ", ".join(map(repr, choices))


def optional(rule: Rule) -> Rule:
    """The rule for what may also be None."""
    holds, want = rule
    return lambda x: x is None or holds(x), f"None or {want}"


def list_of(rule: Rule) -> Rule:
    """The rule of a list whose entries all obey a rule."""
    holds, want = rule
    return (
        lambda x: isinstance(x, list) and all(map(holds, x)),
        f"a list, each {want}",
    )


def instance(kind: type, want: str) -> Rule:
    """The rule of an instance of a class."""
    return lambda x: isinstance(x, kind), want


NUMBER: Rule = is_number, "a finite number"
FLOAT: Rule = (  # infinite and NaN, too
    lambda x: isinstance(x, (int, float)) and not isinstance(x, bool),
    "a number",
)
POSITIVE = number("a positive, finite number", lambda x: x > 0)
NOT_NEGATIVE = number("a finite number, 0 or more", lambda x: x >= 0)
POSITIVE_OR_INFINITE: Rule = (
    lambda x: (isinstance(x, float) and x == math.inf) or (is_number(x) and x > 0),
    "a positive number or math.inf",
)
FRACTION = number("a number from 0 to 1", lambda x: 0 <= x <= 1)
BETWEEN_0_AND_1 = number("a number between 0 and 1", lambda x: 0 < x < 1)
PROBABILITY = number("a probability from 0 up to 1", lambda x: 0 <= x < 1)
INTEGER: Rule = is_integer, "an integer"
COUNT: Rule = is_count, "a positive integer"
LENGTH = integer("an integer, 0 or more", lambda x: x >= 0)
SEED = integer("an integer from 0 to 2**32 - 1", lambda x: 0 <= x < 2**32)
PATH: Rule = (
    lambda x: isinstance(x, str | os.PathLike) and x != "",
    "a path; the current folder is '.'",
)
FLAG = instance(bool, "True or False")
STRING = instance(str, "a string")
DICTIONARY = instance(dict, "a dictionary")


def up_to(most: int) -> Rule:
    """The rule for a positive integer up to `most`: a size that may come from a file."""
    return integer(f"a positive integer up to {most:,}", lambda x: 0 < x <= most)


# Of what is repeated, such as layers and rounds.
REPEATS = up_to(1000)


def divisor_of(name: str, n: int) -> Rule:
    """The rule for a divisor of a named size."""
    return (
        lambda x: is_count(x) and n % x == 0,
        lambda: f"a divisor of {name} = {n}",
    )


def check(**arguments: tuple[object, Rule]) -> None:
    """Check arguments, each given as ``name=(value, rule)``.

    A rule is a pair: a predicate, and either the words for what it accepts or a
    function that returns them.
    """
    for name, (value, (holds, want)) in arguments.items():
        # Nothing is formatted before a check fails: to format a size would tell a
        # compiler that the size never changes.
        if not holds(value):
            want = want if isinstance(want, str) else want()
            raise ArgumentError(name, describe(value), want)


def check_fields(owner: object, rules: dict[str, Rule]) -> None:
    """Check those attributes of an object that have a rule."""
    check(**{name: (getattr(owner, name), rule) for name, rule in rules.items()})


def check_keys(name: str, options: object, known: tuple[str, ...]) -> None:
    """Check that an argument is a dictionary with no other keys than these."""
    check(**{name: (options, DICTIONARY)})
    for key in options:
        require(key in known, name, f"the key {key!r}", f"one of {', '.join(known)}")


def check_keywords(keywords: dict, *known: str) -> None:
    """Check that something reads each keyword of a call; one that is None says nothing."""
    for name, value in keywords.items():
        fits = value is None or name in known
        require(fits, name, "a keyword that nothing reads", "that it is left out")


def check_numbers_of_layers(layers: object, n: int) -> list[int]:
    """Return the numbers of some of n layers, in order, if they are different ones; all if `layers` is None."""
    want = f"different numbers from 0 to {n - 1}"
    require(isinstance(layers, Iterable | None), "layers", layers, want)
    numbers = [*range(n)] if layers is None else [*layers]
    fits = numbers and len({*numbers}) == len(numbers)
    fits = fits and all(is_integer(i) and 0 <= i < n for i in numbers)
    require(fits, "layers", numbers, want)
    return sorted(map(int, numbers))


def check_entries(where: object, found: object, rules: dict[str, Rule], cure: str):
    """Check the entries of a JSON object, nested ones by their dotted names."""
    for entry, (holds, want) in rules.items():
        value = found
        for name in entry.split("."):
            value = value.get(name, ...) if isinstance(value, dict) else ...
        got = "nothing" if value is ... else reprlib.repr(value)
        require(holds(value), f"{where}, {entry}", got, f"{want}: {cure}")


def describe(x: object) -> str:
    """Shape and dtype of a tensor; of anything else the first 200 characters."""
    torch = sys.modules.get("torch")  # who passes a tensor has loaded it
    if torch and isinstance(x, torch.Tensor):
        return f"shape {tuple(x.shape)}, {x.dtype}"
    return repr(x)[:200]


def check_flag(name: str, value: object) -> None:
    """Require Python's own True or False, since a string such as "False" is true."""
    check(**{name: (value, FLAG)})
