"""`gbattn run` and `gbattn compare`: experiments of the book and of one's own."""

import itertools
import json
import math
import textwrap
from pathlib import Path
from statistics import fmean

from gbattn.ground.arguments import require
from gbattn.ground.records import experiment_folder
from gbattn.lab.catalogue import read_settings
from gbattn.lab.commands.options import (
    aligned,
    check_one_process,
    check_options,
    folder_of_records,
    many,
    renamed,
    tell,
)


def question_of(name: str) -> dict:
    """Return question, arms, seeds and grid of an experiment of the book, from its file."""
    found = read_settings(name)
    base = question_of(found["extends"]) if "extends" in found else {}
    inherited = {key: base[key] for key in ("arms", "seeds") if key in base}
    return {"grid": {}} | inherited | found


def listed(name: str, folder: Path | None) -> dict:
    """Return how many runs of an experiment of the book have a record in its folder, by what the records say of arm,
    seed and grid, with the keys of `gbattn.lab.status.Status`: without torch, which takes longer to load than the list
    to make."""
    asked, seconds = question_of(name), {}
    planned = set(itertools.product(asked["arms"], asked["seeds"], *asked["grid"].values()))
    found = dict(name=name, question=asked["question"], runs=len(planned), done=None)
    found |= dict(hours_left=None, left=None, why=None)
    for path in sorted(folder.glob("*.json")) if folder else ():
        try:
            one, took = _run_and_seconds(path, asked["grid"])
        except (LookupError, OSError, RecursionError, TypeError, ValueError, AttributeError):
            want = "a whole one: delete it, and run it again"
            return found | {"why": f"{path}: got a damaged record; want {want}"}
        seconds[one] = took
    done = planned & seconds.keys()
    times = [seconds[one] for one in done if seconds[one] is not None]
    if done == planned or times:
        hours = fmean(times or [0]) * len(planned - done) / 3600
        found |= dict(hours_left=round(hours, 3), left="about")
    return found | {"done": len(done)}


def _run_and_seconds(path: Path, grid: dict) -> tuple[tuple, float | None]:
    """Which run a record is of, by arm, seed and grid, and the seconds that it took."""
    record = json.loads(path.read_bytes())
    settings, took = record["settings"], record["measured"].get("seconds")
    of_grid = settings["model"] | settings["train"]
    varied = (of_grid[key] for key in grid)
    return (settings["arm"], settings["seed"], *varied), None if took is None else float(took)


def run_or_list(
    name: str | None = None,
    *,
    workers: int = 1,
    shard: tuple[int, int] = (1, 1),
    cluster: dict | None = None,
    results: Path | None = None,
    corpora: Path | None = None,
    work: Path | None = None,
    capture: bool = False,
    together: int = 1,
) -> dict:
    """Run an experiment of the book or of your own, or list the book's.

    Each finished run is one record. What is finished is never run again, and an
    unfinished run resumes from its last checkpoint. Most experiments take their
    learning rates from a sweep, which has to be run first. Without a name: all
    experiments, how many of their runs have a record, and how long the others take
    where some have.

    Parameters
    ----------
    name : str, optional
        The name of an experiment of the book, or the path of a TOML file that describes
        one, as those in gbattn/lab/catalogue do.
    workers : int
        Processes at once, each with one thread; 1 is this process, with all threads.
    shard : tuple of int
        The k-th of n parts, for the k-th of n machines.
    cluster : dict, optional
        Submit each run as a SLURM job and wait for it to end: what submitit's
        AutoExecutor takes, as JSON, such as '{"gpus_per_node": 1}'.
    results : Path, optional
        The folder of records: by default GBATTN_RESULTS, the book's folder if this
        is a checkout of it, or results here.
    corpora : Path, optional
        The folder that holds the folders of text; GBATTN_CORPORA by default.
    work : Path, optional
        Where checkpoints are; GBATTN_RUNS by default, else ~/.cache/gbattn/runs.
    capture : bool
        On a GPU: replay an update as one CUDA graph, for small models.
    together : int
        Train so many runs that differ only in seed and learning rate as one stack of
        models, for small models on a GPU; without checkpoints.
    """
    check_one_process("run", "--workers starts more")
    folder = folder_of_records(results)
    others = workers, shard, cluster, corpora, work, capture, together
    if name is None and repr(others) == "(1, (1, 1), None, None, None, False, 1)":
        places = {place.name: place for place in (*folder.glob("*/*/"), *folder.glob("*/"))}
        found = [listed(one, places.get(one)) for one in read_settings("_index")["experiments"]]
        return {"folder": str(folder), "experiments": found}
    check_options(workers=workers, shard=shard, capture=capture, together=together)
    require(name is not None, "name", name, "an experiment: without one, there is no option but --results")
    from gbattn.lab.queue import run_experiment
    from gbattn.lab.records import Plan, check_writable
    from gbattn.lab.status import status_from, status_of

    with renamed(experiment="name"):
        plan = Plan(name, folder, corpora)
    before, (k, n) = status_of(plan), shard
    tell(say_status(before._asdict()))
    with renamed(rates_from=name):
        runs = plan.tuned.shard(k, n)
    if not runs:
        tell(f"part {k}/{n} of {name} is empty: there is nothing to run here")
    if before.done != before.runs:
        plan.check_text(plan.text.fingerprint)  # without the text, nothing is left behind
        check_writable("results", folder, plan.experiment.name)
    try:
        options = dict(workers=workers, shard=shard, cluster=cluster, work=work, capture=capture, together=together)
        records = run_experiment(plan, **options)
    except KeyboardInterrupt as stop:
        raise type(stop)(
            f"what is finished is in {experiment_folder(plan.experiment.name, folder)}; the same command goes on from "
            "there, an unfinished run from its last checkpoint"
        ) from None
    found = status_from(plan.experiment, records)
    return {"folder": str(folder), "experiments": [found._asdict()]}


