"""Chapter 11: the claims with their mutants; a block with every placement, normaliser, feed-forward and attention."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as nnf
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

from claims import claim
from gbattn.attention import causal_mask, padding_mask
from gbattn.blocks import (
    NORMALIZERS,
    PLACEMENTS,
    Block,
    Derf,
    DyT,
    FeedForward,
    layer_norm_jacobian,
    make_normalizer,
    no_norm,
    post_norm,
    pre_norm,
    rms_norm_jacobian,
)

F64 = torch.float64
ATTENTIONS, FFNS = ("multi_head", "linear", "twicing", "boosted"), ("gelu", "relu", "swiglu")
NORMS = [(norm, kind) for norm in ("pre", "post") for kind in NORMALIZERS] + [("none", "layernorm")]
ALL = [
    pytest.param(dict(norm=norm, normalizer=kind, ffn=ffn, attention=attention), id=f"{norm}-{kind}-{ffn}-{attention}")
    for (norm, kind), ffn, attention in itertools.product(NORMS, FFNS, ATTENTIONS)
]
FEW = [
    pytest.param(dict(norm=norm, normalizer=kind, ffn=ffn, attention=attention), id=f"{norm}-{kind}-{ffn}-{attention}")
    for (norm, kind), ffn, attention in zip(NORMS, itertools.cycle(FFNS), itertools.cycle(ATTENTIONS))
]


def stirred(module):
    """The module with every weight moved off its start."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return module


def block_of(d_model=8, n_heads=2, **options):
    return stirred(Block(d_model, n_heads, dtype=F64, **options))


def tokens(B=2, T=6, D=8, **made):
    return torch.randn(B, T, D, **({"dtype": F64} | made))


# ---------------------------------------------------------------- claims


class Problem:
    """Vectors of width d with an ε, n steps of a stream, and a generator for more."""

    def __init__(self, seed, d, n, eps, tau):
        self.rng = torch.Generator().manual_seed(seed)
        self.d, self.n, self.eps, self.tau = d, n, eps, tau
        self.x, self.gain = self.normal(d), self.normal(d)

    def normal(self, *size):
        return torch.randn(*size, generator=self.rng, dtype=F64)


def problems(d=(3, 9), n=(1, 5)):
    return st.builds(
        Problem, st.integers(0, 2**31), st.integers(*d), st.integers(*n),
        st.sampled_from([0.0, 1e-5, 1e-2]), st.floats(0.2, 1.5),
    )  # fmt: skip


def heard(parts, what):
    """A list that will hold what each part reads (0) or says (1), in order."""
    notes = []
    for part in parts:
        part.register_forward_hook(lambda part, x, y: notes.append((x[0], y)[what]))
    return notes


def ends(p, shift):
    """The end of a Pre-LN and of a Post-LN stack, and the sums of what was said; the weights moved by `shift`."""
    left, right, h0 = [], [], p.normal(1, 2, 4)
    for norm in ("pre", "post"):
        stack = [Block(4, 2, norm=norm, dtype=F64) for _ in range(p.n)]
        for block in stack:
            block.reset_parameters(p.rng)
        said = heard([part for block in stack for part in (block.attention, block.ffn)], 1)
        sums = heard([part for block in stack for part in (block.attention_norm, block.ffn_norm)], 0)
        with torch.no_grad():
            left.append(nn.Sequential(*stack)(h0))
        if norm == "pre":
            right.append(h0 + sum(said))
        else:
            s = [(u.var(-1, correction=0, keepdim=True) + 1e-5).sqrt() for u in sums]
            weight = lambda k, s=s: 1 / torch.stack(s[k + shift :] or [torch.ones_like(s[0])]).prod(0)
            total = weight(0) * h0 + sum(weight(k) * f for k, f in enumerate(said))
            right.append(total - total.mean(-1, keepdim=True))
    return torch.cat(left), torch.cat(right)


@claim(problems(), tolerance=1e-10, examples=30, mutant=lambda p: ends(p, 1))
def test_prop_weights(p):
    """What arrives is the sum of what was said, under Post-LN divided by every later scale and its own. Mutant: not by
    its own."""
    return ends(p, 0)


def jacobian(function, x):
    return torch.autograd.functional.jacobian(function, x)


