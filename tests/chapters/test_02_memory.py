"""Chapter 2: the claims with their mutants, and what a lesson should not carry: faults, chunks, long streams."""

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.least_squares import least_squares, linear_attention, whiten
from gbattn.memory import RULES, FastWeights, descend, ridge_attention, running_softmax

F64 = torch.float64


class Stream:
    """A drawn stream: queries and keys (T, K), values (T, Kv), a step size and a ridge."""

    def __init__(self, seed, T, K, Kv):
        self.rng = torch.Generator().manual_seed(seed)
        self.q, self.k, self.v = self.normal(T, K), self.normal(T, K), self.normal(T, Kv)
        self.rate, self.ridge = 0.3 / K, 0.5

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)


lengths = st.one_of(st.integers(1, 30), st.just(70))  # within a chunk, and beyond one
streams = st.builds(Stream, st.integers(0, 2**31), lengths, st.integers(1, 5), st.integers(1, 3))


def by_the_loop(s, gain, before=False):
    """Reads of a memory that is written token by token: M ← M + gain(k, C) (v − Mᵀk)ᵀ."""
    M = s.v.new_zeros(s.k.shape[1], s.v.shape[1])
    C, reads = torch.eye(s.k.shape[1], dtype=F64) / s.ridge, []
    for q, k, v in zip(s.q, s.k, s.v):
        if before:
            reads.append(q @ M)
        Ck = C @ k
        M = M + torch.outer(gain(k, Ck), v - k @ M)
        C = C - torch.outer(Ck, Ck) / (1 + k @ Ck)
        if not before:
            reads.append(q @ M)
    return torch.stack(reads)


def memory_of(s, rule, **options):
    return FastWeights(s.k.shape[1], s.v.shape[1], rule=rule, dtype=F64, **options)


@claim(
    streams,
    tolerance=1e-10,
    mutant=lambda s: (memory_of(s, "hebb").stream(s.q, s.k, s.v, before=True), (s.q @ s.k.T).tril() @ s.v),
)
def test_prop_hebb(s):
    """Summing and reading after each write is causal linear attention. Mutant: reading before."""
    return memory_of(s, "hebb").stream(s.q, s.k, s.v), (s.q @ s.k.T).tril() @ s.v


def one_delta_step(s, rate):
    memory = memory_of(s, "delta", rate=s.rate).write(s.k, s.v)
    M, k, v = memory.memory.clone().requires_grad_(), s.normal(1, s.k.shape[1]), s.normal(1, s.v.shape[1])
    (gradient,) = torch.autograd.grad((v - k @ M).square().sum() / 2, M)
    return memory.write(k, v).memory, M.detach() - rate * gradient


@claim(streams, tolerance=1e-10, mutant=lambda s: one_delta_step(s, 2 * s.rate))
def test_prop_delta(s):
    """A write of the delta rule is a gradient step on ½‖v − Mᵀk‖², by autograd. Mutant: the step without the half."""
    return one_delta_step(s, s.rate)


@claim(
    streams,
    tolerance=1e-9,
    mutant=lambda s: (
        memory_of(s, "delta", rate=s.rate).stream(s.q, s.k, s.v),
        by_the_loop(s, lambda k, Ck: s.rate * 1.001 * k),
    ),
)
def test_prop_delta_chunk(s):
    """Chunks solved at once are the delta rule token by token. Mutant: a step a thousandth longer."""
    return memory_of(s, "delta", rate=s.rate).stream(s.q, s.k, s.v), by_the_loop(s, lambda k, Ck: s.rate * k)


def recursion_and_batch(s, gain):
    refits = [least_squares(s.k[: t + 1], s.v[: t + 1], ridge=s.ridge).coefficients for t in range(len(s.k))]
    return by_the_loop(s, gain), torch.stack([q @ M for q, M in zip(s.q, refits)])


