"""What every attention layer must hold, for every option it has.

A layer's own theorems are tested beside its chapter; here the layers are taken as
one family that a model may swap at will.
"""

import copy
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn
from torch.func import functional_call, vmap

import gbattn.blocks  # noqa: F401 - registers every layer of the book
from gbattn.attention import causal_mask, padding_mask
from gbattn.interop import to_torch
from gbattn.layers import LinearAttention, MultiHeadAttention, make_attention
from gbattn.positions import TokenShift

D, H = 8, 4
NAMES = ("multi_head", "linear", "twicing", "boosted")
EXACT = 1e-10  # float64; measured differences are below 1e-13

KINDS = {
    "multi_head": {},
    "linear elu": {"feature_map": "elu"},
    "linear identity": {"feature_map": "identity"},
    "twicing 1": {"rounds": 1},
    "twicing 2": {"rounds": 2},
    "twicing 3": {"rounds": 3},
    "boosted 1": {"rounds": 1},
}
# Of a family with three options, and three ways to place its heads, every pair of choices is met in twelve cases; the
# whole product is run by `make test-all`.
CHOICES = [
    (kv_from, gate, i + j)
    for i, kv_from in enumerate(("residual", "input", "shared"))
    for j, gate in enumerate(("feature", "head", "scalar", "none"))
]
BOOSTED = {
    f"boosted {rounds} {kv_from} {gate}": {"rounds": rounds, "kv_from": kv_from, "gate": gate}
    for rounds in (2, 3)
    for kv_from, gate, _ in CHOICES
}
PAIRED = {f"boosted {2 + n % 2} {kv_from} {gate}": n % 3 for kv_from, gate, n in CHOICES}
KINDS |= BOOSTED
SHIFTED = {
    f"{kind} shift": KINDS[kind] | {"shift": True}
    for kind in (
        *("multi_head", "linear elu", "linear identity", "twicing 2", "boosted 2 residual feature"),
        *("boosted 3 input head", "boosted 2 shared none"),
    )
}
KINDS |= SHIFTED
KINDS |= {f"{kind} norm": KINDS[kind] | {"qk_norm": True} for kind in ("multi_head", "boosted 2 residual feature")}
KINDS["boosted 3 shared norm"] = {"rounds": 3, "kv_from": "shared", "qk_norm": True}
KINDS["boosted 2 residual of input"] = {"query_from": "input"}
KINDS["boosted 2 residual keys"] = {"kv_from": "residual_keys"}
KINDS["boosted 3 residual values"] = {"rounds": 3, "kv_from": "residual_values"}
KINDS["boosted 3 input of input"] = {"rounds": 3, "kv_from": "input", "query_from": "input"}
FEW = ["multi_head", "linear elu", "twicing 2", "boosted 2 residual feature", "boosted 2 shared head"]
FEW += ["linear elu shift", "boosted 2 residual feature shift"]
SOFTMAX = [kind for kind in KINDS if not kind.startswith("linear")]
FEW_SOFTMAX = [kind for kind in FEW if kind in SOFTMAX]
CROSS = ["multi_head", "linear elu", "twicing 1", "boosted 1", "boosted 2 input feature", "boosted 3 shared scalar"]
CROSS += ["multi_head shift", "linear elu shift", "boosted 3 input head shift"]


def layer_of(kind, *, dtype=torch.float64, seed=0, d_model=D, n_heads=H, **options):
    """A layer with all its weights drawn, gates and biases too, so that none is idle."""
    generator = torch.Generator().manual_seed(seed)
    layer = make_attention(kind.split()[0], d_model, n_heads, dtype=dtype, **KINDS[kind], **options)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.copy_(0.4 * torch.randn(weight.shape, generator=generator))
    return layer.eval()


def tokens(B=2, T=7, *, dtype=torch.float64, seed=1, d_model=D):
    return torch.randn(B, T, d_model, generator=torch.Generator().manual_seed(seed)).to(dtype)


WAYS = ({}, {"n_kv_heads": 2}, {"n_kv_heads": 1, "rotary": 100.0})


def whole(needed):
    """The mark of what only `make test-all` runs."""
    return () if needed else pytest.mark.whole


def each(kinds):
    """The kinds as parameters; of the boosted ones, a choice in which every pair of options is met."""
    return [pytest.param(kind, marks=whole(kind not in BOOSTED or kind in PAIRED)) for kind in kinds]


def variants(kinds=KINDS, alike=False):
    """Each kind plain, with grouped keys, and with rotary positions where it may have them; of the boosted kinds, the
    pairs of all options unless all kinds are treated alike."""
    for kind in kinds:
        for way, options in enumerate(WAYS):
            if not (kind.startswith("linear elu") and "rotary" in options):
                needed = alike or kind not in BOOSTED or PAIRED.get(kind) == way
                yield pytest.param(kind, options, id=f"{kind} {options or ''}".strip(), marks=whole(needed))


VARIANTS, FEW_VARIANTS = [*variants()], [*variants(FEW, alike=True)]


def some_masks(kind, B=2, T=7):
    generator = torch.Generator().manual_seed(2)
    some = torch.rand(B, H, T, T, generator=generator) > 0.5
    some[0, :, 3] = False  # a query that may attend to nothing
    yield None
    yield padding_mask(torch.tensor([5, 7]), T)
    yield some
    yield some[0, 0]
    if not kind.startswith("linear"):
        added = torch.randn(T, T, generator=generator, dtype=torch.float64)
        yield added
        yield added.masked_fill(~some[1, 1], -torch.inf)[None, None]


# ---- explain ----


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
@torch.no_grad()
def test_explain_equals_forward_under_every_mask(kind, options):
    layer, x = layer_of(kind, **options), tokens()
    for causal in (False, True):
        for mask in some_masks(kind):
            output = layer(x, causal=causal, mask=mask)
            trace = layer.explain(x, causal=causal, mask=mask)
            assert torch.isfinite(output).all()
            assert (output - trace.output).abs().max() < EXACT
            assert len(trace.rounds) == getattr(layer, "rounds", 1)
            assert (layer.out(trace.rounds[-1].estimate) - output).abs().max() < EXACT


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_without_gradients_the_same_numbers_come_out_and_the_input_stays(kind, options):
    layer, x = layer_of(kind, **options), tokens()
    before, with_gradients = x.clone(), layer(x, causal=True)
    with torch.no_grad():
        assert torch.equal(layer(x, causal=True), with_gradients)
    assert torch.equal(x, before)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_layers_that_differ_in_one_weight_run_as_a_batch(kind):
    layer, x = layer_of(kind), tokens()
    for name, weight in layer.named_parameters():
        several = torch.stack([weight, weight + 0.1])
        one_by_one = torch.stack([functional_call(layer, {name: w}, (x,)) for w in several])
        batch = vmap(lambda w, name=name: functional_call(layer, {name: w}, (x,)))(several)
        torch.testing.assert_close(batch, one_by_one, atol=EXACT, rtol=0)


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_each_round_of_a_trace_adds_its_gated_correction(kind):
    layer, x = layer_of(kind), tokens()
    estimate = torch.zeros_like(x)
    for seen in layer.explain(x, causal=True).rounds:
        assert seen.weights.shape == (2, H, 7, 7)
        assert seen.residual.shape == seen.correction.shape == seen.estimate.shape == x.shape
        gate = 1 if seen.gate is None else seen.gate
        assert seen.gate is None or seen.gate.shape == x.shape
        estimate = estimate + gate * seen.correction
        assert (seen.estimate - estimate).abs().max() < EXACT


