"""Exercises of chapters 20 to 30 and of the command line: how training shapes attention, neighbours, models."""

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
    "the counts of b and c, with chunks of two; then with chunks of three",
    "A pair counts only where no edge cuts it, so the length of a chunk decides what is stored.",
)
def _():
    yield [[2, 1], [2, 0]]
    yield (
        [[2, 1], [2, 1]],
        "The second: write down the chunks of three. Which pair does an edge cut?",
    )
    yield (
        [[1, 1], [ANY, ANY]],
        "The first: the chunk just before the last token has closed, and it counts as well.",
    )
    yield (
        [[3, 1], [ANY, ANY]],
        "The first: how often does b come after a?",
    )


@exercise(
    "22.2",
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
    "22.3",
    "the output after three writes: Hebb, delta, and with the other sign",
    "Hebb overshoots, delta halves what is missing, and with the other sign the error grows.",
)
def _():
    yield [1.5, 0.875, 2.375]
    yield (
        [3.0, ANY, ANY],
        "The first: each write is multiplied by the rate.",
    )
    yield (
        [ANY, 0.125, ANY],
        "The second: that is the residual. The output is what was found, not what is missing.",
    )
    yield (
        [ANY, 1.0, ANY],
        "The second: each write removes half of the residual. Is it ever all?",
    )
    yield (
        [ANY, ANY, -0.875],
        "The third: start at 0. The first write adds half of 1 + 0, and the next half of 1 + ½.",
    )


@exercise(
    "23.1",
    "how often a proposal is accepted, then the three probabilities after a rejection",
    "What is rejected is what the draft has too much of, and it goes where the draft has too little.",
)
def _():
    yield [0.6, 0.75, 0.0, 0.25]
    yield (
        [1 / 3, ANY, ANY, ANY],
        "The first: so often is the second token accepted. The others are proposed as well.",
    )
    yield (
        [0.4, ANY, ANY, ANY],
        "The first: so often is a proposal rejected.",
    )
    yield (
        [ANY, 0.5, 0.2, 0.3],
        "The last three: that is the model's law, of which accepted proposals are a part already.",
    )
    yield (
        [ANY, 0.3, 0.0, 0.1],
        "The last three: that is what the tokens lack. Given a rejection, the probabilities sum to one.",
    )


@exercise(
    "23.2",
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
    "24.1",
    "what each of the two tokens receives under softmax, then the weight of a token on itself when balanced",
    "Softmax lets one token receive more than the other. Balanced, each receives one.",
)
def _():
    yield [1.3, 0.7, 2 / 3]
    yield (
        [0.8, 0.5, ANY],
        "The first two: those are weights of tokens on themselves. What is received is the sum of a column.",
    )
    yield (
        [1.0, 1.0, ANY],
        "The first two: those are the sums of rows. What is received is the sum of a column.",
    )
    yield (
        [ANY, ANY, 0.8],
        "The third: that is softmax. Divide the first row and the first column by 2 first.",
    )
    yield (
        [ANY, ANY, 1.0],
        "The third: after row and column are halved, one division by the common sum is left.",
    )


@exercise(
    "24.2",
    "the weight p of each of two tokens on itself, from their scores S, two by two",
    "Offsets of rows and columns cancel in this combination: one number of the four counts.",
    on=lambda: [(torch.randn(2, 2),) for _ in range(3)],
)
def _():
    from gbattn.sinkhorn import sinkhorn_weights

    cross = lambda S: S[0, 0] + S[1, 1] - S[0, 1] - S[1, 0]
    yield lambda S: sinkhorn_weights(S, iterations=5000, tolerance=1e-13)[0, 0]
    yield (
        lambda S: cross(S).sigmoid(),
        "Two weights are p and two are 1 − p: the combination holds log p/(1 − p) twice.",
    )
    yield (
        lambda S: S.softmax(1)[0, 0],
        "That is softmax: its columns do not sum to 1.",
    )
    yield (
        lambda S: ((S[0, 0] + S[1, 1]) / 2).sigmoid(),
        "Add 1 to the scores of a row: P stays, and this changes.",
    )


