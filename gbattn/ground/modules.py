"""What layers ask of torch's modules and of their callers: where and in what dtype a layer computes, whether a linear
map is nothing else, and what tokens, contexts, masks, padding, caches and options fit a layer."""

import inspect

import torch
from torch import nn

from gbattn.ground.arguments import ArgumentError, Rule, require
from gbattn.ground.tensors import FLOATING, INTEGRAL, check_tensor, compute_dtype, holds

REAL: Rule = (
    lambda dtype: dtype == torch.bool or INTEGRAL[0](dtype),
    "torch.bool or an integer dtype, 1 = a real token",
)


def weight_of(layer: nn.Module) -> torch.Tensor:
    """A parameter, whose device and dtype are those of all; torch's quantisation leaves none, and float32 on the CPU."""
    weight = None
    for weight in layer.parameters():
        if weight.ndim > 1:  # a scale of a layer's own may have another dtype
            break
    if weight is None:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    return weight


def floating_dtype(*modules: nn.Module) -> torch.dtype:
    """Return the dtype in which modules compute: that of the first weight stored in floating point, a matrix if there
    is one. A quantised weight may be stored as integers."""
    found = [w for m in modules for w in (weight_of(m), *m.parameters())]
    found = [w for w in found if w.is_floating_point()]
    got, want = "None, and no weight in floating point", "that of the tokens"
    require(len(found) > 0, "dtype", got, want)
    return min(found, key=lambda w: w.ndim < 2).dtype


def are_plain(*linears: nn.Module) -> bool:
    """Whether the call of each is ``weight @ x + bias`` and nothing else: no subclass of module or tensor, no hook, no
    method replaced, as libraries do that adapt, quantise, offload or shard a layer; and whether all or none have a
    bias."""
    for one in linears:
        if type(one) is not nn.Linear or "forward" in vars(one):
            return False
        if type(one.weight) not in (nn.Parameter, torch.Tensor):
            return False
        if one._forward_hooks or one._forward_pre_hooks:
            return False
        if one._backward_hooks or one._backward_pre_hooks:
            return False
        if (one.bias is None) != (linears[0].bias is None):
            return False
    return True


# ---- what a caller passes to a layer ----


def check_tokens(name: str, x: torch.Tensor, d_model: int, layer: nn.Module, positive: str = "T") -> None:
    """Require floating tokens (B, T, D) on the device and in the dtype of a layer."""
    weight, of = weight_of(layer), "the weights"
    if (
        isinstance(x, torch.Tensor)
        and (x.dtype, x.device) == (weight.dtype, weight.device)
        and weight.is_floating_point()
        and x.ndim == 3
        and x.shape[2] == d_model
        and x.shape[1] > 0
    ):
        return  # what is below would find nothing
    sizes = dict(D=d_model, positive=positive, device=weight.device)
    check_tensor(name, x, "B T D", **sizes, dtype=FLOATING, of=of)
    dtypes = [compute_dtype(x.device, t.dtype) for t in (x, weight)]
    if weight.is_floating_point() and dtypes[0] != dtypes[1]:
        raise ArgumentError(name, f"dtype {x.dtype}", f"{weight.dtype}, as {of}")


def check_context(layer: nn.Module, x: torch.Tensor, call, causal: object) -> None:
    """Require that a call's context is tokens of as many sequences, of which none is later, and that the layer has a
    use for it."""
    positive = "T" if call.cache is None else ""
    check_tokens("context", call.context, layer.d_model, layer, positive)
    check_tensor("context", call.context, "B S D", B=len(x), of="x")
    require(causal is False, "causal", repr(causal), "False with a context")
    fits, want = call.context is x or not layer.no_context, f"None: {layer.no_context}"
    require(fits, "context", "a context", want)


def check_cache(layer: nn.Module, source: torch.Tensor, call, causal: object) -> None:
    """Require that a call's cache is one of this layer, with room, and that the call has nothing that counts queries."""
    context, cache = call.context, call.cache
    fits = causal is True or context is not None
    require(fits, "causal", repr(causal), "True with a cache")
    cache.check_tokens(source, layer.cache_shapes())
    want = "at least one token, here or in the cache"
    require(cache.span(source.shape[1]) > 0, "context", "0 tokens", want)
    if context is None:
        return
    why = "the cache counts tokens of the context, not queries"
    fits = layer.rotary is None or call.positions is not None
    require(fits, "positions", "None", f"those of x: {why}")
    require(not callable(call.mask), "mask", "a function", f"a tensor: {why}")
    require(call.score_mod is None, "score_mod", "a function", f"None: {why}")


def check_one_reading(mask: object, B: int, T: int) -> None:
    """Require that a mask of two dimensions cannot be read as (T, S) and as (B, S)."""
    flat = isinstance(mask, torch.Tensor) and mask.ndim == 2
    # An exported program is for other sizes than those at hand.
    if flat and not torch.compiler.is_exporting():
        if B == T and mask.shape[0] == T and T > 1:
            got = f"shape {tuple(mask.shape)}, which is (T, S) and (B, S), as B = T"
            want = "mask[None, None] for (T, S), or padding=mask for (B, S)"
            raise ArgumentError("mask", got, want)


def check_padding(padding: torch.Tensor, x: torch.Tensor, S: int) -> None:
    """Require one number for each of S keys, 1 or True where the token is real."""
    sizes = dict(B=x.shape[0], S=S, dtype=REAL, device=x.device, of="x")
    check_tensor("padding", padding, "B S", **sizes)
    binary = lambda p: p.dtype == torch.bool or ((p == 0) | (p == 1)).all()
    got, want = "other numbers than 0 and 1", "1 = a real token, 0 = padding"
    require(holds(binary, padding), "padding", got, want)


def check_keywords(argument: str, kind: type[nn.Module], options: dict, of: str) -> None:
    """Require options that a class of layers takes, itself or through a base class; a class whose base takes anything
    is not checked. `of` names the class in the message."""
    takes = []
    for base in kind.__mro__:
        if base is nn.Module:  # every class so far passes on what it does not know
            return
        parameters = inspect.signature(base.__init__).parameters.values()
        takes += [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
        takes += [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            break
    takes = [t for t in dict.fromkeys(takes) if t not in ("self", "d_model", "n_heads")]
    for option in options:
        want = f"options that {of} takes: {', '.join(takes) or 'none'}"
        require(option in takes, argument, repr(option), want)
