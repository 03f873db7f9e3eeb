"""The figures to play with compute, in a browser, what the library computes; and they answer to hand and keyboard."""

import ast
import json
import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from test_browser import browser, luminance, tab  # noqa: F401

from gbattn.boosted import GradientBoostedAttention
from gbattn.boosting import boosted_smoother, l2_boost, twice
from gbattn.decoding import accept_constrained, emitted_law
from gbattn.geometry import probe_score, procrustes_distortion
from gbattn.hierarchical import lift_scores
from gbattn.hopfield import retrieve
from gbattn.least_squares import hat_matrix
from gbattn.particles import evolve, mean_overlap, overlap_drift, random_attention, simplex_tokens
from gbattn.positions import TokenShift
from gbattn.retrieval import encode, induction_layer
from gbattn.signal import recursion
from gbattn.sinkhorn import sinkhorn_weights
from gbattn.smoothers import bias_variance, kernel_smoother, softmax_weights
from gbattn.streaming import gains_from_scores
from gbattn.test_time import read_chunks, shift_in_chunks
from support.playgrounds import (
    BASELINE_NAMES,
    COMPARED,
    DATA,
    DIMS,
    FIGURES,
    GIVEN,
    OVERLAPS,
    SETTING_NAMES,
    SIZES,
    STEPS,
    TOKENS,
    VERDICTS,
    pairs_to_play,
    play,
)
from support.reports import Report, percent, signed
from support.tables import QUESTIONS, SHORT_TABLES
from support.verdicts import BASELINES, BOOSTED, SHIFT_ONCE_MORE, WARM, planned_p, verdict

EXACT = 1e-9


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("play") / "all.html"
    path.write_text("<!DOCTYPE html><meta charset=utf-8>" + "".join(play(name).data for name in FIGURES))
    with tab(browser, viewport={"width": 800, "height": 3000}) as (page, requests, errors):
        page.goto(path.as_uri())
        yield page
        assert not requests and not errors


@pytest.fixture
def compute(page):
    """What a figure computes of the values of its inputs, tensors in float64."""

    def call(name, **values):
        told = page.evaluate(f"v => document.querySelector('#play-{name}').compute(v)", values)
        numbers = {key: value for key, value in told.items() if value is not None and '"' not in json.dumps(value)}
        return {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}

    return call


@pytest.mark.parametrize("rounds", [1, 2, 20])
def test_the_rounds_on_three_tokens_are_the_librarys(compute, rounds):
    y = torch.tensor([0.5, 2.0, -0.25], dtype=torch.float64)
    found = compute("slope", a=0.5, b=2, c=-0.25, bandwidth=0.7, rounds=rounds)
    A = kernel_smoother(torch.arange(3, dtype=torch.float64)[:, None], 0.7)
    assert (found["one"] - A @ y).abs().max() < EXACT
    assert (found["F"] - boosted_smoother(A, rounds) @ y).abs().max() < EXACT
    assert abs(found["missed"][-1] - (y - found["F"]).abs().max()) < EXACT


@pytest.mark.parametrize(("averages", "ridge"), [(False, 0.0), (False, 4.5), (True, 0.0)])
def test_the_line_and_its_second_round_are_the_librarys(compute, averages, ridge):
    x, y = torch.tensor([[1.0], [2.0], [2.0]], dtype=torch.float64), torch.tensor([-1, 2.5, 0.5], dtype=torch.float64)
    S = kernel_smoother(x, 1.0) if averages else hat_matrix(x, ridge=ridge)
    found = compute("fit", averages=averages, ridge=ridge, **{f"y{i}": float(t) for i, t in enumerate(y, 1)})
    assert (found["F"] - S @ y).abs().max() < EXACT
    assert (found["second"] - S @ (y - S @ y)).abs().max() < EXACT
    assert (found["second"].abs().max() > 0.1) == (averages or ridge > 0)


@pytest.mark.parametrize("rounds", [1, 2, 7])
@pytest.mark.parametrize("lines", [False, True])
def test_the_smooth_of_a_wave_is_the_librarys(compute, rounds, lines):
    x = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]
    truth = torch.sin(6 * x)
    S = kernel_smoother(x, 0.11, degree=int(lines))
    y = truth + 0.3 * torch.tensor(GIVEN["draws"], dtype=torch.float64)[:, None]
    found = compute("smooth", bandwidth=0.11, rounds=rounds, noise=0.3, lines=lines)
    wanted = bias_variance(boosted_smoother(S, rounds), truth, 0.3)
    assert (found["F"] - l2_boost(S, y, rounds)[:, 0]).abs().max() < EXACT
    assert abs(found["bias"] - wanted.squared_bias) < EXACT and abs(found["risk"] - wanted.risk) < EXACT
    S = torch.stack([kernel_smoother(x, h, degree=int(lines)) for h in found["grid"].tolist()])
    for m, risks, (h, least) in zip((1, rounds), (found["one"], found["all"]), found["best"], strict=True):
        assert (risks - bias_variance(boosted_smoother(S, m), truth, 0.3).risk).abs().max() < EXACT
        assert least == risks.min() and h == found["grid"][risks.argmin()]


