"""Chapter 6a: the claims with their mutants, rotary positions, places of a context."""

import itertools
import math

import numpy as np
import pytest
import torch
from drawn_layers import F64, Problem, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.attention import attention_weights, split_heads
from gbattn.layers import MultiHeadAttention, make_attention
from gbattn.positions import TokenShift, rotary_angles, rotate


def permuted(p, **options):
    layer, x = p.layer(**options), p.tokens()
    order = torch.randperm(p.n, generator=p.rng).roll(1) if p.n > 2 else torch.tensor([1, 0])
    before = torch.cat([torch.arange(p.n - 1).flip(0), torch.tensor([p.n - 1])])
    with torch.no_grad():
        left = [layer(x[:, order]), layer(x[:, before], causal=True)[:, -1:]]
        right = [layer(x)[:, order], layer(x, causal=True)[:, -1:]]
    return torch.cat(left, 1), torch.cat(right, 1)


@claim(problems(n=(3, 7)), tolerance=1e-10, mutant=lambda p: permuted(p, rotary=100.0))
def test_prop_permutation(p):
    """Without positions attention sees a set. Mutant: rotary positions."""
    return permuted(p)


def test_two_causal_layers_hear_the_order_of_the_past_and_one_does_not():
    p = Problem(0, 2, 6, 2, 1, 2)
    first, second, x = p.layer(), p.layer(), p.tokens()
    other = x[:, [2, 0, 4, 1, 3, 5]]
    with torch.no_grad():
        one = [first(tokens, causal=True) for tokens in (x, other)]
        two = [second(tokens, causal=True)[:, -1] for tokens in one]
    torch.testing.assert_close(one[0][:, -1], one[1][:, -1], rtol=0, atol=1e-12)
    assert (two[0] - two[1]).abs().max() > 1e-3


def turned(x, place, base=50.0):
    return rotate(x[None, None, None], rotary_angles(torch.tensor([place]), x.shape[0], base))[0, 0, 0]


def only_distance(p, turn):
    q, k, (m, n) = p.normal(p.K), p.normal(p.K), (p.integer(0, 1000), p.integer(0, 1000))
    layer, x = p.layer(rotary=50.0), p.tokens()
    places, shift = torch.arange(p.n), p.integer(1, 10_000)
    with torch.no_grad():
        moved = layer(x, causal=True, positions=places + shift).flatten()
        unmoved = layer(x, causal=True).flatten()
    left = torch.cat([(turned(q, m) @ turn(k, n))[None], moved])
    return left, torch.cat([(q @ turned(k, n - m))[None], unmoved])


@claim(problems(), tolerance=1e-8, mutant=lambda p: only_distance(p, lambda k, n: turned(k, -n)))
def test_prop_rotary(p):
    """Scores depend on the difference of places, and layers do not see a shift. Mutant: keys turned backwards."""
    return only_distance(p, turned)


def aimed(p, aim):
    """Score of q with the key aimed at δ: nowhere above that at δ, and the cosine sum; then random queries."""
    q, delta, away = p.normal(p.K), p.integer(0, 50), torch.arange(60)
    k = turned(q, aim(delta))
    scores = torch.stack([q @ turned(k, -back) for back in away.tolist()])
    theta = 50.0 ** (-torch.arange(0, p.K, 2, dtype=F64) / p.K)
    lengths = q.unflatten(0, (2, -1)).square().sum(0)  # of each pair
    cosines = ((away[:, None] - delta) * theta).cos() @ lengths
    excess = (scores.max() - scores[delta]).clamp_min(0)[None]
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=p.K)), dtype=F64)  # E[qqᵀ] = I
    key = p.normal(p.K)
    squares = torch.stack([(signs @ turned(key, -back)).square().mean() for back in away.tolist()])
    return torch.cat([scores, excess, squares]), torch.cat([cosines, 0 * excess, key @ key + 0 * squares])


@claim(problems(), tolerance=1e-8, mutant=lambda p: aimed(p, lambda delta: delta + 1))
def test_prop_rotary_aim(p):
    """A key turned by δ is heard δ back; random queries hear all distances alike. Mutant: aimed one too far."""
    return aimed(p, lambda delta: delta)


def weights_of_what_came_next(p, own):
    """The last row of one head on random letters, with shifted keys, against the proposition's two weights."""
    n, beta = p.integer(2, 12), 1.0 + p.integer(0, 4)
    letters = torch.randint(3, (n,), generator=p.rng)
    x = torch.linalg.qr(p.normal(5, 5))[0][letters]  # orthonormal, not only one-hot
    shift = TokenShift(5, dtype=F64)
    with torch.no_grad():
        shift.own.fill_(own)
        shift.previous.fill_(1.0)
    k = shift(x[None])[:, None].detach()
    found = attention_weights(beta * x[None, None], k, causal=True, scale=1.0)[0, 0, -1]
    followed = [j > 0 and bool(letters[j - 1] == letters[-1]) for j in range(n)]
    expected = torch.tensor([math.exp(beta) if yes else 1.0 for yes in followed], dtype=F64)
    return found, expected / (sum(followed) * math.exp(beta) + n - sum(followed))


