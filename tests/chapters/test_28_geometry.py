"""Chapter 28: the claims with their mutants, and what a lesson should not carry: gradients, batches, faults."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.geometry import (
    bin_centres,
    donsker_varadhan,
    estimate_information,
    probe_score,
    procrustes_distortion,
    quantize,
    regimes,
    soft_bins,
)
from gbattn.language_model import LanguageModel, ModelConfig

F64 = torch.float64


class Points:
    """Points X (n, p), the same points elsewhere Y (n, q), and a third set."""

    def __init__(self, seed, n, p, q):
        self.rng = torch.Generator().manual_seed(seed)
        self.n, self.p, self.q = n, p, q
        self.X, self.Y, self.Z = (self.normal(n, d) for d in (p, q, q))

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.rng, dtype=F64)

    def rotation(self, d):
        return torch.linalg.qr(self.normal(d, d)).Q


points = st.builds(Points, st.integers(0, 2**31), st.integers(4, 9), st.integers(1, 4), st.integers(1, 4))


def sphere(X):
    X = X - X.mean(0)
    return X / X.norm()


def distortion_sides(p, norm):
    """Each entry of left is at most that of right; equalities appear with both signs."""
    D = procrustes_distortion(p.X, p.Y)
    formula = (1 - torch.linalg.matrix_norm(sphere(p.X).T @ sphere(p.Y), norm)).clamp_min(0).sqrt()
    moved = 3.7 * p.Y @ p.rotation(p.q) + p.normal(p.q)
    same = torch.stack([D, procrustes_distortion(p.Y, p.X), procrustes_distortion(p.X, moved)])
    formulas = torch.stack([formula, D, D])
    own = procrustes_distortion(p.Y, moved)[None]
    width = max(p.p, p.q)
    X, Y = (torch.nn.functional.pad(sphere(Z), (0, width - Z.shape[1])) for Z in (p.X, p.Y))
    others = torch.stack([(X @ p.rotation(width) - Y).norm() / math.sqrt(2) for _ in range(20)])
    triangle = procrustes_distortion(p.X, p.Z) + procrustes_distortion(p.Z, p.Y)
    left = torch.cat([same, -same, own, D.expand(20), D[None], D[None]])
    return left, torch.cat([formulas, -formulas, 0 * own, others, triangle[None], torch.ones(1, dtype=F64)])


@claim(points, tolerance=1e-11, relation="<=", mutant=lambda p: distortion_sides(p, 2))
def test_thm_distortion(p):
    """D is the formula, a metric blind to place, size and rotation, and no R does better. Mutant: the spectral norm."""
    return distortion_sides(p, "nuc")


def collapsed_sides(p, root):
    n = p.n + 3
    angles = 2 * math.pi * torch.arange(n, dtype=F64) / n
    circle = torch.stack([angles.cos(), angles.sin()], 1) @ p.rotation(2)
    alone = (torch.arange(n) == 0).to(F64)[:, None]
    far = procrustes_distortion(circle, 1e-6 * alone + 5)
    robust = procrustes_distortion(alone, alone.clone())
    jittered = circle + 1e-3 * p.normal(n, 2)
    fragile = (procrustes_distortion(circle, jittered) > 1e-6).to(F64)
    exact = torch.tensor(1 - 1 / root(n - 1), dtype=F64).sqrt()
    own = procrustes_distortion(circle, circle.clone())
    return torch.stack([far, robust, fragile, own]), torch.stack([exact, 0 * exact, 0 * exact + 1, 0 * exact])


@claim(points, tolerance=1e-9, mutant=lambda p: collapsed_sides(p, float))
def test_prop_robust_wrong(p):
    """A collapsed embedding is robust and as far from a circle as claimed. Mutant: n − 1 for its root."""
    return collapsed_sides(p, math.sqrt)


def probe_sides(p, of_share):
    """1 − D² of random states, of states that are the fit itself, and of a squashed isotropic truth."""
    Q = torch.linalg.qr(p.X - p.X.mean(0)).Q
    fit = Q @ (Q.T @ sphere(p.Y))
    share = fit.square().sum()
    states = p.X, fit @ p.rotation(p.q)
    left = torch.stack([1 - procrustes_distortion(S, p.Y) ** 2 for S in states])
    equal = 1 - procrustes_distortion(fit, p.Y) ** 2
    bound = of_share(share)
    return torch.cat([left, -equal[None]]), torch.stack([bound, bound, -bound])


@claim(points, tolerance=1e-9, relation="<=", mutant=lambda p: probe_sides(p, lambda share: share))
def test_thm_probe_bound(p):
    """1 − D² is at most the root of the probe's R², with equality for the fit itself. Mutant: R² for its root."""
    return probe_sides(p, torch.sqrt)


