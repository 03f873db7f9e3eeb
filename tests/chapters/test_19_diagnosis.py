"""Chapter 19: every measure on a planted case whose answer is known, and what its functions refuse."""

import math

import pytest
import torch
from refusals import refused

from diagnosed_models import KINDS, batch_of, model_of
from gbattn.attention import causal_mask
from gbattn.boosted import alignment, functional_gradient
from gbattn.corpora import Batch
from gbattn.diagnostics import (
    PATHS,
    SOURCES,
    descent,
    divergence,
    edited,
    effective_rank,
    head_scores,
    hull_distance,
    induction_scores,
    patched,
    replacement,
    rounds_of,
    stopped,
    token_losses,
    trace,
    with_gates,
    without_round,
)
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.layers import LAYERS, MultiHeadAttention, register
from gbattn.retrieval import encode, induction_layer


class Planted(MultiHeadAttention):
    """Two rounds, the second of which adds what is planted."""

    planted = None

    def estimate(self, inputs):
        F = super().estimate(inputs)
        c = torch.zeros_like(F) if self.planted is None else self.planted
        self.record_round(inputs, correction=c, estimate=F + c)
        return F + c


@pytest.fixture
def planted():
    register("planted")(Planted)
    yield model_of("planted")
    del LAYERS["planted"]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("size", [1e-5, -1e-5])
def test_a_correction_that_is_the_negative_gradient_has_cosine_one(planted, layer, size):
    batch, attention = batch_of(), planted.blocks[layer].attention
    u, _ = functional_gradient(attention, lambda: planted(*batch, reduction="sum"))
    attention.planted = -size * u
    found = descent(planted, batch, layer, generator=torch.Generator().manual_seed(0))
    sign = math.copysign(1, size)
    torch.testing.assert_close(found["cosine"], torch.full((4, 16), sign, dtype=torch.float64))
    torch.testing.assert_close(found["first_order"], -size * u.square().sum(-1))
    torch.testing.assert_close(found["change"].sum(), found["first_order"].sum(), rtol=1e-3, atol=0)
    assert sign * found["change"].sum() < 0
    torch.testing.assert_close(found["gradient_change"].sum(), -abs(found["change"].sum()), rtol=1e-3, atol=0)
    assert found["shuffled_cosine"].mean().abs() < 0.3 and found["random_cosine"].mean().abs() < 0.1
    assert found["random_change"].sum().abs() < found["change"].sum().abs() / 2


def test_a_correction_of_half_of_the_features_is_judged_by_that_half(planted):
    """The negative gradient in half of the features and zero in the others: no step of these features is steeper."""
    batch, attention = batch_of(), planted.blocks[1].attention
    u, _ = functional_gradient(attention, lambda: planted(*batch, reduction="sum"))
    half = torch.cat([torch.zeros_like(u[..., 8:]), u[..., 8:]], -1)
    attention.planted = -1e-5 * half
    found = descent(planted, batch, 1, generator=torch.Generator().manual_seed(0))
    assert alignment(-half, u).max() < 0.99
    for name in ("cosine", "gradient_cosine"):
        torch.testing.assert_close(found[name], torch.ones(4, 16, dtype=torch.float64))
    for name in ("first_order", "change"):
        torch.testing.assert_close(found[f"gradient_{name}"], found[name])
    # A random step keeps to them: its first order is length × length × cosine in the half.
    lengths = 1e-5 * half.square().sum(-1)
    torch.testing.assert_close(found["random_first_order"], -lengths * found["random_cosine"])


def test_a_correction_that_is_the_residual_removes_it(planted):
    batch, attention = batch_of(), planted.blocks[1].attention
    (_, (first, _)) = trace(planted, batch.inputs)
    attention.planted = first.residual - first.estimate
    found = descent(planted, batch, 1)
    torch.testing.assert_close(found["residual_cosine"], torch.ones(4, 16, dtype=torch.float64))
    assert found["residual_falls"].all()
    attention.planted = 2.1 * attention.planted  # beyond the other side
    assert not descent(planted, batch, 1)["residual_falls"].any()


