"""Chapter 6: the claims with their mutants, attention against torch's own, and what a lesson should not carry."""

import copy
import itertools
import math
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
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
from gbattn.cache import KeyValueCache
from gbattn.interop import TorchAttention
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
from gbattn.positions import TokenShift, rotary_angles, rotate
from gbattn.smoothers import softmax_weights

F64 = torch.float64


@pytest.fixture(autouse=True)
def same_draws():
    torch.manual_seed(0)


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


# ---------------------------------------------------------------- claims


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


def saturation(p, faster):
    s = 4 * p.normal(p.n)
    first, second = s.topk(2).values
    J = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), s)
    size, rest = torch.linalg.matrix_norm(J, 2), 2 * (1 - s.softmax(-1).max())
    bound = 2 * (p.n - 1) * torch.exp(-faster * (first - second))
    return torch.stack([size, rest]), torch.stack([rest, bound])


@claim(problems(), tolerance=1e-12, relation="<=", mutant=lambda p: saturation(p, 2))
def test_prop_saturation(p):
    """What a row passes back is bounded by what the leader leaves, and that by its lead. Mutant: twice the lead."""
    return saturation(p, 1)


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


def permuted(p, **options):
    layer, x = p.layer(**options), p.tokens()
    order = torch.randperm(p.n, generator=p.rng).roll(1) if p.n > 2 else torch.tensor([1, 0])
    before = torch.cat([torch.arange(p.n - 1).flip(0), torch.tensor([p.n - 1])])
    with torch.no_grad():
        left = [layer(x[:, order]), layer(x[:, before], causal=True)[:, -1:]]
        right = [layer(x)[:, order], layer(x, causal=True)[:, -1:]]
    return torch.cat(left, 1), torch.cat(right, 1)


@claim(problems(n=(3, 7)), tolerance=1e-10, mutant=lambda p: permuted(p, rotary=100.0))
def test_prop_permutation(p):
    """Without positions attention sees a set. Mutant: rotary positions."""
    return permuted(p)


def test_two_causal_layers_hear_the_order_of_the_past_and_one_does_not():
    p = Problem(0, 2, 6, 2, 1, 2)
    first, second, x = p.layer(), p.layer(), p.tokens()
    other = x[:, [2, 0, 4, 1, 3, 5]]
    with torch.no_grad():
        one = [first(tokens, causal=True) for tokens in (x, other)]
        two = [second(tokens, causal=True)[:, -1] for tokens in one]
    torch.testing.assert_close(one[0][:, -1], one[1][:, -1], rtol=0, atol=1e-12)
    assert (two[0] - two[1]).abs().max() > 1e-3


def turned(x, place, base=50.0):
    return rotate(x[None, None, None], rotary_angles(torch.tensor([place]), x.shape[0], base))[0, 0, 0]


def only_distance(p, turn):
    q, k, (m, n) = p.normal(p.K), p.normal(p.K), (p.integer(0, 1000), p.integer(0, 1000))
    layer, x = p.layer(rotary=50.0), p.tokens()
    places, shift = torch.arange(p.n), p.integer(1, 10_000)
    with torch.no_grad():
        moved = layer(x, causal=True, positions=places + shift).flatten()
        unmoved = layer(x, causal=True).flatten()
    left = torch.cat([(turned(q, m) @ turn(k, n))[None], moved])
    return left, torch.cat([(q @ turned(k, n - m))[None], unmoved])


@claim(problems(), tolerance=1e-8, mutant=lambda p: only_distance(p, lambda k, n: turned(k, -n)))
def test_prop_rotary(p):
    """Scores depend on the difference of places, and layers do not see a shift. Mutant: keys turned backwards."""
    return only_distance(p, turned)


def aimed(p, aim):
    """Score of q with the key aimed at δ: nowhere above that at δ, and the cosine sum; then random queries."""
    q, delta, away = p.normal(p.K), p.integer(0, 50), torch.arange(60)
    k = turned(q, aim(delta))
    scores = torch.stack([q @ turned(k, -back) for back in away.tolist()])
    theta = 50.0 ** (-torch.arange(0, p.K, 2, dtype=F64) / p.K)
    lengths = q.unflatten(0, (2, -1)).square().sum(0)  # of each pair
    cosines = ((away[:, None] - delta) * theta).cos() @ lengths
    excess = (scores.max() - scores[delta]).clamp_min(0)[None]
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=p.K)), dtype=F64)  # E[qqᵀ] = I
    key = p.normal(p.K)
    squares = torch.stack([(signs @ turned(key, -back)).square().mean() for back in away.tolist()])
    return torch.cat([scores, excess, squares]), torch.cat([cosines, 0 * excess, key @ key + 0 * squares])


@claim(problems(), tolerance=1e-8, mutant=lambda p: aimed(p, lambda delta: delta + 1))
def test_prop_rotary_aim(p):
    """A key turned by δ is heard δ back; random queries hear all distances alike. Mutant: aimed one too far."""
    return aimed(p, lambda delta: delta)


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


@claim(problems(), tolerance=1e-10, mutant=lambda p: tied(p, copies_in_turn))
def test_prop_grouped(p):
    """Grouped heads are full heads with tied projections. Mutant: tied in turn (0, 1, 0, 1) instead of in groups."""
    return tied(p, copies)


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


