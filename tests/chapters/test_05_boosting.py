"""Chapters 5 and 5a: the claims with their mutants, and what a lesson should not carry: parity, faults, pickles."""

import math
import pickle
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused
from sklearn.base import BaseEstimator, clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import GradientBoostingClassifier as TheirClassifier
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeRegressor
from sklearn.utils import estimator_checks
from sklearn.utils.estimator_checks import check_estimator

from claims import claim
from gbattn import boosting
from gbattn.boosting import (
    AbsoluteError,
    GradientBoosting,
    GradientBoostingClassifier,
    Huber,
    LogLoss,
    Loss,
    SquaredError,
    boosted_smoother,
    l2_boost,
    line_search,
    sharpen,
    staged_l2_boost,
    twice,
)
from gbattn.least_squares import hat_matrix
from gbattn.smoothers import bias_variance, degrees_of_freedom, kernel_smoother, softmax_weights

F64 = torch.float64
DIABETES = load_diabetes(return_X_y=True)
CELLS = load_breast_cancer(return_X_y=True)
RECIPE = partial(kernel_smoother, bandwidth=0.7)


class Problem:
    """Drawn rows X (n, d), values Y (n, c), a shrinkage, a number of looks, and a generator for more."""

    def __init__(self, seed, n, rounds, nu):
        self.rng = torch.Generator().manual_seed(seed)
        self.n, self.rounds, self.nu = n, rounds, nu
        self.X, self.Y, self.X_query = self.normal(n, 2), self.normal(n, 2), self.normal(4, 2)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def uniform(self, *size):
        return torch.rand(*size, generator=self.rng, dtype=F64)

    def attention(self):
        return softmax_weights(*1.5 * self.normal(2, self.n, 3))

    def symmetric(self, values):
        Q = torch.linalg.qr(self.normal(self.n, self.n)).Q
        return Q * values @ Q.T, Q


def problems(n=(3, 14), rounds=(1, 6), nu=(0.1, 1.0)):
    return st.builds(Problem, st.integers(0, 2**31), st.integers(*n), st.integers(*rounds), st.floats(*nu))


def losses(y, F):
    return SquaredError(), AbsoluteError(), Huber(0.6).at(y, F), LogLoss()


# ---------------------------------------------------------------- claims


def pseudo_residuals(p, sign):
    """The third column against central differences, and the sums that vanish at the best constants."""
    y, F = p.uniform(2 * p.n + 1), p.normal(2 * p.n + 1)
    left, right, step = [], [], 1e-6
    for loss in losses(y, F):
        away = ((y - F).abs() > 1e-3) & (((y - F).abs() - getattr(loss, "delta", 1e9)).abs() > 1e-3)  # not at a kink
        slope = (loss.value(y, F + step) - loss.value(y, F - step)) / (2 * step)
        left.append(loss.negative_gradient(y, F)[away])
        right.append(sign * slope[away])
    for loss in (SquaredError(), AbsoluteError(), LogLoss()):
        constant = loss.start(y)
        left.append(loss.value(y, constant.expand_as(y)).mean()[None])
        grid = torch.linspace(-3, 3, 601, dtype=F64)
        at_grid = loss.value(y, grid[:, None]).mean(1).min()
        right.append(torch.minimum(at_grid, left[-1]))
    constant = line_search(Huber(0.5, 0.6), y, torch.zeros_like(y), torch.ones_like(y))
    left.append((y - constant).clamp(-0.6, 0.6).sum()[None])
    right.append(torch.zeros(1, dtype=F64))
    return torch.cat(left), torch.cat([r.reshape(-1) for r in right])


@claim(problems(), tolerance=1e-6, mutant=lambda p: pseudo_residuals(p, 1))
def test_prop_pseudo_residuals(p):
    """Negative gradients by differences; best constants. Mutant: the gradient, not its negative."""
    return pseudo_residuals(p, -1)


def one_round(p, search):
    """A least-squares fit, and any correction after a search, against the identity."""
    r, nu = p.Y[:, 0], 3 * p.nu  # beyond 2 as well
    fitted = hat_matrix(p.X) @ r
    c = p.normal(p.n)
    rho = line_search(SquaredError(), r, torch.zeros_like(r), c) if search else 1.0
    left = [(r - nu * h).square().sum() for h in (fitted, rho * c)]
    right = [r.square().sum() - nu * (2 - nu) * h.square().sum() for h in (fitted, rho * c)]
    return torch.stack(left), torch.stack(right)


@claim(problems(), tolerance=1e-10, mutant=lambda p: one_round(p, False))
def test_thm_boosting_loss(p):
    """A round takes off ν(2 − ν)‖h‖². Mutant: a correction that was neither fitted nor searched."""
    return one_round(p, True)