@claim(streams, tolerance=1e-8, mutant=lambda s: recursion_and_batch(s, lambda k, Ck: Ck))
def test_thm_recursive_least_squares(s):
    """The recursion with gain Ck/(1 + kᵀCk) is the ridge fit of all tokens so far. Mutant: the gain Ck."""
    return recursion_and_batch(s, lambda k, Ck: Ck / (1 + k @ Ck))


def streamed_least_squares(s, shift):
    def stream(before):
        return memory_of(s, "recursive_least_squares", ridge=s.ridge).stream(s.q, s.k, s.v, before=before)

    loops = [by_the_loop(s, lambda k, Ck: Ck / (1 + k @ Ck), before=before) for before in (False, True)]
    return torch.stack([stream(shift), stream(True)]), torch.stack(loops)


@pytest.mark.parametrize("length", [1, 7, 30, 70])
def test_reading_a_chunk_by_its_innovations_is_reading_the_recursion(length):
    """After each write and before it; and after is not before."""
    s = Stream(length, length, 4, 2)
    streamed, recursion = streamed_least_squares(s, False)
    assert torch.allclose(streamed, recursion, atol=1e-8, rtol=0)
    assert not torch.allclose(streamed_least_squares(s, True)[0], recursion, atol=1e-8, rtol=0)


def one_layer(s, sign):
    W0, eta = s.normal(s.k.shape[1], s.v.shape[1]), 0.1
    W = W0.clone().requires_grad_()
    (gradient,) = torch.autograd.grad((s.v - s.k @ W).square().sum() / 2, W)
    residual = s.v - s.k @ W0
    return s.q @ W0 + sign * linear_attention(s.q, s.k, eta * residual), s.q @ (W0 - eta * gradient)


@claim(streams, tolerance=1e-10, mutant=lambda s: one_layer(s, 0.99))
def test_prop_one_step(s):
    """Linear attention to the residual is one gradient step, by autograd. Mutant: one per cent less."""
    return one_layer(s, 1.0)


class Context:
    """A drawn regression of given condition number, with full column rank."""

    def __init__(self, seed, d, log_condition):
        rng = torch.Generator().manual_seed(seed)
        n = d + 20
        left = torch.linalg.qr(torch.randn(n, d, generator=rng, dtype=F64)).Q
        right = torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=F64)).Q
        self.X = left * torch.logspace(0, log_condition, d, dtype=F64) @ right.T
        self.Y = torch.randn(n, 1, generator=rng, dtype=F64)
        self.beta = torch.linalg.lstsq(self.X, self.Y).solution
        self.square = torch.linalg.cond(self.X) ** 2


contexts = st.builds(Context, st.integers(0, 2**31), st.integers(2, 6), st.floats(0.05, 1))


def errors_and_rate(c, power):
    """Errors after 1 … 20 layers; whitened, after one; and what the theorem allows."""
    eye = torch.eye(c.X.shape[1], dtype=F64)
    errors = (descend(c.X, c.Y, eye, steps=20) - c.beta).norm(dim=(-2, -1))
    L = whiten(c.X)
    once = descend(c.X, c.Y, eye, steps=1, rate=1.0, preconditioner=L @ L.T)
    rate = ((c.square - 1) / (c.square + 1)) ** power
    allowed = c.beta.norm() * rate ** torch.arange(1, 21, dtype=F64)
    return torch.cat([errors, (once[0] - c.beta).norm()[None]]), torch.cat([allowed, torch.zeros(1, dtype=F64)])


@claim(contexts, tolerance=1e-9, relation="<=", mutant=lambda c: errors_and_rate(c, 2))
def test_thm_descent_rate(c):
    """Each layer shrinks the error by (κ² − 1)/(κ² + 1); whitened, one layer is enough. Mutant: the rate squared."""
    return errors_and_rate(c, 1)


