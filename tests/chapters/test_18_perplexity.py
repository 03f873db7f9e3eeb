"""Chapter 18: what a report says of toy records, in words, tables and verdicts; measured models; every section of the
page from the committed records."""

import inspect
import math
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
import torch

from gbattn import reports
from gbattn.conventions import Record
from gbattn.experiments import EXPERIMENTS, Arm, CorpusSpec, Experiment, records_of
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.reports import (
    NOT_YET,
    ORDERINGS,
    Report,
    first_block,
    has_interval,
    in_percent,
    increase_by_token,
    losses_by_counting,
    ordering,
    percent,
    quote_all,
    recipe,
)

ARMS = (
    Arm(name="standard"),
    Arm(name="wider", method="wider attention", model={"d_model": 16}),
    Arm(name="boosted_residual", label="boosted", model={"attention": "boosted"}),
)
TOY = Experiment(
    name="toy",
    question="a test",
    corpus=CorpusSpec(name="tiny", vocab_size=260, max_train_tokens=1000),
    model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2, dropout=0.1),
    train=dict(epochs=2, batch_size=4, learning_rate=1e-3, warmup_steps=2),
    arms=ARMS,
    seeds=(1, 2, 3),
)
LOSSES = {"standard": (5.0, 5.1, 5.2), "wider": (4.9, 5.05, 5.0), "boosted_residual": (4.8, 4.9, 5.0)}


def save(folder, experiment=TOY, losses=LOSSES, **measured):
    """Records of all runs of an experiment with these test losses; None is a run that diverged."""
    for one in experiment.runs():
        loss = losses[one.arm.name][experiment.seeds.index(one.seed)]
        found = dict(valid_loss=loss, test_loss=loss, diverged=loss is None, parameters=2000, non_embedding=5)
        if loss is not None:
            found |= dict(training_flops=2 * 10**12, seconds=60.0, steps=10, train_step=[0, 10])
            found |= dict(train_seconds=[0.0, 60.0], test_perplexity=math.exp(loss))
        Record(experiment.name, one.settings, found | measured).save(one.name, folder)


@pytest.fixture
def report(tmp_path):
    save(tmp_path)
    return Report(tmp_path, {"toy": TOY})


OF = "boosted_residual", "standard", "toy"


def test_what_is_in_is_counted(report):
    assert report.state("toy") == "9 of 9 runs are in" and report.complete("toy")
    next((report.folder / "toy").iterdir()).unlink()
    assert report.complete("toy"), "an experiment is read once"
    later = Report(report.folder, report.experiments)
    assert later.state("toy", "toy") == "16 of 18 runs are in" and not later.complete("toy")


def test_a_difference_is_that_of_all_planned_pairs(report):
    row = report.difference(*OF)
    assert row.pairs == 3 and row.difference == pytest.approx(-0.2) and has_interval(row)
    assert report.losses(*OF) == ([4.8, 4.9, 5.0], [5.0, 5.1, 5.2])
    assert report.beside(*OF)[0] == pytest.approx(1)
    assert report.of_arm("wider", "toy") == [4.9, 5.05, 5.0]
    assert report.spread("standard", "toy") == pytest.approx(10)
    next((report.folder / "toy").glob("standard-seed2-*")).unlink()
    later = Report(report.folder, report.experiments)
    assert later.difference(*OF) is None and ordering(None) == "not known yet"
    assert later.in_words("a", "b", *OF) == "how a compares with b is not known yet: not every planned pair is in"


@pytest.mark.parametrize(
    ("losses", "word", "end"),
    [
        ((4.8, 4.9, 5.01), "holds", "lower than b (-19.0 to -16.7 %, 3 pairs): a wins"),
        ((5.2, 5.31, 5.4), "reversed", "higher than b (+20.8 to +24.3 %, 3 pairs): b wins"),
        ((4.8, 5.2, 5.1), "undecided", "3 pairs): undecided"),
    ],
)
def test_an_ordering_in_words_and_put_to_the_test(tmp_path, capsys, losses, word, end):
    save(tmp_path, losses=LOSSES | {"boosted_residual": losses})
    report = Report(tmp_path, {"toy": TOY})
    assert ordering(report.difference(*OF)) == word
    assert report.in_words("a", "b", *OF).startswith("a has a perplexity ")
    assert report.in_words("a", "b", *OF).endswith(end), report.in_words("a", "b", *OF)
    assert report.drawn == {OF: report.difference(*OF)}
    report.judge("a before b", *OF)
    verdict = {"holds": "holds", "reversed": "DOES NOT HOLD", "undecided": "undecided"}[word]
    assert f"verdict     {verdict}" in capsys.readouterr().out


