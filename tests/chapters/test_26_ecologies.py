"""Chapter 26: the claims with their mutants, and what a lesson should not carry: other priors, zeros, faults."""

import math

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.ecologies import (
    TaskEcology,
    cell_averages,
    complexity,
    ecology_distance,
    equivalence_classes,
    merge_path,
    mix,
    optimal_path,
    partitions,
    quotient,
    split_thresholds,
    token_loss,
)

F64 = torch.float64


class World:
    """A drawn ecology of W states, 3 contexts and 4 tokens, and more where a claim needs it."""

    def __init__(self, seed, W):
        self.rng = torch.Generator().manual_seed(seed)
        self.W = W
        self.laws, self.prior = self.draw(W, 3, 4), self.draw(W, scale=0.7)
        self.ecology = TaskEcology(self.laws, self.prior, self.draw(3))
        rows = partitions(W)
        self.encoding = rows[torch.randint(len(rows), (), generator=self.rng)]

    def draw(self, *shape, scale=1.5):
        return (scale * torch.randn(*shape, generator=self.rng, dtype=F64)).softmax(-1)


worlds = st.builds(World, st.integers(0, 2**31), st.integers(2, 5))


def cross_entropy(ecology, encoding, decoder):
    """The loss by its definition, term by term."""
    total = 0.0
    for w, x in enumerate(encoding.tolist()):
        for c, d in enumerate(ecology.contexts.tolist()):
            for v, p in enumerate(ecology.laws[w, c].tolist()):
                if p > 0:
                    total -= ecology.prior[w].item() * d * p * math.log(decoder[x, c, v].item())
    return total


def stack(*numbers):
    return torch.stack([torch.as_tensor(x, dtype=F64) for x in numbers])


def parts_and_loss(p, weighted):
    """The loss of any decoder and of the best, and both sides of 'zero excess if and only if equal laws'."""
    X = int(p.encoding.max()) + 1
    decoder, parts = p.draw(X, 3, 4), token_loss(p.ecology, p.encoding)
    found = token_loss(p.ecology, p.encoding, decoder)
    gap, averages = found.gap, cell_averages(p.ecology, p.encoding)
    if not weighted:  # each cell counts alike
        gap = ((averages * (averages / decoder).log()).sum(-1) @ p.ecology.contexts).mean()
    # With copies of the first law in each cell, the excess goes.
    first = torch.stack([p.laws[(p.encoding == x).nonzero()[0, 0]] for x in p.encoding])
    equal = token_loss(TaskEcology(first, p.prior, p.ecology.contexts), p.encoding).excess
    alike = X == p.W
    left = stack(found.floor + found.excess + gap, parts.total, equal, float(parts.excess > 1e-12))
    loss, least = (cross_entropy(p.ecology, p.encoding, q) for q in (decoder, averages))
    return left, stack(loss, least, 0.0, float(not alike))


@claim(worlds, tolerance=1e-10, mutant=lambda p: parts_and_loss(p, False), examples=30)
def test_thm_excess(p):
    """Floor, excess and gap add up to the loss; excess is zero for equal laws only. Mutant: cells of equal mass."""
    return parts_and_loss(p, True)


def cheapest(p, classes_of):
    """The least complexity without excess over all partitions, and where it is attained."""
    copy = int(torch.randint(p.W - 1, (), generator=p.rng))
    laws = p.laws.clone()
    laws[-1] = laws[copy]
    laws[-1, 0] = p.laws[-1, 0]  # they differ in the first context only, which never comes
    ecology = TaskEcology(laws, p.prior, torch.tensor([0.0, 0.4, 0.6], dtype=F64))
    free = [e for e in partitions(p.W) if token_loss(ecology, e).excess < 1e-12]
    least = min(free, key=lambda e: complexity(ecology, e))
    by_theorem = classes_of(ecology)
    left = stack(complexity(ecology, by_theorem), *by_theorem)
    return left, stack(complexity(ecology, least), *least)


