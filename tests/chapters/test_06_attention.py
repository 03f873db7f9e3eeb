"""Chapter 6: the claims with their mutants, the fused attention against the naive one, masks and heads."""

import itertools
import math

import numpy as np
import pytest
import torch
from drawn_layers import F64, problems
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from claims import claim
from gbattn.attention import (
    attend,
    attention_weights,
    causal_mask,
    merge_heads,
    padding_mask,
    split_heads,
)
from gbattn.layers import MultiHeadAttention
from gbattn.smoothers import softmax_weights


def two_projections(p, shared):
    """Any scores of low rank; with one projection, symmetric, not negative, and nobody outshouts the loudest."""
    X, U, V = p.normal(p.n, p.n + 3), p.normal(p.n, p.K), p.normal(p.n, p.K)
    W_Q, W_K = torch.linalg.pinv(X) @ U, torch.linalg.pinv(X) @ V
    reached = X @ W_Q @ (X @ W_K).T
    one = X @ W_K @ (X @ W_K).T if shared else reached
    loudest = one.diagonal().argmax()
    left = [
        (reached - U @ V.T).flatten(),
        torch.linalg.svdvals(reached)[p.K :],
        (one - one.T).flatten(),
        torch.linalg.eigvalsh((one + one.T) / 2).clamp_max(0),
        (one[loudest] - one[loudest, loudest]).clamp_min(0),
    ]
    left = torch.cat(left)
    return left, torch.zeros_like(left)


@claim(problems(), tolerance=1e-8, mutant=lambda p: two_projections(p, shared=False))
def test_prop_two_projections(p):
    """Two projections reach all scores of rank K, one only positive semi-definite ones. Mutant: two called one."""
    return two_projections(p, shared=True)


def test_a_line_can_be_heard_with_one_projection_and_a_circle_with_two():
    """Who is heard most, when each of three tokens should hear the one before it."""
    keys_get_shorter = torch.tensor([[4, 0], [1.5, 1.5], [0, 1]], dtype=F64)
    assert (keys_get_shorter @ keys_get_shorter.T).argmax(1).tolist() == [0, 0, 1]
    third = 2 * math.pi * torch.arange(3, dtype=F64) / 3
    on_circle = lambda angle: torch.stack([angle.cos(), angle.sin()], 1)
    X = torch.randn(3, 5, dtype=F64)
    keys, queries = (torch.linalg.pinv(X) @ on_circle(angle) for angle in (third, third - third[1]))
    assert (X @ queries @ (X @ keys).T).argmax(1).tolist() == [2, 0, 1]


def score_moments(p, power):
    """Mean and variance of q·k over all outcomes of lopsided coins of mean 0 and variance 1."""
    K = p.integer(1, 5)
    odds = 0.2 + 0.6 * torch.rand(2 * K, generator=p.rng, dtype=F64)
    high, low = ((1 - odds) / odds).sqrt(), -(odds / (1 - odds)).sqrt()
    outcomes = torch.tensor(list(itertools.product((True, False), repeat=2 * K)))
    draws, chance = torch.where(outcomes, high, low), torch.where(outcomes, odds, 1 - odds).prod(1)
    score = (draws[:, :K] * draws[:, K:]).sum(1) / K**power
    return torch.stack([chance @ score, chance @ score**2]), torch.tensor([0.0, 1.0], dtype=F64)


@claim(problems(), tolerance=1e-10, mutant=lambda p: score_moments(p, 1.0))
def test_prop_score_variance(p):
    """q·k/√K has mean 0 and variance 1, by enumeration. Mutant: divided by K."""
    return score_moments(p, 0.5)


def test_undivided_scores_make_gradients_of_queries_erratic_and_not_small():
    K, S, rows = 1024, 64, 400
    q, k, upstream = torch.randn(rows, 1, K), torch.randn(rows, S, K), torch.randn(rows, 1, S)
    sizes = []
    for scale in (1.0, K**-0.5):
        query = q.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((scale * query @ k.mT).softmax(-1), query, upstream)
        sizes.append(gradient.norm(dim=2))
    undivided, divided = sizes
    assert undivided.mean() > 2 * divided.mean() and undivided.median() < divided.median() / 2
    assert undivided.std() / undivided.mean() > 1 > 3 * divided.std() / divided.mean()


