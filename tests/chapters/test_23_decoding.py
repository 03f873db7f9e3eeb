"""Chapter 23: the claims with their mutants, the rules against enumeration and sampling, first rounds, faults."""

import math
from functools import partial

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.decoding import (
    accept_clipped,
    accept_constrained,
    accept_exactly,
    accept_typical,
    binary_divergence,
    clipped_law,
    emitted_law,
    first_round,
    generate_with_draft,
    lifted_probability,
)
from gbattn.language_model import LanguageModel, ModelConfig
from small_models import F64, KINDS, LEARNED, ROTARY, V, model_of, tokens_of


def kl(h, q):
    return torch.special.xlogy(h, h / q).sum(-1)


class Guess:
    """A drawn draft p, model q and another law h on V tokens, a budget, and a lift of each token."""

    def __init__(self, seed, V, sharpness):
        self.rng = torch.Generator().manual_seed(seed)
        logits = sharpness * torch.randn(3, V, generator=self.rng, dtype=F64)
        logits[0] = logits[1] + logits[0] / 2
        self.p, self.q, self.h = logits.softmax(-1)
        self.V, self.delta = V, 10 ** (3 * torch.rand((), generator=self.rng).item() - 2.7)
        self.lifts = self.q + (1 - self.q) * torch.rand(V, generator=self.rng, dtype=F64) ** 2

    def laws(self, n):
        """Laws of any kind, n of them."""
        return (4 * torch.randn(n, self.V, generator=self.rng, dtype=F64)).softmax(-1)


guesses = st.builds(Guess, st.integers(0, 10**6), st.integers(2, 9), st.floats(0.3, 4))


def guess_and_check(g, accept):
    law, accepted = emitted_law(g.p, g.h, accept)
    return torch.cat([law, accepted[None]]), torch.cat([g.h, torch.minimum(g.p, g.h).sum()[None]])


@claim(guesses, tolerance=1e-9, mutant=lambda g: guess_and_check(g, lambda p, h, n: (accept_exactly(p, h, n)[0], h)))
def test_prop_guess_check(g):
    """What is written has the law h, and Σ min(p, h) is accepted. Mutant: h itself is drawn after a rejection."""
    return guess_and_check(g, accept_exactly)


def best_lift(g, divergence):
    """Of all laws within the budget none lifts the first token more; and the root spends the budget."""
    gamma = lifted_probability(g.q, g.delta)
    others = g.laws(300)
    ways = torch.linspace(0, 1, 21, dtype=F64)[:, None, None]
    near = (ways * others + (1 - ways) * g.q).flatten(0, 1)  # from q to other laws
    inside = divergence(near, g.q) <= g.delta
    left = (near * inside[:, None]).amax(0)
    below = gamma < 1
    spent = torch.where(below, (binary_divergence(gamma, g.q) - g.delta).abs(), 0)
    return torch.cat([left, spent]), torch.cat([gamma, torch.full_like(gamma, 1e-8)])


@claim(guesses, tolerance=1e-9, relation="<=", examples=30, mutant=lambda g: best_lift(g, lambda h, q: kl(h, q) / 3))
def test_prop_best_lift(g):
    """γ is the largest h_n within the budget, which it spends. Mutant: a budget of three."""
    return best_lift(g, kl)


def spends(g, half):
    """Below one half at most δ, above it more; always ln(1 + 2δ) at most."""
    q = torch.cat([g.q, 1 - g.q, torch.linspace(0.01, 0.99, 40, dtype=F64)])
    gamma = lifted_probability(q, g.delta, taylor=True)
    spent = binary_divergence(gamma, q) / g.delta
    above = (q >= half) & (gamma < 1)
    left = torch.cat([spent[gamma <= 0.5], 2 - spent[above], spent * g.delta])
    ones = torch.ones(len(left) - len(spent), dtype=F64)
    return left, torch.cat([ones, torch.full_like(spent, math.log1p(2 * g.delta))])


