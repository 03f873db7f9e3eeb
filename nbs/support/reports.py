"""What the pages on the comparison share: their tables, numbers and verdicts, from the records of the experiments.

Chapter 18 and the lab notebook show these; the landing page and chapter 21 quote them.
"""

import math
from collections.abc import Iterable
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import numpy as np
import torch

from gbattn.comparison import (
    Row,
    compare,
    holm,
    losses_by_rate,
    markdown_table,
    paired_interval,
    rates_at_edge,
    step_seconds,
    welch,
)
from gbattn.conventions import Record, colour_of, load_records, put_to_test, quote
from gbattn.experiments import Arm, Experiment
from gbattn.ground.arguments import require
from gbattn.ground.records import experiment_folder
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.records import Plan, records_of
from gbattn.lab.texts import load_text
from gbattn.language_model import LanguageModel

NOT_YET = "(not known yet)"


def quote_all(record: Record, format: str = "", **formats: str) -> None:
    """Quote all that a record has measured, in one format except for names that have
    another, and its settings as they are (`gbattn.conventions.quote`)."""
    for key in record.measured:
        quote(record, key, formats.get(key, format))
    for key in record.settings:
        quote(record, key)


def published(text: str) -> Record:
    """Return what the paper reports of a text, ``"wikitext"`` or ``"openwebtext"``."""
    name = f"sargolzaei2026-{text}"
    return next(r for r in load_records("reported") if r.experiment == name)


def diverged(row: Row) -> bool:
    """Return whether a pair of a comparison is lost to a run that diverged."""
    return row.pairs < row.n + row.diverged


def has_interval(row: Row | None) -> bool:
    """Return whether every planned pair is in and whole, and there are two or more."""
    return row is not None and row.low is not None and not diverged(row)


def percent(nats: float) -> float:
    """Return a difference of losses as one of perplexities, in percent."""
    return 100 * math.expm1(nats)


def in_percent(row: Row) -> str:
    """Return a difference in percent of perplexity, with its interval if it has one."""
    text = f"{percent(row.difference):+.1f}"
    if has_interval(row):
        low, high = f"{percent(row.low):+.1f}", f"{percent(row.high):+.1f}"
        text += f" ({low} to\N{NO-BREAK SPACE}{high})"
    return text


def signed(nats: float) -> str:
    """Return a difference of losses in percent of perplexity, such as −4.1."""
    return f"{percent(nats):+.1f}".replace("-", "\N{MINUS SIGN}")


def _mean_with_interval(mean: float, low: float, high: float, n: int) -> str:
    text = f"{signed(mean)}~% ({signed(low)} to~{signed(high)}, n~=~{n})"
    return text.replace("~", "\N{NO-BREAK SPACE}")


def in_short(row: Row) -> str:
    """Return a difference for a sentence, such as −4.1 % (−9.2 to +1.2, n = 5)."""
    if has_interval(row):
        return _mean_with_interval(row.difference, row.low, row.high, row.pairs)
    return f"{signed(row.difference)}\N{NO-BREAK SPACE}%"


def mean_in_short(differences: np.ndarray) -> str:
    """Return the mean of paired differences for a sentence, as `in_short` does."""
    interval = paired_interval(differences)
    return _mean_with_interval(differences.mean(), *interval, len(differences))


def ordering(row: Row | None) -> str:
    """Return what a paired difference, better minus worse, decides about an ordering:
    it ``holds``, is ``reversed`` or ``undecided``, or is ``not known yet``."""
    if row is None:
        return "not known yet"
    if not has_interval(row) or row.low <= 0 <= row.high:
        return "undecided"
    return "holds" if row.high < 0 else "reversed"


def minutes(records: Iterable[Record], arm: str) -> float:
    """Return the minutes that a run of an arm takes at the pace of `step_seconds`."""
    selected = [
        r
        for r in records
        if r.settings["arm"] == arm and not r.measured["diverged"]
    ]
    return step_seconds(selected) * selected[0].measured["steps"] / 60


