"""Chapter 6b: the claim with its mutant, and what a cache stores, forgets and reorders."""

import copy
import math
import pickle

import pytest
import torch
from drawn_layers import F64, filled, problems
from refusals import refused

from claims import claim
from gbattn.cache import KeyValueCache
from gbattn.layers import LinearAttention, MultiHeadAttention, project


def the_past(p, causal):
    layer, x, cut = p.layer(rotary=50.0), p.tokens(), p.integer(1, p.n)
    with torch.no_grad():
        alone, whole = layer(x[:, :cut], causal=causal), layer(x, causal=causal)
        cache = layer.make_cache(p.B, p.n)
        steps = [layer(part, causal=True, cache=cache) for part in (x[:, :cut], x[:, cut:])]
    return torch.cat([alone, *steps], 1), torch.cat([whole[:, :cut], whole], 1)


@claim(problems(), tolerance=1e-10, mutant=lambda p: the_past(p, False))
def test_prop_causal_past(p):
    """Outputs of the past do not change, so keys and values can be kept. Mutant: without causality."""
    return the_past(p, True)


# ---- What a cache stores, forgets and reorders ----


KEYS = dict(key=(2, 4))


@pytest.fixture
def decoding():
    with torch.no_grad():
        yield MultiHeadAttention(8, 4, n_kv_heads=2, rotary=100.0, dtype=F64), torch.randn(3, 9, 8, dtype=F64)


@pytest.mark.parametrize("kind", [MultiHeadAttention, LinearAttention])
def test_reordering_moves_sequences_and_lets_one_become_two(kind):
    layer, x, rows = kind(8, 4, n_kv_heads=2, dtype=F64), torch.randn(3, 9, 8, dtype=F64), torch.tensor([2, 0, 2])
    with torch.no_grad():
        cache = filled(layer, x[:, :6])
        cache.reorder(rows)
        got = layer(x[:, 6:], causal=True, cache=cache)
        moved = torch.cat([x[rows, :6], x[:, 6:]], 1)
        torch.testing.assert_close(got, layer(moved, causal=True)[:, 6:], atol=1e-12, rtol=0)


def test_a_cache_says_its_size():
    cache = MultiHeadAttention(8, 4, n_kv_heads=2).make_cache(3, 12)
    assert cache.nbytes == 2 * 3 * 2 * 12 * 2 * 4 and cache.length == 0  # key and value, B, G, room, K, bytes
    assert MultiHeadAttention(8, 4).make_cache(3, 12, dtype=torch.bfloat16).nbytes == 2 * 3 * 4 * 12 * 2 * 2
    short, long = (LinearAttention(8, 4).make_cache(3, room).nbytes for room in (1, 10**6))
    assert short == long == 3 * 4 * 2 * 3 * 4


def test_a_new_token_is_written_in_place():
    cache = KeyValueCache(KEYS, 1, 3)
    place, new = cache.buffers["key"].data_ptr(), torch.randn(1, 2, 1, 4)
    for t in range(3):
        keys = cache.extend("key", new + t)
        cache.advance(1)
        assert keys.data_ptr() == place and keys.shape == (1, 2, t + 1, 4)
        assert torch.equal(keys[:, :, t:], new + t)


