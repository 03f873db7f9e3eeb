"""Appendix W: from torch's layer and back, with the same outputs, weights and gradients."""

import math

import pytest
import torch
from drawn_layers import F64, Problem
from refusals import refused
from torch import nn

from gbattn.attention import causal_mask, padding_mask
from gbattn.interop import DecodeStep, TorchAttention, from_torch, to_torch
from gbattn.layers import LinearAttention, MultiHeadAttention


def both_layers(D=8, H=2, bias=True):
    theirs = nn.MultiheadAttention(D, H, bias=bias, batch_first=True, dtype=F64)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return theirs, from_torch(theirs)


@pytest.mark.parametrize("bias", [True, False])
def test_what_was_frozen_in_torchs_layer_stays_frozen(bias):
    theirs, _ = both_layers(bias=bias)
    theirs.out_proj.requires_grad_(False)
    ours = from_torch(theirs)
    assert {name for name, w in ours.named_parameters() if not w.requires_grad} == {
        name for name, _ in ours.named_parameters() if name.startswith("out.")
    }
    assert not any(w.requires_grad for w in from_torch(theirs.requires_grad_(False)).parameters())


B, T, S = 2, 5, 4


MAY = torch.rand(B * 2, T, T, generator=torch.Generator().manual_seed(3)) > 0.4
MAY |= torch.eye(T, dtype=torch.bool)  # nobody sees nothing: there torch has NaN


LENGTHS = torch.tensor([3, T])


ADDED = torch.randn(T, T, generator=torch.Generator().manual_seed(4), dtype=F64)


REAL = padding_mask(LENGTHS, T)


CAUSAL = dict(attn_mask=~causal_mask(T))


PAIRS = {
    "nothing": ({}, {}),
    "boolean, (T, S)": (dict(attn_mask=~MAY[0]), dict(mask=MAY[0])),
    "boolean, per head": (dict(attn_mask=~MAY), dict(mask=MAY.unflatten(0, (B, 2)))),
    "additive": (dict(attn_mask=ADDED), dict(mask=ADDED)),
    "additive, per head": (dict(attn_mask=ADDED.expand(B * 2, T, T)), dict(mask=ADDED.expand(B, 2, T, T))),
    "padding": (dict(key_padding_mask=~REAL[:, 0, 0]), dict(mask=REAL)),
    "causal": (CAUSAL, dict(causal=True)),
    "causal, and torch's hint": (CAUSAL | dict(is_causal=True), dict(causal=True)),
    "causal and padding": (CAUSAL | dict(key_padding_mask=~REAL[:, 0, 0]), dict(causal=True, mask=REAL)),
    "causal and additive": (dict(attn_mask=ADDED.masked_fill(~causal_mask(T), -math.inf)),
                            dict(causal=True, mask=ADDED)),
}  # fmt: skip


def compare_layers(theirs, ours, x, context, their_options, our_options):
    source = x if context is None else context
    for need_weights in (True, False):
        expected, weights = theirs(
            x, source, source, need_weights=need_weights, average_attn_weights=False, **their_options
        )
        output = ours(x, context=context, **our_options)
        torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
        if need_weights:
            trace = ours.explain(x, context=context, **our_options)
            torch.testing.assert_close(trace.rounds[0].weights, weights, atol=1e-12, rtol=0)
        upstream = torch.randn_like(expected)
        inputs = [tensor for tensor in (x, context) if tensor is not None]
        parameters = [theirs.in_proj_weight, theirs.in_proj_bias, *theirs.out_proj.parameters()]
        wanted = torch.autograd.grad(expected, inputs + [w for w in parameters if w is not None], upstream)
        mine = torch.autograd.grad(output, inputs + list(ours.parameters()), upstream)
        mine = dict(zip([*map(str, range(len(inputs))), *dict(ours.named_parameters())], mine))
        stacked = [mine.pop(str(i)) for i in range(len(inputs))]
        for part in ("weight", "bias"):
            if f"query.{part}" in mine:
                stacked.append(torch.cat([mine[f"{name}.{part}"] for name in ("query", "key", "value")]))
        stacked += [mine[f"out.{part}"] for part in ("weight", "bias") if f"out.{part}" in mine]
        assert len(stacked) == len(wanted)
        for a, b in zip(stacked, wanted):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_torchs_layer_forward_weights_and_each_gradient(pair, bias):
    theirs, ours = both_layers(bias=bias)
    compare_layers(theirs, ours, torch.randn(B, T, 8, dtype=F64, requires_grad=True), None, *PAIRS[pair])


