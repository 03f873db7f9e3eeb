"""Chapter 6c: the claim with its mutant, linear attention, the layer and its projections."""

import math

import pytest
import torch
import torch.nn.functional as nnf
from drawn_layers import F64, filled, problems
from refusals import refused
from torch import nn

from claims import claim
from gbattn.attention import merge_heads, padding_mask, split_heads
from gbattn.layers import (
    LinearAttention,
    MultiHeadAttention,
    Round,
    Trace,
    make_attention,
    make_projection,
    project,
    register,
)
from gbattn.positions import rotary_angles, rotate


def one_memory(p, divide):
    """The recursion, with φ = elu + 1, against the layer's maps and outputs."""
    layer, x = p.layer(LinearAttention), p.tokens()
    trace, group = layer.explain(x, causal=True), p.H // p.G
    weights = trace.rounds[0].weights
    phi = lambda z: nnf.elu(z) + 1
    with torch.no_grad():
        q = phi(split_heads(layer.query(x), p.H))
        k = phi(split_heads(layer.key(x), p.G)).repeat_interleave(group, dim=1)
        v = split_heads(layer.value(x), p.G).repeat_interleave(group, dim=1)
        M, z, outputs = 0, 0, []
        for t in range(p.n):
            M = M + k[:, :, t, :, None] * v[:, :, t, None, :]
            z = z + k[:, :, t]
            top = torch.einsum("bhkv,bhk->bhv", M, q[:, :, t])
            outputs.append(top / divide((z * q[:, :, t]).sum(-1, keepdim=True)))
        by_weights = weights @ v
        output = layer.out(merge_heads(torch.stack(outputs, 2)))
    left = torch.cat(
        [output.flatten(), by_weights.flatten(), weights.sum(-1).flatten(), weights.clamp_max(0).flatten()]
    )
    right = [layer(x, causal=True), torch.stack(outputs, 2), torch.ones(p.B, p.H, p.n), torch.zeros_like(weights)]
    return left.detach(), torch.cat([part.detach().to(F64).flatten() for part in right])


@claim(problems(), tolerance=1e-9, mutant=lambda p: one_memory(p, torch.ones_like))
def test_prop_linear_memory(p):
    """One matrix and one vector are causal attention with positive rows that sum to one. Mutant: not divided."""
    return one_memory(p, lambda total: total)


# ---- Linear attention ----


def quadratic(layer, x, causal, mask):
    """Linear attention as its T × S scores say it, from the layer's weights."""
    group = layer.n_heads // layer.n_kv_heads
    q, k, v = (split_heads(p(x), n) for p, n in (
        (layer.query, layer.n_heads), (layer.key, layer.n_kv_heads), (layer.value, layer.n_kv_heads)))  # fmt: skip
    if layer.rotary:
        angles = rotary_angles(torch.arange(x.shape[1]), layer.head_dim, layer.rotary)
        q, k = rotate(q, angles), rotate(k, angles)
    if layer.feature_map == "elu":
        q, k = nnf.elu(q) + 1, nnf.elu(k) + 1
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    A = q @ k.mT
    A = A.tril() if causal else A
    A = A if mask is None else torch.where(mask, A, 0)
    if layer.feature_map == "elu":
        A = (A / A.sum(-1, keepdim=True)).nan_to_num()
    return layer.out(merge_heads(A @ v))


