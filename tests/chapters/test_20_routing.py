"""Chapter 20: the routing law with its mutants, on every layer of the book; the chains and their exact posteriors."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused
from signs import with_sign

from claims import claim
from gbattn.attention import attention_weights, split_heads
from gbattn.boosted import GradientBoostedAttention
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.layers import MultiHeadAttention, make_attention
from gbattn.routing import (
    RoutingRound,
    forward_algorithm,
    routing,
    routing_law,
    sticky_transition,
)

F64 = torch.float64

pytestmark = pytest.mark.usefixtures("in_double_precision")


class Problem:
    """Scores s (T, S), values v (S, K), a head W (K, 5) and labels of T queries, for cross-entropy."""

    def __init__(self, seed, T, S, K):
        rng = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(*shape, generator=rng)
        self.s, self.v, self.W = 2 * normal(T, S), normal(S, K), normal(K, 5)
        self.y = torch.randint(5, (T,), generator=rng)

    def loss(self, s, v):
        return torch.nn.functional.cross_entropy(s.softmax(-1) @ v @ self.W, self.y, reduction="sum")

    @property
    def alpha(self):
        return self.s.softmax(-1)

    @property
    def u(self):
        p = (self.alpha @ self.v @ self.W).softmax(-1)
        return (p - torch.eye(5)[self.y]) @ self.W.T

    @property
    def b(self):
        return self.u @ self.v.T

    def gradients(self):
        s, v = self.s.clone().requires_grad_(), self.v.clone().requires_grad_()
        return torch.autograd.grad(self.loss(s, v), [s, v])


problems = st.builds(Problem, st.integers(0, 2**31), st.integers(1, 6), st.integers(2, 6), st.integers(1, 5))


# ---------------------------------------------------------------- claims


def by_central_differences(f, x, h=1e-5):
    """∂f/∂x, entry by entry."""
    found = torch.empty_like(x)
    for place in itertools.product(*map(range, x.shape)):
        up, down = x.clone(), x.clone()
        up[place] += h
        down[place] -= h
        found[place] = (f(up) - f(down)) / (2 * h)
    return found


def law(p, mean=True):
    by_law = routing_law(p.alpha, p.b) if mean else p.alpha * p.b
    differences = by_central_differences(lambda s: p.loss(s, p.v), p.s)
    values = by_central_differences(lambda v: p.loss(p.s, v), p.v)
    sides = ((by_law, differences), (p.alpha.T @ p.u, values))
    return (torch.cat([x.flatten() for x in side]) for side in zip(*sides))


@claim(problems, tolerance=1e-7, examples=30, mutant=lambda p: law(p, mean=False))
def test_thm_routing(p):
    """Both gradients, by finite differences. Mutant: the mean of b is not subtracted."""
    return law(p)


def without_a_say(p, scale=0.0):
    """Row sums; the gradient after a constant has been added to all values; the gradient for equal values."""
    c = torch.full_like(p.v[0], 3.0)
    shifted = routing_law(p.alpha, p.u @ (p.v + c).T)
    equal = routing_law(p.alpha, p.u @ (c + scale * p.v).T)
    rows = routing_law(p.alpha, p.b).sum(-1)
    zero = torch.zeros(())
    left = torch.cat([rows, (shifted - routing_law(p.alpha, p.b)).flatten(), equal.flatten()])
    return left, zero.expand_as(left).clone()


@claim(problems, tolerance=1e-12, mutant=lambda p: without_a_say(p, scale=0.1))
def test_prop_routing_constant(p):
    """Rows sum to zero, a constant has no say, equal values route nothing. Mutant: the values differ."""
    return without_a_say(p)


def advantage_change(p, centred=True):
    """Measured after a step on the values, against the proposition: the change, its row means, what the library has,
    and a query on its own."""
    eta, alpha, u = 0.3, p.alpha, p.u
    below = lambda v: (alpha * (u @ v.T)).sum(1, keepdim=True) - u @ v.T
    change = below(p.v - eta * alpha.T @ u) - below(p.v)
    together, products = alpha @ alpha.T, u @ u.T  # collisions of two rows; <u_i, u_m>
    terms = products @ alpha - (products * together).sum(1, keepdim=True) * centred
    lone = RoutingRound(alpha[:1], p.v, u[:1], None, None)  # the first query alone: only its own term
    mass = alpha[:1].square().sum() * centred
    own = u[:1].square().sum() * (alpha[:1] - mass)
    in_code = RoutingRound(alpha, p.v, u, None, None).advantage_change
    left = [change, (alpha * change).sum(1), eta * in_code, lone.advantage_change]
    right = [eta * terms, torch.zeros(len(alpha)), eta * terms, own]
    return (torch.cat([x.flatten() for x in side]) for side in (left, right))


@claim(problems, tolerance=1e-10, mutant=lambda p: advantage_change(p, centred=False))
def test_prop_advantage_change(p):
    """The advantage after a step on the values; its row means stay; the own term. Mutant: no collision mass."""
    return advantage_change(p)


def score_step(p, power=2):
    """The change of the averages and of the loss by a small step on the scores, against the proposition."""
    eta = 1e-6
    g, A = p.alpha @ p.v, -(p.u @ p.v.T - (p.alpha * p.b).sum(1, keepdim=True))
    new = p.s - eta * routing_law(p.alpha, p.b)
    moved = (new.softmax(-1) @ p.v - g) / eta
    pushed = torch.einsum("ts,tsk->tk", p.alpha**power * A, p.v - g[:, None])
    fall = (p.loss(new, p.v) - p.loss(p.s, p.v)) / eta
    left = torch.cat([moved.flatten(), fall[None]])
    return left, torch.cat([pushed.flatten(), -(p.alpha**power * A**2).sum()[None]])


@claim(problems, tolerance=1e-3, mutant=lambda p: score_step(p, power=1))
def test_prop_score_step(p):
    """To first order. Mutant: each key by its weight, not by the square of it."""
    return score_step(p)


def rounds_of(layer, x, target):
    return routing(layer, lambda: (layer(x) - target).square().sum())


def two_signs(seed, output=True, s=-1.0):
    """b of both rounds, in a layer that reads x − F and in its image that reads x − sF."""
    torch.manual_seed(seed)
    sides = []
    for kv_from, gate in itertools.product(("residual", "input", "shared"), ("feature", "head", "none")):
        plus = GradientBoostedAttention(8, 2, kv_from=kv_from, gate=gate)
        with torch.no_grad():
            for weight in plus.parameters():
                weight.normal_(std=0.5)
        plus, minus = with_sign(plus, s, output=output)
        x, target = torch.randn(2, 2, 5, 8)
        both = [rounds_of(one, x, target) for one in (plus, minus)]
        sides.append([torch.cat([torch.stack([m.b, m.score_gradient]).flatten() for m in rounds]) for rounds in both])
    return (torch.cat(side) for side in zip(*sides))


@claim(st.integers(0, 2**31), tolerance=1e-12, examples=10, mutant=lambda seed: two_signs(seed, output=False))
def test_prop_routing_sign(seed):
    """Equal b and score gradients in both rounds. Mutant: the output projection keeps its sign."""
    return two_signs(seed)


def test_another_scale_of_the_estimate_routes_the_same():
    one, other = two_signs(3, s=0.4)
    torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


class Shifted(Problem):
    """A problem whose keys and values are mixed with those of the token before, one query a token."""

    def __init__(self, seed, T, K):
        super().__init__(seed, T, T, K)
        rng = torch.Generator().manual_seed(seed + 1)
        normal = lambda *shape: torch.randn(*shape, generator=rng)
        self.q, self.k, self.mixing = normal(T, K), normal(T, K), normal(4, K)

    def mixed(self, k, v, a_k, c_k, a_v, c_v):
        """Scores and values of mixed keys and values."""
        before = lambda z: torch.nn.functional.pad(z, (0, 0, 1, -1))
        keys, values = (1 + a_k) * k + c_k * before(k), (1 + a_v) * v + c_v * before(v)
        return self.q @ keys.T / math.sqrt(k.shape[1]), values


def shifted(p, neighbour=True):
    """The gradients by v and by both coefficients of the token before: by autograd, and by the proposition."""
    leaves = [z.clone().requires_grad_() for z in (p.k, p.v, *p.mixing)]
    _, by_v, _, by_key_c, _, by_value_c = torch.autograd.grad(p.loss(*p.mixed(*leaves)), leaves)
    law = copy.copy(p)
    law.s, law.v = p.mixed(p.k, p.v, *p.mixing)  # b = <u, mixed value>
    w, (_, _, a, c) = law.alpha.T @ law.u, p.mixing
    after, before = torch.nn.functional.pad(w, (0, 0, -1, 1)), lambda z: torch.nn.functional.pad(z, (0, 0, 1, -1))
    by_keys = routing_law(law.alpha, law.b).T @ p.q / math.sqrt(p.k.shape[1])
    expected = [(1 + a) * w + (c * after if neighbour else 0)]
    expected += [(w * before(p.v)).sum(0), (by_keys * before(p.k)).sum(0)]
    sides = [by_v, by_value_c, by_key_c], expected
    return (torch.cat([z.flatten() for z in side]) for side in sides)


@claim(
    st.builds(Shifted, st.integers(0, 2**31), st.integers(2, 6), st.integers(1, 5)),
    tolerance=1e-10,
    mutant=lambda p: shifted(p, neighbour=False),
)
def test_prop_routing_shift(p):
    """Both neighbours' weights reach a value. Mutant: a value learns through its own weights alone."""
    return shifted(p)