def test_a_refused_step_leaves_the_cache_as_it_was(decoding):
    layer, x = decoding
    cache = filled(layer, x[:, :6], room=8)
    with refused("cache"):
        layer(x[:, 6:], causal=True, cache=cache)
    got = layer(x[:, 6:8], causal=True, cache=cache)
    torch.testing.assert_close(got, layer(x[:, :8], causal=True)[:, 6:], atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_cache_serves_any_layer_of_these_shapes_and_can_be_copied():
    layer, x = MultiHeadAttention(8, 2), torch.randn(1, 6, 8)
    cache = MultiHeadAttention(8, 2).make_cache(1, 6)
    layer(x[:, :3], causal=True, cache=cache)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert (layer(x[:, 3:], causal=True, cache=twin) - layer(x, causal=True)[:, 3:]).abs().max() < 1e-6


# ---- A layer that uses its cache wrongly ----


class WithoutSuffix(MultiHeadAttention):
    """Its second round stores its keys under the names of the first."""

    def estimate(self, inputs):
        F = super().estimate(inputs)
        q, k, v = project(inputs.x * F, self.query, self.key, self.value)
        q, (k, v) = self.query_heads(inputs, q), self.append_kv(inputs, k, v)
        return F + self.attend_heads(inputs, q, k, v)[0]


class WithoutCache(MultiHeadAttention):
    """It stores nothing."""

    def estimate(self, inputs):
        q, k, v = self.project_inputs(inputs)
        q, (k, v) = self.query_heads(inputs, q), self.key_value_heads(inputs, k, v)
        return self.attend_heads(inputs, q, k, v)[0]


@pytest.mark.parametrize(("kind", "argument"), [(WithoutSuffix, "name"), (WithoutCache, "cache")])
@torch.no_grad()
def test_a_layer_that_would_decode_wrongly_is_refused(kind, argument):
    layer, x = kind(8, 4), torch.randn(1, 3, 8)
    assert layer(x, causal=True).shape == x.shape  # without a cache nothing is wrong
    cache = layer.make_cache(1, 4)
    for _ in range(2):  # a pass that failed leaves no trace
        with refused(argument):
            layer(x, causal=True, cache=cache)
    assert cache.length == 0


# ---- errors ----


X = torch.zeros(2, 3, 8)


LAYER, LINEAR = MultiHeadAttention(8, 4), LinearAttention(8, 4)


def cached(layer=LAYER, B=2, room=8, **options):
    return dict(causal=True, cache=layer.make_cache(B, room, **options))


def used(layer=LAYER, length=2):
    with torch.no_grad():
        cache = layer.make_cache(2, 8)
        layer(X[:, :length], causal=True, cache=cache)
    return cache


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: KeyValueCache(KEYS, 0, 3), "batch_size"),
        (lambda: KeyValueCache(KEYS, 1, 2.5), "max_length"),
        (lambda: used().crop(3), "length"),
        (lambda: used().crop(-1), "length"),
        (lambda: used().crop(True), "length"),
        (lambda: used(LINEAR).crop(1), "length"),
        (lambda: used().reorder([0, 1]), "rows"),
        (lambda: used().reorder(torch.tensor([0])), "rows"),
        (lambda: used().reorder(torch.tensor([0.0, 1.0])), "rows"),
        (lambda: used().reorder(torch.tensor([0, 2])), "rows"),
        (lambda: LAYER(X, **cached()), "cache"),
        (lambda: LAYER(X, cache={}, causal=True), "cache"),
        (lambda: LAYER(X, cache=used()), "causal"),
        (lambda: LAYER(X, **cached(MultiHeadAttention(8, 2))), "cache"),
        (lambda: LAYER(X, **cached(LINEAR)), "cache"),
        (lambda: LAYER(X, **cached(B=3)), "cache"),
        (lambda: LAYER(X, **cached(room=2)), "cache"),
        (lambda: LAYER(X, context=X[:, :0], cache=LAYER.make_cache(2, 4)), "context"),
        (lambda: KeyValueCache([2], 1, 4), "shapes"),
        (lambda: KeyValueCache({"key": (2, 0)}, 1, 4), "shapes"),
        (lambda: LAYER.make_cache(1, 4).extend("kye", torch.ones(1, 2, 1, 2)), "name"),
        (lambda: LAYER.make_cache(1, 4).add("key", torch.ones(1, 2, 1, 2)), "name"),
        (lambda: LAYER.make_cache(1, 4).advance(-1), "tokens"),
        (lambda: LAYER.make_cache(1, 4).advance(2.5), "tokens"),
        (lambda: LAYER.make_cache(1, 4).advance(math.nan), "tokens"),
        (lambda: LAYER.make_cache(1, 4).advance(5), "tokens"),
        (lambda: LINEAR(X, mask=torch.ones(3, 3) > 0, **cached(LINEAR)), "mask"),
        (lambda: LINEAR.explain(X, **cached(LINEAR)), "cache"),
    ],
)
def test_an_error_names_the_argument(call, argument):
    with refused(argument):
        call()