@pytest.mark.parametrize("n_kv_heads", [None, 2])
@pytest.mark.parametrize("options", [dict(), dict(feature_map="identity"), dict(feature_map="identity", rotary=10.0)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", ["none", "padding", "per query", "per head", "nothing"])
def test_linear_attention_is_its_quadratic_form_forward_and_backward(n_kv_heads, options, causal, which):
    layer = LinearAttention(8, 4, n_kv_heads=n_kv_heads, dtype=F64, **options)
    x = torch.randn(2, 6, 8, dtype=F64, requires_grad=True)
    mask = {
        "none": None,
        "padding": padding_mask(torch.tensor([3, 6]), 6),
        "per query": torch.rand(6, 6) > 0.4,
        "per head": torch.rand(2, 4, 6, 6) > 0.4,
        "nothing": torch.zeros(6, 6, dtype=torch.bool),
    }[which]
    fast, slow = layer(x, causal=causal, mask=mask), quadratic(layer, x, causal, mask)
    torch.testing.assert_close(fast, slow, atol=1e-12, rtol=0)
    parameters = [x, *layer.parameters()]
    upstream = torch.randn_like(fast)
    pairs = (torch.autograd.grad(side, parameters, upstream, allow_unused=True) for side in (fast, slow))
    for a, b in zip(*pairs):
        zero = torch.zeros(())
        a, b = zero if a is None else a, zero if b is None else b
        torch.testing.assert_close(a.double() + 0 * b.double(), b.double(), atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("feature_map", ["elu", "identity"])
def test_linear_attention_decodes_in_half_precision_with_the_cache_that_it_makes(dtype, feature_map):
    """A sum of many tokens is kept in float32: in bfloat16 it would stop growing at 256."""
    layer, x = LinearAttention(8, 2, feature_map=feature_map, dtype=dtype), torch.randn(1, 7, 8).to(dtype)
    exact = LinearAttention(8, 2, feature_map=feature_map, dtype=F64)
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad():
        cache = layer.make_cache(1, 7)
        assert cache.buffers["memory"].dtype == torch.float32
        pieces = torch.cat([layer(piece, causal=True, cache=cache) for piece in x.split(2, 1)], 1)
        assert pieces.dtype == dtype
        torch.testing.assert_close(pieces.double(), exact(x.double(), causal=True), atol=0.08, rtol=0.05)


@pytest.mark.parametrize("feature_map", ["elu", "identity"])
def test_linear_attention_decodes_behind_padding_and_from_an_emptied_cache(feature_map):
    layer, x = LinearAttention(8, 4, n_kv_heads=2, feature_map=feature_map, dtype=F64), torch.randn(2, 7, 8, dtype=F64)
    lengths = torch.tensor([4, 7])
    real = padding_mask(lengths, 7, side="left")
    with torch.no_grad():
        cache = filled(layer, x)
        cache.crop(0)
        assert cache.length == 0
        steps = ((0, 2), (2, 5), (5, 6), (6, 7))
        pieces = [layer(x[:, a:b], causal=True, cache=cache, mask=real[..., :b]) for a, b in steps]
        got = torch.cat(pieces, 1)
        for row, length in enumerate(lengths.tolist()):
            alone = layer(x[row : row + 1, 7 - length :], causal=True)
            torch.testing.assert_close(got[row : row + 1, 7 - length :], alone, atol=1e-12, rtol=0)


def test_linear_attention_decodes_under_autocast():
    layer, x = LinearAttention(8, 2), torch.randn(1, 7, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        cache = layer.make_cache(1, 7)
        pieces = torch.cat([layer(piece, causal=True, cache=cache) for piece in x.split(3, 1)], 1)
    torch.testing.assert_close(pieces.float(), layer(x, causal=True), atol=0.05, rtol=0)


@pytest.mark.parametrize("scale", [10, 100, 1e4])
def test_linear_attention_averages_however_large_its_tokens(scale):
    layer = LinearAttention(8, 4)
    x = (scale * torch.randn(2, 7, 8)).requires_grad_()
    layer(x, causal=True).sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())
    for seen in layer.explain(x, causal=True).rounds:
        assert (seen.weights.sum(-1) - 1).abs().max() < 1e-5


# ---- The layer ----


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_real_tokens(side):
    layer, x = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64), torch.randn(2, 6, 8, dtype=F64)
    lengths = torch.tensor([4, 6])
    real = padding_mask(lengths, 6, side=side)
    for causal in (False, True):
        padded = layer(x, mask=real, causal=causal)
        mine = slice(0, 4) if side == "right" else slice(2, 6)
        torch.testing.assert_close(padded[0, mine], layer(x[:1, mine], causal=causal)[0], atol=1e-12, rtol=0)


def test_a_trace_of_one_round():
    layer, x = MultiHeadAttention(8, 2, dtype=F64), torch.randn(2, 5, 8, dtype=F64)
    trace = layer.explain(x)
    assert isinstance(trace, Trace) and len(trace.rounds) == 1 and isinstance(trace.rounds[0], Round)
    A, residual, correction, gate, estimate = trace.rounds[0]
    assert A.shape == (2, 2, 5, 5) and gate is None
    assert torch.equal(residual, x) and torch.equal(correction, estimate)
    torch.testing.assert_close(layer.out(estimate), trace.output, atol=0, rtol=0)


def test_weights_are_drawn_from_the_generator_that_is_given():
    first, second = MultiHeadAttention(16, 4, n_kv_heads=2), MultiHeadAttention(16, 4, n_kv_heads=2)
    for layer in (first, second):
        layer.reset_parameters(torch.Generator().manual_seed(5))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters()))
    for name, weight in first.named_parameters():
        if name.endswith("bias"):
            assert not weight.any()
        else:
            bound = math.sqrt(6 / sum(weight.shape))
            assert 0.8 * bound < weight.abs().max() <= bound


def test_layers_by_name():
    layer = make_attention("multi_head", 16, 4, n_kv_heads=2, rotary=100.0)
    assert type(layer) is MultiHeadAttention and layer.n_kv_heads == 2 and layer.rotary == 100.0
    assert type(make_attention("linear", 16, 4, feature_map="identity")) is LinearAttention
    assert "feature_map='identity'" in repr(make_attention("linear", 16, 4, feature_map="identity"))
    assert "n_kv_heads=2" in repr(layer)


def test_registering(monkeypatch):
    monkeypatch.setattr("gbattn.layers.LAYERS", {})

    @register("mine")
    class Mine(MultiHeadAttention):
        """A layer of somebody else's."""

    assert type(make_attention("mine", 8, 2)) is Mine
    assert register("mine")(Mine) is Mine  # a notebook cell may run twice
    with refused("name"):
        register("mine")(LinearAttention)
    for bad in ("", 3):
        with refused("name"):
            register(bad)
    place = {"__qualname__": Mine.__qualname__, "__module__": "somewhere.else"}
    again = type("Mine", (MultiHeadAttention,), place | {"__doc__": Mine.__doc__})  # in the book and in the library
    assert register("mine")(again) is again
    stranger = type("Mine", (LinearAttention,), place | {"__module__": "a.third"})
    with refused("name"):
        register("mine")(stranger)


