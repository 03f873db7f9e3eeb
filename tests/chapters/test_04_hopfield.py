"""Chapter 4: the claims with their mutants, and what a lesson should not carry: faults, dtypes, batches."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.hopfield import (
    KINDS,
    _noisy,
    capacity_curve,
    energy,
    jacobian,
    recall_bits,
    retrieve,
    separation,
    update,
)

F64 = torch.float64


class Memory:
    """A drawn memory: patterns X (N, d) of drawn length, states near and far, a sharpness, and a generator for more."""

    def __init__(self, seed, N, d, length, log_beta):
        self.rng = torch.Generator().manual_seed(seed)
        self.N, self.d, self.beta = N, d, 10.0**log_beta
        self.X = length * self.normal(N, d) / math.sqrt(d)
        self.state = 2 * length * self.normal(5, d) / math.sqrt(d)
        self.M = self.X.norm(dim=-1).max()

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def uniform(self, low, high):
        return low + (high - low) * torch.rand((), generator=self.rng, dtype=F64).item()

    @property
    def diameter(self):
        return max((a - b).norm() for a in self.X for b in self.X)

    def outside(self, states):
        """The part of the states that the patterns do not span, by a road that uses no attention."""
        Q = torch.linalg.qr(self.X.T).Q
        return states - states @ Q @ Q.T


def memories(smallest=2, largest=8, dimensions=(2, 10), length=(0.3, 1.5)):
    return st.builds(
        Memory,
        st.integers(0, 2**31),
        st.integers(smallest, largest),
        st.integers(*dimensions),
        st.floats(*length),
        st.floats(-1, 0.7),
    )


def gradient(p, kind, beta):
    state = p.state.clone().requires_grad_()
    energy(state, p.X, kind, beta).sum().backward()
    return state.grad


def steps_and_gradients(p, beta):
    left = torch.stack([update(p.state, p.X, kind, p.beta) for kind in KINDS])
    right = torch.stack([p.state - gradient(p, kind, beta) for kind in KINDS])
    scale = right.abs().amax((1, 2), keepdim=True).clamp_min(1)  # each kind on its own scale
    return left / scale, right / scale


@claim(memories(), tolerance=1e-10, mutant=lambda p: steps_and_gradients(p, 1.01 * p.beta))
def test_thm_update_gradient(p):
    """Every update is ξ − ∇E, the gradient taken by autograd. Mutant: the energy of another sharpness."""
    return steps_and_gradients(p, p.beta)


def energies_after_and_allowed(p, share):
    after, allowed = [], []
    for kind, degree in (("linear", 2), ("polynomial", 4), ("exponential", 2), ("log-sum-exp", 2)):
        g, beta = p.uniform(0.05, 1.95), min(p.beta, 1.0)
        start = 0.5 * p.state
        full = update(start, p.X, kind, beta, degree) - start
        drop = share(g) * full.square().sum(-1)
        before = energy(start, p.X, kind, beta, degree)
        scale = 1 + before.abs() + drop
        after.append(energy(update(start, p.X, kind, beta, degree, gain=g), p.X, kind, beta, degree) / scale)
        allowed.append((before - drop) / scale)
    return torch.stack(after), torch.stack(allowed)


@claim(
    memories(),
    tolerance=1e-11,
    relation="<=",
    mutant=lambda p: energies_after_and_allowed(p, lambda g: 2 * g * (2 - g) + 0.5),
)
def test_thm_descent(p):
    """A step of gain g lowers a convex kind's energy by ½g(2−g)‖f(ξ)−ξ‖² or more. Mutant: by four times that."""
    return energies_after_and_allowed(p, lambda g: 0.5 * g * (2 - g))


def test_log_sum_exp_is_bounded_below_and_one_step_reaches_the_hull():
    for seed in range(10):
        p = Memory(seed, 2 + seed % 7, 2 + seed % 9, 0.3 + seed / 9, seed / 5 - 1)
        assert (energy(p.state, p.X, beta=p.beta) >= 0.5 * (p.state.norm(dim=-1) - p.M).square() - 1e-12).all()
        inside = update(p.state, p.X, beta=p.beta)
        assert (inside.norm(dim=-1) <= p.M + 1e-12).all()
        assert (energy(inside, p.X, beta=p.beta) <= 2 * p.M**2 + 1e-12).all()


