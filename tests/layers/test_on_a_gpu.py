"""On a GPU: training, stopping and going on, scoring, sampling and whole experiments give what a CPU gives, as far as
rounding lets them. The other tests are about single bits, and stay on the CPU (conftest.py)."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import refused

from gbattn.corpora import sequential_windows
from gbattn.lab import training
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.queue import run_experiment
from gbattn.lab.side_by_side import Stack, train_side_by_side
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.timing import Specialisation
from gbattn.training import RateGroup, TrainConfig, evaluate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
V, T = 40, 16
ARMS = ["multi_head", "linear", "twicing", "boosted"]


def choose_anew():
    """Make accelerate forget which device it found."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(autouse=True)
def on_the_gpu(monkeypatch):
    from accelerate.state import PartialState

    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    choose_anew()
    assert PartialState().device.type == "cuda"
    yield
    choose_anew()


def corpus():
    random = np.random.RandomState(0)
    tokens = random.randint(0, V, 6001)
    tokens[1::2] = (3 * tokens[:-1:2] + 1) % V  # every other token can be learned
    return SimpleNamespace(train=tokens[:5000], valid=tokens[5000:])


def small(attention="boosted", **changes):
    config = dict(vocab_size=V, max_length=T, d_model=32, n_layers=2, n_heads=2, attention=attention)
    return LanguageModel(ModelConfig(**config | changes), seed=0)


def settings(**changes):
    return TrainConfig(**dict(steps=12, batch_size=8, learning_rate=3e-3, log_every=3, evaluate_every=6) | changes)


def losses(history):
    return history.loss + history.validation_loss


@pytest.mark.parametrize("attention", ARMS)
def test_training_goes_as_on_a_cpu(monkeypatch, attention):
    there = train(model := small(attention), corpus(), settings(), progress=False)
    assert {p.device.type for p in model.parameters()} == {"cuda"}
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    choose_anew()
    here = train(small(attention), corpus(), settings(), progress=False)
    assert losses(there) == pytest.approx(losses(here), rel=1e-4)
    assert here.loss[-1] < here.loss[0]


@pytest.mark.parametrize("attention", ["linear", "boosted"])
@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_lower_precision_goes_nearly_so(precision, attention):
    exact, other = (train(small(attention), corpus(), settings(precision=p), progress=False) for p in ("no", precision))
    assert losses(other) != losses(exact)
    assert losses(other) == pytest.approx(losses(exact), rel=0.02)


@pytest.mark.parametrize("precision", ["no", "tf32", "bf16"])
@pytest.mark.parametrize("attention", ARMS)
def test_a_captured_update_goes_as_eager(attention, precision):
    """With dropout, which draws in a replayed graph what it draws in an eager update of the same seed."""
    found, models = [], []
    for capture in (False, True):
        models.append(model := small(attention, dropout=0.1))
        config = settings(precision=precision, accumulation=2, keep="last")
        found.append(train(model, corpus(), config, progress=False, capture=capture))
    plain, captured = found
    assert losses(captured) == pytest.approx(losses(plain), rel=1e-5 if precision == "no" else 0.02)
    assert captured.learning_rate == plain.learning_rate
    for a, b in zip(*(model.parameters() for model in models)):
        assert (a - b).norm() <= (1e-4 if precision == "no" else 0.05) * a.norm() + 1e-6


@pytest.mark.parametrize("attention", ARMS)
def test_a_stack_goes_as_its_rows_alone(attention):
    """From the fourth update on in a replayed graph, each row at its own rate."""
    configs = [settings(learning_rate=rate, seed=seed) for rate, seed in ((1e-3, 0), (4e-3, 0), (1e-3, 1))]
    stack = Stack([small(attention) for _ in configs])
    for config, row in zip(configs, train_side_by_side(stack, corpus(), configs), strict=True):
        alone = train(small(attention), corpus(), config, progress=False)
        assert losses(row.history) == pytest.approx(losses(alone), rel=1e-4)
        assert row.history.learning_rate == alone.learning_rate


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_update_is_captured():
    eager, both = (train(small(), corpus(), settings(compile=on), progress=False, capture=on) for on in (False, True))
    assert losses(both) == pytest.approx(losses(eager), rel=1e-4)