@pytest.mark.parametrize("beta", [1.0, 1.2, 20.0])
def test_the_path_of_a_state_is_the_librarys(compute, beta):
    patterns = torch.tensor([[1, 0], [0.31, 0.95], [-0.81, 0.59], [-0.81, -0.59], [0.31, -0.95]], dtype=torch.float64)
    start = torch.tensor([[0.4, -0.3]], dtype=torch.float64)
    found = compute("retrieve", x=0.4, y=-0.3, beta=math.log10(beta), steps=7)
    wanted = retrieve(start, patterns, steps=7, beta=beta, path=True)
    assert (found["states"] - wanted[:, 0]).abs().max() < EXACT


@pytest.mark.parametrize(("place", "rounds"), [(0, 1), (9, 10), (22, 45)])
def test_the_boosted_wave_and_its_risk_are_the_librarys(compute, place, rounds):
    x = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]
    truth, S = torch.sin(6 * x), kernel_smoother(x, 0.09)
    y = truth + 0.5 * torch.tensor(GIVEN["draws"], dtype=torch.float64)[:, None]
    found = compute("boost", rounds=place, shrinkage=0.35, bandwidth=0.09, noise=0.5)
    assert found["M"] == rounds
    assert (found["F"] - l2_boost(S, y, rounds, 0.35)[:, 0]).abs().max() < EXACT
    for m, risk in found["risks"]:
        assert abs(risk - bias_variance(boosted_smoother(S, int(m), 0.35), truth, 0.5).risk) < EXACT


def boosted_wave(rounds, shrinkage):
    """Squared bias and variance of the wave that chapter 5 starts with."""
    x = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]
    S = boosted_smoother(kernel_smoother(x, 0.25), rounds, shrinkage)
    return bias_variance(S, torch.sin(6 * x), 0.3)


@pytest.mark.parametrize(("shrinkage", "best"), [(1, 29), (0.1, 297), (0.35, 84)])
def test_the_best_round_is_the_best_of_all_and_a_stop_of_the_slider(compute, shrinkage, best):
    risks = [boosted_wave(m, shrinkage).risk.item() for m in range(1, 1001)]
    assert np.argmin(risks) + 1 == best
    found = compute("boost", rounds=0, shrinkage=shrinkage, bandwidth=0.25, noise=0.3)
    assert found["best"][0] == best and abs(found["best"][1] - min(risks)) < EXACT
    stops = found["risks"][:, 0]
    assert best in stops and len(stops) == 50 and (stops.diff() > 0).all()


def test_a_risk_that_falls_to_the_last_round_has_no_best_one(page):
    root = page.locator("#play-boost")
    root.locator("input[name=noise]").fill("0")
    assert root.locator("p").inner_text().endswith("it falls up to 1000 rounds.")
    root.locator("button").last.click()


@pytest.mark.parametrize(("place", "alpha"), [(0, 0.1), (6, 1.4)])
def test_the_growth_through_depth_is_the_librarys(compute, place, alpha):
    found = compute("depth", alpha=place, depth=40)
    for name in ("layernorm", "dyt", "derf"):
        wanted = torch.from_numpy(recursion(40, normalizer=name, alpha=alpha).forward_J[::2])
        assert len(found[name]) == 21 and (found[name] / wanted.flatten() - 1).abs().max() < 1e-3


def choices(page, name):
    """The places in a list that can be chosen."""
    options = page.locator(f"#play-pairs select[name={name}] option")
    return options.evaluate_all("all => all.filter(o => !o.disabled).map(o => +o.value)")


def test_the_pairs_that_can_be_chosen_are_those_that_ran_and_have_their_verdict(page, compute):
    report, root, compared = Report(), page.locator("#play-pairs"), pairs_to_play()
    adjusted, names, shown = planned_p(report), list(BASELINE_NAMES), set()
    choose = lambda name, place: root.locator(f"select[name={name}]").select_option(str(place))
    for model, (settings, (says, better)) in enumerate(zip(compared, COMPARED.values(), strict=True)):
        choose("model", model)
        ran = [[i for i, n in enumerate(names) if n in of and report.difference(*of[n])] for of in settings.values()]
        assert [*settings] == [*SETTING_NAMES] and choices(page, "model") == [0, 1, 2]
        assert choices(page, "setting") == [i for i, columns in enumerate(ran) if columns]
        for place in choices(page, "setting"):
            choose("setting", place)
            assert choices(page, "baseline") == ran[place]
            for column in ran[place]:
                of = [*settings.values()][place][names[column]]
                found = compute("pairs", model=model, setting=place, baseline=column)
                row = report.difference(*of)
                wanted = [percent(x) for x in (row.difference, row.low, row.high)]
                assert all(abs(found[key] - x) < 1e-2 for key, x in zip(("mean", "low", "high"), wanted, strict=True))
                assert found["n"] == row.pairs and abs(100 * found["pairs"].expm1()).max() < 24, "beyond the axis"
                choose("baseline", column)
                told = root.locator("p").inner_text()
                begins = f"{says.format(baseline=[*BASELINE_NAMES.values()][column])}, {[*SETTING_NAMES][place]}: "
                assert told.startswith(begins + signed(row.difference))
                lower = better if row.difference < 0 else "the baseline"
                sentence = VERDICTS[word := verdict(report, of, adjusted)].replace("{better}", lower)
                assert told.endswith(sentence[0].upper() + sentence[1:])
                shown.add(word)
    root.locator("button").last.click()
    usual = {f"**{word}**, planned" for word in ("better", "worse")} | {"better, *seen*", "worse, *seen*", "open"}
    assert usual <= shown <= {*VERDICTS}


