"""Chapter 21: the path bound and its mutants, the schedule, slowed parameters, measures, the maturity rule."""

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
from gbattn.corpora import Batch
from gbattn.diagnostics import token_losses, trace
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.timing import (
    HoldAndRamp,
    MaturityRule,
    Specialisation,
    causal_reliance,
    crossing,
    linear_cka,
    normalised_entropy,
    removed_budget,
    schedule_multiplier,
    score_drift_bound,
    slow_rows,
    slowed,
)
from gbattn.training import RateGroup, TrainConfig

F64 = torch.float64
RANDOM = np.random.RandomState(0)
TOKENS = RANDOM.randint(0, 20, 601)
CORPUS = SimpleNamespace(train=TOKENS[:401], valid=TOKENS[401:])
QUIET = dict(progress=False)


def small(seed=0, **more):
    shape = dict(vocab_size=20, max_length=8, d_model=12, n_layers=4, n_heads=2)
    return LanguageModel(ModelConfig(**shape | more), seed=seed)


def a_batch(n=3):
    tokens = torch.from_numpy(RANDOM.randint(0, 20, (n, 9)))
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous())


# ---------------------------------------------------------------- claims


class Head:
    """What a head reads and its matrices, before and after, in double precision; often of width one, where the bound
    is reached."""

    def __init__(self, seed, T, D, K, scale):
        rng = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=rng, dtype=F64)
        if D == 1:  # tokens that stay, parallel weights that grow
            x, k, size = normal(T, 1), normal(1, K), normal(1)
            self.x, self.k = (x, x), (k, (1 + scale) * k)
            self.q = (size * k, (1 + scale) * size * k)
        else:
            pair = lambda *shape: [z := normal(*shape), z + scale * normal(*shape)]
            self.x, self.q, self.k = pair(T, D), pair(D, K), pair(D, K)
        self.G = normal(T, T)


heads = st.builds(
    Head, st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([1, 1, 3]), st.integers(1, 4), st.floats(0.01, 2)
)
wide = st.builds(
    Head, st.integers(0, 2**31), st.integers(2, 5), st.integers(2, 4), st.integers(1, 4), st.floats(0.01, 2)
)


def path(p, product=True):
    """The drift by hand, the bound by the library, or without λ_Q λ_K."""
    K = p.q[0].shape[1]
    S, S_after = (x @ q @ (x @ k).T / math.sqrt(K) for x, q, k in zip(p.x, p.q, p.k))
    found = score_drift_bound(p.x, p.q, p.k)
    assert torch.allclose(found.drift, (S_after - S).norm())
    bound = found.bound
    if not product:
        sizes = p.q[0].norm() * p.k[0].norm() * found.energy
        bound = bound - sizes * found.lambda_q * found.lambda_k
    return (S_after - S).norm()[None], bound[None]


@claim(heads, tolerance=1e-10, relation="<=", mutant=lambda p: path(p, product=False))
def test_thm_path_bound(p):
    """No drift beyond the bound. Mutant: without λ_Q λ_K."""
    return path(p)


def test_the_bound_is_reached_with_one_feature():
    found = score_drift_bound(*((p := Head(3, 4, 1, 2, 0.7)).x, p.q, p.k))
    assert torch.allclose(found.drift, found.bound) and torch.allclose(found.lambda_q, torch.tensor(0.7, dtype=F64))


def one_step(p, both=True):
    """The change of the scores by a gradient step, by automatic differentiation, and by the proposition."""
    x, q, k, K = p.x[0], p.q[0], p.k[0], p.q[0].shape[1]
    scores = lambda q, k: x @ q @ (x @ k).T / math.sqrt(K)
    gradient_q = x.T @ p.G @ x @ k / math.sqrt(K)
    gradient_k = x.T @ p.G.T @ x @ q / math.sqrt(K)
    loss = lambda q, k: (p.G * scores(q, k)).sum()
    by_autograd = torch.func.grad(loss, (0, 1))(q, k)
    after = lambda eta: scores(q - eta * by_autograd[0], k - eta * by_autograd[1])
    change = (after(0.01) - after(-0.01)) / 0.02  # exact: scores are quadratic in eta
    R = x @ x.T
    terms = R @ p.G @ (x @ k @ k.T @ x.T), (x @ q @ q.T @ x.T) @ p.G @ R
    by_law = -(terms[0] + (terms[1] if both else 0)) / K
    left = [change, *by_autograd]
    right = [by_law, gradient_q, gradient_k]
    return (torch.cat([z.flatten() for z in side]) for side in (left, right))


