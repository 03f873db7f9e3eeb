"""Chapter 27: the claims with their mutants, random heads against naive ones, and the fact sheet's numbers."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from scipy.integrate import quad
from scipy.special import gammaln, hyp2f1
from torch.nn.functional import normalize

from claims import claim
from gbattn.ground.arguments import ArgumentError
from gbattn.particles import (
    RandomHeads,
    evolve,
    flow_velocity,
    law_rates,
    mean_overlap,
    overlap_drift,
    random_attention,
    random_projection,
    simplex_drift,
    simplex_tokens,
)

F64 = torch.float64


def rng(seed):
    return torch.Generator().manual_seed(seed)


class Tokens:
    """Drawn unit tokens, four in d dimensions, with weights whose rows sum to one."""

    def __init__(self, seed, d):
        self.rng = rng(seed)
        self.n, self.d = 4, d
        self.x = normalize(torch.randn(4, d, generator=self.rng, dtype=F64), dim=-1)
        self.A = (2 * torch.randn(4, 4, generator=self.rng, dtype=F64)).softmax(-1)
        self.gamma = torch.rand(1, generator=self.rng, dtype=F64).item()


tokens = st.builds(Tokens, st.integers(0, 2**31), st.integers(2, 4))


def curvature(function, size, scale):
    """The drift of a function of a Gaussian vector at 0: half its Laplacian times a variance, by differences."""
    h, e = 4e-3, torch.eye(size, dtype=F64)
    values = [function(k * h * e) for k in (-2, -1, 0, 1, 2)]  # each along all axes
    weights = torch.tensor([-1, 16, -30, 16, -1], dtype=F64) / (12 * h**2)
    return scale / 2 * sum(w * v.sum(0) for w, v in zip(weights, values))


def gradient(function, size):
    h, e = 1e-3, torch.eye(size, dtype=F64)
    near, far = (function(k * h * e) - function(-k * h * e) for k in (1, 2))
    return (8 * near - far) / (12 * h)


def drift(p, d_minus_two):
    def overlaps(V):
        x = normalize(p.x + p.A @ p.x @ V.view(-1, p.d, p.d).mT, dim=-1)
        return x @ x.mT

    R = p.x @ p.x.mT
    s = p.A @ R @ p.A.mT
    both = s.diagonal()[:, None] + s.diagonal()
    by_formula = ((d_minus_two + R**2) * s - (p.d - 1) / 2 * R * both) / p.d
    return curvature(overlaps, p.d**2, 1 / p.d), by_formula


@claim(tokens, tolerance=1e-7, mutant=lambda p: drift(p, p.d - 1), examples=20)
def test_prop_overlap_drift(p):
    """The mean of an overlap moves at the rate D, by all second derivatives in V. Mutant: d − 1 for d − 2."""
    return drift(p, p.d - 2)


def uniform(p, share):
    """Under a common vector: drifts of logarithms and of a cross-ratio, and of logit m on a simplex."""
    n, d, m = p.n, p.d, mean_overlap(p.x)
    i, j = torch.triu_indices(n, n, 1)

    def logarithms(a):
        x = normalize(p.x + a[:, None], dim=-1)
        logs = ((x[:, i] - x[:, j]).square().sum(-1) / 2).log()  # pairs 01, 02, 03, 12, 13, 23
        return torch.cat([logs, logs[:, [0, 5]].sum(1, keepdim=True) - logs[:, [1, 4]].sum(1, keepdim=True)], 1)

    def logit(a):
        return mean_overlap(normalize(x + a[:, None], dim=-1)).logit()

    by_hand = -m * share(d) / d * torch.ones(7, dtype=F64)
    by_hand[-1] = 0
    R = p.x @ p.x.mT
    D = overlap_drift(R, m.expand(n, n), d)[i, j]
    noise = gradient(logarithms, d)[:, -1]
    wide = n + 2
    x = simplex_tokens(n, wide, p.gamma, dtype=F64)
    M = mean_overlap(x)
    moved = torch.stack([curvature(logit, wide, M / wide), gradient(logit, wide).square().sum() * M / wide])
    R = R[i, j]
    stated = torch.stack([1 - (4 + p.gamma - 4 * M) / wide, torch.tensor(4 / wide, dtype=F64)])
    left = [curvature(logarithms, d, m / d), D, noise, moved]
    return torch.cat(left), torch.cat([by_hand, m / d * (1 - R) * (d - 2 - R), torch.zeros(d, dtype=F64), stated])


@claim(tokens, tolerance=1e-6, mutant=lambda p: uniform(p, lambda d: d), examples=20)
def test_thm_uniform_clock(p):
    """Drift of log(1 − R), of D and of logit m; cross-ratios have neither drift nor noise. Mutant: d for d − 1."""
    return uniform(p, lambda d: d - 1)


def clocks(p, growing):
    """1 − m after each layer of explicit vectors that are orthogonal to all tokens; both norms."""
    layers, step = 6, 0.3 + p.gamma
    start = torch.cat([p.x, torch.zeros(p.n, layers, dtype=F64)], dim=-1)
    left, right = [], []
    for norm in ("post", "pre"):
        axes = list(torch.eye(p.d + layers, dtype=F64)[p.d :])  # which no token has

        def update(x, axes=axes):
            return mean_overlap(x).sqrt() * axes.pop()

        states = evolve(start, update, step=step, layers=layers, norm=norm)
        left.append(torch.stack([1 - mean_overlap(normalize(x, dim=-1)) for x in states]))
        m, q = mean_overlap(p.x), 1.0
        rest = [1 - m]
        for _ in range(layers):
            if norm == "pre" and growing:
                q = q + step**2 * (1 - rest[-1])
                rest.append(rest[0] / q)
            else:
                rest.append(rest[-1] / (1 + step**2 * (1 - rest[-1])))
        right.append(torch.stack(rest))
    return torch.cat(left), torch.cat(right)


@claim(tokens, tolerance=1e-10, mutant=lambda p: clocks(p, False), examples=20)
def test_prop_two_clocks(p):
    """Orthogonal common vectors shrink 1 − m by the two laws. Mutant: Pre-LN by the law of the normalised stream."""
    return clocks(p, True)


def rounds(p, factor):
    """(a) by all matrices with entries ±1/√2; (b) by the overlaps of M x on a simplex, averaged over pairs."""
    signs = [torch.tensor(s, dtype=F64).view(2, 2) / 2**0.5 for s in itertools.product((-1.0, 1.0), repeat=4)]
    average = p.x[:, :2].mean(0)
    u = torch.stack([V @ average + W @ (average - V @ average) for V in signs for W in signs])
    covariance = u.mT @ u / len(u)
    common = torch.full((p.n, p.n), 1 / p.n, dtype=F64)
    left = [covariance, 2 * common - common @ common]
    right = [factor * average.square().sum() / 2 * torch.eye(2, dtype=F64), common]
    off = ~torch.eye(p.n, dtype=torch.bool)
    R = (1 - p.gamma) * torch.eye(p.n, dtype=F64) + p.gamma
    for M in (p.A, 2 * p.A - p.A @ p.A):
        s = M @ R @ M.mT
        left.append((s[off].mean() - p.gamma * s.diagonal().mean())[None])
        right.append(simplex_drift(p.gamma, M)[None])
    never = simplex_drift(p.gamma, p.A).clamp(max=0)[None]
    flat = lambda parts: torch.cat([part.reshape(-1) for part in parts])
    return flat([*left, never]), flat([*right, torch.zeros(1, dtype=F64)])


@claim(tokens, tolerance=1e-10, mutant=lambda p: rounds(p, 2), examples=20)
def test_thm_random_rounds(p):
    """Boosted: three times the covariance; twicing: nothing; a simplex moves by f and c. Mutant: two times."""
    return rounds(p, 3)


def exact_cosine(r, d):
    ratio = np.exp(2 * (gammaln((d + 1) / 2) - gammaln(d / 2)))
    return 2 * r / d * ratio * hyp2f1(0.5, 0.5, d / 2 + 1, r**2)


def cosine_density(c, r, d):
    """Fisher's density of a sample correlation of d pairs with known means."""
    log = gammaln(d) - gammaln(d + 0.5) + d / 2 * np.log1p(-(r**2)) + (d - 3) / 2 * np.log1p(-(c**2))
    log += math.log(d - 1) - math.log(2 * math.pi) / 2 - (d - 0.5) * np.log1p(-r * c)
    return np.exp(log) * hyp2f1(0.5, 0.5, d + 0.5, (1 + r * c) / 2)


