"""What a stack of blocks may be, what a block may return, and which modules may change their class."""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from gbattn.ground.arguments import ArgumentError, require


def check_stack(blocks: object) -> Sequence[nn.Module]:
    """Return the blocks, if they are a sequence of modules that is not empty."""
    want = "a non-empty nn.ModuleList, nn.Sequential, list or tuple of modules"
    kind = isinstance(blocks, nn.ModuleList | nn.Sequential | list | tuple)
    require(kind, "blocks", type(blocks).__name__, want)
    require(len(blocks) > 0, "blocks", "none", want)
    for l, block in enumerate(blocks):
        got = f"a {type(block).__name__} at {l}"
        require(isinstance(block, nn.Module), "blocks", got, want)
    return blocks


def check_finite(name: str, x: torch.Tensor, got: str, want: str) -> None:
    """Check that a tensor has finite entries only."""
    require(bool(x.detach().isfinite().all()), name, got, want)


def apply_block(h: torch.Tensor, block: nn.Module, l: int, causal: bool) -> torch.Tensor:
    """Return the output of block `l` for a copy of h (B, T, D), on which it may work in place; the argument `causal` is
    passed on only if it is true."""
    after = block(h.clone(), **({"causal": True} if causal else {}))
    shape = getattr(after, "shape", type(after).__name__)
    if shape != h.shape:
        shape = tuple(shape) if isinstance(shape, tuple) else shape
        got = f"block {l}, which turns shape {tuple(h.shape)} into {shape}"
        raise ArgumentError("blocks", got, "blocks that keep (B, T, D)")
    check_finite("blocks", after, f"block {l}, whose output is not finite", "finite numbers")
    return after


def check_derivative(derivative: torch.Tensor | None, l: int) -> torch.Tensor:
    """Return the derivative through block `l`, if there is one."""
    got = f"block {l}, through which no derivative flows"
    require(derivative is not None, "blocks", got, "differentiable blocks")
    return derivative


def check_own_forward(layers: Iterable[nn.Module]) -> None:
    """Check that no part of the layers runs a forward that its instance holds, which a change of its class or of its
    weights would not reach."""
    for module in (module for layer in layers for module in layer.modules()):
        plain = type(module).forward.__get__(module)  # accelerate leaves it behind
        own = vars(module).get("forward", plain)
        got = f"a {type(module).__name__} that holds a forward of its own"
        want = "none: remove hooks (accelerate.hooks.remove_hook_from_submodules) and "
        want += "compiled methods first, and add them again afterwards"
        require(own == plain, "model", got, want)