@claim(wide, tolerance=1e-9, mutant=lambda p: one_step(p, both=False))
def test_prop_score_sgd(p):
    """Both gradients and the first-order change of the scores. Mutant: only the queries move."""
    return one_step(p)


def test_the_gradients_of_both_matrices_by_finite_differences():
    p = Head(1, 4, 3, 2, 0.1)
    q, k, x = p.q[0].clone().requires_grad_(), p.k[0].clone().requires_grad_(), p.x[0]
    loss = lambda q, k: (p.G * (x @ q @ (x @ k).T / math.sqrt(2))).sum()
    assert torch.autograd.gradcheck(loss, (q, k), atol=1e-6)
    (grad_q,) = torch.autograd.grad(loss(q, k), [q])
    assert (grad_q - x.T @ p.G @ x @ k / math.sqrt(2)).abs().max() < 1e-6


budgets = st.tuples(st.floats(0, 1), st.integers(0, 40), st.integers(1, 20), st.integers(100, 400))


def budget(p, ramp=0.5):
    m, hold, way, T = p
    config = TrainConfig(steps=T, schedule="constant", warmup_steps=0)
    found = removed_budget(config, HoldAndRamp(m, hold / T, way / T), T)
    expected = (1 - m) * (hold / T + ramp * way / T + 0.5 / T)
    return np.array([found]), np.array([expected])


@claim(budgets, tolerance=1e-9, mutant=lambda p: budget(p, ramp=1.0))
def test_prop_budget(p):
    """The share of the rates that is removed. Mutant: the ramp counts in full."""
    return budget(p)


# ---------------------------------------------------------------- the schedule


@pytest.mark.parametrize("T", [100, 1000, 12345.0])
def test_the_published_schedule(T):
    found = [schedule_multiplier(share * T, T) for share in (0, 0.04, 0.045, 0.05, 0.5, 1)]
    assert np.allclose(found, [0.25, 0.25, 0.625, 1, 1, 1], rtol=0, atol=1e-12)


def test_a_late_window_and_one_without_a_ramp():
    late = dict(start=0.5, hold=0.1, ramp=0.0)
    assert [schedule_multiplier(t, 100, **late) for t in (0, 49, 50, 59, 60)] == [1, 1, 0.25, 0.25, 1]


def test_what_is_removed():
    T = 20_000
    config = TrainConfig(steps=T, schedule="constant", warmup_steps=0)
    found = removed_budget(config, HoldAndRamp(), T)
    assert abs(found - 0.75 / (2 * T) - 0.03375) < 1e-6  # a sum, and the integral
    cosine = TrainConfig(steps=1000, warmup_steps=0)
    assert removed_budget(cosine, HoldAndRamp(), 1000) > 0.05


@pytest.mark.parametrize("argument", ["multiplier", "hold", "ramp", "start"])
def test_a_wrong_schedule_is_named(argument):
    with refused(argument):
        HoldAndRamp(**{argument: -0.1})
    with refused(argument):
        schedule_multiplier(1, 10, **{argument: math.nan})


# ---------------------------------------------------------------- slowed parameters


@pytest.mark.parametrize("attention", ["multi_head", "boosted"])
@pytest.mark.parametrize("layers, numbers", [("upper", {2, 3}), ("lower", {0, 1}), ("all", {0, 1, 2, 3})])
def test_exactly_these_matrices(attention, layers, numbers):
    model = small(attention=attention)
    names = set(slowed(model, layers).names)
    for name, _ in model.named_parameters():
        parts = name.split(".")
        chosen = "attention" in parts and parts[-1] == "weight" and parts[-2] in ("query", "key")
        assert (name in names) == (chosen and int(parts[1]) in numbers)
    assert slowed(small(n_layers=3)).names[0].startswith("blocks.1.")


