"""Chapter 13: the claims with their mutants, decoding, the loss, weights by name, files and their faults, errors."""

import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from claims import Disagreement, claim, compare
from gbattn import layers
from gbattn.attention import alibi, padding_mask, sliding_window
from gbattn.cost import count_flops, count_kernels, count_saved_bytes
from gbattn.ground.weights import write_weights
from gbattn.head import loss_of_logits, next_token_probabilities
from gbattn.language_model import (
    LanguageModel,
    ModelConfig,
    model_cost,
    parameter_count,
)
from gbattn.layers import MultiHeadAttention, register
from small_models import F64, KINDS, LEARNED, ROTARY, SMALL, T, V, config_of, model_of, tokens_of

# ---- The claims ----


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
    monkeypatch.setitem(layers.LAYERS, "own", Own)
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
    with refused("attention", "cache="):
        model.generate(tokens, 2)
    assert model.generate(tokens, 2, cache=False).shape == (1, 5)


@pytest.mark.parametrize("forget", ["extra", "kept", "unsaved"])
def test_a_layer_that_leaves_memory_as_it_found_it(own, forget):
    with refused(f"blocks.0.attention.{forget}"):
        LanguageModel(own(forget))


def test_a_buffer_of_truth_values(own):
    with refused("blocks.0.attention.seen"):
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


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: loss_of_logits(torch.ones(2, 3, 4), torch.ones(2, 2).long()), "targets"),
        (lambda: loss_of_logits(torch.ones(2, 4), torch.tensor([1, 4])), "targets"),
        (lambda: loss_of_logits(torch.ones(2, 4), torch.ones(2)), "targets"),
        (lambda: loss_of_logits(torch.ones(2, 4).long(), torch.ones(2).long()), "logits"),
        (lambda: model_of().outputs(tokens_of(), traces=1), "traces"),
        (lambda: model_of().outputs(tokens_of(), tokens_of(2)), "targets"),
        (lambda: model_of()(tokens_of(), padding=torch.ones(3, 9)), "padding"),
        (lambda: model_of()(tokens_of(), padding=torch.ones(3, 8).long()), "padding"),
    ],
)
def test_errors_of_outputs_and_padding_name_what_is_wrong(call, argument):
    with refused(argument):
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
        how = {}
        if padded:
            S = seen.shape[1]
            mask = padding_mask(lengths + step, S, side="left")
            how = dict(mask=mask, positions=torch.arange(S - unread.shape[1], S).expand(2, -1))
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
    assert [block.attention.rotary for block in LanguageModel(config).blocks] == [500.0, 500.0]


@torch.no_grad()
def test_caches_out_of_step_are_refused():
    model, tokens = model_of(overrides={1: {"attention": "linear"}}), tokens_of(1, 3)
    caches = model.make_caches(1)
    with pytest.raises(ValueError):
        model(tokens, cache=caches, mask=torch.zeros(1, 3))
    with refused("cache"):
        model(tokens, cache=caches)
    with refused("cache"):
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
    with refused("targets"):
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
    ("told", "argument"),
    [
        (dict(documents=PACKED[:, :3]), "documents"),
        (dict(documents=PACKED.double()), "documents"),
        (dict(documents=PACKED, positions=torch.arange(17)), "positions"),
    ],
)
def test_bad_documents_are_named(told, argument):
    with refused(argument):
        model_of()(packed_tokens(), **told)


# ---- The loss ----


def test_the_model_takes_its_loss_from_its_logits():
    for tied in (True, False):
        model, tokens = model_of("boosted", tie_embeddings=tied), tokens_of()
        targets = tokens_of(seed=2)
        targets[0, :4] = -100
        scored = nnf.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        assert abs(model(tokens, targets, reduction="sum") - scored) < 1e-10
        assert abs(model(tokens, targets) - scored / (targets != -100).sum()) < 1e-10


# ---- Drawing ----