def harm(p, searched):
    y, F, c = p.uniform(p.n), p.normal(p.n), p.normal(p.n)
    left, right = [], []
    for loss in losses(y, F):
        rho = line_search(loss, y, F, c) if searched else 1.0
        left.append(loss.value(y, F + p.nu * rho * c).sum())
        right.append(loss.value(y, F).sum())
    return torch.stack(left), torch.stack(right)


def test_a_searched_step_does_not_raise_the_loss():
    """Along any correction, shrunken or not; the step 1 may raise it."""
    raised = 0
    for seed in range(20):
        left, right = harm(Problem(seed, 9, 1, (seed + 1) / 20), True)
        assert (left <= right + 1e-12).all()
        left, right = harm(Problem(seed, 9, 1, 1.0), False)
        raised += bool((left > right).any())
    assert raised > 10


def test_one_step_carries_no_promise():
    """Newton's step in a logistic leaf, shrunken or not, and Huber's step from the median can raise the loss."""
    y, F = torch.tensor([1.0, 0.0], dtype=F64), torch.tensor([-10.0, -10.0], dtype=F64)
    step = LogLoss().leaf(y, F)
    assert 11_000 < step < 11_100
    assert 9.9 < LogLoss().value(y, F).sum() < 10.1 and LogLoss().value(y, F + 0.1 * step).sum() > 1000
    y, F, huber = torch.tensor([0.0, 5.0], dtype=F64), torch.tensor([5.0, -1.0], dtype=F64), Huber(0.9, 6.0)
    assert huber.value(y, F).sum() == 30.5 and huber.value(y, F + 0.1 * huber.leaf(y, F)).sum() > 30.7


def closed_form(p, looks):
    """The loop, with one smoother and with several, against powers and products."""
    S, eye = p.attention(), torch.eye(p.n, dtype=F64)
    many = [p.attention() for _ in range(p.rounds)]
    product = eye
    for T in many:
        product = (eye - p.nu * T) @ product
    left = [l2_boost(S, p.Y, p.rounds, p.nu), p.Y - l2_boost(many, p.Y, p.rounds, p.nu)]
    power = torch.linalg.matrix_power(eye - p.nu * S, looks)
    return torch.cat(left), torch.cat([(eye - power) @ p.Y, product @ p.Y])


@claim(problems(), tolerance=1e-10, mutant=lambda p: closed_form(p, p.rounds - 1))
def test_thm_l2_boost(p):
    """M looks are I − (I − νS)ᴹ, or a product. Mutant: the power m for the look that has had m + 1."""
    return closed_form(p, p.rounds)


def one_look(p, values):
    """Predictions for new rows after M looks, computed look by look, against one look."""
    S, Q = kernel_smoother(p.X, 0.8), kernel_smoother(p.X, 0.8, p.X_query)
    F, new = torch.zeros_like(p.Y), torch.zeros(4, 2, dtype=F64)
    for _ in range(p.rounds + 1):
        r = p.Y - F
        F, new = F + p.nu * S @ r, new + p.nu * Q @ r
    a = values(S, p.Y, p.rounds + 1, p.nu)
    return torch.cat([new, F]), torch.cat([Q @ a, S @ a])


@claim(problems(), tolerance=1e-10, mutant=lambda p: one_look(p, l2_boost))
def test_prop_sharpened(p):
    """Many looks are one look at sharpened values. Mutant: one look at the estimates."""
    return one_look(p, sharpen)


def test_what_survives_gates():
    """Given gates in the place of ν: the product for any, one sharpened look if new rows keep theirs."""
    p = Problem(5, 9, 4, 1.0)
    S, Q, y = kernel_smoother(p.X, 0.8), kernel_smoother(p.X, 0.8, p.X_query), p.Y[:, 0]
    gates, new_gate = [p.uniform(9) for _ in range(4)], p.uniform(4)
    F, new, a = torch.zeros_like(y), torch.zeros(4, dtype=F64), torch.zeros_like(y)
    for g in gates:
        r = y - F
        F, new, a = F + g * (S @ r), new + new_gate * (Q @ r), a + r
    torch.testing.assert_close(l2_boost([g[:, None] * S for g in gates], y, 4), F)
    torch.testing.assert_close(new_gate * (Q @ a), new)


def test_rounds_of_a_projection_end_in_it():
    """Each leaves 1 − ν of what the projection finds; a full one leaves nothing of it."""
    p = Problem(4, 9, 3, 0.3)
    H = hat_matrix(p.X)
    torch.testing.assert_close(l2_boost(H, p.Y, 3, 0.3), (1 - 0.7**3) * H @ p.Y)
    torch.testing.assert_close(l2_boost(H, p.Y, 400, 0.3), H @ p.Y)
    torch.testing.assert_close(H @ (p.Y - l2_boost(H, p.Y, 1)), torch.zeros_like(p.Y))


