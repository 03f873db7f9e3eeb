"""The tables of chapter 18 and of the lab notebook, as Markdown, from the records."""

import math
from collections.abc import Iterable

import numpy as np
from IPython.display import Markdown

from gbattn.comparison import compare, losses_by_rate, markdown_table
from support.reports import (
    Report,
    has_interval,
    in_percent,
    in_short,
    minutes,
    percent,
    signed,
)
from support.verdicts import (
    AGAIN,
    BASELINES,
    BOOSTED,
    COMPOUND,
    SETTINGS,
    WARM,
    Setting,
    family,
    planned_p,
    verdict,
)


def arms_table(report: Report, *names: str, against: str = "standard") -> object:
    """Return a comparison of all arms as a table of Markdown, at the seeds that all these
    experiments have."""
    seeds = report.shared_seeds(*names)
    records = [
        r
        for name in names
        for r in report.records(name)
        if r.settings["seed"] in seeds
    ]
    rows, ran = [], {record.settings["arm"] for record in records}
    for row in compare(records, reference=against) if against in ran else ():
        home = [n for n in names if row.arm in report.arms(n)]
        pair = report.difference(
            row.arm, against, *dict.fromkeys([names[0], *home])
        )
        edge = row.arm in set().union(*map(report.untuned, home))
        rows.append(
            [
                row.label + " *" * edge,
                f"{row.n} of {row.n + row.diverged}" if row.diverged else row.n,
                f"{math.exp(row.mean):.2f}" if row.n else "diverged",
                f"{100 * row.sd:.1f}" if row.n > 1 else "",
                in_percent(row) if has_interval(pair) else "",
                f"{row.parameters / 1e3:,.0f}",
                f"{row.training_flops / 1e12:.1f}" if row.training_flops else "",
                f"{minutes(records, row.arm):.1f}" if row.n else "",
            ]
        )
    missing = [
        arm
        for name in names
        for arm in report.arms(name).values()
        if arm.name not in ran
    ]
    rows += [[arm.label, 0, *[""] * 6] for arm in missing]
    header = ["", "n", "perplexity", "sd, %"]
    header += [f"against {against.replace('_', ' ')}, %"]
    return markdown_table([*header, "thousand param.", "TFLOPs", "minutes"], rows)


def sweep_table(report: Report, name: str) -> object:
    """Return the validation losses of a sweep, means over its seeds, as a table of
    Markdown, a row for each arm, the lowest in bold."""
    found = losses_by_rate(report.records(name))
    rows, rates = [], sorted(set().union(*found.values()))
    for arm in report.arms(name).values():
        selected = found.get(arm.name, {})
        cells = [
            f"{selected[rate]:.3f}" if rate in selected else "" for rate in rates
        ]
        if selected:
            least = rates.index(min(selected, key=selected.get))
            cells[least] = f"**{cells[least]}**"
        rows.append([arm.label, *cells])
    title = f"`{name.split('+')[0]}`"
    return markdown_table([title, *(f"{rate:g}" for rate in rates)], rows)


def cell(report: Report, of: tuple[str, ...], adjusted: dict) -> str:
    """Return a comparison as a cell of a table, a line each: percent of perplexity and
    pairs, the interval, and the `verdict`."""
    row, lines = report.draw(*of), []
    if row and has_interval(row):
        lines = [f"{signed(row.difference)}, n = {row.pairs}"]
        lines.append(f"{signed(row.low)} to {signed(row.high)}")
    lines.append(verdict(report, of, adjusted))
    return "<br>".join(lines).replace(" ", "\N{NO-BREAK SPACE}")


