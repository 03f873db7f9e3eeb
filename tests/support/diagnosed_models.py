"""Small models whose weights are large enough for all their parts to matter, and a batch for them."""

import torch

from gbattn.corpora import Batch
from gbattn.language_model import LanguageModel, ModelConfig

KINDS = {
    "residual": ("boosted", {}),
    "three rounds": ("boosted", dict(rounds=3, gate="head", shift=True)),
    "input": ("boosted", dict(kv_from="input", gate="scalar")),
    "shared": ("boosted", dict(kv_from="shared", gate="none")),
    "queries of the input": ("boosted", dict(query_from="input", n_kv_heads=2)),
    "twicing": ("twicing", dict(rounds=3)),
    "multi-head": ("multi_head", {}),
    "linear": ("linear", {}),
}


def model_of(attention="boosted", options=None, seed=0, **changes):
    """A model with weights large enough for all its parts to matter."""
    shape = dict(vocab_size=50, max_length=16, d_model=16, n_layers=2, n_heads=4, init_std=0.4)
    config = ModelConfig(**shape | changes, attention=attention, attention_options=options or {})
    model = LanguageModel(config, seed=seed).double().eval()
    rng = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if ".gate." in name:
            weight.data = torch.randn(weight.shape, generator=rng, dtype=torch.float64) / 2
    return model


def batch_of(B=4, T=16, V=50, seed=0):
    text = torch.randint(V, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(text[:, :-1], text[:, 1:].contiguous())
