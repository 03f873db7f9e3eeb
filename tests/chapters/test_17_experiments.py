"""Chapter 17: names of runs, the catalogue, one's own files, the queue and its faults, rates from a sweep, errors."""

import hashlib
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
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock

from gbattn import experiments
from gbattn.comparison import MEASURES, best_rates, compare
from gbattn.conventions import Record
from gbattn.cost import attention_cost
from gbattn.experiments import Arm, CorpusSpec, Experiment
from gbattn.lab import training
from gbattn.lab.catalogue import CATALOGUE, EXPERIMENTS, find_experiment
from gbattn.lab.checkpoints import checkpoints
from gbattn.lab.queue import run
from gbattn.lab.records import comparable, records_of
from gbattn.lab.status import least_seconds, status_of
from gbattn.lab.token_cache import manifest_checksum
from gbattn.language_model import LanguageModel, model_cost
from gbattn.layers import MultiHeadAttention, make_attention
from gbattn.training import evaluate

STANDARD, WIDER, BOOSTED = EXPERIMENTS["quick"].arms


# Names of runs


def test_what_is_to_be_equal_is_so_at_each_size_of_a_grid():
    grid = {"d_model": (16, 32), "norm": ("pre", "post")}
    made = {}
    for one in replace(TINY, arms=(STANDARD, BOOSTED, WIDER), seeds=(1,), grid=grid).runs():
        made.setdefault((one.model.norm, one.varied["d_model"]), {})[one.arm.name] = one.model
    assert len(made) == 4
    for (norm, width), of in made.items():
        assert of["standard"].d_model == of["boosted_residual"].d_model == width <= of["wider"].d_model
        size = {name: MEASURES["parameters"](config) for name, config in of.items()}
        assert size["wider"] == pytest.approx(size["boosted_residual"], rel=0.01)
        assert all(config.norm == norm for config in of.values())


def test_ids_are_those_of_the_committed_records():
    """A changed id would orphan hours of runs."""
    first = EXPERIMENTS["mini-sweep"].runs()[0]
    assert first.name == f"standard-lr0.001-seed0-{first.id}"
    assert first.id == "3b6ce67907d7"
    assert EXPERIMENTS["blocks-postln"].runs()[-1].id == "c65f476e0833"


def runs_of(experiment):
    """All its runs, at the rates of its sweep, or at 0.001 where that is not finished."""
    try:
        return experiment.tuned().runs()
    except ValueError:
        train = experiment.train | {"learning_rate": 0.001}
        return replace(experiment, rates_from=None, rate_of="", train=train).runs()


def test_the_runs_of_the_catalogue_are_those_of_the_first_day():
    """Names, and with them ids, seeds and rates, of each experiment as it was when its sweep was finished."""
    known = json.loads((Path(__file__).parents[1] / "support" / "catalogue.json").read_text())
    digest = lambda names: hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    found = {name: [one.name for one in runs_of(EXPERIMENTS[name])] for name in known}
    assert {name: [len(names), digest(names)] for name, names in found.items()} == known


def test_the_catalogue_is_its_files():
    assert {path.stem for path in CATALOGUE.glob("[!_]*.toml")} == set(EXPERIMENTS)
    for name, experiment in EXPERIMENTS.items():
        assert experiment.name == name
        assert find_experiment(str(CATALOGUE / f"{name}.toml")) == experiment


def test_no_chapter_has_records_under_the_name_of_another_ones_experiment():
    """A folder of records is found by its name, in whichever chapter it lies."""
    results, homes = Path(__file__).parents[2] / "results", {}
    for folder in results.glob("*/*/"):
        homes.setdefault(folder.name, []).append(folder)
    assert {name: of for name, of in homes.items() if len(of) > 1} == {}
    for name in set(EXPERIMENTS) & set(homes):
        for path in homes[name][0].glob("*.json"):
            assert path.stem.endswith(json.loads(path.read_text())["settings"].get("id", "?")), path


OWN = """
question = "a test"
arms = ["standard", "boosted_residual", "gated"]
seeds = [1, 2]

[corpus]
name = "tiny"
vocab_size = 260

[model]
max_length = 16
d_model = 8
n_layers = 1
n_heads = 2
dropout = 0.1

[train]
steps = 8
batch_size = 4
evaluate_every = 4
log_every = 2
learning_rate = 0.001
warmup_steps = 2

[arm.gated]
model = { attention = "boosted", attention_options.gate = "head" }
"""


