"""Chapter 25: the claims with their mutants, and what a lesson should not carry: long streams, faults."""

import itertools
import math

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.memory import running_softmax
from gbattn.streaming import closed_classes, gains_from_scores, noise_left, scores_from_gains, urn

F64 = torch.float64


class Stream:
    """A drawn stream of n tokens: gains, scores and values."""

    def __init__(self, seed, n):
        self.rng = torch.Generator().manual_seed(seed)
        self.n = n
        self.gains = 0.05 + 0.9 * torch.rand(n, generator=self.rng, dtype=F64)
        self.values, self.scores = torch.randn(2, n, generator=self.rng, dtype=F64)

    def by_recursion(self, gains):
        o, path = self.values[0], []
        for a, v in zip(gains, self.values):
            o = o + a * (v - o)
            path.append(o)
        return torch.stack(path)


streams = st.builds(Stream, st.integers(0, 2**31), st.integers(3, 8))


def gains_and_scores(p, last):
    """Attention with scores made of gains is the recursion; what is left of the first token is the product."""
    gains = torch.cat([torch.ones(1, dtype=F64), p.gains[1:]])
    scores = gains.log()
    scores[1:] -= torch.log1p(-gains[1:]).cumsum(0) if last else torch.log1p(-gains[1:]).cumsum(0).roll(1)
    outputs, log_sums = running_softmax(scores, p.values[:, None])
    left = torch.cat([outputs[:, 0], (log_sums[0] - log_sums).exp()[1:], gains_from_scores(scores)])
    return left, torch.cat([p.by_recursion(gains), (1 - gains[1:]).cumprod(0), gains])


@claim(streams, tolerance=1e-10, mutant=lambda p: gains_and_scores(p, False))
def test_prop_gains_scores(p):
    """Scores log a − Σ log(1 − a) have the gains a. Mutant: the product stops a step early."""
    return gains_and_scores(p, True)


def noise_and_bounds(p, bound):
    """The recursion of p_n, its bounds for scores of ±b, and its limits for rising ones."""
    b, c = 0.2 + 1.5 * p.gains[0].item(), 0.05 + p.gains[1].item()
    share = 1 / (1 + math.exp(2 * b))  # of loud tokens, where the bound is reached
    n = 400
    two = b * torch.where(torch.arange(n, dtype=F64) >= n * (1 - share), 1.0, -1.0).to(F64)
    weights = two.softmax(0)
    A = p.scores.softmax(0)
    a = gains_from_scores(p.scores)
    recursion, share_left = [], torch.zeros((), dtype=F64)
    for gain in a:
        share_left = (1 - gain) ** 2 * share_left + gain**2
        recursion.append(share_left)
    recursion = torch.stack(recursion)
    limit = noise_left(c * torch.arange(3000, dtype=F64))[-1]
    equal_left = torch.cat([noise_left(p.scores), A.square().sum()[None], limit[None]])
    equal_right = torch.cat([recursion, recursion[-1:], torch.tensor([math.tanh(c / 2)], dtype=F64)])
    gamma = 3 * p.gains[2].item()
    many = noise_left(gamma * torch.arange(1, 10_001, dtype=F64).log())[-1] * 10_000
    off = (many - (gamma + 1) ** 2 / (2 * gamma + 1)).abs()
    left = torch.cat([equal_left, -equal_left, weights.square().sum()[None] * n, torch.ones(1, dtype=F64), off[None]])
    upper, lower = torch.tensor([bound(b)], dtype=F64), weights.square().sum()[None] * n
    return left, torch.cat([equal_right, -equal_right, upper, lower, torch.tensor([0.01], dtype=F64)])


@claim(streams, tolerance=1e-9, relation="<=", mutant=lambda p: noise_and_bounds(p, math.cosh))
def test_thm_noise_left(p):
    """Noise obeys its recursion, is at most cosh²(b)/n, and has the limits of rising scores. Mutant: cosh(b)/n."""
    return noise_and_bounds(p, lambda b: math.cosh(b) ** 2)