# The two tables of chapter 18, without the shift and with it: a row for each question,
# a column for each length of the runs.
LONG = "length"
SHORT_TABLES: dict[str, dict[str, tuple]] = {
    "no shift": {
        "standard": (
            (BOOSTED, "standard", WARM, "mini-warm+shift-plain"),
            (BOOSTED, "standard", LONG, "composition"),
        ),
        "twicing": (None, None),
        "stack": (
            (BOOSTED, "stack", "mini-warm", "shift-stack"),
            (BOOSTED, "stack", LONG),
        ),
        "parameters": ((BOOSTED, "wider", WARM), (BOOSTED, "wider", LONG)),
        "flops": (
            (BOOSTED, "wider_flops", WARM, "mini-warm-flops"),
            (BOOSTED, "wider_flops", LONG),
        ),
    },
    "shift in both": {
        "standard": (
            ("boosted_shift", "standard_shift", AGAIN),
            ("boosted_shift", "standard_shift", "shift-length"),
        ),
        "twicing": (
            ("boosted_shift", "twicing_shift", "shift", "shift-stack"),
            ("boosted_shift", "twicing_shift", "composition"),
        ),
        "stack": (("boosted_shift", "stack_shift", "shift", "shift-stack"), None),
        "parameters": (
            ("boosted_shift", "wider_shift", AGAIN),
            ("boosted_shift", "wider_shift", "composition"),
        ),
        "flops": (
            ("boosted_shift", "wider_flops_shift", AGAIN),
            ("boosted_shift", "wider_flops_shift", "shift-length"),
        ),
    },
}
QUESTIONS = {
    "standard": "*Standard*: does it gain at all?",
    "twicing": "*Twicing*: does it need para\N{SOFT HYPHEN}meters of its own?",
    "stack": "*Stack*: is it more than one more atten\N{SOFT HYPHEN}tion?",
    "parameters": "*Wider*, equal para\N{SOFT HYPHEN}meters: is it worth its size?",
    "flops": "*Wider*, equal FLOPs: is it worth its arith\N{SOFT HYPHEN}metic?",
}
# Models, and the experiments that have them: an ordinary run, a long one.
MODELS = {
    "standard": ("standard", "mini-warm+shift-plain", "composition"),
    "boosted": (BOOSTED, WARM, LONG),
    "wider, equal FLOPs": ("wider_flops", "mini-warm-flops", LONG),
    "standard, shift": ("standard_shift", AGAIN, "shift-length"),
    "boosted, shift": ("boosted_shift", AGAIN, "shift-length"),
    "wider, equal FLOPs, shift": ("wider_flops_shift", AGAIN, "shift-length"),
}


def _shifted(name: str) -> tuple[tuple[str, ...], ...]:
    """Boosted attention minus both baselines, all with the shift, in one experiment."""
    arms = "standard_shift", "wider_flops_shift"
    return tuple(("boosted_shift", arm, name) for arm in arms)


# Other settings: boosted attention minus standard attention, and minus the wider model of equal FLOPs.
ELSEWHERE = {
    "shift in both: books in place of Wikipedia": _shifted("shift-gutenberg"),
    "shift in both: width 96": _shifted("shift-96"),
    "shift in both: rotary positions": _shifted("shift-rotary"),
    "shift in both: text read once, width 96": _shifted("shift-one-pass"),
    "no shift: width 96": (
        (
            BOOSTED,
            "standard",
            "ladder-96+ladder-96-again",
            "ladder-96+shift-96-plain",
        ),
        (BOOSTED, "wider_flops", "form"),
    ),
    "no shift: rotary positions": (
        (BOOSTED, "standard", "shift-rotary"),
        (BOOSTED, "wider_flops", "rotary-96"),
    ),
    "no shift: text read once, width 96": (
        (BOOSTED, "standard", "shift-one-pass"),
        None,
    ),
    "no shift: short warm-up": (
        (BOOSTED, "standard", "mini"),
        (BOOSTED, "wider_flops", "mini"),
    ),
}


def short_tables(report: Report) -> object:
    """Return boosted attention minus five baselines, each a question, in runs of two
    lengths: a table without the shift, and one with it."""
    adjusted, found = planned_p(report), []
    for setting, of_baseline in SHORT_TABLES.items():
        rows = []
        for baseline, cells in of_baseline.items():
            row = [QUESTIONS[baseline]]
            for of in cells:
                row.append(cell(report, of, adjusted) if of else "not run")
            rows.append(row)
        head = "boosted minus", setting, f"{setting}, long run"
        found.append(markdown_table(head, rows).data)
    return Markdown("\n\n".join(found))


def models_of(report: Report) -> dict[str, tuple[float, list[dict[int, float]]]]:
    """Return, for each of six models, its training FLOPs of a token in millions, and the
    test perplexity of each seed in the ordinary run, at the seeds of the first model,
    and in the long one."""
    found = {}
    for label, (arm, *experiments) in MODELS.items():
        lengths = [
            {r.settings["seed"]: r.measured for r in _runs_of(report, arm, names)}
            for names in experiments
        ]
        first = next(iter(lengths[0].values()))
        found[label] = (
            first["training_flops"] / first["tokens"] / 1e6,
            [
                {seed: one["test_perplexity"] for seed, one in runs.items()}
                for runs in lengths
            ],
        )
    seeds = found["standard"][1][0]
    for _, (ordinary, _) in found.values():
        for seed in set(ordinary) - set(seeds):
            del ordinary[seed]
    return found