def layer_norm_sides(p, mutate):
    ours = layer_norm_jacobian(p.x, p.gain, eps=p.eps)
    plain = layer_norm_jacobian(p.x, eps=p.eps)
    left = [ours, torch.linalg.svdvals(plain)[None], torch.stack([plain.sum(1), plain @ p.x])]
    s = (p.x.var(correction=0) + p.eps).sqrt()
    unit = (p.x - p.x.mean()) / s
    torch_s = jacobian(lambda x: nnf.layer_norm(x, (p.d,), p.gain, eps=p.eps), p.x)
    values = torch.cat([(1 / s).expand(p.d - 2), torch.stack([mutate(p.eps, s), 0 * s])])
    right = [torch_s, values[None], torch.stack([0 * p.x, p.eps / s**3 * s * unit])]
    return torch.cat(left), torch.cat(right)


@claim(problems(), tolerance=1e-9, mutant=lambda p: layer_norm_sides(p, lambda eps, s: 1 / s))
def test_thm_layer_norm(p):
    """The formula against autograd, its singular values and where 𝟏 and x̂ go. Mutant: x̂ passes like any other."""
    return layer_norm_sides(p, lambda eps, s: eps / s**3)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(problems(d=(3, 40)))
def test_the_rank_is_two_less_and_one_less_with_eps(p):
    values = torch.linalg.svdvals(layer_norm_jacobian(p.x, p.gain.abs() + 0.1, eps=p.eps))
    assert (values > 1e-10 * values[0]).sum() == p.d - 2 + (p.eps > 0)


def corrected(p, at):
    h, f = p.normal(p.d), p.normal(p.d)
    norm = nn.LayerNorm(p.d, eps=p.eps, dtype=F64)
    nn.init.normal_(norm.weight, generator=p.rng)
    left = [jacobian(lambda f, place=place: place(h, lambda z: f, norm), f) for place in (pre_norm, post_norm)]
    return torch.cat(left), torch.cat(
        [torch.eye(p.d, dtype=F64), layer_norm_jacobian(at(h, f), norm.weight, eps=p.eps)]
    )


@claim(problems(), tolerance=1e-9, mutant=lambda p: corrected(p, lambda h, f: h))
def test_cor_correction(p):
    """Pre-LN answers a correction with I, Post-LN with the Jacobian at h + f. Mutant: at h."""
    return corrected(p, lambda h, f: h + f)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(problems())
def test_jacobians_of_the_other_normalisers(p):
    """RMSNorm, DyT and Derf against autograd, and RMSNorm's singular values."""
    close = dict(atol=1e-9, rtol=1e-9)
    expected = jacobian(lambda x: nnf.rms_norm(x, (p.d,), p.gain, eps=p.eps), p.x)
    torch.testing.assert_close(rms_norm_jacobian(p.x, p.gain, eps=p.eps), expected, **close)
    s = (p.x.square().mean() + p.eps).sqrt()
    values = torch.linalg.svdvals(rms_norm_jacobian(p.x, eps=p.eps))
    torch.testing.assert_close(values, torch.cat([(1 / s).expand(p.d - 1), (p.eps / s**3)[None]]), **close)
    alpha = 0.3 + p.tau
    z = alpha * p.x
    slopes = {DyT: 1 - torch.tanh(z).square(), Derf: 2 / math.sqrt(math.pi) * torch.exp(-z.square())}
    for kind, slope in slopes.items():
        norm = kind(p.d, alpha=alpha, dtype=F64)
        with torch.no_grad():
            norm.weight.copy_(p.gain)
        torch.testing.assert_close(jacobian(norm, p.x), torch.diag(p.gain * alpha * slope), **close)


# ---------------------------------------------------------------- every block


@pytest.mark.parametrize("options", ALL)
def test_a_block_is_its_parts_in_order(options):
    """Every argument reaches the attention: masks, causality, positions; and the placement is as it says."""
    rotary = {} if options["attention"] == "linear" else {"rotary": 100.0}
    block, x = block_of(attention_options=rotary, **options), tokens()
    told = dict(causal=True, mask=padding_mask(torch.tensor([4, 6]), 6))
    if rotary:
        told["positions"] = 2 * torch.arange(6)
    by_hand = {
        "pre": lambda h, layer, norm: h + layer(norm(h)),
        "post": lambda h, layer, norm: norm(h + layer(h)),
        "none": lambda h, layer, norm: h + layer(h),
    }[options["norm"]]
    h = by_hand(x, lambda z: block.attention(z, **told), block.attention_norm)
    h = by_hand(h, block.ffn, block.ffn_norm)
    assert torch.equal(block(x, **told), h)
    for name in told:  # and each of them matters
        less = {key: value for key, value in told.items() if key != name}
        assert not torch.allclose(block(x, **less), h)


