"""Chapter 18 and the lab notebook: what a report says of toy records, in words, tables and verdicts; the rules that
decide, for every outcome; measured models; both pages from the committed records."""

import copy
import inspect
import json
import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot
import numpy as np
import pytest
import scipy.stats
import torch
from refusals import refused

from gbattn.conventions import Record
from gbattn.experiments import Arm, CorpusSpec, Experiment
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.records import Plan, records_of
from gbattn.language_model import LanguageModel, ModelConfig
from support import effects, reports, tables, verdicts
from support.effects import (
    apart_in_arm,
    first_block,
    increase_by_token,
    why_runs_differ,
)
from support.figures import gap_curve, headline_bars, interval_bars
from support.reports import (
    NOT_YET,
    Report,
    has_interval,
    in_percent,
    in_short,
    lower_in_short,
    ordering,
    percent,
    quote_all,
)
from support.tables import (
    ELSEWHERE,
    MODELS,
    SHORT_TABLES,
    answer_table,
    arms_table,
    elsewhere_table,
    family_table,
    few_pairs_table,
    models_of,
    settings_table,
    shift_table,
    short_tables,
    sweep_table,
)
from support.verdicts import (
    BASELINES,
    BOOSTED,
    ORDERINGS,
    SETTINGS,
    Setting,
    answers,
    family,
    planned_p,
    verdict,
)

ROOT = Path(__file__).parents[2]

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
    assert report.p("wider", "standard", "toy") == pytest.approx(1 - 7**0.5 / 3), "t² = 7, two degrees of freedom"
    assert report.of_arm("wider", "toy") == [4.9, 5.05, 5.0]
    assert report.spread("standard", "toy") == pytest.approx(10)
    next((report.folder / "toy").glob("standard-seed2-*")).unlink()
    later = Report(report.folder, report.experiments)
    assert later.difference(*OF) is None and ordering(None) == "not known yet"
    assert later.in_words("a", "b", *OF) == "how a compares with b is not known yet: not every planned pair is in"
    assert later.state_of(*OF) == "5 of 6 runs are in" and later.p(*OF) == 1


@pytest.mark.parametrize(
    ("losses", "word", "end"),
    [
        ((4.8, 4.9, 5.01), "held", "lower than b (-19.0 to -16.7 %, 3 pairs): a wins"),
        ((5.2, 5.31, 5.4), "did not hold", "higher than b (+20.8 to +24.3 %, 3 pairs): b wins"),
        ((4.8, 5.2, 5.1), "open", "3 pairs): open"),
    ],
)
def test_an_ordering_in_words_and_put_to_the_test(tmp_path, capsys, losses, word, end):
    save(tmp_path, losses=LOSSES | {"boosted_residual": losses})
    report = Report(tmp_path, {"toy": TOY})
    assert ordering(report.difference(*OF)) == word
    assert report.in_words("a", "b", *OF).startswith("a has a perplexity ")
    assert report.in_words("a", "b", *OF).endswith(end), report.in_words("a", "b", *OF)
    assert report.drawn == {OF: report.difference(*OF)}
    verdicts.judge(report, "a before b", *OF)
    assert f"verdict     {word}\n" in capsys.readouterr().out


def test_a_run_that_diverged_leaves_an_ordering_open(tmp_path, capsys):
    save(tmp_path, losses=LOSSES | {"standard": (5.0, None, 5.2)})
    report = Report(tmp_path, {"toy": TOY})
    assert report.doubt(report.difference(*OF), *OF) == "a run diverged"
    assert report.in_words("a", "b", *OF) == "how a compares with b is open: a run diverged"
    verdicts.judge(report, "a before b", *OF)
    verdicts.compare_gaps(report, "a claim", "toy", "toy")
    assert "open: a run diverged" in capsys.readouterr().out
    assert "| standard | 2 of 3 |" in arms_table(report, "toy").data


def test_a_rate_at_the_edge_leaves_an_ordering_open(tmp_path):
    train = {key: x for key, x in TOY.train.items() if key != "learning_rate"}
    sweep = replace(TOY, name="sweep", train=train, seeds=(0,), grid={"learning_rate": (1e-3, 2e-3, 4e-3)})
    for one in sweep.runs():
        best = 1e-3 if one.arm.name == "standard" else 2e-3
        found = dict(valid_loss=abs(one.train.learning_rate - best), test_loss=1.0, diverged=False)
        Record("sweep", one.settings, found | dict(parameters=1, non_embedding=1)).save(one.name, tmp_path)
    after = replace(TOY, train=train, rates_from=sweep)
    save(tmp_path, Plan(after, tmp_path).tuned)
    report = Report(tmp_path, {"toy": after, "sweep": sweep})
    assert report.edges("sweep") == "at the edge of the grid, so not yet found: standard"
    assert report.untuned("toy") == {"standard"}
    why = "the learning rate of standard lies at the edge of its grid"
    assert report.doubt(report.difference(*OF), *OF) == why
    assert report.doubt(report.difference("wider", "boosted_residual", "toy"), "wider", "x", "toy") is None
    assert report.p("standard", "wider", "toy") == 1, "what a doubt hangs on is not tested"
    assert verdict(report, OF, {}) == "rate not found"
    table = sweep_table(report, "sweep").data.splitlines()
    assert table[0] == "| `sweep` | 0.001 | 0.002 | 0.004 |" and table[2] == "| standard | **0.000** | 0.001 | 0.003 |"


def test_a_comparison_as_a_table(report):
    lines = arms_table(report, "toy").data.splitlines()
    assert lines[0] == "|  | n | perplexity | sd, % | against standard, % | thousand param. | TFLOPs | minutes |"
    boosted, _, standard = lines[2:]
    assert boosted == f"| boosted | 3 | {math.exp(4.9):.2f} | 10.0 | -18.1 (-18.1 to\xa0-18.1) | 2 | 2.0 | 1.0 |"
    assert standard == f"| standard | 3 | {math.exp(5.1):.2f} | 10.0 |  | 2 | 2.0 | 1.0 |"


def test_an_experiment_without_records_is_a_table_of_empty_rows(tmp_path):
    report = Report(tmp_path, {"toy": TOY})
    assert arms_table(report, "toy").data.splitlines()[2:] == [f"| {arm.label} | 0 |  |  |  |  |  |  |" for arm in ARMS]


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
    verdicts.compare_gaps(report, "the gap is smaller in toy", "toy", "later")
    assert "verdict     held" in capsys.readouterr().out


def test_percent_and_its_interval():
    assert percent(math.log(1.1)) == pytest.approx(10)
    row = type("Row", (), dict(difference=0.1, low=None, high=None, pairs=1, n=1, diverged=0))
    assert in_percent(row) == "+10.5" and in_short(row) == "+10.5\xa0%"
    row = type("Row", (), dict(difference=-0.1, low=-0.2, high=0.1, pairs=3, n=3, diverged=0))
    assert in_short(row) == "−9.5\xa0% (−18.1 to\xa0+10.5, n\xa0=\xa03)"


def test_all_of_a_record_is_quoted(monkeypatch):
    glued = {}
    monkeypatch.setattr("myst_nb.glue", lambda key, value, display: glued.update({key: value}))
    quote_all(Record("x", {"n": 3}, {"a": 0.5, "b": 0.25}), ".1f", b="+.2f")
    assert glued == {"x.n": "3", "x.a": "0.5", "x.b": "+0.25"}