@pytest.mark.parametrize("kind", each(SOFTMAX))
@torch.no_grad()
def test_maps_are_averages_that_see_no_key_after_their_own(kind):
    for seen in layer_of(kind).explain(tokens(), causal=True).rounds:
        assert (seen.weights.sum(-1) - 1).abs().max() < EXACT
        assert not seen.weights.masked_select(~causal_mask(7)).any()


def test_explain_refuses_dropout_while_training():
    layer = MultiHeadAttention(D, H, dropout=0.1)
    with refused("dropout", ".eval()"):
        layer.explain(tokens(dtype=torch.float32))
    layer.eval().explain(tokens(dtype=torch.float32))


def test_a_trace_carries_gradients():
    layer = layer_of("boosted 2 residual feature")
    trace = layer.explain(tokens(), causal=True)
    (gradient,) = torch.autograd.grad(trace.output.square().sum(), trace.rounds[0].estimate)
    assert gradient.shape == (2, 7, D) and gradient.any()


def test_gradients_through_explain_equal_those_through_forward():
    allowed = torch.ones(7, 7, dtype=torch.bool)
    allowed[3] = False  # where a careless softmax would give NaN
    for kind in KINDS:
        layer, x = layer_of(kind), tokens().requires_grad_()
        outputs = layer(x, mask=allowed), layer.explain(x, mask=allowed).output
        forward, explained = (torch.autograd.grad(y.square().sum(), x)[0] for y in outputs)
        assert (forward - explained).abs().max() < EXACT, kind


# ---- who may look ----


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_causal_outputs_have_no_gradient_from_later_tokens(kind, options):
    layer, x = layer_of(kind, **options), tokens(1, 6).requires_grad_()
    for t in range(6):
        (gradient,) = torch.autograd.grad(layer(x, causal=True)[0, t].square().sum(), x)
        assert not gradient[0, t + 1 :].any()
        assert gradient[0, : t + 1].any()


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
@torch.no_grad()
def test_no_causal_output_moves_when_a_later_token_does(kind, options):
    layer, x = layer_of(kind, **options), tokens(1, 6)
    before = layer(x, causal=True)
    for t in range(1, 6):
        moved = x.clone()
        moved[:, t:] += 10
        after = layer(moved, causal=True)
        assert (after[:, :t] - before[:, :t]).abs().max() < EXACT
        assert (after[:, t:] - before[:, t:]).abs().max() > 1e-6


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_padding_changes_no_real_token_and_gets_no_gradient(kind, options):
    layer, x = layer_of(kind, **options), tokens().requires_grad_()
    for causal in (False, True):
        output = layer(x, causal=causal, mask=padding_mask(torch.tensor([5, 7]), 7))[0, :5]
        alone = layer(x[:1, :5], causal=causal)[0]
        assert (output - alone).abs().max() < EXACT
        (gradient,) = torch.autograd.grad(output.square().sum(), x)
        assert not gradient[0, 5:].any() and not gradient[1].any()


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_a_tokenizers_mask_is_one_more_mask(kind):
    """Boolean or of any integers, alone and beside causality and every mask."""
    layer, x, lengths = layer_of(kind), tokens(), torch.tensor([5, 7])
    hidden = padding_mask(lengths, 7)
    for causal in (False, True):
        for mask in some_masks(kind):
            both = hidden if mask is None else mask & hidden if mask.dtype == torch.bool else None
            both = mask.masked_fill(~hidden, -torch.inf) if both is None else both
            for dtype in (torch.bool, torch.int64, torch.uint8):
                told = dict(causal=causal, mask=mask, padding=hidden[:, 0, 0].to(dtype))
                assert torch.equal(layer(x, **told), layer(x, causal=causal, mask=both))
            assert torch.equal(layer.explain(x, **told).output, layer.explain(x, causal=causal, mask=both).output)


@pytest.mark.parametrize("kind", each(KINDS))
def test_a_sequence_of_padding_alone_gets_the_output_bias_and_finite_gradients(kind):
    layer, x, real = layer_of(kind), tokens().requires_grad_(), torch.tensor([[0] * 7, [1] * 7])
    for causal in (False, True):
        for method in (layer, lambda x, **told: layer.explain(x, **told).output):
            output = method(x, padding=real, causal=causal)
            assert (output[0] - layer.out.bias).abs().max() < EXACT
            for gradient in torch.autograd.grad(output.square().sum(), [x, *layer.parameters()], allow_unused=True):
                assert gradient is None or torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", CROSS)
@torch.no_grad()
def test_padding_of_a_context_is_that_of_the_context(kind):
    layer, x, context = layer_of(kind), tokens(), tokens(2, 5, seed=3)
    output = layer(x, context=context, padding=torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]))
    assert (output[1:] - layer(x[1:], context=context[1:, :2])).abs().max() < EXACT


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_padding_and_a_cache_are_about_all_keys(kind):
    layer, x, lengths = layer_of(kind), tokens(), torch.tensor([4, 7])
    real, cache, outputs, end = padding_mask(lengths, 7, side="left")[:, 0, 0], layer.make_cache(2, 7), [], 0
    for part in x.split([2, 3, 1, 1], dim=1):
        end += part.shape[1]
        outputs.append(layer(part, causal=True, cache=cache, padding=real[:, :end]))
    output = torch.cat(outputs, dim=1)
    for b, length in enumerate(lengths):
        alone = layer(x[b : b + 1, 7 - length :], causal=True)
        assert (output[b : b + 1, 7 - length :] - alone).abs().max() < EXACT
    with refused("padding"):
        cache.crop(0)
        layer(x[:, :2], causal=True, cache=cache)
        layer(x[:, 2:3], causal=True, cache=cache, padding=real[:, :1])


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_where_there_are_as_many_sequences_as_tokens_padding_is_not_a_mask(kind):
    layer, x = layer_of(kind), tokens(4, 4)
    real = padding_mask(torch.tensor([1, 2, 3, 4]), 4)
    assert torch.equal(layer(x, padding=real[:, 0, 0]), layer(x, mask=real))
    assert (layer(x, padding=real[:, 0, 0]) - layer(x, mask=real[:, 0, 0][None, None])).abs().max() > 1e-3


