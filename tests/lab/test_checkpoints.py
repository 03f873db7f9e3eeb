"""Checkpoints: whole or absent, of the same run or refused, and old ones too."""

import copy
import errno
import hashlib
import itertools
import json
import os
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from safetensors.torch import load_file, save_file

from gbattn.lab.checkpoints import checkpoints, hash_of, load_weights, write_shards
from gbattn.lab.token_cache import manifest_checksum
from gbattn.lab.training import train
from models import WRAPPERS, wraps
from toys import (
    CORPUS,
    END,
    ENVIRONMENT,
    TOKENS,
    Interrupted,
    Toy,
    boosted_model,
    config,
    curve,
    finish,
    overfitting,
    run,
    start,
    stop_after,
    weights,
)


def test_a_run_with_documents_is_another_run(tmp_path):
    run(boosted_model(), folder=tmp_path, steps=2)
    with refused("folder", got="document_end"):
        run(boosted_model(), folder=tmp_path, steps=2, document_end=END)


def test_no_clock_decides_where_a_run_goes_on(tmp_path, monkeypatch):
    """Not one that goes backwards, and no date of a file."""
    whole_model, model = Toy(0.2), Toy(0.2)
    whole = run(whole_model, checkpoint_every=3)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 14)
        run(Toy(0.2), folder=tmp_path, checkpoint_every=3)
    for path in [newest := max(tmp_path.glob("step-*")), *newest.iterdir()]:
        os.utime(path, (0, 0))
    now = itertools.count(10**9, -3600)
    for clock in ("time", "perf_counter", "monotonic"):
        monkeypatch.setattr(time, clock, lambda: float(next(now)))
    assert curve(run(model, folder=tmp_path)) == curve(whole)
    assert torch.equal(weights(model), weights(whole_model))


def test_what_a_run_left_begins_another_where_its_checkpoints_are_gone(tmp_path):
    model, straight = Toy(0.2), Toy(0.2)
    run(model, folder=tmp_path)
    run(straight)
    shutil.rmtree(tmp_path)
    assert run(model, folder=tmp_path).loss == run(straight).loss
    with refused("folder", got="initial weights"):
        run(Toy(0.2), folder=tmp_path)


def test_a_model_that_a_run_left_and_that_was_changed_is_another(tmp_path):
    model = Toy(0.2)
    run(model, folder=tmp_path)
    with torch.no_grad():
        model.head.bias += 1
    with refused("folder", got="initial weights"):
        run(model, folder=tmp_path)


def test_each_model_that_a_run_left_may_go_on_with_it(tmp_path):
    """Also one that was stopped before another finished the run."""
    stopped, fresh = Interrupted(13), Toy(dropout=0.2)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, folder=tmp_path, checkpoint_every=5)
    history = run(fresh, folder=tmp_path)
    assert run(stopped, folder=tmp_path) == history
    assert torch.equal(weights(stopped), weights(fresh))


def test_a_run_writes_into_its_folder_and_not_on_the_model(tmp_path):
    model = Toy(0.2)
    names = {*vars(model)}
    run(model, folder=tmp_path)
    assert {*vars(model)} == names
    other = Toy(0.2)
    load_weights(other, checkpoints(tmp_path)[20])  # another object with the weights that the run left
    assert run(other, folder=tmp_path).finished


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, '{"a": 3}'])
def test_where_it_is_not_known_what_a_run_left_a_model_made_anew_goes_on(tmp_path, content):
    model = Toy(0.2)
    first = run(model, folder=tmp_path)
    (tmp_path / "left.json").write_text(content)
    with refused("folder", got="initial weights"):
        run(model, folder=tmp_path)
    assert run(Toy(0.2), folder=tmp_path) == first


def test_what_a_run_left_is_forgotten_where_its_checkpoints_are_gone(tmp_path):
    """Else a copy of the model that began the second run would count as one that the first has left."""
    model = Toy(0.2)
    run(model, folder=tmp_path)
    copied = copy.deepcopy(model)
    for path in checkpoints(tmp_path).values():
        shutil.rmtree(path)
    second = run(model, folder=tmp_path)
    assert run(copied, folder=tmp_path) == second