def test_a_sweep_of_two_seeds_is_a_table_of_means(tmp_path):
    train = {key: x for key, x in TOY.train.items() if key != "learning_rate"}
    sweep = replace(TOY, name="sweep", train=train, seeds=(0, 1), grid={"learning_rate": (1e-3, 2e-3)})
    for one in sweep.runs():
        found = dict(valid_loss=one.seed + 1000 * one.train.learning_rate, test_loss=1.0, diverged=False)
        Record("sweep", one.settings, found | dict(parameters=1, non_embedding=1)).save(one.name, tmp_path)
    assert sweep_table(Report(tmp_path, {"sweep": sweep}), "sweep").data.splitlines()[2] == (
        "| standard | **1.500** | 2.500 |"
    )


def test_two_experiments_together(report):
    more = replace(TOY, name="more", seeds=(4, 5))
    save(report.folder, more, {"standard": (5.0, 5.1), "wider": (5.0, 5.0), "boosted_residual": (4.9, 4.8)})
    report.experiments["more"] = more
    row = report.difference("boosted_residual", "standard", "toy+more")
    assert row.pairs == 5 and row.difference == pytest.approx(-0.2)
    assert report.planned("toy+more") == 15 and report.complete("toy+more")
    assert report.difference("boosted_residual", "standard", "toy+more", "toy+more").pairs == 5, "a run counts once"
    assert report.difference("boosted_residual", "standard", "toy+more", "more").pairs == 2
    wide, slim = (report.difference("wider", "standard", "toy", confidence=c) for c in (0.99, 0.5))
    assert wide.low < slim.low < slim.high < wide.high and wide.difference == slim.difference


@pytest.mark.parametrize("group, back", [*enumerate((0, 1, 2, 3, 6, 8, 46))])
def test_a_token_that_decides_is_worth_most_and_no_other_anything(group, back):
    """A model that copies the token ``back`` places before the last, on text in which that comes next."""
    windows = torch.randint(11, (64, 49), generator=torch.Generator().manual_seed(0))
    windows[:, -1] = windows[:, -2 - back]
    copies = lambda x: 10 * torch.nn.functional.one_hot(x.roll(back, 1), 11).float()
    found = increase_by_token(copies, windows)
    assert found["loss"] < 1e-3 and found["worth"].pop(group) > 5 and not any(found["worth"])


def test_the_worth_of_tokens_is_measured_on_windows_of_the_text(monkeypatch):
    seen = []
    monkeypatch.setattr(effects, "increase_by_token", lambda model, windows: seen.append(windows) or {"a": 1})
    monkeypatch.setattr(effects, "first_block", lambda model, windows: seen.append(windows) or {"b": 2})
    model = SimpleNamespace(head_weight=torch.empty(0))
    assert effects.effects_of(model, np.arange(4000, dtype=np.uint16)) == {"a": 1, "b": 2}
    windows, few = seen
    assert windows.shape == (2048, 49) and (windows.diff(dim=1) == 1).all()
    assert len(windows[:, 0].unique()) == 2048 and torch.equal(few, windows[:128])


def test_the_effects_of_a_stored_model_are_recorded_once(tmp_path, monkeypatch):
    monkeypatch.setenv("GBATTN_RESULTS", str(tmp_path / "results"))
    monkeypatch.setattr(effects, "load_text", lambda spec: SimpleNamespace(valid="the text"))
    calls = []
    monkeypatch.setattr(effects, "effects_of", lambda *of: calls.append(of) or {"loss": 1.0})
    one = TOY.runs()[0]
    model = LanguageModel(one.model)
    model.save_pretrained(tmp_path / one.id / "model")
    for _ in range(2):
        effects.measure_effects(TOY, tmp_path)
    ((measured, text),) = calls
    assert text == "the text" and not measured.training and measured.config == one.model
    assert Report(tmp_path / "results", {"toy": TOY}).effects == {one.id: {"loss": 1.0}}