@pytest.mark.parametrize("kind", each(KINDS))
def test_a_token_that_may_attend_to_nothing_gets_the_output_bias(kind):
    layer, x = layer_of(kind), tokens().requires_grad_()
    allowed = torch.ones(7, 7, dtype=torch.bool)
    allowed[3] = False
    masks = [allowed]
    if not kind.startswith("linear"):
        masks.append(torch.zeros(7, 7, dtype=torch.float64).masked_fill(~allowed, -torch.inf))
    for mask in masks:
        output = layer(x, mask=mask)
        assert (output[:, 3] - layer.out.bias).abs().max() < EXACT
        for gradient in torch.autograd.grad(output.square().sum(), [x, *layer.parameters()], allow_unused=True):
            assert gradient is None or torch.isfinite(gradient).all()


@pytest.mark.parametrize("kind", each(SOFTMAX))
@torch.no_grad()
def test_boolean_additive_and_causal_masks_agree(kind):
    layer, x = layer_of(kind), tokens()
    allowed = causal_mask(7)
    added = torch.zeros(7, 7, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    for mask in (allowed, added, allowed.expand(2, H, 7, 7)):
        assert (layer(x, mask=mask) - layer(x, causal=True)).abs().max() < EXACT


@pytest.mark.parametrize("kind", FEW_SOFTMAX)
@torch.no_grad()
def test_an_additive_mask_and_causality_both_hold(kind):
    layer, x = layer_of(kind), tokens()
    bias = torch.randn(7, 7, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    both = bias.masked_fill(~causal_mask(7), -torch.inf)
    assert (layer(x, mask=bias, causal=True) - layer(x, mask=both)).abs().max() < EXACT


@torch.no_grad()
def test_a_large_number_in_a_mask_of_another_precision_stays_finite():
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([[0.0, -1.0, lowest], [lowest, lowest, lowest], [-torch.inf, 1e5, 0.0]])
    for dtype in (torch.bfloat16, torch.float16):
        layer, x = layer_of("multi_head", dtype=dtype), tokens(1, 3, dtype=dtype)
        wanted = layer_of("multi_head")(x.double(), mask=bias.double())
        for output in (layer(x, mask=bias), layer.explain(x, mask=bias).output):
            assert (output - wanted)[:, [0, 2]].abs().max() < 0.05 * wanted.abs().max()
            # Nothing in the second row is hidden, so it averages; with which weights is a matter of rounding.
            assert (output[:, 1] - layer.out.bias).abs().max() > 0.05


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_without_positions_a_layer_sees_a_set_unless_it_is_shifted(kind):
    layer, x, order = layer_of(kind), tokens(), torch.tensor([3, 1, 6, 0, 5, 2, 4])
    difference = (layer(x[:, order]) - layer(x)[:, order]).abs().max()
    assert difference > 1e-4 if kind in SHIFTED else difference < EXACT


@pytest.mark.parametrize("kind", FEW_SOFTMAX)
@torch.no_grad()
def test_rotary_layers_see_differences_of_positions_only(kind):
    layer, x = layer_of(kind, rotary=100.0), tokens()
    places = torch.arange(7)
    assert (layer(x, positions=places + 1000) - layer(x)).abs().max() < EXACT
    assert (layer(x, positions=places.expand(2, 7)) - layer(x)).abs().max() < EXACT
    assert (layer(x, positions=2 * places) - layer(x)).abs().max() > 1e-4


@pytest.mark.parametrize("kind", CROSS)
@torch.no_grad()
def test_a_context_is_read_where_the_residual_is_defined(kind):
    layer, x, context = layer_of(kind), tokens(), tokens(2, 5, seed=3)
    seen = layer.explain(x, context=context, mask=padding_mask(torch.tensor([5, 2]), 5))
    assert seen.rounds[-1].weights.shape == (2, H, 7, 5)
    short = layer(x[1:], context=context[1:, :2])
    assert (seen.output[1:] - short).abs().max() < EXACT


@pytest.mark.parametrize("kind", ["multi_head", "boosted 2 input feature", "boosted 3 shared scalar"])
@torch.no_grad()
def test_a_context_that_equals_the_tokens_changes_nothing(kind):
    layer, x = layer_of(kind, rotary=100.0), tokens()
    assert (layer(x, context=x.clone()) - layer(x)).abs().max() < EXACT


@pytest.mark.parametrize(("kind", "cure"), [("twicing 2", ""), ("boosted 2 residual feature", "kv_from='input'")])
def test_a_context_without_a_residual_is_refused(kind, cure):
    with refused("context", cure):
        layer_of(kind)(tokens(), context=tokens(2, 5))


# ---- the cache ----


def decode(layer, x, chunks, cache=None, mask=None, positions=None):
    cache, outputs, start = cache or layer.make_cache(len(x), x.shape[1]), [], 0
    for size in chunks:
        end = start + size
        told = {}
        if mask is not None:
            told["mask"] = mask[..., :end]
        if positions is not None and layer.rotary is not None:
            told["positions"] = positions[:, start:end]
        outputs.append(layer(x[:, start:end], causal=True, cache=cache, **told))
        start = end
    return torch.cat(outputs, dim=1)


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 2, 1], [7]], ids=str)
@torch.no_grad()
def test_decoding_equals_the_full_pass(kind, options, chunks):
    layer, x = layer_of(kind, **options), tokens()
    cache = layer.make_cache(2, 9)
    assert (decode(layer, x, chunks, cache) - layer(x, causal=True)).abs().max() < EXACT
    assert cache.length == 7
    cache.crop(0)
    assert (decode(layer, x, chunks, cache) - layer(x, causal=True)).abs().max() < EXACT


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
@torch.no_grad()
def test_decoding_with_left_padding_equals_each_sequence_alone(kind, options):
    layer, x, lengths = layer_of(kind, **options), tokens(), torch.tensor([4, 7])
    mask = padding_mask(lengths, 7, side="left")
    positions = (torch.arange(7) - (7 - lengths)[:, None]).clamp(min=0)
    output = decode(layer, x, [2, 3, 1, 1], mask=mask, positions=positions)
    for b, length in enumerate(lengths):
        alone = layer(x[b : b + 1, 7 - length :], causal=True)
        assert (output[b : b + 1, 7 - length :] - alone).abs().max() < EXACT


@pytest.mark.parametrize("kind", each(kind for kind in SOFTMAX if kind not in SHIFTED))
@torch.no_grad()
def test_a_cropped_and_reordered_cache_continues_as_if_written_so(kind):
    layer, x = layer_of(kind, rotary=100.0), tokens()
    cache = layer.make_cache(2, 9)
    decode(layer, x, [4, 2], cache)
    cache.crop(3)
    cache.reorder(torch.tensor([1, 1]))
    wanted = torch.cat([x[[1, 1], :3], x[:, 3:]], dim=1)
    assert (decode(layer, x[:, 3:], [4], cache) - layer(wanted, causal=True)[:, 3:]).abs().max() < EXACT