@exercise(
    "24.3",
    "which biases can change the output of SinkhornAttention",
    "Balancing cancels what is the same for all keys, and what is the same for all queries.",
)
def _():
    yield "values"
    yield (
        "queries and values",
        "That is softmax. The bias of the queries adds a number to each column. What does balancing do to it?",
    )
    yield (
        "keys",
        "The bias of the keys adds a number to each row, which even softmax cancels.",
    )
    yield "none", "Rows sum to one: what becomes of a vector added to all values?"


def _plans():
    from gbattn.sinkhorn import coupling

    exact = dict(iterations=5000, tolerance=1e-14)
    draw = lambda: coupling(torch.randn(3, 4), **exact)
    return [(draw(), draw())]


@exercise(
    "24.4",
    "the gradient with respect to S, from P and π",
    "As for softmax. The potentials contribute a term, but one without a linear system.",
    on=_plans,
)
def _():
    from gbattn.sinkhorn import coupling

    def gradient(P, pi):
        S = P.log().requires_grad_()
        plan = coupling(S, iterations=5000, tolerance=1e-14)
        return torch.autograd.grad(-(pi * plan.log()).sum(), S)[0]

    yield gradient
    yield (
        lambda P, pi: -pi,
        "That leaves the potentials out. They depend on S.",
    )
    yield lambda P, pi: -pi / P, "That is the gradient with respect to P."
    yield (
        lambda P, pi: pi - P,
        "A gradient step must raise P where π is larger.",
    )


@exercise(
    "25.1",
    "the four weights, and the share of the first value",
    "Scores in a straight line keep the gain constant: the start is forgotten, and the estimate never settles.",
)
def _():
    yield [1.0, 1.0, 2.0, 4.0, 0.125]
    yield (
        [1.0, 0.5, 0.5, 0.5, ANY],
        "The first four: those are the gains. A gain is a weight over the sum of all weights so far.",
    )
    yield (
        [1.0, 1.0, 1.0, 1.0, ANY],
        "The first four: equal weights have gains that fall, 1, ½, ⅓, ¼.",
    )
    yield (
        [1.0, 2.0, 4.0, 8.0, ANY],
        "The first four: the second gain would be 2 over 3.",
    )
    yield (
        [ANY, ANY, ANY, ANY, 0.5],
        "The last: that is after two tokens. Each further token halves it.",
    )


@exercise(
    "25.2",
    "how many tokens at c = 1, and the c for 100",
    "The larger the slope, the shorter the memory: nearly 2/c tokens.",
)
def _():
    from gbattn.streaming import noise_left

    tokens = (1 / noise_left(torch.arange(100.0))[-1]).item()
    slope = 2 * math.atanh(0.01)
    yield [tokens, slope]
    yield (
        [1 / (1 - math.exp(-1)), ANY],
        "The first: that is one over the largest weight. The noise is the sum of squares of all.",
    )
    yield (
        [ANY, 0.01],
        "The second: that is a gain of a hundredth. The noise that a constant gain a leaves is a/(2 − a).",
    )


@exercise(
    "25.3",
    "the variance of the urn's share after n draws",
    "Uniform on n + 1 shares, whose range grows with n: the limit is that of the uniform law.",
    on=lambda: [(n,) for n in (1, 2, 7, 50)],
)
def _():
    gains = lambda n: 1 / (torch.arange(1.0, n + 1) + 2)
    yield lambda n: (1 - (1 - gains(n) ** 2).prod()) / 4
    yield lambda n: 1 / 12, "That is the limit for many draws."
    yield (
        lambda n: (n + 2) / (12 * n),
        "That is the variance of 0, 1/n, …, 1. The shares are (k + 1)/(n + 2).",
    )
    yield (
        lambda n: (1 - (1 - gains(n)).prod() ** 2) / 4,
        "What is left of the spread is multiplied by 1 − a² at each draw, not by (1 − a)².",
    )


