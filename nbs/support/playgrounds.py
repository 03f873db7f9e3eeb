"""The book's figures to play with: sliders, a picture, and a sentence that says its numbers, in a page's own script.

Each figure computes in the reader's browser, with no network; the tests hold what it computes against the library.
"""

import html
import json
from pathlib import Path

import numpy as np
import torch
from IPython.display import HTML

from gbattn.conventions import colour_of

FOLDER = Path(__file__).parent / "play"
STYLE = """
.play {max-width: 40rem; color: var(--pst-color-text-base, #222)}
.play label {display: grid; grid-template-columns: 8.5rem 1fr 3.5rem; gap: .6rem; align-items: center}
.play label:has([type=checkbox]) {grid-template-columns: auto 1fr}
.play label:has(select) {grid-template-columns: 8.5rem 1fr}
.play input[type=range], .play select {width: 100%; min-width: 0}
.play svg {width: 100%; height: auto; user-select: none}
.play text {font: 15px sans-serif}
.play p {margin: .2rem 0; min-height: 3em; font-variant-numeric: tabular-nums}
.play .key {display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: .9em}
.play button {padding: .2rem .8rem}
"""


# The settings of chapter 18 in plain words, those of its table first, and the baselines in the order of its rows.
SETTING_NAMES = {
    "long warm-up, 0.008: all ten seeds": "no shift",
    "four times the text and the updates": "no shift, long run",
    "long warm-up, every arm shifted": "shift in both",
    "four times both, every arm shifted": "shift in both, long run",
    "width 64, short warm-up": "no shift, short warm-up",
    "width 96: twelve seeds, form or depth": "no shift, width 96",
    "short warm-up, 0.004 for all": "short warm-up, one learning rate for all",
    "long warm-up, each at its rate": "each model at its own learning rate",
    "long warm-up, 0.008: five new seeds": "no shift, the five later pairs alone",
    "attention dropout: three seeds": "attention dropout, three pairs",
    "attention dropout: five new seeds": "attention dropout, five later pairs",
    "rotary positions, 0.008, long warm-up": "rotary positions, one learning rate for all",
    "rotary positions, each at its rate": "rotary positions, each model at its own rate",
    "gutenberg-en, short warm-up": "books in place of Wikipedia, short warm-up",
    "gutenberg-en, long warm-up, 0.008": "books in place of Wikipedia",
    "one pass, width 96, short warm-up": "text read once, width 96, short warm-up",
    "one pass, 0.004 for all": "text read once, one learning rate for all",
    "one pass, 0.004, long warm-up": "text read once, long warm-up",
    "one pass, 0.008, long warm-up": "text read once, long warm-up, higher rate",
    "width 96: three seeds": "width 96, three pairs",
    "width 96: four new seeds": "width 96, four later pairs",
    "width 96, rotary": "width 96, rotary positions",
    "width 96, rotary, each at its rate": "width 96, rotary positions, each at its own rate",
    "gutenberg-en, shifted": "books in place of Wikipedia, shift in both",
    "one pass, shifted": "text read once, shift in both",
    "rotary positions, shifted": "rotary positions, shift in both",
    "width 96, shifted": "width 96, shift in both",
}
BASELINE_NAMES = {
    "standard": "standard",
    "twicing": "twicing",
    "stack": "stack",
    "parameters": "wider, equal parameters",
    "flops": "wider, equal FLOPs",
    "time": "wider, equal time",
}


def settings_to_play() -> dict:
    """Return the settings of chapter 18 by plain names, those of its table first."""
    from support.verdicts import SETTINGS

    labels = {setting.label: setting for setting in SETTINGS}
    ordered = dict.fromkeys([*SETTING_NAMES, *labels])
    return {SETTING_NAMES.get(label, label): labels[label] for label in ordered}


def _choices() -> list[tuple]:
    """The settings and the baselines to choose from."""
    return [
        ("setting", "setting", tuple(settings_to_play())),
        ("baseline", "minus", tuple(BASELINE_NAMES.values())),
    ]


