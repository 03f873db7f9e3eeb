"""Exercises of chapters 5 to 10: boosting inside a layer."""

import math

import torch

from gbattn.boosted import GradientBoostedAttention
from support.exercises.table import exercise

ANY = math.nan


# ---- 5 Boosting ----


@exercise(
    "05.1",
    "what is left of (−2, −1, 3) after one stump at shrinkage one half",
    "Its square is 3.875, and 14 − ν(2 − ν)·13.5 is 3.875: half a step takes three quarters of what a whole one does.",
)
def _():
    r = torch.tensor([-2.0, -1.0, 3.0])
    stump = torch.tensor([-1.5, -1.5, 3.0])
    yield (r - stump / 2).tolist()
    yield (
        (r - stump).tolist(),
        "That is left after the whole stump. Add half of it.",
    )
    yield (
        (stump / 2).tolist(),
        "That is what half a stump adds. What does it leave?",
    )
    yield (
        (r + stump / 2).tolist(),
        "The sign: the stump is subtracted from the residual.",
    )
    yield (
        (0.5 * r).tolist(),
        "Half of the stump is added, not half of the residual.",
    )


@exercise(
    "05.2",
    "the number of rounds",
    "Many small rounds cost a little more than few large ones, and make a path on which one can stop anywhere.",
)
def _():
    left = lambda M: (1 - 0.1 * 0.5) ** M
    yield next(M for M in range(100) if left(M) <= 0.5)
    yield (
        10,
        f"Ten steps of 0.1 add up to one, but each is a share of what is left: {left(10):.2f} of the mode remains.",
    )
    yield 13, f"Nearly: thirteen leave {left(13):.4f}, a little more than one half."
    yield 7, "Each round takes ν times λ, which is 0.05, not 0.1."
    yield (
        5,
        "Each round takes a share of what is left, and that share is ν times λ.",
    )


@exercise(
    "05.3",
    "what a boosted smoother with a searched step still is, in y",
    "The step ρ depends on the direction of r, and not on its length.",
)
def _():
    yield "proportional"
    yield (
        "additive",
        "ρ is a ratio of two squares in r. What does it do for a sum of two residuals?",
    )
    yield (
        "both",
        "Then it would be linear. ρ depends on r: try two targets and their sum.",
    )
    yield "neither", "Multiply y by 3. What happens to ρ?"


# ---- 5a Friedman's machine ----


@exercise(
    "05a.1",
    "the step ρ along the average of the residual",
    "The average had the wrong length and sign, which one number repairs. A wrong direction it cannot repair.",
)
def _():
    yield -2.0
    yield (
        2.0,
        "The sign: the average points away from the residual, so the search steps back.",
    )
    yield -1.0, "That is ⟨r, c⟩. Divide it by ‖c‖²."
    yield -0.5, "That is ⟨r, c⟩ times ‖c‖², or λ. Divide instead."
    yield 1.0, "That is the step without a search."


@exercise(
    "05a.2",
    "the loss of the 90 % quantile, of tensors of one shape",
    "Boosting asks for nothing else: its gradient comes from autograd, its constant from the line search.",
    on=lambda: [(torch.randn(20), torch.randn(20))],
)
def _():
    loss = lambda y, F, q=0.9: torch.maximum(q * (y - F), (q - 1) * (y - F))
    yield lambda y, F: loss(y, F)
    yield (
        lambda y, F: loss(y, F, 0.1),
        "This finds the 10 % quantile: a row above the estimate must cost more.",
    )
    yield (
        lambda y, F: loss(y, F).mean(),
        "The losses of all rows are wanted, not their mean.",
    )
    yield (
        lambda y, F: loss(y, F).sum(),
        "The losses of all rows are wanted, not their sum.",
    )
    yield (
        lambda y, F: (y - F).abs(),
        "This finds the median: both sides cost the same.",
    )