@pytest.mark.parametrize("kind", SHIFTED)
@torch.no_grad()
def test_a_cache_of_a_shifted_layer_can_be_emptied_and_reordered_but_not_cropped(kind):
    """The last key, unmixed, of a shorter past is gone."""
    layer, x = layer_of(kind), tokens()
    cache = layer.make_cache(2, 9)
    decode(layer, x, [4, 2], cache)
    with refused("length"):
        cache.crop(3)
    cache.reorder(torch.tensor([1, 1]))
    again = decode(layer, x[[1, 1], 6:], [1], cache)
    assert (again - layer(x[[1, 1]], causal=True)[:, 6:]).abs().max() < EXACT
    cache.crop(0)
    assert (decode(layer, x, [3, 4], cache) - layer(x, causal=True)).abs().max() < EXACT


# ---- packed sequences and the shift ----

LENGTHS = [3, 1, 3]  # of three texts that share one row of seven tokens
TEXT = torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS))
SAME_TEXT = TEXT[:, None] == TEXT


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_packed_texts_are_as_separate_ones(kind):
    layer, x = layer_of(kind), tokens()
    masks = [SAME_TEXT, SAME_TEXT[None, None].expand(2, H, 7, 7)]
    if not kind.startswith("linear"):
        for hidden in (-torch.inf, -1e9, torch.finfo(torch.float64).min):
            masks.append(torch.zeros(7, 7, dtype=torch.float64).masked_fill(~SAME_TEXT, hidden))
    for causal in (False, True):
        alone = torch.cat([layer(part, causal=causal) for part in x.split(LENGTHS, dim=1)], dim=1)
        for mask in masks:
            assert (layer(x, causal=causal, mask=mask) - alone).abs().max() < EXACT


@pytest.mark.parametrize("kind", [kind for kind in SHIFTED if not kind.startswith("linear")])
@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 2, 1], [2, 5]], ids=str)
@torch.no_grad()
def test_packed_texts_decode_by_chunks(kind, chunks):
    layer, x, start = layer_of(kind), tokens(), 0
    cache, outputs = layer.make_cache(2, 7), []
    for size in chunks:
        end = start + size
        mask = SAME_TEXT[None, None, start:end, :end]
        outputs.append(layer(x[:, start:end], causal=True, mask=mask, cache=cache))
        start = end
    assert (torch.cat(outputs, 1) - layer(x, causal=True, mask=SAME_TEXT)).abs().max() < EXACT


@pytest.mark.parametrize("kind", [kind for kind in CROSS if kind in SHIFTED])
@torch.no_grad()
def test_packed_contexts_are_as_separate_ones(kind):
    layer, x, context = layer_of(kind), tokens(), tokens(2, 5, seed=3)
    of = torch.tensor([0, 0, 1, 2, 2])
    alone = [layer(x[:, TEXT == i], context=context[:, of == i]) for i in range(3)]
    packed = layer(x, context=context, mask=TEXT[:, None] == of)
    assert (packed - torch.cat(alone, 1)).abs().max() < EXACT


def test_the_shift_by_hand():
    """Naively, feature by feature; the first token, and one that may not see its neighbour, have none before them."""
    shift, z = TokenShift(2, dtype=torch.float64), tokens(2, 4, d_model=2)
    assert torch.equal(shift(z), z)
    with torch.no_grad():
        shift.own.copy_(torch.tensor([0.5, -1.0]))
        shift.previous.copy_(torch.tensor([2.0, 1.0]))
    joined, last = torch.tensor([[True, True, False, True], [True] * 4]), tokens(2, 1, seed=5, d_model=2)
    by_hand = torch.zeros_like(z)
    for b, t, i in np.ndindex(2, 4, 2):
        before = z[b, t - 1, i] if t else last[b, 0, i]
        by_hand[b, t, i] = (1 + shift.own[i]) * z[b, t, i] + shift.previous[i] * before * joined[b, t]
    assert torch.allclose(shift(z, last, joined), by_hand, atol=1e-15)
    assert torch.equal(shift(z)[:, 0], (1 + shift.own) * z[:, 0])
    shift.reset_parameters()
    assert torch.equal(shift(z, last), z)


@pytest.mark.parametrize("kind", SHIFTED)
@torch.no_grad()
def test_a_fresh_shift_changes_nothing_and_the_other_weights_are_drawn_as_without_it(kind):
    layers = []
    for name in (kind, kind.removesuffix(" shift")):
        torch.manual_seed(0)
        layers.append(make_attention(kind.split()[0], D, H, **KINDS[name]))
    shifted, plain = layers
    assert plain.state_dict().keys() < shifted.state_dict().keys()
    assert torch.equal(shifted(tokens().float(), causal=True), plain(tokens().float(), causal=True))
    assert "shift=True" in repr(shifted) and "shift" not in repr(plain)


@pytest.mark.parametrize("kind", SHIFTED)
@torch.no_grad()
def test_every_round_with_keys_of_its_own_has_a_shift_of_its_own(kind):
    layer, x = layer_of(kind), tokens()
    before = layer(x, causal=True)
    shifts = [weight for name, weight in layer.named_parameters() if "shift" in name]
    assert len(shifts) == 4 * sum(part.key is not None for part in (layer, *getattr(layer, "corrections", [])))
    for weight in shifts:
        weight += 0.5
        assert (layer(x, causal=True) - before).abs().max() > 1e-4
        weight -= 0.5


@pytest.mark.parametrize("kind", each(SOFTMAX))
@torch.no_grad()
def test_explain_reads_a_cache_as_forward_does(kind):
    layer, x = layer_of(kind), tokens()
    first, second = layer.make_cache(2, 9), layer.make_cache(2, 9)
    for part in x.split([3, 1, 3], dim=1):
        trace = layer.explain(part, causal=True, cache=first)
        assert (trace.output - layer(part, causal=True, cache=second)).abs().max() < EXACT
    assert trace.rounds[-1].weights.shape == (2, H, 3, 7)


@pytest.mark.parametrize(
    ("told", "argument"),
    [
        ({"causal": False}, "causal"),
        ({"x": tokens(3, 2)}, "cache"),
        ({"x": tokens(2, 5)}, "cache"),
        ({"cache": "a dict"}, "cache"),
        ({"cache": LinearAttention(D, H).make_cache(2, 4)}, "cache"),
        ({"context": tokens(2, 0), "causal": False}, "context"),
        ({"context": tokens(2, 5), "causal": False}, "cache"),
    ],
)
@torch.no_grad()
def test_a_cache_that_does_not_fit_is_refused(told, argument):
    layer = layer_of("multi_head")
    told = {"x": tokens(2, 2), "causal": True, "cache": layer.make_cache(2, 4)} | told
    with refused(argument):
        layer(told.pop("x"), **told)


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_a_pass_that_failed_leaves_the_cache_as_it_was(kind):
    layer, x = layer_of(kind), tokens()
    cache = layer.make_cache(2, 7)
    decode(layer, x, [3], cache)

    class Failure(Exception):
        pass

    def fail(*_):
        raise Failure

    handle = layer.out.register_forward_pre_hook(fail)
    with pytest.raises(Failure):
        layer(x[:, 3:4], causal=True, cache=cache)
    handle.remove()
    assert (decode(layer, x[:, 3:], [1, 3], cache) - layer(x, causal=True)[:, 3:]).abs().max() < EXACT


