"""Chapter 9: the claims with their mutants, the hand-set layers, and what their functions refuse."""

import itertools
import json
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.attention import attend
from gbattn.boosted import GradientBoostedAttention
from gbattn.layers import MultiHeadAttention
from gbattn.retrieval import (
    attention_view,
    encode,
    induction_layer,
    induction_targets,
    recall_batch,
    retrieval_posterior,
    train_together,
)
from gbattn.twicing import TwicingAttention

SOURCES = ("residual", "input", "shared")


pytestmark = pytest.mark.usefixtures("in_double_precision")


class Problem:
    """Sequences (B, T) over V tokens for a layer of a length of T or more, and a sharpness that it allows."""

    def __init__(self, seed, V, T, more, extra):
        rng = torch.Generator().manual_seed(seed)
        self.V, self.length = V, T + more
        self.tokens = torch.randint(V, (5, T), generator=rng)
        self.beta = math.log(4 * self.length**2) + extra

    def layer(self, kv_from):
        return induction_layer(self.V, self.length, kv_from=kv_from, sharpness=self.beta)

    def off(self, layer, kv_from):
        """How far each place is off, in the sum of absolute values."""
        found = layer(encode(self.tokens, self.V, self.length, kv_from=kv_from))[:, 1:]
        assert not found[..., self.V :].any()
        return (found[..., : self.V] - induction_targets(self.tokens, self.V)).abs().sum(-1)


problems = st.builds(
    Problem, st.integers(0, 2**31), st.integers(1, 5), st.integers(4, 40), st.integers(0, 5), st.floats(0.0, 20.0)
)


# ---------------------------------------------------------------- claims


def labelled(p, spoil=lambda layer: None):
    layer = p.layer("residual")
    with torch.no_grad():
        spoil(layer)
    off = p.off(layer, "residual")
    return off, torch.full_like(off, (2 + 8 * p.beta) * p.length * math.exp(-p.beta))


def read_the_input(layer):
    layer.kv_from = "input"


