"""Chapter 24: the claims with their mutants, and what a lesson should not carry: masks, gradients, faults."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.attention import padding_mask
from gbattn.boosted import GradientBoostedAttention
from gbattn.cost import attention_cost, attention_parts, count_flops, count_saved_bytes, count_traffic_bytes
from gbattn.language_model import ModelConfig
from gbattn.layers import MultiHeadAttention, make_attention
from gbattn.sinkhorn import (
    SinkhornAttention,
    SinkhornTransformer,
    coupling,
    sinkhorn_potentials,
    sinkhorn_weights,
)
from gbattn.twicing import TwicingAttention

F64 = torch.float64
EXACT = dict(iterations=20_000, tolerance=1e-13)


class Scores:
    """Drawn scores (n, n), and more numbers where a claim needs them."""

    def __init__(self, seed, n, size):
        self.rng = torch.Generator().manual_seed(seed)
        self.n, self.S = n, size * self.normal(n, n)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)


scores = st.builds(Scores, st.integers(0, 2**31), st.integers(2, 7), st.floats(0.3, 1.5))


def contraction_bound(S):
    """tanh²(Δ/4), by brute force."""
    Delta = max(
        (S[i, j] - S[k, j] - S[i, h] + S[k, h]).item()
        for i in range(len(S)) for k in range(len(S)) for j in range(len(S)) for h in range(len(S))
    )  # fmt: skip
    return math.tanh(Delta / 4) ** 2


def osc(g):
    return g.max() - g.min()


def one_iteration(S, g):
    f = -(S + g).logsumexp(1)
    return -(S + f[:, None]).logsumexp(0)


def contraction(p, power):
    """Errors of four iterations and the derivative of one, each with its bound."""
    f, g = sinkhorn_potentials(p.S, **EXACT)
    P, bound = (p.S + f[:, None] + g).exp(), contraction_bound(p.S)
    start = g + 0.1 * p.normal(p.n)
    now, left, right = start, [], []
    for m in range(1, 5):
        now = one_iteration(p.S, now)
        left.append(osc(now - g))
        right.append(bound ** (power * m) * osc(start - g))
    J = torch.autograd.functional.jacobian(lambda h: one_iteration(p.S, h), g)
    equal = (J - P.T @ P).flatten()
    zeros = torch.zeros_like(equal)
    return torch.cat([torch.stack(left), equal, -equal]), torch.cat([torch.stack(right), zeros, zeros])


@claim(scores, tolerance=1e-9, relation="<=", mutant=lambda p: contraction(p, 2))
def test_thm_alternating(p):
    """An iteration contracts by tanh²(Δ/4), near the end as PᵀP. Mutant: by the fourth power."""
    return contraction(p, 1)


def with_offsets(p, weights):
    x, y = p.normal(p.n, 3), p.normal(p.n, 3)
    shifted = p.S + 2 * p.normal(p.n, 1) + 2 * p.normal(1, p.n)
    distances = -torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
    return torch.stack([weights(shifted), weights(distances)]), torch.stack([weights(p.S), weights(x @ y.T)])


@claim(scores, tolerance=1e-9, mutant=lambda p: with_offsets(p, lambda S: S.softmax(-1)))
def test_prop_offsets(p):
    """Offsets of rows and columns cancel; products and distances agree. Mutant: of softmax."""
    return with_offsets(p, lambda S: sinkhorn_weights(S, **EXACT))


def gradients(p, formula):
    G, S = p.normal(p.n, p.n), p.S.clone().requires_grad_()
    g = torch.zeros(p.n, dtype=F64)
    for _ in range(2000):
        previous, g = g, one_iteration(S, g)
        if (g - previous).abs().max() < 1e-14:
            break
    unrolled = (S - (S + g).logsumexp(1, keepdim=True) + g).exp()
    (by_unrolling,) = torch.autograd.grad((G * unrolled).sum(), S)
    return formula(unrolled.detach(), G, p.S), by_unrolling


def implicit(P, G, S):
    S = S.clone().requires_grad_()
    (found,) = torch.autograd.grad((G * sinkhorn_weights(S, **EXACT)).sum(), S)
    return found


@claim(scores, tolerance=1e-7, mutant=lambda p: gradients(p, lambda P, G, S: P * (G - (P * G).sum(1, keepdim=True))))
def test_prop_plan_gradient(p):
    """The implicit gradient is that of the unrolled iteration. Mutant: v = 0, as for softmax."""
    return gradients(p, implicit)


def looking_back(p, sign):
    A = p.S.masked_fill(~torch.ones(p.n, p.n).tril().bool(), -math.inf).softmax(1)
    place = torch.arange(p.n, dtype=F64)
    total = ((place[:, None] - place) * A).sum()
    f, g = sinkhorn_potentials(p.S.masked_fill(A == 0, -math.inf), iterations=1000, tolerance=None)
    near = (p.S + f[:, None] + g).exp().tril()
    limit = torch.full((p.n,), 0.1, dtype=F64)
    left = torch.cat([total[None], -total[None], (1 - near.diagonal())])
    paid = sign * (place * (1 - A.sum(0))).sum()
    return left, torch.cat([paid[None], -paid[None], limit])


@claim(scores, tolerance=1e-9, relation="<=", examples=20, mutant=lambda p: looking_back(p, -1))
def test_thm_look_back(p):
    """Distance looked back is Σ j (1 − c_j); balancing causal scores tends to the identity. Mutant: the other sign."""
    return looking_back(p, 1)


def balanced_rounds(p, weights):
    k = p.normal(p.n, 3) + 1.5
    P, V = weights(k @ k.T), p.normal(p.n, 2)
    left_over = torch.eye(p.n, dtype=F64) - P
    values = torch.linalg.eigvalsh((left_over + left_over.T) / 2)
    one, zero = torch.ones(p.n, dtype=F64), torch.zeros(p.n, dtype=F64)
    left, right, r = [values, -values, torch.linalg.svdvals(left_over)], [one, zero, one], V
    for m in range(1, 4):
        after = r - P @ r
        left += [after.norm(dim=0), after.sum(0), -after.sum(0)]
        right += [r.norm(dim=0), torch.zeros(2, dtype=F64), torch.zeros(2, dtype=F64)]
        r = after
        rounds = torch.eye(p.n, dtype=F64) - torch.linalg.matrix_power(left_over, m)
        left += [rounds.sum(0), -rounds.sum(0), rounds.sum(1), -rounds.sum(1), (rounds - rounds.T).flatten()]
        right += [one, -one, one, -one, torch.zeros(p.n**2, dtype=F64)]
    return torch.cat(left), torch.cat(right)


@claim(scores, tolerance=1e-6, relation="<=", examples=25, mutant=lambda p: balanced_rounds(p, lambda S: S.softmax(-1)))
def test_thm_balanced_rounds(p):
    """With a symmetric, positive semi-definite kernel no round lengthens a residual. Mutant: softmax of it."""
    return balanced_rounds(p, lambda S: sinkhorn_weights(S, iterations=50_000, tolerance=1e-9))


class Texts(Scores):
    """Two weighted texts of different lengths, a positive coupling of them, and scores."""

    def __init__(self, seed, n, size):
        super().__init__(seed, n, size)
        self.mu, self.nu = self.normal(n).softmax(0), self.normal(n + 2).softmax(0)
        self.S = size * self.normal(n, n + 2)
        self.pi = coupling(size * self.normal(n, n + 2), self.mu, self.nu, **EXACT)


texts = st.builds(Texts, st.integers(0, 2**31), st.integers(2, 6), st.floats(0.3, 1.5))


def softmax_joint(S, mu, nu):
    return mu[:, None] * (S + nu.log()).softmax(1)


def with_equal_weights(S, mu, nu):
    return coupling(S, **EXACT)


def balanced(S, mu, nu):
    return coupling(S, mu, nu, **EXACT)


def carried(p, normalize, column_offsets=True):
    """π from its own scores, and the distance of two couplings with the bound."""
    density = (p.pi / p.mu[:, None] / p.nu).log()
    returned = (normalize(density, p.mu, p.nu) - p.pi).flatten()
    apart = 0.2 * p.normal(*p.S.shape)
    offsets = 2 * p.normal(p.n, 1) + column_offsets * 2 * p.normal(1, p.n + 2)
    near, far = (normalize(S, p.mu, p.nu) for S in (p.S, p.S + apart + offsets))
    zeros, distance = torch.zeros_like(returned), (far - near).abs().sum()
    return torch.cat([returned, -returned, distance[None]]), torch.cat([zeros, zeros, apart.abs().max()[None]])


@claim(texts, tolerance=1e-9, relation="<=", mutant=lambda p: carried(p, with_equal_weights))
def test_thm_couplings(p):
    """Sinkhorn of log dπ/d(μ⊗ν) is π, and couplings differ by no more than scores. Mutant: the square case."""
    return carried(p, balanced)


def test_softmax_carries_couplings_too_up_to_offsets_of_columns():
    p = Texts(0, 5, 1.0)
    left, right = carried(p, softmax_joint, column_offsets=False)
    assert (left <= right + 1e-12).all()
    left, right = carried(p, softmax_joint)
    assert left[-1] > 2 * right[-1] and (left[:-1].abs() < 1e-12).all()


def divergence(p, q):
    return (p * (p / q).log()).sum()


def projected(p, turned=False):
    R, P = softmax_joint(p.S, p.mu, p.nu), balanced(p.S, p.mu, p.nu)
    left_over = divergence(R, P) if turned else divergence(P, R)
    return divergence(p.pi, R), divergence(p.pi, P) + left_over


@claim(texts, tolerance=1e-9, mutant=lambda p: projected(p, turned=True))
def test_prop_projection(p):
    """KL(π‖R) = KL(π‖P) + KL(P‖R). Mutant: KL(R‖P)."""
    return projected(p)


def slopes(p):
    """How far attention moves tokens on a circle of density 1 + c cos x, per ε and per ∇log ρ."""
    grid, epsilon = np.linspace(0, 2 * math.pi, 5001), 0.02
    shares = (np.arange(150) + p.phase) / 150 * 2 * math.pi
    x = torch.tensor(np.interp(shares, grid + p.c * np.sin(grid), grid))
    slope = -p.c * x.sin() / (1 + p.c * x.cos())
    steps = (x - x[:, None] + math.pi) % (2 * math.pi) - math.pi
    found = []
    for options in (dict(iterations=0, tolerance=None), dict(iterations=3000, tolerance=1e-6)):
        moved = (sinkhorn_weights(-(steps**2) / 2 / epsilon, **options) * steps).sum(1) / epsilon
        found.append(slope @ moved / (slope @ slope))
    return torch.stack(found)


class Circle:
    def __init__(self, phase, c):
        self.phase, self.c = phase, c


circles = st.builds(Circle, st.floats(0, 1), st.floats(0.2, 0.6))


@claim(circles, tolerance=0.03, examples=5, mutant=lambda p: (slopes(p), torch.ones(2, dtype=F64)))
def test_prop_heat(p):
    """Softmax moves tokens by ε ∇log ρ, Sinkhorn by half of it. Mutant: both by all of it."""
    return slopes(p), torch.tensor([1, 0.5], dtype=F64)


# ---------------------------------------------------------------- the functions


def drawn(*shape, seed=0, dtype=F64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def test_no_iteration_is_softmax_and_few_are_the_published_half_steps():
    S, steps = drawn(3, 8, 8), 5
    P = S
    for step in range(steps):  # as in the published code: odd steps end with rows
        P = P - P.logsumexp(-1 if step % 2 == 0 else -2, keepdim=True)
    assert torch.allclose(sinkhorn_weights(S, iterations=2, tolerance=None), P.exp(), atol=1e-14, rtol=0)
    assert torch.allclose(sinkhorn_weights(S, iterations=0, tolerance=None), S.softmax(-1), atol=1e-15, rtol=0)


def test_scores_that_are_the_logarithm_of_a_coupling_return_it():
    P = sinkhorn_weights(drawn(6, 6), **EXACT)
    again = sinkhorn_weights(P.log() + drawn(6, 1, seed=1) + drawn(1, 6, seed=2), **EXACT)
    assert torch.allclose(again, P, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5), (5, 2), (1, 6), (6, 1), (1, 1)])
def test_rows_sum_to_one_and_columns_to_their_share(shape):
    P = sinkhorn_weights(2 * drawn(*shape), **EXACT)
    assert torch.allclose(P.sum(-1), torch.ones(shape[:-1], dtype=F64), atol=1e-14, rtol=0)
    assert torch.allclose(P.sum(-2), torch.full_like(P.sum(-2), shape[-2] / shape[-1]), atol=1e-11, rtol=0)


@pytest.mark.parametrize("shape", [(4, 4), (2, 3, 5), (5, 2)])
def test_gradients_and_those_of_gradients(shape):
    S = drawn(*shape).requires_grad_()
    weights = lambda S: sinkhorn_weights(S, **EXACT)
    assert torch.autograd.gradcheck(weights, (S,))
    assert torch.autograd.gradgradcheck(weights, (S,))


def test_packed_texts_are_balanced_one_by_one_with_their_gradient():
    S = drawn(7, 7).requires_grad_()
    mask = torch.block_diag(torch.ones(3, 3), torch.ones(4, 4)).bool()
    P = sinkhorn_weights(S, mask=mask, **EXACT)
    alone = torch.block_diag(sinkhorn_weights(S[:3, :3], **EXACT), sinkhorn_weights(S[3:, 3:], **EXACT))
    assert torch.allclose(P, alone, atol=1e-12, rtol=0)
    found = [torch.autograd.grad((drawn(7, 7, seed=3) * out).sum(), S)[0] for out in (P, alone)]
    assert torch.allclose(*found, atol=1e-10, rtol=0)


def test_padding_is_left_out_as_key_and_as_query():
    S, mask = drawn(6, 6), torch.ones(6, 6, dtype=torch.bool)
    mask[4:] = mask[:, 4:] = False
    P = sinkhorn_weights(S, mask=mask, **EXACT)
    assert torch.allclose(P[:4, :4], sinkhorn_weights(S[:4, :4], **EXACT), atol=1e-13, rtol=0)
    assert P[4:].eq(0).all() and P[:, 4:].eq(0).all()
    nothing = sinkhorn_weights(S, mask=torch.zeros(1, 6, dtype=torch.bool))
    assert nothing.eq(0).all()


@pytest.mark.parametrize("weights", [lambda n: drawn(n, seed=n).softmax(0), lambda n: None])
def test_a_coupling_has_its_sums_and_equal_weights_are_the_default(weights):
    S, mu, nu = drawn(3, 4, 6), weights(4), weights(6)
    P = coupling(S, mu, nu, **EXACT)
    for found, expected in ((P.sum(-1), mu), (P.sum(-2), nu)):
        expected = torch.full_like(found, 1 / found.shape[-1]) if expected is None else expected.expand(found.shape)
        assert torch.allclose(found, expected, atol=1e-12, rtol=0)
    if mu is None:
        assert torch.allclose(4 * P, sinkhorn_weights(S, **EXACT), atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", [EXACT, dict(iterations=0, tolerance=None)])
def test_gradients_of_a_coupling_with_those_of_its_weights(options):
    """Also without iterations, where it is softmax."""
    leaves = [drawn(*shape, seed=i).requires_grad_() for i, shape in enumerate([(2, 3, 4), (2, 3), (4,)])]
    weights = lambda S, a, b: coupling(S, a.softmax(-1), b.softmax(-1), **options)
    assert torch.autograd.gradcheck(weights, leaves)
    assert torch.autograd.gradgradcheck(weights, leaves)


def test_without_iterations_the_gradient_is_that_of_softmax():
    S = drawn(5, 5).requires_grad_()
    found = [
        torch.autograd.grad((drawn(5, 5, seed=1) * P).sum(), S)[0]
        for P in (sinkhorn_weights(S, iterations=0, tolerance=None), S.softmax(-1))
    ]
    assert torch.allclose(*found, atol=1e-14, rtol=0)


def test_a_token_without_weight_is_left_out():
    S, mu, nu = drawn(5, 6), drawn(5).softmax(0), drawn(6, seed=1).softmax(0)
    mu[3:], nu[4:] = 0, 0
    mu, nu = mu / mu.sum(), nu / nu.sum()
    P = coupling(S, mu, nu, **EXACT)
    assert torch.allclose(P[:3, :4], coupling(S[:3, :4], mu[:3], nu[:4], **EXACT), atol=1e-12, rtol=0)
    assert P[3:].max() < 1e-300 and P[:, 4:].max() < 1e-300


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_and_large_scores(dtype):
    S = drawn(5, 5)
    P = sinkhorn_weights(S.to(dtype))
    assert P.dtype == dtype
    # the scores are rounded to 8 bits before anything is done
    allowed = 1e-5 if dtype == torch.float32 else 0.02
    assert torch.allclose(P.double(), sinkhorn_weights(S), atol=allowed, rtol=0)
    large = sinkhorn_weights((1e4 * drawn(5, 5)).to(dtype), iterations=50, tolerance=None)
    assert large.isfinite().all()


def test_an_iteration_that_is_not_done_says_so():
    S = 6 * drawn(8, 8)
    with pytest.warns(RuntimeWarning, match="2 iterations"):
        sinkhorn_weights(S, iterations=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sinkhorn_weights(S, iterations=2, tolerance=None)
    causal = torch.ones(6, 6).tril().bool()
    with pytest.warns(RuntimeWarning, match="100 iterations"):
        sinkhorn_weights(drawn(6, 6), mask=causal, iterations=100)


# ---------------------------------------------------------------- the layer


def layer_of(**options):
    torch.manual_seed(0)
    return SinkhornAttention(16, 4, **(dict(iterations=300, dtype=F64) | options))


def test_the_layer_without_iterations_is_multi_head_attention():
    layer, x = layer_of(iterations=0, n_kv_heads=2), drawn(2, 5, 16)
    plain = MultiHeadAttention(16, 4, n_kv_heads=2, dtype=F64)
    plain.load_state_dict(layer.state_dict())
    assert torch.allclose(layer(x), plain(x), atol=1e-13, rtol=0)


@pytest.mark.parametrize("options", [{}, dict(n_kv_heads=2), dict(rotary=50.0), dict(shift=True)])
def test_explain_is_forward_and_its_weights_are_balanced(options):
    layer, x = layer_of(**options), drawn(2, 5, 16)
    trace = layer.explain(x)
    assert torch.equal(trace.output, layer(x))
    (found,) = trace.rounds
    assert torch.allclose(found.weights.sum(-2), torch.ones(2, 4, 5, dtype=F64), atol=1e-8, rtol=0)


def test_a_padded_batch_is_its_sequences_alone():
    layer, x, lengths = layer_of(), drawn(2, 7, 16), torch.tensor([4, 7])
    output, real = layer(x, mask=padding_mask(lengths, 7)), padding_mask(lengths, 7)[:, 0, 0].long()
    for b, length in enumerate(lengths):
        assert torch.allclose(output[b, :length], layer(x[b : b + 1, :length])[0], atol=1e-9, rtol=0)
    assert torch.equal(layer(x, padding=real), output)
    assert torch.equal(layer.explain(x, padding=real).output, output)
    packed = torch.block_diag(torch.ones(2, 2), torch.ones(5, 5)).bool()
    output = layer(x, mask=packed, padding=real)
    assert torch.allclose(output[0, :4], layer(x[:1, :4], mask=packed[:4, :4])[0], atol=1e-9, rtol=0)
    assert torch.allclose(output[1], layer(x[1:], mask=packed)[0], atol=1e-9, rtol=0)
    context = drawn(2, 7, 16, seed=1)
    output = layer(x, context=context, padding=real)
    assert torch.allclose(output[:1], layer(x[:1], context=context[:1, :4]), atol=1e-9, rtol=0)


def test_the_mean_over_tokens_does_not_depend_on_the_scores():
    layer, x = layer_of(), drawn(2, 7, 16)
    expected = layer.out(layer.value(x).mean(1))
    assert torch.allclose(layer(x).mean(1), expected, atol=1e-9, rtol=0)


def test_a_context_gives_each_key_its_share_and_a_single_query_the_mean():
    layer, x, context = layer_of(), drawn(2, 1, 16), drawn(2, 5, 16, seed=1)
    expected = layer.out(layer.value(context).mean(1, keepdim=True))
    assert torch.allclose(layer(x, context=context), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("base", [TwicingAttention, GradientBoostedAttention])
def test_rounds_of_another_layer_with_balanced_weights(base):
    kind = type("Both", (SinkhornAttention, base), {})
    torch.manual_seed(0)
    layer, x = kind(16, 4, rounds=3, iterations=500, dtype=F64), drawn(2, 6, 16)
    trace = layer.explain(x)
    assert torch.equal(trace.output, layer(x)) and len(trace.rounds) == 3
    for found in trace.rounds:
        assert torch.allclose(found.weights.sum(-2), torch.ones(2, 4, 6, dtype=F64), atol=1e-8, rtol=0)
    assert layer.rounds == 3 and layer.iterations == 500


def test_the_layer_trains_and_has_finite_gradients_at_sharp_scores():
    layer = SinkhornAttention(16, 4)
    x = 100 * drawn(2, 6, 16, dtype=torch.float32)
    layer(x).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch itself
def test_the_layer_compiles_whole():
    layer, x = layer_of(iterations=3), drawn(1, 4, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x), layer(x), atol=1e-12, rtol=0)


@pytest.mark.parametrize("context", [None, 9])
@pytest.mark.parametrize("options", [{}, dict(iterations=0), dict(n_kv_heads=2), dict(shift=True, bias=False)])
def test_its_cost_is_what_torch_counts(options, context):
    """FLOPs exactly, bytes from what is documented up to torch's. Mutant: the count of multi-head attention."""
    layer, x = SinkhornAttention(16, 4, **options), drawn(2, 11, 16, dtype=torch.float32).requires_grad_()
    call = {} if context is None else dict(context=drawn(2, context, 16, dtype=torch.float32).requires_grad_())
    cost = attention_cost(layer, 11, context=context, batch_size=2)
    backward = count_flops(layer(x, **call).sum().backward)
    assert (cost.forward_flops, cost.backward_flops) == (count_flops(layer, x, **call), backward)
    assert cost.traffic_bytes <= count_traffic_bytes(layer, x, **call)
    assert cost.saved_bytes <= count_saved_bytes(layer, x, **call)
    assert cost.cache_bytes == layer.make_cache(2, 11).nbytes == 0
    shared = {name: value for name, value in options.items() if name != "iterations"}
    plain = attention_cost(MultiHeadAttention(16, 4, **shared), 11, context=context, batch_size=2)
    assert plain.backward_flops != backward
    keys, parts = context or 11, attention_parts(layer, 11, context=context, batch_size=2)
    ends, scores = 2 * x.nbytes + 4 * 2 * 2 * keys * 4 * layer.n_kv_heads, 4 * 2 * 4 * 11 * keys
    assert parts["attention"].traffic_bytes >= ends + 2 * layer.iterations * scores  # read in each half-step
    assert parts["attention"].saved_bytes >= x.nbytes + scores