def test_a_baseline_that_has_not_run_makes_room_for_one_that_has(page):
    root = page.locator("#play-pairs")
    baseline = root.locator("select[name=baseline]")
    assert baseline.input_value() == "0" and 0 in choices(page, "baseline")
    root.locator("select[name=setting]").select_option("2")
    assert int(baseline.input_value()) == choices(page, "baseline")[0] > 0
    assert [*BASELINE_NAMES.values()][int(baseline.input_value())] in root.locator("p").inner_text()
    root.locator("button").last.click()
    assert baseline.input_value() == "0"


def test_the_pairs_to_play_with_are_those_of_chapter_18():
    assert {*BASELINE_NAMES} - {"boosted"} == {*BASELINES} == {*QUESTIONS, "time"}
    shift, *boosted = pairs_to_play()
    columns = [of for rows in SHORT_TABLES.values() for of in rows["parameters"]]
    assert [model[name]["parameters"] for model in boosted for name in ("ordinary run", "long run")] == columns
    assert boosted[0]["ordinary run"]["standard"] == SHORT_TABLES["no shift"]["standard"][0]
    assert {claim.of for claim in SHIFT_ONCE_MORE.values()} == {*shift["ordinary run, ten new seeds"].values()}
    source = json.loads((Path(__file__).parents[2] / "nbs" / "18_perplexity.ipynb").read_text())
    (code,) = (c for c in map("".join, (c["source"] for c in source["cells"])) if "Every sentence above" in c)
    (told,) = (
        n.value for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Assign) and "instead_long" in ast.dump(n)
    )
    names = {"BOOSTED": BOOSTED, "WARM": WARM, "new": "shift-new-plain", "plain": "mini-warm+shift-plain"}
    told = eval(compile(ast.Expression(told), "18", "eval"), names)
    same = lambda *of: {frozenset(one) for one in of}
    quoted = same(*(of for key, of in told.items() if key in ("first", "rotary") or key.startswith("instead")))
    assert len(quoted) == 7 and quoted <= same(*(of for row in shift.values() for of in row.values()))


@pytest.mark.parametrize(("tokens", "size", "dims"), [(0, 0, 0), (2, 6, 3), (4, 6, 3), (3, 4, 1)])
def test_the_collapse_is_that_of_the_librarys_drift(compute, tokens, size, dims):
    n, d, told = TOKENS[tokens], DIMS[dims], DATA["collapse"]()
    found = compute("collapse", tokens=tokens, size=size, dims=dims)
    own, gamma, path = torch.eye(n, dtype=torch.float64), 0.02, []
    for _ in range(400):
        path.append(gamma)
        f, c = (np.interp(gamma, told["grid"], told[name][tokens][size]) for name in ("squares", "products"))
        R, s = (1 - gamma) * own + gamma, (1 - gamma) * (f * own + c * (1 - own)) + gamma
        gamma += 0.02 * overlap_drift(R, s, d)[0, 1].item()
    assert (found["path"][:400] - torch.tensor(path, dtype=torch.float64)).abs().max() < EXACT
    above = [k * 0.02 for k, overlap in enumerate(found["path"].tolist()) if overlap > 0.9]
    assert found["when"] == above[0] if above else "when" not in found


@pytest.mark.parametrize(("tokens", "size", "place"), [(2, 3, 1), (2, 6, 6), (3, 4, 0)])
def test_the_heads_of_the_collapse_are_the_librarys(tokens, size, place):
    told, n = DATA["collapse"](), TOKENS[tokens]
    x = simplex_tokens(n, 128, OVERLAPS[place], dtype=torch.float64).expand(300, n, 128)
    A = random_attention(x, SIZES[size], torch.Generator().manual_seed(1))
    f = A.square().sum((-2, -1)).mean() / n
    c = (A.sum(-2).square().sum(-1).mean() / n - f) / (n - 1)
    for name, value in (("squares", f), ("products", c)):
        assert abs(told[name][tokens][size][place] - value) < 0.03


def test_no_tokens_of_equal_overlap_without_room(compute):
    assert not len(compute("collapse", tokens=5, size=0, dims=1)["path"])


