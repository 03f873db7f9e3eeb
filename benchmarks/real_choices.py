"""Boost SmolLM2 otherwise: other layers, another reading, another gate, all else as in `real_boost`.

Each arm differs from one of `real_boost` in one choice: corrections in the last ten of thirty layers, keys and values
read from the residual, a gate a head; 24 updates, a pilot seed for the rate, seeds 0, 1 and 2. A best rate at the edge
of the grid is followed until it lies inside. Run with ``make real`` done; records that are there are not made again:

    python benchmarks/real_choices.py

The plan, written before any of its runs.

- Which layers: *first*, *middle* and *last* ten, and *spread* (every third), have equally many new weights. All thirty
  layers cannot: *all* has three times as many.
- Which reading: *input* projects keys and values from the attention's input. As many weights.
- Which gate: *feature* has 2.2 times as many weights.
- Control: LoRA of rank 55 in the *first* and in the *middle* ten layers, beside that of `real_boost` in the last. If
  LoRA orders the layers as corrections do, the order says nothing of corrections.

Rule (that of chapter 30): an arm *pays* against the corrections of `real_boost` if its loss on 16 test documents is
lower both over seeds (paired t test at 5 %, Holm over the comparisons of a question) and over documents (95 % bootstrap
interval of the mean over seeds below 0); it *loses* if its loss is higher in both; else the comparison is *open*.

Prediction. Layers: *first* loses, *middle* and *spread* are open, *all* pays. Reading: open. Gate: *feature* is open.
LoRA: *first* loses to its last ten too.

Added after the runs of *spread* and of LoRA in the first ten layers: LoRA *spread*. Corrections in every third layer
were better than LoRA in ten layers that stand together, which says nothing of corrections. This note was written when
the runs of LoRA *spread* began and committed when they had ended, so it counts as exploration: corrections lose to LoRA
in every third layer, too.

Added later, with its prediction, before its runs: *output*. x and F have different bases, which here only happen to be
of one width, and the frozen model cannot adapt its values to that. So these corrections read x less the output of the
first round, projected. Prediction: open against the corrections of `real_boost`, and losing to LoRA.
"""

import argparse

import torch
from real_boost import BATCH, LENGTH, PILOT, RATES, SEEDS, Upper, best_rate, fit, lower, texts

from gbattn.conventions import Record, read_records
from gbattn.ground.records import experiment_folder
from gbattn.lab.real_model import load_smollm2

EXPERIMENT, UPDATES = "real-choices", 24
LAST = range(20, 30)
ARMS = {
    "boost, first": dict(chosen=range(10)),
    "boost, middle": dict(chosen=range(10, 20)),
    "boost, spread": dict(chosen=range(2, 30, 3)),
    "boost, all": dict(chosen=range(30)),
    "boost, input": dict(chosen=LAST, kv_from="input"),
    "boost, feature": dict(chosen=LAST, gate="feature"),
    "boost, output": dict(chosen=LAST, residual="output"),
    "LoRA, first": dict(chosen=range(10)),
    "LoRA, middle": dict(chosen=range(10, 20)),
    "LoRA, spread": dict(chosen=range(2, 30, 3)),
}


def main():
    """All runs of the plan, each written when it is done; a second call continues the first."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--arms", nargs="+", default=[*ARMS], choices=[*ARMS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    folder = experiment_folder("real-boost").with_name(EXPERIMENT)
    folder.mkdir(exist_ok=True)  # beside it
    model, tokenizer = load_smollm2()
    ids, shape = texts(tokenizer, UPDATES), dict(updates=UPDATES, batch=BATCH, length=LENGTH)
    for arm in options.arms:
        kind, _, what = arm.partition(", ")
        choices = {name: x if isinstance(x, str) else [*x] for name, x in ARMS[arm].items()}
        first = choices["chosen"][0] // 10 * 10  # the residual stream below is stored
        upper = Upper(model, first)
        parts = {name: (lower(model, of, first), of) for name, of in ids.items()}
        settings = shape | dict(first_layer=first, dtype="bfloat16 products", arm=kind, what=what) | choices

        def run(name, rate, seed, split, kind=kind, choices=choices, parts=parts, upper=upper, settings=settings):
            path = folder / f"{name}.json"
            if not path.is_file():
                trained, found = fit(model, upper, parts["train"], kind, rate, seed, UPDATES, **choices)
                found["loss"] = upper.by_document(trained, *parts[split])
                Record(EXPERIMENT, settings | dict(rate=rate, seed=seed, text=split), found).save(name)
            (record,) = read_records(path)
            return sum(record.measured["loss"]) / len(record.measured["loss"])

        rate = best_rate(
            lambda rate, arm=arm, run=run: run(f"pilot-{arm}-{rate:.2g}", rate, PILOT, "valid"), RATES[1:], True
        )
        for seed in SEEDS:
            run(f"{arm}-{seed}", rate, seed, "test")


if __name__ == "__main__":
    main()
