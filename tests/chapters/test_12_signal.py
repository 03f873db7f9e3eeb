"""Chapter 12: the claims with their mutants; the theory against quadrature, exact Jacobians and networks; faults."""

import itertools
import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from claims import Disagreement, claim, compare
from gbattn import signal
from gbattn.blocks import Block
from gbattn.boosted import GradientBoostedAttention
from gbattn.signal import (
    VIT_B,
    Sigmas,
    attention_gain,
    equiangular_tokens,
    exact_norms,
    initialize,
    measure,
    normalizer_kernels,
    power_law_exponent,
    recursion,
    relu_kernels,
    stretched_exponential,
    tanh_mixture,
)
from gbattn.twicing import TwicingAttention
from support import tuning, vision

F64 = torch.float64


class Problem:
    """Tokens (n, d), scales, and a generator for more."""

    def __init__(self, seed, n, s, share, rho):
        self.rng = torch.Generator().manual_seed(seed)
        self.n, self.d, self.s, self.q = n, 8, s, 0.5 + 2 * share
        self.p = self.q * (-1 / (n - 1) + (1 + 1 / (n - 1)) * rho)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def rotation(self, d=None):
        return torch.linalg.qr(self.normal(d or self.d, d or self.d)).Q

    def tokens(self, q=None, p=None, d=None):
        q, p = (self.q, self.p) if q is None else (q, p)
        return equiangular_tokens(self.n, d or self.d, q0=q, p0=p, generator=self.rng, dtype=F64)[0]


def problems(rho=(0.0, 1.0)):
    return st.builds(
        Problem, st.integers(0, 2**31), st.integers(2, 6), st.floats(0.2, 2.0), st.floats(0, 1), st.floats(*rho)
    )


def gram(x, d):
    """Size and overlap, as means over all tokens and pairs."""
    G = x @ x.mT / d
    n = len(G)
    return G.diagonal().mean(), (G.sum() - G.trace()) / (n * (n - 1))


def pair_of_norms(M):
    """J and K of Jacobians M (n, d, inputs)."""
    n, d = M.shape[:2]
    square = M.square().sum() / (n * d)
    return square, (M.sum(0).square().sum() / d - n * square) / (n * (n - 1))


# ---- the claims ----


def attention_step(p, keep):
    """One layer with W = ±σQ and states whose Gram matrices are exact, against the lemma."""
    n, d = p.n, p.d
    h, W = p.tokens(), p.s * p.rotation()
    tq, tp = p.q, p.p  # f is the identity on the tokens; its slopes are drawn apart
    hq, hp, J, K = 1.3, 1.3 * p.p / p.q, 0.9, 0.9 * 0.4
    slopes = p.tokens(hq, hp)  # (n, d): mean products hq and hp
    roots = p.tokens(J, K, d=n) / math.sqrt(n)  # rows with products J and K
    M = torch.einsum("ni,de->ndie", roots, torch.eye(d, dtype=F64)).flatten(2)  # M_a M_bᵀ = (J or K) I
    sides = []
    for sign in (1, -1):
        mean = (slopes[:, :, None] * M).mean(0)
        back = M + slopes[:, :, None] * (sign * W.mT @ M.mean(0))
        after = h + sign * h.mean(0) @ W.mT
        sides.append(torch.stack([*gram(after, d), *pair_of_norms(M + sign * W @ mean), *pair_of_norms(back)]))
    r, s = keep(n), p.s**2
    added, grown, c = s * (tq / n + r * tp), s * (hq * J / n + r * hp * K), J / n + r * K
    right = [p.q + added, p.p + added, J + grown, K + grown, J + s * hq * c, K + s * hp * c]
    return torch.stack(sides).mean(0), torch.tensor(right, dtype=F64)


@claim(problems(), tolerance=1e-10, mutant=lambda p: attention_step(p, lambda n: 1.0))
def test_lem_attention_step(p):
    """Size, overlap and both norms after uniform attention, both ways. Mutant: 1 for the others' 1 − 1/n."""
    return attention_step(p, lambda n: 1 - 1 / n)


def arc(rho, nodes=4000):
    """Directions θ evenly on the circle, seen by two tokens at angle arccos ρ: midpoints between the two kinks."""
    theta0 = math.acos(rho)
    x, w = np.polynomial.legendre.leggauss(60)
    width = math.pi - theta0  # both are positive from θ0 − π/2 to π/2
    theta = theta0 - math.pi / 2 + width * (x + 1) / 2
    return theta, theta0, w * width / 2 / (2 * math.pi)


def relu_pair(p, flip):
    rho = math.cos(math.pi * (0.05 + 0.9 * min(max(p.p / p.q, 0), 1)))
    theta, theta0, w = arc(rho)
    left = [2 * (w * np.cos(theta) * np.cos(theta - theta0)).sum(), w.sum()]
    return np.array(left), np.array([float(k) for k in relu_kernels(flip * rho)])


@claim(problems(), tolerance=1e-10, mutant=lambda p: relu_pair(p, -1))
def test_prop_relu_kernel(p):
    """κ and κ' against an integral over the circle. Mutant: the sign of ρ."""
    return relu_pair(p, 1)


def mlp_step(p, factor):
    """Rows of W₁ evenly on the circle in the plane of two tokens; W₂ only scales mean squares by σ₂²."""
    tq, rho = p.q, 0.999 * p.p / p.q
    tokens = math.sqrt(2 * tq) * np.array([[1, 0], [rho, math.sqrt(1 - rho**2)]])
    theta = 2 * math.pi * (np.arange(20_000) + 0.5) / 20_000
    W1 = p.s * np.stack([np.cos(theta), np.sin(theta)], 1)  # E w wᵀ = σ₁²/2 · I, two inputs
    u = W1 @ tokens.T
    relu, on = np.maximum(u, 0), (u > 0) * 1.0
    hq, hp, s2 = 0.7, 0.3, 1.7
    squares = (W1**2).sum(1)
    left = [
        (relu**2).mean(0)[0],
        relu.prod(1).mean(),
        (on[:, 0] * squares).mean() * hq,
        (on.prod(1) * squares).mean() * hp,
    ]
    kappa, slope = (float(k) for k in relu_kernels(rho))
    s = p.s**2
    return s2 * np.array(left), s2 * np.array([s * tq / 2, s * tq * kappa, s * hq / 2, factor * s * hp * slope])


@claim(problems(), tolerance=1e-3, mutant=lambda p: mlp_step(p, 0.9))
def test_lem_mlp_step(p):
    """What a ReLU sublayer adds to q, p, J and K. Mutant: a tenth of the K factor lost."""
    return mlp_step(p, 1.0)


def rms_pair(p, lost):
    x = p.tokens()[:2]
    f = lambda h: math.sqrt(p.d) * h / h.norm()
    D = [torch.autograd.functional.jacobian(f, h) for h in x]
    out = torch.stack([f(h) for h in x])
    traces = [(D[0] @ D[0].mT).trace() / p.d, (D[0] @ D[1].mT).trace() / p.d]
    rho = p.p / p.q
    right = [1.0, rho, (1 - 1 / p.d) / p.q, (1 - (lost - rho**2) / p.d) / p.q]
    return torch.stack([*gram(out, p.d), *traces]), torch.tensor(right, dtype=F64)


NODES, NODE_WEIGHTS = np.polynomial.hermite_e.hermegauss(180)
NODE_WEIGHTS = NODE_WEIGHTS / NODE_WEIGHTS.sum()


def gaussian_pair(f, g, q, p):
    """E f(u) g(v) by Gauss–Hermite over two dimensions."""
    u = math.sqrt(q) * NODES
    v = p / math.sqrt(q) * NODES[:, None] + math.sqrt(max(q - p * p / q, 0)) * NODES[None]
    return float(NODE_WEIGHTS @ (f(u)[:, None] * g(v)) @ NODE_WEIGHTS)


