"""The arithmetic of a whitening and of a least-squares fit: by QR, or from XᵀX and refined, with gradients. Chapter 1."""

import math
import sys
import warnings
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from gbattn.ground.arguments import require
from gbattn.ground.tensors import full_precision


def _outside_the_library() -> int:
    """The stack level, for warnings, of the first caller outside the library."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("gbattn"):
        level, frame = level + 1, frame.f_back
    return level


def triangular_factor(A: torch.Tensor) -> torch.Tensor:
    """The R of A = QR, differentiable where A requires a gradient."""
    wants_gradient = torch.is_grad_enabled() and A.requires_grad
    # Only the form with Q has a derivative.
    return torch.linalg.qr(A, mode="reduced" if wants_gradient else "r").R


def spectrum_of_gram(gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Singular values of X, largest first, and U, from XᵀX."""
    largest, limits = gram.diagonal(dim1=-2, dim2=-1).amax(-1), torch.finfo(gram.dtype)
    fits = (largest <= limits.max) & ((largest > limits.tiny / limits.eps) | (largest == 0))
    want = f"squares that {gram.dtype} can hold, or mode='accurate'"
    require(bool(fits.all()), "X", "entries too large or too small to square", want)
    eigenvalues, U = torch.linalg.eigh(gram)
    return eigenvalues.clamp_min(0).sqrt().flip(-1), U.flip(-1)


def inverse_lengths(singular: torch.Tensor, n: int, ridge: float, rcond: float | None, mode: str) -> torch.Tensor:
    """1/√(λ + ridge) for each direction, zero for those below the threshold."""
    d = singular.shape[-1]
    eps = torch.finfo(singular.dtype).eps
    if rcond is None:
        rcond = max(n, d) * eps if mode == "accurate" else math.sqrt(d * eps)
    length = torch.hypot(singular, singular.new_tensor(math.sqrt(ridge)))
    in_use = length > rcond * length[..., :1]
    rank = in_use.sum(-1)
    if bool((rank < d).any()):
        warnings.warn(
            f"X: rank {int(rank.min())} of d = {d} at rcond = {rcond:.1e}; the directions below the threshold "
            "are left out, which gives the solution of minimum norm",
            np.exceptions.RankWarning,
            stacklevel=_outside_the_library(),
        )
    return torch.where(in_use, 1 / length.where(in_use, 1), 0)


def _blocks(X, Y, weights, means, rows: int = 8192) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield XᵀW, X and Y in centred blocks that fit the cache."""
    for start in range(0, X.shape[-2], rows):
        x, y = X[..., start : start + rows, :], Y[..., start : start + rows, :]
        if means is not None:
            x, y = x - means[0], y - means[1]
        w = None if weights is None else weights[..., start : start + rows, None]
        yield (x if w is None else x * w).mT, x, y


def _mean(A, share) -> torch.Tensor:
    """Mean of the rows weighted by their shares, shape (…, 1, width), in two passes:
    the second recovers what rounding lost in the first."""
    mean = A[..., :1, :]
    for _ in range(2):
        step = 0
        for a, s in zip(A.split(8192, dim=-2), share.split(8192, dim=-1)):
            step = step + s[..., None, :] @ (a - mean)
        mean = mean + step
    return mean


def weighted_means(X, Y, weights) -> tuple[torch.Tensor, torch.Tensor]:
    """The means of X and Y over the weighted rows."""
    share = X.new_ones(X.shape[:-1]) if weights is None else weights
    share = share / share.amax(-1, keepdim=True)
    share = share / share.sum(-1, keepdim=True)
    return _mean(X, share), _mean(Y, share)


def _missed(X, Y, weights, means, ridge, coefficients) -> torch.Tensor:
    """The residual of the normal equations, XᵀW r − ridge·β with r = Y − Xβ."""
    missed = -ridge * coefficients
    for xw, x, y in _blocks(X, Y, weights, means):
        missed = missed + xw @ (y - x @ coefficients)
    return missed


class _Solved(torch.autograd.Function):
    """G⁻¹ b for G = Lᵀ(XᵀWX + ridge·I)L. L whitens X, so G is the identity and the
    value is b; derivatives of every order see that G changes with X and W."""

    generate_vmap_rule = True

    @staticmethod
    def forward(b, L, X, weights):
        return b.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output, *inputs[1:])

    @staticmethod
    def backward(ctx, gradient):
        solution, L, X, weights = ctx.saved_tensors
        with full_precision(X):
            g = _Solved.apply(gradient, L, X, weights)
            Ls, Lg = L @ solution, L @ g
            Xs, Xg = X @ Ls, X @ Lg
            to_weights = None if weights is None else -(Xs * Xg).sum(-1)
            if weights is not None:
                Xs, Xg = Xs * weights[..., None], Xg * weights[..., None]
            return g, None, -(Xs @ Lg.mT + Xg @ Ls.mT), to_weights


def refined(X, Y, weights, means, ridge, L, M, needs_gradient: bool):
    """M after one step of Newton's method, which is exact: the loss is a square."""
    step = L.mT @ _missed(X, Y, weights, means, ridge, L @ M)
    if needs_gradient:
        centred = X if means is None else X - means[0]
        step = _Solved.apply(step, L, centred, weights)
    return M + step


def read_fast(X, Y, weights, means, ridge, rcond):
    """L and M from XᵀWX and XᵀWY."""
    gram = cross = 0
    for xw, x, y in _blocks(X, Y, weights, means):
        gram, cross = gram + xw @ x, cross + xw @ y
    singular, U = spectrum_of_gram(gram)
    inverse = inverse_lengths(singular, X.shape[-2], ridge, rcond, "fast")
    return U * inverse[..., None, :], inverse[..., None] * (U.mT @ cross)


def read_accurately(X, Y, weights, means, ridge, rcond):
    """L and M from the triangle of [X Y] = QR; XᵀX and XᵀY are never formed."""
    n, d = X.shape[-2:]
    if means is not None:
        X, Y = X - means[0], Y - means[1]
    both = torch.cat([X, Y], dim=-1)
    if weights is not None:
        both = both * weights.sqrt()[..., None]
    R = triangular_factor(both)[..., : min(n, d), :]
    W, singular, Ut = torch.linalg.svd(R[..., :d])
    cross = singular[..., None] * (W.mT @ R[..., d:])  # UᵀXᵀWY
    missing = d - W.shape[-1]  # directions beyond the n < d rows
    singular = nn.functional.pad(singular, (0, missing))
    cross = nn.functional.pad(cross, (0, 0, 0, missing))
    inverse = inverse_lengths(singular, n, ridge, rcond, "accurate")
    return Ut.mT * inverse[..., None, :], inverse[..., None] * cross
