"""The comparisons that chapter 18 decides, the plans that they were judged by, and the rules that judge them."""

import math
from collections.abc import Callable
from itertools import product
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from gbattn.comparison import Row, holm, paired_interval, welch
from gbattn.conventions import Record, put_to_test
from gbattn.lab.catalogue import EXPERIMENTS
from support.reports import Report, diverged, has_interval, ordering, percent

# What a sentence calls the two arms that decide, and the ten orderings with which the
# comparison began (appendix Y).
SIDES = "boosted attention", "the wider model"
ORDERINGS = {
    1: ("boosted_residual", "wider", "mini"),
    2: ("wider", "twicing", "mini"),
    3: ("twicing", "standard", "mini"),
    4: ("wider", "boosted_input", "mini"),
    5: ("boosted_residual", "wider_flops", "mini"),
    6: ("boosted_residual", "wider_time", "mini", "mini-arms"),
    7: ("boosted_residual", "wider", "mini-gutenberg"),
    8: ("boosted_residual", "wider", "one-pass"),
    9: ("boosted_residual", "standard", "mini"),
    10: ("boosted_residual", "twicing", "mini"),
}
BOOSTED = "boosted_residual"
# The columns of the large table of appendix Y: the arm that boosted attention is compared with.
BASELINES = {
    "standard": "standard",
    "parameters": "wider",
    "flops": "wider_flops",
    "stack": "stack",
    "time": "wider_time",
    "twicing": "twicing",
}


class Setting(NamedTuple):
    """A row of that table: for each baseline the arm and the experiments that compare
    it with boosted attention, and which of these comparisons were ``planned`` to
    decide, before their runs.
    """

    label: str
    against: dict[str, tuple[str, ...]]
    planned: tuple[str, ...]
    arm: str

    def of(self, baseline: str) -> tuple[str, ...]:
        """Return the two arms and the experiments, as `Report.difference` takes them."""
        return self.arm, *self.against[baseline]


def setting(
    label: str,
    name: str,
    planned: str = "",
    *,
    suffix: str = "",
    **others: str | tuple[str, ...],
) -> Setting:
    """Return a setting with an experiment's own baselines and those that other
    experiments have for it, each given as one more name or as a tuple of all names;
    ``suffix`` ends the names of its arms."""
    parts = [EXPERIMENTS[part].arms for part in name.split("+")]
    known = set.intersection(*({arm.name for arm in arms} for arms in parts))
    arms = {key: arm + suffix for key, arm in BASELINES.items()}
    against = {key: (arm, name) for key, arm in arms.items() if arm in known}
    for key, at in others.items():
        against[key] = arms[key], *((name, at) if isinstance(at, str) else at)
    arm = f"boosted{suffix}" if suffix else BOOSTED
    return Setting(label, against, tuple(planned.split()), arm)