def random_gains(p, limit):
    """The recursion; and 200 streams of pairs drawn from a few: where they end, and how they scatter."""
    n, runs = 3000, 200
    which = torch.randint(p.n, (runs, n), generator=p.rng)
    s, v = p.scores.clamp(-1.5, 1.5), p.values
    w = s.exp()
    ends = (s[which].softmax(1) * v[which]).sum(1)
    m = (w * v).mean() / w.mean()
    variance = (w**2 * (v - m) ** 2).mean() / w.mean() ** 2
    o, Z = v[0], w[0]
    for weight, value in zip(w[1:], v[1:]):
        Z = Z + weight
        o = o + weight * (value - o) / Z
    away = (n * runs / variance).sqrt() * (ends.mean() - limit(w, v))
    left = [(o - (s.softmax(0) * v).sum()).abs(), away.abs(), (n * ends.var() / variance - 1).abs()]
    return torch.stack(left), torch.tensor([1e-12, 5.0, 0.4], dtype=F64)


@claim(streams, tolerance=0, relation="<=", examples=15, mutant=lambda p: random_gains(p, lambda w, v: v.mean()))
def test_prop_random_gains(p):
    """Streams end at E wv / E w, within a normal law of the stated variance. Mutant: at the mean of the values."""
    return random_gains(p, lambda w, v: (w * v).mean() / w.mean())


class Cycles:
    """Regimes of a stationary stream: each a cycle of tokens that starts at a random place."""

    def __init__(self, seed):
        self.rng = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 6, (2,), generator=self.rng).tolist()
        self.scores, self.values = ([torch.randn(n, generator=self.rng, dtype=F64) for n in lengths] for _ in range(2))
        self.starts = [int(torch.randint(n, (1,), generator=self.rng)) for n in lengths]


def random_limit(p, of_regimes):
    """After whole cycles the running mean is exactly where it ends."""
    ends = []
    for s, v, start in zip(p.scores, p.values, p.starts):
        s, v = (x.roll(-start).repeat(3) for x in (s, v))
        ends.append(running_softmax(s, v[:, None])[0][-1, 0])
    means = torch.stack([torch.stack([(s.exp() * v).mean(), s.exp().mean()]) for s, v in zip(p.scores, p.values)])
    return torch.stack(ends), of_regimes(means)


@claim(
    st.builds(Cycles, st.integers(0, 2**31)),
    tolerance=1e-10,
    mutant=lambda p: random_limit(p, lambda means: (means[:, 0].mean() / means[:, 1].mean()).expand(2)),
)
def test_thm_random_limit(p):
    """A stream ends at the reweighted mean of its regime. Mutant: at that of all regimes together."""
    return random_limit(p, lambda means: means[:, 0] / means[:, 1])


class Chain:
    """A chain with few transitions, the same with more of them, and the windows of a model."""

    def __init__(self, seed, n):
        rng = torch.Generator().manual_seed(seed)
        random = torch.rand(n, n, generator=rng, dtype=F64)
        allowed = torch.rand(n, n, generator=rng) < 1.2 / n
        allowed[range(n), torch.randint(n, (n,), generator=rng)] = True
        more = allowed | (torch.rand(n, n, generator=rng) < 0.5 / n)
        self.few, self.more = (x / x.sum(1, keepdim=True) for x in (random * allowed, random * more))
        # Two tokens, windows of three: each leads to two windows.
        p = 0.05 + 0.9 * torch.rand(8, generator=rng, dtype=F64)
        self.windows = torch.zeros(8, 8, dtype=F64)
        for w in range(8):
            self.windows[w, 2 * w % 8], self.windows[w, 2 * w % 8 + 1] = 1 - p[w], p[w]


def classes_of_a_chain(p, share):
    found, larger, one = map(closed_classes, (p.few, p.more, p.windows))
    # A lazy chain has the same shares of time, and its powers converge.
    lazy = (p.few + torch.eye(len(p.few), dtype=F64)) / 2
    for _ in range(40):
        lazy = lazy @ lazy
        lazy = lazy / lazy.sum(1, keepdim=True)
    too_many = max(0, len(larger.members) - len(found.members))
    counts = torch.tensor([too_many, len(one.members)], dtype=F64)
    left = torch.cat([lazy.flatten(), (found.laws @ p.few).flatten(), counts])
    right = torch.cat([share(found).flatten(), found.laws.flatten(), torch.tensor([0, 1], dtype=F64)])
    return left, right