def bins_sides(p, decode):
    K, d, n = p.n, min(p.p, 2), 4 * p.n
    nodes, weights = (torch.tensor(x) for x in np.polynomial.legendre.leggauss(3))
    x = ((torch.arange(K, dtype=F64)[:, None] + (nodes + 1) / 2) / K).flatten()
    mse = d * (weights.repeat(K) / (2 * K) * (x - decode(quantize(x, K), K)) ** 2).sum()
    edges = torch.rand(K - 1, generator=p.rng, dtype=F64).sort().values
    widths = torch.diff(edges, prepend=torch.zeros(1, dtype=F64), append=torch.ones(1, dtype=F64))
    elsewhere = d * (widths**3).sum() / 12  # any K intervals, each read at its middle
    grid = (torch.arange(n, dtype=F64) + 0.5) / n
    grid = torch.cartesian_prod(*[grid] * d).reshape(-1, d)
    found = procrustes_distortion(grid, decode(quantize(grid, K), K))
    exact = math.sqrt(1 - math.sqrt((1 - K**-2) / (1 - n**-2)))  # 1 − n⁻²: the grid is finite
    want = torch.tensor([d / (12 * K**2), -d / (12 * K**2), exact, -exact], dtype=F64)
    return torch.stack([mse, -mse, found, -found, mse]), torch.cat([want, elsewhere[None]])


def centres(tokens, K):
    return (tokens.to(F64) + 0.5) / K


@claim(points, tolerance=1e-9, relation="<=", mutant=lambda p: bins_sides(p, lambda tokens, K: tokens.to(F64) / K))
def test_prop_bins(p):
    """K bins have the error d/(12K²), the least of any K intervals, and D as claimed. Mutant: read at lower edges."""
    return bins_sides(p, centres)


def order_sides(p, width):
    """Loss, hidden states and gradient of a model, and of its relabelled copy on relabelled bins."""
    K, T = 6 + p.p, 5
    config = ModelConfig(vocab_size=K, max_length=T, d_model=8, n_layers=1, n_heads=2, tie_embeddings=False)
    model, copy = (LanguageModel(config, seed=p.n, dtype=F64) for _ in range(2))
    label = torch.randperm(K, generator=p.rng)
    with torch.no_grad():
        for table, relabelled in ((model.token_embedding, copy.token_embedding), (model.head, copy.head)):
            table.weight.normal_(generator=p.rng)
            relabelled.weight[label] = table.weight
    tokens = torch.randint(K, (3, T + 1), generator=p.rng)
    sides = []
    for net, bins in ((model, tokens), (copy, label[tokens])):
        found = net.outputs(bins[:, :-1])
        targets = soft_bins(centres(bins[:, 1:], K), K, width)
        loss = -(targets * found.logits.log_softmax(-1)).sum(-1).mean()
        loss.backward()
        gradient = net.blocks[0].attention.query.weight.grad
        parts = loss[None], found.hidden_states[-1], gradient
        sides.append(torch.cat([part.detach().flatten() for part in parts]))
    return tuple(sides)


