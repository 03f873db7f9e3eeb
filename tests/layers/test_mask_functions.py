"""Mask and score functions as FlexAttention calls them, and packed sequences, in layers of every kind."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from refusals import refused
from test_layers import EXACT, FEW, FEW_SOFTMAX, LENGTHS, SAME_TEXT, TEXT, D, H, layer_of, tokens
from torch.nn.attention.flex_attention import and_masks, create_mask, flex_attention

from gbattn.attention import (
    alibi,
    attend,
    attention_weights,
    has_flex_kernel,
    padding_mask,
    prefix,
    resolve_functions,
    same_document,
    sliding_window,
    soft_cap,
)
from gbattn.sinkhorn import SinkhornAttention

B, T = 2, 7
SOME = [*FEW, "twicing 3", "boosted 3 input head shift"]
SOME_SOFTMAX = [kind for kind in SOME if not kind.startswith("linear")]
CROSS = ["multi_head shift", "linear elu", "boosted 2 input feature"]
IDS = torch.stack([TEXT, torch.tensor([4, 4, 4, 9, 9, 9, 9])])
TABLE = torch.randn(B, H, 20, generator=torch.Generator().manual_seed(7), dtype=torch.float64)

# Each function, and what it says of one pair of places.
MASKS = {
    "window": (sliding_window(3), lambda b, h, q, k: abs(q - k) < 3),
    "prefix": (prefix(4), lambda b, h, q, k: k <= q or k < 4),
    "prefixes": (prefix(torch.tensor([2, 5])), lambda b, h, q, k: k <= q or k < (2, 5)[b]),
    "documents": (same_document(IDS), lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
    "by head": (lambda b, h, q, k: (q - k) % (h + 1) == 0, lambda b, h, q, k: (q - k) % (h + 1) == 0),
    "nothing": (lambda b, h, q, k: (q != 3) & (k <= q), lambda b, h, q, k: q != 3 and k <= q),
    "chained": (lambda b, h, q, k: IDS[b][q] == IDS[b][k], lambda b, h, q, k: IDS[b, q] == IDS[b, k]),
}
SCORES = {
    "alibi": (alibi(H), lambda s, b, h, q, k: s - 2 ** (-8 * (h + 1) / H) * abs(q - k)),
    "soft cap": (soft_cap(0.5), lambda s, b, h, q, k: 0.5 * math.tanh(s / 0.5)),
    "table": (lambda s, b, h, q, k: s + TABLE[b, h, q - k + 9], lambda s, b, h, q, k: s + TABLE[b, h, q - k + 9]),
}


def by_hand(rule, T=T, S=T, start=0):
    at = [(b, h, q, k) for b in range(B) for h in range(H) for q in range(T) for k in range(S)]
    return torch.tensor([bool(rule(b, h, q + start, k)) for b, h, q, k in at]).reshape(B, H, T, S)


def some_heads(T=T, S=T, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda heads, n: torch.randn(B, heads, n, 4, generator=generator, dtype=torch.float64)
    return draw(H, T), draw(2, S), draw(2, S)


# ---- the functional core ----


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_function_is_the_mask_that_it_describes(name, causal):
    function, rule = MASKS[name]
    q, k, v = some_heads()
    for form in (attend(q, k, v, mask=function, causal=causal), attend(q, k, v, mask=by_hand(rule), causal=causal)):
        weights = attention_weights(q, k, mask=function, causal=causal)
        assert torch.equal(weights, attention_weights(q, k, mask=by_hand(rule), causal=causal))
        assert (form - weights @ v.repeat_interleave(2, 1)).abs().max() < EXACT
    assert torch.equal(by_hand(rule), create_mask(function, B, H, T, T, "cpu"))  # torch's own evaluation


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("causal", [False, True])
def test_a_score_function_changes_the_scaled_scores(name, causal):
    """Score by score, in Python; and as torch's FlexAttention does."""
    function, rule = SCORES[name]
    q, k, v = some_heads()
    scores = 0.7 * q @ k.repeat_interleave(2, 1).mT
    for b, h, i, j in torch.cartesian_prod(*map(torch.arange, (B, H, T, T))).tolist():
        hidden = causal and j > i
        scores[b, h, i, j] = -math.inf if hidden else rule(float(scores[b, h, i, j]), b, h, i, j)
    told = dict(causal=causal, scale=0.7, score_mod=function)
    assert (attention_weights(q, k, **told) - scores.softmax(-1)).abs().max() < EXACT
    output = attend(q, k, v, **told)
    assert (output - scores.softmax(-1) @ v.repeat_interleave(2, 1)).abs().max() < EXACT
    if name == "table" and not causal:
        torchs = flex_attention(q, k, v, score_mod=function, scale=0.7, enable_gqa=True)
        assert (torchs - output).abs().max() < EXACT