@pytest.mark.parametrize(
    "change, argument",
    [
        (dict(layers="top"), "layers"),
        (dict(projections=("up",)), "projections"),
        (dict(model=nn.Linear(2, 2)), "model"),
    ],
)
def test_what_cannot_be_slowed_is_named(change, argument):
    with refused(argument):
        slowed(**dict(model=small()) | change)


def groups_of(model, rates, monkeypatch):
    """The groups that `train` gives to AdamW."""
    caught = []
    plain = torch.optim.AdamW

    def caught_adamw(groups, **options):
        caught.extend(groups)
        return plain(groups, **options)

    monkeypatch.setattr(torch.optim, "AdamW", caught_adamw)
    train(model, CORPUS, TrainConfig(steps=1, batch_size=2), rates=rates, **QUIET)
    return caught


def test_each_parameter_is_in_one_group(monkeypatch):
    model = small()  # its head is its embedding
    group = slowed(model)
    groups = groups_of(model, [group], monkeypatch)
    learned = [p for g in groups for p in g["params"]]
    assert sorted(map(id, learned)) == sorted(map(id, model.parameters()))
    slow = {id(p) for g in groups if g["rates"] == 0 for p in g["params"]}
    assert slow == {id(p) for name, p in model.named_parameters() if name in group.names}


CONFIG = TrainConfig(steps=12, batch_size=4, learning_rate=0.01, evaluate_every=6, checkpoint_every=5, clip=0.1)


def test_a_multiplier_of_one_has_the_bits_of_the_control():
    control, slow = small(), small()
    histories = [
        train(control, CORPUS, CONFIG, **QUIET),
        train(slow, CORPUS, CONFIG, rates=[slowed(slow, multiplier=HoldAndRamp(1.0))], **QUIET),
    ]
    assert all(torch.equal(a, b) for a, b in zip(control.parameters(), slow.parameters()))
    assert histories[0].loss == histories[1].loss
    assert histories[0].gradient_norm == histories[1].gradient_norm


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_first_step_of_a_slowed_matrix_is_a_quarter(decay):
    config = TrainConfig(steps=1, batch_size=4, learning_rate=0.01, warmup_steps=0, weight_decay=decay)
    start, control, slow = (small().double() for _ in range(3))
    group = slowed(slow)
    train(control, CORPUS, config, **QUIET)
    train(slow, CORPUS, config, rates=[group], **QUIET)
    triples = zip(start.named_parameters(), control.parameters(), slow.parameters())
    for (name, w), a, b in triples:
        factor = 0.25 if name in group.names else 1.0
        assert torch.allclose(b - w, factor * (a - w), rtol=1e-6, atol=1e-12), name


class Stop(Exception):
    pass


def stopping(model, after):
    """A model whose forward pass fails, once, after so many calls while training."""
    calls, forward = [], model.forward

    def counted(tokens, targets=None, **options):
        if model.training:
            calls.append(1)
            if len(calls) == after:
                raise Stop
        return forward(tokens, targets, **options)

    model.forward = counted
    return model


def rule():
    tokens = torch.from_numpy(RANDOM.randint(0, 20, (2, 8)))
    return lambda: MaturityRule(tokens, earliest=0.3, latest=0.9, every=0.1, ramp=0.3, threshold=0.5)


@pytest.mark.parametrize("after", [3, 9])
def test_a_stopped_run_with_slowed_parameters_goes_on_bit_for_bit(tmp_path, after):
    make, whole, again = rule(), small(), small()
    config = TrainConfig(steps=12, batch_size=4, learning_rate=0.02, checkpoint_every=2, keep="last")
    rates = lambda model: [slowed(model, multiplier=make()), slowed(model, "lower", multiplier=HoldAndRamp())]
    uncut = rates(whole)
    train(whole, CORPUS, config, rates=uncut, **QUIET)
    assert uncut[0].multiplier.released not in (None, 11)  # by maturity, within the run
    broken = stopping(small(), after)
    with pytest.raises(Stop):
        train(broken, CORPUS, config, rates=rates(broken), folder=tmp_path, **QUIET)
    resumed = rates(again)
    train(again, CORPUS, config, rates=resumed, folder=tmp_path, **QUIET)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters()))
    assert resumed[0].multiplier.released == uncut[0].multiplier.released


