"""The records of an experiment: which run each is of, whether it is whole, and what its sweep has found."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from gbattn.comparison import best_rates, damaged_entries, rates_at_edge
from gbattn.conventions import Record, read_records
from gbattn.corpora import Corpus
from gbattn.experiments import Experiment, PlannedRun, tuned, untuned
from gbattn.ground.arguments import PATH, ArgumentError, check, optional, require
from gbattn.ground.records import CHAPTERS, FETCH_RECORDS, experiment_folder, results_folder
from gbattn.lab.catalogue import EXPERIMENTS, find_experiment
from gbattn.lab.texts import load_text


def home_of(experiment: str, folder: Path) -> Path:
    """Return the folder of an experiment's records; one of the catalogue begins in the book's folder of records in
    the chapter of results."""
    found, chapter = experiment_folder(experiment, folder), folder / "18_perplexity"
    new = experiment in EXPERIMENTS and not found.is_dir() and chapter.is_dir()
    return chapter / experiment if new else found


def check_writable(argument: str, folder: Path, experiment: str = "") -> None:
    """Make a folder, and that of an experiment's records in it; refuse one that cannot be written to."""
    inner = home_of(experiment, folder) if experiment else folder
    try:
        inner.mkdir(parents=True, exist_ok=True)
        why = "" if os.access(inner, os.W_OK) else "Permission denied"
    except OSError as error:
        why = error.strerror
    require(not why, argument, f"{folder} ({why})", "one that can be written to")


# ---- One record


def check_record(path: Path, record: Record, one: PlannedRun, text: str | None = None) -> None:
    """Check that a record is whole and that its settings are still those of a run; where the fingerprint of a text is
    given, that its text is that one."""
    known = json.loads(json.dumps(one.settings))
    whole = known.keys() <= record.settings.keys() and not damaged_entries(record)
    whole = whole and isinstance(record.settings["train"], dict)
    require(whole, str(path), "a damaged record", "a whole one: delete it, and run it again")
    if known["text"]["fingerprint"] is None:
        known["text"]["fingerprint"] = text or record.settings["text"]["fingerprint"]
    differ = [
        f"{part}.{key}"
        for part in ("text", "model", "train")
        for key, value in record.settings[part].items()
        if known[part].get(key, value) != value
    ]
    if differ:
        since = "the text has" if differ == ["text.fingerprint"] else "defaults have"
        want = f"those of the run {one.id}: {since} changed since; state them, or delete the record"
        raise ArgumentError(str(path), f"other settings: {', '.join(differ)}", want)


def read_record(path: Path, one: PlannedRun, text: str | None = None) -> Record:
    """Return the record of a run from its file (`check_record`)."""
    found = read_records(path)
    require(len(found) == 1, str(path), f"{len(found)} records", "one, of one run")
    check_record(path, found[0], one, text)
    return found[0]


def place_of(one: PlannedRun, folder: Path) -> Path:
    """Return the file of the record of a run."""
    return home_of(one.experiment, folder) / f"{one.name}.json"


def finished(one: PlannedRun, folder: Path, text: str | None = None) -> Record | None:
    """Return the record of a run, if it is in."""
    path = place_of(one, folder)
    if not path.is_file():
        return None
    record = read_record(path, one, text)
    got = record.experiment, record.settings["arm"], record.settings["seed"]
    expected = one.experiment, one.arm.name, one.seed
    want = f"{expected}: delete the record, and run it again"
    require(got == expected, str(path), f"a record of {got}", want)
    return record


def from_elsewhere(one: PlannedRun, folder: Path, text: str) -> Record | None:
    """Return the record of the same run on the same text in another experiment."""
    name = f"*/*-{one.id}.json"
    for path in sorted((*folder.glob(name), *folder.glob(f"{CHAPTERS}/{name}"))):
        record = read_record(path, one)
        if record.settings["text"]["fingerprint"] == text:
            return record  # with another, its folder has other files since
    return None


# ---- All of an experiment


