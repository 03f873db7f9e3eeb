"""Boost SmolLM2 for real: corrections alone, LoRA and a parallel adapter, at equal trained weights.

The last third of the layers is adapted, everything else is frozen, and the residual stream that enters these layers is
computed once. Python's documentation: training windows from the train split, rates chosen on documents of the valid
split with a pilot seed, results on documents of the test split. Records that are there are not made again; seeds are
the outer loop, so what is there is paired. Run with ``make real`` done:

    python benchmarks/real_boost.py
    python benchmarks/real_boost.py --updates 96

The second is four times as long, and there a best rate at the edge of the grid is followed until it lies inside. Its
prediction, written before any of its runs, by the rule of chapter 30: boosting loses to LoRA and to the adapter.
"""

import argparse
import copy
import math
import time

import torch
import torch.nn.functional as nnf
from real_smoother import windows
from torch import nn

from gbattn.conventions import Record, read_records
from gbattn.corpora import python_docs
from gbattn.ground.records import experiment_folder
from gbattn.lab.real_model import load_smollm2
from gbattn.pretrained import boost

EXPERIMENT = "real-boost"
RATES, WIDER = (3e-4, 1e-3, 3e-3), 10**0.5
SEEDS, PILOT = (0, 1, 2), 100
WARM, BATCH, LENGTH, FIRST = 4, 2, 256, 20
RANK, BOTTLENECK = 55, 489  # the weights of a correction: 563,337 a layer
ARMS = ("boost", "LoRA", "adapter")


class LowRank(nn.Module):
    """A linear map and a low-rank one beside it, which starts at zero (LoRA)."""

    def __init__(self, base, rank):
        super().__init__()
        self.base, self.in_features = base, base.in_features
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Parallel(nn.Module):
    """A feed-forward part and a narrow one beside it, which starts at zero."""

    def __init__(self, base, d_model, width):
        super().__init__()
        self.base = base
        self.down = nn.Linear(d_model, width, bias=False)
        self.up = nn.Linear(width, d_model, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(nnf.relu(self.down(x)))


def adapted(model, arm, seed, chosen=None, residual="heads", **options):
    """A copy of the model in which only an arm's new weights learn, and these weights; from layer `FIRST` on, unless
    layers are chosen. Of the arm *full*, all weights of these layers learn. Options are those of `boost`; a residual of
    the *output* is x less what round 0 would add to the residual stream, in place of x − F."""
    model = copy.deepcopy(model).requires_grad_(False)
    chosen = [*range(FIRST, len(model.model.layers))] if chosen is None else chosen
    layers = [model.model.layers[number] for number in chosen]
    frozen = [module for module in model.modules() if isinstance(module, nn.Linear)]
    torch.manual_seed(seed)
    if arm == "boost":
        boost(model, layers=chosen, freeze=True, **dict(gate="head") | options)
        for attention in (layer.self_attn for layer in layers) if residual == "output" else ():
            for correction in attention.corrections:
                correction.residual = lambda x, F, attention=attention: x - attention.project_output(F)
    elif arm == "LoRA":
        for layer in layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in [*part.named_children()]:
                    if isinstance(linear, nn.Linear):
                        setattr(part, name, LowRank(linear, RANK))
    elif arm == "full":  # the model's own weights
        for layer in layers:
            layer.requires_grad_(True)
    else:
        for layer in layers:
            layer.mlp = Parallel(layer.mlp, model.config.hidden_size, BOTTLENECK)
    new = [weight for weight in model.parameters() if weight.requires_grad]
    for linear in frozen:  # in the precision of the products; weights that learn stay in float32
        if not linear.weight.requires_grad:
            linear.weight = nn.Parameter(linear.weight.bfloat16(), requires_grad=False)
    return model, new


class Upper:
    """The layers from one on, by default `FIRST`, over a stored residual stream."""

    def __init__(self, model, first=None):
        self.first = FIRST if first is None else first
        places = torch.arange(LENGTH)[None]
        self.angles = model.model.rotary_emb(torch.zeros(1), places)

    def losses(self, model, h, ids, rows=slice(None)):
        """The loss of each predicted token, flat; of the given rows of each window only."""
        with torch.autocast("cpu", torch.bfloat16):
            for layer in model.model.layers[self.first :]:
                h = layer(h, position_embeddings=self.angles, attention_mask=None)
            logits = model.lm_head(model.model.norm(h)[:, :-1][:, rows])
        return nnf.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:][:, rows].flatten(), reduction="none")

    @torch.no_grad()
    def by_document(self, model, h, ids):
        """The mean loss of each window."""
        pairs = zip(h.split(4), ids.split(4))
        return torch.cat([self.losses(model, *pair).view(-1, LENGTH - 1).mean(1) for pair in pairs]).tolist()


