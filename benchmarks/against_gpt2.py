"""Time training steps and generation against transformers' GPT-2 of equal shape.

Both have the same weights and, before anything is timed, must give the same logits, loss and greedy text. A step is
forward, loss, backward and one update of torch's AdamW, the same in both; nothing of accelerate, nothing fused. Text is
generated greedily with a cache, and with static caches and compiled models. Those that are compared take turns, and
the median over the turns counts, of the times and of their ratios to GPT-2 in the same way. Run with ``make bench``; it
needs ``gbattn[pretrained]``. Records go to ``results/``. On a GPU: ``--device cuda``.
"""

import argparse
import copy
from collections.abc import Callable

import torch
from measuring import counted, take_turns
from transformers import CompileConfig, GPT2Config, GPT2LMHeadModel

from gbattn.conventions import Record
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.pretrained import GbattnForCausalLM

SHAPES = {  # B, T, D, heads, layers, V
    "small": (32, 128, 64, 4, 4, 2048),
    "medium": (8, 256, 256, 8, 6, 8192),
    "quick": (2, 16, 16, 2, 2, 64),
}
PROMPT = {"small": (32, 96), "medium": (64, 128), "quick": (4, 8)}  # tokens of the prompt, and new ones


def gpt2_of(model: LanguageModel) -> GPT2LMHeadModel:
    """The GPT-2 with the weights of a language model of standard attention."""
    c = model.config
    sizes = dict(vocab_size=c.vocab_size, n_positions=c.max_length, n_embd=c.d_model, n_layer=c.n_layers)
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    end = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    config = GPT2Config(n_head=c.n_heads, activation_function="gelu", **sizes, **off, **end)
    gpt2 = GPT2LMHeadModel(config)
    weights = {"wte.weight": model.token_embedding.weight, "wpe.weight": model.position_embedding.weight}
    modules = {"ln_f": model.final_norm}
    for i, block in enumerate(model.blocks):
        of = block.attention
        modules |= {f"h.{i}.ln_1": block.attention_norm, f"h.{i}.ln_2": block.ffn_norm}
        maps = {"mlp.c_fc": block.ffn.up, "mlp.c_proj": block.ffn.down, "attn.c_proj": of.out}
        for name, linear in maps.items():
            weights |= {f"h.{i}.{name}.weight": linear.weight.mT, f"h.{i}.{name}.bias": linear.bias}
        fused = [of.query, of.key, of.value]
        weights[f"h.{i}.attn.c_attn.weight"] = torch.cat([linear.weight for linear in fused]).mT
        weights[f"h.{i}.attn.c_attn.bias"] = torch.cat([linear.bias for linear in fused])
    for name, module in modules.items():
        weights |= {f"{name}.{key}": p for key, p in module.named_parameters()}
    gpt2.transformer.load_state_dict({name: p.detach().clone() for name, p in weights.items()})
    return gpt2.to(model.head_weight.device).eval()


def training_step(model: torch.nn.Module, loss_of: Callable) -> Callable[[], torch.Tensor]:
    """One update; it returns the loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def benchmark(name: str, options: argparse.Namespace) -> None:
    """Measure one shape and write its record."""
    B, T, D, H, L, V = SHAPES[name]
    config = ModelConfig(vocab_size=V, max_length=max(T, sum(PROMPT[name])), d_model=D, n_layers=L, n_heads=H)
    draw = torch.Generator().manual_seed(0)
    # Token 0 is what transformers pads with.
    inputs, targets = (torch.randint(1, V, (B, T), generator=draw).to(options.device) for _ in range(2))
    model = LanguageModel(config, seed=0, device=options.device).eval()
    gpt2, bridged = gpt2_of(model), GbattnForCausalLM.from_language_model(model)
    cross_entropy = lambda: torch.nn.functional.cross_entropy(gpt2(inputs).logits.flatten(0, 1), targets.flatten())
    with torch.no_grad():
        torch.testing.assert_close(gpt2(inputs).logits, model(inputs), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(cross_entropy(), model(inputs, targets), atol=1e-4, rtol=1e-4)
    fast, for_any_device = copy.deepcopy(model), CompileConfig()
    fast.compile(fullgraph=True)
    for_any_device._compile_all_devices = True  # else transformers compiles on a GPU only
    length, new = PROMPT[name]
    texts, methods = {}, {}
    for batch in (1, B):
        prompt = inputs[:batch, :length]
        greedy = dict(max_new_tokens=new, do_sample=False, pad_token_id=0)
        texts = {
            "gbattn": lambda prompt=prompt: model.generate(prompt, new, temperature=0),
            "gbattn in transformers": lambda prompt=prompt, greedy=greedy: bridged.generate(prompt, **greedy),
            "GPT-2": lambda prompt=prompt, greedy=greedy: gpt2.generate(prompt, **greedy),
        }
        static = greedy | {"cache_implementation": "static", "compile_config": for_any_device}
        texts |= {
            "gbattn static": lambda p=prompt: fast.generate(p, new, temperature=0, cache="static"),
            "gbattn in transformers static": lambda p=prompt, static=static: bridged.generate(p, **static),
            "GPT-2 static": lambda p=prompt, static=static: gpt2.generate(p, **static),
        }
        found = {kind: generate() for kind, generate in texts.items()}
        same = [(text == found["GPT-2"]).float().mean().item() for text in found.values()]
        assert min(same) > 0.9, same  # where two tokens tie to the last digit, texts part
        methods |= {f"{kind}, {batch} texts": generate for kind, generate in texts.items()}
    measured = {}
    steps = {
        "gbattn, step": training_step(model, lambda: model(inputs, targets)),
        "GPT-2, step": training_step(gpt2, cross_entropy),
    }
    wait = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    for group in ({n: m for n, m in methods.items() if n.endswith(f", {b} texts")} for b in (1, B)):
        measured |= take_turns(group, options.runs, settle=1e-6, wait=wait)
    model.train(), gpt2.train()
    measured |= take_turns(steps, options.runs, settle=1e-6, wait=wait)
    rows = {}
    for method, times in measured.items():
        name_of, _, kind = method.partition(", ")
        like = " static" if name_of.endswith("static") else ""
        ratio = times.over(measured[f"GPT-2{like}, {kind}"])
        rows[method] = times.spread | {"over_gpt2": ratio.median, "low": ratio.low, "high": ratio.high}
        tokens = B * T if kind == "step" else int(kind.split()[0]) * new
        rows[method]["tokens_per_second"] = round(tokens / times.median)
        print(f"{name:8} {method:30} {1000 * times.median:9.1f} ms   {ratio.median:.3f} of GPT-2's "
              f"({ratio.low:.3f} to {ratio.high:.3f})", flush=True)  # fmt: skip
    settings = dict(shape=name, B=B, T=T, D=D, heads=H, layers=L, V=V, prompt=length, new=new)
    settings |= dict(runs=options.runs, threads=torch.get_num_threads(), device=options.device)
    record = Record("speed-gpt2", settings, rows)
    print(record.save(name if options.device == "cpu" else f"{name}-{options.device}", options.folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=counted, default=15, help="timed runs of each method")
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=["small", "medium"], help="which shapes")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--folder", help="where records go; by default results/")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, once: does everything still run?")
    options = parser.parse_args()
    if options.quick:
        options.shapes, options.runs = ["quick"], 1
    for name in options.shapes:
        benchmark(name, options)


if __name__ == "__main__":
    main()