def test_other_rates_are_another_run(tmp_path):
    model, config = small(), TrainConfig(steps=4, batch_size=4, checkpoint_every=2)
    train(model, CORPUS, config, rates=[slowed(model)], folder=tmp_path, **QUIET)
    for rates in ([], [slowed(model, multiplier=HoldAndRamp(0.5))], [slowed(model, "all")]):
        with refused("folder"):
            train(small(), CORPUS, config, rates=rates, folder=tmp_path, **QUIET)


@pytest.mark.parametrize(
    "rates, argument",
    [
        ([RateGroup(("blocks.9",), HoldAndRamp())], "rates"),
        ([RateGroup(("blocks.0.ffn.up.weight",) * 2, HoldAndRamp())], "rates"),
        ([RateGroup(("token_embedding",), lambda *_: 1)], "rates"),
        ([RateGroup((), lambda *_: -1.0)], "multiplier"),
        (["slow"], "rates"),
    ],
)
def test_wrong_rates_are_named(rates, argument):
    with refused(argument):
        train(small(), CORPUS, TrainConfig(steps=1, batch_size=2), rates=rates, **QUIET)


def test_a_frozen_parameter_has_no_rate():
    model = small()
    model.blocks[2].attention.query.weight.requires_grad_(False)
    with refused("rates"):
        train(model, CORPUS, TrainConfig(steps=1, batch_size=2), rates=[slowed(model)], **QUIET)


def test_rows_of_a_fused_weight_are_slowed_for_a_while():
    """Against two weights of their own, one of them in a slowed group: the same steps, decay included."""
    torch.manual_seed(0)
    fused = nn.Parameter(torch.randn(6, 3, dtype=F64))
    parts = [nn.Parameter(fused.detach()[:4].clone()), nn.Parameter(fused.detach()[4:].clone())]
    plan = [0.25, 0.25, 0.625, 1.0, 1.0]
    alone = torch.optim.AdamW([{"params": [parts[0]]}, {"params": [parts[1]]}], lr=0.1, weight_decay=0.3)
    whole = torch.optim.AdamW([fused], lr=0.1, weight_decay=0.3)
    end = slow_rows(whole, fused, slice(0, 4), lambda t: plan[t])
    for t, m in enumerate(plan):
        gradient = torch.randn(6, 3, dtype=F64)
        fused.grad, parts[0].grad, parts[1].grad = gradient, gradient[:4], gradient[4:]
        alone.param_groups[0]["lr"] = 0.1 * m
        whole.step()
        alone.step()
        assert torch.allclose(fused.detach(), torch.cat([p.detach() for p in parts]), atol=1e-12), t
        assert torch.equal(fused.detach()[4:], parts[1].detach())
    end()
    fused.grad = torch.ones_like(fused)
    whole.step()  # and plan[5] does not exist


# ---------------------------------------------------------------- measures


def test_entropy_of_uniform_and_one_hot_attention():
    uniform = torch.ones(1, 1, 7, 7).tril() / torch.arange(1, 8)[:, None]
    assert (normalised_entropy(uniform) - 1).abs().max() < 1e-6
    assert normalised_entropy(torch.eye(7)[None, None]).abs().max() < 1e-6
    assert normalised_entropy(uniform).shape == (1, 6, 1)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 4))