_ONE, _TWO, _FOUR = (
    "parameters",
    "parameters flops",
    "standard parameters flops time",
)
WARM = "mini-warm+mini-warm-again"
AGAIN = "shift+shift-again"
_SHIFTED = dict(planned="standard", suffix="_shift")
SETTINGS = (
    setting(
        "width 64, short warm-up", "mini", f"{_FOUR} twicing", time="mini-arms"
    ),
    setting("short warm-up, 0.004 for all", "mini-common", time="mini-arms"),
    setting(
        "long warm-up, each at its rate", "mini-long", _FOUR, time="mini-long-time"
    ),
    setting(
        "long warm-up, 0.008: five new seeds",
        "mini-warm-again",
        _TWO,
        standard="shift-plain",
        flops="mini-warm-flops",
    ),
    setting(
        "long warm-up, 0.008: all ten seeds",
        WARM,
        standard=(WARM, "mini-warm+shift-plain"),
        flops=(WARM, "mini-warm-flops"),
        time=("mini-warm", "mini-long-time"),
        stack=("mini-warm", "shift-stack"),
    ),
    setting(
        "long warm-up, every arm shifted",
        AGAIN,
        "standard flops",
        suffix="_shift",
        stack="shift-stack",
        twicing=("shift", "shift-stack"),
    ),
    setting("attention dropout: three seeds", "mini-dropout"),
    setting("attention dropout: five new seeds", "mini-again", _TWO),
    setting("a quarter of the text", "mini-quarter"),
    setting("four times the text", "mini-fourfold"),
    setting("four times the text and the updates", "length", _ONE),
    setting(
        "four times both, every arm shifted",
        "shift-length",
        "standard flops",
        suffix="_shift",
        parameters=("composition",),
        twicing=("composition",),
    ),
    setting("rotary positions, short warm-up", "mini-rotary"),
    setting("rotary positions, 0.008, long warm-up", "shift-rotary-common"),
    setting("rotary positions, each at its rate", "shift-rotary"),
    setting("gutenberg-en, short warm-up", "mini-gutenberg", _ONE),
    setting("gutenberg-en, long warm-up, 0.008", "shift-gutenberg-plain"),
    setting("one pass, width 96, short warm-up", "one-pass", _ONE),
    setting("one pass, 0.004 for all", "one-pass-common"),
    setting("one pass, 0.004, long warm-up", "one-pass-warm"),
    setting("one pass, 0.008, long warm-up", "shift-one-pass"),
    setting("width 48", "ladder-48"),
    setting("width 48, attention dropout", "ladder-48-dropout", _ONE),
    setting("width 96: three seeds", "ladder-96"),
    setting(
        "width 96: four new seeds",
        "ladder-96-again",
        _TWO,
        standard="shift-96-plain",
        flops="ladder-96-flops",
    ),
    setting("width 96: twelve seeds, form or depth", "form", "stack"),
    setting("width 96, rotary", "ladder-96-rotary"),
    setting("width 96, rotary, each at its rate", "rotary-96", _ONE),
    setting("width 128", "ladder-128"),
    setting("width 192", "ladder-192"),
    setting("one layer", "depth-1"),
    setting("two layers", "depth-2"),
    setting("four layers", "depth-4"),
    setting("eight layers", "depth-8"),
    setting("gutenberg-en, shifted", "shift-gutenberg", **_SHIFTED),
    setting("one pass, shifted", "shift-one-pass", **_SHIFTED),
    setting("rotary positions, shifted", "shift-rotary", **_SHIFTED),
    setting("width 96, shifted", "shift-96", **_SHIFTED),
    setting("the published size", "paper-wikipedia"),
)


# Planned, too, and no cell of that table: three of the ten orderings that began it,
# coarse gates against a wider model of their size, and E2, whose rule wants all four.
BESIDE = (
    *(ORDERINGS[number] for number in (2, 3, 4)),
    *((f"boosted_{of}", "wider_head", "coarse-gates") for of in ("head", "scalar")),
)
READS = tuple(
    (residual, of_input, "reads")
    for residual, of_input in product(
        (BOOSTED, "boosted_residual_of_input"),
        ("boosted_input", "boosted_input_of_input"),
    )
)
# Planned comparisons of the gaps, boosted minus wider, of two experiments.
GAPS = (
    ("ladder-96", "ladder-48"),
    ("mini-quarter", "mini-fourfold"),
    ("ladder-48-dropout", "ladder-48"),
    ("ladder-96-again", "ladder-96-rotary"),
)
OF_DEPTH = {n: (BOOSTED, "wider", f"depth-{n}") for n in (1, 2, 4, 8)}


class Compound(NamedTuple):
    """What decides a planned question that more than two arms answer: its p, and a
    difference that is below zero if the outcome is the predicted one."""

    p: float
    difference: float


def e2(report: Report) -> Compound:
    """Return what decides E2: the largest p and the largest difference of its four."""
    rows = [report.difference(*of) for of in READS]
    p = max(report.p(*of) for of in READS)
    return Compound(p, 0.0 if None in rows else max(row.difference for row in rows))


def e6(report: Report) -> Compound:
    """Return what decides E6: Student's t for the slope, which was to be above zero."""
    from scipy.stats import ttest_1samp

    slopes = slopes_with_depth(report)
    if slopes is None or any(
        report.doubt(report.difference(*of), *of) for of in OF_DEPTH.values()
    ):
        return Compound(1.0, 0.0)
    return Compound(float(ttest_1samp(slopes, 0).pvalue), -float(slopes.mean()))


def gaps(report: Report, smaller: str, larger: str) -> Compound:
    """Return what decides which of two gaps is smaller: Welch's test."""
    p = report.gap_p(smaller, larger)
    if p == 1:
        return Compound(p, 0.0)
    return Compound(p, report.gap(smaller)[0] - report.gap(larger)[0])


COMPOUND: dict[tuple[str, ...], Callable[[Report], Compound]] = {
    ("E2",): e2,
    ("E6",): e6,
    **{("gap", *of): lambda report, of=of: gaps(report, *of) for of in GAPS},
}