@torch.no_grad()
def test_a_trace_keeps_what_it_saw_when_the_cache_goes_on():
    layer, x = layer_of("twicing 3", n_heads=1), tokens()
    cache = layer.make_cache(2, 7)
    trace = layer.explain(x[:, :3], causal=True, cache=cache)
    before = [seen.residual.clone() for seen in trace.rounds]
    cache.crop(0)
    layer(-x, causal=True, cache=cache)
    assert all(torch.equal(a, seen.residual) for a, seen in zip(before, trace.rounds))


@pytest.mark.parametrize("kind", FEW)
def test_a_cache_refuses_to_cut_gradients_silently(kind):
    layer = layer_of(kind)
    with refused("cache", "torch.no_grad()"):
        layer(tokens(), causal=True, cache=layer.make_cache(2, 7))


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_writing_to_a_cache_allocates_nothing_in_it(kind):
    layer = layer_of(kind)
    cache = layer.make_cache(2, 9)
    places = {name: kept.data_ptr() for name, kept in cache.buffers.items()}
    size = cache.nbytes
    decode(layer, tokens(), [3, 1, 1, 2], cache)
    assert {name: kept.data_ptr() for name, kept in cache.buffers.items()} == places
    assert cache.nbytes == size


# ---- weights ----


@pytest.mark.parametrize("kind", each(KINDS))
def test_weights_have_stable_unfused_names_and_start_from_one_stream(kind):
    def made():
        torch.manual_seed(5)
        return make_attention(kind.split()[0], D, H, **KINDS[kind])

    layer, again = made(), made()
    torch.manual_seed(5)
    plain = MultiHeadAttention(D, H).state_dict()
    state = layer.state_dict()
    assert list(state)[: len(plain)] == list(plain)
    assert all(torch.equal(state[name], plain[name]) for name in plain)
    assert all(torch.equal(a, b) for a, b in zip(state.values(), again.state_dict().values()))
    layer.reset_parameters(torch.Generator().manual_seed(6))
    again.reset_parameters(torch.Generator().manual_seed(6))
    assert all(torch.equal(a, b) for a, b in zip(layer.state_dict().values(), again.state_dict().values()))
    assert not torch.equal(layer.query.weight, plain["query.weight"])


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_fresh_and_reset_layers_follow_the_table(kind):
    layer = make_attention(kind.split()[0], 32, H, **KINDS[kind])
    for _ in range(2):
        for name, weight in layer.named_parameters():
            if "gate" in name or "shift" in name or name.endswith("bias"):
                assert not weight.any(), name
            elif "norm" in name:
                assert (weight == 1).all(), name
            else:
                bound = (6 / sum(weight.shape)) ** 0.5
                assert 0.95 * bound < weight.abs().max() <= bound, name
                assert abs(weight.std() - bound / 3**0.5) < 0.06 * bound, name
        for seen in layer.explain(tokens(dtype=torch.float32, d_model=32)).rounds:
            assert seen.gate is None or (seen.gate == 0.5).all()
        for weight in layer.parameters():
            weight.fill_(7.0)
        layer.reset_parameters()


@pytest.mark.parametrize("kind", each(KINDS))
def test_without_biases_there_are_none_but_those_of_gates(kind):
    names = [name for name, _ in layer_of(kind, bias=False).named_parameters() if name.endswith("bias")]
    assert all("gate" in name for name in names)


@pytest.mark.parametrize("kind", each(KINDS))
def test_state_dict_round_trip_and_deepcopy(kind):
    layer, other, x = layer_of(kind), layer_of(kind, seed=9), tokens()
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x)) and torch.equal(layer(x), copy.deepcopy(layer)(x))


# ---- gradients, compilation, dtypes ----


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
def test_gradcheck(kind, options):
    options = {name: min(value, 2) if name == "n_kv_heads" else value for name, value in options.items()}
    if "n_kv_heads" in options:
        options["n_kv_heads"] = 1
    layer = layer_of(kind, d_model=4, n_heads=2, **options)
    weights = dict(layer.named_parameters())

    def output(x, *values):
        return torch.func.functional_call(layer, dict(zip(weights, values)), (x,), {"causal": True})

    x = tokens(1, 3, d_model=4).requires_grad_()
    assert torch.autograd.gradcheck(output, (x, *weights.values()), fast_mode=True)


@pytest.mark.parametrize("kind", FEW_SOFTMAX)
def test_gradient_of_an_additive_mask(kind):
    layer, x = layer_of(kind), tokens(1, 3)
    bias = torch.randn(1, H, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda bias: layer(x, mask=bias, causal=True), (bias,), fast_mode=True)


@pytest.mark.parametrize(("kind", "options"), FEW_VARIANTS)
def test_layers_compile_into_one_graph(kind, options):
    torch._dynamo.reset()
    layer, x, pad = layer_of(kind, **options), tokens(), padding_mask(torch.tensor([5, 7]), 7)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for told in ({"causal": True}, {"mask": pad}, {"causal": True, "mask": pad}):
        x.requires_grad_()
        assert (compiled(x, **told) - layer(x, **told)).abs().max() < EXACT
        fast, slow = (torch.autograd.grad(f(x, **told).square().sum(), x)[0] for f in (compiled, layer))
        assert (fast - slow).abs().max() < EXACT


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_sizes_of_numpy_make_the_layer_that_compiles(kind):
    torch._dynamo.reset()
    layer, x = layer_of(kind, d_model=np.int64(D), n_heads=np.int64(H), n_kv_heads=np.int64(2)), tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, causal=True), layer(x, causal=True))


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_decoding_compiles_once_for_a_fixed_and_once_for_a_growing_length(kind):
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    x = tokens(T=12)
    for layer in (layer_of(kind) for _ in range(3)):  # layers of one kind share their programs
        layer.compile(fullgraph=True, backend=count)
        cache = layer.make_cache(2, 12)
        outputs = [layer(x[:, t : t + 1], causal=True, cache=cache) for t in range(12)]
        assert (torch.cat(outputs, dim=1) - layer.forward(x, causal=True)).abs().max() < EXACT
    assert len(graphs) == 2


@pytest.mark.parametrize(("kind", "options"), [*variants()])
def test_what_holds_weights_is_called_with_tensors_alone(kind, options):
    """What computes per-sample gradients hooks such modules, and detaches what they are called with."""
    layer, given = layer_of(kind, **options), []
    for module in layer.modules():
        if [*module.parameters(recurse=False)]:
            module.register_forward_pre_hook(lambda _, args: given.append(args))
    layer.train()(tokens(), causal=True)
    assert given and all(isinstance(x, torch.Tensor) for args in given for x in args)


@pytest.mark.parametrize("kind", ["multi_head", "linear elu", "boosted 2 residual feature"])
@torch.no_grad()
def test_a_compiled_layer_takes_any_length(kind):
    torch._dynamo.reset()
    layer, graphs = layer_of(kind), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, backend=count)
    for T in range(5, 15):
        x = tokens(T=T)
        assert (compiled(x) - layer(x)).abs().max() < EXACT
    assert len(graphs) == 2


