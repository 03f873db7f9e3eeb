"""What the figures of chapter 18 and of the lab notebook share."""

import numpy as np

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