def running_and_batch(s, scale):
    scores = 30 * s.k[:, 0]
    outputs, log_sums = running_softmax(scores, s.v)
    batch = [(scale * scores[: t + 1]).softmax(0) @ s.v[: t + 1] for t in range(len(scores))]
    gains = (scores - log_sums).exp()[:, None]
    before = torch.cat([torch.zeros_like(outputs[:1]), outputs[:-1]])
    return torch.cat([outputs, before + gains * (s.v - before)]), torch.stack(batch).repeat(2, 1)


@claim(streams, tolerance=1e-12, mutant=lambda s: running_and_batch(s, 1.001))
def test_thm_running_softmax(s):
    """The running estimate, whole and step by step, is softmax over each prefix. Mutant: another temperature."""
    return running_and_batch(s, 1.0)


# ---------------------------------------------------------------- FastWeights


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("before", [False, True])
def test_streaming_does_not_depend_on_how_it_is_cut(rule, before):
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 200, width, generator=rng, dtype=F64) for width in (4, 4, 2))
    options = dict(rule=rule, rate=0.1, ridge=0.3, batch=(2,), dtype=F64)
    if rule != "delta":
        options["forgetting"] = 0.97
    whole, cut = FastWeights(4, 2, **options), FastWeights(4, 2, **options)
    at_once = whole.stream(q, k, v, before=before)
    pieces = [cut.stream(*(x[:, a:b] for x in (q, k, v)), before=before) for a, b in ((0, 1), (1, 70), (70, 200))]
    torch.testing.assert_close(torch.cat(pieces, dim=1), at_once, atol=1e-10, rtol=0)
    torch.testing.assert_close(cut.memory, whole.memory, atol=1e-10, rtol=0)
    assert cut.count == whole.count == 200
    written = FastWeights(4, 2, **options).write(k, v)
    torch.testing.assert_close(written.memory, whole.memory, atol=1e-12, rtol=0)
    torch.testing.assert_close(written.read(q), q @ written.memory, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("rule", "gamma", "tolerance"),
    [("hebb", 0.99, 1e-10), ("hebb", 0.3, 1e-10), ("hebb", 1e-6, 1e-10)]
    # The faster least squares forgets, the nearer its problem is to having too few tokens.
    + [
        ("recursive_least_squares", 0.99, 1e-10),
        ("recursive_least_squares", 0.9, 1e-9),
        ("recursive_least_squares", 0.5, 1e-5),
    ],
)
def test_forgetting_weighs_a_token_by_its_age(rule, gamma, tolerance):
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(150, width, generator=rng, dtype=F64) for width in (3, 2))
    q = torch.randn(150, 3, generator=rng, dtype=F64)
    memory = FastWeights(3, 2, rule=rule, ridge=0.4, forgetting=gamma, dtype=F64)
    reads = memory.stream(q, k, v)
    for t in (0, 40, 149):
        age = gamma ** torch.arange(t, -1, -1, dtype=F64)
        if rule == "hebb":
            expected = k[: t + 1].T * age @ v[: t + 1]
        else:
            A = k[: t + 1].T * age @ k[: t + 1] + 0.4 * gamma ** (t + 1) * torch.eye(3, dtype=F64)
            expected = torch.linalg.solve(A, k[: t + 1].T * age @ v[: t + 1])
        torch.testing.assert_close(reads[t], q[t] @ expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rule", ["hebb", "recursive_least_squares"])
def test_fast_forgetting_stays_finite_in_single_precision(rule):
    k, v = torch.ones(200, 1), torch.arange(200.0)[:, None]
    memory = FastWeights(1, 1, rule=rule, ridge=1e-3, forgetting=0.01)
    assert torch.isfinite(memory.stream(k, k, v)).all()


@pytest.mark.parametrize(("dtype", "length"), [(torch.float32, 1200), (F64, 8000)])
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("key", [(1.0, 0.0), (1.0, 1.0), (1000.0, 0.0), (0.0, 0.0)])
def test_a_ridge_that_has_faded_away_leaves_numbers(dtype, length, before, key):
    """The keys say nothing of a direction for so long that the ridge is all that is left of it, then nothing is."""
    memory = FastWeights(2, 1, rule="recursive_least_squares", ridge=1.0, forgetting=0.8, dtype=dtype)
    k, v = torch.tensor(key, dtype=dtype).expand(length, 2), torch.ones(length, 1, dtype=dtype)
    reads = memory.stream(torch.ones_like(k), k, v, before=before)
    assert torch.isfinite(reads).all()
    expected = 2 / (key[0] + key[1]) if key[1] else 1 / key[0] if key[0] else 0.0
    assert reads[-1].item() == pytest.approx(expected, rel=1e-4)
    k, v = torch.eye(2, dtype=dtype).repeat(150, 1), torch.tensor([[3.0], [5.0]], dtype=dtype).repeat(150, 1)
    torch.testing.assert_close(memory.stream(k, k, v, before=before)[-2:], v[-2:])


def streamed(rule):
    return lambda k, v: FastWeights(4, 1, rule=rule, rate=0.1, ridge=0.5).stream(k, k, v)


@pytest.mark.parametrize(
    "call",
    [
        *map(streamed, RULES),
        lambda k, v: FastWeights(4, 1, rule="recursive_least_squares", ridge=0.5).write(k, v).read(k),
        lambda k, v: ridge_attention(k, k, v, ridge=0.5),
        lambda k, v: ridge_attention(k, k, v, ridge=0.5, causal=True),
    ],
)
def test_autocast_does_not_reach_a_memory(call):
    rng = torch.Generator().manual_seed(0)
    k, v = torch.randn(50, 4, generator=rng), torch.randn(50, 1, generator=rng)
    expected = call(k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(call(k, v), expected)


def test_least_squares_stays_exact_over_a_long_stream():
    rng = torch.Generator().manual_seed(0)
    k = torch.randn(100_000, 8, generator=rng, dtype=F64)
    v = k.sum(1, keepdim=True) + torch.randn(100_000, 1, generator=rng, dtype=F64)
    memory = FastWeights(8, 1, rule="recursive_least_squares", dtype=F64).write(k, v).memory
    batch = torch.from_numpy(np.linalg.lstsq(k.numpy(), v.numpy())[0])
    torch.testing.assert_close(memory, batch, atol=1e-8, rtol=0)


def test_few_tokens_give_the_shortest_memory_and_say_so():
    k, v = torch.randn(2, 4, dtype=F64), torch.randn(2, 1, dtype=F64)
    memory = FastWeights(4, 1, rule="recursive_least_squares", dtype=F64).write(k, v)
    with pytest.warns(np.exceptions.RankWarning, match="rank 2"):
        torch.testing.assert_close(memory.memory, torch.linalg.pinv(k) @ v, atol=1e-10, rtol=0)


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"rule": "hope"}, "rule"),
        ({"rate": 0}, "rate"),
        ({"ridge": -1.0}, "ridge"),
        ({"forgetting": 1e-9}, "forgetting"),
        ({"forgetting": 0.9, "rule": "delta"}, "forgetting"),
        ({"key_width": 0}, "key_width"),
        ({"value_width": 2.0}, "value_width"),
        ({"dtype": torch.float16}, "dtype"),
        ({"batch": 2}, "batch"),
        ({"batch": (-1,)}, "batch"),
    ],
)
def test_bad_options_are_named(options, argument):
    with refused(argument):
        FastWeights(**({"key_width": 3, "value_width": 1} | options))


