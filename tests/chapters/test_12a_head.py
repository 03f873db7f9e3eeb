"""Chapter 12a: the claims with their mutants, the loss in all its forms, what is drawn."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from claims import claim
from gbattn.cost import count_flops
from gbattn.head import (
    SequenceReader,
    draw_token,
    draw_uniform,
    loss_of_logits,
    next_token_loss,
    next_token_probabilities,
    write_tokens,
)
from small_models import F64, V, model_of, tokens_of


class Reading:
    """A drawn stream, head and targets."""

    def __init__(self, N, D, V, seed):
        g = torch.Generator().manual_seed(seed)
        self.h, self.W = torch.randn(N, D, generator=g, dtype=F64), torch.randn(V, D, generator=g, dtype=F64)
        self.y, self.rows = torch.randint(V, (N,), generator=g), 1 + seed % N

    def gradients(self):
        """The summed loss and its gradients, by autograd."""
        h, W = self.h.clone().requires_grad_(), self.W.clone().requires_grad_()
        loss = nnf.cross_entropy(h @ W.T, self.y, reduction="sum")
        return torch.cat([x.flatten() for x in (loss.detach()[None], *torch.autograd.grad(loss, (h, W)))])

    def by_chunks(self, target=1.0):
        total, of_h, of_W = torch.zeros(1, dtype=F64), [], torch.zeros_like(self.W)
        for h, y in zip(self.h.split(self.rows), self.y.split(self.rows)):
            p = (h @ self.W.T).softmax(-1)
            total -= p.gather(1, y[:, None]).log().sum()
            delta = p - target * nnf.one_hot(y, len(self.W))
            of_h.append(delta @ self.W)
            of_W += delta.T @ h
        return torch.cat([total, torch.cat(of_h).flatten(), of_W.flatten()])


readings = st.builds(Reading, st.integers(1, 12), st.integers(1, 6), st.integers(2, 9), st.integers(0, 10**6))


@claim(readings, tolerance=1e-10, mutant=lambda p: (p.gradients(), p.by_chunks(target=0.0)))
def test_prop_loss_by_rows(p):
    """Loss and gradients are sums, or stacks, of those of chunks of rows."""
    return p.gradients(), p.by_chunks()


def downhill(p, mean=1.0):
    h = p.h.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(nnf.cross_entropy(h @ p.W.T, p.y, reduction="sum"), h)
    return -gradient, p.W[p.y] - mean * (p.h @ p.W.T).softmax(-1) @ p.W


@claim(readings, tolerance=1e-10, mutant=lambda p: downhill(p, mean=0.0))
def test_prop_stream_residual(p):
    """The negative gradient of the loss is the target row minus the expected row."""
    return downhill(p)


class Temperatures:
    def __init__(self, logits, low, more):
        self.logits, self.low, self.high = torch.tensor(logits, dtype=F64), low, low + more

    def entropy(self, temperature):
        p = next_token_probabilities(self.logits, temperature=temperature)
        return torch.special.entr(p).sum()[None]

    def slope(self):
        """dH/dτ by differences, and as the proposition has it."""
        tau, step = self.high, 1e-5
        p = next_token_probabilities(self.logits, temperature=tau)
        variance = p @ (self.logits - p @ self.logits) ** 2
        return (self.entropy(tau + step) - self.entropy(tau - step)) / (2 * step), variance[None] / tau**3


temperatures = st.builds(
    Temperatures, st.lists(st.floats(-5, 5), min_size=2, max_size=8), st.floats(0.3, 3), st.floats(0.3, 3)
)


@claim(
    temperatures,
    relation="<=",
    tolerance=1e-6,
    mutant=lambda p: (p.entropy(p.high), p.entropy(p.low)),
)
def test_prop_temperature(p):
    """Entropy rises with temperature, at the rate Var(s)/τ³."""
    left, right = p.slope()
    return torch.cat([p.entropy(p.low), left, right]), torch.cat([p.entropy(p.high), right, left])


def test_a_loss_of_logits_is_the_loss_without_them():
    h, W, y = torch.randn(6, 4, dtype=F64), torch.randn(V, 4, dtype=F64), torch.tensor([0, 3, -100, 5, 22, 1])
    for reduction in ("mean", "sum"):
        a, b = next_token_loss(h, W, y, reduction=reduction), loss_of_logits(h @ W.T, y, reduction=reduction)
        assert (a - b).abs() < 1e-12
    halves = loss_of_logits((h @ W.T).bfloat16().unflatten(0, (2, 3)), y.view(2, 3))
    assert halves.dtype == torch.float32 and (halves - loss_of_logits(h @ W.T, y)).abs() < 0.1


def loss_and_gradients(h, W, y, reduction, loss):
    h, W = h.clone().requires_grad_(), W.clone().requires_grad_()
    value = loss(h, W, y, reduction)
    return value.detach(), *torch.autograd.grad(value, (h, W))


def plain_loss(h, W, y, reduction):
    return nnf.cross_entropy(h @ W.T, y, reduction=reduction)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward derivatives use it
@pytest.mark.parametrize(("N", "size"), [(7, 23), (300, 4096)])
def test_the_loss_carries_derivatives_forward(N, size):
    h, W, change = torch.randn(N, 4), torch.randn(size, 4), torch.randn(N, 4)
    y = torch.randint(size, (N,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(h, change)
        found = forward_ad.unpack_dual(next_token_loss(dual, W, y)).tangent
        want = forward_ad.unpack_dual(plain_loss(dual, W, y, "mean")).tangent
    assert torch.allclose(found, want, rtol=1e-4) and found != 0


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (F64, 1e-12)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("ignored", [0, 0.3, 1])
@pytest.mark.parametrize(("N", "size"), [(7, 23), (600, 4096)])
def test_both_forms_of_the_loss_agree(dtype, near, reduction, ignored, N, size, monkeypatch):
    g = torch.Generator().manual_seed(0)
    h, W = torch.randn(N, 8, generator=g).to(dtype), torch.randn(size, 8, generator=g).to(dtype)
    y = torch.randint(size, (N,), generator=g)
    y[torch.rand(N, generator=g) < ignored] = -100
    ours = lambda h, W, y, reduction: next_token_loss(h, W, y, reduction=reduction)
    want = loss_and_gradients(h, W, y, reduction, plain_loss)
    forms = [loss_and_gradients(h, W, y, reduction, ours)]
    if hasattr(nnf, "linear_cross_entropy"):
        monkeypatch.delattr(nnf, "linear_cross_entropy")  # as in an older torch
        forms.append(loss_and_gradients(h, W, y, reduction, ours))
    for form in forms:
        if reduction == "mean" and ignored == 1:
            assert form[0].isnan()  # the mean of nothing
            continue
        for got, wanted in zip(form, want):
            assert (got - wanted).abs().max() <= near * max(1, wanted.abs().max())


@pytest.mark.skipif(not hasattr(nnf, "linear_cross_entropy"), reason="an older torch")
def test_a_large_loss_goes_by_chunks(monkeypatch):
    seen = []
    whole = nnf.linear_cross_entropy
    see = lambda *a, **o: seen.append((a[0].dtype, o["options"].batch_chunk_size)) or whole(*a, **o)
    monkeypatch.setattr(nnf, "linear_cross_entropy", see)
    half = torch.bfloat16

    def loss(N, dtype, V=4096, learned="hW"):
        h, W = (torch.zeros(n, 4, dtype=dtype).requires_grad_(of in learned) for of, n in (("h", N), ("W", V)))
        found = next_token_loss(h, W, torch.zeros(N, dtype=torch.int64))
        assert found.dtype == torch.promote_types(dtype, torch.float32)

    def taken():
        found = seen.copy()
        seen.clear()
        return found

    for dtype in (torch.float32, F64):
        loss(300, dtype, learned="")
    assert taken() == [(torch.float32, 256), (F64, 256)]
    loss(200, torch.float32)  # small
    assert not taken()
    # bfloat16 has chunks of its own, float16 the plain form, whether gradients are wanted or not.
    loss(300, half)
    loss(300, torch.float16, learned="h")
    with torch.autocast("cpu", half):
        loss(300, torch.float32)
    with torch.no_grad():
        loss(300, half)
    assert not taken()


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        self.numbers = max([self.numbers, *(x.numel() for x in tree_leaves(output) if isinstance(x, torch.Tensor))])
        return output


@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # by torch itself
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_loss_in_bfloat16_is_as_exact_as_plainly_and_holds_no_logits(reduction, compiled):
    g, (N, D, size) = torch.Generator().manual_seed(0), (700, 8, 4096)
    h, W = (torch.randn(n, D, generator=g).bfloat16() for n in (N, size))
    y = torch.randint(size, (N,), generator=g).masked_fill(torch.rand(N, generator=g) < 0.3, -100)
    forms = {
        "chunks": lambda h, W, y, reduction: next_token_loss(h, W, y, reduction=reduction),
        "plain": lambda h, W, y, reduction: nnf.cross_entropy((h @ W.T).float(), y, reduction=reduction),
    }
    exact = loss_and_gradients(h.to(F64), W.to(F64), y, reduction, plain_loss)
    error, largest = {}, {}
    for name, form in forms.items():
        with nullcontext() if compiled else Largest() as watch:
            form = torch.compile(form, fullgraph=True, backend="aot_eager") if compiled else form
            values = loss_and_gradients(h, W, y, reduction, form)
        assert [x.dtype for x in values] == [torch.float32, torch.bfloat16, torch.bfloat16]
        error[name] = [((a - b).norm() / b.norm()).item() for a, b in zip(values, exact)]
        largest[name] = watch and watch.numbers
    assert all(a < 1.2 * b + 1e-5 for a, b in zip(error["chunks"], error["plain"])) and error["chunks"][0] < 1e-3
    assert compiled or largest == dict(chunks=256 * size, plain=N * size)
    with torch.no_grad():
        alone = next_token_loss(h, W, y, reduction=reduction)
    assert torch.equal(alone, next_token_loss(h.requires_grad_(), W, y, reduction=reduction).detach())


@pytest.mark.parametrize("frozen", ["head", "body"])
def test_what_is_frozen_costs_the_loss_in_bfloat16_no_product(frozen):
    g = torch.Generator().manual_seed(0)
    h, W = (torch.randn(n, 8, generator=g).bfloat16() for n in (700, 4096))
    y = torch.randint(4096, (700,), generator=g)
    loss = lambda h, W, y, reduction="mean": next_token_loss(h, W, y, reduction=reduction)
    _, *expected = loss_and_gradients(h, W, y, "mean", loss)
    learns = 0 if frozen == "head" else 1
    (h, W)[learns].requires_grad_()
    assert count_flops(lambda: loss(h, W, y).backward()) == 2 * 2 * 700 * 4096 * 8  # the logits and one gradient
    assert torch.equal((h, W)[learns].grad, expected[learns])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_loss_exports_for_any_number_of_rows(dtype):
    class Loss(torch.nn.Module):
        def forward(self, h, W, targets):
            return next_token_loss(h, W, targets)

    inputs = lambda N: (torch.randn(N, 8, dtype=dtype).requires_grad_(), weight, torch.randint(4096, (N,)))
    weight, N = torch.randn(4096, 8, dtype=dtype), torch.export.Dim("N", min=2)
    exported = torch.export.export(Loss(), inputs(300), dynamic_shapes=({0: N}, None, {0: N})).module()
    longer = inputs(700)
    assert abs(exported(*longer) - Loss()(*longer)) < 0.02


logit_rows = st.lists(st.integers(-60, 60).map(lambda x: x / 4), min_size=1, max_size=12)


shares = st.integers(0, 99).map(lambda x: (x + 0.1234) / 100)  # never the exact share of some tokens


@settings(deadline=None, max_examples=100)
@given(logit_rows, st.floats(0.05, 20), st.integers(1, 15), shares)
def test_what_the_filters_keep(row, temperature, k, p):
    logits = torch.tensor(row, dtype=F64)
    plain = next_token_probabilities(logits, temperature=temperature)
    assert torch.allclose(plain, (logits / temperature).softmax(-1), atol=1e-12)
    few = next_token_probabilities(logits, temperature=temperature, top_k=k)
    rank = torch.empty_like(logits)
    rank[logits.argsort(descending=True, stable=True)] = torch.arange(len(row), dtype=F64)
    wanted = plain.where(rank < k, 0)
    assert torch.allclose(few, wanted / wanted.sum(), atol=1e-12)
    nucleus = next_token_probabilities(logits, temperature=temperature, top_p=p)
    kept = nucleus > 0
    assert abs(nucleus.sum() - 1) < 1e-12 and kept[logits.argmax()]
    assert plain[kept].sum() >= p - 1e-9  # enough
    least = plain[kept].min()
    assert kept.sum() == 1 or plain[kept].sum() - least < p + 1e-9  # and no more than enough
    assert (plain[~kept] <= least + 1e-12).all()  # the most probable ones
    both = next_token_probabilities(logits, temperature=temperature, top_k=k, top_p=p)
    alone = next_token_probabilities(few.log(), top_p=p)
    assert torch.allclose(both, alone, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, F64])
def test_the_whole_share_keeps_every_token(dtype):
    """A cumulated sum in float32 reaches 1 long before the last of many tokens."""
    logits = 4 * torch.randn(8, 16_384, generator=torch.Generator().manual_seed(0), dtype=F64).to(dtype)
    assert torch.equal(next_token_probabilities(logits, top_p=1.0), next_token_probabilities(logits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_extreme_logits(dtype):
    logits = torch.tensor([-6e4, 0.0, 6e4, -math.inf], dtype=dtype)
    for options in (dict(), dict(temperature=1e-30), dict(temperature=0), dict(top_k=2), dict(top_p=1e-9)):
        p = next_token_probabilities(logits, **options)
        assert p.dtype == torch.float32 and p.tolist() == [0, 0, 1, 0]


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 0.1, 1.0]), min_size=2, max_size=9), st.integers(0, 2**53 - 1))
def test_no_token_without_a_chance_is_drawn(weights, grain):
    p = torch.tensor([[*weights, 1.0, 0.0]], dtype=F64)
    p /= p.sum()
    chosen = draw_token(p, torch.tensor([grain / 2**53], dtype=F64))
    assert p[0, chosen] > 0


def test_tokens_are_drawn_as_often_as_they_should():
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=F64)
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=F64)
    often = torch.bincount(draw_token(p.expand(20_000, 4), u), minlength=4) / 20_000
    assert (often - p).abs().max() < 0.015


def test_no_two_sequences_share_their_numbers():
    """Neither in a batch nor in batches of neighbouring seeds; and more rows or steps change none."""
    drawn = lambda seed, B=4, steps=6: draw_uniform(seed, B, steps, torch.device("cpu"))
    rows = torch.cat([drawn(seed) for seed in range(5)])
    assert rows.flatten().unique().numel() == rows.numel() and ((rows >= 0) & (rows < 1)).all()
    assert torch.equal(drawn(3)[:2, :4], drawn(3, B=2, steps=4))
    assert torch.equal(drawn([5, -1], B=2), torch.cat([drawn(5, B=1), drawn(-1, B=1)]))
    assert drawn(0, B=0).shape == (0, 6)


def test_a_repetition_penalty_by_hand_and_as_transformers_has_it():
    logits, past = torch.tensor([2.0, -1.0, 0.5, -3.0], dtype=F64), torch.tensor([0, 1, -100, 0])
    p = next_token_probabilities(logits, repetition_penalty=2.0, past=past)
    assert torch.allclose(p, torch.tensor([1.0, -2.0, 0.5, -3.0], dtype=F64).softmax(-1))
    assert torch.equal(next_token_probabilities(logits, past=past), next_token_probabilities(logits))
    process = pytest.importorskip("transformers.generation.logits_process").RepetitionPenaltyLogitsProcessor
    logits, past = torch.randn(5, V, generator=torch.Generator().manual_seed(0)), tokens_of(5, 8)
    for penalty in (0.7, 1.3):
        p = next_token_probabilities(logits, repetition_penalty=penalty, past=past)
        assert torch.allclose(p, process(penalty)(past, logits).softmax(-1), atol=1e-6)


# ---- Errors ----

X, IDS = torch.randn(2, V), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("h", dict(h=[1.0])),
        ("h", dict(h=X.long())),
        ("weight", dict(weight=X[:, 1:])),
        ("weight", dict(weight=X.bfloat16())),
        ("weight", dict(weight=X.to("meta"))),
        ("targets", dict(targets=IDS[:1])),
        ("targets", dict(targets=IDS.int())),
        ("targets", dict(targets=IDS.to("meta"))),
        ("targets", dict(targets=torch.tensor([-100, 2]))),
        ("targets", dict(targets=torch.tensor([-1, 0]))),
        ("reduction", dict(reduction="all")),
    ],
)
@pytest.mark.parametrize("size", [1, 2**20])  # of the logits: both forms of the loss
def test_the_loss_refuses_by_name(argument, change, size):
    h = X.repeat(size // 2**10 + 1, 1)
    call = dict(h=h, weight=X, targets=IDS.repeat(size // 2**10 + 1), reduction="mean")
    with refused(argument):
        next_token_loss(**call | change)


@pytest.mark.parametrize(
    ("argument", "logits", "targets"),
    [
        ("targets", torch.ones(2, 3, 4), torch.ones(2, 2).long()),
        ("targets", torch.ones(2, 4), torch.tensor([1, 4])),
        ("targets", torch.ones(2, 4), torch.ones(2)),
        ("logits", torch.ones(2, 4).long(), torch.ones(2).long()),
    ],
)
def test_the_loss_of_logits_refuses_by_name(argument, logits, targets):
    with refused(argument):
        loss_of_logits(logits, targets)


@pytest.mark.parametrize(
    ("argument", "logits", "options"),
    [
        ("logits", [1.0], {}),
        ("logits", torch.zeros(2, 0), {}),
        ("logits", torch.zeros(2, dtype=torch.complex64), {}),
        ("logits", torch.tensor(1.0), {}),
        ("temperature", X, dict(temperature=-0.5)),
        ("temperature", X, dict(temperature=math.nan)),
        ("top_k", X, dict(top_k=0)),
        ("top_p", X, dict(top_p=1.5)),
        ("repetition_penalty", X, dict(repetition_penalty=0)),
        ("past", X, dict(repetition_penalty=2)),
        ("past", X, dict(repetition_penalty=2, past=torch.tensor([[V], [0]]))),
        ("past", X, dict(repetition_penalty=2, past=torch.tensor([0]))),
    ],
)
def test_a_draw_refuses_by_name(argument, logits, options):
    with refused(argument):
        next_token_probabilities(logits, **options)


@pytest.mark.parametrize("seed", [None, 1.5, (1, 2), [3], [3, 0.5]])
def test_a_seed_is_an_integer_or_one_for_each_sequence(seed):
    with refused("seed"):
        draw_uniform(seed, 2, 3, torch.device("cpu"))


# ---- Writing ----


class Counting(nn.Module):
    """It expects the number after the last; it has no cache."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def forward(self, tokens, cache=None, logits_to_keep=1, mask=None, positions=None):
        self.calls.append(positions)
        return 50 * nnf.one_hot((tokens[:, -logits_to_keep:] + 1) % V, V).double()


