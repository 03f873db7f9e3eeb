"""Chapter 12 in training: small vision transformers of the book's blocks on digits, over slopes, scales and rates."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import nn
from torch.func import stack_module_state
from torch.nn import functional as nnf

from gbattn.blocks import Block, make_normalizer
from gbattn.conventions import Record
from gbattn.signal import VIT_B, initialize, recursion

WIDTH, HEADS, PATCHES, HELD_OUT = 32, 4, 8, 400
RATES = [0.00025 * 4**k for k in range(5)]
FUNCTIONS = {"dyt": torch.tanh, "derf": torch.erf}


@lru_cache
def digits():
    """Patches of 2 × 4 pixels (1797, 8, 8) in a random order, and labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = (
        torch.tensor(data.images / 8 - 1)
        .float()
        .unfold(1, 2, 2)
        .unfold(2, 4, 4)
        .reshape(-1, PATCHES, 8)
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order], torch.tensor(data.target)[order]


class Classifier(nn.Module):
    """A vision transformer for one setting and seed. Its slope α is that of DyT and Derf, its gain that of norms."""

    def __init__(self, seed, s):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        make = lambda: Block(
            WIDTH, HEADS, normalizer=s["normalizer"], ffn="relu", bias=False
        )
        self.blocks = nn.ModuleList([make() for _ in range(s["depth"])])
        initialize(
            self.blocks, VIT_B.times(s["factor"]), alpha=s["alpha"], generator=rng
        )
        slope = {} if s["alpha"] is None else {"alpha": s["alpha"]}
        self.norm = make_normalizer(s["normalizer"], WIDTH, **slope)
        self.embed, self.head = (
            nn.Linear(8, WIDTH, bias=False),
            nn.Linear(WIDTH, 10, bias=False),
        )
        self.place = nn.Embedding(PATCHES, WIDTH)
        for part, std in (
            (self.embed, 8**-0.5),
            (self.place, 0.5),
            (self.head, WIDTH**-0.5),
        ):
            nn.init.normal_(part.weight, 0, std, generator=rng)
        for norm in self.modules():
            if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
                nn.init.constant_(norm.weight, s["gain"])

    def forward(self, x):
        h = self.embed(x) + self.place.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h).mean(1))


def logits(W, x, s):
    """`Classifier.forward` of G networks at once: weights W, each (G, …), pictures (G, B, 8, 8); returns (G, B, 10)."""
    G, B, kind = len(x), x.shape[1], s["normalizer"]
    linear = lambda h, name: torch.bmm(h, W[f"{name}.weight"].mT)

    def norm(h, name):
        weight = W[f"{name}.weight"][:, None]
        if kind == "rmsnorm":
            return nnf.rms_norm(h, (WIDTH,), eps=1e-5) * weight
        if kind == "layernorm":
            f = nnf.layer_norm(h, (WIDTH,))
        else:
            f = FUNCTIONS[kind](W[f"{name}.alpha"][:, None] * h)
        return torch.addcmul(W[f"{name}.bias"][:, None], f, weight)

    h = linear(x.flatten(1, 2), "embed") + W["place.weight"].repeat(1, B, 1)
    for l in range(s["depth"]):
        z, names = norm(h, f"blocks.{l}.attention_norm"), ("query", "key", "value")
        heads = (
            linear(z, f"blocks.{l}.attention.{name}").view(
                G * B, PATCHES, HEADS, -1
            )
            for name in names
        )
        a = nnf.scaled_dot_product_attention(
            *(head.transpose(1, 2) for head in heads)
        )
        h = h + linear(
            a.transpose(1, 2).reshape(h.shape), f"blocks.{l}.attention.out"
        )
        u = linear(norm(h, f"blocks.{l}.ffn_norm"), f"blocks.{l}.ffn.up").relu()
        h = h + linear(u, f"blocks.{l}.ffn.down")
    return linear(norm(h, "norm").view(G, B, PATCHES, WIDTH).mean(2), "head")


STANDARD = dict(
    normalizer="layernorm", alpha=None, gain=1.0, factor=1.0, depth=8, warm_up=0
)
STANDARD |= dict(rates=RATES, seeds=5, steps=100, batch=16)
SWEPT = (0.1, 0.2, 0.5, 1.0, 2.0)


def tuning_runs():
    """The cells of the long run: normaliser and slope (or gain) × scale, and controls with a warm-up."""
    runs = {}
    for factor in (1.0, 2.0):
        arms = {"rmsnorm-1": dict(normalizer="rmsnorm")}
        arms |= {f"layernorm-{x:g}": dict(gain=x) for x in SWEPT}
        for name in FUNCTIONS:
            arms |= {f"{name}-{x:g}": dict(normalizer=name, alpha=x) for x in SWEPT}
        if factor == 2:
            warm = ("layernorm-1", "dyt-0.5", "derf-0.5")
            arms |= {f"{name}-warm": arms[name] | dict(warm_up=20) for name in warm}
        runs |= {
            f"{name}-x{factor:g}": arm | dict(factor=factor)
            for name, arm in arms.items()
        }
    return runs