@pytest.mark.parametrize("dtypes", [(torch.float32, F64), (F64, torch.float32)])
def test_autocast_is_no_way_around_float64(dtypes):
    layer, x = MultiHeadAttention(8, 2, dtype=dtypes[0]), torch.randn(1, 3, 8, dtype=dtypes[1])
    with torch.autocast("cpu", torch.bfloat16), refused("x"):
        layer(x)


def test_a_scale_of_ones_own_may_have_another_dtype():
    layer = MultiHeadAttention(8, 4, dtype=torch.bfloat16)
    layer.scale = nn.Parameter(torch.zeros(4))
    assert layer(torch.randn(1, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


# ---- One product for several projections ----


def several(bias=True):
    return [make_projection(8, n, bias=bias, dtype=F64) for n in (8, 4, 4)]


@pytest.mark.parametrize("bias", (True, False))
@pytest.mark.parametrize("T", (1, 5))
def test_one_product_gives_what_the_projections_give(bias, T):
    maps, x = several(bias), torch.randn(2, T, 8, dtype=F64, requires_grad=True)
    learned = [x, *(p for linear in maps for p in linear.parameters())]
    outputs = project(x, *maps), [linear(x) for linear in maps]
    for ours, wanted in zip(*outputs, strict=True):
        assert (ours - wanted).abs().max() < 1e-14
    gradients = [torch.autograd.grad(sum(y.square().sum() for y in ys), learned) for ys in outputs]
    for ours, wanted in zip(*gradients, strict=True):
        assert (ours - wanted).abs().max() < 1e-13


def replaced(linear):
    linear.forward = lambda x: 2 * nn.Linear.forward(linear, x)


def hooked(linear):
    linear.register_forward_hook(lambda module, args, output: 2 * output)


def hooked_before(linear):
    linear.register_forward_pre_hook(lambda module, args: (2 * args[0],))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def of_a_subclass(linear):
    linear.__class__ = Doubled


@pytest.mark.parametrize("change", (replaced, hooked, hooked_before, of_a_subclass))
@pytest.mark.parametrize("place", (0, 2))
def test_a_projection_that_is_not_plain_is_called(change, place):
    maps, x = several(bias=False), torch.randn(2, 5, 8, dtype=F64)
    wanted = list(project(x, *maps))
    wanted[place] = 2 * wanted[place]
    change(maps[place])
    for ours, theirs in zip(project(x, *maps), wanted, strict=True):
        assert (ours - theirs).abs().max() < 1e-14


@pytest.mark.parametrize("place", (0, 1, 2))
def test_a_bias_that_only_some_projections_have_is_added(place):
    maps, x = several(bias=True), torch.randn(2, 5, 8, dtype=F64)
    maps[place].bias = None
    for linear in maps:
        if linear.bias is not None:
            nn.init.ones_(linear.bias)
    for ours, wanted in zip(project(x, *maps), [linear(x) for linear in maps], strict=True):
        assert (ours - wanted).abs().max() < 1e-13


def test_a_backward_hook_of_a_projection_is_called():
    seen, layer, x = [], MultiHeadAttention(8, 2), torch.randn(2, 5, 8, requires_grad=True)
    layer.key.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0].shape))
    layer(x).sum().backward()
    assert seen == [(2, 5, 8)]


@pytest.mark.parametrize("kv", (1, 4))
def test_weights_have_names_of_their_own_and_are_drawn_one_by_one(kv):
    torch.manual_seed(3)
    layer = MultiHeadAttention(8, 4, n_kv_heads=kv)
    torch.manual_seed(3)
    wanted = {name: make_projection(8, n) for name, n in dict(query=8, key=2 * kv, value=2 * kv, out=8).items()}
    wanted = {f"{name}.{part}": x for name, linear in wanted.items() for part, x in linear.state_dict().items()}
    assert list(layer.state_dict()) == list(wanted) == [name for name, _ in layer.named_parameters()]
    assert all(torch.equal(x, wanted[name]) for name, x in layer.state_dict().items())


# ---- errors ----


X, LAYER, LINEAR = torch.zeros(2, 3, 8), MultiHeadAttention(8, 4), LinearAttention(8, 4)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: register("own")(lambda: 0), "layer"),
        (lambda: LinearAttention(8, 4, dropout=0.1), "dropout"),
        (lambda: LinearAttention(8, 4, feature_map="relu"), "feature_map"),
        (lambda: LinearAttention(8, 4, rotary=10.0), "rotary"),
        (lambda: LINEAR(X, mask=torch.zeros(3, 3)), "mask"),
        (lambda: make_attention("quadratic", 8, 4), "name"),
        (lambda: LAYER(X, padding=[[1, 1, 1]]), "padding"),
    ],
)
def test_an_error_names_the_argument(call, argument):
    with refused(argument):
        call()