def family(report: Report) -> dict[tuple[str, ...], float]:
    """Return the p of every comparison that was planned before its runs, by its arms
    and experiments, or by its name in `COMPOUND`. One that is not in, or is in doubt,
    counts with a p of 1; one that was analysed after ten pairs and again after twenty,
    with twice its p; a claim of `PLANS`, with the p of its own limit. (Rules on scatter
    or on levels have no p.)"""
    of = dict.fromkeys(s.of(key) for s in SETTINGS for key in s.planned)
    of = dict.fromkeys([*of, *BESIDE])
    found = {one: min(1, report.p(*one) * (1 + (AGAIN in one))) for one in of}
    for plan in PLANS:
        found |= {plan[key].of: one.p for key, one in decide(report, plan).items()}
    return found | {name: decides(report).p for name, decides in COMPOUND.items()}


def planned_p(report: Report) -> dict[tuple[str, ...], float]:
    """Return Holm's adjusted p of every planned comparison, all in one `family`."""
    found = family(report)
    return dict(zip(found, holm(list(found.values()))))


class Claim(NamedTuple):
    """A claim of a plan with a correction of its own, on the difference ``of`` two arms, in
    the experiments that follow them: that its interval lies below a ``limit`` in percent
    of perplexity, or above."""

    text: str
    of: tuple[str, ...]
    below: bool
    limit: float


# E8. The second is the plan's rule *a rate*, turned round.
COMPOSITION = {
    "composition": Claim(
        "composition: boosted − boosted with keys and values of x",
        ("boosted_shift", "boosted_input_shift", "composition"),
        True,
        0.0,
    ),
    "no rate": Claim(
        "more than a learning rate: boosted − standard",
        ("boosted_shift", "standard_shift", "composition"),
        True,
        0.0,
    ),
    "capacity": Claim(
        "capacity: boosted − wider, equal parameters",
        ("boosted_shift", "wider_shift", "composition"),
        False,
        -1.0,
    ),
    "no weights": Claim(
        "the weights are not needed: twicing − boosted",
        ("twicing_shift", "boosted_shift", "composition"),
        True,
        1.0,
    ),
}
# E12.
_NEW = "shift-new", "shift-new-plain"
SHIFT_ONCE_MORE = {
    "gains": Claim(
        "the shift gains: standard with the shift − standard",
        ("standard_shift", "standard", *_NEW),
        True,
        -10.0,
    ),
    "gains more": Claim(
        "more than a second round: standard with the shift − boosted without",
        ("standard_shift", BOOSTED, *_NEW),
        True,
        0.0,
    ),
}


PLANS = COMPOSITION, SHIFT_ONCE_MORE


class Headline(NamedTuple):
    """A row of the charts with which the first page and chapter 18 begin: two arms and their experiments, the method of
    its colour, and whether a plan had asked before the runs."""

    of: tuple[str, ...]
    method: str
    planned: bool = True


_PLAIN = "mini-warm+shift-plain"
_BOTH = "boosted_shift", "standard_shift"
_WIDER = "boosted_shift", "wider_flops_shift"
HEADLINE = {
    "shift": Headline(SHIFT_ONCE_MORE["gains"].of, "softmax attention"),
    "second": Headline(
        (BOOSTED, "standard", "shift-new-plain"), "boosted attention", False
    ),
    "wider": Headline(
        ("wider_flops", "standard", "mini-warm-flops", _PLAIN),
        "wider attention",
        False,
    ),
    "here": Headline((*_BOTH, AGAIN), "boosted attention"),
    "long": Headline((*_BOTH, "shift-length"), "boosted attention"),
    "flops_here": Headline((*_WIDER, AGAIN), "boosted attention"),
    "flops": Headline((*_WIDER, "shift-length"), "boosted attention"),
}


class Judged(NamedTuple):
    """What a plan says of a claim: the difference, None while a run is missing; its p
    against the limit, alone and corrected for all claims of the plan; the verdict."""

    row: Row | None
    p: float
    corrected: float
    verdict: str