@pytest.mark.parametrize("attention", ["multi_head", "boosted"])
def test_what_tokens_and_the_first_block_do_for_the_loss(attention):
    config = ModelConfig(vocab_size=11, max_length=48, d_model=16, n_layers=2, n_heads=2, attention=attention)
    model = LanguageModel(config, seed=1).eval()
    windows = torch.randint(11, (64, 49), generator=torch.Generator().manual_seed(0))
    before = [p.clone() for p in model.parameters()]
    found = increase_by_token(model, windows)
    assert found["loss"] == pytest.approx(math.log(11), abs=0.3) and len(found["worth"]) == 7
    same = windows[:1].repeat(64, 1)  # an exchange among equals changes nothing
    assert increase_by_token(model, same)["worth"] == [0.0] * 7
    block = first_block(model, windows[:8])
    rounds = 2 if attention == "boosted" else 1
    weights = [round.weights for round in model.outputs(windows[:8, :-1], traces=True).traces[0].rounds]
    largest = lambda A, back: A.diagonal(-back, -2, -1)[..., 1 - back :].mean((0, 2)).max().item()
    assert len(weights) == rounds
    assert block["own"] == pytest.approx([largest(A, 0) for A in weights])
    assert block["before"] == pytest.approx([largest(A, 1) for A in weights])
    whole = evaluated(model, windows[:8])
    for part, silenced in (("attention", "attention.out"), ("ffn", "ffn.down")):
        without = copy.deepcopy(model)
        for parameter in without.blocks[0].get_submodule(silenced).parameters():
            torch.nn.init.zeros_(parameter)
        assert block[f"without_{part}"] == pytest.approx(evaluated(without, windows[:8]) - whole, abs=1e-6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(map(torch.equal, before, model.parameters()))


def evaluated(model, windows):
    with torch.no_grad():
        return model(windows[:, :-1], windows[:, 1:].contiguous()).item()


# ---- The rule of E0 ----

SHIFTED = ("boosted_shift", "standard_shift", "wider_flops_shift")
NOISE = [0.001, -0.001, 0.002, -0.002, 0.0005, -0.0005, 0.0015, -0.0015, 0.001, -0.001]


def shift_report(folder, standard, flops, *, more=None, noise=1.0, diverged=None, missing=None, train=None, sweep=None):
    """A report of ten pairs (and ``more``, of ten others) at these differences, boosted minus the two, in percent."""
    arms = tuple(Arm(name=name) for name in SHIFTED)
    known = {}
    for name, of, seeds in (("shift", (standard, flops), range(1, 11)), ("shift-again", more, range(12, 22))):
        if name == "shift-again" and more is None:
            continue
        extra = {} if train is None else dict(train=train, rates_from=sweep)
        toy = replace(TOY, name=name, arms=arms, seeds=tuple(seeds), **extra)
        if of != "planned":
            boosted = [5.0 + 10 * noise * x for x in NOISE]
            found = [5.0 + 9 * noise * x for x in NOISE], [5.0 + 9 * noise * x for x in NOISE]
            losses = [[x - math.log1p(gap / 100) for x in base] for base, gap in zip(found, of)]
            if diverged:
                losses[diverged == "flops"][3] = None
            save(folder, toy if sweep is None else Plan(toy, folder).tuned, dict(zip(SHIFTED, (boosted, *losses))))
        known[name] = toy
    if missing:
        next((folder / "shift").glob(f"{missing}*")).unlink()
    return Report(folder, known)


NEITHER = dict(standard=-3, flops=+2)
# What came out, in percent; which rules are met, and whether it took twenty pairs.
RULES = {
    "waiting": None,
    "open": (False, False),
    "rule 1": (True, False),
    "rule 2": (False, True),
    "both": (True, True),
}
OUTCOMES = {
    "waiting": (dict(standard=0, flops=0, missing="boosted"), "waiting", False),
    "one waits": (dict(standard=0, flops=0, missing="wider"), "waiting", False),
    "rule 1": (dict(standard=-0.5, flops=+3), "rule 1", False),
    "rule 1, ahead": (dict(standard=+4, flops=+9), "rule 1", False),
    "rule 1, near": (dict(standard=-1.3, flops=+3), "rule 1", False),
    "rule 2": (dict(standard=-5, flops=-3), "rule 2", False),
    "both": (dict(standard=-0.7, flops=-0.5), "both", False),
    "open": (NEITHER, "open", False),
    "open, near": (dict(standard=-1.45, flops=0), "open", False),
    "wide": (dict(standard=0, flops=0, noise=30), "open", False),
    "diverged": (dict(standard=-5, flops=-3, diverged="flops"), "open", False),
    "diverged, rule 2": (dict(standard=-5, flops=-3, diverged="standard"), "rule 2", False),
    "diverged, rule 1": (dict(standard=0, flops=-3, diverged="flops"), "rule 1", False),
    "diverged, small": (dict(standard=0, flops=3, diverged="standard"), "open", False),
    "more runs": (NEITHER | dict(more="planned"), "waiting", True),
    "decided before": (dict(standard=0, flops=3, more=(-9, -9)), "rule 1", False),
    "again open": (NEITHER | dict(more=(-3, +2)), "open", True),
    "again, 97.5 %": (dict(standard=-3, flops=-0.05, more=(-3, -0.06)), "open", True),
    "again, rule 2": (dict(standard=-3, flops=0, more=(-3, -4)), "rule 2", True),
    "again, rule 1": (dict(standard=-1.45, flops=3, more=(1, 3)), "rule 1", True),
}


@pytest.fixture(scope="module")
def shift_reports(tmp_path_factory):
    found = {}
    for outcome, (options, *_) in OUTCOMES.items():
        found[outcome] = report = shift_report(tmp_path_factory.mktemp("shift"), **options)
        for name in report.experiments:
            report.records(name)
    return found


def decides(report, state, again):
    of = verdicts.shifted(report)
    name, confidence = ("shift+shift-again", 0.975) if again else ("shift", 0.95)
    return (of.rules, of.name, of.confidence) == (RULES[state], name, confidence)


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_what_the_shift_decides(outcome, shift_reports, capsys):
    _, state, again = OUTCOMES[outcome]
    assert decides(shift_reports[outcome], state, again)
    verdicts.judge_previous_token(shift_reports[outcome])
    printed = capsys.readouterr().out
    assert printed.count("verdict") == {"waiting": 0}.get(state, 2) - ("diverged" in outcome)
    assert printed.count("verdict     held") == sum(RULES[state] or ())
    assert f"{20 if again else 10} pairs" in printed or state == "waiting"


@pytest.mark.parametrize(
    "outcome, verdict",
    {"rule 1": "held", "rule 2": "did not hold", "again open": "did not hold", "open, near": "open"}.items(),
)
def test_rule_1_in_another_setting_looks_once(outcome, verdict, shift_reports, capsys):
    verdicts.judge_previous_token(shift_reports[outcome], "shift")
    printed = capsys.readouterr().out
    said = "shift, rule 1: little gain, boosted − standard", "10 pairs", "95 % interval not below"
    assert all(text in printed for text in said)
    assert printed.count("verdict") == printed.count(f"verdict     {verdict}") == 1
    verdicts.judge_previous_token(shift_reports[outcome], "shift", rules=2)
    both = capsys.readouterr().out
    assert (
        both.startswith(printed)
        and "shift, rule 2: a gain, boosted − wider by FLOPs" in both
        and both.count("verdict") == 2
    )


@pytest.mark.parametrize(
    "outcome, words",
    {
        "rule 1": ["held", "did not hold"],  # the interval of the second lies above zero
        "open": ["did not hold", "did not hold"],  # both wholly on the other side
        "wide": ["open", "open"],
        "both": ["held", "held"],
        "rule 2": ["did not hold", "held"],
    }.items(),
)
def test_a_rule_that_is_not_met_did_not_hold_only_where_the_opposite_is_shown(outcome, words, shift_reports, capsys):
    verdicts.judge_previous_token(shift_reports[outcome])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1)[1] for line in lines if line.startswith("verdict")] == words


def test_a_rate_at_the_edge_meets_no_rule(tmp_path):
    train = {key: x for key, x in TOY.train.items() if key != "learning_rate"}
    arms = tuple(Arm(name=name) for name in SHIFTED)
    sweep = replace(TOY, name="sweep", arms=arms, train=train, seeds=(0,), grid={"learning_rate": (1e-3, 2e-3, 4e-3)})
    for one in sweep.runs():
        best = 1e-3 if one.arm.name == "standard_shift" else 2e-3
        found = dict(valid_loss=abs(one.train.learning_rate - best), test_loss=1.0, diverged=False)
        Record("sweep", one.settings, found | dict(parameters=1, non_embedding=1)).save(one.name, tmp_path)
    report = shift_report(tmp_path, 0, +3, train=train, sweep=sweep)
    assert decides(report, "open", again=False), "first the grid is extended"
    assert "standard_shift lies at the edge" in verdicts.shifted(report).doubts[0]


RULE_MUTANTS = {
    "another margin": (">= -MARGIN", ">= -2 * MARGIN"),
    "the mean instead of the interval": ("percent(rows[0].low)", "percent(rows[0].difference)"),
    "the wrong end": ("percent(rows[0].low)", "percent(rows[0].high)"),
    "rule 2 by the lower end": ("rows[1].high < 0", "rows[1].low < 0"),
    "rule 2 by its mean": ("rows[1].high < 0", "rows[1].difference < 0"),
    "the other baseline": ('"wider_flops_shift")', '"standard_shift")'),
    "doubts do not count, rule 1": ("small = not doubts[0] and", "small ="),
    "doubts do not count, rule 2": ("more_to_it = not doubts[1] and", "more_to_it ="),
    "no second look": ("again = ", "again = False and "),
    "a second look at once": ("small or more_to_it or any(doubts) or not again", "not again"),
    "no price for the second look": ("0.975", "0.95"),
    "the second ten alone": ('f"{name}+{more}", 0.975', 'f"{more}+{more}", 0.975'),
    "no wait": ("doubts, None)", "doubts, (False, False))"),
}


@pytest.mark.parametrize("mutant", RULE_MUTANTS)
def test_a_wrong_rule_of_the_shift_is_noticed(mutant, shift_reports, monkeypatch):
    old, new = RULE_MUTANTS[mutant]
    source = inspect.getsource(verdicts.shifted)
    assert source.count(old) >= 1
    scope = dict(vars(verdicts))
    exec(source.replace(old, new), scope)
    monkeypatch.setattr(verdicts, "shifted", scope["shifted"])

    assert not all(decides(shift_reports[outcome], *of[1:]) for outcome, of in OUTCOMES.items())


# ---- The rules of E8 ----

ARMS_OF_E8 = "boosted_shift", "boosted_input_shift", "standard_shift", "wider_shift", "twicing_shift"


