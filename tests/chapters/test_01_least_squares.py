"""Chapter 1: the claims with their mutants, and what a lesson should not carry: faults, dtypes, gradients, cost."""

import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.utils.estimator_checks import check_estimator
from torch.utils.flop_counter import FlopCounterMode

from claims import claim
from gbattn.least_squares import LeastSquares, OLSAttention, hat_matrix, least_squares, linear_attention, whiten

F64 = torch.float64


class Problem:
    """A drawn regression: X (n, d) of given condition number, Y (n, c), fresh rows, and a generator for more."""

    def __init__(self, seed, d, extra_rows, c, log_condition):
        self.rng = torch.Generator().manual_seed(seed)
        n = d + extra_rows
        left, right = torch.linalg.qr(self.normal(n, d)).Q, torch.linalg.qr(self.normal(d, d)).Q
        self.X = left * torch.logspace(0, -log_condition, d, dtype=F64) @ right.T
        self.Y, self.X_query = self.normal(n, c), self.normal(4, d)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    @property
    def projection(self):
        """The hat matrix by a road that uses no whitening: an orthonormal basis from QR."""
        Q = torch.linalg.qr(self.X).Q
        return Q @ Q.T


def problems(largest_log_condition=2.0):
    return st.builds(
        Problem,
        st.integers(0, 2**31),
        st.integers(1, 6),
        st.integers(1, 30),
        st.integers(1, 3),
        st.floats(0, largest_log_condition),
    )


def gram(Z):
    return Z.T @ Z


@claim(
    problems(5.0),
    tolerance=1e-10,
    mutant=lambda p: (gram(p.X @ whiten(p.X) * 1.0001), torch.eye(p.X.shape[1], dtype=F64)),
)
def test_prop_whitening(p):
    """Whitened features are orthonormal."""
    return gram(p.X @ whiten(p.X)), torch.eye(p.X.shape[1], dtype=F64)


def scores_and_their_laws(p, H):
    """Scores against the hat matrix, its transpose, its square, and the trace."""
    target = p.projection
    left = torch.stack([H, H, H @ H])
    right = torch.stack([target, target.T, target])
    return torch.cat([left.flatten(), H.trace()[None]]), torch.cat(
        [right.flatten(), torch.tensor([float(p.X.shape[1])], dtype=F64)]
    )


@claim(problems(), tolerance=1e-10, mutant=lambda p: scores_and_their_laws(p, hat_matrix(p.X, ridge=1e-6)))
def test_thm_score_is_hat(p):
    """Scores of whitened rows are the hat matrix: symmetric, idempotent, of trace d. Mutant: a trace of ridge."""
    return scores_and_their_laws(p, hat_matrix(p.X))


def values_not_whitened(p):
    layer = OLSAttention.from_data(p.X, p.Y)
    with torch.no_grad():
        layer.W_V.copy_(torch.eye(len(layer.W_V), dtype=F64))
    return layer(p.X), p.projection @ p.Y


@claim(problems(), tolerance=1e-10, mutant=values_not_whitened)
def test_thm_one_pass(p):
    """The stored layer's pass on its own data is HY. Mutant: values left unwhitened."""
    return OLSAttention.from_data(p.X, p.Y)(p.X), p.projection @ p.Y


def reference(X, Y):
    return torch.linalg.lstsq(X, Y, driver="gelsd").solution


@claim(
    problems(),
    tolerance=1e-8,
    mutant=lambda p: (linear_attention(p.X_query, p.X, p.Y) / len(p.X), p.X_query @ reference(p.X, p.Y)),
)
def test_prop_in_context(p):
    """With the targets as values the pass predicts new rows. Mutant: an average over rows that are not whitened."""
    L, expected = whiten(p.X), p.X_query @ reference(p.X, p.Y)
    spelled = linear_attention(p.X_query @ L, p.X @ L, p.Y)
    library = [OLSAttention.in_context(p.X, p.Y, p.X_query, mode=mode) for mode in ("accurate", "fast")]
    return torch.stack([spelled, *library]), expected.expand(3, -1, -1)


