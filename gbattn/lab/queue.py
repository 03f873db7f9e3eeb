"""The queue: what is left of an experiment is run here, by several processes, or on a cluster."""

import os
import tempfile
from pathlib import Path

from gbattn.conventions import Record, profile
from gbattn.experiments import SHARD, Experiment, PlannedRun, own_layers
from gbattn.ground.arguments import COUNT, DICTIONARY, FLAG, PATH, check, optional, require
from gbattn.ground.packages import check_packages
from gbattn.lab.cluster import job_executor, wait_for_jobs
from gbattn.lab.processes import check_precision
from gbattn.lab.records import Plan, check_writable
from gbattn.lab.texts import is_readers_own, own_folder
from gbattn.lab.workers import Share, wait_for_workers, work_through
from gbattn.language_model import model_cost


def work_folder(work: str | Path | None = None) -> Path:
    """Return where checkpoints, locks and trained models live: as asked, or ``GBATTN_RUNS``, or
    ``~/.cache/gbattn/runs``."""
    return Path(work or os.environ.get("GBATTN_RUNS") or "~/.cache/gbattn/runs").expanduser()


def run_experiment(
    experiment: Experiment | Plan | str | os.PathLike,
    *,
    workers: int = 1,
    shard: tuple[int, int] = (1, 1),
    cluster: dict | None = None,
    folder: str | Path | None = None,
    work: str | Path | None = None,
    corpora: str | Path | None = None,
    progress: bool = True,
    capture: bool = False,
    together: int = 1,
) -> list[Record]:
    """Run what is left of an experiment and return all its records so far.

    Safe to interrupt at any moment and to start again, here or in several processes at once: each finished run is one
    record, an unfinished one resumes from its last checkpoint, and processes that share ``work`` and ``folder`` never
    repeat a run.

    Parameters
    ----------
    experiment : gbattn.experiments.Experiment, str, Path or gbattn.lab.records.Plan
        What `find_experiment` takes, or a `gbattn.lab.records.Plan`, which has folder and corpora.
    workers : int
        Processes, each with one thread of torch; 1 is this process, with the threads it has. All of them train on the
        device that accelerate finds; for several GPUs call `run_experiment` once for each, with CUDA_VISIBLE_DEVICES
        set.
    shard : tuple of int
        (k, n): only the k-th of n parts, for n machines (`Experiment.shard`).
    cluster : dict, optional
        Submit each run as a job, and wait: what submitit's ``AutoExecutor`` takes as parameters, such as
        ``{"slurm_partition": "gpu", "gpus_per_node": 1}``, and as ``cluster``, ``"slurm"`` by default. All machines
        must see ``folder``, ``work`` and the texts. If you stop waiting, the jobs stay on the cluster.
    folder : str or Path, optional
        The folder of records; `gbattn.ground.records.results_folder` by default.
    work : str or Path, optional
        Where checkpoints, locks and the trained models live (`work_folder`).
    corpora : str or Path, optional
        As `gbattn.lab.texts.load_text` takes it.
    progress : bool
        Whether a run in one process shows a progress bar.
    capture : bool
        As `train` takes it, for small models on a GPU.
    together : int
        How many runs that differ in nothing but seed and learning rate a process trains at once, as one stack of models:
        a GPU that is too large for one small model is not for sixteen. On a GPU their updates are captured. Such runs
        write no checkpoints, draw other dropout masks than a run alone, and share the seconds of their records.

    Returns
    -------
    list[gbattn.conventions.Record]
        Of all shards, as far as they are in this folder. The first error of a run is raised once all other runs are
        done; with several workers, as a RuntimeError.
    """
    plan = experiment if isinstance(experiment, Plan) else Plan(experiment, folder, corpora)
    check(workers=(workers, COUNT), shard=(shard, SHARD), progress=(progress, FLAG))
    check(cluster=(cluster, optional(DICTIONARY)), capture=(capture, FLAG), work=(work, optional(PATH)))
    check(together=(together, COUNT))
    want = "1 with a cluster, where each run is a job"
    require(cluster is None or workers == 1, "workers", workers, want)
    require(cluster is None or together == 1, "together", together, want)
    runs, work = plan.tuned.shard(*shard), work_folder(work)
    left = plan.left(runs)
    if not left:
        return _records_as_they_are(plan)
    modules = _check_before_the_first_hour(plan, left)
    alone = workers == 1 and cluster is None
    want = "1, or each layer in a module, for other processes to import"
    require(alone or "__main__" not in modules, "workers", workers, want)
    check_writable("folder", plan.folder, plan.experiment.name)
    check_writable("work", work)
    with tempfile.TemporaryDirectory(prefix="gbattn-run-") as place:
        failures = Path(place) / "failures"
        failures.touch()
        share = Share(runs, plan.folder, work, plan.corpora, failures, modules, capture=capture, together=together)
        if cluster is not None:
            share.runs, codes = left, []
            failed = wait_for_jobs(job_executor(cluster, work / "jobs"), share)
        elif workers > 1:
            codes = wait_for_workers(min(workers, len(left)), share)
            failed = failures.read_text("utf-8").splitlines()
        else:
            share.progress = progress and together == 1
            for error in work_through(share, plan.text):
                raise error
            return plan.records()
    _check_end(plan, left, failed, codes)
    return plan.records()


def _records_as_they_are(plan: Plan) -> list[Record]:
    """The records of an experiment that is finished; of a reader's own text, if it is here, as it is now."""
    spec, text = plan.experiment.corpus, None
    if is_readers_own(spec) and spec.fingerprint is None and (plan.corpora or own_folder(spec)):
        text = plan.text.fingerprint
        plan.check_text(text)
    return plan.records(text)


def _check_before_the_first_hour(plan: Plan, left: list[PlannedRun]) -> set[str]:
    """Stop for what would stop every run; return the modules of layers that are not of this library."""
    check_packages("train", "accelerate", "filelock", "safetensors")
    profile()
    for one in left:
        check_precision(one.train.precision)
    models = {repr(one.model): one.model for one in left}.values()
    for config in models:
        model_cost(config)  # a layer that nobody has counted
    modules = {kind.__module__ for config in models for kind in own_layers(config)}
    reached, asked = plan.text.vocab_size, plan.experiment.corpus.vocab_size
    got = f"a text that reaches a vocabulary of {reached}, not {asked}"
    require(reached == asked, "corpus", got, f"a longer text, or vocab_size={reached}")
    plan.check_text(plan.text.fingerprint)
    return modules


def _check_end(plan: Plan, left: list[PlannedRun], failed: list[str], codes: list[int]) -> None:
    """Raise if a run failed, or if a worker ended with an error and left something to do."""
    if not failed and (not any(codes) or not plan.left(left)):
        return
    why = f"{sum(map(bool, codes))} of {len(codes)} workers ended with an error"
    if failed:
        why = f"{len(failed)} of {len(left)} runs failed, the first {failed[0].partition(' ')[2]}"
    raise RuntimeError(f"{why}; what is finished is kept, and run goes on from there")