@exercise(
    "05a.3",
    "the step ρ, from y and h of ±1 and estimates F, tensors of one shape",
    "Chosen so, and with learners fitted to the same weights, the rounds are those of AdaBoost.",
    on=lambda: [
        (torch.randn(40).sign(), torch.randn(40), torch.randn(40).sign())
        for _ in range(3)
    ],
)
def _():
    def wrong(y, F, h):
        return (-y * F).softmax(0)[h != y].sum()

    step = lambda wrong: ((1 - wrong) / wrong).log() / 2
    yield lambda y, F, h: step(wrong(y, F, h))
    yield (
        lambda y, F, h: 2 * step(wrong(y, F, h)),
        "Set the derivative in ρ to zero: which power of e is (1 − ε)/ε?",
    )
    yield (
        lambda y, F, h: -step(wrong(y, F, h)),
        "The sign: a learner that is mostly right should be added.",
    )
    yield (
        lambda y, F, h: step((h != y).double().mean()),
        "This counts all rows alike. At F = 0 it is right; later each row has its own loss.",
    )
    yield (
        lambda y, F, h: step(wrong(y, -F, h)),
        "A row that F gets right should count less, not more.",
    )
    yield (
        lambda y, F, h: 1 - 2 * wrong(y, F, h),
        "That is the slope of the loss at ρ = 0. How far does the loss fall?",
    )


# ---- 5b What a head is ----


@exercise(
    "05b.1",
    "the weights of the query of it for the keys of dog, cat and it",
    "Equal keys get equal weights: what a head is to tell apart must be in the tokens.",
)
def _():
    def weights(scores):
        return 2.0 ** torch.tensor(scores) / (2.0 ** torch.tensor(scores)).sum()

    yield weights([2.0, 2.0, -2.0])
    yield [4.0, 4.0, 0.25], "Divide the weights by their sum."
    yield (
        weights([2.0, 0.0, -2.0]),
        "That is with a verb in the middle. The key of a noun is 1.",
    )
    yield (
        weights([-1.0, -1.0, 1.0]),
        "That takes the key of the pronoun as its query.",
    )
    yield (
        weights([2.0, 2.0, 2.0]),
        "Then its own key would be that of a noun. A pronoun has another one.",
    )
    yield (
        [0.5, 0.5, 0.0],
        "No weight of a softmax is zero: the pronoun has a small one.",
    )


@exercise(
    "05b.2",
    "how many parameters the layer with 16 heads has, and how wide each head is",
    "Heads share the width of the layer, so more of them cost nothing, and each can say less.",
)
def _():
    width, heads = 64, 16
    yield [4 * width**2, width / heads]
    yield (
        [3 * width**2, width / heads],
        "A fourth matrix mixes what the heads return.",
    )
    yield (
        [heads * 4 * width**2, width],
        "A head is not as wide as the layer: the heads share its width.",
    )
    yield (
        [4 * width**2, width / 4],
        "That is the width of one of four heads.",
    )


# ---- 6 Attention ----


@exercise(
    "06.1",
    "what token 3 receives",
    "A query may match several keys, and receives their mean, not their sum.",
)
def _():
    from gbattn.smoothers import softmax_weights

    values = torch.tensor([10.0, 20.0, 30.0])
    of = lambda query: (
        softmax_weights(torch.tensor([query]), torch.eye(3), 1 / math.log(8))
        @ values
    ).item()
    yield of([1.0, 1.0, 0.0])
    yield 15.0, "Token 3 keeps a little weight on itself: 1 against 8 and 8."
    yield 270.0, "Divide by the sum of the weights."
    yield (
        20.0,
        "Equal weights would give that. What is the score of token 3's own key?",
    )


@exercise(
    "06.2",
    "the variance of the scores",
    "Softmax sees scores four times as large as meant. So projections are drawn small, or queries and keys normalised.",
)
def _():
    yield 16
    yield (
        4,
        "Both q and k have standard deviation 2; a product has the product of the variances.",
    )
    yield 1, "That is for entries of variance one."
    yield (
        16 * 64,
        "That is before the division by √K, which divides the variance by K.",
    )
    yield 2, "That is the standard deviation of an entry."