def test_cka_sees_no_rotation_scale_or_shift(seed, D):
    rng = torch.Generator().manual_seed(seed)
    X, Y = torch.randn(2, 9, D, generator=rng, dtype=F64)
    Q = torch.linalg.qr(torch.randn(D, D, generator=rng, dtype=F64)).Q
    assert math.isclose(linear_cka(X, 3 * X @ Q + 5), 1, abs_tol=1e-9)
    assert math.isclose(linear_cka(X, Y), linear_cka(Y, X), abs_tol=1e-12)
    assert -1e-12 <= linear_cka(X, Y) <= 1 + 1e-12
    kernel = lambda Z: (Z - Z.mean(0)) @ (Z - Z.mean(0)).T
    K, L = kernel(X), kernel(Y)
    assert math.isclose(linear_cka(X, Y), ((K * L).sum() / K.norm() / L.norm()).item(), abs_tol=1e-9)


def test_a_constant_has_no_cka():
    with refused("first, second"):
        linear_cka(torch.ones(4, 2), torch.randn(4, 2))


def test_crossing():
    assert crossing([0, 10, 20], [1.0, 0.6, 0.2], 0.5) == 12.5
    assert crossing([3, 10], [0.1, 0.6], 0.5) == 3 and crossing([0, 10], [1, 0.9], 0.5) == 10
    with refused("values"):
        crossing([0, 1], [1.0], 0.5)


@pytest.mark.parametrize("attention", ["multi_head", "boosted", "twicing"])
def test_reliance_is_that_of_uniform_attention(attention):
    """Against a copy of the model whose queries are zero."""
    model, batch = small(attention=attention, init_std=0.4), a_batch()
    found = causal_reliance(model, batch)
    assert max(map(abs, found)) > 1e-3
    for i, rise in enumerate(found):
        copy = small(attention=attention, init_std=0.4)
        for name, p in copy.named_parameters():
            if name.startswith(f"blocks.{i}.attention") and ".query." in name:
                p.data.zero_()
        with torch.no_grad():
            weights = [m.weights for m in trace(copy, batch.inputs)[i]]
            expected = token_losses(copy, batch).mean() - token_losses(model, batch).mean()
        uniform = torch.ones(8, 8).tril() / torch.arange(1, 9)[:, None]
        assert all(torch.allclose(A, uniform.expand_as(A), atol=1e-6) for A in weights)
        assert math.isclose(rise, expected.item(), abs_tol=1e-5)
    assert "query_heads" not in vars(model.blocks[0].attention)


def test_specialisation_is_what_it_says():
    model, batch = small(init_std=0.3), a_batch()
    watch = Specialisation(batch, at=[0, 2, 5])
    config = TrainConfig(steps=6, batch_size=4, learning_rate=0.02)
    train(model, CORPUS, config, rates=[RateGroup((), watch)], **QUIET)
    watch.observe(model, 6)
    found = watch.result()
    assert found["step"] == [0, 2, 5, 6]
    json.dumps(found)
    weights = [torch.cat([m.weights for m in rounds], 1) for rounds in trace(model, batch.inputs)]
    assert np.allclose(found["entropy"][-1], [normalised_entropy(A).mean().item() for A in weights], atol=1e-6)
    assert found["to_end"][-1] == [0, 0, 0, 0] and min(found["to_end"][0]) > 0
    assert math.isclose(found["maturity"][-1], 1, abs_tol=1e-9) and found["maturity"][0] < 1
    assert found["reliance"][-1] == causal_reliance(model, batch)
    assert found["lambda_q"][0] == [0, 0, 0, 0] and min(found["lambda_q"][-1]) > 0
    assert 0 < max(map(max, found["drift_over_bound"])) <= 1 + 1e-6


def test_watching_changes_no_bit():
    plain, watched = small(), small()
    train(plain, CORPUS, CONFIG, **QUIET)
    train(watched, CORPUS, CONFIG, rates=[RateGroup((), Specialisation(a_batch(), [0, 5]))], **QUIET)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))


