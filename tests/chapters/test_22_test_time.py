"""Chapter 22: the claims with their mutants, and the layer: any split of decoding, documents, causality, faults."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.blocks import Block, FeedForward
from gbattn.boosting import l2_boost
from gbattn.cost import attention_cost, count_flops
from gbattn.language_model import LanguageModel, ModelConfig, model_cost, parameter_count
from gbattn.layers import make_attention
from gbattn.least_squares import linear_attention
from gbattn.memory import FastWeights
from gbattn.retrieval import induction_targets
from gbattn.test_time import (
    FastWeightFeedForward,
    chunk_writes,
    read_chunks,
    shift_in_chunks,
    with_fast_weights,
)

F64 = torch.float64
RULES = ("hebb", "delta")


class Text:
    """Drawn hidden features, targets and slow weights; not always full chunks."""

    def __init__(self, seed, T, chunk, f, D):
        rng = torch.Generator().manual_seed(seed)
        self.chunk, self.rate = chunk, 0.3
        self.z = torch.randn(2, T, f, generator=rng, dtype=F64)
        self.v = torch.randn(2, T, D, generator=rng, dtype=F64)
        self.M = torch.randn(f, D, generator=rng, dtype=F64)

    @property
    def stable(self):
        """A rate at which rounds converge on every chunk."""
        parts = [z for z in self.z.split(self.chunk, 1)]
        return 1 / max(torch.linalg.eigvalsh(z @ z.mT).max().item() for z in parts)

    def serial(self, residual=False, rounds=1, rate=None):
        """The definition, chunk by chunk, and the weights at the end."""
        rate, M, outputs = rate or self.rate, self.M.expand(2, -1, -1), []
        for z, v in zip(self.z.split(self.chunk, 1), self.v.split(self.chunk, 1)):
            outputs.append(z @ M)
            if z.shape[1] == self.chunk:
                fast = M - self.M if residual else torch.zeros_like(M)
                for _ in range(rounds):
                    step = rate * z.mT @ (v - z @ fast)
                    fast, M = fast + step, M + step
        return torch.cat(outputs, 1), M


texts = st.builds(
    Text, st.integers(0, 2**31), st.integers(4, 23), st.integers(1, 6), st.integers(1, 7), st.integers(1, 5)
)


def delayed_attention(p, earlier):
    number = torch.arange(p.z.shape[1]) // p.chunk
    scores = (p.z @ p.z.mT) * earlier(number[:, None], number)
    masked = p.z @ p.M + p.rate * scores @ p.v
    values = chunk_writes(p.z, p.v, chunk=p.chunk, rate=p.rate)
    read = read_chunks(p.z, values, chunk=p.chunk, fast=p.M)
    outputs, M = p.serial()
    left = torch.cat([masked.flatten(), read.flatten(), (p.M + p.z.mT @ values).flatten()])
    return left, torch.cat([outputs.flatten(), outputs.flatten(), M.flatten()])


@claim(texts, tolerance=1e-12, examples=30, mutant=lambda p: delayed_attention(p, torch.ge))
def test_thm_test_time(p):
    """Loop, masked attention and prefix sums agree. Mutant: a token reads its own chunk."""
    return delayed_attention(p, torch.gt)


def rounds_on_a_chunk(p, start):
    z, v, m = p.z[0], p.v[0], 3
    rate = 1 / torch.linalg.eigvalsh(z @ z.mT)[-1].item()
    S, eye = rate * z @ z.mT, torch.eye(len(z), dtype=F64)
    fast, C = start * p.M, len(z)
    written = chunk_writes(z, v, chunk=C, rate=rate, rule="delta", rounds=m, fast=fast)
    after = z @ (fast + z.mT @ written)
    by_power = torch.linalg.matrix_power(eye - S, m) @ (v - z @ p.M)
    pseudo = z @ torch.linalg.pinv(z) @ v
    many = z @ (z.mT @ chunk_writes(z, v, chunk=C, rate=rate, rounds=300))
    slow = torch.linalg.eigvalsh(S)
    slow = slow[slow > 1e-9].min()  # what 300 rounds have left on the slowest direction
    enough = 1.0 if (1 - slow) ** 300 < 1e-9 else 0.0
    left = torch.cat([v - after, enough * (many - pseudo)])
    return left, torch.cat([by_power, torch.zeros_like(v)])


@claim(texts, tolerance=1e-7, mutant=lambda p: rounds_on_a_chunk(p, 0.0), examples=30)
def test_prop_test_time_rounds(p):
    """Rounds leave (I − S)^m of the residual and end in least squares. Mutant: Hebb's residual."""
    return rounds_on_a_chunk(p, 1.0)