def weighted_ridge(p, value_weights):
    w, ridge = p.normal(len(p.X)).square() + 0.1, 0.3
    expected = torch.linalg.solve(p.X.T * w @ p.X + ridge * torch.eye(p.X.shape[1], dtype=F64), p.X.T * w @ p.Y)
    L = whiten(w.sqrt()[:, None] * p.X, ridge=ridge)
    spelled = linear_attention(p.X_query @ L, p.X @ L, value_weights(w)[:, None] * p.Y)
    library = [
        OLSAttention.in_context(p.X, p.Y, p.X_query, weights=w, ridge=ridge, mode=mode) for mode in ("accurate", "fast")
    ]
    return torch.stack([spelled, *library]), (p.X_query @ expected).expand(3, -1, -1)


@pytest.mark.parametrize("seed", range(20))
def test_weights_and_a_ridge_in_context(seed):
    """Weighted values under a weighted, ridged whitening: the ridge prediction. Not so for values weighted by √w."""
    problem = lambda: Problem(seed, 1 + seed % 6, 1 + seed, 2, 1.0)
    near = lambda value_weights: torch.allclose(*weighted_ridge(problem(), value_weights), atol=1e-9, rtol=1e-9)
    assert near(lambda w: w) and not near(torch.sqrt)


def scaled(p, power):
    a = 0.3 + 2.4 * torch.rand((), generator=p.rng, dtype=F64)
    fit = least_squares(p.X, p.Y)
    return OLSAttention.from_data(p.X, p.Y)(a * p.X), a**power * fit.predict(a * p.X)


def test_the_stored_form_is_cubic_in_its_input():
    """On aX it gives a² times the fitted line, not a times."""
    near = lambda power: torch.allclose(*scaled(Problem(0, 9, 3, 2, 1.0), power), atol=1e-10, rtol=0)
    assert near(2) and not near(1)


@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.filterwarnings("ignore::numpy.exceptions.RankWarning")
def test_without_the_null_directions_the_solution_is_the_shortest(mode, seed):
    p = Problem(seed, 1 + seed % 6, 5, 2, 1.0)
    X = torch.cat([p.X, p.X[:, :1] - 2 * p.X[:, -1:]], dim=1)
    shortest = torch.linalg.pinv(X, rtol=1e-9) @ p.Y
    torch.testing.assert_close(least_squares(X, p.Y, mode=mode).coefficients, shortest, atol=1e-8, rtol=1e-8)


def reparametrised(p, left, right):
    """The outputs on fresh rows of a layer and of one whose last matrix is multiplied from the left by `right` and
    whose other matrices are multiplied from the right by `left`."""
    layer, other = OLSAttention.from_data(p.X, p.Y), OLSAttention.from_data(p.X, p.Y)
    with torch.no_grad():
        for name, weight in other.named_parameters():
            weight.copy_(right @ weight if name == "W_P" else weight @ left)
    return other(p.X_query), layer(p.X_query)