def test_an_experiment_of_ones_own(corpora, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    gated = Arm(name="gated", model={"attention": "boosted", "attention_options": {"gate": "head"}})
    own = find_experiment(path)
    assert own == Experiment.from_toml(str(path)) == replace(TINY, name="own", arms=(*TINY.arms, gated))
    (tmp_path / "further.toml").write_text(
        'question = "?"\nextends = "own.toml"\nseeds = [3]\narms = ["gated"]\n'
        'train.steps = 4\ntrain.learning_rate = 0.001\narm.gated.model.attention_options.gate = "none"\n'
    )
    further = Experiment.from_toml(tmp_path / "further.toml")
    model = {"attention": "boosted", "attention_options": {"gate": "none"}}
    arms, train = (Arm(name="gated", model=model),), TINY.train | dict(steps=4)
    assert further == replace(TINY, name="further", question="?", seeds=(3,), arms=arms, train=train)
    records = run(str(tmp_path / "further.toml"), folder=tmp_path, work=tmp_path / "work", corpora=corpora)
    assert records == records_of(tmp_path / "further.toml", tmp_path) and len(records) == 1


def test_rates_from_a_sweep_of_ones_own(tmp_path):
    sweep = OWN.replace("learning_rate = 0.001\n", "") + "[grid]\nlearning_rate = [0.001, 0.002]\n"
    (tmp_path / "sweep.toml").write_text(sweep)
    (tmp_path / "after.toml").write_text(
        'question = ""\nextends = "sweep.toml"\nrates_from = "sweep.toml"\nseeds = [7]\n'
    )
    after = Experiment.from_toml(tmp_path / "after.toml")
    assert after.rates_from == Experiment.from_toml(tmp_path / "sweep.toml") and after.grid == {}
    # Neither is inherited, and without a word the rate would be the default.
    for extended in ("sweep", "after"):
        (tmp_path / "unrated.toml").write_text(f'question = ""\nextends = "{extended}.toml"\n')
        with pytest.raises(ValueError, match="rates_from: got nothing; want it, train.learning_rate or grid"):
            Experiment.from_toml(tmp_path / "unrated.toml")
        for rated in ('rates_from = "sweep.toml"', "train.learning_rate = 0.1", "grid.learning_rate = [0.1, 0.2]"):
            (tmp_path / "rated.toml").write_text(f'question = ""\nextends = "{extended}.toml"\n{rated}\n')
            assert Experiment.from_toml(tmp_path / "rated.toml").name == "rated"


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("seeds =", "seed =", "seed: got an unknown key; want one of question, extends"),
        ("[1, 2]", "3", "seeds: got 3; want an array"),
        ("[1, 2]", "[-1]", "seeds: got (-1,); want a tuple of integers, 0 or more"),
        ('"a test"', "true", "question: got True; want a string"),
        ("seeds = [1, 2]", "", "seeds: got nothing; want list, here or in what it extends"),
        ('"gated"]', '"gates"]', "arms: got 'gates'; want some of standard, twicing"),
        ('"gated"]', "3]", "arms: got 3; want some of standard"),
        ("vocab_size", "vocab", "corpus.vocab: got an unknown key; want one of fingerprint"),
        ('name = "tiny"', "", "corpus: name: got ''; want a string"),
        ("260", '"many"', "corpus: vocab_size: got 'many'; want a positive integer"),
        ("d_model", "width", "model: got ['width']; want fields of ModelConfig"),
        ("d_model = 8", 'd_model = "8"', "arm.standard: d_model: got '8'"),
        ("steps = 8", "steps = 0.5", "arm.standard: steps: got 0.5"),
        ("batch_size = 4", "batch_size = 9_000_000_000_000", "arm.standard: batch_size: got 9000000000000; want"),
        ("n_layers = 1", "n_layers = 1_000_000_000", "arm.standard: n_layers: got 1000000000; want"),
        (
            "[arm.gated]",
            f"[grid]\ninit_std = {[*range(1, 4000)]}\n[arm.gated]",
            "arms, seeds, grid: got 23994 runs; want",
        ),
        ('gate = "head"', 'gate = "x"', "arm.gated: "),
        ("[arm.gated]", "[arm.gated]\ncolour = 3", "arm.gated.colour: got an unknown key; want one of change"),
        ("[arm.gated]", "[arm.gated]\nequal_in = 3", "arm.gated: equal_in: got 3; want one of 'parameters'"),
        ("[arm.gated]", '[arm.gated]\nequal_to = "gated"', "got files or arms that refer to one another in a circle"),
        ("[arm.gated]", "[arm]\ngated = 3\n[arm.x]", "arm.gated: got 3; want a table"),
        ("[arm.gated]", "[grid]\nd_model = [8, 0]\n[arm.gated]", "arm.standard: d_model: got 0"),
        ('question = "a test"', 'question = "a test"\nextends = "x.toml"', "extends: experiment: got "),
        ('question = "a test"', 'question = "a test"\nextends = "own.toml"', "got files or arms that refer"),
        ('question = "a test"', 'question = "a test"\nextends = "x"', "experiment: got 'x'; want one of quick"),
        ('question = "a test"', 'question = "a test"\nrates_from = "x"', "experiment: got 'x'; want one of quick"),
        ("[corpus]", "[corpus", "Expected ']' at the end of a table declaration"),
    ],
)
def test_a_file_is_refused_by_its_name_and_the_key(tmp_path, old, new, message):
    path = tmp_path / "own.toml"
    assert OWN.count(old) == 1
    path.write_text(OWN.replace(old, new))
    with pytest.raises(ValueError) as caught:
        find_experiment(str(path))
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_that_is_not_there_or_has_a_name_of_the_book(tmp_path):
    with pytest.raises(ValueError, match="^experiment: got .*own.toml; want a TOML file"):
        find_experiment(tmp_path / "own.toml")
    (tmp_path / "mini.toml").write_text(OWN)
    with pytest.raises(ValueError, match="experiment: got .*mini.toml; want a file name that is not that of"):
        find_experiment(tmp_path / "mini.toml")


def test_everything_that_decides_is_in_the_id_and_nothing_else():
    one = EXPERIMENTS["mini-sweep"].runs()[0]
    same = [
        replace(one, arm=replace(one.arm, name="other", label="other")),
        replace(one, experiment="other"),
        replace(one, planned=7, varied={}),
    ]
    assert {other.id for other in same} == {one.id}
    other_model = dict(d_model=72, n_layers=3, d_ffn=100, norm="post", dropout=0.2, attention="boosted", init_std=0.1)
    other_train = dict(seed=9, learning_rate=1e-4, clip=None, warmup_steps=3, epochs=2, betas=(0.8, 0.9), compile=True)
    other_text = dict(
        name="x", vocab_size=2049, max_train_tokens=5, max_valid_tokens=6, fingerprint="0", tokenizer="published"
    )
    changed = [replace(one, model=replace(one.model, **{k: v})) for k, v in other_model.items()]
    changed += [replace(one, train=replace(one.train, **{k: v})) for k, v in other_train.items()]
    changed += [replace(one, corpus=replace(one.corpus, **{k: v})) for k, v in other_text.items()]
    ids = [one.id, *(other.id for other in changed)]
    assert len(set(ids)) == len(ids)


def test_a_default_may_be_stated():
    one = EXPERIMENTS["mini-sweep"].runs()[0]
    assert replace(one, train=replace(one.train, schedule="cosine")).id == one.id


