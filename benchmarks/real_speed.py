"""What a second round costs SmolLM2 when it reads and when it writes, against the FLOPs that `gbattn.cost` predicts.

The plain model and one with corrections in all layers take turns. What counts is the median of the processor seconds
of one thread, which other processes disturb less than the clock on the wall. Run with ``make real`` done:

    python benchmarks/real_speed.py
"""

import copy
import statistics
import time

import torch
from torch import nn

from gbattn.conventions import Record
from gbattn.lab.real_model import load_smollm2
from gbattn.language_model import ModelConfig, model_cost
from gbattn.pretrained import boost

PROMPT, NEW, TURNS, BATCHES = 128, 8, 3, (1, 8)
SHAPE = dict(vocab_size=49_152, max_length=256, d_model=576, n_layers=30, n_heads=9, d_ffn=1536, bias=False)
SHAPE |= dict(normalizer="rmsnorm", ffn="swiglu", positions="rotary")
OPTIONS = {"multi_head": dict(n_kv_heads=3), "boosted": dict(n_kv_heads=3, gate="head")}


@torch.no_grad()
def turn(model, ids):
    """Processor seconds to read a prompt and to write a token after it, and the bytes of the cache."""
    begin = time.process_time()
    out = model(ids, use_cache=True, logits_to_keep=1)
    read, cache = time.process_time(), out.past_key_values
    for _ in range(NEW):
        out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
    written = time.process_time()
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    return read - begin, (written - read) / NEW, held


def main():
    """Measure, and write the record."""
    torch.set_num_threads(1)
    plain, _ = load_smollm2()
    boosted = boost(copy.deepcopy(plain), gate="head")
    for layer in boosted.model.layers:
        nn.init.normal_(layer.self_attn.corrections[0].value.weight, std=0.02)
    models, found = dict(multi_head=plain, boosted=boosted), {}
    ids = torch.randint(100, 49_000, (max(BATCHES), PROMPT), generator=torch.Generator().manual_seed(0))
    for batch in BATCHES:
        turns = {name: [] for name in models}
        for _ in range(TURNS + 1):
            for name, model in models.items():
                turns[name].append(turn(model, ids[:batch]))
        for name, rows in turns.items():
            read, write, held = zip(*rows[1:])  # the first turn warms up
            config = ModelConfig(**SHAPE, attention=name, attention_options=OPTIONS[name])
            # Of the head, the model reads one row of a prompt.
            head = 2 * SHAPE["d_model"] * SHAPE["vocab_size"] * batch * (PROMPT - 1)
            costs = model_cost(config, PROMPT, batch), model_cost(config, 1, batch, past=PROMPT + NEW // 2)
            found[f"{name}, {batch}"] = dict(
                read_seconds=statistics.median(read),
                write_seconds=statistics.median(write),
                read_flops=costs[0].forward_flops - head,
                write_flops=costs[1].forward_flops,
                cache_bytes=held[-1],
                weight_bytes=4 * sum(p.numel() for p in models[name].parameters()),
                all_read_seconds=read,
                all_write_seconds=write,
            )
    settings = dict(prompt=PROMPT, new_tokens=NEW, turns=TURNS, threads=1, dtype="float32", gate="head")
    Record("real-speed", settings, found).save("eager")


if __name__ == "__main__":
    main()
