"""Chapter 15: the claims with their mutants, the loop against one by hand, stopping and going on, faults, errors."""

import hashlib
import inspect
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import tqdm
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from claims import claim
from gbattn import training
from gbattn.corpora import TokenStream
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.checkpoints import checkpoints, load_weights
from gbattn.lab.processes import check_device, check_precision
from gbattn.lab.run_folder import RunFolder
from gbattn.lab.speed import measure_speed
from gbattn.lab.token_cache import manifest_checksum
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.training import (
    Evaluation,
    History,
    RateGroup,
    TrainConfig,
    decay_groups,
    evaluate,
    learning_rate,
    step_seed,
)

T, V = 8, 20
RANDOM = np.random.RandomState(0)
TOKENS = RANDOM.randint(0, V, 1001)
TOKENS[1::2] = (TOKENS[:-1:2] * 3 + 1) % V  # every other token can be learned
CORPUS = SimpleNamespace(train=TOKENS[:801], valid=TOKENS[801:])
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Toy(nn.Module):
    """A model of the right shape: an embedding, what came before on average, dropout, a head."""

    def __init__(self, dropout=0.0, seed=0, width=6):
        super().__init__()
        self.config = SimpleNamespace(max_length=T, vocab_size=V, to_dict=lambda: {"width": width})
        self.embedding, self.head = nn.Embedding(V, width), nn.Linear(width, V)
        self.dropout = nn.Dropout(dropout)
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3, generator=generator)
        self.seen = []

    def forward(self, tokens, targets, *, reduction="mean"):
        if self.training:
            self.seen.append(tokens)
        logits = self.logits(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)

    def logits(self, tokens):
        x = self.embedding(tokens)
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.head(self.dropout(torch.tanh(x + past)))


def config(**options):
    given = {"steps": 20, "batch_size": 4, "learning_rate": 0.01, "log_every": 1, "evaluate_every": 10}
    return TrainConfig(**(given | options))


def run(model=None, corpus=CORPUS, folder=None, **options):
    model = Toy(dropout=0.2) if model is None else model
    return train(model, corpus, config(**options), folder=folder, progress=False)


def curve(history):
    """All of a history but the clock."""
    return {name: x for name, x in history.to_dict().items() if name != "seconds"}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# ---- Claims ----


def adamw_path(gradients, scale=1.0, epsilon=0.0, rule="adamw"):
    m, v, path = 0.0, 0.0, []
    for t, g in enumerate(scale * gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        path.append(g if rule == "sgd" else m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.999**t)) + epsilon))
    return np.array(path)


@st.composite
def gradient_paths(draw):
    seed = draw(st.integers(0, 2**32 - 1))
    gradients = np.random.RandomState(seed).standard_normal((draw(st.integers(1, 9)), 3))
    return gradients, 10 ** draw(st.floats(-6, 6))


def scaled_steps(problem, rule):
    gradients, scale = problem
    ours = adamw_path(gradients, scale, rule=rule)
    return np.concatenate([ours, ours[:1]]), np.concatenate([adamw_path(gradients), np.sign(gradients[:1])])


@claim(gradient_paths(), tolerance=1e-9, mutant=lambda p: scaled_steps(p, "sgd"))
def test_prop_adamw_scale(problem):
    """AdamW's steps do not change when all gradients are scaled alike, and its first step is a sign."""
    return scaled_steps(problem, "adamw")


@st.composite
def schedules(draw):
    steps = draw(st.integers(1, 60))
    warm = draw(st.integers(0, steps - 1))
    peak, fraction = draw(st.floats(1e-5, 2)), draw(st.floats(0, 1))
    return TrainConfig(steps=steps, learning_rate=peak, warmup_steps=warm, final_fraction=fraction)


def schedule_sum(c, start=1):
    n = c.steps - c.warmup_steps
    warm = (c.warmup_steps + start) / 2 if c.warmup_steps else 0
    closed = warm + c.final_fraction * n + (1 - c.final_fraction) * (n + start) / 2
    rates = [learning_rate(c, step, c.steps) for step in range(c.steps)]
    return np.array([sum(rates)]), np.array([c.learning_rate * closed])


@claim(schedules(), tolerance=1e-10, mutant=lambda c: schedule_sum(c, start=0))
def test_prop_schedule_sum(problem):
    """The sum of a schedule in closed form; a schedule that starts at 0 adds up to another."""
    return schedule_sum(problem)


@st.composite
def interrupted_runs(draw):
    steps = draw(st.integers(2, 12))
    return draw(st.integers(0, 2**32 - 1)), steps, draw(st.integers(1, steps - 1))


def with_interruption(problem, seeded_by_step):
    seed, steps, stop = problem

    def updates(state, first, last, generator):
        for step in range(first, last):
            if seeded_by_step:
                generator.manual_seed(step_seed(seed, step) >> 1)
            noise = torch.randn(3, generator=generator, dtype=torch.float64)
            state = torch.cos(state + noise) + 0.1 * step
        return state

    start = torch.zeros(3, dtype=torch.float64)
    whole = updates(start, 0, steps, torch.Generator().manual_seed(seed))
    saved = updates(start, 0, stop, torch.Generator().manual_seed(seed))
    return updates(saved, stop, steps, torch.Generator().manual_seed(seed)), whole


@claim(interrupted_runs(), tolerance=0.0, mutant=lambda p: with_interruption(p, False))
def test_thm_resume(problem):
    """A map of state and step goes on from any saved state; one with a stream of its own does not."""
    return with_interruption(problem, True)


@st.composite
def parted_batches(draw):
    sizes = draw(st.lists(st.integers(1, 9), min_size=2, max_size=5).filter(lambda s: len(set(s)) > 1))
    rows = np.random.RandomState(draw(st.integers(0, 2**32 - 1))).standard_normal((sum(sizes), 4))
    return sizes, torch.from_numpy(rows)


def gradient_of_parts(problem, weigh):
    sizes, rows = problem
    w = torch.ones(4, dtype=torch.float64, requires_grad=True)
    loss = lambda part: nn.functional.softplus(part @ w)
    (whole,) = torch.autograd.grad(loss(rows).mean(), w)
    sums = [torch.autograd.grad(loss(part).sum(), w)[0] for part in rows.split(sizes)]
    mine = sum(sums) / len(rows) if weigh else sum(s / n for s, n in zip(sums, sizes)) / len(sizes)
    return mine, whole


@claim(parted_batches(), tolerance=1e-12, mutant=lambda p: gradient_of_parts(p, False))
def test_prop_parts(problem):
    """Summed gradients over the number of all tokens are the gradient of the mean; a mean of means is not."""
    return gradient_of_parts(problem, True)


# ---- Config, schedule, groups, seeds ----

WRONG = [
    ({"steps": 0}, "steps: got 0; want None or a positive integer"),
    ({"steps": True}, "steps: got True"),
    ({"steps": None}, r"steps, epochs: got \(None, None\); want exactly one"),
    ({"epochs": 2.0}, r"steps, epochs: got \(20, 2.0\); want exactly one"),
    ({"steps": None, "epochs": 0}, "epochs: got 0; want None or a positive, finite number"),
    ({"batch_size": 2.5}, "batch_size: got 2.5; want a positive integer"),
    ({"batch_size": 9 * 10**12}, "batch_size: got 9000000000000; want a positive integer up to 1,048,576"),
    ({"evaluate_batch_size": 9 * 10**12}, "evaluate_batch_size: got 9000000000000; want a positive integer up to"),
    ({"length": 9 * 10**12}, "length: got 9000000000000; want None or a positive integer up to 16,777,216"),
    ({"steps": 10**400}, "steps: got 1000.*; want None or a positive integer up to"),
    ({"steps": None, "epochs": 1e300}, "epochs: got 1e.300; want None or a positive, finite number up to"),
    ({"document_end": 10**30}, "document_end: got 1000000000000000000000000000000; want None or an integer"),
    ({"length": 0}, "length: got 0"),
    ({"learning_rate": 0.0}, "learning_rate: got 0.0; want a positive, finite number"),
    ({"learning_rate": math.inf}, "learning_rate: got inf"),
    ({"learning_rate": math.nan}, "learning_rate: got nan"),
    ({"learning_rate": "fast"}, "learning_rate: got 'fast'"),
    ({"warmup_steps": -1}, "warmup_steps: got -1; want None or an integer, 0 or more"),
    ({"schedule": "linear"}, "schedule: got 'linear'; want one of 'cosine', 'constant'"),
    ({"final_fraction": 1.1}, "final_fraction: got 1.1; want a number from 0 to 1"),
    ({"weight_decay": -0.1}, "weight_decay: got -0.1; want a finite number, 0 or more"),
    ({"decay": "all"}, "decay: got 'all'; want one of 'matrices', 'everything'"),
    ({"betas": (0.9, 1.0)}, r"betas: got \(0.9, 1.0\); want two numbers"),
    ({"betas": 0.9}, "betas: got 0.9"),
    ({"clip": 0}, "clip: got 0; want None or a positive, finite number"),
    ({"accumulation": 3}, "batch_size: got 4 with accumulation = 3; want a multiple"),
    ({"accumulation": None}, "accumulation: got None"),
    ({"precision": "fp8"}, "precision: got 'fp8'; want one of 'no', 'tf32', 'bf16', 'fp16'"),
    ({"compile": 1}, "compile: got 1; want True or False"),
    ({"seed": -1}, r"seed: got -1; want an integer from 0 to 2\*\*32 - 1"),
    ({"seed": 2**32}, "seed: got 4294967296"),
    ({"evaluate_every": 0}, "evaluate_every: got 0"),
    ({"evaluate_batch_size": 0}, "evaluate_batch_size: got 0"),
    ({"checkpoint_every": -2}, "checkpoint_every: got -2"),
    ({"log_every": 0}, "log_every: got 0"),
    ({"keep": "first"}, "keep: got 'first'; want one of 'best', 'last'"),
    ({"document_end": -1}, "document_end: got -1; want None or an integer, 0 or more"),
]


