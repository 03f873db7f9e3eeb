"""The machine of chapter 5a with what estimators need: weights, subsamples, rows held out, steps of leaves, options."""

from collections import deque
from collections.abc import Callable
from itertools import islice

import numpy as np
import torch

from gbattn.ground.arguments import (
    BETWEEN_0_AND_1,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    Rule,
    check,
    check_fields,
    number,
    one_of,
    optional,
    require,
)
from gbattn.ground.estimators import hold_out, new_learners, two_classes, weighted_rows
from gbattn.ground.quantiles import weighted_mean
from gbattn.ground.rounds import is_loss


def _is_base_learner(x: object) -> bool:
    if x is None or isinstance(x, type):
        return x is None
    methods = ("fit", "predict", "get_params")
    recipe = callable(x) and not hasattr(x, "fit")
    return recipe or all(hasattr(x, name) for name in methods)


_RULES: dict[str, Rule] = {
    "base_learner": (
        _is_base_learner,
        "None, a regressor, or a function from rows to a smoother",
    ),
    "n_estimators": COUNT,
    "learning_rate": POSITIVE,
    "subsample": number("a number in (0, 1]", lambda x: 0 < x <= 1),
    "line_search": one_of("auto", "leaf", "global", None),
    "init": one_of(None, "zero"),
    "n_iter_no_change": optional(COUNT),
    "validation_fraction": BETWEEN_0_AND_1,
    "tol": NOT_NEGATIVE,
}


def named_loss(loss: object, losses: dict[str, Callable]) -> object:
    """The loss itself, or the one of this name."""
    if is_loss(loss):
        return loss
    known, want = one_of(*losses)
    check(loss=(loss, (known, f"a Loss or {want}")))
    return losses[loss]()


class Regressor:
    """The options and predictions of `gbattn.boosting.GradientBoosting`, which says what they are."""

    def __init__(
        self,
        base_learner=None,
        *,
        loss="squared_error",
        learning_rate=0.1,
        n_estimators=100,
        line_search="auto",
        subsample=1.0,
        init=None,
        alpha=0.9,
        n_iter_no_change=None,
        validation_fraction=0.1,
        tol=1e-4,
        random_state=None,
    ):
        self.base_learner, self.loss = base_learner, loss
        self.learning_rate, self.n_estimators = learning_rate, n_estimators
        self.line_search, self.subsample = line_search, subsample
        self.init, self.alpha, self.tol = init, alpha, tol
        self.n_iter_no_change = n_iter_no_change
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def predict(self, X):
        """Predict targets for features X (n_samples, n_features): (n_samples,)."""
        F = torch.from_numpy(_last(self, X))
        return self._loss.response(F).numpy()

    def staged_predict(self, X):
        """Yield the predictions after each round, (n_samples,) each."""
        for F in _staged(self, X):
            yield self._loss.response(torch.from_numpy(F)).numpy()


class Classifier:
    """The options and predictions of `gbattn.boosting.GradientBoostingClassifier`, which says what they are."""

    def __init__(
        self,
        base_learner=None,
        *,
        learning_rate=0.1,
        n_estimators=100,
        line_search="auto",
        subsample=1.0,
        init=None,
        n_iter_no_change=None,
        validation_fraction=0.1,
        tol=1e-4,
        random_state=None,
    ):
        self.base_learner, self.init, self.tol = base_learner, init, tol
        self.learning_rate, self.n_estimators = learning_rate, n_estimators
        self.line_search, self.subsample = line_search, subsample
        self.n_iter_no_change = n_iter_no_change
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def __sklearn_tags__(self):
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags

    def decision_function(self, X):
        """Return the log-odds of the second class for features X (n_samples,
        n_features); shape (n_samples,)."""
        return _last(self, X)

    def staged_decision_function(self, X):
        """Yield the log-odds after each round, (n_samples,) each."""
        yield from _staged(self, X)

    def predict_proba(self, X):
        """Return the probabilities of both classes, shape (n_samples, 2)."""
        F = torch.from_numpy(_last(self, X))
        return torch.stack([(-F).sigmoid(), F.sigmoid()], dim=1).numpy()

    def predict(self, X):
        """Return the more probable label of each row of X, shape (n_samples,)."""
        second = _last(self, X) > 0  # which says if it is not fitted
        return self.classes_[second.astype(int)]

    def staged_predict(self, X):
        """Yield the labels predicted after each round, (n_samples,) each."""
        for F in _staged(self, X):
            yield self.classes_[(F > 0).astype(int)]


def fit_targets(machine, X, y, sample_weight, loss, line_search: Callable, *, means: bool):
    """Fit a regressor to the targets y, and return it.

    `line_search` is that of chapter 5a. `means` says whether the best constant of the loss is the mean of what is left,
    so that the leaves of a tree of least squares need no search.
    """
    from sklearn.utils.validation import validate_data

    X, y = validate_data(machine, X, y, dtype=np.float64, y_numeric=True)
    check_fields(machine, _RULES)
    X, y, w = weighted_rows(machine.base_learner, X, y, sample_weight, loss)
    return _fit(machine, X, y.astype(np.float64), w, loss, line_search, means)


