"""What a worker of the queue does: the next run that is neither finished nor another's, until none is left."""

import importlib
import math
import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import torch

import gbattn
from gbattn.conventions import Record
from gbattn.corpora import Corpus
from gbattn.experiments import PlannedRun
from gbattn.ground.arguments import require
from gbattn.ground.files import left_drafts
from gbattn.ground.terminal import describe_error, printable
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.checkpoints import put_back
from gbattn.lab.records import finished, from_elsewhere, home_of
from gbattn.lab.side_by_side import Stack, can_be_stacked, train_side_by_side
from gbattn.lab.texts import load_text
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, model_cost, parameter_count
from gbattn.training import Evaluation, evaluate

HOME = Path(gbattn.__file__).parent


# ---- One run


def provenance_of(experiment: str, capture: bool, together: int = 1) -> dict:
    """Return what a record says of where it was made, beyond what every record says."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(HOME), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        commit = git("rev-parse", "HEAD")
        if git("status", "--porcelain", "--untracked-files=no", "--", "."):
            commit += "+changes"
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    versions = {}
    for package in ("accelerate", "tokenizers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    name = experiment if experiment in EXPERIMENTS else f"{experiment}.toml"
    command = f"gbattn run {name}{' --capture' if capture else ''}"
    if together > 1:  # how many runs shared the seconds of this one
        versions["side by side"] = together
        command += f" --together {together}"
    return versions | {"commit": commit, "command": command}


def _rounded(values: Iterable[float], digits: int = 5) -> list[float]:
    return [round(float(value), digits) for value in values]


def _curves(one: PlannedRun, history, corpus: Corpus) -> dict:
    """What a record says of a training that ended."""
    steps, length = history.step[-1], one.train.length or one.model.max_length
    cost = model_cost(one.model, length, one.train.batch_size)
    return {
        "steps": steps,
        "tokens": steps * one.train.batch_size * length,
        "distinct_tokens": len(corpus.train),
        "training_flops": steps * cost.training_flops,
        "seconds": round(history.seconds[-1], 2),
        "seconds_per_step": round(history.seconds[-1] / steps, 5),
        "train_step": history.step,
        "train_loss": _rounded(history.loss),
        "train_seconds": _rounded(history.seconds, 3),
        "curve_step": history.validation_step,
        "curve_loss": _rounded(history.validation_loss),
        "best_step": history.best_step,
        "best_loss": history.best_loss,
    }


def _scores(one: PlannedRun, model: LanguageModel, corpus: Corpus) -> dict:
    """What a record says of the trained model on texts that it was not trained on."""
    length, scores = one.train.length or one.model.max_length, {}
    for split in ("valid", "test"):
        tokens, n_bytes = getattr(corpus, split), corpus.scored_bytes(split)
        scores |= _score(split, evaluate(model, tokens, length=length, n_bytes=n_bytes))
    return scores


def _score(split: str, found: Evaluation) -> dict:
    return {
        f"{split}_loss": found.loss,
        f"{split}_perplexity": found.perplexity,
        f"{split}_bits_per_byte": found.bits_per_byte,
        f"{split}_tokens": found.n_tokens,
    }


def train_and_score(one: PlannedRun, corpus: Corpus, work: Path, *, progress: bool, capture: bool) -> Record:
    """Train a run from where it was left, in its folder of work, and score it; a run that diverges is a result."""
    model, splits, measured = _begin(one, corpus)
    try:
        options = dict(folder=work / "checkpoints", progress=progress, capture=capture)
        history = train(model, splits, one.train, **options)
    except FloatingPointError as error:
        measured["why"] = str(error)
    else:
        if _note_curves(measured, one, history, corpus):
            measured |= _scores(one, model, corpus)
            model.save_pretrained(work / "model")
    return _record(one, corpus, measured)


def train_and_score_together(runs: list[PlannedRun], corpus: Corpus, works: list[Path]) -> list[Record]:
    """Train runs that are alike side by side, from their beginning, and score them."""
    models, splits, measured = zip(*(_begin(one, corpus) for one in runs))
    stack = Stack(models)
    rows = train_side_by_side(stack, splits[0], [one.train for one in runs])
    length, scores = runs[0].train.length or runs[0].model.max_length, {}
    for split in ("valid", "test"):
        scores[split] = stack.losses(getattr(corpus, split), length, 32)
    for number, (one, row, model, work, found) in enumerate(zip(runs, rows, models, works, measured)):
        if row.error is not None:
            found["why"] = str(row.error)
        elif _note_curves(found, one, row.history, corpus):
            for split, (nats, n_tokens) in scores.items():
                found |= _score(split, Evaluation.of(nats[number], n_tokens, corpus.scored_bytes(split)))
            put_back(model, stack.of_row(number))
            model.save_pretrained(work / "model")
    return [_record(one, corpus, found) for one, found in zip(runs, measured)]


def _begin(one: PlannedRun, corpus: Corpus) -> tuple[LanguageModel, SimpleNamespace, dict]:
    """The model of a run, what it trains on, and what is measured of it so far, as of a run that diverged."""
    same, want = corpus.vocab_size == one.corpus.vocab_size, f"{one.corpus.vocab_size}, as the model has"
    require(same, "vocab_size", corpus.vocab_size, want)
    model, count = LanguageModel(one.model, seed=one.seed), parameter_count(one.model)
    measured = dict(parameters=count.total, non_embedding=count.non_embedding)
    measured |= dict(valid_loss=None, test_loss=None, diverged=True)
    splits = SimpleNamespace(train=corpus.train, valid=corpus.valid[: one.corpus.max_valid_tokens])
    return model, splits, measured


def _note_curves(measured: dict, one: PlannedRun, history, corpus: Corpus) -> bool:
    """Note a training that ended; whether it learned anything."""
    measured |= _curves(one, history, corpus)
    if history.best_loss >= math.log(one.model.vocab_size):
        measured["why"] = f"the best validation loss, {history.best_loss:.3f}, is no better than a guess"
        return False
    measured["diverged"] = False
    return True


def _record(one: PlannedRun, corpus: Corpus, measured: dict) -> Record:
    """The record of a run that is over: made now, as it says on which device the process has computed."""
    settings = one.settings
    settings["text"]["fingerprint"] = corpus.fingerprint
    if "steps" in measured:
        settings["steps"] = measured["steps"]
    return Record(one.experiment, settings, measured)


# ---- A share of the queue


@dataclass
class Share:
    """What a process is to do: which runs, where, and ``failures``, the file in which all processes note what failed,
    so that none tries it again. ``modules`` register layers that are not of this library. Up to ``together`` runs that
    are alike are trained side by side."""

    runs: list[PlannedRun]
    folder: Path
    work: Path
    corpora: str | None
    failures: Path
    modules: set[str] = field(default_factory=set)
    progress: bool = False
    capture: bool = False
    together: int = 1

    def failed(self) -> set[str]:
        """Return the ids of the runs that failed in some process."""
        return {line.split()[0] for line in self.failures.read_text("utf-8").splitlines()}

    def note(self, one: PlannedRun, error: Exception) -> None:
        """Note for all processes that a run failed."""
        with self.failures.open("a", encoding="utf-8") as file:
            file.write(f"{one.id} {one.name}: {describe_error(error)}\n")


def work_through(share: Share, text: Corpus | None = None) -> list[Exception]:
    """Keep doing the first run that is neither finished nor another process's, until none is left; return the errors.
    The text is read if it is not given."""
    if share.modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last, as --imports does
    for module in share.modules:
        importlib.import_module(module)
    text = load_text(share.runs[0].corpus, share.corpora) if share.runs and text is None else text
    errors, left = [], dict(enumerate(share.runs, 1))
    while batch := _next(share, left, text, errors):
        for number in batch:
            left.pop(number)
    return errors


def _next(share: Share, left: dict[int, PlannedRun], text: Corpus, errors: list[Exception]) -> dict[int, PlannedRun]:
    """Do the first run that can be done, and those that can be trained together with it; return them. Those that are
    over are left no more."""
    with ExitStack() as locks:
        batch = _take(share, left, text, errors, locks)
        try:
            ends = _do(share, batch, text)
        except Exception as error:  # noted while the locks are held
            errors.append(error)
            for one in batch.values():
                share.note(one, error)
            ends = dict.fromkeys(batch, f"failed: {describe_error(error)}")
    for number, end in ends.items():
        _tell(share, number, batch[number], end)
    return batch


def _take(share: Share, left: dict[int, PlannedRun], text: Corpus, errors: list, locks: ExitStack) -> dict:
    """Lock the first run that can be done, and those that can be trained together with it."""
    from filelock import FileLock, Timeout

    over = lambda one: one.id in share.failed() or finished(one, share.folder, text.fingerprint) is not None
    batch = {}
    for number, one in [*left.items()]:
        if batch and not can_be_stacked([*batch.values(), one]):
            continue
        try:
            if over(one):
                left.pop(number)
                continue
            place = share.work / one.id
            place.mkdir(parents=True, exist_ok=True)
            # The system frees it when a process dies.
            locks.enter_context(FileLock(place / "lock", timeout=0))
            if over(one):
                continue
        except Timeout:
            continue
        except Exception as error:
            share.note(one, error)
            errors.append(error)
            left.pop(number)
            _tell(share, number, one, f"failed: {describe_error(error)}")
            continue
        batch[number] = one
        if len(batch) == share.together:
            break
    return batch


def _do(share: Share, batch: dict[int, PlannedRun], text: Corpus) -> dict[int, str]:
    """Make the records of runs, by training or from another experiment that has them; return how each ended."""
    records, ends = {}, {}
    for number, one in batch.items():
        home, place = home_of(one.experiment, share.folder), share.work / one.id
        for draft in left_drafts(place / "model") + left_drafts(home, f"{one.name}.json"):
            draft.unlink()
        found = from_elsewhere(one, share.folder, text.fingerprint)
        if found is None:
            if not share.progress:
                _tell(share, number, one, "starts")
            continue
        _tell(share, number, one, f"has run for {found.experiment}")
        more = {key: one.settings[key] for key in ("arm", "label", "planned")}
        records[number] = replace(found, experiment=one.experiment, settings=found.settings | more)
    records |= _trained(share, {number: one for number, one in batch.items() if number not in records}, text)
    for number, record in records.items():
        one, m = batch[number], record.measured
        record.save(one.name, home_of(one.experiment, share.folder).parent)
        shutil.rmtree(share.work / one.id / "checkpoints", ignore_errors=True)
        well = not m["diverged"]
        ends[number] = f"test perplexity {m['test_perplexity']:.2f}, {m['seconds'] / 60:.1f} min" if well else ""
        ends[number] = ends[number] or f"diverged: {m['why']}"
    return ends


def _trained(share: Share, runs: dict[int, PlannedRun], text: Corpus) -> dict[int, Record]:
    """The records of runs, one alone or several side by side."""
    places = [share.work / one.id for one in runs.values()]
    if len(runs) > 1:
        found = train_and_score_together([*runs.values()], text, places)
    else:
        options = dict(progress=share.progress, capture=share.capture)
        found = [train_and_score(one, text, place, **options) for one, place in zip(runs.values(), places)]
    more = [provenance_of(one.experiment, share.capture, len(runs)) for one in runs.values()]
    return {n: replace(record, provenance=record.provenance | x) for n, record, x in zip(runs, found, more)}


def _tell(share: Share, number: int, one: PlannedRun, what: str) -> None:
    line = printable(f"{one.experiment} {number}/{len(share.runs)} {one.name}: {what}")
    print(f"{line}\n", end="", file=sys.stderr, flush=True)  # at once, whole


# ---- Processes


def _end_with_parent() -> None:
    """End this process when the one at the other end of standard input is gone, however it ended."""
    os.read(sys.stdin.fileno(), 1)  # nothing more is written, so this is its end
    os._exit(1)


def main() -> None:
    """Do what a process that `start_workers` starts does: its share comes in as a pickle."""
    torch.set_num_threads(1)
    share = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(1 if work_through(share) else 0)  # each failure has been printed


# This gbattn, then what the parent's path has. Ctrl-C reaches all; the process that waits says so.
PROGRAM = (
    "import sys; sys.path[:] = sys.argv[1:2]; import gbattn; "
    "sys.path[:] = sys.argv[2:]; import signal; "
    "signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from gbattn.lab.workers import main; main()"
)


def _path_without_here() -> list[str]:
    """The path of this process without the current folder, of which a file may have the name of a module of Python or
    of a package."""
    here = os.getcwd()
    return [place for place in sys.path if os.path.abspath(place) != here]


def wait_for_workers(count: int, share: Share) -> list[int]:
    """Give so many processes the same share of work, wait for all, and return their exit codes."""
    command = [sys.executable, "-P", "-c", PROGRAM, HOME.parent, *_path_without_here()]
    processes = []
    try:
        for _ in range(count):
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
            processes.append(process)
            process.stdin.write(pickle.dumps(share))
            process.stdin.flush()  # left open: see _end_with_parent
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            process.stdin.close()
            if process.poll() is None:
                process.terminate()
        for process in processes:
            process.wait()