@claim(problems(), tolerance=1e-12, mutant=lambda p: weights_of_what_came_next(p, 0.0))
def test_prop_shift_induction(p):
    """With shifted keys one head finds what came next. Mutant: keys that keep their own token, too."""
    return weights_of_what_came_next(p, -1.0)


# ---- Rotary positions ----


@given(
    seed=st.integers(0, 2**31),
    pairs=st.integers(1, 8),
    start=st.integers(0, 10**7),
    base=st.sampled_from((10.0, 500_000.0)),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_rotary_positions_are_multiplication_by_a_complex_number(seed, pairs, start, base):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 4, 2 * pairs, generator=rng, dtype=F64)
    places = torch.arange(start, start + 4)
    z = torch.complex(x[..., :pairs], x[..., pairs:]).numpy()
    theta = np.array([base ** (-2 * i / (2 * pairs)) for i in range(pairs)])
    turned = z * np.exp(1j * places.numpy()[:, None] * theta)
    mine = rotate(x, rotary_angles(places, 2 * pairs, base)).numpy()
    np.testing.assert_allclose(mine, np.concatenate([turned.real, turned.imag], -1), atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_far_positions_lose_nothing_to_the_dtype(dtype):
    """A score at place ten million equals the one at place zero to the dtype's own rounding."""
    q, k = torch.randn(2, 1, 1, 1, 64).to(dtype)
    score = lambda m, n: (
        rotate(q, rotary_angles(torch.tensor([m]), 64)).double()
        @ rotate(k, rotary_angles(torch.tensor([n]), 64)).double().mT
    )
    far = 10_000_000
    assert (score(far + 3, far) - score(3, 0)).abs() < 40 * torch.finfo(dtype).eps
    assert rotate(q, rotary_angles(torch.tensor([far]), 64)).dtype == dtype
    single = torch.tensor(far + 3.0) - torch.tensor(far) * torch.tensor(10_000.0) ** (-2 / 64)
    exact = (far + 3) - far * 10_000.0 ** (-2 / 64)
    assert abs(single.item() - exact) > 1e-2  # what float32 angles would have lost


def test_positions_for_each_sequence_and_for_all():
    layer, x = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64), torch.randn(2, 5, 8, dtype=F64)
    own = torch.stack([torch.arange(5), torch.arange(5) * 3])
    together = layer(x, causal=True, positions=own)
    for row in range(2):
        alone = layer(x[row : row + 1], causal=True, positions=own[row])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-12, rtol=0)
    assert (together[1] - layer(x, causal=True)[1]).abs().max() > 1e-3


def test_a_context_has_places_of_its_own():
    """Keys of a context stand at 0, 1, … wherever the queries stand; checked from the weights."""
    layer = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64)
    x, context, places = torch.randn(2, 3, 8, dtype=F64), torch.randn(2, 5, 8, dtype=F64), torch.tensor([9, 4, 2])
    trace = layer.explain(x, context=context, positions=places)
    q = rotate(split_heads(layer.query(x), 2), rotary_angles(places, 4, 100.0))
    k = rotate(split_heads(layer.key(context), 2), rotary_angles(torch.arange(5), 4, 100.0))
    torch.testing.assert_close(trace.rounds[0].weights, (q @ k.mT / 2).softmax(-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(layer(x, context=context, positions=places), trace.output, atol=1e-12, rtol=0)


def test_values_are_not_turned():
    """A lone token hears itself at any place, so its output must not depend on the place."""
    layer, x = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64), torch.randn(1, 1, 8, dtype=F64)
    torch.testing.assert_close(layer(x, positions=torch.tensor([777])), layer(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["multi_head", "linear"])
def test_tokens_as_their_own_context_stand_where_they_stand(kind):
    options = {"feature_map": "identity"} if kind == "linear" else {}
    layer, x = make_attention(kind, 8, 2, rotary=100.0, **options), torch.randn(2, 5, 8)
    places = torch.tensor([3, 4, 9, 11, 30])
    assert torch.equal(layer(x, context=x, positions=places), layer(x, positions=places))


# ---- errors ----


Q = torch.zeros(2, 4, 3, 8)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: rotary_angles([0, 1], 4), "positions"),
        (lambda: rotary_angles(torch.arange(2), 3), "width"),
        (lambda: rotary_angles(torch.arange(2), 4, 1.0), "base"),
        (lambda: rotate(Q, torch.zeros(3, 2)), "angles"),
        (lambda: rotate(Q, torch.zeros(2, 3, 4)), "angles"),
        (lambda: rotate(Q, torch.zeros(2, 4, 3, 4)), "angles"),
        (lambda: rotate(Q[..., :3], torch.zeros(3, 1)), "angles"),
        (lambda: rotate(torch.ones(1, 1, 2, 4).long(), torch.zeros(2, 2)), "x"),
        (lambda: rotate(torch.ones(1, 1, 2, 4), torch.zeros(2, 2).long()), "angles"),
        (lambda: rotate([1.0], torch.zeros(2, 2)), "x"),
        (lambda: rotate(torch.ones(2, 4), torch.zeros(2, 2)), "x"),
        (lambda: rotary_angles(torch.ones(3) > 0, 4), "positions"),
    ],
)
def test_an_error_names_the_argument(call, argument):
    with refused(argument):
        call()