# ---------------------------------------------------------------- the model


def model_of(**options):
    torch.manual_seed(0)
    return SinkhornTransformer(2, 8, 2, dtype=F64, **(dict(iterations=500) | options))


def two_sets():
    weights = drawn(3, 4, seed=2).softmax(1), drawn(3, 6, seed=3).softmax(1)
    return drawn(3, 4, 2), drawn(3, 6, 2, seed=1), *weights


@pytest.mark.parametrize("context", ["own", "both"])
def test_the_model_gives_couplings_and_sees_measures(context):
    """Two points of half the weight are one, in either set, and order does not matter."""
    model, (x, y, mu, nu) = model_of(context=context), two_sets()
    P = model(x, y, mu, nu)
    assert torch.allclose(P.sum(2), mu, atol=1e-12, rtol=0) and torch.allclose(P.sum(1), nu, atol=1e-10, rtol=0)
    halved = torch.cat([nu[:, :5], nu[:, 5:] / 2, nu[:, 5:] / 2], 1)
    split = model(x, torch.cat([y, y[:, 5:]], 1), mu, halved)
    assert torch.allclose(torch.cat([split[..., :5], split[..., 5:].sum(-1, keepdim=True)], -1), P, atol=1e-10)
    assert torch.allclose(model(x.flip(1), y, mu.flip(1), nu), P.flip(1), atol=1e-10)
    assert torch.allclose(model(x, y), model(x, y, torch.full_like(mu, 0.25), torch.full_like(nu, 1 / 6)))