@pytest.mark.parametrize("seed", range(10))
def test_rotations_and_scales_of_the_weights_are_invisible(seed):
    p = Problem(seed, 1 + seed % 6, 5, 2, 1.0)
    d = p.X.shape[1]
    R, s = torch.linalg.qr(p.normal(d, d)).Q, 0.5 + seed
    torch.testing.assert_close(*reparametrised(p, R, R.T), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(*reparametrised(p, s * torch.eye(d, dtype=F64), torch.eye(d, dtype=F64) / s**3))


def second_look(p, ridge):
    """What a second look adds: by two passes, and from the spectrum h of the smoother as h(1 − h)."""
    H, S = hat_matrix(p.X, ridge=ridge), hat_matrix(p.X, ridge=0.5)
    left_vectors, singular, _ = torch.linalg.svd(p.X, full_matrices=False)
    h = singular**2 / (singular**2 + 0.5)
    expected = left_vectors * (h * (1 - h)) @ left_vectors.T @ p.Y
    return torch.stack([H @ (p.Y - H @ p.Y), S @ (p.Y - S @ p.Y)]), torch.stack([torch.zeros_like(p.Y), expected])


@claim(problems(), tolerance=1e-10, mutant=lambda p: second_look(p, 0.01))
def test_thm_second_look(p):
    """A projection finds nothing in its residual, a ridge what its spectrum says. Mutant: a ridge instead."""
    return second_look(p, 0.0)


def softmax_squared(p, equal_rows):
    """Positive weights, squared and as they are."""
    n = len(p.X) + 1  # one row alone is always a projection
    A = p.normal(1 if equal_rows else n, n).softmax(-1).expand(n, n)
    return A @ A, A


@claim(problems(), tolerance=1e-12, mutant=lambda p: softmax_squared(p, False))
def test_cor_softmax_projection(p):
    """Positive weights whose rows are all equal are a projection. Mutant: rows that differ."""
    return softmax_squared(p, True)


# ---------------------------------------------------------------- whiten and least_squares


@pytest.mark.parametrize(
    "X",
    [
        torch.tensor([[1.0, math.inf]] * 4),
        torch.ones(4, 0),
        torch.ones(4),
        torch.ones(4, 2, dtype=torch.int32),
        torch.ones(4, 2, dtype=torch.bfloat16),
        [[1.0, 2.0]] * 4,
    ],
)
def test_bad_features_are_named(X):
    for call in (whiten, hat_matrix, lambda X: least_squares(X, torch.ones(4, 1))):
        with refused("X"):
            call(X)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"mode": "quick"}, "mode"),
        ({"ridge": -1.0}, "ridge"),
        ({"rcond": 1.0}, "rcond"),
        ({"intercept": "no"}, "intercept"),
        ({"weights": torch.ones(3)}, "weights"),
        ({"weights": -torch.ones(4)}, "weights"),
        ({"weights": torch.zeros(4)}, "weights"),
    ],
)
def test_bad_options_are_named(options, argument):
    with refused(argument):
        least_squares(torch.randn(4, 2), torch.randn(4, 1), **options)


def test_one_problem_without_weight_is_named():
    with refused("weights"):
        least_squares(torch.randn(2, 4, 2), torch.randn(2, 4, 1), weights=torch.tensor([[1.0] * 4, [0.0] * 4]))


@pytest.mark.parametrize(
    "X_query",
    [torch.ones(5, 1), torch.ones(5, 3, dtype=F64), torch.ones(2, 5, 3), torch.full((5, 3), math.nan)],
)
def test_queries_that_do_not_fit_the_context_are_named(X_query):
    with refused("X_query"):
        least_squares(torch.randn(30, 3), torch.randn(30, 2)).predict(X_query)


def test_mismatched_lengths_are_named():
    with refused("Y"):
        least_squares(torch.randn(4, 2), torch.randn(5, 1))
    with refused("X_query"):
        OLSAttention.in_context(torch.randn(4, 2), torch.randn(4, 1), torch.randn(1, 3))


@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rank_deficiency_is_said(mode, dtype):
    X = torch.randn(30, 2, dtype=dtype, generator=torch.Generator().manual_seed(0))
    with pytest.warns(np.exceptions.RankWarning, match="rank 2"):
        L = whiten(torch.cat([X, X.sum(1, keepdim=True)], 1), mode=mode)
    assert (L[:, 2] == 0).all()


def nearly_dependent(condition):
    """Features of this condition number, targets, and the coefficients without the weakest direction."""
    rng = torch.Generator().manual_seed(0)
    U = torch.linalg.qr(torch.randn(30, 3, dtype=F64, generator=rng)).Q
    V = torch.linalg.qr(torch.randn(3, 3, dtype=F64, generator=rng)).Q
    X = U * torch.tensor([1.0, 0.7, 1 / condition], dtype=F64) @ V.T
    Y = torch.randn(30, 1, dtype=F64, generator=rng)
    return X, Y, V[:, :2] / torch.tensor([1.0, 0.7], dtype=F64) @ U[:, :2].T @ Y


@pytest.mark.filterwarnings("ignore::numpy.exceptions.RankWarning")
def test_rcond_reaches_every_fit():
    X, Y, kept = nearly_dependent(1e4)
    batch = torch.stack([X, 2 * X])
    estimator = LeastSquares(fit_intercept=False, rcond=1e-3).fit(X.numpy(), Y.numpy())
    torch.testing.assert_close(least_squares(X, Y, rcond=1e-3).coefficients, kept)
    torch.testing.assert_close(torch.from_numpy(estimator.coef_).mT, kept)
    torch.testing.assert_close(OLSAttention.from_data(X, Y, rcond=1e-3)(X), X @ kept)
    torch.testing.assert_close(hat_matrix(batch, rcond=1e-3) @ Y, (X @ kept).expand(2, -1, -1))
    assert estimator.rank_ == 2