def test_a_rate_group_counts_in_a_captured_update():
    name = "blocks.0.attention.query.weight"
    frozen = RateGroup(names=(name,), multiplier=lambda model, step, steps: float(step < 5))
    finals = {}
    for capture in (False, True):
        model = small()
        train(model, corpus(), settings(), progress=False, capture=capture, rates=(frozen,))
        finals[capture] = dict(model.named_parameters())[name].detach().cpu()
    assert torch.allclose(finals[True], finals[False], atol=1e-5)
    assert not torch.allclose(finals[True], dict(small().named_parameters())[name], atol=1e-4)


def test_what_specialises_is_measured_where_the_model_is():
    watch = Specialisation(next(sequential_windows(corpus().valid[:65], T, batch_size=4)), at=[0, 6])
    train(model := small("multi_head"), corpus(), settings(), progress=False, rates=[RateGroup((), watch)])
    watch.observe(model, 12)
    found = watch.result()
    assert found["step"] == [0, 6, 12] and np.isfinite(found["maturity"]).all()


@pytest.mark.parametrize("config", [dict(precision="fp16"), dict(document_end=0)])
def test_what_cannot_be_captured_is_refused(config):
    with refused("capture"):
        train(small(), corpus(), settings(**config), progress=False, capture=True)


def test_a_model_that_waits_for_the_gpu_is_told_of():
    class Waiting(LanguageModel):
        def forward(self, *given, **options):
            loss = super().forward(*given, **options)
            return loss if loss.item() > 0 else -loss

    model = Waiting(small().config, seed=0)
    with pytest.raises(RuntimeError, match="capture=False"):
        train(model, corpus(), settings(), progress=False, capture=True)


@pytest.mark.filterwarnings("ignore")  # what torch says of itself when it compiles
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_compiled_training_goes_as_eager(precision):
    plain, compiled = (
        train(small(), corpus(), settings(precision=precision, compile=on), progress=False) for on in (False, True)
    )
    assert losses(compiled) == pytest.approx(losses(plain), rel=1e-4 if precision == "no" else 0.02)


@pytest.mark.parametrize("precision, capture", [("no", False), ("no", True), ("fp16", False)])
def test_a_stopped_run_goes_on(tmp_path, monkeypatch, precision, capture):
    config = settings(precision=precision, checkpoint_every=4)
    options = dict(progress=False, capture=capture)
    whole = train(small(dropout=0.1), corpus(), config, **options)
    update = training.update

    def dying(run):
        if run.step == 7:
            raise KeyboardInterrupt
        update(run)

    monkeypatch.setattr(training, "update", dying)
    with pytest.raises(KeyboardInterrupt):
        train(small(dropout=0.1), corpus(), config, folder=tmp_path, **options)
    began = []
    monkeypatch.setattr(training, "update", lambda run: (began.append(run.step), update(run)))
    again = train(small(dropout=0.1), corpus(), config, folder=tmp_path, **options)
    assert began[0] == 6
    assert again.step == whole.step and losses(again) == pytest.approx(losses(whole), rel=1e-4)


def test_generators_are_left_as_they_were():
    before = torch.cuda.get_rng_state()
    train(small(dropout=0.1), corpus(), settings(), progress=False)
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("attention", ARMS)
def test_scoring_and_sampling(attention):
    model, tokens = small(attention).eval(), corpus().valid
    there = copy.deepcopy(model).cuda()
    assert evaluate(there, tokens).loss == pytest.approx(evaluate(model, tokens).loss, rel=1e-5)
    prompt = torch.as_tensor(tokens[:5])[None]
    here = model.generate(prompt, 8, temperature=0.0)
    assert torch.equal(there.generate(prompt.cuda(), 8, temperature=0.0).cpu(), here)
    drawn = [there.generate(prompt.cuda(), 8, seed=3) for _ in range(2)]
    assert torch.equal(*drawn)


def test_a_saved_model_comes_back(tmp_path):
    model = small().cuda()
    model.save_pretrained(tmp_path)
    back = LanguageModel.from_pretrained(tmp_path)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(model.parameters(), back.parameters()))


def test_an_experiment_runs(tmp_path):
    quick = EXPERIMENTS["quick"]
    short = replace(quick, name="short", seeds=(1,), train=quick.train | dict(steps=8))
    records = run_experiment(short, folder=tmp_path / "results", work=tmp_path / "work", progress=False, capture=True)
    assert len(records) == len(short.arms)
    assert all(math.isfinite(r.measured["test_loss"]) and "NVIDIA" in r.provenance["device"].upper() for r in records)
