"""The queue: it repeats no run and loses none, here, with workers and on a cluster, whatever is killed or fails."""

import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from refusals import refused

from gbattn import experiments
from gbattn.comparison import best_rates, compare
from gbattn.experiments import Arm, CorpusSpec
from gbattn.lab import queue, workers
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.checkpoints import checkpoints
from gbattn.lab.cluster import Job, job_executor
from gbattn.lab.queue import run_experiment
from gbattn.lab.records import records_of
from gbattn.lab.texts import load_text
from gbattn.lab.token_cache import manifest_checksum
from gbattn.language_model import LanguageModel, model_cost
from gbattn.training import evaluate
from tiny_experiment import BOOSTED, STANDARD, TINY, UNRATED, ends_in, go, made, untimed


def test_a_record_is_complete(finished, corpora):
    place, records = finished
    assert len(records) == 4
    wanted = ["parameters", "non_embedding", "training_flops", "tokens", "seconds", "steps", "best_step", "diverged"]
    wanted += [
        f"{split}_{what}" for split in ("valid", "test") for what in ("loss", "perplexity", "bits_per_byte", "tokens")
    ]
    wanted += ["train_step", "train_loss", "curve_step", "curve_loss"]
    settings = ["id", "arm", "seed", "learning_rate", "warmup", "norm", "final_norm", "planned", "steps", "d_model"]
    settings += ["n_layers", "corpus", "text", "model", "train"]
    for one, found in zip(TINY.runs(), records):
        assert set(wanted) <= set(found.measured) and set(settings) <= set(found.settings)
        assert found.settings["text"]["fingerprint"] and found.settings["id"] == one.id
        assert {"commit", "command", "torch", "threads", "device", "accelerate"} <= set(found.provenance)
        m = found.measured
        assert m["tokens"] == 8 * 4 * 16 and m["training_flops"] == 8 * model_cost(one.model, 16, 4).training_flops
        assert m["test_perplexity"] == pytest.approx(math.exp(m["test_loss"]))
        assert m["curve_step"] == [4, 8] and min(m["curve_loss"]) == pytest.approx(m["best_loss"], abs=1e-5)
        model = LanguageModel.from_pretrained(place / "work" / one.id / "model")
        assert model.config == one.model
        assert not (place / "work" / one.id / "checkpoints").exists()
        assert m["best_step"] == m["curve_step"][np.argmin(m["curve_loss"])]
        assert m["seconds_per_step"] == pytest.approx(m["seconds"] / 8, abs=0.002)
        text = load_text(one.corpus, corpora)
        for split in ("valid", "test"):
            known = evaluate(model, getattr(text, split), length=16, n_bytes=text.scored_bytes(split))
            found = [m[f"{split}_{what}"] for what in ("loss", "perplexity", "bits_per_byte", "tokens")]
            assert found == pytest.approx([known.loss, known.perplexity, known.bits_per_byte, known.n_tokens])


def test_runs_side_by_side_give_the_records_of_runs_alone(corpora, tmp_path):
    rates = replace(TINY, model=TINY.model | {"dropout": 0.0}, grid={"learning_rate": [0.003, 0.001]})
    alone = go(corpora, tmp_path / "alone", rates)
    together = go(corpora, tmp_path / "together", rates, together=4)
    for one, other in zip(alone, together, strict=True):
        assert other.settings == one.settings and other.measured.keys() == one.measured.keys()
        for name, x in one.measured.items():
            if "seconds" not in name:
                assert other.measured[name] == pytest.approx(x, rel=2e-4), name
        assert other.provenance["side by side"] == 4 and "--together 4" in other.provenance["command"]
    model = LanguageModel.from_pretrained(tmp_path / "together" / "work" / rates.runs()[-1].id / "model")
    text = load_text(TINY.corpus, corpora)
    assert evaluate(model, text.test, length=16).loss == pytest.approx(together[-1].measured["test_loss"])