class Plan:
    """An experiment on a folder of records: its sweep and its text are read once, when they are first asked for.

    Parameters
    ----------
    experiment : gbattn.experiments.Experiment, str or Path
        What `find_experiment` takes.
    folder : str or Path, optional
        The folder of records; `gbattn.ground.records.results_folder` by default.
    corpora : str or Path, optional
        As `load_text` takes it.
    """

    def __init__(
        self,
        experiment: Experiment | str | os.PathLike,
        folder: str | Path | None = None,
        corpora: str | Path | None = None,
    ) -> None:
        self.experiment = find_experiment(experiment)
        check(folder=(folder, optional(PATH)), corpora=(corpora, optional(PATH)))
        self.folder = Path(folder or results_folder())
        self.corpora = None if corpora is None else str(corpora)

    @cached_property
    def text(self) -> Corpus:
        """The text that is here."""
        return load_text(self.experiment.corpus, self.corpora)

    @cached_property
    def sweep(self) -> list[Record]:
        """The records of its sweep that are in."""
        sweep = self.experiment.rates_from
        return Plan(sweep, self.folder).records() if sweep else []

    @cached_property
    def tuned(self) -> Experiment:
        """The experiment with the rates of its sweep, which must be finished."""
        return tuned(self.experiment, self.sweep)

    @cached_property
    def runs(self) -> list[PlannedRun]:
        """All runs, at the rates of the sweep."""
        return self.tuned.runs()

    def untuned(self) -> set[str]:
        """Return the names of the arms whose rate lies at the edge of its grid in the sweep."""
        return untuned(self.experiment, self.sweep)

    def home(self) -> Path:
        """Return the folder of its records."""
        return home_of(self.experiment.name, self.folder)

    def left(self, runs: Iterable[PlannedRun]) -> list[PlannedRun]:
        """Return those of its runs of which no record is in."""
        home = self.home()
        return [one for one in runs if not (home / f"{one.name}.json").is_file()]

    def records(self, text: str | None = None) -> list[Record]:
        """Return the records that are in now, in the order of the runs; until its sweep is finished its runs are not
        known, and the list is empty. With the fingerprint of a text, a record of another is refused."""
        sweep = self.experiment.rates_from
        if not self.home().is_dir() or sweep and len(self.sweep) < sweep.planned:
            return []
        return [record for one in self.runs if (record := finished(one, self.folder, text))]

    def check_text(self, text: str) -> None:
        """Check that the sweep was of the text with this fingerprint, if it is to be the same."""
        alike = lambda e: replace(e.corpus, max_valid_tokens=None)
        sweep = self.experiment.rates_from
        if sweep and alike(sweep) == alike(self.experiment):
            for one, record in zip(sweep.runs(), self.sweep, strict=True):
                check_record(place_of(one, self.folder), record, one, text)


def records_of(experiment: Experiment | str, folder: str | Path | None = None) -> list[Record]:
    """Return the records of an experiment (what `find_experiment` takes) that are in so far, in the order of its runs,
    from a folder of records, `gbattn.ground.records.results_folder` by default.

    A record of a run that the experiment no longer has, as when its sweep has since found a better rate, is not among
    them. Until its sweep is finished, its runs are not known and the list is empty.
    """
    return Plan(experiment, folder).records()


class Comparable(NamedTuple):
    """What `gbattn.comparison.compare` takes of an experiment: ``records``, one of each arm and seed. ``untuned``
    names the arms whose learning rate lies at the edge of its grid, of which no ordering is decided; ``done`` runs are
    in."""

    experiment: Experiment
    records: list[Record]
    untuned: set[str]
    done: int


def comparable(experiment: Experiment | str, folder: str | Path | None = None) -> Comparable:
    """Return the records of an experiment (what `find_experiment` takes) that can be compared, from a folder of
    records, `gbattn.ground.records.results_folder` by default.

    In a sweep, each arm is taken at the rate of `gbattn.comparison.best_rates`. An experiment that varies another
    setting, or was not run, is refused.
    """
    name = experiment.name if isinstance(experiment, Experiment) else experiment
    plan, rate = Plan(experiment, folder), "learning_rate"
    others = " and ".join(sorted(set(plan.experiment.grid) - {rate}))
    got = f"{str(name)!r}, which varies {others} in each arm"
    want = "one in which an arm varies by its seed and its learning rate alone"
    require(not others, "experiment", got, want)
    edge = plan.untuned() if plan.home().is_dir() else set()
    records = plan.records()
    got = f"{str(name)!r}, of which {plan.folder} has no run"
    want = f"an experiment that was run: gbattn run {name} runs it; or the book's records: {FETCH_RECORDS}"
    require(bool(records), "experiment", got, want)
    done = len(records)
    if rate in plan.experiment.grid:
        edge, best = set(rates_at_edge(records)), best_rates(records)
        records = [r for r in records if r.settings[rate] == best[r.settings["arm"]]]
    return Comparable(plan.experiment, records, edge, done)
