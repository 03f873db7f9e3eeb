"""Exercises of chapters 11 to 19: the block around it, and language models."""

import math
from functools import cache

import numpy as np
import torch

from support.exercises.table import exercise

ANY = math.nan


# ---- 11 Blocks ----


@exercise(
    "11.1",
    "the Jacobian of RMSNorm at u = (0, 0, 3), without ε",
    "Two directions pass. LayerNorm would pass one.",
)
def _():
    from gbattn.blocks import layer_norm_jacobian, rms_norm_jacobian

    u = torch.tensor([0.0, 0.0, 3.0])
    J = rms_norm_jacobian(u, eps=0.0)
    yield J
    yield (
        layer_norm_jacobian(u, eps=0.0),
        "That is LayerNorm, which also loses the mean.",
    )
    yield J * 3**0.5, "What arrives is divided by the root mean square of u."
    yield (
        J / 3**0.5,
        "The root mean square divides by the number of features: √(9/3), not 3.",
    )
    yield (
        torch.eye(3) / 3**0.5,
        "Along u only the length changes, and nothing of that arrives.",
    )


@exercise(
    "11.2",
    "the variance of the features",
    "Below that, ε is what normalises, and the length of the residual stream is heard.",
)
def _():
    yield 1e-5
    yield 2e-5, "That is s². The variance is s² − ε."
    yield math.sqrt(1e-5), "That is the standard deviation."
    yield 5e-6, "Set ε/s³ to half of 1/s, and s² to v + ε."


@exercise(
    "11.3",
    "the mean square of the residual stream, from the number n of sublayers",
    "The stream grows like √n, whatever the sublayers return: only their directions count.",
    on=lambda: [(4,), (32,)],
)
def _():
    yield lambda n: 1 + n
    yield lambda n: n, "The stream has a mean square of one before the first."
    yield lambda n: (1 + n) ** 0.5, "That is its size. The mean square is wanted."
    yield (
        lambda n: (1 + n) ** 2,
        "The corrections are uncorrelated: their mean squares add up, not their sizes.",
    )


@exercise(
    "11.4",
    "the factor a, from n and τ",
    "For many sublayers it is nearly τ√n.",
    on=lambda: [(3, 0.5), (10, 1.0), (50, 0.7)],
)
def _():
    yield lambda n, tau: tau / math.sqrt(math.exp(1 / n) - 1)
    yield (
        lambda n, tau: tau * math.sqrt(n),
        "That is its limit for large n. Solve for a before simplifying.",
    )
    yield lambda n, tau: tau**2 / (math.exp(1 / n) - 1), "That is a²."
    yield (
        lambda n, tau: tau / math.sqrt(math.exp(1 / (2 * n)) - 1),
        "Each step multiplies by a/s, which is the root of a²/s².",
    )


# ---- 12 Signals through depth ----


def uniform_rounds(layers, n):
    """q, p and J after layers of random uniform attention over n orthogonal tokens."""
    q, p, common = 1.0, 0.0, 1 / n
    for _ in range(layers):
        grown = (q + (n - 1) * p) / n
        q, p, common = q + grown, p + grown, 2 * common
    return [q, p, common + (n - 1) / n]


@exercise(
    "12.1",
    "q, p and J after two layers",
    "Size and change grow alike here. With many tokens both grow more slowly.",
)
def _():
    right = uniform_rounds(2, 4)
    yield right
    yield uniform_rounds(1, 4), "That is after one layer."
    yield uniform_rounds(2, 3), "That is for three tokens, as on the page."
    yield (
        [ANY, ANY, (5 / 4) ** 2],
        "J: the changes that enter the second layer are not independent.",
    )
    yield [ANY, ANY, 4.0], "J: attention doubles the mean of the changes only."


@exercise(
    "12.2",
    "the exponent ζ",
    "Without attention a change grows linearly in depth, whatever the weights.",
)
def _():
    from gbattn.signal import VIT_B, power_law_exponent

    yield power_law_exponent(VIT_B._replace(value=0.0))
    yield (
        0.5,
        "That is the exponent of a root. The change is divided by q as it passes, and q is linear in depth.",
    )
    yield 0.0, "The feed-forward sublayers still add to every change."
    yield (
        power_law_exponent(VIT_B),
        "That is with attention. Set its variance to zero.",
    )