def line_style(arm: str) -> dict:
    """Return colour, line and label of an arm of the main tables, for matplotlib."""
    lines = {
        "wider": "--",
        "wider_flops": ":",
        "wider_time": "-.",
        "boosted_input": "--",
        "twicing_last2": "--",
    }
    arms = (*EXPERIMENTS["mini"].arms, *EXPERIMENTS["mini-arms"].arms)
    of = next(a for a in arms if a.name == arm)
    return dict(color=colour_of(of.method), ls=lines.get(arm, "-"), label=of.label)


class Report:
    """What the records of the experiments say, for a page: each experiment is read
    once, and every comparison that the page puts into words or into a table is in
    ``drawn``, keyed by the two arms and the names of the experiments.

    An ordering is of two arms, the better one first, at the seeds that all given
    experiments plan; nothing is said about it until every planned pair is in.
    The name ``"a+b"`` stands for the experiments a and b together.

    Parameters
    ----------
    folder : Path, optional
        The folder of records; `gbattn.ground.records.results_folder` by default.
    experiments : dict, optional
        The experiments by their names; those of the book by default.
    """

    def __init__(self, folder: Path | None = None, experiments: dict | None = None):
        self.folder = folder
        self.experiments = EXPERIMENTS if experiments is None else experiments
        self.drawn: dict[tuple[str, ...], Row | None] = {}
        self._records: dict[str, list[Record]] = {}
        self._untuned: dict[str, set[str]] = {}

    def parts(self, name: str) -> list[Experiment]:
        """Return the experiments that stand together under a name."""
        return [self.experiments[part] for part in name.split("+")]

    def records(self, name: str) -> list[Record]:
        """Return the records of an experiment, as far as they are in."""
        if name not in self._records:
            parts = (records_of(one, self.folder) for one in self.parts(name))
            self._records[name] = list(chain(*parts))
        return self._records[name]

    def untuned(self, name: str) -> set[str]:
        """Return the arms of an experiment whose rate lies at the edge of its grid."""
        if name not in self._untuned:
            parts = (Plan(one, self.folder).untuned() for one in self.parts(name))
            self._untuned[name] = set().union(*parts)
        return self._untuned[name]

    def arms(self, name: str) -> dict[str, Arm]:
        """Return the arms of an experiment, by their names."""
        return {arm.name: arm for one in self.parts(name) for arm in one.arms}

    @cached_property
    def effects(self) -> dict[str, dict]:
        """What `measure_effects` measured of the stored models, by the id of the run."""
        found = load_records("worth-of-tokens", self.folder)
        return {record.settings["id"]: record.measured for record in found}

    # ---- What is in ----

    def state(self, *names: str) -> str:
        """Return how many runs of these experiments are in, for captions."""
        ready = sum(len(self.records(name)) for name in names)
        return f"{ready} of {sum(map(self.planned, names))} runs are in"

    def planned(self, name: str) -> int:
        """Return how many runs an experiment plans."""
        return sum(one.planned for one in self.parts(name))

    def complete(self, name: str) -> bool:
        """Return whether all runs of an experiment are in."""
        return len(self.records(name)) == self.planned(name)

    def edges(self, name: str) -> str:
        """Return which best rates of a sweep lie at the edge of its grid, in words."""
        if not self.complete(name):
            return "the sweep is not in yet"
        if arms := rates_at_edge(self.records(name)):
            return f"at the edge of the grid, so not yet found: {', '.join(arms)}"
        return "no best rate lies at the edge of the grid"

    def with_effects(self, arm: str, name: str) -> list[dict]:
        """Return what the runs of an arm measured, and `measure_effects` of their
        models."""
        found = (r for r in self.records(name) if r.settings["arm"] == arm)
        return [r.measured | self.effects.get(r.settings["id"], {}) for r in found]

    # ---- Two arms ----

    def at_shared_seeds(
        self, better: str, worse: str, *names: str
    ) -> tuple[list[Record], int]:
        """Return the records of two arms at the seeds that all these experiments plan,
        and how many there will be."""
        seeds = self.shared_seeds(*names)
        found = {
            (r.settings["arm"], r.settings["id"]): r
            for name in names
            for r in self.records(name)
            if r.settings["arm"] in (better, worse) and r.settings["seed"] in seeds
        }
        return list(found.values()), 2 * len(seeds)

    def shared_seeds(self, *names: str) -> set[int]:
        """Return the seeds that all these experiments plan."""
        seeds = lambda name: chain(*(one.seeds for one in self.parts(name)))
        return set.intersection(*(set(seeds(name)) for name in names))

    def paired(self, better: str, worse: str, *names: str) -> list[Record] | None:
        """Return the records of two arms at shared seeds, or None if one is missing."""
        found, planned = self.at_shared_seeds(better, worse, *names)
        return found if len(found) == planned else None

    def difference(
        self, better: str, worse: str, *names: str, confidence: float = 0.95
    ) -> Row | None:
        """Return the row of one arm against another, or None while a planned pair is
        missing."""
        found = self.paired(better, worse, *names)
        rows = (
            compare(found, reference=worse, confidence=confidence) if found else []
        )
        return next((row for row in rows if row.arm == better), None)

    def state_of(self, better: str, worse: str, *names: str) -> str:
        """Return how many of the runs that compare two arms are in."""
        found, planned = self.at_shared_seeds(better, worse, *names)
        return f"{len(found)} of {planned} runs are in"

    def p(self, better: str, worse: str, *names: str) -> float:
        """Return the p of Student's t for the pairs of two arms; 1 if nothing can be
        said of them yet."""
        from scipy.stats import ttest_rel

        row = self.difference(better, worse, *names)
        if not has_interval(row) or self.doubt(row, better, worse, *names):
            return 1.0
        return float(ttest_rel(*self.losses(better, worse, *names)).pvalue)

    def losses(self, better: str, worse: str, *names: str) -> tuple[list, list]:
        """Return the test losses of two arms, in the order of the seeds."""
        both = {better: [], worse: []}
        found = self.paired(better, worse, *names)
        for r in sorted(found, key=lambda r: r.settings["seed"]):
            both[r.settings["arm"]].append(r.measured["test_loss"])
        return tuple(both.values())

    def doubt(self, row: Row, better: str, worse: str, *names: str) -> str | None:
        """Return why a difference decides nothing, or None."""
        if diverged(row):
            return "a run diverged"
        edge = set().union(*map(self.untuned, names))
        if arms := edge & {better, worse}:
            return f"the learning rate of {' and '.join(sorted(arms))} lies at the edge of its grid"
        return None

    def draw(self, better: str, worse: str, *names: str) -> Row | None:
        """Return the `difference`, and note that the page has it."""
        row = self.difference(better, worse, *names)
        self.drawn[better, worse, *names] = row
        return row

    def in_words(
        self, first: str, second: str, better: str, worse: str, *names: str
    ) -> str:
        """Return one clause on a paired difference, whatever the outcome; the first
        two arguments are what it calls the arms."""
        row = self.draw(better, worse, *names)
        if row is None:
            return f"how {first} compares with {second} is not known yet: not every planned pair is in"
        if why := self.doubt(row, better, worse, *names):
            return f"how {first} compares with {second} is undecided: {why}"
        size = f"{abs(percent(row.difference)):.1f} %"
        interval = f"{percent(row.low):+.1f} to {percent(row.high):+.1f} %, {row.pairs} pairs"
        direction = "lower" if row.difference < 0 else "higher"
        verdict = {
            "holds": f"{first} wins",
            "reversed": f"{second} wins",
            "undecided": "undecided",
        }[ordering(row)]
        claim = f"{first} has a perplexity {size} {direction} than {second}"
        return f"{claim} ({interval}): {verdict}"

    def judge(self, claim: str, better: str, worse: str, *names: str) -> None:
        """Put an ordering to the test, or print why that is not possible yet."""
        row = self.draw(better, worse, *names)
        if row is None:
            state = self.state_of(better, worse, *names)
            print(f"{claim}\n   not known yet: {state}\n")
        elif why := self.doubt(row, better, worse, *names):
            print(f"{claim}\n   undecided: {why}\n")
        else:
            put_to_test(
                prediction=claim,
                statistic=f"mean paired difference in test loss, nats, {row.pairs} pairs",
                threshold="95 % interval below 0 (reversed: above 0)",
                observed=f"{row.difference:+.4f}  [{row.low:+.4f}, {row.high:+.4f}]",
                holds={"holds": True, "undecided": None, "reversed": False}[
                    ordering(row)
                ],
            )

    def gap(self, name: str) -> tuple[float, float, int]:
        """Return mean, standard deviation and number of the gaps, boosted minus wider,
        of an experiment."""
        found = np.subtract(*self.losses("boosted_residual", "wider", name))
        return float(found.mean()), float(found.std(ddof=1)), len(found)

    def compare_gaps(self, claim: str, smaller: str, larger: str) -> None:
        """Put to the test that the gap, boosted minus wider, of one experiment is
        smaller than that of another, or print why that is not possible yet."""
        of = "boosted_residual", "wider"
        for name in (smaller, larger):
            row = self.difference(*of, name)
            if row is None:
                print(f"{claim}\n   not known yet: `{name}`, {self.state(name)}\n")
                return
            if why := self.doubt(row, *of, name):
                print(f"{claim}\n   undecided: `{name}`, {why}\n")
                return
        a, b = self.gap(smaller), self.gap(larger)
        found = welch(*a, *b)
        put_to_test(
            prediction=claim,
            statistic="difference of the two mean paired differences in test loss, nats; "
            "Welch's t and its p",
            threshold="below 0 with p below 0.05 (fails: above 0 with p below 0.05)",
            observed=f"{a[0] - b[0]:+.4f}; t = {found.t:.2f}, p = {found.p:.3f}",
            holds=found.t < 0 if found.p < 0.05 else None,
        )

    # ---- One arm ----

    def of_arm(self, arm: str, name: str) -> list[float]:
        """Return the test losses of all runs of an arm that are in, and did not
        diverge."""
        records = [r for r in self.records(name) if r.settings["arm"] == arm]
        return [r.measured["test_loss"] for r in records if not r.measured["diverged"]]

    def spread(self, arm: str, name: str) -> float:
        """Return the standard deviation of the test losses of an arm, in percent."""
        return 100 * stdev(self.of_arm(arm, name))

    def gain(
        self, arm: str, earlier: str, later: str
    ) -> tuple[float, float, float]:
        """Return what an arm gains from one experiment to another in nats, paired by
        seed, with its 95 % interval."""
        of_seeds = [
            {
                r.settings["seed"]: r.measured["test_loss"]
                for r in self.records(name)
                if r.settings["arm"] == arm
            }
            for name in (earlier, later)
        ]
        apart = [of_seeds[0][seed] - of_seeds[1][seed] for seed in of_seeds[1]]
        return fmean(apart), *paired_interval(apart)

    def before(self, record: Record) -> float | None:
        """Return by how many nats the loss of a run rises when the token before the
        last is exchanged, if its model was stored."""
        stored = self.effects.get(record.settings["id"])
        return None if stored is None else stored["worth"][1]

    def effects_of(self, name: str, *arms: str) -> list[dict]:
        """Return the `effects` of the stored models of an experiment; all arms by
        default."""
        found = [
            r
            for r in self.records(name)
            if not arms or r.settings["arm"] in arms
            if r.settings["id"] in self.effects
        ]
        return [self.effects[r.settings["id"]] for r in found]

    # ---- Tables and figures ----

    def table(self, *names: str, against: str = "standard") -> object:
        """Return a comparison as a table of Markdown, at the seeds that all these
        experiments have."""
        seeds = self.shared_seeds(*names)
        records = [
            r
            for name in names
            for r in self.records(name)
            if r.settings["seed"] in seeds
        ]
        rows, ran = [], {record.settings["arm"] for record in records}
        for row in compare(records, reference=against) if against in ran else ():
            home = [n for n in names if row.arm in self.arms(n)]
            pair = self.difference(
                row.arm, against, *dict.fromkeys([names[0], *home])
            )
            edge = row.arm in set().union(*map(self.untuned, home))
            rows.append(
                [
                    row.label + " *" * edge,
                    f"{row.n} of {row.n + row.diverged}" if row.diverged else row.n,
                    f"{math.exp(row.mean):.2f}" if row.n else "diverged",
                    f"{100 * row.sd:.1f}" if row.n > 1 else "",
                    in_percent(row) if has_interval(pair) else "",
                    f"{row.parameters / 1e3:,.0f}",
                    f"{row.training_flops / 1e12:.1f}"
                    if row.training_flops
                    else "",
                    f"{minutes(records, row.arm):.1f}" if row.n else "",
                ]
            )
        missing = [
            arm
            for name in names
            for arm in self.arms(name).values()
            if arm.name not in ran
        ]
        rows += [[arm.label, 0, *[""] * 6] for arm in missing]
        header = ["", "n", "perplexity", "sd, %"]
        header += [f"against {against.replace('_', ' ')}, %"]
        return markdown_table([*header, "thousand param.", "TFLOPs", "minutes"], rows)

    def sweep_table(self, name: str) -> object:
        """Return the validation losses of a sweep, means over its seeds, as a table of
        Markdown, a row for each arm, the lowest in bold."""
        found = losses_by_rate(self.records(name))
        rows, rates = [], sorted(set().union(*found.values()))
        for arm in self.arms(name).values():
            selected = found.get(arm.name, {})
            cells = [
                f"{selected[rate]:.3f}" if rate in selected else ""
                for rate in rates
            ]
            if selected:
                least = rates.index(min(selected, key=selected.get))
                cells[least] = f"**{cells[least]}**"
            rows.append([arm.label, *cells])
        title = f"`{name.split('+')[0]}`"
        return markdown_table([title, *(f"{rate:g}" for rate in rates)], rows)


