"""Chapter 12 on pictures: the vision transformer of `transformers` under the meter, and small ones in training."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from gbattn.blocks import Block, make_normalizer
from gbattn.conventions import Record
from gbattn.signal import (
    VIT_B,
    equiangular_tokens,
    initialize,
    measure,
    recursion,
)

WIDTH, SIDE = 192, 64

# ---- pictures, and a vision transformer that sees them ----


def pictures(kind, B=4):
    """B pictures (B, 3, 64, 64): crops of two photographs, digits, or random fields; entries around 0."""
    from sklearn.datasets import load_digits, load_sample_images

    if kind == "photos":  # at a quarter of their size
        x = torch.tensor(np.stack(load_sample_images().images)).permute(0, 3, 1, 2)
        x = nn.functional.avg_pool2d(x / 255, 4)
        left = [8 + 40 * (i // 2) for i in range(B)]
        x = torch.stack(
            [x[i % 2, :, 20 : 20 + SIDE, a : a + SIDE] for i, a in enumerate(left)]
        )
    elif kind == "digits":
        x = torch.tensor(load_digits().images[:B] / 16).float()[:, None]
        x = nn.functional.interpolate(x, (SIDE, SIDE), mode="bilinear").expand(
            -1, 3, -1, -1
        )
    else:  # amplitudes fall like 1 / frequency
        rng, k = torch.Generator().manual_seed(0), torch.fft.fftfreq(SIDE)
        frequency = (k[:, None] ** 2 + k**2).sqrt()
        frequency[0, 0] = math.inf  # no mean
        noise = torch.fft.fft2(torch.randn(B, 3, SIDE, SIDE, generator=rng))
        x = torch.fft.ifft2(noise / frequency).real
        x = 0.5 + 0.25 * x / x.std((-2, -1), keepdim=True)
    return 2 * x - 1


@lru_cache(5)
def vision_transformer(seed, depth, act="relu", factor=1.0, sharp=1.0):
    """A `ViTModel` of width 192 with 64 patches, at the scales of ViT-B × factor; queries and keys × sharp as well."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(seed)
    sizes = dict(
        hidden_size=WIDTH,
        intermediate_size=4 * WIDTH,
        num_hidden_layers=depth,
        num_attention_heads=4,
    )
    seen = dict(image_size=SIDE, patch_size=8, hidden_act=act)
    std = 0.02 * math.sqrt(768 / WIDTH) * factor
    model = ViTModel(
        ViTConfig(**sizes, **seen, initializer_range=std), add_pooling_layer=False
    ).eval()
    for name, weight in model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weight.data *= sharp
    return model.requires_grad_(False)


def blocks_of(model, normalizer="layernorm", alpha=None):
    """The model's blocks, with another normaliser in them."""
    from transformers.models.vit.modeling_vit import ViTLayer

    blocks = [module for module in model.modules() if isinstance(module, ViTLayer)]
    slope = {} if alpha is None else {"alpha": alpha}
    for block in blocks:
        block.layernorm_before = make_normalizer(normalizer, WIDTH, **slope)
        block.layernorm_after = make_normalizer(normalizer, WIDTH, **slope)
    return blocks


def first_tokens(model, kind, with_class=False, with_places=True):
    """What enters block 0; for "equiangular", tokens of the photographs' mean size and
    overlap, any two alike."""
    with torch.no_grad():
        equal = kind == "equiangular"
        x = model.embeddings(pictures("photos" if equal else kind))
        if not with_places:
            x = x - model.embeddings.position_embeddings
    x = x if with_class else x[:, 1:]
    if not equal:
        return x
    q, p = (values.mean().item() for values in sizes_and_overlaps(x))
    rng = torch.Generator().manual_seed(0)
    options = dict(batch_size=len(x), generator=rng)
    return equiangular_tokens(x.shape[1], WIDTH, q0=q, p0=p, **options)


def sizes_and_overlaps(x):
    """Of each token of x (B, n, D): its size, and its mean overlap with the others."""
    gram = (x @ x.mT / WIDTH).double()
    q = gram.diagonal(dim1=1, dim2=2)
    return q, (gram.sum(2) - q) / (x.shape[1] - 1)


# ---- measured and predicted ----


