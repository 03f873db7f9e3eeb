"""One boosted layer as two: what Proposition "prop-sign" of chapter 8 says are the same."""

import copy

import torch


def with_sign(layer, s, *, gates=True, output=True):
    """The layer made to read x − sF, and its image, which reads x − F with values s times as large.

    ``gates`` and ``output``: whether the image's gates and output projection take s back, as they must.
    """
    image = copy.deepcopy(layer)
    for correction in layer.corrections:
        correction.residual = lambda x, F: x - s * F
    with torch.no_grad():
        for each in (image, *image.corrections):
            if each.value is not None:
                each.value.weight.mul_(s)
                each.value.bias.mul_(s)
        for correction in image.corrections:
            if gates and correction.gate is not None:
                correction.gate.weight.div_(s)
        if output:
            image.out.weight.div_(s)
    return layer, image
