"""Time a training step of each arm against a plain step, and the standard one against a textbook's.

A *plain step* makes the same matrix products on the same weights, written straight: functions of torch in a row, no
modules, no checks, no accelerate. It gives the same loss and the same gradients, which is demanded before anything is
timed. *Products* are its matrix products and looks alone, forward and backward: no normalisation, no activation, no
softmax over the vocabulary, no optimiser. The *textbook* step is the standard model as it is usually written: all
logits at once, an optimiser that goes through the parameters one by one, a look at the loss in every step. On a GPU our
step is also *captured*: a graph of CUDA, replayed. Run with ``make bench``. All methods of one problem see the same
tokens in the same process; those that are compared take turns, and the median over the turns counts, of the times and
of their ratios. Records go to ``results/``. On a GPU: ``--device cuda``.
"""

import argparse
import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
import torch._dynamo
import torch.nn.functional as nnf
from measuring import Times, counted, peak_bytes, take_turns
from torch import nn

from gbattn.attention import merge_heads, split_heads
from gbattn.conventions import Record
from gbattn.cost import count_flops, count_kernels
from gbattn.head import next_token_loss
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.training import start_run
from gbattn.language_model import LanguageModel, ModelConfig, model_cost
from gbattn.training import Run, TrainConfig, decay_groups, parts_of, read_losses, step_seed, update

SHAPES = {  # B, T, D, heads, layers, V
    "small": (32, 128, 64, 4, 4, 2048),
    "published": (32, 256, 256, 4, 4, 16384),
    "quick": (2, 16, 16, 2, 4, 64),
}
# Those of the tables of chapter 18, but the ones whose size is found by timing or that are twice here.
ARMS = {
    arm.name.replace("_", " "): arm
    for name in ("mini", "mini-arms", "shift")
    for arm in EXPERIMENTS[name].arms
    if arm.equal_in != "time" and not (name == "shift" and arm.equal_to)
}
WAYS = ("", " compiled", " captured", " compiled captured")  # in which a step can be made; the first is eager
# An arm's are compared with these.
STANDARD = (*(f"standard{way}" for way in WAYS), "standard plain", "standard products")
RUNS = {"small": 15, "published": 5, "quick": 1}
PATIENCE = {"small": 3, "published": 1, "quick": 1}
PRECISION = 0.01  # turns go on until a ratio that has an aim is known to so much of itself, or patience ends
AIMS = {"plain": 1.06, "textbook": 1.2, "predicted": 1.05}


# ---- Steps ----


def run_of(model: nn.Module, tokens: np.ndarray, shape: tuple, precision: str, way: str = "") -> Run:
    config = TrainConfig(steps=10**6, batch_size=shape[0], precision=precision, compile="compiled" in way)
    corpus = SimpleNamespace(train=tokens, valid=tokens)
    return start_run(model.train(), corpus, config, None, capture="captured" in way)


def our_step(run: Run) -> None:
    """What `train` does, the look at the losses included, which it takes every tenth time."""
    update(run)
    if run.step % run.config.log_every == 0:
        read_losses(run)
        run.unlogged.clear()


causal_attention = functools.partial(nnf.scaled_dot_product_attention, is_causal=True)