def repeated(p, sign):
    """Reads at the beginning of each chunk, against the closed form."""
    z, v, chunks = p.z[0, 0] / p.z[0, 0].norm(), p.v[0, 0], 5
    rate = 0.7 / p.chunk
    Z, V = z.expand(p.chunk, -1), v.expand(p.chunk, -1)
    M, reads = p.M, []
    for _ in range(chunks):
        reads.append(z @ M)
        M = M + rate * Z.mT @ (V - sign * Z @ M)
    factor = (1 - 0.7 * sign) ** torch.arange(chunks, dtype=F64)[:, None]
    closed = sign * v + factor * (reads[0] - sign * v)
    return torch.stack(reads), closed, Z, V, rate


def sign_of_the_delta_rule(p, sign):
    plus, plus_closed, _, _, _ = repeated(p, -1)
    minus, minus_closed, Z, V, rate = repeated(p, 1)
    z, v = Z.repeat(5, 1), V.repeat(5, 1)
    written = chunk_writes(z, v, chunk=p.chunk, rate=rate, rule="delta", fast=p.M)
    layer = read_chunks(z, written, chunk=p.chunk, fast=p.M)[:: p.chunk]
    shrink = (minus[1:] - minus[:-1])[1:] - 0.3 * (minus[1:] - minus[:-1])[:-1]
    grow = (plus[1:] - plus[:-1])[1:] - (1 + sign * 0.7) * (plus[1:] - plus[:-1])[:-1]
    zeros = torch.zeros_like(shrink)
    return (
        torch.cat([minus, plus, layer, shrink, grow]),
        torch.cat([minus_closed, plus_closed, minus_closed, zeros, zeros]),
    )


@claim(texts, tolerance=1e-10, examples=30, mutant=lambda p: sign_of_the_delta_rule(p, -1))
def test_prop_test_time_sign(p):
    """One sign contracts, the other grows. Mutant: with either sign differences shrink by 1 − a."""
    return sign_of_the_delta_rule(p, 1)


# ---------------------------------------------------------------- the functions