def test_the_smallest_temperature_and_share():
    logits = torch.tensor([0.0, 3.0, 1.0])
    for options in (dict(temperature=1e-46), dict(temperature=5e-324), dict(top_p=1e-50), dict(top_p=5e-324)):
        assert next_token_probabilities(logits, **options).tolist() == [0, 1, 0]
    model, tokens = model_of("boosted"), tokens_of(2, 4)
    greedy = model.generate(tokens, 6, temperature=0)
    assert torch.equal(model.generate(tokens, 6, temperature=1e-50), greedy)


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
    with refused("prompt"):
        model.train().generate(tokens + V, 2)
    with refused("prompt"):
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
    with refused("model"):
        model.generate(tokens, 3, **options)


def test_what_follows_an_end_is_not_looked_at():
    """A place that is not finite, first read after the sequence has ended."""
    model, tokens = model_of(), tokens_of(2, 4)
    end = model.generate(tokens, 1, temperature=0)[0, -1].item()
    with torch.no_grad():
        model.position_embedding.weight[6] = math.nan
    assert model.generate(tokens[:1].repeat(2, 1), 6, temperature=0, end=end).shape[1] == 5
    with refused("model"):
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


@pytest.mark.parametrize("change", [replaced, normed, tied_by_hand, lambda model: model.to("meta")])
def test_what_could_not_be_read_again_is_not_saved(tmp_path, change):
    model = LanguageModel(config_of(tie_embeddings=False))
    change(model)
    with refused("model"):
        model.save_pretrained(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize("folder", [None, "", __file__])
def test_a_path_that_is_no_folder(folder):
    with refused("folder"):
        MODEL.save_pretrained(folder)


@pytest.mark.parametrize("folder", [None, ""])
def test_no_path(folder):
    with refused("folder"):
        LanguageModel.from_pretrained(folder)


@pytest.fixture
def saved(tmp_path):
    LanguageModel(config_of("boosted")).save_pretrained(tmp_path)
    return tmp_path


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


FORMAT = "gbattn language model 2"


def rewrite(folder, config, weights):
    """Files from elsewhere, with a checksum that fits."""
    write_weights(folder, FORMAT, config, weights)


def refuses(folder, name):
    """Nothing is read, and the file is named."""
    with refused(str(folder / name)) as caught:
        LanguageModel.from_pretrained(folder)
    return caught.value


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
    refuses(tmp_path, "config.json")


def test_weights_of_a_dtype_that_no_model_computes_in(tmp_path):
    model = LanguageModel(config_of())
    config, weights = model.config.to_dict(), model.state_dict()
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn):
        rewrite(tmp_path, config, weights | {"blocks.1.ffn.up.bias": weights["blocks.1.ffn.up.bias"].to(dtype)})
        assert str(dtype) in refuses(tmp_path, "model.safetensors").got
    model.final_norm.double()  # one dtype is not asked for
    model.save_pretrained(tmp_path)
    assert LanguageModel.from_pretrained(tmp_path).final_norm.weight.dtype == F64
    with refused("model"):
        model.to(torch.float8_e4m3fn).save_pretrained(tmp_path)


def test_weights_and_config_of_two_models(saved, tmp_path):
    LanguageModel(config_of()).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "config.json").replace(saved / "config.json")
    refuses(saved, "model.safetensors")


def test_weights_that_do_not_fit_their_own_config(tmp_path):
    weights = LanguageModel(config_of("boosted")).state_dict()
    rewrite(tmp_path, config_of("boosted", n_layers=3).to_dict(), weights)
    assert "blocks.2" in refuses(tmp_path, "model.safetensors").got


