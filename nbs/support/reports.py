"""What the records of the experiments say: differences, in numbers and in words.

Chapter 18 and the lab notebook show these; the landing page and chapter 21 quote them. `verdicts` has the rules that
decide, `tables` and `figures` what a reader sees.
"""

import math
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from gbattn.comparison import (
    Row,
    compare,
    paired_interval,
    rates_at_edge,
    step_seconds,
    welch,
)
from gbattn.conventions import Record, load_records, quote
from gbattn.experiments import Arm, Experiment
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.records import Plan, records_of

NOT_YET = "(not known yet)"


def quote_all(record: Record, format: str = "", **formats: str) -> None:
    """Quote all that a record has measured, in one format except for names that have
    another, and its settings as they are (`gbattn.conventions.quote`)."""
    for key in record.measured:
        quote(record, key, formats.get(key, format))
    for key in record.settings:
        quote(record, key)


def step_times() -> Record:
    """Return how long a training step takes with the shift, and with a second round, over
    one of standard attention: a small model, two cores, single precision."""
    found = {
        r.settings["method"]: f"{r.measured['over_standard']:.2f}"
        for r in load_records("benchmark-training-step")
        if (r.settings["device"], r.settings["shape"]) == ("cpu", "small")
        if r.settings["precision"] == "no" and "over_standard" in r.measured
    }
    both = {"shift": found["standard shift"], "boosted": found["boosted residual"]}
    return Record("step", {}, both)


def published(text: str) -> Record:
    """Return what the paper reports of a text, ``"wikitext"`` or ``"openwebtext"``."""
    name = f"sargolzaei2026-{text}"
    return next(r for r in load_records("reported") if r.experiment == name)


def diverged(row: Row) -> bool:
    """Return whether a pair of a comparison is lost to a run that diverged."""
    return row.pairs < row.n + row.diverged


def has_interval(row: Row | None) -> bool:
    """Return whether every planned pair is in and whole, and there are two or more."""
    return row is not None and row.low is not None and not diverged(row)


def percent(nats: float) -> float:
    """Return a difference of losses as one of perplexities, in percent."""
    return 100 * math.expm1(nats)


def in_percent(row: Row) -> str:
    """Return a difference in percent of perplexity, with its interval if it has one."""
    text = f"{percent(row.difference):+.1f}"
    if has_interval(row):
        low, high = f"{percent(row.low):+.1f}", f"{percent(row.high):+.1f}"
        text += f" ({low} to\N{NO-BREAK SPACE}{high})"
    return text


def signed(nats: float) -> str:
    """Return a difference of losses in percent of perplexity, such as −4.1."""
    return f"{percent(nats):+.1f}".replace("-", "\N{MINUS SIGN}")


def _mean_with_interval(mean: float, low: float, high: float, n: int) -> str:
    text = f"{signed(mean)}~% ({signed(low)} to~{signed(high)}, n~=~{n})"
    return text.replace("~", "\N{NO-BREAK SPACE}")


def in_short(row: Row) -> str:
    """Return a difference for a sentence, such as −4.1 % (−9.2 to +1.2, n = 5)."""
    if has_interval(row):
        return _mean_with_interval(row.difference, row.low, row.high, row.pairs)
    return f"{signed(row.difference)}\N{NO-BREAK SPACE}%"


def lower_in_short(row: Row) -> str:
    """Return a lead for a sentence, such as 4.1 % lower perplexity (1.2 to 9.2, n = 5)."""
    ends = sorted(-percent(x) for x in (row.low, row.high))
    text = f"{-percent(row.difference):.1f}~% lower perplexity ({ends[0]:.1f} to~{ends[1]:.1f}, n~=~{row.pairs})"
    return text.replace("~", "\N{NO-BREAK SPACE}")


def mean_in_short(differences: np.ndarray) -> str:
    """Return the mean of paired differences for a sentence, as `in_short` does."""
    interval = paired_interval(differences)
    return _mean_with_interval(differences.mean(), *interval, len(differences))


def ordering(row: Row | None) -> str:
    """Return what a paired difference, better minus worse, decides about an ordering:
    it ``held``, it ``did not hold`` (the opposite is shown), it is ``open``, or
    ``not known yet``."""
    if row is None:
        return "not known yet"
    if not has_interval(row) or row.low <= 0 <= row.high:
        return "open"
    return "held" if row.high < 0 else "did not hold"


def minutes(records: Iterable[Record], arm: str) -> float:
    """Return the minutes that a run of an arm takes at the pace of `step_seconds`."""
    selected = [
        r
        for r in records
        if r.settings["arm"] == arm and not r.measured["diverged"]
    ]
    return step_seconds(selected) * selected[0].measured["steps"] / 60