@settings(max_examples=25, deadline=None)
@given(texts, st.sampled_from(RULES), st.integers(1, 3))
def test_writes_are_those_of_the_loop(p, rule, rounds):
    rate = p.stable
    outputs, M = p.serial(rule == "delta", rounds, rate)
    written = chunk_writes(p.z, p.v, chunk=p.chunk, rate=rate, rule=rule, rounds=rounds)
    read = p.z @ p.M + read_chunks(p.z, written, chunk=p.chunk)
    assert torch.allclose(read, outputs, atol=1e-10, rtol=0)
    assert torch.allclose(p.M + p.z.mT @ written, M, atol=1e-10, rtol=0)
    assert (written[:, p.z.shape[1] // p.chunk * p.chunk :] == 0).all()


@settings(max_examples=15, deadline=None)
@given(texts)
def test_both_forms_of_reading_agree_with_masked_linear_attention(p):
    """Few features take prefix sums, many take scores."""
    number = torch.arange(p.z.shape[1]) // p.chunk
    mask = number[:, None] > number
    wide = torch.cat([p.z, torch.zeros(2, p.z.shape[1], 200, dtype=F64)], -1)
    want = linear_attention(p.z, p.z, p.v, mask=mask)
    for z in (p.z, wide):
        assert torch.allclose(read_chunks(z, p.v, chunk=p.chunk), want, atol=1e-12, rtol=0)


def test_the_delta_rule_with_chunks_of_one_is_that_of_chapter_2():
    p = Text(0, 20, 1, 5, 3)
    memory = FastWeights(5, 3, rule="delta", rate=0.1, batch=(2,), dtype=F64)
    want = memory.stream(p.z, p.z, p.v, before=True)
    written = chunk_writes(p.z, p.v, chunk=1, rate=0.1, rule="delta")
    assert torch.allclose(read_chunks(p.z, written, chunk=1), want, atol=1e-12, rtol=0)
    assert torch.allclose(p.z.mT @ written, memory.memory, atol=1e-12, rtol=0)


def test_rounds_on_one_chunk_are_boosting():
    p = Text(1, 9, 9, 4, 3)
    z, v, rate = p.z[0], p.v[0], 0.02
    written = chunk_writes(z, v, chunk=9, rate=rate, rounds=7)
    assert torch.allclose(z @ (z.mT @ written), l2_boost(rate * z @ z.mT, v, 7), atol=1e-12, rtol=0)


def test_shifts_stay_in_their_chunks():
    x = torch.arange(1.0, 8)[:, None]
    want = {0: x, 1: [2, 3, 0, 5, 6, 0, 0], -1: [0, 1, 2, 0, 4, 5, 0], 2: [3, 0, 0, 6, 0, 0, 0], 9: [0] * 7}
    for offset, row in want.items():
        found = shift_in_chunks(x, offset, chunk=3)
        assert torch.equal(found[:, 0], torch.as_tensor(row, dtype=x.dtype).flatten())


def test_one_hot_tokens_with_the_next_as_target_count_what_followed():
    """Induction of chapter 9 for what stood in earlier chunks."""
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, (5, 40), generator=rng)
    x = torch.nn.functional.one_hot(tokens, 3).to(F64)
    chunk = 8
    read = read_chunks(x, shift_in_chunks(x, 1, chunk=chunk), chunk=chunk)
    for b in range(5):
        for t in range(40):
            first = t // chunk * chunk
            follows = [
                tokens[b, s + 1].item() for s in range(first) if tokens[b, s] == tokens[b, t] and (s + 1) % chunk
            ]
            want = torch.bincount(torch.tensor(follows, dtype=torch.int64), minlength=3)
            assert torch.equal(read[b, t], want.to(F64))
    one = read_chunks(x[:, :9], shift_in_chunks(x[:, :9], 1, chunk=8), chunk=8)[:, 8]
    last = torch.cat([tokens[:, :8], torch.full((5, 1), 3), tokens[:, 8:9]], 1)  # cut the eighth's pair
    want = induction_targets(last, 4)[:, -1, :3].to(F64)
    counts = one / one.sum(-1, keepdim=True).clamp(min=1)
    free = (tokens[:, 7] != tokens[:, 8]) & (one.sum(-1) > 0)
    assert free.any() and torch.allclose(counts[free], want[free], atol=1e-6)


def test_gradients():
    p = Text(2, 5, 2, 3, 1)
    z, v = p.z.requires_grad_(), p.v.requires_grad_()
    for rule in RULES:
        run = lambda z, v, rule=rule: read_chunks(
            z, chunk_writes(z, v, chunk=2, rate=0.1, rule=rule, rounds=2), chunk=2
        )
        assert torch.autograd.gradcheck(run, (z, v))


# ---------------------------------------------------------------- the layer


def layer_of(rule="hebb", offset=None, kind="gelu", **options):
    """A layer as if it were trained, and tokens for it."""
    torch.manual_seed(0)
    options = dict(d_hidden=9, kind=kind, rule=rule, offset=offset, rate=0.05, dtype=F64) | options
    layer = FastWeightFeedForward(6, **options)
    if layer.kernel is not None:
        torch.nn.init.normal_(layer.kernel)
    return layer, torch.randn(3, 22, 6, dtype=F64)


@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("offset", [None, 1, 0])
def test_decoding_in_any_parts_is_the_full_pass(rule, offset, kind):
    layer, x = layer_of(rule, offset, kind, chunk=4, rounds=2)
    whole = layer(x)
    assert (whole - layer.down(layer.hidden(x))).abs().max() > 1e-3  # it does write
    rng = torch.Generator().manual_seed(1)
    for _ in range(12):
        parts, cache = [], layer.make_cache(3, 22)
        with torch.no_grad():
            while cache.length < 22:
                n = int(torch.randint(1, 9, (), generator=rng))
                parts.append(layer(x[:, cache.length : cache.length + n], cache=cache))
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-10, rtol=0)