# The experiments whose models were stored, as far as they were.
WITH_MODELS = (
    "mini",
    "mini-common",
    "mini-high",
    "mini-warm",
    "mini-warm-again",
    "mini-long",
    "stability",
    "mini-long-time",
    "mini-dropout",
    "mini-again",
    "mini-rotary",
    "mini-gutenberg",
    "one-pass-sweep",
    "one-pass",
    "one-pass-common",
    "one-pass-warm",
    "ladder-48-dropout",
    "ladder-96-again",
)


# Places before the last token that is read, in groups.
BACK = ((0,), (1,), (2,), (3,), range(4, 8), range(8, 16), range(16, 47))


def increase_by_token(model: LanguageModel, windows: torch.Tensor) -> dict:
    """Return the loss in nats of the last token of windows (n, 49), and by how much it
    rises when the tokens at each group of places in `BACK`, counted back from the last
    one read, are exchanged for those of another window."""
    x, y = windows[:, :-1], windows[:, -1]

    def loss(back=()):
        mixed = x.clone()
        for place in back:
            mixed[:, -1 - place] = x[:, -1 - place].roll(1 + place)
        with torch.no_grad():
            logits = model(mixed)[:, -1]
        return torch.nn.functional.cross_entropy(logits, y).item()

    whole = loss()
    return {"loss": whole, "worth": [loss(back) - whole for back in BACK]}


