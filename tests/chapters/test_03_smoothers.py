"""Chapters 3 and 3a: the claims with their mutants, and what a lesson should not carry: faults, dtypes, batches."""

import itertools
import math
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.least_squares import hat_matrix, least_squares
from gbattn.smoothers import (
    bias_variance,
    degrees_of_freedom,
    kernel_smoother,
    leave_one_out,
    sinkhorn,
    softmax_weights,
)

F64 = torch.float64


class Problem:
    """Drawn rows X (n, d), values Y (n, c), a bandwidth, and a generator for more."""

    def __init__(self, seed, n, d, c, bandwidth):
        self.rng = torch.Generator().manual_seed(seed)
        self.n, self.d, self.h = n, d, bandwidth
        self.X, self.Y, self.X_query = self.normal(n, d), self.normal(n, c), self.normal(4, d)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def attention(self, shared=False):
        """An attention map with independent or shared queries and keys, scores of size about two."""
        q, k = 1.5 * self.normal(2, self.n, 4)
        return softmax_weights(k if shared else q, k)


def problems(n=(3, 14), d=(1, 3), bandwidth=(0.4, 2.0)):
    return st.builds(
        Problem, st.integers(0, 2**31), st.integers(*n), st.integers(*d), st.integers(1, 3), st.floats(*bandwidth)
    )


def nadaraya_watson(X, X_query, h):
    """The definition, entry by entry."""
    rows = []
    for x in X_query:
        weights = torch.tensor([math.exp(-((x - other) ** 2).sum().item() / (2 * h * h)) for other in X], dtype=F64)
        rows.append(weights / weights.sum())
    return torch.stack(rows)


def both_forms(p, keys):
    """Distances against inner products with the norms put in; and, on the given keys, without."""
    shifted = (p.X_query @ p.X.T - p.X.square().sum(1) / 2) / p.h**2
    left = torch.cat([shifted.softmax(-1), softmax_weights(p.X_query, keys, p.h**2)])
    right = torch.cat([nadaraya_watson(p.X, p.X_query, p.h), nadaraya_watson(keys, p.X_query, p.h)])
    return torch.cat([left, kernel_smoother(p.X, p.h, p.X_query)]), torch.cat([right, right[:4]])


@claim(problems(), tolerance=1e-10, mutant=lambda p: both_forms(p, p.X))
def test_prop_gaussian_is_softmax(p):
    """Attention is the Gaussian smoother, on keys of one norm (any norm). Mutant: keys of several norms."""
    return both_forms(p, 1.3 * torch.nn.functional.normalize(p.X, dim=-1))


def sign_noise(n):
    """All 2ⁿ sign vectors as columns: an expectation over them is exact for independent noise of variance one."""
    return torch.tensor(list(itertools.product((-1.0, 1.0), repeat=n)), dtype=F64).T


def risks(p, noise):
    S, sigma = p.attention(), 0.7
    fitted = S @ (p.Y[:, :1] + sigma * sign_noise(p.n))  # (n, draws)
    found = bias_variance(S, p.Y[:, :1], noise)
    left = [found.bias[:, 0], found.variance, found.bias[:, 0] ** 2 + found.variance, found.risk[None]]
    errors = (fitted - p.Y[:, :1]).square().mean(1)
    right = [fitted.mean(1) - p.Y[:, 0], fitted.var(1, correction=0), errors, errors.mean()[None]]
    return torch.cat(left), torch.cat(right)


@claim(problems(n=(3, 9)), tolerance=1e-10, mutant=lambda p: risks(p, 0.7**2))
def test_prop_bias_variance(p):
    """Bias and variance in closed form against an exact expectation. Mutant: σ² handed in for σ."""
    return risks(p, 0.7)


NODES, NODE_WEIGHTS = (torch.tensor(a) for a in np.polynomial.legendre.leggauss(300))