@pytest.mark.parametrize("together", [1, 2])
def test_a_record_names_the_device_that_training_began_to_use(corpora, tmp_path, monkeypatch, together):
    """A process holds no GPU before it trains: a record that is made earlier would name the CPU."""

    def on_a_gpu(function, *args, **options):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "some GPU")
        return function(*args, **options)

    for name in ("train", "train_side_by_side"):
        monkeypatch.setattr(workers, name, partial(on_a_gpu, getattr(workers, name)))
    two = replace(TINY, arms=(STANDARD,))
    found = go(corpora, tmp_path, two, together=together)
    assert [record.provenance["device"] for record in found] == ["some GPU"] * 2


def test_a_run_that_diverges_leaves_its_neighbours_alone(corpora, tmp_path):
    plain = dict(model=TINY.model | {"dropout": 0.0}, arms=(STANDARD,), seeds=(0,))
    rates = replace(TINY, **plain, grid={"learning_rate": [0.003, 1e30]})
    well, ill = go(corpora, tmp_path / "together", rates, together=2)
    (alone,) = go(corpora, tmp_path / "alone", replace(rates, grid={"learning_rate": [0.003]}))
    assert ill.measured["diverged"] and "is nan" in ill.measured["why"]
    assert well.measured["test_loss"] == pytest.approx(alone.measured["test_loss"], rel=2e-4)


def test_what_is_finished_is_not_run_again(finished, corpora, monkeypatch):
    place, records = finished
    monkeypatch.setattr(workers, "train_and_score", None)
    assert go(corpora, place) == records
    assert records_of(TINY, place / "results") == records


def test_another_experiment_takes_over_the_same_run(finished, corpora, monkeypatch):
    place, records = finished
    monkeypatch.setattr(workers, "train_and_score", None)
    other = replace(TINY, name="other", arms=(replace(STANDARD, name="plain"),))
    found = go(corpora, place, other)
    assert untimed(found) == untimed(records[::2])
    assert [(r.experiment, r.settings["arm"], r.settings["planned"]) for r in found] == [("other", "plain", 2)] * 2


def test_an_experiment_of_the_book_begins_in_the_chapter_of_results(finished, corpora, tmp_path, monkeypatch):
    """And its runs are found there by others."""
    place, records = finished
    monkeypatch.setitem(EXPERIMENTS.data, "tiny", TINY)
    chapter = tmp_path / "results" / "18_perplexity"
    chapter.mkdir(parents=True)
    shutil.copytree(place / "work", tmp_path / "work")
    assert len(go(corpora, tmp_path)) == 4
    assert [path.name for path in chapter.iterdir()] == ["tiny"]
    monkeypatch.setattr(workers, "train_and_score", None)
    own = go(corpora, tmp_path, replace(TINY, name="own"))
    assert untimed(own) == untimed(records) and (tmp_path / "results" / "own").is_dir()


def test_shards_do_each_run_once_and_leave_pairs_together(corpora, tmp_path, monkeypatch):
    performed = []
    monkeypatch.setattr(workers, "train_and_score", lambda one, *_, **__: performed.append(one) or made(one, corpora))
    blocks = [(seed, rate) for seed in (1, 2) for rate in (1e-3, 2e-3)]
    many = replace(TINY, grid={"learning_rate": (1e-3, 2e-3)})
    for k, mine in ((1, blocks[::3]), (2, blocks[1::3]), (3, blocks[2::3])):
        performed.clear()
        go(corpora, tmp_path, many, shard=(k, 3))
        arms = {(one.seed, one.train.learning_rate): set() for one in performed}
        for one in performed:
            arms[one.seed, one.train.learning_rate].add(one.arm.name)
        assert arms == dict.fromkeys(mine, {"standard", "boosted_residual"}) and len(performed) == 2 * len(mine)
    assert len(records_of(many, tmp_path / "results")) == many.planned == 8