@claim(guesses, tolerance=1e-9, relation="<=", mutant=lambda g: spends(g, 0.2))
def test_thm_spends(g):
    """The published rule keeps its budget for γ ≤ ½, breaks it for q ≥ ½, never beyond ln(1 + 2δ). Mutant: q ≥ 0.2."""
    return spends(g, 0.5)


def test_no_factor_below_two_bounds_what_is_spent():
    q = torch.tensor([0.9, 0.99, 0.999], dtype=F64)
    budgets = ((1 - q) / (2 * q)).tolist()  # that lift just to 1
    share = [binary_divergence(lifted_probability(x, d, taylor=True), x) / d for x, d in zip(q, budgets)]
    assert share[0] < share[1] < share[2] < 2 and share[2] > 1.998


def lifted_law(g, replaced):
    """What a rule writes that lifts each proposal, and draws otherwise as `replaced` says."""

    def rule(p, q, proposed):
        gamma = g.lifts[proposed]
        h = (q * ((1 - gamma) / (1 - q[proposed]))).scatter(-1, proposed[None], gamma[None])
        probability, replacement = accept_exactly(p, h, proposed)
        return probability, replaced(h, replacement)

    return emitted_law(g.p, g.q, rule)


def between(g, replaced):
    law, accepted = lifted_law(g, replaced)
    over = g.p > g.q
    left = torch.cat([torch.minimum(g.p, g.q) - law, law - torch.maximum(g.p, g.q)])
    left = torch.cat([left, (law - torch.minimum(g.p, g.lifts))[over].abs()])
    sums = torch.stack([kl(law, g.q) + kl(g.p, law) - kl(g.p, g.q), (accepted - torch.minimum(g.p, law).sum()).abs()])
    left = torch.cat([left, sums])
    return left, torch.zeros_like(left)


@claim(guesses, tolerance=1e-9, relation="<=", examples=40, mutant=lambda g: between(g, lambda h, replacement: h))
def test_thm_between(g):
    """Any lift writes between draft and model, with its consequences. Mutant: h is drawn after a rejection."""
    return between(g, lambda h, replacement: replacement)


def not_written(g, budget):
    """A uniform draft of K of V tokens is copied, and ln V/K exceeds every budget for large V."""
    V = 4 * g.V
    gamma = lifted_probability(torch.tensor([1 / V], dtype=F64), g.delta)
    K = min(V, math.ceil(1 / gamma.item()))
    q = torch.full((V,), 1 / V, dtype=F64)
    p = torch.zeros(V, dtype=F64)
    p[:K] = 1 / K
    law, accepted = emitted_law(p, q, partial(accept_constrained, delta=g.delta))
    many = 1e12 / g.delta**4
    root = math.ceil(math.sqrt(many))
    fits = binary_divergence(torch.tensor(1 / root, dtype=F64), torch.tensor(1 / many, dtype=F64))
    far = [kl(law, q), accepted, (fits <= g.delta).to(F64), (torch.tensor(many / root, dtype=F64).log() > 10).to(F64)]
    return torch.stack(far), torch.tensor([budget(V, K, g.delta), 1.0, 1.0, 1.0], dtype=F64)


@claim(guesses, tolerance=1e-7, examples=20, mutant=lambda g: not_written(g, lambda V, K, delta: delta))
def test_prop_not_written(g):
    """KL(w‖q) is ln V/K, whatever the budget. Mutant: it is the budget."""
    return not_written(g, lambda V, K, delta: math.log(V / K))


def frontier(g, law):
    """Its objective is the least of all laws, for several prices t."""
    left, right = [], []
    others = torch.cat([g.laws(200), g.p[None], g.q[None], (g.p + g.q)[None] / 2])
    for t in (0.1, 0.5, 1.0, 3.0):
        best = law(g.p, g.q, t)
        others = torch.cat([others, 0.98 * best + 0.02 * g.laws(20)])
        price = lambda h, t=t: kl(h, g.q) - t * torch.minimum(g.p, h).sum(-1)
        left += [price(best), (best.sum() - 1).abs()]
        right += [price(others).min(), torch.tensor(1e-9, dtype=F64)]
    return torch.stack(left), torch.stack(right)


