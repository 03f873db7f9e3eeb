"""How fast a model is."""

import json
import subprocess
import sys

import pytest
import torch
from refusals import refused

from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.speed import measure_speed
from gbattn.language_model import LanguageModel, ModelConfig
from toys import ENVIRONMENT, ROOT, weights


@pytest.mark.parametrize("positions", ["learned", "rotary"])
def test_a_model_that_is_timed_keeps_its_weights(positions):
    sizes = dict(vocab_size=30, max_length=8, d_model=8, n_layers=1, n_heads=2, positions=positions)
    models = [LanguageModel(ModelConfig(attention=name, **sizes)) for name in ("multi_head", "boosted")]
    before = [weights(model) for model in models]
    found = measure_speed(iter(models), batch_size=2, rounds=2, new_tokens=3)
    assert len(found) == 2 and all(seconds > 0 for speed in found for seconds in speed)
    assert all(torch.equal(was, weights(model)) for was, model in zip(before, models))
    assert all(p.grad is None for model in models for p in model.parameters())


def test_a_step_and_a_written_token_are_told_apart(monkeypatch):
    """Medians of three rounds, after one that is not counted."""
    seconds = iter([100, 200, 2, 12, 1, 30, 3, 15])
    monkeypatch.setattr("gbattn.lab.speed.call_seconds", lambda call, device: next(seconds))
    model = LanguageModel(ModelConfig(vocab_size=30, max_length=8, d_model=8, n_layers=1, n_heads=2))
    assert measure_speed([model], batch_size=2, rounds=3, new_tokens=3) == [(2, 5)]


@pytest.mark.parametrize("wrong", [dict(batch_size=0), dict(rounds=1.5), dict(new_tokens=True), dict(models=[3])])
def test_nothing_else_is_timed(wrong):
    with refused(*wrong):
        measure_speed(**dict(models=[]) | wrong)


def test_the_benchmark_still_runs(tmp_path):
    """Tiny and once; it stops by itself unless its plain steps have the gradients of the models."""
    command = [sys.executable, ROOT / "benchmarks" / "training_step.py", "--quick", "--folder", tmp_path]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "AdamW fused" in done.stdout
    records = [json.loads(path.read_text()) for path in (tmp_path / "benchmark-training-step").glob("*.json")]
    methods = {r["settings"]["method"] for r in records}
    tables = [arm for name in ("mini", "mini-arms") for arm in EXPERIMENTS[name].arms if arm.equal_in != "time"]
    tables += [arm for arm in EXPERIMENTS["shift"].arms if arm.equal_to is None]
    assert methods == {"textbook"} | {
        arm.name.replace("_", " ") + kind for arm in tables for kind in ("", " plain", " products")
    }
    assert len(records) == 2 * len(methods) and all(r["measured"]["peak_bytes"] > 0 for r in records)
    ratios = {
        (r["settings"]["method"], field)
        for r in records
        for field in r["measured"]
        if f"{field}_low" in r["measured"]
        and r["measured"][f"{field}_low"] <= r["measured"][field] <= r["measured"][f"{field}_high"]
    }
    arms = {arm.name.replace("_", " ") for arm in tables}
    assert ratios == {(arm, f"over_{kind}") for arm in arms for kind in ("plain", "products")} | {
        (name, "over_standard")
        for name in {"textbook"} | {arm + kind for arm in arms - {"standard"} for kind in ("", " plain", " products")}
    }