def modes(p, noise):
    values = p.uniform(p.n)
    S, U = p.symmetric(values)
    f, sigma = p.Y[:, :1], 0.6
    kappa = (1 - p.nu * values) ** p.rounds
    M = boosted_smoother(S, p.rounds, p.nu)
    found = bias_variance(M, f, noise)
    theta = (U.T @ f)[:, 0]
    left = [found.bias.square().sum(), found.variance.sum(), degrees_of_freedom(M)]
    right = [(kappa**2 * theta**2).sum(), sigma**2 * (1 - kappa).square().sum(), (1 - kappa).sum()]
    return torch.stack(left), torch.stack(right)


@claim(problems(), tolerance=1e-10, mutant=lambda p: modes(p, 0.6**2))
def test_prop_boosting_bias_variance(p):
    """Bias, variance and degrees of freedom of M rounds, mode by mode. Mutant: σ² handed in for σ."""
    return modes(p, 0.6)


def test_bias_falls_and_variance_and_freedom_rise():
    p = Problem(3, 12, 1, 1.0)
    S, _ = p.symmetric(p.uniform(12))
    M = boosted_smoother(S, range(1, 30))
    found = bias_variance(M, p.Y[:, :1], 0.5)
    for rising in (-found.squared_bias, found.variance.mean(-1), degrees_of_freedom(M)):
        assert (rising.diff() > 0).all()


# ---------------------------------------------------------------- losses and the search


def test_hubers_constant_is_not_between_mean_and_median():
    y = torch.tensor([-2.0, -2.0, 0.0, 1.0, 3.0], dtype=F64)
    assert y.mean() == y.median() == 0
    found = line_search(Huber(0.9, 2.0), y, torch.zeros_like(y), torch.ones_like(y))
    assert abs(found + 0.25) < 1e-12