@pytest.mark.parametrize("rule", RULES)
def test_no_token_depends_on_a_later_one(rule):
    layer, x = layer_of(rule, chunk=4)
    before = layer(x)
    for t in range(22):
        changed = x.clone()
        changed[:, t] += 1
        differs = (layer(changed) != before).any(-1).any(0)
        assert differs[t] and not differs[:t].any()


@pytest.mark.parametrize("rule", RULES)
def test_a_document_does_not_depend_on_the_one_before(rule):
    """An emptied cache is a new one, for the layer and for a model."""
    layer, x = layer_of(rule, chunk=4)
    with torch.no_grad():
        cache = layer.make_cache(3, 40)
        layer(x[:, :14], cache=cache)
        cache.crop(0)
        assert torch.equal(layer(x, cache=cache), layer(x, cache=layer.make_cache(3, 40)))
        with refused("length"):
            cache.crop(5)
        layer(x[:, :7], cache=cache)  # and sequences may change places
        swapped = layer.make_cache(3, 40)
        for one in (x[:, :22], x[:, :7]):
            layer(one, cache=swapped)
        rows = torch.tensor([2, 0, 0])
        swapped.reorder(rows)
        assert torch.allclose(layer(x[rows, :9], cache=swapped), layer(x[:, :9], cache=cache)[rows], atol=1e-12)


def test_at_the_start_it_is_a_feed_forward_layer_bitwise():
    torch.manual_seed(0)
    layer = FastWeightFeedForward(6, d_hidden=9, chunk=2)
    plain = FeedForward(6, 9)
    plain.load_state_dict({k: w for k, w in layer.state_dict().items() if k in plain.state_dict()})
    x = torch.randn(2, 11, 6)
    assert torch.equal(layer(x), plain(x))
    layer(x).square().sum().backward()
    assert layer.kernel.grad.abs().max() > 0  # and it can leave the start


def test_explain_shows_what_forward_does():
    for rule in RULES:
        layer, x = layer_of(rule, chunk=4)
        trace = layer.explain(x)
        (one,) = trace.rounds
        assert torch.equal(trace.output, layer(x))
        read = one.weights[:, 0] @ one.residual
        assert torch.allclose(read, one.correction, atol=1e-12, rtol=0)


def test_counts_are_those_of_torch():
    for T, chunk, kind in ((12, 4, "gelu"), (12, 4, "swiglu"), (64, 8, "gelu"), (30, 7, "gelu")):
        layer = FastWeightFeedForward(6, d_hidden=9, chunk=chunk, kind=kind)
        x = torch.randn(2, T, 6)
        cost = attention_cost(layer, T, batch_size=2)
        assert cost.forward_flops == count_flops(partial(layer, x))
        assert cost.parameters == sum(p.numel() for p in layer.parameters())
        held = layer.make_cache(2, T)
        assert cost.cache_bytes == held.nbytes


# ---------------------------------------------------------------- in a language model


def models(positions="learned", attention="multi_head", **options):
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=20,
        max_length=40,
        d_model=12,
        n_layers=3,
        n_heads=2,
        attention=attention,
        positions=positions,
        overrides={1: {"ffn": "swiglu", "d_ffn": 16}},
    )
    plain = LanguageModel(config, seed=3, dtype=F64).eval()
    model = with_fast_weights(plain, chunk=4, rate=0.1, **options)
    return plain, model, torch.randint(20, (2, 21))


def train_a_little(model):
    for block in model.blocks:
        if isinstance(block.attention, FastWeightFeedForward):
            for weight in (block.attention.kernel, block.attention.target.weight):
                torch.nn.init.normal_(weight)


@pytest.mark.parametrize(
    ("rule", "positions", "attention"),
    [("hebb", "learned", "multi_head"), ("delta", "rotary", "multi_head"), ("delta", "learned", "boosted")],
)
def test_a_model_starts_as_it_was_and_decodes_as_it_reads(rule, positions, attention):
    plain, model, tokens = models(positions, attention, rule=rule)
    assert torch.equal(model(tokens), plain(tokens))
    assert torch.equal(model.generate(tokens, 5), plain.generate(tokens, 5))
    train_a_little(model)
    whole = model(tokens)
    assert (whole - plain(tokens)).abs().max() > 1e-3
    for splits in ([1] * 21, [5, 1, 1, 9, 5], [4, 8, 9], [21]):
        caches = model.make_caches(2)
        with torch.no_grad():
            parts = [model(part, cache=caches) for part in tokens.split(splits, 1)]
        assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-10, rtol=0)
    cached, uncached = (model.generate(tokens[:, :6], 13, cache=c) for c in (True, False))
    assert torch.equal(cached, uncached)


