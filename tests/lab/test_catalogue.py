"""The experiments of the book: their files, the runs that they plan, and files of a reader's own."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import refused

from gbattn.comparison import MEASURES
from gbattn.experiments import Arm, Experiment
from gbattn.lab.catalogue import CATALOGUE, EXPERIMENTS, find_experiment
from gbattn.lab.queue import run_experiment
from gbattn.lab.records import Plan, records_of
from gbattn.language_model import LanguageModel
from tiny_experiment import BOOSTED, OWN, STANDARD, TINY


def runs_of(experiment):
    """All its runs, at the rates of its sweep, or at 0.001 where that is not finished."""
    try:
        return Plan(experiment).runs
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


def test_an_experiment_of_ones_own(corpora, tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    gated = Arm(name="gated", model={"attention": "boosted", "attention_options": {"gate": "head"}})
    own = find_experiment(path)
    assert own == Experiment.from_toml(str(path), EXPERIMENTS) == replace(TINY, name="own", arms=(*TINY.arms, gated))
    (tmp_path / "further.toml").write_text(
        'question = "?"\nextends = "own.toml"\nseeds = [3]\narms = ["gated"]\n'
        'train.steps = 4\ntrain.learning_rate = 0.001\narm.gated.model.attention_options.gate = "none"\n'
    )
    further = Experiment.from_toml(tmp_path / "further.toml", EXPERIMENTS)
    model = {"attention": "boosted", "attention_options": {"gate": "none"}}
    arms, train = (Arm(name="gated", model=model),), TINY.train | dict(steps=4)
    assert further == replace(TINY, name="further", question="?", seeds=(3,), arms=arms, train=train)
    records = run_experiment(str(tmp_path / "further.toml"), folder=tmp_path, work=tmp_path / "work", corpora=corpora)
    assert records == records_of(tmp_path / "further.toml", tmp_path) and len(records) == 1


def test_a_file_that_is_not_there_or_has_a_name_of_the_book(tmp_path):
    with refused("experiment"):
        find_experiment(tmp_path / "own.toml")
    (tmp_path / "mini.toml").write_text(OWN)
    with refused("experiment"):
        find_experiment(tmp_path / "mini.toml")


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


def test_the_second_look_of_the_shift_has_new_seeds_and_nothing_else_new():
    first, again = EXPERIMENTS["shift"], EXPERIMENTS["shift-again"]
    assert again.seeds == tuple(range(12, 22))
    assert not set(again.seeds) & {*first.seeds, *first.rates_from.seeds}
    assert replace(again, name=first.name, question=first.question, seeds=first.seeds) == first