def first_block(model: LanguageModel, windows: torch.Tensor) -> dict:
    """Return what the first block does: for each round of its attention, the largest
    mean weight of any head on the query's own token and on the one before; and by how
    many nats the loss of all tokens rises without the attention, and without the
    feed-forward part."""
    some = windows.ndim == 2 and len(windows) > 0 and windows.shape[1] > 2
    got, want = f"shape {tuple(windows.shape)}", "one or more, of three tokens or more"
    require(some, "windows", got, want)
    some = windows.ndim == 2 and len(windows) > 0 and windows.shape[1] > 2
    got, want = f"shape {tuple(windows.shape)}", "one or more, of three tokens or more"
    require(some, "windows", got, want)
    x, y = windows[:, :-1], windows[:, 1:].flatten()
    block, inputs_of = model.blocks[0], []
    loss = lambda: torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y)
    without = []
    with torch.no_grad():
        keep = lambda module, inputs: inputs_of.append(inputs[0])
        hook = block.attention.register_forward_pre_hook(keep)
        whole = loss()
        hook.remove()
        rounds = block.attention.explain(inputs_of[0], causal=True).rounds
        silence = lambda module, inputs, output: torch.zeros_like(output)
        for part in (block.attention, block.ffn):
            hook = part.register_forward_hook(silence)
            without.append((loss() - whole).item())
            hook.remove()
    place = torch.arange(1, x.shape[1])
    on = lambda round, back: (
        round.weights[..., place, place - back].mean((0, 2)).max().item()
    )
    return {
        "own": [on(round, 0) for round in rounds],
        "before": [on(round, 1) for round in rounds],
        "without_attention": without[0],
        "without_ffn": without[1],
    }


