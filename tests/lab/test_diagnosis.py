"""A diagnosis: its means and intervals, its groups of tokens, and its tables against what its edits say by hand."""

import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

from diagnosed_models import KINDS, batch_of, model_of
from gbattn.attention import causal_mask, merge_heads
from gbattn.corpora import Batch
from gbattn.diagnostics import (
    PATHS,
    SOURCES,
    descent,
    edited,
    head_values,
    observed,
    patched,
    stopped,
    token_losses,
    without_round,
)
from gbattn.lab.diagnosis import Means, add_hull, add_weights, diagnose, spread_windows, token_groups
from gbattn.layers import Round

TOKENS = np.arange(200) % 50


def test_a_starved_token_is_found_and_whether_round_1_attends_to_it():
    T, means = 40, Means()
    first = torch.zeros(T, T)  # all attend to token 0
    first[:, 0] = 1
    second = causal_mask(T).float() / torch.arange(1, T + 1)[:, None]
    rounds = [Round(A[None, None]) for A in (first, second)]
    add_weights(means, "", rounds)
    assert means.mean("starved") == pytest.approx(23 / 24)  # of 24 places, all but the first
    assert means.mean("received") == pytest.approx(1, abs=1e-5)
    assert means.mean("round0.entropy") == 0 and means.mean("divergence") > 0.5
    means = Means()
    add_weights(means, "", [Round(A[None, None]) for A in (first, torch.eye(T))])
    assert means.mean("rescued") == pytest.approx(9 / 23)  # key i gets 1/(1/(i + 1) + … + 1/40): enough from i = 15 on


def test_how_much_of_a_step_leads_out_of_the_hull():
    model, batch = model_of(), batch_of()
    with torch.no_grad(), observed(model) as layers:
        model(batch.inputs)
    layer, inputs, (first, _) = layers[0]
    F = first.estimate
    to_a_value = merge_heads(head_values(layer, inputs))[:, :1] - F
    for step, share in ((to_a_value, 0), (1e4 * torch.ones_like(F), 1)):
        rounds, means = [first, first._replace(estimate=F + step)], Means()
        add_hull(means, "", layer, inputs, rounds, torch.Generator().manual_seed(0))
        assert means.mean("hull.correction").item() == pytest.approx(share, abs=1e-2)


def test_groups_by_hand():
    x = torch.tensor([[1, 2, 1, 2, 3, 3, 0]])
    y = torch.tensor([[2, 1, 2, 3, 3, 0, 1]])
    groups = token_groups(Batch(x, y), np.array([0, 9, 10, 5_000_000]))
    novelty = {name: mask[0].nonzero().flatten().tolist() for name, mask in groups["novelty"].items()}
    assert novelty == {"new": [0, 3, 5], "repeated": [1, 4, 6], "pair": [2]}
    often = {name: mask[0].nonzero().flatten().tolist() for name, mask in groups["frequency"].items() if mask.any()}
    assert often == {"0": [1, 5, 6], "10": [0, 2], "1,000,000": [3, 4]}
    assert {k: m.sum().item() for k, m in groups["position"].items()} == {"0": 1, "1": 6}
    for T in (1, 2, 63, 64, 65):
        batch = batch_of(T=T)
        for kind in token_groups(batch, np.arange(50)).values():
            assert torch.stack([*kind.values()]).sum(0).eq(1).all()


def test_means_and_intervals_are_those_of_windows():
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(60, 7, 2, generator=rng, dtype=torch.float64)
    mask = torch.rand(60, 7, generator=rng) < 0.6
    means = Means()
    for part, of in zip(values.split(20), mask.split(20)):
        means.add("x", part, of)
    assert means.count("x")[0] == mask.sum()
    m = (values * mask[..., None]).sum((0, 1)) / mask.sum()
    torch.testing.assert_close(means.mean("x"), m)
    off = ((values - m) * mask[..., None]).sum(1)
    torch.testing.assert_close(means.half("x"), 1.96 * off.square().sum(0).sqrt() / mask.sum())
    means.add("x", torch.full((1, 7, 2), math.nan))
    torch.testing.assert_close(means.mean("x"), m)


def test_tokens_of_one_window_are_not_independent():
    apart, alike = Means(), Means()
    rng = torch.Generator().manual_seed(0)
    apart.add("x", torch.randn(400, 16, generator=rng))
    alike.add("x", torch.randn(400, 1, generator=rng).expand(400, 16))
    assert alike.half("x") / apart.half("x") == pytest.approx(4, rel=0.15)