@pytest.mark.parametrize("options, message", WRONG, ids=lambda x: str(x)[:30])
def test_a_wrong_setting_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_a_config_goes_through_json():
    made = config(betas=[0.8, 0.95], seed=np.int64(3), learning_rate=np.float64(0.5), compile=True)
    back = TrainConfig(**json.loads(json.dumps(made.to_dict())))
    assert back == made and back.betas == (0.8, 0.95) and type(back.seed) is int


def test_epochs_become_steps():
    stream = TokenStream(CORPUS.train, T, 3, seed=0)
    assert stream.n_windows == 100
    for epochs, steps in ((0.001, 1), (1, 33), (1.5, 50), (3, 100)):
        assert TrainConfig(epochs=epochs).total_steps(SimpleNamespace(n_windows=3200)) == max(1, round(100 * epochs))
        assert TrainConfig(epochs=epochs, batch_size=3).total_steps(stream) == steps
    assert TrainConfig(steps=7).total_steps(stream) == 7


def test_the_cosine_is_torchs():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.3)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=17, eta_min=0.3 * 0.1)
    c = TrainConfig(steps=17, learning_rate=0.3, warmup_steps=0, final_fraction=0.1)
    for step in range(17):
        assert math.isclose(learning_rate(c, step, 17), torchs.get_last_lr()[0], rel_tol=1e-9)
        optimizer.step()
        torchs.step()


def test_schedule_values():
    c = TrainConfig(steps=8, learning_rate=1.0, warmup_steps=3)
    rates = [learning_rate(c, step, 8) for step in range(8)]
    cosine = [0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(5)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, *cosine], abs=1e-15)
    constant = TrainConfig(steps=8, learning_rate=2.0, warmup_steps=2, schedule="constant")
    assert [learning_rate(constant, step, 8) for step in range(8)] == [1.0] + 7 * [2.0]
    twelfth = TrainConfig(steps=24, learning_rate=1.0)
    assert [learning_rate(twelfth, step, 24) for step in range(3)] == [0.5, 1.0, 1.0]
    for steps in (1, 2, 11, 400):
        c = TrainConfig(steps=steps)
        assert all(learning_rate(c, step, steps) > 0 for step in range(steps))


@pytest.mark.parametrize("step", [-1, 8, 1.5, "0"])
def test_a_step_outside_the_run(step):
    with pytest.raises(ValueError, match="steps: got 2.5; want a positive integer"):
        learning_rate(config(), 0, 2.5)
    with pytest.raises(ValueError, match="step: got .*; want an integer from 0 to 7"):
        learning_rate(TrainConfig(steps=8), step, 8)


def test_groups_take_each_parameter_once():
    model = Toy()
    model.tied = model.embedding  # shared
    model.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    decays, rest = decay_groups(model, 0.3)
    assert decays["weight_decay"] == 0.3 and rest["weight_decay"] == 0.0
    assert [p.shape for p in decays["params"]] == [(V, 6), (V, 6)] and [p.shape for p in rest["params"]] == [(V,)]
    decays, rest = decay_groups(model, 0.3, "everything")
    assert len(decays["params"]) == 3 and rest["params"] == []
    with pytest.raises(ValueError, match="model: got no parameter that learns; want one or more"):
        decay_groups(model.requires_grad_(False), 0.3)


def test_what_decays():
    """Without a gradient, a matrix shrinks as the schedule says and a bias stays."""
    for decay in ("matrices", "everything"):
        model = Toy()
        model.lone, model.bias = nn.Parameter(torch.ones(1, 1)), nn.Parameter(torch.ones(1))
        forward = model.forward
        model.forward = lambda *a, f=forward, m=model, **k: f(*a, **k) + 0 * (m.lone.sum() + m.bias.sum())
        history = train(model, CORPUS, config(keep="last", weight_decay=0.5, decay=decay), progress=False)
        shrunk = math.prod(1 - 0.5 * rate for rate in history.learning_rate)
        assert model.lone.item() == pytest.approx(shrunk, rel=1e-5)
        assert model.bias.item() == pytest.approx(shrunk if decay == "everything" else 1.0, rel=1e-5)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: decay_groups(Toy(), 0.1, "Everything"),
            "decay: got 'Everything'; want one of 'matrices', 'everything'",
        ),
        (lambda: decay_groups(Toy(), -0.1), "weight_decay: got -0.1; want a finite number, 0 or more"),
        (lambda: step_seed(1.7, 0), "seed: got 1.7; want an integer, 0 or more"),
        (lambda: step_seed(0, -1), "step: got -1; want an integer, 0 or more"),
        (lambda: step_seed(0, 0, "1"), "process: got '1'; want an integer, 0 or more"),
    ],
)
def test_parts_of_a_run_say_what_is_wrong(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_seeds_of_steps():
    assert step_seed(0, 0) == 15793235383387715774  # frozen: a change would change every run
    many = {step_seed(seed, step, process) for seed in range(8) for step in range(50) for process in range(4)}
    assert len(many) == 1600 and all(0 <= x < 2**64 for x in many)


# ---- The loop ----


def loop_by_hand(model, c, corpus=CORPUS):
    """The same run with nothing but torch."""
    stream = TokenStream(corpus.train, T, c.batch_size, c.seed)
    groups = decay_groups(model, c.weight_decay, c.decay)
    optimizer = torch.optim.AdamW(groups, betas=c.betas, foreach=False)
    losses = []
    model.train()
    for step in range(c.steps):
        torch.manual_seed(step_seed(c.seed, step))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(c, step, c.steps)
        loss = model(*stream.batch(step))
        optimizer.zero_grad()
        loss.backward()
        if c.clip:
            nn.utils.clip_grad_norm_(model.parameters(), c.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{}, {"clip": 0.05}, {"clip": None}, {"betas": (0.5, 0.9), "weight_decay": 0.2}])
def test_train_is_the_loop_by_hand(options):
    ours, theirs = Toy(dropout=0.2), Toy(dropout=0.2)
    history = run(ours, keep="last", **options)
    losses = loop_by_hand(theirs, config(**options))
    assert history.loss == pytest.approx(losses, rel=1e-5)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-4, atol=1e-6)


def test_clipping_binds():
    assert max(run(Toy()).gradient_norm) > 0.05
    free, bound = (run(Toy(), clip=clip).loss for clip in (None, 0.05))
    assert free[0] == bound[0] and free != bound