def test_both_functions_and_causality_hold_together():
    q, k, v = some_heads()
    for score, _ in SCORES.values():
        for mask, rule in MASKS.values():
            wanted = attention_weights(q, k, mask=by_hand(rule), causal=True, score_mod=score)
            weights = attention_weights(q, k, mask=mask, causal=True, score_mod=score)
            assert torch.equal(weights, wanted)
            output = attend(q, k, v, mask=mask, causal=True, score_mod=score)
            assert (output - wanted @ v.repeat_interleave(2, 1)).abs().max() < EXACT
            alone = ~by_hand(rule).logical_and(torch.ones(T, T).tril().bool()).any(-1)
            assert not output[alone].any()


def test_places_count_all_keys_where_there_is_a_past():
    q, k, v = some_heads(T=3)
    for mask, rule in MASKS.values():
        wanted = attend(q, k, v, causal=True, mask=by_hand(rule, 3, start=4))
        assert torch.equal(attend(q, k, v, causal=True, mask=mask), wanted)
    q_all, scores = torch.cat([torch.zeros(B, H, 4, 4).double(), q], 2), SCORES["alibi"][0]
    whole = attend(q_all, k, v, causal=True, score_mod=scores)[:, :, 4:]
    assert (attend(q, k, v, causal=True, score_mod=scores) - whole).abs().max() < EXACT


def test_a_mask_that_is_the_same_for_all_is_stored_once():
    """A function of places alone costs T × S bytes, not B · H times as many."""
    dense = lambda mask: resolve_functions((B, H, T, T), torch.device("cpu"), 0, False, mask)[0]
    shapes = {name: tuple(dense(mask).shape) for name, (mask, _) in MASKS.items()}
    assert shapes["window"] == shapes["prefix"] == (1, 1, T, T)
    assert shapes["documents"] == shapes["prefixes"] == (B, 1, T, T)
    assert shapes["by head"] == (1, H, T, T)


def test_gradients_of_scores_and_of_what_a_function_learns():
    q, k, v = some_heads()
    table = torch.zeros(H, dtype=torch.float64).requires_grad_()
    q.requires_grad_()

    def output(q, table):
        learned = lambda score, b, h, q_idx, kv_idx: soft_cap(2.0)(score, b, h, q_idx, kv_idx) + table[h] * kv_idx
        return attend(q, k, v, causal=True, mask=sliding_window(4), score_mod=learned)

    assert torch.autograd.gradcheck(output, (q, table), fast_mode=True)
    assert torch.autograd.gradgradcheck(output, (q, table), fast_mode=True)


def test_half_precision_scores_are_changed_in_single():
    q, k, v = (x.bfloat16() for x in some_heads())
    output = attend(q, k, v, score_mod=alibi(H))
    assert output.dtype == torch.bfloat16
    wide = attend(*(x.double() for x in (q, k, v)), score_mod=alibi(H))
    assert (output - wide).abs().max() < 0.02


# ---- layers ----


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_every_layer_takes_mask_functions(kind):
    layer, x, real = layer_of(kind), tokens(), padding_mask(torch.tensor([5, 7]), T)[:, 0, 0]
    for mask, rule in MASKS.values():
        for told in (dict(), dict(causal=True), dict(causal=True, padding=real)):
            wanted = layer(x, mask=by_hand(rule), **told)
            assert torch.equal(layer(x, mask=mask, **told), wanted)
            assert (layer.explain(x, mask=mask, **told).output - wanted).abs().max() < EXACT


