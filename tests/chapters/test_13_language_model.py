"""Chapter 13: the claims with their mutants, decoding, the loss, weights by name, files and their faults, errors."""

import json
import math
import os
import random
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from claims import Disagreement, claim, compare
from gbattn import attention, language_model
from gbattn.attention import alibi, padding_mask, sliding_window
from gbattn.boosted import Gate
from gbattn.cost import count_flops, count_kernels, count_saved_bytes
from gbattn.decoding import accept_exactly
from gbattn.head import loss_of_logits, next_token_loss, next_token_probabilities
from gbattn.language_model import (
    LanguageModel,
    ModelConfig,
    model_cost,
    parameter_count,
)
from gbattn.layers import MultiHeadAttention, register

F64 = torch.float64
V, T = 23, 20
SMALL = dict(vocab_size=V, max_length=T, d_model=8, n_layers=2, n_heads=2)
KINDS = {
    "multi_head": {},
    "grouped": dict(attention_options={"n_kv_heads": 1}),
    "linear": dict(attention="linear"),
    "twicing": dict(attention="twicing", attention_options={"rounds": 3}),
    "boosted": dict(attention="boosted"),
    "shared": dict(attention="boosted", attention_options={"kv_from": "shared", "gate": "head"}),
    "mixed": dict(overrides={1: {"attention": "boosted", "norm": "post", "ffn": "swiglu"}}),
    "shifted": dict(attention="boosted", attention_options={"shift": True}, overrides={0: {"ffn": "none"}}),
}
LEARNED = [(kind, "learned") for kind in KINDS]
ROTARY = [(kind, "rotary") for kind in KINDS if kind != "linear"]  # its features must stay positive


def config_of(kind="multi_head", positions="learned", **changes):
    return ModelConfig(**SMALL | KINDS[kind] | dict(positions=positions) | changes)


def model_of(*kind, seed=0, scale=20, dtype=F64, **changes):
    """A model whose blocks have something to say, gates too."""
    model = LanguageModel(config_of(*kind, **changes), seed=seed, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Gate):
                module.weight.normal_(generator=generator)
            elif isinstance(module, torch.nn.Linear | torch.nn.Embedding):
                module.weight.mul_(scale)
    return model


def tokens_of(B=3, length=9, seed=1, vocab_size=V):
    return torch.randint(vocab_size, (B, length), generator=torch.Generator().manual_seed(seed))


# ---- The claims ----


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


class Silent:
    """A model whose blocks say nothing."""

    def __init__(self, seed, V, D):
        config = ModelConfig(
            vocab_size=V, max_length=V, d_model=D, n_heads=1, n_layers=2, norm="none", final_norm=False
        )
        self.model, self.V, self.D = LanguageModel(config, seed=seed, dtype=F64), V, D
        self.untied = LanguageModel(replace(config, tie_embeddings=False), seed=seed, dtype=F64)
        g = torch.Generator().manual_seed(seed)
        self.U = torch.randn(V, D, generator=g, dtype=F64)
        with torch.no_grad():
            for model in (self.model, self.untied):
                for block in model.blocks:
                    block.attention.out.weight.zero_()
                    block.ffn.down.weight.zero_()
                model.position_embedding.weight.zero_()
        self.E = torch.randn(V, D, generator=g, dtype=F64)

    def logits(self, E):
        with torch.no_grad():
            self.model.token_embedding.weight.copy_(E)
            return self.model(torch.arange(self.V)[None])[0]

    def sides(self, U=None):
        """The logits are EEᵀ, they are symmetric, and the longest rows expect themselves most."""
        E = self.E
        S, even = self.logits(E), self.logits(E / E.norm(dim=1, keepdim=True))
        S = S if U is None else E @ U.T
        longest = E.norm(dim=1).argmax()
        # Two tables reach any logits of rank D: their singular vectors are such tables.
        wanted = E.flip(0) @ self.U.T
        u, scale, v = torch.linalg.svd(wanted)
        D = min(self.D, self.V)
        with torch.no_grad():
            self.untied.token_embedding.weight.zero_()[:, :D] = u[:, :D] * scale[:D]
            self.untied.head.weight.zero_()[:, :D] = v[:D].T
            reached = self.untied(torch.arange(self.V)[None])[0]
        most = torch.cat([S[longest].max()[None], even.amax(1)])
        own = torch.cat([S[longest, longest][None], even.diagonal()])
        left = torch.cat([S.flatten(), S.T.flatten(), most, reached.flatten()])
        return left, torch.cat([(E @ E.T).flatten(), S.flatten(), own, wanted.flatten()])


@claim(
    st.builds(Silent, st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 8)),
    tolerance=1e-10,
    mutant=lambda p: p.sides(p.U),
)
def test_prop_silent(p):
    """A silent tied model says EEᵀ, which is symmetric; with a head of its own it can say more."""
    return p.sides()


class Start:
    def __init__(self, seed, V, D, sigma):
        g = torch.Generator().manual_seed(seed)
        h = torch.randn(D, generator=g, dtype=F64)
        h *= math.sqrt(D) / h.norm()
        s = sigma * torch.randn(4000, V, D, generator=g, dtype=F64) @ h
        both = torch.cat([s, -s])  # −w is as likely a head as w, and takes most of the noise out
        loss = (-both.log_softmax(-1))[:, 0].mean()  # any target
        self.share = (loss - math.log(V)) / (sigma**2 * D / 2)

    def sides(self, low, high):
        low, high = torch.tensor([low, high], dtype=F64)
        return torch.stack([low, self.share]), torch.stack([self.share, high])


starts = st.builds(Start, st.integers(0, 10**6), st.integers(8, 40), st.integers(4, 16), st.floats(0.3, 3.0))


@claim(starts, relation="<=", tolerance=0.01, examples=20, mutant=lambda p: p.sides(0.0, 0.8))
def test_prop_start(p):
    """The expected loss lies between ln V and ln V + σ²D/2, in shares of σ²D/2. Mutant: four fifths of it at most."""
    return p.sides(0.0, 1.0)


@pytest.mark.parametrize("low, high", [(0.9, 1.0), (0.0, 0.7)])
def test_either_bound_of_the_start_could_fail(low, high):
    """The share is 0.78 here; the mutant of the claim moves the upper bound alone."""
    with pytest.raises(Disagreement):
        compare(*Start(0, 20, 16, 0.6).sides(low, high), 0.01, "<=")


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


class Shifted:
    def __init__(self, kind, seed, by):
        self.kind, self.seed, self.by = kind, seed, by

    def sides(self, positions):
        model, tokens = model_of(self.kind, positions, seed=self.seed, max_length=100), tokens_of(2, 9)
        places = torch.arange(9)
        with torch.no_grad():
            return model(tokens, positions=places), model(tokens, positions=places + self.by)


@claim(
    st.builds(Shifted, st.sampled_from([kind for kind, _ in ROTARY]), st.integers(0, 99), st.integers(1, 90)),
    tolerance=1e-10,
    examples=20,
    mutant=lambda p: p.sides("learned"),
)
def test_prop_shift(p):
    """Logits of a rotary model stay when all positions move by the same number."""
    return p.sides("rotary")


class Sizes:
    def __init__(self, attention, V, T, K, H, L, rounds, B):
        self.V, self.T, self.D, self.L, self.B = V, T, K * H, L, B
        self.attention, self.M = attention, 1 if attention == "multi_head" else rounds
        options = {} if attention == "multi_head" else {"rounds": rounds}
        self.config = ModelConfig(
            vocab_size=V, max_length=T, d_model=K * H, n_layers=L, n_heads=H, attention=attention,
            attention_options=options,
        )  # fmt: skip

    def parameters(self, biases=1):
        V, T, D, L = self.V, self.T, self.D, self.L
        corrections = (self.M - 1) * (5 * D**2 + 4 * D * biases) * (self.attention == "boosted")
        return torch.tensor(V * D + T * D + L * (12 * D**2 + 13 * D * biases + corrections) + 2 * D, dtype=F64)[None]

    def counted(self):
        built = sum(p.numel() for p in LanguageModel(self.config).parameters())
        assert parameter_count(self.config).total == built
        return torch.tensor([built], dtype=F64)

    def flops(self, head=2):
        T, D, L, rows = self.T, self.D, self.L, self.B * self.T
        forward, backward = 24 * L * D**2 + 4 * L * T * D, 48 * L * D**2 + 10 * L * T * D
        return rows * torch.tensor([forward + head * self.V * D, backward + 2 * head * self.V * D], dtype=F64)

    def counted_flops(self):
        model, tokens = LanguageModel(self.config), torch.zeros(self.B, self.T, dtype=torch.int64)
        forward = count_flops(model, tokens)
        return torch.tensor([forward, count_flops(model(tokens).sum().backward)], dtype=F64)


def sizes(*attentions):
    small = [st.integers(*ends) for ends in ((2, 40), (1, 30), (1, 5), (1, 3), (1, 3), (1, 3), (1, 3))]
    return st.builds(Sizes, st.sampled_from(attentions), *small)


@claim(
    sizes("multi_head", "twicing", "boosted"),
    tolerance=0,
    examples=30,
    mutant=lambda p: (p.counted(), p.parameters(biases=0)),
)
def test_prop_parameters(p):
    """A model learns as many numbers as the formula says."""
    return p.counted(), p.parameters()


@claim(sizes("multi_head"), tolerance=0, examples=25, mutant=lambda p: (p.counted_flops(), p.flops(head=0)))
def test_prop_model_flops(p):
    """A token costs as many FLOPs as the formula says."""
    return p.counted_flops(), p.flops()


# ---- Counting ----


def test_the_published_models_have_the_published_parameters():
    counts = {
        name: parameter_count(ModelConfig(vocab_size=16_384, **options))
        for name, options in {
            "standard": {},
            "twicing": dict(attention="twicing"),
            "wider": dict(d_model=288),
            "boosted": dict(attention="boosted"),
        }.items()
    }
    totals = {name: count.total for name, count in counts.items()}
    assert totals == {"standard": 7_419_392, "twicing": 7_419_392, "wider": 8_789_184, "boosted": 8_734_208}
    assert counts["boosted"].non_embedding == 4_474_368
    assert counts["wider"].non_embedding == 3_996_864
    assert all(count.total == count.embeddings + count.non_embedding for count in counts.values())


@pytest.mark.parametrize(
    "changes",
    [
        *KINDS.values(),
        dict(tie_embeddings=False, bias=False, positions="rotary"),
        dict(norm="post", normalizer="rmsnorm", ffn="swiglu", d_ffn=24),
        dict(norm="none", attention="linear", max_length=70),
        dict(overrides={0: {"attention": "twicing", "ffn": "relu"}}, final_norm=True, normalizer="derf"),
    ],
)
def test_cost_is_what_torch_counts(changes):
    config = ModelConfig(**SMALL | changes)
    model, tokens = LanguageModel(config, seed=3), tokens_of(2, config.max_length)
    cost = model_cost(config, batch_size=2)
    if changes == KINDS["grouped"] and torch.__version__ < "2.12":
        pytest.skip("this torch refuses to count grouped queries")
    with torch.no_grad():
        assert count_flops(model, tokens) == cost.forward_flops
    loss = model(tokens).logsumexp(-1).sum()
    assert count_flops(loss.backward) == cost.backward_flops
    assert cost.parameters == sum(p.numel() for p in model.parameters())
    assert 0 < cost.saved_bytes <= count_saved_bytes(model, tokens)  # without norms, activations and residuals
    caches = model.make_caches(2)
    assert cost.cache_bytes == sum(cache.nbytes for cache in caches)
    half = LanguageModel(config, dtype=torch.bfloat16).make_caches(2)
    assert model_cost(config, batch_size=2, itemsize=2).cache_bytes == sum(cache.nbytes for cache in half)
    plain = model_cost(replace(config, bias=False), batch_size=2)
    fewer = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("ffn.up.bias", "ffn.down.bias")))
    fewer += sum(p.numel() for name, p in model.named_parameters() if name.endswith("ffn.gate.bias"))
    assert cost.traffic_bytes - plain.traffic_bytes >= 4 * fewer
    with torch.no_grad():
        model(tokens[:, :5], cache=caches)
        one = count_flops(model, tokens[:, 5:6], cache=caches)
    assert one == model_cost(config, 1, 2, past=5).forward_flops