class Report:
    """What the records of the experiments say, for a page: each experiment is read
    once, and every comparison that the page puts into words or into a table is in
    ``drawn``, keyed by the two arms and the names of the experiments.

    An ordering is of two arms, the better one first, at the seeds that all given
    experiments plan; nothing is said about it until every planned pair is in.
    The name ``"a+b"`` stands for the experiments a and b together.

    Parameters
    ----------
    folder : Path, optional
        The folder of records; `gbattn.ground.records.results_folder` by default.
    experiments : dict, optional
        The experiments by their names; those of the book by default.
    """

    def __init__(self, folder: Path | None = None, experiments: dict | None = None):
        self.folder = folder
        self.experiments = EXPERIMENTS if experiments is None else experiments
        self.drawn: dict[tuple[str, ...], Row | None] = {}
        self._records: dict[str, list[Record]] = {}
        self._untuned: dict[str, set[str]] = {}

    def parts(self, name: str) -> list[Experiment]:
        """Return the experiments that stand together under a name."""
        return [self.experiments[part] for part in name.split("+")]

    def records(self, name: str) -> list[Record]:
        """Return the records of an experiment, as far as they are in."""
        if name not in self._records:
            parts = (records_of(one, self.folder) for one in self.parts(name))
            self._records[name] = list(chain(*parts))
        return self._records[name]

    def untuned(self, name: str) -> set[str]:
        """Return the arms of an experiment whose rate lies at the edge of its grid."""
        if name not in self._untuned:
            parts = (Plan(one, self.folder).untuned() for one in self.parts(name))
            self._untuned[name] = set().union(*parts)
        return self._untuned[name]

    def arms(self, name: str) -> dict[str, Arm]:
        """Return the arms of an experiment, by their names."""
        return {arm.name: arm for one in self.parts(name) for arm in one.arms}

    @cached_property
    def effects(self) -> dict[str, dict]:
        """What `measure_effects` measured of the stored models, by the id of the run."""
        found = load_records("worth-of-tokens", self.folder)
        return {record.settings["id"]: record.measured for record in found}

    # ---- What is in ----

    def state(self, *names: str) -> str:
        """Return how many runs of these experiments are in, for captions."""
        ready = sum(len(self.records(name)) for name in names)
        return f"{ready} of {sum(map(self.planned, names))} runs are in"

    def planned(self, name: str) -> int:
        """Return how many runs an experiment plans."""
        return sum(one.planned for one in self.parts(name))

    def complete(self, name: str) -> bool:
        """Return whether all runs of an experiment are in."""
        return len(self.records(name)) == self.planned(name)

    def edges(self, name: str) -> str:
        """Return which best rates of a sweep lie at the edge of its grid, in words."""
        if not self.complete(name):
            return "the sweep is not in yet"
        if arms := rates_at_edge(self.records(name)):
            return f"at the edge of the grid, so not yet found: {', '.join(arms)}"
        return "no best rate lies at the edge of the grid"

    def with_effects(self, arm: str, name: str) -> list[dict]:
        """Return what the runs of an arm measured, and `measure_effects` of their
        models."""
        found = (r for r in self.records(name) if r.settings["arm"] == arm)
        return [r.measured | self.effects.get(r.settings["id"], {}) for r in found]

    # ---- Two arms ----

    def at_shared_seeds(
        self, better: str, worse: str, *names: str
    ) -> tuple[list[Record], int]:
        """Return the records of two arms at the seeds that all these experiments plan,
        and how many there will be."""
        seeds = self.shared_seeds(*names)
        found = {
            (r.settings["arm"], r.settings["id"]): r
            for name in names
            for r in self.records(name)
            if r.settings["arm"] in (better, worse) and r.settings["seed"] in seeds
        }
        return list(found.values()), 2 * len(seeds)

    def shared_seeds(self, *names: str) -> set[int]:
        """Return the seeds that all these experiments plan."""
        seeds = lambda name: chain(*(one.seeds for one in self.parts(name)))
        return set.intersection(*(set(seeds(name)) for name in names))

    def paired(self, better: str, worse: str, *names: str) -> list[Record] | None:
        """Return the records of two arms at shared seeds, or None if one is missing."""
        found, planned = self.at_shared_seeds(better, worse, *names)
        return found if len(found) == planned else None

    def difference(
        self, better: str, worse: str, *names: str, confidence: float = 0.95
    ) -> Row | None:
        """Return the row of one arm against another, or None while a planned pair is
        missing."""
        found = self.paired(better, worse, *names)
        rows = (
            compare(found, reference=worse, confidence=confidence) if found else []
        )
        return next((row for row in rows if row.arm == better), None)

    def state_of(self, better: str, worse: str, *names: str) -> str:
        """Return how many of the runs that compare two arms are in."""
        found, planned = self.at_shared_seeds(better, worse, *names)
        return f"{len(found)} of {planned} runs are in"

    def p(self, better: str, worse: str, *names: str) -> float:
        """Return the p of Student's t for the pairs of two arms; 1 if nothing can be
        said of them yet."""
        from scipy.stats import ttest_rel

        row = self.difference(better, worse, *names)
        if not has_interval(row) or self.doubt(row, better, worse, *names):
            return 1.0
        return float(ttest_rel(*self.losses(better, worse, *names)).pvalue)

    def losses(self, better: str, worse: str, *names: str) -> tuple[list, list]:
        """Return the test losses of two arms, in the order of the seeds."""
        both = {better: [], worse: []}
        found = self.paired(better, worse, *names)
        for r in sorted(found, key=lambda r: r.settings["seed"]):
            both[r.settings["arm"]].append(r.measured["test_loss"])
        return tuple(both.values())

    def doubt(self, row: Row, better: str, worse: str, *names: str) -> str | None:
        """Return why a difference decides nothing, or None."""
        if diverged(row):
            return "a run diverged"
        edge = set().union(*map(self.untuned, names))
        if arms := edge & {better, worse}:
            return f"the learning rate of {' and '.join(sorted(arms))} lies at the edge of its grid"
        return None

    def draw(self, better: str, worse: str, *names: str) -> Row | None:
        """Return the `difference`, and note that the page has it."""
        row = self.difference(better, worse, *names)
        self.drawn[better, worse, *names] = row
        return row

    def in_words(
        self, first: str, second: str, better: str, worse: str, *names: str
    ) -> str:
        """Return one clause on a paired difference, whatever the outcome; the first
        two arguments are what it calls the arms."""
        row = self.draw(better, worse, *names)
        if row is None:
            return f"how {first} compares with {second} is not known yet: not every planned pair is in"
        if why := self.doubt(row, better, worse, *names):
            return f"how {first} compares with {second} is open: {why}"
        size = f"{abs(percent(row.difference)):.1f} %"
        interval = f"{percent(row.low):+.1f} to {percent(row.high):+.1f} %, {row.pairs} pairs"
        direction = "lower" if row.difference < 0 else "higher"
        verdict = {
            "held": f"{first} wins",
            "did not hold": f"{second} wins",
            "open": "open",
        }[ordering(row)]
        claim = f"{first} has a perplexity {size} {direction} than {second}"
        return f"{claim} ({interval}): {verdict}"

    def gap(self, name: str) -> tuple[float, float, int]:
        """Return mean, standard deviation and number of the gaps, boosted minus wider,
        of an experiment."""
        found = np.subtract(*self.losses("boosted_residual", "wider", name))
        return float(found.mean()), float(found.std(ddof=1)), len(found)

    def gap_p(self, smaller: str, larger: str) -> float:
        """Return the p of Welch's test of two gaps; 1 if nothing can be said yet."""
        of = "boosted_residual", "wider"
        for name in (smaller, larger):
            row = self.difference(*of, name)
            if not has_interval(row) or self.doubt(row, *of, name):
                return 1.0
        return welch(*self.gap(smaller), *self.gap(larger)).p

    # ---- One arm ----

    def of_arm(self, arm: str, name: str) -> list[float]:
        """Return the test losses of all runs of an arm that are in, and did not
        diverge."""
        records = [r for r in self.records(name) if r.settings["arm"] == arm]
        return [
            r.measured["test_loss"] for r in records if not r.measured["diverged"]
        ]

    def spread(self, arm: str, name: str) -> float:
        """Return the standard deviation of the test losses of an arm, in percent."""
        return 100 * stdev(self.of_arm(arm, name))

    def gain(
        self, arm: str, earlier: str, later: str
    ) -> tuple[float, float, float]:
        """Return what an arm gains from one experiment to another in nats, paired by
        seed, with its 95 % interval."""
        of_seeds = [
            {
                r.settings["seed"]: r.measured["test_loss"]
                for r in self.records(name)
                if r.settings["arm"] == arm
            }
            for name in (earlier, later)
        ]
        apart = [of_seeds[0][seed] - of_seeds[1][seed] for seed in of_seeds[1]]
        return fmean(apart), *paired_interval(apart)

    def before(self, record: Record) -> float | None:
        """Return by how many nats the loss of a run rises when the token before the
        last is exchanged, if its model was stored."""
        stored = self.effects.get(record.settings["id"])
        return None if stored is None else stored["worth"][1]

    def effects_of(self, name: str, *arms: str) -> list[dict]:
        """Return the `effects` of the stored models of an experiment; all arms by
        default."""
        found = [
            r
            for r in self.records(name)
            if not arms or r.settings["arm"] in arms
            if r.settings["id"] in self.effects
        ]
        return [self.effects[r.settings["id"]] for r in found]