def mixed(p, q, t):
    a = 1 - math.exp(-t)
    return a * p + (1 - a) * q


@claim(guesses, tolerance=1e-9, relation="<=", examples=20, mutant=lambda g: frontier(g, mixed))
def test_thm_frontier(g):
    """The clipped law minimises KL − t Σ min(p, h). Mutant: a mixture of p and q."""
    return frontier(g, clipped_law)


# ---- The rules ----

RULES = {
    "exact": accept_exactly,
    "none": partial(accept_constrained, delta=0.0),
    "constrained": partial(accept_constrained, delta=0.1),
    "taylor": partial(accept_constrained, delta=0.4, taylor=True),
    "typical": accept_typical,
    "clipped": partial(accept_clipped, spread=0.7),
}


@pytest.mark.parametrize("name", RULES)
def test_what_is_sampled_is_what_is_enumerated(name):
    """2·10⁵ draws, by a χ² test; V = 6."""
    chi2 = pytest.importorskip("scipy.stats").chi2
    rng = torch.Generator().manual_seed(0)
    p, q = (1.5 * torch.randn(2, 6, generator=rng, dtype=F64)).softmax(-1)
    law, accepted = emitted_law(p, q, RULES[name])
    assert abs(law.sum() - 1) < 1e-12
    proposed = torch.multinomial(p, 200_000, replacement=True, generator=rng)
    probability, replacement = RULES[name](p.expand(6, 6), q.expand(6, 6), torch.arange(6))
    accept = torch.rand(200_000, generator=rng, dtype=F64) < probability[proposed]
    other = torch.multinomial(replacement, 200_000, replacement=True, generator=rng)  # (6, draws)
    written = proposed.where(accept, other[proposed, torch.arange(200_000)])
    found = torch.bincount(written, minlength=6)
    expected = 200_000 * law
    assert expected.min() > 5
    assert chi2.sf(((found - expected) ** 2 / expected).sum().item(), 5) > 1e-3
    assert abs(accept.double().mean() - accepted) < 0.01
    if name in ("exact", "none"):
        assert (law - q).abs().max() < 1e-9 and abs(accepted - torch.minimum(p, q).sum()) < 1e-9


def test_the_clipped_rule_writes_the_clipped_law():
    rng = torch.Generator().manual_seed(3)
    p, q = (2 * torch.randn(2, 40, 6, generator=rng, dtype=F64)).softmax(-1)
    for spread in (0, 0.3, 0.7, 2):
        law, _ = emitted_law(p, q, partial(accept_clipped, spread=spread))
        torch.testing.assert_close(law, clipped_law(p, q, spread), rtol=0, atol=1e-9)


def test_typical_acceptance_by_hand():
    rng = torch.Generator().manual_seed(4)
    p, q = (2 * torch.randn(2, 40, 6, generator=rng, dtype=F64)).softmax(-1)
    smaller = set()
    for a, b, law, share in zip(p.tolist(), q.tolist(), *emitted_law(p, q, accept_typical)):
        limits = (0.09, 0.3 * math.exp(sum(x * math.log(x) for x in b)))
        kept = [x if y > min(limits) else 0 for x, y in zip(a, b)]
        by_hand = [x + (1 - sum(kept)) * y for x, y in zip(kept, b)]  # a draw from q after a rejection
        assert law.tolist() == pytest.approx(by_hand) and share.item() == pytest.approx(sum(kept))
        smaller.add(limits[0] < limits[1])
    assert smaller == {False, True}  # each limit is the smaller one somewhere


