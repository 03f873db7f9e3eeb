"""Precisions, devices and processes that share a batch or the weights."""

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from torch import nn

from gbattn.lab.checkpoints import checkpoints, load_weights
from gbattn.lab.processes import accelerator_of, check_device, check_precision, float32_products, placed
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.training import TrainConfig
from toys import CORPUS, ENVIRONMENT, T, Toy, V, config, curve, finish, run, start, weights


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_precision_of_gpus_needs_one(precision):
    for call in (run, check_precision):
        with refused("precision"):
            call(precision=precision)
    with refused("precision"):
        check_precision("fp17")


@pytest.mark.parametrize("precision, during", [("no", None), ("bf16", None), ("tf32", "tf32")])
def test_float32_is_multiplied_as_before_a_run_after_it(precision, during):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with float32_products(precision):
        assert matmul.fp32_precision == (during or before)
    assert matmul.fp32_precision == before
    with pytest.raises(KeyError), float32_products(precision):
        raise KeyError
    assert matmul.fp32_precision == before


def test_a_process_that_set_the_precision_itself_trains():
    """torch refuses to read the older setting once the newer one was used."""
    code = "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; from toys import run; run()"
    subprocess.run([sys.executable, "-c", code], check=True, env=ENVIRONMENT)


def test_what_accelerate_reads_from_the_environment_changes_no_run(monkeypatch):
    plain = curve(run())
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
    assert curve(run()) == plain


def test_a_device_that_cannot_compute_is_named():
    check_device("cpu")
    for device in ("abacus", "meta", ["cpu"]):
        with refused("device"):
            check_device(device)


def test_the_batch_must_split_among_the_processes(monkeypatch):
    real = accelerator_of

    def three(precision):
        accelerator = real(precision)
        return SimpleNamespace(num_processes=3, process_index=0, is_fsdp2=False, device=accelerator.device)

    monkeypatch.setattr("gbattn.lab.training.accelerator_of", three)
    with refused("batch_size"):
        run()


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_are_one(tmp_path, script):
    given = json.dumps(config(steps=12, batch_size=8, accumulation=2, checkpoint_every=5, evaluate_every=6).to_dict())
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    two = start([*launch, script, given, tmp_path / "two", 0.0])
    one = finish(start([script, given, "", 0.0]))
    two = finish(two)
    assert (one["processes"], two["processes"]) == (1, 2)
    for name in ("loss", "gradient_norm", "validation_loss"):
        assert two["curve"][name] == pytest.approx(one["curve"][name], abs=1e-5)
    assert two["weights"] == pytest.approx(one["weights"], abs=1e-5)
    assert 12 in checkpoints(tmp_path / "two")


SHARDS = f"""
import json, sys
from types import SimpleNamespace
import accelerate, numpy as np, torch
from gbattn.lab import training
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.training import TrainConfig
torch.set_num_threads(1)
text = SimpleNamespace(train=np.array({CORPUS.train.tolist()}), valid=np.array({CORPUS.valid.tolist()}))
model, settings, folder = map(json.loads, sys.argv[1:])
update = training.update

def dying(run):
    if run.step == 7:
        raise KeyboardInterrupt
    update(run)

def once(name, dies=False):
    trained = LanguageModel(ModelConfig(**model), seed=1)
    training.update = dying if dies else update
    try:
        history = train(trained, text, TrainConfig(**settings), folder=folder + name, progress=False)
    except KeyboardInterrupt:
        return None
    weights = torch.cat([p.detach().flatten() for p in trained.parameters()])
    good = type(trained) is LanguageModel and not trained.training
    return dict(curve=history.to_dict() | dict(seconds=None), weights=weights.tolist(), good=good)

whole, broken, resumed = once("whole"), once("broken", dies=True), once("broken")
state = accelerate.PartialState()
if state.is_main_process:
    print(json.dumps(whole | dict(goes_on=broken is None and resumed == whole, processes=state.num_processes)))
state.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this torch has no gloo")
def test_two_processes_that_share_the_weights_are_one(tmp_path):
    """Their losses are those of one process; they stop and go on bit for bit; and one process reads what they wrote."""
    of_model = dict(vocab_size=V, max_length=T, d_model=8, n_layers=2, n_heads=2, attention="boosted")
    options = dict(batch_size=8, accumulation=2, checkpoint_every=5, evaluate_every=6, evaluate_batch_size=2)
    settings = config(steps=12, **options).to_dict()
    (tmp_path / "script.py").write_text(SHARDS)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, tmp_path / "script.py"]
    shards = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "CUDA_VISIBLE_DEVICES": ""}
    words = map(json.dumps, (of_model, settings, f"{tmp_path}/"))
    two = finish(start([*launch, *words], **shards))
    assert two["processes"] == 2 and two["good"] and two["goes_on"]

    one = LanguageModel(ModelConfig(**of_model), seed=1)
    history = train(one, CORPUS, TrainConfig(**settings), progress=False)
    for name in ("loss", "gradient_norm", "validation_loss"):
        assert two["curve"][name] == pytest.approx(getattr(history, name), abs=1e-5)
    assert two["weights"] == pytest.approx(weights(one).tolist(), abs=1e-4)  # a bias of keys has rounding alone

    found = checkpoints(tmp_path / "whole")
    assert [*found] == sorted({12, history.best_step})
    path = found[two["curve"]["best_step"]]
    assert len([*path.glob("model/*")]) == len([*path.glob("optimizer/*")]) == 2
    again = LanguageModel(one.config, seed=2)
    load_weights(again, path)
    assert weights(again).tolist() == two["weights"]
    with refused("folder"):
        train(LanguageModel(one.config, seed=1), CORPUS, TrainConfig(**settings), folder=path.parent, progress=False)
    with refused(f"{path / 'model.safetensors'}, 'token_embedding.weight'"):
        load_weights(LanguageModel(one.config, dtype=torch.float64), path)
    file = min(path.glob("model/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with refused("checkpoint", got=file.name):
        load_weights(again, path)
    file.unlink()
    with refused("checkpoint"):
        load_weights(again, path)


@pytest.mark.parametrize(
    ("environment", "options", "argument"),
    [
        ({}, {}, "FSDP_VERSION"),
        ({"FSDP_VERSION": "1"}, {}, "FSDP_VERSION"),
        ({"FSDP_VERSION": "2"}, {"precision": "fp16"}, "precision"),
    ],
)
def test_what_cannot_be_shared_is_named(environment, options, argument, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # for half precision
    for name, value in ({"ACCELERATE_USE_FSDP": "true"} | environment).items():
        monkeypatch.setenv(name, value)
    with refused(argument):
        run(**options)


def test_a_number_cannot_be_cut_and_blocks_are_gathered_as_one():
    model = Toy()
    model.scale = nn.Parameter(torch.tensor(1.0))
    plugin = SimpleNamespace()
    shared = SimpleNamespace(is_fsdp2=True, state=SimpleNamespace(fsdp_plugin=plugin))
    with refused("model"):
        placed(model, shared)
    model = LanguageModel(ModelConfig(vocab_size=V, max_length=T, d_model=8, n_layers=1, n_heads=2))
    assert placed(model, shared) is not model
    assert plugin.transformer_cls_names_to_wrap == ["Block"]
    placed(Toy(), shared)
    assert plugin.transformer_cls_names_to_wrap == []


def test_one_process_alone_has_nothing_to_share(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    shared = curve(run())
    monkeypatch.undo()
    assert shared == curve(run())
