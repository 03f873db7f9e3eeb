"""Everything that chapter 19 measures, on a language model and a text: what its corrections do, token by token."""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from gbattn.attention import split_heads
from gbattn.boosted import GradientBoostedAttention
from gbattn.corpora import Batch, as_array
from gbattn.diagnostics import (
    PATHS,
    SOURCES,
    Edit,
    descent,
    divergence,
    edited,
    effective_rank,
    head_scores,
    head_values,
    hull_distance,
    induction_scores,
    observed,
    patched,
    rescaled,
    stopped,
    token_losses,
    twicing_step,
    with_gates,
    without_round,
)
from gbattn.ground.arguments import COUNT, FLAG, SEED, check, instance, integer, optional, require
from gbattn.ground.tensors import check_tensor, eval_mode
from gbattn.ground.terminal import with_progress
from gbattn.language_model import LanguageModel
from gbattn.layers import Round
from gbattn.training import window_length


def spread_windows(tokens: np.ndarray, length: int, batch_size: int) -> list[np.ndarray]:
    """Return where the windows of each batch begin, so that those of a batch lie far
    apart, and the first batches alone are a sample of the whole text.

    Parameters
    ----------
    tokens : np.ndarray
        Token ids, shape (n,).
    length, batch_size : int
        Tokens T per window, and windows per batch, two or more. Windows do not
        overlap, and what is left over at the end is not used.
    """
    check(length=(length, COUNT))
    check(batch_size=(batch_size, integer("an integer, 2 or more", lambda n: n > 1)))
    n_batches = (len(tokens) - 1) // length // batch_size
    want = f"at least {batch_size * length + 1}, one batch of whole windows"
    require(n_batches > 0, "tokens", f"{len(tokens)} tokens", want)
    starts = length * np.arange(n_batches * batch_size)
    return [starts[j::n_batches] for j in range(n_batches)]


class Means:
    """Means over tokens, gathered batch by batch, with intervals that treat windows,
    not tokens, as independent.

    Notes
    -----
    `add` takes values (B, T, …) by name and, optionally, which tokens count, boolean
    (B, T); values that are not finite do not count. With s the sum over a window and
    n the tokens that count in it, the mean m is Σs/Σn, and `half` is 1.96 times
    its standard error √Σ(s − mn)²/Σn, as for a ratio of means. Source: chapter 19.
    """

    def __init__(self):
        self._sums: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor, mask: torch.Tensor | None = None):
        """Add the values of the windows of a batch."""
        values = values.double()
        counts = values.isfinite()
        if mask is not None:
            counts &= mask.reshape(*mask.shape, *[1] * (values.ndim - 2))
        s, n = (
            values.where(counts, values.new_zeros(())).sum(1),
            counts.double().sum(1),
        )
        new = torch.stack([x.sum(0) for x in (n, s, s * s, s * n, n * n)])
        old = self._sums.get(name)
        self._sums[name] = new if old is None else old + new

    def count(self, name: str) -> torch.Tensor:
        """Return how many values counted."""
        return self._sums[name][0]

    def mean(self, name: str) -> torch.Tensor:
        """Return the mean, of the shape … of a value; NaN if none counted."""
        n, s = self._sums[name][:2]
        return s / n

    def half(self, name: str) -> torch.Tensor:
        """Return half the width of its 95 % interval."""
        n, s, ss, sn, nn = self._sums[name]
        m = s / n
        return 1.96 * (ss - 2 * m * sn + m * m * nn).clamp(min=0).sqrt() / n

    def pair(self, name: str) -> list:
        """Return mean and half width, as numbers or lists of them."""
        return [plain(self.mean(name)), plain(self.half(name))]

    def names(self) -> list[str]:
        """Return all names."""
        return [*self._sums]

    def __contains__(self, name: str) -> bool:
        return name in self._sums


def plain(x) -> object:
    """Numbers for JSON, to six digits; None for what is not finite."""
    if isinstance(x, torch.Tensor | np.ndarray):
        x = x.tolist()
    if isinstance(x, list):
        return [plain(one) for one in x]
    return float(f"{x:.6g}") if math.isfinite(x) else None


