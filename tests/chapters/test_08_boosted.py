"""Chapter 8: the claims with their mutants, the options of the layer, and what its corrections do."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused
from signs import with_sign
from torch import nn

from claims import claim
from gbattn.boosted import Correction, GradientBoostedAttention, alignment, functional_gradient, gated
from gbattn.interop import from_torch
from gbattn.layers import MultiHeadAttention, make_attention
from gbattn.twicing import TwicingAttention

F64 = torch.float64
SOURCES = ("residual", "input", "shared", "residual_keys", "residual_values")
GATES = ("feature", "head", "scalar", "none")


class Problem:
    """Tokens x (1, T, D), a row-stochastic map (T, T), a gate in (0, 1), and a generator for more."""

    def __init__(self, seed, T, H, K, rounds, nu):
        self.rng = torch.Generator().manual_seed(seed)
        self.T, self.H, self.D, self.rounds, self.nu = T, H, H * K, rounds, nu
        self.x = self.normal(1, T, self.D)
        self.map = (2 * self.normal(T, T)).softmax(-1)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def layer(self, kind=GradientBoostedAttention, **options):
        layer = kind(self.D, self.H, dtype=F64, **options)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(0.7 * self.normal(*weight.shape))
        return layer


def problems(T=(2, 7), K=(1, 3)):
    return st.builds(
        Problem, st.integers(0, 2**31), st.integers(*T), st.integers(1, 3), st.integers(*K), st.integers(2, 4),
        st.floats(0.05, 0.95),
    )  # fmt: skip


def half(r):
    return r.square().sum() / 2


# ---------------------------------------------------------------- claims


def closed(p, bias):
    """A layer whose gates rest at a bias, and one with a single round, against the layer of their round 0."""
    boosted = p.layer(rounds=p.rounds)
    plain = MultiHeadAttention(p.D, p.H, dtype=F64)
    plain.load_state_dict({k: w for k, w in boosted.state_dict().items() if not k.startswith("corrections")})
    one = GradientBoostedAttention(p.D, p.H, rounds=1, dtype=F64)
    one.load_state_dict(plain.state_dict())
    for correction in boosted.corrections:
        nn.init.constant_(correction.gate.bias, bias)
    return torch.cat([boosted(p.x), one(p.x)]), plain(p.x).expand(2, -1, -1)


def test_one_round_or_closed_gates_are_ordinary_attention():
    """To the last bit; gates that are nearly closed are not."""
    p = Problem(3, 6, 2, 3, 3, 0.5)
    assert torch.equal(*closed(p, -math.inf)) and not torch.equal(*closed(p, -5.0))


def rescaled(p, s, gates=True, options=GATES, shifts=(False, True)):
    """A layer that reads x − RF against one that reads x − F with the weights of the proposition, for all options;
    s is R, or a number for sI."""
    outputs = []
    for kv_from, gate, shift in itertools.product(SOURCES, options, shifts):
        layer = p.layer(rounds=p.rounds, kv_from=kv_from, gate=gate, shift=shift)
        layer, other = with_sign(layer, s, gates=gates)
        outputs.append((layer(p.x, causal=True), other(p.x, causal=True)))
    return (torch.cat(side) for side in zip(*outputs))


@claim(problems(), tolerance=0, examples=20, mutant=lambda p: rescaled(p, -1.0, gates=False))
def test_prop_sign(p):
    """x + F is x − F, to the last bit. Mutant: the gates keep their weights."""
    return rescaled(p, -1.0)


@pytest.mark.parametrize("s", [0.3, -2.0, 7.0])
def test_any_scale_of_the_estimate_is_the_same_family(s):
    layer, other = rescaled(Problem(3, 6, 2, 3, 3, 0.5), s)
    assert (layer - other).abs().max() < 1e-9 * layer.abs().max()


def test_any_basis_of_the_estimate_is_the_same_family():
    """Within heads; diagonal where a gate or a shift has a number for each feature."""
    p = Problem(3, 6, 2, 3, 3, 0.5)
    turned = torch.block_diag(*(p.normal(p.D // p.H, p.D // p.H) for _ in range(p.H)))
    near = lambda sides: (sides[0] - sides[1]).abs().max() < 1e-9 * sides[0].abs().max()
    assert near(list(rescaled(p, torch.diag(p.normal(p.D)))))
    assert near(list(rescaled(p, turned, options=GATES[1:], shifts=(False,))))
    assert not near(list(rescaled(p, turned, options=GATES[:1], shifts=(False,))))
    assert not near(list(rescaled(p, turned, options=GATES[1:], shifts=(True,))))


def test_the_descent_and_the_answer_do_not_depend_on_the_basis_and_the_angle_with_the_residual_does():
    """For a layer that reads x − RF and its image that reads x − F: ⟨δ, u⟩, each round's answer and r are the same."""
    p = Problem(3, 6, 2, 3, 3, 0.5)
    turned = torch.block_diag(*(p.normal(p.D // p.H, p.D // p.H) for _ in range(p.H)))
    target = p.normal(*p.x.shape)
    for R, gate in ((-1.0, "feature"), (torch.diag(p.normal(p.D)), "feature"), (turned, "head")):
        found = []
        for layer in with_sign(p.layer(rounds=2, gate=gate), R):
            loss = lambda layer=layer: (layer(p.x) - target).square().sum()
            u, trace = functional_gradient(layer, loss)
            first, second = trace.rounds
            delta, r = gated(torch.zeros_like(p.x), second.gate, second.correction), second.residual
            found.append(((delta * u).sum(-1), layer.out(first.estimate), layer.out(second.estimate), r, delta))
        *same, delta = zip(*found)
        for one, image in same:
            torch.testing.assert_close(one, image, atol=1e-9, rtol=1e-9)
        angles = [alignment(d, -found[0][3]) for d in delta]
        if isinstance(R, float):
            assert torch.equal(angles[0], -angles[1])
        else:
            assert (angles[0] - angles[1]).abs().max() > 0.1


def trained(p, clip, optimizer=torch.optim.AdamW):
    """Losses of ten updates of a layer that reads x − F, and of its image that reads x + F."""
    minus = p.layer(rounds=p.rounds)
    plus = copy.deepcopy(minus)
    with torch.no_grad():
        for each in (plus, *plus.corrections):
            each.value.weight.neg_()
            each.value.bias.neg_()
        plus.out.weight.neg_()
        for correction in plus.corrections:
            correction.residual = torch.add
            correction.gate.weight.neg_()
    target, losses = p.normal(*p.x.shape), ([], [])
    for layer, found in zip((minus, plus), losses):
        steps = optimizer(layer.parameters(), lr=0.01, weight_decay=0.1)
        for _ in range(10):
            loss = (layer(p.x) - target).square().mean()
            steps.zero_grad()
            loss.backward()
            clip(layer)
            steps.step()
            found.append(loss.detach())
    return torch.stack(losses[0]), torch.stack(losses[1])


def by_norm(layer):
    nn.utils.clip_grad_norm_(layer.parameters(), 0.1)


def from_above(layer):
    for weight in layer.parameters():
        weight.grad.clamp_(max=1e-3)


def test_training_cannot_tell_the_sign():
    """The same losses at every step; not with a clipping that does not commute with the sign."""
    for seed in (3, 4, 5):
        p = Problem(seed, 6, 2, 3, 3, 0.5)
        assert torch.equal(*trained(p, by_norm)) and not torch.equal(*trained(p, from_above))


def test_the_start_is_as_likely_negated():
    """Gates and biases start at zero; values and output are drawn evenly around it."""
    layer = GradientBoostedAttention(64, 4)
    for each in (layer, *layer.corrections):
        assert not each.value.bias.any()
        assert abs(each.value.weight.mean()) < 4 * each.value.weight.std() / 64
    assert not layer.corrections[0].gate.weight.any() and not layer.corrections[0].gate.bias.any()


def with_fixed_map(kind, p, value=1.0, **options):
    layer = kind(p.D, 1, dtype=F64, **options)
    for name, weight in layer.named_parameters():
        nn.init.zeros_(weight)
        if name.endswith(("value.weight", "out.weight")):
            with torch.no_grad():
                weight.copy_((value if "value" in name else 1.0) * torch.eye(p.D))
    return layer


def fixed_eyes(p, value):
    """The layer under one map: without a gate against twicing, with a constant one against the formula."""
    mask, S = p.map.log(), p.map
    bare = with_fixed_map(GradientBoostedAttention, p, value, rounds=p.rounds, gate="none")
    twicing = with_fixed_map(TwicingAttention, p, value, rounds=p.rounds)
    shrunk = with_fixed_map(GradientBoostedAttention, p, value, rounds=p.rounds)
    for correction in shrunk.corrections:
        nn.init.constant_(correction.gate.bias, math.log(p.nu / (1 - p.nu)))
    eye = torch.eye(p.T, dtype=F64)
    left = torch.linalg.matrix_power(eye - p.nu * S, p.rounds - 1) @ (eye - S) @ p.x
    return torch.cat([bare(p.x, mask=mask), shrunk(p.x, mask=mask)]), torch.cat([twicing(p.x, mask=mask), p.x - left])


def test_with_fixed_weights_the_layer_is_twicing_and_with_constant_gates_l2_boosting():
    """If W_V = I; not if W_V = 0.9 I."""
    p = Problem(3, 6, 2, 3, 3, 0.5)
    near = lambda sides: torch.allclose(*sides, rtol=0, atol=1e-10)
    assert near(fixed_eyes(p, 1.0)) and not near(fixed_eyes(p, 0.9))


def change(p, square):
    F, g, c = p.normal(3, p.T, p.D)
    g = g.sigmoid()
    after = half(p.x[0] - gated(F[None], g[None], c[None])[0])
    r, delta = p.x[0] - F, g * c
    formula = square * half(delta) - (r * delta).sum()
    ball = r.square().sum() - (delta - r).square().sum()  # positive inside
    return torch.stack([after - half(r), -ball / 2]), formula.expand(2)


@claim(problems(), tolerance=1e-10, mutant=lambda p: change(p, 0))
def test_thm_when_it_falls(p):
    """The change of ½‖x − F‖², and the ball: the second part. Mutant: to first order only."""
    return change(p, 1)


def test_the_counter_example():
    x, F, g, c = (torch.tensor([[v]]) for v in ([1.0, 0.0], [0.5, 0.0], [0.5, 0.5], [-1.0, 1.0]))
    assert half(x - F) == 0.125 and half(x - gated(F, g, c)) == 0.625


def test_a_gate_for_each_token_can_spoil_a_fit():
    r, H = torch.tensor([[3.0], [-1.0]]), torch.full((2, 2), 0.5)
    assert (H @ r).flatten().tolist() == [1.0, 1.0]
    taken = torch.tensor([[0.0], [1.0]]) * (H @ r)
    assert half(r) == 5.0 and half(r - taken) == 6.5 and (taken * r).sum() == -1


def test_a_small_step_lowers_any_loss_exactly_if_it_points_downhill():
    """The first part of the theorem, for cross-entropy behind a linear map."""
    fell = []
    for seed in range(20):
        p = Problem(seed, 6, 2, 3, 3, 0.5)
        W, F, delta = p.normal(5, p.D), p.normal(p.D).requires_grad_(), p.normal(p.D)
        L = lambda F, W=W: -(W @ F).log_softmax(-1)[0]
        (u,) = torch.autograd.grad(L(F), F)
        fell.append(bool(L(F + 1e-6 * delta) < L(F)))
        assert fell[-1] == (delta @ -u > 0)
    assert 0 < sum(fell) < 20


def turned(p, kind, **options):
    """A layer, and the same with the basis of its values changed, in every round that has its own."""
    layer = p.layer(kind, **options)
    K = p.D // p.H
    R = torch.block_diag(*(torch.linalg.qr(p.normal(K, K)).Q * 1.5 for _ in range(p.H)))
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for each in (twin, *getattr(twin, "corrections", [])):
            each.value.weight.copy_(R @ each.value.weight)
            each.value.bias.copy_(R @ each.value.bias)
        twin.out.weight.copy_(layer.out.weight @ torch.linalg.inv(R))
    return twin(p.x), layer(p.x)


def test_values_have_a_basis_in_boosted_attention_only():
    """Turned values change neither multi-head attention nor twicing."""
    near = lambda sides: torch.allclose(*sides, rtol=0, atol=1e-10)
    p = Problem(3, 6, 2, 3, 3, 0.5)
    assert near(turned(p, MultiHeadAttention)) and near(turned(p, TwicingAttention))
    assert not near(turned(p, GradientBoostedAttention, gate="none"))


def family(p, shift):
    """Each gate against the larger one with its rows tied."""
    left, right = [], []
    for small, large, copies in (("head", "feature", p.D // p.H), ("scalar", "head", p.H)):
        layer = p.layer(gate=small)
        state = layer.state_dict()
        for name in ("corrections.0.gate.weight", "corrections.0.gate.bias"):
            state[name] = state[name].repeat_interleave(copies, 0).roll(shift, 0) + 0.3 * shift
        tied = GradientBoostedAttention(p.D, p.H, gate=large, dtype=F64)
        tied.load_state_dict(state)
        left.append(tied(p.x))
        right.append(layer(p.x))
    scalar, none = p.layer(gate="scalar"), GradientBoostedAttention(p.D, p.H, gate="none", dtype=F64)
    nn.init.zeros_(scalar.corrections[0].gate.weight)
    nn.init.constant_(scalar.corrections[0].gate.bias, math.inf)
    none.load_state_dict({k: w for k, w in scalar.state_dict().items() if "gate" not in k})
    return torch.cat([*left, scalar(p.x)]), torch.cat([*right, none(p.x)])


def test_a_gate_is_a_larger_one_with_equal_rows():
    """And a bias of ∞ makes none; not with rows that are equal one place off, nor with other biases."""
    p = Problem(3, 6, 2, 3, 3, 0.5)
    near = lambda sides: torch.allclose(*sides, rtol=0, atol=1e-10)
    assert near(family(p, 0)) and not near(family(p, 1))


# ---------------------------------------------------------------- the layer by its definition


def by_definition(layer, x):
    """The chapter's four lines, head by head, with plain softmaxes."""

    def look(m, query, keys, values):
        names = layer if m == 0 else layer.corrections[m - 1]
        own = layer if layer.kv_from == "shared" else names
        H, G, outputs = layer.n_heads, layer.n_kv_heads, []
        heads = lambda z, n: z.unflatten(-1, (n, -1)).unbind(-2)
        q, k, v = heads(names.query(query), H), heads(own.key(keys), G), heads(own.value(values), G)
        for h in range(H):
            A = (q[h] @ k[h * G // H].mT / math.sqrt(layer.head_dim)).softmax(-1)
            outputs.append(A @ v[h * G // H])
        return torch.cat(outputs, -1)

    F = look(0, x, x, x)
    for m, correction in enumerate(layer.corrections, start=1):
        r = x - F
        keys, values = (r if layer.kv_from in ("residual", f"residual_{part}") else x for part in ("keys", "values"))
        c = look(m, r, keys, values)
        if correction.gate is None:
            F = F + c
        else:
            gate = correction.gate
            g = nn.functional.linear(torch.cat([F, c], -1), gate.weight, gate.bias).sigmoid()
            F = F + g.repeat_interleave(layer.d_model // g.shape[-1], -1) * c
    return layer.out(F)


@pytest.mark.parametrize("kv_from", SOURCES)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rounds, groups", [(1, 4), (2, 4), (3, 2), (4, 1)])
def test_the_layer_is_its_definition(kv_from, gate, rounds, groups):
    layer = GradientBoostedAttention(8, 4, n_kv_heads=groups, kv_from=kv_from, gate=gate, rounds=rounds, dtype=F64)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.5)
    x = torch.randn(2, 5, 8, dtype=F64)
    torch.testing.assert_close(layer(x), by_definition(layer, x), atol=1e-12, rtol=0)
    trace = layer.explain(x)
    assert len(trace.rounds) == rounds
    for before, after in zip(trace.rounds, trace.rounds[1:]):
        torch.testing.assert_close(after.residual, x - before.estimate, atol=0, rtol=0)
        taken = after.correction if after.gate is None else after.gate * after.correction
        torch.testing.assert_close(after.estimate, before.estimate + taken, atol=1e-14, rtol=0)
        assert (after.gate is None) == (gate == "none")


def test_the_three_corrections_differ():
    x, outputs = torch.randn(2, 6, 8, dtype=F64), []
    for kv_from in SOURCES:
        torch.manual_seed(1)
        outputs.append(GradientBoostedAttention(8, 2, kv_from=kv_from, dtype=F64)(x))
    for i in range(3):
        for j in range(i):
            assert (outputs[i] - outputs[j]).abs().max() > 1e-2


@pytest.mark.parametrize("kv_from", SOURCES)
def test_a_trained_multi_head_layer_can_be_loaded(kv_from):
    plain, boosted = MultiHeadAttention(8, 2), GradientBoostedAttention(8, 2, kv_from=kv_from)
    found = boosted.load_state_dict(plain.state_dict(), strict=False)
    assert not found.unexpected_keys and all(key.startswith("corrections.0.") for key in found.missing_keys)
    x = torch.randn(1, 4, 8)
    torch.testing.assert_close(boosted.explain(x).rounds[0].estimate, plain.explain(x).rounds[0].estimate)


def test_the_gate_starts_at_exactly_one_half_and_again_after_a_reset():
    layer, x = GradientBoostedAttention(8, 2, rounds=3), 100 * torch.randn(1, 4, 8)
    halfway = lambda: [(look.gate == 0.5).all().item() for look in layer.explain(x).rounds[1:]]
    assert halfway() == [True, True]
    nn.init.normal_(layer.corrections[0].gate.weight)
    assert halfway()[0] is False
    first = layer.query.weight.clone()
    layer.reset_parameters(torch.Generator().manual_seed(3))
    assert halfway() == [True, True] and not torch.equal(first, layer.query.weight)
    twin = GradientBoostedAttention(8, 2, rounds=3)
    twin.reset_parameters(torch.Generator().manual_seed(3))
    assert all(torch.equal(a, b) for a, b in zip(layer.parameters(), twin.parameters()))


def test_a_gate_has_its_bias_where_the_projections_have_none():
    layer = GradientBoostedAttention(8, 2, bias=False)
    biases = [name for name, _ in layer.named_parameters() if name.endswith("bias")]
    assert biases == ["corrections.0.gate.bias"]


@pytest.mark.parametrize(
    "options", [{}, dict(rounds=3, gate="head"), dict(kv_from="input"), dict(query_from="input", gate="none")], ids=str
)
@pytest.mark.parametrize(
    "kind",
    [{}, dict(n_kv_heads=1, rotary=100.0, bias=False), dict(shift=True, causal=True, dtype=torch.float64)],
    ids=str,
)
def test_a_boosted_layer_starts_as_a_trained_one_and_its_values_learn_first(kind, options):
    plain = MultiHeadAttention(8, 2, **kind)
    with torch.no_grad():
        for weight in plain.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    grown, x = GradientBoostedAttention.from_attention(plain, **options), torch.randn(2, 5, 8).to(plain.query.weight)
    assert grown.rounds == options.get("rounds", 2) and grown.causal == plain.causal
    for told in ({}, dict(causal=True), dict(padding=torch.tensor([[1, 1, 0, 0, 0], [1] * 5]))):
        assert torch.equal(grown(x, **told), plain(x, **told))
    for layer in (plain, grown):
        layer(x).square().sum().backward()
    wanted = dict(plain.named_parameters())
    for name, weight in grown.named_parameters():
        if name in wanted:
            assert torch.equal(weight, wanted[name]) and weight is not wanted[name]
            assert torch.equal(weight.grad, wanted[name].grad), name
        else:
            assert (weight.grad.abs().max() > 0) == (".value." in name), name
    with torch.no_grad():
        for weight in grown.parameters():
            weight.sub_(0.1 * weight.grad)
    grown.zero_grad()
    grown(x).square().sum().backward()
    for name, weight in grown.named_parameters():  # a key's bias changes no softmax
        assert name.endswith("key.bias") or weight.grad.abs().max() > 0, name


def test_a_boosted_layer_from_another_keeps_mode_dropout_dtype_and_what_is_frozen():
    plain = MultiHeadAttention(8, 2, dropout=0.1, dtype=torch.bfloat16).eval().requires_grad_(False)
    grown = GradientBoostedAttention.from_attention(plain)
    assert (grown.dropout, grown.training, grown.corrections[0].training) == (0.1, False, False)
    assert {weight.dtype for weight in grown.parameters()} == {torch.bfloat16}
    for name, weight in grown.named_parameters():
        assert weight.requires_grad == name.startswith("corrections"), name
    with torch.no_grad():
        grown.query.weight.zero_()
    assert plain.query.weight.any()


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_boosted_layer_from_torchs_gives_what_that_gives(rounds):
    theirs, x = torch.nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    grown = GradientBoostedAttention.from_attention(from_torch(theirs), rounds=rounds)
    assert type(grown) is GradientBoostedAttention and grown.rounds == rounds
    torch.testing.assert_close(grown(x), theirs(x, x, x)[0])
    causal = GradientBoostedAttention.from_attention(from_torch(theirs, causal=True), rounds=rounds)
    torch.testing.assert_close(causal(x)[:, :3], grown(x[:, :3], causal=True))


def test_a_gate_keeps_its_start_where_modules_reset_themselves_and_can_be_given_it_back():
    layer = GradientBoostedAttention(8, 2, rounds=3)
    gates = [correction.gate for correction in layer.corrections]
    start = lambda: not any(weight.any() for gate in gates for weight in gate.parameters())
    layer.apply(lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None)
    assert start()
    layer.apply(lambda module: nn.init.normal_(module.weight) if isinstance(module, nn.Linear) else None)
    assert not start()  # it is a linear layer, and whoever draws all of these draws it
    for gate in gates:
        gate.reset_parameters()
    assert start() and layer.query.weight.abs().max() > 1


def test_a_fresh_gate_moves_no_number_that_is_drawn_after_it():
    torch.manual_seed(0)
    layer = GradientBoostedAttention(8, 2, rounds=3)
    after = torch.rand(())
    torch.manual_seed(0)
    plain = MultiHeadAttention(8, 2)
    assert torch.equal(plain.query.weight, layer.query.weight)
    for correction in layer.corrections:
        for name in ("query", "key", "value"):
            linear = nn.Linear(8, 8)
            nn.init.xavier_uniform_(linear.weight)
            assert torch.equal(linear.weight, getattr(correction, name).weight)
        nn.Linear(16, 8)
    assert torch.rand(()) == after
    with torch.random.fork_rng():
        torch.manual_seed(1)
        drawn = torch.rand(())
        torch.manual_seed(1)
        layer.corrections[0].gate.reset_parameters()
        assert torch.rand(()) == drawn


def test_a_correction_without_keys_or_gate_has_none():
    bare = Correction(8, 8, 0, False)
    assert [name for name, _ in bare.named_parameters()] == ["query.weight", "query.bias"]


@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_gated_repeats_a_narrow_gate_over_neighbours(n):
    F, c, g = torch.randn(2, 3, 8, dtype=F64), torch.randn(2, 3, 8, dtype=F64), torch.rand(2, 3, n, dtype=F64)
    torch.testing.assert_close(gated(F, g, c), F + g.repeat_interleave(8 // n, -1) * c, atol=1e-15, rtol=0)
    assert torch.equal(gated(F, None, c), F + c)


def test_shared_keys_need_one_cache_and_own_keys_one_each():
    for rounds in (1, 2, 4):
        size = {k: GradientBoostedAttention(8, 2, rounds=rounds, kv_from=k).make_cache(3, 5).nbytes for k in SOURCES}
        one = MultiHeadAttention(8, 2).make_cache(3, 5).nbytes
        assert size == {k: one if k == "shared" else rounds * one for k in SOURCES}


# ---------------------------------------------------------------- parameters


def count(name, D, **options):
    """The published language model around a layer: 16384 words, 256 positions, 4 layers, tied embeddings."""
    with torch.device("meta"):
        attention = make_attention(name, D, 4, **options)
        block = [attention, nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.LayerNorm(D)]
        rest = [nn.Embedding(16_384, D), nn.Embedding(256, D), nn.LayerNorm(D)]
    size = lambda modules: sum(p.numel() for m in modules for p in m.parameters())
    return size(rest) + 4 * size(block)


def test_published_parameter_counts():
    assert count("multi_head", 256) == count("twicing", 256) == 7_419_392
    assert count("boosted", 256) == count("boosted", 256, kv_from="input") == 8_734_208
    assert count("multi_head", 288) == 8_789_184


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("D", [8, 12])
def test_the_formula_of_the_parameters(rounds, D):
    count = sum(p.numel() for p in GradientBoostedAttention(D, 4, rounds=rounds).parameters())
    assert count == 4 * D * D + 4 * D + (rounds - 1) * (5 * D * D + 4 * D)


# ---------------------------------------------------------------- alignment and the functional gradient


def model_and_loss(**options):
    layer, head = GradientBoostedAttention(8, 2, dtype=F64, **options), nn.Linear(8, 5, dtype=F64)
    for weight in layer.parameters():
        nn.init.normal_(weight, std=0.5)
    x, target = torch.randn(2, 6, 8, dtype=F64), torch.randint(5, (12,))
    model = nn.Sequential(layer, nn.Tanh(), head)
    read = lambda out: nn.functional.cross_entropy(head(out.tanh()).flatten(0, 1), target, reduction="sum")
    return layer, x, read, lambda: nn.functional.cross_entropy(model(x).flatten(0, 1), target, reduction="sum")


@pytest.mark.parametrize("look", [0, 1, 2])
@pytest.mark.parametrize("kv_from", SOURCES)
def test_the_functional_gradient_is_that_of_the_layer_stopped_there(look, kv_from):
    layer, x, read, loss = model_and_loss(rounds=3, kv_from=kv_from)
    u, trace = functional_gradient(layer, loss, look)
    F = layer.explain(x).rounds[look].estimate.detach().requires_grad_()
    (expected,) = torch.autograd.grad(read(layer.out(F)), F)
    torch.testing.assert_close(u, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(trace.output, layer(x), atol=1e-12, rtol=0)
    direction = torch.randn_like(F)
    with torch.no_grad():
        slope = (read(layer.out(F + 1e-6 * direction)) - read(layer.out(F - 1e-6 * direction))) / 2e-6
    torch.testing.assert_close((u * direction).sum(), slope, atol=1e-6, rtol=0)


def test_the_three_gradients_are_three():
    layer, x, read, loss = model_and_loss()
    u, _ = functional_gradient(layer, loss)
    trace = layer.explain(x)
    total, last = torch.autograd.grad(read(trace.output), [look.estimate for look in trace.rounds])
    assert min((u - total).abs().max(), (u - last).abs().max(), (total - last).abs().max()) > 1e-2
    at_the_end, _ = functional_gradient(layer, loss, 1)
    torch.testing.assert_close(at_the_end, last, atol=1e-12, rtol=0)


def test_a_total_derivative_has_a_factor_for_each_round_to_come():
    layer, x, read, _ = model_and_loss(rounds=4)
    trace = layer.explain(x)
    estimates = [look.estimate for look in trace.rounds]
    *totals, expected = torch.autograd.grad(read(trace.output), estimates, retain_graph=True)
    for m in (3, 2, 1):  # times (I + J_m)ᵀ, from the last round back
        last, delta = expected, trace.rounds[m].gate * trace.rounds[m].correction
        (product,) = torch.autograd.grad(delta, estimates[m - 1], expected, retain_graph=True)
        expected = last + product
        torch.testing.assert_close(totals[m - 1], expected, atol=1e-10, rtol=1e-10)
        assert (totals[m - 1] - last).abs().max() > 1e-3  # the factor matters


def test_the_functional_gradient_leaves_no_trace():
    layer, x, read, loss = model_and_loss()
    before, state = loss().item(), copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        functional_gradient(layer, loss)
    assert loss().item() == before and not layer._forward_hooks
    assert all(weight.grad is None for weight in layer.parameters())
    assert all(torch.equal(a, b) for a, b in zip(state.values(), layer.state_dict().values()))
    with pytest.raises(ZeroDivisionError):
        functional_gradient(layer, lambda: loss() / 0 if layer(x) is None else 1 / 0)
    assert not layer._forward_hooks


def test_a_loss_that_does_not_depend_on_the_layer():
    layer, x, read, loss = model_and_loss()
    weight = torch.ones(1, dtype=F64, requires_grad=True)
    with refused("loss"):
        functional_gradient(layer, lambda: layer(x).detach().sum() + weight.sum())
    assert torch.equal(functional_gradient(layer, loss, np.int64(1))[0], functional_gradient(layer, loss, 1)[0])
    with refused("round"):
        functional_gradient(layer, loss, True)


def test_other_layers_have_functional_gradients_too():
    x = torch.randn(1, 4, 8, dtype=F64)
    for kind in (MultiHeadAttention, TwicingAttention):
        layer = kind(8, 2, dtype=F64)
        u, trace = functional_gradient(layer, lambda layer=layer: layer(x, causal=True).square().sum() / 2)
        out = layer.out
        torch.testing.assert_close(u, out(trace.rounds[0].estimate) @ out.weight, atol=1e-12, rtol=0)


def test_alignment_is_the_cosine_with_the_descent():
    d = torch.randn(3, 7, 8, dtype=F64)
    u = torch.randn(3, 7, 8, dtype=F64)
    torch.testing.assert_close(alignment(d, u), torch.cosine_similarity(d, -u, dim=-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(alignment(-2 * u, u), torch.ones(3, 7, dtype=F64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64])
def test_alignment_does_not_see_the_scale(dtype):
    d, u = torch.randn(2, 50, 8).to(dtype)
    tiny = torch.finfo(dtype).tiny * 2**10
    huge = torch.finfo(dtype).max / 8
    found, usual = alignment(d * tiny, u / u.abs().max() * huge), alignment(d, u)
    assert found.dtype == (F64 if dtype == F64 else torch.float32)
    torch.testing.assert_close(found, usual, atol=2e-2 if dtype.itemsize == 2 else 1e-5, rtol=0)
    assert found.abs().max() <= 1


def test_alignment_is_a_cosine_to_the_last_bit():
    u = torch.randn(20_000, 7)
    found = alignment(torch.cat([-3 * u, u]), torch.cat([u, u]))
    assert found.max() == 1 and found.min() == -1


def test_alignment_of_a_gradient_finer_than_the_correction():
    one = alignment(torch.tensor([1.0, 0.0]), torch.tensor([-1e-50, 0.0], dtype=torch.float64))
    assert one == 1 and one.dtype == torch.float64


def test_alignment_of_nothing_is_nan():
    d = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 2.0]])
    u = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 2.0]])
    assert alignment(d, u).isnan().tolist() == [True, True, False]


# ---------------------------------------------------------------- errors


def runs(times, then=lambda value: value):
    layer, x = GradientBoostedAttention(4, 2), torch.randn(1, 3, 4)
    return functional_gradient(layer, lambda: then(sum((layer(x).sum() for _ in range(times)), torch.zeros(()))))


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: GradientBoostedAttention(4, 2, rounds=0), "rounds"),
        (lambda: GradientBoostedAttention(4, 2, kv_from="x"), "kv_from"),
        (lambda: GradientBoostedAttention(4, 2, gate="full"), "gate"),
        (lambda: GradientBoostedAttention(4, 2)(torch.zeros(1, 2, 4), context=torch.zeros(1, 3, 4)), "context"),
        (lambda: GradientBoostedAttention(4, 2, bias="False"), "bias"),
        (lambda: GradientBoostedAttention.from_attention(MultiHeadAttention(4, 2), kv_from="shared"), "kv_from"),
        (lambda: GradientBoostedAttention.from_attention(GradientBoostedAttention(4, 2)), "layer"),
        (lambda: Correction(8, 8, 3, True), "n_gates"),
        (lambda: Correction(8, 8, 8, "False"), "own_keys"),
        (lambda: Correction(8, -8, 8, True), "kv_dim"),
        (lambda: gated("F", None, "c"), "F"),
        (lambda: gated(torch.ones(1, 2, 4), None, torch.ones(1, 1, 4)), "c"),
        (lambda: gated(torch.ones(1, 2, 4), torch.ones(1, 2, 3), torch.ones(1, 2, 4)), "g"),
        (lambda: alignment([1.0], torch.ones(1)), "correction"),
        (lambda: alignment(torch.ones(2), torch.ones(2).long()), "gradient"),
        (lambda: functional_gradient(nn.Linear(2, 2), lambda: 0), "layer"),
        (lambda: functional_gradient(GradientBoostedAttention(4, 2), 3), "loss"),
        (lambda: alignment(torch.ones(2, 3), torch.ones(3)), "gradient"),
        (lambda: runs(0), "loss"),
        (lambda: runs(1, torch.Tensor.detach), "loss"),
        (lambda: runs(2), "loss"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()


def test_a_round_that_is_not_there_is_refused_and_leaves_no_hook():
    layer, x = GradientBoostedAttention(4, 2), torch.randn(1, 3, 4)
    for number in (-1, 2, 0.5, None):
        with refused("round"):
            functional_gradient(layer, lambda: layer(x).sum(), number)
    assert not layer._forward_hooks


@pytest.mark.parametrize("kv_from", ["input", "shared"])
def test_a_context_is_read_where_there_is_no_residual_to_read(kv_from):
    layer = GradientBoostedAttention(8, 2, kv_from=kv_from, dtype=F64)
    x, context = torch.randn(2, 3, 8, dtype=F64), torch.randn(2, 5, 8, dtype=F64)
    assert layer(x, context=context).shape == x.shape
    torch.testing.assert_close(layer(x, context=x), layer(x), atol=1e-14, rtol=0)
    assert (layer(x, context=context) - layer(x, context=2 * context)).abs().max() > 1e-3