def weights_of_what_came_next(p, own):
    """The last row of one head on random letters, with shifted keys, against the proposition's two weights."""
    n, beta = p.integer(2, 12), 1.0 + p.integer(0, 4)
    letters = torch.randint(3, (n,), generator=p.rng)
    x = torch.linalg.qr(p.normal(5, 5))[0][letters]  # orthonormal, not only one-hot
    shift = TokenShift(5, dtype=F64)
    with torch.no_grad():
        shift.own.fill_(own)
        shift.previous.fill_(1.0)
    k = shift(x[None])[:, None].detach()
    found = attention_weights(beta * x[None, None], k, causal=True, scale=1.0)[0, 0, -1]
    followed = [j > 0 and bool(letters[j - 1] == letters[-1]) for j in range(n)]
    expected = torch.tensor([math.exp(beta) if yes else 1.0 for yes in followed], dtype=F64)
    return found, expected / (sum(followed) * math.exp(beta) + n - sum(followed))


@claim(problems(), tolerance=1e-12, mutant=lambda p: weights_of_what_came_next(p, 0.0))
def test_prop_shift_induction(p):
    """With shifted keys one head finds what came next. Mutant: keys that keep their own token, too."""
    return weights_of_what_came_next(p, -1.0)


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


# ---------------------------------------------------------------- the fused look against the naive one


@st.composite
def looks(draw):
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


def made(look, dtype):
    rng = torch.Generator().manual_seed(look["seed"])
    normal = lambda shape: torch.randn(shape, generator=rng, dtype=F64).to(dtype)
    q, k, v = normal(look["q"]), normal(look["k"]), normal((*look["k"][:3], look["Kv"]))
    boolean = torch.rand(look["shape"], generator=rng) > 0.4
    mask = {
        "none": None,
        "boolean": boolean,
        "float": normal(look["shape"]),
        "minus infinity": normal(look["shape"]).masked_fill(~boolean, -math.inf),
    }[look["mask"]]
    return (q, k, v), dict(causal=look["causal"], mask=mask, scale=look["scale"])


def naive(q, k, v, **options):
    return attention_weights(q, k, **options) @ v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


# Rounding of the inputs to `dtype` happens on both sides; half precision also rounds A and the output.
TOLERANCE = {F64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.06, torch.float16: 0.01}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(look=looks())
def test_the_fused_look_is_the_naive_one_forward_and_backward(dtype, look):
    (q, k, v), options = made(look, dtype)
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
@given(look=looks())
def test_maps_are_row_by_row_softmax(look):
    """Against a loop over rows that knows nothing of masks: it takes what is allowed and leaves the rest."""
    (q, k, _), options = made(look, F64)
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
def test_the_fused_look_keeps_no_map(options):
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


# ---------------------------------------------------------------- parity with torch's own layer


def twins(D=8, H=2, bias=True):
    theirs = nn.MultiheadAttention(D, H, bias=bias, batch_first=True, dtype=F64)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return theirs, MultiHeadAttention.from_torch(theirs)


@pytest.mark.parametrize("bias", [True, False])
def test_what_was_frozen_in_torchs_layer_stays_frozen(bias):
    theirs, _ = twins(bias=bias)
    theirs.out_proj.requires_grad_(False)
    ours = MultiHeadAttention.from_torch(theirs)
    assert {name for name, w in ours.named_parameters() if not w.requires_grad} == {
        name for name, _ in ours.named_parameters() if name.startswith("out.")
    }
    assert not any(w.requires_grad for w in MultiHeadAttention.from_torch(theirs.requires_grad_(False)).parameters())


B, T, S = 2, 5, 4
SEEN = torch.rand(B * 2, T, T, generator=torch.Generator().manual_seed(3)) > 0.4
SEEN |= torch.eye(T, dtype=torch.bool)  # nobody sees nothing: there torch has NaN
LENGTHS = torch.tensor([3, T])
ADDED = torch.randn(T, T, generator=torch.Generator().manual_seed(4), dtype=F64)
REAL = padding_mask(LENGTHS, T)
CAUSAL = dict(attn_mask=~causal_mask(T))
PAIRS = {
    "nothing": ({}, {}),
    "boolean, (T, S)": (dict(attn_mask=~SEEN[0]), dict(mask=SEEN[0])),
    "boolean, per head": (dict(attn_mask=~SEEN), dict(mask=SEEN.unflatten(0, (B, 2)))),
    "additive": (dict(attn_mask=ADDED), dict(mask=ADDED)),
    "additive, per head": (dict(attn_mask=ADDED.expand(B * 2, T, T)), dict(mask=ADDED.expand(B, 2, T, T))),
    "padding": (dict(key_padding_mask=~REAL[:, 0, 0]), dict(mask=REAL)),
    "causal": (CAUSAL, dict(causal=True)),
    "causal, and torch's hint": (CAUSAL | dict(is_causal=True), dict(causal=True)),
    "causal and padding": (CAUSAL | dict(key_padding_mask=~REAL[:, 0, 0]), dict(causal=True, mask=REAL)),
    "causal and additive": (dict(attn_mask=ADDED.masked_fill(~causal_mask(T), -math.inf)),
                            dict(causal=True, mask=ADDED)),
}  # fmt: skip