# ---- Weights by name ----


def test_a_weight_depends_on_seed_and_name_alone():
    models = {kind: LanguageModel(config_of(kind), seed=5) for kind in ("multi_head", "twicing", "boosted", "shared")}
    deeper = LanguageModel(config_of(n_layers=3), seed=5)
    weights = {kind: dict(model.named_parameters()) for kind, model in (models | {"deeper": deeper}).items()}
    for one in weights.values():
        for name, weight in one.items():
            reference = weights["multi_head"].get(name)
            if reference is not None:
                assert torch.equal(weight, reference), name
    names = [name for name in weights["boosted"] if name.endswith("weight") and "norm" not in name]
    drawn = [weights["boosted"][name].flatten()[:8] for name in names if "gate" not in name]
    assert len({tuple(row.tolist()) for row in drawn}) == len(drawn)  # no two alike


def test_building_neither_reads_nor_moves_the_global_generator():
    torch.manual_seed(1)
    one, state = LanguageModel(config_of("boosted")), torch.get_rng_state()
    torch.manual_seed(2)
    assert all(map(torch.equal, one.parameters(), LanguageModel(config_of("boosted")).parameters()))
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_and_dtypes():
    config = config_of("boosted")
    weight = lambda **made: LanguageModel(config, **made).blocks[0].ffn.up.weight
    assert not torch.equal(weight(seed=0), weight(seed=1))
    assert torch.equal(weight(seed=0).double(), weight(seed=0, dtype=F64))
    assert torch.equal(weight(seed=0).bfloat16(), weight(seed=0, dtype=torch.bfloat16))


def test_the_table_of_initial_weights():
    config = ModelConfig(
        vocab_size=3000, d_model=64, attention="boosted", normalizer="dyt", tie_embeddings=False, init_std=0.05,
        overrides={1: {"normalizer": "layernorm"}, 2: {"normalizer": "rmsnorm"}},
    )  # fmt: skip
    model = LanguageModel(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(7.0)
    model.reset_parameters(0)
    for name, weight in model.named_parameters():
        if "gate" in name or name.endswith("bias"):
            assert (weight == 0).all(), name
        elif "norm" in name:
            assert (weight == (0.5 if name.endswith("alpha") else 1)).all(), name
        else:
            assert weight.ndim == 2
            error = 6 * 0.05 / math.sqrt(2 * weight.numel())
            assert abs(weight.std() - 0.05) < error and abs(weight.mean()) < 2 * error, name
    fresh = LanguageModel(config)
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


class Own(MultiHeadAttention):
    """A layer of one's own, with a weight, a buffer that is saved, and one that is not."""

    def __init__(self, d_model, n_heads, *, forget=None, dtype=None, device=None, **options):
        super().__init__(d_model, n_heads, dtype=dtype, device=device, **options)
        made = dict(dtype=dtype, device=device)
        self.forget = forget
        self.extra = torch.nn.Parameter(torch.empty(d_model, **made))
        self.register_buffer("kept", torch.full((2,), 3.0, **made))
        self.register_buffer("unsaved", torch.full((2,), 4.0, **made), persistent=False)
        if forget == "dtype":
            self.register_buffer("seen", torch.ones(2, dtype=torch.bool, device=device))

    def reset_parameters(self, generator=None):
        super().reset_parameters(generator)
        if hasattr(self, "extra"):
            with torch.no_grad():
                if self.forget != "extra":
                    self.extra.normal_(generator=generator)
                if self.forget != "kept":
                    self.kept.fill_(3.0)
                if self.forget != "unsaved":
                    self.unsaved.fill_(4.0)

    def attend_heads(self, inputs, q, k, v):
        F, A = super().attend_heads(inputs, q, k, v)
        return F * self.extra + (self.kept * self.unsaved).sum(), A


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setitem(attention.LAYERS, "own", Own)
    return lambda forget=None: config_of(attention="own", attention_options={"forget": forget})


def test_a_layer_of_ones_own_starts_by_name(own):
    state = torch.get_rng_state()
    model = LanguageModel(own(), seed=5)
    torch.rand(1)
    again = LanguageModel(own(), seed=5)
    torch.set_rng_state(state)
    assert torch.equal(LanguageModel(own(), seed=5).blocks[0].attention.extra, model.blocks[0].attention.extra)
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(model.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    first, second = (block.attention for block in model.blocks)
    assert not torch.equal(first.extra, second.extra)
    assert (first.kept == 3).all() and (first.unsaved == 4).all()


class Scale(torch.nn.Module):
    """A part that cannot reset itself."""

    def __init__(self, d_model, **factory_kwargs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(d_model, **factory_kwargs))


class OwnPart(MultiHeadAttention):
    """A layer of one's own whose further weight sits in a child."""

    def __init__(self, d_model, n_heads, *, device=None, dtype=None, **options):
        super().__init__(d_model, n_heads, device=device, dtype=dtype, **options)
        self.scale = Scale(d_model, device=device, dtype=dtype)

    def reset_parameters(self, generator=None):
        super().reset_parameters(generator)
        if hasattr(self, "scale"):
            torch.nn.init.normal_(self.scale.weight, generator=generator)

    def attend_heads(self, inputs, q, k, v):
        F, A = super().attend_heads(inputs, q, k, v)
        return F * self.scale.weight, A


def test_a_layer_resets_its_children(own):
    register("own part")(OwnPart)
    state = torch.get_rng_state()
    model, again = (LanguageModel(config_of(attention="own part"), seed=5) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    first, second = (block.attention for block in model.blocks)
    assert not torch.equal(first.scale.weight, second.scale.weight)
    plain = LanguageModel(config_of(), seed=5)  # the other weights are those of a model without it
    weights = model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in plain.state_dict().items())


def test_a_layer_without_a_cache_generates_without_one(own, monkeypatch):
    monkeypatch.setattr(Own, "make_cache", property())  # hasattr says no
    model, tokens = LanguageModel(own()), tokens_of(1, 3)
    with pytest.raises(ValueError, match="attention: got Own, without make_cache; want a layer that has it, or cache="):
        model.generate(tokens, 2)
    assert model.generate(tokens, 2, cache=False).shape == (1, 5)


@pytest.mark.parametrize("forget", ["extra", "kept", "unsaved"])
def test_a_layer_that_leaves_memory_as_it_found_it(own, forget):
    with pytest.raises(ValueError, match=f"blocks.0.attention.{forget}: got a weight or buffer that reset_parameters"):
        LanguageModel(own(forget))


def test_a_buffer_of_truth_values(own):
    with pytest.raises(ValueError, match="blocks.0.attention.seen: got dtype torch.bool; want a floating-point"):
        LanguageModel(own("dtype"))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_layer_of_ones_own_is_read_again(own, tmp_path, dtype):
    model = LanguageModel(own(), seed=5, dtype=dtype).eval()
    with torch.no_grad():
        model.blocks[1].attention.kept.fill_(7.0)
    model.save_pretrained(tmp_path)
    again = LanguageModel.from_pretrained(tmp_path)
    assert again.blocks[0].attention.unsaved.dtype == dtype
    assert torch.equal(again(tokens_of()), model(tokens_of()))


def test_names_of_the_weights():
    names = dict(LanguageModel(config_of()).named_parameters())
    assert {n.split(".")[0] for n in names} == {"token_embedding", "position_embedding", "blocks", "final_norm"}
    untied = dict(LanguageModel(config_of(tie_embeddings=False, positions="rotary")).named_parameters())
    assert {n.split(".")[0] for n in untied} == {"token_embedding", "blocks", "final_norm", "head"}
    assert "head.bias" not in untied


def test_the_final_norm_by_default():
    last = lambda **changes: config_of(**changes).normalizes_last
    assert last() and last(norm="none") and not last(norm="post")
    assert last(norm="post", final_norm=True) and not last(final_norm=False)


def test_a_layer_may_differ():
    overrides = {
        "1": {"attention": "twicing", "attention_options": {"rounds": 3}, "norm": "post", "normalizer": "rmsnorm",
              "ffn": "relu", "d_ffn": 12, "dropout": 0.5}
    }  # fmt: skip
    model = LanguageModel(config_of(overrides=overrides, attention_options={"dropout": 0.25}))
    first, second = model.blocks
    assert (first.attention.dropout, first.norm, first.dropout, first.ffn.kind) == (0.25, "pre", 0.0, "gelu")
    assert (second.attention.rounds, second.norm, second.dropout, second.ffn.kind) == (3, "post", 0.5, "relu")
    assert second.ffn.up.out_features == 12 and isinstance(second.ffn_norm, torch.nn.RMSNorm)


def test_rotary_positions_reach_every_layer():
    layers = dict(overrides={1: {"attention_options": {"n_kv_heads": 1}}})
    rotary = lambda model: [block.attention.rotary for block in model.blocks]
    assert rotary(model_of("boosted", "rotary", **layers)) == [10_000.0, 10_000.0]
    assert rotary(model_of("multi_head", "rotary", attention_options={"rotary": 500.0})) == [500.0, 500.0]


# ---- The forward pass ----


@pytest.mark.parametrize(("kind", "positions"), LEARNED + ROTARY)
def test_nobody_hears_the_future(kind, positions):
    model, tokens = model_of(kind, positions), tokens_of(2, 12)
    other = tokens.clone()
    other[:, 7:] = (other[:, 7:] + 1) % V
    with torch.no_grad():
        moved = (model(tokens) - model(other)).abs().amax((0, 2))
    assert moved[:7].max() < 1e-10 < 1e-3 < moved[7:].min()


@pytest.mark.parametrize(("kind", "positions"), LEARNED + ROTARY)
@torch.no_grad()
def test_decoding_with_a_cache_and_padding_equals_the_full_pass(kind, positions):
    model, (long, short) = model_of(kind, positions), tokens_of(2, 12).split(1)
    short = short[:, :8]
    padded = torch.cat([long, nnf.pad(short, (4, 0))])
    places = torch.stack([torch.arange(12), (torch.arange(12) - 4).clamp(min=0)])
    mask = padding_mask(torch.tensor([12, 8]), 12, side="left")
    full = model(padded, mask=mask, positions=places)
    assert (full[0] - model(long)[0]).abs().max() < 1e-10
    assert (full[1, 4:] - model(short)[0]).abs().max() < 1e-10
    caches, pieces = model.make_caches(2), []
    for start, stop in ((0, 5), (5, 6), (6, 9), (9, 12)):
        seen = dict(mask=mask[..., :stop], positions=places[:, start:stop])
        pieces.append(model(padded[:, start:stop], cache=caches, **seen))
    decoded = torch.cat(pieces, dim=1)
    assert (decoded[0] - full[0]).abs().max() < 1e-10
    assert (decoded[1, 4:] - full[1, 4:]).abs().max() < 1e-10
    plain = torch.cat([model(long[:, i : i + 1], cache=c) for c in [model.make_caches(1)] for i in range(12)], dim=1)
    assert (plain - model(long)).abs().max() < 1e-10


@pytest.mark.parametrize(("kind", "positions"), LEARNED + ROTARY)
@torch.no_grad()
def test_a_tokenizers_mask_is_the_padding(kind, positions):
    model, lengths = model_of(kind, positions), torch.tensor([7, 9, 4])
    tokens, mask = tokens_of(), padding_mask(lengths, 9)
    real = mask[:, 0, 0].long()
    assert torch.equal(model(tokens, padding=real), model(tokens, mask=mask))
    assert torch.equal(model.outputs(tokens, padding=real).logits, model(tokens, mask=mask))
    for row, length in zip(range(3), lengths):
        alone = model(tokens[row : row + 1, :length])
        assert (model(tokens, padding=real)[row : row + 1, :length] - alone).abs().max() < 1e-10


@pytest.mark.parametrize(("kind", "positions"), LEARNED + ROTARY)
def test_outputs_are_those_of_the_forward_pass(kind, positions):
    model, tokens = model_of(kind, positions), tokens_of()
    targets = tokens.roll(-1, 1).masked_fill(tokens == 0, -100)
    for traces in (False, True):
        for reduction in ("mean", "sum"):
            found = model.outputs(tokens, targets, traces=traces, reduction=reduction)
            assert (found.logits - model(tokens)).abs().max() < 1e-10
            assert (found.loss - model(tokens, targets, reduction=reduction)).abs() < 1e-10
            assert len(found.hidden_states) == 1 + len(model.blocks)
            assert (model.logits(found.hidden_states[-1]) - found.logits).abs().max() < 1e-12
        gradients = torch.autograd.grad(found.loss, list(model.parameters()), retain_graph=True)
        wanted = torch.autograd.grad(model(tokens, targets, reduction="sum"), list(model.parameters()))
        assert all((a - b).abs().max() < 1e-8 * max(1, b.abs().max()) for a, b in zip(gradients, wanted))
    for i, (block, trace) in enumerate(zip(model.blocks, found.traces, strict=True)):
        with torch.no_grad():
            assert (block(found.hidden_states[i], causal=True) - found.hidden_states[i + 1]).abs().max() < 1e-10
        assert len(trace.rounds) == getattr(block.attention, "rounds", 1)
    bare = model.outputs(tokens)
    assert bare.loss is None and bare.traces is None


@torch.no_grad()
def test_outputs_decode_with_a_cache():
    model, tokens = model_of("boosted"), tokens_of()
    caches, whole = model.make_caches(3), model.outputs(tokens)
    for start, stop in ((0, 4), (4, 9)):
        part = model.outputs(tokens[:, start:stop], traces=start == 4, cache=caches)
        assert (part.logits - whole.logits[:, start:stop]).abs().max() < 1e-10
        for state, all_of_it in zip(part.hidden_states, whole.hidden_states):
            assert (state - all_of_it[:, start:stop]).abs().max() < 1e-10
    assert part.traces[1].rounds[1].weights.shape == (3, 2, 5, 9)


def test_a_loss_of_logits_is_the_loss_without_them():
    h, W, y = torch.randn(6, 4, dtype=F64), torch.randn(V, 4, dtype=F64), torch.tensor([0, 3, -100, 5, 22, 1])
    for reduction in ("mean", "sum"):
        a, b = next_token_loss(h, W, y, reduction=reduction), loss_of_logits(h @ W.T, y, reduction=reduction)
        assert (a - b).abs() < 1e-12
    halves = loss_of_logits((h @ W.T).bfloat16().unflatten(0, (2, 3)), y.view(2, 3))
    assert halves.dtype == torch.float32 and (halves - loss_of_logits(h @ W.T, y)).abs() < 0.1


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: loss_of_logits(torch.ones(2, 3, 4), torch.ones(2, 2).long()),
            r"targets: got shape \(2, 2\); want \(2, 3",
        ),
        (
            lambda: loss_of_logits(torch.ones(2, 4), torch.tensor([1, 4])),
            "targets: got 1 to 4; want numbers from 0 to 3",
        ),
        (lambda: loss_of_logits(torch.ones(2, 4), torch.ones(2)), "targets: got dtype torch.float32; want torch.int64"),
        (lambda: loss_of_logits(torch.ones(2, 4).long(), torch.ones(2).long()), "logits: got dtype torch.int64"),
        (lambda: model_of().outputs(tokens_of(), traces=1), "traces: got 1; want True or False"),
        (lambda: model_of().outputs(tokens_of(), tokens_of(2)), r"targets: got shape \(2, 9\); want"),
        (
            lambda: model_of()(tokens_of(), padding=torch.ones(3, 9)),
            "padding: got dtype torch.float32; want torch.bool",
        ),
        (
            lambda: model_of()(tokens_of(), padding=torch.ones(3, 8).long()),
            r"padding: got shape \(3, 8\); want \(B, S\)",
        ),
    ],
)
def test_errors_of_outputs_and_padding_name_what_is_wrong(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


def test_a_learned_position_is_the_row_of_its_number():
    model, tokens = model_of(), tokens_of(2, 5)
    places = torch.tensor([[3, 1, 4, 1, 5], [0, 1, 2, 3, 4]])
    with torch.no_grad():
        out = model(tokens, positions=places)
        assert torch.allclose(out[1], model(tokens)[1], atol=1e-12)
        model.position_embedding.weight[4, 0] += 1  # not all: a norm takes a mean away
        moved = (model(tokens, positions=places) - out).abs().amax(-1)
    assert (moved[0, :2] < 1e-12).all() and moved[0, 2] > 1e-3
    assert (moved[1, :4] < 1e-12).all() and moved[1, 4] > 1e-3


@pytest.mark.parametrize(("kind", "vocab_size"), [("multi_head", V), ("boosted", 8192)])
@pytest.mark.filterwarnings("error:linear_cross_entropy")
def test_the_training_step_compiles_whole(kind, vocab_size):
    model = LanguageModel(config_of(kind, vocab_size=vocab_size, max_length=80))
    tokens, targets = tokens_of(2, 80), tokens_of(2, 80, seed=2)
    loss = model(tokens, targets)
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    again = compiled(tokens, targets)
    again.backward()
    assert abs(again - loss) < 1e-5
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, wanted[name], atol=1e-6), name