@torch.no_grad()
def lower(model, ids, first=None):
    """The residual stream that enters a layer, by default `FIRST`."""
    first = FIRST if first is None else first
    places, streams = torch.arange(LENGTH)[None], []
    for some in ids.split(8):
        h = model.model.embed_tokens(some)
        angles = model.model.rotary_emb(h, places)
        with torch.autocast("cpu", torch.bfloat16):
            for layer in model.model.layers[:first]:
                h = layer(h, position_embeddings=angles, attention_mask=None)
        streams.append(h.float())
    return torch.cat(streams)


def fit(model, upper, text, arm, rate, seed, updates, **choices):
    """Train one arm; return the model and what is to be said of the training. Choices are those of `adapted`."""
    model, new = adapted(model, arm, seed, **choices)
    optimizer = torch.optim.AdamW(new, lr=rate, weight_decay=0.0)
    h, ids = text
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    path, begin = [], time.process_time()
    for step, chosen in enumerate(order.split(BATCH)[:updates]):
        share = min(1, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / updates))
        for group in optimizer.param_groups:
            group["lr"] = rate * share
        loss = upper.losses(model, h[chosen], ids[chosen], slice(step % 2, None, 2)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(new, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        path.append(round(loss.item(), 4))
    trained = sum(weight.numel() for weight in new)
    return model, dict(trained=trained, cpu_seconds=time.process_time() - begin, training_loss=path)


def texts(tokenizer, updates):
    """The windows (·, LENGTH) to learn from, and one of each document to choose a rate on and to measure on."""
    docs, end = python_docs(), tokenizer.convert_tokens_to_ids("<|endoftext|>")
    text = [id for doc in docs["train"].values() for id in (*tokenizer(doc).input_ids, end)]
    text = torch.tensor(text[: len(text) // LENGTH * LENGTH]).view(-1, LENGTH)
    text = text[torch.linspace(0, len(text) - 1, updates * BATCH).long()]
    return dict(train=text, **{name: windows(list(docs[name].values()), tokenizer) for name in ("valid", "test")})


def best_rate(pilot, rates, everywhere):
    """The rate of the least loss; at an edge of the rates it is followed once, or until it lies inside."""
    losses = {rate: pilot(rate) for rate in rates}
    best = min(losses, key=losses.get)
    while best in (min(losses), max(losses)) and (everywhere or len(losses) == len(rates)):
        beyond = best * (WIDER if best == max(losses) else 1 / WIDER)
        losses[beyond] = pilot(beyond)
        best = min(losses, key=losses.get)
    return best


def main():
    """All runs of the plan that this file can make."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--updates", type=int, default=24, choices=(24, 96))
    options = parser.parse_args()
    torch.set_num_threads(1)
    updates, longer = options.updates, options.updates > 24
    experiment = f"{EXPERIMENT}-longer" if longer else EXPERIMENT
    folder = experiment_folder(EXPERIMENT).with_name(experiment)  # beside the shorter one
    there = lambda name: (folder / f"{name}.json").is_file()
    model, tokenizer = load_smollm2()
    upper = Upper(model)
    parts = {name: (lower(model, ids), ids) for name, ids in texts(tokenizer, updates).items()}
    shape = dict(updates=updates, batch=BATCH, length=LENGTH, first_layer=FIRST, dtype="bfloat16 products")

    def run(name, arm, rate, seed, split):
        if not there(name):
            trained, found = fit(model, upper, parts["train"], arm, rate, seed, updates)
            found["loss"] = upper.by_document(trained, *parts[split])
            Record(experiment, shape | dict(arm=arm, rate=rate, seed=seed, text=split), found).save(name)
        (record,) = read_records(folder / f"{name}.json")
        return sum(record.measured["loss"]) / len(record.measured["loss"])

    if not there("plain"):
        plain, found = copy.deepcopy(model), {}
        for module in plain.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(module.weight.bfloat16(), requires_grad=False)
        found = {split: upper.by_document(plain, *parts[split]) for split in ("valid", "test")}
        Record(experiment, shape | dict(arm="plain"), found).save("plain")
    best = {}
    for arm in options.arms:
        pilot = lambda rate, arm=arm: run(f"pilot-{arm}-{rate:.2g}", arm, rate, PILOT, "valid")
        best[arm] = best_rate(pilot, RATES[1:] if longer else RATES, longer)
    for seed in SEEDS:
        for arm in options.arms:
            run(f"{arm}-{seed}", arm, best[arm], seed, "test")


if __name__ == "__main__":
    main()