@pytest.mark.parametrize(
    "fields",
    [{}, {"vocab_size": 4, "wings": 2}, {"vocab_size": -4}, {"vocab_size": 4, "d_ffn": 2**62}, {"vocab_size": [4]}],
    ids=str,
)
def test_a_damaged_config(saved, fields):
    (saved / "config.json").write_text(json.dumps({"format": FORMAT} | fields))
    refuses(saved, "config.json")


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
    ("changes", "argument"),
    [
        (dict(vocab_size=0), "vocab_size"),
        (dict(max_length=2.5), "max_length"),
        (dict(d_model=True), "d_model"),
        (dict(n_layers=-1), "n_layers"),
        (dict(n_heads=3), "n_heads"),
        (dict(d_ffn=0), "d_ffn"),
        (dict(overrides={"0": {"d_ffn": 10**30}}), "d_ffn"),
        (dict(attention="boosted", attention_options={"rounds": 10**8}), "rounds"),
        (dict(attention="boosted", attention_options={"rounds": 100}, n_layers=1000), "n_layers"),
        (dict(bias="False"), "bias"),
        (dict(attention="three_times"), "attention"),
        (dict(norm="late"), "norm"),
        (dict(normalizer="batchnorm"), "normalizer"),
        (dict(ffn="tanh"), "ffn"),
        (dict(positions="sinus"), "positions"),
        (dict(dropout=1.0), "dropout"),
        (dict(init_std=0.0), "init_std"),
        (dict(tie_embeddings=1), "tie_embeddings"),
        (dict(final_norm=0), "final_norm"),
        (dict(attention_options=[1]), "attention_options"),
        (dict(attention_options={"wings": 2}), "attention_options"),
        (dict(attention_options={"causal": False}), "attention_options"),
        (dict(attention_options={"dropout": torch.zeros(1)}), "attention_options"),
        (dict(attention_options={"bias": False}), "attention_options"),
        (dict(attention_options={"rotary": 1e4}), "attention_options"),
        (dict(attention_options={"rotary": None}, positions="rotary"), "attention_options"),
        (dict(attention="linear", positions="rotary"), "positions"),
        (dict(overrides={1: {"attention": "linear"}}, positions="rotary"), "positions"),
        (dict(d_model=6, positions="rotary"), "positions"),  # heads of width 3 do not turn in pairs
        (
            dict(overrides={1: {"attention": "linear"}}, positions="rotary", attention_options={"rotary": 100.0}),
            "rotary",
        ),
        (dict(positions="rotary", attention_options={"rotary": -1.0}), "rotary"),
        (dict(positions="rotary", overrides={1: {"attention_options": {"rotary": -1.0}}}), "rotary"),
        (dict(attention="twicing", attention_options={"dropout": 0.1}), "dropout"),
        (dict(overrides=[{}]), "overrides"),
        (dict(overrides={2: {}}), "overrides"),
        (dict(overrides={"-1": {}}), "overrides"),
        (dict(overrides={0: {"d_model": 4}}), "overrides"),
        (dict(overrides={0: "post"}), "overrides"),
        (dict(overrides={1: {"norm": "late"}}), "norm"),
    ],
)
def test_a_config_names_what_it_refuses(changes, argument):
    with refused(argument):
        ModelConfig(**SMALL | changes)


# ---- Errors of the model ----