def heads_are_terms(p, H):
    """The layer's output from its blocks; their rank; and the distance of any target from them."""
    layer, x = p.layer(bias=False), p.normal(1, p.n, p.D)
    trace = layer.explain(x)
    A, group = trace.rounds[0].weights[0], p.H // p.G
    with torch.no_grad():
        value = layer.value.weight.T.unflatten(1, (p.G, p.K)).repeat_interleave(group, dim=1)  # (D, H, K)
        M = torch.einsum("dhk,hke->hde", value, layer.out.weight.T.unflatten(0, (p.H, p.K)))
        blocks = torch.einsum("hij,hde->ijde", A, M)
        output = torch.einsum("jd,ijde->ie", x[0], blocks)
        rows = blocks.flatten(0, 1).flatten(1)  # (n², D²)
        target = p.normal(*rows.shape)
        short = torch.linalg.svdvals(target)[H:].norm() - (target - rows).norm()
    left = torch.cat([(output - trace.output[0]).flatten(), torch.linalg.svdvals(rows)[H:], short.clamp_min(0)[None]])
    return left, torch.zeros_like(left)


@claim(problems(n=(3, 6)), tolerance=1e-9, mutant=lambda p: heads_are_terms(p, p.H - 1))
def test_prop_heads(p):
    """A layer of H heads is H terms, and misses what lies beyond H. Mutant: one head fewer."""
    return heads_are_terms(p, p.H)


def tied(p, tie):
    few, x = p.layer(rotary=50.0), p.tokens()
    many = MultiHeadAttention(p.D, p.H, rotary=50.0, dtype=F64)
    many.load_state_dict({name: tie(p, w) if "key" in name or "value" in name else w
                          for name, w in few.state_dict().items()})  # fmt: skip
    kept = [float(layer.make_cache(1, 5).nbytes) / (5 * 8) for layer in (few, many)]
    with torch.no_grad():
        left, right = few(x, causal=True).flatten(), many(x, causal=True).flatten()
    sizes = torch.tensor([2.0 * p.G * p.K, 2.0 * p.H * p.K], dtype=F64)
    return torch.cat([left, torch.tensor(kept, dtype=F64)]), torch.cat([right, sizes])


