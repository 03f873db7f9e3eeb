"""Chapter 10: the counts against torch's own, for every layer and option, and what a lesson should not carry."""

import itertools
import math

import pytest
import torch
from hypothesis import strategies as st

from claims import claim
from gbattn.attention import LinearAttention, MultiHeadAttention
from gbattn.boosted import GradientBoostedAttention
from gbattn.cost import (
    Cost,
    attention_cost,
    attention_parts,
    count_flops,
    count_saved_bytes,
    count_traffic_bytes,
    linear_cost,
)
from gbattn.twicing import TwicingAttention

KV_FROM = ("residual", "input", "shared")
GATES = ("feature", "head", "scalar", "none")
F64 = torch.float64


def family(D=16, H=4, rounds=(1, 2, 3), **options):
    """Every softmax layer of the book, with every option that changes its cost."""
    yield MultiHeadAttention(D, H, **options)
    for m in rounds:
        yield TwicingAttention(D, H, rounds=m, **options)
        for kv_from, gate in itertools.product(KV_FROM, GATES):
            yield GradientBoostedAttention(D, H, rounds=m, kv_from=kv_from, gate=gate, **options)


def measured(layer, x, **call):
    """What torch counts, keeps and moves in one forward and one backward pass."""
    forward = count_flops(lambda: layer(x, **call))
    y = layer(x, **call)
    backward = count_flops(lambda: y.sum().backward())
    saved = count_saved_bytes(lambda: layer(x, **call), layer.parameters())
    with torch.no_grad():
        traffic = count_traffic_bytes(lambda: layer(x, **call))
    return forward, backward, traffic, saved


def counted(cost):
    return cost.forward_flops, cost.backward_flops, cost.traffic_bytes, cost.saved_bytes


def tokens(B, T, D=16, dtype=torch.float32):
    return torch.randn(B, T, D, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"n_kv_heads": 2}, {"bias": False}, {"rotary": 100.0, "n_kv_heads": 1}])
def test_every_count_is_torchs(dtype, options):
    B, T = 2, 11
    for layer in family(dtype=dtype, **options):
        x = tokens(B, T, dtype=dtype)
        for causal in (False, True):
            cost = attention_cost(layer, T, batch_size=B, causal=causal, itemsize=x.element_size())
            seen, said = measured(layer, x, causal=causal), counted(cost)
            if "rotary" in options:  # whose bytes are left out
                seen, said = seen[:2], said[:2]
            elif "n_kv_heads" in options and isinstance(layer, TwicingAttention):
                seen, said = seen[:2] + seen[3:], said[:2] + said[3:]
            assert seen == said, layer
        assert cost.cache_bytes == layer.make_cache(B, T).nbytes
        assert cost.parameters == sum(p.numel() for p in layer.parameters())


@pytest.mark.parametrize("layer", [m for m in family() if getattr(m, "kv_from", "input") != "residual"], ids=repr)
def test_a_context(layer):
    if isinstance(layer, TwicingAttention):
        return
    x, context = tokens(2, 5), tokens(2, 9)
    cost = attention_cost(layer, 5, context=9, batch_size=2)
    assert measured(layer, x, context=context) == counted(cost)
    assert cost.cache_bytes == 0


@pytest.mark.parametrize("T", [1, 3])
def test_decoding(T):
    layers = [*family(rounds=(2,)), *family(rounds=(2,), n_kv_heads=2)]
    layers += [LinearAttention(16, 4, n_kv_heads=g, feature_map=f) for g in (4, 2) for f in ("elu", "identity")]
    for layer in layers:
        cache = layer.make_cache(2, 20)
        with torch.no_grad():
            layer(tokens(2, 9), causal=True, cache=cache)
            seen = count_flops(lambda: layer(tokens(2, T), causal=True, cache=cache))
        cost = attention_cost(layer, T, past=9, causal=True, batch_size=2)
        assert seen == cost.forward_flops, layer
        full = layer.make_cache(2, 9 + T)
        assert full.nbytes == cost.cache_bytes