def compare_twins(theirs, ours, x, context, their_options, our_options):
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
def test_torchs_layer_forward_maps_and_each_gradient(pair, bias):
    theirs, ours = twins(bias=bias)
    compare_twins(theirs, ours, torch.randn(B, T, 8, dtype=F64, requires_grad=True), None, *PAIRS[pair])


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
    theirs, ours = twins()
    x, context = (torch.randn(B, n, 8, dtype=F64, requires_grad=True) for n in (T, S))
    compare_twins(theirs, ours, x, context, theirs_options, ours_options)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("pair", PAIRS)
@torch.no_grad()
def test_the_layer_made_for_torch_gives_what_ours_gives(pair, bias):
    ours = Problem(0, B, T, 2, 1, 2).layer(bias=bias).train(bias)
    theirs, x = ours.to_torch(), torch.randn(B, T, ours.d_model, dtype=F64)
    their_options, our_options = PAIRS[pair]
    output, _ = theirs(x, x, x, **their_options)
    assert (output - ours(x, **our_options)).abs().max() < 1e-10
    assert theirs.training == bias and theirs.batch_first
    back = MultiHeadAttention.from_torch(theirs)
    assert back.training == bias and torch.equal(back(x), ours(x))
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), ours.parameters(), strict=True))


def test_a_layer_from_torch_keeps_its_options_and_is_a_copy():
    theirs = nn.MultiheadAttention(8, 2, dropout=0.1, dtype=torch.float16).eval()
    ours = MultiHeadAttention.from_torch(theirs, causal=True)
    assert (ours.dropout, ours.causal, ours.training, ours.query.weight.dtype) == (0.1, True, False, torch.float16)
    assert not ours.query.weight.is_set_to(theirs.in_proj_weight)
    before = theirs.in_proj_weight.detach().clone()
    with torch.no_grad():
        ours.query.weight.zero_()
    assert torch.equal(theirs.in_proj_weight, before)
    assert type(LinearAttention.from_torch(nn.MultiheadAttention(8, 2))) is LinearAttention
    assert MultiHeadAttention.from_torch(theirs, dropout=0.0).dropout == 0


def test_the_opposite_mask_is_noticed():
    """The parity above would fail with torch's other convention."""
    theirs, ours = twins()
    x = torch.randn(B, T, 8, dtype=F64)
    expected, _ = theirs(x, x, x, attn_mask=~SEEN[0])
    assert (ours(x, mask=~SEEN[0]) - expected).abs().max() > 1e-2


# ---------------------------------------------------------------- masks and heads


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_real_tokens(side):
    layer, x = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64), torch.randn(2, 6, 8, dtype=F64)
    lengths = torch.tensor([4, 6])
    real = padding_mask(lengths, 6, side=side)
    for causal in (False, True):
        padded = layer(x, mask=real, causal=causal)
        mine = slice(0, 4) if side == "right" else slice(2, 6)
        torch.testing.assert_close(padded[0, mine], layer(x[:1, mine], causal=causal)[0], atol=1e-12, rtol=0)


def test_heads_come_back_together():
    x = torch.arange(24.0).reshape(1, 2, 12)
    assert split_heads(x, 3)[0, 1, 0].tolist() == [4, 5, 6, 7]  # head 1 of token 0
    assert torch.equal(merge_heads(split_heads(x, 3)), x)


# ---------------------------------------------------------------- rotary positions


@given(
    seed=st.integers(0, 2**31),
    pairs=st.integers(1, 8),
    start=st.integers(0, 10**7),
    base=st.sampled_from((10.0, 500_000.0)),
)
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_rotary_positions_are_multiplication_by_a_complex_number(seed, pairs, start, base):
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 4, 2 * pairs, generator=rng, dtype=F64)
    places = torch.arange(start, start + 4)
    z = torch.complex(x[..., :pairs], x[..., pairs:]).numpy()
    theta = np.array([base ** (-2 * i / (2 * pairs)) for i in range(pairs)])
    turned = z * np.exp(1j * places.numpy()[:, None] * theta)
    mine = rotate(x, rotary_angles(places, 2 * pairs, base)).numpy()
    np.testing.assert_allclose(mine, np.concatenate([turned.real, turned.imag], -1), atol=1e-7)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_far_positions_lose_nothing_to_the_dtype(dtype):
    """A score at place ten million equals the one at place zero to the dtype's own rounding."""
    q, k = torch.randn(2, 1, 1, 1, 64).to(dtype)
    score = lambda m, n: (
        rotate(q, rotary_angles(torch.tensor([m]), 64)).double()
        @ rotate(k, rotary_angles(torch.tensor([n]), 64)).double().mT
    )
    far = 10_000_000
    assert (score(far + 3, far) - score(3, 0)).abs() < 40 * torch.finfo(dtype).eps
    assert rotate(q, rotary_angles(torch.tensor([far]), 64)).dtype == dtype
    single = torch.tensor(far + 3.0) - torch.tensor(far) * torch.tensor(10_000.0) ** (-2 / 64)
    exact = (far + 3) - far * 10_000.0 ** (-2 / 64)
    assert abs(single.item() - exact) > 1e-2  # what float32 angles would have lost


