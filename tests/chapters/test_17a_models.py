"""Chapter 17a: the claim with its mutant, what its record says of three models adds up, the shaded text shows what it
is given, and the layers of chapter 18 are drawn with their widths."""

import math
import re

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from bs4 import BeautifulSoup
from drawn_layers import F64, problems

from claims import claim
from gbattn.attention import attend
from gbattn.conventions import load_records
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.positions import TokenShift
from support.diagrams import line_up
from support.figures import shaded_text


def read_after_a_shift(p, own):
    """The outputs of a sharp head with shifted keys for tokens that occurred before, and what it is to read."""
    n = p.integer(2, 12)
    tokens = torch.randint(3, (n,), generator=p.rng)
    tokens[-1] = tokens[p.integer(0, n - 1)]
    k, v = torch.linalg.qr(p.normal(5, 5))[0][tokens], p.normal(n, 4)  # orthonormal, not only one-hot
    shift = TokenShift(5, dtype=F64)
    with torch.no_grad():
        shift.own.fill_(own)
        shift.previous.fill_(1.0)
        output = attend(100.0 * k[None, None], shift(k[None])[:, None], v[None, None], causal=True, scale=1.0)[0, 0]
    after = {t: [s + 1 for s in range(t) if tokens[s] == tokens[t]] for t in range(n)}
    again = [t for t in range(n) if after[t]]
    return output[again], torch.stack([v[after[t]].mean(0) for t in again])


@claim(problems(), tolerance=1e-12, mutant=lambda p: read_after_a_shift(p, 0.0))
def test_prop_shift_reads_next(p):
    """With the shift one head reads what came next. Mutant: keys that keep their own token, too."""
    return read_after_a_shift(p, -1.0)


@pytest.fixture(scope="module")
def measured():
    (record,) = load_records("model-texts")
    return record.measured


@pytest.mark.parametrize("name", ["shift", "second round"])
def test_the_gains_of_all_kinds_of_tokens_add_up_to_that_of_the_text(measured, name):
    rows = [row for row in measured[f"{name}, gains"].values() if isinstance(row, dict)]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    whole = math.log(measured["standard"]["perplexity"] / measured[name]["perplexity"])
    assert sum(row["share"] * row["gain"] for row in rows) == pytest.approx(whole, rel=1e-4)
    mean, low, high = measured[f"{name}, gains"]["continues_minus_starts"]
    assert low < mean < high


def test_the_models_are_those_of_chapter_18(measured):
    for name, (experiment, arm) in {
        "standard": ("mini-warm", "standard"),
        "shift": ("shift", "standard_shift"),
    }.items():
        (known,) = (
            r.measured["test_perplexity"]
            for r in load_records(experiment)
            if (r.settings["arm"], r.settings["seed"]) == (arm, 1)
        )
        assert measured[name]["known"] == known
        assert measured[name]["perplexity"] == pytest.approx(known, rel=0.01)


def test_a_token_is_green_where_the_loss_falls_and_orange_where_it_rises():
    tokens, gains = [" a<b", "c", "d"], np.array([1.0, -2.0, 0.01])
    page = BeautifulSoup(shaded_text(tokens, {"a change": gains}, "losses").data, "html.parser")
    shaded = page.select_one("p.shaded")
    assert shaded.get_text() == " a<bcd"
    better, worse = shaded.find_all("span")
    assert "0, 158, 115, 0.25" in better["style"] and "solid" in better["style"] and better["title"] == "-1.00 nats"
    assert "213, 94, 0, 0.50" in worse["style"] and "dotted" in worse["style"]
    with pytest.raises(ValueError, match="zip"):
        shaded_text(tokens, {"too few": gains[:2]}, "")


def test_the_layers_are_drawn_with_the_widths_of_the_experiments(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: None)
    line_up()
    texts = [text.get_text() for axes in plt.gcf().axes for text in axes.texts]
    assert plt.gcf().get_figwidth() <= 5.4, "a phone shows it whole"
    plt.close("all")
    drawn = {
        kind: {int(n) for t in texts if kind in t for n in re.findall(r"\d+", t)} for kind in ("attention", "network")
    }
    arms = {"mini": ("standard", "wider", "wider_flops"), "shift-stack": ("stack",), "shift": ("standard_shift",)}
    models = [
        EXPERIMENTS[name].model_of(arm) for name, of in arms.items() for arm in EXPERIMENTS[name].arms if arm.name in of
    ]
    assert drawn["attention"] == {model.d_model for model in models}
    assert drawn["network"] == {model.d_ffn or 4 * model.d_model for model in models}