def report_of_e8(
    folder, of_input=-4.0, of_standard=-7.0, of_wider=-0.2, of_twicing=-4.0, noise=1.0, missing=None, diverged=None
):
    """A report of six pairs at these differences, boosted minus the four, in percent."""
    arms = tuple(Arm(name=name) for name in ARMS_OF_E8)
    toy = replace(TOY, name="composition", arms=arms, seeds=(1, 2, 3, 4, 5, 6))
    base = [5.0 + noise * x for x in (0.001, -0.002, 0.003, -0.001, 0.002, -0.003)]
    scatter = [noise * x for x in (0.002, -0.002, 0.001, -0.001, 0.001, -0.001)]
    gaps = of_input, of_standard, of_wider, of_twicing
    others = [[x + e - math.log1p(gap / 100) for x, e in zip(base, scatter)] for gap in gaps]
    losses = dict(zip(ARMS_OF_E8, (base, *others)))
    if diverged:
        losses[diverged][3] = None
    save(folder, toy, losses)
    if missing:
        next((folder / "composition").glob(f"{missing}*")).unlink()
    return Report(folder, {"composition": toy})


OUTCOMES_OF_E8 = {
    "as expected": ({}, "held held held did-not-hold"),
    "none": (dict(of_input=4, of_standard=4, of_wider=-3, of_twicing=2), "did-not-hold did-not-hold did-not-hold held"),
    "within a limit": (dict(of_wider=-0.95, of_twicing=-1.05), "held held open open"),
    "between zero and a limit": (dict(of_wider=-0.5, of_twicing=-0.5), "held held held held"),
    "wide": (dict(of_input=-1, of_standard=-1, of_twicing=0, noise=10), "open open open open"),
    "near": (dict(of_input=-0.2, of_standard=-0.2, of_wider=-1, of_twicing=-1), "open open open open"),
    "one waits": (dict(missing="twicing"), "held held held not-known-yet"),
    "one diverges": (dict(diverged="boosted_input_shift"), "open held held did-not-hold"),
}


@pytest.fixture(scope="module")
def reports_of_e8(tmp_path_factory):
    found = {}
    for outcome, (options, _) in OUTCOMES_OF_E8.items():
        found[outcome] = report = report_of_e8(tmp_path_factory.mktemp("e8"), **options)
        report.records("composition")
    return found


def words_of_e8(report, decide=verdicts.decide):
    return [one.verdict.replace(" ", "-") for one in decide(report, verdicts.COMPOSITION).values()]


@pytest.mark.parametrize("outcome", OUTCOMES_OF_E8)
def test_what_the_long_run_decides(outcome, reports_of_e8, capsys):
    wanted = OUTCOMES_OF_E8[outcome][1].split()
    assert words_of_e8(reports_of_e8[outcome]) == wanted
    verdicts.judge_plan(reports_of_e8[outcome], "E8", verdicts.COMPOSITION)
    lines = capsys.readouterr().out.splitlines()
    printed = [line.split(maxsplit=1)[1].replace(" ", "-") for line in lines if line.startswith("verdict")]
    assert printed == [word for word in wanted if word != "not-known-yet"]
    assert sum("   not known yet: 11 of 12 runs are in" in line for line in lines) == 4 - len(printed)


def test_the_p_of_the_long_run_is_students_against_the_limit(reports_of_e8):
    report = reports_of_e8["wide"]
    found = verdicts.decide(report, verdicts.COMPOSITION)
    for key, (arms, limit) in {
        "composition": (("boosted_shift", "boosted_input_shift"), 1.0),
        "capacity": (("boosted_shift", "wider_shift"), 0.99),
        "no weights": (("twicing_shift", "boosted_shift"), 1.01),
    }.items():
        first, second = map(np.array, report.losses(*arms, "composition"))
        assert found[key].p == pytest.approx(scipy.stats.ttest_rel(first - math.log(limit), second).pvalue)
    ps = sorted(one.p for one in found.values())
    assert min(one.corrected for one in found.values()) == pytest.approx(min(1, 4 * ps[0]))


MUTANTS_OF_E8 = {
    "no correction": ("holm(list(ps.values()))", "list(ps.values())"),
    "the wrong side": ("is_below == below", "is_below != below"),
    "no limit": ("math.log1p(limit / 100)", "0.0"),
    "a limit of the wrong sign": ("math.log1p(limit / 100)", "math.log1p(-limit / 100)"),
    "runs that diverged": ("if has_interval(row) and not report.doubt(row, *of):", "if row is not None:"),
    "no wait": ('word = "not known yet"', 'word = "open"'),
}


@pytest.mark.parametrize("mutant", MUTANTS_OF_E8)
def test_a_wrong_rule_of_the_long_run_is_noticed(mutant, reports_of_e8):
    old, new = MUTANTS_OF_E8[mutant]
    source = inspect.getsource(verdicts.decide)
    assert source.count(old) == 1
    scope = dict(vars(verdicts))
    exec(source.replace(old, new), scope)
    noticed = 0
    for outcome, report in reports_of_e8.items():
        try:
            found = words_of_e8(report, scope["decide"])
            noticed += found != OUTCOMES_OF_E8[outcome][1].split()
        except (TypeError, ValueError):  # of a run without a loss
            noticed += 1
    assert noticed


# ---- The rules of E12 ----


def report_of_e12(folder, of_standard=-20.0, of_boosted=-14.0, noise=1.0, missing=None, diverged=None):
    """A report of ten pairs at these differences, standard attention with the shift minus the two, in percent."""
    names = ("shift-new", ("standard_shift",)), ("shift-new-plain", ("standard", verdicts.BOOSTED))
    toys = [
        replace(TOY, name=name, arms=tuple(Arm(name=arm) for arm in arms), seeds=tuple(range(22, 32)))
        for name, arms in names
    ]
    base = [4.5 + noise * x for x in np.linspace(-0.004, 0.004, 10)]
    others = [
        [x - math.log1p(gap / 100) + noise * 0.003 * (-1) ** at for at, x in enumerate(base)]
        for gap in (of_standard, of_boosted)
    ]
    losses = [{"standard_shift": base}, dict(zip(("standard", verdicts.BOOSTED), others))]
    for toy, of_toy in zip(toys, losses):
        if diverged in of_toy:
            of_toy[diverged][3] = None
        save(folder, toy, of_toy)
    if missing:
        next((folder / "shift-new-plain").glob(f"{missing}*")).unlink()
    return Report(folder, {toy.name: toy for toy in toys})


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, "held held"),
        (dict(of_standard=-9, of_boosted=2), "did-not-hold did-not-hold"),
        (dict(of_standard=-10.1, of_boosted=-0.1), "open open"),
        (dict(of_standard=-11, of_boosted=-2), "held held"),
        (dict(of_standard=-20, of_boosted=-14, noise=60), "open open"),
        (dict(missing="standard"), "not-known-yet held"),
        (dict(diverged="boosted"), "held open"),
        (dict(diverged="standard_shift"), "open open"),
    ],
)
def test_what_the_ten_new_seeds_decide(options, wanted, tmp_path, capsys):
    if options.get("diverged") == "boosted":
        options = options | dict(diverged=verdicts.BOOSTED)
    report = report_of_e12(tmp_path, **options)
    found = verdicts.decide(report, verdicts.SHIFT_ONCE_MORE)
    assert [one.verdict.replace(" ", "-") for one in found.values()] == wanted.split()
    verdicts.judge_plan(report, "E12", verdicts.SHIFT_ONCE_MORE)
    printed = capsys.readouterr().out
    assert printed.count("E12, ") == 2 and printed.count("not known yet") == wanted.count("not-known-yet")