@pytest.mark.parametrize("parts", [2, 4])
def test_accumulation_is_the_large_batch(parts):
    whole, cut = Toy().double(), Toy().double()
    a, b = run(whole), run(cut, accumulation=parts)
    assert a.loss == pytest.approx(b.loss, abs=1e-12) and a.gradient_norm == pytest.approx(b.gradient_norm, abs=1e-12)
    torch.testing.assert_close(weights(whole), weights(cut), rtol=1e-9, atol=1e-12)
    assert {len(x) for x in cut.seen[:parts]} == {4 // parts}


END = 3  # as if it ended a document; it stands once in four or five windows of eight, at every place


def boosted_model():
    sizes = dict(vocab_size=V, max_length=T, d_model=8, n_layers=1, n_heads=2)
    return LanguageModel(ModelConfig(attention="boosted", **sizes), seed=0)


def pieces(batch):
    """The documents of a batch, each a sequence of its own, with its targets."""
    for tokens, targets in zip(*batch):
        for piece, own in zip(*(x.tensor_split((tokens == END).nonzero()[:, 0] + 1) for x in (tokens, targets))):
            if len(piece):
                yield piece[None], own.masked_fill(piece == END, -100)[None]


@pytest.mark.parametrize("parts", [1, 4])
def test_documents_are_trained_as_if_each_stood_alone(parts):
    """Also in parts that hold different numbers of targets: the loss is the mean over all that are scored."""
    made, alone = boosted_model().double(), boosted_model().double()
    told = dict(steps=3, learning_rate=0.05, clip=None, keep="last", document_end=END)
    history = run(made, accumulation=parts, **told)
    c, losses, fewer = config(**told), [], 0
    optimizer = torch.optim.AdamW(decay_groups(alone, c.weight_decay, c.decay), betas=c.betas)
    for step in range(c.steps):
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = learning_rate(c, step, c.steps)
        found = list(pieces(TokenStream(CORPUS.train, T, c.batch_size, c.seed).batch(step)))
        scored = sum(int((targets != -100).sum()) for _, targets in found)
        fewer += scored < c.batch_size * T
        loss = sum(alone(*piece, reduction="sum") for piece in found) / scored
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert fewer and history.loss == pytest.approx(losses, rel=1e-10)
    torch.testing.assert_close(weights(made), weights(alone), rtol=1e-8, atol=1e-10)
    told = dict(length=T, document_end=END)
    loss, _, _, scored = evaluate(made, CORPUS.valid, **told)
    assert history.validation_loss[-1] == pytest.approx(loss, rel=1e-12)
    assert scored == len(CORPUS.valid) - 1 - (CORPUS.valid[:-1] == END).sum()
    assert abs(evaluate(made, CORPUS.valid, length=T).loss - loss) > 1e-3


def test_documents_want_a_model_that_takes_them():
    message = "document_end: got 3 with a Toy; want None, or a model whose forward takes documents and reduction"
    with pytest.raises(ValueError, match=message):
        run(Toy(), document_end=END)
    with pytest.raises(ValueError, match=message):
        evaluate(Toy(), CORPUS.valid, document_end=END)
    with pytest.raises(ValueError, match="document_end: got 'x'"):
        evaluate(boosted_model(), CORPUS.valid, document_end="x")


def test_a_run_with_documents_is_another_run(tmp_path):
    run(boosted_model(), folder=tmp_path, steps=2)
    with pytest.raises(ValueError, match="document_end = 3"):
        run(boosted_model(), folder=tmp_path, steps=2, document_end=END)


def test_no_model_moves_the_data_or_the_callers_generator():
    seen = []
    for dropout in (0.0, 0.5):
        model = Toy(dropout)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        run(model, evaluate_every=20)
        assert torch.equal(torch.get_rng_state(), before)
        seen.append(torch.stack(model.seen[:20]))
    assert torch.equal(*seen)
    other = Toy()
    run(other, seed=1, evaluate_every=20)
    assert not torch.equal(torch.stack(other.seen[:20]), seen[0])


def test_evaluating_more_often_changes_nothing_else():
    rare, often = run(evaluate_every=20), run(evaluate_every=3)
    assert rare.loss == often.loss
    assert often.validation_step == [3, 6, 9, 12, 15, 18, 20] and rare.validation_step == [20]


def test_the_history():
    history = run(log_every=8, steps=20)
    every = run(log_every=1, steps=20)
    assert history.step == [8, 16, 20] and history.tokens == [8 * 32, 16 * 32, 20 * 32]
    assert history.loss == pytest.approx([np.mean(every.loss[a:b]) for a, b in ((0, 8), (8, 16), (16, 20))], abs=1e-12)
    assert history.learning_rate == [every.learning_rate[i - 1] for i in (8, 16, 20)]
    assert history.seconds == sorted(history.seconds) and history.seconds[0] > 0
    assert history.best_loss == min(history.validation_loss) and history.finished
    assert History(**json.loads(json.dumps(history.to_dict()))) == history


def test_a_look_at_each_pass_over_the_text():
    history = run(steps=None, epochs=3, batch_size=6, evaluate_every=None)  # 100 windows
    assert history.step[-1] == 50 and history.validation_step == [17, 34, 50]


def overfitting(**options):
    """A run whose best evaluation is not its last."""
    text = SimpleNamespace(train=TOKENS[:81], valid=RANDOM.permutation(TOKENS)[:400])
    options = {"learning_rate": 0.1, "steps": 40, "evaluate_every": 4} | options
    model = Toy()
    return model, text, run(model, text, **options)


def test_the_best_weights_are_what_is_left():
    model, text, history = overfitting()
    assert 0 < history.best_step < 40 and not model.training
    assert evaluate(model, text.valid).loss == history.best_loss == min(history.validation_loss)
    model, text, last = overfitting(keep="last")
    assert evaluate(model, text.valid).loss == last.validation_loss[-1] > history.best_loss


def test_the_same_run_on_numpys_numbers_and_lists():
    as_lists = SimpleNamespace(train=CORPUS.train.tolist(), valid=CORPUS.valid.tolist())
    assert run(corpus=as_lists).loss == run().loss


def test_half_precision_keeps_the_weights():
    model = Toy()
    history = run(model, precision="bf16")
    assert weights(model).dtype == torch.float32
    exact = run(Toy())
    assert history.loss != exact.loss and history.loss == pytest.approx(exact.loss, rel=0.02)


def test_compiling_is_asked_for(monkeypatch, tmp_path):
    """What torch.compile is given, without the minutes that it takes."""
    asked, real = [], torch.compile

    def compiled(module, **options):
        asked.append(options)
        return real(module, backend="eager", **options)

    monkeypatch.setattr(torch, "compile", compiled)
    model = Toy(0.2)
    history = run(model, compile=True)
    assert asked == [{"dynamic": False}]
    assert history.loss == pytest.approx(run().loss, rel=1e-5)
    assert type(model) is Toy and "forward" not in vars(model)


def test_the_model_comes_out_as_it_went_in():
    model = Toy()
    names = dict(vars(model))
    run(model, precision="bf16")
    assert vars(model).keys() == names.keys() and model.forward.__func__ is Toy.forward
    assert all(p.grad is None for p in model.parameters())


# ---- Checkpoints ----


def stop_after(monkeypatch, step):
    """Make the run die in the update after so many."""
    update = training._update

    def dying(run):
        if run.step == step:
            raise KeyboardInterrupt
        update(run)

    monkeypatch.setattr(training, "_update", dying)


@pytest.mark.parametrize("stop", [1, 3, 10, 13, 19])
@pytest.mark.parametrize("options", [{}, {"log_every": 4, "accumulation": 2, "precision": "bf16"}, {"keep": "last"}])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, monkeypatch, stop, options):
    whole_model, model = Toy(0.2), Toy(0.2)
    whole = run(whole_model, checkpoint_every=3, **options)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, stop)
        run(Toy(0.2), folder=tmp_path, checkpoint_every=3, **options)
    resumed = run(model, folder=tmp_path, checkpoint_every=5, **options)  # may differ: it decides nothing
    assert curve(resumed) == curve(whole)
    assert torch.equal(weights(model), weights(whole_model))


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


class Interrupted(Toy):
    """A toy that stops once, in the first call that is one too many."""

    def __init__(self, calls):
        super().__init__(dropout=0.2)
        self.calls = calls

    def forward(self, *args, **options):
        self.calls -= self.training
        if self.training and self.calls == -1:
            raise KeyboardInterrupt
        return super().forward(*args, **options)


@pytest.mark.parametrize("calls", [26, 27])  # before an update, and inside one, where half a gradient is left
def test_the_model_that_was_stopped_goes_on_bit_for_bit(tmp_path, calls):
    options = dict(steps=20, accumulation=2, checkpoint_every=5, log_every=1, keep="last")
    straight, stopped = Toy(dropout=0.2), Interrupted(calls)
    whole = run(straight, **options)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, folder=tmp_path, **options)
    assert [*checkpoints(tmp_path)] == [10]
    assert run(stopped, folder=tmp_path, **options).loss == whole.loss
    assert torch.equal(weights(stopped), weights(straight))


class Signalled(Toy):
    """A toy that sends its own process signals, each in the middle of an update."""

    def __init__(self, calls, *signals):
        super().__init__(dropout=0.2)
        self.calls, self.signals = calls, signals

    def forward(self, *args, **options):
        self.calls -= self.training
        if self.training and self.calls == -1:
            for number in self.signals:
                os.kill(os.getpid(), number)
        return super().forward(*args, **options)


