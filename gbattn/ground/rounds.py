"""What a line search and the rounds of a linear smoother take."""

from collections.abc import Sequence

import torch

from gbattn.ground.arguments import COUNT, POSITIVE, check, require


def is_loss(x: object) -> bool:
    """Whether x is an object with a negative gradient, and not a class."""
    return hasattr(x, "negative_gradient") and not isinstance(x, type)


def check_search(loss, y, F, h, weights) -> None:
    """Check the arguments of `gbattn.boosting.line_search`."""

    def like_y(x):
        fits = isinstance(x, torch.Tensor) and x.is_floating_point() and x.ndim == 1
        return fits and x.dtype == y.dtype and x.shape == y.shape

    vector = like_y, "a floating tensor (n,), as y, F and h"
    check(loss=(loss, (is_loss, "a Loss")), y=(y, vector), F=(F, vector), h=(h, vector))
    for name, x in (("y", y), ("F", F), ("h", h)):
        require(bool(x.isfinite().all()), name, "NaN or infinite entries", "finite entries")
    if weights is not None:
        check(weights=(weights, vector))
        fits = bool((weights.isfinite() & (weights >= 0)).all())
        require(fits, "weights", "other entries", "finite entries, 0 or more")


def read_rounds(smoother, y, rounds, shrinkage, query) -> tuple[torch.Tensor, list, list]:
    """Check the arguments of `gbattn.boosting.staged_l2_boost`, but for the smoothers' entries; return y as columns, and
    the smoothers and the query smoothers of the rounds."""
    check(rounds=(rounds, COUNT), shrinkage=(shrinkage, POSITIVE))
    fits = isinstance(y, torch.Tensor) and y.ndim > 0
    got = "a scalar" if isinstance(y, torch.Tensor) else type(y).__name__
    require(fits, "y", got, "a torch.Tensor of shape (n,) or (…, n, c)")
    columns = y[:, None] if y.ndim == 1 else y
    smoothers, queries = (list(S) if isinstance(S, Sequence) else [S] * rounds for S in (smoother, query))
    want = f"one matrix, or one for each of {rounds} rounds"
    for name, S in (("smoother", smoothers), ("query", queries)):
        require(len(S) == rounds, name, f"{len(S)} of them", want)
    n, dtype = columns.shape[-2], columns.dtype
    for Q in queries if query is not None else ():
        fits = isinstance(Q, torch.Tensor) and Q.ndim > 1 and Q.shape[-1] == n
        got = f"shape {tuple(Q.shape)}" if isinstance(Q, torch.Tensor) else Q
        require(fits, "query", got, f"shape (…, m, n) with n = {n}, as in y")
        require(Q.dtype == dtype, "query", f"dtype {Q.dtype}", f"{dtype}, as in y")
    return columns, smoothers, queries


def read_counts(rounds) -> list[int]:
    """The numbers of rounds, checked: one, or each of a sequence."""
    several = isinstance(rounds, (Sequence, range)) and len(rounds) > 0
    counts = list(rounds) if several else [rounds]
    for count in counts:
        check(rounds=(count, COUNT))
    return counts
