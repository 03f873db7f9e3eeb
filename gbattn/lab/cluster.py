"""Runs as jobs of a cluster, by submitit."""

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from gbattn.ground.arguments import ArgumentError
from gbattn.ground.packages import check_packages
from gbattn.ground.terminal import describe_error
from gbattn.lab.workers import Share, work_through


class Job:
    """A queue of one run, as a cluster job. One that the cluster stops, as at its time limit, is requeued by submitit
    and resumes from its checkpoint."""

    def __call__(self, share: Share) -> list[str]:
        with tempfile.TemporaryDirectory(prefix="gbattn-run-") as place:
            failures = Path(place) / "failures"  # of its own: the next job is on another machine
            failures.touch()
            return [describe_error(error) for error in work_through(replace(share, failures=failures))]

    def checkpoint(self, share: Share):
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, share)


def job_executor(cluster: dict, logs: Path):
    """Return what submits jobs, if submitit can make it of these options."""
    check_packages("cluster", "submitit")
    from submitit import AutoExecutor

    options = {"cluster": "slurm", "name": "gbattn"} | cluster
    try:
        executor = AutoExecutor(logs, cluster=options.pop("cluster"))
        executor.update_parameters(**options)
    except (AssertionError, NameError, RuntimeError, TypeError, ValueError) as error:
        want = "options of submitit's AutoExecutor, such as {'gpus_per_node': 1}"
        raise ArgumentError("cluster", f"{cluster} ({describe_error(error)})", want) from None
    return executor


def wait_for_jobs(executor, share: Share) -> list[str]:
    """Submit each run of a share as a job and wait for all; return a line on each that failed."""
    # submitit starts python -m, which would put the current folder first.
    safe, before = "PYTHONSAFEPATH", os.environ.get("PYTHONSAFEPATH")
    os.environ[safe] = "1"
    try:
        with executor.batch():
            jobs = [executor.submit(Job(), replace(share, runs=[one])) for one in share.runs]
    finally:
        os.environ.pop(safe) if before is None else os.environ.update({safe: before})
    print(f"{len(jobs)} jobs submitted, logs in {executor.folder}", file=sys.stderr, flush=True)
    failed = []
    for one, job in zip(share.runs, jobs):
        error = job.exception()  # when it has ended
        whys = job.result() if error is None else [describe_error(error)]
        failed += [f"{one.id} {one.name}: {why}" for why in whys]
    return failed