def _runs_of(report: Report, arm: str, experiments: str | None) -> list:
    """Return the records of an arm in experiments, whose names a plus joins."""
    names = experiments.split("+") if experiments else ()
    found = (r for name in names for r in report.records(name))
    return [r for r in found if r.settings["arm"] == arm]


def elsewhere_table(report: Report) -> object:
    """Return boosted attention minus two baselines in settings that `short_tables` lacks."""
    adjusted, rows = planned_p(report), []
    for setting, cells in ELSEWHERE.items():
        found = (cell(report, of, adjusted) if of else "not run" for of in cells)
        rows.append([setting, *found])
    head = "boosted minus", "*standard*", "*wider*, equal FLOPs"
    return markdown_table(head, rows)


def answer_table(report: Report, settings: Iterable[Setting] = SETTINGS) -> object:
    """Return boosted attention minus each baseline, a row for each setting, as a table
    of Markdown."""
    adjusted, rows = planned_p(report), []
    for setting in settings:
        cells = (
            cell(report, setting.of(key), adjusted)
            if key in setting.against
            else ""
            for key in BASELINES
        )
        rows.append([setting.label, *cells])
    head = "standard", "wider, parameters", "wider, FLOPs", "stack", "wider, time"
    head += ("twicing",)
    return markdown_table(["", *head], rows)


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


def few_pairs_table(report: Report, most: int = 6) -> object:
    """Return the planned comparisons of few pairs of which Student's interval leaves out
    zero, by two ways that assume less than a normal distribution, as a table of
    Markdown: the sign test, and the interval of all resamples with replacement
    (the bootstrap, by percentiles)."""
    from scipy.stats import binomtest

    rows = []
    for of in planned_p(report):
        row = report.difference(*of) if len(of) > 2 and of[0] != "gap" else None
        few = has_interval(row) and row.pairs <= most and not report.doubt(row, *of)
        if not few or row.low <= 0 <= row.high:
            continue
        apart = np.subtract(*report.losses(*of))
        n, below = len(apart), int((apart < 0).sum())
        resampled = apart[np.indices((n,) * n).reshape(n, -1)].mean(0)
        ends = np.quantile(resampled, (0.025, 0.975))
        rows.append(
            [
                f"{of[0]} − {of[1]}, `{of[2]}`",
                n,
                in_percent(row),
                f"{percent(ends[0]):+.1f} to {percent(ends[1]):+.1f}",
                f"{below} of {n}",
                f"{binomtest(below, n).pvalue:.3f}",
            ]
        )
    head = "", "pairs", "Student's t, %", "bootstrap, %", "pairs below 0"
    return markdown_table([*head, "p of the signs"], rows)


COMPOUND_NAMES = {
    "E2": "E2: keys and values of the residual − of the input, all four",
    "E6": "E6: slope of boosted − wider with depth",
    "gap": "boosted − wider in `{}`, less that in `{}`",
}


def family_table(report: Report) -> object:
    """Return every planned comparison with its p, Holm's adjusted p and the verdict, as
    a table of Markdown, the smallest p first."""
    adjusted, rows = planned_p(report), []
    for of, p in sorted(family(report).items(), key=lambda pair: pair[1]):
        if of in COMPOUND:
            name, decided = COMPOUND_NAMES[of[0]].format(*of[1:]), "open"
            if adjusted[of] < 0.05:
                predicted = COMPOUND[of](report).difference < 0
                decided = "**held**" if predicted else "**did not hold**"
        else:
            first, second, *names = of
            name = f"{first} − {second}, " + ", ".join(f"`{one}`" for one in names)
            decided = verdict(report, of, adjusted)
        corrected = (
            f"{adjusted[of]:.4f}" if adjusted[of] < 0.01 else f"{adjusted[of]:.3f}"
        )
        rows.append([name, f"{p:.2g}", corrected, decided])
    return markdown_table(["", "p", "corrected p", "verdict"], rows)