def token_groups(batch: Batch, counts: np.ndarray) -> dict[str, dict[str, torch.Tensor]]:
    """Return which targets belong to which group, masks (B, T) by kind and name.

    Parameters
    ----------
    batch : gbattn.corpora.Batch
        Tokens and targets.
    counts : np.ndarray
        How often each token id occurs in the training text, shape (V,).

    Returns
    -------
    dict[str, dict[str, torch.Tensor]]
        ``frequency`` of the target, by powers of ten; ``position`` in the window, by
        powers of two; ``novelty``: whether the target is ``new`` to its window,
        ``repeated``, or followed the same token earlier in it (``pair``).
    """
    x, y = batch
    check_tensor("inputs", x, "B T", positive="B T")
    T, device = x.shape[1], x.device
    often = torch.as_tensor(np.ascontiguousarray(counts), device=device)[y]
    groups = {"frequency": {}, "position": {}, "novelty": {}}
    for power in range(0, 7):
        low, high = 10**power * (power > 0), 10 ** (power + 1)
        mask = (often >= low) & (often < high if power < 6 else often >= 0)
        groups["frequency"][f"{low:,}"] = mask
    place = torch.arange(T, device=device).expand_as(x)
    last = max(0, T.bit_length() - 2)
    for power in range(last + 1):
        low, high = 2**power - 1, 2 ** (power + 1) - 1
        mask = (place >= low) & ((place < high) | (power == last))
        groups["position"][str(low)] = mask
    earlier = torch.ones(T, T, dtype=torch.bool, device=device).tril()
    anywhere = ((x[:, None] == y[..., None]) & earlier).any(-1)
    match = (x[:, None] == x[..., None]) & (y[:, None] == y[..., None])
    pair = (match & earlier.tril(-1)).any(-1)
    groups["novelty"] = {
        "new": ~anywhere,
        "repeated": anywhere & ~pair,
        "pair": pair,
    }
    return groups


class Extremes:
    """The targets with the largest and the smallest values, at most one per window."""

    def __init__(self, n: int = 5):
        self.n, self.most, self.least = n, [], []

    def add(self, values: torch.Tensor, starts: np.ndarray) -> None:
        for entries, sign in ((self.most, 1), (self.least, -1)):
            best = (sign * values).max(-1)
            found = zip(best.values.tolist(), best.indices.tolist(), starts)
            entries += [(sign * v, int(s) + t) for v, t, s in found]
            entries.sort(reverse=sign > 0)
            del entries[self.n :]

    def shown(self, tokens: np.ndarray, decode: Callable | None) -> dict:
        show = lambda ids: decode(ids) if decode else " ".join(map(str, np.asarray(ids)))
        return {
            name: [
                {
                    "gain": plain(gain),
                    "before": show(tokens[max(0, place - 15) : place + 1]),
                    "target": show(tokens[place + 1 : place + 2]),
                }
                for gain, place in entries
            ]
            for name, entries in (("helped", self.most), ("harmed", self.least))
        }


class Diagnosis(NamedTuple):
    """What is gathered on the way."""

    model: LanguageModel
    means: Means
    sums: dict
    extremes: Extremes
    generator: torch.Generator


def add_weights(means: Means, at: str, rounds: list[Round]) -> None:
    """What the attention weights of the rounds of a layer do."""
    scores = [head_scores(one.weights) for one in rounds]
    for m, score in enumerate(scores):
        for name in ("entropy", "own", "previous"):
            means.add(f"{at}round{m}.{name}", score[name])
    A, B = rounds[0].weights, rounds[1].weights
    if A.shape != B.shape:
        return
    means.add(f"{at}divergence", divergence(A, B))
    first, second = (score["received"].mean(-1) for score in scores[:2])
    starved = first < 0.1
    means.add(f"{at}starved", starved.double(), first.isfinite())
    means.add(f"{at}received", second, starved)
    means.add(f"{at}rescued", (second >= 1).double(), starved)


def add_features(means: Means, sums: dict, at: str, rounds: list[Round]) -> None:
    """Gates, and the covariances of what the rounds add."""
    before = None
    for m, one in enumerate(rounds):
        step = one.estimate if before is None else one.estimate - before
        x = step.flatten(0, 1).double()
        old = sums.get(f"{at}{m}", (0, 0, 0))
        new = (len(x), x.sum(0), x.mT @ x)
        sums[f"{at}{m}"] = tuple(a + b for a, b in zip(old, new))
        if one.gate is not None:
            means.add(f"{at}gate{m}", one.gate)
            means.add(f"{at}gate{m}²", one.gate.square())
        before = one.estimate


def rank_of(n: int, s: torch.Tensor, ss: torch.Tensor) -> float | None:
    """The effective rank of n vectors, from their sum and that of their squares; None of vectors that do not vary."""
    covariance = ss / n - torch.outer(s, s) / n**2
    return plain(effective_rank(covariance)) if covariance.trace() > 0 else None