def train_classifiers(**changes):
    """Train seeds × rates together. Equal seeds share first weights (drawn alike for each normaliser) and data.
    Returns a Record of losses (rates, seeds) in nats; those above 100, or not finite, are 100."""
    s = STANDARD | changes
    x, y = digits()
    stacked, _ = stack_module_state(
        [Classifier(seed, s) for seed in range(s["seeds"])]
    )
    W = {
        name: w.detach().repeat(len(s["rates"]), *[1] * (w.ndim - 1))
        for name, w in stacked.items()
    }
    rate = torch.tensor(s["rates"]).repeat_interleave(s["seeds"])
    streams, path = (
        [torch.Generator().manual_seed(1000 + seed) for seed in range(s["seeds"])],
        [],
    )
    moments = {
        name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in W.items()
    }
    for t in range(1, s["steps"] + 1):
        some = [
            torch.randint(HELD_OUT, len(x), (s["batch"],), generator=stream)
            for stream in streams
        ]
        chosen = torch.stack(some).repeat(len(s["rates"]), 1)
        losses = cross_entropy(
            {name: w.requires_grad_() for name, w in W.items()},
            x[chosen],
            y[chosen],
            s,
        )
        path.append(losses.detach())
        gradients = torch.autograd.grad(losses.sum(), list(W.values()))
        warm = min(1.0, t / s["warm_up"]) if s["warm_up"] else 1.0
        for (name, w), g in zip(W.items(), gradients, strict=True):
            W[name] = adamw(w.detach(), g, *moments[name], t, warm * rate)
    with torch.no_grad():
        shown = (
            part[None, :HELD_OUT].expand(len(rate), *part[:HELD_OUT].shape)
            for part in (x, y)
        )
        held_out = cross_entropy(W, *shown, s)
    rows = lambda loss: (
        loss.nan_to_num(100.0).clamp(max=100.0).view(len(s["rates"]), -1).tolist()
    )
    last = torch.stack(path[-10:]).mean(0)
    return Record(
        "signal-tuning", s, {"held_out": rows(held_out), "training": rows(last)}
    )


def cross_entropy(W, x, y, s):
    """The loss of each of G networks, in nats, shape (G,)."""
    z = logits(W, x, s)
    return (
        nnf.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="none")
        .view(y.shape)
        .mean(1)
    )


def adamw(w, g, m, v, t, rate):
    """One update of w (G, …) with a rate for each network (G,), betas 0.9 and 0.999 and a weight decay of 0.05."""
    rate = rate.view(-1, *[1] * (w.ndim - 1))
    m.lerp_(g, 0.1)
    v.mul_(0.999).addcmul_(g, g, value=0.001)
    step = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt_().add_(1e-8))
    return w.sub_(rate * step.add_(w, alpha=0.05))


# ---- what the records say ----


def octaves(loss, rates, within):
    """Factors of two in the rate over which a loss is at most `within` times its
    least; ln loss is taken as linear in ln rate between two rates."""
    x, y = np.log2(rates), np.log(loss)
    fine = np.linspace(x[0], x[-1], 10_001)
    share = np.mean(np.interp(fine, x, y) <= y.min() + math.log(within))
    return float(share * (x[-1] - x[0]))


def best_rate(loss, rates):
    """The middle of the rates within 10 % of the least loss, in ln."""
    x, y = np.log(rates), np.log(loss)
    fine = np.linspace(x[0], x[-1], 10_001)
    return float(fine[np.interp(fine, x, y) <= y.min() + math.log(1.1)].mean())


def norm_at_start(**changes):
    """J from the first tokens of the digits to the last block, predicted."""
    s = STANDARD | changes
    x, _ = digits()
    with torch.no_grad():
        nets = [Classifier(seed, s) for seed in range(s["seeds"])]
        h = torch.stack([net.embed(x) + net.place.weight for net in nets])
    gram = (h @ h.mT / WIDTH).double().mean((0, 1))
    q0 = gram.trace().item() / PATCHES
    p0 = (gram.sum().item() / PATCHES - q0) / (PATCHES - 1)
    rules = dict(normalizer=s["normalizer"], alpha=s["alpha"] or 1.0)
    scales = VIT_B.times(s["factor"])
    run = recursion(s["depth"], **rules, sigmas=scales, q0=q0, p0=p0, n=PATCHES)
    return float(run.backward_J[0])


def decided(differences, sign):
    """Which rows of paired differences have a mean of that sign after Holm's
    correction of their t tests at 5 %."""
    from scipy.stats import ttest_1samp

    from gbattn.comparison import holm

    rows = np.asarray(differences)
    p_values = holm(ttest_1samp(rows, 0, axis=1).pvalue.tolist())
    return (np.array(p_values) < 0.05) & (sign * rows.mean(1) > 0)
