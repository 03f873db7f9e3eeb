"""Means and quantiles of weighted entries: x and `weights` are tensors (n,), and None weighs all entries alike."""

import math

import torch


def weight_args(weights: torch.Tensor | None) -> tuple:
    """The weights as an argument if there are any, since a loss that is never given some need not take them."""
    return () if weights is None else (weights,)


def weighted_mean(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The mean, a scalar."""
    return x.mean() if weights is None else weights @ x / weights.sum()


def weighted_medians(x: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The two middle entries, which are one where their number is odd."""
    if weights is not None:
        return _ends(x, 0.5, weights)
    return x.sort().values[[(len(x) - 1) // 2, len(x) // 2]]


def weighted_quantile(x: torch.Tensor, share: float, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The smallest entry up to which the weights reach a share of all."""
    if weights is not None:
        return _ends(x, share, weights)[0]
    return x.sort().values[math.ceil(share * len(x)) - 1]


def _ends(x, share, weights):
    """The smallest and the largest entry at which the weights up to it reach a share of all; they differ where an entry
    reaches it exactly, but for rounding."""
    order = x.argsort()
    below = weights[order].cumsum(0)
    slack = torch.tensor([1 - 1e-12, 1 + 1e-12], dtype=x.dtype)
    places = torch.searchsorted(below, share * below[-1] * slack)
    return x[order[places.clamp(max=len(x) - 1)]]
