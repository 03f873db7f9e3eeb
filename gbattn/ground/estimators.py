"""What estimators in scikit-learn's form share: how their classes are made, arrays, weights, learners and rows held out."""

import warnings
from collections.abc import Callable, Iterator
from inspect import signature

import numpy as np
import torch

from gbattn.ground.arguments import require
from gbattn.ground.packages import check_packages


def lazy_estimators(namespace: dict, **classes: tuple) -> Callable[[str], type]:
    """The `__getattr__` of a module that makes its estimators when they are first asked for, so that the module loads
    without scikit-learn: by name, the class with their docstring and methods, and the names of scikit-learn's mixins."""
    module = namespace["__name__"]

    def make(name: str) -> type:
        if name not in classes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        check_packages("estimators", "sklearn")
        from sklearn import base

        body, *mixins = classes[name]
        bases = (body, *(getattr(base, mixin) for mixin in mixins), base.BaseEstimator)
        namespace[name] = type(name, bases, {"__doc__": body.__doc__, "__module__": module})  # where pickle finds it
        return namespace[name]

    return make


def read_arrays(estimator, X, y, sample_weight) -> dict[str, torch.Tensor]:
    """What an estimator fits, checked as scikit-learn wants it, as tensors X, Y and, if given, weights."""
    from sklearn.utils.validation import _check_sample_weight, validate_data

    kinds = dict(dtype=[np.float64, np.float32], y_numeric=True)
    X, y = validate_data(estimator, X, y, multi_output=True, **kinds)
    finite = bool(abs(y).max() <= np.finfo(X.dtype).max)
    got, want = f"values beyond {X.dtype}", f"finite {X.dtype}, as X has"
    require(finite, "y", got, want)
    arrays = {"X": X, "Y": y.astype(X.dtype, copy=False)}
    if sample_weight is not None:
        w = _check_sample_weight(sample_weight, X, dtype=X.dtype)
        positive = bool(w.min() >= 0 and w.max() > 0)
        want = "entries that are not negative, and one that is positive"
        got = f"entries from {w.min():.3g} to {w.max():.3g}"
        require(positive, "sample_weight", got, want)
        arrays["weights"] = w
    with warnings.catch_warnings():  # of read-only arrays; nothing here writes
        warnings.filterwarnings("ignore", ".* array is not writable")
        return {name: torch.from_numpy(a.copy() if min(a.strides) < 0 else a) for name, a in arrays.items()}


def weighted_rows(base_learner, X, y, sample_weight, loss) -> tuple:
    """The rows of positive weight, X and y, and their weights if any were given."""
    from sklearn.utils.validation import _check_sample_weight, has_fit_parameter

    if sample_weight is None:
        return X, y, None
    w = _check_sample_weight(sample_weight, X, dtype=np.float64)
    most = np.finfo(w.dtype).max / len(w)
    fits = bool(w.min() >= 0 and 0 < w.max() < most)
    want = "entries that are not negative, with a positive, finite sum"
    got = f"entries from {w.min():.3g} to {w.max():.3g}"
    require(fits, "sample_weight", got, want)
    fits = base_learner is None or (hasattr(base_learner, "fit") and has_fit_parameter(base_learner, "sample_weight"))
    want = "None, or a base_learner whose fit takes sample_weight"
    require(fits, "sample_weight", f"weights with a {type(base_learner).__name__}", want)
    for method in (loss.start, loss.leaf, loss.at):
        fits = "weights" in signature(method).parameters
        got = f"weights with a {type(loss).__name__}"
        want = f"None, or a loss whose {method.__name__} takes weights"
        require(fits, "sample_weight", got, want)
    here = w > 0
    return X[here], y[here], w[here]


class Smoothing:
    """A recipe from rows to a smoother, as a regressor."""

    def __init__(self, recipe: Callable):
        self.recipe = recipe

    def fit(self, X, r):
        self.X, self.r = torch.tensor(X), torch.tensor(r)
        return self

    def predict(self, X):
        S = self.recipe(self.X, X_query=torch.tensor(X))  # (m, n)
        return (S @ self.r).numpy()


def new_learners(base, rng) -> Iterator:
    """Unfitted base learners, without end: clones of a regressor, by default a tree; `Smoothing` of a recipe."""
    from sklearn.base import clone
    from sklearn.tree import DecisionTreeRegressor

    if base is None:
        base = DecisionTreeRegressor(max_depth=3)
    if not hasattr(base, "fit"):
        while True:
            yield Smoothing(base)
    names = base.get_params().items()
    draws = [name for name, value in names if name.split("__")[-1] == "random_state" and value is None]
    while True:
        # A learner within the learner gets a seed: a fit that clones it would
        # clone a generator, too, and not advance this one.
        seeds = {name: rng if name == "random_state" else rng.randint(2**31 - 1) for name in draws}
        learner = clone(base)
        yield learner.set_params(**seeds) if seeds else learner


def hold_out(machine, X, y, loss, w, stratify) -> tuple:
    """The rows to fit and the rows to watch, checked: X, y and weights of each; the latter are None unless
    `n_iter_no_change` asks for them."""
    from sklearn.model_selection import train_test_split

    as_tensor = lambda x: None if x is None else torch.tensor(x)
    loss.check(torch.tensor(y))
    X = np.ascontiguousarray(X)
    if machine.n_iter_no_change is None:
        return (X, torch.tensor(y), as_tensor(w)), None
    arrays = (X, y) if w is None else (X, y, w)
    options = dict(random_state=machine.random_state, stratify=stratify)
    options |= dict(test_size=machine.validation_fraction)
    X, X_val, y, y_val, *parts = train_test_split(*arrays, **options)
    w, w_val = map(torch.tensor, parts) if parts else (None, None)
    loss.check(torch.tensor(y))  # of the rows to fit alone, too
    return (X, torch.tensor(y), w), (X_val, torch.tensor(y_val), w_val)


def two_classes(y) -> tuple[np.ndarray, np.ndarray]:
    """The two labels in y, and the place of each entry among them."""
    from sklearn.utils import multiclass

    multiclass.check_classification_targets(y)
    kind = multiclass.type_of_target(y, input_name="y", raise_unknown=True)
    if kind != "binary":  # the sentence is scikit-learn's own
        raise ValueError(f"Only binary classification is supported. The type of the target is {kind}.")
    classes, labels = np.unique(y, return_inverse=True)
    require(len(classes) == 2, "y", f"{len(classes)} class", "two classes")
    return classes, labels