@pytest.mark.parametrize("name", list(EXPERIMENTS))
def test_the_declared_experiments_hold_together(name):
    experiment = EXPERIMENTS[name]
    # What is equal in time has its size from the records of a sweep; here it keeps that of `model`.
    arms = tuple(replace(arm, equal_to=None) if arm.equal_in == "time" else arm for arm in experiment.arms)
    runs = replace(experiment, arms=arms, seeds=experiment.seeds[:1]).runs()
    assert len({one.id for one in runs}) == len(runs)
    assert {one.planned for one in runs} == {len(runs)}
    if name in ("mini-quarter", "mini-fourfold"):  # as many updates as mini, and no other model
        mini = EXPERIMENTS["mini"].corpus
        assert runs[0].train.steps == 15 * ((mini.max_train_tokens - 1) // 128) // 32
        assert experiment.corpus.max_train_tokens in (mini.max_train_tokens / 4, mini.max_train_tokens * 4)
        assert experiment.model == EXPERIMENTS["mini"].model
    if name == "ladder-96-rotary":  # without weights for positions, and on the same text
        assert experiment.corpus == EXPERIMENTS["ladder-96"].corpus
    elif name.startswith("ladder"):  # as many tokens a parameter as mini
        share = lambda e: e.corpus.max_train_tokens / MEASURES["parameters"](e.model_of(STANDARD))
        assert share(experiment) == pytest.approx(share(EXPERIMENTS["mini"]), rel=1e-2)
    rival = {arm.name: experiment.model_of(arm) for arm in arms}
    if {"wider", "boosted_residual"} <= set(rival) and not name.startswith("paper"):
        sizes = [MEASURES["parameters"](rival[arm]) for arm in ("wider", "boosted_residual")]
        assert sizes[0] == pytest.approx(sizes[1], rel=5e-3)


def test_the_arms_of_the_small_tables():
    """Six arms in the main table, and beside it twicing where its authors had it, each equality, more
    layers, each source of K and V, three rounds and each gate, every rival as equal as it says."""
    model_of = EXPERIMENTS["mini"].model_of
    main, further = ({arm.name: arm for arm in EXPERIMENTS[name].arms} for name in ("mini", "mini-arms"))
    assert list(main) == ["standard", "twicing", "wider", "boosted_residual", "boosted_input", "wider_flops"]
    assert set(further) == {
        *("twicing_last2", "wider_non_embedding", "wider_time", "deeper", "boosted_3"),
        *("boosted_shared", "boosted_head", "boosted_scalar", "boosted_none"),
    }
    last2 = LanguageModel(model_of(further["twicing_last2"]))
    assert [type(block.attention).__name__ for block in last2.blocks] == 2 * ["MultiHeadAttention"] + 2 * [
        "TwicingAttention"
    ]
    options = {name: model_of(arm).attention_options for name, arm in (main | further).items() if "boosted" in name}
    assert {of["kv_from"] for of in options.values()} == {"residual", "input", "shared"}
    assert {of.get("gate", "feature") for of in options.values()} == {"feature", "head", "scalar", "none"}
    assert options["boosted_3"]["rounds"] == 3
    boosted = model_of(BOOSTED)
    for arm, within in ((main["wider_flops"], 1e-2), (further["wider_non_embedding"], 5e-3), (further["deeper"], 0.1)):
        sizes = [MEASURES[arm.equal_in](config) for config in (model_of(arm), boosted)]
        assert sizes[0] == pytest.approx(sizes[1], rel=within), arm.name
    deeper = model_of(further["deeper"])
    assert deeper.n_layers > boosted.n_layers and deeper.d_model == boosted.d_model


def test_the_published_scale():
    """10 million tokens, as published, and the published sizes."""
    for name in ("paper", "paper-openwebtext"):
        experiment = EXPERIMENTS[name]
        assert experiment.corpus.max_train_tokens == 10_000_000 and experiment.train["epochs"] == 15
        sizes = {arm.name: MEASURES["parameters"](experiment.model_of(arm)) for arm in experiment.arms}
        for arm, millions in (("standard", 7.42), ("twicing", 7.42), ("wider", 8.79), ("boosted_residual", 8.73)):
            assert sizes[arm] == pytest.approx(millions * 1e6, rel=2e-3), arm


def test_a_wider_arm_shares_no_weight():
    """What the chapter says of pairs of different width."""
    one, two = (LanguageModel(EXPERIMENTS["mini"].model_of(arm), seed=1).state_dict() for arm in (WIDER, BOOSTED))
    shared = set(one) & set(two)
    assert len(shared) == len(one) and not any(one[name].shape == two[name].shape for name in shared)


def test_arms_of_a_seed_start_from_the_same_weights_by_name():
    runs = [one for one in EXPERIMENTS["quick"].runs() if one.arm.name in ("standard", "boosted_residual")]
    for seed in (1, 2):
        one, two = (LanguageModel(r.model, seed=r.seed).state_dict() for r in runs if r.seed == seed)
        shared = [name for name in one if name in two]
        assert len(shared) == len(one) and all((one[name] == two[name]).all() for name in shared)


# The queue


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "tiny").mkdir()
    words = np.random.default_rng(0).choice(["a cat", "the dog", "sat", "ran", "on a mat", "and"], 4000)
    for split, part in (("train", words), ("valid", words[:300]), ("test", words[300:650])):
        (folder / "tiny" / f"{split}.txt").write_text(" ".join(part) + "\n")
    os.environ["GBATTN_CACHE"] = str(folder / "cache")
    return folder


TINY = Experiment(
    name="tiny",
    question="a test",
    corpus=CorpusSpec(name="tiny", vocab_size=260),
    model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2, dropout=0.1),
    train=dict(steps=8, batch_size=4, evaluate_every=4, log_every=2, learning_rate=1e-3, warmup_steps=2),
    arms=(STANDARD, BOOSTED),
    seeds=(1, 2),
)


def go(corpora, place, experiment=TINY, **options):
    return run(experiment, folder=place / "results", work=place / "work", corpora=corpora, progress=False, **options)


def ends_in(said):
    """The lines on how runs ended, of what a queue says."""
    return [line for line in said.splitlines() if not line.endswith(": starts")]


def untimed(records):
    return [{k: v for k, v in r.measured.items() if "seconds" not in k} for r in records]


@pytest.fixture(scope="module")
def finished(corpora, tmp_path_factory):
    place = tmp_path_factory.mktemp("finished")
    return place, go(corpora, place)


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
        text = one.corpus.load(corpora)
        for split in ("valid", "test"):
            known = evaluate(model, getattr(text, split), length=16, n_bytes=text.scored_bytes(split))
            found = [m[f"{split}_{what}"] for what in ("loss", "perplexity", "bits_per_byte", "tokens")]
            assert found == pytest.approx([known.loss, known.perplexity, known.bits_per_byte, known.n_tokens])


def test_what_is_finished_is_not_run_again(finished, corpora, monkeypatch):
    place, records = finished
    monkeypatch.setattr(experiments, "_perform", None)
    assert go(corpora, place) == records
    assert records_of(TINY, place / "results") == records


def test_a_record_of_a_run_that_is_no_more_does_not_count(finished):
    """As when a sweep has found a better rate since."""
    place, records = finished
    faster = replace(STANDARD, train={"learning_rate": 2e-3})
    assert records_of(replace(TINY, arms=(faster, BOOSTED)), place / "results") == records[1::2]


def test_another_experiment_takes_over_the_same_run(finished, corpora, monkeypatch):
    place, records = finished
    monkeypatch.setattr(experiments, "_perform", None)
    other = replace(TINY, name="other", arms=(replace(STANDARD, name="plain"),))
    found = go(corpora, place, other)
    assert untimed(found) == untimed(records[::2])
    assert [(r.experiment, r.settings["arm"], r.settings["planned"]) for r in found] == [("other", "plain", 2)] * 2


def test_an_experiment_of_the_book_begins_in_the_chapter_of_results(finished, corpora, tmp_path, monkeypatch):
    """And its runs are found there by others."""
    place, records = finished
    monkeypatch.setitem(experiments.EXPERIMENTS.data, "tiny", TINY)
    chapter = tmp_path / "results" / "18_perplexity"
    chapter.mkdir(parents=True)
    shutil.copytree(place / "work", tmp_path / "work")
    assert len(go(corpora, tmp_path)) == 4
    assert [path.name for path in chapter.iterdir()] == ["tiny"]
    monkeypatch.setattr(experiments, "_perform", None)
    own = go(corpora, tmp_path, replace(TINY, name="own"))
    assert untimed(own) == untimed(records) and (tmp_path / "results" / "own").is_dir()


def test_a_changed_default_is_found_out(finished, corpora):
    place, records = finished
    path = next((place / "results" / "tiny").glob("standard-seed1*"))
    kept = path.read_text()
    changed = json.loads(kept)
    changed["settings"]["train"]["final_fraction"] = 0.5
    path.write_text(json.dumps(changed))
    with pytest.raises(ValueError, match=r"other settings: train\.final_fraction; want those of the run"):
        go(corpora, place)
    path.write_text(kept)