def erf(a):
    return lambda x: torch.erf(torch.as_tensor(a * x)).numpy()


def erf_slope(a):
    return lambda x: 2 * a / math.sqrt(math.pi) * np.exp(-((a * x) ** 2))


def erf_pair(p, power):
    q, overlap, a, b = 1.0, p.p / p.q, 0.3 + p.s / 5, 0.2 + p.s / 4
    left = [gaussian_pair(erf(a), erf(b), q, overlap), gaussian_pair(erf_slope(a), erf_slope(b), q, overlap)]
    left += [gaussian_pair(f(a), f(a), q, x) for f in (erf, erf_slope) for x in (q, overlap)]
    N = (1 + 2 * a * a * q) * (1 + 2 * b * b * q)
    right = [
        2 / math.pi * math.asin(2 * a * b * overlap / math.sqrt(N)),
        4 * a * b / math.pi / math.sqrt(N - power * (a * b * overlap) ** 2),
        *(float(k) for k in normalizer_kernels("derf", q, overlap, alpha=a)),
    ]
    return np.array(left), np.array(right)


@claim(problems(), tolerance=1e-8, mutant=lambda p: erf_pair(p, 2))
def test_prop_erf_kernel(p):
    """The kernels of Derf against quadrature. Mutant: a 2 for the 4 under the root."""
    return erf_pair(p, 4)


def mixture(p, shrink):
    a, w = tanh_mixture(0.125)
    x = p.normal(200).numpy() * 4
    return np.tanh(x), (w * erf(1.0)(shrink * a * x[:, None])).sum(1)


def both_directions(p, mutate=False):
    left, right = [], []
    for name, every, attention in itertools.product(
        ("layernorm", "derf", "dyt"), (False, True), ("multi_head", "boosted")
    ):
        sigmas = Sigmas(p.s, 0.8, 1.1, 0.9)
        given = dict(normalizer=name, alpha=0.8, sigmas=sigmas, q0=p.q, n=p.n, every_term=every, attention=attention)
        given["p0"] = p.p if every else abs(p.p)
        run = recursion(7, **given)
        left.append(run.forward_J[-1])
        right.append(run.backward_J[0] - mutate * run.backward_K[0])
    return np.log(np.array(left)), np.log(np.abs(np.array(right)))


@claim(problems(), tolerance=1e-9, mutant=lambda p: both_directions(p, True), examples=25)
def test_thm_through_depth(p):
    """The forward and the backward recursion give one J^{L,0}. Mutant: J − K, the differences alone."""
    return both_directions(p)


def two_modes(p, share):
    n = 2 + p.n
    given = dict(n=n, q0=p.q)
    only = recursion(5, sigmas=Sigmas(p.s, 1.0, 0.0, 0.0), p0=p.q * 0.3, **given)  # attention alone
    C, N = only.forward_J / n + (1 - 1 / n) * only.forward_K, only.forward_J - only.forward_K
    C_want = np.cumprod(np.concatenate([[1 / n], 1 + p.s**2 / only.q[:-1]]))
    s = Sigmas(p.s, 0.9, 1.2, 0.8)
    run = recursion(30, sigmas=s, p0=p.q, **given)
    ov, half = (p.s * 0.9) ** 2, s.mlp / 2
    q = p.q + np.arange(31) * (ov + half)
    product = np.cumprod(np.concatenate([[1], q[1:] / (q[:-1] + ov)]))
    left = [C, N, run.q, run.forward_J]
    right = [C_want, np.ones(6), q, q / q[0] * share(n) + (1 - share(n)) * product]
    return np.concatenate(left), np.concatenate(right)


@claim(problems(), tolerance=1e-9, mutant=lambda p: two_modes(p, lambda n: 1 / (n + 1)))
def test_thm_two_modes(p):
    """Attention leaves the differences alone; equal tokens in closed form. Mutant: n + 1 modes."""
    return two_modes(p, lambda n: 1 / n)


def power_law(p, factor):
    """The local exponent, started where tokens are nearly one and the stream is large."""
    s, q0 = Sigmas(p.s, 1.0, 1.0, 1.1), 3e3
    run = recursion(3000, sigmas=s, q0=q0, p0=q0 * (1 - 1e-12), direction="forward")
    slope = np.log(run.forward_J[-1]) / np.log(run.q[-1] / q0)
    return np.array([slope]), np.array([factor * power_law_exponent(s)])


@claim(problems(), tolerance=2e-3, mutant=lambda p: power_law(p, 1.05), examples=6)
def test_thm_power_law(p):
    """The exponent of Pre-LN, infinitely many tokens. Mutant: five per cent more."""
    return power_law(p, 1.0)


def stretched(p, factor=1.0, correlation=None):
    """From the limit on, as quotients: Δp/Δq is the correlation, q grows by g, ln J by 1/√λ for each √l.

    With another correlation, growth and λ are those that would go with it.
    """
    left, right = [], []
    for name in ("derf", "dyt"):
        s, alpha, q0 = Sigmas(p.s, 1.0, 1.0, 1.1), 0.5 + p.s, 4e6
        _, _, growth, length = end = stretched_exponential(alpha, s, normalizer=name)
        c = end.correlation if correlation is None else correlation
        growth = attention_gain(s) * 2 / math.pi * math.asin(c) + s.mlp / 2
        length = length * growth / end.growth
        run = recursion(1000, normalizer=name, alpha=alpha, sigmas=s, q0=q0, p0=q0 * c, direction="forward")
        l = np.array([q0, run.q[-1]]) / growth  # as if from block 0 on
        grown = run.q[-1] - q0
        left += [(run.p[-1] - q0 * c) / grown / c, grown / 1000 / growth]
        left.append(np.log(run.forward_J[-1]) / np.diff(np.sqrt(l / length)).item())
        right += [1.0, 1.0, factor]
    return np.array(left), np.array(right)


@claim(problems(), tolerance=2e-3, mutant=lambda p: stretched(p, 0.95), examples=5)
def test_thm_stretched(p):
    """Fixed correlation, growth and λ of Derf and of DyT. Mutant: five per cent off."""
    return stretched(p)


@pytest.mark.parametrize("correlation", [0.05, 0.3, 0.95, 0.999])
@pytest.mark.parametrize("s", [0.2, 1.0])
def test_the_check_of_thm_stretched_rejects_another_correlation(s, correlation):
    p = Problem(0, 4, s, 0.5, 0.5)
    compare(*stretched(p), tolerance=2e-3)
    left, right = stretched(p, correlation=correlation)
    for of_one in (slice(0, 1), slice(3, 4)):  # already by Δp/Δq alone
        with pytest.raises(Disagreement):
            compare(left[of_one], right[of_one], tolerance=2e-3)


def looks(p, gate):
    """Rotations with both signs as weights: the mean over signs of the mean square that the real layer adds."""
    left, right = [], []
    for kv_from, rounds in (("residual", 2), ("residual", 3), ("input", 3), ("shared", 3)):
        layer = GradientBoostedAttention(p.d, 2, rounds=rounds, kv_from=kv_from, dtype=F64)
        readers = [layer.value] + [c.value for c in layer.corrections if c.value is not None]
        turns = [p.s * p.rotation() for _ in readers]
        with torch.no_grad():
            for name, weight in layer.named_parameters():
                if "query" in name:
                    weight.zero_()
            layer.out.weight.copy_(0.7 * p.rotation())
            x, found = p.tokens()[None], []
            for signs in itertools.product((1, -1), repeat=len(readers)):
                for reader, sign, turn in zip(readers, signs, turns):
                    reader.weight.copy_(sign * turn)
                found.append(layer(x).square().sum(-1)[0] / p.d)
        left.append(torch.stack(found).mean(0).mean().item())
        m = x.mean(1).square().sum().item() / p.d
        right.append(m * attention_gain(Sigmas(p.s, 0.7), "boosted", rounds=rounds, kv_from=kv_from, gate=gate))
    return np.array(left), np.array(right)