def decide(report: Report, claims: dict[str, Claim]) -> dict[str, Judged]:
    """Return what a plan with a correction of its own decides by its rules (appendix Y)."""
    from scipy.stats import ttest_1samp

    rows, ps = {}, {}
    for key, (_, of, _, limit) in claims.items():
        rows[key] = row = report.difference(*of)
        ps[key] = 1.0
        if has_interval(row) and not report.doubt(row, *of):
            apart = np.subtract(*report.losses(*of))
            ps[key] = float(ttest_1samp(apart, math.log1p(limit / 100)).pvalue)
    found = {}
    for key, corrected in zip(claims, holm(list(ps.values()))):
        word, (_, _, below, limit) = "open", claims[key]
        if rows[key] is None:
            word = "not known yet"
        elif corrected < 0.05:
            is_below = percent(rows[key].difference) < limit
            word = "held" if is_below == below else "did not hold"
        found[key] = Judged(rows[key], ps[key], corrected, word)
    return found


def judge_plan(report: Report, plan: str, claims: dict[str, Claim]) -> None:
    """Put the claims of a plan to the test, or print which runs are missing."""
    for key, judged in decide(report, claims).items():
        claim, row = claims[key], judged.row
        if row is None:
            print(f"{plan}, {claim.text}\n   not known yet: {report.state_of(*claim.of)}\n")
            continue
        low, high = percent(row.low), percent(row.high)
        put_to_test(
            prediction=f"{plan}, {claim.text}",
            statistic=f"mean paired difference, % of perplexity, {row.pairs} pairs",
            threshold=f"95 % interval {'below' if claim.below else 'above'} "
            f"{claim.limit:g}, and p, corrected for {len(claims)} claims, below 0.05",
            observed=f"{percent(row.difference):+.2f}  [{low:+.2f}, {high:+.2f}], "
            f"p = {judged.corrected:.4f}",
            holds={"held": True, "did not hold": False}.get(judged.verdict),
        )


def judge(report: Report, claim: str, better: str, worse: str, *names: str) -> None:
    """Put an ordering to the test, or print why that is not possible yet."""
    row = report.draw(better, worse, *names)
    if row is None:
        state = report.state_of(better, worse, *names)
        print(f"{claim}\n   not known yet: {state}\n")
    elif why := report.doubt(row, better, worse, *names):
        print(f"{claim}\n   open: {why}\n")
    else:
        put_to_test(
            prediction=claim,
            statistic=f"mean paired difference in test loss, nats, {row.pairs} pairs",
            threshold="95 % interval below 0 (did not hold: above 0)",
            observed=f"{row.difference:+.4f}  [{row.low:+.4f}, {row.high:+.4f}]",
            holds={"held": True, "open": None, "did not hold": False}[
                ordering(row)
            ],
        )


def compare_gaps(report: Report, claim: str, smaller: str, larger: str) -> None:
    """Put to the test that the gap, boosted minus wider, of one experiment is
    smaller than that of another, or print why that is not possible yet."""
    of = "boosted_residual", "wider"
    for name in (smaller, larger):
        row = report.difference(*of, name)
        if row is None:
            print(f"{claim}\n   not known yet: `{name}`, {report.state(name)}\n")
            return
        if why := report.doubt(row, *of, name):
            print(f"{claim}\n   open: `{name}`, {why}\n")
            return
    a, b = report.gap(smaller), report.gap(larger)
    found = welch(*a, *b)
    put_to_test(
        prediction=claim,
        statistic="difference of the two mean paired differences in test loss, nats; "
        "Welch's t and its p",
        threshold="below 0 with p below 0.05 (did not hold: above 0 with p below 0.05)",
        observed=f"{a[0] - b[0]:+.4f}; t = {found.t:.2f}, p = {found.p:.3f}",
        holds=found.t < 0 if found.p < 0.05 else None,
    )


# An arm whose sweep missed its best rate, in an experiment: another experiment, in which
# a rate that was not its own is better for it in every pair.
BETTER_RATE = {("one-pass", BOOSTED): "one-pass-common"}