@pytest.mark.parametrize("sign", [False, True])
def test_the_second_round_is_that_of_the_layer(compute, sign):
    values = dict(x=1.1, y=-0.7, sharp=1.3, sharper=2.4, gate=0.35, sign=sign)
    found = compute("second", **values)
    layer = GradientBoostedAttention(2, 1, gate="scalar", bias=True, dtype=torch.float64)
    parts = dict.fromkeys(("query", "key", "value", "out"), 1.0) | {"query": values["sharp"]}
    second = {"query": values["sharper"], "key": 1.0, "value": 1.0}
    if sign:
        layer.corrections[0].residual = torch.add
        parts["value"] = parts["out"] = second["value"] = -1.0
    with torch.no_grad():
        for of, scales in ((layer, parts), (layer.corrections[0], second)):
            for name, scale in scales.items():
                getattr(of, name).weight.copy_(scale * torch.eye(2, dtype=torch.float64))
                getattr(of, name).bias.zero_()
        layer.corrections[0].gate.weight.zero_()
        layer.corrections[0].gate.bias.fill_(torch.logit(torch.tensor(values["gate"], dtype=torch.float64)))
        trace = layer.explain(found["X"][None])
    first, correction = trace.rounds
    assert (found["A"] - first.weights[0, 0, 0]).abs().max() < EXACT
    assert (found["B"] - correction.weights[0, 0, 0]).abs().max() < EXACT
    assert (found["r"] - correction.residual[0, 0]).abs().max() < EXACT
    assert (found["c"] - correction.correction[0, 0]).abs().max() < EXACT
    assert (found["output"] - trace.output[0, 0]).abs().max() < EXACT


@pytest.mark.parametrize("chunk", [1, 4, 5, 16])
def test_what_a_token_reads_is_what_the_library_reads(compute, chunk):
    letters = torch.tensor(["abcd".index(letter) for letter in "abcabdacbabdabca"])
    z = torch.nn.functional.one_hot(letters, 4).double()[None]
    reads = read_chunks(z, shift_in_chunks(z, 1, chunk=chunk), chunk=chunk)[0]
    for token in range(1, 17):
        assert torch.equal(compute("test_time", chunk=chunk, token=token)["reads"], reads[token - 1])


@pytest.mark.parametrize("place", [0, 1, 16, 40])
def test_the_law_that_is_written_is_the_librarys(compute, place):
    found = compute("decoding", delta=place)
    p = torch.tensor([0.42, 0.22, 0.12, 0.1, 0.06, 0.04, 0.03, 0.01], dtype=torch.float64)
    q = torch.tensor([0.22, 0.08, 0.3, 0.05, 0.16, 0.1, 0.04, 0.05], dtype=torch.float64)
    law, accepted = emitted_law(p, q, partial(accept_constrained, delta=float(found["delta"])))
    assert (found["law"] - law).abs().max() < 1e-6 and abs(found["accepted"] - accepted) < 1e-6
    assert abs(found["written"] - (law * (law / q).log()).sum()) < 1e-6
    assert abs(found["draft"] - (p * (p / q).log()).sum()) < EXACT


@pytest.mark.parametrize("offset", [0, 2])
def test_the_weights_are_softmax_and_in_the_end_sinkhorns(compute, offset):
    scores = torch.eye(3, dtype=torch.float64) * math.log(3)
    scores[:, 2] += offset
    found = compute("sinkhorn", offset=offset, steps=21)
    assert (found["softmax"] - scores.softmax(-1)).abs().max() < EXACT
    assert (found["P"] - sinkhorn_weights(scores, tolerance=1e-12)).abs().max() < 1e-6


@pytest.mark.parametrize("place", [0, 20, 40])
def test_the_running_estimate_is_that_of_the_librarys_gains(page, compute, place):
    found = compute("streaming", slope=place)
    gains = gains_from_scores(found["slope"] * torch.arange(400.0, dtype=torch.float64))
    F, values = 0, found["estimate"].clone()
    for t, (gain, estimate) in enumerate(zip(gains, found["estimate"], strict=True)):
        values[t] = F + (estimate - F) / gain  # the value with which the gain makes this estimate
        F = estimate
    start = compute("streaming", slope=10)
    again, F = [], 0
    for gain, value in zip(gains_from_scores(start["slope"] * torch.arange(400.0).double()), values, strict=True):
        F = F + gain * (value - F)
        again.append(F)
    assert (torch.stack(again) - start["estimate"]).abs().max() < 1e-6
    truth = torch.ones(400).double()
    truth[133:267] = -1
    assert abs(found["error"] - (found["estimate"] - truth).square().mean()) < EXACT


@pytest.mark.parametrize("squeeze", [0, 0.3, 1])
def test_the_distances_of_the_circle_are_the_librarys(compute, squeeze):
    found = compute("geometry", squeeze=squeeze)
    clean, truth = found["clean"], compute("geometry", squeeze=1)["clean"]
    assert abs(found["far"] - procrustes_distortion(truth, clean)) < 1e-6
    assert abs(found["robust"] - procrustes_distortion(clean, found["jittered"])) < 1e-6
    assert abs(found["best"] - probe_score(clean, truth, clean, truth, ridge=1e-9)) < 1e-6