def test_a_run_that_diverged_leaves_an_ordering_undecided(tmp_path, capsys):
    save(tmp_path, losses=LOSSES | {"standard": (5.0, None, 5.2)})
    report = Report(tmp_path, {"toy": TOY})
    assert report.doubt(report.difference(*OF), *OF) == "a run diverged"
    assert report.in_words("a", "b", *OF) == "how a compares with b is undecided: a run diverged"
    report.judge("a before b", *OF)
    report.compare_gaps("a claim", "toy", "toy")
    assert "undecided: a run diverged" in capsys.readouterr().out
    assert "| standard | 2 of 3 |" in report.table("toy").data


def test_a_rate_at_the_edge_leaves_an_ordering_undecided(tmp_path):
    train = {key: x for key, x in TOY.train.items() if key != "learning_rate"}
    sweep = replace(TOY, name="sweep", train=train, seeds=(0,), grid={"learning_rate": (1e-3, 2e-3, 4e-3)})
    for one in sweep.runs():
        best = 1e-3 if one.arm.name == "standard" else 2e-3
        found = dict(valid_loss=abs(one.train.learning_rate - best), test_loss=1.0, diverged=False)
        Record("sweep", one.settings, found | dict(parameters=1, non_embedding=1)).save(one.name, tmp_path)
    after = replace(TOY, train=train, rates_from=sweep)
    save(tmp_path, after.tuned(tmp_path))
    report = Report(tmp_path, {"toy": after, "sweep": sweep})
    assert report.edges("sweep") == "at the edge of the grid, so not yet found: standard"
    assert report.untuned("toy") == {"standard"}
    why = "the learning rate of standard lies at the edge of its grid"
    assert report.doubt(report.difference(*OF), *OF) == why
    assert report.doubt(report.difference("wider", "boosted_residual", "toy"), "wider", "x", "toy") is None
    table = report.sweep_table("sweep").data.splitlines()
    assert table[0] == "|  | 0.001 | 0.002 | 0.004 |" and table[2] == "| standard | **0.000** | 0.001 | 0.003 |"


def test_a_comparison_as_a_table(report):
    lines = report.table("toy").data.splitlines()
    assert lines[0] == "|  | n | perplexity | sd, % | against standard, % | thousand param. | TFLOPs | min |"
    boosted, _, standard = lines[2:]
    assert boosted == f"| boosted | 3 | {math.exp(4.9):.2f} | 10.0 | -18.1 (-18.1 to\xa0-18.1) | 2 | 2.0 | 1.0 |"
    assert standard == f"| standard | 3 | {math.exp(5.1):.2f} | 10.0 |  | 2 | 2.0 | 1.0 |"


def test_an_experiment_without_records_is_a_table_of_empty_rows(tmp_path):
    report = Report(tmp_path, {"toy": TOY})
    assert report.table("toy").data.splitlines()[2:] == [f"| {arm.label} | 0 |  |  |  |  |  |  |" for arm in ARMS]


def test_what_an_arm_gains_is_paired_by_seed(report):
    later = replace(TOY, name="later", train=TOY.train | dict(warmup_steps=3))
    save(report.folder, later, LOSSES | {"standard": (4.9, 5.05, 5.0)})
    report.experiments["later"] = later
    mean, low, high = report.gain("standard", "toy", "later")
    assert mean == pytest.approx(0.35 / 3) and low < mean < high