def test_positions_for_each_sequence_and_for_all():
    layer, x = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64), torch.randn(2, 5, 8, dtype=F64)
    own = torch.stack([torch.arange(5), torch.arange(5) * 3])
    together = layer(x, causal=True, positions=own)
    for row in range(2):
        alone = layer(x[row : row + 1], causal=True, positions=own[row])
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-12, rtol=0)
    assert (together[1] - layer(x, causal=True)[1]).abs().max() > 1e-3


def test_a_context_has_places_of_its_own():
    """Keys of a context stand at 0, 1, … wherever the queries stand; checked from the weights."""
    layer = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64)
    x, context, places = torch.randn(2, 3, 8, dtype=F64), torch.randn(2, 5, 8, dtype=F64), torch.tensor([9, 4, 2])
    trace = layer.explain(x, context=context, positions=places)
    q = rotate(split_heads(layer.query(x), 2), rotary_angles(places, 4, 100.0))
    k = rotate(split_heads(layer.key(context), 2), rotary_angles(torch.arange(5), 4, 100.0))
    torch.testing.assert_close(trace.rounds[0].weights, (q @ k.mT / 2).softmax(-1), atol=1e-12, rtol=0)
    torch.testing.assert_close(layer(x, context=context, positions=places), trace.output, atol=1e-12, rtol=0)


def test_values_are_not_turned():
    """A lone token hears itself at any place, so its output must not depend on the place."""
    layer, x = MultiHeadAttention(8, 2, rotary=100.0, dtype=F64), torch.randn(1, 1, 8, dtype=F64)
    torch.testing.assert_close(layer(x, positions=torch.tensor([777])), layer(x), atol=1e-12, rtol=0)


# ---------------------------------------------------------------- the cache


def filled(layer, x, room=12):
    cache = layer.make_cache(x.shape[0], room)
    layer(x, causal=True, cache=cache)
    return cache


@pytest.fixture
def decoding():
    with torch.no_grad():
        yield MultiHeadAttention(8, 4, n_kv_heads=2, rotary=100.0, dtype=F64), torch.randn(3, 9, 8, dtype=F64)


def test_cropping_forgets_the_latest_tokens(decoding):
    layer, x = decoding
    cache = filled(layer, x[:, :6])
    cache.crop(4)
    assert cache.length == 4
    got = layer(x[:, 6:], causal=True, cache=cache)
    kept = torch.cat([x[:, :4], x[:, 6:]], 1)
    torch.testing.assert_close(got, layer(kept, causal=True)[:, 4:], atol=1e-12, rtol=0)
    cache.crop(0)
    torch.testing.assert_close(layer(x, causal=True, cache=cache), layer(x, causal=True), atol=1e-12, rtol=0)


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
    with pytest.raises(ValueError, match="cache: got 6 tokens and 3 more; want at most max_length = 8"):
        layer(x[:, 6:], causal=True, cache=cache)
    got = layer(x[:, 6:8], causal=True, cache=cache)
    torch.testing.assert_close(got, layer(x[:, :8], causal=True)[:, 6:], atol=1e-12, rtol=0)


def test_explain_decodes_too(decoding):
    layer, x = decoding
    cache = filled(layer, x[:, :6])
    trace = layer.explain(x[:, 6:], causal=True, cache=cache)
    whole = layer.explain(x, causal=True)
    torch.testing.assert_close(trace.output, whole.output[:, 6:], atol=1e-12, rtol=0)
    torch.testing.assert_close(trace.rounds[0].weights, whole.rounds[0].weights[:, :, 6:], atol=1e-12, rtol=0)


# ---------------------------------------------------------------- linear attention


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


# ---------------------------------------------------------------- the layer


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
    with pytest.raises(ValueError, match="name: got 'mine', which is .*Mine.*; want a name that is not taken"):
        register("mine")(LinearAttention)
    for bad in ("", 3):
        with pytest.raises(ValueError, match="name: got .*; want a name"):
            register(bad)
    place = {"__qualname__": Mine.__qualname__, "__module__": "somewhere.else"}
    again = type("Mine", (MultiHeadAttention,), place | {"__doc__": Mine.__doc__})  # in the book and in the library
    assert register("mine")(again) is again
    stranger = type("Mine", (LinearAttention,), place | {"__module__": "a.third"})
    with pytest.raises(ValueError, match="want a name that is not taken"):
        register("mine")(stranger)


@torch.no_grad()
def test_a_cache_serves_any_layer_of_these_shapes_and_can_be_copied():
    layer, x = MultiHeadAttention(8, 2), torch.randn(1, 6, 8)
    cache = MultiHeadAttention(8, 2).make_cache(1, 6)
    layer(x[:, :3], causal=True, cache=cache)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert (layer(x[:, 3:], causal=True, cache=twin) - layer(x, causal=True)[:, 3:]).abs().max() < 1e-6


@pytest.mark.parametrize("scale", [10, 100, 1e4])
def test_linear_attention_averages_however_large_its_tokens(scale):
    layer = LinearAttention(8, 4)
    x = (scale * torch.randn(2, 7, 8)).requires_grad_()
    layer(x, causal=True).sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in layer.parameters())
    for seen in layer.explain(x, causal=True).rounds:
        assert (seen.weights.sum(-1) - 1).abs().max() < 1e-5