@pytest.mark.parametrize("kind", SOME_SOFTMAX)
@torch.no_grad()
def test_every_round_has_scores_so_changed(kind):
    layer, x = layer_of(kind), tokens()
    bias = alibi(H)
    distance = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    added = -(2 ** (-8 * torch.arange(1, H + 1) / H))[:, None, None] * distance
    wanted = layer(x, mask=added[None].double(), causal=True)
    assert (layer(x, score_mod=bias, causal=True) - wanted).abs().max() < EXACT
    trace = layer.explain(x, score_mod=bias, causal=True)
    assert (trace.output - wanted).abs().max() < EXACT
    capped = layer.explain(x, score_mod=soft_cap(1e-9), causal=True)  # all scores are equal
    uniform = torch.ones(T, T).double().tril() / torch.arange(1, T + 1)[:, None]
    for found in capped.rounds:
        assert (found.weights - uniform).abs().max() < 1e-8
    assert (layer(x, score_mod=soft_cap(1e-9), causal=True) - capped.output).abs().max() < EXACT


@pytest.mark.parametrize("kind", SOME_SOFTMAX)
@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 2, 1]], ids=str)
@torch.no_grad()
def test_functions_decode_as_they_read(kind, chunks):
    layer, x = layer_of(kind), tokens()
    for mask, score in ((sliding_window(3), alibi(H)), (same_document(IDS), None)):
        wanted = layer(x, causal=True, mask=mask, score_mod=score)
        cache, outputs = layer.make_cache(B, T), []
        for part in x.split(chunks, dim=1):
            outputs.append(layer(part, causal=True, mask=mask, score_mod=score, cache=cache))
        assert (torch.cat(outputs, 1) - wanted).abs().max() < EXACT


@pytest.mark.parametrize("kind", CROSS)
@torch.no_grad()
def test_functions_of_a_context_have_its_places(kind):
    layer, x, context = layer_of(kind), tokens(), tokens(2, 5, seed=3)
    for name in ("window", "prefix", "by head"):
        mask, rule = MASKS[name]
        wanted = layer(x, context=context, mask=by_hand(rule, S=5))
        assert torch.equal(layer(x, context=context, mask=mask), wanted)


@pytest.mark.parametrize("kind", FEW_SOFTMAX)
def test_functions_compile_and_have_gradients(kind):
    torch._dynamo.reset()
    rotary = {"base": 100.0, "scaling": "yarn", "factor": 4.0, "original_length": 32}
    options = {} if "shift" in kind else {"rotary": rotary, "qk_norm": True}
    layer, x = layer_of(kind, **options), tokens().requires_grad_()
    told = dict(causal=True, mask=same_document(IDS), score_mod=alibi(H))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    fast, slow, naive = compiled(x, **told), layer(x, **told), layer.explain(x, **told).output
    assert (fast - slow).abs().max() < EXACT and (naive - slow).abs().max() < EXACT
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (fast, slow, naive)]
    assert max((g - gradients[0]).abs().max() for g in gradients) < EXACT


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_documents_are_as_separate_sequences(kind):
    layer, x = layer_of(kind), tokens()
    alone = torch.cat([layer(part, causal=True) for part in x.split(LENGTHS, dim=1)], dim=1)
    packed = layer(x, causal=True, mask=same_document(TEXT.expand(B, T)))
    assert (packed - alone).abs().max() < EXACT
    assert (packed - layer(x, causal=True)).abs().max() > 1e-3
    assert (packed - layer(x, causal=True, mask=SAME_TEXT)).abs().max() < EXACT


def test_dropout_with_a_score_function_is_unbiased():
    layer, x = layer_of("multi_head", dropout=0.3), tokens(1, 4)
    wanted = layer(x, score_mod=alibi(H))
    layer.train()
    torch.manual_seed(0)
    assert not torch.equal(layer(x, score_mod=alibi(H)), layer(x, score_mod=alibi(H)))
    mean = layer(x.expand(20000, 4, D), score_mod=alibi(H)).mean(0)
    assert (mean - wanted[0]).abs().max() < 0.02 * wanted.abs().max()


# ---- errors ----


@pytest.mark.parametrize("kind", FEW)
def test_bad_functions_are_named(kind):
    layer, x = layer_of(kind), tokens()
    with refused("mask"):
        layer(x, mask=lambda b, h, q, k: 1.0 * (q - k).double())
    with refused("score_mod"):
        layer(x, score_mod=3)