@claim(points, tolerance=1e-10, mutant=lambda p: order_sides(p, 0.3), examples=15)
def test_prop_no_order(p):
    """A relabelled model on relabelled bins has the same loss, states and gradients. Mutant: soft bins."""
    return order_sides(p, 0.0)


def cap_sides(p, logarithm):
    """Estimates of critics as they come and exaggerated, from all pairs of a batch, and log m."""
    n = p.n + 3
    T = p.normal(n, n) + 5 * torch.eye(n, dtype=F64)
    left = []
    for size in (0.1, 1.0, 10.0, 1000.0):
        scores = size * T
        if logarithm:
            left.append(donsker_varadhan(scores.diagonal(), scores.flatten()))
        else:
            left.append(scores.diagonal().mean() - scores.mean())
    return torch.stack(left), torch.full((4,), math.log(n), dtype=F64)


@claim(points, tolerance=1e-11, relation="<=", mutant=lambda p: cap_sides(p, False))
def test_prop_cap(p):
    """From all m² pairs no estimate exceeds log m. Mutant: a mean for the logarithm of a mean of exponentials."""
    return cap_sides(p, True)


def test_without_a_pairs_own_score_among_the_draws_there_is_no_cap():
    scores = 50 * torch.eye(6, dtype=F64)
    others = scores[~torch.eye(6, dtype=bool)]
    assert torch.isclose(donsker_varadhan(scores.diagonal(), others), torch.tensor(50.0, dtype=F64))


# ---------------------------------------------------------------- the functions


def planted(seed, n=400):
    """A square, and states that miss it in no way, and in one each, in the order of `regimes`."""
    rng = torch.Generator().manual_seed(seed)
    square = torch.rand(n, 2, generator=rng, dtype=F64)
    patch = (3 * square).long() @ torch.tensor([3, 1])
    places = torch.randn(9, 8, generator=rng, dtype=F64)[patch]
    places[:, :2] += square
    noise = torch.randn(n, 16, generator=rng, dtype=F64)
    faithful = torch.cat([square, 0.02 * noise], 1)
    return square, (faithful, places, square * torch.tensor([1, 0.1]), noise)


@pytest.mark.parametrize("seed", range(5))
def test_each_regime_is_found_where_it_is_planted_and_nowhere_else(seed):
    square, cases = planted(seed)
    found = torch.tensor([regimes(states, square) for states in cases])
    own = torch.cat([torch.zeros(1, 3), torch.eye(3)]).bool()
    assert found[own].min() > 0.5 > found[~own].max()


def test_regimes_do_not_see_place_size_or_rotation():
    square, cases = planted(7, 60)
    turn = Points(0, 4, 2, 2).rotation(16)
    for states in (cases[0][:, 2:], cases[3]):
        moved = 5 * states @ turn + 3
        assert torch.allclose(torch.stack(regimes(moved, square)), torch.stack(regimes(states, square)))
    assert torch.allclose(torch.stack(regimes(square, square)), torch.zeros(3, dtype=F64), atol=1e-12)


def test_other_directions_hide_a_compression():
    """The limit that the definition has: what else the states hold counts as a direction, too."""
    square, cases = planted(3)
    wide = torch.cat([cases[2], 0.3 * cases[3][:, :3]], 1)
    assert regimes(cases[2], square).compression > 0.9 and regimes(wide, square).compression < 0.1


def gaussians(rho, n, rng):
    x, e = torch.randn(2, 3, n, 1, generator=rng, dtype=F64)
    return x, rho * x + math.sqrt(1 - rho**2) * e


def test_a_trained_critic_finds_the_information_on_fresh_pairs():
    rng = torch.Generator().manual_seed(0)
    for rho in (0.0, 0.9):
        options = dict(batch=64, steps=200, width=16, lr=1e-2, generator=rng)
        found = estimate_information(*gaussians(rho, 1000, rng), *gaussians(rho, 1280, rng), **options)
        assert found.shifted.shape == found.all_pairs.shape == (3, 20)
        assert abs(found.shifted.mean() + 0.5 * math.log(1 - rho**2)) < 0.12
        assert (found.all_pairs < math.log(64)).all()


