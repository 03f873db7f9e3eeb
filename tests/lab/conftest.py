"""What the tests of the laboratory share: texts, a tiny experiment, a tiny model and a terminal."""

import pytest

from texts import cache, corpus, folder  # noqa: F401
from tiny_experiment import corpora, finished  # noqa: F401
from tiny_model import call, own_places, result, text, trained  # noqa: F401

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