@pytest.mark.parametrize("options", FEW)
@torch.no_grad()
def test_a_block_explains_its_pass_and_knows_a_tokenizers_mask(options):
    block, x, mask = block_of(dropout=0.1, **options).eval(), tokens(), padding_mask(torch.tensor([4, 6]), 6)
    output = block(x, causal=True, mask=mask)
    assert torch.equal(block(x, causal=True, padding=mask[:, 0, 0].long()), output)
    for told in (dict(mask=mask), dict(padding=mask[:, 0, 0])):
        explained, trace = block.explain(x, causal=True, **told)
        assert torch.allclose(explained, output, atol=1e-11, rtol=0)
        before = x if options["norm"] != "pre" else block.attention_norm(x)
        assert torch.allclose(trace.output, block.attention(before, causal=True, mask=mask), atol=1e-11, rtol=0)


@pytest.mark.parametrize("options", ALL)
def test_gradcheck(options):
    block = block_of(4, 2, **options)
    weights = dict(block.named_parameters())

    def output(x, *values):
        return torch.func.functional_call(block, dict(zip(weights, values)), (x,), {"causal": True})

    x = tokens(1, 3, 4).requires_grad_()
    assert torch.autograd.gradcheck(output, (x, *weights.values()), fast_mode=True)


@pytest.mark.parametrize("options", ALL)
@torch.no_grad()
def test_decoding_equals_the_full_pass(options):
    block, x = block_of(**options), tokens(T=7)
    cache = block.make_cache(2, 7)
    parts = [block(part, causal=True, cache=cache) for part in x.split((3, 1, 1, 2), dim=1)]
    assert torch.allclose(torch.cat(parts, 1), block(x, causal=True), atol=1e-11, rtol=0)