def test_mode_reaches_every_fit_and_the_warning_points_here():
    """At this condition number the fast mode drops a direction and says so; the accurate mode does not."""
    X, Y, _ = nearly_dependent(1e10)
    fits = [
        lambda mode: whiten(X, mode=mode),
        lambda mode: least_squares(X, Y, mode=mode),
        lambda mode: OLSAttention.from_data(X, Y, mode=mode),
        lambda mode: OLSAttention.in_context(X, Y, X, mode=mode),
        lambda mode: LeastSquares(mode=mode).fit(X.numpy(), Y.numpy()),
    ]
    for fit in fits:
        fit("accurate")
        with pytest.warns(np.exceptions.RankWarning, match="rank 2") as heard:
            fit("fast")
        assert heard[0].filename == __file__


def test_the_default_threshold_is_the_documented_one_and_the_lowest_rank_is_said():
    X = torch.ones(2, 50, 3, dtype=F64)
    X[0, :25, 0] = -1
    with pytest.warns(np.exceptions.RankWarning, match="rank 1 .* rcond = 1.1e-14"):
        whiten(X)


@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-35, -20, 0, 18, 35])
def test_units_do_not_matter_where_squares_do_not_leave_the_dtype(mode, dtype, exponent):
    """Only the fast mode forms squares: it refuses those that single precision cannot hold."""
    rng = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(60, width, dtype=dtype, generator=rng) for width in (3, 1))
    unit = 2.0 ** round(exponent * math.log2(10))
    if mode == "fast" and dtype == torch.float32 and exponent in (-35, -20, 35):
        zero = lambda: pytest.warns(np.exceptions.RankWarning, match="rank 0")
        for call in (lambda X: least_squares(X, Y, mode=mode), lambda X: whiten(X, mode=mode)):
            with zero() if exponent == -35 else refused("X"):
                call(X * unit)
        return
    scaled = least_squares(X * unit, Y, mode=mode).coefficients * unit
    torch.testing.assert_close(scaled, least_squares(X, Y, mode=mode).coefficients)


@pytest.mark.parametrize("mode", ["accurate", "fast"])
def test_a_far_mean_in_single_precision(mode):
    rng = torch.Generator().manual_seed(0)
    X = torch.randn(100_000, 3, generator=rng) + 1000
    Y = X @ torch.tensor([[1.0], [2.0], [3.0]]) + torch.randn(100_000, 1, generator=rng)
    wide = least_squares(X.double(), Y.double(), intercept=True)
    fit = least_squares(X, Y, intercept=True, mode=mode)
    torch.testing.assert_close(fit.coefficients.double(), wide.coefficients, atol=1e-4, rtol=0)
    torch.testing.assert_close(fit.predict(X[:9]).double(), wide.predict(X[:9].double()), atol=5e-3, rtol=0)


@pytest.mark.parametrize("mode", ["accurate", "fast"])
def test_a_constant_column_beside_an_intercept_has_no_slope(mode):
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=2000), np.full(2000, 123456.7)])
    with pytest.warns(np.exceptions.RankWarning, match="rank 1"):
        fitted = LeastSquares(mode=mode).fit(X, np.arange(2000.0))
    assert fitted.coef_[1] == 0 and fitted.rank_ == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda X, Y: least_squares(X, Y).predict(X),
        lambda X, Y: least_squares(X, Y, mode="fast").predict(X),
        lambda X, Y: least_squares(X, Y).coefficients,
        lambda X, Y: hat_matrix(X),
    ],
)
def test_autocast_does_not_reach_a_factorisation(call):
    rng = torch.Generator().manual_seed(0)
    X, Y = torch.randn(50, 4, generator=rng), torch.randn(50, 1, generator=rng)
    expected = call(X, Y)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(call(X, Y), expected)