def test_acceptance_does_not_fall_with_the_budget_nor_divergence_exceed_the_drafts():
    rng = torch.Generator().manual_seed(1)
    p, q = (2 * torch.randn(2, 300, 12, generator=rng, dtype=F64)).softmax(-1)
    for taylor in (True, False):
        accepted = []
        for delta in (0, 0.01, 0.1, 0.5, 2, 50):
            law, share = emitted_law(p, q, partial(accept_constrained, delta=delta, taylor=taylor))
            accepted.append(share)
            assert (kl(law, q) <= kl(p, q) + 1e-9).all()
        assert (torch.stack(accepted).diff(dim=0) >= -1e-12).all()
    assert torch.allclose(law, p, atol=1e-9)  # with the root, at that budget any proposal


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_certain_and_impossible_tokens(dtype):
    """q of 0 and 1 neither divide by zero nor lift the impossible."""
    q = torch.tensor([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0]], dtype=dtype)
    p = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.5, 0.5]], dtype=dtype)
    for delta in (0, 0.3):
        for proposed in (0, 1, 2):
            n = torch.full((2,), proposed)
            probability, replacement = accept_constrained(p, q, n, delta=delta)
            assert probability.isfinite().all() and torch.allclose(replacement.sum(-1), torch.ones(2, dtype=dtype))
        assert accept_constrained(p, q, torch.tensor([1, 2]), delta=delta)[0].tolist() == [0, 0]
    assert lifted_probability(torch.tensor([0.0, 1.0], dtype=dtype), 0.2).tolist() == [0, 1]


def test_the_readme_of_the_paper():
    gamma = lifted_probability(torch.tensor(0.35, dtype=F64), 0.211, taylor=True)
    spent = binary_divergence(gamma, torch.tensor(0.35, dtype=F64))
    assert abs(gamma - 0.66) < 0.005 and abs(spent - 0.198) < 0.001
    assert abs(0.35 / 0.802 - 0.44) < 0.005 and abs(gamma / 0.802 - 0.82) < 0.005


def test_the_ends_of_the_frontier():
    rng = torch.Generator().manual_seed(2)
    p, q = torch.randn(2, 40, 7, generator=rng, dtype=F64).softmax(-1)
    assert torch.allclose(clipped_law(p, q, 0), q, atol=1e-12)
    assert torch.allclose(clipped_law(p, q, 50), p, atol=1e-9)


# ---- Models ----

SHAPE = dict(vocab_size=13, max_length=24, d_model=8, n_heads=2)


@pytest.mark.parametrize(
    "options",
    [
        dict(attention="boosted", n_layers=2, tie_embeddings=False),
        dict(attention="boosted", attention_options=dict(rounds=3, kv_from="input"), positions="rotary"),
        dict(n_layers=2, overrides={1: {"attention": "boosted"}}),
    ],
    ids=str,
)
def test_a_first_round_shares_its_weights_and_guesses_for_its_model(options):
    model = LanguageModel(ModelConfig(**SHAPE | options), dtype=F64)
    draft = first_round(model)
    own = dict(model.named_parameters())
    assert all(own[name] is weight for name, weight in draft.named_parameters())
    assert not any("corrections" in name for name, _ in draft.named_parameters())
    tokens = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3)
        for layer in (block.attention for block in model.blocks):
            for correction in getattr(layer, "corrections", []):
                correction.value.weight.zero_()
                correction.value.bias.zero_()
    with torch.no_grad():
        assert torch.allclose(draft(tokens), model(tokens), atol=1e-12)  # no correction, one law
    said = model.generate(tokens, 8, temperature=0)
    for rule in (None, partial(accept_constrained, delta=0.5)):
        assert torch.equal(generate_with_draft(model, draft, tokens, 8, temperature=0, accept=rule), said)


def test_a_rule_of_ones_own():
    """A budget beyond all bounds copies the draft; a budget of none is the default."""
    model, draft = (LanguageModel(ModelConfig(**SHAPE, init_std=0.6), seed=s, dtype=F64) for s in (0, 1))
    tokens = torch.randint(13, (3, 4), generator=torch.Generator().manual_seed(0))
    pieces = []
    copies = partial(accept_constrained, delta=1e3)
    generate_with_draft(model, draft, tokens, 8, accept=copies, stream=pieces.append)
    assert [piece.shape[1] for piece in pieces] == [4, 4]
    exact = generate_with_draft(model, draft, tokens, 8, seed=4)
    assert torch.equal(generate_with_draft(model, draft, tokens, 8, seed=4, accept=RULES["none"]), exact)


