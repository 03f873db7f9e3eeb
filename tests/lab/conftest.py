"""What the tests of the laboratory share: texts, a tiny experiment, a tiny model and a terminal."""

import pytest

from gbattn.lab.token_cache import load_corpus
from texts import TEXTS
from tiny_experiment import corpora, finished  # noqa: F401
from tiny_model import call, own_places, result, text, trained  # noqa: F401


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A local corpus; the name of its folder is a pattern to the library that reads it."""
    folder = tmp_path_factory.mktemp("texts") / "a [1] b*"
    folder.mkdir()
    for split, words in TEXTS.items():
        (folder / f"{split}.txt").write_text(words, encoding="utf-8", newline="")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(folder, cache):
    return load_corpus(folder, vocab_size=300, cache=cache)


SCRIPT = """
import json, sys
import accelerate, torch
from gbattn.lab.training import train
from gbattn.training import TrainConfig
from toys import CORPUS, Toy
torch.set_num_threads(1)
settings, folder, dropout = sys.argv[1:]
model = Toy(dropout=float(dropout), width=32)
history = train(model, CORPUS, TrainConfig(**json.loads(settings)), folder=folder or None, progress=False)
state = accelerate.PartialState()
if state.is_main_process:
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    curve = history.to_dict() | {"seconds": None}
    print(json.dumps({"curve": curve, "weights": weights, "processes": state.num_processes}))
state.destroy_process_group()
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path
