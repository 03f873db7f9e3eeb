"""One boosted layer as two: what Proposition "prop-sign" of chapter 8 says are the same."""

import copy

import torch


def with_sign(layer, s, *, gates=True, output=True):
    """The layer made to read x − RF, and its image, which reads x − F with values turned by R.

    ``s`` is R, a matrix (D, D), or a number for R = sI. ``gates`` and ``output``: whether the image's gates and
    output projection take R back, as they must.
    """
    image, like = copy.deepcopy(layer), layer.out.weight
    R = torch.as_tensor(s, dtype=like.dtype)
    R = R * torch.eye(len(like), dtype=like.dtype) if R.ndim == 0 else R
    back = torch.linalg.inv(R)
    for correction in layer.corrections:
        correction.residual = lambda x, F: x - F @ R.T
    with torch.no_grad():
        for each in (image, *image.corrections):
            if each.value is not None:
                each.value.weight.copy_(R @ each.value.weight)
                each.value.bias.copy_(R @ each.value.bias)
        for correction in image.corrections:
            if gates and correction.gate is not None:
                correction.gate.weight.copy_(correction.gate.weight @ torch.block_diag(back, back))
        if output:
            image.out.weight.copy_(image.out.weight @ back)
    return layer, image