@pytest.mark.parametrize("ffn", ["gelu", "swiglu"])
def test_energies_and_largest_weights_are_those_of_blocks_run_by_hand(ffn):
    model, batch = small(ffn=ffn, init_std=0.2), a_batch()
    watch, found = Specialisation(batch, at=()), []
    watch.observe(model, 0)
    with torch.no_grad():
        x = model.token_embedding(batch.inputs) + model.position_embedding.weight
        for block, rounds in zip(model.blocks, trace(model, batch.inputs)):
            read = block.attention_norm(x)
            between = x + block.attention(read, causal=True)
            write = block.ffn(block.ffn_norm(between))
            energies = [(y**2).sum().item() / y.numel() for y in (x, read, write)]
            A = torch.cat([m.weights for m in rounds], 1)
            found.append([*energies, A[:, :, 1:].max(-1).values.mean().item()])
            x = between + write
    names = ("stream_energy", "read_energy", "write_energy", "largest")
    assert np.allclose([watch.curves[name][0] for name in names], np.transpose(found), rtol=1e-5)


def test_a_smaller_rate_moves_less():
    """λ at the release is smaller in the slowed run, for two seeds."""
    for seed in range(2):
        found = []
        for multiplier in (1.0, 0.25):
            model = small(seed)
            watch = Specialisation(a_batch(), at=[0])
            rates = [RateGroup((), watch), slowed(model, multiplier=HoldAndRamp(multiplier, 1.0, 0.0))]
            train(model, CORPUS, TrainConfig(steps=6, batch_size=4, learning_rate=0.01), rates=rates, **QUIET)
            watch.observe(model, 6)
            found.append([watch.curves[name][-1][2:] for name in ("lambda_q", "lambda_k")])
        assert (np.array(found[1]) < np.array(found[0])).all()


def test_the_maturity_rule_in_its_times():
    model, tokens = small(), torch.from_numpy(RANDOM.randint(0, 20, (2, 8)))
    still = MaturityRule(tokens)  # of a model that does not move
    found = [still(model, t, 1000) for t in range(1000)]
    assert still.released == 30 and found[:31] == [0.25] * 31
    assert math.isclose(found[35], 0.625) and found[40:] == [1.0] * 960
    never = MaturityRule(tokens, threshold=1.0)
    for t in range(0, 200):
        if t % 5 == 0:
            model.blocks[0].ffn.up.weight.data.normal_()
        never(model, t, 1000)
    assert never.released == 120


@pytest.mark.parametrize(
    "options, argument",
    [
        (dict(tokens=torch.zeros(1, 1, dtype=torch.int64)), "tokens"),
        (dict(tokens=torch.zeros(2, 8)), "tokens"),
        (dict(earliest=0.2, latest=0.1), "earliest, latest"),
        (dict(every=0.0), "every"),
        (dict(threshold=1.5), "threshold"),
        (dict(multiplier=-1.0), "multiplier"),
    ],
)
def test_a_wrong_rule_is_named(options, argument):
    with refused(argument):
        MaturityRule(**dict(tokens=torch.zeros(2, 8, dtype=torch.int64)) | options)


@pytest.mark.parametrize(
    "options, argument",
    [
        (dict(x=(torch.ones(3, 2),)), "x"),
        (dict(w_q=(torch.ones(3, 2), torch.ones(3, 2))), "x"),
        (dict(w_k=(torch.ones(2, 5), torch.ones(2, 5))), "w_k"),
    ],
)
def test_what_has_no_drift_is_named(options, argument):
    pair = lambda *shape: (torch.ones(*shape), torch.ones(*shape))
    with refused(argument):
        score_drift_bound(**dict(x=pair(3, 2), w_q=pair(2, 4), w_k=pair(2, 4)) | options)


def test_what_was_not_observed_has_no_result():
    with refused("observe"):
        Specialisation(a_batch(), at=()).result()
    with refused("at"):
        Specialisation(a_batch(), at=[-1])


def test_the_bound_of_weights_that_begin_at_zero_is_a_number():
    from gbattn.timing import score_drift_bound

    x, zero, w = torch.randn(4, 3), torch.zeros(3, 2), torch.randn(3, 2)
    still, moved = (score_drift_bound((x, x), (zero, end), (w, w + 1)) for end in (zero, w))
    assert still.bound == still.drift == still.lambda_q == 0
    assert moved.lambda_q == torch.inf and moved.drift <= moved.bound < torch.inf