@pytest.mark.parametrize(
    ("kind", "positions"),
    [
        (kind, positions)
        for kind in KINDS
        for positions in ("learned", "rotary")
        if (kind, positions) != ("linear", "rotary")
    ],
)
def test_it_compiles_whole_for_any_length(kind, positions):
    torch._dynamo.reset()
    model = LanguageModel(config_of(kind, positions=positions))
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="eager")
    for length in (5, 9, 7):
        tokens = tokens_of(2, length)
        torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))


@pytest.mark.filterwarnings("ignore:.*:torch.jit.TracerWarning", "ignore:`torch.jit.trace")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_can_be_traced(kind):
    """As TensorBoard's add_graph does."""
    model, tokens = LanguageModel(config_of(kind)).eval(), tokens_of(2, 5)
    traced = torch.jit.trace(model, (tokens,), check_trace=False)
    assert torch.equal(traced(tokens), model(tokens))


@pytest.mark.parametrize(
    ("kind", "positions", "padded"),
    [
        ("multi_head", "learned", False),
        ("linear", "learned", False),
        ("linear", "learned", True),
        ("twicing", "learned", False),
        ("boosted", "learned", True),
        ("boosted", "rotary", False),
    ],
)
@torch.no_grad()
def test_decoding_compiles_to_two_graphs(kind, positions, padded):
    """One for the prompt and one for a token, wherever it stands."""
    torch._dynamo.reset()
    model, seen, made = LanguageModel(config_of(kind, positions, max_length=32)).eval(), tokens_of(2, 5), []
    wanted = model.generate(seen, 24, temperature=0)

    def backend(graph, inputs):
        made.append(graph)
        return graph.forward

    compiled, caches, unread = torch.compile(model, backend=backend, fullgraph=True), model.make_caches(2, 32), seen
    for step in range(24):
        lengths = torch.tensor([5, 5]) if padded else None
        S = seen.shape[1]
        how = language_model._padded(lengths, step, S, unread.shape[1], S)
        unread = compiled(unread, cache=caches, **how)[:, -1].argmax(-1)[:, None]
        seen = torch.cat([seen, unread], dim=1)
    assert len(made) == 2 and torch.equal(seen, wanted)


def test_the_last_logits():
    model, tokens = model_of("boosted", final_norm=False), tokens_of()
    for n in (1, 4, 9):
        assert torch.allclose(model(tokens, logits_to_keep=n), model(tokens)[:, -n:], atol=1e-12)
    with torch.no_grad():
        flops = [count_flops(model, tokens, logits_to_keep=n) for n in (1, 9)]
    assert flops[1] - flops[0] == 2 * 3 * 8 * 8 * V  # of 3 sequences, the head of 8 tokens that nobody wants


class Stubborn(LanguageModel):
    """It always says token 3."""

    def forward(self, tokens, targets=None, **options):
        return super().forward(tokens, targets, **options).index_fill(-1, torch.tensor([3]), 1e9)


@pytest.mark.parametrize("cache", [True, False, "static"])
def test_generate_calls_the_model(cache):
    config, tokens = config_of("boosted"), tokens_of(2, 4)
    model, shapes = LanguageModel(config).eval(), []
    wanted = model.generate(tokens, 8, cache=cache)
    handle = model.register_forward_hook(lambda module, args, output: shapes.append(tuple(output.shape)))
    assert torch.equal(model.generate(tokens, 8, cache=cache), wanted)
    assert shapes == 8 * [(2, 1, V)]
    handle.remove()
    model.register_forward_pre_hook(lambda module, args: (args[0] * 0,))
    assert not torch.equal(model.generate(tokens, 8, cache=cache), wanted)
    assert (Stubborn(config).generate(tokens, 8, cache=cache)[:, 4:] == 3).all()


def test_a_compiled_model_generates_compiled():
    torch._dynamo.reset()
    model, tokens, calls = LanguageModel(config_of("boosted")).eval(), tokens_of(2, 4), []
    wanted = model.generate(tokens, 8)

    def backend(graph, inputs):
        return lambda *inputs: calls.append(1) or graph.forward(*inputs)

    model.compile(backend=backend, fullgraph=True)
    assert torch.equal(model.generate(tokens, 8), wanted) and len(calls) == 8


@pytest.mark.parametrize("padded", [{}, dict(lengths=torch.tensor([4, 2]))], ids=["", "padded"])
@pytest.mark.parametrize("kind", ["boosted", "linear"])
def test_a_compiled_model_with_a_static_cache_has_two_programs(kind, padded):
    torch._dynamo.reset()
    model, tokens, programs = LanguageModel(config_of(kind)).eval(), tokens_of(2, 4), []
    wanted = model.generate(tokens, 15, **padded)

    def backend(graph, inputs):
        programs.append(graph)
        return graph.forward

    model.compile(backend=backend, fullgraph=True)
    for seed in (0, 1):  # the caches of the second text are others
        assert model.generate(tokens, 15, cache="static", seed=seed, **padded).shape == (2, 19)
        assert len(programs) == 2
    assert torch.equal(model.generate(tokens, 15, cache="static", **padded), wanted)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("tied", [True, False])
