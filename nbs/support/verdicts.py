"""The orderings that chapter 18 decides, the plans that they were judged by, and the tables that show them."""

import math
from collections.abc import Iterable
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np

from gbattn.comparison import (
    Row,
    holm,
    markdown_table,
    paired_interval,
)
from gbattn.conventions import Record, put_to_test
from gbattn.lab.catalogue import EXPERIMENTS
from support.reports import (
    Report,
    diverged,
    has_interval,
    in_percent,
    in_short,
    ordering,
    percent,
    signed,
)

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
# The columns of the page's table: the arm that boosted attention is compared with.
BASELINES = {
    "standard": "standard",
    "parameters": "wider",
    "flops": "wider_flops",
    "stack": "stack",
    "time": "wider_time",
}


class Setting(NamedTuple):
    """A row of the page's table: for each baseline the arm and the experiments that
    compare it with boosted attention, and which of these comparisons were ``planned``
    to decide, before their runs. A setting that is ``shown`` is in the table; all are
    in the figure.
    """

    label: str
    against: dict[str, tuple[str, ...]]
    planned: tuple[str, ...]
    shown: bool
    arm: str

    def of(self, baseline: str) -> tuple[str, ...]:
        """Return the two arms and the experiments, as `Report.difference` takes them."""
        return self.arm, *self.against[baseline]


def setting(
    label: str,
    name: str,
    planned: str = "",
    *,
    shown: bool = True,
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
    return Setting(label, against, tuple(planned.split()), shown, arm)


_ONE, _TWO, _FOUR = (
    "parameters",
    "parameters flops",
    "standard parameters flops time",
)
_HIDE = dict(shown=False)
WARM = "mini-warm+mini-warm-again"
AGAIN = "shift+shift-again"
_SHIFTED = dict(planned="standard", suffix="_shift", **_HIDE)
SETTINGS = (
    setting("width 64, short warm-up", "mini", _FOUR, time="mini-arms"),
    setting(
        "short warm-up, 0.004 for all", "mini-common", time="mini-arms", **_HIDE
    ),
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
    ),
    setting("attention dropout: three seeds", "mini-dropout", **_HIDE),
    setting("attention dropout: five new seeds", "mini-again", _TWO),
    setting("a quarter of the text", "mini-quarter", **_HIDE),
    setting("four times the text", "mini-fourfold", **_HIDE),
    setting("four times the text and the updates", "length", _ONE),
    setting(
        "four times both, every arm shifted",
        "shift-length",
        "standard flops",
        suffix="_shift",
    ),
    setting("rotary positions, short warm-up", "mini-rotary"),
    setting(
        "rotary positions, 0.008, long warm-up", "shift-rotary-common", **_HIDE
    ),
    setting("rotary positions, each at its rate", "shift-rotary"),
    setting("gutenberg-en, short warm-up", "mini-gutenberg", _ONE),
    setting("gutenberg-en, long warm-up, 0.008", "shift-gutenberg-plain"),
    setting("one pass, width 96, short warm-up", "one-pass", _ONE),
    setting("one pass, 0.004 for all", "one-pass-common", **_HIDE),
    setting("one pass, 0.004, long warm-up", "one-pass-warm", **_HIDE),
    setting("one pass, 0.008, long warm-up", "shift-one-pass", **_HIDE),
    setting("width 48", "ladder-48"),
    setting("width 48, attention dropout", "ladder-48-dropout", _ONE, **_HIDE),
    setting("width 96: three seeds", "ladder-96", **_HIDE),
    setting(
        "width 96: four new seeds",
        "ladder-96-again",
        _TWO,
        standard="shift-96-plain",
        flops="ladder-96-flops",
    ),
    setting("width 96: twelve seeds, form or depth", "form", "stack"),
    setting("width 96, rotary", "ladder-96-rotary", **_HIDE),
    setting("width 96, rotary, each at its rate", "rotary-96", _ONE),
    setting("width 128", "ladder-128"),
    setting("width 192", "ladder-192"),
    setting("one layer", "depth-1", **_HIDE),
    setting("two layers", "depth-2", **_HIDE),
    setting("four layers", "depth-4", **_HIDE),
    setting("eight layers", "depth-8", **_HIDE),
    setting("gutenberg-en, shifted", "shift-gutenberg", **_SHIFTED),
    setting("one pass, shifted", "shift-one-pass", **_SHIFTED),
    setting("rotary positions, shifted", "shift-rotary", **_SHIFTED),
    setting("width 96, shifted", "shift-96", **_SHIFTED),
    setting("the published size", "paper-wikipedia"),
)


