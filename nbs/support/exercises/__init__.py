"""Whether an answer to an exercise of the book is right and, where it is not, a hint.

    from support import exercises

    exercises.check("07")          # what the exercises of chapter 7 want, and what their dots mean
    exercises.check("07.1", 44)    # whether this answers the first

The number is that above the exercise on its page. What is right is computed by the library. Exercises that ask for a
proof or an opinion have no check.
"""

import difflib
import re
import textwrap
from dataclasses import dataclass, field

from support.exercises import boosting, language, more, regression  # noqa: F401
from support.exercises.form import fields
from support.exercises.table import EXERCISES

_NOTHING = object()
_MARKS = (
    "● a minute, ●● a quarter of an hour, ●●● an evening. What takes Python is checked in "
    "the notebook: on a page of the book the rocket opens it on Colab."
)


@dataclass(frozen=True)
class Verdict:
    """Whether an answer is right, and a sentence that says so; or the exercises of a
    chapter, which a browser shows with fields for the answers."""

    right: bool
    words: str
    listed: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self.right

    def __repr__(self) -> str:
        """Wrap the lines, each under what follows its number."""
        indent = lambda line: " " * re.match(r"(\S+  )?", line).end()
        wrap = lambda line: textwrap.fill(line, 80, subsequent_indent=indent(line))
        return "\n".join(map(wrap, self.words.splitlines()))

    def _repr_html_(self) -> str | None:
        return fields(self.listed, _MARKS) if self.listed else None


def check(number: str, answer: object = _NOTHING) -> Verdict:
    """Say whether the answer to an exercise is right, with a hint where it is not.

    Parameters
    ----------
    number : str
        Chapter and exercise, such as ``"07.1"``; or a chapter, to see what its
        exercises want.
    answer : object, optional
        A number, numbers, a word or a function. Without it: what is wanted.

    Returns
    -------
    Verdict
        It shows its sentence, and is true if the answer is right.
    """
    name = str(number).strip()
    one_digit = name[:1].isdigit() and not name[1:2].isdigit()
    name = f"0{name}" if one_digit else name
    of_chapter = sorted(
        key for key in EXERCISES if key.startswith(f"{name.partition('.')[0]}.")
    )
    if name not in EXERCISES and (
        answer is not _NOTHING
        or name not in {key.partition(".")[0] for key in of_chapter}
    ):
        close = of_chapter or sorted(
            difflib.get_close_matches(name, EXERCISES, cutoff=0)
        )
        return Verdict(
            False,
            f"There is no check {name!r}. The nearest are {', '.join(close)}.",
        )
    if answer is _NOTHING:
        wanted = [name] if name in EXERCISES else of_chapter
        lines = [f"{key}  {EXERCISES[key].wants}" for key in wanted]
        if name in EXERCISES:
            return Verdict(False, *lines)
        return Verdict(False, "\n".join([*lines, _MARKS]), of_chapter)
    exercise = EXERCISES[name]
    fault = exercise.fault(answer)
    return Verdict(
        not fault, f"Not yet. {fault}" if fault else f"Right. {exercise.then}"
    )