def test_shards_do_each_run_once_and_leave_pairs_together(corpora, tmp_path, monkeypatch):
    performed = []
    monkeypatch.setattr(experiments, "_perform", lambda one, *_: performed.append(one) or made(one, corpora))
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


def made(one, corpora=None):
    measured = dict(diverged=False, test_loss=1.0, valid_loss=1.0, test_perplexity=2.7, seconds=1.0)
    measured |= dict(parameters=1, non_embedding=1)
    text = one.settings["text"] | {"fingerprint": one.corpus.load(corpora).fingerprint if corpora else "f"}
    return Record(one.experiment, one.settings | {"text": text}, measured)


def test_workers_side_by_side_share_the_runs(corpora, tmp_path, monkeypatch):
    performed = []

    def perform(one, *_):
        performed.append(one.id)
        time.sleep(0.05)
        return made(one, corpora)

    monkeypatch.setattr(experiments, "_perform", perform)
    many = replace(TINY, seeds=tuple(range(10)))
    threads = [threading.Thread(target=go, args=(corpora, tmp_path, many)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(performed) == sorted(one.id for one in many.runs())


def test_a_run_that_another_holds_is_left_to_it(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_perform", lambda one, *_: made(one, corpora))
    held = TINY.runs()[1]
    (tmp_path / "work" / held.id).mkdir(parents=True)
    with FileLock(tmp_path / "work" / held.id / "lock"):
        found = go(corpora, tmp_path)
        assert len(found) == 3 and held.id not in {r.settings["id"] for r in found}
    assert len(go(corpora, tmp_path)) == 4


def test_drafts_of_a_killed_process_are_cleared_by_who_goes_on_with_the_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_perform", lambda one, *_: made(one, corpora))
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
from gbattn.lab.queue import run
experiment, options = pickle.load(sys.stdin.buffer)
print(len(run(experiment, progress=False, **options)))
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
    monkeypatch.setattr(experiments, "_START", "import sys; sys.stdin.buffer.read(1); sys.exit(3)")
    with pytest.raises(RuntimeError, match="2 of 2 workers ended with an error; what is finished is kept"):
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
    broken, update = Arm(name="broken", train={"warmup_steps": 40}), training.update
    of = replace(LONG, arms=(STANDARD, BOOSTED, broken), seeds=(1,))
    stopped, held, _ = of.runs()

    def dying(one):
        if one.step == 20:
            raise KeyboardInterrupt
        update(one)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(training, "update", dying)
        go(corpora, tmp_path, of)
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
    again = experiments._Job().checkpoint("runs", "folder")
    assert isinstance(again.function, experiments._Job) and (again.args, again.kwargs) == (("runs", "folder"), {})


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a POSIX signal here.")
def test_ctrl_c_ends_a_worker_while_it_imports():
    """In silence: the process that started it says what there is to say."""
    loading = experiments._START.replace("; from", "; print(flush=True); import time; time.sleep(60); from")
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {loading}"
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process = subprocess.Popen([sys.executable, "-c", heeding], **pipes)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=30)[1] == b"" and process.returncode == -signal.SIGINT


def test_a_run_that_fails_holds_up_no_other(corpora, tmp_path, monkeypatch, capsys):
    performed = []

    def perform(one, *_):
        performed.append(one.id)
        if one.seed == 1:
            raise OSError(f"no {one.arm.name}")
        return made(one, corpora)

    monkeypatch.setattr(experiments, "_perform", perform)
    with pytest.raises(OSError, match="no standard"):
        go(corpora, tmp_path)
    assert sorted(performed) == sorted(one.id for one in TINY.runs())
    assert [r.settings["seed"] for r in records_of(TINY, tmp_path / "results")] == [2, 2]
    said = ends_in(capsys.readouterr().err)  # at once, not only at the end
    assert [line.split(": ", 1)[1] for line in said[:2]] == ["failed: no standard", "failed: no boosted_residual"]


def test_a_place_that_cannot_be_holds_up_no_other(corpora, tmp_path, monkeypatch, capsys):
    """Nor does a record that is damaged."""
    monkeypatch.setattr(experiments, "_perform", lambda one, *_: made(one, corpora))
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
    monkeypatch.setattr(experiments, "_work", lambda *share: pytest.fail("a run was started"))
    (tmp_path / "work").write_text("a file")
    with pytest.raises(ValueError, match="work: got .*work .*; want one that can be written to"):
        go(corpora, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"settings": []},
        lambda found: found | {"settings": found["settings"] | {"text": "tiny"}},
        lambda found: found | {"settings": {k: v for k, v in found["settings"].items() if k != "model"}},
        lambda found: found | {"settings": {k: v for k, v in found["settings"].items() if k != "label"}},
        lambda found: found | {"measured": {k: v for k, v in found["measured"].items() if k != "diverged"}},
        lambda found: found | {"measured": {k: v for k, v in found["measured"].items() if k != "test_loss"}},
        lambda found: found | {"settings": found["settings"] | {"text": {"name": "tiny"}}},
        lambda found: found | {"measured": None},
        lambda found: found | {"measured": found["measured"] | {"diverged": "no"}},
        lambda found: found | {"measured": found["measured"] | {"valid_loss": "3.5"}},
        lambda found: found | {"measured": found["measured"] | {"test_loss": math.nan}},
        lambda found: found | {"measured": found["measured"] | {"parameters": -1}},
        lambda found: found | {"measured": found["measured"] | {"seconds": None}},
        lambda found: found | {"measured": found["measured"] | {"train_step": [0, True]}},
        lambda found: found | {"settings": found["settings"] | {"learning_rate": "fast"}},
    ],
)
def test_a_record_that_is_not_whole_is_damaged(finished, tmp_path, change):
    place, records = finished
    shutil.copytree(place / "results" / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / f"{TINY.runs()[0].name}.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=f"{path.name}: got a damaged record; want a whole one: delete it"):
        records_of(TINY, tmp_path)


@pytest.mark.parametrize(
    "change", [{"experiment": "other"}, {"settings": {"arm": "boosted_residual"}}, {"settings": {"seed": 7}}]
)
def test_a_record_under_the_name_of_another_is_refused(finished, tmp_path, change):
    place, records = finished
    shutil.copytree(place / "results" / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / f"{TINY.runs()[0].name}.json"
    found = json.loads(path.read_text())
    settings = found["settings"] | change.get("settings", {})
    path.write_text(json.dumps(found | change | {"settings": settings}))
    with pytest.raises(ValueError, match=f"{path.name}: got a record of .*; want .*'tiny', 'standard'.*delete the"):
        records_of(TINY, tmp_path)


def test_a_record_of_another_text_is_not_taken_over(corpora, tmp_path):
    """The same folder, with other files since."""
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    options = dict(folder=tmp_path / "results", corpora=tmp_path, progress=False)
    before, after = (replace(TINY, name=name, seeds=(1,), arms=(STANDARD,)) for name in ("before", "after"))
    (first,) = run(before, work=tmp_path / "work", **options)
    text = tmp_path / "tiny" / "train.txt"
    text.write_text(text.read_text()[::-1])
    (second,) = run(after, work=tmp_path / "elsewhere", **options)
    assert first.settings["text"]["fingerprint"] != second.settings["text"]["fingerprint"]
    assert first.measured["test_loss"] != second.measured["test_loss"]
    with pytest.raises(ValueError, match="other settings: text.fingerprint; want .*: the text has changed since"):
        run(replace(before, seeds=(1, 2)), work=tmp_path / "work", **options)


def test_finished_runs_are_those_of_the_text_that_is_here(corpora, tmp_path):
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    one = replace(TINY, seeds=(1,), arms=(STANDARD,))
    records = go(tmp_path, tmp_path, one)
    assert go(tmp_path, tmp_path, one) == records
    (tmp_path / "tiny" / "valid.txt").write_text("a cat sat on the dog and ran on a mat\n")
    with pytest.raises(ValueError, match="other settings: text.fingerprint; want .*: the text has changed since"):
        go(tmp_path, tmp_path, one)
    with pytest.raises(ValueError, match="corpora: got .*gone; want a folder that holds tiny"):
        go(tmp_path / "gone", tmp_path, one)
    assert records_of(one, tmp_path / "results") == records  # without the text nothing can be asked of it
    assert go(None, tmp_path, one) == records


def test_rates_are_those_of_the_text_that_is_here(corpora, tmp_path):
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    sweep = replace(TINY, name="sweep", seeds=(3,), arms=(STANDARD,), grid={"learning_rate": (1e-3, 2e-3)})
    after = replace(UNRATED, name="after", seeds=(1,), arms=(STANDARD,), rates_from=sweep)
    go(tmp_path, tmp_path, sweep)
    (tmp_path / "tiny" / "valid.txt").write_text("a cat sat on the dog and ran on a mat\n")
    changed = pytest.raises(ValueError, match="sweep.*other settings: text.fingerprint; want .*: the text has changed")
    with changed:
        go(tmp_path, tmp_path, after)
    assert not (tmp_path / "results" / "after").exists()
    with changed:
        go(tmp_path, tmp_path, replace(after, corpus=replace(TINY.corpus, max_valid_tokens=8)))
    go(corpora, tmp_path, after)
    with changed:
        go(tmp_path, tmp_path, after)  # also when all is in


def test_a_text_is_that_of_the_folder_of_corpora(corpora, tmp_path, monkeypatch):
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / "valid.txt").write_text("a cat sat on the dog and ran on a mat\n")
    found = set()
    for folder in (corpora, tmp_path):
        monkeypatch.setenv("GBATTN_CORPORA", str(folder))
        found.add(TINY.corpus.load().fingerprint)
    assert len(found) == 2


def test_a_profile_that_is_none_is_refused_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "_work", lambda *share: pytest.fail("a run was started"))
    monkeypatch.setenv("GBATTN_PROFILE", "fast")
    with pytest.raises(ValueError, match="GBATTN_PROFILE: got 'fast'"):
        go(corpora, tmp_path)