def test_a_sharded_model_generates(tied):
    distributed = torch.distributed
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("torch without FSDP2")
    model, tokens = LanguageModel(config_of("boosted", tie_embeddings=tied)), tokens_of(2, 4)
    wanted = model.generate(tokens, 8)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        for part in (*model.blocks, model):
            fsdp.fully_shard(part, mesh=mesh)
        for cache in (True, False):
            assert torch.equal(model.generate(tokens, 8, cache=cache), wanted)
    finally:
        distributed.destroy_process_group()


def test_a_model_without_memory_under_accelerate():
    accelerate = pytest.importorskip("accelerate")
    config, state = config_of("boosted"), torch.get_rng_state()
    with accelerate.init_empty_weights():
        model = LanguageModel(config)
    assert all(p.is_meta for p in model.parameters()) and torch.equal(torch.get_rng_state(), state)
    model.to_empty(device="cpu").reset_parameters(5)
    assert all(map(torch.equal, model.parameters(), LanguageModel(config, seed=5).parameters()))


@pytest.mark.parametrize("norm", ["pre", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_it_can_be_quantised(kind, norm):
    """By torch, for the CPU: products of eight bits, so nearly the same logits."""
    model, tokens = LanguageModel(config_of(kind, norm=norm)).eval(), tokens_of(2, 6)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    assert not any(type(part) is torch.nn.Linear for part in small.modules())
    with torch.no_grad():
        exact = model(tokens)
        assert 0 < (small(tokens) - exact).abs().max() < 0.1 * exact.abs().max()
    assert small.generate(tokens, 3, temperature=0).shape == (2, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    model, tokens = model_of(kind, dtype=torch.float32, scale=1), tokens_of(2, 12)
    exact = model(tokens, tokens).item()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens, tokens)
        said = model.generate(tokens, 3, temperature=0)
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss.item() - exact) < 0.01
    assert said.shape == (2, 15)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_the_loss(dtype):
    """A loss in bfloat16 would be off by up to 0.03; the logits are large enough for chunks in full precision."""
    model = LanguageModel(config_of(vocab_size=8192, max_length=160), dtype=dtype)
    tokens = tokens_of(2, 160)
    loss = model(tokens, tokens)
    exact = LanguageModel(config_of(vocab_size=8192, max_length=160))(tokens, tokens)
    (2.0**14 * loss).backward()
    assert loss.dtype == torch.float32 and abs(loss - exact) < 0.005
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("place", ["embeddings", "sublayers", "attention weights"])
def test_dropout_works_while_training_only(place):
    inner = {"dropout": 0.3} if place == "attention weights" else {}
    common = 0.3 if place == "embeddings" else 0.0
    layer = {"dropout": 0.3 if place == "sublayers" else 0.0}
    model = model_of("boosted", dropout=common, attention_options=inner, overrides={0: layer, 1: layer})
    tokens = tokens_of()
    torch.manual_seed(0)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("default", ["meta"])
def test_another_default_device_changes_nothing(default):
    model, tokens = model_of("boosted"), tokens_of(2, 4)
    want = model.generate(tokens, 5)
    with torch.device(default):
        same = LanguageModel(model.config, seed=3, device="cpu")
        assert torch.equal(same.head_weight, LanguageModel(model.config, seed=3, device="cpu").head_weight)
        assert torch.equal(model.generate(tokens, 5), want)
    assert torch.equal(same.head_weight, LanguageModel(model.config, seed=3).head_weight)


@pytest.mark.parametrize("kind", ["multi_head", "linear", "boosted"])
def test_a_model_on_the_meta_device_has_shapes(kind):
    model = LanguageModel(config_of(kind), device="meta")
    tokens = torch.zeros(2, 5, dtype=torch.int64, device="meta")
    assert model(tokens).shape == (2, 5, V) and model(tokens, tokens).shape == ()
    assert len(model.make_caches(2)) == model.config.n_layers


def test_a_config_of_numpys_numbers(tmp_path):
    numbers = {name: np.int64(size) for name, size in (SMALL | {"d_ffn": 12}).items()}
    config = ModelConfig(**numbers, init_std=np.float32(0.5), dropout=np.float64(0.25))
    assert config == ModelConfig(**SMALL, d_ffn=12, init_std=0.5, dropout=0.25)
    LanguageModel(config).save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).config == config


def test_the_last_block_decides_whether_a_norm_follows():
    ends = {("post", "pre"): True, ("pre", "post"): False, ("post", "post"): False, ("pre", "pre"): True}
    for (norm, last), normalised in ends.items():
        config = config_of(norm=norm, overrides={1: {"norm": last}})
        assert config.normalizes_last == normalised
        assert config_of(norm=norm, overrides={1: {"norm": last}}, final_norm=True).normalizes_last


def test_a_layer_of_its_own_turns_like_the_others():
    config = config_of(
        positions="rotary", attention_options={"rotary": 500.0}, overrides={1: {"attention_options": {"n_kv_heads": 1}}}
    )
    assert [config._block_options(layer)["attention_options"]["rotary"] for layer in range(2)] == [500.0, 500.0]


@torch.no_grad()
def test_caches_out_of_step_are_refused():
    model, tokens = model_of(overrides={1: {"attention": "linear"}}), tokens_of(1, 3)
    caches = model.make_caches(1)
    with pytest.raises(ValueError):
        model(tokens, cache=caches, mask=torch.zeros(1, 3))
    with pytest.raises(
        ValueError, match=r"cache: got \[3, 0\] tokens in its layers; want one number: a pass that failed"
    ):
        model(tokens, cache=caches)
    with pytest.raises(ValueError, match=r"cache: got \[NoneType, NoneType\]; want a list of 2, from make_caches"):
        model(tokens, cache=[None, None])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("kind", ["multi_head", "boosted"])
def test_gradients_of_each_sequence(kind):
    model, tokens, targets = model_of(kind), tokens_of(), tokens_of(seed=2)
    targets[0, 3] = -100
    weights = {name: w.detach() for name, w in model.named_parameters()}

    def loss(weights, row, target):
        return torch.func.functional_call(model, weights, (row[None], target[None]))

    together = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, tokens, targets)
    for b in range(len(tokens)):
        alone = torch.autograd.grad(model(tokens[b : b + 1], targets[b : b + 1]), [*model.parameters()])
        for name, gradient in zip(weights, alone, strict=True):
            torch.testing.assert_close(together[name][b], gradient)


@torch.no_grad()
def test_targets_at_fault_leave_the_caches_as_they_are():
    model, tokens = model_of("boosted"), tokens_of(1, 3)
    caches = model.make_caches(1)
    with pytest.raises(ValueError, match="targets: got"):
        model(tokens, tokens + V, cache=caches)
    assert [cache.length for cache in caches] == [0, 0]


def test_no_sequences():
    model = model_of("boosted")
    none = torch.empty(0, 5, dtype=torch.int64)
    assert model(none).shape == (0, 5, V)
    assert model(none, none, reduction="sum") == 0 and model(none, none).isnan()
    assert model.generate(none, 3).shape[0] == 0


# ---- Packed documents ----

LENGTHS = (4, 1, 7, 5)  # of documents in a row of 17 tokens
PACKED = torch.repeat_interleave(torch.tensor([3, 8, 8, 3]), torch.tensor(LENGTHS)).expand(2, 17).clone()
PACKED[:, 5:12] = 1  # neighbours that differ; the last one has the number of the first