def copies(p, weight):
    return weight.unflatten(0, (p.G, p.K)).repeat_interleave(p.H // p.G, dim=0).flatten(0, 1)


def copies_in_turn(p, weight):
    heads = weight.unflatten(0, (p.G, p.K))
    return heads.repeat(p.H // p.G, *[1] * (heads.ndim - 1)).flatten(0, 1)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(problems())
def test_grouped_heads_are_full_heads_with_tied_projections(p):
    """And not with projections tied in turn (0, 1, 0, 1) instead of in groups."""
    close = lambda left, right: torch.allclose(left, right, atol=1e-10, rtol=0)
    assert close(*tied(p, copies))
    assert not 1 < p.G < p.H or not close(*tied(p, copies_in_turn))


# ---- The fused attention against the naive one ----


@st.composite
def calls(draw):
    """Shapes, a mask of any kind, causality, and a generator's seed."""
    G, shared = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    B, T, K = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    S = T + draw(st.integers(0, 4))
    wide = draw(st.booleans())
    B_mask, H_mask = draw(st.sampled_from((1, B))), draw(st.sampled_from((1, G * shared)))
    T_mask, S_mask = draw(st.sampled_from((1, T))), draw(st.sampled_from((1, S)))
    shape = draw(st.sampled_from(((T_mask, S_mask), (B_mask, H_mask, T_mask, S_mask))))
    return dict(
        seed=draw(st.integers(0, 2**31)), q=(B, G * shared, T, K), k=(B, G, S, K), Kv=K + 1 if wide else K,
        mask=draw(st.sampled_from(("none", "boolean", "float", "minus infinity"))), shape=shape,
        causal=draw(st.booleans()), scale=draw(st.sampled_from((None, 0.3, 2.0))),
    )  # fmt: skip


def drawn(call, dtype):
    rng = torch.Generator().manual_seed(call["seed"])
    normal = lambda shape: torch.randn(shape, generator=rng, dtype=F64).to(dtype)
    q, k, v = normal(call["q"]), normal(call["k"]), normal((*call["k"][:3], call["Kv"]))
    boolean = torch.rand(call["shape"], generator=rng) > 0.4
    mask = {
        "none": None,
        "boolean": boolean,
        "float": normal(call["shape"]),
        "minus infinity": normal(call["shape"]).masked_fill(~boolean, -math.inf),
    }[call["mask"]]
    return (q, k, v), dict(causal=call["causal"], mask=mask, scale=call["scale"])


def naive(q, k, v, **options):
    return attention_weights(q, k, **options) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


# Rounding of the inputs to `dtype` happens on both sides; half precision also rounds A and the output.
TOLERANCE = {F64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.01}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(call=calls())
def test_fused_attention_is_the_naive_one_forward_and_backward(dtype, call):
    (q, k, v), options = drawn(call, dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    oracle = [x.detach().to(F64).requires_grad_() for x in inputs]
    fused, exact = attend(*inputs, **options), naive(*oracle, **options)
    assert fused.dtype == dtype and fused.shape == exact.shape
    upstream = torch.randn(exact.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    tolerance = dict(rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * 4)
    torch.testing.assert_close(fused.to(F64), exact, **tolerance)
    mine = torch.autograd.grad(fused, inputs, upstream.to(dtype))
    for got, wanted in zip(mine, torch.autograd.grad(exact, oracle, upstream)):
        size = max(1.0, wanted.abs().max().item())
        torch.testing.assert_close(got.to(F64) / size, wanted / size, **tolerance)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(call=calls())
def test_weights_are_row_by_row_softmax(call):
    """Against a loop over rows that knows nothing of masks: it takes what is allowed and leaves the rest."""
    (q, k, _), options = drawn(call, F64)
    A = attention_weights(q, k, **options)
    B, H, T, K = q.shape
    S, group = k.shape[2], H // k.shape[1]
    mask = torch.ones(1, 1, T, S, dtype=torch.bool) if options["mask"] is None else options["mask"]
    mask = mask.expand(B, H, T, S)
    scale = options["scale"] or 1 / math.sqrt(K)
    for b, h, t in itertools.product(range(B), range(H), range(T)):
        scores = np.array([scale * float(q[b, h, t] @ k[b, h // group, s]) for s in range(S)])
        if mask.dtype == torch.bool:
            allowed = mask[b, h, t].numpy()
        else:
            allowed = mask[b, h, t].numpy() > -math.inf
            scores = scores + np.where(allowed, mask[b, h, t].numpy(), 0)
        if options["causal"]:
            allowed = allowed & (np.arange(S) <= t + S - T)
        row = np.where(allowed, np.exp(scores), 0)
        np.testing.assert_allclose(A[b, h, t].numpy(), row / max(row.sum(), 1e-300), atol=1e-12)


def test_one_head_and_a_boolean_mask_are_the_smoother_of_chapter_3():
    q, k = torch.randn(2, 5, 4, dtype=F64), torch.randn(2, 7, 4, dtype=F64)
    mask = torch.rand(5, 7) > 0.3
    mine = attention_weights(q[:, None], k[:, None], mask=mask)[:, 0]
    torch.testing.assert_close(mine, softmax_weights(q, k, mask=mask), atol=1e-14, rtol=0)


@pytest.mark.parametrize("kind", ["boolean", "minus infinity", "learned"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", [attend, naive])
def test_a_row_that_may_see_nothing_is_zero_with_finite_gradients(kind, causal, form):
    q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False, False], [False, False, False], [True, True, True]])
    if kind != "boolean":
        mask = torch.zeros(3, 3).masked_fill(~mask, -math.inf).requires_grad_(kind == "learned")
    output = form(q, k, v, mask=mask, causal=causal)
    assert not output[:, :, 1].any() and output[:, :, 0].all()
    output.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert not q.grad[:, :, 1].any()
    if kind == "learned":
        assert mask.grad.isfinite().all() and not mask.grad[1].any()


def test_torchs_layer_makes_nan_of_such_a_row():
    """What the chapter says of nn.MultiheadAttention."""
    layer, x = nn.MultiheadAttention(4, 2, batch_first=True), torch.randn(2, 3, 4)
    hidden = torch.tensor([[False, False, True], [True, True, True]])
    output, _ = layer(x, x, x, key_padding_mask=hidden)
    output[0].sum().backward()
    assert output[1].isnan().all() and layer.in_proj_weight.grad.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_extreme_scores(dtype, causal):
    """Entries of ±10,000: products overflow half precision, outputs must not."""
    sign = torch.tensor([1.0, -1.0, 1.0, 1.0])[:, None]
    q = (1e4 * sign).expand(4, 8).to(dtype).expand(1, 2, 4, 8).clone().requires_grad_()
    v = torch.arange(4.0)[:, None].expand(4, 8).to(dtype).expand(1, 2, 4, 8)
    # A token hears those of its own sign alike, and nobody of the other: tokens 0, 2 and 3; and 1.
    expected = torch.tensor([0, 1, 1, 5 / 3] if causal else [5 / 3, 1, 5 / 3, 5 / 3])
    for form in (attend, naive):
        output = form(q, q, v, causal=causal)
        torch.testing.assert_close(output[0, 0, :, 0].float(), expected, atol=0.02, rtol=0)
        (output.float().sum() / 1000).backward()  # the gradient itself must fit into the dtype
        assert q.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, F64], ids=str)
def test_equal_scores_are_the_mean_and_one_key_is_itself(dtype):
    q, v = torch.zeros(2, 3, 5, 4, dtype=dtype), torch.randn(2, 3, 5, 4).to(dtype)
    mean = v.double().mean(2, keepdim=True).expand(2, 3, 5, 4)
    torch.testing.assert_close(attend(q, q, v).double(), mean, atol=1e-2, rtol=0)
    one = [x[:, :, :1] for x in (torch.randn(2, 3, 5, 4).to(dtype), torch.randn(2, 3, 5, 4).to(dtype), v)]
    for causal in (False, True):
        assert torch.equal(attend(*one, causal=causal), one[2])


def held_for_backward(form, queries=256):
    """The largest tensor that autograd keeps, in numbers."""
    sizes = []

    def hold(tensor):
        sizes.append(tensor.untyped_storage().nbytes() // tensor.element_size())
        return tensor

    q, k, v = torch.randn(3, 1, 4, 256, 8, requires_grad=True).unbind()
    q = q[:, :, -queries:]
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        form(q, k, v)
    return max(sizes)


@pytest.mark.parametrize("options", [dict(), dict(causal=True), dict(mask=padding_mask(torch.tensor([200]), 256))])
def test_fused_attention_keeps_no_weights(options):
    assert held_for_backward(lambda *qkv: naive(*qkv, **options)) >= 4 * 256 * 256
    assert held_for_backward(lambda *qkv: attend(*qkv, **options)) <= 3 * 4 * 256 * 8  # q, k and v in one


@pytest.mark.parametrize(("mask", "T"), [(padding_mask(torch.tensor([200]), 256), 256), (None, 200)])
def test_two_masks_are_made_one_which_is_kept_for_all_heads(mask, T):
    """As the notes of `attend` say of causal with another mask, and of causal behind a past."""
    assert held_for_backward(lambda *qkv: attend(*qkv, causal=True, mask=mask), T) == T * 256


def test_empty_batches_and_no_queries():
    for form in (attend, naive):
        for shape in ((0, 2, 3, 4), (2, 2, 0, 4)):
            q, k = torch.zeros(shape), torch.zeros(shape[0], 2, 3, 4)
            assert form(q, k, k, causal=True).shape == shape
            assert form(q, k, k, mask=torch.ones(1, 3, dtype=torch.bool)).shape == shape
    layer = MultiHeadAttention(8, 2, rotary=100.0)
    assert layer(torch.zeros(0, 3, 8), causal=True).shape == (0, 3, 8)


def test_dropout_keeps_the_mean_and_leaves_scores_alone():
    q, k = torch.randn(2, 1, 1, 6, 4, dtype=F64)
    eye = torch.eye(6, dtype=F64)[None, None]  # values that show the weights
    A = attention_weights(q, k)
    drawn = torch.stack([attend(q, k, eye, dropout_p=0.25) for _ in range(4000)])
    kept = drawn / A  # 0 or 1/(1 − p)
    assert ((kept.abs() < 1e-9) | ((kept - 4 / 3).abs() < 1e-9)).all()
    assert (drawn.mean(0) - A).abs().max() < 0.03
    layer = MultiHeadAttention(8, 2, dropout=0.5)
    x = torch.randn(1, 5, 8)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x)) and torch.allclose(layer.explain(x).output, layer(x), atol=1e-6)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
def test_a_result_does_not_depend_on_whether_gradients_are_wanted(half):
    q, k, v = (torch.randn(2, 3, 9, 16, dtype=half).requires_grad_() for _ in range(3))
    F = attend(q, k, v)
    with torch.no_grad():
        assert F.dtype == half and torch.equal(F, attend(q, k, v))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("K", [8, 80])
def test_gradients_in_half_precision_are_those_of_float64(K, half):
    """Those of a mask, too."""
    exact = [torch.randn(2, 3, 5, K, dtype=F64).to(half).double() for _ in range(3)]
    exact.append(torch.randn(3, 5, 5, dtype=F64).to(half).double())
    found = []
    for dtype in (F64, half):
        q, k, v, mask = (x.to(dtype, copy=True).requires_grad_() for x in exact)
        found.append(torch.autograd.grad(attend(q, k, v, mask=mask[None]).sum(), (q, k, v, mask)))
    for want, got in zip(*found):
        assert got.dtype == half and (got - want).norm() < 0.03 * want.norm()


def test_a_large_number_in_a_coarse_mask_stays_finite():
    q, mask = torch.randn(1, 1, 3, 4).half(), torch.zeros(3, 3, dtype=torch.bfloat16)
    mask[1] = torch.finfo(torch.bfloat16).min
    assert (attention_weights(q, q, mask=mask).sum(-1) - 1).abs().max() < 2e-3
    assert attend(q, q, q, mask=mask)[0, 0, 1].abs().max() > 0


def test_attend_compiles_for_any_number_of_heads():
    """Two models in one process have different numbers, which torch then takes for symbols."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads, kv_heads in ((4, 4), (8, 8), (8, 2)):
        q, k, v = torch.randn(2, heads, 5, 8), torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 8)
        assert torch.allclose(compiled(q, k, v), attend(q, k, v), atol=1e-6)


# ---- Masks and heads ----


@pytest.mark.parametrize(("T", "S"), [(1, 1), (3, 3), (1, 4), (3, 7)])
def test_the_causal_triangle_ends_at_the_last_key(T, S):
    expected = [[j <= i + S - T for j in range(S)] for i in range(T)]
    assert causal_mask(T, S).tolist() == expected
    assert S != T or torch.equal(causal_mask(T), causal_mask(T, T))


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4), side=st.sampled_from(("left", "right")))
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_padding_is_where_it_is_said_to_be(lengths, side):
    mask = padding_mask(torch.tensor(lengths), 6, side=side)
    assert mask.shape == (len(lengths), 1, 1, 6) and mask.dtype == torch.bool
    for row, length in zip(mask[:, 0, 0].tolist(), lengths):
        real, filled = [True] * length, [False] * (6 - length)
        assert row == (real + filled if side == "right" else filled + real)


def test_heads_come_back_together():
    x = torch.arange(24.0).reshape(1, 2, 12)
    assert split_heads(x, 3)[0, 1, 0].tolist() == [4, 5, 6, 7]  # head 1 of token 0
    assert torch.equal(merge_heads(split_heads(x, 3)), x)


def test_sizes_of_numpy_and_none_of_truth():
    assert causal_mask(np.int64(3)).shape == (3, 3)
    with refused("T"):
        causal_mask(True)


def test_padding_of_a_length_that_an_export_leaves_open():
    class Padded(nn.Module):
        def forward(self, x, lengths):
            return padding_mask(lengths, x.shape[1])

    x, lengths = torch.zeros(2, 5), torch.tensor([3, 5])
    length = torch.export.Dim("T", min=2, max=50)
    made = torch.export.export(Padded(), (x, lengths), dynamic_shapes=({1: length}, None), strict=False)
    assert torch.equal(made.module()(torch.zeros(2, 7), lengths), padding_mask(lengths, 7))


# ---- errors ----


Q = torch.zeros(2, 4, 3, 8)


X = torch.zeros(2, 3, 8)


BOOLEAN = torch.ones(3, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: attend(X, Q, Q), "q"),
        (lambda: attend(Q.numpy(), Q, Q), "q"),
        (lambda: attend(Q, None, Q), "k"),
        (lambda: attend(Q, Q, Q[0]), "v"),
        (lambda: attend(Q.int(), Q, Q), "q"),
        (lambda: attend(Q, Q.double(), Q), "k"),
        (lambda: attend(Q, Q, Q.half()), "v"),
        (lambda: attend(Q, Q.to("meta"), Q), "k"),
        (lambda: attend(Q, Q[:1], Q[:1]), "k"),
        (lambda: attend(Q, Q[..., :4], Q), "k"),
        (lambda: attend(Q, Q[:, :, :0], Q[:, :, :0]), "k"),
        (lambda: attend(Q, Q[:, :3], Q[:, :3]), "k"),
        (lambda: attend(Q, Q, Q[:, :, :2]), "v"),
        (lambda: attend(Q, Q[:, :, :2], Q[:, :, :2], causal=True), "k"),
        (lambda: attend(Q, Q, Q, causal=1), "causal"),
        (lambda: attend(Q, Q, Q, mask=[True]), "mask"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN.long()), "mask"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN[None]), "mask"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN[:2]), "mask"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN[0]), "mask"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN.to("meta")), "mask"),
        (lambda: attend(Q, Q, Q, scale=math.nan), "scale"),
        (lambda: attend(Q, Q, Q, scale=-1.0), "scale"),
        (lambda: attend(Q, Q, Q, scale=True), "scale"),
        (lambda: attention_weights(Q, Q, scale=0), "scale"),
        (lambda: attend(Q, Q, Q, dropout_p=1.0), "dropout_p"),
        (lambda: attend(Q, Q, Q, dropout_p="none"), "dropout_p"),
        (lambda: attention_weights(Q, Q[:, :, :2], causal=True), "k"),
        (lambda: attention_weights(Q, Q, mask=BOOLEAN[None]), "mask"),
        (lambda: causal_mask(3, 2), "k"),
        (lambda: padding_mask([1, 2], 3), "lengths"),
        (lambda: padding_mask(torch.tensor([[1]]), 3), "lengths"),
        (lambda: padding_mask(torch.tensor([1.0]), 3), "lengths"),
        (lambda: padding_mask(torch.tensor([True]), 3), "lengths"),
        (lambda: padding_mask(torch.tensor([4, 1]), 3), "lengths"),
        (lambda: padding_mask(torch.tensor([-1]), 3), "lengths"),
        (lambda: padding_mask(torch.tensor([1]), 0), "size"),
        (lambda: padding_mask(torch.tensor([1]), 3, side="up"), "side"),
        (lambda: split_heads(X, 3), "x"),
        (lambda: split_heads(X, 0), "n_heads"),
        (lambda: padding_mask(torch.ones(2, dtype=torch.complex64), 4), "lengths"),
        (lambda: split_heads([1.0], 2), "x"),
        (lambda: merge_heads(torch.ones(2, 3, 4)), "x"),
        (lambda: merge_heads("x"), "x"),
    ],
)
def test_an_error_names_the_argument(call, argument):
    with refused(argument):
        call()