@claim(problems((0.1, 1.0)), tolerance=1e-9, mutant=lambda p: looks(p, 0.45), examples=20)
def test_thm_look_at_start(p):
    """What a boosted layer adds at uniform attention, in all three readings. Mutant: another gate."""
    return looks(p, 0.5)


def residuals(p, factor):
    layer = GradientBoostedAttention(p.d, 2, dtype=F64)
    x, turn, found = p.tokens()[None], p.s * p.rotation(), []
    with torch.no_grad():
        layer.query.weight.zero_()
        for sign in (1, -1):
            layer.value.weight.copy_(sign * turn)
            found.append(torch.stack(gram(layer.explain(x).rounds[1].residual[0], p.d)))
    mu = factor * p.s**2 * (p.q / p.n + (1 - 1 / p.n) * p.p)
    return torch.stack(found).mean(0), torch.tensor([p.q + mu, p.p + mu], dtype=F64)


def twice(p, both):
    """The real layer at uniform attention; and its derivative where the scores move."""
    layer = TwicingAttention(p.d, 1, dtype=F64)
    x = p.normal(1, p.n, p.d)
    with torch.no_grad():
        layer.query.weight.zero_()
        flat = (layer.value(x).mean(1, keepdim=True).expand(-1, p.n, -1)) @ layer.out.weight.mT
        left, V = layer(x) - flat, p.normal(p.n, 3)
    logits, step = torch.zeros(p.n, p.n, dtype=F64), p.normal(p.n, p.n)
    A = logits.softmax(-1)
    moved = lambda s: (2 * s.softmax(-1) - s.softmax(-1) @ s.softmax(-1)) @ V
    _, change = torch.autograd.functional.jvp(moved, logits, step)
    _, dA = torch.autograd.functional.jvp(lambda s: s.softmax(-1), logits, step)
    want = (2 * torch.eye(p.n, dtype=F64) - both * A) @ dA @ V
    return torch.cat([left.flatten(), change.flatten()]), torch.cat([0 * left.flatten(), want.flatten()])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("sides", "right", "wrong", "tolerance"),
    [(rms_pair, 2, 1, 1e-10), (mixture, 1.0, 1.01, 1e-12), (twice, 1, 0, 1e-10), (residuals, 1.0, 0.5, 1e-9)],
    ids=[
        "RMSNorm loses two directions",
        "tanh is a mean of erfs",
        "twicing uses its scores twice",
        "the first residual has noise that all tokens share",
    ],
)
def test_what_the_page_says_in_a_sentence(sides, right, wrong, tolerance, seed):
    """RMSNorm by its Jacobian, tanh, and twicing at uniform attention, each with a mutant that is rejected."""
    problem = Problem(seed, 2 + seed, 0.5 + seed / 4, 0.5, 0.6)
    compare(*sides(problem, right), tolerance=tolerance)
    with pytest.raises(Disagreement):
        compare(*sides(problem, wrong), tolerance=tolerance)


# ---- the fact sheet's reference values ----

TABLE = {
    (12, "layernorm", 0.5): (3.6869, 1.8330, 3.0346),
    (12, "derf", 0.5): (1.6506, 0.5392, 1.6004),
    (12, "derf", 1.0): (2.4059, 0.9499, 2.8065),
    (12, "derf", 1.5): (2.7666, 1.1298, 4.5683),
    (64, "layernorm", 0.5): (16.6392, 11.9216, 9.6330),
    (64, "derf", 0.5): (7.0668, 4.1229, 6.7224),
    (64, "derf", 1.0): (11.2891, 6.6577, 33.871),
    (64, "derf", 1.5): (12.6288, 7.2628, 152.16),
}


@pytest.mark.parametrize(("case", "want"), TABLE.items(), ids=str)
def test_reference_values(case, want):
    depth, name, alpha = case
    run = recursion(depth, normalizer=name, alpha=alpha, n=196, every_term=False)
    np.testing.assert_allclose([run.q[-1], run.p[-1], run.forward_J[-1]], want, rtol=0, atol=1e-3)
    assert (run.backward_J[-1], run.backward_K[-1], run.forward_J[0], run.forward_K[0]) == (1, 0, 1, 0)
    assert run.q.shape == run.backward_J.shape == (depth + 1,) and run.attended.q.shape == (depth,)


def test_reference_values_at_six_digits():
    ln = recursion(64, n=196, every_term=False)
    derf = recursion(64, normalizer="derf", alpha=1.0, n=196, every_term=False)
    np.testing.assert_allclose([ln.backward_J[0], derf.backward_J[0]], [9.633009, 33.871406], rtol=0, atol=1e-6)


def test_the_published_recursion_step_by_step():
    """One block, written out."""
    q, p, n, a, ov, mlp = 1.3, 0.4, 7, 0.9, VIT_B.value**2 * VIT_B.out**2, VIT_B.mlp
    tilde = lambda q, p: 2 / math.pi * math.asin(2 * a * a * p / (1 + 2 * a * a * q))
    hat = lambda q, p: 4 * a * a / math.pi / math.sqrt((1 + 2 * a * a * q) ** 2 - 4 * a**4 * p * p)
    q1, p1 = q + ov * tilde(q, p), p + ov * tilde(q, p)
    rho = tilde(q1, p1) / tilde(q1, q1)
    kappa = (math.sqrt(1 - rho**2) + rho * (math.pi - math.acos(rho))) / (2 * math.pi)
    J = (1 + ov * hat(q, q) / n) * (1 + mlp * hat(q1, q1) / 2)
    K = ov * hat(q, q) / n * (1 + mlp * (0.25 + math.asin(rho) / 2 / math.pi) * hat(q1, p1))
    run = recursion(1, normalizer="derf", alpha=a, q0=q, p0=p, n=n, every_term=False)
    want = [q1 + mlp * tilde(q1, q1) / 2, p1 + mlp * tilde(q1, q1) * kappa, J, K]
    np.testing.assert_allclose([run.q[1], run.p[1], run.forward_J[1], run.forward_K[1]], want, rtol=1e-13)


def test_vit_b_scales_and_limits():
    assert VIT_B.value**2 * VIT_B.out**2 == pytest.approx(0.0944, abs=5e-5)
    assert VIT_B.mlp == pytest.approx(0.3775, abs=5e-5)
    end = stretched_exponential(1.0, VIT_B)
    assert (end.correlation, end.overlap) == pytest.approx((0.6598, 0.4587), abs=5e-5)
    assert 1 / math.sqrt(end.length) == pytest.approx(0.499, abs=5e-4)
    ov, mlp, p = attention_gain(VIT_B), VIT_B.mlp, end.overlap
    residual = (ov * p + mlp * relu_kernels(p)[0]) / (ov * p + mlp / 2) - end.correlation
    assert abs(residual) < 1e-10
    run = recursion(16_000, normalizer="derf", alpha=2.0, direction="forward")
    assert abs(run.p[-1] / run.q[-1] - end.correlation) < 0.01


