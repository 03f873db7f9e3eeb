"""Boost a small model of the book that is trained, and train it further in six ways; chapter 30 says what came out.

A model of two layers learns the first half of Python's documentation and goes on with the second half. Records that
are there are not made again:

    python benchmarks/boost_further.py
"""

import copy
from types import SimpleNamespace

import numpy as np
import torch
from real_boost import LowRank
from torch import nn

from gbattn.attention import attend, merge_heads
from gbattn.conventions import Record, read_records
from gbattn.ground.records import experiment_folder
from gbattn.lab.token_cache import load_corpus
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig, model_cost
from gbattn.pretrained import GbattnForCausalLM, boost
from gbattn.training import TrainConfig

EXPERIMENT = "boost-further"
ARMS = ("boost", "LoRA", "sublayer", "boost, all", "continued", "continued, 400")
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
SEEDS, PILOTS, STEPS = (0, 1, 2, 3, 4), (100, 101), 400
SHAPE = dict(vocab_size=512, max_length=64, d_model=64, n_layers=2, n_heads=4)
costs = [model_cost(ModelConfig(**SHAPE, attention=kind)).training_flops for kind in ("multi_head", "boosted")]
EQUAL_FLOPS = costs[1] / costs[0]


class Sublayer(nn.Module):
    """One more attention sublayer of the stream, which starts as nothing."""

    def __init__(self, d_model, width, n_heads):
        super().__init__()
        self.norm, self.n_heads = nn.LayerNorm(d_model), n_heads
        self.qkv = nn.Linear(d_model, 3 * width)
        self.out = nn.Linear(width, d_model)
        nn.init.zeros_(self.out.weight)

    def forward(self, h):
        qkv = self.qkv(self.norm(h)).unflatten(-1, (3, self.n_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        return h + self.out(merge_heads(attend(q, k, v, causal=True)))


def arm_of(base, arm, seed):
    """A copy of the pretrained model, ready to be trained further in this way."""
    model = copy.deepcopy(base)
    torch.manual_seed(seed)  # of the new weights
    if arm.startswith("boost"):
        return boost(model, freeze=arm == "boost")
    if arm.startswith("continued"):
        return model
    model.requires_grad_(False)
    for block in model.model.blocks:
        if arm == "sublayer":
            block.extra = Sublayer(64, 80, 4)
            before = lambda block, args: (block.extra(args[0]), *args[1:])
            block.register_forward_pre_hook(before)
        else:
            for part, names in (
                (block.attention, ("query", "key", "value", "out")),
                (block.ffn, ("up", "down")),
            ):
                for name in names:
                    setattr(part, name, LowRank(getattr(part, name), 18))
    return model


def texts():
    """The text to learn from first, and the text to learn from then."""
    corpus = load_corpus("python-docs", vocab_size=512)
    half, valid = len(corpus.train) // 2, corpus.valid[:12_000]
    parts = corpus.train[:half], corpus.train[half:]
    return [SimpleNamespace(train=part, valid=valid) for part in parts]


def fit(model, text, steps, rate, seed, batch_size=16):
    """The validation loss after this training."""
    options = dict(length=64, batch_size=batch_size, keep="last")
    config = TrainConfig(steps=steps, learning_rate=rate, seed=seed, **options)
    return train(model, text, config, progress=False).validation_loss[-1]


def further(base, text, arm, rate, seed):
    """The loss of one arm after further training, and what its gates became."""
    model = arm_of(base, arm, seed)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    steps = round(STEPS * (EQUAL_FLOPS if arm == "continued" else 1))
    loss = fit(model, text, steps, rate, seed)
    found = dict(loss=loss, trained=trained, steps=steps)
    if arm.startswith("boost"):
        window = torch.as_tensor(text.valid[:1024].astype("int64")).view(16, 64)
        window = window.to(model.device)  # training may have moved it
        with torch.no_grad():
            traces = model.to_language_model().outputs(window, traces=True).traces
        rounds = [trace.rounds[1] for trace in traces]
        found["gate_moved"] = [(r.gate - 0.5).abs().mean().item() for r in rounds]
        found["share"] = [((r.gate * r.correction).norm() / r.estimate.norm()).item() for r in rounds]
    return found


def main():
    """All runs, each written when it is done; a second call continues the first."""
    folder = experiment_folder(EXPERIMENT)
    there = lambda name: (folder / f"{name}.json").is_file()
    save = lambda name, *parts: Record(EXPERIMENT, *parts).save(name)
    first, then = texts()
    plain = LanguageModel(ModelConfig(**SHAPE), seed=0)
    before = fit(plain, first, 1500, 3e-3, 0)
    base = GbattnForCausalLM.from_language_model(plain)
    if not there("base"):
        settings = SHAPE | dict(arm="base", rate=3e-3, steps=1500)
        save("base", settings, dict(loss=before, equal_flops=EQUAL_FLOPS))
    for arm in ARMS:
        if not there(f"pilot-{arm}"):
            runs = [[further(base, then, arm, rate, seed)["loss"] for seed in PILOTS] for rate in RATES]
            settings = dict(arm=f"pilot, {arm}", rates=RATES, seeds=PILOTS)
            save(f"pilot-{arm}", settings, dict(loss=runs))
    for seed in SEEDS:
        for arm in ARMS:
            if not there(f"{arm}-{seed}"):
                (pilot,) = read_records(folder / f"pilot-{arm}.json")
                rate = RATES[int(np.mean(pilot.measured["loss"], 1).argmin())]
                settings = dict(arm=arm, rate=rate, seed=seed)
                save(f"{arm}-{seed}", settings, further(base, then, arm, rate, seed))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