@exercise(
    "12.3",
    "ζ and the factor of a stack four times as deep, with attention; then with a second round",
    "The second round changes the exponent of the power, not the kind of law.",
)
def _():
    yield [0.5, 2.0, 0.4, 4**0.4]
    yield (
        [2 / 3, ANY, ANY, ANY],
        "The first: the formula has half of σ₂₁², above and below the line.",
    )
    yield (
        [ANY, 4.0, ANY, ANY],
        "The second: four is the factor of the depth. Raise it to the power ζ.",
    )
    yield (
        [ANY, ANY, 0.6, ANY],
        "The third: attention stands below the line only.",
    )


@exercise(
    "12.4",
    "σ²_OV with three rounds: from the residual, from the input, shared",
    "Shared keys and values grow with the square of the rounds, because their corrections all point one way.",
)
def _():
    from gbattn.signal import Sigmas, attention_gain

    sources = "residual", "input", "shared"
    gain = lambda kv, **more: attention_gain(Sigmas(), "boosted", kv_from=kv, **more)
    yield [gain(kv, rounds=3) for kv in sources]
    yield [gain(kv) for kv in sources], "That is for two rounds."
    yield (
        [3.125, ANY, ANY],
        "The first: the theorem subtracts one at the end.",
    )
    yield (
        [ANY, 2.0, ANY],
        "The second: the gate multiplies a correction, so its square multiplies the mean square.",
    )
    yield (
        [ANY, ANY, 1.5],
        "The third: shared corrections are the same vector. Add them before you square.",
    )


@exercise(
    "12a.1",
    "the loss in nats",
    "Worse than knowing nothing: a table that reads what it wrote repeats itself.",
)
def _():
    E = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    loss = lambda read, comes: -(E[read] @ E.T).log_softmax(-1)[comes].item()
    yield loss(1, 2)
    yield loss(0, 1), "That is after a, when b comes."
    yield math.log(3), "That is a uniform guess."
    yield loss(1, 1), "That is if b comes again."
    yield (
        -loss(1, 2) / math.log(2),
        "A loss is positive, and here in nats, not bits.",
    )


@exercise(
    "12a.2",
    "the two entries of r",
    "Target minus estimate: the residual of the residual stream.",
)
def _():
    E = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]])
    expected = lambda read: (E[read] @ E.T).softmax(-1) @ E
    yield (E[2] - expected(1)).tolist()
    yield expected(1).tolist(), "That is the expected place."
    yield (
        (expected(1) - E[2]).tolist(),
        "That is the gradient, along which the loss rises fastest.",
    )
    yield (
        (E[2] - E[1]).tolist(),
        "That is from b to c, for a model that is sure of b.",
    )
    yield (E[1] - expected(0)).tolist(), "That is after a, when b comes."


@exercise(
    "12a.3",
    "for 16,384 tokens, the `top_k` and the `top_p` that change nothing",
    "The other end is greedy: a single token is left.",
)
def _():
    yield [16_384, 1.0]
    yield [1, ANY], "The first is greedy: only the most probable token is left."
    yield [0, ANY], "The first leaves no token."
    yield [ANY, 0.0], "The second is greedy: only the most probable token is left."


@exercise(
    "12a.4",
    "the temperature, from the margin m and the number V of tokens",
    "More tokens need more cold, but only by a logarithm.",
    on=lambda: [(2.0, 3), (1.0, 50), (2.0, 16_384)],
)
def _():
    yield lambda m, V: m / math.log(99 * (V - 1))
    yield (
        lambda m, V: m / math.log(99 * V),
        "The first token is not one of the others.",
    )
    yield lambda m, V: m / math.log(99), "All V − 1 others may lie at the margin."
    yield (
        lambda m, V: math.log(99 * (V - 1)) / m,
        "That is one over the temperature.",
    )
    yield (
        lambda m, V: m / math.log(0.99 * (V - 1)),
        "The first has 99 times what all others have together.",
    )


# ---- 13 A language model ----