# ---- The rule of E5 ----


def made_up_runs(mean=100.0, spread=0.01, failed=0, diverged=0):
    """Ten runs about a perplexity; some of them fail, or diverge and have no loss."""
    runs = [
        dict(diverged=False, test_loss=math.log(mean) + spread * x, without_attention=0.1, without_ffn=0.3)
        for x in np.linspace(-1, 1, 10)
    ]
    for run in runs[:failed]:
        run["without_attention"] = 0.4
    return [dict(diverged=True)] * diverged + runs[diverged:]


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        (dict(), True),
        (dict(mean=100.4), True),
        (dict(mean=100.6), False),
        (dict(spread=0.024), True),
        (dict(spread=0.026), False),
        (dict(failed=1), False),
        (dict(diverged=1), False),
    ],
)
def test_what_a_cure_must_do(options, accepted, capsys):
    """Against plain runs of five times the spread, and a gentler rate of the same."""
    others = made_up_runs(spread=0.05, failed=3), made_up_runs()
    found = verdicts.cure(made_up_runs(**options), *others)
    assert found.accepted is accepted
    assert found.failed == options.get("failed", options.get("diverged", 0))
    assert found.ratio == pytest.approx(options.get("spread", 0.01) / 0.05, rel=0.2)
    assert found.worse == pytest.approx(options.get("mean", 100) - 100, abs=0.2)
    verdicts.judge_cure("a cure", made_up_runs(**options), *others)
    assert ("verdict     held" in capsys.readouterr().out) is accepted
    verdicts.judge_cure("a cure", made_up_runs()[:9], *others)
    assert "9 of 10 runs are in, of the plain ones 10" in capsys.readouterr().out
    verdicts.judge_cure("a cure", made_up_runs(failed=2)[:3], *others)
    assert "observed    2 of 3\n" in (out := capsys.readouterr().out) and "verdict     held" not in out


@pytest.mark.parametrize(
    ("options", "verdict", "observed"),
    [
        (dict(), "open", "0 of 0; 0."),
        (dict(spread=0.026), "did not hold", "0 of 0; 0.5"),
        (dict(mean=101), "did not hold", "+1.0"),
    ],
)
def test_losses_alone_can_reject_a_cure_and_cannot_accept_it(options, verdict, observed, capsys):
    """What a model loses without a part is not known of models that were not kept."""
    changed = [{key: run[key] for key in ("diverged", "test_loss")} for run in made_up_runs(**options)]
    others = made_up_runs(spread=0.05, failed=3), made_up_runs()
    assert verdicts.cure(changed, *others).accepted is (None if verdict == "open" else False)
    verdicts.judge_cure("a cure", changed, *others)
    out = capsys.readouterr().out
    assert f"verdict     {verdict}" in out and observed in out


# ---- The rule of E6 ----


def of_depth(folder, slope, missing=False):
    """Records of four depths in which boosted attention starts 0.1 nats ahead, and its lead falls by a slope a
    doubling, a little more or less with each seed."""
    toys = {}
    for n in (1, 2, 4, 8):
        name = f"depth-{n}"
        toys[name] = replace(TOY, name=name, model=TOY.model | {"n_layers": n})
        lead = [-0.1 + (slope + wobble) * math.log2(n) for wobble in (-0.001, 0, 0.001)]
        boosted = tuple(5 + apart for apart in lead)
        save(folder, toys[name], {"standard": (5.0,) * 3, "wider": (5.0,) * 3, "boosted_residual": boosted})
    if missing:
        next((folder / "depth-8").glob("wider-seed2-*")).unlink()
    return Report(folder, toys)


@pytest.mark.parametrize(("slope", "verdict"), [(0.01, "held"), (0.0, "open"), (-0.01, "did not hold")])
def test_whether_the_lead_falls_with_depth(slope, verdict, tmp_path, capsys):
    report = of_depth(tmp_path, slope)
    assert verdicts.slopes_with_depth(report) == pytest.approx([slope - 0.001, slope, slope + 0.001])
    verdicts.judge_depth(report)
    assert f"verdict     {verdict}\n" in capsys.readouterr().out
    p, difference = verdicts.e6(report)
    assert difference == pytest.approx(-slope) and (p < 0.05) is (verdict != "open")


def test_a_mean_for_a_sentence_has_the_interval_of_its_row(tmp_path):
    report = of_depth(tmp_path, 0.01)
    row = report.difference("boosted_residual", "wider", "depth-8")
    pairs = np.subtract(*report.losses("boosted_residual", "wider", "depth-8"))
    assert reports.mean_in_short(pairs) == reports.in_short(row)


def test_a_rate_at_the_edge_leaves_the_slope_open(tmp_path, capsys, monkeypatch):
    report = of_depth(tmp_path, 0.01)
    monkeypatch.setattr(report, "untuned", lambda name: {"wider"} if name == "depth-2" else set())
    verdicts.judge_depth(report)
    assert "open: the learning rate of wider lies at the edge" in capsys.readouterr().out
    assert verdicts.e6(report).p == 1


def test_no_slope_before_every_depth_is_in(tmp_path, capsys):
    report = of_depth(tmp_path, 0.01, missing=True)
    assert verdicts.slopes_with_depth(report) is None and verdicts.e6(report).p == 1
    verdicts.judge_depth(report)
    assert "not known yet: 35 of 36 runs are in" in capsys.readouterr().out


# ---- The table ----


def settings_of(report, monkeypatch, planned=("standard",)):
    row = Setting("toy", {"standard": ("standard", "toy"), "parameters": ("wider", "toy")}, planned, OF[0])
    monkeypatch.setattr(verdicts, "SETTINGS", (row,))
    monkeypatch.setattr(verdicts, "BESIDE", ())
    monkeypatch.setattr(verdicts, "COMPOUND", {})
    monkeypatch.setattr(verdicts, "PLANS", ())
    return row


TABLE_OUTCOMES = {
    "ahead": ((4.8, 4.91, 5.0), ("standard",), "**better**, planned"),
    "behind": ((5.2, 5.31, 5.4), ("standard",), "**worse**, planned"),
    "open": ((4.8, 5.2, 5.1), ("standard",), "open"),
    "not after Holm": ((4.98, 5.06, 5.17), ("standard", "parameters"), "open after Holm"),
    "not planned: ahead": ((4.8, 4.91, 5.0), (), "better, *seen*"),
    "not planned: behind": ((5.2, 5.31, 5.4), (), "worse, *seen*"),
    "not planned: open": ((4.8, 5.2, 5.1), (), "open"),
    "diverged": ((4.8, None, 5.0), ("standard",), "run diverged"),
}


@pytest.mark.parametrize("outcome", TABLE_OUTCOMES)
def test_the_verdict_of_a_cell(outcome, tmp_path, monkeypatch):
    losses, planned, word = TABLE_OUTCOMES[outcome]
    save(tmp_path, losses=LOSSES | {"boosted_residual": losses})
    report = Report(tmp_path, {"toy": TOY})
    row = settings_of(report, monkeypatch, planned)
    adjusted = planned_p(report)
    assert len(adjusted) == len(planned)
    assert verdict(report, row.of("standard"), adjusted) == word, adjusted
    cells = answer_table(report, [row]).data.splitlines()[2].split(" | ")
    assert cells[0] == "| toy" and cells[1].endswith(word.replace(" ", "\xa0")) and cells[3] == ""
    decided = [of for of, p in adjusted.items() if p < 0.05]
    found = answers(report).measured
    assert found["stand"] == ("one" if row.of("standard") in decided else "none")
    rest = sorted(p for of, p in adjusted.items() if of not in decided)
    assert (found["planned"], found["next_p"]) == (len(planned), rest[0] if rest else 1)
    next((tmp_path / "toy").glob("standard-seed2-*")).unlink()
    later = Report(tmp_path, {"toy": TOY})
    assert verdict(later, row.of("standard"), planned_p(later)) == "5 of 6"
    assert planned_p(later).get(row.of("standard"), 1) == 1