def attended(p, scale):
    return torch.nn.functional.scaled_dot_product_attention(p.state, p.X, p.X, scale=scale)


@claim(
    memories(),
    tolerance=1e-12,
    mutant=lambda p: (update(p.state, p.X, beta=p.beta), attended(p, p.beta / math.sqrt(p.d))),
)
def test_prop_attention_step(p):
    """The update is torch's attention with scale β. Mutant: torch's default scale on top."""
    return update(p.state, p.X, beta=p.beta), attended(p, p.beta)


class Bits:
    """A drawn memory of signs, asked for drawn states."""

    def __init__(self, seed, N, d, kind):
        rng = torch.Generator().manual_seed(seed)
        signs = lambda rows: 1.0 - 2 * (torch.rand(rows, d, generator=rng) < 0.5).to(F64)
        self.X, self.state, self.kind = signs(N), signs(4), kind

    def F(self, z):
        return {"linear": z**2 / 2, "polynomial": z**3, "exponential": z.exp()}[self.kind]

    def both_ways(self):
        """Energy with each bit down minus up, one flip at a time."""
        result = torch.empty_like(self.state)
        for b in range(self.state.shape[1]):
            up, down = self.state.clone(), self.state.clone()
            up[:, b], down[:, b] = 1, -1
            result[:, b] = (self.F(up @ self.X.T) - self.F(down @ self.X.T)).sum(-1)
        return result

    def settled(self, field):
        """Signs of the field; a bit that makes no difference stays."""
        return torch.where(field.abs() <= 1e-9 * field.abs().max(), self.state, field.sign())


def bits():
    kinds = st.sampled_from(KINDS[:3])
    return st.builds(Bits, st.integers(0, 2**31), st.integers(1, 12), st.integers(2, 9), kinds)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("seed", range(10))
def test_two_matrix_products_decide_all_flips(kind, seed):
    """As flipping one bit at a time does; without its correction a bit speaks for itself."""
    p = Bits(seed, 1 + seed, 2 + seed % 8, kind)
    assert torch.equal(recall_bits(p.state, p.X, p.kind, 3), p.settled(p.both_ways()))


