"""The layers of the experiment `stability`: each differs from boosted attention in one thing."""

import math
from dataclasses import replace

import pytest
import torch

from gbattn.cost import attention_cost
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.records import Plan
from gbattn.language_model import LanguageModel
from gbattn.layers import MultiHeadAttention, make_attention


def trial(arm, seed=3):
    """The first layer of the model of an arm, and that of plain boosted attention, as a model starts them."""
    of = EXPERIMENTS["stability"]
    chosen = {a.name: a for a in of.arms}
    models = [LanguageModel(of.model_of(chosen[name]), seed=seed) for name in (arm, "boosted_residual")]
    return [model.blocks[0].attention.eval() for model in models]


def windows(seed=0):
    return torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(seed))


def test_the_trial_layers_differ_from_boosted_attention_in_one_thing_each():
    of = EXPERIMENTS["stability"]
    assert [arm.name for arm in of.arms] == [
        "boosted_residual",
        "boosted_zero_value",
        "boosted_qk_norm",
        "boosted_gate_bias",
    ]
    assert {one.train.learning_rate for one in of.runs()} == {0.016}
    warm = {one.arm.name: one for one in Plan("mini-warm").runs}["boosted_residual"]
    for one in of.runs():
        assert one.planned == 40
        assert replace(one.train, learning_rate=1, seed=0) == replace(warm.train, learning_rate=1, seed=0)
        assert one.corpus == warm.corpus
        assert replace(one.model, attention="boosted", attention_options={"kv_from": "residual"}) == warm.model
    for arm in of.arms[1:]:
        layer, plain = trial(arm.name)
        found, known = layer.state_dict(), plain.state_dict()
        assert found.keys() == known.keys()  # no weight more, none fewer
        changed = {name for name in found if not torch.equal(found[name], known[name])}
        assert (
            changed
            == {
                "boosted_zero_value": {"corrections.0.value.weight"},
                "boosted_qk_norm": set(),
                "boosted_gate_bias": {"corrections.0.gate.bias"},
            }[arm.name]
        )
        assert attention_cost(layer, 9) == attention_cost(plain, 9)


@torch.no_grad()
def test_a_correction_whose_values_start_at_zero_leaves_the_first_round_as_it_is():
    layer, plain = trial("boosted_zero_value")
    x = windows()
    first, second = layer.explain(x, causal=True).rounds
    assert torch.equal(second.estimate, first.estimate)
    assert not second.correction.any()
    first_alone = MultiHeadAttention(64, 4)
    first_alone.load_state_dict({k: v for k, v in layer.state_dict().items() if "corrections" not in k})
    assert torch.equal(layer(x, causal=True), first_alone(x, causal=True))
    assert not torch.equal(plain(x, causal=True), first_alone(x, causal=True))
    layer.reset_parameters(torch.Generator().manual_seed(1))  # on its own, too
    assert not layer.corrections[0].value.weight.any()


def test_a_correction_whose_values_start_at_zero_can_leave_zero():
    layer, _ = trial("boosted_zero_value")
    layer(windows(), causal=True).square().sum().backward()
    assert layer.corrections[0].value.weight.grad.abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"rotary": 100.0}, {"n_kv_heads": 2}, {"shift": True}])
@torch.no_grad()
def test_normalised_queries_and_keys_bound_every_score(options):
    """|q·k| / √K ≤ √K, whatever the weights: two attention weights of a query differ at most by a factor e^(2√K)."""
    bound = 2 * 16**0.5 + 1e-3
    spread = lambda of, x: max((r.weights.amax(-1) / r.weights.amin(-1)).log().max() for r in of.explain(x).rounds)
    for scale in (1, 1e4):
        torch.manual_seed(0)
        layer = make_attention("boosted_trial", 64, 4, qk_norm=True, **options)
        plain = make_attention("boosted", 64, 4, **options)
        plain.load_state_dict(layer.state_dict())
        x = scale * windows()
        assert spread(layer, x) <= bound
        assert torch.allclose(layer.explain(x).output, layer(x), rtol=1e-4, atol=1e-4 * scale)
    assert not spread(plain, x) <= bound
    cache = layer.make_cache(2, 9)
    parts = [layer(x[:, s], causal=True, cache=cache) for s in (slice(0, 4), slice(4, 9))]
    torch.testing.assert_close(torch.cat(parts, 1), layer(x, causal=True), rtol=1e-3, atol=1e-4 * scale)


@torch.no_grad()
def test_a_gate_whose_bias_starts_at_minus_two_starts_nearly_shut():
    layer, plain = trial("boosted_gate_bias")
    for of, start in ((layer, 1 / (1 + math.exp(2))), (plain, 0.5)):
        gate = of.explain(windows(), causal=True).rounds[1].gate
        torch.testing.assert_close(gate, torch.full_like(gate, start))
    assert round(1 / (1 + math.exp(2)), 2) == 0.12