def test_a_critic_scored_on_its_own_pairs_finds_what_is_not_there():
    rng = torch.Generator().manual_seed(1)
    x, y = gaussians(0, 40, rng)
    options = dict(batch=40, steps=300, lr=1e-2, generator=rng)
    assert estimate_information(x, y, x, y, **options).all_pairs.mean() > 0.15  # the mutant: it reads its test
    assert estimate_information(x, y, *gaussians(0, 40, rng), **options).all_pairs.mean() < 0


def test_distortion_is_exact_near_zero_and_gives_the_nuclear_norm_elsewhere():
    p = Points(0, 200, 5, 5)
    moved = 7 * p.X @ p.rotation(5) + 100
    assert procrustes_distortion(p.X, moved) < 1e-13
    near = p.X + 1e-9 * p.normal(200, 5)  # 1 − ‖XᵀY‖ would be lost in rounding
    assert 1e-10 < procrustes_distortion(p.X, near) < 1e-8
    assert procrustes_distortion(1e200 * p.X, 1e-200 * p.Y).isfinite()


def test_distortion_takes_batches_and_has_a_gradient():
    p = Points(1, 6, 3, 2)
    X, Y = p.normal(2, 4, 6, 3), p.normal(2, 4, 6, 2)
    found = procrustes_distortion(X, Y)
    assert found.shape == (2, 4)
    assert torch.allclose(found[1, 2], procrustes_distortion(X[1, 2], Y[1, 2]))
    inputs = p.X.requires_grad_(), p.Y.requires_grad_()
    assert torch.autograd.gradcheck(procrustes_distortion, inputs)


def test_distortion_of_one_number_a_point_is_by_their_correlation():
    p = Points(2, 30, 1, 1)
    correlation = torch.corrcoef(torch.cat([p.X, p.Y], 1).T)[0, 1]
    assert torch.isclose(procrustes_distortion(p.X, p.Y), (1 - correlation.abs()).sqrt())


def test_codewords_and_error_have_the_slope_of_the_rate():
    """Three dimensions, sampled: d/(12K²) within 3 %, and the slope −2/d against the number of codewords."""
    x = torch.rand(100_000, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    bins = [2, 4, 8, 16]
    errors = [(x - centres(quantize(x, K), K)).square().sum(1).mean().item() for K in bins]
    assert all(abs(e * 12 * K**2 / 3 - 1) < 0.03 for e, K in zip(errors, bins))
    slope = np.polyfit([3 * math.log(K) for K in bins], np.log(errors), 1)[0]
    assert abs(slope + 2 / 3) < 0.01


def test_bins_reach_from_edge_to_edge():
    x = torch.tensor([-1.0, 0.0, 0.25, 0.5, 0.999, 1.0, 3.0], dtype=F64)
    assert quantize(x, 4).tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert torch.equal(quantize(bin_centres(torch.arange(256), 256), 256), torch.arange(256))


def test_soft_bins_are_probabilities_around_x_and_at_width_zero_one_hot():
    x = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=F64)
    soft = soft_bins(x, 64, 0.05)
    assert torch.allclose(soft.sum(-1), torch.ones(50, dtype=F64))
    inside = (x > 0.25) & (x < 0.75)
    assert ((soft @ centres(torch.arange(64), 64))[inside] - x[inside]).abs().max() < 1e-3
    assert torch.equal(soft_bins(x, 64, 0).argmax(-1), quantize(x, 64))
    assert torch.equal(soft_bins(x, 64, 1e-4).argmax(-1), quantize(x, 64))