@pytest.mark.parametrize("token", [0, 1])
def test_the_weights_of_a_sum_of_levels_are_the_librarys(compute, token):
    found = compute("hierarchical", token=token, share=0.35)
    x = found["x"]
    blocks = lift_scores(x.view(1, 8, 4).sum(-1) / 2, 2, 1, 32)[0]
    weights = (2 * (0.65 * x + 0.35 * blocks)).softmax(-1)
    clue = [21] if token else [12, 13, 14, 15]
    assert (found["weights"] - weights).abs().max() < EXACT and abs(found["mass"] - weights[clue].sum()) < EXACT


@pytest.mark.parametrize("share", [0, 0.35, 1])
@pytest.mark.parametrize("token", [1, 5, 8])
def test_the_weights_of_shifted_keys_are_the_librarys(compute, share, token):
    kinds = torch.nn.functional.one_hot(torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])).double()[None]
    shift = TokenShift(5, dtype=torch.float64)
    with torch.no_grad():
        shift.own.fill_(-share)
        shift.previous.fill_(share)
        scores = 5 * shift(kinds)[0, :token] @ kinds[0, token - 1]
    assert (compute("shift", share=share, token=token)["weights"] - scores.softmax(-1)).abs().max() < EXACT


@pytest.mark.parametrize("mutant", [False, True])
@pytest.mark.parametrize(("word", "place"), [("radar", 5), ("papaya", 6), ("Ab-Aba!", 2), ("abcdabcd", 8), ("z", 1)])
def test_the_rounds_on_a_word_are_those_of_the_induction_layer(compute, word, place, mutant):
    found = compute("radar", word=word, place=place, mutant=mutant)
    layer = induction_layer(26, 8).double()
    if mutant:
        layer.kv_from = "input"
    ids = torch.tensor([[ord(letter) - 97 for letter in word.lower() if letter.isalpha()]])
    with torch.no_grad():
        trace = layer.explain(encode(ids, 26, 8).double())
    for name, each in zip(("first", "second"), trace.rounds, strict=True):
        assert (found[name] - each.weights[0, 0, place]).abs().max() < EXACT, name
    assert (found["output"] - trace.output[0, place, :26]).abs().max() < EXACT


@pytest.fixture(scope="module")
def last_token():
    """The function of chapter 8's page, which takes no query but the last: a prefix is what an earlier one may see."""
    cells = json.loads((Path(__file__).parents[2] / "nbs" / "08_boosted.ipynb").read_text())["cells"]
    (source,) = ("".join(c["source"]) for c in cells if "def last_token" in "".join(c["source"]))
    exec(source.partition("\n\n\n")[0], names := {"torch": torch})
    return names["last_token"]


@pytest.mark.parametrize("sharp", [0, 1.5, 10])
@pytest.mark.parametrize(("word", "place"), [("radar", 5), ("abracadabra", 11), ("Ab-Aba!", 4), ("aaa", 3), ("dad", 1)])
def test_the_weights_on_a_word_are_those_of_the_last_token_of_the_page(compute, last_token, word, place, sharp):
    seen = "".join(letter for letter in word.lower() if letter.isalpha())[:place]
    letters = torch.nn.functional.one_hot(torch.tensor([ord(letter) - 97 for letter in seen]), 26).double()
    for keys, wanted in enumerate(last_token(seen, sharp)):
        found = compute("compose", word=word, place=place, sharp=sharp, keys=keys)
        assert len(found["weights"]) == place and (found["weights"] - wanted).abs().max() < 1e-6  # single precision
        assert (found["output"] - wanted.double() @ letters).abs().max() < 1e-6


@pytest.mark.parametrize(("place", "query", "mask"), [(3, -2, True), (2, 1.5, True), (1, -2, False), (3, -3, False)])
def test_a_head_by_hand_is_the_librarys_attention(compute, place, query, mask):
    found = compute("head", place=place, query=query, dog=7, mask=mask)
    key, value = torch.tensor([[1.0], [0.0], [-1.0]]).double(), torch.tensor([[7.0], [1.0], [0.0]]).double()
    may = torch.ones(3, 3, dtype=torch.bool).tril() if mask else None
    weights = softmax_weights(query * key, key, temperature=1 / math.log(2), mask=may)[place - 1]
    assert (found["weights"] - weights).abs().max() < EXACT
    assert (found["output"] - weights @ value).abs().max() < EXACT


def test_a_letter_is_tapped_and_no_word_is_no_error(phone):
    root = phone.locator("#play-compose")
    word, place, told = root.locator("[name=word]"), root.locator("[name=place]"), root.locator("p")
    root.locator("[data-pick='place 4']").tap()
    assert place.input_value() == "4"
    assert told.inner_text().startswith("Token 4, “a”, looks for a token that came after an “a”, and finds token 3 ")
    word.fill("")
    assert told.inner_text().startswith("Type a word")
    root.locator("button").last.tap()
    assert (word.input_value(), place.input_value()) == ("radar", "5")


