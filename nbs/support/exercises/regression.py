"""Exercises of chapters 0 to 4: attention is regression."""

import math

import torch

from support.exercises.table import exercise

ANY = math.nan


def drawn(*shapes):
    return [torch.randn(*shape) for shape in shapes]


# ---- 0 Conventions ----


@exercise(
    "00.1",
    "the share of F₀ that is left after 20 steps",
    "A shrunken step never forgets the start in full, and boosting lives on such steps.",
)
def _():
    yield (1 - 0.1) ** 20
    yield 1 - (1 - 0.1) ** 20, "That is the share of the way to 3."
    yield 3 + 4 * 0.9**20, "That is F after 20 steps from a start of 7."
    yield 0.1**20, "Each step leaves 1 − g of the error, not g."
    yield 0.9**19, "That is after 19 steps."


@exercise(
    "00.4",
    "all gains g₁, …, gₙ, from the weights w",
    "With w the exponential of a score, this is streaming softmax attention.",
    on=lambda: [(torch.rand(12).exp(),)],
)
def _():
    yield lambda w: w / w.cumsum(0)
    yield (
        lambda w: w / w.sum(),
        "The gain of a step knows the weights up to this step only.",
    )
    yield lambda w: 1 / torch.arange(1, len(w) + 1), "That is for equal weights."
    yield (
        lambda w: w / (w.cumsum(0) - w + 1),
        "The sum holds the present weight, too.",
    )


# ---- 1 Least squares in one pass ----


@exercise(
    "01.1",
    "by how much the fit to the first two points misses the third value",
    "A fit that has seen the row misses it by less, by the factor 1 − H₃₃.",
)
def _():
    from gbattn.least_squares import least_squares

    x, y = torch.tensor([[1.0], [2.0], [2.0]]), torch.tensor([[2.0], [3.0], [5.0]])
    guess = least_squares(x[:2], y[:2]).predict(x[2:])
    yield (y[2:] - guess).item()
    yield 1.0, "That is the residual of the line that has seen the third point."
    yield guess.item(), "That is the prediction. How far is it from 5?"
    yield (
        2.25,
        "One over the leverage is 9/4. The formula has one minus the leverage.",
    )
    yield (
        1 - 4 / 9,
        "That multiplies by 1 − H₃₃, which makes the error smaller. It must grow.",
    )


@exercise(
    "01.3",
    "the errors at all rows, each by a fit that never saw the row, from X and Y of shape (n, d) and (n, 1)",
    "No refit is needed: one pass has all n errors.",
    on=lambda: [drawn((12, 3), (12, 1))],
)
def _():
    from gbattn.least_squares import hat_matrix

    def errors(X, Y, power=-1.0):
        H = hat_matrix(X)
        return (Y - H @ Y) * (1 - H.diagonal()[:, None]) ** power

    yield lambda X, Y: errors(X, Y)
    yield (
        lambda X, Y: errors(X, Y, 0.0),
        "These are the residuals of the fit to all rows.",
    )
    yield (
        lambda X, Y: errors(X, Y, 1.0),
        "A row pulls the fit towards itself. So without it the error grows.",
    )
    yield (
        lambda X, Y: errors(X, Y)[:, 0],
        "Right, but as n numbers; Y has the shape (n, 1).",
    )
    yield (
        lambda X, Y: Y - errors(X, Y),
        "These are the predictions; the errors are wanted.",
    )


# ---- 2 Slow and fast memory ----


TWO_KEYS, TWO_VALUES = ((1.0, 0.0), (0.6, 0.8)), (1.0, 2.0)


def written(order=(0, 1), rule="delta", rounds=1):
    from gbattn.memory import FastWeights

    keys = torch.tensor([TWO_KEYS[i] for i in order])
    values = torch.tensor([[TWO_VALUES[i]] for i in order])
    memory = FastWeights(2, 1, rule=rule)
    for _ in range(rounds):
        memory.write(keys, values)
    return memory.memory[:, 0]


