"""The folder of a run."""

import shutil

import pytest
import torch
from refusals import refused

from gbattn.lab.run_folder import RunFolder
from gbattn.language_model import LanguageModel
from models import compiled, wraps
from toys import CORPUS, config, small_model, weights


@wraps
def test_the_folder_of_a_run_takes_a_compiled_model(tmp_path):
    folder, model = RunFolder(tmp_path), compiled(small_model())
    history = folder.train(model, CORPUS, config(steps=2))
    assert torch.equal(weights(LanguageModel.from_pretrained(tmp_path)), weights(model))
    shutil.rmtree(folder.checkpoints)
    assert folder.train(again := compiled(small_model()), CORPUS, config(steps=2)) == history
    assert torch.equal(weights(again), weights(model))


@pytest.mark.parametrize("folder", [3, "", None, True])
def test_the_folder_of_a_run_is_a_path(folder):
    with refused("folder"):
        RunFolder(folder)