def test_a_probe_reads_linear_maps_and_nothing_from_noise():
    p = Points(3, 400, 4, 2)
    truth = p.X @ p.normal(4, 2) + 3
    assert torch.isclose(probe_score(p.X[:200], truth[:200], p.X[200:], truth[200:]), torch.ones((), dtype=F64))
    noise = p.normal(400, 150)
    fitted = probe_score(noise[:200], truth[:200], noise[:200], truth[:200])
    held_out = probe_score(noise[:200], truth[:200], noise[200:], truth[200:])
    assert fitted > 0.6 and held_out < 0


@pytest.mark.parametrize(("rho", "bound"), [(0.3, 0.049), (0.7, 0.342), (0.9, 0.829)])
def test_the_optimal_critic_of_two_gaussians_reaches_their_information(rho, bound):
    rng = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 100_000, generator=rng, dtype=F64)
    y = rho * x + math.sqrt(1 - rho**2) * noise
    shuffled = y[torch.randperm(len(y), generator=rng)]
    information = -0.5 * math.log(1 - rho**2)

    def critic(x, y):
        return information - (rho**2 * (x**2 + y**2) - 2 * rho * x * y) / (2 * (1 - rho**2))

    found = donsker_varadhan(critic(x, y), critic(x, shuffled))
    assert abs(found - information) < 0.03 and abs(found - bound) < 0.03
    assert donsker_varadhan(0.5 * critic(x, y), 0.5 * critic(x, shuffled)) < found


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: procrustes_distortion(torch.ones(3), torch.ones(3, 1)), "X"),
        (lambda: procrustes_distortion(torch.ones(3, 1).long(), torch.ones(3, 1)), "X"),
        (lambda: procrustes_distortion(torch.rand(3, 1), torch.rand(4, 1)), "Y"),
        (lambda: procrustes_distortion(torch.rand(2, 3, 1), torch.rand(3, 1)), "Y"),
        (lambda: procrustes_distortion(torch.rand(3, 1), torch.ones(3, 1)), "Y"),
        (lambda: procrustes_distortion(torch.rand(3, 1) / 0, torch.rand(3, 1)), "X"),
        (lambda: quantize(torch.rand(3), 0), "bins"),
        (lambda: quantize(torch.ones(3).long(), 4), "x"),
        (lambda: bin_centres(torch.rand(3), 4), "tokens"),
        (lambda: soft_bins(torch.rand(3), 4, -1.0), "width"),
        (lambda: probe_score(*[torch.rand(3, 2)] * 3, torch.rand(4, 2)), "test_truth"),
        (lambda: probe_score(*[torch.rand(3, 2)] * 2, torch.rand(3, 1), torch.rand(3, 2)), "test_states"),
        (lambda: probe_score(torch.rand(3, 2), torch.ones(3, 1), torch.rand(3, 2), torch.ones(3, 1)), "test_truth"),
        (lambda: donsker_varadhan(torch.rand(0), torch.rand(2)), "joint_scores"),
        (lambda: regimes(torch.rand(9, 2), torch.rand(9, 2)), "states"),
        (lambda: regimes(torch.ones(12, 2), torch.rand(12, 2)), "states"),
        (lambda: regimes(torch.rand(12, 2), torch.rand(12, 1)), "truth"),
        (lambda: regimes(torch.rand(12, 2), torch.rand(11, 2)), "truth"),
        (lambda: estimate_information(*[torch.rand(6, 1)] * 4, batch=1), "batch"),
        (lambda: estimate_information(*[torch.rand(6, 1)] * 4, batch=7), "batch"),
        (lambda: estimate_information(torch.rand(6, 1), torch.rand(5, 1), *[torch.rand(6, 1)] * 2, batch=2), "y"),
        (lambda: estimate_information(*[torch.rand(6, 1)] * 2, torch.rand(6, 2), torch.rand(6, 1), batch=2), "test_x"),
        (lambda: donsker_varadhan(torch.rand(2), torch.rand(2).double()), "product_scores"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