def verdict(report: Report, of: tuple[str, ...], adjusted: dict) -> str:
    """Return whether the first of two arms is better or worse, and how that is known:
    ``planned``, after Holm's correction, or ``seen`` after the runs. ``open`` if the
    interval includes zero, or if the correction leaves it so; where a plan asked for more
    than an order and is open, the order is ``seen``. No verdict where the best learning
    rate of one of them was not found: it lies at the edge of its grid, or another rate is
    better in every pair (`BETTER_RATE`)."""
    row = report.difference(*of)
    if row is None:
        found, planned = report.at_shared_seeds(*of)
        return f"{len(found)} of {planned}"
    if report.doubt(row, *of):
        return "run diverged" if diverged(row) else "rate not found"
    if any((name, arm) in BETTER_RATE for arm in of[:2] for name in of[2:]):
        return "rate not found"
    if ordering(row) == "open":
        return "open"
    word, of = "better" if row.high < 0 else "worse", ("E2",) if of in READS else of
    limits = {claim.of: claim.limit for plan in PLANS for claim in plan.values()}
    for one in (of, (*of[1::-1], *of[2:])):  # a claim of a plan may have it turned round
        if adjusted.get(one, 1) < 0.05:  # E2 was planned as one
            return f"**{word}**, planned"
        if one in adjusted and not limits.get(one):
            return "open after Holm"
    return f"{word}, *seen*"


def answers(report: Report) -> Record:
    """Return how many comparisons are planned, how many of them are decided, and the
    least adjusted p of the others."""
    adjusted = planned_p(report)
    stand = sum(p < 0.05 for p in adjusted.values())
    counted = {
        "planned": len(adjusted),
        "stand": ("none", *"one two three four five six seven eight nine".split())[
            stand
        ]
        if stand < 10
        else str(stand),
        "next_p": min((p for p in adjusted.values() if p >= 0.05), default=1.0),
    }
    return Record("answers", {}, counted)


MARGIN = 1.5  # percent of perplexity, fixed with the plan (appendix Y)


class Shifted(NamedTuple):
    """Boosted attention against two baselines where every arm has the previous token
    for free, and whether the two rules are met; None while a planned pair is missing."""

    name: str
    confidence: float
    rows: list[Row | None]
    doubts: list[str | None]
    rules: tuple[bool, bool] | None


def shifted(
    report: Report, name: str = "shift", more: str = "shift-again"
) -> Shifted:
    """Return what experiment E0, or its counterpart ``name`` in another setting,
    decides by the rule of its plan (appendix Y).

    Rule 1, *the gain is a cheap previous token*: the interval of boosted − standard
    does not reach below −`MARGIN` percent. Rule 2, *there is more to it*: that of
    boosted − wider by FLOPs lies below zero. If ten pairs meet neither, ten more are
    run, once, as experiment ``more``, and the intervals of all twenty are 97.5 %
    ones. A comparison with a run that diverged, or with a rate at the edge of its
    grid, meets no rule.
    """
    confidence = 0.95
    while True:
        rows, doubts = [], []
        for baseline in ("standard_shift", "wider_flops_shift"):
            of = "boosted_shift", baseline, name
            row = report.difference(*of, confidence=confidence)
            rows.append(row)
            doubts.append(report.doubt(row, *of) if row else None)
        if None in rows:
            return Shifted(name, confidence, rows, doubts, None)
        small = not doubts[0] and percent(rows[0].low) >= -MARGIN
        more_to_it = not doubts[1] and rows[1].high < 0
        again = "+" not in name and more in report.experiments
        if small or more_to_it or any(doubts) or not again:
            return Shifted(name, confidence, rows, doubts, (small, more_to_it))
        name, confidence = f"{name}+{more}", 0.975


def judge_previous_token(
    report: Report, setting: str | None = None, rules: int = 1
) -> None:
    """Put the two rules of E0 (in another setting the first 1 or 2 ``rules``) to the
    test, or print why that is not possible yet."""
    of = shifted(report, setting, more="") if setting else shifted(report)
    claims = (
        "the gain is a cheap previous token: boosted − standard, both shifted",
        "there is more to it: boosted − wider by FLOPs, both shifted",
    )
    if setting:
        claims = [
            f"{setting}, rule 1: little gain, boosted − standard, both shifted",
            f"{setting}, rule 2: a gain, boosted − wider by FLOPs, both shifted",
        ][:rules]
    for place, (claim, limit) in enumerate(zip(claims, (-MARGIN, 0))):
        row, why = of.rows[place], of.doubts[place]  # met, contradicted or open
        if of.rules is None or why:
            why = (
                f"open: {why}" if why else f"not known yet: {report.state(of.name)}"
            )
            print(f"{claim}\n   {why}\n")
            continue
        low, high = percent(row.low), percent(row.high)
        contradicted = low > limit if place else high < limit
        put_to_test(
            prediction=claim,
            statistic=f"mean paired difference, % of perplexity, {row.pairs} pairs",
            threshold=f"{100 * of.confidence:g} % interval "
            + (f"below {limit}" if place else f"not below {limit}"),
            observed=f"{percent(row.difference):+.2f}  [{low:+.2f}, {high:+.2f}]",
            holds=True if of.rules[place] else False if contradicted else None,
        )


