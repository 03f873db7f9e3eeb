"""Rotary positions as data, normalised queries and keys, caches of fixed shapes and of a context."""

import json
import math

import pytest
import torch
from refusals import refused
from test_layers import EXACT, D, H, layer_of, tokens

from gbattn.attention import alibi, sliding_window
from gbattn.boosted import GradientBoostedAttention
from gbattn.cache import KeyValueCache, StaticCache
from gbattn.cost import attention_cost
from gbattn.interop import DecodeStep, to_torch
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.layers import AttentionCall, MultiHeadAttention, make_attention
from gbattn.positions import Rotary, rotary_angles, rotate

YARN = {"scaling": "yarn", "factor": 4.0, "original_length": 2048}
QUARTER = {
    "scaling": "yarn",
    "factor": 8.0,
    "original_length": 512,
    "fraction": 0.25,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
# transformers' names and values, the fields of a Rotary, and its inverse frequencies at heads of width 64: the first,
# one a third and one two thirds on, and the last (transformers 5.23, modeling_rope_utils, in float32).
TABLES = [
    (dict(rope_type="linear", factor=4.0), dict(scaling="linear", factor=4.0), 1.0)
    + ([0.25, 0.0140585322, 0.000592843455, 3.33380376e-05],),
    (dict(rope_type="linear", factor=2.5, partial_rotary_factor=0.5), dict(scaling="linear", factor=2.5, fraction=0.5))
    + (1.0, [0.400000006, 0.0224936511, 0.00126491114, 7.11311732e-05]),
    (dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048), YARN, 1.138629436111989)
    + ([1.0, 0.0497455746, 0.000592843455, 3.33380376e-05],),
    (
        dict(rope_type="yarn", factor=8.0, original_max_position_embeddings=512, partial_rotary_factor=0.25)
        | dict(beta_fast=16.0, beta_slow=2.0),
        QUARTER,
        1.2079441541679836,
        [1.0, 0.0708333328, 0.000395284733, 3.95284733e-05],
    ),
    (
        dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, truncate=False, attention_factor=1.5),
        YARN | {"truncate": False, "attention_factor": 1.5},
        1.5,
        [1.0, 0.0494530834, 0.000592843455, 3.33380376e-05],
    ),
]
DYNAMIC = {  # by the length of a call, with factor 3 and an original length of 2048
    1000: [1.0, 0.0562341288, 0.00237137382, 0.00013335215],
    4096: [1.0, 0.0359573029, 0.000927156187, 3.3338034e-05],
    9000: [1.0, 0.0258076172, 0.000462030526, 1.19239076e-05],
}
SOME = ["multi_head", "twicing 3", "boosted 2 residual feature", "boosted 3 shared norm"]
SOME += ["boosted 2 residual feature shift", "linear elu shift"]


# ---- rotary positions ----