def test_separation_is_the_overlap_with_itself_less_the_largest_other():
    X = torch.randn(2, 6, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    gaps = [[min(x @ x - x @ y for j, y in enumerate(Z) if j != i) for i, x in enumerate(Z)] for Z in X]
    torch.testing.assert_close(separation(X), torch.tensor(gaps, dtype=F64), atol=1e-12, rtol=0)


def retrieval(p, factor):
    rho = p.uniform(0, 0.3)
    away = p.normal(p.N, p.d)
    asked = p.X + rho * away / away.norm(dim=-1, keepdim=True)
    epsilon = (p.N - 1) * (-p.beta * (separation(p.X) - 2 * p.M * rho)).exp()
    weights = (p.beta * asked @ p.X.T).softmax(-1).diagonal()
    error = (update(asked, p.X, beta=p.beta) - p.X).norm(dim=-1)
    scale = epsilon.clamp_min(1)  # a bound above one says nothing; keep it from hiding the others
    return torch.stack([error, 1 - weights]) / scale, torch.stack([2 * p.M * epsilon, epsilon]) * factor / scale


@claim(
    memories(length=(1.0, 4.0)),
    tolerance=1e-12,
    relation="<=",
    mutant=lambda p: retrieval(p, 0.02),
)
def test_thm_one_step_retrieval(p):
    """Weight elsewhere ≤ ε and error ≤ 2Mε. Mutant: a fiftieth of both."""
    return retrieval(p, 1.0)


def erased(p, seen):
    left = [update(p.state, p.X, kind, beta=0.5) for kind in KINDS]
    right = [update(seen(p.state), p.X, kind, beta=0.5) for kind in KINDS]
    scale = torch.stack(left).abs().amax().clamp_min(1)
    rest = p.outside(torch.cat(left))
    return torch.cat([*left, rest]) / scale, torch.cat([*right, torch.zeros_like(rest)]) / scale


@claim(memories(largest=4, dimensions=(5, 10)), tolerance=1e-10, mutant=lambda p: erased(p, lambda s: 0.99 * s))
def test_thm_erasure(p):
    """No kind sees or returns what the patterns do not span. Mutant: a state that is shrunk inside the span too."""
    return erased(p, lambda s: s - p.outside(s))


def jacobians(p, ours):
    by_autograd = torch.stack(
        [torch.autograd.functional.jacobian(lambda x: update(x[None], p.X, beta=p.beta)[0], s) for s in p.state]
    )
    smallest = torch.linalg.eigvalsh(by_autograd).amin(-1).clamp_max(0)
    return torch.cat([ours.flatten(), ours.flatten(), smallest]), torch.cat(
        [by_autograd.flatten(), by_autograd.mT.flatten(), torch.zeros(5, dtype=F64)]
    )


@claim(memories(), tolerance=1e-9, mutant=lambda p: jacobians(p, jacobian(p.state, p.X, p.beta) / p.beta))
def test_prop_jacobian(p):
    """β Cov_p(x) is autograd's Jacobian, symmetric, without negative eigenvalues. Mutant: the covariance alone."""
    return jacobians(p, jacobian(p.state, p.X, p.beta))


def forgotten(p, contraction):
    beta = 4 * p.uniform(0.2, 0.9) / p.diameter.item() ** 2
    kappa = contraction(beta * p.diameter**2 / 4)
    paths = retrieve(p.state, p.X, 12, beta=beta, path=True)
    apart = (paths[:, :1] - paths[:, 1:]).norm(dim=-1)  # (13, 4)
    powers = kappa ** torch.arange(13, dtype=F64)
    end = retrieve(p.state, p.X, 300, beta=beta)
    one_point = (end - end[:1]).norm(dim=-1)
    left = torch.cat([(apart / apart[0]).flatten(), one_point])
    return left, torch.cat([powers[:, None].expand(13, 4).flatten(), torch.zeros(5, dtype=F64)])


@claim(memories(), tolerance=1e-9, relation="<=", mutant=lambda p: forgotten(p, lambda kappa: kappa / 20))
def test_thm_forget(p):
    """With κ = ¼βD² < 1 questions approach each other as κᵗ, to one point. Mutant: a twentieth of κ."""
    return forgotten(p, lambda kappa: kappa)


def ball(p, softer):
    """States of the ball, their images and Jacobians, at the smallest sharpness for which the conditions hold."""
    X = p.X / p.X.norm(dim=-1, keepdim=True)  # on the sphere every pattern is separated
    i = separation(X).argmax()
    gap = separation(X)[i].item()
    radius, beta = gap / 4, 1e-3
    epsilon = lambda b: (p.N - 1) * math.exp(-b * (gap - 2 * radius))
    while 2 * epsilon(beta) > radius or 4 * beta * epsilon(beta) >= 1:
        beta *= 1.05
    c = 4 * beta * epsilon(beta)
    beta = beta / softer
    away = p.normal(40, p.d)
    asked = X[i] + radius * away / away.norm(dim=-1, keepdim=True)
    distance = (update(asked, X, beta=beta) - X[i]).norm(dim=-1)
    norm = torch.linalg.matrix_norm(jacobian(asked, X, beta), 2)
    return torch.stack([distance / radius, norm]), torch.stack(
        [torch.ones(40, dtype=F64), torch.full((40,), c, dtype=F64)]
    )


@claim(memories(smallest=3), tolerance=1e-10, relation="<=", mutant=lambda p: ball(p, 5.0))
def test_thm_ball(p):
    """A separated pattern's ball is mapped into itself and contracted by c. Mutant: a fifth of the sharpness."""
    return ball(p, 1.0)


@pytest.mark.parametrize("beta, fixed_points", [(0.04, 1), (6.0, 3)])
def test_there_is_one_fixed_point_in_all_or_one_a_pattern(beta, fixed_points):
    """The condition of thm-forget holds at the smaller β, that of thm-ball with ρ = 0.1 at the larger."""
    X, N = torch.eye(3, dtype=F64), 3
    epsilon = (N - 1) * math.exp(-beta * (1 - 2 * 0.1))
    keeps_a_ball = 2 * epsilon <= 0.1 and 4 * beta * epsilon < 1
    assert keeps_a_ball == (fixed_points == N) and (beta * 2 / 4 < 1) == (fixed_points == 1)
    ends = retrieve(X, X, beta=beta, steps=100)
    assert len(torch.unique(ends.mul(1e6).round(), dim=0)) == fixed_points


def border_of(N):
    a = torch.linspace(1 / N, 1, 100_001, dtype=F64)[1:-1]
    return a, ((a * (N - 1) / (1 - a)).log() / (a - (1 - a) / (N - 1)))


def on_both_sides(N, shift):
    """The final weight on pattern 1 above and below the border against the roots that the proposition names."""
    a, sharpness = border_of(N)
    border = sharpness.min().item()
    X = torch.eye(N, dtype=F64)
    above, below = border * (1.05 + shift), border * (0.95 + shift)
    root = a[sharpness <= above].max()
    ends = [retrieve(X[:1], X, 1000, beta=beta)[0, 0] for beta in (above, below)]
    return torch.stack(ends), torch.stack([root, torch.tensor(1 / N, dtype=F64)])


@claim(st.integers(3, 40), tolerance=1e-4, mutant=lambda N: on_both_sides(N, 0.1), examples=12)
def test_prop_border(N):
    """Above β_N the weight stays at the largest root of β(a) = β, below it ends at 1/N. Mutant: a border moved up."""
    return on_both_sides(N, 0.0)


def kept(p, gain, held):
    g, t = 0.3, 4
    out = p.outside(p.state)
    replaced = retrieve(p.state, p.X, t, beta=p.beta)
    damped = retrieve(p.state, p.X, t, beta=p.beta, gain=g)
    F = torch.zeros_like(p.state)
    for _ in range(t):
        F = F + g * update(held(p.state, F), p.X, beta=p.beta)
    left = torch.cat([p.outside(replaced), p.outside(damped), p.outside(held(p.state, F))])
    return left, torch.cat([torch.zeros_like(out), (1 - gain) ** t * out, out])


@claim(memories(largest=4, dimensions=(5, 10)), tolerance=1e-11, mutant=lambda p: kept(p, 0.31, lambda x, F: x - F))
def test_prop_kept(p):
    """Replacing keeps 0 of the outside part, a gain (1−g)ᵗ, the residual all. Mutant: another gain."""
    return kept(p, 0.3, lambda x, F: x - F)


# ---------------------------------------------------------------- energies, dtypes, batches


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-4)])
def test_batches_agree_with_single_memories_in_both_precisions(kind, dtype, tolerance):
    rng = torch.Generator().manual_seed(0)
    X, state = (0.2 * torch.randn(2, 3, n, 6, generator=rng, dtype=F64) for n in (7, 4))
    for call in (energy, update, lambda s, x, *a: retrieve(s, x, 3, *a)):
        together = call(state.to(dtype), X.to(dtype), kind, 0.5)
        assert together.dtype == dtype
        for i in range(2):
            for j in range(3):
                single = call(state[i, j], X[i, j], kind, 0.5)
                scale = single.abs().max().clamp_min(1)
                assert (together[i, j].double() - single).abs().max() <= tolerance * scale