def test_overrides_agree_with_what_is_derived_from_the_value():
    p = Problem(0, 30, 1, 1.0)
    y, F = p.uniform(31), p.normal(31)
    for loss in losses(y, F):
        torch.testing.assert_close(loss.negative_gradient(y, F), Loss.negative_gradient(loss, y, F))
        if not isinstance(loss, Huber):  # its start is the median, by convention
            found = line_search(loss, y, torch.zeros_like(y), torch.ones_like(y))
            torch.testing.assert_close(loss.start(y), found, atol=1e-9, rtol=0)
    for loss in (SquaredError(), AbsoluteError()):  # the others take one step
        torch.testing.assert_close(loss.leaf(y, F), Loss.leaf(loss, y, F), atol=1e-9, rtol=0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_search_finds_formulas_in_both_directions(sign):
    p = Problem(1, 40, 1, 1.0)
    y, F, h = p.normal(40), p.normal(40), sign * p.normal(40)
    rho = (y - F) @ h / (h @ h)
    torch.testing.assert_close(line_search(SquaredError(), y, F, h), rho, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(line_search(SquaredError(), y, F, 1e-9 * h), 1e9 * rho, atol=0, rtol=1e-12)
    for scale in (1e9, 1e20):  # steps far smaller than a rounding error of 1
        torch.testing.assert_close(line_search(SquaredError(), y, F, scale * h), rho / scale, atol=0, rtol=1e-12)
    single = [a.float() for a in (y, F, 1e9 * h)]
    torch.testing.assert_close(line_search(SquaredError(), *single), (rho / 1e9).float(), atol=0, rtol=1e-5)


def test_the_search_at_its_limits():
    y = torch.tensor([0.0, 1.0], dtype=F64)
    zero = torch.zeros(2, dtype=F64)
    assert line_search(SquaredError(), y, zero, zero) == 0
    assert line_search(SquaredError(), y, zero, torch.tensor([1.0, 0.0], dtype=F64)) == 0  # orthogonal to what is left
    separated = line_search(LogLoss(), y, zero, torch.tensor([-1.0, 1.0], dtype=F64))
    assert 30 < separated <= 2.0**40
    single = line_search(SquaredError(), y.float(), zero.float(), y.float())
    assert single.dtype == torch.float32 and abs(single - 1) < 1e-6
    kink = line_search(AbsoluteError(), y, zero, torch.ones(2, dtype=F64))  # falls at 0, and nowhere else
    assert 0 <= kink < 1e-300


def test_log_loss_in_a_leaf_that_is_certain():
    certain = torch.full((3,), 800.0, dtype=F64)
    assert LogLoss().leaf(torch.ones(3, dtype=F64), certain) == 0
    assert LogLoss().value(torch.ones(3, dtype=F64), -certain).isfinite().all()


# ---------------------------------------------------------------- parity with scikit-learn


@pytest.mark.parametrize("loss", ["squared_error", "absolute_error", "huber"])
@pytest.mark.parametrize("tree", [{"max_depth": 1}, {"max_depth": 4, "min_samples_leaf": 5}])
def test_regressor_is_scikit_learns_stage_by_stage(loss, tree):
    X, y = DIABETES
    settings = {"loss": loss, "n_estimators": 30, "learning_rate": 0.3, "random_state": 1, "alpha": 0.8}
    ours = GradientBoosting(DecisionTreeRegressor(**tree), **settings).fit(X, y)
    theirs = GradientBoostingRegressor(**settings, **tree).fit(X, y)
    for a, b in zip(ours.staged_predict(X[:50] + 0.01), theirs.staged_predict(X[:50] + 0.01), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-8, rtol=0)
    factor = 2 if loss == "squared_error" else 1  # theirs is the mean square
    np.testing.assert_allclose(factor * ours.train_score_, theirs.train_score_, rtol=1e-10)


def test_classifier_is_scikit_learns_stage_by_stage():
    X, y = CELLS
    settings = {"n_estimators": 30, "learning_rate": 0.3, "random_state": 1}
    ours, theirs = (model(**settings).fit(X, y) for model in (GradientBoostingClassifier, TheirClassifier))
    stages = zip(ours.staged_decision_function(X), theirs.staged_decision_function(X), strict=True)
    assert max(np.abs(a - b.ravel()).max() for a, b in stages) < 1e-8
    np.testing.assert_allclose(ours.decision_function(X), theirs.decision_function(X), atol=1e-8)
    np.testing.assert_allclose(ours.predict_proba(X), theirs.predict_proba(X), atol=1e-8)
    assert (ours.predict(X) == theirs.predict(X)).all() and (list(ours.staged_predict(X))[-1] == ours.predict(X)).all()


def test_early_stopping_is_scikit_learns():
    X, y = DIABETES
    settings = {"n_estimators": 200, "n_iter_no_change": 5, "tol": 0.0, "random_state": 0}
    ours, theirs = GradientBoosting(**settings).fit(X, y), GradientBoostingRegressor(**settings).fit(X, y)
    assert ours.n_estimators_ == theirs.n_estimators_ == len(ours.estimators_) == len(ours.validation_score_) < 200
    np.testing.assert_allclose(ours.predict(X), theirs.predict(X), atol=1e-8)
    ours, theirs = (m(**settings).fit(*CELLS) for m in (GradientBoostingClassifier, TheirClassifier))
    assert ours.n_estimators_ == theirs.n_estimators_


def test_subsamples_differ_by_seed_and_repeat():
    X, y = DIABETES
    machine = GradientBoosting(subsample=0.5, n_estimators=5, random_state=0)
    once, again = (clone(machine).fit(X, y).predict(X) for _ in range(2))
    assert (once == again).all()
    assert np.abs(once - machine.set_params(random_state=1).fit(X, y).predict(X)).max() > 1
    assert machine.estimators_[0].tree_.n_node_samples[0] == 221


# ---------------------------------------------------------------- any learner


@pytest.mark.parametrize("degree", [0, 1])
def test_the_machine_with_a_smoother_is_l2_boost(degree):
    X, X_query = torch.randn(40, 2, dtype=F64), torch.randn(7, 2, dtype=F64)
    y = torch.randn(40, dtype=F64)
    recipe = partial(kernel_smoother, bandwidth=1.2, degree=degree)
    machine = GradientBoosting(recipe, n_estimators=6, learning_rate=0.4, init="zero", line_search=None)
    machine.fit(X.numpy(), y.numpy())
    S, Q = recipe(X), recipe(X, X_query=X_query)
    for rows, query in ((X, None), (X_query, Q)):
        stages = zip(machine.staged_predict(rows.numpy()), staged_l2_boost(S, y, 6, 0.4, query=query), strict=True)
        for a, b in stages:
            np.testing.assert_allclose(a, b, atol=1e-12)


def test_attention_and_least_squares_inside():
    X, y = DIABETES
    attention = lambda X, X_query: softmax_weights(X_query, X, 0.01)
    machine = GradientBoosting(attention, n_estimators=20, learning_rate=1.0).fit(X, y)
    assert (np.diff(machine.train_score_) < 0).all()  # the search sees to it
    line = GradientBoosting(LinearRegression(), n_estimators=3, learning_rate=1.0).fit(X, y)
    np.testing.assert_allclose(line.predict(X), LinearRegression().fit(X, y).predict(X), atol=1e-9)
    np.testing.assert_allclose(line.steps_[0], 1.0, atol=1e-10)


@pytest.mark.parametrize("loss", ["absolute_error", "huber", "log_loss"])
def test_one_step_a_tree_and_one_a_leaf_both_go_down(loss):
    X, y = DIABETES
    y = y / 400 if loss == "log_loss" else y
    scores = {}
    for how in ("global", "leaf"):
        machine = GradientBoosting(loss=loss, line_search=how, n_estimators=20, random_state=0).fit(X, y)
        scores[how] = machine.train_score_
        assert scores[how][-1] < scores[how][0]
    assert (np.diff(scores["global"]) <= 1e-9).all() or loss == "huber"  # whose δ moves
    assert np.abs(scores["global"] - scores["leaf"]).max() > 1e-4


def test_log_loss_predicts_probabilities():
    X, y = CELLS
    shares = GradientBoosting(loss="log_loss", n_estimators=10, random_state=0).fit(X, y).predict(X)
    labels = GradientBoostingClassifier(n_estimators=10, random_state=0).fit(X, y)
    np.testing.assert_allclose(shares, labels.predict_proba(X)[:, 1], atol=1e-12)


def test_a_loss_that_is_only_a_value():
    class Again(Loss):
        def value(self, y, F):
            return 0.5 * (y - F) ** 2

    X, y = DIABETES
    a, b = (
        GradientBoosting(loss=loss, n_estimators=5, random_state=0).fit(X, y) for loss in (Again(), "squared_error")
    )
    np.testing.assert_allclose(a.predict(X), b.predict(X), rtol=1e-10)
    with pytest.raises(NotImplementedError):
        Loss().value(torch.ones(1), torch.ones(1))


def test_a_loss_is_asked_whatever_it_is_made_of():
    """A subclass keeps what it overrides: the constant of a leaf, the loss of the coming round."""

    class Half(SquaredError):
        def leaf(self, y, F):
            return super().leaf(y, F) / 2

    class Told(Huber):
        rounds = 0

        def at(self, y, F):
            coming = super().at(y, F)
            coming.rounds += 1
            seen.append(coming)
            return coming

    X, y = DIABETES
    settings = dict(learning_rate=1.0, n_estimators=1, init="zero", random_state=0)
    half, whole = (GradientBoosting(loss=loss, **settings).fit(X, y).predict(X) for loss in (Half(), "squared_error"))
    np.testing.assert_allclose(half, whole / 2)
    told, seen = Told(0.8), []
    GradientBoosting(loss=told, n_estimators=3, random_state=0).fit(X, y)
    assert [(type(one), one.rounds, one.alpha) for one in seen] == [(Told, n, 0.8) for n in (1, 2, 3)]
    assert told.rounds == 0 and told.delta == math.inf


@pytest.mark.parametrize("how", ["leaf", "auto"])
def test_leaves_that_another_criterion_made_get_their_best_constant(how):
    X, y = DIABETES
    tree = DecisionTreeRegressor(criterion="absolute_error", max_depth=2)
    machine = GradientBoosting(tree, learning_rate=1.0, n_estimators=1, line_search=how, random_state=0).fit(X, y)
    leaves, F = machine.estimators_[0].apply(X), machine.predict(X)
    for leaf in np.unique(leaves):
        np.testing.assert_allclose(F[leaves == leaf], y[leaves == leaf].mean())


@pytest.mark.parametrize("loss", ["absolute_error", "huber", "log_loss", "labels"])
def test_a_constrained_tree_keeps_its_order(loss):
    """In no round do predictions fall along the rising feature; leaves of their own are refused."""
    tree = DecisionTreeRegressor(max_depth=5, monotonic_cst=[1, 0], random_state=0)
    grid = np.linspace(-2, 2, 200)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        X = rng.normal(size=(150, 2))
        y = np.sin(3 * X[:, 0]) + X[:, 1] + rng.standard_t(2, size=150)
        settings = dict(learning_rate=0.5, n_estimators=8, random_state=0)
        y = 1.0 * (y > 0) if loss in ("log_loss", "labels") else y
        if loss == "labels":
            machine = GradientBoostingClassifier(tree, **settings).fit(X, y)
        else:
            machine = GradientBoosting(tree, loss=loss, **settings).fit(X, y)
        for v in (-1.0, 0.0, 1.0):
            rows = np.stack([grid, np.full(200, v)], axis=1)
            stages = machine.staged_decision_function if loss == "labels" else machine.staged_predict
            assert all((np.diff(F) >= -1e-12).all() for F in stages(rows))
        assert machine.train_score_[-1] < machine.train_score_[0]
    with refused("line_search"):
        machine.set_params(line_search="leaf").fit(X, y)


def test_a_constrained_learner_takes_no_step_back():
    """A constraint may turn a fit against the residual; then no step is taken, as a negative one would fall."""

    class Rising(BaseEstimator):
        def __init__(self, monotonic_cst=None):
            self.monotonic_cst = monotonic_cst

        def fit(self, X, r):
            return self

        def predict(self, X):
            return X[:, 0]

    X = np.arange(10.0)[:, None]
    free = GradientBoosting(Rising(), n_estimators=2).fit(X, -X[:, 0])
    bound = GradientBoosting(Rising([1]), n_estimators=2).fit(X, -X[:, 0])
    assert (free.steps_ < 0).all() and (bound.steps_ == 0).all()


@pytest.mark.parametrize("how", ["leaf", "global", None])
@pytest.mark.parametrize("loss", ["squared_error", "absolute_error", "huber", "log_loss", "labels"])
def test_weights_count_as_repetition_and_zero_as_absence(loss, how):
    X, y = (a[:60] for a in DIABETES)
    w = np.random.default_rng(0).integers(0, 4, 60)
    y = 1.0 * (y > 140) if loss in ("log_loss", "labels") else y
    y = np.where(y > 0, y, 7.0) if loss == "labels" else y
    kind = GradientBoostingClassifier if loss == "labels" else partial(GradientBoosting, loss=loss)
    tree = DecisionTreeRegressor(max_depth=1, random_state=0)
    make = lambda: kind(tree, line_search=how, n_estimators=10, random_state=0)
    weighted, repeated = make().fit(X, y, sample_weight=w), make().fit(X.repeat(w, 0), y.repeat(w))
    np.testing.assert_allclose(weighted.init_, repeated.init_, rtol=1e-12)
    np.testing.assert_allclose(weighted.train_score_, repeated.train_score_, rtol=1e-9)
    spoiled = np.where(w == 0, 0.5 if loss != "labels" else 3.0, y)  # a third label, too
    np.testing.assert_array_equal(make().fit(X, spoiled, w).predict(X), weighted.predict(X))
    held = make().set_params(n_iter_no_change=3, subsample=0.5).fit(X, y, w)
    assert np.isfinite(held.validation_score_).all()


def test_quantiles_do_not_depend_on_the_unit_of_weights():
    y = torch.arange(10, dtype=F64)
    for unit in (0.1, 0.3, 1.0, 7e5):
        w = torch.full((10,), unit, dtype=F64)
        assert AbsoluteError().start(y, w) == AbsoluteError().start(y) == 4.5
        assert AbsoluteError().leaf(y, 0 * y, w) == 4 and Huber(0.8).at(y, 0 * y, w).delta == 7


def test_weights_that_nothing_can_use_are_refused():
    class Plain(SquaredError):
        def leaf(self, y, F):
            return super().leaf(y, F)

    X, y = np.arange(10.0).reshape(5, 2), np.arange(5.0)
    for w in ([1, 1, -1, 1, 1], [0] * 5, [1e308] * 5):
        for kind in (GradientBoosting, GradientBoostingClassifier):
            with pytest.raises(ValueError, match="(?i)sample.weight"):
                kind().fit(X, y > 2, w)
    learners = (RECIPE, make_pipeline(StandardScaler(), DecisionTreeRegressor()), Constant())
    for settings in (*(dict(base_learner=one) for one in learners), dict(loss=Plain())):
        machine = GradientBoosting(**settings)
        with refused("sample_weight"):
            machine.fit(X, y, np.ones(5))
        assert not hasattr(machine, "estimators_")
        machine.fit(X, y)
    with refused("weights"):
        line_search(SquaredError(), torch.ones(2), torch.zeros(2), torch.ones(2), -torch.ones(2))


@pytest.mark.parametrize("wrap", [lambda tree: make_pipeline(StandardScaler(), tree), TransformedTargetRegressor])
def test_the_seed_reaches_a_learner_within_the_learner(wrap):
    X, y = DIABETES

    def fit(seed, inner=None):
        tree = DecisionTreeRegressor(max_depth=1, splitter="random", random_state=inner)
        return GradientBoosting(wrap(tree), n_estimators=4, random_state=seed).fit(X, y).predict(X)

    np.testing.assert_array_equal(fit(0), fit(0))
    assert not np.array_equal(fit(0), fit(1))
    np.testing.assert_array_equal(fit(0, 7), fit(1, 7))  # a seed that was given stays
    machine = GradientBoosting(wrap(DecisionTreeRegressor()), n_estimators=4, random_state=0).fit(X, y)
    seeds = {str({k: v for k, v in a.get_params().items() if "random_state" in k}) for a in machine.estimators_}
    assert len(seeds) == 4  # another one in each round


class Constant(BaseEstimator):
    """Predicts the mean residual, in a shape and a dtype of its own."""

    def __init__(self, shape=(-1,), dtype=np.float64):
        self.shape, self.dtype = shape, dtype

    def fit(self, X, r):
        self.mean = r.mean()
        return self

    def predict(self, X):
        return np.full(len(X), self.mean, self.dtype).reshape(self.shape)


@pytest.mark.parametrize("how", ["global", None])
def test_predictions_of_a_learner_are_one_number_a_row(how):
    X, y = DIABETES
    settings = dict(n_estimators=3, line_search=how, init="zero", n_iter_no_change=3, random_state=0)
    single = GradientBoosting(Constant(dtype=np.float32), **settings).fit(X, y).predict(X)
    double = GradientBoosting(Constant(), **settings).fit(X, y).predict(X)
    assert single.dtype == double.dtype == np.float64
    np.testing.assert_allclose(single, double, rtol=1e-6)
    with refused("base_learner"):
        GradientBoosting(Constant(shape=(-1, 1)), **settings).fit(X, y)


def test_targets_of_rows_held_out_are_checked():
    X, y = np.arange(40.0)[:, None], np.arange(40) % 2.0
    held = train_test_split(np.arange(40), test_size=0.1, random_state=0)[1]
    y[held[0]] = 7
    with refused("y"):
        GradientBoosting(loss="log_loss", n_iter_no_change=2, random_state=0).fit(X, y)


@pytest.mark.parametrize(
    "estimator",
    [
        GradientBoosting(),
        GradientBoosting(loss="huber", n_estimators=10, subsample=0.8, random_state=0),
        GradientBoosting(RECIPE, n_estimators=5),
        GradientBoosting(LinearRegression(), n_estimators=5),
        GradientBoostingClassifier(n_estimators=10),
        GradientBoostingClassifier(RECIPE, n_estimators=5),
    ],
    ids=["default", "huber", "smoother", "line", "classifier", "classifier-smoother"],
)
def test_estimators_satisfy_scikit_learn(estimator):
    names = [name for name in vars(estimator_checks) if name.startswith("check_") and "sample_weight" in name]
    takes = "a smoother takes no weights" if estimator.base_learner is RECIPE else None
    drawn = "rows, or splits that tie, are drawn" if estimator.base_learner is None else None
    reasons = {name: takes or (drawn if "equivalence" in name else None) for name in names}
    failing = {name: reason for name, reason in reasons.items() if reason}
    results = check_estimator(estimator, on_skip=None, expected_failed_checks=failing)
    passed = [result["check_name"] for result in results if result["status"] == "passed"]
    assert len(results) > 40 and all(result["status"] in ("passed", "skipped", "xfail") for result in results)
    assert failing or "check_sample_weight_equivalence_on_dense_data" in passed


def test_pickles_and_clones():
    X, y = DIABETES
    for machine in (GradientBoosting(n_estimators=3), GradientBoosting(RECIPE, n_estimators=3)):
        fitted = pickle.loads(pickle.dumps(machine.fit(X, y)))
        np.testing.assert_array_equal(fitted.predict(X), machine.predict(X))
    labels = np.where(y > 140, "more", "less")
    fitted = pickle.loads(pickle.dumps(GradientBoostingClassifier(n_estimators=3).fit(X, labels)))
    assert set(fitted.predict(X)) == {"less", "more"} == set(fitted.classes_)
    assert clone(GradientBoosting(RECIPE, tol=0.5)).tol == 0.5


def test_importing_the_module_loads_no_scikit_learn():
    code = "import gbattn.boosting, sys; print([m for m in ('sklearn', 'matplotlib', 'scipy') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
    import gbattn.boosting

    with pytest.raises(AttributeError, match="Boosting"):
        gbattn.boosting.__getattr__("Boosting")


# ---------------------------------------------------------------- shapes, precision, gradients


def test_shapes_of_values_batches_and_stacks():
    X, y = torch.randn(3, 9, 2, dtype=F64), torch.randn(3, 9, 2, dtype=F64)
    h = torch.tensor([0.5, 1.0], dtype=F64)
    S, Q = kernel_smoother(X, h), kernel_smoother(X, h, X[:, :4])
    assert l2_boost(S, y, 3).shape == (2, 3, 9, 2) and l2_boost(S, y, 3, query=Q).shape == (2, 3, 4, 2)
    torch.testing.assert_close(l2_boost(S, y, 3, 0.5)[1, 2], l2_boost(S[1, 2], y[2], 3, 0.5))
    flat = y[0, :, 0]
    assert l2_boost(S[:, 0], flat, 3).shape == (2, 9) and l2_boost(S[0, 0], flat, 3, query=Q[0, 0]).shape == (4,)
    torch.testing.assert_close(sharpen(S[:, 0], flat, 4), sharpen(S[:, 0], flat[:, None], 4)[..., 0])
    assert boosted_smoother(S, [1, 5, 2]).shape == (3, 2, 3, 9, 9) and boosted_smoother(S, 2).shape == S.shape
    torch.testing.assert_close(boosted_smoother(S, 4, 0.3) @ y, l2_boost(S, y, 4, 0.3))
    torch.testing.assert_close(twice(S, y), l2_boost(S, y, 2))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_dtype_is_kept_and_gradients_are_right(dtype):
    X, y = torch.randn(8, 2, dtype=F64), torch.randn(8, dtype=F64)
    S = kernel_smoother(X, 0.8).to(dtype)
    for found in (l2_boost(S, y.to(dtype), 5, 0.5), sharpen(S, y.to(dtype), 5), boosted_smoother(S, 5)):
        assert found.dtype == dtype
    if dtype == F64:
        inputs = [a.clone().requires_grad_() for a in (S, y)]
        assert torch.autograd.gradcheck(lambda S, y: l2_boost(S, y, 4, 0.7), inputs)


def test_l2_boost_forms_no_matrix():
    """A look of n = 20,000 values would not fit as a matrix power; S is only ever multiplied by values."""

    class Counted(torch.Tensor):
        shapes = []

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            found = super().__torch_function__(function, types, args, kwargs or {})
            if function in (torch.Tensor.__matmul__, torch.matmul, torch.Tensor.matmul):
                cls.shapes.append(tuple(found.shape))
            return found

    S = torch.full((30, 30), 1 / 30, dtype=F64).as_subclass(Counted)
    l2_boost(S, torch.randn(30, dtype=F64), 7)
    assert Counted.shapes == [(30, 1)] * 7


def test_one_matrix_for_all_rounds_is_checked_once(monkeypatch):
    checked, check = [], boosting.check_rows
    monkeypatch.setattr(boosting, "check_rows", lambda S, **others: checked.append(S) or check(S, **others))
    S, y = torch.full((5, 5), 0.2, dtype=F64), torch.ones(5, dtype=F64)
    boosted_smoother(S, [50, 70])
    l2_boost(S, y, 50)
    assert len(checked) == 2
    l2_boost([S, S.clone(), S], y, 3)
    assert len(checked) == 4


# ---------------------------------------------------------------- errors

S, y = torch.full((5, 5), 0.2, dtype=F64), torch.ones(5, dtype=F64)
X5 = np.arange(10.0).reshape(5, 2)


def fit(**settings):
    return GradientBoosting(**settings).fit(X5, np.arange(5.0))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: l2_boost(S, y, 0), "rounds"),
        (lambda: l2_boost(S, y, 2, 0.0), "shrinkage"),
        (lambda: l2_boost(S, y.numpy(), 2), "y"),
        (lambda: l2_boost(S, y[0], 2), "y"),
        (lambda: l2_boost(S, y[:4], 2), "y"),
        (lambda: l2_boost(S, y.float(), 2), "y"),
        (lambda: l2_boost(S[:4], y, 2), "smoother"),
        (lambda: l2_boost([S], y, 2), "smoother"),
        (lambda: l2_boost(S, y, 2, query=[S]), "query"),
        (lambda: l2_boost(S, y, 2, query=S[:, :4]), "query"),
        (lambda: l2_boost(S, y, 2, query=S.float()), "query"),
        (lambda: boosted_smoother(S, [1, 0]), "rounds"),
        (lambda: boosted_smoother(S, []), "rounds"),
        (lambda: boosted_smoother(S, 2, -1.0), "shrinkage"),
        (lambda: boosted_smoother(S[0], 2), "smoother"),
        (lambda: sharpen(S, y, 1.5), "rounds"),
        (lambda: Huber(1.0), "alpha"),
        (lambda: Huber(delta=-1.0), "delta"),
        (lambda: line_search(SquaredError, y, y, y), "loss"),
        (lambda: line_search(SquaredError(), y.long(), y, y), "y"),
        (lambda: line_search(SquaredError(), y, 0.0, y), "F"),
        (lambda: line_search(SquaredError(), y, y[:1], y), "F"),
        (lambda: line_search(SquaredError(), y[None], y, y), "y"),
        (lambda: line_search(SquaredError(), y, y.float(), y), "F"),
        (lambda: line_search(SquaredError(), y, y, y / 0), "h"),
        (lambda: fit(base_learner=3), "base_learner"),
        (lambda: fit(base_learner=DecisionTreeRegressor), "base_learner"),
        (lambda: fit(loss="hinge"), "loss"),
        (lambda: fit(loss=SquaredError), "loss"),
        (lambda: fit(loss="huber", alpha=2), "alpha"),
        (lambda: fit(loss="log_loss"), "y"),
        (lambda: fit(n_estimators=0), "n_estimators"),
        (lambda: fit(learning_rate=-0.1), "learning_rate"),
        (lambda: fit(subsample=1.5), "subsample"),
        (lambda: fit(line_search="wolfe"), "line_search"),
        (lambda: fit(base_learner=RECIPE, line_search="leaf"), "line_search"),
        (lambda: fit(init="mean"), "init"),
        (lambda: fit(n_iter_no_change=3, validation_fraction=2), "validation_fraction"),
        (lambda: fit(n_iter_no_change=3, tol=math.nan), "tol"),
        (lambda: fit(n_iter_no_change=0), "n_iter_no_change"),
        (lambda: GradientBoostingClassifier().fit(X5, np.ones(5)), "y"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