def test_the_exponent_falls_towards_two_thirds_and_the_stretched_slope_is_right():
    run = recursion(16_000, n=10**9, direction="forward")
    at = np.array([250, 1000, 4000, 16_000])
    slopes = np.diff(np.log(run.forward_J[at])) / np.diff(np.log(at))
    assert np.all(np.diff(slopes) < 0) and 2 / 3 < slopes[-1] < 0.69
    assert power_law_exponent(VIT_B) == pytest.approx(2 / 3)
    assert power_law_exponent(VIT_B._replace(value=0.0)) == 1.0
    J = recursion(16_000, normalizer="derf", alpha=1.0, direction="forward").forward_J
    slope = math.log(J[16_000] / J[4_000]) / (math.sqrt(16_000) - math.sqrt(4_000))
    assert slope * math.sqrt(stretched_exponential(1.0, VIT_B).length) == pytest.approx(1, abs=0.03)


def test_the_fixed_correlation_is_one_and_attracts_whatever_the_scales():
    """The equation of c*, solved for σ²_OV/σ²₂₁, rises in c: each quotient of scales is met once."""
    c = np.concatenate([np.linspace(1e-3, 0.99, 4000), 1 - np.geomspace(1e-2, 1e-7, 2000)[1:]])
    p = 2 / math.pi * np.arcsin(c)
    quotient = (c / 2 - relu_kernels(p)[0]) / ((1 - c) * p)
    assert np.all(np.diff(quotient) > 0) and quotient[0] < 0 and quotient[-1] > 1e3
    for value in (0.3, 1.0, 2.0):
        s, q0 = Sigmas(value=value), 100.0
        end = stretched_exponential(1.0, s).correlation
        p0 = q0 * np.array([0.0, (1 + end) / 2, 1.0])
        run = recursion(20_000, normalizer="derf", alpha=1.0, sigmas=s, q0=q0, p0=p0, direction="forward")
        left = np.abs(run.p / run.q - end)
        assert np.all(left[-1, :2] < 0.6 * left[0, :2])
        assert run.p[-1, 2] == pytest.approx(run.q[-1, 2])  # equal tokens stay equal


def other_order(name, n, sigmas, every, kept):
    """At fixed n from the limit on, as quotients: Δp/Δq, Δq a block, ln J.

    `every`: what the recursion keeps; `kept`: what the limit is told that it keeps.
    """
    ov, mlp, share = attention_gain(sigmas), sigmas.mlp, kept / n
    low, high = 0.0, 1.0
    for _ in range(60):
        c = (low + high) / 2
        overlap = 2 / math.pi * math.asin(c)
        mean = share + (1 - share) * overlap  # of the n tokens, its mean square
        growth = ov * mean + mlp / 2
        low, high = (c, high) if ov * mean + mlp * relu_kernels(overlap)[0] > c * growth else (low, c)
    q0, end = 4e6, stretched_exponential(1.0, sigmas, normalizer=name)
    run = recursion(
        1000, normalizer=name, alpha=1.0, sigmas=sigmas, q0=q0, p0=q0 * c, n=n, every_term=every, direction="forward"
    )
    grown, l = run.q[-1] - q0, np.array([q0, run.q[-1]]) / growth
    law = (1 + 2 * ov / n / mlp) * np.diff(np.sqrt(l / (end.length * growth / end.growth))).item()
    found = [(run.p[-1] - q0 * c) / grown / c, grown / 1000 / growth, math.log(run.forward_J[-1]) / law]
    return np.array(found), c, growth, end


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("sigmas", [VIT_B, Sigmas()], ids=["vit_b", "unit"])
@pytest.mark.parametrize("name", ["derf", "dyt"])
def test_the_stretched_exponential_in_the_other_order_of_limits(name, sigmas, every):
    """At fixed n, ½σ²₂₁ in ln J becomes ½σ²₂₁ + σ²_OV/n, and with every term p* becomes 1/n + (1 − 1/n) p*.

    Mutant: the own term dropped where it is kept, and kept where it is dropped.
    """
    for n in (2, 8):
        compare(other_order(name, n, sigmas, every, every)[0], np.ones(3), tolerance=1e-3)
        with pytest.raises(Disagreement):
            compare(other_order(name, n, sigmas, every, not every)[0], np.ones(3), tolerance=1e-3)


def test_two_tokens_at_the_scales_of_vit_b():
    """What the page says of two tokens: c*, and over infinitely many the slope of ln J against √l."""
    for every, c_star, slope in ((False, 0.66, 1.25), (True, 0.72, 1.18)):
        _, c, growth, end = other_order("derf", 2, VIT_B, every, every)
        want = (1 + attention_gain(VIT_B) / VIT_B.mlp) * math.sqrt(end.growth / growth)
        assert (c, want) == pytest.approx((c_star, slope), abs=5e-3)
        far = recursion(20_000, normalizer="derf", alpha=1.0, n=2, every_term=every, direction="forward").forward_J
        found = math.log(far[20_000] / far[5_000]) / (math.sqrt(20_000) - math.sqrt(5_000))
        assert found * math.sqrt(end.length) == pytest.approx(want, rel=0.02)


def test_without_a_feed_forward_sublayer_there_is_no_stretched_exponential():
    """σ₂₁ = 0: from any p₀ > 0 the tokens become one, and J stays 1."""
    for name in ("derf", "dyt"):
        run = recursion(3000, normalizer=name, alpha=1.0, sigmas=Sigmas(up=0), p0=np.array([0.0, 0.01, 0.5]))
        assert np.all(run.forward_J == 1)
        assert run.p[-1, 0] == 0 and np.all(run.p[-1, 1:] / run.q[-1, 1:] > 0.999)


@pytest.mark.parametrize(("value", "alike"), [(0.0, False), (0.7, True)])
def test_the_residual_is_more_alike_only_where_the_first_look_says_something(value, alike):
    p = Problem(3, 4, value, 0.5, 0.6)
    (size, overlap), (_, want) = residuals(p, 1.0)
    assert (overlap / size > p.p / p.q + 1e-3) == alike and overlap == pytest.approx(want.item())
    assert alike or overlap / size == pytest.approx(p.p / p.q)


def test_square_root_beats_logarithm_for_derf_and_loses_for_layernorm():
    l = np.arange(16, 257)
    for name, wins in (("layernorm", False), ("derf", True)):
        y = np.log(recursion(256, normalizer=name, alpha=0.5, n=196, direction="forward").forward_J[l])
        fit = [np.corrcoef(x, y)[0, 1] ** 2 for x in (np.sqrt(l), np.log(l))]
        assert (fit[0] > fit[1]) == wins


@pytest.mark.parametrize("alpha", [0.2, 0.5, 1.0])
def test_kernels_of_dyt_against_quadrature(alpha):
    """Gauss–Hermite where it is exact; the mixture needs no small slope."""
    tanh, slope = lambda x: np.tanh(alpha * x), lambda x: alpha / np.cosh(alpha * x) ** 2
    q, p = 1.0, 0.35
    want = [gaussian_pair(f, f, q, x) for f in (tanh, slope) for x in (q, p)]
    np.testing.assert_allclose(normalizer_kernels("dyt", q, p, alpha=alpha), want, atol=2e-8, rtol=0)


def test_dyt_saturates_as_a_sign():
    far = normalizer_kernels("dyt", 1e8, 0.4e8, alpha=1.0)
    assert far.q == pytest.approx(1, abs=1e-3) and far.p == pytest.approx(2 / math.pi * math.asin(0.4), abs=1e-3)
    assert far.slope_q == pytest.approx(4 / (3 * math.sqrt(2 * math.pi * 1e8)), rel=1e-3)


