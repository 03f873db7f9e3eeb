"""What the figures of chapters 17a and 18 and of the lab notebook share."""

from html import escape

import numpy as np
from IPython.display import HTML

from gbattn.conventions import Record, colour_of
from gbattn.lab.catalogue import EXPERIMENTS
from support.reports import Report


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
