"""Chapter 16: claims with their mutants, matched sizes, rates of a sweep, intervals, corrections, errors."""

import itertools
import math
from dataclasses import replace
from statistics import fmean, stdev

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.comparison import (
    MEASURES,
    best_rates,
    compare,
    equal_time,
    equivalent,
    holm,
    markdown_table,
    matched,
    paired_interval,
    rates_at_edge,
    step_seconds,
    welch,
)
from gbattn.conventions import Record
from gbattn.language_model import LanguageModel, ModelConfig, model_cost

SEED = st.integers(0, 2**32 - 1)


# The claims


@claim(SEED, tolerance=1e-10, mutant=lambda s: (differences_variance(s)[0], differences_variance(s)[2]))
def test_prop_pairing(s):
    """The variance of the differences is the sum of the variances less twice the covariance."""
    return differences_variance(s)[:2]


def differences_variance(s):
    random = np.random.default_rng(s)
    a = random.normal(size=int(random.integers(2, 12)))
    b = random.normal(size=a.size) + random.normal() * a
    apart, covariance = (b - a).var(ddof=1), np.cov(a, b)
    return apart, covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1], covariance[0, 0] + covariance[1, 1]


def share_separated(n):
    """Of all ways to deal 2n sorted runs to two models, those that separate them."""
    deals = list(itertools.combinations(range(2 * n), n))
    apart = sum(max(mine) == n - 1 or min(mine) == n for mine in deals)
    return np.float64(apart / len(deals))


@claim(
    st.integers(1, 6),
    tolerance=1e-12,
    mutant=lambda n: (share_separated(n), np.float64(math.factorial(n) ** 2 / math.factorial(2 * n))),
)
def test_prop_separated_bars(n):
    """All runs of one of two equal models lie below all of the other with probability 2 (n!)² / (2n)!."""
    return share_separated(n), np.float64(2 * math.factorial(n) ** 2 / math.factorial(2 * n))


def test_bars_of_two_runs_end_at_the_runs():
    runs = np.random.default_rng(0).normal(size=(50, 2))
    ends = np.stack([runs.mean(1) - runs.std(1), runs.mean(1) + runs.std(1)], 1)
    np.testing.assert_allclose(ends, np.sort(runs, 1), atol=1e-12)


def layer_flops(attention, d, T):
    """Forward, per token, of one block as the library counts it."""
    shape = dict(vocab_size=2, max_length=T, n_heads=1, d_model=d, attention=attention)
    one, two = (model_cost(ModelConfig(n_layers=n, **shape)).forward_flops for n in (1, 2))
    return (two - one) / T


def rival(d, T, ratio):
    return np.array([layer_flops("multi_head", d, T), 24 * (ratio * d) ** 2 + 4 * T * ratio * d])


def counted(d, T):
    return np.array([24.0 * d * d + 4 * T * d, layer_flops("boosted", d, T)])


@claim(
    st.tuples(st.sampled_from([8, 16, 64]), st.integers(1, 600)),
    tolerance=1e-10,
    examples=12,
    mutant=lambda p: (rival(*p, math.sqrt(17 / 12)), counted(*p)),
)
def test_prop_baseline(p):
    """A standard layer of width ϱd has the FLOPs of a boosted one of width d."""
    d, T = p
    tau = T / d
    return rival(d, T, (-tau + math.sqrt(tau**2 + 48 * tau + 204)) / 12), counted(d, T)


def test_the_rival_grows_from_one_limit_to_the_other():
    tau = np.logspace(-6, 6, 200)
    ratio = (-tau + np.sqrt(tau**2 + 48 * tau + 204)) / 12
    assert (np.diff(ratio) > 0).all()
    assert ratio[0] == pytest.approx(math.sqrt(17 / 12), abs=1e-5) and ratio[-1] == pytest.approx(2, abs=1e-4)


# Matched sizes

