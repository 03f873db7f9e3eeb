"""How far along an experiment is: by the seconds of its runs, or a bound."""

import shutil
from types import SimpleNamespace

import pytest

from gbattn.experiments import Arm, CorpusSpec, Experiment
from gbattn.lab import status
from gbattn.lab.status import status_from, status_of
from tiny_experiment import TINY


def test_the_estimate(tmp_path, monkeypatch):
    """What is left at the speed of what is in; without it, FLOPs at a rate, epochs and steps alike."""
    monkeypatch.setattr(status, "product_rate", lambda: 1e6)
    base = dict(question="", model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2), arms=(Arm(name="a"),))
    spec = CorpusSpec(name="x", vocab_size=300, max_train_tokens=640)
    steps = Experiment(name="s", corpus=spec, train=dict(steps=30, batch_size=4), seeds=(1, 2, 3), **base)
    epochs = Experiment(name="e", corpus=spec, train=dict(epochs=3, batch_size=4), seeds=(1, 2, 3), **base)
    found = [status_of(one, tmp_path) for one in (steps, epochs)]
    assert found[0].hours_left == found[1].hours_left > 0  # 3 × 640 tokens are 30 × 4 × 16
    assert found[0].left == "at least"
    records = [SimpleNamespace(measured={"seconds": 3600.0})]
    found = status_from(steps, records)
    assert (found.hours_left, found.left) == (2.0, "about")
    records = 3 * [SimpleNamespace(measured={})]
    assert status_from(steps, records).hours_left == 0


def test_a_bound_is_one(tmp_path, monkeypatch):
    """By the cheapest arm, grid and windows included; where it could be false, nothing is said."""
    monkeypatch.setattr(status, "product_rate", lambda: 1e4)
    spec = CorpusSpec(name="x", vocab_size=300, max_train_tokens=640)
    small, twice = Arm(name="small"), Arm(name="twice", model={"attention": "twicing"})
    base = dict(name="s", question="", corpus=spec, train=dict(steps=30, batch_size=4), seeds=(1,))
    base |= dict(model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2))
    hours = lambda **change: status_of(Experiment(**base | change), tmp_path).hours_left
    alone = hours(arms=(small,))
    assert hours(arms=(twice,)) > alone
    assert hours(arms=(twice, small)) == pytest.approx(2 * alone, abs=0.002)
    slow = Arm(name="slow", equal_to=twice, equal_in="time")
    assert hours(arms=(slow,)) == hours(arms=(twice,))  # whose size a sweep decides
    assert hours(arms=(small,), grid={"n_layers": (2, 1)}) == pytest.approx(2 * alone, abs=0.002)
    assert hours(arms=(small,), train=base["train"] | {"length": 8}) < 0.6 * alone
    unknown = dict(corpus=CorpusSpec(name="x", vocab_size=300), train=dict(epochs=3))
    assert hours(arms=(small,), **unknown) is None
    assert hours(arms=(small,), train=base["train"] | {"precision": "bf16"}) is None
    monkeypatch.setattr(status, "product_rate", lambda: None)
    assert hours(arms=(small,)) is None


@pytest.mark.parametrize("gpu, other, device", [(True, False, "cuda"), (False, True, None), (False, False, "cpu")])
def test_the_speed_is_that_of_where_a_run_trains(monkeypatch, gpu, other, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: other)
    measured = lambda device="cpu": SimpleNamespace(flops=device)
    monkeypatch.setattr(status, "measure_machine", measured)
    assert status.product_rate.__wrapped__() == device


def test_how_far_it_is(finished, tmp_path):
    place, _ = finished
    found = status_of(TINY, place / "results")
    assert (found.name, found.done, found.runs, found.hours_left, found.why) == ("tiny", 4, 4, 0, None)
    shutil.copytree(place / "results", tmp_path / "results")
    damaged = next((tmp_path / "results" / "tiny").glob("*.json"))
    damaged.write_text('{"experiment": "tiny", "settings": {}, "measured": {}}')
    found = status_of(TINY, tmp_path / "results")
    assert (found.done, found.hours_left, found.left) == (None, None, None)
    assert found.why.startswith(f"{damaged}: got a damaged record")