def plain_attention(layer: nn.Module, x: torch.Tensor, products_only: bool) -> torch.Tensor:
    """The layer, written straight. Of `products_only`, no residual, no sum and no gate but its products."""
    H = layer.n_heads
    linear = lambda part, z: nnf.linear(z, part.weight, part.bias)

    def heads(part, z, shift=None):
        z = linear(part, z)
        if shift is not None and not products_only:
            z = torch.addcmul(z * (1 + shift.own), shift.previous, nnf.pad(z, (0, 0, 1, -1)))
        return split_heads(z, H)

    keys_and_values = lambda of, z: (heads(of.key, z, of.key_shift), heads(of.value, z, of.value_shift))
    q, (k, v) = heads(layer.query, x), keys_and_values(layer, x)
    F, ends = causal_attention(q, k, v), []
    if type(layer).__name__ == "TwicingAttention":
        F = causal_attention(q, k, F if products_only else 2 * v - F)
    F = merge_heads(F)
    for correction in getattr(layer, "corrections", ()):
        r = F if products_only else x - F
        q = heads(correction.query, r)
        if correction.key is not None:
            read = r if layer.kv_from == "residual" else x
            k, v = keys_and_values(correction, read)
        c = merge_heads(causal_attention(q, k, v))
        if correction.gate is not None:
            of_F, of_c = correction.gate.weight.chunk(2, dim=1)
            g = nnf.linear(F, of_F, correction.gate.bias), nnf.linear(c, of_c)
        if products_only:
            ends += [part.sum() * 0 for part in g] if correction.gate is not None else []
            F = c
            continue
        gate = torch.sigmoid(g[0] + g[1]) if correction.gate is not None else 1
        if correction.gate is not None and gate.shape[-1] not in (1, F.shape[-1]):
            gate = gate.repeat_interleave(F.shape[-1] // gate.shape[-1], -1)
        F = F + gate * c
    return linear(layer.out, F) + sum(ends)


def plain_stream(model: nn.Module, tokens: torch.Tensor, products_only: bool) -> torch.Tensor:
    """The stream before the head."""
    h = model.token_embedding.weight[tokens] if products_only else nnf.embedding(tokens, model.token_embedding.weight)
    if not products_only:
        h = h + model.position_embedding.weight[: tokens.shape[1]]
    norm = (
        (lambda layer, x: x)
        if products_only
        else (lambda layer, x: nnf.layer_norm(x, layer.normalized_shape, layer.weight, layer.bias, layer.eps))
    )
    act = (lambda x: x) if products_only else nnf.gelu
    for block in model.blocks:
        a = plain_attention(block.attention, norm(block.attention_norm, h), products_only)
        h = a if products_only else h + a
        up = nnf.linear(norm(block.ffn_norm, h), block.ffn.up.weight, block.ffn.up.bias)
        f = nnf.linear(act(up), block.ffn.down.weight, block.ffn.down.bias)
        h = f if products_only else h + f
    return norm(model.final_norm, h).flatten(0, 1)


class HeadProducts(torch.autograd.Function):
    """The three products of the head, by chunks of rows, with nothing between them."""

    @staticmethod
    def forward(ctx, h, weight):
        rows = 256 if h.device.type == "cpu" else 2048
        dh, dw = [], torch.zeros_like(weight)
        for chunk in h.split(rows):
            z = chunk @ weight.T
            dh.append(z @ weight)
            dw.addmm_(z.T, chunk)
        ctx.save_for_backward(torch.cat(dh), dw)
        return h.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.saved_tensors


def plain_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, products_only=False) -> torch.Tensor:
    h = plain_stream(model, inputs, products_only)
    weight = model.token_embedding.weight
    if products_only:
        return HeadProducts.apply(h, weight.to(h.dtype))
    return next_token_loss(h, weight, targets.flatten())