def test_a_typed_word_is_asked_at_its_last_letter_and_no_word_is_no_error(page):
    root = page.locator("#play-radar")
    word, place, told = root.locator("[name=word]"), root.locator("[name=place]"), root.locator("p")
    for typed, most in (("barbara", "7"), ("", "1"), ("x", "1"), ("?ox!", "2")):
        word.fill(typed)
        assert (place.get_attribute("max"), place.input_value()) == (most, most)
        assert told.inner_text().startswith(f"Place {most} holds" if typed else "Type a word")
    word.fill("barbara")
    place.fill("4")
    word.fill("barb")
    assert place.input_value() == "4" and "the guess is “a”" in told.inner_text()
    root.locator("button").last.click()
    assert (word.input_value(), place.input_value()) == ("radar", "5")


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_a_layer_of_random_heads_moves_tokens_as_the_library_does(compute, rounds):
    found = compute("particles", layer=7, size=10, rounds=rounds, seed=3)

    def head(x, Q, K, V, rounds):
        A = (10 / 3**0.5 * (x @ Q.T) @ (x @ K.T).T).softmax(-1)
        return (twice(A, x) if rounds == 1 else A @ x) @ V.T / 3**0.5

    def update(x):
        first = head(x, *found["drawn"][0], rounds)
        return first + head(x - first, *found["drawn"][1], 0) if rounds == 2 else first

    *_, after = evolve(found["before"], update, step=0.3, layers=1)
    assert (found["X"] - after).abs().max() < EXACT
    assert abs(found["overlap"] - (16 * mean_overlap(after) - 1) / 15) < EXACT


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_answers_to_the_keyboard_and_starts_again(page, name):
    root = page.locator(f"#play-{name}")
    seen = lambda: (root.locator("svg").inner_html(), root.locator("p").inner_text())
    start = seen()
    first = root.locator("input:not([type=text]), select").first
    first.focus()
    for _ in range(3):
        first.press({"pairs": "ArrowDown", "radar": "ArrowLeft", "compose": "ArrowLeft"}.get(name, "ArrowRight"))
    assert seen()[0] != start[0]
    root.locator("button").last.click()
    assert seen() == start


@pytest.mark.parametrize("name", FIGURES)
def test_a_screen_reader_says_of_a_slider_what_is_shown(page, name):
    root = page.locator(f"#play-{name}")
    for slider in root.locator("input[type=range]").all():
        shown = slider.locator("xpath=following-sibling::output")
        for key in ("Home", "ArrowRight", "End"):
            slider.press(key)
            assert slider.get_attribute("aria-valuetext") == shown.inner_text() != ""
    root.locator("button").last.click()
    for slider in root.locator("input[type=range]").all():
        shown = slider.locator("xpath=following-sibling::output")
        assert slider.get_attribute("aria-valuetext") == shown.inner_text()


def test_a_slider_whose_value_is_a_place_in_a_list_says_what_lies_there(page):
    slider = page.locator("#play-boost input[name=rounds]")
    slider.press("End")
    assert (slider.input_value(), slider.get_attribute("aria-valuetext")) == ("49", "1000")
    page.locator("#play-boost button").last.click()


@pytest.mark.parametrize(
    ("name", "moved"), [("slope", ["a"]), ("fit", ["y1"]), ("second", ["x", "y"]), ("retrieve", ["x", "y"])]
)
def test_a_point_is_dragged(page, name, moved):
    root = page.locator(f"#play-{name}")
    values = lambda: [root.locator(f"input[name={one}]").input_value() for one in moved]
    point = root.locator("[data-drag]").first
    point.scroll_into_view_if_needed()  # the mouse reaches no further
    before, box = values(), point.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + 40, box["y"] - 40)
    page.mouse.up()
    assert all(a != b for a, b in zip(before, values(), strict=True))
    root.locator("button").last.click()
    assert values() == before


# ---- On a phone ----