@exercise(
    "25.4",
    "at a = 0.02 the lag of one round and of two in tokens, then the noise that each keeps, over a",
    "Two rounds remove the lag of a straight line and cost two and a half times the noise.",
    tolerance=0.03,
)
def _():
    a, k = 0.02, torch.arange(5000.0)
    one = a * (1 - a) ** k
    two = (2 - a * (k + 1)) * one
    lag = lambda weights: (weights @ k).item()
    noise = lambda weights: (weights @ weights / a).item()
    yield [lag(one), 0.0, noise(one), noise(two)]
    yield (
        [ANY, lag(one) ** 2, ANY, ANY],
        "The second: residuals of a straight line are level. What does an average make of a level line?",
    )
    yield (
        [ANY, ANY, 1.0, ANY],
        "The third: a is the largest weight. The noise is the sum of the squares.",
    )
    yield (
        [ANY, ANY, ANY, 2 * noise(one)],
        "The fourth: the noise of the second round is not independent of that of the first.",
    )


@exercise(
    "26.1",
    "floor and excess in bits, and the price β*",
    "The nearer the two laws, the smaller the excess, and the cheaper a bit of code must be to pay.",
)
def _():
    floor = 2 - 0.75 * math.log2(3)
    yield [floor, 1 - floor, 1 - floor]
    yield (
        [1.0, ANY, ANY],
        "The first: that is the loss without the state. The floor is paid by a model that knows it.",
    )
    yield (
        [floor * math.log(2), ANY, ANY],
        "The first: that is in nats. Take logarithms to the base 2.",
    )
    yield (
        [ANY, 1.0, ANY],
        "The second: that is the whole loss. The floor has to be paid in any case.",
    )
    yield (
        [ANY, ANY, 0.5],
        "The third: that is for the two states on the page. What does a bit of code give back here?",
    )


@exercise(
    "26.2",
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
    "the time, the number of layers, and the standard deviation of logit m",
    "The heads are random, and yet the time of the collapse is nearly certain in many dimensions.",
    tolerance=0.02,
)
def _():
    t = 2 * math.log(9)
    yield [t, t / 0.01, 2 * math.sqrt(t / 400)]
    yield (
        [t / 2, ANY, ANY],
        "The first: from 0.1 to a half. The way from there to 0.9 is as long.",
    )
    yield (
        [0.8, ANY, ANY],
        "The first: that is the growth of m. What grows evenly is log m/(1 − m).",
    )
    yield (
        [ANY, t / 0.04, ANY],
        "The second: the mean of four heads has a quarter of the variance of one.",
    )
    yield (
        [ANY, t / 0.2, ANY],
        "The second: the mean step is zero, so the overlap moves with the square of η.",
    )
    yield (
        [ANY, ANY, math.sqrt(t / 400)],
        "The third: the page's error bar has a constant in front of the root.",
    )


@exercise(
    "27.2",
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
    "27.3",
    "layers in the normalised stream, and in the Pre-LN stream",
    "One clock is exponential in depth. The other slows down in proportion to what has come.",
    tolerance=0.05,
)
def _():
    step = 0.2**2
    yield [math.log(2) / math.log(1 + step), 5 / step]
    yield (
        [1 / step, ANY],
        "The first: that is for a step that stays the same. Each layer divides what is left.",
    )
    yield (
        [ANY, math.log(2) / math.log(1 + step)],
        "The second: that is for tokens of length 1. The step is added to a squared length that has grown.",
    )
    yield (
        [ANY, 1 / step],
        "The second: from which squared length to which?",
    )


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
    "28.2",
    "the least number of points",
    "The more points, the more is lost in one place; clean and jittered still agree.",
)
def _():
    distance = lambda n: math.sqrt(1 - 1 / math.sqrt(n - 1))
    least = next(n for n in range(3, 999) if distance(n) > 0.9)
    yield least
    yield (
        next(n for n in range(3, 999) if distance(n) ** 2 > 0.9),
        "That is for the square of the distance.",
    )
    yield least - 1, "The root is of n − 1, and the distance is to lie above."