def autocast(device: torch.device, precision: str):
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def plain_step(
    run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, precision: str, compiled: bool = False
) -> Callable:
    """Batch, forward, backward, clip, fused AdamW."""
    device = next(model.parameters()).device
    batch = run.stream.batch(0)
    parameters = list(model.parameters())
    loss_of = torch.compile(plain_loss, dynamic=False) if compiled else plain_loss

    def step():
        torch.manual_seed(step_seed(0, 0))
        inputs, targets = (x.to(device) for x in batch)
        with autocast(device, precision):
            loss = loss_of(model, inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def products(run: Run, model: nn.Module, precision: str) -> Callable:
    device = next(model.parameters()).device
    inputs, targets = (x.to(device) for x in run.stream.batch(0))

    def step():
        with autocast(device, precision):
            loss = plain_loss(model, inputs, targets, products_only=True)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


# ---- The textbook ----


class TextbookBlock(nn.Module):
    def __init__(self, D: int, H: int):
        super().__init__()
        self.n_heads = H
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.ffn = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, x):
        q, k, v = (split_heads(part, self.n_heads) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(merge_heads(nnf.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return x + self.ffn(self.norm2(x))


class Textbook(nn.Module):
    """A GPT as it is usually written, with fused attention."""

    def __init__(self, T: int, D: int, H: int, layers: int, V: int):
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(*(TextbookBlock(D, H) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(D), nn.Linear(D, V, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens):
        h = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(h)))


def textbook_step(run: Run, shape: tuple, device: torch.device, precision: str, compiled: bool) -> Callable:
    B, T, D, H, layers, V = shape
    model = Textbook(T, D, H, layers, V).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    called, batch = torch.compile(model, dynamic=False) if compiled else model, run.stream.batch(0)

    def step():
        inputs, targets = (x.to(device) for x in batch)
        with autocast(device, precision):
            logits = called(inputs)
            loss = nnf.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()  # at the end, as in every step here: gradients are part of what a step needs
        loss.item()

    return step


# ---- What is timed ----


def demand_the_same(model: nn.Module, run: Run) -> None:
    """Stop unless the plain loss has the model's gradients, and the products alone are the model's. A CPU can tell for
    all: a GPU has other kernels for attention with other counts, and takes the general one at odd widths."""
    model, (inputs, targets) = copy.deepcopy(model).cpu(), (x[:2] for x in run.stream.batch(0))
    gradients = []
    for call in (model, functools.partial(plain_loss, model)):
        model.zero_grad()
        call(inputs, targets).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    gap = ((gradients[0] - gradients[1]).norm() / gradients[0].norm()).item()
    if not gap < 1e-4:
        raise SystemExit(f"the gradients of a plain step are off by a relative {gap:.1e}")
    model.zero_grad()
    counts = count_flops(lambda: plain_loss(model, inputs, targets, products_only=True).backward())
    model.zero_grad()
    in_place = 2 * inputs.numel() * model.token_embedding.weight.numel()  # torch does not count addmm_
    expected = model_cost(model.config, inputs.shape[1], 2).training_flops
    if counts != expected - in_place:
        raise SystemExit(f"the products alone make {counts + in_place} FLOPs, the model {expected}")


def config_of(arm: str, shape: tuple) -> ModelConfig:
    """The model of an arm at the size of a shape, or at what equals that of another arm there."""
    B, T, D, H, layers, V = shape
    mini = EXPERIMENTS["mini"]
    sizes = {"max_length": T, "d_model": D, "n_heads": H, "n_layers": layers}
    config = replace(mini, corpus=replace(mini.corpus, vocab_size=V), model=sizes).model_of(ARMS[arm])
    # With smaller weights and no normalisation the products alone would sink to numbers that a CPU is slow with.
    return replace(config, init_std=config.d_model**-0.5)


def steps_of(arm: str, shape: tuple, tokens: np.ndarray, options, precision: str) -> dict[str, Callable]:
    """The calls of one arm by name, each a training step."""
    config = config_of(arm, shape)
    run = run_of(LanguageModel(config), tokens, shape, precision)
    model = run.model
    demand_the_same(model, run)
    optimizer = torch.optim.AdamW(decay_groups(model, 0.01), lr=1e-6, fused=True)
    calls = {
        arm: functools.partial(our_step, run),
        f"{arm} plain": plain_step(run, model, optimizer, precision),
        f"{arm} products": products(run, model, precision),
    }
    if arm == "standard":
        calls["textbook"] = textbook_step(run, shape, options.device, precision, False)
    for way in WAYS[1:]:
        possible = options.device.type == "cuda" or "captured" not in way
        if possible and (options.compile or "compiled" not in way):
            run = run_of(LanguageModel(config), tokens, shape, precision, way)
            calls[f"{arm}{way}"] = functools.partial(our_step, run)
    if options.compile:
        calls[f"{arm} plain compiled"] = plain_step(run, model, optimizer, precision, True)
        if arm == "standard":
            calls["textbook compiled"] = textbook_step(run, shape, options.device, precision, True)
    return calls


def comparisons(arm: str, group: dict) -> Iterator[tuple[str, str, str]]:
    """What is divided by the time of what, and the name of the ratio."""
    pairs = [(arm, f"{arm} {kind}", f"over_{kind}") for kind in ("plain", "products")]
    pairs += [(f"{arm}{way}", arm, "over_eager") for way in WAYS[1:]]
    pairs.append((f"{arm} compiled", f"{arm} plain compiled", "over_plain"))
    if arm == "standard":
        for textbook in ("textbook", "textbook compiled"):
            pairs += [(textbook, f"{arm}{way}", f"over_standard{way}".replace(" ", "_")) for way in WAYS]
    else:
        pairs += [(standard.replace("standard", arm), standard, "over_standard") for standard in STANDARD]
    yield from (pair for pair in pairs if {*pair[:2]} <= group.keys())


def known(arm: str, times: dict[str, Times]) -> bool:
    """Whether the ratios with an aim are: the standard step's to the plain one, an arm's to the standard step."""
    close = (arm, "standard plain" if arm == "standard" else "standard")
    pairs = [tuple(f"{of}{way}" for of in close) for way in WAYS]
    return all(times[a].over(times[b]).known_to(PRECISION) for a, b in pairs if {a, b} <= times.keys())


def parts_of_a_step(shape: tuple, tokens: np.ndarray) -> dict[str, Callable]:
    """What surrounds forward and backward in a step of the standard model, each alone, and other ways to do it."""
    B, T, D, H, layers, V = shape
    model = LanguageModel(ModelConfig(vocab_size=V, max_length=T, d_model=D, n_heads=H, n_layers=layers))
    run = run_of(model, tokens, shape, "no")
    parameters = run.learning
    for p in parameters:
        p.grad = torch.full_like(p, 1e-3)
    device = parameters[0].device
    groups = lambda: decay_groups(model, 0.01)
    kinds = {"fused": {"fused": True}, "one by one": {"foreach": False}, "foreach": {"foreach": True}}
    adamw = {f"AdamW {name}": torch.optim.AdamW(groups(), lr=1e-9, **kind).step for name, kind in kinds.items()}
    h = torch.randn(B * T, D, device=device, requires_grad=True)
    weight, targets = model.token_embedding.weight, torch.randint(V, (B * T,), device=device)
    return {
        **adamw,
        "clip": lambda: run.accelerator.clip_grad_norm_(parameters, 1.0),
        "batch": lambda: parts_of(run, 0),
        "seed": lambda: torch.manual_seed(step_seed(0, 0)),
        "loss": lambda: torch.autograd.grad(next_token_loss(h, weight, targets), (h, weight)),
        "loss, all logits": lambda: torch.autograd.grad(nnf.cross_entropy(h @ weight.T, targets), (h, weight)),
        "dropout": lambda: torch.autograd.grad(nnf.dropout(h, 0.1).sum(), h),
    }


def with_peaks(calls: dict[str, Callable], options: argparse.Namespace) -> dict[str, dict]:
    """Call each once, which is not timed, then for the memory that it needs and, if it is not compiled, its kernels."""
    found = {}
    for name, call in calls.items():
        call()
        found[name] = {"peak_bytes": peak_bytes(call, options.device)}
        if not name.endswith(WAYS[1:]):
            found[name]["kernels"] = count_kernels(call)
    return found


def benchmark(name: str, options: argparse.Namespace) -> None:
    shape, runs = SHAPES[name], options.runs or RUNS[name]
    B, T, D, H, layers, V = shape
    tokens = np.random.RandomState(0).randint(0, V, 64 * B * T + 1)
    sizes = {"shape": name, "B": B, "T": T, "D": D, "H": H, "layers": layers, "V": V, "device": options.device.type}
    turns = functools.partial(take_turns, settle=options.settle, wait=options.wait)
    for precision in options.precisions:
        torch.manual_seed(0)
        standard = steps_of("standard", shape, tokens, options, precision)
        show_heads(name, precision)
        for arm in options.arms:
            mine = standard if arm == "standard" else steps_of(arm, shape, tokens, options, precision)
            found = with_peaks(mine, options)
            group = mine | {method: standard[method] for method in STANDARD if method in standard}
            times = turns(group, runs, patience=PATIENCE[name], enough=functools.partial(known, arm))
            for method, numbers in found.items():
                numbers |= times[method].spread | {"turns": len(times[method].seconds)}
                numbers["tokens_per_second"] = B * T / numbers["median_seconds"]
            for method, beneath, field in comparisons(arm, group):
                for end, value in times[method].over(times[beneath])._asdict().items():
                    found[method][f"{field}_{end}".removesuffix("_median")] = value
            flops = {of: model_cost(config_of(of, shape), T, B).training_flops for of in (arm, "standard")}
            found[arm]["training_flops"] = flops[arm]
            for method in found.keys() - {"textbook", "textbook compiled"}:
                found[method]["predicted_ratio"] = flops[arm] / flops["standard"]
            for method, numbers in found.items():
                settings = sizes | {"precision": precision, "method": method, "runs": runs}
                save("benchmark-training-step", f"{name} {precision} {method}", settings, numbers, options)
            show(arm, found)
            if name != "quick":
                show_missed(arm, found)
    calls = parts_of_a_step(shape, tokens)
    parts = with_peaks(calls, options)
    for part, times in turns(calls, 3 * runs).items():
        parts[part] |= times.spread
        print(f"{part:30}{1e3 * times.median:10.2f} ms")
        settings = sizes | {"method": part, "runs": 3 * runs}
        save("benchmark-training-parts", f"{name} {part}", settings, parts[part], options)


def save(experiment: str, name: str, settings: dict, numbers: dict, options: argparse.Namespace) -> None:
    prefix = "" if options.device.type == "cpu" else f"{options.device.type} "
    name = f"{prefix}{name}".replace(",", "").replace(" ", "-").lower()
    Record(experiment, settings, numbers).save(name, options.folder)


def show_heads(name: str, precision: str) -> None:
    print(f"\n{name} {SHAPES[name]}, precision {precision}: milliseconds, tokens a second, megabytes at the highest,")
    print("kernels, times the plain step, the products alone, the standard step, and what its products predict")


def show(arm: str, found: dict[str, dict]) -> None:
    """Print a row for each method of an arm."""
    for method, numbers in found.items():
        row = f"{method:30}{1e3 * numbers['median_seconds']:10.1f}{numbers['tokens_per_second']:12,.0f}"
        row += f"{numbers['peak_bytes'] / 1e6:9.0f}{numbers.get('kernels', ''):9}"
        for field in ("over_plain", "over_products", "over_standard", "predicted_ratio"):
            row += f"{numbers[field]:9.3f}" if field in numbers else " " * 9
        print(row.rstrip(), flush=True)


def show_missed(arm: str, found: dict[str, dict]) -> None:
    """Print which aims were not met, each at the fastest way."""
    fastest = lambda kind: min(
        (n for n in found if n in [f"{kind}{way}" for way in WAYS]), key=lambda n: found[n]["median_seconds"]
    )
    numbers = found[fastest(arm)]
    if arm != "standard":
        limit = AIMS["predicted"] * numbers["predicted_ratio"]
        if numbers["over_standard"] > limit:
            print(f"missed: {fastest(arm)} takes {interval(numbers, 'over_standard')} times as long; aim {limit:.3f}")
        return
    beside_plain = {name: numbers for name, numbers in found.items() if "over_plain" in numbers}  # none is captured
    name = min(beside_plain, key=lambda name: found[name]["median_seconds"])
    if found[name]["over_plain"] > AIMS["plain"]:
        print(f"missed: {name} takes {interval(found[name], 'over_plain')} plain steps; aim {AIMS['plain']}")
    textbook, field = found[fastest("textbook")], f"over_{fastest(arm).replace(' ', '_')}"
    if textbook[field] < AIMS["textbook"]:
        print(f"missed: the textbook's step takes {interval(textbook, field)} of ours; aim {AIMS['textbook']}")


def interval(numbers: dict, field: str) -> str:
    return f"{numbers[field]:.3f} ({numbers[field + '_low']:.3f} to {numbers[field + '_high']:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = "timed runs of each method at least (default: small 15, published 5)"
    parser.add_argument("--runs", type=counted, help=runs)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["small", "published"], help="which shapes")
    parser.add_argument("--precisions", nargs="*", choices=("no", "bf16"), default=["no", "bf16"])
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="which arms; by default all")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="leave out what is compiled")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="by default what accelerate finds")
    parser.add_argument("--folder", help="where records go; by default results/")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, once: does everything still run?")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.compile, options.runs = ["quick"], False, options.runs or 1
    # One function is compiled for each arm and precision; with a few more than eight torch would go on without a word,
    # and eagerly.
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    from accelerate import Accelerator

    found = Accelerator().device
    if found.type not in ("cpu", "cuda") or options.device not in (None, found.type):
        raise SystemExit(f"accelerate finds {found.type}; set ACCELERATE_USE_CPU=true to keep off a GPU")
    options.device = found
    gpu = found.type == "cuda"
    options.wait = torch.cuda.synchronize if gpu else lambda: None
    # All methods use the same threads of torch, so nobody has to wake: one untimed call of a method meets the caches
    # and the memory that the method before it left.
    options.settle = 0.02 if gpu else 1e-6
    for name in options.shapes:
        benchmark(name, options)


if __name__ == "__main__":
    main()
