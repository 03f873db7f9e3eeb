"""Chapter 7: the claims with their mutants, and what a lesson should not carry: parity with the naive layer, decoding,
weights that move between layers, extreme inputs, faults."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import gbattn.layers
from claims import claim
from gbattn.attention import (
    attend,
    causal_mask,
    merge_heads,
    padding_mask,
    split_heads,
)
from gbattn.boosting import l2_boost, twice
from gbattn.layers import MultiHeadAttention, make_attention
from gbattn.twicing import TwicingAttention

F64 = torch.float64


class Problem:
    """Drawn sizes, a number of looks M, and a generator for more."""

    def __init__(self, seed, T, width, M):
        self.rng = torch.Generator().manual_seed(seed)
        self.T, self.K, self.M = T, width, M

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def uniform(self, *size):
        return torch.rand(*size, generator=self.rng, dtype=F64)

    def attention(self, causal=False, starve=0.0):
        """An attention map with scores of size about one, less `starve` for the last key."""
        scores = self.normal(self.T, 4) @ self.normal(4, self.T) / 2
        scores[:, -1] -= starve
        return scores.masked_fill(~causal_mask(self.T), -math.inf).softmax(-1) if causal else scores.softmax(-1)


def problems(T=(2, 10), width=(1, 4), M=(1, 5)):
    return st.builds(Problem, st.integers(0, 2**31), st.integers(*T), st.integers(*width), st.integers(*M))


def look_by_look(A, V, M):
    """The definition: the estimate, and the residual before each look."""
    F, residuals = torch.zeros_like(V), []
    for _ in range(M):
        residuals.append(V - F)
        F = F + A @ residuals[-1]
    return F, residuals


def closed_form(A, M):
    identity = torch.eye(len(A), dtype=A.dtype)
    return identity - torch.linalg.matrix_power(identity - A, M)


def zeros(*parts):
    """Nothing, once for each entry of the parts."""
    return torch.zeros(sum(part.numel() for part in parts), dtype=F64)


def flat(*parts):
    return torch.cat([part.flatten() for part in parts])


# ---------------------------------------------------------------- the claims


def in_closed_form(p, M):
    A, V = p.attention(), p.normal(p.T, p.K)
    F, residuals = look_by_look(A, V, p.M)
    two, _ = look_by_look(A, V, 2)
    rows = closed_form(A, p.M).sum(1)
    left = flat(F, F, two, two, rows)
    right = (closed_form(A, M) @ V, A @ sum(residuals), (2 * A - A @ A) @ V, A @ (2 * V - A @ V), torch.ones_like(rows))
    return left, flat(*right)


@claim(problems(), tolerance=1e-10, mutant=lambda p: in_closed_form(p, p.M + 1))
def test_prop_looks(p):
    """M looks are I − (I − A)^M, A on the sum of residuals, and keep row sums. Mutant: one look more."""
    return in_closed_form(p, p.M)


def modes(p, most):
    """Modes of a symmetric map with drawn eigenvalues in [0, 1], and those of an attention map in the plane."""
    U, values = torch.linalg.qr(p.normal(p.T, p.T)).Q, p.uniform(p.T)
    kept = [(U.T @ look_by_look(U * values @ U.T, U, M)[0]).diagonal() for M in (p.M, p.M + 1)]
    formula = 1 - (1 - values) ** p.M
    A = p.attention()
    anywhere, vectors = torch.linalg.eig(A)
    left_over = torch.linalg.matrix_power(torch.eye(p.T, dtype=F64) - A, p.M).to(vectors.dtype) @ vectors
    off = left_over.norm(dim=0) - (1 - anywhere).abs() ** p.M
    parts = (
        kept[0] - formula,
        formula - kept[0],
        values - kept[0],
        kept[0] - kept[1],
        kept[0] - most(values),
        off,
        -off,
    )
    return flat(*parts), zeros(*parts)


@claim(problems(), tolerance=1e-7, relation="<=", mutant=lambda p: modes(p, lambda v: v))
def test_prop_modes(p):
    """A mode is kept at 1 − (1 − λ)^M, in [λ, min(1, Mλ)], and grows in M. Mutant: kept at no more than λ."""
    return modes(p, lambda values: (p.M * values).clamp(max=1))


NODES, WEIGHTS = (torch.tensor(a) for a in np.polynomial.legendre.leggauss(200))


def bias_order(p, constant):
    """The exact bias on a wave, by quadrature over z in [−12, 12] or [−12, 0], in units of its order."""
    omega, phase = 0.5 + p.uniform(1).item(), 6 * p.uniform(1).item()
    M = min(p.M, 3)
    left, right = [], []
    for causal, h, order, factor in ((False, 1e-2, 2, -constant), (True, 1e-4, 1, math.sqrt(2 / math.pi))):
        z = 6 * (NODES - 1) if causal else 12 * NODES
        density = torch.exp(-(z**2) / 2) * WEIGHTS
        turn = (density * torch.exp(1j * omega * h * z)).sum() / density.sum()
        missed = ((1 - turn) ** M * torch.exp(torch.tensor(1j * phase))).real
        left.append(missed / h ** (order * M))
        derivative = ((1j * omega) ** (order * M) * np.exp(1j * phase)).real
        right.append(torch.tensor(factor**M * derivative, dtype=F64))
    return torch.stack(left), torch.stack(right)


@claim(problems(), tolerance=1e-3, mutant=lambda p: bias_order(p, 1.0))
def test_thm_bias_order(p):
    """M looks miss (−h²/2)^M f^(2M), causal ones (h√(2/π))^M f^(M). Mutant: without the half."""
    return bias_order(p, 0.5)


def half(p, own):
    A, r = p.attention(causal=p.M % 2 == 0), p.normal(p.T, 200)
    left_over = torch.eye(p.T, dtype=F64) - A
    bound = 2 * (1 - own(A.diagonal()))
    signs = left_over[A.diagonal().argmin()].sign()
    reached = (left_over @ signs).abs().max() - bound
    any_residual = (left_over @ r).abs().amax(0) - bound * r.abs().amax(0)
    return flat(any_residual, reached, -reached), zeros(any_residual, reached, reached)


@claim(problems(), tolerance=1e-10, relation="<=", mutant=lambda p: half(p, torch.mean))
def test_prop_half(p):
    """The largest entry grows by 2(1 − min Aᵢᵢ) at most, and that is reached. Mutant: the mean for the minimum."""
    return half(p, torch.min)


def test_half_bounds_the_largest_entry_and_not_the_length():
    """Half to oneself and half to token 1: no entry grows, and a residual of 64 tokens gets four times as long."""
    A = torch.eye(64, dtype=F64) / 2
    A[:, 0] += 0.5
    left_over = torch.eye(64, dtype=F64) - A
    assert torch.linalg.matrix_norm(left_over, math.inf) == 1
    assert abs(torch.linalg.matrix_norm(left_over, 2) - 4) < 1e-12


def chain(T, a):
    """The previous-token head that keeps the share a."""
    A = a * torch.eye(T, dtype=F64) + (1 - a) * torch.eye(T, dtype=F64).roll(1, 0)
    A[0] = torch.eye(T, dtype=F64)[0]
    return A


def causal_eigenvalues(p, causal):
    A = p.attention(causal=causal)
    values = torch.linalg.eigvals(closed_form(A, p.M))
    a, M = p.uniform(1).item(), min(p.M, p.T - 1)
    power = torch.linalg.matrix_power(torch.eye(p.T, dtype=F64) - chain(p.T, a), M)
    left = flat(values.real.sort().values, values.imag, torch.linalg.matrix_norm(power, math.inf))
    diagonal = (1 - (1 - A.diagonal()) ** p.M).sort().values
    return left, flat(diagonal, zeros(values), torch.tensor((2 * (1 - a)) ** M, dtype=F64))


@claim(problems(), tolerance=1e-9, mutant=lambda p: causal_eigenvalues(p, False))
def test_thm_causal(p):
    """Eigenvalues from the diagonal; the chain's residual grows (2(1 − a))^M. Mutant: a map that sees both ways."""
    return causal_eigenvalues(p, True)