def test_a_padding_mask_can_be_made_in_a_graph():
    torch._dynamo.reset()
    layer, x = layer_of("multi_head"), tokens()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def padded(x, lengths):
        return layer(x, mask=padding_mask(lengths, 7))

    lengths = torch.tensor([5, 7])
    assert (padded(x, lengths) - layer(x, mask=padding_mask(lengths, 7))).abs().max() < EXACT


@pytest.mark.parametrize("kind", FEW)
def test_layers_export(kind):
    layer, x = layer_of(kind), tokens()
    sizes = {"x": {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}, "causal": None}
    if kind.startswith("linear"):
        sizes["x"].pop(1)  # its causal form cuts a given length into chunks
    exported = torch.export.export(layer, (x,), {"causal": True}, dynamic_shapes=sizes).module()
    longer = tokens(3, 7 if kind.startswith("linear") else 11)
    assert (exported(longer, causal=True) - layer(longer, causal=True)).abs().max() < EXACT


@pytest.mark.parametrize("heads", [1, 8])
def test_layers_in_half_precision_export_for_any_length(heads):
    """Though on a CPU it depends on the length and the width how a look that learns is made."""
    layer = MultiHeadAttention(64, heads, dtype=torch.bfloat16)
    x = tokens(dtype=torch.bfloat16, d_model=64)
    sizes = {"x": {1: torch.export.Dim("T", min=2, max=4096)}, "causal": None}
    exported = torch.export.export(layer, (x,), {"causal": True}, dynamic_shapes=sizes).module()
    longer = tokens(2, 600, dtype=torch.bfloat16, d_model=64)
    assert (exported(longer, causal=True) - layer(longer, causal=True)).abs().max() < 0.05


