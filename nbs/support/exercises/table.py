"""The exercises that can be checked: what is wanted, what is right, and what a typical mistake would give."""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@contextmanager
def own_state() -> Iterator[None]:
    """Compute in double precision, with random numbers that are not the page's."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


def as_numbers(answer: object) -> torch.Tensor:
    """Return numbers, however nested, as a tensor in double precision."""
    if isinstance(answer, torch.Tensor):
        return answer.detach().cpu().double()
    if isinstance(answer, (list, tuple)):
        return torch.stack([as_numbers(part) for part in answer])
    return torch.from_numpy(np.asarray(answer, dtype=float))


def are_whole(answer: object) -> bool:
    """Whether an answer is whole numbers, which must be met exactly."""
    if isinstance(answer, (list, tuple)):
        return all(map(are_whole, answer))
    return isinstance(answer, int)


def near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> bool:
    """Whether all entries agree; a NaN in `want` stands for any number."""
    if got.shape != want.shape:
        return False
    stated = ~want.isnan()
    scale = torch.where(want == 0, want[stated].abs().max() or 1.0, want.abs())
    return bool(((got - want).abs() <= tolerance * scale + 1e-12)[stated].all())


@dataclass(frozen=True)
class Exercise:
    """One exercise that can be checked.

    Parameters
    ----------
    number : str
        Of chapter and place on its page, such as ``"07.1"``.
    asks : str
        What the answer says, for a reader who wants to know its form.
    then : str
        What follows from a right answer.
    answers : callable
        Yields the right answer, then pairs of a wrong one and its hint. Numbers,
        however nested (NaN for any number), a word or a function; with `form`, a
        function that returns what is wrong with an example, or nothing.
    on : callable, optional
        Returns the lists of arguments on which functions are compared.
    form : str, optional
        Of an example that the reader is to find.
    tolerance : float, optional
        Relative; default one per cent, and exact for whole numbers.
    """

    number: str
    asks: str
    then: str
    answers: Callable
    on: Callable | None = None
    form: str | None = None
    tolerance: float | None = None

    @cached_property
    def solved(self) -> tuple[object, list[tuple[object, str]]]:
        """The right answer, and the wrong ones with their hints."""
        with own_state():
            right, *wrong = self.answers()
        return right, wrong

    @property
    def wants(self) -> str:
        """What kind of answer, and what it says."""
        right, wrong = self.solved
        if self.form:
            kind = self.form
        elif isinstance(right, str):
            words = sorted({right, *(word for word, _ in wrong)})
            kind = "one of " + ", ".join(f'"{word}"' for word in words)
        elif callable(right):
            kind = f"a function of {', '.join(inspect.signature(right).parameters)}"
        elif isinstance(right, int):
            kind = "a whole number"
        elif not (shape := tuple(as_numbers(right).shape)):
            kind = "a number"
        else:
            kind = " by ".join(map(str, shape)) + " numbers"
        return f"{kind}: {self.asks}"

    def fault(self, answer: object) -> str:
        """Return what is wrong with the answer; nothing if it is right."""
        right, wrong = self.solved
        if self.form:
            return self._of_example(right, answer)
        if isinstance(right, str):
            return self._of_word(right, dict(wrong), answer)
        if callable(right) != callable(answer):
            return f"Wanted is {self.wants}."
        tolerance = self.tolerance
        if callable(right):
            tolerance = tolerance or 1e-4
            try:
                got = self._values(answer)
            except Exception as error:  # of the reader's code, whatever it is
                return f"The function raises {type(error).__name__}: {error}"
            want = self._values(right)
            wrong = [(self._values(one), hint) for one, hint in wrong]
        else:
            tolerance = tolerance or (1e-9 if are_whole(right) else 0.01)
            want = [as_numbers(right)]
            wrong = [([as_numbers(one)], hint) for one, hint in wrong]
            try:
                got = [as_numbers(answer)]
            except (TypeError, ValueError, RuntimeError):
                return f"Wanted is {self.wants}."
            if want[0].ndim == 0 and got[0].numel() == 1:
                got = [got[0].reshape(())]
        shapes = next(
            ((g.shape, w.shape) for g, w in zip(got, want) if g.shape != w.shape),
            None,
        )
        alike = lambda other: all(near(g, o, tolerance) for g, o in zip(got, other))
        if shapes is None and alike(want):
            return ""
        for one, hint in wrong:
            if alike(one):
                return hint
        if shapes:
            return f"Its shape is {tuple(shapes[0])}. Wanted is {self.wants}."
        return general_hint(
            torch.cat([g.flatten() for g in got]),
            torch.cat([w.flatten() for w in want]),
            tolerance,
        )

    def _of_example(self, judge: Callable, answer: object) -> str:
        try:
            with own_state():
                return judge(answer) or ""
        except Exception:  # the judge could not read it
            return f"Wanted is {self.wants}."

    def _of_word(self, right: str, hints: dict[str, str], answer: object) -> str:
        if isinstance(answer, bool):
            answer = "yes" if answer else "no"
        word = answer.strip().lower() if isinstance(answer, str) else None
        if word == right:
            return ""
        return hints.get(word, f"Wanted is {self.wants}.")

    def _values(self, function: Callable) -> list[torch.Tensor]:
        with own_state():
            return [as_numbers(function(*arguments)) for arguments in self.on()]


def general_hint(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """Return what a wrong answer has in common with the right one, of the same size."""
    if not got.isfinite().all():
        return "It holds what is no finite number."
    if near(-got, want, tolerance):
        return "Its size is right, its sign is not."
    if near(100 * got, want, tolerance) or near(got / 100, want, tolerance):
        return "It is off by a factor of 100: a share, or per cent?"
    if want.numel() == 1:
        ratio = (got / want).item() if want.item() else math.nan
        if near(1 / got, want, tolerance):
            return "It is one over the answer."
        if not float(want).is_integer() and 0.9 < ratio < 1.1:
            return "It is nearly right. Compute it to three digits."
        return "It is too large." if got > want else "It is too small."
    if near(got.flip(0), want, tolerance):
        return "The numbers are right, their order is reversed."
    factor = (got @ want / (want @ want)).item()
    if factor and near(got / factor, want, tolerance):
        return "It is right but for one factor, the same in all entries."
    if near(got - (got - want).mean(), want, tolerance):
        return "It is right but for one number that is added to all entries."
    right = sum(near(g, w, tolerance) for g, w in zip(got, want))
    return (
        f"Right so far: {right} of {want.numel()}."
        if right
        else "None of its numbers is right."
    )


EXERCISES: dict[str, Exercise] = {}


def exercise(number: str, asks: str, then: str, **options) -> Callable:
    """Put an exercise into the table, with the decorated generator as its answers."""

    def put(answers: Callable) -> Callable:
        if number in EXERCISES:
            raise ValueError(f"{number} is in the table already")
        EXERCISES[number] = Exercise(number, asks, then, answers, **options)
        return answers

    return put
