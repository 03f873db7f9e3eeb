"""Run what waits for a GPU, one line at a time, and pack the records that it makes.

    python tools/on_a_gpu.py composition --prepare --corpora TEXTS   # where the texts are: tokens, into GBATTN_CACHE
    python tools/on_a_gpu.py composition --minutes 9 --out FOLDER    # where the GPU is, with that GBATTN_CACHE

A line checks first that the GPU and the tokens are there, and extends a sweep whose plan says so. When it has done so,
the new rates go into the sweep's TOML file with its records. It stops after its minutes; started again, it goes on from
the records and checkpoints that it finds. ``--rehearse`` makes every run two updates of a short text, on any device
and in folders of its own, and the benchmarks their smallest shape.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from gbattn.comparison import rates_at_edge
from gbattn.experiments import CorpusSpec
from gbattn.ground.records import results_folder
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.queue import run_experiment
from gbattn.lab.records import records_of
from gbattn.lab.texts import load_text

ROOT = Path(__file__).parents[1]
# Experiments in the order in which one takes its rates from the other, the processes that share the GPU, and how many
# runs each trains as one stack. One stack of eight keeps an H200 busy (an update of eight boosted models of width 64
# takes 19 ms), so three processes only fill its gaps, and finish their first stacks early. A run at the published size
# takes seven to eleven minutes of an H100 alone, so two at once are what a short lease can end.
LINES = {
    "composition": (("composition-sweep", "composition"), 3, 8),
    "short": (
        (
            "shift-new",
            "shift-new-plain",
            "rounds-sweep",
            "rounds",
            "twicing-sweep",
            "twicing",
            "rotary-96-warm-sweep",
            "rotary-96-warm",
        ),
        3,
        8,
    ),
    "paper": (("paper-wikipedia-sweep", "paper-wikipedia-tuned"), 2, 1),
    "wide": (("ladder-192-slow", "ladder-256-slow"), 8, 1),
}
EXTENDED = {
    "composition-sweep",
    "rounds-sweep",
    "twicing-sweep",
    "rotary-96-warm-sweep",
}  # by its plan, while the best rate of an arm is the lowest or the highest of its grid
MEASURE = (  # the empty rows of chapters 10, 15 and 30
    ["-m", "pytest", "-q", "tests/layers/test_on_a_gpu.py"],
    ["benchmarks/attention_layers.py", "--device", "cuda"],
    ["benchmarks/training_step.py", "--device", "cuda"],
    ["benchmarks/against_gpt2.py", "--device", "cuda"],
)
REHEARSED = (
    ["-m", "pytest", "-q", "tests/layers/test_on_a_gpu.py"],
    ["benchmarks/attention_layers.py", "--runs", "1", "--shapes", "--no-decoding"],
    ["benchmarks/training_step.py", "--quick", "--device", "cpu"],
    ["benchmarks/against_gpt2.py", "--quick"],
)


def rehearsal(experiment):
    """The same arms, each with one rate and seed, on a text that ships with Python, for two updates."""
    train = {key: x for key, x in experiment.train.items() if key not in ("epochs", "warmup_steps", "compile")}
    train |= dict(steps=2, batch_size=1, precision="no")
    text = CorpusSpec(name="python-docs", vocab_size=300, max_train_tokens=4000, max_valid_tokens=300)
    grid = {key: values[:1] for key, values in experiment.grid.items()}
    few = dict(seeds=experiment.seeds[:1], grid=grid, rates_from=None, rate_of="")
    return replace(experiment, corpus=text, train=train, **few)


def swept(sweep, folder, run=lambda sweep: None):
    """Run a sweep, with one more rate for all arms while the best of one lies at the edge; return it with all rates.
    Without ``run``, as far as its records are in."""
    while True:
        run(sweep)
        records = records_of(sweep, folder)
        edge = set(rates_at_edge(records).values()) if len(records) == sweep.planned else set()
        if not edge:
            return sweep
        rates = sweep.grid["learning_rate"]
        more = {2 * max(rates)} if max(rates) in edge else set()
        more |= {min(rates) / 2} if min(rates) in edge else set()
        print(f"{sweep.name}: the best rate of an arm lies at the edge, so {sorted(more)} come too", flush=True)
        sweep = replace(sweep, grid=sweep.grid | {"learning_rate": (*rates, *sorted(more))})


def perform(name, rehearse, options):
    """Run an experiment to its end, in a process of its own."""
    experiment, folder = EXPERIMENTS[name], options["folder"]
    capture = torch.cuda.is_available() and not experiment.train.get("compile", False)
    run = lambda e: run_experiment(rehearsal(e) if rehearse else e, capture=capture, **options)
    sweep = experiment.rates_from
    if name in EXTENDED and not rehearse:
        swept(experiment, folder, run)
    elif sweep and sweep.name in EXTENDED and not rehearse:
        run(replace(experiment, rates_from=swept(sweep, folder)))
    else:
        run(experiment)


def run_experiments(names, rehearse, until, options):
    """Run them in turn until the time is over; whether the last one ended."""
    for name in names:
        process = get_context("spawn").Process(target=perform, args=(name, rehearse, options))
        process.start()
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()  # its workers end with it
            process.join()
            print(f"{name}: the time is over; what is finished is kept")
            return False
        if process.exitcode:
            sys.exit(f"{name}: failed, as said above")
    return True


def measure(commands, until, folder):
    """Run the benchmarks and the tests, each with the time that is left; whether all of them ended well."""
    good = True
    for command in commands:
        into = ["--folder", folder] if command[0].startswith("benchmarks/") and "attention" not in command[0] else []
        environment = os.environ | {
            "GBATTN_RESULTS": str(folder),
            "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'benchmarks'}",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-P", *command, *into],
                cwd=ROOT,
                env=environment,
                timeout=max(1.0, until - time.monotonic()),
            )
            good &= done.returncode == 0
        except subprocess.TimeoutExpired:
            print(f"{' '.join(command)}: the time is over")
            good = False
    return good


def pack(folder, before, out):
    """Pack the records that were not there before."""
    new = sorted(path for path in folder.rglob("*.json") if path not in before)
    out.mkdir(parents=True, exist_ok=True)
    with tarfile.open(out / "records.tar.gz", "w:gz") as archive:
        for path in new:
            archive.add(path, path.relative_to(folder))
    print(f"{len(new)} new records in {out / 'records.tar.gz'}: unpack them in results/")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("line", choices=[*LINES, "measure"])
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop (default: 9)")
    parser.add_argument("--workers", type=int, help="processes at once (default: what the line says)")
    parser.add_argument("--out", type=Path, default=Path("."), help="where records.tar.gz goes (default: here)")
    parser.add_argument("--work", type=Path, help="where checkpoints are (default: as for gbattn run)")
    parser.add_argument("--corpora", type=Path, help="the folder that holds the folders of text")
    parser.add_argument("--prepare", action="store_true", help="cut the texts of the line into tokens, and no more")
    parser.add_argument("--rehearse", action="store_true", help="two updates a run, on any device")
    options = parser.parse_args()
    until = time.monotonic() + 60 * options.minutes
    names, workers, together = LINES.get(options.line, ((), 0, 1))
    if not (options.rehearse or options.prepare or torch.cuda.is_available()):
        parser.error("there is no GPU here; --prepare and --rehearse need none")
    if not options.rehearse:
        for name in names:  # fails with the name of the text that is missing
            load_text(EXPERIMENTS[name].corpus, options.corpora)
    if options.prepare:
        return
    if torch.cuda.is_available():
        print(torch.cuda.get_device_name(), f"torch {torch.__version__}")
        if shutil.which("nvidia-cuda-mps-control"):  # processes then share the GPU instead of taking turns
            subprocess.run(["nvidia-cuda-mps-control", "-d"])
    with tempfile.TemporaryDirectory(prefix="gbattn-rehearsal-") as place:
        folder = Path(place) / "results" if options.rehearse else Path(results_folder())
        folder.mkdir(parents=True, exist_ok=True)
        before = set(folder.rglob("*.json"))
        work = Path(place) / "work" if options.rehearse else options.work
        if names:
            how = dict(workers=options.workers or workers, together=together, folder=folder, work=work)
            how |= dict(corpora=options.corpora)
            good = run_experiments(names, options.rehearse, until, how)
        else:
            good = measure(REHEARSED if options.rehearse else MEASURE, until, folder)
        pack(folder, before, options.out)
    sys.exit(0 if good else 3)


if __name__ == "__main__":
    main()