def _duration(hours: float) -> str:
    if hours < 1:
        return many(round(60 * hours), "minute")
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.0f} days"


def say_status(one: dict) -> str:
    """What a terminal shows of the status of experiments."""
    done, hours = one["done"], one["hours_left"] or 0
    line = f"{one['name']:22}{'?' if done is None else done:>4} of {one['runs']:3} runs"
    if done is None:
        line += f": {one['why']}"
    elif hours >= 1 / 60:
        line += f", {one['left']} {_duration(hours)} to go"
    how = dict(width=79, break_long_words=False, break_on_hyphens=False)
    lines = textwrap.wrap(line, subsequent_indent="    ", **how)
    return "\n".join([*lines, textwrap.indent(textwrap.fill(one["question"], 75), "    ")])


def say_run(result: dict) -> str:
    """What a terminal shows of the result of `run_experiment`."""
    lines = [say_status(one) for one in result["experiments"]]
    return "\n".join([*lines, f"records: {result['folder']}"])


def compare_arms(
    name: str,
    *,
    beside: tuple[str, ...] = (),
    metric: str = "test_loss",
    reference: str | None = None,
    confidence: float = 0.95,
    results: Path | None = None,
) -> dict:
    """Compare the arms of an experiment by its records.

    For each: the mean, its spread, and the paired difference from one of them, with
    an interval.

    Parameters
    ----------
    name : str
        As in gbattn run. Of a sweep, each arm is taken at the learning rate that
        was best in validation.
    beside : tuple of str
        Experiments whose arms stand in the same table, paired by seed. They have
        the same text and other arms.
    metric : str
        test_loss, test_perplexity, test_bits_per_byte, the same for valid, or
        another number of the records.
    reference : str, optional
        The arm that the others are compared with; by default standard, or the first
        where there is none.
    confidence : float
        Of the intervals.
    results : Path, optional
        The folder of records: by default GBATTN_RESULTS, the book's folder if this
        is a checkout of it, or results here.
    """
    from gbattn.comparison import compare
    from gbattn.lab.records import comparable

    check_options(beside=beside)
    folder, found = folder_of_records(results), []
    for argument, one in [("name", name), *(("beside", other) for other in beside)]:
        # An unfinished sweep is that of one of them.
        with renamed(experiment=argument, rates_from=one):
            found.append(comparable(one, folder))
    records = [record for one in found for record in one.records]
    if reference is None:
        arms = [arm.name for one in found for arm in one.experiment.arms]
        reference = "standard" if "standard" in arms else arms[0]
    options = dict(metric=metric, reference=reference, confidence=confidence)
    return {
        "name": name,
        "beside": list(beside),
        "metric": metric,
        "reference": reference,
        "rows": [row._asdict() for row in compare(records, **options)],
        "done": sum(one.done for one in found),
        "planned": sum(one.experiment.planned for one in found),
        "untuned": sorted(set().union(*(one.untuned for one in found))),
    }


def say_compared(result: dict) -> str:
    """What a terminal shows of the result of `compare_arms`."""

    def number(x, form):
        return "–" if x is None or not math.isfinite(x) else format(x, form)

    rows, reference = result["rows"], result["reference"]
    lost = any(row["pairs"] != row["n"] for row in rows if row["arm"] != reference)
    least = min(row["training_flops"] or math.inf for row in rows)
    units = ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)
    unit, size = next((one for one in units if least >= one[1]), ("", 1.0))
    table = [["", "runs", result["metric"], "sd", "difference"]]
    table[0] += ["pairs"] * lost + ["interval", "parameters", f"{unit}FLOPs"]
    for row in rows:
        arm, low, high = row["arm"], row["low"], row["high"]
        flops = (row["training_flops"] or math.nan) / size
        cells = [row["label"] + f" ({arm})" * (arm != row["label"]), str(row["n"])]
        cells += [number(row["mean"], ".4f"), number(row["sd"], ".4f")]
        cells += [number(row["difference"], "+.4f")]
        cells += ["–" if arm == reference else str(row["pairs"])] * lost
        cells += ["–" if low is None else f"{low:+.4f} … {high:+.4f}"]
        table.append([*cells, f"{row['parameters']:,}", number(flops, ",.1f")])
    lines = [*aligned(table), f"differences: to {reference}, paired by seed"]
    undecided = "so no ordering is decided"
    if result["done"] < result["planned"]:
        here = f"{result['done']} of {result['planned']} runs are in"
        lines.append(f"{here}, {undecided}")
    if gone := [f"{r['label']} {r['diverged']}" for r in rows if r["diverged"]]:
        lines.append(f"diverged, left out: {', '.join(gone)}")
    if result["untuned"]:
        edge = f"best learning rate at the edge of its grid, {undecided}"
        lines.append(f"{edge}: {', '.join(result['untuned'])}")
    return "\n".join(lines)
