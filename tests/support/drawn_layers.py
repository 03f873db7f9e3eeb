"""Layers of drawn sizes with drawn weights, for the tests of chapters 6 to 6c."""

import torch
from hypothesis import strategies as st

from gbattn.layers import MultiHeadAttention

F64 = torch.float64


class Problem:
    """Drawn sizes, a generator, and a layer with weights of size about one half."""

    def __init__(self, seed, B, n, groups, shared, K):
        self.rng = torch.Generator().manual_seed(seed)
        self.B, self.n, self.G, self.H, self.K = B, n, groups, groups * shared, 2 * K
        self.D = self.H * self.K

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def integer(self, low, high):
        return int(torch.randint(low, high, (), generator=self.rng))

    def layer(self, kind=MultiHeadAttention, **options):
        layer = kind(self.D, self.H, n_kv_heads=self.G, dtype=F64, **options)
        with torch.no_grad():
            for weight in layer.parameters():
                weight.copy_(0.5 * self.normal(*weight.shape))
        return layer

    def tokens(self, n=None):
        return self.normal(self.B, n or self.n, self.D)


def problems(n=(2, 7)):
    count = st.integers(1, 2)
    return st.builds(Problem, st.integers(0, 2**31), count, st.integers(*n), count, count, count)


def filled(layer, x, room=12):
    """The cache of a layer that has read x."""
    cache = layer.make_cache(x.shape[0], room)
    layer(x, causal=True, cache=cache)
    return cache
