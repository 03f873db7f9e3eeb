"""Time every attention layer against those of others, against a naive form and its floor; then time decoding.

The floor of a layer makes the same matrix products, with the same weights in the same order, and the same calls of
``scaled_dot_product_attention``, with nothing around them: no residual, no gate but its products, no sum. Run with
``make bench``. All methods of one problem see the same tokens in the same process; those that are compared take turns,
and the median over the turns counts, of the times and of their ratios. Before anything is timed, each floor must make
exactly its layer's products, and each naive form must give its layer's answer. On a CPU everything is timed in a
process that keeps the memory it frees, so that arithmetic is compared; before that, at T = 256 and 1024, torch's own,
three layers and their naive forms also as a program has them that asks for nothing: it returns memory to the system and
pays for getting it again. Records go to ``results/``. On a GPU: ``--device cuda`` (bfloat16, eager, then compiled).

The others are torch's own layer, the attention of transformers' GPT-2 where transformers is installed, and with
``--author FILE`` the layers of the paper's author, from experiments/train_openwebtext.py of the repository
salehsargolzaee/boosted-attention. They keep weights of their own, since only the time counts.
"""

import argparse
import copy
import functools
import math
import runpy
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as nnf
from measuring import Times, counted, keep_memory, page_faults, peak_bytes, return_memory, take_turns
from torch import nn

from gbattn.attention import merge_heads, split_heads
from gbattn.boosted import GradientBoostedAttention
from gbattn.conventions import Record
from gbattn.cost import attention_cost, count_flops
from gbattn.layers import LinearAttention, MultiHeadAttention
from gbattn.twicing import TwicingAttention

SHAPES = ((32, 256, 256, 4), (4, 1024, 768, 12), (1, 4096, 512, 8))
RUNS, PATIENCE = {256: 15, 1024: 9, 4096: 9}, 3
PRECISION = 0.01  # turns go on until a ratio that has an aim is known to so much of itself, or patience ends
WITH_NAIVE = ("multi_head", "twicing", "boosted residual feature")
BESIDE = (" floor", " naive", " author", " transformers")  # what follows a layer's name where it is not the layer
MODES = ("eager", "compiled")
MEMORY = ("returned", "kept")  # in this order: a process that has begun to keep its memory goes on
KV_FROM, GATES = ("residual", "input", "shared"), ("feature", "head", "scalar", "none")
DECODED, POSITIONS = (1, 512, 8), (128, 512, 1024, 2048, 4096)
AIMS = {"multi_head": 1.03, "twicing": 1.06, "boosted": 1.06}  # at most this many times the floor
NAIVE_AIMS = {256: 1.5, 1024: 2.5}  # at least this many times faster than the naive form


# ---- What is timed ----


def layers(D: int, H: int, whole: bool) -> dict[str, nn.Module]:
    """The layers by name. Without `whole`, each way to read keys and each gate, but not every pair of them."""
    modules = {"multi_head": MultiHeadAttention(D, H), "twicing": TwicingAttention(D, H)}
    for kv_from in KV_FROM:
        for gate in GATES if whole or kv_from == "shared" else GATES[:1]:
            modules[f"boosted {kv_from} {gate}"] = GradientBoostedAttention(D, H, kv_from=kv_from, gate=gate)
    return modules | {"linear": LinearAttention(D, H)}