SMALL = dict(vocab_size=100, max_length=16, n_layers=2, n_heads=2)


@pytest.mark.parametrize("by", list(MEASURES))
@pytest.mark.parametrize("d", [16, 40])
def test_the_match_is_the_nearest_admissible(by, d):
    standard, target = ModelConfig(**SMALL, d_model=d), ModelConfig(**SMALL, d_model=d, attention="boosted")
    found = matched(standard, target, by)
    measure, wanted = MEASURES[by], MEASURES[by](target)
    off = lambda **size: abs(measure(replace(standard, **size)) - wanted)
    widths = range(4, 121, 4)
    assert found["d_model"] == min(widths, key=lambda width: off(d_model=width))
    width = found["d_model"]
    assert found["d_ffn"] == min(range(4, 8 * width, 4), key=lambda f: off(d_model=width, d_ffn=f))


def test_a_deeper_match_and_the_published_width():
    shape = dict(vocab_size=16_384, max_length=256, n_layers=4, n_heads=4, d_model=256)
    standard, boosted = ModelConfig(**shape), ModelConfig(**shape, attention="boosted")
    assert MEASURES["parameters"](boosted) == 8_734_208
    assert MEASURES["parameters"](replace(standard, d_model=288)) == 8_789_184
    assert matched(standard, boosted)["d_model"] == 288
    deep = matched(standard, boosted, change="n_layers")
    assert set(deep) == {"n_layers", "d_ffn"} and deep["n_layers"] in (5, 6)
    # one step of d_ffn is 4 (2 d + 1) parameters a layer
    assert abs(MEASURES["parameters"](replace(standard, **deep)) - 8_734_208) <= 2 * deep["n_layers"] * 513


@pytest.mark.parametrize(
    "size, change",
    [
        (dict(d_model=64), "n_layers"),  # one such layer is larger than all of the target
        (dict(d_model=16, n_layers=6, overrides={5: {"attention": "boosted"}}), "n_layers"),  # it cannot lose the sixth
    ],
)
def test_what_cannot_be_matched_is_refused(size, change):
    with refused("config"):
        matched(ModelConfig(**SMALL | size), ModelConfig(**SMALL, d_model=16), change=change)


def test_a_deeper_match_keeps_the_layers_that_it_names():
    config = ModelConfig(**SMALL, d_model=16, overrides={1: {"attention": "boosted"}})
    target = ModelConfig(**SMALL | dict(n_layers=4), d_model=16)
    found = matched(config, target, change="n_layers")
    off = MEASURES["parameters"](replace(config, **found)) - MEASURES["parameters"](target)
    assert abs(off) <= 4 * 33 * found["n_layers"]