def test_workers_side_by_side_share_the_runs(corpora, tmp_path, monkeypatch):
    performed = []

    def perform(one, *_, **__):
        performed.append(one.id)
        time.sleep(0.05)
        return made(one, corpora)

    monkeypatch.setattr(workers, "train_and_score", perform)
    many = replace(TINY, seeds=tuple(range(10)))
    threads = [threading.Thread(target=go, args=(corpora, tmp_path, many)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(performed) == sorted(one.id for one in many.runs())


def test_a_run_that_another_holds_is_left_to_it(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "train_and_score", lambda one, *_, **__: made(one, corpora))
    held = TINY.runs()[1]
    (tmp_path / "work" / held.id).mkdir(parents=True)
    with FileLock(tmp_path / "work" / held.id / "lock"):
        found = go(corpora, tmp_path)
        assert len(found) == 3 and held.id not in {r.settings["id"] for r in found}
    assert len(go(corpora, tmp_path)) == 4


def test_drafts_of_a_killed_process_are_cleared_by_who_goes_on_with_the_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "train_and_score", lambda one, *_, **__: made(one, corpora))
    first = TINY.runs()[0]
    names = f"work/{first.id}/model/model.safetensors", f"results/tiny/{first.name}.json", "results/tiny/other.json"
    drafts = [tmp_path / f"{name}.draft-0123abcd" for name in names]
    for path in drafts:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("half")
    assert len(go(corpora, tmp_path)) == 4
    assert [path.exists() for path in drafts] == [False, False, True]


CODE = """
import pickle, sys
from gbattn.lab.queue import run_experiment
experiment, options = pickle.load(sys.stdin.buffer)
print(len(run_experiment(experiment, progress=False, **options)))
"""


def start(experiment, corpora, place, workers):
    """A process that runs an experiment."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", CODE], env=environment, **pipes)
    options = dict(folder=place / "results", work=place / "work", corpora=corpora, workers=workers)
    process.stdin.write(pickle.dumps((experiment, options)))
    process.stdin.flush()
    return process


def under_way(place):
    """The newest checkpoint of each run that has one; a draft is none."""
    found = [checkpoints(folder) for folder in (place / "work").glob("*/checkpoints")]
    return [list(of.values())[-1] for of in found if of]


def kill_in_mid_run(process, place, runs, how=signal.SIGKILL):
    """End a process when this many runs have a checkpoint."""
    while len(under_way(place)) < runs and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(how)
    process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        pipe.close()


LONG = replace(TINY, train=TINY.train | dict(steps=40, checkpoint_every=2))


def test_killed_and_started_again_the_curve_is_the_same(finished, corpora, tmp_path):
    """SIGKILL in mid-run, then two workers: the records of runs that were never stopped, but for their times."""
    kill_in_mid_run(start(LONG, corpora, tmp_path, 1), tmp_path, 1)
    assert len(records_of(LONG, tmp_path / "results")) < 4
    (kept,) = (path / "training.json" for path in under_way(tmp_path))
    state = json.loads(kept.read_text())
    state["seconds"] = 1e6  # by which the record of who goes on from it is known
    kept.write_text(json.dumps(state | {"sha256": manifest_checksum(state)}))
    process = start(LONG, corpora, tmp_path, 2)
    out, err = process.communicate()
    assert process.returncode == 0 and int(out) == 4, err.decode()
    lines = [line.split(" ")[2] for line in ends_in(err.decode()) if line.startswith("tiny ")]
    assert len(lines) == len(set(lines)) >= 1
    assert sum(one.measured["seconds"] > 1e6 for one in records_of(LONG, tmp_path / "results")) == 1
    (tmp_path / "whole").mkdir()
    # By workers too, who have one thread each: other numbers of threads add in another order.
    whole = go(corpora, tmp_path / "whole", LONG, workers=2)
    assert untimed(whole) == untimed(records_of(LONG, tmp_path / "results"))


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_the_process_that_started_it(corpora, tmp_path, how):
    """Else the next start would double the load, and spoil what is timed."""
    longer = replace(TINY, train=TINY.train | dict(steps=20_000, checkpoint_every=2))
    kill_in_mid_run(start(longer, corpora, tmp_path, 2), tmp_path, 2, how)
    for place in (tmp_path / "work").iterdir():
        FileLock(place / "lock").acquire(timeout=30).lock.release(force=True)


def test_a_run_that_fails_in_a_worker_is_named(corpora, tmp_path, capfd):
    """Once, by a line and no traceback, and no other worker tries it again."""
    broken = Arm(name="broken", train={"warmup_steps": 8})
    with pytest.raises(RuntimeError) as caught:
        go(corpora, tmp_path, replace(TINY, arms=(broken, STANDARD)), workers=2)
    said = str(caught.value)
    assert said.startswith("2 of 4 runs failed, the first broken-seed")
    assert ": warmup_steps: got 8; want fewer than the 8 steps" in said and said.endswith("run goes on from there")
    said = capfd.readouterr().err
    assert said.count(": starts\n") == 4
    lines = ends_in(said)
    assert len(lines) == 4 and sum(": failed: warmup_steps: got 8" in line for line in lines) == 2, lines
    assert len(list((tmp_path / "results" / "tiny").glob("standard-*.json"))) == 2


def test_a_worker_that_dies_is_reported(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "PROGRAM", "import sys; sys.stdin.buffer.read(1); sys.exit(3)")
    with pytest.raises(RuntimeError, match="2 of 2 workers"):
        go(corpora, tmp_path, workers=2)


@pytest.fixture
def one_thread(monkeypatch):
    """Here and in whatever is started, as the number of threads decides the last bits."""
    threads = torch.get_num_threads()
    path = [str(Path(experiments.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_each_run_is_a_job_and_its_record_the_same(corpora, tmp_path, one_thread, monkeypatch, capfd):
    """One that was stopped goes on, one that another process holds is left to it, and one that fails is named."""
    broken = Arm(name="broken", train={"warmup_steps": 40})
    of = replace(LONG, arms=(STANDARD, BOOSTED, broken), seeds=(1,))
    stopped, held, _ = of.runs()
    kill_in_mid_run(start(of, corpora, tmp_path, 1), tmp_path, 1)
    (kept,) = (path / "training.json" for path in under_way(tmp_path))
    state = json.loads(kept.read_text())
    state["seconds"] = 1e6  # by which the record of who goes on from it is known
    kept.write_text(json.dumps(state | {"sha256": manifest_checksum(state)}))
    (tmp_path / "work" / held.id).mkdir()
    with FileLock(tmp_path / "work" / held.id / "lock"), pytest.raises(RuntimeError) as caught:
        go(corpora, tmp_path, of, cluster={"cluster": "local", "timeout_min": 10})
    said = str(caught.value)
    assert said.startswith("1 of 3 runs failed, the first broken-seed1-") and "warmup_steps: got 40; want" in said
    assert "3 jobs submitted, logs in " in capfd.readouterr().err
    (found,) = records_of(of, tmp_path / "results")
    assert found.settings["id"] == stopped.id and found.measured["seconds"] > 1e6
    (tmp_path / "whole").mkdir()
    (whole,) = go(corpora, tmp_path / "whole", replace(of, arms=(STANDARD,)))
    assert untimed([found]) == untimed([whole])
    assert found.settings | {"planned": 1} == whole.settings and found.provenance == whole.provenance


def test_a_job_that_is_stopped_asks_for_the_same_again():
    again = Job().checkpoint("share")
    assert isinstance(again.function, Job) and (again.args, again.kwargs) == (("share",), {})


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a POSIX signal here.")
def test_ctrl_c_ends_a_worker_while_it_imports():
    """In silence: the process that started it says what there is to say."""
    loading = workers.PROGRAM.replace("; from", "; print(flush=True); import time; time.sleep(60); from")
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {loading}"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", heeding], **pipes)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == b"" and process.returncode == -signal.SIGINT


def test_a_run_that_fails_holds_up_no_other(corpora, tmp_path, monkeypatch, capsys):
    performed = []

    def perform(one, *_, **__):
        performed.append(one.id)
        if one.seed == 1:
            raise OSError(f"no {one.arm.name}")
        return made(one, corpora)

    monkeypatch.setattr(workers, "train_and_score", perform)
    with pytest.raises(OSError, match="no standard"):
        go(corpora, tmp_path)
    assert sorted(performed) == sorted(one.id for one in TINY.runs())
    assert [r.settings["seed"] for r in records_of(TINY, tmp_path / "results")] == [2, 2]
    said = ends_in(capsys.readouterr().err)  # at once, not only at the end
    assert [line.split(": ", 1)[1] for line in said[:2]] == ["failed: no standard", "failed: no boosted_residual"]


def test_a_place_that_cannot_be_holds_up_no_other(corpora, tmp_path, monkeypatch, capsys):
    """Nor does a record that is damaged."""
    monkeypatch.setattr(workers, "train_and_score", lambda one, *_, **__: made(one, corpora))
    runs = TINY.runs()
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / runs[0].id).write_text("a file where the folder of the run is to be")
    torn = tmp_path / "results" / "tiny" / f"{runs[1].name}.json"
    torn.parent.mkdir(parents=True)
    torn.write_text(json.dumps({"experiment": "tiny", "settings": {}, "measured": {}}))
    with pytest.raises(FileExistsError, match=runs[0].id):
        go(corpora, tmp_path)
    lines = ends_in(capsys.readouterr().err)
    assert [": failed: " in line for line in lines] == [True, True, False, False]
    assert f"{torn}: got a damaged record; want a whole one" in lines[1]


def test_where_runs_live_is_looked_at_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "work_through", lambda *share: pytest.fail("a run was started"))
    (tmp_path / "work").write_text("a file")
    with refused("work"):
        go(corpora, tmp_path)


def test_a_record_of_another_text_is_not_taken_over(corpora, tmp_path):
    """The same folder, with other files since."""
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    options = dict(folder=tmp_path / "results", corpora=tmp_path, progress=False)
    before, after = (replace(TINY, name=name, seeds=(1,), arms=(STANDARD,)) for name in ("before", "after"))
    (first_run,) = before.runs()
    (first,) = run_experiment(before, work=tmp_path / "work", **options)
    text = tmp_path / "tiny" / "train.txt"
    text.write_text(text.read_text()[::-1])
    (second,) = run_experiment(after, work=tmp_path / "elsewhere", **options)
    assert first.settings["text"]["fingerprint"] != second.settings["text"]["fingerprint"]
    assert first.measured["test_loss"] != second.measured["test_loss"]
    with refused(tmp_path / "results" / "before" / f"{first_run.name}.json", got="text.fingerprint"):
        run_experiment(replace(before, seeds=(1, 2)), work=tmp_path / "work", **options)


def test_finished_runs_are_those_of_the_text_that_is_here(corpora, tmp_path):
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    one = replace(TINY, seeds=(1,), arms=(STANDARD,))
    records = go(tmp_path, tmp_path, one)
    assert go(tmp_path, tmp_path, one) == records
    (tmp_path / "tiny" / "valid.txt").write_text("a cat sat on the dog and ran on a mat\n")
    with refused(tmp_path / "results" / "tiny" / f"{one.runs()[0].name}.json", got="text.fingerprint"):
        go(tmp_path, tmp_path, one)
    with refused("corpora"):
        go(tmp_path / "gone", tmp_path, one)
    assert records_of(one, tmp_path / "results") == records  # without the text nothing can be asked of it
    assert go(None, tmp_path, one) == records


def test_rates_are_those_of_the_text_that_is_here(corpora, tmp_path):
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    sweep = replace(TINY, name="sweep", seeds=(3,), arms=(STANDARD,), grid={"learning_rate": (1e-3, 2e-3)})
    after = replace(UNRATED, name="after", seeds=(1,), arms=(STANDARD,), rates_from=sweep)
    go(tmp_path, tmp_path, sweep)
    (tmp_path / "tiny" / "valid.txt").write_text("a cat sat on the dog and ran on a mat\n")
    changed = tmp_path / "results" / "sweep" / f"{sweep.runs()[0].name}.json"
    with refused(changed, got="text.fingerprint"):
        go(tmp_path, tmp_path, after)
    assert not (tmp_path / "results" / "after").exists()
    with refused(changed, got="text.fingerprint"):
        go(tmp_path, tmp_path, replace(after, corpus=replace(TINY.corpus, max_valid_tokens=8)))
    go(corpora, tmp_path, after)
    with refused(changed, got="text.fingerprint"):
        go(tmp_path, tmp_path, after)  # also when all is in


def test_a_profile_that_is_none_is_refused_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "work_through", lambda *share: pytest.fail("a run was started"))
    monkeypatch.setenv("GBATTN_PROFILE", "fast")
    with refused("GBATTN_PROFILE"):
        go(corpora, tmp_path)


def test_what_wants_a_gpu_is_refused_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(queue, "work_through", lambda *share: pytest.fail("a run was started"))
    with refused("precision"):
        go(corpora, tmp_path, replace(TINY, train=TINY.train | dict(precision="tf32")))


def test_a_run_that_diverges_is_a_result(corpora, tmp_path, monkeypatch):
    def burst(*args, **options):
        raise FloatingPointError("loss is nan in step 3")

    monkeypatch.setattr(workers, "train", burst)
    found = go(corpora, tmp_path)
    assert len(found) == 4 and all(r.measured["diverged"] and r.measured["test_loss"] is None for r in found)
    assert found[0].measured["why"] == "loss is nan in step 3"
    burst_before = found
    guess = SimpleNamespace(step=[8], seconds=[1.0], loss=[6.0], validation_step=[8], validation_loss=[6.0])
    guess.best_step, guess.best_loss = 8, 6.0
    monkeypatch.setattr(workers, "train", lambda *args, **options: guess)
    found = go(corpora, tmp_path / "guess")
    assert all(r.measured["diverged"] and "no better than a guess" in r.measured["why"] for r in found)
    with refused("records"):
        best_rates(found)
    row = compare(found)[0]
    assert row.n == 0 and row.diverged == 2 and row.mean == math.inf and row.difference is None
    assert row.seconds == 1.0 and row.training_flops > 0
    row = compare(burst_before)[0]
    assert row.seconds is None and row.training_flops is None


def test_a_folder_of_records_that_cannot_be_is_refused_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "work_through", lambda *share: pytest.fail("a run was started"))
    (tmp_path / "results").write_text("a file")
    with refused("folder"):
        go(corpora, tmp_path)


def test_a_missing_package_is_named_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with refused("filelock", "pip install"):
        go(corpora, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_its_text_an_experiment_leaves_nothing_behind(tmp_path):
    elsewhere = replace(TINY, corpus=CorpusSpec(name="elsewhere"))
    with refused("corpora"):
        go(tmp_path, tmp_path, elsewhere)
    assert not list(tmp_path.iterdir())


def test_a_text_too_poor_for_its_vocabulary_is_refused(corpora, tmp_path):
    with refused("corpus", "vocab_size="):
        go(corpora, tmp_path, replace(TINY, corpus=CorpusSpec(name="tiny", vocab_size=5000)))


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: run_experiment("nothing"), "experiment"),
        (lambda: run_experiment(TINY, workers=0), "workers"),
        (lambda: run_experiment(TINY, cluster="slurm"), "cluster"),
        (lambda: job_executor({"cluster": "no"}, Path("x")), "cluster"),
        (lambda: run_experiment(TINY, cluster={}, workers=2), "workers"),
        (lambda: run_experiment(TINY, shard=(3, 2)), "shard"),
        (lambda: run_experiment(TINY, shard=(1,)), "shard"),
        (lambda: records_of("nothing"), "experiment"),
        (lambda: compare(TINY), "records"),
        (lambda: load_text(CorpusSpec(name="nowhere"), "/"), "corpora"),
        (lambda: load_text(CorpusSpec(name="nowhere"), 3), "corpora"),
        (lambda: run_experiment(TINY, progress="False"), "progress"),
        (lambda: run_experiment(TINY, folder=3), "folder"),
        (lambda: run_experiment(TINY, work=b"x"), "work"),
        (lambda: run_experiment(TINY, corpora=3), "corpora"),
        (lambda: records_of(TINY, 3), "folder"),
    ],
)
def test_what_is_no_experiment_text_or_place_is_refused_by_its_name(call, argument):
    with refused(argument):
        call()