@exercise(
    "13.1",
    "for D = 8, 512 contexts and 100 tokens: the largest rank of the logits, and of the log-probabilities",
    "Width limits what a model can say at once, however deep it is.",
)
def _():
    yield [8, 9]
    yield (
        [8, 8],
        "Log-probabilities subtract one number from each row. What can that add to a rank?",
    )
    yield [100, ANY], "The first: logits are a product, and D is what is between."
    yield (
        [7, ANY],
        "The first: that is with a LayerNorm before the head, which takes one direction.",
    )
    yield (
        [ANY, 100],
        "The second: subtracting one number a row adds a matrix of rank one.",
    )


@exercise(
    "13.2",
    "whether the shorter prompt goes on as it does alone, once a mask says which tokens are padding",
    "A mask hides keys. The last column is still a padding token, and its logits are read.",
)
def _():
    yield "no"
    yield (
        "yes",
        "The mask hides padding as a key. Whose logits does the last column hold?",
    )


@exercise(
    "13.3",
    "the width from which the beam is certain to find the best of all continuations",
    "A beam that is certain is hardly cheaper than trying everything. A narrower one is a wager.",
)
def _():
    yield 6**3
    yield (
        6**4,
        "So many continuations are there. Before the last token one step fewer has been taken.",
    )
    yield 6**3 - 1, "The row that is dropped may be the parent of the best."
    yield 6, "That is certain for two tokens."
    yield 4 * 6, "Continuations multiply."


@exercise(
    "13.4",
    "the width that matches with the head, and the one without",
    "A wider model pays for a wider head, too. What is counted decides what is fair.",
)
def _():
    from gbattn.language_model import ModelConfig, model_cost

    def training(width, head, **options):
        config = ModelConfig(vocab_size=16_384, d_model=width, **options)
        flops = model_cost(config).training_flops / config.max_length
        return flops - (0 if head else 6 * config.vocab_size * width)

    widths = range(256, 384, 4)
    matched = []
    for head in (True, False):
        goal = training(256, head, attention="boosted")
        matched.append(min(widths, key=lambda d: abs(training(d, head) - goal)))
    yield matched
    yield (
        matched[::-1],
        "The two are exchanged. A wider model pays for a wider head, too.",
    )
    yield [256, ANY], "The first: at equal width the boosted model does more."
    yield [ANY, matched[0]], "The second: without the head more width is needed."


# ---- 14 Corpora, 15 Training ----


@exercise(
    "14.1",
    "the better model",
    "Perplexity belongs to a tokenizer, bits per byte to the text.",
)
def _():
    bits = {
        name: math.log2(ppl) / per
        for name, ppl, per in (("first", 30, 4.0), ("second", 28, 3.8))
    }
    yield min(bits, key=bits.get)
    yield (
        max(bits, key=bits.get),
        "Its tokens are shorter, so it predicts more of them. Compare bits per byte.",
    )
    yield (
        "neither",
        "Compute bits per byte to three digits: the logarithm to base 2, over the bytes per token.",
    )


@exercise(
    "14.2",
    "the tokens that are left after the fourth merge",
    "Where all pairs are equally frequent, the rule for ties decides what becomes a token.",
)
def _():
    yield 8
    yield 9, "So many are left after the third merge."
    yield 7, "Each pair occurs once, so a merge saves one token."


@exercise(
    "15.1",
    "how far the weight moves",
    "A gradient far below ε is seen in its size, one far above in its sign alone.",
)
def _():
    yield 0.1 * 1e-12 / (1e-12 + 1e-8)
    yield (
        0.1,
        "That is for a gradient far above ε. Here ε is far above the gradient.",
    )
    yield 1e-4, "That is the ratio. The step is η times it."
    yield 1e-13, "Divide by √v + ε, which is nearly ε."