SAMPLING = dict(temperature=1.0, top_k=None, top_p=None, repetition_penalty=1.0)


def test_any_model_of_the_next_token_writes():
    model, prompt = Counting(), torch.tensor([[3], [V - 2]])
    said = write_tokens(model, prompt, 4, SAMPLING, cache=False)
    assert said.tolist() == [[3, 4, 5, 6, 7], [V - 2, V - 1, 0, 1, 2]] and len(model.calls) == 4
    ended = write_tokens(model, prompt, 4, SAMPLING, cache=False, end=5)
    assert ended.tolist() == [[3, 4, 5, 5, 5], [V - 2, V - 1, 0, 1, 2]]
    padded = write_tokens(model, torch.tensor([[1, 2, 3]]), 2, SAMPLING, cache=False, lengths=torch.tensor([2]))
    assert padded.tolist() == [[1, 2, 3, 4, 5]] and model.calls[-1].tolist() == [[0, 0, 1, 2]]


def test_a_reader_says_what_each_token_predicts_and_forgets_what_is_cropped():
    model = model_of("boosted")
    tokens = tokens_of(2, 6)
    reader = SequenceReader(model, tokens[:, :3], None, 8, True, SAMPLING)
    with torch.no_grad():
        want = model(tokens).softmax(-1)
        p, finite = reader(tokens[:, :5], 2)
        assert (p - want[:, 3:5]).abs().max() < 1e-10 and finite.all()
        reader.crop(4)
        p, _ = reader(tokens, 1)
    assert (p[:, 0] - want[:, 5]).abs().max() < 1e-10