def effects_of(model: LanguageModel, valid: np.ndarray) -> dict:
    """Return the effects of tokens, on 2,048 windows of a text, and of the parts of the
    first block, on 128 of these, on the loss of a model."""
    starts = np.random.RandomState(0).permutation(len(valid) - 48)[:2048]
    windows = valid[starts[:, None] + np.arange(49)].astype(np.int64)
    windows = torch.from_numpy(windows)
    return increase_by_token(model, windows) | first_block(model, windows[:128])


def measure_effects(experiment: Experiment, runs: Path) -> None:
    """Record the `effects_of` each model of an experiment that is stored in a folder of
    runs."""
    for one in Plan(experiment).runs:
        done = experiment_folder("worth-of-tokens") / f"{one.id}.json"
        if done.is_file() or not (runs / one.id / "model").is_dir():
            continue
        model = LanguageModel.from_pretrained(runs / one.id / "model").eval()
        found = effects_of(model, load_text(one.corpus).valid)
        about = dict(id=one.id, arm=one.arm.name, seed=one.seed)
        Record("worth-of-tokens", about, found).save(one.id)


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
    setting("short warm-up, 0.004 for all", "mini-common", time="mini-arms", **_HIDE),
    setting("long warm-up, each at its rate", "mini-long", _FOUR, time="mini-long-time"),
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
    setting("rotary positions, 0.008, long warm-up", "shift-rotary-common", **_HIDE),
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
        "stand": ("none", *"one two three four five six seven eight nine".split())[stand]
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


