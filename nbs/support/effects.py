"""What the models of chapter 18 do with single tokens, and what sets apart runs of one arm: from their records."""

from pathlib import Path

import numpy as np
import torch

from gbattn.conventions import Record
from gbattn.experiments import Experiment
from gbattn.ground.arguments import require
from gbattn.ground.records import experiment_folder
from gbattn.lab.records import Plan
from gbattn.lab.texts import load_text
from gbattn.language_model import LanguageModel
from support.reports import Report
from support.verdicts import BOOSTED

# The experiments whose models were stored, as far as they were.
WITH_MODELS = (
    "mini",
    "mini-common",
    "mini-high",
    "mini-warm",
    "mini-warm-again",
    "mini-long",
    "stability",
    "mini-long-time",
    "mini-dropout",
    "mini-again",
    "mini-rotary",
    "mini-gutenberg",
    "one-pass-sweep",
    "one-pass",
    "one-pass-common",
    "one-pass-warm",
    "ladder-48-dropout",
    "ladder-96-again",
)


# Places before the last token that is read, in groups.
BACK = ((0,), (1,), (2,), (3,), range(4, 8), range(8, 16), range(16, 47))


def increase_by_token(model: LanguageModel, windows: torch.Tensor) -> dict:
    """Return the loss in nats of the last token of windows (n, 49), and by how much it
    rises when the tokens at each group of places in `BACK`, counted back from the last
    one read, are exchanged for those of another window."""
    x, y = windows[:, :-1], windows[:, -1]

    def loss(back=()):
        mixed = x.clone()
        for place in back:
            mixed[:, -1 - place] = x[:, -1 - place].roll(1 + place)
        with torch.no_grad():
            logits = model(mixed)[:, -1]
        return torch.nn.functional.cross_entropy(logits, y).item()

    whole = loss()
    return {"loss": whole, "worth": [loss(back) - whole for back in BACK]}


def first_block(model: LanguageModel, windows: torch.Tensor) -> dict:
    """Return what the first block does: for each round of its attention, the largest
    mean weight of any head on the query's own token and on the one before; and by how
    many nats the loss of all tokens rises without the attention, and without the
    feed-forward part."""
    some = windows.ndim == 2 and len(windows) > 0 and windows.shape[1] > 2
    want = "one or more, of three tokens or more"
    require(some, "windows", f"shape {tuple(windows.shape)}", want)
    x, y = windows[:, :-1], windows[:, 1:].flatten()
    block, inputs_of = model.blocks[0], []
    loss = lambda: torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y)
    without = []
    with torch.no_grad():
        keep = lambda module, inputs: inputs_of.append(inputs[0])
        hook = block.attention.register_forward_pre_hook(keep)
        whole = loss()
        hook.remove()
        rounds = block.attention.explain(inputs_of[0], causal=True).rounds
        silence = lambda module, inputs, output: torch.zeros_like(output)
        for part in (block.attention, block.ffn):
            hook = part.register_forward_hook(silence)
            without.append((loss() - whole).item())
            hook.remove()
    place = torch.arange(1, x.shape[1])
    on = lambda round, back: (
        round.weights[..., place, place - back].mean((0, 2)).max().item()
    )
    return {
        "own": [on(round, 0) for round in rounds],
        "before": [on(round, 1) for round in rounds],
        "without_attention": without[0],
        "without_ffn": without[1],
    }


def effects_of(model: LanguageModel, valid: np.ndarray) -> dict:
    """Return the effects of tokens, on 2,048 windows of a text, and of the parts of the
    first block, on 128 of these, on the loss of a model."""
    starts = np.random.RandomState(0).permutation(len(valid) - 48)[:2048]
    windows = valid[starts[:, None] + np.arange(49)].astype(np.int64)
    windows = torch.from_numpy(windows).to(model.head_weight.device)
    return increase_by_token(model, windows) | first_block(model, windows[:128])


def measure_effects(experiment: Experiment, runs: Path) -> None:
    """Record the `effects_of` each model of an experiment that is stored in a folder of
    runs."""
    for one in Plan(experiment).runs:
        done = experiment_folder("worth-of-tokens") / f"{one.id}.json"
        if done.is_file() or not (runs / one.id / "model").is_dir():
            continue
        model = LanguageModel.from_pretrained(runs / one.id / "model").eval()
        found = effects_of(model, load_text(one.corpus).valid)
        about = dict(id=one.id, arm=one.arm.name, seed=one.seed)
        Record("worth-of-tokens", about, found).save(one.id)


def stored(report: Report) -> list[tuple[str, Record]]:
    """Return the runs whose models were measured, but for sweeps and rotary positions,
    each once and with its experiment."""
    found = {}
    for name, of in report.experiments.items():
        if of.rates_from and of.model.get("positions", "learned") == "learned":
            for r in report.records(name):
                if r.settings["id"] in report.effects:
                    found.setdefault(r.settings["id"], (name, r))
    return list(found.values())


def apart_in_arm(report: Report) -> dict[str, np.ndarray]:
    """Return, for each stored run, boosted or other, by how much its loss increase when
    the previous token is replaced, and its test loss, lie above the mean of its arm in
    its experiment."""
    groups: dict[tuple, list] = {}
    for name, r in stored(report):
        both = report.before(r), r.measured["test_loss"]
        groups.setdefault((name, r.settings["arm"]), []).append(both)
    found = {"boosted": [], "others": []}
    for (_, arm), of in groups.items():
        key = "boosted" if arm == BOOSTED else "others"
        found[key] += list(np.array(of) - np.mean(of, axis=0))
    return {key: np.array(of) for key, of in found.items()}


def why_runs_differ(report: Report) -> Record:
    """Return the correlation of these two excesses, and how many runs it has."""
    found = {}
    for key, of in apart_in_arm(report).items():
        found |= {f"{key}_runs": len(of), f"{key}_spread": of[:, 0].std(ddof=1)}
        found |= {f"{key}_r": float(np.corrcoef(of.T)[0, 1])}
    return Record("why-runs-differ", {}, found)