@pytest.mark.parametrize("kind", each(KINDS))
def test_autocast_runs_in_half_precision_and_comes_close(kind):
    layer, x = layer_of(kind, dtype=torch.float32), tokens(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x, causal=True)
        with torch.no_grad():
            cache = layer.make_cache(2, 7, dtype=torch.bfloat16)
            decoded = torch.cat([layer(part, causal=True, cache=cache) for part in x.split(1, dim=1)], dim=1)
    wanted = layer(x, causal=True)
    size = wanted.abs().max()
    assert output.dtype == decoded.dtype == torch.bfloat16
    assert (output - wanted).abs().max() < 0.05 * size  # eight bits of mantissa, several products deep
    assert (decoded - wanted).abs().max() < 0.05 * size
    output.float().square().sum().backward()
    assert all(torch.isfinite(weight.grad).all() for weight in layer.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_long_sums_keep_their_precision_under_autocast(dtype):
    layer = layer_of("linear elu", dtype=torch.float32, d_model=32, n_heads=1)
    x = tokens(1, 3000, dtype=torch.float32, d_model=32)
    wanted = layer(x, causal=True)
    with torch.autocast("cpu", dtype=dtype):
        for output in (layer(x, causal=True), decode(layer, x, [500] * 6)):
            assert (output - wanted).abs().max() < 0.05 * wanted.abs().max()


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(
    kind=st.sampled_from(list(KINDS)),
    groups=st.sampled_from([1, 2, 4]),
    B=st.integers(0, 3),
    T=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    causal=st.booleans(),
    scale=st.sampled_from([0.0, 1.0, 1e4]),
)
def test_any_shape_dtype_and_size_of_input_gives_finite_outputs(kind, groups, B, T, dtype, causal, scale):
    layer = layer_of(kind, dtype=dtype, n_kv_heads=groups)
    if dtype == torch.float16:  # its largest number is 65,504, and a layer multiplies by several matrices
        scale = min(scale, 1.0 if kind == "linear identity" else 100.0)
    x = scale * tokens(B, T, dtype=dtype)
    output = layer(x, causal=causal)
    assert output.shape == x.shape and output.dtype == dtype
    assert torch.isfinite(output).all()
    if dtype == torch.float64 and B:
        assert (layer.explain(x, causal=causal).output - output).abs().max() <= EXACT * max(1.0, output.abs().max())


@pytest.mark.parametrize("kind", FEW_SOFTMAX)
@torch.no_grad()
def test_equal_scores_average_the_past(kind):
    layer, x = layer_of(kind), tokens()
    layer.query.weight.zero_(), layer.query.bias.zero_()
    weights = layer.explain(x, causal=True).rounds[0].weights
    wanted = causal_mask(7) / torch.arange(1.0, 8.0, dtype=torch.float64)[:, None]
    assert (weights - wanted).abs().max() < EXACT


def test_dropout_drops_weights_while_training_and_scales_the_rest():
    torch.manual_seed(0)
    x = tokens(dtype=torch.float32)
    for kind in ("multi_head", "boosted 2 residual feature"):
        layer = layer_of(kind, dtype=torch.float32, dropout=0.5)
        assert torch.equal(layer(x), layer(x))
        layer.train()
        assert not torch.equal(layer(x), layer(x))
    plain = layer_of("multi_head", dtype=torch.float32, dropout=0.5)
    wanted = plain(x)
    plain.train()
    mean = torch.stack([plain(x) for _ in range(4000)]).mean(0)
    assert (mean - wanted).abs().max() < 0.05 * wanted.abs().max()  # an unbiased estimate of the pass without dropout


# ---- what others do to a layer: wrap, quantise, shard, trace ----


class Wrapped(nn.Module):
    """A linear layer within another module, as an adapter has it: no weight, no bias, one input."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x)


@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_every_linear_layer_can_be_replaced_by_a_module_that_calls_it(kind):
    layer, x = layer_of(kind), tokens()
    wanted = layer(x, causal=True)
    places = [
        (parent, name)
        for parent in layer.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    for parent, name in places:
        setattr(parent, name, Wrapped(getattr(parent, name)))
    assert (layer(x, causal=True) - wanted).abs().max() < EXACT  # of one product for several maps, in another order
    assert all(getattr(parent, name).calls == 1 for parent, name in places)
    cache = layer.make_cache(2, 7)
    assert (decode(layer, x, [3, 4], cache) - wanted).abs().max() < EXACT


@pytest.mark.parametrize("kind", each(KINDS))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@torch.no_grad()
def test_dynamic_quantisation_leaves_a_layer_that_runs(kind):
    torch.manual_seed(0)
    layer, x = make_attention(kind.split()[0], 32, H, **KINDS[kind]), tokens(dtype=torch.float32, d_model=32)
    small = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    assert not isinstance(small.query, nn.Linear)
    wanted = layer(x, causal=True)
    assert (small(x, causal=True) - wanted).abs().max() < 0.1 * wanted.abs().max()


class Int8Weight(torch.Tensor):
    """A weight stored as integers and scales that says it is floating point and knows the product of a linear map, and
    nothing else, as tensors of quantisation libraries do."""

    @staticmethod
    def __new__(cls, weight):
        return torch.Tensor._make_wrapper_subclass(cls, weight.shape, dtype=weight.dtype)

    def __init__(self, weight):
        self.scale = weight.detach().abs().amax(-1, keepdim=True) / 127
        self.stored = (weight.detach() / self.scale).round().to(torch.int8)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is nn.functional.linear:
            x, weight, *bias = args
            return nn.functional.linear(x, weight.stored.to(x.dtype) * weight.scale, *bias)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{function} of a quantised weight")


class Int8Linear(nn.Linear):
    """A linear map whose weight is integers, as modules of quantisation libraries are."""

    def __init__(self, linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = linear.weight.detach().abs().amax(-1, keepdim=True) / 127
        stored = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(stored, requires_grad=False)

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def quantised(module, by):
    """The module, with each linear map in it of integers, by tensors or by modules."""
    for parent in [*module.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and by == "tensor":
                child.weight = nn.Parameter(Int8Weight(child.weight), requires_grad=False)
            elif isinstance(child, nn.Linear):
                setattr(parent, name, Int8Linear(child))
    return module


@pytest.mark.parametrize("by", ["tensor", "module"])
@pytest.mark.parametrize("kind", each(KINDS))
@torch.no_grad()
def test_quantised_weights_leave_a_layer_that_runs_and_decodes(kind, by):
    layer, x = layer_of(kind), tokens()
    wanted = layer(x, causal=True)
    small = quantised(layer, by)
    output = small(x, causal=True)
    assert 0 < (output - wanted).abs().max() < 0.1 * wanted.abs().max()
    assert (small.explain(x, causal=True).output - output).abs().max() < EXACT
    assert (decode(small, x, [3, 4], small.make_cache(2, 7)) - output).abs().max() < EXACT


def quantised_by_library(layer, how):
    """A copy of a layer as a library quantises it: torchao the weights, bitsandbytes the linear maps."""
    layer = copy.deepcopy(layer)
    if how == "torchao int8":
        torchao = pytest.importorskip("torchao.quantization")
        torchao.quantize_(layer, torchao.Int8WeightOnlyConfig())
        return layer
    bitsandbytes = pytest.importorskip("bitsandbytes").nn
    eight = partial(bitsandbytes.Linear8bitLt, has_fp16_weights=False)
    make = {"bitsandbytes 8 bit": eight, "bitsandbytes 4 bit": bitsandbytes.Linear4bit}[how]
    for parent in [*layer.modules()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                small = make(child.in_features, child.out_features, child.bias is not None)
                small.load_state_dict(child.state_dict())
                setattr(parent, name, small.to("cpu"))  # which quantises
    return layer


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    ("how", "near"), [("torchao int8", 0.02), ("bitsandbytes 8 bit", 0.02), ("bitsandbytes 4 bit", 0.3)]
)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_weights_quantised_by_a_library_leave_a_layer_that_runs_and_decodes(name, how, near):
    """With the gate as it starts, and drawn. float8 is not here: torchao turns a linear map whose weights are all zero,
    as the gate starts, into NaN, and a plain `nn.Linear` just as well."""
    torch.manual_seed(0)
    layer, x = make_attention(name, 64, H).eval(), tokens(dtype=torch.float32, d_model=64)
    for _ in range(2):
        small, wanted = quantised_by_library(layer, how), layer(x, causal=True)
        output = small(x, causal=True)
        assert 0 < (output - wanted).norm() < near * wanted.norm()
        assert (small.explain(x, causal=True).output - output).abs().max() < 1e-5
        assert (decode(small, x, [3, 1, 3], small.make_cache(2, 7)) - output).abs().max() < 1e-5
        for weight in layer.parameters():
            if not weight.any():
                nn.init.normal_(weight, std=0.1)


@pytest.mark.parametrize("kind", ["multi_head", "linear"])
@torch.no_grad()
def test_a_layer_of_integers_alone_asks_for_the_dtype_of_its_cache(kind):
    layer = quantised(make_attention(kind, D, H, bias=False, dtype=torch.float64), "module")
    with refused("dtype"):
        layer.make_cache(2, 7)
    x, cache = tokens(), layer.make_cache(2, 7, dtype=torch.float64)
    assert (decode(layer, x, [3, 4], cache) - layer(x, causal=True)).abs().max() < EXACT


@torch.no_grad()
def test_a_quantised_layer_is_not_copied_into_torchs():
    with refused("projections"):
        to_torch(quantised(MultiHeadAttention(D, H), "tensor"))


def test_a_correction_is_called_so_that_hooks_and_checkpoints_see_it():
    layer, x = layer_of("boosted 3 shared head"), tokens().requires_grad_()
    rounds = []
    for correction in layer.corrections:
        correction.register_forward_hook(lambda module, args, output: rounds.append(output))
    wanted = layer(x, causal=True)
    trace = layer.explain(x, causal=True)
    assert len(rounds) == 4
    for hooked, explained in zip(rounds, trace.rounds[1:]):
        assert (hooked.estimate - explained.estimate).abs().max() < EXACT
        assert (hooked.correction - explained.correction).abs().max() < EXACT
    gradients = torch.autograd.grad(wanted.square().sum(), [x, *layer.parameters()])
    for correction in layer.corrections:
        plain = correction.forward
        saved = partial(torch.utils.checkpoint.checkpoint, plain, use_reentrant=False)
        correction.forward = saved
    again = layer(x, causal=True)
    for a, b in zip(gradients, torch.autograd.grad(again.square().sum(), [x, *layer.parameters()])):
        assert torch.equal(a, b)


@pytest.fixture
def one_process():
    """A group of this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not (distributed.is_available() and distributed.is_gloo_available()):
        pytest.skip("needs torch.distributed with gloo")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield distributed
    distributed.destroy_process_group()


@pytest.mark.parametrize("kv_from", ["residual", "input", "shared"])
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of operations in place, of which there are none
def test_corrections_can_be_sharded(one_process, kv_from):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("needs torch.distributed.fsdp.fully_shard")
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    layer, x = layer_of(f"boosted 3 {kv_from} feature"), tokens()
    whole = copy.deepcopy(layer)
    for correction in layer.corrections:
        fsdp.fully_shard(correction, mesh=mesh)
    fsdp.fully_shard(layer, mesh=mesh)
    outputs = [each(x, causal=True) for each in (layer, whole)]
    assert torch.equal(*outputs)
    for output in outputs:
        output.square().sum().backward()
    for sharded, weight in zip(layer.parameters(), whole.parameters()):
        assert torch.equal(sharded.grad.full_tensor(), weight.grad)


@pytest.mark.parametrize(("kind", "options"), FEW_VARIANTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace")
@torch.no_grad()
def test_layers_can_be_traced(kind, options, causal):
    layer, x = layer_of(kind, causal=causal, **options), tokens()
    assert torch.equal(torch.jit.trace(layer, (x,))(-x), layer(-x))


@pytest.mark.parametrize("kind", FEW)
def test_layers_can_be_made_empty(kind):
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        layer = make_attention(kind.split()[0], 64, 4, **KINDS[kind])
    assert {weight.device.type for weight in layer.parameters()} == {"meta"}


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_half_of_the_features_do_not_pass_for_heads_of_half_the_width(kind):
    """As a projection that is split over devices gives them."""
    layer, x = layer_of(kind), tokens()
    for name in ("query", "key", "value"):
        whole, part = getattr(layer, name), nn.Linear(D, D // 2, dtype=torch.float64)
        setattr(layer, name, part)
        with refused(name):
            layer(x)
        setattr(layer, name, whole)


@torch.no_grad()
def test_heads_split_over_two_devices_add_up_to_the_layer():
    whole, x = layer_of("multi_head", rotary=100.0), tokens()
    total = whole.out.bias.clone()
    for half in (slice(0, D // 2), slice(D // 2, D)):
        part = copy.deepcopy(whole)
        part.n_heads, part.n_kv_heads = H // 2, H // 2
        for linear in (part.query, part.key, part.value):
            linear.weight, linear.bias = nn.Parameter(linear.weight[half]), nn.Parameter(linear.bias[half])
        part.out.weight, part.out.bias = nn.Parameter(part.out.weight[:, half]), None
        total = total + part(x, causal=True)
    assert (total - whole(x, causal=True)).abs().max() < EXACT


# ---- causal, where the layer is made ----


@pytest.mark.parametrize(("kind", "options"), VARIANTS)
@torch.no_grad()
def test_a_layer_made_causal_is_causal_unless_told(kind, options):
    layer, plain, x = layer_of(kind, causal=True, **options), layer_of(kind, **options), tokens()
    assert torch.equal(layer(x), plain(x, causal=True))
    assert torch.equal(layer.explain(x).output, plain.explain(x, causal=True).output)
    assert torch.equal(layer(x, causal=False), plain(x))
    cache = layer.make_cache(2, 7)
    decoded = torch.cat([layer(part, cache=cache) for part in x.split([3, 1, 3], dim=1)], dim=1)
    assert (decoded - layer(x)).abs().max() < EXACT
    assert "causal=True" in repr(layer) and "causal" not in repr(plain)


@pytest.mark.parametrize("kind", CROSS)
@torch.no_grad()
def test_a_layer_made_causal_must_be_told_of_a_context(kind):
    layer, x, context = layer_of(kind, causal=True), tokens(), tokens(2, 5)
    with refused("causal"):
        layer(x, context=context)
    assert torch.equal(layer(x, context=context, causal=False), layer_of(kind)(x, context=context))


# ---- what could be misread ----


@pytest.mark.parametrize("kind", FEW)
@torch.no_grad()
def test_a_mask_that_could_be_of_queries_or_of_sequences_is_refused(kind):
    layer, x = layer_of(kind), tokens(4, 4)
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    for method in (layer, layer.explain):
        with refused("mask"):
            method(x, mask=mask)
    of_queries, of_sequences = layer(x, mask=mask[None, None]), layer(x, mask=mask[:, None, None])
    for b in range(4):
        assert (of_queries[b] - layer(x[b : b + 1], mask=mask)[0]).abs().max() < EXACT
        assert (of_sequences[b] - layer(x[b : b + 1], mask=mask[b : b + 1])[0]).abs().max() < EXACT


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", FEW_SOFTMAX)
def test_zeros_and_ones_are_not_added_to_the_scores(kind):
    layer, x = layer_of(kind), tokens()
    ones = torch.ones(7, 7, dtype=torch.float64)
    for method in (layer, layer.explain):
        with refused("mask", "mask.bool()"):
            method(x, mask=ones.tril())
    for harmless in (ones, 0 * ones, 2 * ones.tril(), ones.tril().requires_grad_()):
        layer(x, mask=harmless)
    several = torch.stack([ones.tril(), ones.triu()])
    assert vmap(lambda mask: layer(x, mask=mask))(several).shape == (2, 2, 7, D)  # it cannot look at numbers


# ---- errors that all layers share ----


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"d_model": 0}, "d_model"),
        ({"n_heads": 3}, "n_heads"),
        ({"n_kv_heads": 3}, "n_kv_heads"),
        ({"bias": "False"}, "bias"),
        ({"causal": "False"}, "causal"),
        ({"wings": 2}, "options"),
        ({"dropout": 1.0}, "dropout"),
        ({"qk_norm": 1}, "qk_norm"),
        ({"rotary": {"speed": 2}}, "rotary"),
        ({"rotary": True}, "rotary"),
        ({"n_heads": 8, "rotary": 10.0}, "rotary"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_options_are_named(name, options, argument):
    made = {"d_model": 8, "n_heads": 4} | options
    if name == "linear" and options.get("rotary") is not None:
        made["feature_map"] = "identity"
    with refused(argument):
        make_attention(name, **made)


BAD_ARGUMENTS = [  # the first of each case is at fault
    {"x": torch.ones(2, 7, 9)},
    {"x": torch.ones(2, 0, D)},
    {"x": torch.ones(2, 7, D)},
    {"x": torch.ones(2, 7, D, device="meta")},
    {"context": torch.ones(2, 5, D)},
    {"context": torch.ones(3, 5, D, dtype=torch.float64)},
    {"causal": "False"},
    {"causal": True, "context": tokens(2, 5)},
    {"mask": [True]},
    {"mask": torch.ones(7, 7, dtype=torch.int64)},
    {"mask": torch.ones(7, 6) > 0},
    {"mask": torch.ones(2, 7, 7) > 0},
    {"mask": torch.ones(7, 7, device="meta") > 0},
    {"positions": torch.arange(7)},
]


@pytest.mark.parametrize("kind", FEW)
def test_bad_arguments_are_named(kind):
    layer = layer_of(kind)
    for told in BAD_ARGUMENTS:
        for method in (layer, layer.explain):
            with refused([*told][0]):
                method(**{"x": tokens()} | told)


@pytest.mark.parametrize("positions", [torch.arange(6), torch.arange(7.0), range(7)])
def test_bad_positions_are_named(positions):
    with refused("positions"):
        layer_of("multi_head", rotary=100.0)(tokens(), positions=positions)


# ---- on a GPU ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_what_the_cpu_gives():
    for kind in KINDS:
        layer, x = layer_of(kind, dtype=torch.float32), tokens(dtype=torch.float32)
        there = copy.deepcopy(layer).cuda()
        for causal in (False, True):
            for mask in some_masks(kind):
                wanted = layer(x, causal=causal, mask=mask)
                got = there(x.cuda(), causal=causal, mask=None if mask is None else mask.cuda()).cpu()
                assert torch.isfinite(got).all(), kind
                assert (got - wanted).abs().max() < 1e-4 * max(1.0, wanted.abs().max()), kind  # TF32 is off
        with torch.no_grad():
            decoded = decode(there, x.cuda(), [3, 1, 1, 2]).cpu()
        assert (decoded - layer(x, causal=True)).abs().max() < 1e-4, kind