def packed_tokens():
    return torch.randint(V, (2, 17), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize(("kind", "positions"), [*LEARNED, *ROTARY])
@torch.no_grad()
def test_packed_documents_are_as_separate_sequences(kind, positions):
    model, ids = model_of(kind, positions), packed_tokens()
    alone = torch.cat([model(part) for part in ids.split(LENGTHS, 1)], 1)
    assert (model(ids, documents=PACKED) - alone).abs().max() < 1e-10
    assert (model(ids) - alone).abs().max() > 1e-3
    traced = model.outputs(ids, documents=PACKED, traces=True)
    assert (traced.logits - alone).abs().max() < 1e-10
    different = PACKED[:, :, None] != PACKED[:, None]
    for trace in traced.traces:
        for found in trace.rounds:
            assert not found.weights.masked_select(different[:, None]).any()


def test_the_loss_of_packed_documents_has_the_gradients_of_separate_ones():
    for kind in ("multi_head", "twicing", "shifted"):
        model, ids = model_of(kind), packed_tokens()
        targets = ids.roll(-1, 1).masked_fill(nnf.pad(PACKED[:, 1:] != PACKED[:, :-1], (0, 1), value=True), -100)
        loss = model(ids, targets, reduction="sum", documents=PACKED)
        parts = zip(ids.split(LENGTHS, 1), targets.split(LENGTHS, 1))
        alone = sum(model(part, own.contiguous(), reduction="sum") for part, own in parts)
        assert (loss - alone).abs() < 1e-10
        for a, b in zip(*(torch.autograd.grad(x, [*model.parameters()]) for x in (loss, alone))):
            assert (a - b).abs().max() < 1e-9


@pytest.mark.parametrize("kind", ["multi_head", "boosted", "shifted"])
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_packed_documents_decode(kind, static):
    model, ids = model_of(kind, "rotary"), packed_tokens()
    wanted, caches = model(ids, documents=PACKED), model.make_caches(2, 17, static=static)
    outputs, end = [], 0
    for part in ids.split([3, 1, 6, 7], 1):
        end += part.shape[1]
        outputs.append(model(part, cache=caches, documents=PACKED if static else PACKED[:, :end]))
    assert (torch.cat(outputs, 1) - wanted).abs().max() < 1e-10


@torch.no_grad()
def test_documents_and_every_mask_hold_together():
    model, ids = model_of("boosted"), packed_tokens()
    window = (torch.arange(17)[:, None] - torch.arange(17)).abs() < 3
    wanted = torch.cat([model(part, mask=sliding_window(3)) for part in ids.split(LENGTHS, 1)], 1)
    bias = torch.zeros(17, 17, dtype=F64).masked_fill(~window, -math.inf)
    for mask in (sliding_window(3), window, bias):
        assert (model(ids, documents=PACKED, mask=mask) - wanted).abs().max() < 1e-10
    slopes = torch.cat([model(part, score_mod=alibi(2)) for part in ids.split(LENGTHS, 1)], 1)
    assert (model(ids, documents=PACKED, score_mod=alibi(2)) - slopes).abs().max() < 1e-10
    real = torch.ones(2, 17, dtype=torch.bool)
    real[:, 15:] = False
    padded = model(ids, documents=PACKED, padding=real)
    assert (padded - model(ids, documents=PACKED))[:, :15].abs().max() < 1e-10


@pytest.mark.parametrize(
    ("told", "sentence"),
    [
        (dict(documents=PACKED[:, :3]), r"documents: got shape \(2, 3\); want \(B, S\) with B = 2, S = 17"),
        (dict(documents=PACKED.double()), "documents: got dtype torch.float64; want an integer dtype"),
        (dict(documents=PACKED, positions=torch.arange(17)), "positions: got .*; want None with documents, in which"),
    ],
)
def test_bad_documents_are_named(told, sentence):
    with pytest.raises(ValueError, match=sentence):
        model_of()(packed_tokens(), **told)


# ---- The loss ----


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


def test_the_model_takes_its_loss_from_its_logits():
    for tied in (True, False):
        model, tokens = model_of("boosted", tie_embeddings=tied), tokens_of()
        targets = tokens_of(seed=2)
        targets[0, :4] = -100
        scored = nnf.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        assert abs(model(tokens, targets, reduction="sum") - scored) < 1e-10
        assert abs(model(tokens, targets) - scored / (targets != -100).sum()) < 1e-10


# ---- Drawing ----

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


def test_the_smallest_temperature_and_share():
    logits = torch.tensor([0.0, 3.0, 1.0])
    for options in (dict(temperature=1e-46), dict(temperature=5e-324), dict(top_p=1e-50), dict(top_p=5e-324)):
        assert next_token_probabilities(logits, **options).tolist() == [0, 1, 0]
    model, tokens = model_of("boosted"), tokens_of(2, 4)
    greedy = model.generate(tokens, 6, temperature=0)
    assert torch.equal(model.generate(tokens, 6, temperature=1e-50), greedy)


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
    chosen = language_model._draw_token(p, torch.tensor([grain / 2**53], dtype=F64))
    assert p[0, chosen] > 0


def test_tokens_are_drawn_as_often_as_they_should():
    p = torch.tensor([0.5, 0.0, 0.3, 0.2], dtype=F64)
    u = torch.rand(20_000, generator=torch.Generator().manual_seed(0), dtype=F64)
    often = torch.bincount(language_model._draw_token(p.expand(20_000, 4), u), minlength=4) / 20_000
    assert (often - p).abs().max() < 0.015


@pytest.mark.parametrize(("kind", "positions"), LEARNED + ROTARY)
@pytest.mark.parametrize("options", [dict(temperature=0), dict(temperature=0.9, top_k=9, top_p=0.95)], ids=str)
def test_a_batch_with_padding_and_a_cache_says_what_each_says_alone(kind, positions, options):
    model, tokens = model_of(kind, positions), tokens_of(3, 7)
    lengths = torch.tensor([7, 1, 4])
    said = model.generate(tokens, 12, lengths=lengths, seed=[8, 9, 8], **options)
    assert torch.equal(said[:, :7], tokens)
    for cache in (False, "static"):
        again = model.generate(tokens, 12, lengths=lengths, seed=[8, 9, 8], cache=cache, **options)
        assert torch.equal(said, again)
    for b, length in enumerate(lengths.tolist()):
        alone = model.generate(tokens[b : b + 1, 7 - length :], 12, seed=[8, 9, 8][b], **options)
        assert torch.equal(alone[0], said[b, 7 - length :])


def test_greedy_takes_the_largest_logit():
    model, tokens = model_of("boosted"), tokens_of(2, 4)
    said = model.generate(tokens, 6, temperature=0)
    with torch.no_grad():
        assert torch.equal(model(said[:, :-1])[:, 3:].argmax(-1), said[:, 4:])


def test_the_seed_decides_and_nothing_else():
    model, tokens = model_of("boosted", scale=2), tokens_of(2, 4)
    one = model.generate(tokens, 10, seed=1)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert torch.equal(one, model.generate(tokens, 10, seed=1))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(one, model.generate(tokens, 10, seed=3))


def test_no_two_sequences_share_their_numbers():
    """Neither in a batch nor in batches of neighbouring seeds; and more rows or steps change none."""
    drawn = lambda seed, B=4, steps=6: language_model._uniform(seed, B, steps, torch.device("cpu"))
    rows = torch.cat([drawn(seed) for seed in range(5)])
    assert rows.flatten().unique().numel() == rows.numel() and ((rows >= 0) & (rows < 1)).all()
    assert torch.equal(drawn(3)[:2, :4], drawn(3, B=2, steps=4))
    assert torch.equal(drawn([5, -1], B=2), torch.cat([drawn(5, B=1), drawn(-1, B=1)]))
    assert drawn(0, B=0).shape == (0, 6)


def test_a_sequence_ends():
    model, tokens = model_of("boosted"), tokens_of(3, 4)
    free = model.generate(tokens, 12, seed=1)
    end = free[0, 6].item()
    stopped = model.generate(tokens, 12, seed=1, end=end)
    for row, wanted in zip(stopped[:, 4:], free[:, 4:]):
        places = (wanted == end).nonzero()
        first = places[0].item() if len(places) else len(wanted)
        assert torch.equal(row[:first], wanted[: len(row)][:first]) and (row[first:] == end).all()
    only = model.generate(tokens[:1], 12, seed=1, end=end)
    assert only.shape[1] == 4 + (free[0, 4:] == end).nonzero()[0].item() + 1  # the rest is left out


def test_generation_leaves_the_model_as_it_was():
    model = model_of("boosted", dropout=0.5).train()
    tokens = tokens_of(2, 4)
    one = model.generate(tokens, 8, temperature=0)
    assert model.training and torch.equal(one, model.generate(tokens, 8, temperature=0))
    assert not model.eval().generate(tokens, 1).requires_grad and not model.training
    with pytest.raises(ValueError, match="prompt: got"):
        model.train().generate(tokens + V, 2)
    with pytest.raises(ValueError, match="prompt: got dtype torch.float32; want torch.int64 or torch.int32"):
        model.generate(tokens.float(), 2)
    assert model.training
    model.blocks[0].eval()  # frozen, say
    model.generate(tokens, 1)
    assert model.training and not any(part.training for part in model.blocks[0].modules())


def test_lengths_of_a_narrow_dtype():
    model = model_of(max_length=150)
    tokens, lengths = tokens_of(2, 130), torch.tensor([120, 127])
    want = model.generate(tokens, 12, lengths=lengths, temperature=0)
    assert torch.equal(model.generate(tokens, 12, lengths=lengths.to(torch.int8), temperature=0), want)


def test_a_float64_model_generates_under_autocast():
    model, tokens = model_of(dtype=F64), tokens_of(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model.generate(tokens, 5), model_of(dtype=F64).generate(tokens, 5))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("options", [dict(temperature=0), dict(), dict(top_k=3), dict(cache=False)], ids=str)
def test_weights_that_are_not_finite_write_nothing(bad, options):
    model, tokens = model_of("boosted"), tokens_of(2, 4)
    with torch.no_grad():
        model.blocks[1].ffn.down.bias[0] = bad
    with pytest.raises(ValueError, match="model: got logits that are not finite; want finite ones: look for NaN"):
        model.generate(tokens, 3, **options)


def test_what_follows_an_end_is_not_looked_at():
    """A place that is not finite, first read after the sequence has ended."""
    model, tokens = model_of(), tokens_of(2, 4)
    end = model.generate(tokens, 1, temperature=0)[0, -1].item()
    with torch.no_grad():
        model.position_embedding.weight[6] = math.nan
    assert model.generate(tokens[:1].repeat(2, 1), 6, temperature=0, end=end).shape[1] == 5
    with pytest.raises(ValueError, match="model: got logits that are not finite"):
        model.generate(tokens, 6, temperature=0)


def test_a_rotary_model_may_go_on_beyond_its_length():
    said = model_of("boosted", "rotary").generate(tokens_of(1, 4), T + 5)
    assert said.shape == (1, T + 9)


# ---- Pieces, penalties, drafts ----


def test_pieces_add_up_and_the_reader_may_stop():
    model, tokens, pieces = model_of("boosted"), tokens_of(2, 4), []
    said = model.generate(tokens, 8, seed=1, stream=pieces.append)
    assert torch.equal(torch.cat([tokens, *pieces], 1), said) and [p.shape for p in pieces] == 8 * [(2, 1)]
    pieces.clear()
    stopped = model.generate(tokens, 8, seed=1, stream=lambda new: pieces.append(new) or len(pieces) == 3)
    assert torch.equal(stopped, said[:, :7])
    drafted = model.generate(tokens, 8, seed=1, draft=model, n_draft=3, stream=pieces.append)
    assert [p.shape[1] for p in pieces[3:]] == [3, 3, 2] and torch.equal(drafted[:, 4:], torch.cat(pieces[3:], 1))


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


def test_a_strong_penalty_never_repeats_and_padding_has_not_occurred():
    model, tokens, lengths = model_of("boosted", "rotary"), tokens_of(3, 7), torch.tensor([7, 1, 4])
    options = dict(repetition_penalty=1e9, temperature=0)
    with torch.no_grad():  # all logits positive: a penalty that strong is then a ban
        model.final_norm.weight.zero_()
        model.final_norm.bias.fill_(1.0)
        model.token_embedding.weight.abs_()
    said = model.generate(tokens, 12, lengths=lengths, **options)
    for row, prompt, length in zip(said[:, 7:].tolist(), tokens, lengths):
        assert len({*row}) == 12 and not {*row} & {*prompt[7 - length :].tolist()}


FORGETFUL = [k for k in KINDS if k not in ("linear", "shifted")]


def drafted(kind, positions="learned"):
    """A model, another that is like it, and prompts with padding on the left."""
    models = [model_of(kind, positions, seed=seed) for seed in (0, 1)]
    with torch.no_grad():  # near the other, so that some are accepted
        for a, b in zip(models[1].parameters(), models[0].parameters()):
            a.mul_(0.03).add_(0.97 * b)
    return *models, tokens_of(3, 7), dict(lengths=torch.tensor([7, 1, 4]))


@pytest.mark.parametrize(("kind", "positions"), LEARNED + ROTARY)
def test_greedy_with_a_draft_is_greedy(kind, positions):
    model, draft, tokens, options = drafted(kind, positions)
    options |= dict(temperature=0)
    wanted, pieces = model.generate(tokens, 12, **options), []
    for cache in [False] + [True] * (kind in FORGETFUL):
        for n_draft in (1, 4, 30):
            more = options | dict(cache=cache, draft=draft, n_draft=n_draft, stream=pieces.append)
            assert torch.equal(model.generate(tokens, 12, **more), wanted)
    assert {p.shape[1] for p in pieces} != {1}  # some were accepted


@pytest.mark.parametrize("options", [{}, dict(top_k=9, temperature=0.8, repetition_penalty=1.4)], ids=str)
@pytest.mark.parametrize("kind", FORGETFUL)
def test_the_tokens_do_not_depend_on_batch_cache_or_number_of_proposals(kind, options):
    model, draft, tokens, padded = drafted(kind)
    seeds = [8, 9, 8]
    first = model.generate(tokens, 12, draft=draft, seed=seeds, **options | padded)
    for n_draft, cache in ((1, True), (3, False), (12, True), (5, "static")):
        more = dict(draft=draft, seed=seeds, n_draft=n_draft, cache=cache)
        assert torch.equal(model.generate(tokens, 12, **more, **options | padded), first)
    for b, length in enumerate(padded["lengths"].tolist()):
        alone = model.generate(tokens[b : b + 1, 7 - length :], 12, draft=draft, seed=seeds[b], **options)
        assert torch.equal(alone[0], first[b, 7 - length :])


def test_a_drafted_sequence_ends():
    model, draft, tokens, options = drafted("boosted")
    free = model.generate(tokens, 12, draft=draft, **options)
    for end in free[:, 9].tolist():
        stopped = model.generate(tokens, 12, draft=draft, end=end, **options)
        for row, whole in zip(stopped[:, 7:], free[:, 7:]):
            first = (whole == end).cumsum(0) - (whole == end).long()  # 0 up to the first end
            assert torch.equal(row, whole.where(first == 0, end)[: len(row)])
        done = (free[:, 7:] == end).any(1).all()
        longest = max((row == end).nonzero()[0].item() for row in free[:, 7:]) + 1 if done else 12
        assert stopped.shape[1] == 7 + longest


def test_the_law_with_a_draft_is_the_models():
    """All 5³ continuations, enumerated, against 2000 sequences."""
    chi2 = pytest.importorskip("scipy.stats").chi2
    model, draft = (model_of(seed=seed, vocab_size=5, scale=6) for seed in (0, 1))
    every = torch.cartesian_prod(*[torch.arange(5)] * 3)
    prompt = torch.tensor([[0, 3]])
    with torch.no_grad():
        rows = torch.cat([prompt.expand(125, 2), every], 1)
        log_p = model(rows[:, :-1]).log_softmax(-1)[:, 1:]
    law = log_p.gather(2, every[..., None]).sum((1, 2)).exp()
    assert abs(law.sum() - 1) < 1e-9

    def statistic(**options):
        said = model.generate(prompt.expand(2000, 2), 3, seed=3, draft=draft, **options)[:, 2:]
        found = torch.bincount((said * torch.tensor([25, 5, 1])).sum(1), minlength=125).double()
        rare = 2000 * law < 5  # in one class
        pooled = [torch.cat([x[~rare], x[rare].sum()[None]]) for x in (found, 2000 * law)]
        return chi2.sf(((pooled[0] - pooled[1]) ** 2 / pooled[1]).sum().item(), (~rare).sum().item())

    assert statistic(n_draft=2) > 1e-3
    always = lambda p, q, new: (torch.ones_like(p[..., 0]), q)
    assert statistic(accept=always) < 1e-9  # the mutant: each proposal is accepted


def test_a_compiled_model_and_draft_generate_compiled():
    torch._dynamo.reset()
    model, draft, tokens, _ = drafted("boosted")
    options, calls = dict(draft=draft, n_draft=2), []
    wanted = model.generate(tokens, 4, **options)

    def backend(graph, inputs):
        return lambda *inputs: calls.append(1) or graph.forward(*inputs)

    for one in (model, draft):
        one.compile(backend=backend, fullgraph=True)
    assert torch.equal(model.generate(tokens, 4, **options), wanted) and len(calls) >= 6


@pytest.mark.parametrize("which", [0, 1])
def test_a_draft_that_is_not_finite_writes_nothing(which):
    models, tokens = [model_of("boosted"), model_of(seed=1)], tokens_of(2, 4)
    with torch.no_grad():
        models[which].blocks[1].ffn.down.bias[0] = math.nan
    with pytest.raises(ValueError, match="model, or draft: got logits that are not finite"):
        models[0].generate(tokens, 3, draft=models[1])


def test_a_batch_of_none_with_a_draft():
    assert model_of().generate(tokens_of(0, 4), 3, draft=model_of()).shape[0] == 0


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (dict(draft=3), "draft: got 3; want a LanguageModel"),
        (dict(draft=lambda: model_of(vocab_size=9)), "draft: got vocab_size 9; want 23"),
        (dict(draft=lambda: model_of(max_length=7)), "draft: got 4 tokens and 5 more; want at most max_length = 7"),
        (dict(draft=lambda: model_of("linear")), r"draft: got a cache that cannot forget .* want cache=False"),
        (dict(draft=model_of, n_draft=0), "n_draft: got 0; want a positive integer"),
        (dict(draft=model_of, accept=1), "accept: got 1; want None or a callable"),
        (dict(stream=1), "stream: got 1; want None or a callable"),
        (dict(repetition_penalty=0), "repetition_penalty: got 0; want a positive"),
    ],
)
def test_errors_of_generation_name_what_is_wrong(change, sentence):
    if isinstance(change.get("draft"), type(lambda: 0)):
        change = change | dict(draft=change["draft"]())
    with pytest.raises(ValueError, match=sentence):
        model_of().generate(tokens_of(2, 4), 5, **change)