@pytest.mark.parametrize("d", [16, 64, 96])
def test_as_many_attentions_in_sequence(d):
    """Twice the layers, a feed-forward part of 9/4 D: exactly the FLOPs, and the weights but biases and norms."""
    standard, target = ModelConfig(**SMALL, d_model=d), ModelConfig(**SMALL, d_model=d, attention="boosted")
    found = matched(standard, target, "sequential_attention", change="n_layers")
    assert found == {"n_layers": 4, "d_ffn": 9 * d // 4}
    stack = replace(standard, **found)
    assert MEASURES["training_flops"](stack) == MEASURES["training_flops"](target)
    of_matrices = lambda config: sum(p.numel() for p in LanguageModel(config).parameters() if p.ndim > 1)
    assert of_matrices(stack) == of_matrices(target)
    assert matched(standard, standard, "sequential_attention", change="n_layers") == {"n_layers": 2, "d_ffn": 4 * d}
    three = replace(target, attention_options={"rounds": 3})
    assert matched(standard, three, "sequential_attention", change="n_layers")["n_layers"] == 6
    with refused("config"):
        matched(replace(target, n_layers=1), replace(standard, n_layers=3), "sequential_attention", change="n_layers")
    with refused("change"):
        matched(standard, target, "sequential_attention")


def test_a_model_matched_to_itself_stays():
    config = ModelConfig(**SMALL, d_model=24)
    assert matched(config, config) == {"d_model": 24, "d_ffn": 96}
    assert matched(config, config, change="n_layers") == {"n_layers": 2, "d_ffn": 96}


def record(arm, seed, loss, *, rate=1e-3, seconds=None, size=None, **more):
    """A record as `run` makes it, as far as it is compared."""
    s = dict(arm=arm, label=arm, seed=seed, learning_rate=rate, planned=1, corpus="text")
    s |= dict(text={"fingerprint": "f"}, model=ModelConfig(**SMALL | (size or {})).to_dict())
    m = dict(test_loss=loss, valid_loss=loss, diverged=loss is None, parameters=10, non_embedding=5)
    m |= dict(training_flops=7, seconds=2.0)
    if seconds is not None:  # a slow stretch, and one at this pace
        m |= dict(train_step=[10, 20, 30], train_seconds=[0.0, 30 * seconds, 40 * seconds])
    return Record("toy", s | more, m)


FLOPS = MEASURES["training_flops"]


@settings(deadline=None)
@given(st.floats(0.5, 3), st.sampled_from([64, 80, 96, 160]), st.sampled_from([None, 100, 480]))
def test_equal_time_inverts_a_power_law_of_the_flops(power, width, d_ffn):
    """Whatever feed-forward widths were timed; a law of the width alone would miss."""
    sizes = [dict(d_model=64, d_ffn=None), dict(d_model=96, d_ffn=d_ffn)]
    flops = [FLOPS(ModelConfig(**SMALL | size)) for size in sizes]
    slow = ModelConfig(**SMALL, d_model=width)
    at = lambda f: 1e-3 * (f / flops[0]) ** power
    timed = [record(str(f), 0, 1.0, seconds=at(f), size=size) for f, size in zip(flops, sizes)]
    timed += [record("slow", 0, 1.0, seconds=at(FLOPS(slow)), size=dict(attention="boosted"))]
    found = equal_time(replace(slow, d_model=16), timed, "slow")
    assert found == {"d_model": width, "d_ffn": 4 * width}


def test_equal_time_fits_all_sizes_that_were_timed():
    """A size that was slow by chance may not decide alone how time goes on beyond it."""
    widths, seconds, target = [64, 80, 96], np.array([1.0, 1.5, 1.52]), 1.8
    sizes = [dict(d_model=width) for width in widths]
    flops = np.array([FLOPS(ModelConfig(**SMALL | size)) for size in sizes])
    timed = [record(str(f), 0, 1.0, seconds=t, size=size) for f, t, size in zip(flops, seconds, sizes)]
    timed.append(record("slow", 0, 1.0, seconds=target, size=dict(d_model=64, attention="boosted")))
    found = equal_time(ModelConfig(**SMALL, d_model=16), timed, "slow")
    slope, offset = np.polyfit(np.log(flops), np.log(seconds), 1)
    expected = np.exp((np.log(target) - offset) / slope)
    assert FLOPS(ModelConfig(**SMALL | found)) == pytest.approx(expected, rel=0.01)


def test_a_pace_is_the_median_of_the_fastest_quarter():
    paces = [9.0, 2.0, 3.0, 1.0, 8.0, 7.0, 6.0, 5.0, 4.0, 9.0, 9.0, 9.0]
    curve = dict(train_step=list(range(0, 130, 10)), train_seconds=[0.0, *np.cumsum(paces) * 10])
    one, other = record("a", 1, 1.0), record("a", 2, 1.0, seconds=0.5)
    one.measured.update(curve)
    assert step_seconds([one]) == pytest.approx(2.0)  # of 1, 2, 3; the fastest alone would be 1
    assert step_seconds([one, other]) == pytest.approx(1.25)  # of 0.5, 1, 1.5, 2 out of fourteen
    assert step_seconds([other]) == pytest.approx(0.5)


def test_a_pace_is_none_of_runs_that_diverged():
    """One that was no better than a guess has a whole learning curve, and may be the fastest."""
    guess = record("slow", 3, 1.0, seconds=0.01, size=dict(attention="boosted"))
    guess.measured["diverged"] = True
    good = record("slow", 1, 1.0, seconds=2.0, size=dict(attention="boosted"))
    assert step_seconds([guess, good]) == step_seconds([good])
    with refused("records"):
        step_seconds([guess])
    timed = [record(str(w), 0, 1.0, seconds=w / 64, size=dict(d_model=w)) for w in (64, 96, 128)]
    config = ModelConfig(**SMALL, d_model=16)
    assert equal_time(config, [*timed, good, guess], "slow") == equal_time(config, [*timed, good], "slow")
    with refused("slow"):
        equal_time(config, [*timed, guess], "slow")


def sweep_of(losses):
    """The records of a sweep with one seed, from losses by arm and rate; None is a run that diverged."""
    return [record(arm, 0, loss, rate=rate) for (arm, rate), loss in losses.items()]


@pytest.mark.parametrize(
    "losses, edge",
    [
        ((3.0, 2.0, 1.0), {"standard": 4e-3}),  # still falling
        ((1.0, 2.0, 3.0), {"standard": 1e-3}),
        ((2.0, 1.0, 3.0), {}),
        ((2.0, 1.0, None), {}),  # the next rate breaks: it has been found
        ((2.0, None, 1.0), {"standard": 4e-3}),
        ((1.0,), {"standard": 1e-3}),  # one rate is no grid
    ],
)
def test_a_best_rate_at_the_edge_is_not_found(losses, edge):
    found = sweep_of({("standard", 1e-3 * 2**i): loss for i, loss in enumerate(losses)})
    assert rates_at_edge(found) == edge
    # Each arm by the rates that it was run at, not by those of another.
    other = sweep_of({("wide", rate): rate for rate in (1e-5, 2e-5)} | {("wide", 5e-6): 1.0})
    assert rates_at_edge(iter(found + other)) == edge


# The comparison


@settings(deadline=None)
@given(SEED, st.integers(2, 9), st.floats(0.5, 0.999))
def test_the_paired_interval_is_that_of_scipy(s, n, confidence):
    from scipy import stats

    d = np.random.default_rng(s).normal(size=n).tolist()
    ours = paired_interval(d, confidence)
    theirs = stats.ttest_1samp(d, 0).confidence_interval(confidence)
    assert ours == pytest.approx(tuple(theirs), rel=1e-9, abs=1e-12)
    t = (ours[1] - fmean(d)) / (stdev(d) / math.sqrt(n))  # and by the definition
    assert stats.t.cdf(t, n - 1) == pytest.approx((1 + confidence) / 2, abs=1e-9)


@settings(deadline=None)
@given(SEED, st.integers(2, 9), st.integers(2, 9))
def test_welch_is_that_of_scipy(s, n, m):
    from scipy import stats

    random = np.random.default_rng(s)
    a, b = random.normal(size=n), 3 * random.normal(size=m) + 1
    ours = welch(a.mean(), a.std(ddof=1), n, b.mean(), b.std(ddof=1), m)
    theirs = stats.ttest_ind(a, b, equal_var=False)
    assert ours.t == pytest.approx(theirs.statistic) and ours.p == pytest.approx(theirs.pvalue)
    assert ours.df == pytest.approx(theirs.df)


@pytest.mark.parametrize("unit", [1e-200, 1e200])
def test_welch_in_other_units(unit):
    plain, scaled = welch(3, 1, 4, 2, 0.5, 3), welch(3 * unit, unit, 4, 2 * unit, 0.5 * unit, 3)
    assert scaled == pytest.approx(plain)


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), max_size=9))
def test_holm_is_the_step_down_rule(p_values):
    """As it is told: from the smallest on, each at its own level, until the first that is not decided."""
    corrected = holm(p_values)
    for level in (0.01, 0.05, 0.3, 0.9999):
        decided = set()
        for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
            if p_values[i] * (len(p_values) - rank) > level:
                break
            decided.add(i)
        assert {i for i, p in enumerate(corrected) if p <= level} == decided
    assert all(p <= c <= 1 for p, c in zip(p_values, corrected))


