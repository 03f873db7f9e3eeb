"""A model that learns in milliseconds, and runs of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from gbattn.lab import training
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.training import TrainConfig

T, V = 8, 20

RANDOM = np.random.RandomState(0)

TOKENS = RANDOM.randint(0, V, 1001)

TOKENS[1::2] = (TOKENS[:-1:2] * 3 + 1) % V  # every other token can be learned

CORPUS = SimpleNamespace(train=TOKENS[:801], valid=TOKENS[801:])

ROOT = Path(__file__).parents[2]


class Toy(nn.Module):
    """A model of the right shape: an embedding, what came before on average, dropout, a head."""

    def __init__(self, dropout=0.0, seed=0, width=6):
        super().__init__()
        self.config = SimpleNamespace(max_length=T, vocab_size=V, to_dict=lambda: {"width": width})
        self.embedding, self.head = nn.Embedding(V, width), nn.Linear(width, V)
        self.dropout = nn.Dropout(dropout)
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.3, generator=generator)
        self.seen = []

    def forward(self, tokens, targets, *, reduction="mean"):
        if self.training:
            self.seen.append(tokens)
        logits = self.logits(tokens).flatten(0, 1)
        return nn.functional.cross_entropy(logits, targets.flatten(), reduction=reduction)

    def logits(self, tokens):
        x = self.embedding(tokens)
        past = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return self.head(self.dropout(torch.tanh(x + past)))


def config(**options):
    given = {"steps": 20, "batch_size": 4, "learning_rate": 0.01, "log_every": 1, "evaluate_every": 10}
    return TrainConfig(**(given | options))


def run(model=None, corpus=CORPUS, folder=None, **options):
    model = Toy(dropout=0.2) if model is None else model
    return train(model, corpus, config(**options), folder=folder, progress=False)


def curve(history):
    """All of a history but the clock."""
    return {name: x for name, x in history.to_dict().items() if name != "seconds"}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def overfitting(**options):
    """A run whose best evaluation is not its last."""
    text = SimpleNamespace(train=TOKENS[:81], valid=RANDOM.permutation(TOKENS)[:400])
    options = {"learning_rate": 0.1, "steps": 40, "evaluate_every": 4} | options
    model = Toy()
    return model, text, run(model, text, **options)


def stop_after(monkeypatch, step):
    """Make the run die in the update after so many."""
    update = training.update

    def dying(run):
        if run.step == step:
            raise KeyboardInterrupt
        update(run)

    monkeypatch.setattr(training, "update", dying)


class Interrupted(Toy):
    """A toy that stops once, in the first call that is one too many."""

    def __init__(self, calls):
        super().__init__(dropout=0.2)
        self.calls = calls

    def forward(self, *args, **options):
        self.calls -= self.training
        if self.training and self.calls == -1:
            raise KeyboardInterrupt
        return super().forward(*args, **options)


def small_model():
    config = ModelConfig(vocab_size=V, d_model=8, n_layers=1, n_heads=2, max_length=T, dropout=0.2)
    return LanguageModel(config, seed=0)


PLACES = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": PLACES}


def start(command, **more):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return subprocess.Popen([sys.executable, *map(str, command)], env=ENVIRONMENT | more, text=True, **pipes)


def finish(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])  # gloo of an older torch has its say before


END = 3  # as if it ended a document; it stands once in four or five windows of eight, at every place


def boosted_model():
    sizes = dict(vocab_size=V, max_length=T, d_model=8, n_layers=1, n_heads=2)
    return LanguageModel(ModelConfig(attention="boosted", **sizes), seed=0)