def averages(f, density, h, x, edge):
    """f_h at x (n,) by quadrature over z in [−10, 10], at an edge at 0 over z in [−x/h, 10]."""
    low = (-x / h).clamp(min=-10) if edge else torch.full_like(x, -10)
    z = low[:, None] + (10 - low[:, None]) * (NODES + 1) / 2  # (n, 300)
    at = x[:, None] + h * z
    w = NODE_WEIGHTS * torch.exp(-(z**2) / 2) * density(at)
    return (f(at) * w).sum(1) / w.sum(1)


def residual_after(rounds, f, density, h, edge):
    """The function (I − S)^rounds f."""
    for _ in range(rounds):
        f = lambda x, f=f: f(x) - averages(f, density, h, x.flatten(), edge).view_as(x)
    return f


def population_bias(f, density, h, edge, rounds=1):
    return -residual_after(rounds, f, density, h, edge)(torch.zeros(1, dtype=F64))[0]


def kernel_bias(p, design):
    a, b, c, s = p.normal(4)
    f, density = lambda x: torch.sin(a * x) + b * x + c * x**2, lambda x: torch.exp(s * x)
    h = 1e-3
    left = [
        population_bias(f, density, h, edge=False) / h**2,
        population_bias(f, density, h / 100, edge=True) * 100 / h,
    ]
    return torch.stack(left), torch.stack([c + design * (a + b) * s, math.sqrt(2 / math.pi) * (a + b)])


@claim(problems(), tolerance=1e-3, mutant=lambda p: kernel_bias(p, 0))
def test_thm_kernel_bias(p):
    """Leading bias inside and at an edge, by quadrature at small h. Mutant: the design term forgotten."""
    return kernel_bias(p, 1)


def two_rounds_bias(p, rounds=2):
    """Bias inside over h⁴ and at an edge over h, against −B(Bf) and the constant of the edge, for p'/p = s."""
    a, b, c, d, s = p.normal(5)
    f, density = lambda x: torch.sin(a * x) + b * x + c * x**2 + d * x**4, lambda x: torch.exp(s * x)
    inside, near = 0.005, 1e-4
    left = [
        population_bias(f, density, inside, edge=False, rounds=rounds) / inside**4,
        population_bias(f, density, near, edge=True, rounds=rounds) / near,
    ]
    return torch.stack(left), torch.stack([-(6 * d - s * a**3 + 2 * c * s**2), 0.3793 * (a + b)])


@claim(problems(), tolerance=2e-3, mutant=lambda p: two_rounds_bias(p, rounds=1))
def test_prop_two_rounds_bias(p):
    """Leading bias of two rounds inside and at an edge, by quadrature at small h. Mutant: one round, of order h²."""
    return two_rounds_bias(p)


def test_two_rounds_shrink_the_edge_and_do_not_mend_it():
    """The constant of the edge, b(0) less the mean of b over the neighbours; one round has 0.798."""
    s = torch.linspace(0, 10, 100_001, dtype=F64)
    phi = torch.exp(-(s**2) / 2) / math.sqrt(2 * math.pi)
    mean_of_b = torch.trapezoid(2 * phi * phi / torch.special.ndtr(s), s)
    assert abs(math.sqrt(2 / math.pi) - mean_of_b - 0.3793) < 1e-4


def local_line(p, degree):
    """S y against a weighted regression around each query, and against the affine functions."""
    X, h = p.X, p.h + 0.6
    S = kernel_smoother(X, h, p.X_query, degree=degree)
    w = nadaraya_watson(X, p.X_query, h)
    refits = [least_squares(X, p.Y, intercept=True, weights=row).predict(x[None])[0] for row, x in zip(w, p.X_query)]
    ones = torch.ones(len(S), 1, dtype=F64)
    return torch.cat([S @ p.Y, S @ X, S.sum(1, keepdim=True)], 1), torch.cat([torch.stack(refits), p.X_query, ones], 1)


