"""Models of other kinds, and what torch wraps around one."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from toys import Toy


class Mean(Toy):
    def forward(self, tokens, targets, *, reduction="mean"):
        return super().forward(tokens, targets, reduction="mean")


class Logits(Toy):
    def forward(self, tokens, targets, *, reduction="mean"):
        return self.head(self.embedding(tokens))


class Plain(Toy):
    """Written for the numbers that there are: nothing is left out, and the sum is a float when nobody learns."""

    def forward(self, tokens, targets, *, reduction="mean"):
        logits = self.logits(tokens)
        loss = -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
        torch.rand(1)
        return loss if self.training else float(loss)


class Pair(Toy):
    """As nanoGPT: the mean of its own targets, of which −1 is not scored, beside the logits."""

    def forward(self, idx, targets=None):
        logits = self.logits(idx)
        if targets is None:
            return logits[:, [-1]], None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class HuggingFace(Toy):
    """As Hugging Face's models: labels, which it shifts itself, a cache, and an object."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, use_cache=None, **kwargs):
        assert attention_mask is None and labels is None and use_cache is False and not kwargs
        return SimpleNamespace(logits=self.logits(input_ids), loss=None)


class LossFirst(Toy):
    def forward(self, x, y):
        return nn.functional.cross_entropy(self.logits(x).flatten(0, 1), y.flatten()), self.logits(x)


class LogitsAlone(Toy):
    def forward(self, x, mask=None):
        assert mask is None
        return self.logits(x)


def compiled(model, backend="eager"):
    return torch.compile(model, backend=backend)


def partly_compiled(model):
    model.head = compiled(model.head)
    return model


WRAPPERS = {
    "compiled": compiled,
    "parallel": nn.DataParallel,
    "compiled in parallel": lambda model: nn.DataParallel(compiled(model)),
    "a part compiled": partly_compiled,
}

# Of which torch warns itself.
wraps = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute:UserWarning")