# name: what a screen reader says of the picture, its height, and the inputs: name and label, then least, most, step and
# start of a slider, whether a box is checked, or what there is to choose
FIGURES = {
    "fit": (
        "Three points, the line through the origin fitted to them, dashed residuals, and the fit after a second round.",
        260,
        [
            (f"y{i}", f"point {i}", -2, 6, 0.05, start)
            for i, start in enumerate((2, 3, 5), 1)
        ]
        + [("averages", "Gaussian averages of bandwidth 1 instead of least squares", False)],
    ),
    "smooth": (
        "Noisy points around a wave, the wave, and its estimate by averages or local lines.",
        250,
        [
            ("bandwidth", "bandwidth", 0.02, 0.4, 0.005, 0.06),
            ("rounds", "rounds", 1, 8, 1, 1),
            ("noise", "noise", 0, 0.6, 0.02, 0.3),
            ("lines", "local lines instead of averages", False),
        ],
    ),
    "retrieve": (
        "A state among five stored patterns on a circle, and its path when it is averaged again and again.",
        290,
        [
            ("x", "state, across", -1.2, 1.2, 0.05, 0.4),
            ("y", "state, up", -1.2, 1.2, 0.05, 0.25),
            ("beta", "β", -0.5, 1.5, 0.05, 0.6),
            ("steps", "steps", 1, 20, 1, 5),
        ],
    ),
    "boost": (
        "On the left noisy points around a wave with the boosted estimate; on the right the risk against the rounds.",
        245,
        [
            ("rounds", "rounds", 0, 49, 1, 0),
            ("shrinkage", "shrinkage ν", 0.05, 1, 0.05, 1),
            ("bandwidth", "bandwidth", 0.04, 0.3, 0.005, 0.25),
            ("noise", "noise", 0, 1, 0.05, 0.3),
        ],
    ),
    "depth": (
        "The Jacobian norm against depth on a logarithmic axis, a curve for each of LayerNorm, DyT and Derf.",
        250,
        [("alpha", "slope α", 0, 7, 1, 5), ("depth", "depth", 2, 64, 2, 64)],
    ),
    "pairs": (
        "Paired runs of two models as dots on an axis in per cent, their mean and its interval.",
        140,
        _choices,
    ),
    "second": (
        "A token x among five others, what attention makes of it, F, the residual x − F, and a gated second round.",
        430,
        [
            ("x", "x, across", -2, 2, 0.05, 1.2),
            ("y", "x, up", -2, 2, 0.05, -1),
            ("sharp", "sharpness of the first round", 0, 4, 0.1, 0.1),
            ("sharper", "sharpness of the second round", 0, 30, 0.5, 12),
            ("gate", "gate", 0, 1, 0.05, 0.8),
            ("sign", "read x + F, values and output negated", False),
        ],
    ),
    "collapse": (
        "The common overlap of tokens against time under random heads, and dashed the same for uniform attention.",
        250,
        [
            ("tokens", "tokens", 0, 5, 1, 4),
            ("size", "size of scores", 0, 6, 1, 6),
            ("dims", "dimensions", 0, 4, 1, 3),
        ],
    ),
}
# name: what its marks mean, each with its colour
KEYS = {
    "fit": [
        ("●", "data", "points"),
        ("━", "first", "fit"),
        ("┅", "wrong", "residuals"),
        ("┅", "second", "after a second round"),
    ],
    "smooth": [
        ("●", "data", "noisy values"),
        ("┅", "data", "truth"),
        ("━", "second", "estimate"),
    ],
    "boost": [
        ("●", "data", "noisy values"),
        ("┅", "data", "truth"),
        ("━", "second", "estimate"),
        ("━", "first", "risk"),
        ("●", "second", "risk now"),
    ],
    "second": [
        ("●", "data", "tokens, the large one x"),
        ("━", "first", "attention of x, first round (wider: more)"),
        ("●", "first", "F, its estimate"),
        ("┅", "wrong", "residual, from F to x"),
        ("○", "second", "attention of x, second round (larger: more)"),
        ("━", "second", "gated correction"),
    ],
}
ALPHAS = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.4, 2.0]
DEPTHS = [*range(0, 65, 2)]


def _growth() -> dict:
    """What the recursion of chapter 12 says of each normaliser at each depth."""
    # not above, where a page's own layers would meet the library's in the registry
    from gbattn.signal import recursion

    norms = {"layernorm": recursion(64).forward_J[DEPTHS]}
    for name in ("dyt", "derf"):
        norms[name] = (
            recursion(64, normalizer=name, alpha=np.array(ALPHAS))
            .forward_J[DEPTHS]
            .T
        )
    rounded = {
        name: [[float(f"{J:.4g}") for J in row] for row in np.atleast_2d(found)]
        for name, found in norms.items()
    }
    return {
        "alphas": ALPHAS,
        "depths": DEPTHS,
        "norms": rounded | {"layernorm": rounded["layernorm"][0]},
    }