@exercise(
    "15.2",
    "the updates if each epoch drops its last batch, and those if batches run on",
    "Ten updates of eighteen thousand: little, but not the same run.",
)
def _():
    windows = 10_000_000 // 256
    yield [15 * (windows // 32), round(15 * windows / 32)]
    yield (
        [round(15 * windows / 32), ANY],
        "The first: an epoch has whole batches only.",
    )
    yield [windows // 32, ANY], "The first is of one epoch."
    yield (
        [ANY, 15 * (windows // 32)],
        "The second: windows that are left go into the next pass.",
    )


@exercise(
    "15.3",
    "how far the first weight travels, in units of η, and the other one",
    "One large gradient moves a weight for thirty steps, since v forgets it more slowly than m.",
)
def _():
    def travelled(gradients, beta1=0.9, beta2=0.999):
        m = v = w = 0.0
        for t, g in enumerate(gradients, 1):
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w += m / (1 - beta1**t) / (math.sqrt(v / (1 - beta2**t)) + 1e-8)
        return w

    yield [travelled([1.0] + 3000 * [0.0]), travelled(100 * [1.0])]
    yield [1.0, ANY], "The first: m remembers the gradient after the step."
    yield (
        [10.0, ANY],
        "The first: the memory of m adds up to ten gradients, but the bias of both means is mended, too.",
    )
    yield [ANY, 1.0], "The second makes a step of η each time."


# ---- 16 How to compare ----


@exercise(
    "16.1",
    "the ends of the 95 % interval of the four differences, the lower first",
    "A fourth pair, and zero is left out: the spread is known better, and the mean varies less.",
)
def _():
    from gbattn.comparison import paired_interval

    d = np.array([-2.0, -1.0, -3.0, -2.0])
    around = lambda half: [d.mean() - half, d.mean() + half]
    sd = d.std(ddof=1)
    yield list(paired_interval(d))
    yield (
        around(4.303 * sd / 2),
        "4.30 is for three pairs. Four have three degrees of freedom.",
    )
    yield around(1.96 * sd / 2), "1.96 is for a spread that is known."
    yield (
        around(3.182 * sd),
        "The mean of four varies less than one of them: divide by √4.",
    )
    yield around(3.182 * d.std() / 2), "That spread divides by n. Divide by n − 1."
    yield list(paired_interval(d[:3])), "That is the interval of the first three."


@exercise(
    "16.2",
    "the probability in five pairs, and in two",
    "Five of one sign are not enough for 0.05; six would be.",
)
def _():
    yield [2 / 2**5, 2 / 2**2]
    yield (
        [1 / 2**5, ANY],
        "The first is of one sign alone. All five could also be positive.",
    )
    yield (
        [ANY, 1 / 2**2],
        "The second is of one sign alone. Both could also be positive.",
    )


@exercise(
    "16.3",
    "how many questions Holm's rule decides in the first case, and in the second",
    "Holm decides all that Bonferroni does, and sometimes more.",
)
def _():
    from gbattn.comparison import holm

    cases = [0.02, 0.04, 0.03], [0.01, 0.04, 0.02]
    yield [sum(p < 0.05 for p in holm(case)) for case in cases]
    yield (
        [ANY, 1],
        "The second is Bonferroni's. Holm multiplies the next by two, and the last by one.",
    )
    yield [3, ANY], "The first is without a correction."
    yield [2, ANY], "The first: Holm stops at the first that fails."
    yield [1, ANY], "The first: 0.02 times three is above 0.05."


@exercise(
    "16.4",
    "the pairs for the interval, how often it leaves zero out then, and the pairs for nine times in ten",
    "A difference just seen is seen again about every other time, or a little more often. Power wants more pairs.",
)
def _():
    from scipy.special import nctdtr, stdtrit

    t, size = lambda n: stdtrit(n - 1, 0.975), 1.5
    power = lambda n: float(1 - nctdtr(n - 1, size * n**0.5, t(n)))
    least = next(n for n in range(2, 99) if t(n) < size * n**0.5)
    most = next(n for n in range(2, 99) if power(n) >= 0.9)
    yield [least, power(least), most]
    yield (
        [2, ANY, ANY],
        "The first: 1.96 is for a spread that is known. With two pairs t is 12.7.",
    )
    yield (
        [ANY, 0.95, ANY],
        "The second: 95 % is how often the interval holds the true difference, not how often it leaves zero out.",
    )
    yield [ANY, ANY, most - 1], "The third: one pair fewer falls just short."


@exercise(
    "16.5",
    "the seeming advantage in nats",
    "As large as a run's own noise, for nothing. So a rate is chosen on other runs than those reported.",
)
def _():
    from scipy.integrate import quad
    from scipy.stats import norm

    least = lambda n: quad(
        lambda z: z * n * norm.pdf(z) * norm.sf(z) ** (n - 1), -9, 9
    )[0]
    yield -0.004 * least(4)
    yield -0.004 * least(2), "That is the better of two."
    yield (
        -0.004 * least(4) / 2,
        "It is not the mean of four that is reported, but the best.",
    )
    yield (
        0.0,
        "Equally good rates give different losses. The best of them is reported.",
    )
    yield -least(4), "That is in standard deviations of a run."


# ---- 17 Experiments as data ----


@exercise(
    "17.1",
    "the change that gives another id",
    "What decides a result decides the id, and nothing else does.",
)
def _():
    yield "seed"
    yield "label", "A label does not change what is computed."
    yield "experiment", "The run would be the same; so is its id."
    yield "default", "A default that is stated is the same setting."


# ---- 17a The models of the results ----


@exercise(
    "17a.1",
    "the perplexity",
    "First the mean of the losses, then e to its power.",
)
def _():
    yield 8.0
    yield 17.0, "That is the mean of the perplexities. The mean is that of the losses."
    yield 3 * math.log(2), "That is the mean loss, in nats."
    yield 64 / 17, "That is one over the mean probability."


@exercise(
    "17a.2",
    "the change of perplexity in per cent",
    "The perplexity is e to the power of the loss. A fall is negative.",
)
def _():
    yield 100 * math.expm1(-0.2)
    yield -20.0, "That is nearly right for small changes only: a loss stands in an exponent."
    yield -100 * math.expm1(-0.2), "It falls: the change is negative."
    yield 100 * math.exp(-0.2), "That is what is left of it."
    yield math.expm1(-0.2), "In per cent."


@exercise(
    "17a.3",
    "the four shifted keys",
    "The factor of a key itself is 1 + a.",
)
def _():
    k = torch.tensor([3.0, 1.0, 4.0, 1.0])
    before, after = k.roll(1), k.roll(-1)
    before[0] = after[-1] = 0
    yield (k + before) / 2
    yield (before - k) / 2, "That has a where 1 + a stands."
    yield (k + after) / 2, "That is the key after: a shift looks back."


@exercise(
    "17a.4",
    "the share of the shift's gain that known pairs have",
    "The gain of a kind of tokens counts as often as its tokens come.",
    tolerance=0.05,
)
def _():
    share = {"starts": (0.45, 0.02), "continues": (0.37, 0.05), "other": (0.11, 0.01)}
    gain = {"starts": (0.08, 0.41), "continues": (0.13, 2.04), "other": (0.12, 0.61)}
    new, known = (sum(share[k][i] * gain[k][i] for k in share) for i in (0, 1))
    yield known / (new + known)
    yield known, "That is their part of the gain in nats, not its share."
    yield 0.08, "That is their share of the tokens."
    means = [sum(gain[k][i] for k in gain) for i in (0, 1)]
    yield means[1] / sum(means), "Weight each gain by its share of the tokens."


@exercise(
    "17a.5",
    "the attention weights, T by T, of T tokens",
    "A token finds what came after its copies. So one head with the shift does what takes two attentions without it.",
    on=lambda: [(torch.tensor([3, 1, 4, 1, 5, 3, 1, 0]),), (torch.arange(9) % 4,)],
)
def _():
    def weights(own=-1.0, previous=1.0, causal=True, back=1):
        def of(tokens):
            keys = torch.nn.functional.one_hot(tokens).double()
            before = keys.roll(back, 0)
            before[0 if back > 0 else -1] = 0
            scores = 20 * keys @ ((1 + own) * keys + previous * before).T
            later = torch.ones(len(keys), len(keys)).triu(1).bool()
            return scores.masked_fill(later & causal, -math.inf).softmax(-1)

        return of

    yield weights()
    yield weights(causal=False), "A token may attend to itself and to earlier ones only."
    yield weights(previous=0.0, own=0.0), "These keys are not shifted."
    yield weights(own=0.0), "With a = −1 nothing is left of a token's own key."
    yield weights(back=-1), "The shift brings the key of the token before, not after."


# ---- 18 Results ----


@cache
def report():
    from support.reports import Report

    return Report()


@cache
def pairs(*of):
    """Paired differences of test losses, in nats."""
    return np.subtract(*report().losses(*of))


def long_run():
    return pairs("boosted_shift", "standard_shift", "shift-length")


def against_flops():
    from support.verdicts import BOOSTED, WARM

    return pairs(BOOSTED, "wider_flops", WARM, "mini-warm-flops")


@exercise(
    "18.1",
    "the ends of the 95 % interval of the first three pairs, in nats, the lower first",
    "Three pairs that agree within a sixth of their mean decide. With a spread of half the mean they would not.",
)
def _():
    from gbattn.comparison import paired_interval

    d = long_run()[:3]
    mean, sd = d.mean(), d.std(ddof=1)
    around = lambda half: [mean - half, mean + half]
    yield list(paired_interval(d))
    yield (
        around(1.96 * sd / 3**0.5),
        "1.96 is for a spread that is known. With three pairs t is 4.30.",
    )
    yield (
        around(4.303 * sd),
        "The mean of three varies less than one of them: divide by √3.",
    )
    yield (
        around(4.303 * d.std() / 3**0.5),
        "That spread divides by n. Divide by n − 1.",
    )
    yield (
        around(3.182 * sd / 3**0.5),
        "Three pairs have two degrees of freedom, not three.",
    )


@exercise(
    "18.2",
    "the smallest margin, in per cent of perplexity, within which the ten pairs are equivalent",
    "So 3 % is shown and 1.5 % is not: the lead may be nothing, or more than that. A margin is fixed before the runs.",
)
def _():
    from gbattn.comparison import equivalent, paired_interval

    d = against_flops()
    grid = np.arange(0.01, 10, 0.01)
    yield float(next(x for x in grid if equivalent(d, math.log1p(x / 100))))
    yield (
        100 * math.expm1(-paired_interval(d)[0]),
        "That is the end of the 95 % interval. `equivalent` makes two one-sided tests.",
    )
    yield (
        100 * math.expm1(-d.mean()),
        "That is the mean. A margin must hold what the spread allows, too.",
    )
    yield (
        100 * math.expm1(paired_interval(d)[1]),
        "That is one side. The difference must lie within the margin on both.",
    )


@exercise(
    "18.3",
    "the pairs that decide it nine times in ten",
    "Three times the runs, for a difference of one per cent. That is why it is open.",
)
def _():
    from scipy.special import nctdtr, stdtrit

    d = against_flops()
    size = abs(d.mean()) / d.std(ddof=1)
    power = lambda n: 1 - nctdtr(n - 1, size * n**0.5, stdtrit(n - 1, 0.975))
    even = next(n for n in range(2, 999) if stdtrit(n - 1, 0.975) < size * n**0.5)
    normal = math.ceil(((1.96 + 1.2816) / size) ** 2)
    yield next(n for n in range(2, 999) if power(n) >= 0.9)
    yield (
        even,
        "So many decide if the mean comes out again just so. By chance that is every other time.",
    )
    yield (
        normal,
        "That takes the spread as known (1.96). Student's t needs a little more.",
    )
    yield len(d), "Ten pairs left it open. How often would ten others decide it?"


# ---- 19 Diagnosis ----


@exercise(
    "19.1",
    "in (a) the mean cosine of the steps, and of exchanged steps; then the same in (b)",
    "Only the difference between a step and the steps of other tokens says that it is made for its token.",
)
def _():
    a = math.sqrt(0.5)
    yield [[a, -a], [a, a]]
    yield (
        [[1.0, ANY], [ANY, ANY]],
        "(a): −u is (½, −½), which also lowers the other class. What is its angle with (1, 0)?",
    )
    yield (
        [[0.5, ANY], [ANY, ANY]],
        "(a): that is the inner product. Divide it by both lengths.",
    )
    yield (
        [[ANY, 0.0], [ANY, ANY]],
        "(a), exchanged: the steps are at right angles to each other. Are they to −u?",
    )
    yield (
        [[ANY, ANY], [ANY, -a]],
        "(b), exchanged: the two steps are the same.",
    )


@exercise(
    "19.2",
    "whether a step with a positive cosine can raise the loss of the three examples",
    "A cosine speaks of small steps. So the page also measures what the whole step does.",
)
def _():
    yield "yes"
    yield (
        "no",
        "Downhill at the start says nothing of a long step. Follow it further.",
    )