# ---------------------------------------------------------------- the law by hand


def test_three_tokens_by_hand():
    alpha, v, u = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([[-1.0]])
    one = RoutingRound(alpha, v, u, None, None)
    assert one.b.tolist() == [[0, -2, -4]]
    assert one.advantage.tolist() == [[-1.5, 0.5, 2.5]]
    assert one.predicted_score_gradient.tolist() == [[0.75, -0.125, -0.625]]
    assert one.predicted_value_gradient.T.tolist() == [[-0.5, -0.25, -0.25]]


def test_the_stored_pair_whose_b_rises_and_whose_advantage_falls():
    alpha, u = torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([[1.0], [-3.0]])
    two = RoutingRound(alpha, torch.zeros(2, 1), u, None, None)
    assert two.b_change.tolist() == [[1.5, 0.5], [-4.5, -1.5]]
    assert (two.weights * two.b_change).sum() == -2.5 == -two.predicted_value_gradient.square().sum()
    assert two.advantage_change.tolist() == [[-0.25, 0.75], [0.75, -2.25]]


def test_a_query_helps_the_keys_above_its_collision_mass_useful_or_not():
    alpha, v, u = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.0], [2.0], [4.0]]), torch.tensor([[-1.0]])
    one = RoutingRound(alpha, v, u, None, None)
    assert one.advantage_change.tolist() == [[0.125, -0.125, -0.125]]  # against the advantages -1.5, 0.5, 2.5
    equal = RoutingRound(torch.full((1, 4), 0.25), torch.randn(4, 1), u, None, None)
    assert not equal.advantage_change.any()


