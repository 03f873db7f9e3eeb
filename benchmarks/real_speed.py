"""What a second round costs SmolLM2 when it reads and when it writes, against the FLOPs that `gbattn.cost` predicts.

The plain model and one with corrections in all layers take turns. What counts is the median of the processor seconds
of one thread, which other processes disturb less than the clock on the wall. Run with ``make real`` done:

    python benchmarks/real_speed.py
    python benchmarks/real_speed.py --compiled
    python benchmarks/real_speed.py --compiled --sequences 8

The second, for one sequence unless told otherwise, lets three ways take turns: as the model is, with a static cache,
and compiled with one (compiling aside). One more turn of each, not timed, measures the peak of memory: weights and
static cache, and what the process takes beyond them, as Linux counts it.

Prediction, written before the second was run: compiling brings the ratio of boosted to plain nearer to that of the
FLOPs, when a prompt is read and when a token is written; a static cache alone moves neither by more than 0.1. Written
before the third, when the second had shown the first half of that for writing only: with eight sequences compiling
brings the ratio of writing nearer to that of the FLOPs, and moves that of reading by less than 0.1.
"""

import argparse
import copy
import ctypes
import statistics
import time
from pathlib import Path

import torch
from torch import nn
from transformers import StaticCache

from gbattn.conventions import Record
from gbattn.lab.real_model import load_smollm2
from gbattn.language_model import ModelConfig, model_cost
from gbattn.pretrained import boost

PROMPT, NEW, TURNS, BATCHES = 128, 8, 3, (1, 8)
SHAPE = dict(vocab_size=49_152, max_length=256, d_model=576, n_layers=30, n_heads=9, d_ffn=1536, bias=False)
SHAPE |= dict(normalizer="rmsnorm", ffn="swiglu", positions="rotary")
MODES, MODE_TURNS = ("eager", "static", "compiled"), 7
OPTIONS = {"multi_head": dict(n_kv_heads=3), "boosted": dict(n_kv_heads=3, gate="head")}


@torch.no_grad()
def turn(model, ids, call=None, cache=None):
    """Processor seconds to read a prompt and to write a token after it, and the bytes of the cache, which is a new and
    growing one unless a static one is given; by `call`, or by the model itself."""
    call = model if call is None else call
    if cache is not None:
        cache.reset()
    begin = time.process_time()
    out = call(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    read, cache = time.process_time(), out.past_key_values
    for _ in range(NEW):
        out = call(out.logits[:, -1:].argmax(-1), past_key_values=cache, use_cache=True)
    written = time.process_time()
    return read - begin, (written - read) / NEW, cache_bytes(cache)


def cache_bytes(cache):
    """The bytes of its keys and values."""
    return sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))


def weight_bytes(model):
    """Those of its weights, in float32."""
    return 4 * sum(p.numel() for p in model.parameters())


def memory(name):
    """Bytes of this process: `VmRSS` now, `VmHWM` at most since the last peak was forgotten."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(row.split()[1]) for row in rows if row.startswith(name))


def peak(action):
    """The bytes that an action takes at most beyond those held before it."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = memory("VmRSS")
    action()
    return memory("VmHWM") - before


def flops(name, batch):
    """FLOPs to read the prompts, and to write a token half-way."""
    config = ModelConfig(**SHAPE, attention=name, attention_options=OPTIONS[name])
    # Of the head, the model reads one row of a prompt.
    head = 2 * SHAPE["d_model"] * SHAPE["vocab_size"] * batch * (PROMPT - 1)
    costs = model_cost(config, PROMPT, batch), model_cost(config, 1, batch, past=PROMPT + NEW // 2)
    return dict(read_flops=costs[0].forward_flops - head, write_flops=costs[1].forward_flops)


def seconds(rows):
    """Medians over turns, and all of them."""
    read, write = zip(*((row[0], row[1]) for row in rows))
    medians = dict(read_seconds=statistics.median(read), write_seconds=statistics.median(write))
    return medians | dict(all_read_seconds=read, all_write_seconds=write)


def eager(models, ids, settings):
    """Both models as they are, one sequence and eight."""
    found = {}
    for batch in BATCHES:
        turns = {name: [] for name in models}
        for _ in range(TURNS + 1):
            for name, model in models.items():
                turns[name].append(turn(model, ids[:batch]))
        for name, rows in turns.items():
            held = dict(cache_bytes=rows[-1][-1], weight_bytes=weight_bytes(models[name]))
            found[f"{name}, {batch}"] = seconds(rows[1:]) | flops(name, batch) | held  # the first turn warms up
    Record("real-speed", settings | dict(turns=TURNS), found).save("eager")


def compiled(models, ids, settings):
    """Both models as they are, with a static cache, and compiled with one."""
    ways, found, batch = {}, {}, len(ids)
    for name, model in models.items():
        for mode in MODES:
            cache = None if mode == "eager" else StaticCache(model.config, max_cache_len=PROMPT + 2 * NEW)
            call = torch.compile(model.forward, dynamic=False) if mode == "compiled" else model
            if cache is not None:
                with torch.no_grad():
                    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)  # makes the buffers
            ways[name, mode] = (model, ids, call, cache)
    turns = {way: [] for way in ways}
    begin = time.perf_counter()
    for number in range(MODE_TURNS + 1):
        for way, arguments in ways.items():
            turns[way].append(turn(*arguments))
        if number == 0:
            settings["seconds_of_compiling"] = round(time.perf_counter() - begin)
    for (name, mode), (model, _, _, cache) in ways.items():
        static = 0 if cache is None else cache_bytes(cache)
        most = weight_bytes(model) + static + peak(lambda way=(name, mode): turn(*ways[way]))
        held = dict(cache_bytes=turns[name, mode][-1][-1], weight_bytes=weight_bytes(model), peak_bytes=most)
        found[f"{name}, {mode}"] = seconds(turns[name, mode][1:]) | flops(name, batch) | held
    settings |= dict(sequences=batch, turns=MODE_TURNS, modes=MODES)
    Record("real-speed", settings, found).save("compiled" if batch == 1 else f"compiled-{batch}")


def main():
    """Measure, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--compiled", action="store_true", help="compiled and with a static cache, too")
    parser.add_argument("--sequences", type=int, default=1, choices=BATCHES, help="of the second (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain, _ = load_smollm2()
    boosted = boost(copy.deepcopy(plain), gate="head")
    for layer in boosted.model.layers:
        nn.init.normal_(layer.self_attn.corrections[0].value.weight, std=0.02)
    ids = torch.randint(100, 49_000, (max(BATCHES), PROMPT), generator=torch.Generator().manual_seed(0))
    settings = dict(prompt=PROMPT, new_tokens=NEW, threads=1, dtype="float32", gate="head")
    models = dict(multi_head=plain, boosted=boosted)
    if options.compiled:
        compiled(models, ids[: options.sequences], settings)
    else:
        eager(models, ids, settings)


if __name__ == "__main__":
    main()