def test_the_path_starts_at_the_question_and_ends_at_the_answer():
    X, state = torch.randn(5, 3, dtype=F64), torch.randn(2, 3, dtype=F64)
    path = retrieve(state, X, 4, path=True)
    assert path.shape == (5, 2, 3)
    assert torch.equal(path[0], state) and torch.equal(path[-1], retrieve(state, X, 4))
    assert torch.equal(path[1], update(state, X)) and torch.equal(retrieve(state, X, 0), state)


def test_polynomial_of_degree_two_is_the_linear_memory():
    X, state = torch.randn(5, 3, dtype=F64), torch.randn(2, 3, dtype=F64)
    torch.testing.assert_close(energy(state, X, "polynomial", 0.7, 2), energy(state, X, "linear", 0.7))
    torch.testing.assert_close(update(state, X, "polynomial", 0.7, 2), update(state, X, "linear", 0.7))


def test_log_sum_exp_survives_large_overlaps():
    X = 1e3 * torch.eye(4)
    assert torch.isfinite(energy(X, X, beta=10.0)).all()
    torch.testing.assert_close(update(X, X, beta=10.0), X)


def test_gradients_reach_states_and_patterns():
    rng = torch.Generator().manual_seed(0)
    state, X = (torch.randn(n, 3, dtype=F64, generator=rng, requires_grad=True) for n in (2, 4))
    for kind in KINDS:
        assert torch.autograd.gradcheck(lambda s, x, kind=kind: retrieve(s, x, 2, kind, 0.3), (state, X))