@pytest.mark.parametrize("seed", range(8))
def test_local_lines_are_a_tilted_softmax(seed):
    """The weighted line, exact on affine functions; averages are neither."""
    p = Problem(seed, n=8 + seed, d=1 + seed % 2, c=2, bandwidth=0.4 + 0.2 * seed)
    torch.testing.assert_close(*local_line(p, 1), atol=1e-6, rtol=0)
    averages, lines = local_line(p, 0)
    assert (averages - lines).abs().max() > 0.01


def furthest(p, S):
    """Outputs in a random direction against the furthest value."""
    reach = p.Y @ p.normal(p.Y.shape[1])
    return S @ reach, reach.max().expand(p.n)


def two_looks(A):
    return 2 * A - A @ A


@claim(problems(), tolerance=1e-10, relation="<=", mutant=lambda p: furthest(p, two_looks(p.attention())))
def test_thm_hull(p):
    """No output reaches further than the furthest value. Mutant: two looks."""
    return furthest(p, p.attention())


def spectrum(p, shared):
    """Imaginary parts, bounds on the real parts, and the residual in the length of D."""
    k = p.normal(p.n, 4)
    q = k if shared else p.normal(p.n, 4)
    K = torch.exp(q @ k.T)
    D, A = K.sum(1), softmax_weights(q, k, 1.0)
    values, r = torch.linalg.eigvals(A), p.Y[:, 0]
    length = lambda r: (D * r.square()).sum().sqrt()[None]
    left = [values.imag.abs(), -values.real, values.real, length(r - A @ r)]
    right = [torch.zeros(p.n, dtype=F64), torch.zeros(p.n, dtype=F64), torch.ones(p.n, dtype=F64), length(r)]
    return torch.cat(left), torch.cat(right)


@claim(problems(), tolerance=1e-7, relation="<=", mutant=lambda p: spectrum(p, False))
def test_prop_spectrum(p):
    """Shared queries and keys: eigenvalues real, in [0, 1], and no look lengthens r. Mutant: independent ones."""
    return spectrum(p, True)


def test_symmetric_scores_without_definiteness_have_real_eigenvalues_down_to_minus_one():
    values = torch.linalg.eigvals(torch.tensor([[0.0, 6.0], [6.0, 0.0]], dtype=F64).softmax(-1))
    assert values.imag.abs().max() == 0 and -1 <= values.real.min() < -0.99


def shrinkage(p, square):
    """Size of a mode after three looks, by the loop and by the formula."""
    S, nu = p.attention(), 0.9
    values, vectors = torch.linalg.eig(S)
    left, right = [], []
    for value, u in zip(values, vectors.T):
        r = u
        for _ in range(3):
            r = r - nu * (S.to(r.dtype) @ r)
        left.append(r.abs().square().sum())
        right.append((1 - 2 * nu * value.real + square * nu**2 * value.abs() ** 2) ** 3)
    return torch.stack(left), torch.stack(right)


@claim(problems(), tolerance=1e-8, mutant=lambda p: shrinkage(p, 0))
def test_prop_no_shrinkage(p):
    """A mode's factor is |1 − νλ|. Mutant: its second-order term forgotten."""
    return shrinkage(p, 1)


def balanced(p, K):
    D = K.sum(1, keepdim=True)
    P, Q = sinkhorn(K / D, tolerance=1e-12), sinkhorn(K, tolerance=1e-12)
    one, zero = torch.ones(p.n, dtype=F64), torch.zeros(p.n, dtype=F64)
    values = torch.linalg.eigvalsh((P + P.T) / 2)
    left = [(P - P.T).flatten(), (P - Q).flatten(), P.sum(0), P.sum(1), values.clamp_max(0), values.clamp_min(1)]
    right = [torch.zeros(2 * p.n**2, dtype=F64), one, one, zero, one]
    return torch.cat(left), torch.cat(right)