def predicted(x, depth, s, each_token=False):
    """The recursion from the tokens x (B, n, D), a mean over pictures; or with a size and an overlap for each token,
    a mean over tokens as well."""
    q, p = sizes_and_overlaps(x[:, 1:] if s["with_class"] else x)  # (B, n)
    if each_token:
        p = p.minimum(q).maximum(-q / (x.shape[1] - 1))
    else:
        q, p = q.mean(1), p.mean(1)
    rules = dict(
        normalizer=s["normalizer"],
        alpha=s["alpha"] or 1.0,
        sigmas=VIT_B.times(s["factor"]),
    )
    found = recursion(depth, **rules, q0=q.numpy(), p0=p.numpy(), n=x.shape[1])
    mean = lambda values: values.reshape(depth + 1, -1).mean(1).tolist()
    return {
        name: mean(getattr(found, name))
        for name in ("q", "p", "backward_J", "forward_J")
    }


STANDARD = dict(
    pictures="photos",
    normalizer="layernorm",
    alpha=None,
    act="relu",
    factor=1.0,
    sharp=1.0,
)
STANDARD |= dict(
    family="transformers", with_class=False, with_places=True, forward=False
)
STANDARD |= dict(depth=64, later=8, inits=5, draws=2)
LN, DYT, DERF = (
    dict(normalizer="layernorm"),
    dict(normalizer="dyt", alpha=1.0),
    dict(normalizer="derf", alpha=1.0),
)
NORMALIZERS = {"layernorm": LN, "dyt": DYT, "derf": DERF}
CONTROLS = {
    "gelu": dict(act="gelu"),
    "class": dict(with_class=True),
    "places": dict(with_places=False),
    "sharp": dict(sharp=4.0),
    "twice": dict(factor=2.0),
    "blocks": dict(family="gbattn"),
}
ADDED = {  # after the others had run
    "flat": dict(sharp=0.0),
    "equal": dict(pictures="equiangular"),
}


def picture_runs():
    """The arms of the long run: three kinds of pictures, and controls on the photographs."""
    runs = {}
    for name, normalizer in NORMALIZERS.items():
        for kind in ("photos", "digits", "fields"):
            runs[f"{kind}-{name}"] = normalizer | dict(pictures=kind, forward=True)
        for control, change in CONTROLS.items():
            runs[f"{control}-{name}"] = normalizer | change | dict(inits=3)
    for control, change in ADDED.items():
        runs[f"{control}-layernorm"] = LN | change | dict(inits=3)
    return runs


def measure_pictures(**changes):
    """Measure one arm, and predict it from the tokens before block 0 and after `later` blocks. Returns a Record."""
    s = STANDARD | changes
    depth, later, rows = s["depth"], s["later"], {}
    short = lambda values: [float(f"{x:.5g}") for x in values]
    add = lambda name, values: rows.setdefault(name, []).append(short(values))
    for seed in range(s["inits"]):
        model = vision_transformer(seed, depth, s["act"], s["factor"], s["sharp"])
        x = first_tokens(model, s["pictures"], s["with_class"], s["with_places"])
        rng = torch.Generator().manual_seed(seed)
        if s["family"] == "gbattn":
            blocks = [
                Block(WIDTH, 4, ffn=s["act"], normalizer=s["normalizer"])
                for _ in range(depth)
            ]
            initialize(
                blocks, VIT_B.times(s["factor"]), alpha=s["alpha"], generator=rng
            )
        else:
            blocks = blocks_of(model, s["normalizer"], s["alpha"])
        for way in ("backward", "forward") if s["forward"] else ("backward",):
            found = measure(
                blocks,
                x,
                direction=way,
                draws=s["draws"],
                generator=rng,
                progress=False,
            )
            add(f"{way}_J", found.J.tolist())
        add("q", found.q.tolist())
        add("p", found.p.tolist())
        with torch.no_grad():
            h = nn.Sequential(*blocks[:later])(x)
        for name, values in predicted(x, depth, s).items():
            add(f"{name}_predicted", values)
        add(
            "each_token_predicted",
            predicted(x, depth, s, each_token=True)["backward_J"],
        )
        add("later_predicted", predicted(h, depth - later, s)["backward_J"])
    return Record("signal-pictures", s, rows)