def test_rotary_tables_are_those_of_transformers():
    for _, own, amplitude, numbers in TABLES:
        rotary = Rotary(**own)
        found = rotary.frequencies(64)
        n = len(found)
        assert n == rotary.width(64) // 2 and rotary.amplitude == amplitude
        assert found[[0, n // 3, 2 * n // 3, -1]].tolist() == pytest.approx(numbers, rel=3e-7)
    for n, numbers in DYNAMIC.items():
        rotary = Rotary(scaling="ntk", factor=3 * max(n, 2048) / 2048 - 2)
        assert rotary.frequencies(64)[[0, 10, 21, -1]].tolist() == pytest.approx(numbers, rel=3e-7)


@pytest.mark.filterwarnings("ignore")
def test_rotary_tables_against_transformers_itself():
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    def theirs(rope, length=None, most=8192):
        sizes = dict(hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=most)
        config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_theta": 10_000.0} | rope)
        return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu", length)

    for rope, own, _, _ in TABLES:
        table, amplitude = theirs(rope)
        assert Rotary(**own).amplitude == amplitude
        assert (table.double() / Rotary(**own).frequencies(64) - 1).abs().max() < 3e-7
    for n in DYNAMIC:
        table, _ = theirs(dict(rope_type="dynamic", factor=3.0), n, 2048)
        own = Rotary(scaling="ntk", factor=3 * max(n, 2048) / 2048 - 2)
        assert (table.double() / own.frequencies(64) - 1).abs().max() < 3e-7


def test_the_scalings_by_hand():
    plain, places = Rotary(100.0), torch.arange(5)
    assert torch.equal(rotary_angles(places, 8, plain), rotary_angles(places, 8, 100.0))
    halved = rotary_angles(2 * places, 8, Rotary(100.0, scaling="linear", factor=2.0))
    assert torch.allclose(halved, rotary_angles(places, 8, 100.0), atol=1e-12, rtol=0)
    slow = Rotary(100.0, scaling="ntk", factor=3.0).frequencies(8) / plain.frequencies(8)
    assert slow[0] == 1 and slow[-1] == pytest.approx(1 / 3, rel=1e-12)
    # Two turns in 100 places are more than 1.5, half a turn is less than 1.
    yarn = Rotary(100.0, scaling="yarn", factor=4.0, original_length=100, beta_fast=1.5, truncate=False)
    speed, turns = plain.frequencies(8), 100 * plain.frequencies(8) / (2 * math.pi)
    ratio = yarn.frequencies(8) / speed
    assert (ratio[turns > 1.5] == 1).all() and (ratio[turns < 1] == 0.25).all()
    assert yarn.amplitude == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize("kind", ["multi_head", "boosted 2 shared head", "linear identity"])
@torch.no_grad()
def test_a_part_of_the_features_turns(kind):
    """As features turned by hand; the others stay."""
    rotary = {"base": 100.0, "fraction": 0.5, "scaling": "yarn", "factor": 4.0, "original_length": 32}
    layer, x = layer_of(kind, d_model=32, rotary=rotary), tokens(d_model=32)
    heads = layer.query(x).unflatten(-1, (H, 8)).transpose(1, 2)
    angles = torch.arange(7)[:, None] * Rotary(**rotary).frequencies(8)
    turned = (0.1 * math.log(4) + 1) * rotate(heads[..., :4].contiguous(), angles)
    inputs = layer.prepare_inputs(x, AttentionCall(causal=False))
    found = layer.query_heads(inputs, layer.query(x))
    assert (found - torch.cat([turned, heads[..., 4:]], -1)).abs().max() < EXACT
    assert (layer(x, positions=torch.arange(7) + 50) - layer(x)).abs().max() < EXACT
    assert (layer(x, positions=2 * torch.arange(7)) - layer(x)).abs().max() > 1e-4


@torch.no_grad()
def test_a_description_goes_through_layers_models_and_copies():
    rotary = {"base": 100.0} | {k: QUARTER[k] for k in ("scaling", "factor", "original_length")}
    plain = layer_of("multi_head", rotary=rotary)
    assert plain.rotary == Rotary(**rotary) and "scaling='yarn'" in repr(plain)
    assert torch.equal(GradientBoostedAttention.from_attention(plain)(tokens()), plain(tokens()))
    config = ModelConfig(vocab_size=9, d_model=D, n_heads=H, positions="rotary", attention_options={"rotary": rotary})
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    model, ids = LanguageModel(again, dtype=torch.float64), torch.arange(9)[None]
    assert model.blocks[0].attention.rotary == Rotary(**rotary)
    caches = model.make_caches(1, 9)
    parts = torch.cat([model(part, cache=caches) for part in ids.split([4, 1, 4], 1)], 1)
    assert (parts - model(ids)).abs().max() < EXACT


@torch.no_grad()
def test_a_model_computes_its_angles_once(monkeypatch):
    calls, plain = [], rotary_angles
    monkeypatch.setattr("gbattn.positions.rotary_angles", lambda *a: calls.append(a) or plain(*a))
    options = dict(vocab_size=9, d_model=D, n_heads=H, n_layers=4, positions="rotary")
    model, ids = LanguageModel(ModelConfig(**options, attention="boosted"), dtype=torch.float64), torch.arange(9)[None]
    together = model(ids)
    assert len(calls) == 1
    h = model.token_embedding(ids)
    for block in model.blocks:
        h = block(h, causal=True)
    assert torch.equal(model.logits(h), together)
    calls.clear()
    bases = {2: {"attention_options": {"rotary": 100.0}}, 3: {"attention_options": {"rotary": 100.0}}}
    LanguageModel(ModelConfig(**options, overrides=bases))(ids)
    assert len(calls) == 2
    with refused("positions"):
        angles = layer_of("multi_head", rotary=100.0).rotary_positions(tokens())
        layer_of("multi_head", rotary=10.0)(tokens(), positions=angles)


@pytest.mark.parametrize(
    ("fields", "argument"),
    [
        ({"base": 1.0}, "base"),
        ({"fraction": 0.0}, "fraction"),
        ({"scaling": "dynamic"}, "scaling"),
        ({"scaling": "linear", "factor": 0.5}, "factor"),
        ({"factor": 2.0}, "factor"),
        ({"scaling": "yarn", "factor": 2.0}, "original_length"),
        ({"fraction": 0.4}, "head_dim"),
        ({"fraction": 0.25, "scaling": "ntk", "factor": 2.0}, "head_dim"),
    ],
)
def test_bad_descriptions_are_named(fields, argument):
    with refused(argument):
        MultiHeadAttention(16, 2, rotary=fields)


# ---- query and key norms ----


@torch.no_grad()
def test_normalised_heads_by_hand():
    layer, x = layer_of("boosted 2 residual feature", qk_norm=True, rotary=100.0), tokens()
    layer.query_norm.weight.copy_(torch.tensor([2.0, 0.5]))
    correction = layer.corrections[0]
    states = layer.explain(x, causal=True).rounds
    heads = lambda z: z.unflatten(-1, (H, 2)).transpose(1, 2)
    unit = lambda z, gain: gain * heads(z) / (heads(z).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for part, source, found in ((layer, x, states[0]), (correction, states[1].residual, states[1])):
        q, k = unit(part.query(source), part.query_norm.weight), unit(part.key(source), part.key_norm.weight)
        angles = rotary_angles(torch.arange(7), 2, 100.0)
        scores = rotate(q, angles) @ rotate(k, angles).mT / math.sqrt(2)
        wanted = scores.masked_fill(~torch.ones(7, 7).tril().bool(), -math.inf).softmax(-1)
        assert (found.weights - wanted).abs().max() < EXACT


@torch.no_grad()
def test_with_norms_a_score_has_a_bound():
    """Without gains |q·k|/√K ≤ √K, whatever the weights: no row of weights saturates."""
    for kind in ("multi_head", "twicing 2", "boosted 3 shared norm"):
        options = {} if "norm" in kind else {"qk_norm": True}
        layer, x = layer_of(kind, d_model=32, **options), 100 * tokens(d_model=32)
        layer.reset_parameters()
        for part in layer.modules():
            if isinstance(part, torch.nn.Linear):
                part.weight.mul_(50)
        K = layer.head_dim
        for found in layer.explain(x).rounds:
            assert found.weights.max() / found.weights.min() <= math.exp(2 * math.sqrt(K)) * (1 + 1e-9)


def test_norms_are_counted_as_parameters_and_copied():
    for name, options in (("multi_head", {}), ("boosted", {"rounds": 3}), ("boosted", {"kv_from": "shared"})):
        layer = make_attention(name, D, H, qk_norm=True, **options)
        assert attention_cost(layer, 5).parameters == sum(p.numel() for p in layer.parameters())
    layer = MultiHeadAttention(D, H, qk_norm=True)
    with torch.no_grad():
        layer.key_norm.weight.uniform_()
    boosted = GradientBoostedAttention.from_attention(layer)
    x = tokens(dtype=torch.float32)
    assert torch.equal(boosted(x), layer(x)) and boosted.corrections[0].key_norm is not None
    with refused("qk_norm"):
        to_torch(layer)


# ---- a cache of fixed shapes ----


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_a_static_cache_decodes_as_the_full_pass(kind):
    rotary = {} if "elu" in kind else {"rotary": 100.0, "n_kv_heads": 2}
    layer, x = layer_of(kind, **rotary), tokens()
    cache = layer.make_cache(2, 9, static=True)
    for chunks in ([1] * 7, [3, 1, 2, 1], [7]):
        outputs = [layer(part, causal=True, cache=cache) for part in x.split(chunks, 1)]
        assert (torch.cat(outputs, 1) - layer(x, causal=True)).abs().max() < EXACT
        assert cache.length.item() == 7
        cache.crop(0)
    if "linear" in kind:
        return
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])
    told = dict(causal=True, mask=sliding_window(4))
    outputs = [layer(part, cache=cache, padding=real, **told) for part in x.split([2, 1, 4], 1)]
    assert (torch.cat(outputs, 1) - layer(x, padding=real[:, :7], **told)).abs().max() < EXACT
    if "shift" not in kind:  # which cannot forget a part
        cache.crop(3)
        cache.reorder(torch.tensor([1, 1]))
        again = layer(x[[1, 1], 3:], causal=True, cache=cache, mask=sliding_window(4))
        assert (again - layer(x[[1, 1]], **told)[:, 3:]).abs().max() < EXACT


@pytest.mark.parametrize("attention", ["multi_head", "twicing", "boosted"])
@torch.no_grad()
def test_a_prompt_and_a_hundred_tokens_compile_once_each(attention):
    """A program for the prompt, one for a step, and no third; positions are learned and rotary."""
    torch._dynamo.reset()
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    for positions in ("learned", "rotary"):
        sizes = dict(vocab_size=20, d_model=8, n_heads=2, n_layers=1, max_length=128, positions=positions)
        model = LanguageModel(ModelConfig(**sizes, attention=attention), dtype=torch.float64)
        ids = torch.randint(20, (2, 105), generator=torch.Generator().manual_seed(0))
        wanted, caches = model(ids), model.make_caches(2, 128, static=True)
        graphs.clear()
        compiled = torch.compile(model, fullgraph=True, backend=count)
        parts = [compiled(ids[:, :5], cache=caches)]
        parts += [compiled(ids[:, t : t + 1], cache=caches) for t in range(5, 105)]
        assert len(graphs) == 2
        assert (torch.cat(parts, 1) - wanted).abs().max() < EXACT


@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_a_step_of_decoding_is_exported_with_its_cache(kind):
    layer, x = layer_of(kind, **({} if "elu" in kind else {"rotary": 100.0})), tokens()
    cache = layer.make_cache(2, 9, static=True)
    step = DecodeStep(layer, cache, causal=True)
    first = step(x[:, :3])
    exported = torch.export.export(step, (x[:, 3:4],)).module()
    assert cache.length == 3  # tracing wrote nothing
    outputs = [first, *(exported(x[:, t : t + 1]) for t in range(3, 7))]
    assert (torch.cat(outputs, 1) - layer(x, causal=True)).abs().max() < EXACT
    assert cache.length == 7  # which is one


@torch.no_grad()
def test_a_step_of_a_model_is_exported():
    sizes = dict(vocab_size=20, d_model=8, n_heads=2, n_layers=2, attention="boosted")
    model, ids = LanguageModel(ModelConfig(**sizes), dtype=torch.float64), torch.arange(8)[None]
    step = DecodeStep(model, model.make_caches(1, 8, static=True))
    exported = torch.export.export(step, (ids[:, :1],)).module()
    outputs = [exported(ids[:, t : t + 1]) for t in range(8)]
    assert (torch.cat(outputs, 1) - model(ids)).abs().max() < EXACT


@torch.no_grad()
def test_what_does_not_fit_a_static_cache_is_named():
    layer, x = layer_of("multi_head"), tokens()
    cache = layer.make_cache(2, 8, static=True)
    assert isinstance(cache, StaticCache) and type(layer.make_cache(2, 8)) is KeyValueCache
    layer(x, causal=True, cache=cache)
    with refused("cache"):
        layer(x, causal=True, cache=cache)
    with refused("cache"):
        DecodeStep(layer, layer.make_cache(2, 8))
    with refused("length"):
        cache.crop(8)
    with refused("static"):
        layer.make_cache(2, 8, static=1)


# ---- the cache of a context ----


@pytest.mark.parametrize(
    "kind", ["multi_head shift", "boosted 2 input feature", "boosted 3 shared scalar", "linear elu"]
)
@pytest.mark.parametrize("static", [False, True])
@torch.no_grad()
def test_a_context_is_projected_once(kind, static):
    layer, x, context = layer_of(kind), tokens(), tokens(2, 5, seed=3)
    wanted, cache = layer(x, context=context), layer.make_cache(2, 8, static=static)
    calls = []
    handle = layer.key.register_forward_hook(lambda module, args, output: calls.append(args[0].shape[1]))
    outputs, rest = [], context
    for part in x.split([2, 4, 1], 1):
        outputs.append(layer(part, context=rest, cache=cache))
        rest = context[:, :0]
    handle.remove()
    assert calls == [5, 0, 0] and int(cache.length) == 5
    assert (torch.cat(outputs, 1) - wanted).abs().max() < EXACT
    if "linear" in kind:
        return
    cache.crop(0)  # a context may come in parts
    layer(x, context=context[:, :3], cache=cache)
    assert (layer(x, context=context[:, 3:], cache=cache) - wanted).abs().max() < EXACT
    trace = layer.explain(x, context=context[:, :0], cache=cache)
    assert (trace.output - wanted).abs().max() < EXACT


@torch.no_grad()
def test_places_of_a_cached_context_count_from_its_start():
    layer, x, context = layer_of("multi_head", rotary=100.0), tokens(), tokens(2, 5, seed=3)
    cache, places = layer.make_cache(2, 5), torch.arange(7) + 3
    wanted = layer(x, context=context, positions=places)
    for part in context.split([2, 3], 1):
        output = layer(x, context=part, positions=places, cache=cache)
    assert (output - wanted).abs().max() < EXACT


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "call", "argument"),
    [
        (dict(rotary=100.0), {}, "positions"),
        ({}, dict(mask=sliding_window(3)), "mask"),
        ({}, dict(score_mod=alibi(4)), "score_mod"),
    ],
)
def test_what_counts_queries_is_refused_with_a_cache_that_counts_a_context(options, call, argument):
    layer, x, context = layer_of("multi_head", **options), tokens(), tokens(2, 5, seed=3)
    with refused(argument):
        layer(x, context=context, cache=layer.make_cache(2, 5), **call)


# ---- on a GPU ----


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", SOME)
@torch.no_grad()
def test_a_step_is_captured_in_a_cuda_graph(kind):
    layer, x = layer_of(kind, dtype=torch.float32).cuda(), tokens(dtype=torch.float32).cuda()
    cache = layer.make_cache(2, 9, static=True)
    step, token = DecodeStep(layer, cache, causal=True), x[:, :1].clone()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(token)  # what a first call sets up
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step(token)
    cache.crop(0)
    outputs = []
    for t in range(7):
        token.copy_(x[:, t : t + 1])
        graph.replay()
        outputs.append(output.clone())
    assert (torch.cat(outputs, 1) - layer(x, causal=True)).abs().max() < 1e-4