def cosine(p, half):
    """d² times what the expansion leaves, against a constant; one and two factors, and the drift of artanh."""
    d, r = 40 + 20 * p.d, 0.1 + 0.8 * p.gamma
    one = exact_cosine(r, d)
    total = quad(cosine_density, -1, 1, args=(r, d))[0]
    again = quad(lambda c: c * cosine_density(c, r, d), -1, 1)[0]
    two = quad(lambda c: exact_cosine(c, d) * cosine_density(c, r, d), -1, 1)[0]
    left = [abs(total - 1) * 1e6, abs(again - one) * 1e6]
    for L, mean in ((1, one), (2, two)):
        left.append(d**2 * abs(mean - r + L * half / d * r * (1 - r**2)))
        D = ((d - 2 + r**2) * mean - (d - 1) * r) / d
        noise = 2 / d * (1 - r**2) * (1 - r * mean)
        artanh = D / (1 - r**2) + r * noise / (1 - r**2) ** 2
        left.append(d * abs(d * artanh - (1 - L / 2) * r))
    left = torch.tensor(left, dtype=F64)
    return left, torch.tensor([1.0, 1.0, 2.0, 6.0, 2.0, 6.0], dtype=F64)


@claim(tokens, tolerance=1e-6, relation="<=", mutant=lambda p: cosine(p, 0.25), examples=10)
def test_thm_cosine(p):
    """The mean cosine after one and two Gaussian matrices up to O(d⁻²), exact by quadrature. Mutant: half of L/2."""
    return cosine(p, 0.5)


