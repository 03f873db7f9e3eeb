"""A cache with an entry for each round, on caches that are no more than a list."""

from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from gbattn.ground.hugging_face import LayerCache, append_layer, check_buffer, no_continuous_batching, update_cache


class Layer:
    """An entry of a cache, as transformers has them."""

    is_compileable = False

    def __init__(self, sliding_window=None):
        self.sliding_window, self.keys = sliding_window, None


class Growing:
    """A cache that appends what it is given to an entry, of a fixed number unless one is appended."""

    layer_class_to_replicate = None

    def __init__(self, layers):
        self.layers = [Layer(window) for window in layers]

    def update(self, keys, values, index):
        layer = self.layers[index]
        if layer.keys is not None:
            keys, values = torch.cat([layer.keys, keys], 2), torch.cat([layer.values, values], 2)
        layer.keys, layer.values = keys, values
        return keys, values


def pair(tokens, heads=2):
    return torch.randn(1, heads, tokens, 3), torch.randn(1, heads, tokens, 3)


def test_round_0_is_stored_with_its_layer_and_each_further_round_behind_all_layers():
    cache = Growing([None, 4])
    for _ in range(2):  # twice two tokens
        rounds = LayerCache(cache, 1, 2)
        for _ in range(3):
            rounds.extend_pair(*pair(2))
    assert [None if layer.keys is None else layer.keys.shape[2] for layer in cache.layers] == [None, 4, 4, 4]
    assert [layer.sliding_window for layer in cache.layers] == [None, 4, 4, 4]


def test_one_tensor_and_unmixed_keys_are_rounds_of_their_own():
    cache = Growing([None])
    assert LayerCache(cache, 0, 1).extend("m", pair(2)[0]).shape == (1, 2, 2, 3)
    cache = Growing([None])
    for start in (0, 2):
        k, v = torch.randn(1, 2, 6), torch.randn(1, 2, 6)
        rounds = LayerCache(cache, 0, 1)
        places, last_k, last_v = rounds.extend_unmixed(k, v)
        assert places.tolist() == [start, start + 1] and last_k.shape == last_v.shape == (1, 1, 6)
        assert last_k.any() == (start > 0)  # before the first token there is none
        assert torch.equal(rounds.newest(cache.layers[0].keys, 2), k[:, None])


def test_a_buffer_filled_for_other_keys_is_refused():
    layer = SimpleNamespace(is_compileable=True, keys=torch.zeros(1, 1, 8, 6))
    check_buffer(layer, torch.zeros(1, 1, 2, 6))
    with refused("cache"):
        check_buffer(layer, torch.zeros(1, 2, 2, 3))


def test_a_static_cache_gets_no_entry_while_a_program_is_traced(monkeypatch):
    cache = Growing([None])
    cache.layers[0].is_compileable = True
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    with refused("cache"):
        append_layer(cache, 0)
    assert len(cache.layers) == 1
    with refused("cache"):
        update_cache(cache, *pair(1), 0, 1)


def test_continuous_batching_is_refused():
    with refused("model"):
        no_continuous_batching(object(), 1, option=2)
    with pytest.raises(ValueError):
        no_continuous_batching(object())