def penalized(logits, past):
    return next_token_probabilities(logits, repetition_penalty=2, past=past)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda x: penalized(x, None), "past: got NoneType"),
        (lambda x: penalized(x, torch.tensor([[V], [0]])), "past: got 0 to 23; want numbers from 0 to 22, or -100"),
        (lambda x: penalized(x, torch.tensor([0])), r"past: got \(\) sequences; want \(2,\), as logits"),
        (lambda x: accept_exactly(x, x[:, 1:], torch.tensor([0, 1])), r"q: got \(2, 22\); want \(2, 23\), as p"),
        (lambda x: accept_exactly(x, x, torch.tensor([0])), "proposed: got shape"),
    ],
)
def test_errors_of_sampling_name_what_is_wrong(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call(torch.randn(2, V))


# ---- Files ----


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_read_again(tmp_path, dtype, tied):
    config = config_of("mixed", "rotary", tie_embeddings=tied, normalizer="dyt")
    model = LanguageModel(config, seed=4, dtype=dtype)
    model.save_pretrained(tmp_path / "deep" / "folder")
    state = torch.get_rng_state()
    again = LanguageModel.from_pretrained(tmp_path / "deep" / "folder")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config == config and not again.training
    for (name, one), (other_name, other) in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
        assert name == other_name and one.dtype == other.dtype and torch.equal(one, other)
    assert all(p.requires_grad for p in again.parameters())
    assert sorted(path.name for path in (tmp_path / "deep" / "folder").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    assert LanguageModel.from_pretrained(tmp_path / "deep" / "folder", dtype=F64).head_weight.dtype == F64


def test_saving_again_replaces(tmp_path):
    one, other = (LanguageModel(config_of("boosted"), seed=seed) for seed in (1, 2))
    one.save_pretrained(tmp_path)
    held = LanguageModel.from_pretrained(tmp_path)
    other.save_pretrained(tmp_path)
    assert torch.equal(held.head_weight, one.head_weight)
    assert torch.equal(LanguageModel.from_pretrained(tmp_path).head_weight, other.head_weight)


def test_a_model_with_a_compiled_part_is_saved_as_the_plain_one(tmp_path):
    model = LanguageModel(config_of("boosted"), seed=3).eval()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.save_pretrained(tmp_path)
    again = LanguageModel.from_pretrained(tmp_path)
    assert {*again.state_dict()} == {*LanguageModel(model.config).state_dict()}
    assert torch.equal(again(tokens_of()), LanguageModel(model.config, seed=3).eval()(tokens_of()))


def test_a_model_owns_the_weights_it_read(tmp_path):
    """Whatever becomes of the file."""
    one, other = (LanguageModel(config_of("boosted"), seed=seed).eval() for seed in (1, 2))
    one.save_pretrained(tmp_path / "one")
    other.save_pretrained(tmp_path / "other")
    held = LanguageModel.from_pretrained(tmp_path / "one")
    shutil.copyfile(tmp_path / "other" / "model.safetensors", tmp_path / "one" / "model.safetensors")
    assert torch.equal(held(tokens_of()), one(tokens_of()))


def replaced(model):
    model.token_embedding = torch.nn.Embedding(V + 1, 8)


def normed(model):
    torch.nn.utils.parametrizations.weight_norm(model.blocks[0].ffn.up)


def tied_by_hand(model):
    model.head.weight = model.token_embedding.weight


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            replaced,
            rf"model: got token_embedding.weight \({V + 1}, 8\); want token_embedding.weight \({V}, 8\), as its",
        ),
        (normed, "model: got blocks.0.ffn.up.weight missing; want"),
        (
            lambda model: model.to("meta"),
            "model: got token_embedding.weight on the meta device; want weights in memory",
        ),
        (tied_by_hand, "model: got token_embedding.weight and head.weight as one; want .*tie_embeddings=True"),
    ],
)
def test_what_could_not_be_read_again_is_not_saved(tmp_path, change, said):
    model = LanguageModel(config_of(tie_embeddings=False))
    change(model)
    with pytest.raises(ValueError, match=said):
        model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_paths_that_are_no_folder(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(ValueError, match="folder: got .*file, a file; want a folder"):
        MODEL.save_pretrained(tmp_path / "file")
    for use in (MODEL.save_pretrained, LanguageModel.from_pretrained):
        with pytest.raises(ValueError, match="folder: got None; want a path"):
            use(None)
        with pytest.raises(ValueError, match="folder: got ''; want a path; the current folder is '.'"):
            use("")


@pytest.fixture
def saved(tmp_path):
    LanguageModel(config_of("boosted")).save_pretrained(tmp_path)
    return tmp_path


def refuses(folder, *parts):
    with pytest.raises(ValueError) as caught:
        LanguageModel.from_pretrained(folder)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_missing_files(saved, tmp_path):
    refuses(tmp_path / "nowhere", "nowhere: got no config.json")
    (saved / "model.safetensors").unlink()
    refuses(saved, "got no model.safetensors in it")


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_weights_cut_off(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refuses(saved, "model.safetensors: got a damaged file")


def test_a_flipped_bit(saved):
    path = saved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-17] ^= 4
    path.write_bytes(content)
    refuses(saved, "weights that do not add up to their checksum")


def test_a_flipped_bit_in_the_header(tmp_path):
    """The file is named, or nothing was lost: a sample, as all of them take long."""
    config = ModelConfig(vocab_size=3, max_length=2, d_model=2, n_layers=1, n_heads=1, positions="rotary", bias=False)
    model = LanguageModel(config)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    said = {}
    bits = range(8 * (8 + int.from_bytes(whole[:8], "little")))
    for place in random.Random(0).sample(bits, 1000):
        content = bytearray(whole)
        content[place // 8] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            again = LanguageModel.from_pretrained(tmp_path)
        except ValueError as error:
            name, _, got = str(error).partition(": got ")
            assert name == str(path), error
            said[got[:20]] = place
        else:
            assert again.config == config
            for one, other in zip(model.state_dict().items(), again.state_dict().items(), strict=True):
                assert one[0] == other[0] and one[1].dtype == other[1].dtype and torch.equal(one[1], other[1])
    assert {"a damaged file (Erro", "a damaged file (its ", "the file of another ", "the weights of anoth"} <= set(said)


def test_equal_models_make_equal_files(tmp_path):
    """In one process, and in another whose dicts are ordered otherwise."""
    model = LanguageModel(config_of("mixed"), seed=4)
    files = set()
    for _ in range(8):
        model.save_pretrained(tmp_path)
        files.add(tuple((tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")))
    code = (
        "import sys; from gbattn.language_model import LanguageModel, ModelConfig\n"
        f"LanguageModel(ModelConfig.from_dict({model.config.to_dict()}), seed=4).save_pretrained(sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True, env=os.environ | {"PYTHONHASHSEED": "3"})
    files.add(tuple((tmp_path / name).read_bytes() for name in ("config.json", "model.safetensors")))
    assert len(files) == 1


def rewrite(folder, config, weights, metadata=None):
    """Files from elsewhere, with a checksum that fits."""
    from safetensors.torch import save_file

    facts = dict(format=language_model._FORMAT, config=config, sha256=language_model._checksum(weights))
    metadata = json.dumps(facts) if metadata is None else metadata
    save_file(weights, folder / "model.safetensors", metadata={"gbattn": metadata})
    (folder / "config.json").write_text(json.dumps({"format": language_model._FORMAT} | config))


WRONG = [
    None, True, -1, 0, 1.5, 10**9, 2**31, 2**62, 2**64, 10**400, math.nan, math.inf, "False", "8", "", [], [1],
    {"a": 1}, {"rounds": 10**9}, {"rounds": "2"}, {"n_kv_heads": 2**64}, {"rotary": 10**400}, {"0": 3}, {"5": {}},
    {"00": {}, "0": {}}, {"9" * 5000: {}}, {"0": {"d_ffn": 10**30}}, {"0": {"norm": []}},
    {"0": {"attention": "linear"}}, {"0": {"attention_options": {"rounds": 10**9}}},
]  # fmt: skip


@pytest.mark.parametrize("field", config_of().to_dict())
def test_a_config_from_elsewhere(tmp_path, field):
    """Whatever a field holds, it is read or the file is named, at once."""
    model = LanguageModel(config_of("boosted"))
    whole = model.config.to_dict()
    for wrong in WRONG:
        rewrite(tmp_path, whole | {field: wrong}, model.state_dict())
        try:
            LanguageModel.from_pretrained(tmp_path)
        except ValueError as error:
            assert str(error).startswith(str(tmp_path)), error
        else:  # of those that change no shape
            assert field in ("d_ffn", "dropout", "final_norm", "init_std", "tie_embeddings", "bias"), wrong
    rewrite(tmp_path, whole | dict(n_layers=10**12), model.state_dict())
    refuses(tmp_path, "config.json: got n_layers = 1000000000000; want at most")


def test_weights_of_a_dtype_that_no_model_computes_in(tmp_path):
    model = LanguageModel(config_of())
    config, weights = model.config.to_dict(), model.state_dict()
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        rewrite(tmp_path, config, weights | {"blocks.1.ffn.up.bias": weights["blocks.1.ffn.up.bias"].to(dtype)})
        refuses(tmp_path, f"model.safetensors: got blocks.1.ffn.up.bias of {dtype}; want torch.float64, torch.float32")
    model.final_norm.double()  # one dtype is not asked for
    model.save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).final_norm.weight.dtype == F64
    with pytest.raises(ValueError, match="model: got .* of torch.float8_e4m3fn; want torch.float64"):
        model.to(torch.float8_e4m3fn).save_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ("[" * 100_000, "a damaged file (its metadata: maximum recursion depth"),
        ("{", "a damaged file (its metadata: "),
        ("[]", "the file of another program or version"),
        ('{"format": ["gbattn language model 2"]}', "the file of another program or version"),
        ('{"format": "gbattn language model 2", "sha256": 3}', "weights that do not add up to their checksum"),
    ],
)
def test_metadata_from_elsewhere(tmp_path, metadata, said):
    model = LanguageModel(config_of())
    rewrite(tmp_path, model.config.to_dict(), model.state_dict(), metadata)
    refuses(tmp_path, f"model.safetensors: got {said}")


def test_a_shape_that_torch_cannot_hold(saved):
    path = saved / "model.safetensors"
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + size]), content[8 + size :]
    header["empty"] = dict(dtype="F32", shape=[0, 2**63], data_offsets=[len(body)] * 2)
    header = json.dumps(header).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    refuses(saved, "model.safetensors: got a damaged file")


def test_a_pickle_is_not_read(saved):
    torch.save({"x": torch.zeros(3)}, saved / "model.safetensors")
    refuses(saved, "a damaged file")


def test_weights_of_another_program(saved):
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3)}, saved / "model.safetensors")
    refuses(saved, "the file of another program or version")