@pytest.mark.parametrize("alpha", [0.01, 1.0, 30.0])
@pytest.mark.parametrize("q", [1e-8, 1.0, 1e8, 1e16, 1e40, 1e100])
def test_no_digit_of_the_kernels_of_derf_cancels(q, alpha):
    """Against whole numbers."""
    for rho in (-1.0, -0.3, 0.0, 0.5, 1 - 1e-12, 1.0):
        p = rho * q
        side = 2 * Fraction(alpha) ** 2
        roots = [math.sqrt((1 + side * Fraction(q)) ** 2 - (side * Fraction(x)) ** 2) for x in (q, p)]
        want = [2 / math.pi * math.atan2(side * Fraction(x), root) for x, root in zip((q, p), roots)]
        want += [2 / math.pi * side / root for root in roots]
        found = normalizer_kernels("derf", q, p, alpha=alpha)
        np.testing.assert_allclose(found, np.array(want, dtype=float), rtol=1e-14, atol=0)


@pytest.mark.parametrize("name", ["layernorm", "derf", "dyt"])
def test_an_overlap_rounded_past_the_size_is_the_size(name):
    given = dict(alpha=1.0)
    for sign in (1, -1):
        past, at = (normalizer_kernels(name, 1e10, sign * p, **given) for p in (1e10 * (1 + 5e-10), 1e10))
        np.testing.assert_array_equal(past, at)
        assert past.p == sign * past.q


def test_a_huge_stream_passes_unchanged():
    """q = 1e20: a block multiplies J by 1 + σ²_OV q̂/n + ½σ²₂₁ q̂, with q̂ = 2α/(π√q)."""
    J = recursion(2, normalizer="derf", alpha=0.5, q0=1e20, p0=1e19, n=9).forward_J
    grown = (attention_gain(VIT_B) / 9 + VIT_B.mlp / 2) / (math.pi * 1e10)
    np.testing.assert_allclose(J - 1, [0, grown, 2 * grown], rtol=1e-3)


def test_every_argument_may_be_an_array():
    for change in (dict(q=[1.0, 2.0, 3.0]), dict(alpha=[0.5, 1.0]), dict(p=[0.1, -0.2])):
        given = dict(q=1.0, p=0.5, alpha=0.5)
        ((name, values),) = change.items()
        many = normalizer_kernels("derf", **given | change)
        each = [normalizer_kernels("derf", **given | {name: value}) for value in values]
        np.testing.assert_allclose(many, np.transpose(each), rtol=1e-14)
    for change in (dict(q0=[1.0, 2.0]), dict(p0=[0.1, 0.3]), dict(n=[10, 20]), dict(alpha=[0.5, 1.0])):
        ((name, values),) = change.items()
        for every in (False, True):
            many = recursion(2, normalizer="derf", every_term=every, **{name: np.array(values)})
            each = [recursion(2, normalizer="derf", every_term=every, **{name: value}) for value in values]
            np.testing.assert_allclose(many.forward_J, np.stack([run.forward_J for run in each], 1), rtol=1e-14)
            np.testing.assert_allclose(many.q, np.stack([run.q for run in each], 1), rtol=1e-14)


def test_recursion_broadcasts_and_equals_its_scalars():
    alphas, starts = np.array([0.4, 1.2]), np.array([[0.1], [0.3], [0.0]])
    for name in ("derf", "dyt"):
        many = recursion(4, normalizer=name, alpha=alphas, p0=starts, n=50)
        assert many.q.shape == (5, 3, 2) and many.attended.slope_p.shape == (4, 3, 2)
        for (i, j), alpha in np.ndenumerate(np.broadcast_to(alphas, (3, 2))):
            one = recursion(4, normalizer=name, alpha=alpha, p0=starts[i, 0], n=50)
            for a, b in zip(many[:2] + many[3:], one[:2] + one[3:]):
                np.testing.assert_allclose(a[:, i, j], b, rtol=1e-12)


def test_directions_and_limits_of_recursion():
    both, on, back = (recursion(5, n=30, direction=way) for way in ("both", "forward", "backward"))
    assert on.backward_J is None is on.backward_K and back.forward_J is None is back.forward_K
    np.testing.assert_array_equal(both.forward_J, on.forward_J)
    np.testing.assert_array_equal(both.backward_K, back.backward_K)
    far, kept = recursion(5, n=1e12, every_term=False), recursion(5, n=1e12)
    np.testing.assert_allclose(far.q, kept.q, rtol=1e-10)
    assert np.all(recursion(5).forward_K == 0)  # infinitely many tokens
    np.testing.assert_array_equal(recursion(5, normalizer="rmsnorm").q, recursion(5).q)


def test_gains_at_the_corners():
    s = Sigmas(1.3, 0.7)
    plain = attention_gain(s)
    assert attention_gain(s, "twicing") == plain
    for kv_from in ("residual", "input", "shared"):
        assert attention_gain(s, "boosted", kv_from=kv_from, gate=0.0) == pytest.approx(plain)
        assert attention_gain(s, "boosted", kv_from=kv_from, rounds=1) == pytest.approx(plain)
        assert attention_gain(s, "boosted", kv_from=kv_from) > plain
    unit = [attention_gain(Sigmas(), "boosted", kv_from=k) for k in ("input", "residual", "shared")]
    assert unit == [1.25, 1.5, 2.25]


@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize("value", [1e-50, 1e-9, 1e-3, 1.0])
def test_a_small_scale_is_not_lost_in_the_gain(value, rounds):
    """Against whole numbers; the exponent of growth is made of it."""
    v = Fraction(value) ** 2
    want = float((1 + v) * (1 + v / 9) ** (rounds - 1) - 1)
    told = dict(rounds=rounds, gate=Fraction(1, 3))
    assert attention_gain(Sigmas(value), "boosted", **told) == pytest.approx(want, rel=1e-14)
    half = value**2 / 2
    found = power_law_exponent(Sigmas(value, up=value), "boosted", **told)
    assert found == pytest.approx(half / (half + want), rel=1e-14)


@pytest.mark.parametrize("kv_from", ["residual", "input", "shared"])
def test_a_boosted_stack_is_one_of_attention_with_its_gain(kv_from):
    """The options reach the recursion and both limits."""
    told = dict(attention="boosted", rounds=3, kv_from=kv_from, gate=0.7)
    s = Sigmas(0.9, 0.8, 1.1, 0.7)
    same = s._replace(value=math.sqrt(attention_gain(s, **told)), out=1.0)
    for name in ("layernorm", "derf"):
        one, two = recursion(6, normalizer=name, sigmas=s, n=9, **told), recursion(6, normalizer=name, sigmas=same, n=9)
        for a, b in zip((one.q, one.forward_J, one.backward_K), (two.q, two.forward_J, two.backward_K)):
            np.testing.assert_allclose(a, b, rtol=1e-12)
    assert power_law_exponent(s, **told) == pytest.approx(power_law_exponent(same))
    assert stretched_exponential(0.5, s, **told) == pytest.approx(stretched_exponential(0.5, same))


def test_scales_may_be_numbers_of_numpy():
    assert Sigmas(up=np.int32(50_000)).mlp == 2.5e9
    assert Sigmas(up=np.float16(300)).mlp == 9e4


def test_flags_that_blas_raises_over_finite_numbers_are_no_error(monkeypatch):
    """As under Apple's Accelerate, numpy issue 28687."""

    class Flagged(np.ndarray):
        def __rmatmul__(self, other):
            raise FloatingPointError("divide by zero encountered in matmul")

    want = normalizer_kernels("dyt", 1.0, 0.5)
    maps = signal._KERNELS["dyt"](np.float64(0.5))
    maps.weights = maps.weights.view(Flagged)
    monkeypatch.setitem(signal._KERNELS, "dyt", lambda alpha: maps)
    assert normalizer_kernels("dyt", 1.0, 0.5) == pytest.approx(want)


# ---- networks ----


def stack(depth=3, d=16, **options):
    return nn.ModuleList(Block(d, 2, ffn="relu", dtype=F64, **options) for _ in range(depth))