@pytest.fixture
def ctrl_c():
    """A shell that runs the tests in the background has told them to ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(os.name != "posix", reason="here no process gets such signals")
@pytest.mark.parametrize(("number", "end"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
@pytest.mark.parametrize("calls", [0, 13, 25, 39])  # of two in each update
def test_a_signal_lets_the_update_end_and_loses_none(tmp_path, number, end, calls, capsys):
    options = dict(steps=20, accumulation=2, log_every=4, keep="last")
    straight, stopped, resumed = Toy(dropout=0.2), Signalled(calls, number), Toy(dropout=0.2)
    whole = run(straight, **options)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(end) as caught:
        run(stopped, folder=tmp_path, **options)
    step = calls // 2 + 1
    said = f"stopped after step {step}; the last good checkpoint is {checkpoints(tmp_path)[step]}"
    if number == signal.SIGTERM:
        assert caught.value.code == 143 and said in capsys.readouterr().err
    else:
        assert said in str(caught.value)
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))
    assert curve(run(resumed, folder=tmp_path, **options)) == curve(whole)
    assert torch.equal(weights(resumed), weights(straight))


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.skipif(os.name != "posix", reason="here no process gets such signals")
def test_the_second_signal_acts_at_once_and_without_a_folder_the_first(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(Signalled(5, signal.SIGINT, signal.SIGINT), folder=tmp_path)
    assert not checkpoints(tmp_path)
    model = Signalled(5, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(model)
    assert model.calls == -1


@pytest.mark.skipif(os.name != "posix", reason="here no process gets such signals")
def test_who_handles_a_signal_goes_on_doing_so(tmp_path):
    seen = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        assert run(Signalled(5, signal.SIGTERM), folder=tmp_path).finished
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_gradient_of_the_callers_is_not_used():
    straight, touched = Toy(), Toy()
    for p in touched.parameters():
        p.grad = torch.ones_like(p)
    assert curve(run(touched)) == curve(run(straight))
    assert torch.equal(weights(touched), weights(straight))


def test_what_a_run_left_begins_another_where_its_checkpoints_are_gone(tmp_path):
    model, straight = Toy(0.2), Toy(0.2)
    run(model, folder=tmp_path)
    run(straight)
    shutil.rmtree(tmp_path)
    assert run(model, folder=tmp_path).loss == run(straight).loss
    with pytest.raises(ValueError, match="folder: got initial weights"):
        run(Toy(0.2), folder=tmp_path)


def test_a_model_that_a_run_left_and_that_was_changed_is_another(tmp_path):
    model = Toy(0.2)
    run(model, folder=tmp_path)
    with torch.no_grad():
        model.head.bias += 1
    with pytest.raises(ValueError, match="folder: got initial weights"):
        run(model, folder=tmp_path)


def test_each_model_that_a_run_left_may_go_on_with_it(tmp_path):
    """Also one that was stopped before another finished the run."""
    stopped, fresh = Interrupted(13), Toy(dropout=0.2)
    with pytest.raises(KeyboardInterrupt):
        run(stopped, folder=tmp_path, checkpoint_every=5)
    history = run(fresh, folder=tmp_path)
    assert run(stopped, folder=tmp_path) == history
    assert torch.equal(weights(stopped), weights(fresh))


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
            raise OSError("no space left")
        real(number)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="no space left"):
        run(folder=tmp_path, checkpoint_every=4)
    assert [*checkpoints(tmp_path)] == [4]
    monkeypatch.setattr(os, "fsync", real)
    assert curve(run(folder=tmp_path)) == curve(run())


FULL = """
import resource, sys
from test_15_training import Toy, run

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
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE, env=ENVIRONMENT).stdout
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
    assert events == [*3 * ["file"], checkpoints(tmp_path)[20].stat().st_ino, tmp_path.stat().st_ino]


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
    def refused(path, target):
        assert len([*path.iterdir()]) == 3 and not target.exists()
        raise OSError("here the power fails")

    with monkeypatch.context() as patched, pytest.raises(OSError, match="the power fails"):
        patched.setattr(Path, "rename", refused)
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
    want = "want a whole checkpoint: delete that one"
    with pytest.raises(ValueError, match=f"folder: got .*step-00000020, which cannot be read .*{want}"):
        run(folder=tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_checkpoint_with_other_bytes(tmp_path, name):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / name
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"cannot be read .*{name} has other bytes than were written"):
        run(folder=tmp_path)


KEYS = ["step", "identity", "history", "unlogged", "seconds", "scaler", "files"]


@pytest.mark.parametrize("key", [*KEYS, "sha256"])
def test_a_checkpoint_that_lacks_something(tmp_path, key):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / "training.json"
    state = json.loads(path.read_text())
    del state[key]
    path.write_text(json.dumps(state))
    said = "KeyError: 'sha256'" if key == "sha256" else "ValueError: training.json: got contents that do not match"
    with pytest.raises(ValueError, match=f"which cannot be read .{said}.*; want a whole checkpoint: delete that one"):
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
    with pytest.raises(ValueError, match=f"folder: got .*step-00000020, which cannot be read .*{name}"):
        run(folder=tmp_path)


@pytest.mark.parametrize("change", ["shape", "name"])
@pytest.mark.parametrize("name", ["model", "optimizer"])
def test_a_checkpoint_with_tensors_of_another_model(tmp_path, name, change):
    from safetensors.torch import load_file, save_file

    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20]
    tensors = load_file(path / f"{name}.safetensors")
    first = next(key for key in sorted(tensors) if tensors[key].ndim)
    tensors[first if change == "shape" else "x"] = tensors.pop(first)[:1].clone()
    save_file(tensors, path / f"{name}.safetensors")
    sealed(path)
    with pytest.raises(ValueError, match="folder: got .*step-00000020 with other tensors than the model has; want"):
        run(folder=tmp_path)


def test_a_loss_that_was_edited(tmp_path):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / "training.json"
    state = json.loads(path.read_text())
    state["history"]["best_loss"] = 0.5
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="training.json: got contents that do not match their checksum"):
        run(folder=tmp_path)


def test_a_checkpoint_that_no_parser_can_read(tmp_path):
    run(folder=tmp_path)
    file = checkpoints(tmp_path)[20] / "training.json"
    whole = file.read_text()
    file.write_text("[" * 100_000)
    with pytest.raises(ValueError, match="training.json: got RecursionError: .*; want a whole checkpoint"):
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
    with pytest.raises(ValueError, match="training.json: got step 20; want 30"):
        run(folder=tmp_path)


def test_a_history_goes_through_json():
    history = run()
    assert History.from_dict(json.loads(json.dumps(history.to_dict()))) == history
    assert History.from_dict(History().to_dict()) == History()
    with pytest.raises(ValueError, match="history, best_step: got nothing"):
        History.from_dict({name: x for name, x in History().to_dict().items() if name != "best_step"})
    for change in ({"tokens": [1]}, {"finished": "no"}, {"best_step": None}, {"loss": None}):
        with pytest.raises(ValueError, match=next(iter(change))):
            History.from_dict(history.to_dict() | change)
    with pytest.raises(ValueError, match="history, step: got nothing; want a list"):
        History.from_dict([])


def test_a_checkpoint_of_another_format(tmp_path):
    run(folder=tmp_path)
    path = checkpoints(tmp_path)[20] / "training.json"
    path.write_text(path.read_text().replace("gbattn checkpoint 2", "gbattn checkpoint 1"))
    with pytest.raises(ValueError, match="folder: got .*'gbattn checkpoint 1'; want 'gbattn checkpoint 2'"):
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
    want = {"gone": f" without step {best}; want its best checkpoint too", "cut": "want a whole checkpoint"}[damage]
    with pytest.raises(ValueError, match=f"folder: got .*{want}: copy it again, or delete {tmp_path} to begin anew"):
        train(model, text, c, folder=tmp_path, progress=False)
    shutil.rmtree(path, ignore_errors=True)
    path.with_name("kept").rename(path)
    assert train(model, text, c, folder=tmp_path, progress=False).best_step == best
    assert torch.equal(weights(model), left)


def frozen(model):
    model.embedding.requires_grad_(False)
    return model