def test_a_checkpoint_with_the_names_of_torch_compile_is_read(tmp_path, monkeypatch):
    """As they were written of a compiled model once: in the tensors, the identity, the hash of the first weights."""
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 13)
        run(Toy(0.2), folder=tmp_path)
    (path,) = checkpoints(tmp_path).values()
    tensors = load_file(path / "model.safetensors")
    save_file({f"_orig_mod.{name}": x for name, x in tensors.items()}, path / "model.safetensors")
    identity = json.loads((path / "training.json").read_text())["identity"]
    named = {name.replace("model ", "model _orig_mod."): x for name, x in identity.items()}
    first = {f"_orig_mod.{name}": x.detach() for name, x in Toy(0.2).named_parameters()}
    sealed(path, identity=named | {"initial weights": hash_of(first)})
    loaded = Toy(0.2, seed=1)
    load_weights(loaded, path)
    assert torch.equal(loaded.head.weight, tensors["head.weight"])
    with refused("folder"):
        run(Toy(0.2, seed=1), folder=tmp_path)
    assert curve(run(Toy(0.2), folder=tmp_path)) == curve(run(Toy(0.2)))


def test_a_finished_run_is_only_read(tmp_path):
    first = run(folder=tmp_path)
    model = Toy(0.2)
    again = run(model, folder=tmp_path)
    assert again == first and model.seen == [] and not model.training
    assert run(model, folder=tmp_path) == first  # the model that it left is the same run
    fresh = Toy(0.2)
    run(fresh)
    assert torch.equal(weights(model), weights(fresh))


def test_the_newest_and_the_best_are_kept(tmp_path):
    text = overfitting()[1]
    history = train(Toy(), text, config(learning_rate=0.1, steps=40, evaluate_every=4), folder=tmp_path, progress=False)
    assert [*checkpoints(tmp_path)] == [history.best_step, 40]
    assert sorted(path.name for path in checkpoints(tmp_path)[40].iterdir()) == [
        "model.safetensors",
        "optimizer.safetensors",
        "training.json",
    ]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".pkl", ".pt", ".bin")]
    assert checkpoints(tmp_path / "none") == {}


def test_a_half_written_checkpoint_is_ignored_and_removed(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 12)
        run(folder=tmp_path, checkpoint_every=5)
    draft = tmp_path / "step-00000012.draft"
    draft.mkdir()
    (draft / "model.safetensors").write_bytes(b"half")
    (tmp_path / "step-notes").mkdir()  # somebody else's
    assert [*checkpoints(tmp_path)] == [10]
    assert curve(run(folder=tmp_path)) == curve(run())
    assert not draft.exists() and (tmp_path / "step-notes").exists()


def test_a_checkpoint_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    real = os.fsync
    calls = []

    def failing(number):
        calls.append(number)
        if len(calls) == 7:  # in the middle of the second checkpoint
            raise OSError(errno.ENOSPC, "")
        real(number)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError) as caught:
        run(folder=tmp_path, checkpoint_every=4)
    assert caught.value.errno == errno.ENOSPC
    assert [*checkpoints(tmp_path)] == [4]
    monkeypatch.setattr(os, "fsync", real)
    assert curve(run(folder=tmp_path)) == curve(run())