@torch.no_grad()
def test_what_has_no_scores_refuses_a_function_of_them():
    for layer in (layer_of("linear elu"), SinkhornAttention(D, H, dtype=torch.float64)):
        with refused("score_mod"):
            layer(tokens(), score_mod=alibi(H))
    layer = layer_of("linear elu")
    for size in (1, 3):
        with refused("mask"):
            layer(tokens(2, size), causal=True, mask=sliding_window(2), cache=layer.make_cache(2, 7))
    both = and_masks(sliding_window(3), same_document(IDS))
    wanted = SinkhornAttention(D, H, dtype=torch.float64)
    assert torch.equal(wanted(tokens(), mask=both), wanted(tokens(), mask=create_mask(both, B, H, T, T, "cpu")))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: sliding_window(0), "size"),
        (lambda: prefix(-1), "length"),
        (lambda: prefix(torch.ones(2)), "length"),
        (lambda: same_document(torch.arange(3)), "ids"),
        (lambda: same_document(torch.ones(1, 3)), "ids"),
        (lambda: alibi(0), "n_heads"),
        (lambda: soft_cap(0.0), "cap"),
        (lambda: attend(*some_heads(), score_mod="alibi"), "score_mod"),
    ],
)
def test_bad_options_of_functions_are_named(call, argument):
    with refused(argument):
        call()


# ---- on a GPU ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", FEW_SOFTMAX)
def test_block_masks_give_what_dense_ones_give(kind):
    """FlexAttention's kernel against the dense path of a CPU, with gradients; with padding, too."""
    n, sizes = 300, dict(d_model=64, n_heads=H, dtype=torch.float32)
    layer, x = layer_of(kind, **sizes), tokens(B, n, dtype=torch.float32, d_model=64)
    there, ids = copy.deepcopy(layer).cuda(), torch.arange(n).expand(B, n) // 70
    real = padding_mask(torch.tensor([200, n]), n)[:, 0, 0]
    on_both = lambda make: [make(torch.device(name)) for name in ("cpu", "cuda")]
    calls = [
        on_both(lambda device: dict(mask=sliding_window(50))),
        on_both(lambda device: dict(mask=same_document(ids.to(device)), causal=True)),
        on_both(lambda device: dict(score_mod=soft_cap(2.0, device=device), causal=True, padding=real.to(device))),
        on_both(lambda device: dict(score_mod=alibi(H, device=device), mask=sliding_window(50))),
    ]
    for told, moved in calls:
        here, far = layer(x, **told), there(x.cuda(), **moved)
        assert (far.cpu() - here).abs().max() < 1e-3 * here.abs().max()
        for a, b in zip(layer.parameters(), there.parameters()):
            one, other = (
                torch.autograd.grad(y.square().mean(), w, retain_graph=True) for y, w in ((here, a), (far, b))
            )
            assert (one[0] - other[0].cpu()).abs().max() < 1e-3 * max(1, one[0].abs().max())


def test_block_masks_are_for_a_gpu_alone():
    assert not has_flex_kernel(torch.ones(1))
    there = [SimpleNamespace(is_cuda=True, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    assert [*map(has_flex_kernel, there)] == [True, False]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_block_mask_hides_what_the_dense_one_hides(monkeypatch):
    """Built on a CPU, without the kernel that would read it."""
    compiled = torch.compile  # torch itself calls it with options
    uncompiled = lambda function, **options: compiled(function, **options) if options else function
    monkeypatch.setattr(torch, "compile", uncompiled)
    real = padding_mask(torch.tensor([5, 7]), T)[:, 0, 0]
    for mask, rule in [*MASKS.values(), (None, lambda b, h, q, k: True)]:
        for causal, padding, score in ((False, None, alibi(H)), (True, real, None), (True, None, soft_cap(1.0))):
            if mask is None and score is None:
                continue
            told = (B, H, T, T), torch.device("cpu"), 0, causal, mask, score, padding
            block, flag, changed = resolve_functions(*told, True)
            wanted = by_hand(rule)
            wanted = wanted & torch.ones(T, T).tril().bool() if causal else wanted
            wanted = wanted if padding is None else wanted & real[:, None, None]
            assert flag is False and block.kv_num_blocks.shape[:2] in ((1, 1), (B, 1), (1, H), (B, H))
            assert torch.equal(create_mask(block.mask_mod, B, H, T, T, "cpu"), wanted)
            q, k, v = some_heads()
            got = flex_attention(q, k, v, changed, block, enable_gqa=True)  # eager, forward only
            naive = attention_weights(q, k, mask=wanted, score_mod=score) @ v.repeat_interleave(2, 1)
            assert (got - naive).abs().max() < EXACT