def fit_labels(machine, X, y, sample_weight, loss, line_search: Callable):
    """Fit a classifier to the labels y, which are of two classes, and return it."""
    from sklearn.utils.validation import validate_data

    X, y = validate_data(machine, X, y, dtype=np.float64)
    check_fields(machine, _RULES)
    X, y, w = weighted_rows(machine.base_learner, X, y, sample_weight, loss)
    machine.classes_, labels = two_classes(y)
    return _fit(machine, X, labels.astype(np.float64), w, loss, line_search, stratify=labels)


def _fit(machine, X, y, w, loss, line_search, means=False, stratify=None):
    """The eight lines of chapter 5a: each round a learner fits the negative gradient of its rows."""
    from sklearn.utils import check_random_state

    rng = check_random_state(machine.random_state)
    (X, y, w), others = hold_out(machine, X, y, loss, w, stratify)
    of = lambda rows=slice(None): () if w is None else (w[rows],)
    start = 0.0 if machine.init == "zero" else loss.start(y, *of()).item()
    F, machine.init_ = torch.full_like(y, start), start
    machine.estimators_, machine.steps_, scores = [], [], []
    watch = None if others is None else _Watch(machine, *others)
    learners = new_learners(machine.base_learner, rng)
    for learner in islice(learners, machine.n_estimators):
        rows = _drawn(machine, rng, len(y))
        loss = loss.at(y, F, *of())
        r = loss.negative_gradient(y, F).numpy()
        weight = [("sample_weight", a.numpy()) for a in of(rows)]
        learner.fit(X[rows], r[rows], **dict(weight))
        rho = _step(machine, loss, line_search, means, learner, X, y, F, rows, of)
        machine.estimators_.append(learner)
        machine.steps_.append(machine.learning_rate * rho)
        F = F + machine.steps_[-1] * _predictions(learner, X)
        scores.append(weighted_mean(loss.value(y, F), w).item())
        if watch is not None and watch.stops(machine, loss):
            break
    machine.n_estimators_, machine._loss = len(scores), loss
    machine.steps_, machine.train_score_ = map(np.array, (machine.steps_, scores))
    if watch is not None:
        machine.validation_score_ = np.array(watch.losses)
    return machine


def _drawn(machine, rng, n):
    """The rows of a round, in order."""
    if machine.subsample == 1:
        return np.arange(n)
    size = max(1, int(machine.subsample * n))
    return np.sort(rng.choice(n, size, replace=False))


def _step(machine, loss, line_search, means, learner, X, y, F, rows, of):
    """The factor ρ of one round; for a tree, each leaf is set to its own."""
    how = machine.line_search
    settings = getattr(learner, "get_params", dict)()
    constrained = any(name.split("__")[-1] == "monotonic_cst" and value is not None for name, value in settings.items())
    searchable = hasattr(learner, "tree_") and not constrained
    if how == "auto":
        how = "leaf" if searchable else "global"
    got = f"'leaf' with a {type(learner).__name__}"
    got += " that has monotonic_cst" if constrained else ""
    want = "'leaf' with a tree without monotonic_cst, or another line search"
    require(how != "leaf" or searchable, "line_search", got, want)
    # A tree of least squares has the best constants in its leaves.
    criterion = getattr(learner, "criterion", "")
    squared = criterion in ("squared_error", "friedman_mse")
    if how == "leaf" and not (squared and means):
        leaves = learner.apply(X)
        constants = learner.tree_.value[:, 0, 0]
        for leaf in np.unique(leaves[rows]):
            here = torch.from_numpy(rows[leaves[rows] == leaf])
            constants[leaf] = loss.leaf(y[here], F[here], *of(here))
    elif how == "global":
        h = _predictions(learner, X[rows])
        step = line_search(loss, y[rows], F[rows], h, *of(rows)).item()
        return max(step, 0.0) if constrained else step
    return 1.0


def _predictions(learner, X: np.ndarray) -> torch.Tensor:
    """The predictions of a base learner, one number per row."""
    h = np.asarray(learner.predict(X), dtype=np.float64)
    got, want = f"predictions of shape {h.shape}", f"shape ({len(X)},)"
    require(h.shape == (len(X),), "base_learner", got, want)
    return torch.as_tensor(h)


class _Watch:
    """The mean loss of the rows held out, after each round."""

    def __init__(self, machine, X, y, w):
        self.X, self.y, self.w, self.losses = X, y, w, []
        self.F = torch.full_like(y, machine.init_)

    def stops(self, machine, loss):
        """Add the last round; return whether the loss has stopped falling."""
        h = _predictions(machine.estimators_[-1], self.X)
        self.F = self.F + machine.steps_[-1] * h
        self.losses.append(weighted_mean(loss.value(self.y, self.F), self.w).item())
        before = self.losses[:-1][-machine.n_iter_no_change :]
        waited = len(before) == machine.n_iter_no_change
        return waited and self.losses[-1] + machine.tol >= max(before)


def _staged(machine, X):
    """Estimates after each round, before `Loss.response`."""
    from sklearn.utils.validation import check_is_fitted, validate_data

    check_is_fitted(machine)
    X = validate_data(machine, X, dtype=np.float64, reset=False)
    X = np.ascontiguousarray(X)
    F = np.full(len(X), machine.init_)
    for learner, step in zip(machine.estimators_, machine.steps_):
        F = F + step * _predictions(learner, X).numpy()
        yield F


def _last(machine, X):
    return deque(_staged(machine, X), maxlen=1)[0]