@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.parametrize("ridge", [0.0, 0.2])
@pytest.mark.parametrize(("n", "d", "c"), [(3, 7, 1), (7, 7, 2), (8, 7, 4), (40, 3, 2), (1, 1, 1)])
@pytest.mark.filterwarnings("ignore::numpy.exceptions.RankWarning")
def test_every_shape_gives_the_shortest_solution(mode, ridge, n, d, c):
    rng = torch.Generator().manual_seed(n)
    X, Y = torch.randn(n, d, dtype=F64, generator=rng), torch.randn(n, c, dtype=F64, generator=rng)
    fit = least_squares(X, Y, ridge=ridge, mode=mode)
    rows = torch.cat([X, math.sqrt(ridge) * torch.eye(d, dtype=F64)])
    expected = torch.linalg.pinv(rows, rtol=1e-12) @ torch.cat([Y, torch.zeros(d, c, dtype=F64)])
    torch.testing.assert_close(fit.coefficients, expected, atol=1e-9, rtol=0)
    assert int(fit.rank) == (d if ridge else min(n, d))


@pytest.mark.parametrize("mode", ["accurate", "fast"])
def test_batches_agree_with_single_problems(mode):
    rng = torch.Generator().manual_seed(0)
    X, Y, w = (torch.rand(2, 3, *shape, dtype=F64, generator=rng) for shape in ((20, 4), (20, 2), (20,)))
    fit = least_squares(X, Y, intercept=True, weights=w, ridge=0.1, mode=mode)
    for i in range(2):
        for j in range(3):
            single = least_squares(X[i, j], Y[i, j], intercept=True, weights=w[i, j], ridge=0.1, mode=mode)
            torch.testing.assert_close(fit.coefficients[i, j], single.coefficients, atol=1e-11, rtol=0)
            torch.testing.assert_close(fit.predict(X)[i, j], single.predict(X[i, j]), atol=1e-11, rtol=0)


def test_more_rows_than_a_block_and_a_far_mean_cost_no_digits():
    rng = torch.Generator().manual_seed(0)
    X = 1e6 + torch.randn(20_000, 3, dtype=F64, generator=rng)
    Y = X @ torch.tensor([[1.0], [-2.0], [3.0]], dtype=F64) + torch.randn(20_000, 1, dtype=F64, generator=rng)
    expected = reference(X - X.mean(0), Y - Y.mean(0))
    for mode in ("accurate", "fast"):
        torch.testing.assert_close(
            least_squares(X, Y, intercept=True, mode=mode).coefficients, expected, atol=1e-8, rtol=0
        )


@pytest.mark.parametrize("degree", range(1, 8))
def test_errors_beside_those_of_lapack(degree):
    """Integer problems have a solution that is known to the last bit; ten times LAPACK's error is the margin."""
    t = torch.arange(1.0, 21.0, dtype=F64)
    X = torch.stack([t**j for j in range(degree + 1)], dim=1)
    beta = torch.tensor([[(-1.0) ** j * (j + 1)] for j in range(degree + 1)], dtype=F64)
    residual = torch.zeros(20, 1, dtype=F64)
    residual[:15, 0] = torch.tensor([(-1.0) ** i * math.comb(14, i) for i in range(15)])
    Y = X @ beta + residual
    error = lambda b: (b - beta).norm() / beta.norm()
    lapack = torch.tensor(np.linalg.lstsq(X.numpy(), Y.numpy())[0])
    assert error(least_squares(X, Y).coefficients) <= 10 * error(lapack) + 1e-13
    if degree == 3:  # a condition number of about 1e4: one look is not enough, two are
        L = whiten(X, mode="fast")
        assert error(L @ (L.mT @ (X.mT @ Y))) > 100 * error(lapack)
        assert error(least_squares(X, Y, mode="fast").coefficients) <= 10 * error(lapack) + 1e-13


@pytest.mark.parametrize("mode", ["accurate", "fast"])
def test_gradients_reach_features_and_targets(mode):
    rng = torch.Generator().manual_seed(0)
    X, Y, X_query = (
        torch.randn(*shape, dtype=F64, generator=rng, requires_grad=True) for shape in ((9, 3), (9, 2), (4, 3))
    )
    assert torch.autograd.gradcheck(
        lambda *a: OLSAttention.in_context(*a, intercept=True, mode=mode), (X, Y, X_query), atol=1e-6
    )