def test_windows_are_spread_and_none_comes_twice():
    tokens = np.arange(1000)
    starts = spread_windows(tokens, 10, 4)
    every = sorted(np.concatenate(starts))
    assert every == list(range(0, 960, 10)) and all(np.diff(one).min() >= 240 for one in starts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_diagnosis_is_json_and_the_same_again(kind):
    model = model_of(*KINDS[kind]).float().train()
    tokens = np.random.RandomState(0).randint(50, size=700)
    options = dict(batch_size=4, sample=64, progress=False)
    found = diagnose(model, tokens, **options)
    assert model.training and json.loads(json.dumps(found, allow_nan=False)) == found
    assert found == diagnose(model, tokens, **options)
    assert found["tokens"] == 640 and found["sampled"] == 64
    assert len(found["layers"]) == 2 and len(found["examples"]["helped"]) == 5
    batch = Batch(*(torch.from_numpy(tokens[s : s + 640].reshape(-1, 16)) for s in (0, 1)))
    loss = token_losses(model.eval(), batch).mean().item()
    assert found["loss"][0] == pytest.approx(loss, rel=1e-4)
    groups = found["where"]["novelty"].values()
    assert sum(group["n"] for group in groups) == 640
    mean = sum(group["n"] * group["gain"][0] for group in groups) / 640
    assert mean == pytest.approx(found["whole"]["stopped"][0], abs=1e-4)


def test_the_table_of_one_batch_by_hand():
    model, tokens = model_of(), np.random.RandomState(0).randint(50, size=65)
    found = diagnose(model, tokens, batch_size=4, progress=False)
    batch = Batch(*(torch.from_numpy(tokens[s : s + 64].reshape(4, 16)) for s in (0, 1)))

    def loss(edit, layers=(0, 1)):
        with torch.no_grad(), edited(model, dict.fromkeys(layers, edit)):
            return token_losses(model, batch)

    plain, whole, near = loss(stopped(-1)), found["whole"], partial(pytest.approx, rel=1e-5)
    rise = lambda *edit: near((loss(*edit) - plain).mean().item())
    gain = loss(stopped()) - plain
    assert whole["helped"][0] == near((gain > 0).double().mean().item())
    assert whole["without_first"][0] == rise(without_round(0))
    three = PATHS[:3]
    paths = {path: (path,) for path in PATHS} | {"all three": three}
    for source in SOURCES:
        every = paths | {f"all but {p}": tuple({*three} - {p}) for p in three if source == "other"}
        rises = {name: rise(patched(hidden, source)) for name, hidden in every.items()}
        assert {name: pair[0] for name, pair in whole["paths"][source].items()} == rises
    for i, layer in enumerate(found["layers"]):
        assert layer["without_first"][0] == rise(without_round(0), [i])
        assert all(layer["paths"][p][0] == rise(patched((p,)), [i]) for p in PATHS)
        once = descent(model, batch, i)
        for name, counts in (("downhill", once["cosine"] > 0), ("helped", once["change"] < 0)):
            share = counts.double().mean().item()
            assert layer["descent1"][name][0] == near(share) and share != 0.5  # else its opposite would pass
    for name, place in (("helped", gain.argmax()), ("harmed", gain.argmin())):
        example = found["examples"][name][0]
        assert example["gain"] == near(gain.flatten()[place].item())
        assert example["target"] == str(batch.targets.flatten()[place].item())


def test_batches_do_not_change_the_means():
    model, tokens = model_of().float(), np.random.RandomState(0).randint(50, size=641)
    one, other = (diagnose(model, tokens, batch_size=B, sample=1, progress=False) for B in (4, 20))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert one["layers"][0]["rank"] == pytest.approx(other["layers"][0]["rank"], rel=1e-4)
    assert one["layers"][0]["gate1"]["sd_tokens"] == pytest.approx(other["layers"][0]["gate1"]["sd_tokens"], rel=1e-4)


def test_gates_that_are_constant_cost_nothing_to_replace():
    model = model_of().float()
    for block in model.blocks:
        nn.init.zeros_(block.attention.corrections[0].gate.weight)
    found = diagnose(model, np.random.RandomState(0).randint(50, size=641), batch_size=4, progress=False)
    assert abs(found["whole"]["constant_gates"][0]) < 1e-5 < found["whole"]["stopped"][1]
    gate = found["layers"][0]["gate1"]
    assert gate["sd_tokens"] < 1e-3 < gate["sd_features"]


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: diagnose(nn.Linear(1, 1), TOKENS), "model"),
        (lambda: diagnose(model_of(), TOKENS[:30], batch_size=2), "tokens"),
        (lambda: diagnose(model_of(), TOKENS + 40, batch_size=2), "tokens"),
        (lambda: diagnose(model_of(), TOKENS, batch_size=1), "batch_size"),
        (lambda: diagnose(model_of(), TOKENS, length=17), "length"),
        (lambda: diagnose(model_of(), TOKENS, sample=0), "sample"),
        (lambda: diagnose(model_of(), TOKENS, batch_size=2, counts=[1]), "counts"),
        (lambda: diagnose(model_of(), TOKENS, decode="utf-8"), "decode"),
        (lambda: diagnose(model_of(), TOKENS, progress=1), "progress"),
    ],
)
def test_bad_input_is_refused_by_its_name(call, argument):
    with refused(argument):
        call()