def stored(report: Report) -> list[tuple[str, Record]]:
    """Return the runs whose models were measured, but for sweeps and rotary positions,
    each once and with its experiment."""
    found = {}
    for name, of in report.experiments.items():
        if of.rates_from and of.model.get("positions", "learned") == "learned":
            for r in report.records(name):
                if r.settings["id"] in report.effects:
                    found.setdefault(r.settings["id"], (name, r))
    return list(found.values())


def apart_in_arm(report: Report) -> dict[str, np.ndarray]:
    """Return, for each stored run, boosted or other, by how much its loss increase when
    the previous token is replaced, and its test loss, lie above the mean of its arm in
    its experiment."""
    groups: dict[tuple, list] = {}
    for name, r in stored(report):
        both = report.before(r), r.measured["test_loss"]
        groups.setdefault((name, r.settings["arm"]), []).append(both)
    found = {"boosted": [], "others": []}
    for (_, arm), of in groups.items():
        key = "boosted" if arm == BOOSTED else "others"
        found[key] += list(np.array(of) - np.mean(of, axis=0))
    return {key: np.array(of) for key, of in found.items()}


def why_runs_differ(report: Report) -> Record:
    """Return the correlation of these two excesses, and how many runs it has."""
    found = {}
    for key, of in apart_in_arm(report).items():
        found |= {f"{key}_runs": len(of), f"{key}_spread": of[:, 0].std(ddof=1)}
        found |= {f"{key}_r": float(np.corrcoef(of.T)[0, 1])}
    return Record("why-runs-differ", {}, found)


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