@claim(worlds, tolerance=1e-10, mutant=lambda p: cheapest(p, lambda e: torch.arange(p.W)), examples=20)
def test_thm_quotient(p):
    """The classes are the cheapest partition without excess. Mutant: the finest partition."""
    return cheapest(p, quotient)


def coarser_code(p):
    """A partition, and one made of it by joining its last two cells (or the same, where it has one)."""
    last = int(p.encoding.max())
    return torch.where(p.encoding == last, max(last - 1, 0), p.encoding)


def average(p, encoding, values):
    rows = [values[encoding == x] for x in encoding]
    weights = [p.prior[encoding == x] for x in encoding]
    return torch.stack([torch.einsum("w,wcv->cv", w, v) / w.sum() for w, v in zip(weights, rows)])


def round_of_cells(p, code):
    coarse, fine = coarser_code(p), p.encoding
    F = average(p, coarse, p.laws)
    smoothed = average(p, fine if code == "fine" else coarse, p.laws - F)
    finer = average(p, fine, p.laws)
    fall = token_loss(p.ecology, coarse).excess - token_loss(p.ecology, fine).excess
    divergence = p.prior @ (finer * (finer / F).log()).sum(-1) @ p.ecology.contexts
    again = average(p, coarse, p.laws - F)
    left = torch.cat([(F + smoothed).flatten(), stack(fall), again.flatten()])
    return left, torch.cat([finer.flatten(), stack(divergence), torch.zeros_like(again).flatten()])


@claim(worlds, tolerance=1e-10, mutant=lambda p: round_of_cells(p, "coarse"))
def test_prop_cells_round(p):
    """Averages over finer cells are one round on the residual. Mutant: a round with the same cells."""
    return round_of_cells(p, "fine")


def split(p, charged):
    """The fall of J_β for the last two cells, and the sign of it on both sides of β*."""
    fine, coarse = p.encoding.clone(), coarser_code(p)
    if fine.max() == 0:
        fine[-1] = 1
    X, beta = int(fine.max()) + 1, 0.5 * torch.rand((), generator=p.rng, dtype=F64)
    J = lambda e, b: token_loss(p.ecology, e).total + b * complexity(p.ecology, e)
    masses = torch.stack([p.prior[fine == x].sum() for x in (X - 2, X - 1)])
    m, share = masses.sum(), masses / masses.sum()
    A, B = cell_averages(p.ecology, fine)[-2:]
    M = share[0] * A + share[1] * B
    js = sum(s * ((Q * (Q / M).log()).sum(-1) @ p.ecology.contexts) for s, Q in zip(share, (A, B)))
    h = -(share * share.log()).sum()
    star = split_thresholds(p.ecology, fine)[X - 2, X - 1]
    fall = lambda b: J(coarse, b) - J(fine, b)
    left = stack(fall(beta), fall(star), float(fall(0.9 * star) > 0), float(fall(1.1 * star) < 0))
    return left, stack(m * (js - beta * charged(h)), 0.0, 1.0, 1.0)


@claim(worlds, tolerance=1e-10, mutant=lambda p: split(p, lambda h: math.log(2)))
def test_thm_split(p):
    """J_β falls by m (JS − β h), and β* is where it turns. Mutant: every split is charged one bit."""
    return split(p, lambda h: h)