@pytest.mark.parametrize("mode", ["accurate", "fast"])
def test_gradients_where_singular_values_coincide(mode):
    X = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=F64, requires_grad=True)
    Y = torch.randn(4, 1, dtype=F64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    w = torch.tensor([1.0, 2.0, 0.0, 1.0], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *a: least_squares(*a, mode=mode).coefficients, (X, Y))
    least_squares(X, Y, weights=w, mode=mode).coefficients.sum().backward()
    assert torch.isfinite(w.grad).all()


@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
@pytest.mark.parametrize("weighted", [False, True])
def test_second_derivatives_are_those_of_the_solution(mode, intercept, ridge, weighted):
    rng = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(7, width, dtype=F64, generator=rng, requires_grad=True) for width in (3, 2))
    w = (torch.rand(7, dtype=F64, generator=rng) + 0.2).requires_grad_()
    inputs = (X, Y, w) if weighted else (X, Y)
    fit = lambda X, Y, w=None: least_squares(X, Y, weights=w, intercept=intercept, ridge=ridge, mode=mode).coefficients
    assert torch.autograd.gradgradcheck(fit, inputs, atol=1e-6, gen_non_contig_grad_outputs=True)


@pytest.mark.parametrize("mode", ["accurate", "fast"])
def test_derivatives_up_to_the_third_are_those_of_the_normal_equations(mode):
    """Also where singular values coincide, and in a batch."""
    rng = torch.Generator().manual_seed(0)
    square = torch.tensor([[1, 1], [1, -1], [-1, 1], [-1, -1]], dtype=F64)
    X, direction = torch.stack([square, torch.randn(4, 2, dtype=F64, generator=rng)]), square.roll(1, 0) + 0.3
    Y = torch.randn(2, 4, 1, dtype=F64, generator=rng)

    def derivatives(solve):
        x, found = X.clone().requires_grad_(), []
        value = solve(x).pow(2).sum()
        for _ in range(3):
            (gradient,) = torch.autograd.grad(value, x, create_graph=True)
            found.append(gradient)
            value = (gradient * direction).sum()
        return torch.stack(found)

    ours = derivatives(lambda x: least_squares(x, Y, ridge=0.1, mode=mode).coefficients)
    eye = 0.1 * torch.eye(2, dtype=F64)
    expected = derivatives(lambda x: torch.linalg.solve(x.mT @ x + eye, x.mT @ Y))
    torch.testing.assert_close(ours, expected, atol=1e-9, rtol=1e-9)


def test_functional_gradients_reach_a_fit():
    rng = torch.Generator().manual_seed(0)
    X, Y = (torch.randn(9, width, dtype=F64, generator=rng) for width in (3, 2))
    coefficients = lambda X: least_squares(X, Y).coefficients
    expected = torch.autograd.functional.jacobian(coefficients, X)
    torch.testing.assert_close(torch.func.jacrev(coefficients)(X), expected)
    hessian = torch.autograd.functional.hessian(lambda X: coefficients(X).pow(3).sum(), X)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(lambda X: coefficients(X).pow(3).sum()))(X), hessian)


@pytest.mark.parametrize("mode", ["accurate", "fast"])
def test_an_empty_batch_may_have_weights(mode):
    X, Y, w = torch.ones(0, 5, 2, dtype=F64), torch.ones(0, 5, 1, dtype=F64), torch.ones(0, 5, dtype=F64)
    fit = least_squares(X, Y, weights=w, intercept=True, mode=mode)
    assert fit.coefficients.shape == (0, 2, 1) and fit.predict(X).shape == (0, 5, 1)


# ---------------------------------------------------------------- linear_attention


def inputs(T, S, K=5, Kv=3, batch=(2,), dtype=F64):
    rng = torch.Generator().manual_seed(T + S)
    return tuple(torch.randn(*batch, *shape, generator=rng, dtype=F64).to(dtype) for shape in ((T, K), (S, K), (S, Kv)))


def quadratic(q, k, v, *, causal=False, mask=None):
    """The naive form, with the T × S scores in full."""
    scores = q @ k.mT
    if causal:
        scores = scores.tril(k.shape[-2] - q.shape[-2])
    return (scores if mask is None else scores * mask) @ v


