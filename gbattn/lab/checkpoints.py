"""Checkpoints of a run: whole or absent, of the same run or refused."""

import hashlib
import itertools
import json
import os
import re
import reprlib
import shutil
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from gbattn.ground.arguments import (
    DICTIONARY,
    FLOAT,
    NUMBER,
    PATH,
    ArgumentError,
    check,
    check_entries,
    instance,
    list_of,
    require,
)
from gbattn.ground.files import file_checksum, read_json, write_atomic
from gbattn.ground.packages import check_packages
from gbattn.lab.token_cache import manifest_checksum
from gbattn.training import History, RateGroup, Run, plain_name, unwrapped

FORMAT = "gbattn checkpoint 2"
LEFT = "left.json"  # beside the checkpoints: the models that runs have left


@dataclass(kw_only=True)
class StoredRun(Run):
    """A run that may be stopped: its ``identity`` tells it from others, and its state is kept
    in a ``folder``, if there is one. ``whole`` is the model that the caller passed, ``scored``
    what is evaluated, ``best`` the best weights so far, ``stopped`` the signal that came."""

    whole: nn.Module
    scored: nn.Module
    corpus: object
    folder: Path | None
    identity: dict[str, str]
    best: dict[str, torch.Tensor] | None = None
    stopped: int | None = None


# ---- Tensors by name ----


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, shared ones once."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return {plain_name(name): tensor.detach() for name, tensor in named}


def put_back(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    """Copy tensors into a model; into a whole one from shards, too, in all processes."""
    for name, tensor in tensors_of(model).items():
        x = saved[name]
        gather = hasattr(x, "full_tensor") and not hasattr(tensor, "full_tensor")
        tensor.copy_(x.full_tensor() if gather else x)


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: x.detach().cpu().contiguous() for name, x in tensors.items()}


def _flat_state(state: dict[int, dict]) -> dict[str, torch.Tensor]:
    """The state of an optimiser, each tensor under one name."""
    return {f"{number}.{name}": torch.as_tensor(x) for number, of_one in state.items() for name, x in of_one.items()}


def _parameters(optimizer) -> list[nn.Parameter]:
    """In the order in which an optimiser numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


# ---- Which run it is ----


def _fingerprint(corpus) -> str:
    """What tells one text from another, hashed if it cannot say so itself."""
    if hasattr(corpus, "fingerprint"):
        return corpus.fingerprint
    digest = hashlib.sha256()
    for split in (corpus.train, corpus.valid):
        digest.update(f"{len(split)} ".encode())  # where one ends, the next begins
        digest.update(np.ascontiguousarray(split).astype("<i8").tobytes())
    return digest.hexdigest()[:12]


def identity_of(model: nn.Module, corpus, config, accelerator, rates: tuple, folder: Path | None) -> dict[str, str]:
    """All that decides a run, as flat text, to compare with a checkpoint's."""
    settings = config.to_dict()
    del settings["checkpoint_every"]  # decides nothing
    if config.document_end is None:
        del settings["document_end"]  # checkpoints from before it have no such name
    if hasattr(getattr(model, "config", None), "to_dict"):
        settings |= {f"model.{name}": x for name, x in model.config.to_dict().items()}
    for name, x in tensors_of(model).items():
        settings[f"model {name}"] = f"{x.dtype} {tuple(x.shape)}"
    for name, x in model.named_parameters():
        settings[f"model {plain_name(name)}"] += "" if x.requires_grad else " frozen"
    settings |= {"corpus": _fingerprint(corpus)}
    settings |= {"processes": accelerator.num_processes}
    settings |= {"sharded": True} if accelerator.is_fsdp2 else {}
    identity = {name: json.dumps(x, default=str) for name, x in settings.items()}
    identity |= {f"rates {i}": repr(x) for i, x in enumerate(rates)}
    return identity | ({"initial weights": _initial_weights(model, folder)} if folder else {})


def hash_of(tensors: dict[str, torch.Tensor]) -> str:
    """Twelve hexadecimal digits that tell tensors apart, names included."""
    from safetensors.torch import save

    return hashlib.sha256(save(_on_cpu(tensors))).hexdigest()[:12]