@pytest.mark.parametrize("direction", ["backward", "forward"])
@pytest.mark.parametrize("options", [{}, {"attention": "boosted"}, {"norm": "post", "attention": "twicing"}], ids=str)
def test_hutchinson_agrees_with_the_exact_jacobian(direction, options):
    g = torch.Generator().manual_seed(1)
    blocks = initialize(stack(2, **options), Sigmas(), generator=g)
    x = equiangular_tokens(4, 16, batch_size=2, generator=g, dtype=F64)
    exact = exact_norms(blocks, x, direction=direction)
    draws = 2000 if direction == "backward" else 600
    found = measure(blocks, x, direction=direction, draws=draws, generator=g, progress=False)
    torch.testing.assert_close(found.q, exact.q)
    torch.testing.assert_close(found.p, exact.p)
    assert ((found.J / exact.J - 1).abs() < (0.02 if draws == 2000 else 0.06)).all()
    assert ((found.K - exact.K).abs() < 0.05 * exact.J).all()
    assert ((found.J - exact.J).abs() < 5 * found.error).all() and (exact.error == 0).all()
    fixed = -1 if direction == "backward" else 0
    assert exact.J[fixed] == 1 and abs(exact.K[fixed]) < 1e-12


def test_the_error_is_the_scatter_over_seeds():
    g = torch.Generator().manual_seed(3)
    blocks = initialize(stack(2), Sigmas(), generator=g)
    x = equiangular_tokens(4, 16, generator=g, dtype=F64)
    runs = [measure(blocks, x, draws=5, generator=g, progress=False) for _ in range(60)]
    scatter = torch.stack([run.J for run in runs]).std(0)
    error = torch.stack([run.error for run in runs]).square().mean(0).sqrt()
    torch.testing.assert_close(error, scatter, rtol=0.3, atol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_exact_norms_are_those_of_the_whole_jacobian(causal):
    g = torch.Generator().manual_seed(2)
    blocks = initialize(stack(3), Sigmas(), generator=g)
    x = equiangular_tokens(3, 16, generator=g, dtype=F64)

    def tail(h):
        for block in blocks[1:]:
            h = block(h, causal=causal)
        return h

    h = blocks[0](x, causal=causal).detach()
    M = torch.autograd.functional.jacobian(tail, h).reshape(3, 16, 3, 16)
    back, on = (exact_norms(blocks, x, direction=way, causal=causal) for way in ("backward", "forward"))
    assert back.J[1] == pytest.approx(M.square().sum().item() / 48)
    cross = sum((M[:, :, a] * M[:, :, b]).sum().item() for a in range(3) for b in range(3) if a != b)
    assert back.K[1] == pytest.approx(cross / (6 * 16))
    assert on.J[-1] == pytest.approx(back.J[0].item()) and back.J[0] > back.J[1]


@pytest.mark.parametrize(("name", "alpha"), [("layernorm", None), ("rmsnorm", None), ("derf", 1.0), ("dyt", 1.0)])
@pytest.mark.parametrize(("factor", "allowed"), [(1, 0.05), (2, 0.10)])
def test_theory_describes_finite_networks(name, alpha, factor, allowed):
    sigmas = VIT_B.times(factor)._replace(query=0.0)
    blocks, found = [Block(256, 4, ffn="relu", normalizer=name) for _ in range(6)], []
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        initialize(blocks, sigmas, alpha=alpha, generator=g)
        x = equiangular_tokens(24, 256, generator=g)
        found.append(measure(blocks, x, draws=8, generator=g, progress=False).J[0].item())
    run = recursion(6, normalizer=name, alpha=alpha or 0.5, sigmas=sigmas, n=24)
    assert np.mean(found) == pytest.approx(run.backward_J[0], rel=allowed)


def test_measure_takes_any_modules_and_leaves_them_as_they_were():
    net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 8)), nn.Tanh())
    net[1].eval()
    x = torch.randn(3, 5, 8)
    modes = [m.training for m in net.modules()]
    one, two = (measure(net, x, draws=3, generator=torch.Generator().manual_seed(0), progress=False) for _ in range(2))
    torch.testing.assert_close(one.J, two.J, rtol=0, atol=0)  # no dropout in it
    assert [m.training for m in net.modules()] == modes and all(w.grad is None for w in net.parameters())
    assert one.J.shape == one.q.shape == (4,) and one.J.dtype == F64 and not x.requires_grad
    assert measure(list(net), x, draws=1, progress=False).error.isnan().all()
    with torch.no_grad():
        assert measure(tuple(net), x, draws=2, progress=True).J.isfinite().all()


BOTH_WAYS = pytest.mark.parametrize("direction", ["backward", "forward"])


@BOTH_WAYS
def test_causality_reaches_every_block(direction):
    block, x = initialize(stack(2), Sigmas()), torch.randn(2, 5, 16, dtype=F64)
    told = dict(direction=direction, draws=2, progress=False)
    seen = lambda blocks, **causal: measure(blocks, x, generator=torch.Generator().manual_seed(0), **told, **causal)
    bound = [Broken(partial(b, causal=True)) for b in block]
    torch.testing.assert_close(seen(block, causal=True), seen(bound))
    assert not torch.allclose(seen(block, causal=True).J, seen(block).J)