def test_a_large_number_in_a_coarse_mask_stays_finite():
    q, mask = torch.randn(1, 1, 3, 4).half(), torch.zeros(3, 3, dtype=torch.bfloat16)
    mask[1] = torch.finfo(torch.bfloat16).min
    assert (attention_weights(q, q, mask=mask).sum(-1) - 1).abs().max() < 2e-3
    assert attend(q, q, q, mask=mask)[0, 0, 1].abs().max() > 0


@pytest.mark.parametrize("kind", ["multi_head", "linear"])
def test_tokens_as_their_own_context_stand_where_they_stand(kind):
    options = {"feature_map": "identity"} if kind == "linear" else {}
    layer, x = make_attention(kind, 8, 2, rotary=100.0, **options), torch.randn(2, 5, 8)
    places = torch.tensor([3, 4, 9, 11, 30])
    assert torch.equal(layer(x, context=x, positions=places), layer(x, positions=places))


@pytest.mark.parametrize("dtypes", [(torch.float32, F64), (F64, torch.float32)])
def test_autocast_is_no_way_around_float64(dtypes):
    layer, x = MultiHeadAttention(8, 2, dtype=dtypes[0]), torch.randn(1, 3, 8, dtype=dtypes[1])
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="x: got dtype"):
        layer(x)


def test_sizes_of_numpy_and_none_of_truth():
    assert causal_mask(np.int64(3)).shape == (3, 3)
    with pytest.raises(ValueError, match="T: got True; want an integer"):
        causal_mask(True)


def test_padding_of_a_length_that_an_export_leaves_open():
    class Padded(nn.Module):
        def forward(self, x, lengths):
            return padding_mask(lengths, x.shape[1])

    x, lengths = torch.zeros(2, 5), torch.tensor([3, 5])
    length = torch.export.Dim("T", min=2, max=50)
    made = torch.export.export(Padded(), (x, lengths), dynamic_shapes=({1: length}, None), strict=False)
    assert torch.equal(made.module()(torch.zeros(2, 7), lengths), padding_mask(lengths, 7))


# ---------------------------------------------------------------- errors

Q = torch.zeros(2, 4, 3, 8)
X = torch.zeros(2, 3, 8)
LAYER, TURNING, LINEAR = MultiHeadAttention(8, 4), MultiHeadAttention(8, 4, rotary=10.0), LinearAttention(8, 4)
BOOLEAN = torch.ones(3, 3, dtype=torch.bool)
KEYS = dict(key=(2, 4))


def cached(layer=LAYER, B=2, room=8, **options):
    return dict(causal=True, cache=layer.make_cache(B, room, **options))


def used(layer=LAYER, length=2):
    with torch.no_grad():
        cache = layer.make_cache(2, 8)
        layer(X[:, :length], causal=True, cache=cache)
    return cache


# ---- a layer of one's own that gets its cache wrong ----


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


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (WithoutSuffix, "name: got 'key' twice; want each name once in a pass"),
        (WithoutCache, r"cache: got a pass that stored nothing under \['key', 'value'\]; want all that the layer's"),
    ],
)
@torch.no_grad()
def test_a_layer_that_would_decode_wrongly_is_refused(kind, sentence):
    layer, x = kind(8, 4), torch.randn(1, 3, 8)
    assert layer(x, causal=True).shape == x.shape  # without a cache nothing is wrong
    cache = layer.make_cache(1, 4)
    for _ in range(2):  # a pass that failed leaves no trace
        with pytest.raises(ValueError, match=sentence):
            layer(x, causal=True, cache=cache)
    assert cache.length == 0