@claim(
    st.builds(Chain, st.integers(0, 2**31), st.integers(2, 9)),
    tolerance=1e-8,
    mutant=lambda p: classes_of_a_chain(p, lambda found: found.laws.mean(0).expand(len(found.chances), -1)),
)
def test_thm_classes(p):
    """Shares of time are chances times laws; more transitions, no more classes; a window, one class.
    Mutant: all classes have the same chance."""
    return classes_of_a_chain(p, lambda found: found.chances @ found.laws)


class Drive:
    """A recursion driven by one of three states of the world a step, expanding or not, and its mean equation."""

    def __init__(self, seed, n):
        rng = torch.Generator().manual_seed(seed)
        self.L = 0.5 + 2 * torch.rand((), generator=rng, dtype=F64)
        B = torch.randn(3, 2, 2, generator=rng, dtype=F64)
        self.B = self.L * B / torch.linalg.matrix_norm(B, 2)[:, None, None]
        if seed % 2:
            self.B = (self.L * torch.eye(2, dtype=F64)).expand(3, 2, 2)
        self.b = torch.randn(3, 2, generator=rng, dtype=F64)
        self.which = torch.randint(3, (n,), generator=rng)
        self.steps = (0.3 * torch.rand(n, generator=rng, dtype=F64)).sort(descending=True).values
        self.r = 2 * torch.rand((), generator=rng, dtype=F64) - 1

    def run(self):
        x = z = torch.zeros(2, dtype=F64)
        S, far, most = torch.zeros(2, dtype=F64), [], []
        for a, y in zip(self.steps, self.which):
            xi = self.B[y] @ z + self.b[y] - (self.B @ z + self.b).mean(0)
            x, z = x + a * (self.B[y] @ x + self.b[y]), z + a * (self.B @ z + self.b).mean(0)
            S = S + a * xi
            far.append((x - z).norm()), most.append(S.norm())
        return torch.stack(far).max(), torch.stack(most).max()


def follows(p, factor):
    far, most = p.run()
    a, n = p.steps, len(p.steps)
    k = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    square = a @ p.r**k @ a  # of a sum of noise with the covariance r^|k|
    bound = a[0] * a.sum() * (1 + 2 * (p.r.abs() ** torch.arange(1, n)).sum())
    return torch.stack([far, square]), torch.stack([factor(p.L * a.sum()) * most, bound])


@claim(
    st.builds(Drive, st.integers(0, 2**31), st.integers(3, 25)),
    tolerance=1e-10,
    relation="<=",
    mutant=lambda p: follows(p, lambda exponent: 1.0),
)
def test_thm_follows(p):
    """Paths stay within e^(Lτ) times the largest sum of noise, whose square is bounded. Mutant: without the factor."""
    return follows(p, torch.exp)


def second_head(p, share):
    a, b, g = p.gains[:3]
    k = torch.arange(p.n)[:, None] - torch.arange(p.n)
    A, B = (torch.where(k >= 0, x * (1 - x) ** k, 0) for x in (a, b))
    h = share(a, b, g)
    rounds = A @ p.values + g * B @ (p.values - A @ p.values)
    product = (b * (1 - a) * A - a * (1 - b) * B) / (b - a)
    sides = [rounds, (B @ A).flatten()], [(1 - h) * A @ p.values + h * B @ p.values, product.flatten()]
    return tuple(map(torch.cat, sides))


@claim(streams, tolerance=1e-8, mutant=lambda p: second_head(p, lambda a, b, g: g * b / (b - a)))
def test_prop_second_head(p):
    """A second round of constant gain is a head of that gain. Mutant: its share without 1 − a."""
    return second_head(p, lambda a, b, g: g * b * (1 - a) / (b - a))


def urn_by_enumeration(p, left_over):
    start, mean, square = 0.2 + 0.6 * p.gains[0], 0.0, 0.0
    gains = p.gains[1:]
    for draws in itertools.product((0.0, 1.0), repeat=len(gains)):
        o, probability = start, torch.ones((), dtype=F64)
        for a, v in zip(gains, draws):
            probability = probability * (o if v else 1 - o)
            o = o + a * (v - o)
        mean, square = mean + probability * o, square + probability * o**2
    by_theorem = start * (1 - start) * (1 - left_over(gains).prod())
    return torch.stack([mean, square - mean**2]), torch.stack([start, by_theorem])