@pytest.mark.parametrize("seed", range(8))
def test_balancing_a_symmetric_kernel(seed):
    """Symmetric, the same from A and from K, eigenvalues in [0, 1]; none of an asymmetric kernel is symmetric."""
    p = Problem(seed, 4 + seed, 2, 1, 1.0)
    k = p.normal(p.n, 3)
    torch.testing.assert_close(*balanced(p, torch.exp(k @ k.T / 2)), atol=1e-8, rtol=0)
    left, right = balanced(p, torch.exp(p.normal(p.n, 3) @ p.normal(3, p.n)))
    assert (left - right).abs().max() > 1e-2


def left_out(p, error):
    """The shortcut and n refits: averages, attention by any scores, local lines, ridge."""
    h, scores, X = p.h + 0.6, p.normal(p.n, p.n), p.X[:, :1]
    left = [error(S, p.Y) for S in (kernel_smoother(X, h), scores.softmax(-1), kernel_smoother(X, h, degree=1),
                                    hat_matrix(X, ridge=0.5))]  # fmt: skip
    right = [[], [], [], []]
    for i in range(p.n):
        rest = torch.arange(p.n) != i
        guesses = (
            kernel_smoother(X[rest], h, X[i : i + 1]) @ p.Y[rest],
            scores[i : i + 1, rest].softmax(-1) @ p.Y[rest],
            kernel_smoother(X[rest], h, X[i : i + 1], degree=1) @ p.Y[rest],
            least_squares(X[rest], p.Y[rest], ridge=0.5).predict(X[i : i + 1]),
        )
        for errors, guess in zip(right, guesses):
            errors.append(p.Y[i] - guess[0])
    return torch.stack(left), torch.stack([torch.stack(errors) for errors in right])


@pytest.mark.parametrize("seed", range(8))
def test_leave_one_out_is_refitting(seed):
    """Errors without row i, by refitting: averages, any softmax, lines, ridge. The plain residual is something else."""
    p = Problem(seed, 8 + seed % 6, 1 + seed % 3, 2, 0.4 + 0.2 * seed)
    torch.testing.assert_close(*left_out(p, leave_one_out), atol=1e-6, rtol=0)
    left, right = left_out(p, lambda S, Y: Y - S @ Y)
    assert (left - right).abs().max() > 1e-2


def test_leave_one_out_is_not_for_two_looks():
    """The chapter says so; here it is seen."""
    p = Problem(0, 12, 1, 1, 0.5)
    refits = []
    for i in range(12):
        rest = torch.arange(12) != i
        inner, outer = kernel_smoother(p.X[rest], 0.5), kernel_smoother(p.X[rest], 0.5, p.X[i : i + 1])
        refits.append(p.Y[i] - (outer @ (2 * p.Y[rest] - inner @ p.Y[rest]))[0])
    shortcut = leave_one_out(two_looks(kernel_smoother(p.X, 0.5)), p.Y)
    assert (shortcut - torch.stack(refits)).abs().max() > 1e-2


def second_look(p, pays):
    """Risk of two looks less that of one, by bias_variance, against the formula summed over modes."""
    Q = torch.linalg.qr(p.normal(p.n, p.n)).Q
    values = torch.rand(p.n, generator=p.rng, dtype=F64)
    S, sigma = Q * values @ Q.T, 0.6
    f = p.Y[:, :1]
    change = bias_variance(two_looks(S), f, sigma).risk - bias_variance(S, f, sigma).risk
    total = (Q.T @ f)[:, 0] ** 2 + sigma**2
    ideal = 1 - sigma**2 / total
    modes = total * values * (1 - values) * (pays(values) - 2 * ideal)
    return change[None], (modes.sum() / p.n)[None]


@claim(problems(), tolerance=1e-10, mutant=lambda p: second_look(p, lambda v: 2 * v))
def test_prop_second_look_pays(p):
    """What a second look changes, mode by mode. Mutant: the multiplier of one look for the mean of the two."""
    return second_look(p, lambda v: v * (3 - v))