def test_retrieval_traces_without_a_graph_break():
    explained = torch._dynamo.explain(lambda s, x: retrieve(s, x, 3, beta=2.0))(torch.randn(2, 3), torch.randn(4, 3))
    assert explained.graph_break_count == 0, explained.break_reasons


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu():
    X, state = torch.randn(6, 4, dtype=F64), torch.randn(3, 4, dtype=F64)
    for call in (energy, update, jacobian):
        torch.testing.assert_close(call(state.cuda(), X.cuda()).cpu(), call(state, X), atol=1e-12, rtol=0)
    torch.testing.assert_close(separation(X.cuda()).cpu(), separation(X), atol=1e-12, rtol=0)


# ---------------------------------------------------------------- bits


def test_log_sum_exp_would_flip_the_same_bits_as_the_exponential():
    rng = torch.Generator().manual_seed(0)
    X, state = (1.0 - 2 * (torch.rand(n, 9, generator=rng) < 0.5).to(F64) for n in (30, 5))
    slow = state.clone()
    for b in range(9):
        up, down = state.clone(), state.clone()
        up[:, b], down[:, b] = 1, -1
        slow[:, b] = ((up @ X.T).logsumexp(-1) - (down @ X.T).logsumexp(-1)).sign()
    assert torch.equal(recall_bits(state, X, "exponential"), slow)


def test_hopfield_1982_is_the_linear_memory():
    rng = torch.Generator().manual_seed(0)
    X, state = (1.0 - 2 * (torch.rand(n, 31, generator=rng) < 0.5).to(F64) for n in (5, 8))
    W = X.T @ X
    W.fill_diagonal_(0)
    field = state @ W
    assert torch.equal(recall_bits(state, X, "linear"), torch.where(field == 0, state, field.sign()))


