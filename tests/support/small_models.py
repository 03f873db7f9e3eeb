"""Small models of each kind, in float64, for the tests of several chapters."""

import torch

from gbattn.boosted import Gate
from gbattn.language_model import LanguageModel, ModelConfig

F64 = torch.float64


V, T = 23, 20


SMALL = dict(vocab_size=V, max_length=T, d_model=8, n_layers=2, n_heads=2)


KINDS = {
    "multi_head": {},
    "grouped": dict(attention_options={"n_kv_heads": 1}),
    "linear": dict(attention="linear"),
    "twicing": dict(attention="twicing", attention_options={"rounds": 3}),
    "boosted": dict(attention="boosted"),
    "shared": dict(attention="boosted", attention_options={"kv_from": "shared", "gate": "head"}),
    "mixed": dict(overrides={1: {"attention": "boosted", "norm": "post", "ffn": "swiglu"}}),
    "shifted": dict(attention="boosted", attention_options={"shift": True}, overrides={0: {"ffn": "none"}}),
}


LEARNED = [(kind, "learned") for kind in KINDS]


ROTARY = [(kind, "rotary") for kind in KINDS if kind != "linear"]  # its features must stay positive


def config_of(kind="multi_head", positions="learned", **changes):
    return ModelConfig(**SMALL | KINDS[kind] | dict(positions=positions) | changes)


def model_of(*kind, seed=0, scale=20, dtype=F64, **changes):
    """A model whose blocks have something to say, gates too."""
    model = LanguageModel(config_of(*kind, **changes), seed=seed, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Gate):
                module.weight.normal_(generator=generator)
            elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.mul_(scale)
    return model


def tokens_of(B=3, length=9, seed=1, vocab_size=V):
    return torch.randint(vocab_size, (B, length), generator=torch.Generator().manual_seed(seed))