def elsewhere(p, swapped):
    other = TaskEcology(p.draw(p.W, 2, 4), p.prior, p.draw(2))
    share = 0.05 + 0.4 * float(p.draw(2)[0])
    mixed = mix(p.ecology, other, 1 - share if swapped else share)
    every = (*token_loss(mixed, p.encoding)[:2], ecology_distance(mixed.laws, mixed.contexts)[0, 1])
    here, there = (
        (*token_loss(e, p.encoding)[:2], ecology_distance(e.laws, e.contexts)[0, 1]) for e in (p.ecology, other)
    )
    low, high = sorted([here[2].item(), there[2].item()])
    epsilon = (low + high) / 2
    star = (epsilon - here[2]) / (there[2] - here[2])
    both = [mix(p.ecology, other, float(star) + s) for s in (-1e-3, 1e-3)]
    sides = [ecology_distance(e.laws, e.contexts)[0, 1] > epsilon for e in both]
    rises = bool(there[2] > here[2])
    equal = stack(*every, float(sides[0]), float(sides[1]))
    wanted = stack(*[(1 - share) * a + share * b for a, b in zip(here, there)], float(not rises), float(rises))
    # The bound, for the code that merges the first two states and whatever else.
    code = p.encoding.clone()
    code[code == code[1]] = code[0]
    code = code.unique(return_inverse=True)[1]
    m = p.prior[:2].sum()
    pair = TaskEcology(other.laws[:2], p.prior[:2] / m, other.contexts)
    bound = m * token_loss(pair, torch.zeros(2, dtype=torch.int64)).excess
    return torch.cat([equal, -equal, stack(bound)]), torch.cat([wanted, -wanted, stack(token_loss(other, code).excess)])


@claim(worlds, tolerance=1e-10, relation="<=", mutant=lambda p: elsewhere(p, True))
def test_prop_elsewhere(p):
    """Mixing is linear, a* is where the pair passes ε, and the bound holds. Mutant: the shares are swapped."""
    return elsewhere(p, False)


def frozen(p, adapted):
    """A mixture of two experts, routed by the prompt and by h; in the mutant an adapter of h for the first prompt."""
    C, X = 3, int(p.encoding.max()) + 1
    h = p.encoding.clone()
    h[h == h[1]] = h[0]  # h merges the first two states
    h = h.unique(return_inverse=True)[1]
    pool = p.draw(3, 4)  # few laws, so that single prompts merge states too
    expert = pool[torch.randint(3, (2, C, X), generator=p.rng)]
    route = torch.randint(2, (C, X), generator=p.rng)
    laws = torch.stack([expert[route[c, h], c, h] for c in range(C)], 1)  # (W, C, V)
    if adapted:
        laws[:, 0] = p.draw(p.W, 4)
    same = lambda e: (e[:, None] == e).double()
    single = torch.stack([same(quotient(TaskEcology(laws[:, [c]]))) for c in range(C)]).prod(0)
    every = same(quotient(TaskEcology(laws)))
    fewer = same(quotient(TaskEcology(laws[:, :2])))
    loss = token_loss(p.ecology, torch.arange(p.W), laws).total
    bound = token_loss(p.ecology, h).total
    left = torch.cat([(every - single).abs().flatten(), (every - fewer).flatten(), same(h).flatten(), stack(bound)])
    zeros = torch.zeros(2 * p.W**2, dtype=F64)
    return left, torch.cat([zeros, every.flatten(), stack(loss)])


@claim(worlds, tolerance=1e-10, relation="<=", mutant=lambda p: frozen(p, True))
def test_prop_frozen(p):
    """All prompts refine each, and what h merges stays merged and costs its excess. Mutant: an adapter of h."""
    return frozen(p, False)


# ---------------------------------------------------------------- the functions


def world(seed=0, W=5):
    return World(seed, W)


def test_partitions_are_all_and_each_once():
    for n, bell in ((1, 1), (2, 2), (4, 15), (6, 203)):
        rows = partitions(n)
        assert rows.shape == (bell, n) and rows.dtype == torch.int64
        assert len({tuple(row.tolist()) for row in rows}) == bell
        first = rows.cummax(1).values  # each new cell has the next number
        assert (rows[:, 0] == 0).all() and (rows[:, 1:] <= first[:, :-1] + 1).all()


def test_refining_never_raises_the_excess():
    p = world(W=4)
    rows = partitions(4)
    excess = torch.stack([token_loss(p.ecology, row).excess for row in rows])
    same = rows[:, :, None] == rows[:, None, :]
    for i, j in ((i, j) for i in range(15) for j in range(15) if (same[j] | ~same[i]).all()):
        assert excess[i] <= excess[j] + 1e-12