@pytest.mark.parametrize(("dtype", "d"), [(F64, 5000), (torch.float32, 300)])
def test_long_patterns_neither_overflow_nor_vanish_in_the_exponential(dtype, d):
    rng = torch.Generator().manual_seed(0)
    X = 1 - 2 * (torch.rand(50, d, generator=rng) < 0.5).to(dtype)
    asked = X.clone()
    asked[:, : d // 5] *= -1
    assert torch.equal(recall_bits(asked, X), X) and torch.equal(recall_bits(X, X), X)
    for corruption in (0.0, 0.2):
        generator = torch.Generator().manual_seed(0)
        curve = capacity_curve(d, [5], corruption=corruption, generator=generator, repetitions=1, dtype=dtype)
        assert curve.wrong_bits.max() == 0


@pytest.mark.parametrize(
    ("kind", "degree", "d", "few", "many"),
    [("linear", 2, 100, 4, 100), ("polynomial", 3, 60, 30, 3000), ("exponential", 2, 12, 4, 4000)],
)
def test_a_memory_holds_few_patterns_and_not_many(kind, degree, d, few, many):
    curve = capacity_curve(d, [few, many], kind=kind, degree=degree, generator=torch.Generator().manual_seed(0))
    assert curve.wrong_patterns.shape == curve.wrong_bits.shape == (2, 5)
    assert curve.wrong_patterns[0].mean() < 0.2 and curve.wrong_patterns[1].mean() > 0.8
    assert (curve.wrong_bits <= curve.wrong_patterns).all()


def test_no_error_of_the_exponential_memory_is_seen_at_forty_bits():
    curve = capacity_curve(40, [20_000], repetitions=1, generator=torch.Generator().manual_seed(0))
    assert curve.wrong_bits.sum() == 0


def test_bits_err_as_the_gaussian_estimate_says():
    """Linear memory, d = N = 400: the chance of a wrong bit is Φ(−√(399/399)) = 0.1587; 25 000 bits, five sigma."""
    curve = capacity_curve(400, [400], kind="linear", generator=torch.Generator().manual_seed(1), repetitions=10)
    assert curve.wrong_bits.mean().item() == pytest.approx(0.1587, abs=0.006)


def test_corruption_flips_its_share_and_is_repaired():
    generator = torch.Generator().manual_seed(0)
    X = torch.ones(6, 50)
    flipped = _noisy(X, 0.2, generator) != X
    assert (flipped.sum(-1) == 10).all() and not (flipped == flipped[:1]).all()
    repaired = capacity_curve(50, [10], corruption=0.2, generator=generator)
    assert repaired.wrong_bits.max() == 0
    overloaded = capacity_curve(50, [1], kind="linear", corruption=0.4, generator=generator, repetitions=3)
    assert overloaded.wrong_bits.max() == 0, "one pattern is repaired from two fifths of wrong bits"


def test_two_steps_are_two_calls():
    rng = torch.Generator().manual_seed(0)
    X, state = (1.0 - 2 * (torch.rand(n, 31, generator=rng) < 0.5).to(F64) for n in (5, 8))
    once = recall_bits(state, X, "linear")
    twice = recall_bits(once, X, "linear")
    assert torch.equal(recall_bits(state, X, "linear", steps=2), twice) and not torch.equal(once, twice)
    curve = lambda steps: capacity_curve(
        100, [10], kind="linear", corruption=0.2, steps=steps, generator=torch.Generator().manual_seed(0)
    )
    assert curve(2).wrong_bits.mean() < 0.5 * curve(1).wrong_bits.mean()


def test_sizes_of_numpy_are_integers():
    two = np.int64(2)
    X, state = torch.ones(3, 4), torch.ones(2, 4)
    assert torch.equal(retrieve(state, X, two, "polynomial", 1.0, two), retrieve(state, X, 2, "polynomial", 1.0, 2))
    assert torch.equal(energy(state, X, "polynomial", 1.0, two), energy(state, X, "polynomial", 1.0, 2))
    assert torch.equal(recall_bits(state, X, "polynomial", two, steps=two), state)
    sizes = dict(d=two, counts=np.array([1, 2]), degree=two, steps=two, probes=two, repetitions=two)
    curve = capacity_curve(**sizes, kind="polynomial", generator=torch.Generator().manual_seed(0))
    assert curve.counts.tolist() == [1, 2] and curve.wrong_bits.shape == (2, 2)


def test_the_same_generator_gives_the_same_curve():
    first, second = (capacity_curve(20, [5, 9], generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("call", [energy, update, retrieve])
@pytest.mark.parametrize(
    "wrong",
    [
        {"state": torch.ones(2, 4)},
        {"state": torch.ones(3)},
        {"state": torch.ones(2, 3, dtype=F64)},
        {"state": torch.ones(6, 2, 3)},
        {"patterns": torch.ones(0, 3)},
        {"kind": "softmax"},
        {"beta": 0.0},
        {"degree": 1},
    ],
)
def test_what_is_wrong_is_named(call, wrong):
    with refused(*wrong):
        call(**({"state": torch.ones(2, 3), "patterns": torch.ones(5, 3)} | wrong))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda s, x: retrieve(s, x, -1), "steps"),
        (lambda s, x: retrieve(s, x, 2, gain=2.0), "gain"),
        (lambda s, x: retrieve(s, x, 2, path="no"), "path"),
        (lambda s, x: update(s, x, gain=0), "gain"),
        (lambda s, x: jacobian(s, x, -1.0), "beta"),
        (lambda s, x: separation(x[:1]), "patterns"),
        (lambda s, x: recall_bits(s, 0.5 * x), "patterns"),
        (lambda s, x: recall_bits(0 * s, x), "state"),
        (lambda s, x: recall_bits(s, x, "log-sum-exp"), "kind"),
        (lambda s, x: recall_bits(s, x, steps=0), "steps"),
    ],
)
def test_bad_options_are_named(call, argument):
    with refused(argument):
        call(torch.ones(2, 3), torch.ones(5, 3))


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"d": 0}, "d"),
        ({"counts": []}, "counts"),
        ({"counts": [4, 0]}, "counts"),
        ({"counts": 3}, "counts"),
        ({"dtype": torch.int64}, "dtype"),
        ({"probes": 1.5}, "probes"),
        ({"repetitions": -1}, "repetitions"),
        ({"corruption": 0.5}, "corruption"),
        ({"kind": "log-sum-exp"}, "kind"),
    ],
)
def test_capacity_curve_names_what_is_wrong(change, argument):
    with refused(argument):
        capacity_curve(**({"d": 5, "counts": [3], "generator": torch.Generator()} | change))


@pytest.mark.parametrize(("beta", "call"), [(5e-324, "energy"), (1e38, "update"), (1e38, "jacobian")])
def test_a_sharpness_at_which_nothing_can_be_computed_is_named(beta, call):
    import gbattn.hopfield as hopfield

    state, patterns = 3 * torch.ones(1, 4), 3 * torch.ones(2, 4)
    with refused("beta"):
        getattr(hopfield, call)(state, patterns, beta=beta)