def _left_in(folder: Path) -> dict[str, str]:
    """By the hash of a model that a run in this folder has left, that of the weights the run began
    with. A file that says something else is as good as none: models made anew are still taken."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads((folder / LEFT).read_text("utf-8"))
        if isinstance(found, dict):
            return {name: x for name, x in found.items() if isinstance(x, str)}
    return {}


def _initial_weights(model: nn.Module, folder: Path) -> str:
    """A hash of the weights that a run begins with. A model that a run in this folder has left
    may continue it, and counts as what it was at first."""
    found = hash_of(tensors_of(model))
    return _left_in(folder).get(found, found) if checkpoints(folder) else found


def note_what_is_left(run: StoredRun) -> None:
    """Write into the folder which weights a run leaves in its model, however it ends."""
    if run.folder is None or not run.accelerator.is_main_process:
        return
    left, first = hash_of(tensors_of(run.whole)), run.identity["initial weights"]
    if left != first:
        # Where the disk is full, whoever goes on makes the model anew.
        with suppress(OSError):
            found = _left_in(run.folder) | {left: first}
            write_atomic(run.folder / LEFT, json.dumps(found, indent=1).encode())


def _in_plain_names(identity: dict[str, str], run: StoredRun) -> dict[str, str]:
    """The identity in a checkpoint of a compiled model, whose tensors once had torch.compile's
    names: there, and in the hash of its initial weights."""
    names = {plain_name(name): name for name in identity}
    if all(plain == name for plain, name in names.items()):
        return identity
    found = {plain_name(name): x for name, x in identity.items()}
    named = {names.get(f"model {name}", name).removeprefix("model "): x for name, x in tensors_of(run.whole).items()}
    if found.get("initial weights") == hash_of(named):
        found["initial weights"] = run.identity["initial weights"]
    return found


def _check_same_run(folder: Path, there: dict[str, str], here: dict[str, str]) -> None:
    nothing = "nothing"
    names = [n for n in (there | here) if there.get(n) != here.get(n)]
    lines = [f"{n} = {here.get(n, nothing)}"[:200] for n in names]
    wants = [f"{n} = {there.get(n, nothing)}"[:200] for n in names]
    also = f", as in the checkpoint in {folder}, or another folder"
    if "initial weights" in names:
        also = f" (a model made anew with the same seed){also}"
    require(not names, "folder", "; ".join(lines), "; ".join(wants) + also)


# ---- Which checkpoints there are ----


def checkpoints(folder: str | Path) -> dict[int, Path]:
    """Return the finished checkpoints in a folder by their step, in order.

    Parameters
    ----------
    folder : str or Path
        The `folder` of `gbattn.lab.training.train`. It need not exist.

    Returns
    -------
    dict[int, Path]
        Each path holds ``model.safetensors``, ``optimizer.safetensors`` and
        ``training.json``, or, for a run in shards, folders ``model`` and
        ``optimizer`` with a file from each process.

    Notes
    -----
    A draft left by a killed run does not count. Source: chapter 15.
    """
    found = {
        int(path.name[5:]): path for path in Path(folder).glob("step-*") if re.fullmatch("step-[0-9]{8,}", path.name)
    }
    return dict(sorted(found.items()))


def last_good(folder: Path | None) -> str:
    """What is kept of a run that could not go on, as a sentence."""
    paths = ["none", *(checkpoints(folder).values() if folder else ())]
    return f"the last good checkpoint is {paths[-1]}"


def _clean(folder: Path, needed: set) -> None:
    """Remove drafts, and checkpoints that nobody needs any more. A rename makes
    drafts of those first: what is half deleted must not appear finished."""
    for path in folder.glob("step-*.draft"):
        shutil.rmtree(path)
    for step, path in checkpoints(folder).items():
        if step not in needed:
            shutil.rmtree(path.rename(path.with_suffix(".draft")))


# ---- Writing ----


def save_checkpoint(run: StoredRun) -> None:
    """Write a checkpoint of all that the rest of the run depends on."""
    from safetensors.torch import save

    scaler, main = run.accelerator.scaler, run.accelerator.is_main_process
    draft = run.folder / f"step-{run.step:08d}.draft"
    if main:
        shutil.rmtree(draft, ignore_errors=True)
    state = {
        "format": FORMAT,
        "step": run.step,
        "identity": run.identity,
        "history": run.history.to_dict(),
        "unlogged": run.unlogged,
        "seconds": run.seconds,
        "scaler": scaler and scaler.state_dict(),
        "rates": [x.multiplier.state_dict() for x in _stateful(run)],
    }
    if run.sharded:
        run.accelerator.wait_for_everyone()  # what was there is gone
        state["files"] = write_shards(run, draft)
    if main:
        moments = _flat_state(run.optimizer.state_dict()["state"])
        parts = tensors_of(run.model), moments
        parts = zip(_FILES, () if run.sharded else parts)
        contents = {name: save(_on_cpu(part)) for name, part in parts}
        _write_checkpoint(draft, state, contents, run.history.best_step)
    run.accelerator.wait_for_everyone()


def _stateful(run: Run) -> list[RateGroup]:
    return [x for x in run.rates if hasattr(x.multiplier, "state_dict")]


def _write_checkpoint(draft: Path, state: dict, contents: dict[str, bytes], best: int | None) -> None:
    """Write a checkpoint beside its place, move it there when it is whole, and drop what is neither
    the newest nor the best. An error names the last good one. Shards are in the draft already, with
    their checksums in the state."""
    folder, place = draft.parent, draft.with_suffix("")
    sums = {name: hashlib.sha256(x).hexdigest() for name, x in contents.items()}
    state = state | {"files": state.get("files", {}) | sums}
    state["sha256"] = manifest_checksum(state)
    contents = contents | {"training.json": json.dumps(state).encode()}
    try:
        draft.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            write_atomic(draft / name, content)
        for inner in (path for path in draft.iterdir() if path.is_dir()):
            _flush_names(inner)
        _flush_names(draft)
        draft.rename(place)
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        why = f"{error.strerror or error}; {last_good(folder)}"
        raise OSError(error.errno, why, error.filename or str(draft)) from error
    _flush_names(folder)
    _clean(folder, {state["step"], best})


def write_shards(run: StoredRun, draft: Path) -> dict[str, str]:
    """Let each process write its part of weights and moments into the draft; return
    the checksums of all files."""
    import torch.distributed.checkpoint as dcp
    from accelerate.utils import gather_object
    from torch.distributed.checkpoint.api import CheckpointException

    moments = _flat_state(run.optimizer.state_dict()["state"])
    parts = {"model": tensors_of(run.model), "optimizer": moments}
    for name, tensors in parts.items():
        path = str(draft / name)
        writer = dcp.HuggingFaceStorageWriter(path, save_distributed=True)
        try:
            dcp.save(tensors, storage_writer=writer)
        except CheckpointException as error:  # in every process
            number, why = next(iter(error.failures.items()))
            why = f"process {number}: {why[0]}; {last_good(run.folder)}"
            raise OSError(f"{why}: '{path}'") from error
    files = sorted(draft.glob(f"*/shard-{run.process + 1:05d}-*"))
    names = [file.relative_to(draft).as_posix() for file in files]
    sums = gather_object([dict(zip(names, map(file_checksum, files)))])
    return {name: x for of_one in sums for name, x in of_one.items()}


def _flush_names(folder: Path) -> None:
    """Flush to disk which names a folder holds, where the system lets one."""
    if os.name == "posix":
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


# ---- Reading ----

_FILES = ("model.safetensors", "optimizer.safetensors")
_PAIR = (lambda x: isinstance(x, list) and [*map(FLOAT[0], x)] == [True] * 2, "two numbers")
_STATE = {
    "identity": DICTIONARY,
    "unlogged": list_of(_PAIR),
    "seconds": NUMBER,
    "rates": instance(list, "a list"),
}


def resume(run: StoredRun) -> None:
    """Continue from the newest checkpoint, if there is one."""
    found, main = checkpoints(run.folder), run.accelerator.is_main_process
    if found:
        run.step = max(found)
        weights, moments, state = _read_checkpoint(run, run.step, "delete that one")
        run.history = state["history"]
        best = run.history.best_step
        if run.config.keep == "best" and best is not None:
            cure = f"copy it again, or delete {run.folder} to begin anew"
            got = f"{run.folder} without step {best}"
            require(best in found, "folder", got, f"its best checkpoint too: {cure}")
            run.best = _read_checkpoint(run, best, cure)[0]
        put_back(run.model, weights)
        rest = run.optimizer.state_dict()
        run.optimizer.load_state_dict(rest | {"state": moments})
        run.unlogged = [tuple(pair) for pair in state["unlogged"]]
        run.seconds = state["seconds"]
        for x, found_state in zip(_stateful(run), state.get("rates", ())):
            x.multiplier.load_state_dict(found_state)
        if scaler := run.accelerator.scaler:
            scaler.load_state_dict(state["scaler"])
    elif main:
        (run.folder / LEFT).unlink(missing_ok=True)  # of a run whose checkpoints are gone
    run.accelerator.wait_for_everyone()
    if main and run.folder.is_dir():
        _clean(run.folder, {run.step, run.history.best_step})


def _read_checkpoint(run: StoredRun, step: int, cure: str) -> tuple[dict, dict, dict]:
    """The weights, the state of the optimiser and the rest of a checkpoint, if it is
    one of this run. Checksums and identity vouch for all that it holds."""
    path, want = checkpoints(run.folder)[step], "as train writes it"
    numbered, one = enumerate(_parameters(run.optimizer)), torch.zeros((), dtype=torch.float32)
    like = {n: {"step": one, "exp_avg": p, "exp_avg_sq": p} for n, p in numbered}
    file = path / "training.json"
    try:
        state = read_json(file, want)
        if state["format"] == FORMAT:
            same = state["sha256"] == manifest_checksum(state)
            got = "contents that do not match their checksum"
            require(same, file.name, got, want)
            require(state["step"] == step, file.name, f"step {state['step']}", step)
            check_entries(file.name, {"rates": []} | state, _STATE, want)
            state["history"] = History.from_dict(state["history"])
            weights = _read_tensors(path, "model", state, tensors_of(run.model))
            moments = _read_tensors(path, "optimizer", state, _flat_state(like))
    except Exception as error:  # whatever a damaged file does to its reader
        got = f"{path}, which cannot be read ({type(error).__name__}: {error})"
        raise ArgumentError("folder", got, f"a whole checkpoint: {cure}") from None
    found = state["format"]
    got = f"{path}, {reprlib.repr(found)}"
    require(found == FORMAT, "folder", got, f"{FORMAT!r}")
    _check_same_run(run.folder, _in_plain_names(state["identity"], run), run.identity)
    # Moments of what has had a gradient.
    like = {n: x for n, x in like.items() if f"{n}.step" in moments}
    pairs = [(weights.get(name), x) for name, x in tensors_of(run.model).items()]
    pairs += [(moments.get(name), x) for name, x in _flat_state(like).items()]
    same = all(x is not None and x.shape == y.shape for x, y in pairs)
    got = f"{path} with other tensors than the model has"
    require(same, "folder", got, f"a whole checkpoint: {cure}")
    state_of = {n: {name: moments[f"{n}.{name}"] for name in x} for n, x in like.items()}
    return weights, state_of, state


def _read_tensors(path: Path, part: str, state: dict, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a part of a checkpoint, if its bytes are those that were written.
    From shards, only what the given tensors hold in this process is read."""
    from safetensors.torch import load

    other = "{} has other bytes than were written"
    if (name := f"{part}.safetensors") in state["files"]:
        content = (path / name).read_bytes()
        if state["files"][name] != hashlib.sha256(content).hexdigest():
            raise ValueError(other.format(name))
        return {plain_name(name): x for name, x in load(content).items()}
    written = {name for name in state["files"] if name.startswith(f"{part}/")}
    there = {file.relative_to(path).as_posix() for file in (path / part).glob("*")}
    if written != there:
        raise ValueError(f"{part} has the files {sorted(there)}")
    for name in sorted(written):
        if state["files"][name] != file_checksum(path / name):
            raise ValueError(other.format(name))
    return _read_shards(path / part, like)