@exercise(
    "02.1",
    "the memory M",
    "It reads the first fact back exactly: the newest one. The delta rule depends on the order.",
)
def _():
    yield written((1, 0))
    yield (
        written((0, 1)),
        "That is the order of the page. Here the second fact comes first.",
    )
    yield (
        written(rule="hebb"),
        "That sums, and does not subtract what the memory says already.",
    )
    yield [1.0, 1.75], "That solves for both. Write one fact after the other."
    yield (
        written((1,)),
        "That is the memory after one fact. What does it say of the other, and what is missing?",
    )


@exercise(
    "02.2",
    "what each round but the first multiplies the error by",
    "Keys at right angles would need one round; the nearer two keys are, the slower.",
)
def _():
    away = lambda rounds: (
        (written(rounds=rounds) - torch.tensor([1, 1.75])).norm().item()
    )
    yield away(3) / away(2)
    yield 0.6, "That is the cosine of the keys. A round projects twice."
    yield 0.8, "That is the sine of the angle between the keys."
    yield (
        0.64,
        "That is the share of a key which is new, squared. What is left is one minus it.",
    )


@exercise(
    "02.4",
    "the effective number of tokens",
    "A window of γ = 0.99 averages as many tokens as 199 equal weights would.",
)
def _():
    gamma = 0.99
    weights = gamma ** torch.arange(5000.0)
    yield round((weights.sum() ** 2 / weights.square().sum()).item())
    yield (
        100,
        "That is the sum of the weights. Square it, and divide by the sum of their squares.",
    )
    yield 50, "That is the sum of the squared weights, the divisor."
    yield 10_000, "That is the squared sum. Divide it by the sum of the squares."


# ---- 3 Attention is a smoother ----


def three_tokens():
    from gbattn.smoothers import kernel_smoother

    return kernel_smoother(torch.arange(3.0)[:, None], (2 * math.log(2)) ** -0.5)


@exercise(
    "03.1",
    "the first token's estimate of the slope after three rounds",
    "The slope is learned quickly; the peak, whose factor is smaller, more slowly.",
)
def _():
    slope, left = torch.arange(3.0), torch.eye(3) - three_tokens()
    after = lambda rounds: (
        slope - torch.linalg.matrix_power(left, rounds) @ slope
    )[0].item()
    yield after(3)
    yield after(2), "That is the estimate after two rounds."
    yield after(4), "That is the estimate after four rounds."
    yield -after(3), "The estimate stays above 0."


@exercise(
    "03.2",
    "the variance of the first token after one round",
    "Averages have less noise than the values: that is what they are for.",
)
def _():
    weights = three_tokens()[0]
    yield weights.square().sum().item()
    yield weights.sum().item(), "Variances add with the squares of the weights."
    yield weights.square().sum().sqrt().item(), "That is the standard deviation."


@exercise(
    "03.3",
    "the coordinate to append to each key, from keys of shape (n, d), if the query's is 1",
    "Softmax attention can be a Gaussian smoother, if it may have one more coordinate.",
    on=lambda: [drawn((7, 3))],
)
def _():
    yield lambda k: -k.square().sum(-1) / 2
    yield (
        lambda k: -k.square().sum(-1, keepdim=True) / 2,
        "Right, but as a column; give n numbers.",
    )
    yield (
        lambda k: k.square().sum(-1) / 2,
        "Its sign: a long key must be held back.",
    )
    yield (
        lambda k: -k.square().sum(-1),
        "Expand half of the squared distance: a factor is missing.",
    )
    yield (
        lambda k: -k.norm(dim=-1) / 2,
        "The distance is squared, so the norm is, too.",
    )


# ---- 3a Many rounds, and a temperature from the data ----


@exercise(
    "03a.1",
    "the share p from which on a round leaves less than it was given",
    "At one half both rows are equal: the average of the residual is zero, and the round does nothing.",
)
def _():
    yield 0.5
    yield 0.75, "There a round leaves one half. From where on does it leave less than all?"
    yield 0.0, "With p = 0 the tokens exchange what is left, and a round doubles it."