OTHER = {
    "learning rate": (lambda: {"learning_rate": 0.02}, "got learning_rate = 0.02; want learning_rate = 0.01, as in"),
    "two things": (lambda: {"seed": 4, "clip": None}, "got clip = null; seed = 4; want clip = 1.0; seed = 0, as in"),
    "text": (lambda: {"corpus": SimpleNamespace(train=TOKENS[:800], valid=TOKENS[801:])}, "corpus = "),
    "validation": (lambda: {"corpus": SimpleNamespace(train=TOKENS[:801], valid=TOKENS[802:])}, "corpus = "),
    "fingerprint": (lambda: {"corpus": SimpleNamespace(**vars(CORPUS), fingerprint="abc")}, 'corpus = "abc"; want'),
    "width": (lambda: {"model": Toy(width=7)}, r"got model.width = 7; .*model embedding.weight = .*\(20, 7\)"),
    "first weights": (lambda: {"model": Toy(0.2, seed=9)}, r"got initial weights = \w+; .*same seed\), as in"),
    "a boundary": (lambda: {"corpus": SimpleNamespace(train=TOKENS[:800], valid=TOKENS[800:])}, "corpus = "),
    "frozen": (lambda: {"model": frozen(Toy(0.2))}, "got model embedding.weight = .* frozen"),
    "dtype": (lambda: {"model": Toy().double()}, r"model head.bias = .torch.float64 \(20,\)"),
}


@pytest.mark.parametrize("name", OTHER)
def test_another_run_is_refused_and_nothing_is_lost(tmp_path, name):
    other, message = OTHER[name]
    run(folder=tmp_path)
    with pytest.raises(ValueError, match=f"folder: got .*{message}|folder: {message}"):
        run(**{"folder": tmp_path} | other())
    assert [*checkpoints(tmp_path)] == [20] and run(folder=tmp_path).finished


# ---- What is not finite ----


class Exploding(Toy):
    """A toy that goes wrong in the update after so many."""

    def __init__(self, after, what):
        super().__init__()
        self.after, self.what = after, what

    def forward(self, *args, **options):
        loss = super().forward(*args, **options)
        if self.training:
            self.after -= 1
        if self.after < 0 and self.training != (self.what == "validation"):
            if self.what == "gradient":
                zero = self.head.bias.sum() - self.head.bias.sum().detach()
                return loss + zero.sqrt()  # the loss is what it was, its gradient is not
            return loss * (torch.inf if self.what == "infinite loss" else torch.nan)
        return loss


@pytest.mark.parametrize("log_every", [1, 7, 50])
def test_a_loss_that_is_not_finite_is_named_and_the_last_good_checkpoint_stays(tmp_path, log_every):
    model = Exploding(13, "loss")
    good = run(Toy(), steps=50, evaluate_every=50, log_every=1)
    with pytest.raises(FloatingPointError) as error:
        run(model, folder=tmp_path, steps=50, checkpoint_every=4, evaluate_every=50, log_every=log_every)
    message = str(error.value)
    rate = learning_rate(config(steps=50), 13, 50)
    assert message.startswith(f"loss is nan in step 13, at learning rate {rate:.3g}, on the batch ")
    assert "TokenStream(corpus.train, 8, 4, 0).batch(13)" in message and "step-00000012" in message
    corpus = CORPUS  # the name in the message
    named = eval(message.split("the batch ")[1].split(";")[0], {"TokenStream": TokenStream, "corpus": corpus})
    assert torch.equal(named.inputs, model.seen[13])
    assert [*checkpoints(tmp_path)] == [12]
    resumed = run(Toy(), folder=tmp_path, steps=50, evaluate_every=50, log_every=log_every)
    assert resumed.validation_loss == good.validation_loss


def test_an_infinite_loss():
    with pytest.raises(FloatingPointError, match="loss is inf in step 5, .* the last good checkpoint is none"):
        run(Exploding(5, "infinite loss"), steps=20)


def test_a_gradient_that_is_not_finite():
    with pytest.raises(FloatingPointError, match=r"gradient norm is (inf|nan) in step 5.*checkpoint is none"):
        run(Exploding(5, "gradient"), steps=20)


@pytest.mark.parametrize("updates", [10, 20])  # in the middle, and at the end
def test_a_validation_loss_that_is_not_finite(updates):
    step = updates - 1
    rate = learning_rate(config(steps=20), step, 20)
    message = rf"validation loss is nan after step {step}, at learning rate {rate:.3g}, .*\.batch\({step}\)"
    with pytest.raises(FloatingPointError, match=message):
        run(Exploding(step, "validation"), steps=20, evaluate_every=10)


# ---- Evaluation ----


def brute_force(model, tokens, length, context):
    """Each token alone, from the tokens that its window holds before it."""
    total = 0.0
    for target in range(1, len(tokens)):
        stride, last = length - context, len(tokens) - 1
        k = 0  # the first window that scores this target
        while k * stride + length < target:
            k += 1
        start = k * stride
        if start + length > last:  # the rest reaches back by no more than the context
            full = max(0, (last - length) // stride + 1)
            done = stride * (full - 1) + length if full else 0
            start = max(0, done - context)
        piece = torch.tensor(tokens[start : target + 1])[None]
        scored = torch.full_like(piece[:, 1:], -100)
        scored[0, -1] = piece[0, -1]
        with torch.no_grad():
            total += model(piece[:, :-1], scored, reduction="sum").item()
    return total / (len(tokens) - 1)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 60), st.integers(1, 9), st.data())
def test_evaluate_is_brute_force(n, length, data):
    context, batch = data.draw(st.integers(0, length - 1)), data.draw(st.integers(1, 5))
    model = Toy(dropout=0.5).double()
    found = evaluate(model, TOKENS[:n], length=length, context=context, batch_size=batch)
    assert found.n_tokens == n - 1
    assert found.loss == pytest.approx(brute_force(model.eval(), TOKENS[:n], length, context), rel=1e-12)
    assert found.perplexity == math.exp(found.loss) and found.bits_per_byte is None


def test_evaluate_counts_bytes_and_gives_the_mode_back():
    model = Toy(dropout=0.5).train()
    found = evaluate(model, TOKENS, n_bytes=3000)
    assert isinstance(found, Evaluation) and model.training
    assert found.bits_per_byte == pytest.approx(found.loss * found.n_tokens / math.log(2) / 3000, rel=1e-12)
    assert found == evaluate(model.eval(), TOKENS, n_bytes=3000) and not model.training
    model.config.vocab_size = None  # which leaves it to the embedding
    with pytest.raises(IndexError):
        evaluate(model.train(), TOKENS + V)
    assert model.training


def test_a_model_without_parameters_is_evaluated():
    class Guess(nn.Module):
        def forward(self, inputs, targets, *, reduction):
            return (targets != -100).sum() * math.log(V)

    assert evaluate(Guess(), TOKENS, length=T).loss == pytest.approx(math.log(V))


def test_a_hopeless_model_has_infinite_perplexity():
    model = Toy()
    with torch.no_grad():
        model.head.bias[0] = 1e4
    assert evaluate(model, np.ones(20, int)).perplexity == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n_bytes", [None, 3000])
def test_a_loss_that_is_not_finite_is_no_score(bad, n_bytes):
    model = Toy()
    with torch.no_grad():
        model.head.bias[0] = bad
    with pytest.raises(ValueError, match="model: got a loss of (nan|inf); want a finite one: look for NaN"):
        evaluate(model, TOKENS, n_bytes=n_bytes)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"length": 0}, "length: got 0; want a positive integer"),
        ({"context": 8}, "context: got 8; want an integer from 0 to 7"),
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"n_bytes": 0}, "n_bytes: got 0; want None or a positive integer"),
    ],
)
def test_evaluate_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        evaluate(Toy(), TOKENS, **options)
    with pytest.raises(ValueError, match="tokens: got 1 tokens; want at least 2"):
        evaluate(Toy(), TOKENS[:1])
    with pytest.raises(ValueError, match="length: got None, of a model without config.max_length"):
        evaluate(nn.Linear(1, 1), TOKENS)


# ---- How fast a model is ----


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_model_that_is_timed_keeps_its_weights(positions):
    sizes = dict(vocab_size=30, max_length=8, d_model=8, n_layers=1, n_heads=2, positions=positions)
    models = [LanguageModel(ModelConfig(attention=name, **sizes)) for name in ("multi_head", "boosted")]
    before = [weights(model) for model in models]
    found = measure_speed(iter(models), batch_size=2, rounds=2, new_tokens=3)
    assert len(found) == 2 and all(seconds > 0 for speed in found for seconds in speed)
    assert all(torch.equal(was, weights(model)) for was, model in zip(before, models))
    assert all(p.grad is None for model in models for p in model.parameters())


def test_a_step_and_a_written_token_are_told_apart(monkeypatch):
    """Medians of three rounds, after one that is not counted."""
    seconds = iter([100, 200, 2, 12, 1, 30, 3, 15])
    monkeypatch.setattr("gbattn.training.call_seconds", lambda call, device: next(seconds))
    model = LanguageModel(ModelConfig(vocab_size=30, max_length=8, d_model=8, n_layers=1, n_heads=2))
    assert measure_speed([model], batch_size=2, rounds=3, new_tokens=3) == [(2, 5)]