@pytest.mark.parametrize(("T", "S"), [(1, 1), (3, 3), (64, 64), (65, 65), (130, 130), (1, 200), (70, 200), (64, 128)])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_equals_the_quadratic_form(T, S, causal):
    q, k, v = inputs(T, S)
    rng = torch.Generator().manual_seed(0)
    masks = [
        None,
        torch.rand(S, generator=rng) < 0.5,
        torch.rand(2, 1, S, generator=rng) < 0.5,
        torch.rand(T, S, generator=rng) < 0.5,
        torch.zeros(2, 1, 1, dtype=torch.bool),
    ]
    for mask in masks:
        torch.testing.assert_close(
            linear_attention(q, k, v, causal=causal, mask=mask),
            quadratic(q, k, v, causal=causal, mask=mask),
            atol=1e-10,
            rtol=0,
        )


def test_causal_memory_crosses_segments():
    q, k, v = inputs(5000, 5007, K=2, Kv=2, batch=())
    torch.testing.assert_close(
        linear_attention(q, k, v, causal=True), quadratic(q, k, v, causal=True), atol=1e-9, rtol=0
    )


@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_sums_are_wide(causal):
    q, k, v = (torch.full((3000, 8), x, dtype=torch.float16) for x in (6e-3, 6.0, 6.0))
    got = linear_attention(q, k, v, causal=causal)[-1]
    torch.testing.assert_close(got.float(), torch.full((8,), 8 * 3000 * 6e-3 * 36), rtol=2e-3, atol=0)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": torch.ones(100, 100, dtype=torch.bool)}])
def test_half_precision_scores_are_wide(options):
    q, k, v = (torch.full((100, width), x, dtype=torch.float16) for width, x in ((8, 100), (8, 100), (1, 1e-3)))
    got = linear_attention(q, k, v, **options)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got[-1].float(), torch.tensor([8 * 100 * 100 * 100 * 1e-3]), rtol=2e-3, atol=0)


def test_hidden_keys_may_hold_anything():
    q, k, v = inputs(4, 6)
    mask = torch.tensor([True] * 4 + [False] * 2)
    expected = linear_attention(q, k[:, :4], v[:, :4])
    k[:, 4:], v[:, 4:] = math.nan, math.inf
    torch.testing.assert_close(linear_attention(q, k, v, mask=mask), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_in_every_precision(dtype, tolerance, causal):
    """Error relative to the largest output; bfloat16 keeps eight bits, so a few hundredths is what it can hold."""
    q, k, v = inputs(300, 300, K=16, Kv=16)
    exact = quadratic(q, k, v, causal=causal)
    got = linear_attention(q.to(dtype), k.to(dtype), v.to(dtype), causal=causal)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= tolerance * exact.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_on_a_gpu(causal):
    q, k, v = inputs(300, 300)
    got = linear_attention(q.cuda(), k.cuda(), v.cuda(), causal=causal)
    torch.testing.assert_close(got.cpu(), linear_attention(q, k, v, causal=causal), atol=1e-10, rtol=0)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_has_the_right_gradients(causal):
    q, k, v = (x.requires_grad_() for x in inputs(70, 80, K=2, Kv=2, batch=()))
    assert torch.autograd.gradcheck(lambda *a: linear_attention(*a, causal=causal), (q, k, v), fast_mode=True)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": torch.ones(4096, dtype=torch.bool)}])
def test_linear_attention_grows_linearly_and_forms_no_score_matrix(options):
    """Four times the length costs four times the operations, and fewer than the score matrix alone would."""

    def flops(T):
        q, k, v = inputs(T, T, K=16, Kv=16, batch=(), dtype=torch.float32)
        with FlopCounterMode(display=False) as counter:
            linear_attention(q, k, v, **({"mask": options["mask"][:T]} if "mask" in options else options))
        return counter.get_total_flops()

    assert flops(4096) == pytest.approx(4 * flops(1024), rel=0.02)
    assert flops(4096) < 2 * 4096 * 4096 * 16 / 4


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_traces_without_a_graph_break(causal):
    explained = torch._dynamo.explain(lambda q, k, v: linear_attention(q, k, v, causal=causal))(*inputs(100, 100))
    assert explained.graph_break_count == 0, explained.break_reasons


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"q": torch.ones(2, 9, 4, dtype=F64)}, "k"),
        ({"v": torch.ones(2, 7, 3, dtype=F64)}, "v"),
        ({"v": torch.ones(3, 9, 3, dtype=F64)}, "v"),
        ({"q": torch.ones(2, 12, 5, dtype=F64), "causal": True}, "k"),
        ({"mask": torch.ones(9)}, "mask"),
        ({"mask": torch.ones(8, 9, dtype=torch.bool)}, "mask"),
        ({"mask": torch.ones(1, 2, 9, 9, dtype=torch.bool)}, "mask"),
        ({"causal": "no"}, "causal"),
    ],
)
def test_linear_attention_names_what_is_wrong(change, argument):
    q, k, v = inputs(9, 9)
    with refused(argument):
        linear_attention(**({"q": q, "k": k, "v": v} | change))