@pytest.mark.parametrize(
    ("k", "v", "argument"),
    [
        (torch.ones(5, 4), torch.ones(5, 1), "k"),
        (torch.ones(5, 3), torch.ones(5, 2), "v"),
        (torch.ones(5, 3), torch.ones(4, 1), "v"),
        (torch.ones(2, 5, 3), torch.ones(2, 5, 1), "k"),
        (torch.ones(5, 3, dtype=F64), torch.ones(5, 1, dtype=F64), "k"),
        (torch.full((5, 3), math.nan), torch.ones(5, 1), "k"),
    ],
)
@pytest.mark.parametrize("rule", RULES)
def test_bad_tokens_are_named_and_leave_the_memory_alone(rule, k, v, argument):
    memory = FastWeights(3, 1, rule=rule, ridge=1.0)
    before = memory.memory.clone()
    with refused(argument):
        memory.write(k, v)
    assert torch.equal(memory.memory, before) and memory.count == 0


def test_reads_that_do_not_fit_are_named():
    memory = FastWeights(3, 1, rule="recursive_least_squares")
    with refused("q"):
        memory.read(torch.ones(4, 2))
    with refused("ridge"):
        memory.stream(*(torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 1)))
    with refused("before"):
        FastWeights(3, 1).stream(*(torch.ones(4, 3), torch.ones(4, 3), torch.ones(4, 1)), before="False")
    with refused("q"):
        FastWeights(3, 1).stream([1.0], torch.ones(4, 3), torch.ones(4, 1))
    with refused("q"):
        FastWeights(3, 1).stream(torch.ones(3, 3), torch.ones(4, 3), torch.ones(4, 1))


