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
.play {max-width: 40rem; margin-inline: auto; color: var(--pst-color-text-base, #222)}
.play label {display: grid; grid-template-columns: 9.5rem 1fr 3.5rem; gap: .6rem; align-items: center}
.play label:has([type=checkbox]) {grid-template-columns: auto 1fr}
.play label:has(select, [type=text]) {grid-template-columns: 9.5rem 1fr}
.play [type=text] {width: 9rem; font: inherit}
.play input[type=range], .play select {width: 100%; min-width: 0}
.play svg {width: 100%; height: auto; user-select: none}
.play text {font: 15px sans-serif}
.play p {margin: .2rem 0; min-height: 3em; font-variant-numeric: tabular-nums}
.play .key {display: flex; flex-wrap: wrap; gap: 0 1.2rem; font-size: .9em}
.play .steps {display: flex; flex-wrap: wrap; gap: .5rem; align-items: center; margin: .4rem 0 .6rem}
.play button {padding: .2rem .7rem; border: 1px solid var(--pst-color-border, #999); border-radius: .4rem;
  background: var(--pst-color-surface, #eee); color: inherit; font-size: .9em}
.play button:hover {border-color: var(--pst-color-link, #06c)}
.play [data-drag] {stroke: transparent; stroke-width: 26px}
@media (pointer: coarse), (max-width: 576px) {
  .play :is(button, select, input[type=range], [type=text]), .play label:has([type=checkbox]) {min-height: 44px}
  .play [type=checkbox] {width: 24px; height: 24px}
}
@media (max-width: 576px) {
  .play svg {overflow: visible}
  .play text {font-size: 20px}
  .play [data-drag] {r: 20.5px; stroke-width: 34px}
  .play label {grid-template-columns: 7.5rem 1fr 3.2rem}
  .play label:has(select, [type=text]) {grid-template-columns: 5rem 1fr}
}
"""


# What chapter 18 compares: the model, what the sentence says of it and a baseline, and its name where it is better.
COMPARED = {
    "standard with the shift": (
        "Standard attention with the shift minus {baseline} without it",
        "the shift",
    ),
    "boosted, no shift": (
        "Boosted attention minus {baseline}, no shift",
        "boosted attention",
    ),
    "boosted, shift in both": (
        "Boosted attention minus {baseline}, shift in both",
        "boosted attention",
    ),
}


def _for_both(*names: str) -> dict[str, tuple[str, ...]]:
    """The same experiments for both baselines."""
    return dict.fromkeys(("standard", "boosted"), names)


# Settings in plain words, those of the tables of chapter 18 first. Of each: the experiments that compare standard
# attention with the shift with models without it, and the settings of the lab notebook's table, which has more of them,
# that compare boosted attention: without the shift, and with the shift in both.
SETTING_NAMES = {
    "ordinary run": (
        {
            "standard": ("shift", "mini-warm+shift-plain"),
            "boosted": ("shift", "mini-warm+mini-warm-again"),
        },
        "long warm-up, 0.008: all ten seeds",
        "long warm-up, every arm shifted",
    ),
    "ordinary run, ten new seeds": (
        _for_both("shift-new", "shift-new-plain"),
        None,
        None,
    ),
    "long run": (
        {"boosted": ("shift-length", "length")},
        "four times the text and the updates",
        "four times both, every arm shifted",
    ),
    "short warm-up": ({}, "width 64, short warm-up", None),
    "width 96": (
        {
            "standard": ("shift-96", "ladder-96+shift-96-plain"),
            "boosted": ("shift-96", "ladder-96+ladder-96-again"),
        },
        "width 96: twelve seeds, form or depth",
        "width 96, shifted",
    ),
    "rotary positions": (
        _for_both("shift-rotary"),
        "rotary positions, each at its rate",
        "rotary positions, shifted",
    ),
    "rotary positions, width 96": ({}, "width 96, rotary, each at its rate", None),
    "books in place of Wikipedia": (
        _for_both("shift-gutenberg", "shift-gutenberg-plain"),
        "gutenberg-en, long warm-up, 0.008",
        "gutenberg-en, shifted",
    ),
    "text read once, width 96": (
        _for_both("shift-one-pass"),
        "one pass, 0.008, long warm-up",
        "one pass, shifted",
    ),
}
BASELINE_NAMES = {
    "standard": "standard",
    "boosted": "boosted attention",
    "twicing": "twicing",
    "stack": "stack",
    "parameters": "wider, equal parameters",
    "flops": "wider, equal FLOPs",
    "time": "wider, equal time",
}


def pairs_to_play() -> list[dict[str, dict[str, tuple]]]:
    """Return for each model of `COMPARED`, by setting and baseline, what `Report.difference` takes."""
    from support.verdicts import BOOSTED, SETTINGS

    arms = {"standard": "standard", "boosted": BOOSTED}
    rows = {setting.label: setting for setting in SETTINGS}
    shift, *others = ({} for _ in COMPARED)
    for name, (experiments, *labels) in SETTING_NAMES.items():
        shift[name] = {
            baseline: ("standard_shift", arms[baseline], *names)
            for baseline, names in experiments.items()
        }
        for found, label in zip(others, labels):
            row = rows.get(label)
            found[name] = {key: row.of(key) for key in row.against} if row else {}
    return [shift, *others]


# name: what a screen reader says of the picture, its height, and the inputs: name and label, then least, most, step and
# start of a slider, whether a box is checked, a word and the most letters that it may have, or what there is to choose
FIGURES = {
    "slope": (
        "Three tokens with values, what one round of averages returns, and what more rounds return.",
        252,
        [
            ("a", "token 1", -0.5, 2.5, 0.05, 0),
            ("b", "token 2", -0.5, 2.5, 0.05, 1),
            ("c", "token 3", -0.5, 2.5, 0.05, 2),
            ("bandwidth", "bandwidth", 0.3, 3, 0.01, 0.85),
            ("rounds", "rounds", 1, 20, 1, 2),
        ],
    ),
    "fit": (
        "Three points, the fitted line through the origin and dashed residuals; below, as bars, each residual and what "
        "a second round adds.",
        453,
        [
            (f"y{i}", f"point {i}", -2, 6, 0.05, start)
            for i, start in enumerate((2, 3, 5), 1)
        ]
        + [
            ("ridge", "ridge λ", 0, 18, 0.5, 0),
            (
                "averages",
                "Gaussian averages of bandwidth 1 instead of least squares",
                False,
            ),
        ],
    ),
    "smooth": (
        "On the left noisy points around a wave with the estimate; on the right the risk against the bandwidth.",
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
        [
            ("model", "model", tuple(COMPARED)),
            ("setting", "setting", tuple(SETTING_NAMES)),
            ("baseline", "minus", tuple(BASELINE_NAMES.values())),
        ],
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
    "test_time": (
        "Sixteen letters in chunks; the reading token, the equal tokens before it, and the tokens that followed them.",
        105,
        [
            ("chunk", "tokens of a chunk", 1, 16, 1, 4),
            ("token", "reading token", 1, 16, 1, 13),
        ],
    ),
    "decoding": (
        "Eight tokens, each with a bar of what is written, between marks at the probabilities of draft and model.",
        225,
        [("delta", "budget δ", 0, 40, 1, 16)],
    ),
    "sinkhorn": (
        "Two tables of weights of three queries and keys, with their sums: softmax, and Sinkhorn after half-steps.",
        185,
        [
            ("offset", "offset of key 3", 0, 6, 0.5, 2),
            ("steps", "half-steps", 1, 21, 1, 9),
        ],
    ),
    "streaming": (
        "A mean that changes sign twice in 400 tokens, the values around it, and the running estimate.",
        240,
        [("slope", "slope of the scores", 0, 40, 1, 20)],
    ),
    "particles": (
        "Sixteen tokens on a sphere, seen from outside, after layers of random heads.",
        280,
        [
            ("layer", "layer", 0, 150, 1, 0),
            ("size", "size of scores", 0, 20, 1, 10),
            (
                "rounds",
                "rounds in a layer",
                ("one", "two, twicing", "two, boosted with fresh heads"),
            ),
            ("seed", "draw of tokens", 1, 20, 1, 1),
        ],
    ),
    "geometry": (
        "Left points on a circle; right the same circle squeezed, and beside each point where jitter moves it.",
        235,
        [("squeeze", "squeeze s", 0, 1, 0.01, 0.5)],
    ),
    "shift": (
        "Eight tokens with a bar each, the attention weight that the reading token gives it; below, an arrow from each "
        "token to the key of the next.",
        195,
        [
            ("share", "share of the token before", 0, 1, 0.05, 0),
            ("token", "reading token", 1, 8, 1, 8),
        ],
    ),
    "head": (
        "Three tokens, dog, sat and it, with their keys and values; as bars, the weights that one of them gives, and "
        "what it receives.",
        210,
        [
            ("query", "query, times x₁", -3, 3, 0.5, -2),
            ("dog", "dog’s value", -5, 10, 1, 5),
            ("place", "who asks", 1, 3, 1, 3),
            ("mask", "causal mask", True),
        ],
    ),
    "compose": (
        "The letters of a word, and below each the letter before it. Arcs lead from the query token back to the tokens "
        "that it attends to in round 1; their weights stand above. At the end the guess.",
        190,
        [
            ("word", "word", "radar", 11),
            ("place", "query token", 1, 5, 1, 5),
            ("sharp", "sharpness", 0, 10, 0.5, 10),
            ("keys", "keys read", ("the residual r", "the input x")),
        ],
    ),
    "radar": (
        "The letters of a word behind a start. Above each a bar, its attention weight in round 0; below it its label, "
        "the letter before it, and a bar, its weight in round 1. At the end the guess.",
        228,
        [
            ("word", "word", "radar", 8),
            ("place", "asked at place", 1, 5, 1, 5),
            ("mutant", "keys and values of round 1 read x", False),
        ],
    ),
    "hierarchical": (
        "Attention weights of 32 tokens in eight blocks of four, a bar each; those of the clue are orange.",
        210,
        [
            ("token", "the clue is", ("a block", "a token")),
            ("share", "weight of level 2", 0, 1, 0.05, 0.5),
        ],
    ),
}
# name: what its marks mean, each with its colour
KEYS = {
    "slope": [
        ("●", "wrong", "values: drag them"),
        ("━", "first", "one round"),
        ("━", "own", "all rounds"),
    ],
    "fit": [
        ("●", "data", "points"),
        ("━", "own", "least squares"),
        ("━", "first", "averages"),
        ("■", "wrong", "residual: in"),
        ("■", "own", "the second look: out, in the colour of the fit"),
    ],
    "smooth": [
        ("●", "pale", "noisy values"),
        ("┅", "data", "truth"),
        ("━", "second", "estimate, and risk of its rounds"),
        ("━", "first", "risk of one round"),
        ("●", "second", "risk now"),
    ],
    "boost": [
        ("●", "pale", "noisy values"),
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
    "test_time": [
        ("□", "first", "reads"),
        ("□", "own", "an equal token, and filled what followed it"),
        ("┅", "own", "a pair that an edge cuts"),
        ("□", "wrong", "in the chunk that is still open"),
    ],
    "decoding": [
        ("■", "second", "what is written"),
        ("━", "wrong", "the draft, p"),
        ("━", "data", "the model, q"),
    ],
    "streaming": [
        ("●", "wrong", "values"),
        ("━", "data", "their mean"),
        ("━", "first", "softmax attention over the stream"),
    ],
    "shift": [
        ("■", "first", "attention weight"),
        ("□", "data", "the reading token"),
        ("━", "own", "the token before, in a key"),
    ],
    "compose": [
        ("╲", "first", "round 0: the letter before"),
        ("□", "data", "query token"),
        ("⌣", "second", "weights of round 1"),
        ("→", "second", "guess"),
    ],
    "radar": [
        ("■", "first", "round 0"),
        ("■", "second", "round 1"),
        ("□", "data", "where we ask"),
        ("a", "own", "label, the letter before"),
        ("→", "second", "guess"),
    ],
    "hierarchical": [("■", "first", "the clue"), ("■", "wrong", "other tokens")],
}
# name: what there is to see in it, a button each: its words, the inputs that it moves from where they start, and what
# a reader then sees
STEPS = {
    "slope": [
        (
            "a peak",
            {"a": 0, "b": 2, "c": 0},
            "Averages shave the peak, and the second round brings part of it back.",
        ),
        (
            "wider averages",
            {"bandwidth": 3},
            "Each token hears nearly the same mean, so two rounds are nearly flat, too.",
        ),
        (
            "20 rounds",
            {"rounds": 20},
            "With as many rounds as you like averages return the values themselves, noise and all.",
        ),
    ],
    "fit": [
        (
            "an outlier",
            {"y3": -2},
            "The line turns, and the second round still adds nothing: what is left is at right angles to every line.",
        ),
        (
            "a ridge",
            {"ridge": 9},
            "A ridge as large as the sum of squares, 9, halves the fit. The second round adds half as much again.",
        ),
        (
            "averages",
            {"averages": True},
            "An average leaves residuals that another average can see, so the second round adds something.",
        ),
    ],
    "smooth": [
        (
            "too wide",
            {"bandwidth": 0.15},
            "The estimate cuts off the peak and fills the valley: nearly all of the risk is bias.",
        ),
        (
            "and a second round",
            {"bandwidth": 0.15, "rounds": 2},
            "The second round removes more than half of the squared bias and pays with a little variance.",
        ),
        (
            "two rounds, their best",
            {"bandwidth": 0.095, "rounds": 2},
            "At this wider bandwidth two rounds have less risk than one round has at any.",
        ),
        (
            "too narrow",
            {"bandwidth": 0.02, "rounds": 2},
            "The estimate follows the noise: there is no bias to remove, and a second round brings only variance.",
        ),
        (
            "local lines",
            {"bandwidth": 0.15, "lines": True},
            "Local lines of the same bandwidth have less bias than averages in their first round.",
        ),
    ],
    "retrieve": [
        (
            "small β",
            {"beta": -0.5},
            "Attention is nearly uniform, and the state goes to the mean of all patterns.",
        ),
        (
            "large β",
            {"beta": 1.5, "steps": 2},
            "Two steps are enough: all attention is then on the nearest pattern, and the state is there.",
        ),
    ],
    "boost": [
        (
            "the best round",
            {"rounds": 18},  # the stop that is put on it
            "One more round would bring more variance than it removes of the squared bias.",
        ),
        (
            "too many rounds",
            {"rounds": 49},
            "The later rounds removed hardly any bias and brought variance: stop earlier.",
        ),
        (
            "smaller steps",
            {"rounds": 38, "shrinkage": 0.1},
            "A tenth of the step needs ten times the rounds and ends at the same risk.",
        ),
    ],
    "depth": [
        (
            "a gentle slope",
            {"alpha": 0},
            "DyT and Derf hardly pass anything on inside a block, and nothing grows.",
        ),
        (
            "a steep slope",
            {"alpha": 7},
            "DyT and Derf grow far beyond LayerNorm, which has no slope to choose.",
        ),
    ],
    "pairs": [
        (
            "the shift or a second round",
            {"setting": 1, "baseline": 1},
            "The shift is better in each of the ten pairs.",
        ),
        (
            "a second round alone",
            {"model": 1},
            "A second round gains, too: about a third as much as the shift.",
        ),
        (
            "the shift in both",
            {"model": 2},
            "A second round has no lead that can be seen: pairs lie on both sides of zero.",
        ),
        (
            "and equal FLOPs",
            {"model": 2, "baseline": 5},
            "A wider model that costs as much is better in most pairs.",
        ),
    ],
    "second": [
        (
            "close the gate",
            {"gate": 0},
            "A gate of 0 lets nothing through. The result is F, one round of attention.",
        ),
        (
            "no gate",
            {"gate": 1},
            "Without a gate, as with a gate of 1, the whole correction counts. Here the result comes nearer to x.",
        ),
        (
            "a step too long",
            {"x": 0.3, "y": -0.3, "gate": 1},
            "The correction points towards x and goes too far: the result misses x by more than F does.",
        ),
        (
            "flip the sign",
            {"sign": True},
            "Reading x + F with values and output negated gives the same result: no loss can tell the two apart.",
        ),
    ],
    "collapse": [
        (
            "uniform attention",
            {"size": 0},
            "Without scores the two curves are one.",
        ),
        (
            "two tokens",
            {"tokens": 0},
            "Fewer tokens meet sooner.",
        ),
    ],
    "test_time": [
        (
            "a chunk for each token",
            {"chunk": 1},
            "Every pair is cut, and there is nothing to read.",
        ),
        (
            "one chunk",
            {"chunk": 16},
            "The chunk is never closed before it is read: there is nothing to read.",
        ),
    ],
    "decoding": [
        (
            "no budget",
            {"delta": 0},
            "This is exact speculative decoding: what is written has the law of the model.",
        ),
        (
            "a large budget",
            {"delta": 40},
            "Every guess is accepted: the draft writes.",
        ),
    ],
    "sinkhorn": [
        (
            "a sink",
            {"offset": 6},
            "Softmax gives nearly all weight to key 3; after enough half-steps the offset is gone.",
        ),
        ("one half-step", {"steps": 1}, "The first half-step is softmax."),
    ],
    "streaming": [
        (
            "equal scores",
            {"slope": 0},
            "The estimate settles at the mean of all values so far and misses both jumps.",
        ),
        (
            "steep scores",
            {"slope": 40},
            "The estimate follows each jump at once, and the noise as well.",
        ),
    ],
    "particles": [
        (
            "150 layers",
            {"layer": 150},
            "Sharp heads gather the tokens at two opposite ends.",
        ),
        (
            "uniform heads",
            {"layer": 150, "size": 0},
            "All tokens hear the same mean, and gather at one place.",
        ),
    ],
    "geometry": [
        (
            "no second direction",
            {"squeeze": 0},
            "The states keep one direction: half of the truth is lost, and jitter moves them least.",
        ),
        (
            "nothing squeezed",
            {"squeeze": 1},
            "The states are the truth, and jitter moves them most.",
        ),
    ],
    "shift": [
        (
            "half and half",
            {"share": 0.5},
            "The token itself, its earlier copy and what came after that copy now get equal weights.",
        ),
        (
            "shifted",
            {"share": 1},
            "A key now names the token before, so the weight lies on what came after it the last time.",
        ),
        (
            "a new token",
            {"share": 1, "token": 5},
            "Nothing has followed this token yet, and the head has nothing to say.",
        ),
    ],
    "head": [
        (
            "ask with the key",
            {"query": 1},
            "With its own key for a query a token attends most to its like, here to itself.",
        ),
        (
            "ask nothing",
            {"query": 0},
            "All scores are zero, so the output is the plain mean of the values.",
        ),
        (
            "look ahead",
            {"place": 1, "mask": False},
            "Without the mask dog attends most to a token that comes after it.",
        ),
    ],
    "compose": [
        (
            "abracadabra",
            {"word": "abracadabra", "place": 11},
            "Four tokens came after an a, so the guess is split.",
        ),
        (
            "no repeat",
            {"word": "planet", "place": 6},
            "A letter that is new has no continuation to find.",
        ),
        (
            "keys from x",
            {"keys": 1},
            "These keys do not hold the letter before: they all look alike.",
        ),
    ],
    "radar": [
        (
            "two continuations",
            {"word": "papaya", "place": 6},
            "Two places are labelled a, so the guess is split between what stands there.",
        ),
        (
            "a new letter",
            {"word": "radio", "place": 5},
            "No place is labelled o yet, so round 1 finds nothing.",
        ),
        (
            "keys and values of x",
            {"mutant": True},
            "Round 0 does the same, but round 1 cannot see its labels.",
        ),
    ],
    "hierarchical": [
        (
            "a block, by its block",
            {"share": 1},
            "The sum over a block averages the noise away: more weight on the clue.",
        ),
        (
            "a token, by its block",
            {"token": 1, "share": 1},
            "The three other tokens of the block get as much as the clue.",
        ),
        (
            "a token, by itself",
            {"token": 1, "share": 0},
            "A token that stands out needs no block.",
        ),
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


# What a verdict of chapter 18 means; {better} is the one with the lower mean.
_WORDS = {
    "**{word}**, planned": "Planned, and decided after Holm's correction: {better} is better.",
    "{word}, *seen*": "Seen, not planned: {better} is better.",
}
VERDICTS = {
    key.format(word=word): said
    for key, said in _WORDS.items()
    for word in ("better", "worse")
} | {
    "open": "Open: the interval includes zero.",
    "open after Holm": "Open: planned, and {better} looks better, but not after Holm's correction.",
    "rate not found": "No verdict: the best learning rate of one of the two was not found.",
    "run diverged": "No verdict: a run diverged.",
}


def _pairs() -> dict:
    """The paired differences of chapter 18, each model minus each baseline that has run, with their verdicts, and
    Student's quantiles."""
    from scipy.stats import t

    from support.reports import Report
    from support.verdicts import planned_p, verdict

    report, known = Report(), [*VERDICTS]
    adjusted = planned_p(report)

    def found(of):
        if of is None or not report.paired(*of):
            return None
        apart = np.subtract(*report.losses(*of)).round(6).tolist()
        return {
            "pairs": apart,
            "verdict": known.index(verdict(report, of, adjusted)),
        }

    return {
        "models": [
            {
                "says": says,
                "better": better,
                "settings": [
                    [found(row.get(baseline)) for baseline in BASELINE_NAMES]
                    for row in rows.values()
                ],
            }
            for (says, better), rows in zip(COMPARED.values(), pairs_to_play())
        ],
        "settings": list(SETTING_NAMES),
        "baselines": list(BASELINE_NAMES.values()),
        "quantiles": [float(t.ppf(0.975, n - 1)) for n in range(2, 31)],
        "verdicts": list(VERDICTS.values()),
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
DATA = {
    "depth": _growth,
    "pairs": _pairs,
    "collapse": _collapse,
    "slope": lambda: {"colour": colour_of("twicing")},
    "shift": lambda: {"colour": colour_of("boosted attention")},
    "radar": lambda: {"colour": colour_of("gradient boosting")},
    "test_time": lambda: {"colour": colour_of("linear attention")},
    "sinkhorn": lambda: {"colour": colour_of("Sinkhorn")},
    "geometry": lambda: {"colour": colour_of("least squares")},
    "fit": lambda: {"colour": colour_of("least squares")},
}
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
    if isinstance(slider[0], str):
        word, most = slider
        kind = 'type="text" autocapitalize="none" autocomplete="off" spellcheck="false"'
        return f'<label>{html.escape(label)}<input {kind} name="{name}" maxlength="{most}" value="{word}"></label>'
    if len(slider) == 1:
        checked = " checked" if slider[0] else ""
        return f'<label><input type="checkbox" name="{name}"{checked}>{html.escape(label)}</label>'
    least, most, step, start = slider
    limits = f'min="{least}" max="{most}" step="{step}" value="{start}"'
    return f'<label>{html.escape(label)}<input type="range" name="{name}" {limits}><output></output></label>'


def _button(words, values=(), lesson="") -> str:
    """A button that moves inputs and says what is then to be seen."""
    given = html.escape(json.dumps(dict(values)))
    return f'<button type="button" data-values="{given}" data-lesson="{html.escape(lesson)}">{words}</button>'


def play(name: str) -> HTML:
    """Return a figure to play with, one of `FIGURES`."""
    alt, height, inputs = FIGURES[name]
    rows = "".join(_row(*one) for one in inputs)
    told = GIVEN | ({"data": DATA[name]()} if name in DATA else {})
    colours = told | {"own": told.get("data", {}).get("colour"), "data": "inherit"}
    key = "".join(
        f'<span><b style="color: {colours.get(colour, "inherit")}; opacity: {0.6 if colour == "pale" else 1}">'
        f"{mark}</b> {words}</span>"
        for mark, colour, words in KEYS.get(name, ())
    )
    steps = "".join(
        _button(*step) for step in [*STEPS.get(name, ()), ("start again",)]
    )
    common, own = ((FOLDER / f"{part}.js").read_text() for part in ("play", name))
    return HTML(
        f'<div class="play" id="play-{name}" role="group" aria-label="{html.escape(alt)}"><style>{STYLE}</style>'
        f'<svg viewBox="0 0 600 {height}" role="img" aria-label="{html.escape(alt)}"></svg>'
        f'<div class="key">{key}</div><p aria-live="polite"></p><div class="steps">{steps}</div>{rows}\n'
        f"<script>{{\n{common}\nplay(document.currentScript.parentElement, (\n{own.rstrip().rstrip(';')}\n)"
        f"({json.dumps(told)}));\n}}</script></div>"
    )