def _pairs() -> dict:
    """The paired differences of chapter 18, boosted attention minus each baseline, and Student's quantiles."""
    from scipy.stats import t

    from support.reports import Report

    report, settings = Report(), []
    for label, setting in settings_to_play().items():
        pairs = {}
        for name in setting.against:
            if report.paired(*setting.of(name)):
                better, worse = map(np.array, report.losses(*setting.of(name)))
                pairs[name] = (better - worse).round(6).tolist()
        settings.append({"label": label, "pairs": pairs})
    quantiles = [float(t.ppf(0.975, n - 1)) for n in range(2, 31)]
    return {
        "settings": settings,
        "baselines": list(BASELINE_NAMES),
        "names": list(BASELINE_NAMES.values()),
        "quantiles": quantiles,
    }


TOKENS, SIZES, DIMS = (
    [2, 4, 8, 16, 32, 64],
    [0, 1, 2, 5, 10, 20, 50],
    [16, 32, 64, 256, 1024],
)
OVERLAPS = [0.0, 0.02, 0.05, 0.1, *(k / 10 for k in range(2, 10)), 0.95, 1.0]


def _collapse() -> dict:
    """What random heads have at each overlap γ: the means of Σₖ Aᵢₖ² and Σₖ Aᵢₖ Aⱼₖ, for
    d → ∞, where scores are normal with the covariance RᵢᵢʹRⱼⱼʹ, up to offsets of rows."""
    rng = torch.Generator().manual_seed(0)
    options = dict(generator=rng, dtype=torch.float64)
    squares, products = [], []
    for n in TOKENS:
        draws = 4 + 20_000 // n**2
        Z = torch.randn(draws, n, n, **options)
        shared = torch.randn(draws, 1, n, **options)
        rows = [], []
        for size in SIZES:
            found = [], []
            for gamma in OVERLAPS:
                scores = (1 - gamma) * Z + (gamma * (1 - gamma)) ** 0.5 * shared
                A = (size * scores).softmax(-1)
                f = A.square().sum((-2, -1)).mean() / n
                c = (A.sum(-2).square().sum(-1).mean() / n - f) / (n - 1)
                for row, value in zip(found, (f, c)):
                    row.append(float(f"{value:.4g}"))
            for table, row in zip(rows, found):
                table.append(row)
        squares.append(rows[0])
        products.append(rows[1])
    told = dict(tokens=TOKENS, sizes=SIZES, dims=DIMS, grid=OVERLAPS)
    return told | dict(squares=squares, products=products)


# what a figure draws and does not compute
DATA = {"depth": _growth, "pairs": _pairs, "collapse": _collapse}
GIVEN = {
    "first": colour_of("softmax attention"),
    "second": colour_of("boosted attention"),
    "wrong": "#8c8c8c",
    "draws": torch.randn(
        25, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).tolist(),
}


def _row(name, label, *slider) -> str:
    """One input with its label."""
    if isinstance(slider[0], tuple):
        choices = "".join(
            f'<option value="{i}">{html.escape(one)}</option>'
            for i, one in enumerate(*slider)
        )
        return f'<label>{html.escape(label)}<select name="{name}">{choices}</select></label>'
    if len(slider) == 1:
        checked = " checked" if slider[0] else ""
        return f'<label><input type="checkbox" name="{name}"{checked}>{html.escape(label)}</label>'
    least, most, step, start = slider
    limits = f'min="{least}" max="{most}" step="{step}" value="{start}"'
    return f'<label>{html.escape(label)}<input type="range" name="{name}" {limits}><output></output></label>'


def play(name: str) -> HTML:
    """Return a figure to play with, one of `FIGURES`."""
    alt, height, inputs = FIGURES[name]
    rows = "".join(_row(*one) for one in (inputs() if callable(inputs) else inputs))
    told = GIVEN | ({"data": DATA[name]()} if name in DATA else {})
    key = "".join(
        f'<span><b style="color: {told.get(colour, "inherit")}">{mark}</b> {words}</span>'
        for mark, colour, words in KEYS.get(name, ())
    )
    common, own = ((FOLDER / f"{part}.js").read_text() for part in ("play", name))
    return HTML(
        f'<div class="play" id="play-{name}" role="group" aria-label="{html.escape(alt)}"><style>{STYLE}</style>'
        f'<svg viewBox="0 0 600 {height}" role="img" aria-label="{html.escape(alt)}"></svg>'
        f'<div class="key">{key}</div><p aria-live="polite"></p>{rows}<button type="button">start again</button>\n'
        f"<script>{{\n{common}\nplay(document.currentScript.parentElement, (\n{own.rstrip().rstrip(';')}\n)"
        f"({json.dumps(told)}));\n}}</script></div>"
    )