def test_the_chain_has_one_eigenvector_for_all_but_the_first_token():
    """64 tokens: the eigenvalue a, 63 times, and A − aI has rank 63; two looks leave 0 and (1 − a)²."""
    A, identity = chain(64, 0.1), torch.eye(64, dtype=F64)
    assert torch.linalg.matrix_rank(A - 0.1 * identity) == 63
    left_over = torch.linalg.matrix_power(identity - A, 2)
    torch.testing.assert_close(left_over.diagonal()[[0, 1, 63]], torch.tensor([0, 0.81, 0.81], dtype=F64))
    assert torch.equal(left_over, left_over.tril())


@pytest.mark.parametrize("M", [1, 2, 3])
def test_causal_looks_come_to_the_values_in_the_end(M):
    """(I − A)^m tends to zero, even where it grew before."""
    A = chain(12, 0.2)
    powers = [torch.linalg.matrix_power(torch.eye(12, dtype=F64) - A, m).abs().max().item() for m in (8, 1000)]
    assert powers[0] > 10 and powers[1] < 1e-20
    F, _ = look_by_look(A, torch.randn(12, M, dtype=F64), 1000)
    assert F.isfinite().all()


def negative_weights(p, detour):
    A, i = p.attention(causal=p.M % 2 == 0), torch.arange(1, p.T + 1, dtype=F64)
    two, H = closed_form(A, 2), (1 / i).cumsum(0)
    average = torch.ones(p.T, p.T, dtype=F64).tril() / i[:, None]
    formula = ((2 - (H[:, None] - (H - 1 / i))) / i[:, None]).tril()
    left = flat((two < 0).double(), two.clamp(-1, 2), 2 * average - average @ average)
    return left, flat((A @ A > detour * A).double(), two, formula)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(problems(T=(2, 30)))