MODEL, TOKENS = model_of(), tokens_of(2, 9)
LONG = torch.zeros(2, T + 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("argument", "call"),
    [
        ("tokens", lambda model, tokens: model(tokens[0])),
        ("tokens", lambda model, tokens: model(tokens.float())),
        ("tokens", lambda model, tokens: model(torch.tensor([[0, V]]))),
        ("tokens", lambda model, tokens: model(torch.tensor([[2, -1]]))),
        ("tokens", lambda model, tokens: model(LONG)),
        ("targets", lambda model, tokens: model(tokens, tokens[:, 1:])),
        ("targets", lambda model, tokens: model(tokens, tokens.int())),
        ("targets", lambda model, tokens: model(tokens[:1, :3], torch.tensor([[-1, -100, V]]))),
        ("reduction", lambda model, tokens: model(tokens, tokens, reduction="none")),
        ("reduction", lambda model, tokens: model(tokens, reduction="max")),
        ("logits_to_keep", lambda model, tokens: model(tokens, logits_to_keep=0)),
        ("logits_to_keep", lambda model, tokens: model(tokens, logits_to_keep=10)),
        ("logits_to_keep", lambda model, tokens: model(tokens, tokens, logits_to_keep=3)),
        ("h", lambda model, tokens: model.logits([1.0])),
        ("h", lambda model, tokens: model.logits(torch.zeros(2, 8, device="meta"))),
        ("h", lambda model, tokens: model.logits(torch.zeros(2, 8))),
        ("cache", lambda model, tokens: model(tokens, cache=model.make_caches(2)[0])),
        ("cache", lambda model, tokens: model(tokens, cache=[1, 2])),
        ("cache", lambda model, tokens: model(tokens, cache=model.make_caches(2)[:1])),
        ("cache", lambda model, tokens: model.generate(tokens, 2, cache=model.make_caches(2))),
        ("cache", lambda model, tokens: model.generate(tokens, 2, cache="False")),
        ("top_k", lambda model, tokens: model.generate(tokens, 2, top_k=True)),
        ("device", lambda model, tokens: LanguageModel(model.config, device="nowhere")),
        ("dtype", lambda model, tokens: LanguageModel(model.config, dtype=torch.int64)),
        ("dtype", lambda model, tokens: LanguageModel.from_pretrained("somewhere", dtype="float32")),
        ("tokens", lambda model, tokens: model(tokens.to("meta"))),
        ("prompt", lambda model, tokens: model.generate(tokens.to("meta"), 2)),
        ("targets", lambda model, tokens: model(tokens, tokens.to("meta"))),
        ("positions", lambda model, tokens: model(tokens, positions=torch.arange(9, device="meta"))),
        ("lengths", lambda model, tokens: model.generate(tokens, 2, lengths=torch.tensor([9, 9], device="meta"))),
        ("seed", lambda model, tokens: model.generate(tokens, 2, seed=(1, 2))),
        ("positions", lambda model, tokens: model(tokens, positions=torch.arange(3))),
        ("positions", lambda model, tokens: model(tokens, positions=torch.arange(9.0))),
        ("positions", lambda model, tokens: model(tokens, positions=torch.arange(12, 21))),
        ("prompt", lambda model, tokens: model.generate(tokens[0], 2)),
        ("max_new_tokens", lambda model, tokens: model.generate(tokens, 0)),
        ("max_new_tokens", lambda model, tokens: model.generate(tokens, 12)),
        ("temperature", lambda model, tokens: model.generate(tokens, 2, temperature=-0.5)),
        ("top_p", lambda model, tokens: model.generate(tokens, 2, top_p=1.5)),
        ("lengths", lambda model, tokens: model.generate(tokens, 2, lengths=torch.tensor([9, 0]))),
        ("lengths", lambda model, tokens: model.generate(tokens, 2, lengths=[9, 9])),
        ("lengths", lambda model, tokens: model.generate(tokens, 2, lengths=torch.tensor([9, 10]))),
        ("lengths", lambda model, tokens: model.generate(tokens, 2, lengths=torch.tensor([9]))),
        ("seed", lambda model, tokens: model.generate(tokens, 2, seed=None)),
        ("seed", lambda model, tokens: model.generate(tokens, 2, seed=[3])),
        ("seed", lambda model, tokens: model.generate(tokens, 2, seed=[3, 0.5])),
        ("end", lambda model, tokens: model.generate(tokens, 2, end=V)),
        ("config", lambda model, tokens: LanguageModel({})),
        ("seed", lambda model, tokens: LanguageModel(model.config, seed=1.5)),
        ("T", lambda model, tokens: model_cost(model.config, 0)),
        ("count_masked", lambda model, tokens: model_cost(model.config, count_masked="False")),
    ],
)
def test_a_refused_argument_is_named(argument, call):
    with refused(argument):
        call(MODEL, TOKENS)


def test_the_past_counts_too():
    caches = MODEL.make_caches(2, T + 4)
    with torch.no_grad():
        MODEL(tokens_of(2, T - 1), cache=caches)
        MODEL(tokens_of(2, 1), cache=caches)
        with refused("tokens"):
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
