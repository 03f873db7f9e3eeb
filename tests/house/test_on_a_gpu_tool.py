"""What waits for a GPU can be started: tools/on_a_gpu.py, on a CPU and for two updates."""

import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gbattn.conventions import Record
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.queue import run_experiment

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import on_a_gpu


@pytest.mark.parametrize("name", [name for names, *_ in on_a_gpu.LINES.values() for name in names])
def test_a_rehearsal_has_every_arm_of_the_experiment_and_two_updates(name):
    runs = on_a_gpu.rehearsal(EXPERIMENTS[name]).runs()
    assert [one.arm.name for one in runs] == [arm.name for arm in EXPERIMENTS[name].arms]
    assert {one.train.steps for one in runs} == {2}
    real = {one.arm.name: one.model for one in replace(EXPERIMENTS[name], rates_from=None, rate_of="").runs()}
    same = lambda one: replace(one.model, vocab_size=2) == replace(real[one.arm.name], vocab_size=2)
    assert all(same(one) for one in runs if one.arm.equal_to is None)


def test_a_sweep_comes_before_the_experiment_that_takes_its_rates():
    for names, *_ in on_a_gpu.LINES.values():
        for i, name in enumerate(names):
            sweep = EXPERIMENTS[name].rates_from
            assert sweep is None or sweep.name in names[:i] or sweep.name not in on_a_gpu.EXTENDED


def test_a_rehearsed_run_is_packed_and_the_records_before_it_are_not(tmp_path):
    (tmp_path / "18_perplexity").mkdir()
    old = tmp_path / "18_perplexity" / "old.json"
    old.write_text("{}")
    toy = on_a_gpu.rehearsal(EXPERIMENTS["composition-sweep"])
    run_experiment(replace(toy, arms=toy.arms[:1]), folder=tmp_path, work=tmp_path / "work", progress=False)
    on_a_gpu.pack(tmp_path, {old, *(tmp_path / "work").rglob("*.json")}, tmp_path / "out")
    with tarfile.open(tmp_path / "out" / "records.tar.gz") as archive:
        (name,) = archive.getnames()
    assert name.startswith("18_perplexity/composition-sweep/standard_shift-lr0.004-seed0")


def test_where_there_is_no_gpu_nothing_is_run(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(on_a_gpu, "run_experiments", lambda *of: pytest.fail("something ran"))
    monkeypatch.setattr(sys, "argv", ["on_a_gpu.py", "composition", "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        on_a_gpu.main()
    assert stopped.value.code == 2 and not list(tmp_path.iterdir())


def test_a_line_stops_when_its_time_is_over(tmp_path):
    how = dict(workers=1, folder=tmp_path, work=tmp_path / "work", corpora=None)
    assert on_a_gpu.run_experiments(("composition-sweep",), True, time.monotonic(), how) is False
    assert not list(tmp_path.rglob("*.json"))


def test_each_benchmark_finds_its_modules(tmp_path):
    commands = [command for command in on_a_gpu.MEASURE if command[0].startswith("benchmarks/")]
    helps = [[command[0], "--help"] for command in commands]
    assert len(helps) == 3 and on_a_gpu.measure(helps, time.monotonic() + 300, tmp_path)


def test_a_sweep_is_extended_while_a_best_rate_is_at_the_edge(tmp_path):
    losses = {0.004: 3.2, 0.008: 3.1, 0.016: 3.0, 0.032: 2.9, 0.064: 3.3}
    sweep = replace(EXPERIMENTS["composition-sweep"], seeds=(0,), grid={"learning_rate": (0.008, 0.016)})

    def run(sweep):
        for one in sweep.runs():
            loss = losses[one.train.learning_rate]
            settings = one.settings | {"text": one.settings["text"] | {"fingerprint": "ff6f8b529b40"}}
            found = dict(valid_loss=loss, test_loss=loss, diverged=False, parameters=1, non_embedding=1)
            Record(sweep.name, settings, found).save(one.name, tmp_path)

    found = on_a_gpu.swept(sweep, tmp_path, run)
    assert found.grid["learning_rate"] == (0.008, 0.016, 0.032, 0.064)
    assert on_a_gpu.swept(sweep, tmp_path) == found