def test_hard_attention_leaves_nothing_to_route():
    hard = torch.eye(4)[[0, 0, 2, 3]]
    one = RoutingRound(hard, torch.randn(4, 3), torch.randn(4, 3), None, None)
    assert not one.predicted_score_gradient.any() and one.predicted_value_gradient.abs().max() > 0.1


def test_scores_rise_exactly_where_b_is_below_its_mean():
    p = Problem(5, 6, 6, 4)
    gradient, _ = p.gradients()
    below = p.b < (p.alpha * p.b).sum(1, keepdim=True)
    assert torch.equal(-gradient > 0, below)


# ---------------------------------------------------------------- on layers

KINDS = {
    "multi_head": {},
    "linear": {},
    "twicing": {"rounds": 3},
    "boosted": {"rounds": 3},
    "boosted, input": {"kv_from": "input", "gate": "head"},
    "boosted, shared": {"kv_from": "shared", "gate": "scalar"},
    "boosted, no gate": {"gate": "none", "query_from": "input"},
}
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"n_kv_heads": 2},
    "shift": {"shift": True, "causal": True},
    "no bias": {"bias": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("option", OPTIONS)
def test_both_predictions_hold_in_every_layer(kind, option):
    name = kind.split(",")[0]
    layer = make_attention(name, 16, 4, **KINDS[kind], **OPTIONS[option])
    x, target = torch.randn(2, 2, 6, 16)
    loss = lambda: (layer(x) - target).square().sum()
    rounds = routing(layer, loss)
    assert len(rounds) == len(layer.explain(x).rounds)
    for one, known in zip(rounds, layer.explain(x).rounds, strict=True):
        torch.testing.assert_close(one.weights, known.weights)
        torch.testing.assert_close(one.score_gradient, one.predicted_score_gradient, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(one.value_gradient, one.predicted_value_gradient, rtol=1e-10, atol=1e-12)
        assert one.score_gradient.sum(-1).abs().max() < 1e-12
        assert one.score_gradient.abs().max() > 1e-3
    assert "attend_heads" not in vars(layer) and not layer._forward_pre_hooks


def test_the_score_is_the_scaled_product_of_query_and_key():
    """The measured gradient, through a mask that is added to the scores."""
    layer, x = MultiHeadAttention(16, 4, causal=True), torch.randn(2, 6, 16)
    bias = torch.zeros(2, 4, 6, 6, requires_grad=True)
    (by_mask,) = torch.autograd.grad(layer(x, mask=bias).square().sum(), bias)
    (one,) = routing(layer, lambda: layer(x).square().sum())
    torch.testing.assert_close(one.score_gradient, by_mask)
    heads = [split_heads(part(x), 4) for part in (layer.query, layer.key)]
    torch.testing.assert_close(one.weights, attention_weights(*heads, causal=True))


def test_twicing_adds_the_gradients_of_its_rounds():
    layer, x = make_attention("twicing", 16, 4), torch.randn(2, 6, 16)
    bias = torch.zeros(2, 4, 6, 6, requires_grad=True)
    (by_mask,) = torch.autograd.grad(layer(x, mask=bias).square().sum(), bias)
    first, second = routing(layer, lambda: layer(x).square().sum())
    torch.testing.assert_close(first.score_gradient + second.score_gradient, by_mask)


@pytest.mark.parametrize("attention", ["multi_head", "twicing", "boosted", "linear"])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_language_model(attention, positions):
    if (attention, positions) == ("linear", "rotary"):
        pytest.skip("elu features take no rotation")
    shape = dict(vocab_size=11, max_length=8, d_model=16, n_heads=2, n_layers=2)
    model = LanguageModel(ModelConfig(attention=attention, positions=positions, **shape), dtype=F64)
    tokens = torch.randint(11, (3, 8))
    loss = lambda: model(tokens[:, :-1], tokens[:, 1:])
    for block in model.blocks:
        before = loss()
        for one in routing(block.attention, loss):
            torch.testing.assert_close(one.score_gradient, one.predicted_score_gradient, rtol=1e-9, atol=1e-14)
            torch.testing.assert_close(one.value_gradient, one.predicted_value_gradient, rtol=1e-9, atol=1e-14)
        assert torch.equal(before, loss())


def test_a_mask_and_a_query_that_may_attend_to_nothing():
    layer, x = MultiHeadAttention(8, 2), torch.randn(1, 4, 8)
    mask = torch.rand(4, 4) < 0.6
    mask[2], mask[0, 0] = False, True
    (one,) = routing(layer, lambda: layer(x, mask=mask).square().sum())
    torch.testing.assert_close(one.score_gradient, one.predicted_score_gradient)
    assert not one.score_gradient[:, :, ~mask].any() and one.score_gradient.isfinite().all()


def test_a_context_has_more_keys_than_there_are_queries():
    layer, x, context = MultiHeadAttention(8, 2), torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    (one,) = routing(layer, lambda: layer(x, context=context).square().sum())
    assert one.weights.shape == (2, 2, 3, 5) and one.values.shape == (2, 2, 5, 4)
    torch.testing.assert_close(one.score_gradient, one.predicted_score_gradient)


def test_frozen_weights_and_single_precision():
    layer, x = make_attention("boosted", 16, 4, dtype=torch.float32).requires_grad_(False), torch.randn(2, 5, 16)
    rounds = routing(layer, lambda: layer(x.float()).square().sum())
    for one in rounds:
        assert one.score_gradient.dtype == torch.float32
        torch.testing.assert_close(one.score_gradient, one.predicted_score_gradient, rtol=1e-3, atol=1e-5)


# ---------------------------------------------------------------- chains


def test_the_sticky_chain_is_the_published_one():
    P = sticky_transition()
    torch.testing.assert_close(P.sum(1), torch.ones(8))
    row = torch.tensor([0.3498, 0.1660, 0.0830, 0.0553, 0.0415, 0.0553, 0.0830, 0.1660])
    torch.testing.assert_close(P[0], row, atol=6e-5, rtol=0)
    assert abs(torch.special.entr(P[0]).sum().item() - 1.8292) < 1e-4
    torch.testing.assert_close(P, torch.stack([P[0].roll(i) for i in range(8)]))
    torch.testing.assert_close(sticky_transition(2, 0.0), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


def test_the_forward_algorithm_is_enumeration():
    n, T = 3, 6
    rng = torch.Generator().manual_seed(0)
    simplex = lambda *shape: torch.rand(*shape, generator=rng).softmax(-1)
    start, transition, likelihood = simplex(n), simplex(n, n), torch.rand(2, T, n, generator=rng)
    found = forward_algorithm(start, transition, likelihood)
    assert found.shape == (2, T, n)
    for B, t in itertools.product(range(2), range(T)):
        expected = torch.zeros(n)
        for path in itertools.product(range(n), repeat=t + 1):
            p = start[path[0]] * math.prod(transition[a, b].item() for a, b in itertools.pairwise(path))
            expected[path[-1]] += p * math.prod(likelihood[B, i, a].item() for i, a in enumerate(path))
        torch.testing.assert_close(found[B, t], expected / expected.sum(), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- bad input

ONES = torch.ones(2, 3, dtype=F64)


def unnormalised():
    layer = make_attention("linear", 4, 2, feature_map="identity")
    return routing(layer, lambda: layer(torch.randn(1, 3, 4)).sum())


def attends_elsewhere():
    class Mean(MultiHeadAttention):
        def estimate(self, inputs):
            return inputs.x.mean(1, keepdim=True).expand_as(inputs.x)

    layer = Mean(4, 2)
    return routing(layer, lambda: layer(torch.randn(1, 3, 4)).sum())


def in_training_with_dropout():
    layer = MultiHeadAttention(4, 2, dropout=0.5)
    return routing(layer, lambda: layer(torch.randn(1, 3, 4)).sum())


def run_twice():
    layer = MultiHeadAttention(4, 2)
    return routing(layer, lambda: (layer(torch.randn(1, 3, 4)) + layer(torch.randn(1, 3, 4))).sum())


def another_layer():
    layer, other = MultiHeadAttention(4, 2), MultiHeadAttention(4, 2)

    def loss():
        layer(torch.randn(1, 3, 4))
        return other(torch.randn(1, 3, 4)).sum()

    return routing(layer, loss)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: routing_law(ONES.long(), ONES), "weights"),
        (lambda: routing_law(ONES, ONES[:1]), "b"),
        (lambda: routing_law(ONES, ONES.float()), "b"),
        (lambda: routing(torch.nn.Linear(2, 2), lambda: 0), "layer"),
        (lambda: routing(MultiHeadAttention(4, 2), 3), "loss"),
        (unnormalised, "layer"),
        (attends_elsewhere, "layer"),
        (in_training_with_dropout, "layer"),
        (run_twice, "loss"),
        (another_layer, "loss"),
        (lambda: routing(MultiHeadAttention(4, 2), lambda: torch.ones(())), "loss"),
        (lambda: sticky_transition(1), "n_symbols"),
        (lambda: sticky_transition(8, -0.1), "self_entry"),
        (lambda: forward_algorithm(ONES[0], ONES, ONES), "likelihood"),
        (lambda: forward_algorithm(ONES[0], ONES, ONES[None]), "transition"),
        (lambda: forward_algorithm(ONES[0, :2], ONES, ONES[None]), "start"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()


def test_an_error_of_the_loss_leaves_the_layer_as_it_was():
    layer = MultiHeadAttention(4, 2)
    with pytest.raises(ZeroDivisionError):
        routing(layer, lambda: 1 / 0)
    assert "attend_heads" not in vars(layer) and not layer._forward_pre_hooks


def test_an_observation_that_no_state_emits_is_named():
    from gbattn.routing import forward_algorithm

    likelihood = torch.ones(1, 3, 2)
    likelihood[0, 1] = 0
    with refused("likelihood"):
        forward_algorithm(torch.tensor([0.5, 0.5]), torch.eye(2), likelihood)