def smooth(x):
    return (2 * x @ x.mT).softmax(-1) @ x


def limits(p, step_of):
    """A layer against the flow through it, over η²; mean and covariance of a step with noise, by all derivatives."""
    step, x, z = 1e-3, p.x, smooth(p.x)
    layer, flow = normalize(x + step * z, dim=-1), x
    for _ in range(4):  # by the midpoint rule
        middle = flow + step / 8 * flow_velocity(flow, smooth, step=step_of(step))
        flow = flow + step / 4 * flow_velocity(normalize(middle, dim=-1), smooth, step=step_of(step))
    noisy = lambda W: normalize(x + z @ W.view(-1, p.d, p.d).mT, dim=-1).flatten(1)
    change = gradient(noisy, p.d**2)
    P = torch.eye(p.d, dtype=F64) - x[:, :, None] * x[:, None, :]
    covariance = torch.einsum("ij,iab,jbc->iajc", z @ z.mT, P, P).flatten(2).flatten(0, 1)
    left = [(layer - flow) / step**2, curvature(noisy, p.d**2, 1 / p.d), change.mT @ change]
    right = [torch.zeros_like(x), -(p.d - 1) / (2 * p.d) * z.square().sum(-1, keepdim=True) * x, covariance]
    return torch.cat([part.flatten() for part in left]), torch.cat([part.flatten() for part in right])


@claim(tokens, tolerance=2e-2, mutant=lambda p: limits(p, lambda step: 0), examples=20)
def test_prop_three_limits(p):
    """A layer ends O(η³) from the corrected flow; noise has the drift and covariance stated. Mutant: the plain flow."""
    return limits(p, lambda step: step)


# ---------------------------------------------------------------- random heads


def test_a_flow_that_cannot_be_taken_is_refused():
    for x, step, argument in ((torch.ones(3), 0.1, "x"), (torch.ones(2, 3), -0.1, "step")):
        with pytest.raises(ArgumentError) as refused:
            flow_velocity(x, smooth, step=step)
        assert refused.value.argument == argument


def test_projections_have_the_law_of_a_gaussian_matrix():
    x = torch.randn(3, 5, dtype=F64, generator=rng(0))
    many = random_projection(x.expand(40_000, 3, 5), rng(1))
    flat = many.flatten(1)
    covariance = flat.mT @ flat / len(flat)
    expected = torch.kron(x @ x.mT, torch.eye(5, dtype=F64))
    assert (covariance - expected).abs().max() < 0.03 * expected.abs().max()
    assert flat.mean(0).abs().max() < 0.05
    wide = torch.randn(7, 2, dtype=F64, generator=rng(2))  # more tokens than features
    short = random_projection(wide.expand(40_000, 7, 2), rng(3))
    products = torch.einsum("rik,rjk->ij", short, short) / 80_000
    assert torch.allclose(products, wide @ wide.mT, atol=0.1)


def test_scores_have_their_standard_deviation_and_weights_are_those_of_naive_heads():
    d, draws = 12, 20_000
    x = simplex_tokens(3, d, 0.3, dtype=F64)
    fast = random_attention(x.expand(draws, 3, d), 2.0, rng(0))
    W, W2 = torch.randn(2, draws, d, d, dtype=F64, generator=rng(1))
    scores = 2 / d**0.5 * (x @ W) @ (x @ W2).mT
    assert abs(scores.std() - 2) < 0.05
    naive = scores.softmax(-1)
    for moment in (lambda A: A.square().mean(0), lambda A: (A @ A.mT).mean(0), lambda A: (A @ A).mean(0)):
        assert torch.allclose(moment(fast), moment(naive), atol=0.012)
    assert torch.allclose(fast.sum(-1), torch.ones(draws, 3, dtype=F64))