def test_paths_end_in_one_cell_and_the_best_one_is_convex():
    p = world(3)
    greedy, best = merge_path(p.ecology), optimal_path(p.ecology)
    for path in (greedy, best):
        assert path[0].beta == 0 and path[0].excess < 1e-12 and not path[-1].encoding.any()
    assert [len(s.encoding.unique()) for s in greedy] == [5, 4, 3, 2, 1]
    betas = [s.beta for s in best]
    assert betas == sorted(betas)
    rows = [(token_loss(p.ecology, e).excess, complexity(p.ecology, e)) for e in partitions(5)]
    for stage, after in zip(best, [*betas[1:], betas[-1] + 1]):
        beta = (stage.beta + after) / 2
        least = min(x + beta * h for x, h in rows)
        assert abs(stage.excess + beta * stage.complexity - least) < 1e-12


def test_a_law_with_zeros_and_a_decoder_with_zeros():
    laws = torch.eye(2)[:, None]
    two = TaskEcology(laws)
    apart, joint = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    assert token_loss(two, apart).total == 0
    assert torch.isclose(token_loss(two, joint).excess, torch.tensor(math.log(2)))
    assert token_loss(two, apart, laws).total == 0
    assert token_loss(two, apart, laws.flip(0)).total == math.inf


def test_chains_of_near_states_are_one_class():
    x = torch.tensor([0.0, 1.0, 5.0, 2.0, 3.0, 9.0, 5.5])
    distance = (x[:, None] - x).abs()
    assert equivalence_classes(distance, 1.0).tolist() == [0, 0, 1, 0, 0, 2, 1]
    assert equivalence_classes(distance).tolist() == list(range(7))
    line = torch.arange(40.0)
    assert not equivalence_classes((line[:, None] - line).abs(), 1.0).any()


def test_gradients_reach_the_decoder_and_dtypes_are_those_of_the_laws():
    p = world()
    logits = torch.zeros(5, 3, 4, dtype=F64, requires_grad=True)
    loss = token_loss(p.ecology, torch.arange(5), logits.softmax(-1)).total
    (gradient,) = torch.autograd.grad(loss, logits)
    weights = p.prior[:, None, None] * p.ecology.contexts[:, None]
    assert torch.allclose(gradient, weights * (0.25 - p.laws), atol=1e-12)
    small = TaskEcology(p.laws.float())
    assert token_loss(small, p.encoding).total.dtype == torch.float32
    assert small.prior.dtype == small.contexts.dtype == torch.float32


LAWS = torch.full((2, 1, 2), 0.5)
TWO = TaskEcology(LAWS)
ONE = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: TaskEcology(LAWS[0]), "laws"),
        (lambda: TaskEcology(LAWS + 0.1), "laws"),
        (lambda: TaskEcology(LAWS, prior=torch.ones(3) / 3), "prior"),
        (lambda: TaskEcology(LAWS, prior=torch.tensor([1.0, 0.0])), "prior"),
        (lambda: TaskEcology(LAWS, contexts=torch.ones(1).double()), "contexts"),
        (lambda: token_loss(LAWS, ONE), "ecology"),
        (lambda: token_loss(TWO, ONE.float()), "encoding"),
        (lambda: token_loss(TWO, ONE + 1), "encoding"),
        (lambda: token_loss(TWO, ONE, LAWS), "decoder"),
        (lambda: token_loss(TWO, ONE, 2 * LAWS[:1]), "decoder"),
        (lambda: complexity(TWO, ONE[:1]), "encoding"),
        (lambda: ecology_distance(LAWS, torch.ones(2)), "contexts"),
        (lambda: equivalence_classes(torch.ones(2, 3)), "distance"),
        (lambda: equivalence_classes(torch.ones(2, 2), -1.0), "tolerance"),
        (lambda: partitions(0), "n"),
        (lambda: mix(TWO, TWO, 1.5), "share"),
        (lambda: mix(TWO, TaskEcology(LAWS[:1]), 0.5), "second"),
        (lambda: mix(TWO, TaskEcology(LAWS, torch.tensor([0.3, 0.7])), 0.5), "second"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