@pytest.mark.parametrize(
    ("p_values", "corrected"),
    [
        ((0.011, 0.02, 0.3, 0.001), (0.033, 0.04, 0.3, 0.004)),
        ((0.04, 0.03, 0.02, 0.01, 0.9), (0.09, 0.09, 0.08, 0.05, 0.9)),
        ((0.2, 0.2, 0.01), (0.4, 0.4, 0.03)),
        ((0.0004, 0.05, 0.013, 0.013, 0.6, 0.7), (0.0024, 0.15, 0.065, 0.065, 1, 1)),
    ],
)
def test_holm_corrects_as_statsmodels_does(p_values, corrected):
    """What multipletests(p_values, method="holm") of statsmodels 0.15.0 returned."""
    assert holm(p_values) == pytest.approx(list(corrected), rel=1e-12)


@settings(deadline=None)
@given(SEED, st.floats(0.01, 3))
def test_equivalence_is_two_one_sided_tests(s, margin):
    from scipy import stats

    d = np.random.default_rng(s).normal(0.1, 1, 6)
    p = max(
        stats.ttest_1samp(d, -margin, alternative="greater").pvalue,
        stats.ttest_1samp(d, margin, alternative="less").pvalue,
    )
    assert equivalent(d.tolist(), margin) == (p < 0.05)
    assert not equivalent([-1.0, 1.0], margin)  # undecided is not equal