@pytest.mark.parametrize("kind", ["one", "twicing", "boosted"])
def test_the_mean_update_is_zero_and_overlaps_stay_in_their_range(kind):
    heads = RandomHeads(3, kind, n_heads=2, generator=rng(0))
    x = simplex_tokens(4, 6, 0.4, dtype=F64).expand(4000, 4, 6)
    u = heads(x)
    assert (u.mean(0).abs() < 4.5 * u.std(0) / 4000**0.5).all()
    *_, last = evolve(x[:50], heads, step=0.4, layers=30)
    R = last @ last.mT
    assert R.abs().max() <= 1 + 1e-12 and torch.allclose(R.diagonal(dim1=-2, dim2=-1), torch.ones(50, 4, dtype=F64))


def test_a_token_does_not_move_against_itself():
    p = Tokens(5, 4)
    R = p.x @ p.x.mT
    D = overlap_drift(R, p.A @ R @ p.A.mT, 4)
    assert D.diagonal().abs().max() < 1e-12


def test_more_heads_take_smaller_steps():
    x = simplex_tokens(4, 8, 0.2, dtype=F64).expand(4000, 4, 8)
    sizes = [RandomHeads(1, n_heads=H, generator=rng(0))(x).square().sum(-1).mean() for H in (1, 4)]
    assert abs(sizes[0] / sizes[1] - 4) < 0.3


def test_uniform_attention_is_what_a_small_score_tends_to():
    x = simplex_tokens(4, 8, 0.2, dtype=F64).expand(4000, 4, 8)
    for kind, factor in (("one", 1), ("twicing", 1), ("boosted", 3)):
        for sd in (0, 1e-9):
            u = RandomHeads(sd, kind, generator=rng(0))(x)
            assert (u - u[:, :1]).abs().max() < 1e-6  # the same for all tokens
            assert abs(u.square().sum(-1).mean() / mean_overlap(x[0]) - factor) < 0.1 * factor


def law_sides(p):
    """Drift and quadratic variation of a mean of φ, by derivatives in the noise and along the flow, and as stated."""
    noise, z = 0.7, p.A @ p.x
    a, M = torch.randn(p.d, generator=p.rng, dtype=F64), torch.randn(p.d, p.d, generator=p.rng, dtype=F64)
    M = M + M.T

    def mean_of(x):
        x = normalize(x, dim=-1)
        return (x @ a + (x @ M * x).sum(-1)).mean(-1)

    shaken = lambda V: mean_of(p.x + z @ V.view(-1, p.d, p.d).mT)
    along = gradient(lambda h: mean_of(p.x + h.view(-1, 1, 1) * z), 1).squeeze()
    drift = along + curvature(shaken, p.d**2, noise / p.d)
    variation = noise / p.d * gradient(shaken, p.d**2).square().sum()
    return torch.stack([drift, variation]), torch.stack(law_rates(p.x, z, a, M, noise=noise))


@given(tokens)
@settings(max_examples=20, deadline=None)
def test_a_mean_over_tokens_drifts_and_varies_as_its_rates_say(p):
    """The mean of φ, by derivatives and by `law_rates` (the lab notebook)."""
    assert torch.allclose(*law_sides(p), atol=1e-6, rtol=1e-6)


def test_the_hot_chain_follows_the_logistic_law():
    """The fact sheet's setting, eight seeds: η = 0.2, d = 256, n = 8, u₀ = 0.2125, t up to 6."""
    x = simplex_tokens(8, 256, 0.1, dtype=F64).expand(8, 8, 256)
    states = evolve(x, RandomHeads(0, generator=rng(3)), step=0.2, layers=150)
    m = torch.stack([mean_overlap(x).mean() for x in states])
    law = (torch.tensor(0.2125, dtype=F64).logit() + 0.04 * torch.arange(151, dtype=F64)).sigmoid()
    assert (m - law).abs().max() < 0.08


