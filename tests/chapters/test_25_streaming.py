"""Chapter 25: the claims with their mutants, and what a lesson should not carry: long streams, faults."""

import itertools
import math

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.memory import running_softmax
from gbattn.streaming import gains_from_scores, noise_left, scores_from_gains, urn

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
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