def test_two_gaps_are_compared(report, capsys):
    later = replace(TOY, name="later", train=TOY.train | dict(warmup_steps=3))
    save(report.folder, later, LOSSES | {"wider": (4.5, 4.61, 4.7)})
    report.experiments["later"] = later
    assert report.gap("toy")[0] == pytest.approx(np.mean([-0.1, -0.15, 0.0]))
    report.compare_gaps("the gap is smaller in toy", "toy", "later")
    assert "verdict     holds" in capsys.readouterr().out


def test_percent_and_its_interval():
    assert percent(math.log(1.1)) == pytest.approx(10)
    row = type("Row", (), dict(difference=0.1, low=None, high=None, pairs=1, n=1, diverged=0))
    assert in_percent(row) == "+10.5"


def test_all_of_a_record_is_quoted(monkeypatch):
    glued = {}
    monkeypatch.setattr("myst_nb.glue", lambda key, value, display: glued.update({key: value}))
    quote_all(Record("x", {"n": 3}, {"a": 0.5, "b": 0.25}), ".1f", b="+.2f")
    assert glued == {"x.n": "3", "x.a": "0.5", "x.b": "+0.25"}


def test_the_recipe_of_an_experiment():
    rows = recipe(TOY)
    assert rows["updates"] == str(2 * (1000 // 16) // 4) and rows["dropout in attention"] == 0.0


def test_losses_by_counting_are_those_of_frequencies():
    tokens = np.array([0, 1] * 50, dtype=np.uint16)
    corpus = type("Text", (), dict(vocab_size=2, train=tokens, valid=tokens, test=tokens))
    found = losses_by_counting(corpus)
    assert found["test_loss"] == pytest.approx(math.log(2)) and found["pair_loss"] < 0.05


@pytest.mark.parametrize("attention", ["multi_head", "boosted"])
def test_what_tokens_and_the_first_block_do_for_the_loss(attention):
    config = ModelConfig(vocab_size=11, max_length=48, d_model=16, n_layers=2, n_heads=2, attention=attention)
    model = LanguageModel(config, seed=1).eval()
    windows = torch.randint(11, (64, 49), generator=torch.Generator().manual_seed(0))
    found = increase_by_token(model, windows)
    assert found["loss"] == pytest.approx(math.log(11), abs=0.3) and len(found["worth"]) == 7
    same = windows[:1].repeat(64, 1)  # an exchange among equals changes nothing
    assert increase_by_token(model, same)["worth"] == [0.0] * 7
    block = first_block(model, windows[:8])
    rounds = 2 if attention == "boosted" else 1
    assert len(block["own"]) == len(block["before"]) == rounds
    assert all(0 < x < 1 for x in block["own"] + block["before"])
    before = [p.clone() for p in model.parameters()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(map(torch.equal, before, model.parameters()))


@pytest.fixture(scope="module")
def page():
    return Report()


SECTIONS = [
    function
    for name, function in inspect.getmembers(reports, inspect.isfunction)
    if function.__module__ == "gbattn.reports" and list(inspect.signature(function).parameters) == ["report"]
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_a_section_of_the_page(section, page):
    """Its own asserts hold what the page says against the committed records; nothing of it is unknown."""
    matplotlib.use("Agg")
    found = section(page)
    if isinstance(found, Record):
        waiting = {key for key, value in found.measured.items() if value == NOT_YET}
        assert not waiting, waiting
        assert found.experiment.startswith("perplexity-")
    elif section.__name__.startswith("draw_"):
        assert matplotlib.pyplot.get_fignums()
        matplotlib.pyplot.close("all")


def test_the_ten_orderings(page, capsys):
    reports.judge_orderings(page, {number: f"ordering {number}" for number in ORDERINGS})
    assert capsys.readouterr().out.count("verdict") == 10
    assert page.drawn[ORDERINGS[8]] == page.difference(*ORDERINGS[8])


def test_every_experiment_that_a_table_names_is_one_of_the_book(page):
    assert set(reports.WIDTHS) | set(reports.AMOUNTS) | set(reports.WITH_MODELS) <= set(EXPERIMENTS)
    assert page.records("mini") == records_of("mini")