def test_the_constant_of_the_cosine():
    """0.5 ± 0.05 for one matrix, 1 ± 0.07 for a product, by heads as they are drawn."""
    d, draws = 20, 200_000
    x = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=F64)
    z = x @ torch.randn(draws, 2, d, dtype=F64, generator=rng(0))
    for coefficient, tolerance in ((0.5, 0.05), (1.0, 0.07)):
        cos = torch.nn.functional.cosine_similarity(z[:, 0], z[:, 1], dim=-1)
        assert abs((0.6 - cos.mean()) * d / (0.6 * 0.64) - coefficient) < tolerance
        inner, rest = z[:, :1], z[:, 1:]  # the next matrix, by Gram–Schmidt
        along = (inner * rest).sum(-1, keepdim=True) / inner.square().sum(-1, keepdim=True)
        lengths = torch.cat([inner.norm(dim=-1), (rest - along * inner).norm(dim=-1)], 1)
        G = torch.randn(draws, 2, d, dtype=F64, generator=rng(1))
        first = lengths[:, :1, None] * G[:, :1]
        z = torch.cat([first, along * first + lengths[:, 1:, None] * G[:, 1:]], 1)


def test_pre_norm_grows_and_post_norm_does_not():
    x = 3 * simplex_tokens(4, 8, 0.2, dtype=F64)  # lengths are divided out first
    for norm in ("pre", "post"):
        first, *_, last = evolve(x, RandomHeads(1, generator=rng(0)), step=0.5, layers=40, norm=norm)
        assert torch.allclose(first.norm(dim=-1), torch.ones(4, dtype=F64))
        grown = last.norm(dim=-1)
        assert (grown > 1.5).all() if norm == "pre" else torch.allclose(grown, torch.ones(4, dtype=F64))


def test_any_layer_can_be_the_update():
    from gbattn.layers import MultiHeadAttention

    layer = MultiHeadAttention(8, 2, dtype=F64)
    states = list(evolve(torch.randn(3, 5, 8, dtype=F64, generator=rng(0)), layer, step=0.1, layers=4))
    assert len(states) == 5 and all(x.shape == (3, 5, 8) for x in states)


def test_float32_repeats_with_its_seed():
    x = simplex_tokens(4, 8, 0.2, dtype=torch.float32)
    runs = [list(evolve(x, RandomHeads(2, generator=rng(7)), step=0.2, layers=5))[-1] for _ in range(2)]
    assert torch.equal(*runs) and runs[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: simplex_tokens(4, 4), "d"),
        (lambda: simplex_tokens(0, 4), "n"),
        (lambda: simplex_tokens(2, 4, 1.5), "overlap"),
        (lambda: mean_overlap(torch.ones(3)), "x"),
        (lambda: random_projection(torch.ones(2, 3).long()), "x"),
        (lambda: random_attention(torch.ones(2, 3), -1), "score_sd"),
        (lambda: RandomHeads(1, "three"), "rounds"),
        (lambda: RandomHeads(1, n_heads=0), "n_heads"),
        (lambda: evolve(torch.zeros(2, 3), RandomHeads(1), step=1, layers=1), "x"),
        (lambda: evolve(torch.ones(2, 3), RandomHeads(1), step=0, layers=1), "step"),
        (lambda: evolve(torch.ones(2, 3), RandomHeads(1), step=1, layers=-1), "layers"),
        (lambda: evolve(torch.ones(2, 3), RandomHeads(1), step=1, layers=1, norm="rms"), "norm"),
        (lambda: overlap_drift(torch.eye(3), torch.eye(2), 4), "smoothed"),
        (lambda: overlap_drift(torch.ones(2, 3), torch.eye(3), 4), "overlaps"),
        (lambda: overlap_drift(torch.eye(3), torch.eye(3), 0), "d"),
        (lambda: law_rates(torch.ones(3), torch.ones(2, 3), torch.ones(3), torch.eye(3), noise=1), "x"),
        (lambda: law_rates(torch.ones(2, 3), torch.ones(3, 3), torch.ones(3), torch.eye(3), noise=1), "smoothed"),
        (lambda: law_rates(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2), torch.eye(3), noise=1), "a"),
        (lambda: law_rates(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), torch.eye(2), noise=1), "M"),
        (lambda: law_rates(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3), torch.eye(3), noise=-1), "noise"),
        (lambda: simplex_drift(2, torch.eye(3)), "overlap"),
        (lambda: simplex_drift(0.5, 2 * torch.eye(3)), "weights"),
        (lambda: simplex_drift(0.5, torch.ones(1, 1)), "weights"),
        (lambda: simplex_drift(0.5, torch.ones(2, 3)), "weights"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