@pytest.fixture(scope="module")
def phone(browser, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("phone") / "all.html"
    head = "<!DOCTYPE html><meta charset=utf-8><meta name=viewport content='width=device-width'>"
    path.write_text(head + "<body style='margin: 16px; line-height: 1.5'>" + "".join(play(n).data for n in FIGURES))
    view = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
    with tab(browser, **view) as (page, requests, errors):
        page.goto(path.as_uri())
        yield page
        assert not requests and not errors


# The letters of a figure that run into one another or out of it, and the height of the smallest in pixels.
LETTERS = """svg => {
    const frame = svg.getBoundingClientRect(), wrong = [];
    const texts = [...svg.querySelectorAll('text')].map(e => [e.textContent, e.getBoundingClientRect()]);
    texts.forEach(([words, a], i) => {
        if (a.left < frame.left - 12 || a.right > frame.right + 12) wrong.push(`${words} is cut`);
        texts.slice(i + 1).forEach(([others, b]) => {
            if (a.left < b.right && b.left < a.right && a.top + 2 < b.bottom - 2 && b.top + 2 < a.bottom - 2)
                wrong.push(`${words} meets ${others}`);
        });
    });
    const sizes = [...svg.querySelectorAll('text')].map(
        e => parseFloat(getComputedStyle(e).fontSize) * frame.width / svg.viewBox.baseVal.width);
    return [wrong, Math.min(...sizes, 99)];
}"""


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_can_be_read_and_touched_on_a_phone(phone, name):
    root = phone.locator(f"#play-{name}")
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    for touched in root.locator("button, select, input[type=range], [type=text], label:has([type=checkbox])").all():
        assert touched.bounding_box()["height"] >= 44
    for button in root.locator("button").all():
        button.tap()
        wrong, smallest = root.locator("svg").evaluate(LETTERS)
        assert not wrong and smallest >= 11.5, (button.inner_text(), wrong, smallest)


@pytest.mark.parametrize("name", ["slope", "fit", "second", "retrieve"])
def test_a_handle_is_held_beside_it_and_of_two_the_nearer(phone, name):
    root = phone.locator(f"#play-{name}")
    for handle in root.locator("[data-drag]").all():
        handle.scroll_into_view_if_needed()
        moves = handle.get_attribute("data-drag").split()[-1]
        box, before = handle.bounding_box(), root.locator("input").evaluate_all("all => all.map(e => e.value)")
        across, down = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        radius = handle.evaluate("e => parseFloat(getComputedStyle(e).r) * e.ownerSVGElement.clientWidth / 600")
        assert radius >= 12
        phone.mouse.move(across - 18, down)
        phone.mouse.down()
        phone.mouse.move(across - 18, down - 30)
        phone.mouse.up()
        after = root.locator("input").evaluate_all("all => all.map(e => e.value)")
        names = root.locator("input").evaluate_all("all => all.map(e => e.name)")
        changed = {one for one, a, b in zip(names, before, after, strict=True) if a != b}
        assert moves in changed <= {*handle.get_attribute("data-drag").split()}
        root.locator("button").last.tap()


def roughness(path):
    return path.diff().square().mean()


COLOURED = """() => [...document.querySelectorAll('.play svg text')].map(text => getComputedStyle(text).fill)
    .filter(fill => fill.startsWith('color('))"""


def test_coloured_letters_are_legible(page):
    numbers = lambda fill: [float(c) for c in fill.removeprefix("color(srgb ").rstrip(")").split()]
    fills = {fill: numbers(fill) for fill in page.evaluate(COLOURED)}
    assert len(fills) > 1
    style = (Path(__file__).parents[2] / "_static" / "book.css").read_text()
    assert "filter: brightness(1.45); --letters: 100%" in style
    for fill, colour in fills.items():
        assert 1.05 / (luminance([255 * c for c in colour]) + 0.05) >= 4.5, fill
        by_night = luminance([min(1.45 * 255 * c / 0.78, 255) for c in colour])
        assert (by_night + 0.05) / (luminance((0x14, 0x18, 0x1E)) + 0.05) >= 4.5, fill


def small(x):
    return x.abs().max() < 0.005


def missed(now, name):
    return (now["X"][0] - now[name]).norm()


def last_that_pays(rounds):
    """Whether of the rounds about this number, all of which lower the bias, this is the last that lowers the risk."""
    before, now, after = (boosted_wave(m, 1) for m in (rounds - 1, rounds, rounds + 1))
    assert before.squared_bias > now.squared_bias > after.squared_bias
    return before.risk > now.risk < after.risk


# what each button says, of what the figure computes after it and of what it computed at the start
LESSONS = {
    "a peak": lambda now, start: now["one"][1] < now["F"][1] < 2,
    "wider averages": lambda now, start: now["F"].max() - now["F"].min() < 0.5,
    "20 rounds": lambda now, start: small(now["F"] - now["y"]),
    "an outlier": lambda now, start: small(now["second"]) and now["F"][0] < start["F"][0],
    "a ridge": lambda now, start: small(now["F"] - start["F"] / 2) and small(now["second"] - now["F"] / 2),
    "averages": lambda now, start: now["second"].abs().max() > 0.05,
    "too wide": lambda now, start: now["bias"] > 5 * now["noise"],
    "and a second round": lambda now, start: now["bias"] < 0.0569 / 2 and now["noise"] < 0.0086 + 0.0569 / 2,
    "two rounds, their best": lambda now, start: now["risk"] == now["best"][1, 1] < start["best"][0, 1],
    "too narrow": lambda now, start: small(now["bias"]) and now["noise"] > start["noise"],
    "local lines": lambda now, start: now["bias"] < 0.0569,
    "small β": lambda now, start: small(now["states"][-1]),
    "large β": lambda now, start: small(now["states"][-1] - torch.tensor([1.0, 0.0])),
    "the best round": lambda now, start: now["M"] == now["best"][0] and last_that_pays(int(now["M"])),
    "too many rounds": lambda now, start: now["risk"] > now["best"][1] and now["best"][0] < 1000,
    "smaller steps": lambda now, start: (
        abs(now["M"] / (10 * start["best"][0]) - 1) < 0.05 and small((now["risk"] - start["best"][1]) * 50)
    ),
    "a gentle slope": lambda now, start: now["dyt"][-1] < 1.25 > now["derf"][-1],
    "a steep slope": lambda now, start: 10 * now["layernorm"][-1] < min(now["dyt"][-1], now["derf"][-1]),
    "the shift or a second round": lambda now, start: now["n"] == 10 and (now["pairs"] < 0).all(),
    "a second round alone": lambda now, start: (
        now["high"] < 0 and 2.5 < start["pairs"].mean() / now["pairs"].mean() < 3.5 and len(now["pairs"]) == 10
    ),
    "the shift in both": lambda now, start: (
        now["low"] < 0 < now["high"] and now["pairs"].min() < 0 < now["pairs"].max()
    ),
    "and equal FLOPs": lambda now, start: (now["pairs"] > 0).double().mean() > 0.75,
    "close the gate": lambda now, start: small(now["output"] - now["F"]),
    "no gate": lambda now, start: (
        small(now["output"] - now["F"] - now["c"]) and missed(now, "output") < missed(start, "output")
    ),
    "a step too long": lambda now, start: now["c"] @ now["r"] > 0 and missed(now, "output") > missed(now, "F"),
    "flip the sign": lambda now, start: small(now["output"] - start["output"]) and small(now["F"] + start["F"]),
    "uniform attention": lambda now, start: now["when"] == now["hotWhen"],
    "two tokens": lambda now, start: now["when"] < start["when"],
    "a chunk for each token": lambda now, start: not any(now["reads"]) and any(start["reads"]),
    "one chunk": lambda now, start: not any(now["reads"]),
    "no budget": lambda now, start: small(now["written"]),
    "a large budget": lambda now, start: small(now["accepted"] - 1) and small(now["written"] - now["draft"]),
    "a sink": lambda now, start: now["softmax"][:, 2].min() > 0.95 and small(now["P"] - start["P"]),
    "one half-step": lambda now, start: small(now["P"] - now["softmax"]),
    "equal scores": lambda now, start: now["estimate"][150:267].mean() > 0 and now["error"] > start["error"],
    "steep scores": lambda now, start: (
        now["estimate"][150:160].mean() < -0.5 and roughness(now["estimate"]) > 3 * roughness(start["estimate"])
    ),
    "150 layers": lambda now, start: small((now["overlap"]) / 10) and (now["X"] @ now["X"].T).abs().mean() > 0.8,
    "uniform heads": lambda now, start: now["overlap"] > 0.7,
    "no second direction": lambda now, start: now["best"] == 0.5 and now["robust"] < start["robust"],
    "nothing squeezed": lambda now, start: small(now["far"]) and now["robust"] > start["robust"],
    "a block, by its block": lambda now, start: now["mass"] > start["mass"],
    "a token, by its block": lambda now, start: small(now["weights"][20:24] - now["weights"][21]),
    "a token, by itself": lambda now, start: now["weights"][21] == now["weights"].max(),
    "ask with the key": lambda now, start: now["weights"].argmax() == 2 and start["weights"].argmax() == 0,
    "ask nothing": lambda now, start: small(now["weights"] - 1 / 3) and small(now["output"] - now["knows"].mean()),
    "look ahead": lambda now, start: now["weights"].argmax() == 2,
    "half and half": lambda now, start: small(now["weights"][[2, 3, 7]] - now["weights"].max()),
    "shifted": lambda now, start: now["weights"][3] > 0.9 and (start["weights"][[2, 7]] - 0.49).abs().max() < 0.01,
    "abracadabra": lambda now, start: (
        small(now["weights"][[1, 4, 6, 8]] - 0.25) and small(now["output"][:4] - torch.tensor([0, 0.5, 0.25, 0.25]))
    ),
    "no repeat": lambda now, start: small(now["weights"] - 1 / 6),
    "keys from x": lambda now, start: small(start["weights"][1] - 1) and small(now["weights"] - 1 / 5),
    "two continuations": lambda now, start: (
        small(now["output"][[15, 24]] - 0.5) and small(now["second"][[3, 5]] - 0.5) and small(start["output"][0] - 1)
    ),
    "a new letter": lambda now, start: small(now["second"][0] - 1) and small(now["output"]),
    "keys and values of x": lambda now, start: (
        small(now["first"] - start["first"]) and small(start["second"][2] - 1) and small(now["second"][0] - 1)
    ),
    "a new token": lambda now, start: small(now["weights"] - 1 / 5) and len(now["weights"]) == 5,
}


@pytest.mark.parametrize(("name", "step"), [(name, step) for name, steps in STEPS.items() for step in steps])
def test_the_lesson_of_a_button_holds(page, compute, name, step):
    words, _, lesson = step
    root = page.locator(f"#play-{name}")
    inputs = "e => [e.name, e.type === 'checkbox' ? e.checked : e.type === 'text' ? e.value : +e.value]"
    values = lambda: dict(root.locator("input, select").evaluate_all(f"all => all.map({inputs})"))
    start = compute(name, **values())
    root.get_by_role("button", name=words, exact=True).click()
    assert root.locator("p").inner_text().endswith(lesson)
    assert LESSONS[words](compute(name, **values()), start)
    root.locator("button").last.click()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_small(name):
    assert len(play(name).data) < 40_000