def attend_to_itself(layer):
    place = slice(layer.d_model // 2 - 1, layer.d_model // 2 + 1)
    scale = layer.query.weight[place, place].norm() / math.sqrt(2)
    layer.query.weight[place, place] = scale * torch.eye(2)


def write_plus(layer):
    layer.value.weight.neg_()


@claim(problems, tolerance=1e-12, relation="<=", examples=30, mutant=lambda p: labelled(p, read_the_input))
def test_thm_induction(p):
    """Within the bound at every place. Mutant: keys and values of round 1 read the input."""
    return labelled(p)


@pytest.mark.parametrize("spoil", [attend_to_itself, write_plus], ids=lambda spoil: spoil.__name__)
def test_every_step_of_the_construction_is_needed(spoil):
    off, bound = labelled(Problem(0, 3, 30, 0, 10.0), spoil)
    assert off.max() > 0.9 > 100 * bound.max()


def pointed(p, own_place=True):
    sides = []
    for kv_from in ("input", "shared"):
        layer = p.layer(kv_from)
        if not own_place:
            with torch.no_grad():
                layer.query.weight[p.V + 1 : p.V + p.length + 2].zero_()
        sides.append(p.off(layer, kv_from))
    off = torch.stack(sides)
    return off, torch.full_like(off, 2 * p.length * math.exp(-p.beta))


@pytest.mark.parametrize("seed", range(10))
def test_a_pointer_finds_the_follower_too(seed):
    """Off by at most 2 T e^(−β) at every place, for both kinds."""
    off, bound = pointed(Problem(seed, 1 + seed % 5, 4 + 4 * seed, seed % 6, 2.0 * seed))
    assert (off <= bound + 1e-12).all()


def test_a_pointer_must_not_find_its_own_place():
    off, bound = pointed(Problem(0, 3, 30, 0, 12.0), own_place=False)
    assert off.max() > 0.5 > 100 * bound.max()


def posterior_mean(seed, power=2):
    """Attention against Bayes' rule, from normal densities, one feature after the other."""
    rng = np.random.default_rng(seed)
    N, D, noise, length = rng.integers(2, 7), rng.integers(1, 6), rng.uniform(0.3, 2), rng.uniform(0.5, 3)
    patterns = rng.standard_normal((N, D))
    patterns *= length / np.linalg.norm(patterns, axis=1, keepdims=True)
    queries = patterns[rng.integers(N, size=8)] + noise * rng.standard_normal((8, D))
    density = np.exp(-((queries[:, None] - patterns) ** 2) / (2 * noise**2)).prod(-1)
    expected = density / density.sum(1, keepdims=True) @ patterns
    q, k = torch.from_numpy(queries), torch.from_numpy(patterns)
    by_attention = attend(q[None, None], k[None, None], k[None, None], scale=noise**-power)[0, 0]
    weights = retrieval_posterior(q, k, noise ** (power / 2))
    return torch.stack([by_attention, weights @ k]), np.stack([expected, expected])


@claim(st.integers(0, 2**31), tolerance=1e-10, mutant=lambda seed: posterior_mean(seed, power=1))
def test_thm_posterior(seed):
    """Attention with β = 1/σ² is the posterior mean. Mutant: β = 1/σ."""
    return posterior_mean(seed)


def two_at_once(p, rounds=1):
    """The bound, and the largest squared error over all ordered pairs of N patterns."""
    seed, N, scale = p
    rng = np.random.default_rng(seed)
    patterns = np.linalg.qr(rng.standard_normal((N + 2, N)))[0].T
    i, j = np.array(list(itertools.permutations(range(N), 2))).T
    q, target = 2 * patterns[i] + patterns[j], patterns[i] + patterns[j]
    W = rng.standard_normal((N + 2, N + 2)) if seed % 2 else rng.uniform(0, 9) * np.eye(N + 2)
    weights = lambda scores: torch.from_numpy(scores).softmax(-1).numpy()
    F = scale * weights(q @ W.T @ patterns.T) @ patterns
    if rounds == 2:
        F = 2 * weights(30 * q @ patterns.T) @ patterns
        F = (F + 2 * weights(30 * (q - F) @ patterns.T) @ patterns) / 2
    return np.array([3 / 11]), ((F - target) ** 2).sum(-1).max(keepdims=True)


three_or_more = st.tuples(st.integers(0, 2**31), st.integers(3, 7), st.floats(-1, 4))


@claim(three_or_more, tolerance=1e-12, relation="<=", mutant=lambda p: two_at_once(p, rounds=2))
def test_prop_two_at_once(p):
    """One round is off by 3/11 somewhere. Mutant: two rounds."""
    return two_at_once(p)


def test_two_rounds_find_two_at_once():
    assert two_at_once((0, 5, 1.0), rounds=2)[1] < 1e-9


# ---------------------------------------------------------------- targets


def test_targets_by_hand():
    tokens = torch.tensor([[0, 1, 0, 2, 0, 1, 1]])
    expected = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0], [0, 1 / 2, 1 / 2], [1, 0, 0], [1 / 2, 1 / 2, 0]]
    torch.testing.assert_close(induction_targets(tokens, 3)[0], torch.tensor(expected))
    assert torch.equal(induction_targets(tokens.int(), 3), induction_targets(tokens, 3))
    assert not induction_targets(torch.zeros(2, 1, dtype=torch.long), 1).any()


