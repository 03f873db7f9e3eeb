"""What a stack of blocks may be, and what a block may return."""

import pytest
import torch
from refusals import refused
from torch import nn

from gbattn.ground.stacks import apply_block, check_derivative, check_finite, check_own_forward, check_stack

X = torch.zeros(1, 2, 4)


@pytest.mark.parametrize("kind", [list, tuple, nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_a_sequence_of_modules_is_returned_as_it_is(kind):
    blocks = kind([nn.Identity(), nn.Tanh()])
    assert check_stack(blocks) is blocks


@pytest.mark.parametrize("blocks", [[], nn.Tanh(), [torch.tanh], [nn.Tanh(), None], iter([nn.Tanh()])])
def test_any_other_stack_is_refused(blocks):
    with refused("blocks"):
        check_stack(blocks)


def test_a_block_works_on_a_copy_and_is_told_of_causality_only_if_it_holds():
    calls = []

    class Block(nn.Module):
        def forward(self, x, **options):
            calls.append(options)
            return x.add_(1)

    assert (apply_block(X, Block(), 0, False) == 1).all() and (X == 0).all()
    apply_block(X, Block(), 0, True)
    assert calls == [{}, {"causal": True}]


@pytest.mark.parametrize("block", [nn.Linear(4, 3), nn.GRU(4, 4), nn.Threshold(1, float("nan"))])
def test_a_block_that_changes_the_shape_or_is_not_finite_is_refused(block):
    with refused("blocks"):
        apply_block(X, block, 0, False)


def test_a_derivative_has_to_be_there_and_numbers_to_be_finite():
    assert check_derivative(X, 0) is X
    with refused("blocks"):
        check_derivative(None, 0)
    check_finite("x", X, "", "")
    with refused("x"):
        check_finite("x", X / 0, "NaN", "numbers")


def test_a_forward_that_an_instance_holds_is_refused_unless_it_is_that_of_the_class():
    layer = nn.Sequential(nn.Linear(2, 2))
    layer[0].forward = layer[0].forward  # as accelerate leaves it behind
    check_own_forward([layer])
    layer[0].forward = lambda x: x
    with refused("model"):
        check_own_forward([layer])