@pytest.mark.parametrize("context", ["own", "both"])
def test_what_a_point_is_encoded_with(context):
    """Differences of scores of one x are ⟨u, v − v'⟩: with its own set alone, u does not move when y does."""
    model, (x, y, mu, nu) = model_of(context=context), two_sets()
    keys = []
    model.key.register_forward_hook(lambda layer, inputs, v: keys.append(v))
    moved = x.clone()
    moved[:, 1] += 1
    for points in (x, moved):
        model.scores(points, y, mu, nu)
    assert torch.equal(*keys) == (context == "own")


def test_without_iterations_the_model_is_a_softmax_of_the_same_parameters():
    model, softmax, sets = model_of(), model_of(iterations=0), two_sets()
    softmax.load_state_dict(model.state_dict())
    expected = softmax_joint(model.scores(*sets)[0], sets[2][0], sets[3][0])
    assert torch.allclose(softmax(*sets)[0], expected, atol=1e-13, rtol=0)


def test_the_model_learns_who_is_who():
    model, (x, _, mu, _) = model_of(iterations=100), two_sets()
    optimizer, target = torch.optim.Adam(model.parameters(), 1e-2), torch.diag_embed(mu)
    for _ in range(60):
        optimizer.zero_grad()
        loss = -(target * model(x, x, mu, mu).clamp_min(1e-30).log()).sum()
        loss.backward()
        optimizer.step()
    assert (model(x, x, mu, mu).argmax(2) == torch.arange(4)).double().mean() > 0.9