@claim(streams, tolerance=1e-10, mutant=lambda p: urn_by_enumeration(p, lambda a: (1 - a) ** 2), examples=20)
def test_thm_urn(p):
    """Mean and variance over all sequences of draws. Mutant: (1 − a)² for 1 − a²."""
    return urn_by_enumeration(p, lambda a: 1 - a**2)


# ---------------------------------------------------------------- the functions


def test_there_and_back():
    scores = torch.randn(3, 50, dtype=F64)
    again = scores_from_gains(gains_from_scores(scores))
    assert torch.allclose(again, scores - scores[:, :1], atol=1e-10, rtol=0)


def test_long_streams_and_large_scores_stay_finite():
    scores = 300 * torch.randn(100_000, dtype=F64)
    for found in (gains_from_scores(scores), noise_left(scores)):
        assert found.isfinite().all() and (found >= 0).all() and (found <= 1 + 1e-9).all()
    equal = gains_from_scores(torch.zeros(1000, dtype=F64))
    assert torch.allclose(equal, 1 / torch.arange(1.0, 1001, dtype=F64), atol=1e-13, rtol=0)


def test_a_chain_ends_in_its_classes_as_often_as_counted():
    chain = torch.tensor([[0, 0.5, 0, 0.5], [0, 0, 1, 0], [0, 0.5, 0.5, 0], [0, 0, 0, 1]], dtype=F64)
    found = closed_classes(chain)
    assert found.members == [[1, 2], [3]]
    assert torch.allclose(found.laws, torch.tensor([[0, 1 / 3, 2 / 3, 0], [0, 0, 0, 1]], dtype=F64))
    assert torch.allclose(found.chances, torch.tensor([[0.5, 0.5], [1, 0], [1, 0], [0, 1]], dtype=F64))
    assert closed_classes(chain.float()).laws.dtype == torch.float32


def test_an_urn_repeats_with_its_seed_and_its_moments_are_those_of_the_theorem():
    gains = torch.full((30,), 0.2, dtype=F64)
    runs = [urn(gains, 20_000, 0.3, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*runs) and runs[0].shape == (20_000, 30)
    last = runs[0][:, -1]
    variance = 0.21 * (1 - (1 - gains**2).prod())
    assert abs(last.mean() - 0.3) < 5 * (variance / 20_000).sqrt()
    assert abs(last.var() / variance - 1) < 0.05


def strays_from_the_mean(first, runs=200):
    """Largest distance until t = 3 of the delta rule with steps n^-0.8, from step `first` on, from (1 − e^-t)θ."""
    rng = torch.Generator().manual_seed(0)
    theta, w = torch.randn(runs, 2, generator=rng, dtype=F64), torch.zeros(runs, 2, dtype=F64)
    far, t, n = torch.zeros(runs, dtype=F64), 0.0, first
    while t < 3:
        x, noise = torch.randn(2, runs, 2, generator=rng, dtype=F64)
        y = (x * theta).sum(1) + 0.5 * noise[:, 0]
        w = w + n**-0.8 * x * (y - (x * w).sum(1))[:, None]
        t, n = t + n**-0.8, n + 1
        far = far.maximum((w - (1 - math.exp(-t)) * theta).norm(dim=1))
    return far.mean()


def test_the_delta_rule_follows_its_mean_equation_the_closer_the_smaller_its_steps():
    """Least mean squares as stochastic approximation; each stream has coefficients of its own."""
    assert strays_from_the_mean(10) > 3 * strays_from_the_mean(1000) and strays_from_the_mean(1000) < 0.15


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: gains_from_scores(torch.ones(0)), "scores"),
        (lambda: noise_left(torch.ones(3).long()), "scores"),
        (lambda: scores_from_gains(torch.tensor([0.5, 0.5])), "gains"),
        (lambda: scores_from_gains(torch.tensor([1.0, 1.0])), "gains"),
        (lambda: urn(torch.ones(2, 2), 3), "gains"),
        (lambda: urn(torch.ones(2), 0), "runs"),
        (lambda: urn(torch.ones(2), 3, 1.5), "start"),
        (lambda: gains_from_scores(torch.tensor([-torch.inf, 0])), "scores"),
        (lambda: urn(2 * torch.ones(2), 3), "gains"),
        (lambda: closed_classes(torch.ones(2, 3)), "transition"),
        (lambda: closed_classes(torch.ones(2, 2)), "transition"),
        (lambda: closed_classes(torch.tensor([[2.0, -1], [0, 1]])), "transition"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
