"""How far along an experiment is, and how long the rest takes at least or about."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch

from gbattn.conventions import Record
from gbattn.cost import measure_machine
from gbattn.experiments import Experiment
from gbattn.lab.catalogue import find_experiment
from gbattn.lab.records import Plan
from gbattn.language_model import model_cost


@lru_cache(1)
def product_rate() -> float | None:
    """Return the FLOPs per second of float32 matrix products where `run_experiment` trains; None on an accelerator
    that cannot be timed here."""
    if torch.cuda.is_available():
        return measure_machine("cuda").flops
    other = torch.backends.mps.is_available() or torch.xpu.is_available()
    return None if other else measure_machine().flops


def least_seconds(experiment: Experiment | str) -> float | None:
    """Return a lower bound in seconds on the training of a run of an experiment, by `find_experiment`: the FLOPs of
    its cheapest run, at the rate at which this machine multiplies float32 matrices.

    None if that rate cannot be measured, if the text decides how long a run is, or if a run trains in another
    precision. An arm that is equal to another in time counts as that one, as its size is not known before the sweep.
    """
    experiment = find_experiment(experiment)
    arms = tuple(
        replace(arm.equal_to, name=arm.name, train=arm.train) if arm.equal_to and arm.equal_in == "time" else arm
        for arm in experiment.arms
    )
    one_seed = dict(seeds=experiment.seeds[:1], rates_from=None, rate_of="")
    flops = []
    for one in replace(experiment, arms=arms, **one_seed).runs():
        config, tokens = one.train, one.corpus.max_train_tokens
        T, B = config.length or one.model.max_length, config.batch_size
        if config.precision != "no" or config.epochs and not tokens:
            return None
        steps = config.steps or config.epochs * tokens / (B * T)
        flops.append(steps * model_cost(one.model, T, B).training_flops)
    rate = product_rate()
    return rate and min(flops) / rate


class Status(NamedTuple):
    """How far along an experiment is: ``done`` of its ``runs`` have a record, and the others take ``hours_left`` (to
    three decimals) one after the other; ``left`` says whether ``"about"``, by the mean seconds of those that are in,
    or ``"at least"``, by `least_seconds`. None stands for what is not known: the hours, or everything if a record is
    damaged; ``why`` says which record.
    """

    name: str
    question: str
    runs: int
    done: int | None = None
    hours_left: float | None = None
    left: str | None = None
    why: str | None = None


def status_from(experiment: Experiment, records: list[Record]) -> Status:
    """Return how far along an experiment is, from the records of it that are in."""
    missing = experiment.planned - len(records)
    measured = [record.measured.get("seconds") for record in records]
    seconds = [x for x in measured if x is not None]
    if seconds or not missing:
        left, each = "about", fmean(seconds or [0])
    else:
        left, each = "at least", least_seconds(experiment)
    hours = None if each is None else round(missing * each / 3600, 3)
    return Status(experiment.name, experiment.question, experiment.planned, len(records), hours, left)


def status_of(experiment: Experiment | Plan | str, folder: str | Path | None = None) -> Status:
    """Return how far along an experiment (what `find_experiment` takes, or a `Plan`) is, from a folder of records,
    `gbattn.ground.records.results_folder` by default."""
    plan = experiment if isinstance(experiment, Plan) else Plan(experiment, folder)
    of = plan.experiment
    try:
        return status_from(of, plan.records())
    except ValueError as error:
        return Status(of.name, of.question, of.planned, why=str(error))