@BOTH_WAYS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-13, 1e13])
def test_squares_that_single_precision_does_not_hold_are_measured(scale, dtype, direction):
    """Each of two layers multiplies by the scale: J and K grow by its square."""
    net, x = [Broken(lambda x: scale * x)] * 2, torch.randn(1, 3, 4).to(dtype)
    told, growth = dict(direction=direction), scale ** torch.tensor([4.0, 2.0, 0.0], dtype=F64)
    growth = growth if direction == "backward" else growth.flip(0)
    rtol = {torch.float32: 1e-5, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(exact_norms(net, x, **told).J, growth, rtol=rtol, atol=0)
    found = measure(net, x, generator=torch.Generator().manual_seed(0), progress=False, **told)
    start = -1 if direction == "backward" else 0
    for norm in (found.J, found.K):
        torch.testing.assert_close(norm, norm[start] * growth, rtol=rtol, atol=0)
    size = x.double().square().mean() * scale ** torch.tensor([0.0, 2.0, 4.0], dtype=F64)
    torch.testing.assert_close(found.q, size, rtol=rtol, atol=0)


@BOTH_WAYS
@pytest.mark.parametrize(
    "ask", [partial(measure, draws=2, progress=False), exact_norms], ids=["measure", "exact_norms"]
)
def test_inference_mode_does_not_hide_the_derivative(ask, direction):
    net, x = stack(2), torch.randn(2, 4, 16, dtype=F64)
    want = (torch.manual_seed(0), ask(net, x, direction=direction))[1]
    with torch.inference_mode():
        torch.manual_seed(0)
        found = ask(net, x.clone(), direction=direction)
    torch.testing.assert_close(found, want)


def test_a_linear_stack_has_the_norm_of_its_product():
    net = [nn.Linear(8, 8, dtype=F64) for _ in range(3)]
    W = [layer.weight for layer in net]
    found = exact_norms(net, torch.randn(2, 4, 8, dtype=F64))
    want = [(W[2] @ W[1] @ W[0]), (W[2] @ W[1]), W[2], torch.eye(8, dtype=F64)]
    torch.testing.assert_close(found.J, torch.stack([w.square().sum() / 8 for w in want]).detach())
    torch.testing.assert_close(found.K, torch.zeros(4, dtype=F64), atol=1e-12, rtol=0)


def test_equiangular_tokens_have_exactly_these_angles():
    for n, d, q, p in ((2, 2, 1.0, -1.0), (5, 9, 2.0, 2.0), (24, 24, 0.5, -0.5 / 23), (3, 300, 1.0, 0.2)):
        x = equiangular_tokens(n, d, q0=q, p0=p, batch_size=2, dtype=F64)
        want = (q - p) * torch.eye(n, dtype=F64) + p
        torch.testing.assert_close(x @ x.mT / d, want.expand(2, n, n), rtol=0, atol=1e-7)
    a, b = (equiangular_tokens(4, 6, generator=torch.Generator().manual_seed(s)) for s in (3, 3))
    assert a.dtype == torch.get_default_dtype() and torch.equal(a, b)


def test_the_directions_are_random_up_to_their_signs():
    """What the docstring says: QR leaves feature a of token a negative more often than not, and no other."""
    rng = torch.Generator().manual_seed(0)
    x = equiangular_tokens(24, 256, p0=0.0, batch_size=400, generator=rng, dtype=F64)
    own = x.diagonal(dim1=1, dim2=2)
    assert (own < 0).double().mean() > 0.8
    rest = (x.sum((1, 2)) - own.sum(1)) / (24 * 255)
    assert abs(rest.mean()) < 4 * rest.std() / 20
    assert own.square().mean() == pytest.approx(1, abs=0.05)  # but for the sign it is like any other


def test_initialize_gives_the_variances_and_is_seeded():
    options = dict(normalizer="derf", attention="boosted", attention_options={"n_kv_heads": 2})
    blocks = [Block(128, 4, ffn="swiglu", **options) for _ in range(2)]
    sigmas = Sigmas(0.5, 1.5, 2.0, 0.25, 3.0, 0.75)
    assert initialize(blocks, sigmas, alpha=0.3, generator=torch.Generator().manual_seed(5)) is blocks
    first = {k: v.clone() for k, v in blocks[0].state_dict().items()}
    want = sigmas._asdict() | {"gate": sigmas.up}
    for name, weight in first.items():
        role = name.split(".")[-2]
        if name.endswith("corrections.0.gate.weight") or name.endswith("bias"):
            assert (weight == 0).all()
        elif role in want:
            assert weight.std() * math.sqrt(weight.shape[1]) == pytest.approx(want[role], rel=0.05)
        else:
            assert (weight == (0.3 if name.endswith("alpha") else 1)).all()
    initialize(blocks, sigmas, alpha=0.3, generator=torch.Generator().manual_seed(5))
    assert all(torch.equal(first[k], v) for k, v in blocks[0].state_dict().items())


@pytest.mark.parametrize("name", ["dyt", "derf"])
def test_a_slope_that_is_not_given_is_left_as_it_is(name):
    blocks = initialize([Block(8, 2, normalizer=name)], VIT_B, alpha=1.5)
    norms = blocks[0].attention_norm, blocks[0].ffn_norm
    for norm, slope in zip(norms, (1.5, 0.7)):
        for weight, value in ((norm.alpha, slope), (norm.weight, 3.0), (norm.bias, 2.0)):
            nn.init.constant_(weight, value)
    initialize(blocks, VIT_B)
    for norm, slope in zip(norms, (1.5, 0.7)):
        assert norm.alpha.item() == pytest.approx(slope) and (norm.weight == 1).all() and (norm.bias == 0).all()


@pytest.mark.parametrize("direction", ["backward", "forward"])
def test_blocks_that_work_in_place_leave_the_tokens_alone(direction):
    x = torch.randn(2, 5, 8, dtype=F64)
    before, linear = x.clone(), nn.Linear(8, 8, dtype=F64)
    in_place, plain = ([nn.ReLU(inplace=flag), linear, nn.Tanh()] for flag in (True, False))
    told = dict(direction=direction, progress=False)
    one, two = (measure(net, x, generator=torch.Generator().manual_seed(0), **told) for net in (in_place, plain))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    one, two = (exact_norms(net, x, direction=direction) for net in (in_place, plain))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert torch.equal(x, before)


# ---- faults ----

X = torch.zeros(1, 2, 4)
LINEAR = [nn.Linear(4, 4)]


class Broken(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.of = of

    def forward(self, x):
        return self.of(x)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: relu_kernels(1.1), "rho"),
        (lambda: relu_kernels("one"), "rho"),
        (lambda: tanh_mixture(0.0), "step"),
        (lambda: normalizer_kernels("batchnorm", 1, 0), "normalizer"),
        (lambda: normalizer_kernels("derf", 0.0, 0), "q"),
        (lambda: normalizer_kernels("derf", 1, [0.5, -1.5]), "p"),
        (lambda: normalizer_kernels("dyt", 1, 0.5, alpha=-1), "alpha"),
        (lambda: normalizer_kernels("derf", [1, 2], [0, 0, 0]), "q, p, alpha"),
        (lambda: normalizer_kernels("derf", 1, 0, alpha="one"), "alpha"),
        (lambda: normalizer_kernels("dyt", 1, 0, alpha=1e200), "q, alpha"),
        (lambda: normalizer_kernels("layernorm", 1e-310, 0), "q, alpha"),
        (lambda: attention_gain(VIT_B, "linear"), "attention"),
        (lambda: attention_gain(VIT_B, "boosted", rounds=0), "rounds"),
        (lambda: attention_gain(VIT_B, "boosted", gate=1.5), "gate"),
        (lambda: attention_gain(Sigmas(1e60), "boosted", rounds=99), "rounds"),
        (lambda: attention_gain(VIT_B, "boosted", kv_from="context"), "kv_from"),
        (lambda: attention_gain((1, 1)), "sigmas"),
        (lambda: recursion(3, sigmas=Sigmas(out=-1)), "sigmas.out"),
        (lambda: recursion(3, sigmas=Sigmas(up=np.ones(2))), "sigmas.up"),
        (lambda: recursion(3, sigmas=VIT_B.times(1e90)), "sigmas.value"),
        (lambda: recursion(9, normalizer="derf", sigmas=VIT_B.times(1e40)), "depth"),
        (lambda: recursion(3, q0=[1, 2], n=[2, 3, 4]), "q0, p0, n, alpha"),
        (lambda: Sigmas.of_std(-1, 8, 8), "std"),
        (lambda: Sigmas.of_std(0.02, 8.5, 8), "d_model"),
        (lambda: VIT_B.times(math.inf), "factor"),
        (lambda: recursion(0), "depth"),
        (lambda: recursion(3, normalizer="none"), "normalizer"),
        (lambda: recursion(3, direction="up"), "direction"),
        (lambda: recursion(3, q0=math.nan), "q0"),
        (lambda: recursion(3, p0=1.2), "p0"),
        (lambda: recursion(3, p0=-0.1, n=4, every_term=False), "p0"),
        (lambda: recursion(3, p0=-0.5, n=4), "p0"),
        (lambda: recursion(3, every_term="False"), "every_term"),
        (lambda: recursion(3, p0="0.2"), "p0"),
        (lambda: recursion(3, q0=True), "q0"),
        (lambda: recursion(3, n=1), "n"),
        (lambda: recursion(3, n=10**400), "n"),
        (lambda: recursion(3, alpha=0), "alpha"),
        (lambda: power_law_exponent(Sigmas(0, 0, 0, 0)), "sigmas"),
        (lambda: stretched_exponential(1.0, Sigmas(up=0)), "sigmas"),
        (lambda: stretched_exponential(0, VIT_B), "alpha"),
        (lambda: stretched_exponential(1, Sigmas(up=1e40, down=1e40)), "alpha, sigmas"),
        (lambda: stretched_exponential(1, VIT_B, normalizer="layernorm"), "normalizer"),
        (lambda: equiangular_tokens(1, 4), "n"),
        (lambda: equiangular_tokens(5, 4), "d"),
        (lambda: equiangular_tokens(3, 4, p0=-0.6), "p0"),
        (lambda: equiangular_tokens(3, 4, q0=[1.0, 2.0]), "q0"),
        (lambda: equiangular_tokens(3, 4, batch_size=0), "batch_size"),
        (lambda: equiangular_tokens(3, 4, dtype=torch.int64), "dtype"),
        (lambda: initialize(LINEAR, VIT_B), "blocks"),
        (lambda: initialize([Block(4, 2)], VIT_B, alpha=0.5), "alpha"),
        (lambda: initialize([Block(4, 2, normalizer="dyt")], VIT_B, alpha=-1.0), "alpha"),
        (lambda: initialize((Block(4, 2) for _ in range(2)), VIT_B), "blocks"),
        (lambda: initialize([Block(4, 2)], 0.02), "sigmas"),
        (lambda: measure(nn.Linear(4, 4), X), "blocks"),
        (lambda: measure([], X), "blocks"),
        (lambda: measure([torch.tanh], X), "blocks"),
        (lambda: measure([nn.Linear(4, 3)], X), "blocks"),
        (lambda: measure([Broken(lambda x: (x, x))], X), "blocks"),
        (lambda: measure([Broken(lambda x: x / 0)], X), "blocks"),
        (lambda: measure(LINEAR, X[0]), "x"),
        (lambda: measure(LINEAR, X.long()), "x"),
        (lambda: measure(LINEAR, X[:, :1]), "x"),
        (lambda: measure(LINEAR, X / 0), "x"),
        (lambda: measure(LINEAR, X, causal="False"), "causal"),
        (lambda: measure(LINEAR, X, progress="no"), "progress"),
        (lambda: exact_norms(LINEAR, X, causal="False"), "causal"),
        (lambda: measure(LINEAR, X, draws=0), "draws"),
        (lambda: measure(LINEAR, X, direction="both"), "direction"),
        (lambda: exact_norms(LINEAR, torch.zeros(1, 600, 4)), "x"),
        (lambda: exact_norms(LINEAR, X, direction="sideways"), "direction"),
    ],
)
def test_faults_are_named(call, argument):
    with refused(argument):
        call()