# ---------------------------------------------------------------- ridge_attention, descend, running_softmax


def test_ridge_attention_is_ridge_regression_and_causal_when_asked():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 130, width, generator=rng, dtype=F64) for width in (3, 3, 2))
    M = torch.linalg.solve(k.mT @ k + 0.7 * torch.eye(3, dtype=F64), k.mT @ v)
    torch.testing.assert_close(ridge_attention(q, k, v, ridge=0.7), q @ M, atol=1e-10, rtol=0)
    causal = ridge_attention(q, k, v, ridge=0.7, causal=True)
    for t in (0, 63, 64, 129):
        prefix = ridge_attention(q[:, t : t + 1], k[:, : t + 1], v[:, : t + 1], ridge=0.7)
        torch.testing.assert_close(causal[:, t : t + 1], prefix, atol=1e-10, rtol=0)
    with refused("causal"):
        ridge_attention(q, k, v, ridge=0.7, causal="False")
    with refused("ridge"):
        ridge_attention(q, k, v, ridge=0)


def test_descend_names_what_is_wrong_and_keeps_batches_apart():
    rng = torch.Generator().manual_seed(0)
    X, Y = torch.randn(3, 20, 4, generator=rng, dtype=F64), torch.randn(3, 20, 1, generator=rng, dtype=F64)
    together = descend(X, Y, X, steps=5)
    for i in range(3):
        torch.testing.assert_close(together[:, i], descend(X[i], Y[i], X[i], steps=5), atol=1e-12, rtol=0)
    for argument, value in (
        ("steps", 0),
        ("rate", -1.0),
        ("preconditioner", torch.eye(3, dtype=F64)),
        ("preconditioner", torch.full((4, 4), math.nan, dtype=F64)),
    ):
        with refused(argument):
            descend(X, Y, X, **{"steps": 1, argument: value})


