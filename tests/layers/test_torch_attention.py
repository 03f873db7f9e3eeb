"""`TorchAttention`: every layer where a model calls ``torch.nn.MultiheadAttention``."""

import copy
import math
import pickle

import pytest
import torch
from refusals import refused
from torch import nn

from gbattn.attention import causal_mask
from gbattn.boosted import GradientBoostedAttention
from gbattn.hierarchical import HierarchicalAttention
from gbattn.interop import TorchAttention, from_torch
from gbattn.layers import LinearAttention, MultiHeadAttention
from gbattn.sinkhorn import SinkhornAttention
from gbattn.twicing import TwicingAttention

D, H, B, T, S = 8, 2, 2, 5, 4
EXACT = 1e-10  # float64
PADDING = torch.tensor([[False, False, False, True, True], [False] * 5])  # torch's: True = hidden
CAUSAL = ~causal_mask(T)  # the same
SOME = torch.rand(B * H, T, T, generator=torch.Generator().manual_seed(3)) > 0.6
SOME[:, :, 0] = False  # torch has NaN where nothing is left
ADDED = torch.randn(B * H, T, T, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
KINDS = (MultiHeadAttention, LinearAttention, TwicingAttention, GradientBoostedAttention, SinkhornAttention)
KINDS += (HierarchicalAttention,)


@pytest.fixture(autouse=True)
def double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def drawn(module):
    """With biases that are not zero, too."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.3 * torch.randn_like(weight))
    return module


def floats(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -math.inf)


MASKS = {
    "none": {},
    "boolean": dict(attn_mask=SOME[0]),
    "boolean, per head": dict(attn_mask=SOME),
    "floats": dict(attn_mask=ADDED[0]),
    "floats, per head": dict(attn_mask=ADDED),
    "padding": dict(key_padding_mask=PADDING),
    "padding in floats": dict(key_padding_mask=floats(PADDING)),
    "padding that is a bias": dict(key_padding_mask=ADDED[0, :B]),
    "causal": dict(attn_mask=CAUSAL, is_causal=True),
    "causal in floats, padding": dict(attn_mask=floats(CAUSAL), is_causal=True, key_padding_mask=floats(PADDING)),
    "boolean per head, padding": dict(attn_mask=SOME, key_padding_mask=PADDING),
    "floats, padding in floats": dict(attn_mask=ADDED, key_padding_mask=floats(PADDING)),
}


@pytest.mark.parametrize("need", [dict(need_weights=False), {}, dict(average_attn_weights=False)], ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", MASKS)
@torch.no_grad()
def test_what_torchs_layer_returns_is_returned(masks, batch_first, need):
    theirs = drawn(nn.MultiheadAttention(D, H, batch_first=batch_first))
    ours = TorchAttention(from_torch(theirs), batch_first=batch_first)
    x = torch.randn(B, T, D) if batch_first else torch.randn(T, B, D)
    (output, weights), (got, own) = (attention(x, x, x, **MASKS[masks], **need) for attention in (theirs, ours))
    torch.testing.assert_close(got, output, atol=EXACT, rtol=0)
    assert (weights is None) == (own is None) == ("need_weights" in need)
    if weights is not None:
        torch.testing.assert_close(own, weights, atol=EXACT, rtol=0)
    for name in ("embed_dim", "num_heads", "head_dim", "kdim", "vdim", "dropout", "batch_first", "bias_k"):
        assert getattr(ours, name) == getattr(theirs, name)


@torch.no_grad()
def test_one_sequence_without_a_batch_and_a_context():
    theirs = drawn(nn.MultiheadAttention(D, H, batch_first=True))
    ours = TorchAttention(from_torch(theirs))
    x, context = torch.randn(T, D), torch.randn(B, S, D)
    for told in ({}, dict(attn_mask=SOME[:H]), dict(key_padding_mask=PADDING[0])):
        for a, b in zip(theirs(x, x, x, **told), ours(x, x, x, **told)):
            torch.testing.assert_close(a, b, atol=EXACT, rtol=0)
    x, hidden = torch.randn(B, T, D), PADDING[:, 1:]
    for told in ({}, dict(key_padding_mask=hidden), dict(attn_mask=SOME[:, :, 1:] & False)):
        for a, b in zip(theirs(x, context, context, **told), ours(x, context, context, **told)):
            torch.testing.assert_close(a, b, atol=EXACT, rtol=0)
    boosted = TorchAttention(GradientBoostedAttention(D, H))
    with refused("context"):
        boosted(x, context, context)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_layer_gives_behind_the_face_what_it_gives_alone(kind):
    layer = drawn(kind(D, H))
    face, x, real = TorchAttention(layer), torch.randn(B, T, D), (~PADDING).long()
    torch.testing.assert_close(face(x, x, x)[0], layer(x))
    for hidden in (PADDING, floats(PADDING)):
        output = face(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
        torch.testing.assert_close(output, layer(x, padding=real))
    causal = [dict(is_causal=True), dict(attn_mask=floats(CAUSAL), is_causal=True)]
    causal += [] if kind is HierarchicalAttention else [dict(attn_mask=CAUSAL)]  # which takes no mask of many rows
    if kind is not SinkhornAttention:
        for told in causal:
            output = face(x, x, x, key_padding_mask=PADDING, **told)[0]
            torch.testing.assert_close(output, layer(x, causal=True, padding=real))
    again = pickle.loads(pickle.dumps(copy.deepcopy(face)))
    assert torch.equal(again(x, x, x)[0], face(x, x, x)[0])
    assert face.state_dict().keys() == {f"layer.{name}" for name in layer.state_dict()}


def test_weights_while_training_with_dropout_are_those_before_it():
    layer = GradientBoostedAttention(D, H, dropout=0.5)
    face, x = TorchAttention(layer), torch.randn(B, T, D)
    output, weights = face(x, x, x)
    assert layer.training and not torch.equal(output, face(x, x, x)[0])
    assert torch.equal(weights, layer.eval().explain(x).rounds[0].weights.mean(1))


# ---- in torch's transformers ----


def of_kind(kind, mha):
    """A layer of any kind with the weights of torch's."""
    if kind is GradientBoostedAttention:
        return kind.from_attention(from_torch(mha))
    return from_torch(mha, kind=kind)


def replaced(model, kind, which=None):
    """A copy whose attentions are ours, with the same weights."""
    model = copy.deepcopy(model)
    layers = model.layers if hasattr(model, "layers") else [model]
    for i, layer in enumerate(layers):
        if which is None or i in which:
            mha = layer.self_attn
            layer.self_attn = TorchAttention(of_kind(kind, mha), batch_first=mha.batch_first)
    return model


def encoder_layer(**options):
    return drawn(nn.TransformerEncoderLayer(D, H, 12, dropout=0.0, **options))


CALLS = {
    "nothing": {},
    "padding": dict(src_key_padding_mask=PADDING),
    "a mask": dict(mask=SOME[0]),
    "the triangle": dict(mask=floats(CAUSAL)),
    "the triangle, said": dict(mask=floats(CAUSAL), is_causal=True),
    "the triangle and padding": dict(mask=CAUSAL, is_causal=True, src_key_padding_mask=PADDING),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize("which", [None, [0], [2]], ids=["all", "first", "last"])
def test_an_encoder_gives_the_same_with_our_layers(which, gradients, training):
    """In eval mode torch's own layer takes a fused path, on nested tensors where there is padding."""
    theirs = drawn(nn.TransformerEncoder(encoder_layer(batch_first=True), 3)).train(training)
    ours, x = replaced(theirs, MultiHeadAttention, which), torch.randn(B, T, D)
    with torch.set_grad_enabled(gradients):
        for name, told in CALLS.items():
            real = ~told.get("src_key_padding_mask", torch.zeros(B, T, dtype=torch.bool))
            a, b = theirs(x, **told), ours(x, **told)
            assert (a - b)[real].abs().max() < EXACT, name


@pytest.mark.parametrize(
    "options", [{}, dict(batch_first=True, norm_first=True), dict(batch_first=True, bias=False)], ids=str
)
@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_an_encoder_layer_of_any_kind(options, training):
    theirs = encoder_layer(**options).train(training)
    ours, x = replaced(theirs, MultiHeadAttention), torch.randn(B, T, D)
    x = x if "batch_first" in options else x.transpose(0, 1)
    for told in ({}, dict(src_key_padding_mask=PADDING), dict(src_mask=floats(CAUSAL), is_causal=True)):
        a, b = theirs(x, **told), ours(x, **told)
        real = ~PADDING if "batch_first" in options else ~PADDING.T
        assert (a - b)[real].abs().max() < EXACT
    encoder = nn.TransformerEncoder(ours, 2, enable_nested_tensor=False)
    assert torch.isfinite(encoder(x)).all()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not MultiHeadAttention])