@pytest.mark.parametrize("direction", ["backward", "forward"])
@pytest.mark.parametrize("ask", [partial(measure, progress=False), exact_norms], ids=["measure", "exact_norms"])
@pytest.mark.parametrize(
    "block",
    [
        Broken(torch.sqrt),
        Broken(torch.detach),
        Broken(lambda x: LINEAR[0](x.detach())),
        Broken(torch.zeros_like),
    ],
    ids=["not finite", "detached", "detached before its weights", "constant"],
)
def test_both_ways_and_both_functions_refuse_the_same_blocks(block, ask, direction):
    with refused("blocks"):
        ask([nn.Identity(), block, nn.Identity()], X, direction=direction)


@pytest.mark.parametrize(
    ("blocks", "alpha", "argument"),
    [(lambda block: [block], 0, "alpha"), (lambda block: [block, nn.Linear(4, 4)], None, "blocks")],
    ids=["alpha", "blocks"],
)
def test_a_refused_initialization_leaves_the_weights(blocks, alpha, argument):
    block = Block(4, 2, normalizer="derf")
    before = {name: weight.clone() for name, weight in block.state_dict().items()}
    with refused(argument):
        initialize(blocks(block), VIT_B, alpha=alpha)
    assert all(torch.equal(before[name], weight) for name, weight in block.state_dict().items())


def test_a_failed_measurement_restores_the_modes():
    net = [nn.Dropout(0.5), Broken(lambda x: x / 0)]
    with refused("blocks"):
        measure(net, X)
    assert net[0].training


# ---- what the page uses on pictures ----


@pytest.mark.parametrize("normalizer", ["layernorm", "rmsnorm", "dyt", "derf"])
def test_many_classifiers_at_once_are_each_one(normalizer):
    s = tuning.STANDARD | dict(normalizer=normalizer, alpha=0.7 if normalizer[:1] == "d" else None, gain=0.3, depth=2)
    nets, x = [tuning.Classifier(seed, s) for seed in (0, 1)], torch.randn(2, 3, 8, 8)
    stacked, _ = torch.func.stack_module_state(nets)
    each = torch.stack([net(part) for net, part in zip(nets, x)])
    assert not torch.allclose(*each, atol=0.1)
    torch.testing.assert_close(tuning.logits(stacked, x, s), each)


def test_the_update_is_that_of_torch():
    w, gradients, rates = torch.randn(2, 3, 4), torch.randn(5, 2, 3, 4), [0.01, 0.3]
    found, m, v = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients, 1):
        found = tuning.adamw(found, g, m, v, t, torch.tensor(rates))
    for i, rate in enumerate(rates):
        one = nn.Parameter(w[i].clone())
        optimizer = torch.optim.AdamW([one], rate, weight_decay=0.05)
        for g in gradients:
            one.grad = g[i].clone()
            optimizer.step()
        torch.testing.assert_close(found[i], one.data)


def test_octaves_within_a_factor_of_the_best():
    rates = [1.0, 4.0, 16.0]
    assert tuning.octaves([4.0, 1.0, 4.0], rates, 2.0) == pytest.approx(2.0, abs=1e-3)
    assert tuning.octaves([1.0, 1.0, 4.0], rates, 4.0) == pytest.approx(4.0, abs=1e-3)


def test_a_difference_is_decided_by_its_sign_and_after_holm():
    sure, unsure = [1.0, 1.1, 0.9, 1.05, 0.95], [1.0, -1.0, 0.5, -0.4, 0.1]
    assert tuning.decided([sure, unsure], 1).tolist() == [True, False]
    assert tuning.decided([sure, unsure], -1).tolist() == [False, False]
    once = [1.0, 2.0, 3.0, 0.2, 1.5]  # p = 0.03
    assert tuning.decided([once], 1).all() and not tuning.decided([once, unsure, unsure], 1).any()


@pytest.mark.parametrize("normalizer", ["layernorm", "derf"])
def test_the_blocks_of_transformers_are_those_of_the_book(normalizer):
    model = vision.vision_transformer(0, 2, factor=2.0)
    alpha = None if normalizer == "layernorm" else 0.7
    theirs, x = vision.blocks_of(model, normalizer, alpha), vision.first_tokens(model, "digits")
    for one in theirs:
        ours = initialize([Block(vision.WIDTH, 4, ffn="relu", normalizer=normalizer)], VIT_B, alpha=alpha)[0]
        attention, ffn = one.attention, one.mlp
        pairs = [(ours.attention.query, attention.q_proj), (ours.attention.key, attention.k_proj)]
        pairs += [(ours.attention.value, attention.v_proj), (ours.attention.out, attention.o_proj)]
        pairs += [(ours.ffn.up, ffn.fc1), (ours.ffn.down, ffn.fc2)]
        for mine, other in pairs:
            mine.weight.data.copy_(other.weight)
        with torch.no_grad():
            torch.testing.assert_close(ours(x), one(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["photos", "digits", "fields"])
def test_the_prediction_for_pictures_starts_from_their_sizes(kind):
    model = vision.vision_transformer(0, 2)
    x = vision.first_tokens(model, kind)
    q = x.square().mean().item()
    found = vision.predicted(x, 2, vision.STANDARD)
    assert found["q"][0] == pytest.approx(q, rel=1e-4) and found["backward_J"][-1] == 1
    equal = equiangular_tokens(64, vision.WIDTH, q0=0.3, p0=0.1, batch_size=2)
    each = vision.predicted(equal, 3, vision.STANDARD, each_token=True)
    assert each["backward_J"] == pytest.approx(recursion(3, q0=0.3, p0=0.1, n=64).backward_J, rel=1e-4)