# ---------------------------------------------------------------- the layer and the estimator


def test_a_layer_saves_and_loads_and_names_what_does_not_fit():
    layer = OLSAttention.from_data(torch.randn(20, 3), torch.randn(20, 2))
    copy = OLSAttention(3, 2)
    copy.load_state_dict(layer.state_dict())
    X = torch.randn(4, 6, 3)
    assert torch.equal(layer(X), copy(X)) and layer(X).shape == (4, 6, 2)
    with refused("X"):
        layer(torch.randn(6, 5))
    with refused("X"):
        layer(X.double())
    with refused("n_features"):
        OLSAttention(0, 1)
    with refused("X"):  # the weights hold one data set
        OLSAttention.from_data(torch.randn(2, 20, 3), torch.randn(2, 20, 1))


def test_layer_draws_its_weights_from_the_generator():
    first, second = (OLSAttention(3, 2, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    assert OLSAttention(400, 1).W_Q.std().item() == pytest.approx(1 / 20, rel=0.02)
    assert OLSAttention(np.int64(2), 1, device="meta").W_P.device.type == "meta"
    assert repr(first) == "OLSAttention(n_features=3, n_outputs=2)"


@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.filterwarnings("ignore::numpy.exceptions.RankWarning")
def test_estimator_satisfies_scikit_learn(mode):
    results = check_estimator(LeastSquares(mode=mode), on_skip=None)
    assert sum(result["status"] == "passed" for result in results) > 50


@pytest.mark.parametrize("mode", ["accurate", "fast"])
@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("ridge", [0.0, 3.0])
def test_estimator_agrees_with_scikit_learn(mode, intercept, ridge):
    rng = np.random.default_rng(0)
    X, y, w = rng.normal(2, 1, (60, 4)), rng.normal(size=(60, 2)), rng.random(60)
    theirs = (Ridge(ridge, fit_intercept=intercept) if ridge else LinearRegression(fit_intercept=intercept)).fit(
        X, y, w
    )
    ours = LeastSquares(fit_intercept=intercept, ridge=ridge, mode=mode).fit(X, y, w)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-9)
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), atol=1e-9)
    assert ours.rank_ == 4
    single = LeastSquares(mode=mode).fit(X, y[:, 0])
    assert single.coef_.shape == (4,) and np.ndim(single.intercept_) == 0 and single.predict(X).shape == (60,)


def test_estimator_predicts_what_the_layer_predicts_and_pickles():
    rng = np.random.default_rng(0)
    X, y, X_query = rng.normal(size=(30, 3)), rng.normal(size=(30, 1)), rng.normal(size=(5, 3))
    fitted = pickle.loads(pickle.dumps(LeastSquares().fit(X, y)))
    attended = OLSAttention.in_context(*map(torch.from_numpy, (X, y, X_query)), intercept=True)
    np.testing.assert_allclose(fitted.predict(X_query), attended.numpy(), atol=1e-12)


def test_estimator_follows_the_dtype():
    X = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    fitted = LeastSquares().fit(X, X[:, 0])
    assert fitted.coef_.dtype == np.float32 and fitted.predict(X).dtype == np.float32


def test_estimator_takes_views_and_names_its_own_arguments():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(30, 3)), rng.normal(size=30)
    np.testing.assert_allclose(
        LeastSquares().fit(X[::-1, ::-1], y[::-1]).coef_[::-1], LeastSquares().fit(X, y).coef_, atol=1e-12
    )
    with refused("fit_intercept"):
        LeastSquares(fit_intercept="False").fit(X, y)
    with refused("sample_weight"):
        LeastSquares().fit(X, y, np.where(np.arange(30) == 3, -1.0, 1.0))
    with refused("y"):
        LeastSquares().fit(X.astype(np.float32), y * 1e200)