def test_a_table_has_a_row_for_each():
    table = markdown_table(["", "n"], [["a", 1], ["b", 2.5]])
    assert table.data == "|  | n |\n| --- | --: |\n| a | 1 |\n| b | 2.5 |"


def test_compare_by_hand():
    losses = {"standard": [110, 113, 116], "boosted": [108, 112, 113]}
    records = [record(arm, seed, loss) for arm, of in losses.items() for seed, loss in enumerate(of)]
    best, reference = compare(records)
    assert (best.arm, best.n, best.mean, best.pairs, best.difference) == ("boosted", 3, 111, 3, -2)
    assert best.sd == pytest.approx(stdev([108, 112, 113]))
    assert (best.low, best.high) == pytest.approx((-2 - 4.30265 / 3**0.5, -2 + 4.30265 / 3**0.5), abs=1e-4)
    assert reference.difference is None and (reference.parameters, reference.training_flops) == (10, 7)


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(6)), st.floats(-5, 5))
def test_the_order_of_records_and_what_seeds_share_change_nothing(order, shift):
    losses = {"standard": [5.0, 6.0, 5.5], "other": [4.8, 6.1, 5.2]}
    plain = [record(arm, seed, loss) for arm, of in losses.items() for seed, loss in enumerate(of)]
    same = {row.arm: row for row in compare(plain)}
    for row in compare([plain[i] for i in order]):
        assert row[4:7] == pytest.approx(same[row.arm][4:7], nan_ok=True)
    moved = [
        record(r.settings["arm"], r.settings["seed"], r.measured["test_loss"] + shift * r.settings["seed"])
        for r in plain
    ]
    row = {row.arm: row for row in compare(moved)}["other"]
    assert (row.difference, row.low, row.high) == pytest.approx(
        (same["other"].difference, same["other"].low, same["other"].high), abs=1e-9
    )