def test_a_second_look_at_the_best_multiplier_never_pays():
    best = torch.linspace(0.01, 0.99, 50, dtype=F64)
    risk = lambda share: (share - 1) ** 2 * best / (1 - best) + share**2  # noise 1
    assert (risk(2 * best - best**2) > risk(best)).all()


# ---------------------------------------------------------------- batches, precision, gradients


def test_a_batch_is_its_parts_and_bandwidths_lead():
    X = torch.randn(2, 3, 9, 2, dtype=F64)
    X_query, h = torch.randn(2, 3, 4, 2, dtype=F64), torch.tensor([0.5, 1.0], dtype=F64)
    for degree in (0, 1):
        S = kernel_smoother(X, h, X_query, degree=degree)
        assert S.shape == (2, 2, 3, 4, 9)
        single = kernel_smoother(X[1, 2], 1.0, X_query[1, 2], degree=degree)
        torch.testing.assert_close(S[1, 1, 2], single, atol=1e-10, rtol=0)
    maps = softmax_weights(X_query, X, h)
    assert maps.shape == (2, 2, 3, 4, 9)
    torch.testing.assert_close(maps[0, 1, 0], softmax_weights(X_query[1, 0], X[1, 0], 0.5))
    torch.testing.assert_close(softmax_weights(X_query, X), softmax_weights(X_query, X, math.sqrt(2)))
    S, Y = kernel_smoother(X[0], h), torch.randn(3, 9, 2, dtype=F64)
    assert degrees_of_freedom(S).shape == (2, 3)
    found = bias_variance(S, Y, 0.1)
    assert found.bias.shape == (2, 3, 9, 2) and found.variance.shape == (2, 3, 9) and found.risk.shape == (2, 3)
    assert leave_one_out(S, Y).shape == (2, 3, 9, 2)
    S = kernel_smoother(X[0], h + 1)  # an outlier that hardly listens to others is balanced slowly
    torch.testing.assert_close(sinkhorn(S)[1, 2], sinkhorn(S[1, 2]), atol=1e-9, rtol=0)


@pytest.mark.parametrize("degree", [0, 1])
def test_a_recipe_is_a_partial(degree):
    recipe = partial(kernel_smoother, bandwidth=0.7, degree=degree)
    X = torch.randn(8, 2, dtype=F64)
    assert torch.equal(recipe(X), kernel_smoother(X, 0.7, degree=degree))


@pytest.mark.parametrize("degree", [0, 1])
def test_single_precision_and_a_far_origin(degree):
    """Moving all rows by a million bandwidths changes nothing but what float64 cannot hold of the rows."""
    X = torch.randn(40, 2, dtype=F64)
    exact = kernel_smoother(X, 0.5, degree=degree)
    single = kernel_smoother(X.float(), 0.5, degree=degree)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), exact, atol=2e-4, rtol=0)
    torch.testing.assert_close(kernel_smoother(X + 2.0**19, 0.5, degree=degree), exact, atol=1e-7, rtol=0)


@pytest.mark.parametrize("degree", [0, 1])
def test_extreme_bandwidths(degree):
    """Narrow: each row itself. Wide: the mean, or the least-squares line."""
    X = torch.linspace(0, 1, 12, dtype=F64)[:, None]
    torch.testing.assert_close(kernel_smoother(X, 1e-3, degree=degree), torch.eye(12, dtype=F64), atol=1e-9, rtol=0)
    line = torch.cat([torch.ones_like(X), X], 1)
    wide = hat_matrix(line) if degree else torch.full((12, 12), 1 / 12, dtype=F64)
    torch.testing.assert_close(kernel_smoother(X, 1e4, degree=degree), wide, atol=1e-6, rtol=0)