def add_hull(means: Means, at: str, layer, inputs, rounds, generator) -> None:
    """What share of its length takes a correction out of the hull of the values, for 32
    of the first 64 places, and the same for other steps of that length."""
    if rounds[0].weights.shape[1] != layer.n_heads:  # halves of heads are hulls
        return
    S, H = min(64, inputs.x.shape[1]), layer.n_heads
    v = head_values(layer, inputs)[:, :, :S]
    place = torch.randint(1, S, (len(v),), generator=generator)[:32].tolist()
    heads = lambda x: torch.cat([split_heads(x, H)[b, :, t] for b, t in enumerate(place)])
    F, step = heads(rounds[0].estimate), heads(rounds[1].estimate)
    step = step - F  # (32 H, K)
    hulls = []
    for b, t in enumerate(place):
        one = v[b].clone()
        one[:, t + 1 :] = one[:, :1]  # a point that comes twice changes no hull
        hulls.append(one)
    hulls = torch.cat(hulls)
    twicing = heads(twicing_step(layer, inputs, rounds[0].weights))
    noise = torch.randn(step.shape, generator=generator).to(step)
    order = torch.randperm(len(step), generator=generator).to(step.device)
    steps = dict(correction=step, shuffled=step[order], random=noise, twicing=twicing)
    deltas = torch.cat([rescaled(direction, step) for direction in steps.values()])
    outputs = F.repeat(len(steps), 1) + deltas
    away = hull_distance(outputs, hulls.repeat(len(steps), 1, 1), steps=200)
    shares = (away / deltas.norm(dim=-1)).view(len(steps), len(place), H)
    for name, share in zip(steps, shares):
        means.add(f"{at}hull.{name}", share)


