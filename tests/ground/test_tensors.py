"""What a tensor may be, and in which dtype it is summed."""

import pytest
import torch
from refusals import refused

from gbattn.ground.tensors import (
    FLOATING,
    INDEX,
    INTEGRAL,
    at_least_float32,
    check_tensor,
    compute_dtype,
    eval_mode,
    holds,
    is_length,
    rows_of_table,
)


@pytest.mark.parametrize(
    ("x", "shape", "options", "got", "want"),
    [
        ([1.0], "B T", {}, "list", "(B, T)"),
        (torch.ones(2), "B T", {"T": 3}, "shape (2,)", "(B, T) with T = 3"),
        (torch.ones(2, 4), "B T", {"T": 3, "of": "y"}, "shape (2, 4)", "(B, T) with T = 3, as y"),
        (torch.ones(0, 4), "B T", {"positive": "B T"}, "shape (0, 4)", "(B, T) with B ≥ 1, T ≥ 1"),
        (torch.ones(()), "… D", {}, "shape ()", "(…, D)"),
        (torch.ones(2, 3, 5), "… D", {"D": 4}, "shape (2, 3, 5)", "(…, D) with D = 4"),
        (torch.ones(2, 2), "n", {}, "shape (2, 2)", "(n,)"),
        (torch.ones(2, 3), "n n", {}, "shape (2, 3)", "(n, n)"),
        ("x", "…", {}, "str", "a tensor"),
        (torch.ones(2).long(), "n", {"dtype": FLOATING}, "dtype torch.int64", "a floating dtype"),
        (torch.ones(2) > 0, "n", {"dtype": INTEGRAL}, "dtype torch.bool", "an integer dtype"),
        (torch.ones(2).short(), "n", {"dtype": INDEX}, "dtype torch.int16", "torch.int64 or torch.int32"),
        (torch.ones(2), "n", {"dtype": torch.half, "of": "y"}, "dtype torch.float32", "torch.float16, as y"),
        (torch.ones(2, device="meta"), "n", {"device": torch.device("cpu")}, "device meta", "cpu"),
    ],
)
def test_a_tensor_that_breaks_its_rule_is_described(x, shape, options, got, want):
    with refused("x") as caught:
        check_tensor("x", x, shape, **options)
    assert (caught.value.got, caught.value.want) == (got, want)


def test_a_tensor_that_obeys_its_rule_passes():
    x = torch.ones(2, 0, 4)
    for shape in ("B T D", "… T D", "… D", "…"):
        check_tensor("x", x, shape, dtype=FLOATING, device=x.device, positive="D", D=4)
    check_tensor("x", x, "B T D", B=2, T=0, D=4, dtype=torch.float32)
    compiled = torch.compile(lambda x: (check_tensor("x", x, "B T", T=3), x + 1)[1], fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((2, 3), 2.0))


def test_sums_are_in_single_precision_at_least():
    assert [at_least_float32(dtype) for dtype in (torch.bfloat16, torch.float32, torch.float64)] == [
        torch.float32,
        torch.float32,
        torch.float64,
    ]
    cpu = torch.device("cpu")
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            compute_dtype(cpu, torch.float32) == torch.bfloat16 and compute_dtype(cpu, torch.float64) == torch.float64
        )
        assert compute_dtype(torch.device("meta"), torch.float32) == torch.float32
    assert compute_dtype(cpu, torch.float32) == torch.float32


def test_numbers_are_read_on_a_cpu_alone():
    negative = lambda x: (x < 0).all()
    assert not holds(negative, torch.ones(2)) and holds(negative, -torch.ones(2))
    assert holds(negative, torch.ones(2, device="meta"))
    assert torch.vmap(lambda x: x * holds(negative, x))(torch.ones(2)).tolist() == [1, 1]


def test_a_length_is_an_integer_that_is_not_negative():
    assert [x for x in (-1, 0, 3, 2.0, True, None, "1") if is_length(x)] == [0, 3]


def test_modes_are_put_back_part_by_part():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout()).train()
    model[1].eval()
    with eval_mode(model):
        assert not any(part.training for part in model.modules())
    assert [part.training for part in model.modules()] == [True, True, False]


def test_a_number_beyond_a_table_is_named():
    table = torch.nn.Embedding(3, 2)
    assert torch.equal(rows_of_table(table, "ids", torch.tensor([0, 2])), table.weight[[0, 2]])
    for number in (-1, 3):
        with refused("ids"):
            rows_of_table(table, "ids", torch.tensor([0, number]))