def test_what_wants_a_gpu_is_refused_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(experiments, "_work", lambda *share: pytest.fail("a run was started"))
    with pytest.raises(ValueError, match="precision: got 'tf32' without a GPU"):
        go(corpora, tmp_path, replace(TINY, train=TINY.train | dict(precision="tf32")))


def test_a_run_that_diverges_is_a_result(corpora, tmp_path, monkeypatch):
    def burst(*args, **options):
        raise FloatingPointError("loss is nan in step 3")

    monkeypatch.setattr(experiments, "train", burst)
    found = go(corpora, tmp_path)
    assert len(found) == 4 and all(r.measured["diverged"] and r.measured["test_loss"] is None for r in found)
    assert found[0].measured["why"] == "loss is nan in step 3"
    burst_before = found
    guess = SimpleNamespace(step=[8], seconds=[1.0], loss=[6.0], validation_step=[8], validation_loss=[6.0])
    guess.best_step, guess.best_loss = 8, 6.0
    monkeypatch.setattr(experiments, "train", lambda *args, **options: guess)
    found = go(corpora, tmp_path / "guess")
    assert all(r.measured["diverged"] and "no better than a guess" in r.measured["why"] for r in found)
    with pytest.raises(ValueError, match="only runs of standard that diverged; want one that did not"):
        best_rates(found)
    row = compare(found)[0]
    assert row.n == 0 and row.diverged == 2 and row.mean == math.inf and row.difference is None
    assert row.seconds == 1.0 and row.training_flops > 0
    row = compare(burst_before)[0]
    assert row.seconds is None and row.training_flops is None


# The sweep and what takes its rates


UNRATED = replace(TINY, train={key: x for key, x in TINY.train.items() if key != "learning_rate"})


def swept(losses, folder, arms=TINY.arms, **more):
    """A sweep, and in a folder its records with these losses by arm and rate; None is a run that diverged."""
    rates = tuple(dict.fromkeys(rate for _, rate in losses))
    sweep = replace(TINY, name="sweep", arms=arms, seeds=(0, 3), grid={"learning_rate": rates})
    for one in sweep.runs():
        loss = losses[one.arm.name, one.train.learning_rate]
        found = dict(valid_loss=loss, test_loss=loss, diverged=loss is None, parameters=1, non_embedding=1)
        found |= more.get(one.arm.name, {})
        Record("sweep", one.settings, found).save(one.name, folder)
    return sweep


def test_rates_come_from_the_sweep(tmp_path):
    losses = {("standard", 1e-3): 2.0, ("standard", 2e-3): 1.0}
    losses |= {("boosted_residual", 1e-3): 1.0, ("boosted_residual", 2e-3): None}
    sweep = swept(losses, tmp_path)
    after = replace(UNRATED, name="after", rates_from=sweep)
    rates = [one.train.learning_rate for one in after.tuned(tmp_path).runs()[:2]]
    assert rates == [2e-3, 1e-3]
    unswept = replace(after, arms=(STANDARD, BOOSTED, Arm(name="y")))
    with pytest.raises(ValueError, match="arms: got y; want an arm of sweep"):
        unswept.tuned(tmp_path)
    rates = [one.train.learning_rate for one in replace(unswept, rate_of="standard").tuned(tmp_path).runs()[:3]]
    assert rates == [2e-3] * 3


