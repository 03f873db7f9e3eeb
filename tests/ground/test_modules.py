"""What a layer asks of modules and of its callers."""

import torch
from refusals import refused
from torch import nn

from gbattn.ground.modules import (
    are_plain,
    check_keywords,
    check_one_reading,
    check_padding,
    check_tokens,
    floating_dtype,
    weight_of,
)


class Scaled(nn.Linear):
    """A linear map with a scale of its own, in another dtype, before the weight."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.float64)
        weight = self.weight
        del self.weight
        self.scale, self.weight = nn.Parameter(torch.ones(1)), weight


def test_the_weight_of_a_layer_is_a_matrix_of_it_or_empty():
    assert weight_of(Scaled()).shape == (4, 4)
    assert (weight_of(nn.Identity()).numel(), weight_of(nn.Identity()).dtype) == (0, torch.float32)


def test_the_dtype_of_modules_is_that_of_a_matrix_in_floating_point():
    assert floating_dtype(Scaled()) == torch.float64
    packed = nn.Linear(4, 4)
    packed.weight = nn.Parameter(packed.weight.to(torch.int8), requires_grad=False)
    assert floating_dtype(packed) == torch.float32  # of the bias
    assert floating_dtype(packed, Scaled()) == torch.float64
    packed.bias = None
    refused(lambda: floating_dtype(packed), "dtype: got None, and no weight in floating point; want that of the tokens")


def hooked(register):
    linear = nn.Linear(4, 4)
    getattr(linear, register)(lambda *_: None)
    return linear


def test_a_plain_linear_map_is_torchs_own_without_a_hook():
    assert are_plain(nn.Linear(4, 4), nn.Linear(4, 2)) and are_plain(nn.Linear(4, 4, bias=False))
    assert not are_plain(nn.Linear(4, 4), nn.Linear(4, 4, bias=False))
    assert not are_plain(Scaled())
    replaced = nn.Linear(4, 4)
    replaced.forward = lambda x: x
    assert not are_plain(replaced)
    for hook in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        assert not are_plain(hooked(f"register_{hook}_hook"))


def test_tokens_are_on_the_device_and_in_the_dtype_of_a_layer():
    layer = nn.Linear(4, 4)
    check_tokens("x", torch.ones(2, 3, 4), 4, layer)
    check_tokens("context", torch.ones(2, 0, 4), 4, layer, positive="")
    wide = torch.ones(2, 3, 4, dtype=torch.float64)
    for x in (wide, torch.ones(2, 3, 5), torch.ones(2, 0, 4), torch.ones(3, 4), torch.ones(2, 3, 4).long(), None):
        with refused("x"):
            check_tokens("x", x, 4, layer)


def test_a_mask_that_could_be_read_in_two_ways_is_refused():
    for mask in (None, torch.ones(1, 3), torch.ones(1, 1, 3, 3), lambda b, h, q, k: q >= k):
        check_one_reading(mask, 3, 3)
    check_one_reading(torch.ones(3, 3), 2, 3)
    with refused("mask"):
        check_one_reading(torch.ones(3, 3), 3, 3)


def test_padding_is_one_number_for_each_key():
    x = torch.ones(2, 3, 4)
    for padding in (torch.ones(2, 5).bool(), torch.ones(2, 5).long(), torch.zeros(2, 5, dtype=torch.uint8)):
        check_padding(padding, x, 5)
    for padding in (torch.ones(2, 3).bool(), torch.ones(2, 5), 2 * torch.ones(2, 5).long()):
        with refused("padding"):
            check_padding(padding, x, 5)


class Base(nn.Module):
    def __init__(self, d_model, n_heads, *, bias=True):
        super().__init__()


class Derived(Base):
    def __init__(self, d_model, n_heads, *, rounds=2, **options):
        super().__init__(d_model, n_heads, **options)


class Free(nn.Module):
    def __init__(self, d_model, n_heads, **options):
        super().__init__()


def test_options_are_those_of_a_class_and_its_bases():
    check_keywords("options", Derived, {"rounds": 3, "bias": False}, "'derived'")
    with refused("options", "rounds, bias"):
        check_keywords("options", Derived, {"round": 3}, "'derived'")
    check_keywords("options", Free, {"anything": 3}, "'free'")
