"""What is measured on SmolLM2, tried on a small Llama with random weights."""

import importlib
import random
import string
import sys
from pathlib import Path

import pytest
import torch

from pages import skip_or_fail

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
double = lambda numbers: torch.tensor(numbers, dtype=torch.float64)
IDS = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(name="llama")
def fixture_llama():
    """A Llama of three layers in float64, all weights moved."""
    if importlib.util.find_spec("transformers") is None:
        skip_or_fail("transformers is not installed: pip install 'gbattn[pretrained]'.")
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=3, vocab_size=40)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).double().eval().requires_grad_(False)
    for weight in model.parameters():
        weight += 0.3 * torch.randn(weight.shape, dtype=weight.dtype)
    return model


def test_derivatives_are_those_of_the_loss(llama):
    """Of each head, each layer's shift and each document, against differences of the loss itself."""
    smoother = importlib.import_module("real_smoother")
    found = smoother.derivatives(llama, IDS)
    run, step = smoother.Layers(llama, IDS), 1e-2  # its norms compute in float32
    own = torch.stack([llama(row[None], labels=row[None]).loss for row in IDS]).double()
    assert torch.allclose(own, run.loss())
    assert torch.allclose(double(found["loss"]), run.loss())
    for name, of in (("twice", smoother.twice), ("scale", smoother.scaled)):
        for layer, head in ((0, 1), (2, 3)):
            at = torch.zeros(4, 1, 1, dtype=torch.float64)
            at[head] = step
            up, down = (double(run.loss_with({layer: of(sign * at)})) for sign in (1, -1))
            slope = double([row[layer][head] for row in found[name]])
            assert torch.allclose((up - down) / (2 * step), slope, rtol=1e-2, atol=1e-3)
            other = double([row[layer][head - 1] for row in found[name]])  # the mutant: of another head
            assert not torch.allclose(slope, other, rtol=1e-1, atol=1e-2)
    up, down = (double(smoother.shifted_loss(run, sign * step)) for sign in (1, -1))
    slope = sum(double(found[name]).sum((1, 2)) for name in ("shift_key", "shift_value"))
    assert torch.allclose((up - down) / (2 * step), slope, rtol=1e-2, atol=1e-3)


def test_the_second_round_is_twicing(llama):
    """F + A(V − F) for each head, as chapter 7 has it, with the model's own weights of attention."""
    smoother = importlib.import_module("real_smoother")
    q, k, v = (torch.randn(2, heads, 6, 4, dtype=torch.float64) for heads in (4, 2, 2))
    layer = torch.nn.Identity()
    layer.second = smoother.twice(1.0)
    F, _ = smoother.attend(layer, q, k, v, scaling=0.5)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    A = (0.5 * q @ k.mT).masked_fill(torch.ones(6, 6).triu(1).bool(), float("-inf")).softmax(-1)
    eye = torch.eye(6, dtype=A.dtype)
    assert torch.allclose(F.transpose(1, 2), (eye - (eye - A) @ (eye - A)) @ v)


def test_the_arms_start_as_the_model_with_equally_many_weights(llama, monkeypatch):
    boosting = importlib.import_module("real_boost")
    for name, value in dict(FIRST=1, LENGTH=12, RANK=2, BOTTLENECK=19).items():
        monkeypatch.setattr(boosting, name, value)
    model = llama.float()
    upper, h = boosting.Upper(model), boosting.lower(model, IDS)
    plain, _ = boosting.adapted(model, "adapter", 0)
    losses = upper.by_document(plain, h, IDS)
    for arm in (*boosting.ARMS, "full"):
        arms, new = boosting.adapted(model, arm, 0)
        assert upper.by_document(arms, h, IDS) == losses
        assert all(weight.dtype == torch.float32 for weight in new)
        trained, found = boosting.fit(model, upper, (h, IDS), arm, 1e-2, 0, 24)
        assert upper.by_document(trained, h, IDS) != losses
        assert found["trained"] == sum(weight.numel() for weight in new)
    for choices in (dict(chosen=[0, 2]), dict(kv_from="input"), dict(gate="feature")):  # over a stream of its own
        first = min(choices.get("chosen", [1]))
        upper, h = boosting.Upper(model, first), boosting.lower(model, IDS, first)
        arms, new = boosting.adapted(model, "boost", 0, **choices)
        assert upper.by_document(arms, h, IDS) == pytest.approx(losses, abs=2e-2)  # of bfloat16 products
        found = {n.split(".")[2] for n, w in arms.named_parameters() if w.requires_grad}
        assert found == {str(number) for number in choices.get("chosen", [1, 2])}
        assert arms.config.boosting["gate"] == choices.get("gate", "head")
        assert arms.config.boosting["kv_from"] == choices.get("kv_from", "residual")
    sizes = {}
    monkeypatch.undo()
    correction = 2 * 576 * 192 + 576**2 + 2 * 576 * 9 + 9  # keys and values, queries, a gate a head
    sizes["LoRA"] = boosting.RANK * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    sizes["adapter"] = boosting.BOTTLENECK * 2 * 576
    assert all(abs(size / correction - 1) < 0.01 for size in sizes.values())


def test_full_training_reaches_the_weights_of_the_chosen_layers_alone(llama, monkeypatch):
    boosting, full = (importlib.import_module(name) for name in ("real_boost", "real_full"))
    model, new = boosting.adapted(llama.float(), "full", 0, chosen=[0, 2])
    assert {weight for layer in (0, 2) for weight in model.model.layers[layer].parameters()} == {*new}
    # Without a head and corrections, frozen layers cost two products where full training costs three.
    for name in ("HEAD", "CORRECTION"):
        monkeypatch.setattr(full, name, 0)
    assert full.equal_updates(24) == 16


def test_the_peak_of_memory_is_that_of_an_action():
    speed = importlib.import_module("real_speed")
    if not Path("/proc/self/clear_refs").is_file():
        pytest.skip("no peak of memory that can be forgotten: not Linux")
    large, small = (speed.peak(lambda n=n: torch.ones(n).sum().item()) for n in (30_000_000, 10_000_000))
    assert 119e6 < large < 140e6 and 39e6 < small < 60e6


def test_a_question_has_the_text_that_follows_and_three_from_elsewhere():
    asking = importlib.import_module("real_questions")
    documents = ["".join(random.Random(0).choices(string.ascii_lowercase, k=2000)), "too short"]
    asked = asking.questions(documents, 50)
    for one in asked:
        start = documents[0].index(one["before"])
        assert documents[0][start:].startswith(one["before"] + one["choices"][one["own"]])
        others = [text for i, text in enumerate(one["choices"]) if i != one["own"]]
        assert len({*one["choices"]}) == 4 and all(len(text) == asking.AFTER for text in one["choices"])
        assert all(text in documents[0] and text not in one["before"] for text in others)
    assert len({one["own"] for one in asked}) == 4 and asking.questions(documents, 50) == asked