@exercise(
    "03a.2",
    "target minus prediction at the first token, from the other two",
    "Without itself a token is missed by more, by one over the attention that it pays to others.",
)
def _():
    A, slope = three_tokens(), torch.arange(3.0)
    missed = (slope - A @ slope)[0].item()
    others = 1 - A[0, 0].item()
    yield missed / others
    yield -missed / others, "That is the prediction, or prediction minus target."
    yield missed, "That is the error of the round that has seen the token."
    yield missed * others, "Divide by 1 − 0.64: the error grows."


@exercise(
    "03a.3",
    "the degrees of freedom of two rounds, 2A − A²",
    "Two rounds fit more closely than one, so they cost more.",
)
def _():
    from gbattn.smoothers import degrees_of_freedom

    A = three_tokens()
    once = degrees_of_freedom(A).item()
    yield degrees_of_freedom(2 * A - A @ A).item()
    yield (
        3.0,
        "The sum of all weights is 3, for every smoother of three rows. Degrees of freedom are the trace.",
    )
    yield once, "That is the number of one round."
    yield 2 * once, "Two rounds have the trace of 2A, less that of A²."


@exercise(
    "03a.4",
    "the predictions for all rows, each left out of both rounds, from A of shape (n, n) and y of shape (n, 1)",
    "The shortcut of one round does not hold for 2A − A², whose weights depend on which rows are present.",
    on=lambda: [(torch.rand(9, 9).softmax(-1), torch.randn(9, 1))],
)
def _():
    def predictions(A, y):
        first = ((A @ y) - A * y.T) / (1 - A)  # (j, i): the estimate of j without i
        share = (A / (1 - A.diagonal()[:, None])).fill_diagonal_(0)
        return share @ (2 * y) - (share * first.T).sum(1, keepdim=True)

    def shortcut(A, y):
        S = 2 * A - A @ A
        return y - (y - S @ y) / (1 - S.diagonal()[:, None])

    def only_second(A, y):
        share = (A / (1 - A.diagonal()[:, None])).fill_diagonal_(0)
        return share @ (2 * y - A @ y)

    yield predictions
    yield (
        lambda A, y: y - predictions(A, y),
        "These are the errors; the predictions are wanted.",
    )
    yield (
        shortcut,
        "That is the shortcut for one round, on 2A − A². It needs a smoother that minimises.",
    )
    yield (
        only_second,
        "Row i is left out of the second round only; the first has still seen it.",
    )
    yield (
        lambda A, y: 2 * A @ y - A @ A @ y,
        "Here each row has been seen by both rounds.",
    )


# ---- 4 Hopfield networks ----


@exercise(
    "04.1",
    "one step from ξ at e^β = 8",
    "One step says whose pattern it is. A hundred more at this β would forget it.",
)
def _():
    from gbattn.hopfield import update

    patterns, question = torch.eye(4)[:3], torch.tensor([[1.0, 0.0, 0.0, 1.0]])
    yield update(question, patterns, beta=math.log(8))[0]
    yield (
        update(question, patterns, beta=math.log(2))[0],
        "That is the step of the page, at e^β = 2.",
    )
    yield (
        [0.8, 0.1, 0.1, 1.0],
        "No pattern has the fourth coordinate. So what is left of it?",
    )
    yield [8.0, 1.0, 1.0, 0.0], "Divide the weights by their sum."
    yield update(question, patterns, beta=8.0)[0], "Here e^β is 8, not β."


@exercise(
    "04.2",
    "the number of steps after which less than half is left, at a gain of one quarter",
    "Forgetting is geometric for a constant gain. Only gains with a finite sum keep something.",
)
def _():
    yield next(t for t in range(99) if 0.75**t < 0.5)
    yield 2, "Two steps leave 0.75², which is 0.56."
    yield 1, "One step leaves three quarters."
    yield 4, "A step earlier it is below one half already."