@pytest.mark.parametrize("wrong", [dict(batch_size=0), dict(rounds=1.5), dict(new_tokens=True), dict(models=[3])])
def test_nothing_else_is_timed(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}: got .*{re.escape(str(value))}.*; want "):
        measure_speed(**dict(models=[]) | wrong)


# ---- Errors of train ----


@pytest.mark.parametrize(
    "options, message",
    [
        ({"warmup_steps": 20}, "warmup_steps: got 20; want fewer than the 20 steps"),
        ({"length": 900}, "tokens: got 801 tokens; want at least length"),
        ({"corpus": SimpleNamespace(train=TOKENS, valid=TOKENS[:1])}, "corpus: got 1 tokens of valid; want 2 or more"),
        ({"corpus": SimpleNamespace(**vars(CORPUS), vocab_size=21)}, "model: got a vocabulary of 20; want the 21 of"),
        ({"model": nn.Linear(2, 2)}, "length: got None, of a model without config.max_length"),
        ({"model": Toy().requires_grad_(False)}, "model: got no parameter that learns"),
    ],
)
def test_train_says_what_is_wrong(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_precision_of_gpus_needs_one(precision):
    for call in (run, check_precision):
        with pytest.raises(ValueError, match=f"precision: got '{precision}' without a GPU; want 'no' or 'bf16'"):
            call(precision=precision)
    with pytest.raises(ValueError, match="precision: got 'fp17'; want one of 'no', 'tf32'"):
        check_precision("fp17")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_an_update_is_captured_on_a_gpu_only():
    on_a_cpu, no_flag = "got True with device cpu; want False, or a GPU", "got 1; want True or False"
    for capture, message in ((True, on_a_cpu), (1, no_flag)):
        with pytest.raises(ValueError, match=f"capture: {message}"):
            train(Toy(), CORPUS, config(), progress=False, capture=capture)


@pytest.mark.parametrize("precision, during", [("no", None), ("bf16", None), ("tf32", "tf32")])
def test_float32_is_multiplied_as_before_a_run_after_it(precision, during):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with training._products(precision):
        assert matmul.fp32_precision == (during or before)
    assert matmul.fp32_precision == before
    with pytest.raises(KeyError), training._products(precision):
        raise KeyError
    assert matmul.fp32_precision == before


def test_a_process_that_set_the_precision_itself_trains():
    """torch refuses to read the older setting once the newer one was used."""
    code = "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'; from test_15_training import run; run()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE, env=ENVIRONMENT)


def test_what_accelerate_reads_from_the_environment_changes_no_run(monkeypatch):
    plain = curve(run())
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    monkeypatch.setattr(torch, "compile", lambda *args, **options: pytest.fail("compiled"))
    assert curve(run()) == plain


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(folder=""), "folder: got ''; want None or a path; the current folder is '.'"),
        (dict(folder=3), "folder: got 3; want None or a path; the current folder is '.'"),
        (dict(corpus="docs"), "corpus: got 'docs'; want a Corpus, or anything with tokens as train and valid"),
        (dict(config={"steps": 3}), "config: got {'steps': 3}; want a TrainConfig"),
    ],
)
def test_what_cannot_be_trained_is_named(arguments, message):
    arguments = dict(corpus=CORPUS, config=config()) | arguments
    with pytest.raises(ValueError) as caught:
        train(Toy(), progress=False, **arguments)
    assert str(caught.value) == message


def small_model():
    config = ModelConfig(vocab_size=V, d_model=8, n_layers=1, n_heads=2, max_length=T, dropout=0.2)
    return LanguageModel(config, seed=0)


def test_a_window_longer_than_learned_positions_is_named():
    model = small_model()
    message = "length: got 16; want at most max_length = 8, as positions are learned"
    for call in (lambda: run(model, length=16), lambda: evaluate(model, CORPUS.valid, length=16)):
        with pytest.raises(ValueError, match=message):
            call()


def test_bytes_that_cannot_be_are_named_before_the_work():
    model = Toy()
    with pytest.raises(ValueError, match="n_bytes: got 0; want None or a positive integer"):
        evaluate(model, TOKENS, n_bytes=0)
    assert not model.seen


class Mean(Toy):
    def forward(self, tokens, targets, *, reduction="mean"):
        return super().forward(tokens, targets, reduction="mean")


class Logits(Toy):
    def forward(self, tokens, targets, *, reduction="mean"):
        return self.head(self.embedding(tokens))


class Plain(Toy):
    """Written for the numbers that there are: nothing is left out, and the sum is a float when nobody learns."""

    def forward(self, tokens, targets, *, reduction="mean"):
        logits = self.logits(tokens)
        loss = -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
        torch.rand(1)
        return loss if self.training else float(loss)


NO_SUMS = {
    "mean over the targets": (
        Mean,
        "model: got a loss of .* for a window, .* for two of it; want with reduction='sum'",
    ),
    "logits": (Logits, "model: got Tensor of shape .*; want one number, the summed loss, with reduction='sum'"),
}


@pytest.mark.parametrize(("model", "message"), NO_SUMS.values(), ids=NO_SUMS)
def test_a_model_whose_loss_is_no_sum_is_refused(model, message, tmp_path):
    """Its perplexity would be near one, untrained."""
    with pytest.raises(ValueError, match=message):
        run(model(), folder=tmp_path)
    assert not checkpoints(tmp_path)
    for tokens in (TOKENS, TOKENS[:2]):
        with pytest.raises(ValueError, match=message):
            evaluate(model(), tokens)


def test_a_model_of_ones_own_needs_the_sum_and_nothing_else():
    model, state = Plain(), torch.get_rng_state()
    assert run(model).finished and torch.equal(torch.get_rng_state(), state)
    assert evaluate(Plain(), TOKENS).loss == pytest.approx(evaluate(Toy(), TOKENS).loss, rel=1e-6)


