"""Exercises of chapters 20 to 30: how training shapes attention, neighbours, and the models people have."""

import math

import torch

from support.exercises.table import exercise

ANY = math.nan


@exercise(
    "20.2",
    "how the number of steps grows as ε falls",
    "A starved key waits: its own small weight stands in front of its gradient.",
)
def _():
    yield "1/ε"
    yield (
        "log 1/ε",
        "That is for a rate in proportion to the weight a. Here the rate is in proportion to a².",
    )
    yield (
        "1/ε²",
        "The difference of scores moves in proportion to a, and a's own rate to a².",
    )
    yield "not at all", "Does a key with half the weight wait no longer?"


@exercise(
    "21.1",
    "the factor for small λ, and the one for large",
    "A slower rate helps most where scores have run far.",
)
def _():
    factor = lambda lam: 2 * lam + lam**2
    yield [factor(1e-9) / factor(1e-9 / 2), factor(1e9) / factor(1e9 / 2)]
    yield [4.0, ANY], "The first: for small λ the square is negligible."
    yield [ANY, 2.0], "The second: for large λ the square is what counts."


@exercise(
    "22.1",
    "how many tokens over the edge keep the layer causal",
    "A write is first read by the next chunk, whose first token is the one that was looked at.",
)
def _():
    yield "only one"
    yield "none", "Which token reads the write first? What has it seen?"
    yield (
        "one or two",
        "With two, the write holds the second token of the next chunk. Who reads it first?",
    )


@exercise(
    "23.1",
    "the best m, its speed, and the τ from which on no m pays",
    "A draft pays while it is cheap. Long drafts need a small τ and a good match.",
)
def _():
    speed = lambda tau, m: (1 - 0.8**m) / 0.2 / (m * tau + 1)
    best = max(range(1, 40), key=lambda m: speed(0.1, m))
    limit = lambda m: sum(0.8**k for k in range(1, m)) / m
    least = max(limit(m) for m in range(2, 40))
    yield [best, speed(0.1, best), least]
    yield (
        [ANY, 5.0, ANY],
        "The second: a draft that costs nothing would give that. Each proposal costs τ.",
    )
    yield (
        [ANY, ANY, 0.8],
        "The third: the last token of a round comes from the model itself, whatever m is.",
    )
    yield (
        [ANY, ANY, limit(best)],
        "The third: that is the limit for the best m at τ = 0.1. Another m pays longer.",
    )


@exercise(
    "26.1",
    "the price β* at λ = 0.3",
    "The price is the share of a bit of code that a token gives back, and the prior cancels.",
)
def _():
    from gbattn.ecologies import TaskEcology, split_thresholds

    laws = torch.tensor([[[0.5, 0.5, 0.0]], [[0.5, 0.0, 0.5]]])
    states = TaskEcology(laws, torch.tensor([0.3, 0.7]))
    entropy = lambda x: -x * math.log2(x) - (1 - x) * math.log2(1 - x)
    yield split_thresholds(states, torch.arange(2))[0, 1].item()
    yield (
        0.5 * entropy(0.3),
        "That is the gain. Divide it by the code's length, the entropy of λ.",
    )
    yield entropy(0.3), "That is the length of the code."
    yield (
        0.3,
        "Only half of the tokens name the state. What else does λ change, and does it change both sides alike?",
    )


@exercise(
    "27.1",
    "the drift under one round, and under twicing, at γ = 0.3",
    "One round permutes and leaves the overlap. Twicing's negative weights drive tokens apart.",
)
def _():
    from gbattn.particles import simplex_drift

    P = torch.eye(3).roll(1, 1)
    drift = lambda A: float(simplex_drift(0.3, A))
    one, two = drift(P), drift(2 * P - P @ P)
    yield [one, two]
    yield [ANY, 0.0], "The second: its rows are (0, 2, −1), no permutation."
    yield [ANY, -two], "The second: with c = −2 overlaps fall."
    yield [ANY, two / 0.7], "The second: a factor 1 − γ is missing."


@exercise(
    "28.1",
    "the s at which D is 0.3",
    "D sees the squeeze. A linear probe, which may stretch, does not.",
    tolerance=0.02,
)
def _():
    distortion = lambda s: math.sqrt(
        max(0.0, 1 - (1 + s) / math.sqrt(2 * (1 + s * s)))
    )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if distortion(middle) > 0.3 else (low, middle)
    yield low
    yield 0.3, "That is D. Solve for s."
    yield (
        1 / low,
        "That stretches the second direction. It is to be squeezed, s ≤ 1.",
    )
    yield 0.91, "That is 1 − D², the trace. Solve for s."


@exercise(
    "29.2",
    "the largest factor by which a weight can be off, from c, B, ρ and L",
    "An error of scores counts twice in a weight: above and below the line.",
    on=lambda: [(1.0, 1.0, 0.5, 3), (0.3, 2.0, 0.8, 6)],
)
def _():
    left = lambda c, B, rho, L: c * B * rho**L / (1 - rho)
    yield lambda c, B, rho, L: math.exp(2 * left(c, B, rho, L))
    yield (
        lambda c, B, rho, L: math.exp(left(c, B, rho, L)),
        "The normaliser changes as well as the numerator.",
    )
    yield (
        left,
        "That is the error of a score. A weight is its exponential over a sum of such.",
    )
    yield (
        lambda c, B, rho, L: math.exp(2 * c * B * rho**L),
        "That is the first level left out. Sum over all of them.",
    )


@exercise(
    "30.1",
    "the weights and gate biases, by D, H and G: with a gate per feature, and per head",
    "A gate per head is nearly free; one per feature costs as much as two projections.",
    on=lambda: [(64, 4, 2), (128, 8, 8)],
)
def _():
    size = lambda D, H, G, n: D**2 + 2 * D**2 * G // H + 2 * D * n + n
    yield lambda D, H, G: [size(D, H, G, D), size(D, H, G, H)]
    yield (
        lambda D, H, G: [size(D, H, G, D) - D, size(D, H, G, H) - H],
        "The gate's biases are missing.",
    )
    yield (
        lambda D, H, G: [size(D, H, H, D), size(D, H, H, H)],
        "Keys and values have G heads, not H.",
    )
    yield (
        lambda D, H, G: [size(D, H, G, D) - D * D, size(D, H, G, H) - D * H],
        "The gate reads F and c, two vectors of width D.",
    )