def test_a_claim_of_a_plan_may_be_turned_round_and_one_with_a_limit_decides_no_order():
    report = of_the_book()
    adjusted, of = planned_p(report), {key: claim.of for key, claim in verdicts.COMPOSITION.items()}
    first, second, name = of["no weights"]
    assert verdict(report, (second, first, name), adjusted) == "**better**, planned"
    assert verdict(report, of["composition"], adjusted) == "open after Holm"
    assert verdicts.COMPOSITION["capacity"].limit and adjusted[of["capacity"]] > 0.05
    assert verdict(report, of["capacity"], adjusted) == "better, *seen*"


def test_two_analyses_double_the_p(tmp_path, monkeypatch):
    save(tmp_path, losses=LOSSES)
    report = Report(tmp_path, {"toy": TOY})
    of = settings_of(report, monkeypatch).of("standard")
    (once,) = planned_p(report).values()
    monkeypatch.setattr(verdicts, "AGAIN", "toy")
    assert once == report.p(*of) < 0.5 and planned_p(report) == {of: pytest.approx(2 * once)}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("adjusted.get(one, 1) < 0.05", "adjusted.get(one, 1) < 1"),
        ('"better" if row.high < 0 else "worse"', '"better"'),
        ('if ordering(row) == "open":', "if False:"),
        ('f"{word}, *seen*"', "word"),
        ("if report.doubt(row, *of):", "if False:"),
        ('return f"{len(found)} of {planned}"', 'return "open"'),
    ],
)
def test_a_wrong_verdict_is_noticed(old, new, tmp_path, monkeypatch):
    source = inspect.getsource(verdict)
    assert source.count(old) == 1
    scope = dict(vars(verdicts))
    exec(source.replace(old, new), scope)
    monkeypatch.setitem(globals(), "verdict", scope["verdict"])
    wrong = 0
    for number, outcome in enumerate(TABLE_OUTCOMES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            try:
                test_the_verdict_of_a_cell(outcome, folder, patch)
            except AssertionError:
                wrong += 1
    assert wrong


@pytest.mark.parametrize(
    ("old", "new"),
    [("row.high < 0", "row.high > 0"), ("row.low <= 0 <= row.high", "False"), ('"not known yet"', '"open"')],
)
def test_a_wrong_ordering_is_noticed(old, new):
    source = inspect.getsource(ordering)
    assert source.count(old) == 1
    scope = dict(vars(reports))
    exec(source.replace(old, new), scope)
    row = lambda low, high: type("Row", (), dict(low=low, high=high, pairs=3, n=3, diverged=0))
    cases = {"held": row(-2, -1), "did not hold": row(1, 2), "open": row(-1, 1), "not known yet": None}
    assert all(ordering(case) == word for word, case in cases.items())
    assert any(scope["ordering"](case) != word for word, case in cases.items())


def test_the_settings_are_those_of_the_book():
    for setting in SETTINGS:
        assert set(setting.against) <= set(BASELINES) and set(setting.planned) <= set(setting.against)
        for baseline in setting.against:
            better, worse, *names = setting.of(baseline)
            known = {arm.name for name in names for part in name.split("+") for arm in EXPERIMENTS[part].arms}
            assert {better, worse} <= known
            assert of_the_book().shared_seeds(*names), (setting.label, baseline)


def test_the_family_is_every_planned_comparison():
    """The ten orderings and what was planned after them, each once; counted by hand from the plans."""
    report = of_the_book()
    found = family(report)
    assert set(ORDERINGS.values()) <= set(found) and len(found) == 28 + 4 + 2 + 4 + 2 + 4 + 2
    assert sum(of[0] == "gap" for of in found) == 4 and {("E2",), ("E6",)} <= set(found)
    gates = {(f"boosted_{of}", "wider_head", "coarse-gates") for of in ("head", "scalar")}
    assert gates <= set(found)
    boosted, wider = (np.array(of) for of in report.losses(BOOSTED, "wider", "rotary-96"))
    apart = boosted - wider
    t = apart.mean() / (apart.std(ddof=1) / len(apart) ** 0.5)
    assert found[BOOSTED, "wider", "rotary-96"] == pytest.approx(2 * scipy.stats.t.sf(abs(t), len(apart) - 1))
    assert found["E2",] == max(report.p(*of) for of in verdicts.READS) and len(verdicts.READS) == 4
    assert found["gap", "ladder-96-again", "ladder-96-rotary"] == 1, "it has not run"
    adjusted = planned_p(report)
    least, most = min(found.values()), max(found.values())
    assert min(adjusted.values()) == pytest.approx(len(found) * least) and max(adjusted.values()) == most == 1
    assert all(adjusted[of] >= p for of, p in found.items())


def test_a_gap_has_the_p_of_welch(report):
    later = replace(TOY, name="later", train=TOY.train | dict(warmup_steps=3))
    save(report.folder, later, LOSSES | {"wider": (4.5, 4.61, 4.7)})
    report.experiments["later"] = later
    gap = [np.subtract(*report.losses(BOOSTED, "wider", name)) for name in ("toy", "later")]
    found = verdicts.gaps(report, "toy", "later")
    assert found.p == pytest.approx(scipy.stats.ttest_ind(*gap, equal_var=False).pvalue)
    assert found.difference == pytest.approx(gap[0].mean() - gap[1].mean())
    next((report.folder / "later").glob("wider-seed2-*")).unlink()
    assert verdicts.gaps(Report(report.folder, report.experiments), "toy", "later") == (1, 0)


def test_the_family_as_a_table(tmp_path, monkeypatch):
    save(tmp_path, losses=LOSSES | {"boosted_residual": (4.8, 4.91, 5.0)})
    report = Report(tmp_path, {"toy": TOY})
    settings_of(report, monkeypatch)
    decided = {("E2",): (0.001, -1.0), ("E6",): (0.001, 1.0), ("gap", "a", "b"): (0.9, -1.0)}
    decided = {name: lambda report, of=of: verdicts.Compound(*of) for name, of in decided.items()}
    for module in (verdicts, tables):
        monkeypatch.setattr(module, "COMPOUND", decided)
    lines = family_table(report).data.splitlines()[2:]
    words = {line.split(" | ")[0].removeprefix("| "): line.rstrip(" |").split(" | ")[-1] for line in lines}
    names = [tables.COMPOUND_NAMES[key] for key in ("E2", "E6")]
    assert [words[name] for name in names] == ["**held**", "**did not hold**"]
    assert words["boosted_residual − standard, `toy`"] == "**better**, planned"
    assert words[tables.COMPOUND_NAMES["gap"].format("a", "b")] == "open"


def test_few_pairs_have_signs_and_resamples(tmp_path, monkeypatch):
    losses = {"standard": (5.0, 5.1, 5.2), "boosted_residual": (4.8, 4.91, 5.0)}
    save(tmp_path, losses=LOSSES | losses)
    report = Report(tmp_path, {"toy": TOY})
    settings_of(report, monkeypatch)
    (line,) = few_pairs_table(report).data.splitlines()[2:]
    apart = np.subtract(*(losses[arm] for arm in ("boosted_residual", "standard")))
    means = [np.mean([apart[i], apart[j], apart[k]]) for i in range(3) for j in range(3) for k in range(3)]
    low, high = (percent(x) for x in np.quantile(means, (0.025, 0.975)))
    assert line.endswith(f" | {low:+.1f} to {high:+.1f} | 3 of 3 | 0.250 |")
    assert not few_pairs_table(report, most=2).data.splitlines()[2:]


@cache
def of_the_book():
    """What the records of the book say, read once for all tests."""
    return Report()


def short_cells():
    """The comparisons in the two tables of the chapter."""
    return [of for rows in SHORT_TABLES.values() for cells in rows.values() for of in cells if of]


def elsewhere_cells():
    return [of for cells in ELSEWHERE.values() for of in cells if of]


def test_the_short_tables_ask_what_the_book_can_answer():
    for better, worse, *names in (*short_cells(), *elsewhere_cells()):
        known = {arm.name for name in names for part in name.split("+") for arm in EXPERIMENTS[part].arms}
        assert {better, worse} <= known and better.startswith("boosted")
    report = of_the_book()
    found = [table.splitlines() for table in short_tables(report).data.split("\n\n")]
    assert [len(lines) for lines in found] == [2 + 5, 2 + 5]
    assert found[0][3].endswith(" | not run | not run |") and found[1][4].endswith(" | not run |")
    held = report.difference("boosted_shift", "standard_shift", "shift-length")
    assert reports.signed(held.difference) in found[1][2] and found[1][2].count("**better**,\xa0planned") == 1
    stack = report.difference(BOOSTED, "stack", "mini-warm", "shift-stack")
    assert reports.signed(stack.difference) in found[0][4] and found[0][4].count("*seen*") == 2
    assert found[1][3].count("**better**,\xa0planned") == 1  # a claim of E8, turned round
    assert [line.count("**worse**,\xa0planned") for line in found[1][2:]] == [0, 0, 0, 0, 2]


def test_the_table_of_other_settings():
    report, shown = of_the_book(), elsewhere_cells()
    lines = elsewhere_table(report).data.replace("\xa0", " ").splitlines()[2:]
    for line, (setting, cells) in zip(lines, ELSEWHERE.items(), strict=True):
        assert line.startswith(f"| {setting} | ")
        for of, cell in zip(cells, line.strip(" |").split(" | ")[1:], strict=True):
            row = report.difference(*of) if of else None
            low, high = (reports.signed(x) for x in (row.low, row.high)) if row else ("", "")
            assert cell.split("<br>")[1] == f"{low} to {high}" if row else cell == "not run"
    assert len({*shown}) == len(shown) and not {*shown} & {*short_cells()}


def test_a_bar_reaches_from_zero_to_the_change_with_its_interval_and_is_hollow_if_it_was_not_planned(report):
    row = report.difference("wider", "standard", "toy")
    told = {"planned": (row, "boosted attention", True), "seen": (row, "wider attention", False)}
    interval_bars({"a group": told})
    ax = matplotlib.pyplot.gca()
    ends = [percent(row.low), percent(row.high)]
    drawn = [line.get_xdata() for line in ax.lines[:-1]]  # the last is the line at zero
    wanted = [[0, percent(row.difference)], ends, [percent(row.difference)]]
    assert all(np.allclose(*one) for one in zip(drawn, 2 * wanted, strict=True))
    heights = [{*ax.lines[k].get_ydata()} | {*ax.lines[k + 1].get_ydata()} for k in (0, 3)]
    assert [len(one) for one in heights] == [1, 1] and heights[0] != heights[1]
    planned, seen = (ax.lines[k].get_markerfacecolor() for k in (2, 5))
    assert planned == ax.lines[2].get_color() and seen == "white"
    words = [text.get_text() for text in ax.texts]
    change = f"{reports.signed(row.difference)} %"
    assert words == ["a group", "planned", change, "seen", change]
    matplotlib.pyplot.close()


def test_a_row_of_the_headline_is_hollow_if_no_plan_had_asked_for_it():
    rows = {name: of_the_book().difference(*one.of) for name, one in verdicts.HEADLINE.items()}
    headline_bars(rows, {"all": {name: name for name in rows}})
    dots = [line for line in matplotlib.pyplot.gca().lines if line.get_marker() == "o"]
    adjusted = planned_p(of_the_book())
    hollow = [dot.get_markerfacecolor() == "white" for dot in dots]
    assert hollow == [one.of not in adjusted for one in verdicts.HEADLINE.values()] and 0 < sum(hollow) < len(rows)
    assert [dot.get_xdata()[0] for dot in dots] == pytest.approx([percent(row.difference) for row in rows.values()])
    matplotlib.pyplot.close()


def test_a_lead_is_told_in_words(report):
    row = report.difference("wider", "standard", "toy")
    told = lower_in_short(row).replace("\xa0", " ")
    lead, low, high = (-percent(x) for x in (row.difference, row.high, row.low))
    assert low < lead < high and told == f"{lead:.1f} % lower perplexity ({low:.1f} to {high:.1f}, n = 3)"


def test_the_figure_of_six_models_has_their_runs():
    models = models_of(of_the_book())
    costs = {name: cost for name, (cost, _) in models.items()}
    assert costs["standard"] == costs["standard, shift"] < costs["wider, equal FLOPs"]
    assert costs["boosted"] == costs["boosted, shift"] == pytest.approx(costs["wider, equal FLOPs, shift"], rel=0.01)
    for name, (_, (ordinary, long)) in models.items():
        assert [*sorted(ordinary)] == [*range(1, 11)] and len(long) == 6
        arm, short, late = MODELS[name]
        losses = of_the_book().of_arm(arm, late)
        assert sorted(map(math.log, long.values())) == pytest.approx(sorted(losses))
    shorter = models["standard, shift"][1][0]
    assert {math.log(shorter[seed]) for seed in shorter} <= {*of_the_book().of_arm("standard_shift", verdicts.AGAIN)}


def test_what_the_figures_are_said_to_show_is_what_they_show():
    """The numbers of their descriptions, for readers who do not see them."""
    report, page = of_the_book(), (Path(__file__).parents[2] / "nbs" / "18_perplexity.ipynb").read_text()
    of_bars, of_models = re.findall(r"fig-alt: '(.*?)'", page)[:2]
    geometric = lambda runs: math.exp(np.mean(np.log([*runs.values()])))
    means = [[geometric(runs[length]) for _, runs in models_of(report).values()] for length in (0, 1)]
    named = [int(x) for x in re.findall(r"\d+", of_models)]
    assert named == [round(x) for x in (*means[0], *means[1])]
    rows = {name: percent(report.difference(*one.of).difference) for name, one in verdicts.HEADLINE.items()}
    told = [float(x.replace("minus ", "-").replace("plus ", "")) for x in re.findall(r"(?:minus|plus) [\d.]+", of_bars)]
    drawn = [rows[name] for name in ("shift", "second", "long", "flops_here", "flops")]
    assert told == pytest.approx(drawn, abs=0.5) and abs(rows["second"] - rows["wider"]) < 0.5


def test_a_rate_that_a_sweep_missed_is_worse_in_every_pair():
    report = of_the_book()
    for (name, arm), other in verdicts.BETTER_RATE.items():
        ran, better = report.of_arm(arm, name), report.of_arm(arm, other)
        assert len(ran) == len(better) >= 3 and max(np.subtract(better, ran)) < 0
        assert verdict(report, (arm, "standard", name), {}) == "rate not found"


def test_why_runs_differ_takes_the_mean_of_arm_and_setting_out(report, monkeypatch):
    monkeypatch.setattr(report, "experiments", {"toy": SimpleNamespace(rates_from="a sweep", model={})})
    monkeypatch.setattr(report, "records", lambda name: records_of(TOY, report.folder))
    losses = {r.settings["id"]: r.measured["test_loss"] for r in report.records("toy")}
    report.effects = {id: {"worth": [3.0, 10 - 2 * loss]} for id, loss in losses.items()}
    apart = apart_in_arm(report)
    assert len(apart["boosted"]) == 3 and len(apart["others"]) == 6
    assert np.allclose([of.mean(0) for of in apart.values()], 0)
    found = why_runs_differ(report).measured
    assert found["boosted_r"] == pytest.approx(-1) and found["others_runs"] == 6


def test_a_gap_against_updates_is_paired(tmp_path):
    for one in TOY.runs():
        lower = 0.1 * (one.arm.name == "boosted_residual")
        curve = [one.seed - 2 * lower, one.seed + 0.01 * one.seed * lower]
        found = dict(valid_loss=1.0, test_loss=1.0, diverged=False, parameters=1, non_embedding=1)
        Record("toy", one.settings, found | dict(curve_loss=curve, curve_step=[5, 10])).save(one.name, tmp_path)
    steps, gap = gap_curve(Report(tmp_path, {"toy": TOY}), ("boosted_residual", "wider", "toy"))
    assert steps.tolist() == [5, 10] and gap == pytest.approx([percent(-0.2), percent(0.002)])


# ---- The pages ----


def run_page(name, monkeypatch, figures):
    """The names that the code cells of a notebook leave behind, and what they quoted."""
    matplotlib.use("Agg")
    glued = {}
    monkeypatch.setattr("myst_nb.glue", lambda key, value, display: glued.update({key: value}))
    cells = json.loads((ROOT / "nbs" / f"{name}.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    code = "\n\n".join(source for source in sources if "#| eval: false" not in source)
    scope = {"__name__": "page"}
    dtype, style = torch.get_default_dtype(), dict(matplotlib.rcParams)
    try:
        exec(compile(code, name, "exec"), scope)
        assert len(matplotlib.pyplot.get_fignums()) >= figures
    finally:
        torch.set_default_dtype(dtype)
        matplotlib.pyplot.close("all")
        matplotlib.rcParams.update(style)
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    return scope, glued, text


@pytest.fixture(scope="module")
def notebook():
    with pytest.MonkeyPatch.context() as patch:
        yield run_page("Y_lab_notebook", patch, figures=6)


def test_the_lab_notebook_holds_what_it_says(notebook):
    """Its own asserts hold it against the committed records; nothing of the first comparison is unknown."""
    scope, glued, text = notebook
    first = {key: value for key, value in glued.items() if key.startswith("perplexity-")}
    assert len(first) > 150 and NOT_YET not in first.values()
    quoted = set(reports_of(text))
    assert quoted <= set(glued), quoted - set(glued)
    assert scope["beside"](of_the_book(), *ORDERINGS[9])[0] == pytest.approx(
        np.corrcoef(*of_the_book().losses(*ORDERINGS[9]))[0, 1]
    )


def reports_of(text):
    return [part.split("`")[1] for part in text.split("{glue:text}")[1:]]


def test_the_ten_orderings(notebook, capsys):
    page = notebook[0]["report"]
    notebook[0]["judge_orderings"](page, {number: f"ordering {number}" for number in ORDERINGS})
    assert capsys.readouterr().out.count("verdict") == 10
    assert page.drawn[ORDERINGS[8]] == page.difference(*ORDERINGS[8])


def test_the_recipe_of_an_experiment(notebook):
    rows = notebook[0]["recipe"](TOY)
    assert rows["updates"] == str(2 * (1000 // 16) // 4) and rows["dropout in attention"] == 0.0


def test_losses_by_counting_are_those_of_frequencies(notebook):
    tokens = np.array([0, 1] * 50, dtype=np.uint16)
    corpus = type("Text", (), dict(vocab_size=2, train=tokens, valid=tokens, test=tokens))
    found = notebook[0]["losses_by_counting"](corpus)
    assert found["test_loss"] == pytest.approx(math.log(2)) and found["pair_loss"] < 0.05


def test_every_experiment_that_a_table_names_is_one_of_the_book(notebook):
    scope = notebook[0]
    assert set(scope["WIDTHS"]) | set(scope["AMOUNTS"]) | set(effects.WITH_MODELS) <= set(EXPERIMENTS)
    assert scope["report"].records("mini") == records_of("mini")


def test_the_page_holds_what_it_says(monkeypatch):
    _, glued, text = run_page("18_perplexity", monkeypatch, figures=1)
    quoted = set(reports_of(text))
    assert quoted <= set(glued), quoted - set(glued)


def test_what_the_shift_is_worth_in_each_setting(monkeypatch):
    """The table against the differences themselves; a star where a rate lies at the edge of its grid."""
    report = of_the_book()
    *_, wikipedia, gutenberg, one_pass, common, rotary, _ = settings_table(report).data.splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip("|").split("|")][1:]
    both = report.difference("boosted_shift", "standard_shift", "shift+shift-again")
    assert cells(wikipedia)[2] == in_short(both)
    plain = report.difference("standard_shift", "standard", "shift-gutenberg-plain", "shift-gutenberg")
    second = report.difference(BOOSTED, "standard", "shift-gutenberg-plain")
    assert cells(gutenberg)[:2] == [in_short(plain), in_short(second)]
    both = report.difference("boosted_shift", "standard_shift", "shift-rotary-common")
    assert cells(common)[2] == in_short(both)
    assert not any("*" in line for line in (wikipedia, gutenberg, one_pass, common, rotary))
    before = report.untuned  # as it was before the grid of one experiment was extended
    monkeypatch.setattr(report, "untuned", lambda name: {"standard"} if name == "shift-rotary" else before(name))
    rotary = settings_table(report).data.splitlines()[-2]
    assert [cell.endswith(" *") for cell in cells(rotary)] == [True, True, False, False]


def test_what_the_shift_does_for_each_arm():
    report = of_the_book()
    first, *_, stack = shift_table(report).data.splitlines()[2:]
    size = in_percent(report.difference("standard_shift", "standard", "mini-warm+shift-plain", "shift"))
    assert first == f"| standard | 20 of 20 | {size} |"
    assert stack.endswith(f" | {in_percent(report.difference('stack_shift', 'stack', 'shift-stack'))} |")


def test_settings_without_records_say_how_many_runs_are_in(tmp_path):
    lines = settings_table(Report(tmp_path)).data.splitlines()[2:]
    assert len(lines) == 6 and all("0 of" in line and "%" not in line for line in lines)


@pytest.mark.parametrize("shape", [(0, 9), (3, 2), (9,)])
def test_effects_of_no_windows_are_refused(shape):
    with refused("windows"):
        effects.first_block(None, torch.zeros(shape, dtype=torch.int64))