def _read_shards(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    import torch.distributed.checkpoint as dcp

    reader = dcp.HuggingFaceStorageReader(str(folder))
    found = {}
    for name, x in reader.read_metadata().state_dict_metadata.items():
        dtype, here = x.properties.dtype, like.get(plain_name(name))
        fits = here is not None and (here.shape, here.dtype) == (x.size, dtype)
        as_written = torch.empty(0 if fits else x.size, dtype=dtype)  # for an error
        found[name] = torch.empty_like(here.detach()) if fits else as_written
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*intent is to load in a single process")
        dcp.load(found, storage_reader=reader, no_dist=True)
    return {plain_name(name): x for name, x in found.items()}


def load_weights(model: nn.Module, checkpoint: str | Path) -> None:
    """Give a model the weights of a checkpoint, in one process, however many wrote it.

    Parameters
    ----------
    model : torch.nn.Module
        Of the same architecture. It stays where it is, and as it is in all else.
    checkpoint : str or Path
        One of the paths of `checkpoints`.

    Notes
    -----
    Source: chapter 15.
    """
    check(checkpoint=(checkpoint, PATH))
    check_packages("train", "safetensors")
    path, model = Path(checkpoint), unwrapped(model)[1]
    try:
        state = read_json(path / "training.json", "as train writes it")
        weights = _read_tensors(path, "model", state, tensors_of(model))
    except Exception as error:  # whatever a damaged file does to its reader
        got = f"{path}, which cannot be read ({type(error).__name__}: {error})"
        raise ArgumentError("checkpoint", got, "one of the paths of checkpoints(folder)") from None
    model_has = tensors_of(model)
    for name in model_has | weights:
        got, want = (
            f"{x[name].dtype} {tuple(x[name].shape)}" if name in x else "nothing" for x in (weights, model_has)
        )
        place = f"{path / 'model.safetensors'}, {reprlib.repr(name)}"
        require(got == want, place, got, want)
    put_back(model, weights)