FULL = """
import resource, sys
from toys import Toy, run

class Full(Toy):
    def forward(self, *inputs, **options):
        if len(self.seen) == 6:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        return super().forward(*inputs, **options)

try:
    run(Full(0.2), folder=sys.argv[1], checkpoint_every=4)
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="here files cannot be limited")
def test_a_disk_that_is_full_is_named_with_what_is_kept(tmp_path):
    command = [sys.executable, "-c", FULL, tmp_path]
    said = subprocess.run(command, check=True, capture_output=True, text=True, env=ENVIRONMENT).stdout
    kept, file = tmp_path / "step-00000004", tmp_path / "step-00000008.draft" / "model.safetensors"
    assert f"File too large; the last good checkpoint is {kept}: '{file}'" in said
    assert [*tmp_path.glob("step-*")] == [kept]
    assert curve(run(folder=tmp_path)) == curve(run())


@pytest.mark.skipif(os.name != "posix", reason="here no folder can be flushed")
def test_files_and_names_are_flushed_before_anything_relies_on_them(tmp_path, monkeypatch):
    real, events = os.fsync, []

    def noted(number):
        what = os.fstat(number)
        events.append("file" if stat.S_ISREG(what.st_mode) else what.st_ino)
        real(number)

    monkeypatch.setattr(os, "fsync", noted)
    run(folder=tmp_path, evaluate_every=20)
    written = [*3 * ["file"], checkpoints(tmp_path)[20].stat().st_ino, tmp_path.stat().st_ino]
    assert events == [*written, "file"]  # the last says which weights the run has left


def test_a_checkpoint_that_is_half_deleted_is_not_listed(tmp_path, monkeypatch):
    real = shutil.rmtree

    def cut_off(path, **options):
        if path.exists():
            next(path.iterdir()).unlink()
            raise KeyboardInterrupt
        real(path, **options)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", cut_off)
        run(folder=tmp_path, checkpoint_every=4)
    assert [*checkpoints(tmp_path)] == [8] and len([*tmp_path.glob("step-*")]) == 2
    assert curve(run(folder=tmp_path)) == curve(run())
    assert not [*tmp_path.glob("*.draft")]


def test_a_checkpoint_takes_its_place_by_one_rename(tmp_path, monkeypatch):
    def fail(path, target):
        assert len([*path.iterdir()]) == 3 and not target.exists()
        raise OSError("here the power fails")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="the power fails"):
        patched.setattr(Path, "rename", fail)
        run(folder=tmp_path)
    assert checkpoints(tmp_path) == {} and not [*tmp_path.glob("step-*")]


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "training.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "noise"])
def test_a_damaged_checkpoint(tmp_path, name, damage):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-9] if damage == "cut" else b"noise")
    with refused("folder", want="delete that one", got=path.parent.name):
        run(folder=tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_with_other_bytes(tmp_path, name):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with refused("folder", got=name):
        run(folder=tmp_path)


KEYS = ["step", "identity", "history", "unlogged", "seconds", "scaler", "files"]


@pytest.mark.parametrize("key", [*KEYS, "sha256"])
def test_a_checkpoint_that_lacks_something(tmp_path, key):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / "training.json"
    state = json.loads(path.read_text())
    del state[key]
    path.write_text(json.dumps(state))
    with refused("folder", got=str(path.parent)):
        run(folder=tmp_path)


def sealed(path, **entries):
    """Entries of a checkpoint and checksums that fit them: it was not damaged but written so."""
    state = json.loads((path / "training.json").read_text()) | entries
    state["files"] = {name: hashlib.sha256((path / name).read_bytes()).hexdigest() for name in state["files"]}
    state["sha256"] = manifest_checksum(state)
    (path / "training.json").write_text(json.dumps(state))


ENTRIES = [
    ("identity", []),
    ("unlogged", [[1.0, "x"]]),
    ("unlogged", 3),
    ("seconds", None),
    ("rates", 1),
    ("history", 1),
]


@pytest.mark.parametrize("name, value", ENTRIES)
def test_a_checkpoint_that_says_nonsense(tmp_path, name, value):
    run(folder=tmp_path)
    sealed(checkpoints(tmp_path)[20], **{name: value})
    with refused("folder", got=name):
        run(folder=tmp_path)


@pytest.mark.parametrize("change", ["shape", "name"])
@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_checkpoint_with_tensors_of_another_model(tmp_path, name, change):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20]
    tensors = load_file(path / f"{name}.safetensors")
    first = next(key for key in sorted(tensors) if tensors[key].ndim)
    tensors[first if change == "shape" else "x"] = tensors.pop(first)[:1].clone()
    save_file(tensors, path / f"{name}.safetensors")
    sealed(path)
    with refused("folder"):
        run(folder=tmp_path)


def test_a_loss_that_was_edited(tmp_path):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / "training.json"
    state = json.loads(path.read_text())
    state["history"]["best_loss"] = 0.5
    path.write_text(json.dumps(state))
    with refused("folder", got="training.json"):
        run(folder=tmp_path)


def test_a_checkpoint_that_no_parser_can_read(tmp_path):
    run(folder=tmp_path)
    file = checkpoints(tmp_path)[20] / "training.json"
    whole = file.read_text()
    file.write_text("[" * 100_000)
    with refused("folder", got="training.json"):
        run(folder=tmp_path)
    file.write_text(whole)
    assert run(folder=tmp_path).finished


def test_a_checkpoint_under_another_step(tmp_path):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20]
    for name in ("step-\u0663", "step-\u00b2", "step-7"):  # digits, and no names of ours
        (tmp_path / name).mkdir()
    assert [*checkpoints(tmp_path)] == [20]
    path.rename(path.with_name("step-00000030"))
    with refused("folder", got="training.json"):
        run(folder=tmp_path)


def test_a_checkpoint_of_another_format(tmp_path):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / "training.json"
    path.write_text(path.read_text().replace("gbattn checkpoint 2", "gbattn checkpoint 1"))
    with refused("folder"):
        run(folder=tmp_path)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_best_checkpoint_that_is_gone_or_damaged(tmp_path, damage):
    text = overfitting()[1]
    c = config(learning_rate=0.1, steps=40, evaluate_every=4)
    model = Toy()
    best = train(model, text, c, folder=tmp_path, progress=False).best_step
    path, left = checkpoints(tmp_path)[best], weights(model)
    path.rename(path.with_name("kept"))
    if damage == "cut":
        path.mkdir()
        (path / "training.json").write_text("{")
    with refused("folder", want=f"delete {tmp_path}", got=f"step {best}" if damage == "gone" else path.name):
        train(model, text, c, folder=tmp_path, progress=False)
    shutil.rmtree(path, ignore_errors=True)
    path.with_name("kept").rename(path)
    assert train(model, text, c, folder=tmp_path, progress=False).best_step == best
    assert torch.equal(weights(model), left)


def frozen(model):
    model.embedding.requires_grad_(False)
    return model


OTHER = {
    "learning rate": (lambda: {"learning_rate": 0.02}, "learning_rate"),
    "two things": (lambda: {"seed": 4, "clip": None}, "clip = null; seed = 4"),
    "text": (lambda: {"corpus": SimpleNamespace(train=TOKENS[:800], valid=TOKENS[801:])}, "corpus"),
    "validation": (lambda: {"corpus": SimpleNamespace(train=TOKENS[:801], valid=TOKENS[802:])}, "corpus"),
    "fingerprint": (lambda: {"corpus": SimpleNamespace(**vars(CORPUS), fingerprint="abc")}, "corpus"),
    "width": (lambda: {"model": Toy(width=7)}, "model.width"),
    "first weights": (lambda: {"model": Toy(0.2, seed=9)}, "initial weights"),
    "a boundary": (lambda: {"corpus": SimpleNamespace(train=TOKENS[:800], valid=TOKENS[800:])}, "corpus"),
    "frozen": (lambda: {"model": frozen(Toy(0.2))}, "embedding.weight"),
    "dtype": (lambda: {"model": Toy().double()}, "head.bias"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_run_is_refused_and_nothing_is_lost(tmp_path, name):
    other, differs = OTHER[name]
    run(folder=tmp_path)
    with refused("folder", got=differs):
        run(**{"folder": tmp_path} | other())
    assert [*checkpoints(tmp_path)] == [20] and run(folder=tmp_path).finished


@wraps
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("plain_first", [True, False])
def test_checkpoints_are_those_of_the_plain_model(wrap, plain_first, tmp_path, monkeypatch):
    first, then = (lambda model: model, wrap)[:: 1 if plain_first else -1]
    stopped, resumed, loaded, straight = first(Toy()), then(Toy()), then(Toy(seed=1)), Toy()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 3)
        run(stopped, folder=tmp_path, checkpoint_every=3)
    load_weights(loaded, checkpoints(tmp_path)[3])
    assert torch.equal(weights(loaded), weights(stopped))
    run(straight)
    assert run(resumed, folder=tmp_path).step[0] == 1  # it went on
    assert torch.allclose(weights(resumed), weights(straight), atol=1e-6)


def test_equal_runs_write_equal_bytes(tmp_path, script):
    given = json.dumps(config(steps=3).to_dict())
    folders = tmp_path / "a", tmp_path / "b"
    for process in [start([script, given, folder, 0.3]) for folder in folders]:
        finish(process)
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, two = ((checkpoints(folder)[3] / name).read_bytes() for folder in folders)
        assert one == two


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # here it is one process that writes a shard
def test_a_shard_that_cannot_be_written_is_named_with_what_is_kept(tmp_path):
    model, draft = Toy(), tmp_path / "step-00000030.draft"
    run(folder=tmp_path, evaluate_every=20)
    one = SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters()), process=0, folder=tmp_path)
    draft.mkdir()
    (draft / "model").write_text("in the place of a folder")
    with pytest.raises(OSError, match="step-00000020"):
        write_shards(one, draft)
    (draft / "model").unlink()
    assert [*write_shards(one, draft)] == ["model/shard-00001-model-00001-of-00001.safetensors"]


def test_load_weights_takes_a_model_of_the_same_shapes(tmp_path):
    model, other = Toy(), Toy(seed=1)
    run(model, folder=tmp_path, keep="last")
    load_weights(other, checkpoints(tmp_path)[20])
    assert torch.equal(weights(other), weights(model))
    with refused("checkpoint"):
        load_weights(other, tmp_path)
    with refused(f"{checkpoints(tmp_path)[20] / 'model.safetensors'}, 'embedding.weight'"):
        load_weights(Toy(width=7), checkpoints(tmp_path)[20])