def test_targets_depend_on_nothing_that_comes_later():
    tokens = torch.randint(4, (3, 20), generator=torch.Generator().manual_seed(0))
    other = tokens.clone()
    other[:, 11:] = (other[:, 11:] + 1) % 4
    first, second = induction_targets(tokens, 4), induction_targets(other, 4)
    assert torch.equal(first[:, :11], second[:, :11]) and not torch.equal(first, second)


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("kv_from", SOURCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_default_sharpness_is_right_everywhere(kv_from, dtype):
    torch.set_default_dtype(dtype)
    V, T = 3, 6
    words = torch.tensor(list(itertools.product(range(V), repeat=T)))
    layer, targets = induction_layer(V, T, kv_from=kv_from), induction_targets(words, V)
    found = layer(encode(words, V, T, kv_from=kv_from))[:, 1:, :V]
    assert found.dtype == dtype
    answer = found.argmax(-1, keepdim=True)
    match = targets.sum(-1) > 0
    torch.testing.assert_close(targets.gather(-1, answer)[..., 0][match], targets.amax(-1)[match])


@pytest.mark.parametrize("kv_from", SOURCES)
def test_a_layer_is_an_ordinary_boosted_one(kv_from):
    """It may be read, and it decodes from a cache what it computes at once."""
    layer = induction_layer(3, 12, kv_from=kv_from)
    assert type(layer) is GradientBoostedAttention and layer.n_heads == 1 and layer.causal
    width = {"residual": 2 * 3 + 4, "input": 3 + 2 * 12 + 3, "shared": 2 * 3 + 2 * 12 + 3}
    assert layer.d_model == width[kv_from]
    x = encode(torch.randint(3, (2, 12), generator=torch.Generator().manual_seed(0)), 3, 12, kv_from=kv_from)
    trace = layer.explain(x)
    torch.testing.assert_close(trace.output, layer(x))
    gates = trace.rounds[1].gate
    assert torch.equal(gates, gates[:1, :1].expand_as(gates))  # constant
    cache = layer.make_cache(2, 13)
    with torch.no_grad():
        steps = [layer(x[:, t : t + 1], cache=cache) for t in range(13)]
    torch.testing.assert_close(torch.cat(steps, 1), layer(x))


def test_the_first_round_attends_to_the_token_before():
    layer = induction_layer(4, 9)
    weights = layer.explain(encode(torch.arange(9)[None] % 4, 4, 9)).rounds[0].weights[0, 0]
    assert weights.argmax(-1).tolist() == [0, *range(9)]
    assert weights.amax(-1).min() > 0.99


def composed(layer, monkeypatch):
    """Which of query, key and value of place 5 depend on the token of place 1, in each round."""
    attended, attend_heads = [], layer.attend_heads
    note = lambda inputs, *qkv: attended.append(qkv) or attend_heads(inputs, *qkv)
    monkeypatch.setattr(layer, "attend_heads", note)
    x = torch.randn(1, 6, 8, generator=torch.Generator().manual_seed(0))
    layer(x)
    x[0, 1] += 1
    layer(x)
    at = lambda z: z.reshape(1, -1, 6, 4)[:, :, 5] if z.ndim == 4 else z[:, 5]
    before, after = attended[: len(attended) // 2], attended[len(attended) // 2 :]
    return [[not torch.equal(at(z), at(w)) for z, w in zip(*both)] for both in zip(before, after)]


NOTHING = [False, False, False]


@pytest.mark.parametrize("kv_from", SOURCES)
def test_the_table_of_compositions(kv_from, monkeypatch):
    layer = GradientBoostedAttention(8, 2, kv_from=kv_from, causal=True)
    assert composed(layer, monkeypatch) == [NOTHING, [True, kv_from == "residual", kv_from == "residual"]]


def test_twicing_composes_values_with_the_same_weights_and_one_round_nothing(monkeypatch):
    layer = TwicingAttention(8, 2, causal=True)
    first, second = layer.explain(torch.randn(1, 6, 8)).rounds
    assert torch.equal(first.weights, second.weights)
    assert composed(layer, monkeypatch) == [NOTHING, [False, False, True]]
    for layer in (MultiHeadAttention(8, 2, causal=True), TwicingAttention(8, 2, rounds=1, causal=True)):
        assert composed(layer, monkeypatch) == [NOTHING]


# ---------------------------------------------------------------- training


def test_recall_asks_for_what_a_key_stood_with():
    tokens, seen = recall_batch(50, 9, 4, generator=torch.Generator().manual_seed(0))
    assert tokens.shape == (50, 18) and seen.shape == (50, 9)
    asked, values = tokens[:, ::2], tokens[:, 1::2]
    assert set(asked.unique().tolist()) == {0, 1, 2, 3} and set(values.unique().tolist()) == {4, 5, 6, 7}
    for key, value, known in zip(asked.tolist(), values.tolist(), seen.tolist()):
        for p in range(9):
            assert known[p] == (key[p] in key[:p])
            assert not known[p] or value[p] == value[key.index(key[p])]
    assert (values[0] != values[1]).any()  # a map of its own


def test_recall_once():
    tokens, seen = recall_batch(20, 10, 5, once=True, generator=torch.Generator().manual_seed(0))
    for half in tokens[:, ::2].split(5, 1):
        assert torch.equal(half.sort(1).values, torch.arange(5).expand(20, 5))
    assert not seen[:, :5].any() and seen[:, 5:].all()


@pytest.mark.parametrize("decay", [False, True])
def test_models_trained_together_are_models_trained_alone(decay):
    def build(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(GradientBoostedAttention(4, 2, causal=True), torch.nn.Linear(4, 1))

    loss = lambda model, x, y: (model(x) - y).square().mean()
    x, y = torch.randn(6, 2, 3, 5, 4), torch.randn(6, 2, 3, 5, 1)
    together, batches = [build(0), build(1)], iter(zip(x, y))
    seen = []
    for step in train_together(together, lambda: next(batches), loss, steps=6, lr=0.01, every=4, decay=decay):
        seen.append((step, loss(together[0], x[0, 0], y[0, 0]).item()))
    assert [step for step, _ in seen] == [4, 6] and seen[0][1] != seen[1][1]
    for s in (0, 1):
        alone = build(s)
        optimizer = torch.optim.Adam(alone.parameters(), lr=0.01)
        for step in range(6):
            optimizer.param_groups[0]["lr"] = 0.01 * (1 + math.cos(math.pi * step / 6)) / 2 if decay else 0.01
            optimizer.zero_grad()
            loss(alone, x[step, s], y[step, s]).backward()
            optimizer.step()
        for one, other in zip(alone.parameters(), together[s].parameters()):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- a view


def test_a_view_shows_each_round_and_escapes_its_tokens():
    layer = induction_layer(3, 2)
    rounds = {f"round {m}": each.weights[0, 0] for m, each in enumerate(layer.explain(encode(IDS[:, :2], 3, 2)).rounds)}
    page = attention_view(["⊢", "<b>", "a"], rounds, at=2)
    assert "&lt;b&gt;" in page and "<b>" not in page and page.count("<button") == 6
    assert json.loads(re.search("weights = (.*);", page)[1])[0] == rounds["round 0"].round(decimals=2).tolist()
    shown = [float(w) for w in re.findall(r"rgba\(204,121,167,([\d.]+)\)", page)]
    assert shown == [round(w, 2) for each in rounds.values() for w in each[2].tolist()]
    assert attention_view(["⊢", "<b>", "a"], rounds) == page  # the last by default


# ---------------------------------------------------------------- bad input

IDS = torch.zeros(2, 3, dtype=torch.long)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: induction_targets(IDS[0], 2), "tokens"),
        (lambda: induction_targets(IDS.double(), 2), "tokens"),
        (lambda: induction_targets(IDS + 2, 2), "tokens"),
        (lambda: induction_targets(IDS - 1, 2), "tokens"),
        (lambda: induction_targets(IDS, 0), "vocab_size"),
        (lambda: encode(IDS, 2, 2), "tokens"),
        (lambda: encode(IDS, 2, 3.0), "length"),
        (lambda: encode(IDS, 2, 3, kv_from="x"), "kv_from"),
        (lambda: induction_layer(0, 3), "vocab_size"),
        (lambda: induction_layer(2, -1), "length"),
        (lambda: induction_layer(2, 3, sharpness=0), "sharpness"),
        (lambda: induction_layer(2, 3, kv_from=None), "kv_from"),
        (lambda: recall_batch(0, 2, 2), "batch"),
        (lambda: recall_batch(1, 2.0, 2), "pairs"),
        (lambda: recall_batch(1, 2, 0), "keys"),
        (lambda: recall_batch(1, 5, 2, once=True), "pairs"),
        (lambda: recall_batch(1, 4, 2, once=1), "once"),
        (lambda: next(train_together([], tuple, sum, steps=1, lr=0.1)), "models"),
        (lambda: next(train_together([torch.nn.Linear(1, 1)], tuple, sum, steps=0, lr=0.1)), "steps"),
        (lambda: next(train_together([torch.nn.Linear(1, 1)], tuple, sum, steps=1, lr=0)), "lr"),
        (lambda: attention_view("ab", {"round": torch.ones(2, 3)}), "rounds['round']"),
        (lambda: attention_view("ab", {}), "tokens, rounds"),
        (lambda: attention_view("ab", {"round": torch.eye(2)}, at=2), "at"),
        (lambda: retrieval_posterior(torch.ones(3), torch.ones(3), 1), "patterns"),
        (lambda: retrieval_posterior(torch.ones(3), torch.ones(2, 4), 1), "patterns"),
        (lambda: retrieval_posterior(torch.ones(3).long(), torch.ones(2, 3), 1), "queries"),
        (lambda: retrieval_posterior(torch.ones(3), torch.ones(2, 3).float(), 1), "patterns"),
        (lambda: retrieval_posterior(torch.ones(3), torch.ones(2, 3), 0.0), "noise"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()


def test_patterns_of_any_length_and_queries_of_any_shape():
    rng = torch.Generator().manual_seed(0)
    queries, patterns = torch.randn(2, 3, 4, generator=rng), torch.randn(5, 4, generator=rng)
    expected = (-torch.cdist(queries, patterns[None]).square() / (2 * 0.7**2)).softmax(-1)
    torch.testing.assert_close(retrieval_posterior(queries, patterns, 0.7), expected)


def test_noise_beyond_the_dtype_is_named_and_little_noise_has_its_limit():
    from gbattn.retrieval import retrieval_posterior

    patterns = 1e10 * torch.eye(3, dtype=torch.float32)
    for noise in (5e-324, 1e-30, 1e200):
        with refused("noise"):
            retrieval_posterior(patterns, patterns, noise)
    assert torch.equal(retrieval_posterior(patterns, patterns, 1e-18), torch.eye(3, dtype=torch.float32))
    with refused("queries"):
        retrieval_posterior(1e20 * patterns, 1e20 * patterns, 1.0)
