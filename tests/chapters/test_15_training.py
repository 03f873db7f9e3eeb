"""Chapter 15: the claims with their mutants, the loop against one by hand, stopping and going on, scores."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from claims import claim
from gbattn.corpora import TokenStream
from gbattn.ground.arguments import ArgumentError
from gbattn.lab.checkpoints import checkpoints
from gbattn.lab.training import train
from gbattn.training import (
    Evaluation,
    History,
    TrainConfig,
    decay_groups,
    evaluate,
    learning_rate,
    step_seed,
)
from models import WRAPPERS, HuggingFace, Logits, LogitsAlone, LossFirst, Mean, Pair, Plain, wraps
from toys import CORPUS, END, TOKENS, T, Toy, V, boosted_model, config, curve, run, small_model, stop_after, weights

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
    ({"steps": 0}, "steps"),
    ({"steps": True}, "steps"),
    ({"steps": None}, "steps, epochs"),
    ({"epochs": 2.0}, "steps, epochs"),
    ({"steps": None, "epochs": 0}, "epochs"),
    ({"batch_size": 2.5}, "batch_size"),
    ({"batch_size": 9 * 10**12}, "batch_size"),
    ({"evaluate_batch_size": 9 * 10**12}, "evaluate_batch_size"),
    ({"length": 9 * 10**12}, "length"),
    ({"steps": 10**400}, "steps"),
    ({"steps": None, "epochs": 1e300}, "epochs"),
    ({"document_end": 10**30}, "document_end"),
    ({"length": 0}, "length"),
    ({"learning_rate": 0.0}, "learning_rate"),
    ({"learning_rate": math.inf}, "learning_rate"),
    ({"learning_rate": math.nan}, "learning_rate"),
    ({"learning_rate": "fast"}, "learning_rate"),
    ({"warmup_steps": -1}, "warmup_steps"),
    ({"schedule": "linear"}, "schedule"),
    ({"final_fraction": 1.1}, "final_fraction"),
    ({"weight_decay": -0.1}, "weight_decay"),
    ({"decay": "all"}, "decay"),
    ({"betas": (0.9, 1.0)}, "betas"),
    ({"betas": 0.9}, "betas"),
    ({"clip": 0}, "clip"),
    ({"accumulation": 3}, "batch_size"),
    ({"accumulation": None}, "accumulation"),
    ({"precision": "fp8"}, "precision"),
    ({"compile": 1}, "compile"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**32}, "seed"),
    ({"evaluate_every": 0}, "evaluate_every"),
    ({"evaluate_batch_size": 0}, "evaluate_batch_size"),
    ({"checkpoint_every": -2}, "checkpoint_every"),
    ({"log_every": 0}, "log_every"),
    ({"keep": "first"}, "keep"),
    ({"document_end": -1}, "document_end"),
]


@pytest.mark.parametrize("options, argument", WRONG, ids=lambda x: str(x)[:30])
def test_a_wrong_setting_is_named(options, argument):
    with refused(argument):
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
    with refused("steps"):
        learning_rate(config(), 0, 2.5)
    with refused("step"):
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
    with refused("model"):
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
    "call, argument",
    [
        (lambda: decay_groups(Toy(), 0.1, "Everything"), "decay"),
        (lambda: decay_groups(Toy(), -0.1), "weight_decay"),
        (lambda: step_seed(1.7, 0), "seed"),
        (lambda: step_seed(0, -1), "step"),
        (lambda: step_seed(0, 0, "1"), "process"),
    ],
)
def test_parts_of_a_run_name_what_is_wrong(call, argument):
    with refused(argument):
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
    with refused("document_end"):
        run(Toy(), document_end=END)
    with refused("document_end"):
        evaluate(Toy(), CORPUS.valid, document_end=END)
    with refused("document_end"):
        evaluate(boosted_model(), CORPUS.valid, document_end="x")


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


# ---- Checkpoints ----


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


def test_a_history_goes_through_json():
    history = run()
    assert History.from_dict(json.loads(json.dumps(history.to_dict()))) == history
    assert History.from_dict(History().to_dict()) == History()
    with refused("history, best_step"):
        History.from_dict({name: x for name, x in History().to_dict().items() if name != "best_step"})
    for change in ({"tokens": [1]}, {"finished": "no"}, {"best_step": None}, {"loss": None}):
        with pytest.raises(ArgumentError) as caught:
            History.from_dict(history.to_dict() | change)
        assert {*change} <= {*caught.value.argument.split(", ")}
    with refused("history, step"):
        History.from_dict([])


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
    with refused("model"):
        evaluate(model, TOKENS, n_bytes=n_bytes)


@pytest.mark.parametrize(
    "options, argument",
    [
        ({"length": 0}, "length"),
        ({"context": 8}, "context"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_evaluate_names_what_is_wrong(options, argument):
    with refused(argument):
        evaluate(Toy(), TOKENS, **options)
    with refused("tokens"):
        evaluate(Toy(), TOKENS[:1])
    with refused("length"):
        evaluate(nn.Linear(1, 1), TOKENS)


# ---- Errors of train ----


def test_a_window_longer_than_learned_positions_is_named():
    model = small_model()
    for call in (lambda: run(model, length=16), lambda: evaluate(model, CORPUS.valid, length=16)):
        with refused("length"):
            call()


def test_bytes_that_cannot_be_are_named_before_the_work():
    model = Toy()
    with refused("n_bytes"):
        evaluate(model, TOKENS, n_bytes=0)
    assert not model.seen


@pytest.mark.parametrize("model", [Mean, Logits])
def test_a_model_whose_loss_is_no_sum_is_refused(model, tmp_path):
    """Its perplexity would be near one, untrained."""
    with refused("model", "reduction='sum'"):
        run(model(), folder=tmp_path)
    assert not checkpoints(tmp_path)
    for tokens in (TOKENS, TOKENS[:2]):
        with refused("model", "reduction='sum'"):
            evaluate(model(), tokens)


def test_a_model_of_ones_own_needs_the_sum_and_nothing_else():
    model, state = Plain(), torch.get_rng_state()
    assert run(model).finished and torch.equal(torch.get_rng_state(), state)
    assert evaluate(Plain(), TOKENS).loss == pytest.approx(evaluate(Toy(), TOKENS).loss, rel=1e-6)


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

    with refused("model", ".logits"):
        run(MeanAlone())


@wraps
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("kind", [HuggingFace, LogitsAlone])
def test_what_torch_wraps_is_trained_and_scored_as_what_is_in_it(kind, wrap):
    expected, model = kind(), wrap(kind())
    wanted, history = run(expected), run(model)
    assert history.validation_loss == pytest.approx(wanted.validation_loss, rel=1e-6)
    assert torch.allclose(weights(model), weights(expected), atol=1e-6)
    assert evaluate(model, TOKENS).loss == pytest.approx(evaluate(expected, TOKENS).loss, rel=1e-6)


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
    with refused("model"):
        run(model, folder=tmp_path, length=T)
    assert not checkpoints(tmp_path)
    with refused("model"):
        evaluate(model, TOKENS, length=T)


def test_the_length_of_a_hugging_face_model_is_asked_for():
    model = HuggingFace()
    model.config.max_position_embeddings = 2048  # and its max_length once was 20, of generation
    with refused("length"):
        run(model)
    assert run(model, length=T).finished


def test_tokens_that_the_model_has_not_are_refused():
    beyond = np.append(TOKENS, V)
    with refused("model"):
        run(corpus=SimpleNamespace(train=TOKENS, valid=beyond))
    with refused("tokens"):
        evaluate(Toy(), beyond)
    with refused("tokens"):  # a target that is not scored
        evaluate(Toy(), np.append(TOKENS, -100))
