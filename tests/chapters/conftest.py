"""What the tests of the chapters share: equal draws in each, and with the laboratory a corpus of small texts."""

import pytest
import torch

from texts import cache, corpus, folder  # noqa: F401


@pytest.fixture(autouse=True)
def same_draws():
    torch.manual_seed(0)


@pytest.fixture
def in_double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