class Cure(NamedTuple):
    """What a change does for runs that fail: how many of those fail of which that is
    known, the standard deviation with it over that of the plain runs, by how many
    percent the mean perplexity is above that at a gentler rate, and whether it is
    ``accepted``; None if that hangs on models that were not measured."""

    failed: int
    known: int
    ratio: float
    worse: float
    accepted: bool | None


def measured(runs: list[dict]) -> list[dict]:
    """Return the runs of which is known whether they fail (`fails`)."""
    return [run for run in runs if run["diverged"] or "without_ffn" in run]


def fails(run: dict) -> bool:
    """Return whether a run diverged, or its model loses more without its first attention
    than without its first feed-forward part."""
    return run["diverged"] or run["without_attention"] > run["without_ffn"]


def cure(changed: list[dict], plain: list[dict], gentle: list[dict]) -> Cure:
    """Return what a change does for runs, by the rule of E5 (appendix Y): accepted if
    none fails, the standard deviation of the test loss is at most half the plain
    runs', and the mean perplexity at most 0.5 percent above the gentler rate's."""
    losses = [
        [run["test_loss"] for run in runs if not run["diverged"]]
        for runs in (changed, plain, gentle)
    ]
    known = measured(changed)
    failed = sum(map(fails, known))
    ratio = stdev(losses[0]) / stdev(losses[1])
    mean = [fmean(map(math.exp, of)) for of in losses]
    worse = 100 * (mean[0] / mean[2] - 1)
    accepted = failed == 0 and ratio <= 0.5 and worse <= 0.5
    if accepted and len(known) < len(changed):
        accepted = None
    return Cure(failed, len(known), ratio, worse, accepted)


def judge_cure(
    claim: str, changed: list[dict], plain: list[dict], gentle: list[dict]
) -> None:
    """Put the rule of `cure` to the test, or print how many of ten runs are in. One that
    fails decides it before the others are in."""
    known, accepted = measured(changed), False
    failed = sum(map(fails, known))
    observed = f"{failed} of {len(known)}"
    if len(changed) == len(plain) == len(gentle) == 10:
        *_, ratio, worse, accepted = cure(changed, plain, gentle)
        observed += f"; {ratio:.2f}; {worse:+.1f}"
    elif not failed:
        of = f"{len(changed)} of 10 runs are in, of the plain ones {len(plain)}"
        print(f"{claim}\n   not known yet: {of}\n")
        return
    put_to_test(
        prediction=claim,
        statistic="failed, of the models measured; ratio of standard deviations; perplexity, %",
        threshold="none of ten; at most 0.5; at most +0.5",
        observed=observed,
        holds=accepted,
    )


def slopes_with_depth(report: Report) -> np.ndarray | None:
    """Return the slope of boosted − wider, test losses, against log₂ of the layers, 1 to
    8: nats for each doubling, one for each seed; None while a run is missing."""
    if None in [report.difference(*of) for of in OF_DEPTH.values()]:
        return None
    gaps = [np.subtract(*report.losses(*of)) for of in OF_DEPTH.values()]
    return np.polyfit(np.log2([*OF_DEPTH]), gaps, 1)[0]


def judge_depth(report: Report) -> None:
    """Put E6 to the test (appendix Y), or print why that is not possible yet."""
    claim = "E6: boosted attention's lead over the wider model falls with depth"
    slopes = slopes_with_depth(report)
    if slopes is None:
        state = report.state(*(name for *_, name in OF_DEPTH.values()))
        print(f"{claim}\n   not known yet: {state}\n")
        return
    doubts = [report.doubt(report.difference(*of), *of) for of in OF_DEPTH.values()]
    if why := next(filter(None, doubts), None):
        print(f"{claim}\n   open: {why}\n")
        return
    low, high = paired_interval(slopes)
    put_to_test(
        prediction=claim,
        statistic=f"slope of the difference in test loss, nats a doubling, {len(slopes)} seeds",
        threshold="95 % interval above 0 (did not hold: below 0)",
        observed=f"{slopes.mean():+.4f}  [{low:+.4f}, {high:+.4f}]",
        holds=None if low < 0 < high else bool(low > 0),
    )