def floor(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The products of the layer, one after the other; every end of the chain is returned, so that all run backward."""
    H = layer.n_heads

    def look(q, k, v):
        return merge_heads(nnf.scaled_dot_product_attention(q, k, v, is_causal=True))

    q, k, v = (split_heads(project(x), H) for project in (layer.query, layer.key, layer.value))
    F, gates = look(q, k, v), []
    if isinstance(layer, TwicingAttention):
        for _ in range(1, layer.rounds):
            F = look(q, k, split_heads(F, H))
    for correction in getattr(layer, "corrections", ()):
        q = split_heads(correction.query(F), H)
        if correction.key is not None:
            read = F if layer.kv_from == "residual" else x
            k, v = split_heads(correction.key(read), H), split_heads(correction.value(read), H)
        c = look(q, k, v)
        if correction.gate is not None:
            of_F, of_c = correction.gate.weight.chunk(2, dim=1)
            gates += [nnf.linear(F, of_F, correction.gate.bias), nnf.linear(c, of_c)]
        F = c
    return [layer.out(F), *gates]


def naive(layer: MultiHeadAttention, T: int, device: torch.device) -> MultiHeadAttention:
    """The naive form: the layer, with the same weights, that overrides the method in which it attends by one that
    builds the T × T weights, as the formula says it."""
    later = torch.ones(T, T, dtype=torch.bool, device=device).triu(1)

    def attend_heads(inputs, q, k, v):
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return merge_heads(scores.masked_fill_(later, float("-inf")).softmax(-1) @ v), None

    form = copy.copy(layer)
    form.attend_heads = attend_heads
    return form


def torchs_own(D: int, H: int, T: int, device: torch.device, dtype: torch.dtype) -> Callable:
    layer = nn.MultiheadAttention(D, H, batch_first=True, device=device, dtype=dtype)
    mask = nn.Transformer.generate_square_subsequent_mask(T, device=device, dtype=dtype)
    return lambda x: layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]


def layers_of_others(D: int, H: int, author: Path | None) -> dict[str, nn.Module]:
    """The layers of transformers and of the paper's author, causal by themselves, beside ours that does the same."""
    others = {}
    if find_spec("transformers"):
        from transformers import GPT2Config
        from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

        config = GPT2Config(n_embd=D, n_head=H, attn_pdrop=0.0, resid_pdrop=0.0, attn_implementation="sdpa")
        others["multi_head transformers"] = GPT2Attention(config, layer_idx=0)
    if author:
        module = runpy.run_path(str(author))
        for name, kind in zip(WITH_NAIVE, ("CausalAttention", "TwicingCausalAttention", "BoostedCausalAttention")):
            others[f"{name} author"] = module[kind](D, H)
    return others


def output_of(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = layer(x)
    return output[0] if isinstance(output, tuple) else output


def compiled(method: Callable) -> Callable:
    """The method compiled, or an error: never in part, nor for sizes that may change.

    Its code is its own: torch compiles the same code eight times, and whoever comes next would run uncompiled.
    """

    def call(*given, **options):
        return method(*given, **options)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, dynamic=False, fullgraph=True)


# ---- Layers ----


def methods_of(modules: dict, D: int, H: int, T: int, memory: str, options: argparse.Namespace) -> dict[str, Callable]:
    """Functions of x: torch's own, each layer, its floor, the naive form of those that have one, and what others have.
    Where memory is returned, only torch's own and those with a naive form, and no floor."""
    ready = compiled if options.compile else lambda method: method
    methods = {"nn.MultiheadAttention": ready(torchs_own(D, H, T, options.device, options.dtype))}
    for name, layer in modules.items():
        if memory == "returned" and name not in WITH_NAIVE:
            continue
        methods[name] = ready(functools.partial(layer, causal=True))
        if memory != "returned" and name != "linear":
            methods[f"{name} floor"] = ready(functools.partial(floor, layer))
    for name in filter(modules.__contains__, WITH_NAIVE):
        methods[f"{name} naive"] = ready(functools.partial(naive(modules[name], T, options.device), causal=True))
    for name, layer in (layers_of_others(D, H, options.author) if memory != "returned" else {}).items():
        methods[name] = ready(functools.partial(output_of, layer.to(options.device, options.dtype)))
    return methods


def groups_of(names: Iterable[str]) -> dict[str, list[str]]:
    """By layer: the layer, its floor, its naive form and those of others: those that are compared."""
    groups = {}
    for name in names:
        layer = name
        for suffix in BESIDE:
            layer = layer.removesuffix(suffix)
        groups.setdefault("multi_head" if layer == "nn.MultiheadAttention" else layer, []).append(name)
    return groups


def comparisons(layer: str, group: list[str]) -> Iterator[tuple[str, str, str]]:
    """What is divided by the time of what, and the name of the ratio."""
    for what, beneath in (("layer", layer), ("floor", f"{layer} floor")):
        for name in group:
            if beneath in group and name not in (beneath, f"{layer} floor"):
                yield name, beneath, f"over_{what}"


def known(layer: str, times: dict[str, Times]) -> bool:
    """Whether the ratios with a close aim are: the layer's to its floor, and torch's own to the layer."""
    close = ((layer, f"{layer} floor"), ("nn.MultiheadAttention", layer))
    return all(times[a].over(times[b]).known_to(PRECISION) for a, b in close if {a, b} <= times.keys())


def flat(result: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return result if isinstance(result, list) else [result]


def training(method: Callable, x: torch.Tensor) -> Callable:
    """Forward and backward, to the input and to all weights; the gradients of the ends are given."""
    given = [torch.ones_like(end) for end in flat(method(x))]
    return lambda: torch.autograd.backward(flat(method(x)), given)


def products(method: Callable, x: torch.Tensor) -> int:
    """FLOPs of the products of a forward and a backward pass."""
    return count_flops(lambda: training(method, x)()) - count_flops(method, x)


def demand_the_same(modules: dict, x: torch.Tensor) -> None:
    """Stop unless each floor makes its layer's products, and the naive form gives its layer's answer."""
    for name, layer in modules.items():
        if name == "linear":  # has neither
            continue
        answer = layer(x, causal=True)
        gap = ((naive(layer, x.shape[1], x.device)(x, causal=True) - answer).abs().max() / answer.abs().max()).item()
        if not gap <= 64 * torch.finfo(x.dtype).eps:
            raise SystemExit(f"{name} and its naive form differ by a relative {gap:.1e}")
        mine, beneath = products(functools.partial(layer, causal=True), x), products(functools.partial(floor, layer), x)
        if mine != beneath:
            raise SystemExit(f"{name} makes {mine} FLOPs of products, its floor {beneath}")


def benchmark_layers(shape: tuple[int, int, int, int], memory: str, options: argparse.Namespace) -> None:
    return_memory()
    B, T, D, H = shape
    runs = options.runs or RUNS[T]
    torch.manual_seed(0)
    modules = layers(D, H, options.whole or shape == SHAPES[0])
    modules = {name: layer for name, layer in modules.items() if name in (options.layers or modules)}
    demand_the_same(modules, torch.randn(1, 64, D, requires_grad=True))  # in float32: in bfloat16 too much would pass
    modules = {name: layer.to(options.device, options.dtype) for name, layer in modules.items()}
    x = torch.randn(B, T, D, device=options.device, dtype=options.dtype, requires_grad=True)
    methods = methods_of(modules, D, H, T, memory, options)
    tasks = {
        "forward": ({name: functools.partial(method, x) for name, method in methods.items()}, torch.no_grad),
        "training": ({name: training(method, x) for name, method in methods.items()}, nullcontext),
    }
    measured = {name: {} for name in methods}
    for task, (calls, context) in tasks.items():
        with context():
            for name, call in calls.items():
                call()  # the first is not timed; it may compile, and leaves gradients that stay
                measured[name][f"{task}_peak_bytes"] = peak_bytes(call, options.device)
            for layer, group in groups_of(calls).items():
                times = take_turns(
                    {name: calls[name] for name in group},
                    runs,
                    settle=options.settle,
                    wait=options.wait,
                    patience=PATIENCE,
                    enough=functools.partial(known, layer),
                )
                for name in group:
                    measured[name] |= {f"{task}_{field}": value for field, value in times[name].spread.items()}
                    measured[name][f"{task}_turns"] = len(times[name].seconds)
                for name, beneath, field in comparisons(layer, group):
                    for end, value in times[name].over(times[beneath])._asdict().items():
                        measured[name][f"{task}_{field}_{end}".removesuffix("_median")] = value
            for name, call in calls.items():
                call()
                measured[name][f"{task}_page_faults"] = page_faults(call)
    settings = {"B": B, "T": T, "D": D, "H": H, "memory": memory} | options.machine | {"runs": runs}
    for name, numbers in measured.items():
        if name in modules:
            cost = attention_cost(modules[name], T, batch_size=B, causal=True, itemsize=x.element_size())
            numbers |= {"saved_bytes": cost.saved_bytes, "training_flops": cost.training_flops}
        record = Record("benchmark-attention-layers", settings | {"method": name}, numbers)
        returned = " returned" if memory == "returned" else ""
        record.save(f"{options.prefix}{B} {T} {D} {H} {name}{returned}".replace(" ", "-").lower())
    show_layers(shape, memory, measured)


def show_layers(shape: tuple[int, int, int, int], memory: str, measured: dict[str, dict]) -> None:
    """Print a row for each method, and whether the aims were met."""
    print(f"\n(B, T, D, H) = {shape}, memory {memory}: milliseconds, times the floor, megabytes, page faults")
    header = f"{'floor':>8}{'MB':>8}{'faults':>8}"
    print(f"{'':30}{'forward':>10}{header}{'training':>12}{header}")
    for name, numbers in measured.items():
        row = f"{name:30}"
        for task, width in (("forward", 10), ("training", 12)):
            row += f"{1e3 * numbers[f'{task}_median_seconds']:{width}.1f}"
            ratio = numbers.get(f"{task}_over_floor")
            row += f"{ratio:8.3f}" if ratio and not name.endswith("naive") else " " * 8
            row += f"{numbers[f'{task}_peak_bytes'] / 1e6:8.0f}{numbers[f'{task}_page_faults']:8}"
        print(row)
    for task in ("forward", "training"):
        for name, numbers in measured.items():
            limit, field = AIMS.get(name.split()[0]), f"{task}_over_floor"
            if limit and not name.endswith(BESIDE) and numbers.get(field, 0) > limit:
                ratio, low, high = (numbers[field + end] for end in ("", "_low", "_high"))
                print(f"missed: {task} of {name}, {ratio:.3f} ({low:.3f} to {high:.3f}) times its floor, aim {limit}")
        gain = measured["nn.MultiheadAttention"].get(f"{task}_over_layer", math.inf)
        if gain <= 1:
            print(f"missed: {task} of nn.MultiheadAttention, {gain:.3f} times multi_head, aim above 1")
        gain = measured.get("boosted residual feature naive", {}).get(f"{task}_over_layer", math.inf)
        if gain < (aim := NAIVE_AIMS.get(shape[1], 0)):
            print(f"missed: {task} of the naive form, {gain:.2f} times boosted residual feature, aim {aim}")


# ---- Decoding ----


def benchmark_decoding(options: argparse.Namespace) -> None:
    """One more token behind so many, with a cache and without."""
    (B, D, H), longest, runs = DECODED, max(POSITIONS), options.runs or 7
    torch.manual_seed(0)
    modules = layers(D, H, False)
    chosen = ("multi_head", "twicing", "boosted residual feature", "boosted shared head", "linear")
    print(f"\ndecoding, (B, D, H) = {DECODED}: tokens a second after so many, with the cache and without")
    print(f"{'':30}" + "".join(f"{position:>16}" for position in POSITIONS))
    with torch.no_grad():
        rows = {}
        for name in chosen:
            layer = modules[name].to(options.device, options.dtype)
            rows[name] = {}
            cache = layer.make_cache(B, longest + 1, dtype=options.dtype)
            for kept in cache.buffers.values():
                kept.normal_()
            for position in POSITIONS:
                x = torch.randn(B, position + 1, D, device=options.device, dtype=options.dtype)
                step = functools.partial(one_step, layer, cache, x[:, -1:], position)
                calls = {"cache": step, "whole": functools.partial(layer, x, causal=True)}
                numbers = {}
                for way, turns in (("cache", 10 * runs), ("whole", runs)):
                    calls[way]()
                    one = {way: calls[way]}
                    timed = take_turns(one, turns, settle=options.settle, wait=options.wait)[way]
                    numbers[f"{way}_tokens_per_second"] = B / timed.median
                itemsize = x.element_size()
                cost = attention_cost(layer, 1, past=position, batch_size=B, causal=True, itemsize=itemsize)
                numbers |= {"cache_bytes": cost.cache_bytes, "flops": cost.forward_flops}
                numbers["traffic_bytes"] = cost.traffic_bytes
                settings = {"B": B, "D": D, "H": H, "position": position} | options.machine
                record = Record("benchmark-decoding", settings | {"method": name, "runs": runs}, numbers)
                record.save(f"{options.prefix}{position:05d} {name}".replace(" ", "-").lower())
                rows[name][position] = numbers
            cells = (
                f"{n['cache_tokens_per_second']:8.0f}{n['whole_tokens_per_second']:8.0f}" for n in rows[name].values()
            )
            print(f"{name:30}" + "".join(cells))


def one_step(layer: nn.Module, cache, x: torch.Tensor, position: int) -> torch.Tensor:
    cache.length = position  # as if the tokens before had just been written
    return layer(x, causal=True, cache=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = "timed runs of each method at least (default: 15 at T = 256, else 9; 7 of decoding)"
    parser.add_argument("--runs", type=counted, help=runs)
    parser.add_argument("--whole", action="store_true", help="every pair of kv_from and gate at every shape")
    parser.add_argument(
        "--shapes", type=int, nargs="*", choices=range(3), default=[0, 1, 2], help="which of the three shapes"
    )
    parser.add_argument("--memory", nargs="*", choices=MEMORY, help="on a CPU, one way only (default: as above)")
    parser.add_argument(
        "--layers", nargs="*", metavar="NAME", help="which, as 'boosted residual feature'; default: all"
    )
    parser.add_argument("--no-decoding", dest="decoding", action="store_false", help="leave out decoding")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    dtypes = ("float32", "bfloat16")
    parser.add_argument("--dtype", choices=dtypes, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--modes", nargs="*", choices=MODES, help="default: eager on a CPU, both on a GPU")
    parser.add_argument("--author", type=Path, metavar="FILE", help="train_openwebtext.py, as said above")
    options = parser.parse_args()
    gpu = options.device == "cuda"
    known = layers(8, 1, True)
    if unknown := set(options.layers or ()) - known.keys():
        parser.error(f"--layers: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    if options.author and not options.author.is_file():
        parser.error(f"--author: there is no file {options.author}")
    if gpu and options.memory:
        parser.error("--memory is for a CPU: a GPU's allocator keeps memory anyway")
    options.device = torch.device(options.device)
    dtype = options.dtype or ("bfloat16" if gpu else "float32")
    options.dtype = getattr(torch, dtype)
    options.wait = torch.cuda.synchronize if gpu else lambda: None
    # All methods use the same threads of torch, so nobody has to wake: one untimed call of a method meets the caches
    # and the memory that the method before it left.
    options.settle = 0.02 if gpu else 1e-6
    for mode in options.modes or (MODES if gpu else MODES[:1]):
        options.compile = mode == "compiled"
        options.machine = {"device": options.device.type, "dtype": dtype, "compiled": options.compile}
        plain = not (gpu or options.compile or options.dtype != torch.float32)
        options.prefix = "" if plain else f"{options.device.type} {dtype} {'compiled ' if options.compile else ''}"
        benchmark(options, gpu)


def benchmark(options: argparse.Namespace, gpu: bool) -> None:
    """All that is timed in one mode; decoding in the eager one."""
    wanted = options.memory or (["kept"] if gpu else MEMORY)
    for memory in filter(wanted.__contains__, MEMORY):
        if memory == "kept" and not gpu and not keep_memory():
            print("\nthis C library cannot be told to keep memory: the ratios below contain page faults")
            memory = "not kept"
        for shape in (SHAPES[index] for index in options.shapes):
            if memory != "returned" or shape[1] in NAIVE_AIMS:
                benchmark_layers(shape, memory, options)
    if options.decoding and not options.compile:
        if not gpu:
            keep_memory()
        benchmark_decoding(options)


if __name__ == "__main__":
    main()