def test_weights_and_config_of_two_models(saved, tmp_path):
    LanguageModel(config_of()).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").replace(saved / "config.json")
    refuses(saved, "the weights of another config than that in config.json")


def test_weights_that_do_not_fit_their_own_config(tmp_path):
    weights = LanguageModel(config_of("boosted")).state_dict()
    rewrite(tmp_path, config_of("boosted", n_layers=3).to_dict(), weights)
    refuses(tmp_path, "blocks.2.attention_norm.weight missing", "as config.json says")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "got JSONDecodeError: "),
        ("[1]", "the file of another program"),
        ('{"format": "somebody else"}', "the file of another program"),
        ('{"format": "gbattn language model 2"}', "no vocab_size"),
        ('{"format": "gbattn language model 2", "vocab_size": 4, "wings": 2}', "the key 'wings'"),
        ('{"format": "gbattn language model 2", "vocab_size": -4}', "vocab_size: got -4"),
        (
            f'{{"format": "gbattn language model 2", "vocab_size": 4, "d_ffn": {2**62}}}',
            "d_ffn: got 4611686018427387904",
        ),
        ("[" * 100_000, "got RecursionError: "),
    ],
)
def test_a_damaged_config(saved, content, said):
    (saved / "config.json").write_text(content)
    refuses(saved, "config.json", said)


def test_a_save_that_is_cut_off_leaves_the_old_model(saved, monkeypatch):
    before = LanguageModel.from_pretrained(saved)

    def full_disk(number):
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError):
        LanguageModel(config_of("boosted"), seed=9).save_pretrained(saved)
    monkeypatch.undo()
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(LanguageModel.from_pretrained(saved).head_weight, before.head_weight)


# ---- The config ----


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(sorted(KINDS)),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["pre", "post", "none"]),
    st.sampled_from([None, True, False]),
)
def test_a_config_goes_through_json(kind, tied, bias, norm, final_norm):
    config = config_of(kind, tie_embeddings=tied, bias=bias, norm=norm, final_norm=final_norm)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_linear_attention_that_may_turn():
    """Without positive features, as in chapter 1."""
    options = {"feature_map": "identity"}
    config = config_of(attention="linear", positions="rotary", attention_options=options)
    assert LanguageModel(config)(tokens_of()).isfinite().all()


def test_nobody_changes_a_config_from_outside():
    options, overrides = {"rounds": 2}, {0: {"dropout": 0.5}}
    config = config_of(attention="boosted", attention_options=options, overrides=overrides)
    options["rounds"], overrides[0]["dropout"] = 7, 0.0
    assert config.attention_options == {"rounds": 2} and config.overrides == {0: {"dropout": 0.5}}
    with pytest.raises(AttributeError):
        config.d_model = 16


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(vocab_size=0), "vocab_size: got 0; want a positive integer"),
        (dict(max_length=2.5), "max_length: got 2.5; want a positive integer"),
        (dict(d_model=True), "d_model: got True"),
        (dict(n_layers=-1), "n_layers: got -1"),
        (dict(n_heads=3), "n_heads: got 3; want a divisor of d_model = 8"),
        (dict(d_ffn=0), "d_ffn: got 0"),
        (dict(d_ffn=2**62), "d_ffn: got 4611686018427387904; want None or a positive integer up to 16,777,216"),
        (dict(overrides={"0": {"d_ffn": 10**30}}), "d_ffn: got 1000000000000000000000000000000; want None or a"),
        (dict(vocab_size=2**62), "vocab_size: got 4611686018427387904; want a positive integer up to 16,777,216"),
        (dict(max_length=2**62), "max_length: got 4611686018427387904; want a positive integer up to 16,777,216"),
        (dict(d_model=10**9), "d_model: got 1000000000; want a positive integer up to 1,048,576"),
        (dict(n_layers=10**9), "n_layers: got 1000000000; want a positive integer up to 1,000"),
        (dict(attention="boosted", attention_options={"rounds": 10**8}), "rounds: got 100000000; want a positive"),
        (dict(attention="twicing", attention_options={"rounds": 10**8}), "rounds: got 100000000; want a positive"),
        (
            dict(attention="boosted", attention_options={"rounds": 100}, n_layers=1000),
            "n_layers: got 1000 of 507 modules; want at most 100,000 modules in all",
        ),
        (dict(bias="False"), "bias: got 'False'; want True or False"),
        (dict(attention="three_times"), "attention: got 'three_times'; want one of 'multi_head'"),
        (dict(norm="late"), "norm: got 'late'"),
        (dict(normalizer="batchnorm"), "normalizer: got 'batchnorm'"),
        (dict(ffn="tanh"), "ffn: got 'tanh'"),
        (dict(positions="sinus"), "positions: got 'sinus'; want one of 'learned', 'rotary'"),
        (dict(dropout=1.0), "dropout: got 1.0"),
        (dict(init_std=0.0), "init_std: got 0.0; want a positive, finite number"),
        (dict(tie_embeddings=1), "tie_embeddings: got 1; want True or False"),
        (dict(bias="yes"), "bias: got 'yes'"),
        (dict(final_norm=0), "final_norm: got 0; want None or True or False"),
        (dict(attention_options=[1]), "attention_options: got [1]; want a dict"),
        (dict(attention_options={"wings": 2}), "attention_options: got 'wings'; want options that 'multi_head' takes"),
        (dict(attention_options={"causal": False}), "attention_options: got 'causal'; want no 'causal'"),
        (dict(attention_options={"dropout": torch.zeros(1)}), "want what JSON can write"),
        (dict(attention_options={"bias": False}), "attention_options: got 'bias'; want no 'bias'"),
        (dict(attention_options={"rotary": 1e4}), "want none with positions='learned'"),
        (dict(attention_options={"rotary": None}, positions="rotary"), "want a base with positions='rotary'"),
        (
            dict(attention="linear", positions="rotary"),
            "positions: got 'rotary' with attention='linear', whose features must stay positive; want 'learned', or",
        ),
        (
            dict(overrides={1: {"attention": "linear"}}, positions="rotary", attention_options={"rotary": 100.0}),
            "positions: got 'rotary' with attention='linear'",
        ),
        (dict(attention="twicing", attention_options={"dropout": 0.1}), "dropout: got 0.1; want 0"),
        (dict(overrides=[{}]), "overrides: got [{}]; want a dict of layers"),
        (dict(overrides={2: {}}), "overrides: got the layer 2; want layers from 0 to 1"),
        (dict(overrides={"-1": {}}), "overrides: got the layer '-1'"),
        (dict(overrides={0: {"d_model": 4}}), "overrides: got the key 'd_model'; want one of attention"),
        (dict(overrides={0: "post"}), "overrides: got 'post'; want a dict"),
        (dict(overrides={1: {"norm": "late"}}), "norm: got 'late'"),
    ],
)
def test_config_errors(changes, said):
    with pytest.raises(ValueError) as caught:
        ModelConfig(**SMALL | changes)
    assert said in str(caught.value)


# ---- Errors of the model ----