@exercise(
    "06.4",
    "the output with a zero key and a zero value added, from q, k and v of shape (B, H, T, K); scores are over √K",
    "A layer with such a key can return nothing where no key fits.",
    on=lambda: [torch.randn(3, 1, 2, 6, 4).unbind()],
)
def _():
    from gbattn.attention import attend

    def free(q, k, v, scale=0.5):
        Z = (q @ k.mT * scale).exp().sum(-1, keepdim=True)
        return attend(q, k, v) * Z / (Z + 1)

    padded = lambda x: torch.cat([x, torch.zeros_like(x[:, :, :1])], dim=2)
    yield lambda q, k, v: free(q, k, v)
    yield (
        lambda q, k, v: attend(q, k, v),
        "That is ordinary attention. One more key takes some of the weight.",
    )
    yield (
        lambda q, k, v: free(q, k, v, 1.0),
        "Z sums the exponentials of the scores after the division by √K.",
    )
    yield (
        lambda q, k, v: attend(
            q, padded(k), torch.cat([v, v.mean(2, keepdim=True)], dim=2)
        ),
        "The new value is zero, not the mean.",
    )


@exercise(
    "06a.1",
    "the score",
    "Scores need not fall with the distance: this one turns negative, and comes back.",
)
def _():
    from gbattn.positions import rotary_angles, rotate

    x = torch.tensor([[1.0, 0.0], [1.0, 0.0]])[None, None]
    at = lambda places: rotate(x, rotary_angles(torch.tensor(places), 2))[0, 0]
    score = lambda places: (at(places)[0] @ at(places)[1]).item()
    yield score([7, 5])
    yield score([7, 6]), "That is at a distance of one."
    yield math.cos(math.radians(2)), "The angle is two radians, not two degrees."
    yield (
        math.sin(2),
        "The inner product of two unit vectors is the cosine of their angle.",
    )
    yield (
        score([7, 0]),
        "That is at a distance of seven. What counts is how far apart the two are.",
    )


@exercise(
    "06a.2",
    "the key, of length one",
    "So a head is aimed: its query and key decide at which distance the score is largest.",
)
def _():
    from gbattn.positions import rotary_angles, rotate

    turn = lambda places: rotate(
        torch.tensor([[[[1.0, 0.0]]]]), rotary_angles(torch.tensor([places]), 2)
    ).flatten()
    yield turn(1)
    yield (
        turn(-1),
        "That aims at the token after. The key is turned less than the query, so it must start ahead.",
    )
    yield [1.0, 0.0], "That aims at the token itself."
    yield turn(2), "That aims two places back."


@exercise(
    "06a.3",
    "for K = 8, the order in which the paper's features are taken",
    "Weights can be carried from one convention to the other by sorting their rows.",
)
def _():
    yield [0, 2, 4, 6, 1, 3, 5, 7]
    yield (
        [0, 4, 1, 5, 2, 6, 3, 7],
        "That is the inverse: it turns the book's order into the paper's.",
    )
    yield (
        list(range(8)),
        "Pair 0 of the paper is features 0 and 1; here it is features 0 and 4.",
    )


@exercise(
    "06b.1",
    "the rows that are computed, the naive way and with a cache",
    "The naive way grows with the square of the text, the cached way with its length.",
)
def _():
    yield [sum(range(100, 150)), 149]
    yield (
        [sum(range(101, 151)), ANY],
        "The first: the first new token is drawn after the 100 rows of the prompt.",
    )
    yield (
        [50 * 100, ANY],
        "The first: each pass reads one token more than the pass before.",
    )
    yield (
        [sum(range(1, 151)), ANY],
        "The first: the prompt is there at once. Its tokens are read in a single pass.",
    )
    yield [ANY, 150], "The second: the last token is written and not read."
    yield [ANY, 50], "The second: the prompt has to be read, too, once."


@exercise(
    "06b.2",
    "the rows that appending has written, for T = 1000",
    "Half a million rows instead of a thousand: that is why room is reserved.",
)
def _():
    T = 1000
    yield T * (T + 1) // 2
    yield T * (T - 1) // 2, "The new row is written, too."
    yield T * T, "The copies grow: the first has one row, not T."
    yield T, "So many rows does reserved room write."


