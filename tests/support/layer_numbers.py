"""Numbers of every layer in float64, to hold against those of another commit.

For each case one number of the output and one of all its gradients, and for each layer the names of its weights and one
number of their seeded start.  `python layer_numbers.py FILE` writes them; in `layer_numbers.json` are those of the
commit before the layers were rebuilt, with which they agreed to the last bit on one machine.
"""

import itertools
import json
import math
import sys
from pathlib import Path

import torch

import gbattn
import gbattn.hierarchical
import gbattn.sinkhorn

B, T, D, H = 2, 6, 16, 4
LAYERS = {
    "multi_head": [{}],
    "linear": [{}, {"feature_map": "identity"}],
    "twicing": [{}, {"rounds": 3}],
    "boosted": [
        *({"kv_from": kv, "gate": gate} for kv in ("residual", "input", "shared") for gate in ("feature", "scalar")),
        {"gate": "head"},
        {"gate": "none"},
        {"rounds": 3},
        {"kv_from": "residual_keys"},
        {"kv_from": "residual_values", "rounds": 3},
        {"query_from": "input"},
    ],
    "hierarchical": [{}, {"combine": "residuals"}],
    "sinkhorn": [{}],
}
OPTIONS = [{}, {"rotary": 100.0}, {"n_kv_heads": 2}, {"qk_norm": True}, {"shift": True}, {"bias": False}]
OPTIONS += [{"rotary": 100.0, "n_kv_heads": 2, "qk_norm": True, "shift": True}]
CALLS = ("plain", "causal", "mask", "head_mask", "added", "padding", "context", "window", "alibi", "decode", "explain")


def filled(shape, phase):
    n = math.prod(shape)
    return torch.sin(torch.arange(n, dtype=torch.float64) * 0.7 + phase).reshape(shape)


def make(name, options):
    torch.manual_seed(0)
    layer = gbattn.make_attention(name, D, H, **options).double()
    start = one_number(*layer.parameters())
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(filled(p.shape, i) * 0.2)
    return layer, start


def called(layer, call, x):
    """The output of one way to call a layer."""
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    window = gbattn.attention.sliding_window(3)
    options = {
        "plain": {},
        "causal": {"causal": True},
        "mask": {"mask": (causal | causal.mT.roll(1, 0))[None, None]},
        "head_mask": {"mask": torch.stack([causal.roll(h, 1) for h in range(H)])[None].expand(B, -1, -1, -1)},
        "added": {"mask": filled((1, 1, T, T), 0.3), "causal": True},
        "padding": {"padding": torch.arange(T) < torch.tensor([[T], [T - 2]]), "causal": True},
        "context": {"context": filled((B, T + 2, D), 2.0)},
        "window": {"mask": window, "causal": True},
        "alibi": {"score_mod": gbattn.attention.alibi(H), "causal": True},
    }
    if call == "decode":
        with torch.no_grad():
            outputs = []
            for static in (False, True):
                cache = layer.make_cache(B, T, static=static)
                for now in (slice(0, 3), slice(3, 4), slice(4, 6)):
                    outputs.append(layer(x[:, now], causal=True, cache=cache))
        return torch.cat(outputs, 1)
    if call == "explain":
        trace = layer.explain(x, causal=True)
        parts = [p for r in trace.rounds for p in r if p is not None]
        return torch.cat([trace.output.flatten(), *(p.flatten() for p in parts)])
    return layer(x, **options[call])


def one_number(*tensors):
    return float(sum((t.detach() * filled(t.shape, i)).sum() for i, t in enumerate(tensors))).hex()


def numbers():
    torch.set_num_threads(1)
    found = {}
    for name, own in LAYERS.items():
        for kind, options in itertools.product(own, OPTIONS):
            title = f"{name} {json.dumps(kind | options)}"
            try:
                layer, start = make(name, kind | options)
            except (ValueError, TypeError) as error:
                found[title] = type(error).__name__.replace("ArgumentError", "ValueError")
                continue
            found[title] = [start, *layer.state_dict()]
            for call in CALLS:
                x = filled((B, T, D), 1.0).requires_grad_(call != "decode")
                try:
                    output = called(layer, call, x)
                except (ValueError, RuntimeError, TypeError) as error:
                    found[f"{title} {call}"] = type(error).__name__.replace("ArgumentError", "ValueError")
                    continue
                found[f"{title} {call}"] = [one_number(output)]
                if output.requires_grad:
                    layer.zero_grad()
                    (output * filled(output.shape, 0.1)).sum().backward()
                    gradients = [x.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]
                    found[f"{title} {call}"].append(one_number(*gradients))
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(numbers(), separators=(",\n", ":")))
