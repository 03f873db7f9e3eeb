"""Train layers of SmolLM2 in full, beside the corrections, LoRA and the adapter of `real_boost`.

No weights are new: all those of the chosen layers learn, with the text, schedule, clipping and seeds of `real_boost`.
Embeddings (which are also the output head) and final norm stay frozen, as in all arms. A pilot seed chooses the rate
of 24 updates from 3e-5, 1e-4 and 3e-4 on 16 documents of the valid split; a best rate at the edge is followed until it
lies inside. Then seeds 0, 1 and 2 on 16 documents of the test split.

- *full, last*: the last ten layers, where `real_boost` has its arms; 3.5 million weights a layer, 6.3 times as many.
- *full, last, equal FLOPs*: the same with as many updates as cost the FLOPs of boosting's 24 (`equal_updates`), at the
  rate of *full, last*.
- *full, all*: all thirty layers, beside *boost, all* of `real_choices`.

Rule (that of chapter 30), for corrections in the same layers minus full training, Holm over the three comparisons:
boosting *pays* if its loss is lower both over seeds (paired t test at 5 %) and over documents (95 % bootstrap interval
of the mean over seeds below 0); it *loses* if it is higher in both; else the comparison is *open*.

Prediction, written before any of the runs: boosting loses in all three. LoRA minus *full, last* is compared by the same
rule, alone: open.

Run with ``make real`` done; records that are there are not made again:

    python benchmarks/real_full.py
"""

import torch
from real_boost import BATCH, LENGTH, PILOT, SEEDS, Upper, best_rate, fit, lower, texts

from gbattn.conventions import Record, read_records
from gbattn.ground.records import experiment_folder
from gbattn.lab.real_model import load_smollm2

EXPERIMENT, UPDATES = "real-full", 24
RATES = (3e-5, 1e-4, 3e-4)
LAYERS = {"last": range(20, 30), "all": range(30)}
LAYER, CORRECTION, HEAD = 2 * 576 * (576 + 192) + 3 * 576 * 1536, 563_337, 49_152 * 576  # weights


def equal_updates(updates=UPDATES, layers=10):
    """The updates of full training that cost the FLOPs of some updates of boosting, to the nearest.

    A product costs one unit forward, one for the gradient of its input and one for that of weights that learn. Half of
    the tokens reach the head, which is frozen. Attention weights, under 5 %, are left out of both, and so are the
    layers below, whose output is stored.
    """
    head = 2 * HEAD / 2
    boosting = layers * (2 * LAYER + 3 * CORRECTION) + head
    return round(updates * boosting / (layers * 3 * LAYER + head))


def main():
    """All runs of the plan, each written when it is done; a second call continues the first."""
    torch.set_num_threads(1)
    folder = experiment_folder("real-boost").with_name(EXPERIMENT)
    folder.mkdir(exist_ok=True)  # beside it
    model, tokenizer = load_smollm2()
    ids, shape = texts(tokenizer, UPDATES), dict(batch=BATCH, length=LENGTH, dtype="bfloat16 products", arm="full")
    for what, chosen in LAYERS.items():
        upper = Upper(model, chosen[0])
        parts = {name: (lower(model, of, chosen[0]), of) for name, of in ids.items()}

        def run(name, rate, seed, split, updates=UPDATES, what=what, chosen=chosen, upper=upper, parts=parts):
            path = folder / f"{name}.json"
            if not path.is_file():
                trained, found = fit(model, upper, parts["train"], "full", rate, seed, updates, chosen=chosen)
                found["loss"] = upper.by_document(trained, *parts[split])
                of = dict(updates=updates, rate=rate, seed=seed, text=split, what=what, chosen=[*chosen])
                Record(EXPERIMENT, shape | of, found).save(name)
            (record,) = read_records(path)
            return sum(record.measured["loss"]) / len(record.measured["loss"])

        rate = best_rate(
            lambda rate, what=what, run=run: run(f"pilot-full, {what}-{rate:.2g}", rate, PILOT, "valid"), RATES, True
        )
        for seed in SEEDS:
            run(f"full, {what}-{seed}", rate, seed, "test")
            if what == "last":
                run(f"full, last, equal FLOPs-{seed}", rate, seed, "test", equal_updates())


if __name__ == "__main__":
    main()
