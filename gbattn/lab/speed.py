"""A glance at a machine: how fast models train and write on it."""

from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

import torch

from gbattn.cost import call_seconds
from gbattn.ground.arguments import COUNT, check, require
from gbattn.language_model import LanguageModel


class Speed(NamedTuple):
    """How fast a model is: the seconds of a training step, ``step_seconds``, and of a
    token that is written, ``token_seconds``; each is a median."""

    step_seconds: float
    token_seconds: float


def measure_speed(
    models: Iterable[LanguageModel],
    *,
    batch_size: int = 16,
    rounds: int = 7,
    new_tokens: int = 32,
) -> list[Speed]:
    """Measure how fast language models train and write, each on its own device.

    Parameters
    ----------
    models : iterable of gbattn.language_model.LanguageModel
        They take turns, and keep their weights: the step is one of AdamW at a learning
        rate of 0.
    batch_size : int
        Sequences of a step, each of the model's ``max_length`` random tokens.
    rounds : int
        Turns of each that count, after one that does not.
    new_tokens : int
        Tokens written in a turn, one by one, in one sequence, with the cache.
    """
    counts = dict(batch_size=batch_size, rounds=rounds, new_tokens=new_tokens)
    check(**{name: (count, COUNT) for name, count in counts.items()})
    models = list(models)
    good = all(isinstance(model, LanguageModel) for model in models)
    require(good, "models", models, "LanguageModels")

    def turn_of(model: LanguageModel) -> Callable[[], list[float]]:
        device, config = model.head_weight.device, model.config
        shape = batch_size, config.max_length + 1
        seeded = torch.Generator().manual_seed(0)
        text = torch.randint(config.vocab_size, shape, generator=seeded).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

        def step() -> None:
            model(text[:, :-1], text[:, 1:].contiguous()).backward()
            optimizer.step()
            optimizer.zero_grad()

        write = lambda: model.generate(text[:1, :1], new_tokens)
        return lambda: [call_seconds(call, device) for call in (step, write)]

    turns = [turn_of(model) for model in models]
    seconds = [[turn() for turn in turns] for _ in range(rounds + 1)]
    medians = [map(median, zip(*of)) for of in zip(*seconds[1:])]
    return [Speed(step, written / new_tokens) for step, written in medians]