def test_without_the_whole_sweep_no_run_is_known(tmp_path):
    """Its grid was extended, or a record is missing: the best rate may be another."""
    losses = {(arm.name, rate): abs(rate - 2) for arm in TINY.arms for rate in (1, 2, 3)}
    after = replace(UNRATED, name="after", rates_from=swept(losses, tmp_path))
    for one in after.tuned(tmp_path).runs():
        Record("after", one.settings, made(one).measured).save(one.name, tmp_path)
    assert len(records_of(after, tmp_path)) == 4
    wider = replace(after, rates_from=replace(after.rates_from, grid={"learning_rate": (1, 2, 3, 4)}))
    for use in (wider.tuned, wider.untuned):
        with pytest.raises(ValueError, match="12 of the 16 runs of sweep; want all of them: run sweep first"):
            use(tmp_path)
    assert records_of(wider, tmp_path) == []
    next((tmp_path / "sweep").glob("*")).unlink()
    with pytest.raises(ValueError, match="11 of the 12 runs of sweep"):
        after.untuned(tmp_path)
    assert records_of(after, tmp_path) == []


def test_an_untuned_arm_is_named_wherever_its_rate_is_used(tmp_path):
    losses = {("standard", rate): -rate for rate in (1, 2, 3)}
    losses |= {("boosted_residual", rate): abs(rate - 2) for rate in (1, 2, 3)}
    after = replace(UNRATED, rates_from=swept(losses, tmp_path))
    assert after.untuned(tmp_path) == {"standard"}
    assert replace(after, rate_of="standard").untuned(tmp_path) == {"standard", "boosted_residual"}
    assert replace(after, rate_of="boosted_residual").untuned(tmp_path) == set()
    assert TINY.untuned(tmp_path) == set()


def test_the_width_of_equal_time_comes_from_the_sweep(tmp_path):
    pace = lambda seconds: dict(train_step=[10, 20], train_seconds=[0.0, 10 * seconds])
    arms = STANDARD, Arm(name="wide", model={"d_model": 16}), BOOSTED
    timed = {"standard": pace(1.0), "wide": pace(2.0), "boosted_residual": pace(2.0)}
    sweep = swept({(arm.name, 1e-3): 1.0 for arm in arms}, tmp_path, arms, **timed)
    arm = Arm(name="slow", equal_to=BOOSTED, equal_in="time")
    experiment = replace(UNRATED, rates_from=sweep, arms=(arm,), rate_of="wide")
    found = experiment.tuned(tmp_path).runs()[0].model
    assert (found.d_model, found.d_ffn) == (16, 64)
    with pytest.raises(ValueError, match=r"arm slow: got a size of equal time .*; want an experiment with rates_from"):
        experiment.runs()


def test_no_run_of_a_sweep_is_reported():
    """The seed that chooses a rate is not among those that a table shows."""
    for experiment in EXPERIMENTS.values():
        if sweep := experiment.rates_from:
            assert EXPERIMENTS[sweep.name] is sweep
            assert not set(sweep.seeds) & set(experiment.seeds)
            assert len(sweep.grid["learning_rate"]) >= 3


def test_a_rate_of_its_own_wants_a_sweep_of_its_own():
    for experiment in EXPERIMENTS.values():
        if experiment.rates_from and not experiment.rate_of:
            swept = experiment.rates_from.arms
            arms = experiment.arms
            if experiment.name == "ladder-48-dropout":  # changes attention dropout alone: rates are those without it
                arms = tuple(map(without_attention_dropout, arms))
            assert all(arm in swept for arm in arms)