class Pair(Toy):
    """As nanoGPT: the mean of its own targets, of which −1 is not scored, beside the logits."""

    def forward(self, idx, targets=None):
        logits = self.logits(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class HuggingFace(Toy):
    """As Hugging Face's models: labels, which it shifts itself, a cache, and an object."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None, **kwargs):
        assert attention_mask is None and labels is None and use_cache is False and not kwargs
        return SimpleNamespace(logits=self.logits(input_ids), loss=None)


class LossFirst(Toy):
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.logits(x).flatten(0, 1), y.flatten()), self.logits(x)


class LogitsAlone(Toy):
    def forward(self, x, mask=None):
        assert mask is None
        return self.logits(x)


OTHERS = [Pair, HuggingFace, LossFirst, LogitsAlone]


@pytest.mark.parametrize("kind", OTHERS)
def test_a_model_of_another_kind_trains_and_scores_as_one_with_a_summed_loss(kind):
    expected, model = Toy(), kind()
    wanted, history = run(expected, accumulation=2), run(model, accumulation=2)
    assert history.loss == pytest.approx(wanted.loss, rel=1e-6)
    assert history.validation_loss == pytest.approx(wanted.validation_loss, rel=1e-6)
    assert torch.allclose(weights(model), weights(expected), atol=1e-6)
    for context in (0, 3):  # what was read before is a target of −100
        scores = evaluate(model, TOKENS, context=context), evaluate(expected, TOKENS, context=context)
        assert scores[0].loss == pytest.approx(scores[1].loss, rel=1e-6) and scores[0].n_tokens == scores[1].n_tokens


def test_a_model_of_another_kind_without_logits_is_named():
    class MeanAlone(Toy):
        def forward(self, x, targets):
            return self.logits(x).mean()

    with pytest.raises(
        ValueError, match=r"model: got Tensor; want logits \(B, T, V\), alone, in a tuple or as .logits"
    ):
        run(MeanAlone())


def compiled(model, backend="eager"):
    return torch.compile(model, backend=backend)


def partly_compiled(model):
    model.head = compiled(model.head)
    return model


WRAPPERS = {
    "compiled": compiled,
    "parallel": nn.DataParallel,
    "compiled in parallel": lambda model: nn.DataParallel(compiled(model)),
    "a part compiled": partly_compiled,
}
# Of which torch warns itself.
wraps = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")


@wraps
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("kind", [HuggingFace, LogitsAlone])
def test_what_torch_wraps_is_trained_and_scored_as_what_is_in_it(kind, wrap):
    expected, model = kind(), wrap(kind())
    wanted, history = run(expected), run(model)
    assert history.validation_loss == pytest.approx(wanted.validation_loss, rel=1e-6)
    assert torch.allclose(weights(model), weights(expected), atol=1e-6)
    assert evaluate(model, TOKENS).loss == pytest.approx(evaluate(expected, TOKENS).loss, rel=1e-6)


@wraps
def test_a_compiled_model_is_called_as_it_was_compiled():
    calls = []

    def backend(graph, inputs):
        return lambda *args: calls.append(1) or graph(*args)

    evaluate(compiled(LogitsAlone(), backend), TOKENS)
    scored = len(calls)
    run(compiled(LogitsAlone(), backend))
    assert scored and len(calls) > 2 * scored


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


@wraps
def test_the_folder_of_a_run_takes_a_compiled_model(tmp_path):
    folder, model = RunFolder(tmp_path), compiled(small_model())
    history = folder.train(model, CORPUS, config(steps=2))
    assert torch.equal(weights(LanguageModel.from_pretrained(tmp_path)), weights(model))
    shutil.rmtree(folder.checkpoints)
    assert folder.train(again := compiled(small_model()), CORPUS, config(steps=2)) == history
    assert torch.equal(weights(again), weights(model))


@wraps
def test_rates_are_for_the_names_of_a_compiled_model_or_of_the_plain_one():
    for name in ("head.weight", "_orig_mod.head.weight"):
        model, held = compiled(Toy()), RateGroup((name,), lambda *_: 0.0)
        train(model, CORPUS, config(), rates=[held], progress=False)
        assert torch.equal(model.head.weight, Toy().head.weight)
        assert not torch.equal(model.head.bias, Toy().head.bias)


class Passing(nn.Module):
    """A wrapper that takes anything."""

    def __init__(self, model):
        super().__init__()
        self.module = model

    def forward(self, *args, **options):
        return self.module(*args, **options)


def over_two_gpus(model):
    model = nn.DataParallel(model)
    model.device_ids = [0, 1]
    return model


@pytest.mark.parametrize(
    "model", [Passing(Pair()), Passing(LogitsAlone()), nn.Sequential(Pair()).forward, over_two_gpus(Toy())]
)
def test_a_model_that_cannot_be_called_is_named(model, tmp_path):
    with pytest.raises(ValueError, match="^model: got "):
        run(model, folder=tmp_path, length=T)
    assert not checkpoints(tmp_path)
    with pytest.raises(ValueError, match="^model: got "):
        evaluate(model, TOKENS, length=T)


def test_the_length_of_a_hugging_face_model_is_asked_for():
    model = HuggingFace()
    model.config.max_position_embeddings = 2048  # and its max_length once was 20, of generation
    with pytest.raises(ValueError, match="length: got None"):
        run(model)
    assert run(model, length=T).finished


def test_a_compilation_that_fails_is_one_sentence(tmp_path):
    code = "from test_15_training import run\ntry:\n    run(compile=True)\n"
    code += "except RuntimeError as error:\n    print(error)"
    nothing = {"CXX": str(tmp_path / "nothing"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=HERE, env=ENVIRONMENT | nothing)
    assert re.fullmatch("torch.compile failed: .{9,200}; compile=False trains without it\n", said.stdout)


@pytest.mark.parametrize("name", ["progress", "tensorboard"])
@pytest.mark.parametrize("value", ["False", 0, None])
def test_a_flag_is_a_truth_value(name, value, tmp_path):
    with pytest.raises(ValueError, match=f"{name}: got {value!r}; want True or False"):
        train(Toy(), CORPUS, config(), folder=tmp_path, **{name: value})


def test_tokens_that_the_model_has_not_are_refused():
    beyond = np.append(TOKENS, V)
    with pytest.raises(ValueError, match="model: got a vocabulary of 20; want the 21 of the corpus"):
        run(corpus=SimpleNamespace(train=TOKENS, valid=beyond))
    with pytest.raises(ValueError, match="tokens: got a number that is no token; want ids below 20"):
        evaluate(Toy(), beyond)
    with pytest.raises(ValueError, match="tokens: got numbers from -100 to 19"):  # a target that is not scored
        evaluate(Toy(), np.append(TOKENS, -100))


def test_equal_runs_write_equal_bytes(tmp_path, script):
    given = json.dumps(config(steps=3).to_dict())
    folders = tmp_path / "a", tmp_path / "b"
    for process in [start([script, given, folder, 0.3]) for folder in folders]:
        finish(process)
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, two = ((checkpoints(folder)[3] / name).read_bytes() for folder in folders)
        assert one == two


def test_two_trainings_in_one_folder_are_refused(tmp_path):
    """Each would remove what the other writes; and what was held is free when a run ends, however it ends."""

    class Second(Toy):
        def forward(self, *inputs, **options):
            with pytest.raises(ValueError, match=f"folder: got {tmp_path}, in which another training is at work"):
                run(folder=tmp_path)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(Second(), folder=tmp_path)
    assert run(folder=tmp_path).finished


@pytest.mark.parametrize("package", ["accelerate", "filelock", "safetensors"])
def test_a_missing_package_is_named_before_the_work(package, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    cure = rf"{package}: got a Python that cannot import it; want pip install 'gbattn\[train\] @"
    with pytest.raises(ValueError, match=cure):
        run(folder=tmp_path)
    assert not list(tmp_path.iterdir())
    if package != "accelerate":  # without checkpoints they are not needed
        assert run().finished


@pytest.mark.parametrize("folder", [3, "", None, True])
def test_the_folder_of_a_run_is_a_path(folder):
    with pytest.raises(ValueError, match="folder: got .*; want a path"):
        RunFolder(folder)


def test_a_device_that_cannot_compute_is_named():
    check_device("cpu")
    for device in ("abacus", "meta", ["cpu"]):
        with pytest.raises(ValueError, match="device: got .*; want cpu, or cuda where torch finds a GPU"):
            check_device(device)


@pytest.mark.skipif(
    shutil.which("g++") is None or " " in torch.__file__,
    reason="torch compiles with g++, and not where its own path has a space",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # what torch says of itself when it begins to compile
def test_a_compiled_run_that_was_stopped_goes_on_bit_for_bit(tmp_path, monkeypatch):
    options = dict(compile=True, checkpoint_every=3)
    straight, resumed = small_model(), small_model()
    whole = run(straight, **options)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 4)
        run(small_model(), folder=tmp_path, **options)
    assert max(checkpoints(tmp_path)) == 3
    assert curve(run(resumed, folder=tmp_path, **options)) == curve(whole)
    assert torch.equal(weights(resumed), weights(straight))


def test_tensorboard_needs_a_folder():
    with pytest.raises(ValueError, match="tensorboard: got True without a folder; want a folder"):
        train(Toy(), CORPUS, config(), tensorboard=True)


@pytest.mark.parametrize("place", ["a.txt", "a.txt/sub"])
def test_a_file_in_the_place_of_the_folder_is_refused_at_once(tmp_path, place):
    (tmp_path / "a.txt").write_text("no folder")
    model = Toy()
    with pytest.raises(ValueError, match=r"folder: got .*a\.txt, a file; want a folder"):
        run(model, folder=tmp_path / place)
    assert not model.seen


def test_the_batch_must_split_among_the_processes(monkeypatch):
    real = training._accelerator

    def three(precision):
        accelerator = real(precision)
        return SimpleNamespace(num_processes=3, process_index=0, is_fsdp2=False, device=accelerator.device)

    monkeypatch.setattr(training, "_accelerator", three)
    with pytest.raises(ValueError, match="batch_size: got 4 for 3 processes; want a multiple"):
        run()


# ---- What is shown ----


def test_the_progress_bar(capsys):
    train(Toy(), CORPUS, config(log_every=5))
    shown = capsys.readouterr()
    assert shown.out == ""
    last = shown.err.replace("\r", "\n").strip().splitlines()[-1]
    for part in ("100%", "20/20", "loss ", "tokens/s", "valid "):
        assert part in last
    train(Toy(), CORPUS, config(), progress=False)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_of_80_columns_has_room_for_the_bar_and_all_numbers(capsys, monkeypatch):
    """Those of a long run, too."""
    bar = partial(tqdm.tqdm, ncols=80, mininterval=0)
    monkeypatch.setattr("tqdm.tqdm", bar)
    run = SimpleNamespace(step=123_000, steps=400_000, accelerator=SimpleNamespace(is_main_process=True))
    with training._display(run, progress=True, tensorboard=False) as show:
        run.step += 10_000
        show({}, valid="valid 4.321")
        training._show_point(show, History([run.step], [4.123], [1.0], [1e-3], [12_345], [1.0]))
    for line in capsys.readouterr().err.replace("\r", "\n").splitlines():
        assert len(line) <= 80
        shown = line
    filled, bar, numbers = shown.split("|")
    assert len(bar) >= 5 and all(part in numbers for part in ("133000/400000", "loss 4.123", "12,345 tokens/s"))
    assert "valid 4.321" in numbers


@pytest.mark.filterwarnings("ignore")  # of TensorBoard's own reader
def test_tensorboards_files(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        stop_after(patched, 13)
        train(Toy(), CORPUS, config(), folder=tmp_path, progress=False, tensorboard=True)
    history = train(Toy(), CORPUS, config(), folder=tmp_path, progress=False, tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    training_loss = reader.Scalars("loss/training")
    assert [e.step for e in training_loss] == history.step  # what was written twice is there once
    assert [e.value for e in training_loss] == pytest.approx(history.loss, rel=1e-6)
    assert [e.value for e in reader.Scalars("loss/validation")] == pytest.approx(history.validation_loss, rel=1e-6)
    assert {"gradient norm", "learning rate", "tokens per second"} <= set(reader.Tags()["scalars"])


# ---- Other processes ----

SCRIPT = f"""
import json, sys
from types import SimpleNamespace
import accelerate, numpy as np, torch
from torch import nn
from gbattn.training import TrainConfig
from gbattn.lab.training import train
torch.set_num_threads(1)
T, V = {T}, {V}
{inspect.getsource(Toy)}
text = SimpleNamespace(train=np.array({CORPUS.train.tolist()}), valid=np.array({CORPUS.valid.tolist()}))
settings, folder, dropout = sys.argv[1:]
model = Toy(dropout=float(dropout), width=32)
history = train(model, text, TrainConfig(**json.loads(settings)), folder=folder or None, progress=False)
state = accelerate.PartialState()
if state.is_main_process:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    curve = history.to_dict() | {{"seconds": None}}
    print(json.dumps({{"curve": curve, "weights": weights, "processes": state.num_processes}}))
state.destroy_process_group()
"""
PLACES = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": PLACES}


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def start(command, **more):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([sys.executable, *map(str, command)], env=ENVIRONMENT | more, text=True, **pipes)


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])  # gloo of an older torch has its say before


def test_killed_at_any_moment_and_started_again(tmp_path, script):
    given = json.dumps(config(steps=600, checkpoint_every=7, evaluate_every=60, log_every=5).to_dict())
    folder = tmp_path / "run"
    whole = start([script, given, "", 0.3])
    moments, kills, newest = random.Random(0), 0, 0
    while kills < 2:
        process = start([script, given, folder, 0.3])
        while process.poll() is None and max(checkpoints(folder), default=0) <= newest:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        newest = max(checkpoints(folder), default=0)
        assert newest < 600, "finished before it could be killed"
    resumed = finish(start([script, given, folder, 0.3]))
    assert resumed == finish(whole)


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
from gbattn import training
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.training import TrainConfig
from gbattn.lab.training import train
torch.set_num_threads(1)
text = SimpleNamespace(train=np.array({CORPUS.train.tolist()}), valid=np.array({CORPUS.valid.tolist()}))
model, settings, folder = map(json.loads, sys.argv[1:])
update = training._update

def dying(run):
    if run.step == 7:
        raise KeyboardInterrupt
    update(run)

def once(name, dies=False):
    trained = LanguageModel(ModelConfig(**model), seed=1)
    training._update = dying if dies else update
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
    with pytest.raises(ValueError, match="folder: got .*sharded = nothing.*want .*sharded = true"):
        train(LanguageModel(one.config, seed=1), CORPUS, TrainConfig(**settings), folder=path.parent, progress=False)
    with pytest.raises(ValueError, match=r"'token_embedding.weight': got torch.float32 .*; want torch.float64"):
        load_weights(LanguageModel(one.config, dtype=torch.float64), path)
    file = min(path.glob("model/*"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=f"checkpoint: got .*{file.name} has other bytes than were written"):
        load_weights(again, path)
    file.unlink()
    with pytest.raises(ValueError, match="checkpoint: got .*model has the files"):
        load_weights(again, path)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # here it is one process that writes a shard
def test_a_shard_that_cannot_be_written_is_named_with_what_is_kept(tmp_path):
    model, draft = Toy(), tmp_path / "step-00000030.draft"
    run(folder=tmp_path, evaluate_every=20)
    one = SimpleNamespace(model=model, optimizer=torch.optim.AdamW(model.parameters()), process=0, folder=tmp_path)
    draft.mkdir()
    (draft / "model").write_text("in the place of a folder")
    kept = re.escape(str(checkpoints(tmp_path)[20]))
    with pytest.raises(OSError, match=f"^process 0: .*File exists.*; the last good checkpoint is {kept}: '.*/model'$"):
        training._write_shards(one, draft)
    (draft / "model").unlink()
    assert [*training._write_shards(one, draft)] == ["model/shard-00001-model-00001-of-00001.safetensors"]


def test_the_weights_of_a_checkpoint(tmp_path):
    model, other = Toy(), Toy(seed=1)
    run(model, folder=tmp_path, keep="last")
    load_weights(other, checkpoints(tmp_path)[20])
    assert torch.equal(weights(other), weights(model))
    with pytest.raises(ValueError, match="checkpoint: got .*, which cannot be read .*want one of the paths"):
        load_weights(other, tmp_path)
    with pytest.raises(
        ValueError, match=r"'embedding.weight': got torch.float32 \(20, 6\); want torch.float32 \(20, 7\)"
    ):
        load_weights(Toy(width=7), checkpoints(tmp_path)[20])


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, {}, "FSDP_VERSION: got nothing; want 2"),
        ({"FSDP_VERSION": "1"}, {}, "FSDP_VERSION: got 1; want 2"),
        ({"FSDP_VERSION": "2"}, {"precision": "fp16"}, "precision: got 'fp16' with weights in shards; want"),
    ],
)
def test_what_cannot_be_shared_is_named(environment, options, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # for half precision
    for name, value in ({"ACCELERATE_USE_FSDP": "true"} | environment).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_a_number_cannot_be_cut_and_blocks_are_gathered_as_one():
    model = Toy()
    model.scale = nn.Parameter(torch.tensor(1.0))
    plugin = SimpleNamespace()
    shared = SimpleNamespace(is_fsdp2=True, state=SimpleNamespace(fsdp_plugin=plugin))
    with pytest.raises(ValueError, match="model: got scalars: scale; want parameters of shape"):
        training._placed(model, shared)
    model = LanguageModel(ModelConfig(vocab_size=V, max_length=T, d_model=8, n_layers=1, n_heads=2))
    assert training._placed(model, shared) is not model
    assert plugin.transformer_cls_names_to_wrap == ["Block"]
    assert training._units(Toy()) == set()


def test_one_process_alone_has_nothing_to_share(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    shared = curve(run())
    monkeypatch.undo()
    assert shared == curve(run())


def test_importing_loads_nothing_that_is_an_extra():
    code = (
        "import sys, gbattn.training; "
        "print([m for m in ('accelerate', 'safetensors', 'tensorboard') if m in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


def test_the_benchmark_still_runs(tmp_path):
    """Tiny and once; it stops by itself unless its plain steps have the gradients of the models."""
    command = [sys.executable, ROOT / "benchmarks" / "training_step.py", "--quick", "--folder", tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AdamW fused" in done.stdout
    records = [json.loads(path.read_text()) for path in (tmp_path / "benchmark-training-step").glob("*.json")]
    methods = {r["settings"]["method"] for r in records}
    tables = [arm for name in ("mini", "mini-arms") for arm in EXPERIMENTS[name].arms if arm.equal_in != "time"]
    tables += [arm for arm in EXPERIMENTS["shift"].arms if arm.equal_to is None]
    assert methods == {"textbook"} | {
        arm.name.replace("_", " ") + kind for arm in tables for kind in ("", " plain", " products")
    }
    assert len(records) == 2 * len(methods) and all(r["measured"]["peak_bytes"] > 0 for r in records)
    ratios = {
        (r["settings"]["method"], field)
        for r in records
        for field in r["measured"]
        if f"{field}_low" in r["measured"]
        and r["measured"][f"{field}_low"] <= r["measured"][field] <= r["measured"][f"{field}_high"]
    }
    arms = {arm.name.replace("_", " ") for arm in tables}
    assert ratios == {(arm, f"over_{kind}") for arm in arms for kind in ("plain", "products")} | {
        (name, "over_standard")
        for name in {"textbook"} | {arm + kind for arm in arms - {"standard"} for kind in ("", " plain", " products")}
    }