@exercise(
    "28.3",
    "the factor in two dimensions, and in four",
    "Every doubling of the dimension squares the price of a finer code.",
)
def _():
    factor = lambda d, less: less ** (d / 2)
    yield [factor(2, 2), factor(4, 2)]
    yield (
        [ANY, factor(2, 2)],
        "The second: each coordinate gets more bins, and there are four of them.",
    )
    yield (
        [math.sqrt(2), ANY],
        "The first: that is the factor of the bins of one coordinate.",
    )
    yield (
        [factor(2, 4), ANY],
        "The first: that halves the root of the mean squared error.",
    )


@exercise(
    "29.1",
    "the weight of the first key, with summed scores and with summed outputs",
    "A sum of scores asks for both clues; a sum of outputs is content with one.",
)
def _():
    laws = torch.tensor([[0.3, 0.6, 0.1], [0.3, 0.1, 0.6]])
    yield [laws.log().mean(0).softmax(0)[0].item(), 0.3]
    yield (
        [0.3, ANY],
        "The first: the geometric means do not sum to one. Divide by their sum.",
    )
    yield (
        [laws.log().sum(0).softmax(0)[0].item(), ANY],
        "The first: that is with weights of 1. With halves, take the roots of the products.",
    )
    yield (
        [ANY, laws.log().mean(0).softmax(0)[0].item()],
        "The second: summed outputs have the ordinary mean of the weights.",
    )


@exercise(
    "29.3",
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
    "the output of the head, the output with twicing, and their ratio",
    "A head that returns little leaves its values almost whole, so a second round repeats the first.",
)
def _():
    A, V = torch.tensor([[1.0, 0.0], [0.9, 0.1]]), torch.tensor([0.0, 1.0])
    F = A @ V
    twiced = lambda nu: (F + nu * A @ (V - F))[1].item()
    yield [F[1].item(), twiced(0.5), twiced(0.5) / F[1].item()]
    yield (
        [0.9, ANY, ANY],
        "The first: the large weight lies on a value of 0.",
    )
    yield (
        [ANY, 0.15, ANY],
        "The second: that adds half of F. Smooth the residual V − F, not V.",
    )
    yield [ANY, twiced(1.0), ANY], "The second: that is ν = 1."
    yield (
        [ANY, 0.55, ANY],
        "The second: the residual is smoothed by the same weights before it is added.",
    )


@exercise(
    "30.2",
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


# ---- Z The command line ----


@exercise(
    "Z.1",
    "which option may change",
    "A folder holds one run: what decides its weights or its curve is fixed.",
)
def _():
    yield "--checkpoint-every"
    yield (
        "--log-every",
        "It says what a point of the learning curve is the mean of.",
    )
    yield "--seed", "It decides the order of the text."
    yield "none", "Which option leaves weights and learning curve as they are?"


@exercise(
    "Z.2",
    "what the model pays for the reversed text, beside the text itself",
    "An equal floor, but for a model of that language.",
)
def _():
    yield "more"
    yield (
        "the same",
        "The entropy is the same. Which direction has this model learned?",
    )
    yield "less", "No text of this entropy costs a model less than the floor."


@exercise(
    "Z.3",
    "bits of a sentence on average, of one of the baker's, and of another",
    "A text is above or below the floor by the luck of its draws.",
)
def _():
    from torch.distributions import Categorical

    shares = torch.tensor([1 / 2, 1 / 6, 1 / 6, 1 / 6])
    rest = 2 * math.log2(4)
    subject = Categorical(shares).entropy().item() / math.log(2)
    one, other = (-shares[:2].log2()).tolist()
    yield [subject + rest, one + rest, other + rest]
    yield (
        [6.0, ANY, ANY],
        "The first: that is for four subjects of equal probability.",
    )
    yield (
        [subject * math.log(2) + rest, ANY, ANY],
        "The first: the subject's entropy is in nats there. Bits are wanted.",
    )
    yield (
        [ANY, 1.0, ANY],
        "The second: that is the subject. Two words of four follow.",
    )