# ---- Writing with a draft ----

FORGETFUL = [k for k in KINDS if k not in ("linear", "shifted")]


def drafted(kind, positions="learned"):
    """A model, another that is like it, and prompts with padding on the left."""
    models = [model_of(kind, positions, seed=seed) for seed in (0, 1)]
    with torch.no_grad():  # near the other, so that some are accepted
        for a, b in zip(models[1].parameters(), models[0].parameters()):
            a.mul_(0.03).add_(0.97 * b)
    return *models, tokens_of(3, 7), dict(lengths=torch.tensor([7, 1, 4]))


@pytest.mark.parametrize(("kind", "positions"), LEARNED + ROTARY)
def test_greedy_with_a_draft_is_greedy(kind, positions):
    model, draft, tokens, options = drafted(kind, positions)
    options |= dict(temperature=0)
    wanted, pieces = model.generate(tokens, 12, **options), []
    for cache in [False] + [True] * (kind in FORGETFUL):
        for n_draft in (1, 4, 30):
            more = options | dict(cache=cache, n_draft=n_draft, stream=pieces.append)
            assert torch.equal(generate_with_draft(model, draft, tokens, 12, **more), wanted)
    assert {p.shape[1] for p in pieces} != {1}  # some were accepted


@pytest.mark.parametrize("options", [{}, dict(top_k=9, temperature=0.8, repetition_penalty=1.4)], ids=str)
@pytest.mark.parametrize("kind", FORGETFUL)
def test_the_tokens_do_not_depend_on_batch_cache_or_number_of_proposals(kind, options):
    model, draft, tokens, padded = drafted(kind)
    seeds = [8, 9, 8]
    write = partial(generate_with_draft, model, draft)
    first = write(tokens, 12, seed=seeds, **options | padded)
    for n_draft, cache in ((1, True), (3, False), (12, True), (5, "static")):
        more = dict(seed=seeds, n_draft=n_draft, cache=cache)
        assert torch.equal(write(tokens, 12, **more, **options | padded), first)
    for b, length in enumerate(padded["lengths"].tolist()):
        alone = write(tokens[b : b + 1, 7 - length :], 12, seed=seeds[b], **options)
        assert torch.equal(alone[0], first[b, 7 - length :])


def test_a_drafted_sequence_ends():
    model, draft, tokens, options = drafted("boosted")
    write = partial(generate_with_draft, model, draft)
    free = write(tokens, 12, **options)
    for end in free[:, 9].tolist():
        stopped = write(tokens, 12, end=end, **options)
        for row, whole in zip(stopped[:, 7:], free[:, 7:]):
            first = (whole == end).cumsum(0) - (whole == end).long()  # 0 up to the first end
            assert torch.equal(row, whole.where(first == 0, end)[: len(row)])
        done = (free[:, 7:] == end).any(1).all()
        longest = max((row == end).nonzero()[0].item() for row in free[:, 7:]) + 1 if done else 12
        assert stopped.shape[1] == 7 + longest


