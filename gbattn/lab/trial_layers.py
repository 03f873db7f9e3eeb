"""Layers that one experiment of the book tries and that the library does not offer: the arms of `stability`."""

import torch
import torch.nn.functional as nnf
from torch import nn

from gbattn.boosted import Gate, GradientBoostedAttention
from gbattn.cost import COUNTS
from gbattn.ground.arguments import FLAG, NUMBER, check
from gbattn.layers import register


class StartingLinear(Gate):
    """A linear map like another one, whose weight starts at zero and whose bias starts at a number, in a language
    model too."""

    def __init__(self, like: nn.Linear, bias_start: float = 0.0) -> None:
        self.bias_start = bias_start  # before nn.Linear calls reset_parameters
        size, has_bias = (like.in_features, like.out_features), like.bias is not None
        nn.Linear.__init__(self, *size, bias=has_bias, device=like.weight.device, dtype=like.weight.dtype)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        if self.bias is not None:
            nn.init.constant_(self.bias, self.bias_start)


@register("boosted_trial")
class BoostedTrial(GradientBoostedAttention):
    """Boosted attention with changes that may keep a run from failing: arms of the experiment ``stability``, not
    options of the layer.

    Parameters
    ----------
    zero_value : bool
        Whether the values of each correction start at zero, so that the layer starts as its first round.
    qk_norm : bool
        Whether each head of the queries and keys of every round is divided by its root mean square, so that a score
        is at most √K in size. Unlike ``qk_norm`` of `gbattn.layers.MultiHeadAttention`, whose name it has in the
        records, it has no gains: it adds no weight.
    gate_bias : float
        Where the bias of each gate starts; the gate starts at its sigmoid.

    Notes
    -----
    Source: the plan of E5 in appendix Y.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        *,
        zero_value: bool = False,
        qk_norm: bool = False,
        gate_bias: float = 0.0,
        **options,
    ) -> None:
        check(zero_value=(zero_value, FLAG), qk_norm=(qk_norm, FLAG), gate_bias=(gate_bias, NUMBER))
        super().__init__(d_model, n_heads, **options)
        self.unit_heads = qk_norm
        for correction in self.corrections:
            if zero_value and correction.value is not None:
                correction.value = StartingLinear(correction.value)
            if gate_bias and correction.gate is not None:
                correction.gate = StartingLinear(correction.gate, gate_bias)

    def reset_parameters(self, generator=None) -> None:
        super().reset_parameters(generator)
        for module in self.corrections.modules():
            if isinstance(module, StartingLinear):
                module.reset_parameters()

    def at_unit_size(self, x: torch.Tensor) -> torch.Tensor:
        """Each head of x (B, T, …) at a root mean square of one, where that is asked for."""
        if not self.unit_heads:
            return x
        heads = x.unflatten(-1, (-1, self.head_dim))
        return nnf.rms_norm(heads, (self.head_dim,)).flatten(-2)

    def query_heads(self, inputs, q):
        return super().query_heads(inputs, self.at_unit_size(q))

    def key_value_heads(self, inputs, k, v):
        return super().key_value_heads(inputs, self.at_unit_size(k), v)


COUNTS[BoostedTrial] = COUNTS[GradientBoostedAttention]  # the norm is not counted
