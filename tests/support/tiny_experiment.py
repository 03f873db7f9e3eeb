"""An experiment of four runs that take a second together, its text, and made-up records of it."""

import os
from dataclasses import replace

import numpy as np
import pytest

from gbattn.conventions import Record
from gbattn.experiments import CorpusSpec, Experiment
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.queue import run_experiment
from gbattn.lab.texts import load_text

STANDARD, WIDER, BOOSTED = EXPERIMENTS["quick"].arms


OWN = """
question = "a test"
arms = ["standard", "boosted_residual", "gated"]
seeds = [1, 2]

[corpus]
name = "tiny"
vocab_size = 260

[model]
max_length = 16
d_model = 8
n_layers = 1
n_heads = 2
dropout = 0.1

[train]
steps = 8
batch_size = 4
evaluate_every = 4
log_every = 2
learning_rate = 0.001
warmup_steps = 2

[arm.gated]
model = { attention = "boosted", attention_options.gate = "head" }
"""


TINY = Experiment(
    name="tiny",
    question="a test",
    corpus=CorpusSpec(name="tiny", vocab_size=260),
    model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2, dropout=0.1),
    train=dict(steps=8, batch_size=4, evaluate_every=4, log_every=2, learning_rate=1e-3, warmup_steps=2),
    arms=(STANDARD, BOOSTED),
    seeds=(1, 2),
)


UNRATED = replace(TINY, train={key: x for key, x in TINY.train.items() if key != "learning_rate"})


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    (folder / "tiny").mkdir()
    words = np.random.default_rng(0).choice(["a cat", "the dog", "sat", "ran", "on a mat", "and"], 4000)
    for split, part in (("train", words), ("valid", words[:300]), ("test", words[300:650])):
        (folder / "tiny" / f"{split}.txt").write_text(" ".join(part) + "\n")
    os.environ["GBATTN_CACHE"] = str(folder / "cache")
    return folder


@pytest.fixture(scope="module")
def finished(corpora, tmp_path_factory):
    place = tmp_path_factory.mktemp("finished")
    return place, go(corpora, place)


def go(corpora, place, experiment=TINY, **options):
    return run_experiment(
        experiment, folder=place / "results", work=place / "work", corpora=corpora, progress=False, **options
    )


def ends_in(said):
    """The lines on how runs ended, of what a queue says."""
    return [line for line in said.splitlines() if not line.endswith(": starts")]


def untimed(records):
    return [{k: v for k, v in r.measured.items() if "seconds" not in k} for r in records]


def made(one, corpora=None):
    measured = dict(diverged=False, test_loss=1.0, valid_loss=1.0, test_perplexity=2.7, seconds=1.0)
    measured |= dict(parameters=1, non_embedding=1)
    text = one.settings["text"] | {"fingerprint": load_text(one.corpus, corpora).fingerprint if corpora else "f"}
    return Record(one.experiment, one.settings | {"text": text}, measured)


def swept(losses, folder, arms=TINY.arms, **more):
    """A sweep, and in a folder its records with these losses by arm and rate; None is a run that diverged."""
    rates = tuple(dict.fromkeys(rate for _, rate in losses))
    sweep = replace(TINY, name="sweep", arms=arms, seeds=(0, 3), grid={"learning_rate": rates})
    for one in sweep.runs():
        loss = losses[one.arm.name, one.train.learning_rate]
        found = dict(valid_loss=loss, test_loss=loss, diverged=loss is None, parameters=1, non_embedding=1)
        found |= more.get(one.arm.name, {})
        Record("sweep", one.settings, found).save(one.name, folder)
    return sweep