@pytest.mark.parametrize("length", [1, 16, 17, 256, 257, 5000])
def test_running_softmax_at_every_depth_with_hidden_tokens(length):
    rng = torch.Generator().manual_seed(length)
    scores = 500 * torch.randn(2, length, generator=rng, dtype=F64)
    scores[torch.rand(2, length, generator=rng) < 0.3] = -math.inf
    v = torch.randn(2, length, 3, generator=rng, dtype=F64)
    outputs, log_sums = running_softmax(scores, v)
    for t in {0, length // 2, length - 1}:
        weights = torch.nan_to_num(scores[:, : t + 1].softmax(-1))  # nothing to see: zeros
        expected = (weights[:, None] @ v[:, : t + 1])[:, 0]
        torch.testing.assert_close(outputs[:, t], expected, atol=1e-12, rtol=0)
        torch.testing.assert_close(log_sums[:, t], scores[:, : t + 1].logsumexp(-1))


def test_running_softmax_has_the_right_gradients():
    rng = torch.Generator().manual_seed(0)
    scores = torch.randn(40, generator=rng, dtype=F64, requires_grad=True)
    v = torch.randn(40, 2, generator=rng, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s, v: running_softmax(s, v)[0], (scores, v))


@pytest.mark.parametrize(
    "scores",
    [torch.ones(4), torch.ones(5, dtype=F64), torch.full((5,), math.inf), torch.full((5,), math.nan), [1.0] * 5],
)
def test_running_softmax_names_what_is_wrong(scores):
    with refused("scores"):
        running_softmax(scores, torch.ones(5, 1))


@pytest.mark.parametrize(
    ("dtype", "ridge", "tolerance"), [(F64, 1e-10, 1e-7), (torch.float32, 1.0, 1e-4), (torch.float32, 1e-6, 2e-2)]
)
@pytest.mark.parametrize("before", [False, True])
def test_streamed_least_squares_keeps_its_digits_with_a_small_ridge(dtype, ridge, tolerance, before):
    """Write, then read, token by token, is the reference: reading while writing must not lose more."""
    rng = torch.Generator().manual_seed(0)
    k, v = (torch.randn(60, width, generator=rng, dtype=F64) for width in (3, 1))
    exact = FastWeights(3, 1, rule="recursive_least_squares", ridge=ridge, dtype=F64)
    expected = []
    for t in range(60):
        if before:
            expected.append(exact.read(k[t : t + 1]))
        exact.write(k[t : t + 1], v[t : t + 1])
        if not before:
            expected.append(exact.read(k[t : t + 1]))
    memory = FastWeights(3, 1, rule="recursive_least_squares", ridge=ridge, dtype=dtype)
    got = memory.stream(*(x.to(dtype) for x in (k, k, v)), before=before)
    expected = torch.cat(expected)
    assert (got.double() - expected)[3:].abs().max() <= tolerance * expected.abs().max()


def test_causal_ridge_attention_has_gradients_over_chunks():
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(70, 2, generator=rng, dtype=F64, requires_grad=True) for _ in range(3))
    assert torch.autograd.gradcheck(lambda *a: ridge_attention(*a, ridge=0.5, causal=True), (q, k, v), fast_mode=True)


def test_running_softmax_keeps_to_the_past_and_has_gradients_everywhere():
    scores = (200.0 * torch.arange(16, dtype=F64)).requires_grad_()
    v = torch.randn(16, 2, dtype=F64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    running_softmax(scores, v)[0].sum().backward()
    assert torch.isfinite(scores.grad).all() and torch.isfinite(v.grad).all()
    hidden = torch.full((40,), -math.inf, dtype=F64)
    hidden[5:] = 0
    hidden.requires_grad_()
    running_softmax(hidden, torch.ones(40, 1, dtype=F64))[0].sum().backward()
    assert torch.isfinite(hidden.grad).all()
    with refused("v"):
        running_softmax(torch.ones(2), torch.tensor([[1.0], [math.nan]]))


def test_descend_leaves_directions_without_data_at_zero():
    rng = torch.Generator().manual_seed(0)
    X, Y = torch.randn(2, 4, generator=rng, dtype=F64), torch.randn(2, 1, generator=rng, dtype=F64)
    W = descend(X, Y, torch.eye(4, dtype=F64), steps=3000)[-1]
    torch.testing.assert_close(W, torch.linalg.pinv(X) @ Y, atol=1e-9, rtol=0)
    assert (descend(0 * X, Y, X, steps=3) == 0).all()


def test_the_memory_is_a_copy():
    memory = FastWeights(2, 1).write(torch.ones(1, 2), torch.ones(1, 1))
    memory.memory.add_(1)
    assert torch.equal(memory.memory, torch.ones(2, 1))