@torch.no_grad()
def test_in_eval_mode_a_layer_of_another_kind_stays_what_it_is(kind):
    """Torch's fused path would compute softmax attention with its weights."""
    theirs = nn.TransformerEncoder(encoder_layer(batch_first=True), 2)
    ours, x = drawn(replaced(theirs, kind)), torch.randn(B, T, D)
    assert torch.equal(ours.train()(x), ours.eval()(x))
    padded = ours(x, src_key_padding_mask=PADDING)
    alone = ours(x[:1, :3])
    assert (padded[:1, :3] - alone).abs().max() < EXACT


def test_every_weight_of_a_boosted_encoder_learns():
    ours = replaced(nn.TransformerEncoder(encoder_layer(batch_first=True), 2), GradientBoostedAttention)
    drawn(ours)(torch.randn(B, T, D), src_key_padding_mask=PADDING).square().sum().backward()
    for name, weight in ours.named_parameters():
        if not name.endswith("key.bias"):  # the same number for all keys changes no softmax
            assert weight.grad.abs().max() > 1e-8, name


@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_a_decoder_layer_with_its_context(training):
    theirs = drawn(nn.TransformerDecoderLayer(D, H, 12, dropout=0.0, batch_first=True)).train(training)
    ours, x, memory = copy.deepcopy(theirs), torch.randn(B, T, D), torch.randn(B, S, D)
    for name in ("self_attn", "multihead_attn"):
        setattr(ours, name, TorchAttention(from_torch(getattr(ours, name))))
    told = dict(tgt_mask=floats(CAUSAL), tgt_is_causal=True, memory_key_padding_mask=PADDING[:, 1:])
    assert (theirs(x, memory, **told) - ours(x, memory, **told)).abs().max() < EXACT


def test_an_encoder_with_our_layers_compiles_whole():
    layer = TorchAttention(GradientBoostedAttention(D, H))
    model = encoder_layer(batch_first=True)
    model.self_attn = layer
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x, hidden = torch.randn(B, T, D), floats(PADDING)
    for mode in (True, False):
        model.train(mode)
        torch.testing.assert_close(compiled(x, src_key_padding_mask=hidden), model(x, src_key_padding_mask=hidden))
    alone = torch.compile(layer.layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(alone(x, padding=(~PADDING).long()), layer.layer(x, padding=~PADDING))