def test_two_rounds_are_negative_where_the_detour_exceeds_twice_the_direct_way(p):
    """And lie in [−1, 2]; the averaging head has a formula."""
    torch.testing.assert_close(*negative_weights(p, 2), atol=1e-12, rtol=0)


def two_looks_through(A, B):
    return A + B @ (torch.eye(len(A), dtype=F64) - A)


def starvation(p, weights_of):
    """The weights of the last token, which is the starved one, and their bounds."""
    A = p.attention(starve=4.0)
    epsilon, worst = A[:, -1].max(), 2.0**p.M - 1
    column = weights_of(A)[:, -1]
    two = (2 * A - A @ A)[:, -1]
    parts = (column.abs() - worst * epsilon, -epsilon - two, two - 2 * epsilon)
    return flat(*parts), zeros(*parts)


@claim(
    problems(T=(3, 8)),
    tolerance=1e-9,
    relation="<=",
    mutant=lambda p: starvation(p, lambda A: two_looks_through(A, p.attention())),
)
def test_thm_starved(p):
    """Bounds on what M looks give a starved token. Mutant: a second look through another map."""
    return starvation(p, lambda A: closed_form(A, p.M))


def test_published_examples():
    """The numbers of the fact sheets: two tokens that swap, the averaging head."""
    swap = torch.tensor([[0.0, 6.0], [6.0, 0.0]], dtype=F64).softmax(-1)
    two = 2 * swap - swap @ swap
    assert abs(two.min() + 0.990) < 5e-4 and abs(torch.linalg.eigvals(two).real.min() + 2.98) < 5e-3
    i = torch.arange(1.0, 65, dtype=F64)
    average = torch.ones(64, 64, dtype=F64).tril() / i[:, None]
    assert abs((2 * average - average @ average).min() + 0.093) < 5e-4


# ---------------------------------------------------------------- the layer against the naive one

OPTIONS = [
    dict(),
    dict(n_kv_heads=2),
    dict(n_kv_heads=1, bias=False),
    dict(n_kv_heads=2, rotary=100.0),
]