def diagnose(
    model: LanguageModel,
    tokens: np.ndarray,
    *,
    length: int | None = None,
    batch_size: int = 16,
    sample: int = 8_192,
    counts: np.ndarray | None = None,
    decode: Callable[[np.ndarray], str] | None = None,
    seed: int = 0,
    progress: bool = True,
) -> dict:
    """Measure what the corrections of a language model do on a text.

    Parameters
    ----------
    model : gbattn.language_model.LanguageModel
        Any; the second half of the heads counts as the correction where a layer
        has one round.
    tokens : np.ndarray
        Token ids of a text that the model was not trained on, shape (n,).
    length, batch_size : int
        Tokens T per window, ``max_length`` by default, and windows at once, 2 or more.
    sample : int
        About how many tokens are used for what takes many passes: descent, paths,
        pruning and hulls. They are spread over the text. The chapter uses 16,384.
    counts : np.ndarray, optional
        How often each token id occurs in the training text, (V,); by default in
        these tokens.
    decode : callable, optional
        From token ids to text, for the examples.
    seed : int
        Of the random controls.
    progress : bool
        Whether to show a progress bar, where tqdm is installed.

    Returns
    -------
    dict
        For JSON. A pair is a mean and half the width of its 95 % interval (`Means`);
        ``halves`` are the layers with one round, where the second half of the heads
        counts as a correction. Source: chapter 19.
    """
    check(model=(model, instance(LanguageModel, "a LanguageModel")), sample=(sample, COUNT), seed=(seed, SEED))
    check(
        progress=(progress, FLAG),
        decode=(decode, optional((callable, "a function"))),
    )
    T, tokens = window_length(model, length), as_array(tokens)
    starts = spread_windows(tokens, T, batch_size)
    V = model.config.vocab_size
    known = int(tokens.max()) < V
    require(known, "tokens", "a number that is no token", f"ids below {V}")
    if counts is None:
        counts = np.bincount(tokens, minlength=V)
    fits = getattr(counts, "shape", None) == (V,)
    require(fits, "counts", getattr(counts, "shape", counts), f"shape ({V},)")
    sampled = min(len(starts), max(1, round(sample / (T * batch_size))))
    of = Diagnosis(model, Means(), {}, Extremes(), torch.Generator().manual_seed(seed))
    device = model.head_weight.device
    with torch.no_grad(), eval_mode(model):
        for place in with_progress(starts, progress, "as it is"):
            observe(of, _batch(tokens, place, T, device), counts, place)
        for place in with_progress(starts[:sampled], progress, "edited"):
            intervene(of, _batch(tokens, place, T, device))
    induction = plain(induction_scores(model, length=T // 2, seed=seed))
    return {
        "model": model.config.to_dict(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": len(starts) * batch_size * T,
        "sampled": sampled * batch_size * T,
        "length": T,
        "halves": [i for i, block in enumerate(model.blocks) if getattr(block.attention, "rounds", 1) == 1],
        "loss": of.means.pair("loss"),
        "whole": _nested(of.means, "whole."),
        "layers": [_of_layer(of, layer, scores) for layer, scores in enumerate(induction)],
        "where": _nested(of.means, "where."),
        "examples": of.extremes.shown(tokens, decode),
    }


def _batch(tokens: np.ndarray, starts: np.ndarray, length: int, device) -> Batch:
    index = starts[:, None] + np.arange(length + 1)
    chosen = torch.from_numpy(tokens[index].astype(np.int64)).to(device)
    return Batch(chosen[:, :-1], chosen[:, 1:].contiguous())


def observe(of: Diagnosis, batch: Batch, counts: np.ndarray, starts) -> None:
    """What two passes show of a batch: one as it is, one without corrections."""
    model, means = of.model, of.means
    with observed(model) as layers:
        losses = token_losses(model, batch)
    for i, (_, _, rounds) in enumerate(layers):
        add_weights(means, f"{i}.", rounds)
        add_features(means, of.sums, f"{i}.", rounds)
    with edited(model, dict.fromkeys(range(len(layers)), stopped())):
        gain = token_losses(model, batch) - losses
    means.add("loss", losses)
    means.add("whole.stopped", gain)
    means.add("whole.helped", (gain > 0).double())
    of.extremes.add(gain, starts)
    for kind, groups in token_groups(batch, counts).items():
        for name, mask in groups.items():
            if mask.any() or f"where.{kind}.{name}.loss" in means:
                means.add(f"where.{kind}.{name}.loss", losses, mask)
                means.add(f"where.{kind}.{name}.gain", gain, mask)


_THREE = PATHS[:3]


_ALONE = {path: (path,) for path in PATHS} | {"all three": _THREE}


_ALL_BUT = {f"all but {p}": tuple(q for q in _THREE if q != p) for p in _THREE}


def intervene(of: Diagnosis, batch: Batch) -> None:
    """What many passes show of a batch, each with another edit."""
    model, means, number = of.model, of.means, len(of.model.blocks)
    before = token_losses(model, batch)

    def rise(name: str, edits: dict[int, Edit]) -> None:
        with edited(model, edits):
            means.add(name, token_losses(model, batch) - before)

    everywhere = lambda edit: dict.fromkeys(range(number), edit)
    boosted = [isinstance(block.attention, GradientBoostedAttention) for block in model.blocks]
    constant = {}
    for i in range(number):
        names = [n for n in means.names() if re.fullmatch(rf"{i}\.gate\d+", n)]
        if names:
            constant[i] = with_gates([means.mean(n).to(before) for n in names])
    if constant:
        rise("whole.constant_gates", constant)
    rise("whole.without_first", everywhere(without_round(0)))
    if all(boosted):
        for source in SOURCES:
            sets = _ALONE | (_ALL_BUT if source == "other" else {})
            for name, paths in sets.items():
                edit = patched(paths, source)
                rise(f"whole.paths.{source}.{name}", everywhere(edit))
    with observed(model) as layers:
        token_losses(model, batch)
    for i, (layer, inputs, rounds) in enumerate(layers):
        add_hull(means, f"{i}.", layer, inputs, rounds, of.generator)
        for m in range(1, len(rounds)):
            found = descent(model, batch, i, round=m, generator=of.generator)
            for name, values in found.items():
                means.add(f"{i}.descent{m}.{name}", values)
            downhill = (found["cosine"] > 0).double()
            mask = found["cosine"].isfinite()
            means.add(f"{i}.descent{m}.downhill", downhill, mask)
            means.add(f"{i}.descent{m}.helped", (found["change"] < 0).double())
        rise(f"{i}.without_first", {i: without_round(0)})
        if i in constant:
            rise(f"{i}.constant_gates", {i: constant[i]})
        if boosted[i]:
            for name, paths in _ALONE.items():
                rise(f"{i}.paths.{name}", {i: patched(paths)})


def _nested(means: Means, prefix: str) -> dict:
    """The pairs of all names with a prefix, as a tree."""
    tree: dict = {}
    for name in means.names():
        if name.startswith(prefix):
            *path, last = name.removeprefix(prefix).split(".")
            branch = tree
            for part in path:
                branch = branch.setdefault(part, {})
            branch[last] = means.pair(name)
            if last in ("loss", "starved"):
                branch["n"] = int(means.count(name))
    return tree


def _of_layer(of: Diagnosis, i: int, induction: list[list[float]]) -> dict:
    """Everything about one layer."""
    found = _nested(of.means, f"{i}.")
    for m, score in enumerate(induction):
        found.setdefault(f"round{m}", {})["induction"] = score
    rounds = range(len(induction))
    found["rank"] = [rank_of(*of.sums[f"{i}.{m}"]) for m in rounds]
    for m in (m for m in rounds if f"gate{m}" in found):
        mean = of.means.mean(f"{i}.gate{m}")
        del found[f"gate{m}²"]
        square = of.means.mean(f"{i}.gate{m}²")
        found[f"gate{m}"] = {
            "features": plain(mean.float()),
            "mean": plain(mean.mean()),
            "sd_features": plain(mean.std(correction=0)),
            "sd_tokens": plain((square - mean**2).clamp(min=0).mean().sqrt()),
        }
    return found