def test_local_lines_over_columns_that_do_not_spread():
    """A constant column has no slope; what is left is the local line of the other one."""
    X = torch.randn(20, 1, dtype=F64)
    flat = torch.cat([X, torch.ones_like(X)], 1)
    torch.testing.assert_close(
        kernel_smoother(flat, 0.8, degree=1), kernel_smoother(X, 0.8, degree=1), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("degree", [0, 1])
def test_kernel_smoother_has_the_right_gradients(degree):
    X, X_query = torch.randn(7, 2, dtype=F64), torch.randn(3, 2, dtype=F64)
    h = torch.tensor(0.9, dtype=F64)
    inputs = [a.requires_grad_() for a in (X, h, X_query)]
    assert torch.autograd.gradcheck(lambda X, h, Q: kernel_smoother(X, h, Q, degree=degree), inputs)
    assert torch.autograd.gradcheck(lambda X, h: kernel_smoother(X, h, degree=0), inputs[:2])


def test_softmax_weights_has_the_right_gradients_and_traces():
    q, k = torch.randn(3, 4, dtype=F64, requires_grad=True), torch.randn(5, 4, dtype=F64, requires_grad=True)
    mask = torch.tensor([True, True, False, True, True])
    assert torch.autograd.gradcheck(lambda q, k: softmax_weights(q, k, 0.7, mask=mask), (q, k))
    explained = torch._dynamo.explain(lambda q, k: softmax_weights(q, k, mask=mask))(q, k)
    assert explained.graph_break_count == 0, explained.break_reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_masked_attention_is_attention_over_what_is_left(dtype):
    q, k = torch.randn(2, 4, 3).to(dtype), torch.randn(2, 6, 3).to(dtype)
    mask = torch.tensor([True, False, True, True, False, True])
    weights = softmax_weights(q, k, mask=mask)
    assert weights.dtype == dtype and not weights[..., ~mask].any()
    torch.testing.assert_close(weights[..., mask], softmax_weights(q, k[:, mask]))
    nothing = softmax_weights(q, k, mask=torch.zeros(4, 6, dtype=torch.bool))
    assert not nothing.any()


def test_sinkhorn_says_when_it_is_not_there():
    causal = torch.ones(6, 6, dtype=F64).tril()
    with pytest.warns(RuntimeWarning, match="50 iterations"):
        sinkhorn(causal, max_iterations=50)
    for dtype in (torch.float32, F64):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            P = sinkhorn(torch.rand(20, 20, dtype=dtype) + 0.1)
        assert (P.sum(0) - 1).abs().max() < 2e4 * torch.finfo(dtype).eps and P.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sinkhorn_balances_half_precision(dtype):
    S = (torch.rand(20, 20) + 0.1).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        P = sinkhorn(S)
    assert P.dtype == dtype
    torch.testing.assert_close(P.float(), sinkhorn(S.float()), atol=0, rtol=torch.finfo(dtype).eps)
    with pytest.warns(RuntimeWarning):
        sinkhorn(S, max_iterations=1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_sinkhorn_without_a_balanced_form_still_has_rows_that_sum_to_one(dtype):
    S = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 1, 1]], dtype=dtype)
    with pytest.warns(RuntimeWarning, match="3000 iterations"):
        P = sinkhorn(S, max_iterations=3000)
    torch.testing.assert_close(P.sum(-1), torch.ones(3, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("tiny", [1e-20, 1e-40, 1e-46, 1e-300])
def test_the_narrowest_kernels_pick_the_nearest(dtype, tiny):
    """Ratios beyond the dtype, and numbers that float32 rounds to zero."""
    X, X_query = torch.tensor([[0.0], [1.0], [2.0]], dtype=dtype), torch.tensor([[0.4], [1.7]], dtype=dtype)
    first_and_last = torch.eye(3, dtype=dtype)[[0, 2]]
    for h in (tiny, torch.tensor(tiny, dtype=F64)):
        for degree in (0, 1):
            assert torch.equal(kernel_smoother(X, h, X_query, degree=degree), first_and_last)
        q = X + 1
        assert torch.equal(softmax_weights(q, X, h), torch.eye(3, dtype=dtype)[[2, 2, 2]])
        mask = torch.tensor([True, True, False])
        assert torch.equal(softmax_weights(q, X, h, mask=mask), torch.eye(3, dtype=dtype)[[1, 1, 1]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_temperatures_and_bandwidths_leave_the_dtype_alone(dtype):
    X = torch.randn(5, 2).to(dtype)
    one = torch.ones((), dtype=F64)
    assert torch.equal(softmax_weights(X, X, one), softmax_weights(X, X, 1.0))
    assert softmax_weights(X, X, one).dtype == softmax_weights(X, X, one.float()).dtype == dtype
    if dtype != torch.bfloat16:
        assert kernel_smoother(X, one).dtype == kernel_smoother(X, one.float()).dtype == dtype


def test_sizes_of_numpy_are_integers():
    X = torch.randn(5, 2, dtype=F64)
    assert torch.equal(kernel_smoother(X, 1.0, degree=np.int64(1)), kernel_smoother(X, 1.0, degree=1))
    with pytest.warns(RuntimeWarning, match="1 iterations"):
        sinkhorn(kernel_smoother(X, 1.0), max_iterations=np.int64(1))


@pytest.mark.parametrize("seed", range(4))
def test_a_row_with_a_column_to_itself_is_not_left_out(seed):
    X = torch.randn(20, 3, dtype=F64, generator=torch.Generator().manual_seed(seed)) * torch.tensor([1.0, 100.0, 0.0])
    X[4, 2] = 1
    with refused("smoother"):
        leave_one_out(hat_matrix(X), X[:, :1])


def test_half_precision_rows_may_be_left_out():
    S = torch.randn(100, 100).softmax(-1).bfloat16()
    assert torch.isfinite(leave_one_out(S, torch.ones(100, 1, dtype=torch.bfloat16))).all()


# ---------------------------------------------------------------- errors

X, Y, S = torch.ones(5, 2, dtype=F64), torch.ones(5, 1, dtype=F64), torch.full((5, 5), 0.2, dtype=F64)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: softmax_weights(X, X, 0.0), "temperature"),
        (lambda: softmax_weights(X, X, torch.tensor([1.0, -1.0])), "temperature"),
        (lambda: softmax_weights(X, X, torch.tensor([1])), "temperature"),
        (lambda: softmax_weights(X, X[:, :1]), "k"),
        (lambda: softmax_weights(X, X, mask=torch.ones(5)), "mask"),
        (lambda: softmax_weights(X, X, mask=torch.ones(4, dtype=torch.bool)), "mask"),
        (lambda: leave_one_out(kernel_smoother(X, 0.5), X[:, 0]), "Y"),
        (lambda: kernel_smoother(X, -1.0), "bandwidth"),
        (lambda: kernel_smoother(X, 1.0, degree=2), "degree"),
        (lambda: kernel_smoother(X, 1.0, X[:, :1]), "X_query"),
        (lambda: kernel_smoother(X * math.nan, 1.0), "X"),
        (lambda: kernel_smoother(X.half(), 1.0), "X"),
        (lambda: kernel_smoother(X.numpy(), 1.0), "X"),
        (lambda: degrees_of_freedom(S[:4]), "smoother"),
        (lambda: degrees_of_freedom(S, "rank"), "kind"),
        (lambda: bias_variance(S, Y, -0.1), "noise"),
        (lambda: bias_variance(S, Y[:4], 0.1), "truth"),
        (lambda: bias_variance(S, Y[None], 0.1), "truth"),
        (lambda: leave_one_out(S, Y.float()), "Y"),
        (lambda: leave_one_out(torch.eye(5, dtype=F64), Y), "smoother"),
        (lambda: sinkhorn(-S), "smoother"),
        (lambda: sinkhorn(S * torch.eye(5)[0]), "smoother"),
        (lambda: sinkhorn(S, tolerance=0.0), "tolerance"),
        (lambda: sinkhorn(S, max_iterations=0), "max_iterations"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
