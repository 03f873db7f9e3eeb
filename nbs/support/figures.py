"""What the figures of chapters 17a and 18 and of the lab notebook share."""

from collections.abc import Mapping
from html import escape

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML

from gbattn.comparison import Row
from gbattn.conventions import Record, colour_of
from gbattn.lab.catalogue import EXPERIMENTS
from support.reports import Report, percent, signed
from support.verdicts import HEADLINE


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


def interval_bars(groups: Mapping[str, Mapping[str, tuple[Row, str, bool]]]) -> None:
    """Draw changes of perplexity as bars from zero with their 95 % intervals, words above each. A group has a title;
    a row has a label, a paired difference, the method of its colour, and whether it was planned (filled) or not."""
    place, spaces = 0.0, 1.08 * sum(map(len, groups.values())) + 0.75 * len(groups)
    fig, ax = plt.subplots(figsize=(5.35, 0.3 + 0.53 * spaces), layout="none")
    fig.subplots_adjust(0.01, 0.34 / fig.get_figheight(), 0.99, 0.99)
    for title, rows in groups.items():
        ax.text(-30, place, title, va="center", color="#555555", fontsize=10.5)
        for label, (row, method, planned) in rows.items():
            hue, ends = colour_of(method), (percent(row.low), percent(row.high))
            ax.text(-30, place + 0.62, label, va="center", fontsize=12)
            told = f"{signed(row.difference)} %"
            ax.text(13, place + 0.62, told, va="center", ha="right", fontsize=12)
            place += 1.08
            bar, at = dict(color=hue, solid_capstyle="butt"), percent(row.difference)
            ax.plot([0, at], [place, place], lw=9, alpha=0.3, **bar)
            ax.plot(ends, [place, place], lw=3, **bar)
            face = hue if planned else "white"
            ax.plot(at, place, "o", color=hue, mfc=face, ms=8, mew=2)
        place += 0.75
    ax.axvline(0, color="#6e6e6e", lw=1, zorder=0)
    ax.set(xlim=(-30.3, 13.3), ylim=(place - 0.35, -0.35), yticks=())
    ax.set_xticks((-20, -10, 0, 10), ("−20 %", "−10 %", "0", "+10 %"))
    ax.spines["left"].set_visible(False)


def headline_bars(
    rows: Mapping[str, Row], groups: Mapping[str, Mapping[str, str]]
) -> None:
    """Draw `interval_bars` of rows of `HEADLINE`; a group gives each of its labels the name of a row."""
    told = lambda name: (rows[name], HEADLINE[name].method, HEADLINE[name].planned)
    interval_bars(
        {
            title: {label: told(name) for label, name in labels.items()}
            for title, labels in groups.items()
        }
    )


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


GREEN, ORANGE = "0, 158, 115", "213, 94, 0"  # of Okabe and Ito, as in the figures


def shaded_text(
    tokens: list[str], gains: dict[str, np.ndarray], label: str
) -> HTML:
    """Return a text once for each of several changes, its tokens green and underlined where a change gains, orange
    and dotted where it loses: the stronger, the more, from a tenth of a nat to two."""
    parts = []
    for title, values in gains.items():
        spans = []
        for token, gain in zip(tokens, values, strict=True):
            text = escape(token).replace("\n", " ")
            strength = min(abs(gain) / 2, 1)
            if strength > 0.05:
                colour, line = (GREEN, "solid") if gain > 0 else (ORANGE, "dotted")
                style = f"background: rgba({colour}, {strength / 2:.2f}); border-bottom: 2px {line} rgb({colour})"
                text = f"<span style='{style}' title='{-gain:+.2f} nats'>{text}</span>"
            spans.append(text)
        parts.append(f"<p><strong>{escape(title)}</strong></p><p class='shaded'>{''.join(spans)}</p>")
    key = (
        f"<p class='key'>"
        f"<span style='background: rgba({GREEN}, .5); border-bottom: 2px solid rgb({GREEN})'>lower</span> "
        f"<span style='background: rgba({ORANGE}, .5); border-bottom: 2px dotted rgb({ORANGE})'>higher</span></p>"
    )
    style = "<style>.shaded {line-height: 1.9; white-space: pre-wrap}</style>"
    return HTML(f"{style}<figure><figcaption>{escape(label)}</figcaption>{key}{''.join(parts)}</figure>")