@pytest.mark.parametrize(
    ("theirs_options", "ours_options"),
    [
        ({}, {}),
        (
            dict(key_padding_mask=~padding_mask(torch.tensor([1, 3]), S)[:, 0, 0]),
            dict(mask=padding_mask(torch.tensor([1, 3]), S)),
        ),
        (dict(attn_mask=ADDED[:, :S]), dict(mask=ADDED[:, :S])),
    ],
    ids=["nothing", "padding", "additive"],
)
def test_torchs_layer_over_a_context(theirs_options, ours_options):
    theirs, ours = both_layers()
    x, context = (torch.randn(B, n, 8, dtype=F64, requires_grad=True) for n in (T, S))
    compare_layers(theirs, ours, x, context, theirs_options, ours_options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
@torch.no_grad()
def test_the_layer_made_for_torch_gives_what_ours_gives(pair, bias):
    ours = Problem(0, B, T, 2, 1, 2).layer(bias=bias).train(bias)
    theirs, x = to_torch(ours), torch.randn(B, T, ours.d_model, dtype=F64)
    their_options, our_options = PAIRS[pair]
    output, _ = theirs(x, x, x, **their_options)
    assert (output - ours(x, **our_options)).abs().max() < 1e-10
    assert theirs.training == bias and theirs.batch_first
    back = from_torch(theirs)
    assert back.training == bias and torch.equal(back(x), ours(x))
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), ours.parameters(), strict=True))


def test_a_layer_from_torch_keeps_its_options_and_is_a_copy():
    theirs = nn.MultiheadAttention(8, 2, dropout=0.1, dtype=torch.float16).eval()
    ours = from_torch(theirs, causal=True)
    assert (ours.dropout, ours.causal, ours.training, ours.query.weight.dtype) == (0.1, True, False, torch.float16)
    assert not ours.query.weight.is_set_to(theirs.in_proj_weight)
    before = theirs.in_proj_weight.detach().clone()
    with torch.no_grad():
        ours.query.weight.zero_()
    assert torch.equal(theirs.in_proj_weight, before)
    assert type(from_torch(nn.MultiheadAttention(8, 2), kind=LinearAttention)) is LinearAttention
    assert from_torch(theirs, dropout=0.0).dropout == 0


def test_the_opposite_mask_is_noticed():
    """The parity above would fail with torch's other convention."""
    theirs, ours = both_layers()
    x = torch.randn(B, T, 8, dtype=F64)
    expected, _ = theirs(x, x, x, attn_mask=~MAY[0])
    assert (ours(x, mask=~MAY[0]) - expected).abs().max() > 1e-2


# ---- errors ----


X = torch.zeros(2, 3, 8)


LAYER, TURNING, LINEAR = MultiHeadAttention(8, 4), MultiHeadAttention(8, 4, rotary=10.0), LinearAttention(8, 4)


BOOLEAN = torch.ones(3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: from_torch(nn.Linear(2, 2)), "mha"),
        (lambda: from_torch(nn.MultiheadAttention(8, 2, kdim=4)), "mha"),
        (lambda: from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True)), "mha"),
        (lambda: from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True)), "mha"),
        (lambda: from_torch(nn.MultiheadAttention(8, 2), n_kv_heads=1), "n_kv_heads"),
        (lambda: DecodeStep(LAYER, LAYER.make_cache(2, 4)), "cache"),
        (lambda: to_torch(LINEAR), "layer"),
        (lambda: to_torch(MultiHeadAttention(8, 4, n_kv_heads=2)), "n_kv_heads"),
        (lambda: to_torch(TURNING), "rotary"),
        (lambda: to_torch(MultiHeadAttention(8, 2, shift=True)), "shift"),
        (lambda: to_torch(MultiHeadAttention(8, 2, causal=True)), "causal"),
        (lambda: TorchAttention(nn.MultiheadAttention(8, 2)), "layer"),
        (lambda: TorchAttention(LAYER)(X, X, X.clone()), "value"),
        (lambda: TorchAttention(LAYER)(X, X, X, attn_mask=BOOLEAN.long()), "attn_mask"),
        (lambda: TorchAttention(LINEAR)(X, X, X, attn_mask=torch.randn(3, 3)), "attn_mask"),
        (lambda: TorchAttention(LAYER)(X, X, X, attn_mask=BOOLEAN[:2]), "mask"),
    ],
)
def test_an_error_names_the_argument(call, argument):
    with refused(argument):
        call()