def without_attention_dropout(arm):
    options = {key: x for key, x in arm.model["attention_options"].items() if key != "dropout"}
    model = arm.model | {"attention_options": options}
    target = arm.equal_to and without_attention_dropout(arm.equal_to)
    return replace(arm, model={key: x for key, x in model.items() if x != {}}, equal_to=target)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: run("nothing"), "experiment: got 'nothing'; want one of quick, mini-sweep"),
        (lambda: run(TINY, workers=0), "workers: got 0; want a positive integer"),
        (lambda: run(TINY, cluster="slurm"), "cluster: got 'slurm'; want None or a dictionary"),
        (
            lambda: experiments._executor({"cluster": "no"}, Path("x")),
            "cluster: got {'cluster': 'no'} (AutoExecutor doesn",
        ),
        (lambda: run(TINY, cluster={}, workers=2), "workers: got 2; want 1 with a cluster, where each run is a job"),
        (lambda: run(TINY, shard=(3, 2)), "shard: got (3, 2); want (k, n) with k from 1 to n"),
        (lambda: run(TINY, shard=1), "shard: got 1; want (k, n) with k from 1 to n"),
        (lambda: run(TINY, shard=(1,)), "shard: got (1,); want (k, n) with k from 1 to n"),
        (lambda: records_of("nothing"), "experiment: got 'nothing'; want one of quick, mini-sweep"),
        (lambda: compare(TINY), "records: got Experiment; want records, as run and records_of return them"),
        (lambda: CorpusSpec(name=""), "name: got ''; want a string that is not empty"),
        (lambda: CorpusSpec(name="a", fingerprint=3), "fingerprint: got 3; want None or a string that is not empty"),
        (lambda: CorpusSpec(name="a", vocab_size=None), "vocab_size: got None; want a positive integer"),
        (lambda: CorpusSpec(name="a", max_train_tokens=0), "max_train_tokens: got 0; want None or a positive integer"),
        (
            lambda: CorpusSpec(name="a", max_valid_tokens=-5),
            "max_valid_tokens: got -5; want None or an integer, 2 or more",
        ),
        (lambda: CorpusSpec(name="a", tokenizer="x"), "tokenizer: got 'x'; want one of 'byte-level', 'published'"),
        (lambda: Arm(name="a", method="x"), "method: got 'x'; want one of 'theory', 'reference'"),
        (lambda: Arm(name="a", equal_in="x"), "equal_in: got 'x'; want one of 'parameters', 'non_embedding'"),
        (lambda: Arm(name="a", change="x"), "change: got 'x'; want one of 'd_model', 'n_layers'"),
        (lambda: Arm(name="a", equal_to="boosted"), "equal_to: got 'boosted'; want None or an Arm"),
        (lambda: Arm(name="a", model="twicing"), "model: got 'twicing'; want a dictionary"),
        (lambda: replace(TINY, corpus="tiny"), "corpus: got 'tiny'; want a CorpusSpec"),
        (lambda: replace(TINY, arms=("standard",)), "arms: got ('standard',); want a tuple of Arm"),
        (lambda: replace(TINY, arms=STANDARD), "arms: got Arm(name='standard'"),
        (lambda: replace(TINY, seeds=3), "seeds: got 3; want a tuple of integers, 0 or more"),
        (lambda: replace(TINY, seeds=(1, -1)), "seeds: got (1, -1); want a tuple of integers, 0 or more"),
        (lambda: replace(TINY, grid=[1]), "grid: got [1]; want a dictionary"),
        (lambda: replace(TINY, grid={"steps": 8}), "grid steps: got 8; want a tuple of values"),
        (lambda: replace(UNRATED, rates_from="sweep"), "rates_from: got 'sweep'; want None or an Experiment"),
        (
            lambda: replace(UNRATED, rates_from=TINY),
            "rates_from: got a sweep that varies nothing; want one that varies learning_rate",
        ),
        (
            lambda: replace(UNRATED, rates_from=replace(TINY, grid={"learning_rate": (1.0,), "norm": ("pre",)})),
            "rates_from: got a sweep that varies learning_rate, norm; want one that varies learning_rate",
        ),
        (lambda: Arm(name=".."), "name: got '..'; want letters, digits, _ and ."),
        (lambda: replace(TINY, name="../up"), "name: got '../up'; want letters, digits, _, - and ."),
        (lambda: replace(TINY, name=".."), "name: got '..'; want letters"),
        (lambda: replace(TINY, name=""), "name: got ''; want letters"),
        (
            lambda: replace(TINY, rates_from=TINY),
            "train: got learning_rate; want no learning_rate beside that of rates_from",
        ),
        (
            lambda: replace(UNRATED, arms=(Arm(name="a", train={"learning_rate": 1.0}),), rates_from=TINY),
            "arm a: got learning_rate; want no learning_rate beside that of rates_from",
        ),
        (lambda: Arm(name="a-b"), "name: got 'a-b'; want letters, digits, _ and ."),
        (lambda: replace(TINY, seeds=(1, 1)), "seeds: got [1, 1]; want one or more, all different"),
        (lambda: replace(TINY, arms=()), "arms: got []; want one or more, all different"),
        (lambda: replace(TINY, model=dict(width=3)), "model: got ['width']; want fields of ModelConfig"),
        (lambda: replace(TINY, train=dict(seed=3)), "train: got ['seed']; want fields of TrainConfig"),
        (lambda: replace(TINY, arms=(Arm(name="a", train={"x": 1}),)), "arm a: got ['x']; want fields of TrainConfig"),
        (lambda: replace(TINY, grid={"x": (1,)}), "grid: got ['x']; want fields of ModelConfig and TrainConfig"),
        (lambda: replace(TINY, grid={"steps": ()}), "grid steps: got []; want one or more, all different"),
        (lambda: replace(TINY, grid={"steps": (8, 9, 8)}), "grid steps: got [8, 9, 8]; want one or more"),
        (
            lambda: replace(TINY, arms=(WIDER,), grid={"attention": ("twicing",)}),
            "grid: got attention, which arm wider sets; want fields that neither an arm nor rates_from sets",
        ),
        (
            lambda: replace(UNRATED, rates_from=TINY, grid={"learning_rate": (1.0,)}),
            "grid: got learning_rate, which rates_from sets; want fields that neither",
        ),
        (lambda: replace(TINY, rate_of="x"), "rate_of: got x; want an arm of rates_from: there is no sweep"),
        (
            lambda: replace(UNRATED, rates_from=TINY, rate_of="x"),
            "rate_of: got x; want an arm of rates_from: standard, boosted_residual",
        ),
        (lambda: CorpusSpec(name="nowhere").load("/"), "corpora: got /; want a folder that holds nowhere"),
        (lambda: CorpusSpec(name="nowhere").load(3), "corpora: got 3; want None or a path"),
        (lambda: run(TINY, workers=True), "workers: got True; want a positive integer"),
        (lambda: run(TINY, workers=1.5), "workers: got 1.5; want a positive integer"),
        (lambda: run(TINY, progress="False"), "progress: got 'False'; want True or False"),
        (lambda: run(TINY, folder=3), "folder: got 3; want None or a path"),
        (lambda: run(TINY, work=b"x"), "work: got b'x'; want None or a path"),
        (lambda: run(TINY, corpora=3), "corpora: got 3; want None or a path"),
        (lambda: records_of(TINY, 3), "folder: got 3; want None or a path"),
        (lambda: records_of(["tiny"]), "experiment: got ['tiny']; want one of quick"),
        (lambda: Arm(name=3), "name: got 3; want letters"),
        (lambda: Arm(name="a", label=3), "label: got 3; want a string"),
        (lambda: Arm(name="a", method=["x"]), "method: got ['x']; want one of 'theory'"),
        (lambda: replace(TINY, name=None), "name: got None; want letters"),
        (lambda: replace(TINY, question=3), "question: got 3; want a string"),
        (lambda: replace(TINY, rate_of=0), "rate_of: got 0; want a string"),
        (lambda: replace(TINY, model={3: 1, "x": 2}), "model: got [3, 'x']; want fields of ModelConfig"),
        (lambda: replace(TINY, grid={3: (1,), "x": (2,)}), "grid: got [3, 'x']; want fields of ModelConfig"),
    ],
)
def test_errors_say_what_they_want(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_another_text_than_the_pinned_one_is_refused(corpora, monkeypatch):
    with pytest.raises(
        ValueError, match="tiny: got a text with fingerprint .*; want 000, the text that this experiment"
    ):
        CorpusSpec(name="tiny", vocab_size=260, fingerprint="000").load(corpora)
    monkeypatch.setenv("GBATTN_CORPORA", str(corpora))
    assert CorpusSpec(name="tiny", vocab_size=260).load().vocab_size == 260
    monkeypatch.delenv("GBATTN_CORPORA")
    with pytest.raises(ValueError, match="corpora: got nothing; want a folder that holds elsewhere"):
        CorpusSpec(name="elsewhere").load()


def test_a_cache_that_was_carried_here_needs_no_text(corpora, monkeypatch, tmp_path):
    """It is known by its fingerprint; a corpus of the same name with another one is not taken for it."""
    here = CorpusSpec(name="tiny", vocab_size=260).load(corpora)
    shorter = CorpusSpec(name="tiny", vocab_size=260, max_train_tokens=100).load(corpora)
    for corpus in (here, shorter):
        shutil.copytree(corpus.folder, tmp_path / "cache" / corpus.folder.name)
    monkeypatch.setenv("GBATTN_CACHE", str(tmp_path / "cache"))
    for corpus in (here, shorter):
        pinned = CorpusSpec(name="tiny", vocab_size=260, fingerprint=corpus.fingerprint)
        found = replace(pinned, max_train_tokens=len(corpus.train)).load(tmp_path)
        assert found.folder.parent == tmp_path / "cache" and len(found.train) == len(corpus.train)
    with pytest.raises(ValueError, match="corpora: got .*; want a folder that holds tiny"):
        CorpusSpec(name="tiny", vocab_size=260, fingerprint="000").load(tmp_path)


def test_of_a_carried_cache_a_whole_copy_is_taken(corpora, monkeypatch, tmp_path):
    """No draft, and none that is damaged; one of another text is not even read."""
    spec = CorpusSpec(name="tiny", vocab_size=260)
    here, other = spec.load(corpora), replace(spec, max_train_tokens=90).load(corpora)
    names = ("tiny-0.draft-1", "tiny-1", "tiny-2", "tiny-3")
    for name, corpus in zip(names, (here, other, here, here)):
        shutil.copytree(corpus.folder, tmp_path / name)
    (tmp_path / "tiny-1" / "train.bin").unlink()
    (tmp_path / "tiny-2" / "train.bin").write_bytes(b"no")
    (tmp_path / "tiny-4").mkdir()
    (tmp_path / "tiny-4" / "corpus.json").write_text("no")
    monkeypatch.setenv("GBATTN_CACHE", str(tmp_path))
    pinned = replace(spec, fingerprint=here.fingerprint, max_valid_tokens=77)  # none that was loaded before
    assert pinned.load(tmp_path).folder == tmp_path / "tiny-3"


def test_a_file_with_two_records_is_none_of_a_run(finished, tmp_path):
    place, records = finished
    shutil.copytree(place / "results" / "tiny", tmp_path / "tiny")
    path = tmp_path / "tiny" / f"{TINY.runs()[0].name}.json"
    path.write_text(json.dumps(2 * [json.loads(path.read_text())]))
    with pytest.raises(ValueError, match=f"{path.name}: got 2 records; want one, of one run"):
        records_of(TINY, tmp_path)


def test_a_folder_of_records_that_cannot_be_is_refused_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setattr("gbattn.experiments._work", lambda *share: pytest.fail("a run was started"))
    (tmp_path / "results").write_text("a file")
    with pytest.raises(ValueError, match="folder: got .*results .*; want one that can be written to"):
        go(corpora, tmp_path)


def test_a_missing_package_is_named_before_any_run(corpora, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(ValueError, match="filelock: got a Python that cannot import it; want pip install"):
        go(corpora, tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_its_text_an_experiment_leaves_nothing_behind(tmp_path):
    elsewhere = replace(TINY, corpus=CorpusSpec(name="elsewhere"))
    with pytest.raises(ValueError, match="corpora: got .*; want a folder that holds elsewhere"):
        go(tmp_path, tmp_path, elsewhere)
    assert not list(tmp_path.iterdir())


def test_a_text_too_poor_for_its_vocabulary_is_refused(corpora, tmp_path):
    with pytest.raises(
        ValueError, match=r"corpus: got a text that reaches a vocabulary of (\d+), not 5000; want .*vocab_size=\1"
    ):
        go(corpora, tmp_path, replace(TINY, corpus=CorpusSpec(name="tiny", vocab_size=5000)))


def test_wider_is_equal_to_boosted():
    config = TINY.model_of(WIDER)
    assert abs(MEASURES["parameters"](config) / MEASURES["parameters"](TINY.model_of(BOOSTED)) - 1) < 0.05


# How far an experiment is, and what of it can be compared


def test_the_estimate(tmp_path, monkeypatch):
    """What is left at the speed of what is in; without it, FLOPs at a rate, epochs and steps alike."""
    monkeypatch.setattr(experiments, "_product_rate", lambda: 1e6)
    base = dict(question="", model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2), arms=(Arm(name="a"),))
    spec = CorpusSpec(name="x", vocab_size=300, max_train_tokens=640)
    steps = Experiment(name="s", corpus=spec, train=dict(steps=30, batch_size=4), seeds=(1, 2, 3), **base)
    epochs = Experiment(name="e", corpus=spec, train=dict(epochs=3, batch_size=4), seeds=(1, 2, 3), **base)
    found = [status_of(one, tmp_path) for one in (steps, epochs)]
    assert found[0].hours_left == found[1].hours_left > 0  # 3 × 640 tokens are 30 × 4 × 16
    assert found[0].left == "at least"
    records = [SimpleNamespace(measured={"seconds": 3600.0})]
    monkeypatch.setattr(experiments, "records_of", lambda *_: records)
    found = status_of(steps, tmp_path)
    assert (found.hours_left, found.left) == (2.0, "about")
    records = 3 * [SimpleNamespace(measured={})]
    assert status_of(steps, tmp_path).hours_left == 0


def test_a_bound_is_one(tmp_path, monkeypatch):
    """By the cheapest arm, grid and windows included; where it could be false, nothing is said."""
    monkeypatch.setattr(experiments, "_product_rate", lambda: 1e4)
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
    monkeypatch.setattr(experiments, "_product_rate", lambda: None)
    assert hours(arms=(small,)) is None


@pytest.mark.parametrize("gpu, other, device", [(True, False, "cuda"), (False, True, None), (False, False, "cpu")])
def test_the_speed_is_that_of_where_a_run_trains(monkeypatch, gpu, other, device):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: other)
    measured = lambda device="cpu": SimpleNamespace(flops=device)
    monkeypatch.setattr(experiments, "measure_machine", measured)
    assert experiments._product_rate.__wrapped__() == device


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


def test_what_can_be_compared(finished, tmp_path):
    """All records of a comparison; of a sweep those of the best rates, with the arms that are not tuned."""
    place, records = finished
    found = comparable(TINY, place / "results")
    assert found == (TINY, records_of(TINY, place / "results"), set(), 4)
    losses = {("standard", rate): -rate for rate in (1, 2, 3)}
    losses |= {("boosted_residual", rate): abs(rate - 2) for rate in (1, 2, 3)}
    sweep = swept(losses, tmp_path)
    found = comparable(sweep, tmp_path)
    rates = {(r.settings["arm"], r.settings["learning_rate"]) for r in found.records}
    assert rates == {("standard", 3), ("boosted_residual", 2)} and len(found.records) == 4
    assert (found.untuned, found.done) == ({"standard"}, 12)
    after = replace(UNRATED, name="after", rates_from=sweep)
    for one in after.tuned(tmp_path).runs():
        Record("after", one.settings, made(one).measured).save(one.name, tmp_path)
    assert comparable(after, tmp_path)[2:] == ({"standard"}, 4)


@pytest.mark.parametrize(
    "use, wrong, message",
    [
        (comparable, dict(experiment="none"), "experiment: got 'none'; want one of"),
        (comparable, dict(experiment="quick", folder=3), "folder: got 3; want None or a path"),
        (comparable, dict(experiment="quick"), "got 'quick', of which .* has no run; want .* run quick runs"),
        (comparable, dict(experiment=replace(TINY, grid={"n_layers": (1, 2)})), "'tiny', which varies n_layers"),
        (status_of, dict(experiment=["quick"]), "experiment: got .*; want one of"),
        (status_of, dict(experiment="quick", folder=""), "folder: got ''; want None or a path"),
        (least_seconds, dict(experiment=3), "experiment: got 3; want one of"),
    ],
)
def test_what_is_no_experiment_or_folder_is_refused(tmp_path, use, wrong, message):
    folder = {} if use is least_seconds else dict(folder=tmp_path)
    with pytest.raises(ValueError, match=message):
        use(**folder | wrong)


# The arms of E5 ("stability"), and the second look of E0


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
    warm = {one.arm.name: one for one in EXPERIMENTS["mini-warm"].tuned().runs()}["boosted_residual"]
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


def test_the_second_look_of_the_shift_has_new_seeds_and_nothing_else_new():
    first, again = EXPERIMENTS["shift"], EXPERIMENTS["shift-again"]
    assert again.seeds == tuple(range(12, 22))
    assert not set(again.seeds) & {*first.seeds, *first.rates_from.seeds}
    assert replace(again, name=first.name, question=first.question, seeds=first.seeds) == first