def calls(model, tokens):
    caches = model.make_caches(2)
    long = torch.zeros(2, T + 1, dtype=torch.int64)
    return {
        "tokens: got shape (9,); want (B, T) with T ≥ 1": lambda: model(tokens[0]),
        "tokens: got shape (2, 0)": lambda: model(tokens[:, :0]),
        "tokens: got dtype torch.float32": lambda: model(tokens.float()),
        f"tokens: got 0 to {V}; want numbers from 0 to {V - 1}": lambda: model(torch.tensor([[0, V]])),
        "tokens: got -1 to 2": lambda: model(torch.tensor([[2, -1]])),
        f"tokens: got {T + 1} of them; want at most max_length = {T}": lambda: model(long),
        "targets: got shape (2, 8); want (B, T) with B = 2, T = 9": lambda: model(tokens, tokens[:, 1:]),
        "targets: got dtype torch.int32; want torch.int64": lambda: model(tokens, tokens.int()),
        f"targets: got -1 to {V}": lambda: model(tokens[:1, :3], torch.tensor([[-1, -100, V]])),
        "reduction: got 'none'; want one of 'mean', 'sum'": lambda: model(tokens, tokens, reduction="none"),
        "reduction: got 'max'; want one of 'mean', 'sum'": lambda: model(tokens, reduction="max"),
        "logits_to_keep: got 0; want None or, without targets, 1 to 9": lambda: model(tokens, logits_to_keep=0),
        "logits_to_keep: got 10; want": lambda: model(tokens, logits_to_keep=10),
        "logits_to_keep: got True; want": lambda: model(tokens, logits_to_keep=True),
        "logits_to_keep: got 3; want None or, without targets": lambda: model(tokens, tokens, logits_to_keep=3),
        "h: got list; want (…, D) with D = 8": lambda: model.logits([1.0]),
        "h: got device meta; want cpu, as the model": lambda: model.logits(torch.zeros(2, 8, device="meta")),
        "h: got dtype torch.float32; want torch.float64, as the model": lambda: model.logits(torch.zeros(2, 8)),
        "cache: got KeyValueCache; want a list of 2": lambda: model(tokens, cache=caches[0]),
        "cache: got [int, int]; want a list of 2, from make_caches": lambda: model(tokens, cache=[1, 2]),
        "cache: got [KeyValueCache]; want a list of 2": lambda: model(tokens, cache=caches[:1]),
        "cache: got [<gbattn.cache.KeyValueCache": lambda: model.generate(tokens, 2, cache=caches),
        "cache: got 1; want True, False or 'static'": lambda: model.generate(tokens, 2, cache=1),
        "cache: got 'False'; want True, False or 'static'": lambda: model.generate(tokens, 2, cache="False"),
        "top_k: got True": lambda: model.generate(tokens, 2, top_k=True),
        "device: got 'nowhere' (": lambda: LanguageModel(model.config, device="nowhere"),
        "dtype: got torch.int64; want torch.float64, torch.float32": lambda: LanguageModel(
            model.config, dtype=torch.int64
        ),
        "dtype: got 'float32'; want": lambda: LanguageModel.from_pretrained("somewhere", dtype="float32"),
        "tokens: got device meta; want cpu, as the model": lambda: model(tokens.to("meta")),
        "prompt: got device meta; want cpu": lambda: model.generate(tokens.to("meta"), 2),
        "targets: got device meta; want cpu": lambda: model(tokens, tokens.to("meta")),
        "positions: got device meta; want cpu": lambda: model(tokens, positions=torch.arange(9, device="meta")),
        "lengths: got device meta; want cpu": lambda: model.generate(
            tokens, 2, lengths=torch.tensor([9, 9], device="meta")
        ),
        "reduction: got 'all'; want one of 'mean', 'sum'": lambda: next_token_loss(
            torch.zeros(2, 3), torch.zeros(5, 3), torch.tensor([0, 4]), reduction="all"
        ),
        "weight: got shape (5, 3); want (V, D) with D = 4, as h": lambda: next_token_loss(
            torch.zeros(2, 4), torch.zeros(5, 3), torch.tensor([0, 4])
        ),
        "targets: got 0 to 5; want numbers from 0 to 4, or -100": lambda: next_token_loss(
            torch.zeros(3, 2), torch.zeros(5, 2), torch.tensor([0, 5, -100])
        ),
        "weight: got device meta; want cpu, as h": lambda: next_token_loss(
            torch.zeros(3, 2), torch.zeros(5, 2, device="meta"), torch.tensor([0, 4, 1])
        ),
        "targets: got device meta; want cpu, as h": lambda: next_token_loss(
            torch.zeros(3, 2), torch.zeros(5, 2), torch.zeros(3, dtype=torch.int64, device="meta")
        ),
        "weight: got dtype torch.bfloat16; want torch.float32, as h": lambda: next_token_loss(
            torch.zeros(300, 2), torch.zeros(4096, 2, dtype=torch.bfloat16), torch.zeros(300, dtype=torch.int64)
        ),
        "h: got dtype torch.int64; want a floating dtype": lambda: next_token_loss(
            torch.zeros(3, 2, dtype=torch.int64), torch.zeros(5, 2), torch.tensor([0, 4, 1])
        ),
        "h: got list; want (N, D)": lambda: next_token_loss([1.0], torch.zeros(5, 2), torch.tensor([0])),
        "logits: got list; want (…, V)": lambda: next_token_probabilities([1.0]),
        "logits: got shape (2, 0); want": lambda: next_token_probabilities(torch.zeros(2, 0)),
        "logits: got dtype torch.complex64": lambda: next_token_probabilities(torch.zeros(2, dtype=torch.complex64)),
        "logits: got shape ()": lambda: next_token_probabilities(torch.tensor(1.0)),
        "seed: got (1, 2); want an integer, or a list of them": lambda: model.generate(tokens, 2, seed=(1, 2)),
        "positions: got shape (3,)": lambda: model(tokens, positions=torch.arange(3)),
        "positions: got dtype torch.float32": lambda: model(tokens, positions=torch.arange(9.0)),
        f"positions: got 12 to 20; want numbers from 0 to {T - 1}": lambda: model(
            tokens, positions=torch.arange(12, 21)
        ),
        "prompt: got shape (9,)": lambda: model.generate(tokens[0], 2),
        "max_new_tokens: got 0; want a positive integer": lambda: model.generate(tokens, 0),
        f"max_new_tokens: got 9 tokens and 12 more; want at most max_length = {T}": lambda: model.generate(tokens, 12),
        "temperature: got -0.5": lambda: model.generate(tokens, 2, temperature=-0.5),
        "temperature: got nan": lambda: model.generate(tokens, 2, temperature=math.nan),
        "top_k: got 0": lambda: model.generate(tokens, 2, top_k=0),
        "top_p: got 1.5": lambda: model.generate(tokens, 2, top_p=1.5),
        "lengths: got [9, 0]; want one real token or more": lambda: model.generate(
            tokens, 2, lengths=torch.tensor([9, 0])
        ),
        "lengths: got list; want (B,)": lambda: model.generate(tokens, 2, lengths=[9, 9]),
        "lengths: got [9, 10]": lambda: model.generate(tokens, 2, lengths=torch.tensor([9, 10])),
        "lengths: got shape (1,); want (B,) with B = 2": lambda: model.generate(tokens, 2, lengths=torch.tensor([9])),
        "seed: got None; want an integer": lambda: model.generate(tokens, 2, seed=None),
        "seed: got 1 seeds; want one for each of 2 sequences": lambda: model.generate(tokens, 2, seed=[3]),
        "seed: got 0.5; want an integer": lambda: model.generate(tokens, 2, seed=[3, 0.5]),
        f"end: got {V}": lambda: model.generate(tokens, 2, end=V),
        "config: got {}; want a ModelConfig": lambda: LanguageModel({}),
        "seed: got 1.5; want an integer": lambda: LanguageModel(model.config, seed=1.5),
        "T: got 0": lambda: model_cost(model.config, 0),
        "count_masked: got 'False'; want True or False": lambda: model_cost(model.config, count_masked="False"),
    }


MODEL, TOKENS = model_of(), tokens_of(2, 9)


@pytest.mark.parametrize("said", calls(MODEL, TOKENS))
def test_model_errors(said):
    with pytest.raises(ValueError) as caught:
        calls(MODEL, TOKENS)[said]()
    assert str(caught.value).startswith(said)


def test_the_past_counts_too():
    caches = MODEL.make_caches(2, T + 4)
    with torch.no_grad():
        MODEL(tokens_of(2, T - 1), cache=caches)
        MODEL(tokens_of(2, 1), cache=caches)
        with pytest.raises(ValueError, match=f"tokens: got {T + 1} of them; want at most max_length = {T}"):
            MODEL(tokens_of(2, 1), cache=caches)


def test_importing_loads_torch_and_numpy_only():
    code = (
        "import sys, gbattn.language_model\n"
        "heavy = {'sklearn', 'matplotlib', 'safetensors', 'tokenizers', 'datasets', 'accelerate', 'scipy', 'pandas'}\n"
        "print(sorted(heavy & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- as few kernels as the arithmetic needs ----


class TextbookLayer(nn.Module):
    def __init__(self, D, H):
        super().__init__()
        self.H, self.qkv, self.out = H, nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norms = nn.ModuleList((nn.LayerNorm(D), nn.LayerNorm(D)))
        self.ffn = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))

    def forward(self, h):
        q, k, v = (x.unflatten(-1, (self.H, -1)).transpose(1, 2) for x in self.qkv(self.norms[0](h)).chunk(3, -1))
        F = nnf.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        h = h + self.out(F)
        return h + self.ffn(self.norms[1](h))


class TextbookModel(nn.Module):
    """A GPT as it is usually written, with one product for q, k and v."""

    def __init__(self, T, D, H, layers, V):
        super().__init__()
        self.token, self.position = nn.Embedding(V, D), nn.Embedding(T, D)
        self.blocks = nn.Sequential(*(TextbookLayer(D, H) for _ in range(layers)))
        self.norm = nn.LayerNorm(D)

    def forward(self, tokens, targets):
        h = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits = self.norm(self.blocks(h)) @ self.token.weight.T
        return nnf.cross_entropy(logits.flatten(0, 1), targets.flatten())


def kernels_of(model, tokens, targets):
    """Operations of a forward pass, and of a backward pass."""
    learned = list(model.parameters())
    forward = count_kernels(model, tokens, targets)
    both = count_kernels(lambda: torch.autograd.grad(model(tokens, targets), learned))
    return forward, both - forward


def test_a_step_dispatches_no_more_kernels_than_a_textbook():
    layers, tokens = 4, torch.randint(V, (2, 9))
    tokens, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    textbook = kernels_of(TextbookModel(8, 16, 2, layers, V), tokens, targets)
    config = ModelConfig(vocab_size=V, max_length=8, d_model=16, n_layers=layers, n_heads=2)
    ours = kernels_of(LanguageModel(config), tokens, targets)
    copies = 2 * layers  # of weights and biases, which the textbook has as one
    assert ours[0] <= textbook[0] + copies and ours[1] <= textbook[1]
    # A correction adds x − F, a product and two copies for it, an attention, three for the gate, and a sum.
    boosted = kernels_of(LanguageModel(replace(config, attention="boosted")), tokens, targets)
    assert boosted[0] == ours[0] + 9 * layers


def test_a_call_reads_no_value_on_the_way(monkeypatch):
    """To read one would wait for a GPU; ranges of token ids are looked into once torch has refused them."""
    read = []
    for name in ("item", "tolist", "__bool__", "__int__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, plain=plain: read.append(x) or plain(x))
    config = ModelConfig(vocab_size=V, max_length=8, d_model=16, n_layers=2, n_heads=2, attention="boosted")
    model, tokens = LanguageModel(config), torch.zeros(2, 8, dtype=torch.int64)
    read.clear()
    model(tokens, tokens).backward()
    assert not read


def test_a_config_is_a_key():
    shape = dict(vocab_size=8, d_model=8, n_heads=2, attention="boosted")
    of = lambda **options: ModelConfig(**shape, attention_options=options)
    one, same, other = of(rounds=2, gate="head"), of(gate="head", rounds=2), of(rounds=3, gate="head")
    assert one == same and hash(one) == hash(same) and {one: 1}[same] == 1
    assert {one: 1, other: 2}[other] == 2


@torch.no_grad()
def test_a_head_that_is_not_plain_is_called_for_logits_and_loss():
    model = LanguageModel(ModelConfig(vocab_size=20, d_model=8, n_layers=1, n_heads=2, tie_embeddings=False))
    tokens = torch.arange(12).view(2, 6)
    plain = model(tokens), model(tokens, tokens)
    model.head.register_forward_hook(lambda module, args, output: 2 * output)
    assert torch.equal(model(tokens), 2 * plain[0])
    assert not torch.equal(model(tokens, tokens), plain[1])
    assert torch.equal(model(tokens, tokens), model.outputs(tokens, tokens).loss)