@exercise(
    "06b.3",
    "the bytes of the cache",
    "Seven such texts have more bytes in their caches than a model of 124 million weights, the size of this one.",
)
def _():
    yield 2 * 12 * 12 * 64 * 1024 * 2
    yield 12 * 12 * 64 * 1024 * 2, "Values are stored beside the keys."
    yield 2 * 12 * 12 * 64 * 1024 * 4, "float16 has two bytes a number."
    yield 2 * 12 * 64 * 1024 * 2, "Layers and heads: there are twelve of each."


@exercise(
    "06b.4",
    "whether the order of the keys matters",
    "Attention sees a set, and positions are in the keys already.",
)
def _():
    yield "no"
    yield (
        "yes",
        "Where would the order enter, once the keys are turned by their positions?",
    )


@exercise(
    "06c.1",
    "the weights and biases of the layer, with four heads of keys and values, and with two",
    "Grouped keys and values save half of two of the four matrices.",
)
def _():
    from gbattn.layers import MultiHeadAttention

    size = lambda **options: sum(
        w.numel() for w in MultiHeadAttention(16, 4, **options).parameters()
    )
    full, grouped = size(), size(n_kv_heads=2)
    yield [full, grouped]
    yield [size(bias=False), ANY], "The first leaves out the biases."
    yield [ANY, size(n_kv_heads=2, bias=False)], "The second leaves out the biases."
    yield [3 * 16 * 17, ANY], "There are four matrices: the output, too."
    yield [ANY, full // 2], "Query and output keep their size."


@exercise(
    "06c.3",
    "the ranks of the weights of linear attention, without and with a causal mask",
    "A mask acts entry by entry and can raise a rank. So the limit binds where all may attend to all.",
)
def _():
    from gbattn.layers import LinearAttention

    def rank(causal):
        (one,) = (
            LinearAttention(16, 4)
            .explain(torch.randn(1, 32, 16), causal=causal)
            .rounds
        )
        return int(torch.linalg.matrix_rank(one.weights).max())

    yield [rank(causal=False), rank(causal=True)]
    yield (
        [4, 4],
        "A mask is no product of features. A triangle with a positive diagonal: what is its determinant?",
    )
    yield (
        [32, 32],
        "Without a mask the weights are a product of two matrices with four columns, with rows divided by a number.",
    )
    yield (
        [16, ANY],
        "That is the width of the model. Each head has features of its own: how many?",
    )


# ---- 7 Twicing ----


@exercise(
    "07.1",
    "the rounds for the bend, and those for the mode",
    "Each round multiplies what is left. Rounds are an expensive way to sharpen what attention keeps little of.",
)
def _():
    rounds = lambda keeps, left: math.ceil(math.log(left) / math.log(1 - keeps))
    A = torch.tensor([[3.0, 1, 0], [1, 2, 1], [0, 1, 3]]) / 4
    least = torch.linalg.eigvalsh(A).min().item()
    yield [rounds(least, 0.05), rounds(0.01, 0.01)]
    yield [rounds(least, 0.05) - 1, ANY], "The first: one round fewer leaves 0.056."
    yield (
        [rounds(0.75, 0.05), ANY],
        "The first is for the slope, of which a quarter is left. The bend keeps three quarters.",
    )
    yield [ANY, rounds(0.1, 0.01)], "The second is for λ = 0.1."
    yield [ANY, 99], "Shares of what is left multiply; they do not add up."


@exercise(
    "07.2",
    "the frequency ω above which each round makes the error larger",
    "Periods shorter than six tokens grow: a head that copies must not be given too many rounds.",
)
def _():
    yield math.pi / 3
    yield math.pi / 2, "At this ω the factor is √2 already. Set 2 sin(ω/2) to one."
    yield math.pi / 6, "That is half of it: the sine has ω/2 in it."
    yield 6.0, "That is the period; ω is 2π over it."
    yield (
        2 * math.pi / 3,
        "At this ω the factor is √3 already. Set 2 sin(ω/2) to one.",
    )


@exercise(
    "07.3",
    "the order of the bias in the bandwidth",
    "Two rounds need not have the same weights to raise the order. Chapter 8 takes other ones.",
)
def _():
    yield 4
    yield 2, "That is one round's. The residual is a product of two factors."
    yield 3, "Both averages are symmetric, so each factor has an even order."
    yield 6, "That would take three rounds."


# ---- 8 Gradient-boosted attention ----


@exercise(
    "08.1",
    "the correction and the gate of token three",
    "The gate was set for a value of 3. A layer must find such numbers before it sees the tokens.",
)
def _():
    r = torch.tensor([0.0, 0.0, 2.0])
    c = (
        (2.0 ** ((r - 1)[:, None] * r)) @ r / (2.0 ** ((r - 1)[:, None] * r)).sum(1)
    )[2]
    gate = lambda c: (4 * c - 6).sigmoid().item()
    yield [c.item(), gate(c)]
    yield (
        [192 / 66, ANY],
        "The first is that of a value of 3. The query, r − 1, changes too.",
    )
    yield [2 * 16 / 18, ANY], "The query is r − 1, which is 1, not 2."
    yield (
        [2.0, ANY],
        "Token three attends to itself most, but not only. What are its weights?",
    )
    yield [ANY, (4 * c - 6).item()], "The second goes through the sigmoid."
    yield (
        [ANY, gate(torch.tensor(2.0))],
        "The gate reads the correction c, not the residual.",
    )


@exercise(
    "08.2",
    "what is set to zero",
    "The layer starts as it was, to the last bit, and the value projection gets a gradient at once.",
)
def _():
    yield "value"
    yield (
        "gate",
        "A gate is a sigmoid. At exactly zero its gradient is zero too, and its bias would be −∞.",
    )
    yield (
        "query",
        "With a zero query all scores are zero: the correction is a mean, not zero.",
    )
    yield (
        "key",
        "With zero keys all scores are zero: the correction is a mean, not zero.",
    )
    yield (
        "out",
        "The output projection is shared by both rounds: at zero the whole layer is silent.",
    )


def weights_and_inputs():
    """Inputs, and the matrices of a layer of three rounds whose keys and values read
    x, twice; see the function of chapter 8."""
    for seed in (0, 1):
        torch.manual_seed(seed)
        layer = three_rounds_of_input()
        parts = dict(Q="query", K="key", V="value")
        W = {"out": layer.out.weight.T}
        for m, part in enumerate((layer, *layer.corrections)):
            W |= {
                n + str(m): getattr(part, name).weight.T
                for n, name in parts.items()
            }
        for m, part in enumerate(layer.corrections, start=1):
            W |= {f"g{m}": part.gate.weight.T, f"b{m}": part.gate.bias}
        W = {name: weight.detach() for name, weight in W.items()}
        yield torch.randn(2, 5, 8, dtype=torch.float64), W, 2


def three_rounds_of_input():
    """A layer as in 08.4, with random weights, those of the gates among them."""
    layer = GradientBoostedAttention(
        8, 2, rounds=3, kv_from="input", bias=False, dtype=torch.float64
    )
    for part in layer.corrections:
        torch.nn.init.normal_(part.gate.weight)
    return layer


def by_the_library(x, W, heads):
    """The answer of 08.4, of the library's layer with the weights W."""
    layer = three_rounds_of_input()
    parts = dict(Q="query", K="key", V="value")
    with torch.no_grad():
        layer.out.weight.copy_(W["out"].T)
        for m, part in enumerate((layer, *layer.corrections)):
            for n, name in parts.items():
                getattr(part, name).weight.copy_(W[n + str(m)].T)
        for m, part in enumerate(layer.corrections, start=1):
            part.gate.weight.copy_(W[f"g{m}"].T)
            part.gate.bias.copy_(W[f"b{m}"])
        return layer(x)


def by_hand(keys_read_x=True, rounds=3, renewed=True, gated=True):
    """What goes wrong in 08.4 without one of its parts."""

    def boosted(x, W, heads):
        def attention(m, *sources):
            split = lambda z: z.unflatten(-1, (heads, -1)).transpose(1, 2)
            q, k, v = (split(z @ W[n + m]) for n, z in zip("QKV", sources))
            A = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
            return (A @ v).transpose(1, 2).flatten(2)

        F = attention("0", x, x, x)
        r = x - F
        for m in "12"[: rounds - 1]:
            r = x - F if renewed else r
            source = x if keys_read_x else r
            c = attention(m, r, source, source)
            g = torch.cat([F, c], -1) @ W["g" + m] + W["b" + m]
            F = F + (g.sigmoid() if gated else 1) * c
        return F @ W["out"]

    return boosted


@exercise(
    "08.4",
    "what the layer gives for tokens (B, T, D), a dict of matrices and a number of heads",
    'That is kv_from="input" with three rounds. All else in the library is masks, caches and checks.',
    on=lambda: list(weights_and_inputs()),
)
def _():
    yield by_the_library
    yield by_hand(keys_read_x=False), "Keys and values of later rounds read x."
    yield by_hand(rounds=2), "These are two rounds. A third one follows."
    yield (
        by_hand(renewed=False),
        "The third round has a residual of its own, x − F.",
    )
    yield by_hand(gated=False), "The gate is the sigmoid of its map of F and c."


def agreeing(own=1, before=1):
    """Weights of the last token of a word, by what a token scores for coming after the
    last letter, and for coming two places after the last but one."""

    def weights(word):
        scores = [
            own * (j > 0 and word[j - 1] == word[-1])
            + before * (j > 1 and word[j - 2] == word[-2])
            for j in range(len(word))
        ]
        return (10.0 * torch.tensor(scores)).softmax(0)

    return weights


@exercise(
    "08.5",
    "the weights that the last token of a word gives to each of its tokens in round 2",
    "Where no place has both letters, those with one share the weight: the layer falls back to a shorter memory.",
    on=lambda: [("entertainment",), ("abcabdab",), ("abab",)],
)
def _():
    yield agreeing()
    yield agreeing(before=0), "It finds what came after the last letter alone."
    yield (
        agreeing(own=0),
        "It asks only for the letter two back, and not for the one before.",
    )
    yield (
        agreeing(before=-1),
        "A sign: each residual negates what a round has added. What sign has the letter two back?",
    )
    yield (
        agreeing(own=-1),
        "A sign: in r the letter before stands with a minus, which the score has to take back.",
    )
    yield (
        agreeing(own=-1, before=-1),
        "Both signs: the last token shuns what agrees with it.",
    )


# ---- 8a Does it learn to correct? ----


@exercise(
    "08a.1",
    "half of the squared residual after the step",
    "Half of the step goes sideways, and the loss still halves.",
)
def _():
    left = torch.tensor([1.0, 0.0]) - torch.tensor([0.5, 0.5])
    yield (left.square().sum() / 2).item()
    yield (
        0.5,
        "That is the square after the step, and half of the square before it. Take half.",
    )
    yield (
        0.125,
        "The half of the step that goes sideways is left over as an error, too.",
    )


@exercise(
    "08a.2",
    "the level of each of the six intervals, as a share",
    "The more questions, the wider each interval: that is the price of asking them all.",
)
def _():
    yield 1 - 0.05 / 6
    yield 0.05 / 6, "That is the probability with which it may be wrong."
    yield 0.95, "Then six of them are wrong more often than one time in twenty."
    yield 0.95**6, "That is how often six independent ones of 95 % are all right."


# ---- 9 Retrieval ----


@exercise(
    "09.1",
    "the place that each of the five tokens attends to in round 1, the start being place 0",
    "Round 0 brings the label, round 1 finds it: composition through the keys.",
)
def _():
    from gbattn.retrieval import encode, induction_layer

    abab = torch.tensor([[0, 1, 0, 1]])
    _, rounds = induction_layer(2, 4, sharpness=20).explain(encode(abab, 2, 4))
    first, second = (one.weights[0, 0].argmax(-1) for one in rounds)
    yield second
    yield first, "That is round 0, which attends to the place before."
    yield (
        [0, 0, 0, 1, 2],
        "These hold the same letter. Round 1 attends to the place after, which carries that label.",
    )
    yield (
        [0, 1, 2, 2, 3],
        "A letter that has not been seen finds no label, and attends to the start.",
    )


@exercise(
    "09.2",
    "the feature to add to each key, from patterns of shape (n, d), if the query's is 1",
    "It is the Gaussian smoother of chapter 3 once more: Bayes' rule with equal priors.",
    on=lambda: [(torch.randn(6, 5),)],
)
def _():
    yield lambda p: -p.square().sum(-1) / 2
    yield (
        lambda p: -p.square().sum(-1, keepdim=True) / 2,
        "Right, but as a column; give n numbers.",
    )
    yield (
        lambda p: p.square().sum(-1) / 2,
        "Its sign: a long pattern is not more probable.",
    )
    yield lambda p: -p.square().sum(-1), "Expand −‖q − p‖²/2: a factor is missing."
    yield lambda p: -p.norm(dim=-1) / 2, "The norm is squared."


@exercise(
    "09.3",
    "the place with the largest score, from i, d and n",
    "A mean of places is a place between. A pointer with two targets finds neither.",
    on=lambda: [(i, d, 12) for i in range(12) for d in (1, 2)],
)
def _():
    yield lambda i, d, n: (i + d + 1) % n
    yield (
        lambda i, d, n: (i + d) % n,
        "That is the middle; round 1 turns it on by one.",
    )
    yield (
        lambda i, d, n: (i + 1) % n,
        "That is one of the two right answers. What does the mean of both point to?",
    )
    yield (
        lambda i, d, n: (i + 2 * d + 1) % n,
        "That is one of the two right answers. What does the mean of both point to?",
    )
    yield lambda i, d, n: i + d + 1, "On the circle: take it modulo n."


# ---- 10 What a second round costs ----


@exercise(
    "10.1",
    "the operations of three boosted rounds, and those of two with shared keys and values",
    "Rounds cost alike, and sharing saves a quarter of the second.",
)
def _():
    from gbattn.cost import count_flops
    from gbattn.layers import make_attention

    count = lambda **options: count_flops(
        make_attention("boosted", 2, 1, **options), torch.randn(1, 3, 2)
    )
    three, shared = count(rounds=3), count(kv_from="shared")
    yield [three, shared]
    yield (
        [3 * 168, ANY],
        "The first: a further round has a gate, and no output projection of its own.",
    )
    yield (
        [3 * 192, ANY],
        "The first: round 0 has no gate, but the output projection.",
    )
    yield [ANY, count() - 24], "The second: keys and values are two projections."
    yield (
        [ANY, count() - 48 - 72],
        "The second: the attention of round 1 is still its own; only its keys are not.",
    )
    yield [ANY, count()], "The second: two projections are spared."


@exercise(
    "10.2",
    "the width",
    "Matching one measure unmatches the others: width 288 has equal parameters, in the whole model.",
)
def _():
    from gbattn.cost import attention_cost
    from gbattn.layers import make_attention

    def training(kind, d):
        layer = make_attention(kind, d, 4, device="meta")
        return attention_cost(
            layer, 256, causal=True, count_masked=False
        ).training_flops

    target = training("boosted", 256)
    yield next(
        d for d in range(256, 1024, 4) if training("multi_head", d) >= target
    )
    yield 288, "That is the published width, which matches parameters of the model."
    yield 512, "Twice the width costs nearly four times as much."
    yield 364, "That is √2 times 256: boosting costs more than twice as much."


@exercise(
    "10.4",
    "for D = 512, the position at which the cache has the bytes of the weights, for one sequence and for 32",
    "A batch shares the weights and not the caches. So long texts and large batches wait for the cache.",
)
def _():
    yield [2 * 512, 2 * 512 // 32]
    yield (
        [4 * 512, ANY],
        "The first: the cache holds keys and values, 2D numbers a token.",
    )
    yield [512, ANY], "The first: there are four matrices of D by D."
    yield (
        [ANY, 2 * 512],
        "The second: each sequence of the batch has a cache of its own.",
    )
    yield [ANY, 2 * 512 * 32], "The second: a batch reads more caches, not fewer."