def test_single_layers_configs_and_files(tmp_path):
    plain, _, tokens = models()
    model = with_fast_weights(plain, [1], chunk=4)
    kinds = [type(block.attention).__name__ for block in model.blocks]
    assert kinds == ["MultiHeadAttention"] * 2 + ["FastWeightFeedForward", "MultiHeadAttention"]
    assert torch.equal(model(tokens), plain(tokens))
    more = parameter_count(model.config).total - parameter_count(plain.config).total
    assert more == 12 * 12 + 5 * 12  # the targets' matrix and the mixture
    train_a_little(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(LanguageModel.from_pretrained(tmp_path)(tokens), model(tokens))
    flops = count_flops(lambda: model(tokens))
    assert model_cost(model.config, 21, 2).forward_flops == flops


def test_gradients_reach_every_weight_of_a_block():
    """Gradients reach every weight of a block of the layer alone."""
    block = Block(8, 2, attention="fast_feed_forward", attention_options={"chunk": 2, "offset": 1}, ffn="none")
    block(torch.randn(2, 9, 8)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in block.parameters())


# ---------------------------------------------------------------- faults

z, v = torch.ones(4, 3), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: shift_in_chunks(z, 1, chunk=0), "chunk"),
        (lambda: shift_in_chunks(z, 1.5, chunk=2), "offset"),
        (lambda: shift_in_chunks(z.long(), 1, chunk=2), "x"),
        (lambda: read_chunks(z, v[:3], chunk=2), "values"),
        (lambda: read_chunks(z, v.double(), chunk=2), "values"),
        (lambda: read_chunks(z, v, chunk=2, fast=torch.ones(2, 2)), "fast"),
        (lambda: chunk_writes(z, v[:3], chunk=2), "targets"),
        (lambda: chunk_writes(z, v, chunk=2, rule="ols"), "rule"),
        (lambda: chunk_writes(z, v, chunk=2, rate=0), "rate"),
        (lambda: chunk_writes(z, v, chunk=2, rounds=0), "rounds"),
        (lambda: FastWeightFeedForward(4, chunk=0), "chunk"),
        (lambda: FastWeightFeedForward(4, reach=-1), "reach"),
        (lambda: FastWeightFeedForward(4, offset=0.5), "offset"),
        (lambda: FastWeightFeedForward(4)(torch.ones(1, 3, 5)), "x"),
        (lambda: FastWeightFeedForward(4)(torch.ones(1, 3, 4), causal=False), "causal"),
        (lambda: FastWeightFeedForward(4)(torch.ones(1, 3, 4), mask=torch.ones(3, 3)), "mask"),
        (lambda: FastWeightFeedForward(4)(torch.ones(1, 3, 4), score_mod=abs), "score_mod"),
        (lambda: FastWeightFeedForward(4).make_cache(1, 8, static=True), "static"),
        (lambda: make_attention("fast_feed_forward", 4, 2, chunks=3), "options"),
        (lambda: with_fast_weights(3), "model"),
        (lambda: with_fast_weights(models()[0], [3]), "layers"),
        (lambda: with_fast_weights(models()[0], [1, 1]), "layers"),
        (lambda: with_fast_weights(models()[1]), "layers"),
    ],
)
def test_errors_name_what_is_wrong(call, argument):
    with refused(argument):
        call()


def test_a_cache_of_another_layer_or_with_gradients():
    layer, x = layer_of(chunk=4)
    with refused("cache"):
        layer(x, cache=layer_of(chunk=5)[0].make_cache(3, 22))
    cache = layer.make_cache(3, 22)
    with refused("cache", "torch.no_grad"):
        layer(x, cache=cache)
    with torch.no_grad(), refused("tokens"):
        layer(torch.cat([x, x], 1)[:, :30], cache=cache)
    assert cache.length == 0