def naive(layer, x, mask):
    """out((I − (I − A)^M) V) with every matrix formed; grouped heads written out; no rotary positions."""
    q, k, v = layer.query(x), layer.key(x), layer.value(x)
    K, group, heads = layer.head_dim, layer.n_heads // layer.n_kv_heads, []
    for h in range(layer.n_heads):
        mine, theirs = slice(h * K, (h + 1) * K), slice(h // group * K, (h // group + 1) * K)
        scores = q[..., mine] @ k[..., theirs].mT / math.sqrt(K)
        A = scores.masked_fill(~mask, -math.inf).softmax(-1)
        identity = torch.eye(x.shape[1], dtype=x.dtype)
        heads.append((identity - torch.linalg.matrix_power(identity - A, layer.rounds)) @ v[..., theirs])
    return layer.out(torch.cat(heads, -1))


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
@pytest.mark.parametrize("options", OPTIONS[:3])
@pytest.mark.parametrize("causal", [True, False])
def test_forward_and_gradients_are_those_of_the_naive_layer(rounds, options, causal):
    layer = TwicingAttention(12, 4, rounds=rounds, dtype=F64, **options)
    x = torch.randn(2, 7, 12, dtype=F64, requires_grad=True)
    mask = torch.rand(7, 7) > 0.3
    mask.fill_diagonal_(True)
    outputs = layer(x, causal=causal, mask=mask), naive(layer, x, mask & causal_mask(7) if causal else mask)
    torch.testing.assert_close(*outputs, atol=1e-11, rtol=0)
    wanted = torch.randn_like(outputs[0])
    inputs = [x, *layer.parameters()]
    grads = [torch.autograd.grad((out * wanted).sum(), inputs) for out in outputs]
    for fast, slow in zip(*grads):
        torch.testing.assert_close(fast, slow, atol=1e-10, rtol=0)


def test_two_rounds_are_one_look_at_sharpened_values():
    layer = TwicingAttention(12, 3, dtype=F64)
    x = torch.randn(2, 6, 12, dtype=F64)
    q, k, v = (split_heads(linear(x), 3) for linear in (layer.query, layer.key, layer.value))
    sharp = attend(q, k, 2 * v - attend(q, k, v, causal=True), causal=True)
    torch.testing.assert_close(layer.out(merge_heads(sharp)), layer(x, causal=True), atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", OPTIONS)
def test_one_round_is_multi_head_attention_bit_by_bit(options):
    plain = MultiHeadAttention(12, 2 if options.get("rotary") else 4, **options)
    layer = TwicingAttention(12, plain.n_heads, rounds=1, **options)
    layer.load_state_dict(plain.state_dict())
    x = torch.randn(2, 9, 12)
    for shared in (dict(causal=True), dict(mask=padding_mask(torch.tensor([4, 9]), 9)), dict(mask=torch.randn(9, 9))):
        outputs = [module(x, **shared) for module in (plain, layer)]
        assert torch.equal(*outputs)
        grads = [
            torch.autograd.grad(out.square().sum(), list(m.parameters())) for out, m in zip(outputs, (plain, layer))
        ]
        assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.parametrize("options", OPTIONS[:3])
def test_weights_move_between_layers_and_rounds(options):
    plain, layer = MultiHeadAttention(16, 4, **options), TwicingAttention(16, 4, rounds=3, **options)
    assert plain.state_dict().keys() == layer.state_dict().keys()
    layer.load_state_dict(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    count = lambda module: sum(p.numel() for p in module.parameters())
    assert count(plain) == count(layer) == count(TwicingAttention(16, 4, rounds=9, **options))
    assert not torch.allclose(plain(torch.ones(1, 3, 16).cumsum(1)), layer(torch.ones(1, 3, 16).cumsum(1)), atol=1e-4)


def test_forward_forms_no_map(monkeypatch):
    layer, x = TwicingAttention(8, 2, rounds=3), torch.randn(1, 5, 8)
    expected = layer(x, causal=True)

    class Formed(Exception):
        pass

    def refuse(*_, **__):
        raise Formed

    monkeypatch.setattr(gbattn.layers, "form_weights", refuse)
    assert torch.equal(layer(x, causal=True), expected)
    with pytest.raises(Formed):
        layer.explain(x, causal=True)


def test_explain_shows_the_looks():
    layer = TwicingAttention(12, 4, rounds=3, n_kv_heads=2, dtype=F64)
    x = torch.randn(2, 6, 12, dtype=F64)
    trace = layer.explain(x, causal=True)
    assert len(trace.rounds) == 3
    values = split_heads(layer.value(x), 2).repeat_interleave(2, dim=1)
    F, residuals = look_by_look(trace.rounds[0].weights, values, 3)
    for seen, residual in zip(trace.rounds, residuals):
        assert seen.gate is None and torch.equal(seen.weights, trace.rounds[0].weights)
        torch.testing.assert_close(seen.residual, merge_heads(residual), atol=1e-12, rtol=0)
        torch.testing.assert_close(seen.correction, merge_heads(seen.weights @ residual), atol=1e-12, rtol=0)
        torch.testing.assert_close(
            seen.estimate, merge_heads(values) - seen.residual + seen.correction, atol=1e-12, rtol=0
        )
    torch.testing.assert_close(trace.rounds[-1].estimate, merge_heads(F), atol=1e-12, rtol=0)
    torch.testing.assert_close(trace.output, layer.out(merge_heads(F)), atol=1e-12, rtol=0)


# ---------------------------------------------------------------- decoding


@torch.no_grad()
def test_remembering_keys_and_values_only_decodes_as_one_look():
    """The mutant of the chapter: right shapes, no error, and the second look is gone."""
    layer, x = TwicingAttention(16, 4, dtype=F64), torch.randn(2, 8, 16, dtype=F64)
    plain = MultiHeadAttention(16, 4, dtype=F64)
    plain.load_state_dict(layer.state_dict())
    q, k, v = (split_heads(linear(x), 4) for linear in (layer.query, layer.key, layer.value))
    out = []
    for t in range(8):
        asked, keys, values = q[:, :, t : t + 1], k[:, :, : t + 1], v[:, :, : t + 1]
        F = attend(asked, keys, values)
        out.append(layer.out(merge_heads(F + attend(asked, keys, values - F))))
    mutant = torch.cat(out, 1)
    torch.testing.assert_close(mutant, plain(x, causal=True), atol=1e-12, rtol=0)
    off = (mutant - layer(x, causal=True)).abs().amax((0, 2))
    assert off[0] < 1e-12 and (off[1:] > 1e-3).all()


@torch.no_grad()
def test_a_cache_without_the_residual_gives_other_answers():
    """Corrupting what the cache keeps of past residuals changes the next token: it is read, not decoration."""
    layer, x = TwicingAttention(16, 4, dtype=F64), torch.randn(1, 6, 16, dtype=F64)
    answers = []
    for factor in (1.0, 0.0):
        cache = layer.make_cache(1, 6)
        layer(x[:, :5], causal=True, cache=cache)
        cache.buffers["residual1"] *= factor
        answers.append(layer(x[:, 5:], causal=True, cache=cache))
    assert (answers[0] - answers[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("rounds", "groups", "numbers"), [(1, 8, 128), (2, 8, 192), (3, 8, 256), (2, 2, 96), (1, 2, 32)]
)
def test_what_the_cache_keeps_of_a_token(rounds, groups, numbers):
    """Keys and values once a group, a residual once a head and look."""
    layer = TwicingAttention(64, 8, n_kv_heads=groups, rounds=rounds)
    cache = layer.make_cache(1, 10)
    assert cache.nbytes == 4 * 10 * numbers
    assert set(cache.buffers) == {"key", "value"} | {f"residual{m}" for m in range(1, rounds)}


# ---------------------------------------------------------------- properties and extremes


@pytest.mark.parametrize("rounds", [1, 2, 7])
def test_constant_values_come_back(rounds):
    """Rows sum to one: what all values share passes through any number of looks."""
    layer = TwicingAttention(8, 2, rounds=rounds, dtype=F64)
    with torch.no_grad():
        layer.value.weight.zero_()
        layer.value.bias.copy_(torch.arange(8.0))
    x = torch.randn(1, 6, 8, dtype=F64)
    expected = layer.out(torch.arange(8.0, dtype=F64).expand(1, 6, 8))
    torch.testing.assert_close(layer(x), expected, atol=1e-11, rtol=0)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_a_lone_token_is_its_own_value(rounds):
    layer, x = TwicingAttention(8, 2, rounds=rounds, dtype=F64), torch.randn(3, 1, 8, dtype=F64)
    torch.testing.assert_close(layer(x, causal=True), layer.out(layer.value(x)), atol=1e-12, rtol=0)


def test_a_token_that_nobody_may_read_is_never_heard():
    """The starved token, exactly: hidden by the mask, at any number of looks."""
    x = torch.randn(1, 6, 8, dtype=F64)
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 3] = False
    for rounds in (1, 2, 10):
        layer = TwicingAttention(8, 2, rounds=rounds, dtype=F64)
        changed = x.clone()
        changed[:, 3] += 100.0
        others = [0, 1, 2, 4, 5]
        torch.testing.assert_close(
            layer(x, mask=mask)[:, others], layer(changed, mask=mask)[:, others], atol=1e-12, rtol=0
        )


def test_sharp_scores_stay_finite_and_copy():
    """Scores of 10⁴ make the map a permutation or a copy; two looks of it are still exact."""
    layer = TwicingAttention(8, 1, dtype=F64)
    x = 1e3 * torch.randn(1, 6, 8, dtype=F64)
    torch.testing.assert_close(layer(x), naive(layer, x, torch.ones(6, 6, dtype=torch.bool)), atol=1e-6, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision(dtype):
    layer = TwicingAttention(16, 2, dtype=F64)
    x = torch.randn(2, 12, 16, dtype=F64)
    exact = layer(x, causal=True)
    low = layer.to(dtype)(x.to(dtype), causal=True)
    assert low.dtype == dtype
    torch.testing.assert_close(low.double(), exact, atol=2e-6 if dtype == torch.float32 else 0.1, rtol=0)


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_looks_are_boosting_rounds(rounds):
    """The layer's estimate is chapter 5's L2-boosting of the values of each head with its own map."""
    layer, x = TwicingAttention(6, 2, rounds=rounds, dtype=F64), torch.randn(1, 8, 6, dtype=F64)
    trace = layer.explain(x, causal=True)
    maps, values = trace.rounds[0].weights[0], split_heads(layer.value(x), 2)[0]
    boosted = torch.stack([l2_boost(A, v, rounds) for A, v in zip(maps, values)])
    torch.testing.assert_close(trace.rounds[-1].estimate, merge_heads(boosted[None]), atol=1e-12, rtol=0)
    if rounds == 2:
        assert torch.equal(boosted[0], twice(maps[0], values[0]))


def test_a_context_that_is_the_tokens_themselves_is_none():
    layer, x = TwicingAttention(8, 2), torch.randn(1, 5, 8)
    assert torch.equal(layer(x, context=x), layer(x))


# ---------------------------------------------------------------- errors

X = torch.ones(1, 4, 8)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: TwicingAttention(8, 2, rounds=0), "rounds"),
        (lambda: TwicingAttention(8, 2, dropout=0.1), "dropout"),
        (lambda: TwicingAttention(8, 2).explain(X, context=X[:, :2]), "context"),
        (lambda: TwicingAttention(8, 2)(X, causal=True, cache=MultiHeadAttention(8, 2).make_cache(1, 4)), "cache"),
        (
            lambda: TwicingAttention(8, 2, rounds=3)(X, causal=True, cache=TwicingAttention(8, 2).make_cache(1, 4)),
            "cache",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()


def test_printed_with_its_rounds():
    assert "rounds=3" in repr(TwicingAttention(8, 2, rounds=3))
    assert make_attention("twicing", 8, 2, rounds=3).rounds == 3


@pytest.mark.parametrize("S", [5, 9])
def test_a_single_look_at_a_context_has_no_residual(S):
    layer = TwicingAttention(8, 2, rounds=1)
    (seen,) = layer.explain(torch.randn(2, 7, 8), context=torch.randn(2, S, 8)).rounds
    assert seen.residual is None and seen.correction.shape == (2, 7, 8)