def test_a_scale_of_ones_own_may_have_another_dtype():
    layer = MultiHeadAttention(8, 4, dtype=torch.bfloat16)
    layer.scale = nn.Parameter(torch.zeros(4))
    assert layer(torch.randn(1, 3, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


# ---- one product for several projections ----


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


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        # attend and attention_weights
        (lambda: attend(X, Q, Q), r"q: got shape \(2, 3, 8\); want \(B, H, T, K\)"),
        (lambda: attend(Q.numpy(), Q, Q), r"q: got ndarray; want \(B, H, T, K\)"),
        (lambda: attend(Q, None, Q), r"k: got NoneType; want \(B, G, S, K\) with B = 2"),
        (lambda: attend(Q, Q, Q[0]), r"v: got shape \(4, 3, 8\); want \(B, G, S, Kv\)"),
        (lambda: attend(Q.int(), Q, Q), "q: got dtype torch.int32; want a floating dtype"),
        (lambda: attend(Q, Q.double(), Q), "k: got dtype torch.float64; want torch.float32, as q"),
        (lambda: attend(Q, Q, Q.half()), "v: got dtype torch.float16; want torch.float32, as q"),
        (lambda: attend(Q, Q.to("meta"), Q), "k: got device meta; want cpu, as q"),
        (lambda: attend(Q, Q[:1], Q[:1]), r"k: got shape \(1, 4, 3, 8\); want .* B = 2, G ≥ 1, S ≥ 1, K = 8"),
        (lambda: attend(Q, Q[..., :4], Q), r"k: got shape \(2, 4, 3, 4\); want .* K = 8, as q"),
        (lambda: attend(Q, Q[:, :, :0], Q[:, :, :0]), r"k: got shape \(2, 4, 0, 8\); want .* S ≥ 1"),
        (lambda: attend(Q, Q[:, :3], Q[:, :3]), r"k: got .*; want a number of heads that divides H = 4"),
        (lambda: attend(Q, Q, Q[:, :, :2]), r"v: got shape \(2, 4, 2, 8\); want .* with B = 2, G = 4, S = 3, as q"),
        (lambda: attend(Q, Q[:, :, :2], Q[:, :, :2], causal=True), "k: got S = 2 keys for T = 3 queries; want S ≥ T"),
        (lambda: attend(Q, Q, Q, causal=1), "causal: got 1; want True or False"),
        (lambda: attend(Q, Q, Q, mask=[True]), "mask: got list; want a tensor"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN.long()), "mask: got dtype torch.int64; want a tensor of torch.bool"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN[None]), r"mask: got shape \(1, 3, 3\); want \(T, S\) = \(3, 3\) or"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN[:2]), r"mask: got shape \(2, 3\); want \(T, S\) = \(3, 3\) or"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN[0]), r"mask: got shape \(3,\); want"),
        (lambda: attend(Q, Q, Q, mask=BOOLEAN.to("meta")), "mask: got device meta; want cpu, as q"),
        (lambda: attend(Q, Q, Q, scale=math.nan), "scale: got nan; want None or a positive, finite number"),
        (lambda: attend(Q, Q, Q, scale=-1.0), "scale: got -1.0; want None or a positive, finite number"),
        (lambda: attend(Q, Q, Q, scale=True), "scale: got True; want None or a positive, finite number"),
        (lambda: attention_weights(Q, Q, scale=0), "scale: got 0; want None or a positive, finite number"),
        (lambda: attend(Q, Q, Q, dropout_p=1.0), "dropout_p: got 1.0; want a probability from 0 up to 1"),
        (lambda: attend(Q, Q, Q, dropout_p="none"), "dropout_p: got 'none'; want a probability"),
        (lambda: attention_weights(Q, Q[:, :, :2], causal=True), "k: got S = 2 keys for T = 3 queries"),
        (lambda: attention_weights(Q, Q, mask=BOOLEAN[None]), r"mask: got shape \(1, 3, 3\)"),
        # masks and heads
        (lambda: causal_mask(3, 2), "k: got S = 2 keys for T = 3 queries; want S ≥ T when causal"),
        (lambda: padding_mask([1, 2], 3), r"lengths: got list; want \(B,\)"),
        (lambda: padding_mask(torch.tensor([[1]]), 3), r"lengths: got shape \(1, 1\); want \(B,\)"),
        (lambda: padding_mask(torch.tensor([1.0]), 3), "lengths: got dtype torch.float32; want an integer dtype"),
        (lambda: padding_mask(torch.tensor([True]), 3), "lengths: got dtype torch.bool; want an integer dtype"),
        (lambda: padding_mask(torch.tensor([4, 1]), 3), r"lengths: got \[4, 1\]; want lengths from 0 to size = 3"),
        (lambda: padding_mask(torch.tensor([-1]), 3), r"lengths: got \[-1\]; want lengths from 0 to size = 3"),
        (lambda: padding_mask(torch.tensor([1]), 0), "size: got 0; want a positive integer"),
        (lambda: padding_mask(torch.tensor([1]), 3, side="up"), "side: got 'up'; want one of 'right', 'left'"),
        (lambda: split_heads(X, 3), r"x: got shape \(2, 3, 8\); want \(B, T, D\) with a width that 3 heads"),
        (lambda: split_heads(X, 0), "n_heads: got 0; want a positive integer"),
        # rotary positions
        (lambda: rotary_angles([0, 1], 4), r"positions: got list; want a tensor"),
        (lambda: rotary_angles(torch.arange(2), 3), "width: got 3; want an even number of features, to turn in pairs"),
        (lambda: rotary_angles(torch.arange(2), 4, 1.0), "base: got 1.0; want a finite base above 1"),
        (lambda: rotate(Q, torch.zeros(3, 2)), r"angles: got shape \(3, 2\); want \(T, K/2\) or \(B, 1, T"),
        (lambda: rotate(Q, torch.zeros(2, 3, 4)), r"angles: got shape \(2, 3, 4\); want .* or \(B, 1, T, K/2\)"),
        (lambda: rotate(Q, torch.zeros(2, 4, 3, 4)), r"angles: got shape \(2, 4, 3, 4\)"),
        (lambda: rotate(Q[..., :3], torch.zeros(3, 1)), r"angles: got shape \(3, 1\)"),
        # the cache
        (lambda: KeyValueCache(KEYS, 0, 3), "batch_size: got 0; want a positive integer"),
        (lambda: KeyValueCache(KEYS, 1, 2.5), "max_length: got 2.5; want a positive integer"),
        (lambda: used().crop(3), "length: got 3; want an integer from 0 to 2"),
        (lambda: used().crop(-1), "length: got -1; want an integer from 0 to 2"),
        (lambda: used().crop(True), "length: got True; want an integer from 0 to 2"),
        (lambda: used(LINEAR).crop(1), r"length: got 1; want 0: \['memory'\] cannot forget a part"),
        (lambda: used().reorder([0, 1]), r"rows: got list; want \(B,\) with B = 2"),
        (lambda: used().reorder(torch.tensor([0])), r"rows: got shape \(1,\); want \(B,\) with B = 2"),
        (lambda: used().reorder(torch.tensor([0.0, 1.0])), "rows: got dtype torch.float32; want torch.int64 or"),
        (lambda: used().reorder(torch.tensor([0, 2])), r"rows: got \[0, 2\]; want sequences from 0 to 1"),
        (lambda: LAYER(X, **cached()), r"cache: got keys that carry a gradient; want none: decode under torch.no_grad"),
        (lambda: LAYER(X, cache={}, causal=True), "cache: got dict; want a KeyValueCache"),
        (lambda: LAYER(X, cache=used()), "causal: got False; want True with a cache"),
        (lambda: LAYER(X, **cached(MultiHeadAttention(8, 2))), r"cache: got one that keeps \{'key': \(2, 4\)"),
        (lambda: LAYER(X, **cached(LINEAR)), r"cache: got one that keeps \{'memory'.*; want the cache of this layer"),
        (lambda: LAYER(X, **cached(B=3)), "cache: got a batch of 3; want 2, as x"),
        (lambda: LAYER(X, **cached(room=2)), "cache: got 0 tokens and 3 more; want at most max_length = 2"),
        # layers
        (lambda: MultiHeadAttention(0, 2), "d_model: got 0; want a positive integer"),
        (lambda: MultiHeadAttention(8, 3), "n_heads: got 3; want a divisor of d_model = 8"),
        (lambda: MultiHeadAttention(8, 4, n_kv_heads=3), "n_kv_heads: got 3; want a divisor of n_heads = 4"),
        (lambda: MultiHeadAttention(8, 4, n_kv_heads=0), "n_kv_heads: got 0; want a divisor of n_heads = 4"),
        (lambda: MultiHeadAttention(8, 4, rotary=True), "rotary: got True; want None or a finite base above 1"),
        (lambda: MultiHeadAttention(6, 2, rotary=10.0), "rotary: got heads of width 3; want an even width"),
        (lambda: MultiHeadAttention(8, 4, dropout=1.5), "dropout: got 1.5; want a probability from 0 up to 1"),
        (lambda: LAYER(X[0]), r"x: got shape \(3, 8\); want \(B, T, D\) with T ≥ 1, D = 8"),
        (lambda: LAYER(X[..., :4]), r"x: got shape \(2, 3, 4\); want \(B, T, D\) with T ≥ 1, D = 8"),
        (lambda: LAYER(X.long()), "x: got dtype torch.int64; want a floating dtype, as the weights"),
        (lambda: LAYER(X, context=X[..., :4]), r"context: got shape \(2, 3, 4\); want \(B, T, D\) with T ≥ 1, D = 8"),
        (lambda: LAYER(X, context=X[:1]), r"context: got shape \(1, 3, 8\); want \(B, S, D\) with B = 2, as x"),
        (lambda: LAYER(X, context=X, causal=True), "causal: got True; want False with a context"),
        (lambda: LAYER(X, context=X[:, :0], cache=LAYER.make_cache(2, 4)), "context: got 0 tokens; want at least one"),
        (lambda: rotate(torch.ones(1, 1, 2, 4).long(), torch.zeros(2, 2)), "x: got dtype torch.int64; want a float"),
        (lambda: rotate(torch.ones(1, 1, 2, 4), torch.zeros(2, 2).long()), "angles: got dtype torch.int64; want"),
        (lambda: rotate([1.0], torch.zeros(2, 2)), r"x: got list; want \(B, heads, T, K\)"),
        (lambda: rotate(torch.ones(2, 4), torch.zeros(2, 2)), r"x: got shape \(2, 4\); want \(B, heads, T, K\)"),
        (lambda: rotary_angles(torch.ones(3) > 0, 4), "positions: got dtype torch.bool; want an integer dtype"),
        (lambda: padding_mask(torch.ones(2, dtype=torch.complex64), 4), "lengths: got dtype torch.complex64"),
        (lambda: split_heads([1.0], 2), r"x: got list; want \(B, T, D\)"),
        (lambda: merge_heads(torch.ones(2, 3, 4)), r"x: got shape \(2, 3, 4\); want \(B, heads, T, K\)"),
        (lambda: merge_heads("x"), r"x: got str; want \(B, heads, T, K\)"),
        (lambda: KeyValueCache([2], 1, 4), r"shapes: got \[2\]; want a dict of"),
        (lambda: KeyValueCache({"key": (2, 0)}, 1, 4), r"shapes: got .*; want a dict of"),
        (lambda: LAYER.make_cache(1, 4).extend("kye", torch.ones(1, 2, 1, 2)), "name: got 'kye'; want one of"),
        (lambda: LAYER.make_cache(1, 4).add("key", torch.ones(1, 2, 1, 2)), r"name: got 'key'; want one of \[\]"),
        (lambda: LAYER.make_cache(1, 4).advance(-1), "tokens: got -1; want an integer from 0 to 4"),
        (lambda: LAYER.make_cache(1, 4).advance(2.5), "tokens: got 2.5; want an integer from 0 to 4"),
        (lambda: LAYER.make_cache(1, 4).advance(math.nan), "tokens: got nan; want an integer from 0 to 4"),
        (lambda: LAYER.make_cache(1, 4).advance(5), "tokens: got 5; want an integer from 0 to 4"),
        (lambda: register("own")(lambda: 0), "layer: got .*; want a subclass of torch.nn.Module"),
        (lambda: LAYER(X, causal="False"), "causal: got 'False'; want True or False"),
        (lambda: LAYER(X, mask=BOOLEAN[:, :2]), r"mask: got shape \(3, 2\); want \(T, S\) = \(3, 3\) or"),
        (lambda: LAYER(X, positions=torch.arange(3)),
         r"positions: got shape \(3,\), torch.int64; want None: this layer has rotary=None"),
        (lambda: TURNING(X, positions=[0, 1, 2]), r"positions: got \[0, 1, 2\]; want integers of shape \(T,\)"),
        (lambda: TURNING(X, positions=torch.arange(4)), r"positions: got shape \(4,\), torch.int64; want integers"),
        (lambda: TURNING(X, positions=torch.zeros(3)), "positions: got dtype torch.float32; want an integer dtype"),
        (
            lambda: MultiHeadAttention(8, 4, dropout=0.5).explain(X),
            r"dropout: got 0.5 while training; want no dropout in explain: call .eval\(\) first",
        ),
        (lambda: LinearAttention(8, 4, dropout=0.1), "dropout: got 0.1; want 0: linear attention forms no weight"),
        (lambda: LinearAttention(8, 4, feature_map="relu"), "feature_map: got 'relu'; want one of 'elu', 'identity'"),
        (lambda: LinearAttention(8, 4, rotary=10.0), "rotary: got 10.0; want None with feature_map='elu'"),
        (lambda: LINEAR(X, mask=torch.zeros(3, 3)), "mask: got dtype torch.float32; want torch.bool: without"),
        (lambda: LINEAR(X, mask=BOOLEAN, **cached(LINEAR)), r"mask: got shape \(3, 3\); want \(1, S\) or"),
        (lambda: LINEAR.explain(X, **cached(LINEAR)), "cache: got a cache; want None in explain"),
        (lambda: make_attention("quadratic", 8, 4), "name: got 'quadratic'; want one of 'multi_head', .*; a layer"),
        # torch's layer, and its place
        (lambda: MultiHeadAttention.from_torch(nn.Linear(2, 2)), "mha: got Linear.*; want a torch.nn.MultiheadA"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, kdim=4)),
         "mha: got kdim = 4, vdim = 8; want both embed_dim = 8"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True)), "mha: got add_bias_kv"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True)), "mha: got add_bias_k"),
        (lambda: MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2), n_kv_heads=1), "n_kv_heads: got 1; want 2"),
        (lambda: LINEAR.to_torch(), "layer: got LinearAttention; want what torch.nn.MultiheadAttention has, too"),
        (lambda: MultiHeadAttention(8, 4, n_kv_heads=2).to_torch(), "n_kv_heads: got 2; want what torch"),
        (lambda: TURNING.to_torch(), "rotary: got .*; want what torch"),
        (lambda: MultiHeadAttention(8, 2, shift=True).to_torch(), "shift: got True; want what torch"),
        (lambda: MultiHeadAttention(8, 2, causal=True).to_torch(), "causal: got True; want what torch"),
        (lambda: TorchAttention(nn.MultiheadAttention(8, 2)), "layer: got MultiheadAttention; want an attention layer"),
        (lambda: TorchAttention(LAYER)(X, X, X.clone()), "value: got a second tensor; want the one that is the key"),
        (lambda: TorchAttention(LAYER)(X, X, X, attn_mask=BOOLEAN.long()),
         "attn_mask: got dtype torch.int64; want a tensor of torch.bool, True = hidden"),
        (lambda: TorchAttention(LINEAR)(X, X, X, attn_mask=torch.randn(3, 3)),
         "attn_mask: got other numbers to add; want 0 and −∞, or torch.bool"),
        (lambda: TorchAttention(LAYER)(X, X, X, attn_mask=BOOLEAN[:2]), r"mask: got shape \(1, 1, 2, 3\); want"),
        # padding
        (lambda: LAYER(X, padding=[[1, 1, 1]]), r"padding: got list; want \(B, S\) with B = 2, S = 3, as x"),
        (lambda: LAYER(X, padding=BOOLEAN), r"padding: got shape \(3, 3\); want \(B, S\) with B = 2, S = 3, as x"),
        (lambda: LAYER(X, padding=torch.ones(2, 3)), "padding: got dtype torch.float32; want torch.bool or an integer"),
        (lambda: LAYER(X, padding=torch.tensor([[1, 1, 2], [1, 0, 0]])), "padding: got other numbers than 0 and 1"),
        (lambda: LAYER(X, padding=torch.ones(2, 3, device="meta")), "padding: got device meta; want cpu, as x"),
        (lambda: LAYER(X, mask=torch.ones(2, 3) > 0), "or .B, H, T, S.*one row for each sequence is .*padding="),
    ],
)  # fmt: skip
def test_errors_name_what_is_wrong(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_attend_compiles_for_any_number_of_heads():
    """Two models in one process have different numbers, which torch then takes for symbols."""
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads, kv_heads in ((4, 4), (8, 8), (8, 2)):
        q, k, v = torch.randn(2, heads, 5, 8), torch.randn(2, kv_heads, 5, 8), torch.randn(2, kv_heads, 5, 8)
        assert torch.allclose(compiled(q, k, v), attend(q, k, v), atol=1e-6)