def planned_p(report: Report) -> dict[tuple[str, ...], float]:
    """Return Holm's adjusted p of every planned comparison of `SETTINGS`; one that is
    not in, or is in doubt, counts with a p of 1; one that was analysed after ten pairs
    and again after twenty, with twice its p."""
    of = list(dict.fromkeys(s.of(key) for s in SETTINGS for key in s.planned))
    p_values = [min(1, report.p(*one) * (1 + (AGAIN in one))) for one in of]
    return dict(zip(of, holm(p_values)))


def verdict(report: Report, of: tuple[str, ...], adjusted: dict) -> str:
    """Return the verdict on boosted attention against a baseline: for a planned
    comparison after Holm's correction, for any other marked as exploratory."""
    row = report.difference(*of)
    if row is None:
        found, planned = report.at_shared_seeds(*of)
        return f"{len(found)} of {planned}"
    if report.doubt(row, *of):
        return "run diverged" if diverged(row) else "rate at edge"
    word = {"holds": "ahead", "reversed": "behind"}.get(ordering(row), "undecided")
    if of not in adjusted:
        return f"*({word})*"
    if word == "undecided":
        return word
    return f"**{word}**" if adjusted[of] < 0.05 else "not after Holm"


def answer_table(report: Report, settings: Iterable[Setting] = SETTINGS) -> object:
    """Return boosted attention minus each baseline, a row for each setting, as a table
    of Markdown: percent of perplexity and pairs, the interval, the `verdict`."""
    adjusted, rows = planned_p(report), []
    for setting in settings:
        cells = []
        for key in BASELINES:
            lines = []
            if key in setting.against:
                of = setting.of(key)
                row = report.draw(*of)
                if row and has_interval(row):
                    lines = [f"{signed(row.difference)}, n = {row.pairs}"]
                    lines.append(f"{signed(row.low)}, {signed(row.high)}")
                lines.append(verdict(report, of, adjusted))
            text = "<br>".join(lines).replace(" ", "\N{NO-BREAK SPACE}")
            cells.append(text)
        rows.append([setting.label, *cells])
    head = "standard", "wider, parameters", "wider, FLOPs", "stack", "wider, time"
    return markdown_table(["", *head], rows)


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
        sides = ("standard", "wider by FLOPs")[:rules]
        claims = [
            f"{setting}, rule {k}: boosted − {side}, both shifted"
            for k, side in enumerate(sides, 1)
        ]
    for place, (claim, limit) in enumerate(zip(claims, (-MARGIN, 0))):
        row, why = of.rows[place], of.doubts[place]
        if of.rules is None or why:
            why = (
                f"undecided: {why}"
                if why
                else f"not known yet: {report.state(of.name)}"
            )
            print(f"{claim}\n   {why}\n")
            continue
        low, high = percent(row.low), percent(row.high)
        put_to_test(
            prediction=claim,
            statistic=f"mean paired difference, % of perplexity, {row.pairs} pairs",
            threshold=f"{100 * of.confidence:g} % interval "
            + (f"below {limit}" if place else f"not below {limit}"),
            observed=f"{percent(row.difference):+.2f}  [{low:+.2f}, {high:+.2f}]",
            holds=of.rules[place],
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


OF_DEPTH = {n: (BOOSTED, "wider", f"depth-{n}") for n in (1, 2, 4, 8)}


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
        print(f"{claim}\n   undecided: {why}\n")
        return
    low, high = paired_interval(slopes)
    put_to_test(
        prediction=claim,
        statistic=f"slope of the difference in test loss, nats a doubling, {len(slopes)} seeds",
        threshold="95 % interval above 0 (fails: below 0)",
        observed=f"{slopes.mean():+.4f}  [{low:+.4f}, {high:+.4f}]",
        holds=None if low < 0 < high else bool(low > 0),
    )


def settings_table(report: Report) -> object:
    """Return what the shift and a second round bring standard attention in each setting
    of E0, alone and together, and how both compare with the wider model of equal FLOPs,
    as a table of Markdown."""
    plain = "mini-warm+shift-plain"
    settings = {  # standard, boosted, standard shifted, all shifted
        "Wikipedia": (plain, WARM, "shift", AGAIN),
        "gutenberg-en": ("shift-gutenberg-plain",) * 2 + ("shift-gutenberg",) * 2,
        "one pass, width 96": ("shift-one-pass",) * 4,
        "rotary positions, 0.008 for all": ("shift-rotary-common",) * 4,
        "rotary positions": ("shift-rotary",) * 4,
        "width 96": (
            "ladder-96+shift-96-plain",
            "ladder-96+ladder-96-again",
            "shift-96",
            "shift-96",
        ),
    }
    rows = []
    for label, (standard, boosted, shifted, both) in settings.items():
        cells = []
        for first, second, *names in (
            ("standard_shift", "standard", standard, shifted),
            (BOOSTED, "standard", boosted, standard),
            ("boosted_shift", "standard_shift", both),
            ("boosted_shift", "wider_flops_shift", both),
        ):
            of = first, second, *dict.fromkeys(names)
            row = report.draw(*of)
            star = " *" * bool(row and report.doubt(row, *of))
            cells.append(in_short(row) + star if row else report.state_of(*of))
        rows.append([label, *cells])
    head = "standard: shifted − not", "boosted − standard", "the same, both shifted"
    return markdown_table(["", *head, "boosted − wider, FLOPs, both shifted"], rows)


def shift_table(report: Report) -> object:
    """Return what the shift does for each arm, the long warm-up and the arm's own rate
    with it, as a table of Markdown."""
    arms = {
        "standard": ("standard", "mini-warm+shift-plain", "shift"),
        "wider, equal parameters": ("wider", WARM, "shift"),
        "wider, equal FLOPs": ("wider_flops", "mini-warm-flops", "shift"),
        "boosted": (BOOSTED, WARM, "shift"),
        "stack": ("stack", "shift-stack"),
    }
    rows = []
    for label, (arm, *names) in arms.items():
        of = ("boosted" if arm == BOOSTED else arm) + "_shift", arm, *names
        row = report.draw(*of)
        found, planned = report.at_shared_seeds(*of)
        doubt = row and report.doubt(row, *of)
        size = f"{in_percent(row)}{' *' * bool(doubt)}" if row else ""
        rows.append([label, f"{len(found)} of {planned}", size])
    return markdown_table(["", "runs in", "shifted − not shifted, %"], rows)


def gap_curve(report: Report, of: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return the updates at which two arms were validated, and the mean paired
    difference there in percent of perplexity."""
    by_arm: dict[str, dict[int, Record]] = {}
    for r in report.paired(*of):
        by_arm.setdefault(r.settings["arm"], {})[r.settings["seed"]] = r
    boosted, other = by_arm[of[0]], by_arm[of[1]]
    losses = [
        np.subtract(
            boosted[s].measured["curve_loss"], other[s].measured["curve_loss"]
        )
        for s in boosted
    ]
    steps = boosted[min(boosted)].measured["curve_step"]
    return np.array(steps), 100 * np.expm1(np.mean(losses, axis=0))