def test_only_pairs_are_differences():
    records = [
        record("standard", 1, 5.0),
        record("standard", 2, None),
        record("other", 2, 4.0),
        record("other", 1, 4.5),
    ]
    row = {row.arm: row for row in compare(records)}["other"]
    assert (row.n, row.pairs, row.difference, row.low) == (2, 1, -0.5, None)
    assert compare(records)[-1].diverged == 1


TOY = ModelConfig(**SMALL, d_model=16)

PAIR = (("a", 16), ("b", 32))


# Errors


@pytest.mark.parametrize(
    "call, argument",
    [
        (lambda: holm(0.5), "p_values"),
        (lambda: holm([0.5, 1.5]), "p_values"),
        (lambda: equivalent([1.0, 2.0], 0), "margin"),
        (lambda: equivalent([1.0, 2.0], 1.0, 0.5), "confidence"),
        (lambda: equivalent([1.0], 1.0), "differences"),
        (lambda: paired_interval([1.0]), "differences"),
        (lambda: paired_interval([math.inf, 1.0]), "differences"),
        (lambda: paired_interval([1.0, 2.0], 1), "confidence"),
        (lambda: welch(1, 1, 1, 1, 1, 2), "n_a"),
        (lambda: welch(1, 0, 2, 1, 0, 2), "sd_a, sd_b"),
        (lambda: welch(1, 1, 2, 1, math.nan, 2), "sd_a, sd_b"),
        (lambda: welch(1, math.inf, 2, 1, 1, 2), "sd_a, sd_b"),
        (lambda: welch(1, 1, 2, math.nan, 1, 2), "mean_a, mean_b"),
        (lambda: compare([], confidence=95), "confidence"),
        (lambda: compare([]), "reference"),
        (lambda: compare([record("standard", 1, 1.0)] * 2), "records"),
        (lambda: compare([record("standard", 1, 1.0)], metric="x"), "metric"),
        (lambda: compare([record("standard", 1, 1.0, seconds=1.0)], metric="train_step"), "metric"),
        (lambda: compare([record("standard", 1, 1.0), record("b", 1, 1.0, text={"fingerprint": "g"})]), "records"),
        (lambda: matched(ModelConfig(vocab_size=9), ModelConfig(vocab_size=9), "x"), "by"),
        (lambda: matched(ModelConfig(vocab_size=9), ModelConfig(vocab_size=9), change="x"), "change"),
        (lambda: matched(ModelConfig(vocab_size=9, d_ffn=8), ModelConfig(vocab_size=9)), "config"),
        (lambda: step_seconds([record("a", 1, None)]), "records"),
        (lambda: step_seconds([record("a", 1, 1.0, seconds=0.0)]), "records"),
        (lambda: equal_time(TOY, [], "boosted"), "slow"),
        (lambda: equal_time(replace(TOY, d_ffn=8), [], "a"), "config"),
        (lambda: equal_time(TOY, [record("a", 1, 1.0, seconds=1.0)], "a"), "records"),
        (
            lambda: equal_time(TOY, [record(a, 1, 1.0, seconds=1.0, size=dict(d_model=w)) for a, w in PAIR], "a"),
            "records",
        ),
        (lambda: best_rates([record("a", 1, 1.0), record("a", 1, 2.0)]), "records"),
        (lambda: rates_at_edge([record("a", 1, 1.0), record("b", 1, 1.0, text={"fingerprint": "g"})]), "records"),
        (lambda: compare(3), "records"),
        (lambda: compare([{"arm": "a"}]), "records"),
        (lambda: compare([Record("x", {}, {})]), "records"),
        (lambda: step_seconds([Record("x", {}, {})]), "records"),
        (lambda: step_seconds(3), "records"),
        (lambda: equal_time(TOY, 3, "a"), "records"),
        (lambda: equal_time({}, [], "a"), "config"),
        (lambda: matched(TOY, "wide"), "target"),
        (lambda: matched("wide", TOY), "config"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()