def test_it_is_registered():
    assert isinstance(make_attention("sinkhorn", 8, 2, iterations=4), SinkhornAttention)
    assert "iterations=4" in repr(make_attention("sinkhorn", 8, 2, iterations=4))


def test_it_is_no_layer_of_a_language_model():
    """Which would read the tokens to come."""
    with refused("attention"):
        ModelConfig(vocab_size=9, attention="sinkhorn")


X = torch.ones(1, 4, 8)


def decoding(**options):
    layer = SinkhornAttention(8, 2)
    return layer(X, cache=layer.make_cache(1, 8), **options)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: sinkhorn_weights(torch.ones(3)), "scores"),
        (lambda: sinkhorn_weights(torch.ones(0, 3)), "scores"),
        (lambda: sinkhorn_weights(torch.ones(3, 3).long()), "scores"),
        (lambda: sinkhorn_weights(torch.ones(3, 3), iterations=-1), "iterations"),
        (lambda: sinkhorn_weights(torch.ones(3, 3), tolerance=0.0), "tolerance"),
        (lambda: sinkhorn_weights(torch.ones(3, 3), mask=torch.ones(3, 3)), "mask"),
        (lambda: sinkhorn_weights(torch.ones(3, 3), mask=torch.ones(2, 3).bool()), "mask"),
        (lambda: coupling(torch.ones(3)), "scores"),
        (lambda: coupling(torch.ones(3, 4), torch.ones(4) / 4), "mu"),
        (lambda: coupling(torch.ones(3, 4), None, torch.ones(4)), "nu"),
        (lambda: coupling(torch.ones(2, 2), torch.tensor([2.0, -1])), "mu"),
        (lambda: coupling(torch.ones(3, 4), iterations=-1), "iterations"),
        (lambda: SinkhornTransformer(2, 8, context="all"), "context"),
        (lambda: SinkhornTransformer(2, 8)(torch.ones(1, 4, 3), torch.ones(1, 4, 2)), "x"),
        (lambda: SinkhornAttention(8, 2, iterations=1.0), "iterations"),
        (lambda: SinkhornAttention(8, 2, dropout=0.1), "dropout"),
        (lambda: SinkhornAttention(8, 2, causal=True), "causal"),
        (lambda: SinkhornAttention(8, 2)(X, causal=True), "causal"),
        (lambda: decoding(causal=True), "causal"),
        (lambda: decoding(), "cache"),
        (lambda: attention_cost(SinkhornAttention(8, 2), 4, causal=True), "causal"),
        (lambda: SinkhornAttention(8, 2)(X, mask=torch.randn(4, 4)), "mask"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