def test_the_law_with_a_draft_is_the_models():
    """All 5³ continuations, enumerated, against 2000 sequences."""
    chi2 = pytest.importorskip("scipy.stats").chi2
    model, draft = (model_of(seed=seed, vocab_size=5, scale=6) for seed in (0, 1))
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    prompt = torch.tensor([[0, 3]])
    with torch.no_grad():
        rows = torch.cat([prompt.expand(125, 2), every], 1)
        log_p = model(rows[:, :-1]).log_softmax(-1)[:, 1:]
    law = log_p.gather(2, every[..., None]).sum((1, 2)).exp()
    assert abs(law.sum() - 1) < 1e-9

    def statistic(**options):
        said = generate_with_draft(model, draft, prompt.expand(2000, 2), 3, seed=3, **options)[:, 2:]
        found = torch.bincount((said * torch.tensor([25, 5, 1])).sum(1), minlength=125).double()
        rare = 2000 * law < 5  # in one class
        pooled = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, 2000 * law)]
        return chi2.sf(((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum().item(), (~rare).sum().item())

    assert statistic(n_draft=2) > 1e-3
    always = lambda p, q, new: (torch.ones_like(p[..., 0]), q)
    assert statistic(accept=always) < 1e-9  # the mutant: each proposal is accepted


def test_a_compiled_model_and_draft_generate_compiled():
    torch._dynamo.reset()
    model, draft, tokens, _ = drafted("boosted")
    write, calls = partial(generate_with_draft, model, draft, tokens, 4, n_draft=2), []
    wanted = write()

    def backend(graph, inputs):
        return lambda *inputs: calls.append(1) or graph.forward(*inputs)

    for one in (model, draft):
        one.compile(backend=backend, fullgraph=True)
    assert torch.equal(write(), wanted) and len(calls) >= 6


@pytest.mark.parametrize("which", [0, 1])
def test_a_draft_that_is_not_finite_writes_nothing(which):
    models, tokens = [model_of("boosted"), model_of(seed=1)], tokens_of(2, 4)
    with torch.no_grad():
        models[which].blocks[1].ffn.down.bias[0] = math.nan
    with refused("model, or draft"):
        generate_with_draft(*models, tokens, 3)


def test_a_batch_of_none_with_a_draft():
    assert generate_with_draft(model_of(), model_of(), tokens_of(0, 4), 3).shape[0] == 0


def test_pieces_are_as_long_as_what_is_accepted():
    model, tokens, pieces = model_of("boosted"), tokens_of(2, 4), []
    said = generate_with_draft(model, model, tokens, 8, seed=1, n_draft=3, stream=pieces.append)
    assert [p.shape[1] for p in pieces] == [3, 3, 2] and torch.equal(said[:, 4:], torch.cat(pieces, 1))
    pieces.clear()
    stopped = generate_with_draft(
        model, model, tokens, 8, seed=1, n_draft=3, stream=lambda new: pieces.append(new) or len(pieces) == 2
    )
    assert torch.equal(stopped, said[:, :10])


@pytest.mark.parametrize(
    ("draft", "options", "argument"),
    [
        (lambda: 3, {}, "draft"),
        (lambda: model_of(vocab_size=9), {}, "draft"),
        (lambda: model_of(max_length=7), {}, "draft"),
        (lambda: model_of("linear"), {}, "draft"),
        (model_of, dict(n_draft=0), "n_draft"),
        (model_of, dict(accept=1), "accept"),
        (model_of, dict(stream=1), "stream"),
        (model_of, dict(repetition_penalty=0), "repetition_penalty"),
        (model_of, dict(end=V), "end"),
    ],
)
def test_a_refused_argument_is_named_before_a_model_runs(draft, options, argument, monkeypatch):
    draft = draft()
    monkeypatch.setattr(LanguageModel, "forward", lambda *_, **__: pytest.fail("computed"))
    with refused(argument):
        generate_with_draft(model_of(), draft, tokens_of(2, 4), 5, **options)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda p: lifted_probability(p, -1), "delta"),
        (lambda p: lifted_probability(p.long(), 1), "q"),
        (lambda p: clipped_law(p, p[:2], 1), "q"),
        (lambda p: clipped_law(p, p, -1), "spread"),
        (lambda p: emitted_law(p.long(), p, accept_exactly), "p"),
        (lambda p: emitted_law(p, p[:2], accept_exactly), "q"),
        (lambda p: accept_typical(p, p[:2], torch.tensor(0)), "q"),
        (lambda p: accept_typical(p, p, torch.tensor(0.5)), "proposed"),
        (lambda p: accept_constrained(p, p, torch.zeros(1).long(), delta=1), "proposed"),
        (lambda p: accept_typical(p, p, torch.tensor(0), alpha=0), "alpha"),
        (lambda p: accept_constrained(p, p, torch.tensor(0), delta=math.nan), "delta"),
        (lambda p: first_round(3), "model"),
        (lambda p: first_round(LanguageModel(ModelConfig(**SHAPE))), "model"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call(torch.ones(3, dtype=F64) / 3)
