"""Chapter 29: the claims with their mutants, and what a lesson should not carry: masks, decoding, costs, faults."""

import math
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.attention import attend, attention_weights, causal_mask, padding_mask
from gbattn.cost import attention_cost, attention_parts, count_flops, count_saved_bytes, count_traffic_bytes
from gbattn.decoding import generate_with_draft
from gbattn.hierarchical import HierarchicalAttention, causal_pyramid, lift_scores, pyramid_cost
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.layers import MultiHeadAttention, make_attention

F64 = torch.float64


class Problem:
    """Tokens (T, d), filters and forms of L levels, weights that sum to one."""

    def __init__(self, seed, T, levels, taps):
        self.rng = torch.Generator().manual_seed(seed)
        self.T, self.d, self.levels = T, 3, levels
        self.X, self.V = self.normal(T, self.d), self.normal(T, 2)
        self.filters = self.normal(levels - 1, taps, self.d)
        self.forms = self.normal(levels, self.d, self.d)
        self.lam = self.normal(levels).softmax(0)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)

    def lifted(self):
        """P_l X^(l) for each level, by its definition, token by token."""
        levels = causal_pyramid(self.X, self.filters)
        return [torch.stack([x[t // 2**l] for t in range(self.T)]) for l, x in enumerate(levels)]

    def scores(self, forms=None):
        """λ_l P_l S_l P_lᵀ of each level."""
        forms = self.forms if forms is None else forms
        return [w * y @ M @ y.mT / self.d**0.5 for w, y, M in zip(self.lam, self.lifted(), forms)]


problems = st.builds(Problem, st.integers(0, 2**31), st.integers(2, 11), st.integers(1, 4), st.integers(1, 3))


def by_definition(X, filters):
    """The pyramid in plain loops."""
    levels = [X]
    for weights in filters:
        fine, rows = levels[-1], []
        for j in range((len(fine) + 1) // 2):
            row = torch.zeros(X.shape[1], dtype=X.dtype)
            for k, w in enumerate(weights):
                if 2 * j - k >= 0:
                    row = row + w * fine[2 * j - k]
            rows.append(row)
        levels.append(torch.stack(rows))
    return levels


def block_means(X, filters):
    cut = lambda l: X.split(2**l)
    return [torch.stack([part.mean(0) for part in cut(l)]) for l in range(len(filters) + 1)]


def from_later_tokens(p, pyramid):
    """Derivatives of rows and of causal outputs, plain and aligned, by tokens that come after."""

    def outputs(X, aligned):
        S = 0
        for l, (x, M) in enumerate(zip(pyramid(X, p.filters), p.forms)):
            scores = x @ M @ x.mT
            scores = scores.tril() if aligned else scores
            S = S + lift_scores(scores, l, p.T, p.T, aligned=aligned)
        return S.masked_fill(~causal_mask(p.T), -math.inf).softmax(1) @ p.V

    place, found = torch.arange(p.T), []
    for l in range(p.levels):
        J = torch.autograd.functional.jacobian(lambda X, l=l: pyramid(X, p.filters)[l], p.X).abs().sum((1, 3))
        found.append(J[place > 2**l * torch.arange(len(J))[:, None]])
    for aligned in (False, True):
        J = torch.autograd.functional.jacobian(lambda X, a=aligned: outputs(X, a), p.X).abs().sum((1, 3))
        found.append(J[place > place[:, None]])
    left = torch.cat(found)
    return left, torch.zeros_like(left)


@claim(problems, tolerance=0, examples=20, mutant=lambda p: from_later_tokens(p, block_means))
def test_thm_causal_pyramid(p):
    """No row or causal output depends on a later token. Mutant: means of blocks."""
    return from_later_tokens(p, causal_pyramid)


def windows(p, start):
    """Which token each row of each level depends on, times which it is lifted to; and as claimed."""
    filters, left, right = 1 + torch.rand(p.levels, 2, p.d, generator=p.rng, dtype=F64), [], []
    for l in range(1, p.levels + 1):
        J = torch.autograd.functional.jacobian(lambda X, l=l: causal_pyramid(X, filters)[l], p.X).abs().sum((1, 3)) > 0
        for j in range(1, len(J)):
            inside = [float(2**l * (j - 1) + start <= t <= 2**l * j) for t in range(p.T)]
            shared = sum(J[j, t] for t in range(2**l * j, min(2**l * (j + 1), p.T)))
            left += [J[j].double(), shared.double()[None]]
            right += [torch.tensor(inside, dtype=F64), torch.ones(1, dtype=F64)]
    left = left or [torch.ones(1, dtype=F64)]
    return torch.cat(left), torch.cat(right or left)


@claim(problems, tolerance=0, examples=20, mutant=lambda p: windows(p, 0))
def test_prop_late(p):
    """A row holds the 2^l tokens up to 2^l j, of which it is lifted to one. Mutant: one token more."""
    return windows(p, 1)


def counted(p, ratio):
    T = 2 ** (p.levels + 1)
    levels = causal_pyramid(p.normal(T, p.d), p.filters)
    count = sum(len(x) ** 2 for x in levels) / T**2
    return torch.tensor([count, count], dtype=F64), torch.tensor([ratio(p.levels), min(count, 4 / 3)], dtype=F64)


@claim(problems, tolerance=1e-12, mutant=lambda p: counted(p, lambda L: 2 * (1 - 2.0**-L)))
def test_prop_cost_series(p):
    """Scores of L levels, (4/3)(1 − 4^−L) of one. Mutant: a series of rows instead of scores."""
    return counted(p, pyramid_cost)


def wide(p, weights):
    """Output and scores of the mix, and of one wide head; singular values beyond the bound."""
    queries, keys = (p.normal(p.levels, p.d, 2) for _ in range(2))
    Y, allowed = p.lifted(), causal_mask(p.T)
    S = sum(p.scores(queries @ keys.mT))
    F = S.masked_fill(~allowed, -math.inf).softmax(1) @ p.V
    q, k = (torch.cat([w.sqrt() * y @ W for w, y, W in zip(weights, Y, maps)], 1) for maps in (queries, keys))
    one = attend(q[None, None], k[None, None], p.V[None, None], causal=True, scale=p.d**-0.5)[0, 0]
    first = attention_weights((Y[0] @ queries[0])[None, None], (Y[0] @ keys[0])[None, None], scale=p.d**-0.5)[0, 0]
    alone = (Y[0] @ queries[0] @ keys[0].mT @ Y[0].mT / p.d**0.5).softmax(1)  # λ = (1, 0, …)
    rank = sum(min(p.d, -(-p.T // 2**l)) for l in range(p.levels))
    beyond = torch.linalg.svdvals(sum(p.scores()))[rank:]
    zeros = torch.zeros_like(beyond)
    return torch.cat([F.flatten(), first.flatten(), beyond]), torch.cat([one.flatten(), alone.flatten(), zeros])


@claim(problems, tolerance=1e-10, mutant=lambda p: wide(p, p.lam.square()))
def test_prop_wide_head(p):
    """The mix is one head L times as wide, of bounded rank. Mutant: λ in the place of √λ."""
    return wide(p, p.lam)


def pooled(p, tap):
    l, filters = p.levels, torch.full((p.levels, 2, 1), tap, dtype=F64)
    T = 2**l + 1  # row 1 of level l holds tokens 1 … 2^l
    effect = causal_pyramid(torch.eye(T, dtype=F64)[..., None], filters)[l][:, 1, 0]  # one token after the other
    left = torch.stack([effect.square().sum(), effect.sum(), *effect])
    size = 2.0 ** (-l / 2)
    return left, torch.tensor([1.0, 1 / size, 0.0] + [size] * 2**l, dtype=F64)


@claim(problems, tolerance=1e-12, mutant=lambda p: pooled(p, 0.5))
def test_prop_pooling(p):
    """Noise stays, a mean of the window grows by 2^(l/2), one token shrinks by it. Mutant: taps of a mean."""
    return pooled(p, 0.5**0.5)


def sums(p, geometric):
    """Weights of summed scores, and what stages leave; each by its product."""
    allowed, d = causal_mask(p.T), p.d**0.5
    scores = [(y @ M @ y.mT / d).masked_fill(~allowed, -math.inf) for y, M in zip(p.lifted(), p.forms)]
    A = torch.stack([s.softmax(1) for s in scores])
    mixed = sum(w * s.masked_fill(~allowed, 0) for w, s in zip(p.lam, scores))
    mixed = mixed.masked_fill(~allowed, -math.inf).softmax(1)
    if geometric:
        product = (A ** p.lam[:, None, None]).prod(0)
    else:
        product = (A * p.lam[:, None, None]).sum(0)
    F, left_over, gates = torch.zeros_like(p.V), p.V, 2 * p.lam
    for l in reversed(range(p.levels)):
        F = F + gates[l] * A[l] @ (p.V - F)
        left_over = left_over - gates[l] * A[l] @ left_over
    product = product / product.sum(1, keepdim=True)
    return torch.cat([mixed.flatten(), (p.V - F).flatten()]), torch.cat([product.flatten(), left_over.flatten()])


@claim(problems, tolerance=1e-10, mutant=lambda p: sums(p, False))
def test_prop_sums(p):
    """Summed scores give a geometric mean of weights, stages a product of what is left. Mutant: arithmetic mean."""
    return sums(p, True)


# ---------------------------------------------------------------- the functions


def drawn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


@pytest.mark.parametrize("T", [1, 2, 5, 8, 11])
@pytest.mark.parametrize("taps", [1, 2, 4])
def test_the_pyramid_is_its_definition(T, taps):
    X, filters = drawn(T, 3), drawn(3, taps, 3, seed=1)
    for fast, plain in zip(causal_pyramid(X, filters), by_definition(X, filters), strict=True):
        assert torch.allclose(fast, plain, atol=1e-14, rtol=0)
    batch = causal_pyramid(torch.stack([X, 2 * X]), filters)
    assert torch.equal(batch[-1][0], causal_pyramid(X, filters)[-1])


@pytest.mark.parametrize("taps", [1, 2, 4])
def test_gradients_of_the_pyramid(taps):
    inputs = drawn(5, 2).requires_grad_(), drawn(2, taps, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda X, f: tuple(causal_pyramid(X, f)), inputs)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize(
    ("level", "T", "S", "past"), [(0, 4, 4, 0), (1, 5, 5, 0), (2, 9, 9, 0), (2, 3, 9, 6), (1, 1, 6, 5), (3, 2, 5, 3)]
)
def test_lifting_is_its_definition(level, T, S, past, aligned):
    size = 2**level
    rows, columns = (past + T - 1) // size - past // size + 1, -(-S // size)
    coarse = drawn(2, rows, columns)
    lifted = lift_scores(coarse, level, T, S, past=past, aligned=aligned)
    for t in range(T):
        for s in range(S):
            j = -(-s // size) if aligned else s // size
            expected = coarse[:, (past + t) // size - past // size, j] if j < columns else torch.zeros(2, dtype=F64)
            assert torch.equal(lifted[:, t, s], expected)


def test_the_cost_series_of_the_abstract():
    assert [pyramid_cost(L) for L in (1, 2, 3)] == [1.0, 1.25, 1.3125]
    assert abs(pyramid_cost(4) - 1.328125) < 1e-12 and pyramid_cost(12) < 4 / 3


# ---------------------------------------------------------------- the layer

SUMS = ("scores", "outputs", "residuals")
OPTIONS = [
    dict(combine=combine, aligned=aligned, **more)
    for combine in SUMS
    for aligned, more in (
        *((False, dict(n_kv_heads=2, shift=True)), (True, dict(levels=4, taps=3))),
        *((False, dict(levels=1)), (True, dict(taps=1, levels=2))),
    )
]
name_of = lambda options: " ".join(f"{value}" for value in options.values())
each_layer = pytest.mark.parametrize("options", OPTIONS, ids=name_of)


def layer_of(**options):
    torch.manual_seed(0)
    layer = HierarchicalAttention(8, 4, **(dict(dtype=F64) | options))
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.4 * torch.randn_like(weight))
    return layer.eval()


def by_tokens(layer, x, causal):
    """The heads of a layer, from the definitions; its output."""
    H, K, T = layer.n_heads, layer.head_dim, x.shape[0]
    heads = lambda z: z.unflatten(-1, (H, K)).transpose(0, 1)
    levels = by_definition(x, layer.filters)
    queries, keys = [layer.query, *layer.level_queries], [layer.key, *layer.level_keys]
    scores = []
    for l, (X, q, k) in enumerate(zip(levels, queries, keys)):
        coarse, lifted = heads(q(X)) @ heads(k(X)).mT / K**0.5, torch.zeros(H, T, T, dtype=F64)
        for t in range(T):
            for s in range(T):
                j = -(-s // 2**l) if layer.aligned else s // 2**l
                if j < len(X) and not (layer.aligned and causal and j > t // 2**l):
                    lifted[:, t, s] = coarse[:, t // 2**l, j]
        scores.append(lifted)
    hide = lambda S: S.masked_fill(~causal_mask(T), -math.inf) if causal else S
    V, w = heads(layer.value(x)), layer.level_weights()[..., None, None]
    if layer.combine == "scores":
        F = hide(sum(a * S for a, S in zip(w, scores))).softmax(-1) @ V
    elif layer.combine == "outputs":
        F = sum(a * hide(S).softmax(-1) @ V for a, S in zip(w, scores))
    else:
        F = torch.zeros_like(V)
        for a, S in zip(w.flip(0), scores[::-1]):
            F = F + a * hide(S).softmax(-1) @ (V - F)
    return layer.out(F.transpose(0, 1).flatten(1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("combine", SUMS)
@torch.no_grad()
def test_the_layer_is_its_definition(combine, aligned, causal):
    layer, x = layer_of(combine=combine, aligned=aligned, levels=4, taps=3), drawn(1, 11, 8)
    assert torch.allclose(layer(x, causal=causal)[0], by_tokens(layer, x[0], causal), atol=1e-12, rtol=0)


@torch.no_grad()
def test_all_weight_on_level_0_is_multi_head_attention():
    layer, plain, x = layer_of(n_kv_heads=2), MultiHeadAttention(8, 4, n_kv_heads=2, dtype=F64), drawn(2, 7, 8)
    assert plain.load_state_dict(layer.state_dict(), strict=False).missing_keys == []
    layer.mixture.zero_()[0] = 1e4
    for causal in (False, True):
        assert torch.allclose(layer(x, causal=causal), plain(x, causal=causal), atol=1e-12, rtol=0)
    assert (layer_of(levels=1)(x) - layer_of()(x)).abs().max() > 1e-3


@each_layer
@torch.no_grad()
def test_explain_is_forward_and_each_round_adds_its_gated_correction(options):
    layer, x = layer_of(**options), drawn(2, 7, 8)
    for causal in (False, True):
        trace, F = layer.explain(x, causal=causal), 0
        assert torch.equal(trace.output, layer(x, causal=causal)) and len(trace.rounds) == layer.rounds
        for found in trace.rounds:
            assert torch.allclose(found.weights.sum(-1), torch.ones(2, 4, 7, dtype=F64))
            assert found.residual.shape == x.shape
            F = F + (1 if found.gate is None else found.gate) * found.correction
            assert torch.allclose(F, found.estimate, atol=1e-12, rtol=0)


@each_layer
@torch.no_grad()
def test_no_causal_output_depends_on_a_later_token(options):
    layer, x = layer_of(causal=True, **options), drawn(1, 10, 8)
    before = layer(x)
    for t in range(1, 10):
        moved = x.clone()
        moved[:, t:] += 5
        after = layer(moved)
        assert torch.equal(after[:, :t], before[:, :t])
        assert (after[:, t:] - before[:, t:]).abs().max() > 1e-6


@each_layer
@torch.no_grad()
def test_decoding_is_exact_wherever_a_block_is_cut(options):
    layer, x = layer_of(causal=True, **options), drawn(2, 11, 8)
    for sizes in ([11], [1] * 11, [2, 3, 1, 1, 4], [3, 8], [5, 1, 5]):
        cache = layer.make_cache(2, 11)
        parts = [layer(part, cache=cache) for part in x.split(sizes, dim=1)]
        assert torch.allclose(torch.cat(parts, dim=1), layer(x), atol=1e-12, rtol=0)
    cache.crop(0)  # and the cache starts anew
    assert torch.allclose(layer(x[:, :4], cache=cache), layer(x[:, :4]), atol=1e-12, rtol=0)


@each_layer
def test_a_padded_batch_is_its_sequences_alone_and_hidden_tokens_get_no_gradient(options):
    layer, x, lengths = layer_of(**options), drawn(2, 7, 8).requires_grad_(), torch.tensor([5, 7])
    real = padding_mask(lengths, 7)
    for causal in (False, True):
        output = layer(x, padding=real[:, 0, 0], causal=causal)
        assert torch.equal(layer(x, mask=real, causal=causal), output)
        for b, length in enumerate(lengths):
            alone = layer(x[b : b + 1, :length], causal=causal)[0]
            assert torch.allclose(output[b, :length], alone, atol=1e-12, rtol=0)
        (gradient,) = torch.autograd.grad(output[0, :5].square().sum(), x)
        assert not gradient[0, 5:].any()
    nothing = layer(x, padding=torch.zeros(2, 7, dtype=torch.bool))
    assert torch.allclose(nothing, layer.out.bias.expand(2, 7, 8), atol=1e-12, rtol=0)
    assert torch.autograd.grad(nothing.sum(), x)[0].isfinite().all()


@torch.no_grad()
def test_padding_on_the_left_reaches_no_token_also_in_a_cache():
    layer, x = layer_of(causal=True), drawn(2, 7, 8)
    real = padding_mask(torch.tensor([4, 7]), 7, side="left")[:, 0, 0]
    moved, cache = x.clone(), layer.make_cache(2, 7)
    moved[0, :3] += 5
    output = layer(x, padding=real)
    assert torch.equal(layer(moved, padding=real)[0, 3:], output[0, 3:])
    parts = [layer(x[:, :2], padding=real[:, :2], cache=cache), layer(x[:, 2:], padding=real, cache=cache)]
    assert torch.allclose(torch.cat(parts, 1), output, atol=1e-12, rtol=0)


@torch.no_grad()
def test_text_is_not_written_from_padded_prompts_that_blocks_would_see(monkeypatch):
    """Unless there is one level only, or no padding; of a draft, too."""
    config = dict(vocab_size=20, d_model=8, n_heads=2, n_layers=1, max_length=16, attention="hierarchical")
    model, plain = (LanguageModel(ModelConfig(**config, attention_options=dict(levels=l))).double() for l in (3, 1))
    tokens, lengths = torch.randint(20, (2, 6)), torch.tensor([6, 4])
    said = plain.generate(tokens, 5, lengths=lengths, temperature=0)
    assert torch.equal(said[1:, 2:], plain.generate(tokens[1:, 2:], 5, temperature=0))
    model.generate(tokens, 5, lengths=torch.tensor([6, 6]))
    monkeypatch.setattr(LanguageModel, "forward", lambda *_, **__: pytest.fail("computed"))
    for write in (model.generate, partial(model.generate, cache=False), partial(generate_with_draft, model, plain)):
        with refused("lengths"):
            write(tokens, 5, lengths=lengths)
    with refused("lengths"):
        generate_with_draft(plain, model, tokens, 5, lengths=lengths)


@torch.no_grad()
def test_a_context_has_a_pyramid_of_its_own():
    layer, x, context = layer_of(), drawn(2, 5, 8), drawn(2, 9, 8, seed=1)
    output = layer(x, context=context)
    assert torch.allclose(layer(x, context=x.clone()), layer(x), atol=1e-12, rtol=0)
    padded = torch.cat([context, 9 + context], 1)
    real = (torch.arange(18) < 9).expand(2, -1)
    assert torch.allclose(layer(x, context=padded, padding=real), output, atol=1e-12, rtol=0)


@pytest.mark.parametrize("combine", SUMS)
def test_gradients(combine):
    layer = HierarchicalAttention(4, 2, combine=combine, aligned=combine == "outputs", dtype=F64)
    x = drawn(1, 5, 4).requires_grad_()
    call = lambda x, f, a: torch.func.functional_call(layer, {"filters": f, "mixture": a}, (x,))
    assert torch.autograd.gradcheck(call, (x, layer.filters, layer.mixture))
    layer(x).square().sum().backward()
    for name, weight in layer.named_parameters():
        if "key" not in name or "weight" in name:  # the same number for all keys changes no softmax
            assert weight.grad.abs().max() > 1e-9, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_follows(dtype):
    for combine in SUMS:
        layer, x = layer_of(combine=combine), drawn(1, 9, 8)
        expected = layer(x, causal=True)
        allowed = 1e-5 if dtype == torch.float32 else 0.2
        output = layer.to(dtype)(x.to(dtype), causal=True)
        assert output.dtype == dtype and (output - expected).abs().max() < allowed * expected.abs().max()


def test_dropout_drops_while_training_only():
    layer, x = layer_of(dropout=0.5), drawn(1, 9, 8)
    assert torch.equal(layer(x), layer(x))
    assert not torch.equal(layer.train()(x), layer(x))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch itself
@pytest.mark.parametrize("combine", SUMS)
def test_the_layer_compiles_whole(combine):
    layer, x = layer_of(combine=combine, aligned=True, levels=2), drawn(1, 6, 8)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x, causal=True), layer(x, causal=True), atol=1e-12, rtol=0)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_reset_is_the_start_and_layers_run_as_a_batch():
    layer, x = layer_of(), drawn(2, 6, 8)
    stacked = {name: torch.stack([w, w + 0.1]) for name, w in layer.named_parameters()}
    both = torch.func.vmap(lambda w: torch.func.functional_call(layer, w, (x,)))(stacked)
    assert torch.allclose(both[0], layer(x), atol=1e-12, rtol=0)
    layer.reset_parameters(torch.Generator().manual_seed(3))
    again = layer_of()
    again.reset_parameters(torch.Generator().manual_seed(3))
    assert torch.equal(layer(x), again(x)) and torch.equal(layer.level_weights(), torch.full((3, 4), 1 / 3, dtype=F64))
    assert layer.filters.eq(0.5**0.5).all() and (layer_of(combine="residuals").level_weights() > 0).all()


@each_layer
def test_its_cost_is_what_torch_counts(options):
    """FLOPs exactly, bytes from what must move up to torch's. Mutant: the count of multi-head attention."""
    layer, x = HierarchicalAttention(8, 4, **options), drawn(2, 11, 8, dtype=torch.float32).requires_grad_()
    for context in (None,) if layer.combine == "residuals" else (None, 9):
        call = {} if context is None else dict(context=drawn(2, context, 8, dtype=torch.float32).requires_grad_())
        cost = attention_cost(layer, 11, context=context, batch_size=2)
        backward = count_flops(layer(x, **call).sum().backward)
        assert (cost.forward_flops, cost.backward_flops) == (count_flops(layer, x, **call), backward)
        assert cost.traffic_bytes <= count_traffic_bytes(layer, x, **call)
        assert cost.saved_bytes <= count_saved_bytes(layer, x, **call)
        keys, inside = context or 11, attention_parts(layer, 11, context=context, batch_size=2)["attention"]
        ends, scores = 2 * x.nbytes + 4 * 2 * 2 * keys * 2 * layer.n_kv_heads, 4 * 2 * 4 * 11 * keys
        assert inside.traffic_bytes >= ends + (layer.levels + layer.rounds) * scores  # scores of levels, and weights
        assert inside.saved_bytes >= x.nbytes + layer.rounds * scores
    assert cost.parameters == sum(w.numel() for w in layer.parameters())
    assert cost.cache_bytes == layer.make_cache(2, 11).nbytes or context is not None
    with torch.no_grad():
        cache = layer.make_cache(2, 11)
        layer(x[:, :6].detach(), causal=True, cache=cache)
        later = attention_cost(layer, 4, past=6, causal=True, batch_size=2)
        assert later.forward_flops == count_flops(layer, x[:, 6:10].detach(), causal=True, cache=cache)
    if layer.levels > 1:
        plain, whole = (
            MultiHeadAttention(8, 4, n_kv_heads=options.get("n_kv_heads")),
            attention_cost(layer, 11, batch_size=2),
        )
        assert attention_cost(plain, 11, batch_size=2).forward_flops < whole.forward_flops
        half = attention_cost(layer, 11, batch_size=2, causal=True, count_masked=False)
        assert half.forward_flops < whole.forward_flops


def test_it_is_registered():
    layer = make_attention("hierarchical", 8, 2, levels=2, combine="residuals")
    assert isinstance(layer, HierarchicalAttention)
    assert "levels=2, taps=2, combine='residuals', aligned=False" in repr(layer)


X, L = torch.ones(1, 4, 8), HierarchicalAttention(8, 2)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: causal_pyramid(torch.ones(3), torch.ones(1, 2, 3)), "X"),
        (lambda: causal_pyramid(X, torch.ones(1, 2, 3)), "filters"),
        (lambda: causal_pyramid(X, torch.ones(1, 2, 8).double()), "filters"),
        (lambda: causal_pyramid(X, torch.ones(1, 0, 8)), "filters"),
        (lambda: lift_scores(torch.ones(2, 2), 1, 5, 5), "scores"),
        (lambda: lift_scores(torch.ones(2, 2), -1, 4, 4), "level"),
        (lambda: lift_scores(torch.ones(2, 2), 1, 4, 4, past=-1), "past"),
        (lambda: lift_scores(torch.ones(2, 2), 1, 0, 4), "T"),
        (lambda: lift_scores(torch.ones(2, 2), 1, 4, 4, aligned=1), "aligned"),
        (lambda: pyramid_cost(0), "levels"),
        (lambda: HierarchicalAttention(8, 2, levels=0), "levels"),
        (lambda: HierarchicalAttention(8, 2, taps=1.5), "taps"),
        (lambda: HierarchicalAttention(8, 2, combine="both"), "combine"),
        (lambda: HierarchicalAttention(8, 2, aligned="yes"), "aligned"),
        (lambda: HierarchicalAttention(8, 2, rotary=100.0), "rotary"),
        (lambda: L(X, mask=torch.ones(4, 4).tril().bool()), "mask"),
        (lambda: L(X, mask=torch.randn(1, 4)), "mask"),
        (lambda: L(X, mask=torch.ones(1, 2, 1, 4).bool()), "mask"),
        (lambda: HierarchicalAttention(8, 2, combine="residuals")(X, context=X + 1), "context"),
        (lambda: L(X, context=X + 1, cache=L.make_cache(1, 4)), "cache"),
        (lambda: L.make_cache(1, 4, static=True), "static"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