@pytest.mark.parametrize("options", FEW)
def test_blocks_compile_into_one_graph(options):
    torch._dynamo.reset()
    block, x = block_of(dropout=0.1, **options).eval(), tokens()
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    told = {"causal": True, "mask": padding_mask(torch.tensor([5, 6]), 6)}
    x.requires_grad_()
    fast, slow = compiled(x, **told), block(x, **told)
    assert torch.allclose(fast, slow, atol=1e-11, rtol=0)
    grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (fast, slow)]
    assert torch.allclose(*grads, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_compiled_block_takes_any_length():
    torch._dynamo.reset()
    block, graphs = block_of(), []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(block, fullgraph=True, backend=count)
    for T in range(3, 9):
        x = tokens(T=T)
        assert torch.allclose(compiled(x, causal=True), block(x, causal=True), atol=1e-11, rtol=0)
    assert len(graphs) == 2


@pytest.mark.parametrize("options", FEW)
def test_blocks_export(options):
    block, x = block_of(**options), tokens()
    sizes = {"x": {0: torch.export.Dim("B")}, "causal": None}
    exported = torch.export.export(block, (x,), {"causal": True}, dynamic_shapes=sizes).module()
    more = tokens(3)
    assert torch.allclose(exported(more, causal=True), block(more, causal=True), atol=1e-11, rtol=0)


@pytest.mark.parametrize("options", FEW)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_dtypes_follow_the_weights_and_autocast_runs(options, dtype):
    block = Block(8, 2, dtype=dtype, **options)
    assert block(tokens(dtype=dtype)).dtype == dtype
    if dtype == torch.float32:
        x = tokens(dtype=dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            near = block(x, causal=True)
        exact = block(x, causal=True)
        assert (near.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("options", FEW)
@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e10])
def test_extreme_streams_stay_finite(options, scale):
    block, x = block_of(**options), scale * tokens()
    x[:, 0] = scale  # a row that does not vary
    x.requires_grad_()
    y = block(x, causal=True)
    y.sum().backward()
    finite = torch.isfinite(y).all() and torch.isfinite(x.grad).all()
    assert finite or (options["norm"] == "none" and scale == 1e10)
    assert block(x[:0]).shape == (0, 6, 8)


# ---------------------------------------------------------------- against others, by name and by hand


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_parity_with_torch(norm, activation):
    theirs = stirred(
        nn.TransformerEncoderLayer(
            8, 2, 32, dropout=0.0, activation=activation, batch_first=True, norm_first=norm == "pre", dtype=F64
        )
    )
    ours = Block(8, 2, norm=norm, ffn=activation, dtype=F64)
    given = theirs.state_dict()
    renamed = {"norm1": "attention_norm", "norm2": "ffn_norm", "linear1": "ffn.up", "linear2": "ffn.down"}
    weights = {
        f"{mine}.{kind}": given[f"{name}.{kind}"] for name, mine in renamed.items() for kind in ("weight", "bias")
    }
    for kind in ("weight", "bias"):
        weights[f"attention.out.{kind}"] = given[f"self_attn.out_proj.{kind}"]
        for name, part in zip(("query", "key", "value"), given[f"self_attn.in_proj_{kind}"].chunk(3)):
            weights[f"attention.{name}.{kind}"] = part
    ours.load_state_dict(weights)
    x, hidden = tokens(), torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    theirs.train()  # its eval mode takes another path
    assert torch.allclose(ours(x), theirs(x), atol=1e-12, rtol=0)
    wanted = theirs(x, src_mask=~causal_mask(6), src_key_padding_mask=hidden)
    assert torch.allclose(ours(x, causal=True, mask=~hidden[:, None, None]), wanted, atol=1e-12, rtol=0)


def test_the_gated_form_by_hand():
    ffn, x = stirred(FeedForward(6, 5, kind="swiglu", dtype=F64)), tokens(D=6)
    gate, up, down = ffn.gate, ffn.up, ffn.down
    z = x @ gate.weight.T + gate.bias
    by_hand = (z * torch.sigmoid(z) * (x @ up.weight.T + up.bias)) @ down.weight.T + down.bias
    assert torch.allclose(ffn(x), by_hand, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("kind", "act"), [("gelu", nnf.gelu), ("relu", torch.relu)])
def test_the_plain_form_by_hand(kind, act):
    ffn, x = stirred(FeedForward(6, 5, kind=kind, bias=False, dtype=F64)), tokens(D=6)
    assert torch.allclose(ffn(x), act(x @ ffn.up.weight.T) @ ffn.down.weight.T, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("d_model", "hidden"), [(3, 8), (96, 256), (97, 264), (256, 688), (768, 2048)])
def test_default_widths(d_model, hidden):
    assert FeedForward(d_model, kind="swiglu", device="meta").up.out_features == hidden >= 8 * d_model / 3
    assert hidden - 8 < 8 * d_model / 3 and hidden % 8 == 0
    assert FeedForward(d_model, device="meta").up.out_features == 4 * d_model
    assert Block(d_model, 1, d_ffn=7, device="meta").ffn.up.out_features == 7


@pytest.mark.parametrize("kind", FFNS)
@pytest.mark.parametrize("number", [np.uint8, np.int8, np.int64])
def test_widths_of_numpy_are_widths(number, kind):
    """They neither overflow in the default width nor keep a block from compiling."""
    wide = [FeedForward(d, kind=kind, device="meta").up.out_features for d in (96, number(96))]
    assert wide[0] == wide[1]
    torch._dynamo.reset()
    block, x = Block(number(8), 2, ffn=kind), tokens(dtype=torch.float32)
    assert torch.allclose(torch.compile(block, fullgraph=True, backend="eager")(x), block(x), atol=1e-6)


@pytest.mark.parametrize(("kind", "squash"), [(DyT, torch.tanh), (Derf, torch.erf)])
def test_squashes_by_hand(kind, squash):
    norm, x = stirred(kind(8, alpha=0.7, dtype=F64)), tokens()
    assert torch.allclose(norm(x), norm.weight * squash(norm.alpha * x) + norm.bias, atol=1e-12, rtol=0)


def test_dyt_and_derf_with_matched_slopes_agree_near_zero():
    x = torch.linspace(-0.05, 0.05, 8, dtype=F64)
    dyt, derf = DyT(8, dtype=F64)(x), Derf(8, alpha=0.5 * math.sqrt(math.pi) / 2, dtype=F64)(x)
    assert torch.allclose(dyt, derf, atol=1e-5, rtol=0)  # both x/2 up to the third order
    assert not torch.allclose(dyt, Derf(8, dtype=F64)(x), atol=1e-3, rtol=0)


def test_normalizers_are_those_of_torch():
    x = tokens()
    assert torch.equal(make_normalizer("layernorm", 8, dtype=F64)(x), nnf.layer_norm(x, (8,), eps=1e-5))
    assert torch.equal(make_normalizer("rmsnorm", 8, dtype=F64)(x), nnf.rms_norm(x, (8,), eps=1e-5))
    assert make_normalizer("rmsnorm", 8, eps=0.1).eps == make_normalizer("layernorm", 8, eps=0.1).eps == 0.1


NAMES = {
    "layernorm": ["weight", "bias"],
    "rmsnorm": ["weight"],
    "dyt": ["alpha", "weight", "bias"],
    "derf": ["alpha", "weight", "bias"],
}


@pytest.mark.parametrize(("norm", "normalizer"), NORMS)
@pytest.mark.parametrize("ffn", FFNS)
def test_names_are_stable(norm, normalizer, ffn):
    block = Block(8, 2, norm=norm, normalizer=normalizer, ffn=ffn)
    mine = [] if norm == "none" else NAMES[normalizer]
    linear = lambda *parts: [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    names = [f"attention_norm.{name}" for name in mine]
    names += linear("attention.query", "attention.key", "attention.value", "attention.out")
    names += [f"ffn_norm.{name}" for name in mine]
    names += linear("ffn.up", "ffn.gate", "ffn.down") if ffn == "swiglu" else linear("ffn.up", "ffn.down")
    assert list(block.state_dict()) == names
    copy = Block(8, 2, norm=norm, normalizer=normalizer, ffn=ffn)
    copy.load_state_dict(block.state_dict())
    x = tokens(dtype=torch.float32)
    assert torch.equal(copy(x), block(x))


def test_a_placement_and_a_normaliser_of_your_own(monkeypatch):
    monkeypatch.setitem(PLACEMENTS, "sandwich", lambda x, sublayer, norm: x + norm(sublayer(x)))
    monkeypatch.setitem(NORMALIZERS, "half", lambda d_model, **made: nn.LayerNorm(d_model, eps=0.5, **made))
    block, x = block_of(norm="sandwich", normalizer="half"), tokens()
    h = x + block.attention_norm(block.attention(x))
    assert torch.equal(block(x), h + block.ffn_norm(block.ffn(h)))


@pytest.mark.parametrize("attention", ["multi_head", "linear", "twicing", "boosted"])
@torch.no_grad()
def test_a_block_with_a_causal_attention_is_causal_unless_told(attention):
    torch.manual_seed(0)
    block, x = Block(8, 2, attention=attention, attention_options={"causal": True}), torch.randn(2, 5, 8)
    plain = Block(8, 2, attention=attention)
    plain.load_state_dict(block.state_dict())
    assert torch.equal(block(x), plain(x, causal=True))
    assert torch.equal(block(x, causal=False), plain(x))


def test_attention_options_reach_the_layer():
    block = Block(
        8, 4, attention="boosted", attention_options=dict(rounds=3, kv_from="shared", n_kv_heads=2, dropout=0.1)
    )
    layer = block.attention
    assert (layer.rounds, layer.kv_from, layer.n_kv_heads, layer.dropout) == (3, "shared", 2, 0.1)
    bare = Block(8, 4, ffn="swiglu", bias=False)
    assert not [
        name for name, _ in bare.named_parameters() if name.startswith(("attention.", "ffn.")) and "bias" in name
    ]


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_a_block_of_attention_alone(norm):
    whole = block_of(norm=norm)
    alone = Block(8, 2, norm=norm, ffn="none", dtype=F64)
    alone.load_state_dict({k: w for k, w in whole.state_dict().items() if not k.startswith("ffn")})
    x = tokens()
    assert torch.equal(alone(x), whole.place(x, whole.attention, whole.attention_norm))
    alone.reset_parameters(torch.Generator().manual_seed(1))
    with refused("x"):
        alone(x.float())


def test_dropout_falls_on_what_is_added():
    """With the attention silenced, a feature of the stream gets nothing or twice what the feed-forward says."""
    block, x = block_of(dropout=0.5), tokens()
    nn.init.zeros_(block.attention.out.weight)
    nn.init.zeros_(block.attention.out.bias)
    said = block.ffn(block.ffn_norm(x))
    share = ((block(x) - x) / said).round(decimals=9)
    assert set(share.flatten().tolist()) == {0.0, 2.0}
    assert torch.allclose(block.eval()(x), x + said, atol=1e-12)
    nn.init.zeros_(block.ffn.down.weight)  # and on what the attention says
    nn.init.zeros_(block.ffn.down.bias)
    nn.init.normal_(block.attention.out.weight)
    said = block.attention(block.attention_norm(x))
    share = ((block.train()(x) - x) / said).round(decimals=9)
    assert set(share.flatten().tolist()) == {0.0, 2.0}


def test_hidden_dropout_of_the_feed_forward():
    ffn = FeedForward(4, 200, kind="relu", bias=False, dropout=0.5, dtype=F64)
    nn.init.ones_(ffn.down.weight)
    nn.init.constant_(ffn.up.weight, 0.25)
    x = torch.ones(1, 4, dtype=F64)
    kept = ffn(x)[0, 0] / 2  # of 200 hidden units that say one
    assert 60 < kept < 140 and kept == kept.round()
    assert ffn.eval()(x)[0, 0] == 200


@pytest.mark.parametrize(("norm", "normalizer"), NORMS)
def test_reset_follows_the_generator(norm, normalizer):
    options = dict(norm=norm, normalizer=normalizer, ffn="swiglu", attention="boosted", dtype=F64)
    one, two = stirred(Block(8, 2, **options)), stirred(Block(8, 2, **options))
    for block in (one, two):
        block.reset_parameters(torch.Generator().manual_seed(3))
    for (name, a), b in zip(one.named_parameters(), two.parameters()):
        assert torch.equal(a, b), name
    fresh = dict(Block(8, 2, **options).named_parameters())
    for name, weight in one.named_parameters():
        if "_norm" in name or "bias" in name or "gate.weight" in name and "corrections" in name:
            assert torch.equal(weight, fresh[name]), name
        else:
            assert weight.abs().max() <= math.sqrt(6 / sum(weight.shape)), name


def test_printed_forms_name_the_options():
    text = str(Block(8, 2, norm="post", normalizer="derf", ffn="swiglu", dropout=0.25))
    for part in ("norm='post', dropout=0.25", "Derf(8, alpha=0.5)", "kind='swiglu'"):
        assert part in text


def test_importing_blocks_loads_little_and_registers_all_layers():
    code = (
        "import sys, gbattn.blocks as b\n"
        "for name in ('multi_head', 'linear', 'twicing', 'boosted'): b.Block(4, 2, attention=name)\n"
        "heavy = {'sklearn', 'scipy', 'matplotlib', 'pandas', 'accelerate', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---------------------------------------------------------------- Jacobians as functions


@pytest.mark.parametrize("function", [layer_norm_jacobian, rms_norm_jacobian])
def test_jacobians_of_batches_follow_each_row(function):
    x, gain = torch.randn(2, 3, 5, dtype=torch.float32), torch.randn(5)
    J = function(x, gain)
    assert J.shape == (2, 3, 5, 5) and J.dtype == torch.float32
    assert torch.allclose(J[1, 2], function(x[1, 2], gain), atol=1e-6)
    assert function(x[:0], gain).shape == (0, 3, 5, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("function", [layer_norm_jacobian, rms_norm_jacobian])
def test_jacobians_in_half_precision_are_those_of_single(function, dtype):
    x, gain = torch.tensor([[300.0, -300.0, 100.0, 7.0], [1.0, 2.0, 4.0, 8.0]]), torch.tensor([1.0, 2.0, -0.5, 0.25])
    for weight in (None, gain.to(dtype)):
        found = function(x.to(dtype), weight)
        assert found.dtype == dtype
        want = function(x.to(dtype).float(), None if weight is None else gain)
        assert torch.equal(found, want.to(dtype))
    assert function(x.to(dtype), gain).dtype == torch.float32  # of a wider gain


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, F64])
def test_a_constant_row_has_no_jacobian_without_eps(dtype):
    """The mean of equal numbers is rounded, so that they seem to vary a little."""
    for value in torch.linspace(-3, 3, 41, dtype=dtype):
        for d in (3, 7, 10):
            row = value.expand(2, d).clone()
            row[0, 0] += 1  # one that varies beside one that does not
            with refused("x"):
                layer_norm_jacobian(row, eps=0.0)
            assert layer_norm_jacobian(row[:1], eps=0.0).isfinite().all()
            assert layer_norm_jacobian(row).isfinite().all()


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("make", "argument"),
    [
        (lambda: Block(8.0, 2), "d_model"),
        (lambda: Block(8, 2, norm="Pre"), "norm"),
        (lambda: Block(8, 2, normalizer="batch"), "normalizer"),
        (lambda: Block(8, 2, norm="none", normalizer="batch"), "normalizer"),
        (lambda: Block(8, 2, ffn="tanh"), "ffn"),
        (lambda: Block(8, 2, ffn="none", d_ffn=4), "d_ffn"),
        (lambda: Block(8, 2, d_ffn=0), "d_ffn"),
        (lambda: Block(8, 2, attention="soft"), "attention"),
        (lambda: Block(8, 2, bias="False"), "bias"),
        (lambda: Block(8, 2, attention_options={"nope": 1}), "attention_options"),
        (lambda: Block(8, 2, attention_options={"d_model": 1}), "attention_options"),
        (lambda: Block(8, 2, attention_options=3), "attention_options"),
        (lambda: Block(8, 2, dropout=1.0), "dropout"),
        (lambda: Block(8, 2, attention="twicing", attention_options={"dropout": 0.1}), "dropout"),
        (lambda: Block(8, 3), "n_heads"),
        (lambda: make_normalizer("none", 8), "normalizer"),
        (lambda: make_normalizer("layernorm", 0), "d_model"),
        (lambda: make_normalizer("layernorm", 8, bias="False"), "bias"),
        (lambda: make_normalizer("rmsnorm", 8, elementwise_affine=0), "elementwise_affine"),
        (lambda: FeedForward(0), "d_model"),
        (lambda: FeedForward(8, True), "d_hidden"),
        (lambda: FeedForward(8, kind=["gelu"]), "kind"),
        (lambda: FeedForward(8, dropout=-0.1), "dropout"),
        (lambda: FeedForward(8, bias="False"), "bias"),
        (lambda: FeedForward(8)(torch.ones(2, 7)), "x"),
        (lambda: DyT(8.0), "d_model"),
        (lambda: DyT(8, alpha=math.nan), "alpha"),
        (lambda: DyT(8)(torch.ones(2, 1)), "x"),
        (lambda: DyT(8)(torch.ones(8, dtype=torch.int64)), "x"),
        (lambda: Derf(8, alpha=0.0), "alpha"),
        (lambda: Derf(8)([1.0] * 8), "x"),
        (lambda: layer_norm_jacobian(torch.tensor(1.0)), "x"),
        (lambda: layer_norm_jacobian(torch.ones(2, 0)), "x"),
        (lambda: layer_norm_jacobian(torch.ones(4), eps=0.0), "x"),
        (lambda: layer_norm_jacobian(torch.tensor([1.0, math.nan])), "x"),
        (lambda: layer_norm_jacobian(torch.rand(4), eps=-1.0), "eps"),
        (lambda: rms_norm_jacobian(torch.ones(0)), "x"),
        (lambda: rms_norm_jacobian(torch.zeros(4), eps=0.0), "x"),
        (lambda: rms_norm_jacobian(torch.rand(4), torch.ones(3)), "weight"),
    ],
)
def test_bad_options_are_named(make, argument):
    with refused(argument):
        make()


@pytest.mark.parametrize("norm", ["pre", "post", "none"])
def test_bad_arguments_are_named_in_every_placement(norm):
    x = torch.ones(2, 3, 8)
    for argument, told in (
        ("x", {"x": torch.ones(2, 3, 7)}),
        ("x", {"x": x.double()}),
        ("mask", {"mask": torch.ones(4, 4, dtype=torch.bool)}),
        ("cache", {"cache": 3, "causal": True}),
    ):
        with refused(argument):
            Block(8, 2, norm=norm)(**{"x": x} | told)


def test_no_norm_leaves_its_normaliser_alone():
    x = tokens()
    assert torch.equal(no_norm(x, torch.sin, lambda x: 1 / 0), x + torch.sin(x))