@pytest.mark.parametrize("kind", ["residual", "twicing", "three rounds"])
def test_the_change_is_that_of_the_loss_between_two_stops(kind):
    model, batch = model_of(*KINDS[kind]), batch_of()
    for m in range(1, len(trace(model, batch.inputs)[0])):
        losses = []
        for last in (m - 1, m):
            with edited(model, {0: stopped(last)}):
                losses.append(token_losses(model, batch).detach())
        found = descent(model, batch, 0, round=m)
        torch.testing.assert_close(found["change"], losses[1] - losses[0])
        loss = lambda: model(*batch, reduction="sum")
        u, seen = functional_gradient(model.blocks[0].attention, loss, round=m - 1)
        step = seen.rounds[m].estimate - seen.rounds[m - 1].estimate
        torch.testing.assert_close(found["first_order"], (u * step).sum(-1).detach())


def test_the_twicing_control_of_a_twicing_layer_is_its_own_correction():
    found = descent(model_of("twicing"), batch_of(), 1)
    torch.testing.assert_close(found["twicing_cosine"][:, 1:], found["cosine"][:, 1:])  # at place 0 both are 0
    torch.testing.assert_close(found["twicing_change"], found["change"])


def test_controls_have_the_size_of_the_correction_and_come_from_the_seed():
    model, batch = model_of(), batch_of()
    once, again, other = (descent(model, batch, 0, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    for name in once:  # twicing has no correction at place 0
        torch.testing.assert_close(once[name], again[name], equal_nan=name == "twicing_cosine")
    assert not torch.equal(once["random_change"], other["random_change"])
    down = once["gradient_first_order"]
    assert (down <= once["first_order"] + 1e-12).all() and (down <= once["random_first_order"] + 1e-12).all()


@pytest.fixture(scope="module")
def by_hand():
    """The layer of chapter 9 in a language model: it writes what came next into the third block."""
    V, T = 150, 32
    layer = induction_layer(V, T)
    shape = dict(max_length=T, d_model=layer.d_model, n_layers=1, n_heads=1, attention="boosted")
    config = ModelConfig(vocab_size=V, **shape, norm="none", ffn="none", tie_embeddings=False, final_norm=False)
    model = LanguageModel(config)
    (block,) = model.blocks
    block.attention = layer
    code = encode(torch.arange(T)[None] % V, V, T)[0]
    with torch.no_grad():
        model.token_embedding.weight.copy_(torch.eye(V, layer.d_model))
        model.position_embedding.weight.copy_(code[:T] * (torch.arange(layer.d_model) > V))
        out = layer.out.weight[:V].clone()
        layer.out.weight.zero_()
        layer.out.weight[V + 3 : 2 * V + 3] = out
        model.head.weight.zero_()
        model.head.weight[:, V + 3 : 2 * V + 3] = 12 * torch.eye(V)
    return model


def test_a_hand_set_induction_head_has_score_one(by_hand):
    """But where chance repeats a token, and at place 0, which is labelled with its own token, as none is before it."""
    ((before, match),) = induction_scores(by_hand, length=16, sequences=40)
    tokens = torch.randint(150, (40, 16), generator=torch.Generator().manual_seed(0)).repeat(1, 2)
    label = torch.cat([tokens[:, :1], tokens[:, :-1]], 1)
    matches = (label[:, None] == tokens[..., None]).tril()[:, 16:].sum(-1)
    assert match[0] == pytest.approx((1 / matches).mean().item(), abs=1e-3) and match[0] > 0.9
    assert before[0] < 0.02
    ((_, match),) = induction_scores(by_hand, length=2, sequences=200)
    assert match[0] == pytest.approx(3 / 4, abs=0.02)


def test_its_first_round_attends_to_the_token_before(by_hand):
    ((first, second),) = trace(by_hand, batch_of(T=32, V=150).inputs)
    assert head_scores(first.weights)["previous"][:, 1:].min() > 0.99
    assert head_scores(second.weights)["previous"][:, 1:].mean() < 0.2


@pytest.mark.parametrize("source", SOURCES)
def test_the_path_through_its_keys_carries_everything(by_hand, source):
    once = torch.stack([torch.randperm(150, generator=torch.Generator().manual_seed(s))[:16] for s in range(8)])
    text = torch.cat([once, once, once[:, :1]], 1)
    batch = Batch(text[:, :32], text[:, 1:].contiguous())

    def loss(paths):
        with torch.no_grad(), edited(by_hand, {0: patched(paths, source)}):
            return token_losses(by_hand, batch)[:, 17:].mean().item()  # the second copy, but for its first

    whole = loss(())
    assert whole < 0.01
    for untouched in (("queries",), ("values",), ("gates",), ("queries", "values", "gates")):
        assert loss(untouched) == pytest.approx(whole, abs=1e-5)
    assert loss(("keys",)) > 3
    assert loss(("queries", "keys", "values")) == pytest.approx(loss(("keys",)), abs=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_edits_that_change_nothing(kind):
    model, batch = model_of(*KINDS[kind]), batch_of()
    expected = model(batch.inputs)
    layers = trace(model, batch.inputs)
    edits = [stopped(-1), lambda layer, inputs: rounds_of(layer, inputs)[-1].estimate]
    if kind in ("twicing", "shared", "multi-head"):
        edits.append(with_gates([torch.ones(16)] * (len(layers[0]) - 1)))
    if KINDS[kind][0] == "boosted":
        edits.append(patched(()))
    for edit in edits:
        with edited(model, dict.fromkeys(range(2), edit)):
            torch.testing.assert_close(model(batch.inputs), expected)
    assert torch.equal(model(batch.inputs), expected)


@pytest.mark.parametrize(
    ("kind", "reads"),
    [("residual", "queries keys values gates"), ("input", "queries gates"), ("shared", "queries"),
     ("queries of the input", "keys values gates")],
)  # fmt: skip
def test_a_path_is_there_where_the_layer_has_one(kind, reads):
    model, batch = model_of(*KINDS[kind]), batch_of()
    expected = model(batch.inputs)
    for path in PATHS:
        with edited(model, {0: patched((path,))}):
            assert torch.allclose(model(batch.inputs), expected) == (path not in reads.split())


def test_what_stands_in_for_an_estimate():
    F = torch.arange(24.0).view(4, 3, 2)
    assert torch.equal(replacement(F, "other"), F[[2, 3, 0, 1]])
    torch.testing.assert_close(replacement(F, "mean")[1], F[[0, 2, 3]].mean(0))
    assert not replacement(F, "zero").any()


def test_all_paths_hidden_is_a_round_that_read_another_window():
    model, batch = model_of(), batch_of()
    with edited(model, {0: patched(PATHS, "other")}):
        once = model(batch.inputs)
    mixed = batch.inputs.clone()
    mixed[:2] = batch_of(seed=1).inputs[:2]  # the first half changes, the second keeps its tokens
    with edited(model, {0: patched(PATHS, "other")}):
        assert not torch.allclose(model(mixed)[2:], once[2:])
    with edited(model, {0: patched(PATHS, "zero")}):
        zero = model(batch.inputs)
        torch.testing.assert_close(model(mixed)[2:], zero[2:])


def test_without_a_round_and_with_constant_gates_by_hand():
    model, batch = model_of(), batch_of()
    (first, second), _ = trace(model, batch.inputs)
    layer = model.blocks[0].attention
    embedded = model.token_embedding(batch.inputs) + model.position_embedding.weight
    gates = torch.rand(16, dtype=torch.float64)
    for edit, F in (
        (stopped(), first.estimate),
        (without_round(1), first.estimate),
        (without_round(0), second.gate * second.correction),
        (with_gates([gates]), first.estimate + gates * second.correction),
    ):
        with edited(model, {0: edit}):
            output = layer(model.blocks[0].attention_norm(embedded), causal=True)
        torch.testing.assert_close(output, layer.out(F))


def test_the_second_half_of_the_heads_is_a_correction_of_the_first():
    model, batch = model_of("multi_head"), batch_of()
    (first, second), _ = trace(model, batch.inputs)
    assert not first.estimate[..., 8:].any() and not second.correction[..., :8].any()
    torch.testing.assert_close(first.estimate + second.correction, second.estimate)
    assert first.weights.shape == second.weights.shape == (4, 2, 16, 16)


def test_an_edit_is_undone_whatever_happens():
    class Stop(Exception):
        pass

    model, batch = model_of(), batch_of()
    expected = model(batch.inputs)

    def fail(layer, inputs):
        raise Stop

    with pytest.raises(Stop), edited(model, {1: fail}):
        model(batch.inputs)
    assert torch.equal(model(batch.inputs), expected)


def test_scores_of_weights_that_are_known():
    T = 20
    uniform = causal_mask(T).double() / torch.arange(1, T + 1)[:, None]
    scores = head_scores(uniform[None, None])
    torch.testing.assert_close(scores["entropy"][0, :, 0], torch.arange(1, T + 1).double().log())
    torch.testing.assert_close(scores["own"][0, :, 0], 1 / torch.arange(1, T + 1).double())
    assert scores["previous"][0, 0, 0].isnan() and scores["received"][0, 4:, 0].isnan().all()
    torch.testing.assert_close(scores["received"][0, :4, 0], torch.ones(4, dtype=torch.float64))
    before = torch.eye(T).roll(1, 0).tril()
    before[0, 0] = 1
    scores = head_scores(before[None, None])
    assert scores["previous"][0, 1:].eq(1).all() and not scores["entropy"].any()
    assert not head_scores(torch.eye(T)[None, None])["previous"][0, 1:].any()


def test_the_distance_of_two_attentions():
    A = torch.eye(5)[None, None]
    B = A.roll(1, -1)
    assert not divergence(A, A).any()
    torch.testing.assert_close(divergence(A, B), torch.ones(1, 5, 1))
    half = divergence(A, (A + B) / 2)
    by_hand = math.sqrt(1 - (0.75 * math.log2(3) - 0.5))  # of (1, 0) and (½, ½): H(¾, ¼) − ½
    torch.testing.assert_close(half, torch.full((1, 5, 1), by_hand), rtol=1e-4, atol=1e-5)


def test_the_distance_to_a_hull():
    square = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    points = torch.tensor([[0.5, 0.5], [0.9, 0.1], [2.0, 0.5], [2.0, 2.0], [-0.3, 0.2], [1.0, 1.0]])
    found = hull_distance(points, square.expand(6, 5, 2))
    torch.testing.assert_close(found, torch.tensor([0, 0, 1, 2**0.5, 0.3, 0]), atol=1e-4, rtol=1e-4)
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(50, 30, 8, generator=rng)
    inside = (torch.randn(50, 1, 30, generator=rng).softmax(-1) @ values)[:, 0]
    assert hull_distance(inside, values).max() < 2e-3


def test_effective_ranks():
    assert effective_rank(torch.eye(7)) == pytest.approx(7)
    assert effective_rank(torch.ones(7, 7)) == pytest.approx(1, abs=1e-5)
    assert effective_rank(torch.diag(torch.tensor([1.0, 1, 0, 0]))) == pytest.approx(2)
    assert effective_rank(torch.cat([torch.eye(4), -torch.eye(4)])) == pytest.approx(4)
    assert effective_rank(torch.outer(torch.linspace(-1, 1, 9), torch.tensor([1.0, -2.0, 3.0]))) == pytest.approx(1)
    assert effective_rank(torch.zeros(5, 3)) == 0


WEIGHTS = torch.eye(4)[None, None]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: patched(("query",)), "paths"),
        (lambda: patched((), "noise"), "source"),
        (lambda: descent(model_of(), batch_of(), 0, round=0), "round"),
        (lambda: descent(model_of(), batch_of(), 0, round=2), "round"),
        (lambda: descent(model_of(), batch_of(), 2), "edits"),
        (lambda: head_scores(WEIGHTS[..., :3]), "weights"),
        (lambda: head_scores(WEIGHTS[0]), "weights"),
        (lambda: divergence(WEIGHTS, WEIGHTS[..., :3]), "second"),
        (lambda: hull_distance(torch.ones(2, 3), torch.ones(2, 4, 2)), "values"),
        (lambda: hull_distance(torch.ones(2, 3), torch.ones(2, 0, 3)), "values"),
        (lambda: effective_rank(torch.ones(3)), "matrix"),
        (lambda: induction_scores(model_of(), length=9), "tokens"),
        (lambda: induction_scores(model_of(), sequences=0), "sequences"),
    ],
)
def test_bad_input_is_refused_by_its_name(call, argument):
    with refused(argument):
        call()


def test_layers_that_cannot_be_diagnosed_are_refused():
    with refused("layer"):
        trace(model_of("multi_head", n_heads=1), batch_of().inputs)
    with refused("model"):
        with edited(model_of("twicing"), {0: patched(("keys",))}) as _, torch.no_grad():
            model = model_of("twicing")
            with edited(model, {0: patched(("keys",))}):
                model(batch_of().inputs)
    model = model_of()
    with refused("edits"):
        with edited(model, {0: stopped()}), edited(model, {0: stopped()}):
            pass
