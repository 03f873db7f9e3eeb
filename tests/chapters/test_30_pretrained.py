"""Chapter 30: models of Hugging Face with the book's attention, and boosted ones."""

import copy
import importlib
import importlib.util
import json
import pickle

import pytest
import torch
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn.ground.tensors import eval_mode
from gbattn.language_model import LanguageModel, ModelConfig
from pages import skip_or_fail

SIZES = dict(vocab_size=40, max_length=32, d_model=16, n_layers=2, n_heads=2)
ATTENTION = {
    "standard": dict(attention="multi_head"),
    "grouped": dict(attention="multi_head", attention_options=dict(n_kv_heads=1), positions="rotary"),
    "boosted": dict(attention="boosted"),
    "three rounds": dict(attention="boosted", attention_options=dict(rounds=3, kv_from="input"), positions="rotary"),
    "shared": dict(attention="boosted", attention_options=dict(kv_from="shared"), positions="rotary"),
    "scaled": dict(
        attention="boosted",
        attention_options=dict(rotary=dict(fraction=0.5, scaling="linear", factor=2.0)),
        positions="rotary",
    ),
    "twicing": dict(attention="twicing", attention_options=dict(rounds=3)),
    "linear": dict(attention="linear"),
    "shifted": dict(attention="multi_head", attention_options=dict(shift=True), positions="rotary"),
    "shifted, boosted": dict(attention="boosted", attention_options=dict(shift=True, n_kv_heads=1)),
    "shifted, shared": dict(
        attention="boosted", attention_options=dict(shift=True, kv_from="shared"), positions="rotary"
    ),
}
STATIC = [kind for kind in ATTENTION if kind != "linear"]
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
IDS = torch.arange(18).view(2, 9) * 7 % 40
REAL = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 9])  # padding on the left
GREEDY = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)


def package():
    """The module of the chapter, or no test."""
    if importlib.util.find_spec("transformers") is None:
        skip_or_fail("transformers is not installed: pip install 'gbattn[pretrained]'.")
    return importlib.import_module("gbattn.pretrained")


@pytest.fixture(name="gp", scope="module")
def fixture_gp():
    return package()


@torch.no_grad()
def shaken(model, seed=0, scale=0.1, only=""):
    """Move the weights, so that none is zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if only in name:
            weight += scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return model


def book_model(kind, **options):
    return shaken(LanguageModel(ModelConfig(**SIZES, **ATTENTION[kind], **options), seed=1)).eval()


def family(name, seed=0, width=16):
    """A small model of a family of transformers, in evaluation mode."""
    package()
    import transformers as hf

    none = dict(vocab_size=40, bos_token_id=None, eos_token_id=None)
    sizes = dict(hidden_size=width, intermediate_size=3 * width // 2, **none)
    sizes |= dict(num_hidden_layers=2, num_attention_heads=2)
    window = dict(num_key_value_heads=1, use_sliding_window=True, sliding_window=5, max_window_layers=1)
    if name == "gpt2":
        model = hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=width, n_layer=2, n_head=2, n_positions=32, **none))
    elif name == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=1, **sizes))
    elif name == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**window, **sizes))
    else:  # heads that together are wider than the stream
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(head_dim=12, **window, **sizes))
    return shaken(model, seed).eval()


# ---- the book's model as a model of transformers ----


@torch.no_grad()
@pytest.mark.parametrize("kind", ATTENTION)
def test_a_language_model_has_the_same_logits_and_text_in_transformers(gp, kind):
    model = book_model(kind)
    copied = gp.GbattnForCausalLM.from_language_model(model)
    logits = model(IDS)
    assert torch.equal(copied(IDS).logits, logits)
    assert torch.equal(copied(IDS, logits_to_keep=2).logits, logits[:, -2:])
    back = copied.to_language_model()
    assert torch.equal(back(IDS), logits) and back.config == model.config
    text = model.generate(IDS, 6, temperature=0)
    assert torch.equal(copied.generate(IDS, attention_mask=torch.ones_like(IDS), **GREEDY), text)
    padded = model.generate(IDS, 6, temperature=0, lengths=REAL.sum(1))
    assert torch.equal(copied.generate(IDS, attention_mask=REAL, **GREEDY), padded)
    beams = [
        copied.generate(IDS, attention_mask=REAL, num_beams=3, use_cache=c, **GREEDY)
        for c in (copied.config.use_cache, False)
    ]
    assert torch.equal(*beams)


@torch.no_grad()
@pytest.mark.parametrize("kind", STATIC)
def test_a_static_cache_writes_the_same_text(gp, kind):
    copied = gp.GbattnForCausalLM.from_language_model(book_model(kind))
    text = [copied.generate(IDS, attention_mask=REAL, **GREEDY, **o) for o in ({}, dict(cache_implementation="static"))]
    assert torch.equal(*text)


def exportable(model):
    """The model with a static cache of its own, as transformers exports it."""
    from transformers.integrations import executorch

    model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    return executorch.TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=12)


def exported_logits(module, ids):
    """The logits of an exported program that reads one token after the other."""

    def at(i):
        return dict(input_ids=ids[:, i : i + 1], cache_position=torch.tensor([i]))

    program = torch.export.export(module, (), at(0), strict=False).module()
    return torch.cat([program(**at(i)) for i in range(ids.shape[1])], 1)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of torch.export
@pytest.mark.parametrize("kind", ["twicing", "three rounds", "llama"])
def test_a_program_with_a_static_cache_is_right_or_refused(gp, kind):
    if kind == "llama":
        model = shaken(gp.boost(family(kind)), 3, 0.3, "corrections")
    else:
        model = gp.GbattnForCausalLM.from_language_model(book_model(kind))
    ids = IDS[:1, :4]
    with refused("cache"):
        exported_logits(exportable(model), ids)
    module = exportable(model)
    module(input_ids=ids[:, :1], cache_position=torch.tensor([0]))
    wanted = model(ids, use_cache=False).logits
    assert torch.allclose(exported_logits(module, ids), wanted, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_a_grouped_model_is_exported_with_its_number_of_key_value_heads(gp):
    model = gp.GbattnForCausalLM.from_language_model(book_model("grouped"))
    assert model.config.num_key_value_heads == 1
    ids = IDS[:1, :4]
    logits = exported_logits(exportable(model), ids)
    assert torch.allclose(logits, model(ids, use_cache=False).logits, atol=1e-5)


# ---- quantised models, and changes that are whole ----


class Integers(torch.nn.Linear):
    """A linear map whose weight is stored as integers, as quantisation libraries have it."""

    def __init__(self, linear):
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        self.scale = linear.weight.detach().abs().max().item() / 127
        stored = (linear.weight.detach() / self.scale).round().to(torch.int8)
        self.weight = torch.nn.Parameter(stored, requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def of_integers(model):
    for parent in [*model.modules()]:
        for name, child in parent.named_children():
            if type(child) is torch.nn.Linear and name != "lm_head":
                setattr(parent, name, Integers(child))
    return model.eval()


def book_form(gp):
    return gp.GbattnForCausalLM.from_language_model(book_model("standard", bias=False))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen3", "book"])
def test_a_quantised_model_is_boosted_in_the_dtype_in_which_it_computes(gp, name):
    model = of_integers(book_form(gp) if name == "book" else family(name)).to(torch.bfloat16)
    logits = model(IDS).logits
    gp.boost(model, freeze=True)
    assert torch.equal(model(IDS).logits, logits)
    for key, weight in model.named_parameters():
        assert weight.requires_grad == ("corrections" in key)
        assert "corrections" not in key or weight.dtype == torch.bfloat16
    assert torch.equal(gp.unboost(model)(IDS).logits, logits)


@torch.no_grad()
@pytest.mark.parametrize("name", ["gpt2", "llama", "book"])
def test_boost_that_fails_changes_nothing(gp, name, monkeypatch):
    model = book_form(gp) if name == "book" else family(name)
    before, logits, config = type(model), model(IDS).logits, model.config.to_dict()
    calls, make = [], gp.Gate.__init__

    def fails_second(self, *sizes, **options):
        calls.append(sizes)
        if len(calls) == 2:
            raise MemoryError
        make(self, *sizes, **options)

    monkeypatch.setattr(gp.Gate, "__init__", fails_second)
    with pytest.raises(MemoryError):
        gp.boost(model, freeze=True)
    assert type(model) is before and model.config.to_dict() == config
    assert torch.equal(model(IDS).logits, logits)
    assert all(weight.requires_grad for weight in model.parameters())


def test_each_round_with_keys_of_its_own_has_a_layer_of_the_cache(gp):
    rounds = {"standard": 2, "boosted": 4, "three rounds": 6, "shared": 2, "twicing": 6}
    unmixed = {"shifted": 4, "shifted, boosted": 8, "shifted, shared": 4}
    for kind, layers in (rounds | unmixed).items():
        copied = gp.GbattnForCausalLM.from_language_model(book_model(kind))
        cache = copied(IDS).past_key_values
        assert len(cache.layers) == layers and {layer.keys.shape[-2] for layer in cache.layers} == {9}, kind


@torch.no_grad()
@pytest.mark.parametrize("kind", ["boosted", "shifted", "shifted, boosted", "shifted, shared"])
def test_tokens_can_be_taken_back(gp, kind):
    copied = gp.GbattnForCausalLM.from_language_model(book_model(kind))
    whole = copied(IDS, attention_mask=REAL, use_cache=False).logits
    cache = copied(IDS, attention_mask=REAL).past_key_values
    cache.crop(-4)
    again = copied(IDS[:, 5:], attention_mask=REAL, past_key_values=cache).logits
    assert torch.allclose(again, whole[:, 5:], atol=1e-5)
    one_by_one = copied(IDS[:, :1], attention_mask=REAL[:, :1]).past_key_values
    for t in range(1, 9):
        step = copied(IDS[:, t : t + 1], attention_mask=REAL[:, : t + 1], past_key_values=one_by_one).logits
    assert torch.allclose(step[:, -1], whole[:, -1], atol=1e-5)


def test_what_a_cache_cannot_hold_is_refused(gp):
    from transformers import DynamicCache

    linear = gp.GbattnForCausalLM.from_language_model(book_model("linear"))
    assert not linear.config.use_cache
    for name in ("cache", "past_key_values"):
        with refused(gp.CACHE_NAME):
            linear(IDS, **{name: DynamicCache()})
    with refused("input_ids"):
        linear()


@pytest.mark.filterwarnings("ignore")  # of torch.export
def test_a_static_cache_filled_for_other_keys_is_refused(gp):
    """As an export fills it; with a shift, keys are stored before they are split into heads."""
    model = gp.GbattnForCausalLM.from_language_model(book_model("shifted"))
    with refused("cache"):
        exported_logits(exportable(model), IDS[:1, :4])


@pytest.mark.parametrize("name", ["book", *FAMILIES])
def test_continuous_batching_is_refused_at_once(gp, name, monkeypatch):
    if name == "book":
        model = gp.GbattnForCausalLM.from_language_model(book_model("boosted"))
    else:
        model = gp.boost(family(name))
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: pytest.fail("computed"))
    with refused("model"):
        model.generate_batch(inputs=IDS.tolist())
    with refused("model"):
        model.init_continuous_batching()


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_correction_reads_x_minus_the_heads_or_minus_the_output_if_widths_differ(gp, name, monkeypatch):
    model, kept, residual = gp.boost(family(name), layers=[0]), [], gp.HeadCorrection.residual
    keep = lambda self, x, F: kept.append((residual(self, x, F), F)) or kept[-1][0]
    monkeypatch.setattr(gp.HeadCorrection, "residual", keep)
    layer = model.model.layers[0].self_attn
    layer.register_forward_pre_hook(lambda _, args, call: kept.append(call["hidden_states"]), with_kwargs=True)
    model(IDS)
    x, (r, F) = kept
    assert (F.shape == x.shape) == (name != "qwen3")
    assert torch.equal(r, x - (layer.o_proj(F) if name == "qwen3" else F))


def attention_call(gp):
    """The boosted attention of a Llama, and a call of it."""
    layer = shaken(gp.boost(family("llama"))).model.layers[0].self_attn
    turn = torch.ones(1, 3, layer.head_dim), torch.zeros(1, 3, layer.head_dim)  # by no angle
    return layer, dict(hidden_states=torch.randn(1, 3, 16), position_embeddings=turn)


@torch.no_grad()
def test_a_cache_is_taken_under_either_name_and_only_once(gp):
    from transformers import DynamicCache

    model = gp.GbattnForCausalLM.from_language_model(book_model("boosted"))
    wanted = model(IDS).logits[:, 5:]
    for body in (lambda **call: model(**call).logits, lambda **call: model.lm_head(model.model(**call)[0])):
        for name in ("cache", "past_key_values"):
            cache = DynamicCache()
            body(input_ids=IDS[:, :5], **{name: cache})
            assert torch.allclose(body(input_ids=IDS[:, 5:], **{name: cache}), wanted, atol=1e-5)
        with refused(gp.CACHE_NAME):
            body(input_ids=IDS, cache=DynamicCache(), past_key_values=DynamicCache())
        with refused(gp.CACHE_NAME):
            body(input_ids=IDS, cache=(IDS, IDS))
    layer, call = attention_call(gp)
    outputs = []
    for name in ("cache", "past_key_values"):
        cache = DynamicCache()
        outputs += [layer(**call, **{name: cache})[0] for _ in range(2)]
        assert cache.get_seq_length() == 6
    assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])


def test_a_keyword_that_nothing_reads_is_refused(gp):
    model = gp.GbattnForCausalLM.from_language_model(book_model("boosted"))
    for keyword in (dict(token_type_ids=IDS), dict(is_causal=False), dict(past_kv=())):
        for body in (model, model.model):
            with refused([*keyword][0]):
                body(IDS, **keyword)
    assert torch.equal(model(IDS, token_type_ids=None).logits, model(IDS).logits)
    layer, call = attention_call(gp)
    with refused("past_kv"):
        layer(**call, past_kv=())


@torch.no_grad()
def test_eager_attention_shows_its_weights_and_the_hidden_states(gp):
    model = book_model("boosted")
    copied = gp.GbattnForCausalLM.from_language_model(model)
    copied.set_attn_implementation("eager")
    output = copied(IDS, output_attentions=True, output_hidden_states=True)
    traces = model.outputs(IDS, traces=True)
    assert torch.allclose(output.logits, traces.logits, atol=1e-5)
    for weights, trace in zip(output.attentions, traces.traces):
        assert torch.allclose(weights, trace.rounds[0].weights, atol=1e-5)
    assert torch.allclose(output.hidden_states[1], traces.hidden_states[1], atol=1e-5)
    embedded = copied(inputs_embeds=copied.get_input_embeddings()(IDS))
    assert torch.allclose(embedded.logits, output.logits, atol=1e-6)
    linear = gp.GbattnForCausalLM.from_language_model(book_model("linear"))
    wanted = linear(IDS, attention_mask=REAL).logits
    linear.set_attn_implementation("eager")  # a mask of floats, for a layer that takes a boolean one
    assert torch.allclose(linear(IDS, attention_mask=REAL).logits[REAL > 0], wanted[REAL > 0], atol=1e-5)
    dropping = gp.GbattnForCausalLM.from_language_model(
        LanguageModel(ModelConfig(**SIZES, attention_options=dict(dropout=0.5)))
    ).train()
    dropping.set_attn_implementation("eager")
    with refused("dropout"):
        dropping(IDS)


def test_attention_weights_keep_a_gradient_beside_a_cache(gp):
    copied = gp.GbattnForCausalLM.from_language_model(book_model("boosted"))
    copied.set_attn_implementation("eager")
    output = copied(IDS, output_attentions=True, use_cache=True)
    for weights in output.attentions:
        weights.retain_grad()
    output.logits.sum().backward()
    assert all(weights.grad.any() for weights in output.attentions)


def test_checkpointed_gradients_are_the_same_and_labels_are_shifted(gp):
    model = book_model("boosted")
    copied = gp.GbattnForCausalLM.from_language_model(model).train()
    loss = copied(IDS, labels=IDS).loss
    assert torch.allclose(loss, model(IDS[:, :-1].contiguous(), IDS[:, 1:].contiguous()))
    loss.backward()
    plain = {name: weight.grad.clone() for name, weight in copied.named_parameters()}
    copied.zero_grad()
    enable = getattr(copied, "activation_checkpointing_enable", None)  # before 5.23 it has another name
    (enable or copied.gradient_checkpointing_enable)()
    copied(IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(torch.equal(plain[name], weight.grad) for name, weight in copied.named_parameters())


@torch.no_grad()
def test_saved_models_are_found_by_the_auto_classes(gp, tmp_path):
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    overrides = {1: dict(attention="multi_head", attention_options={})}
    model = book_model("boosted", overrides=overrides, tie_embeddings=False)
    copied = gp.GbattnForCausalLM.from_language_model(model, eos_token_id=3)
    copied.save_pretrained(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "config.json").read_text())  # no remote code
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is gp.GbattnConfig and config.to_model_config() == model.config and config.eos_token_id == 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is gp.GbattnForCausalLM and torch.equal(loaded(IDS).logits, model(IDS))
    body = AutoModel.from_pretrained(tmp_path)
    assert torch.equal(body(IDS).last_hidden_state, loaded.model(IDS).last_hidden_state)
    fresh = AutoModelForCausalLM.from_config(config)
    gates = [module for module in fresh.modules() if type(module).__name__ == "Gate"]
    assert gates and not any(weight.any() for gate in gates for weight in gate.parameters())


def test_a_config_names_what_is_wrong(gp):
    with refused("n_heads"):
        gp.GbattnConfig(d_model=16, n_heads=3)
    with refused("config"):
        gp.GbattnConfig.from_model_config({})
    with refused("model"):
        gp.GbattnForCausalLM.from_language_model(torch.nn.Linear(1, 1))
    assert gp.GbattnConfig(hidden_size=32, num_hidden_layers=1, n_heads=2).to_model_config().d_model == 32


# ---- boosting a trained model ----

OPTIONS = st.fixed_dictionaries(
    dict(
        rounds=st.sampled_from([2, 3]),
        kv_from=st.sampled_from(["residual", "input"]),
        gate=st.sampled_from(["feature", "head", "scalar", "none"]),
        layers=st.sampled_from([None, [0], [1], [1, 0]]),
    )
)


def both(problem, spoil=False):
    name, seed, options = problem
    plain = family(name, seed).double()
    boosted = package().boost(copy.deepcopy(plain), **options)
    if spoil:
        shaken(boosted, only="corrections.0.value.weight")
    with torch.no_grad():
        return boosted(IDS, attention_mask=REAL).logits, plain(IDS, attention_mask=REAL).logits


@claim(
    st.tuples(st.sampled_from(FAMILIES), st.integers(0, 3), OPTIONS),
    tolerance=0.0,
    mutant=lambda problem: both(problem, spoil=True),
    examples=16,
)
def test_prop_starts_as_nothing(problem):
    """Corrections with zero values change no bit of the logits."""
    return both(problem)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_boosted_model_writes_the_same_text_and_then_decodes_what_it_computes(gp, name, tmp_path):
    from transformers import AutoModelForCausalLM

    plain = family(name)
    model = gp.boost(copy.deepcopy(plain), 3)
    text = [m.generate(IDS, attention_mask=REAL, **GREEDY) for m in (plain, model)]
    assert torch.equal(*text)
    shaken(model, scale=0.3, only="corrections")
    logits = model(IDS, attention_mask=REAL).logits
    assert not torch.allclose(logits, plain(IDS, attention_mask=REAL).logits, atol=1e-3)
    options = [{}, dict(use_cache=False), dict(cache_implementation="static")]
    first, *others = (model.generate(IDS, attention_mask=REAL, **GREEDY, **o) for o in options)
    assert all(torch.equal(first, other) for other in others)
    beams = [model.generate(IDS, attention_mask=REAL, num_beams=3, use_cache=c, **GREEDY) for c in (True, False)]
    assert torch.equal(*beams)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(model) and torch.equal(loaded(IDS, attention_mask=REAL).logits, logits)
    assert loaded.config.to_dict() | dict(_name_or_path="") == model.config.to_dict()
    restored = gp.unboost(model)
    assert type(restored) is type(plain) and type(restored.config) is type(plain.config)
    assert torch.equal(restored(IDS).logits, plain(IDS).logits)
    assert {*restored.state_dict()} == {*plain.state_dict()}


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_the_plain_class_refuses_a_folder_whose_corrections_it_would_drop(gp, name, tmp_path):
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoModelForCausalLM

    plain = family(name)
    model = shaken(gp.boost(copy.deepcopy(plain), layers=[1]), scale=0.3, only="corrections")
    model.save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError, match="boosted_(full|sliding)_attention"):
        type(plain).from_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    types = config["layer_types"]
    assert [of.startswith("boosted_") for of in types] == [False, True]
    config |= dict(num_hidden_layers=2, layer_types=[of.removeprefix("boosted_") for of in types])
    path.write_text(json.dumps(config))  # the mutant, as it was saved before
    first_round, info = type(plain).from_pretrained(tmp_path, output_loading_info=True)  # which warns
    assert torch.equal(first_round(IDS).logits, plain(IDS).logits)
    assert {*info["unexpected_keys"]} == {*model.state_dict()} - {*plain.state_dict()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    gp.unboost(model).save_pretrained(tmp_path / "plain")
    again = type(plain).from_pretrained(tmp_path / "plain")
    assert torch.equal(again(IDS).logits, plain(IDS).logits)


@torch.no_grad()
def test_a_window_hides_the_same_tokens_from_every_round(gp):
    model = shaken(gp.boost(family("qwen2"), layers=[1]), scale=0.3, only="corrections")
    model.model.layers[0] = copy.deepcopy(model.model.layers[1])  # both have the window of 5
    model.config.layer_types = ["sliding_attention"] * 2
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx, layer.self_attn.extra = number, 2 + number
    far = IDS.clone()
    far[:, 0] = 39 - far[:, 0]
    # Layers · rounds · (5 − 1) tokens are as far as anything reaches: with r = x − F, a round reaches from F on.
    reach = 2 * 2 * 4
    long, longer = (torch.cat([x, IDS, IDS], 1) for x in (IDS, far))
    change = (model(long).logits - model(longer).logits).abs().amax((0, 2))
    assert change[0] > 0 and not change[reach + 1 :].any()


@torch.no_grad()
def test_a_boosted_gpt2_is_the_layer_of_chapter_8(gp):
    from gbattn.boosted import GradientBoostedAttention
    from gbattn.layers import MultiHeadAttention

    model = shaken(gp.boost(family("gpt2").double(), 3), scale=0.3, only="corrections")
    attn, x = model.transformer.h[0].attn, torch.randn(2, 7, 16, dtype=torch.float64)
    plain = MultiHeadAttention(16, 2, causal=True, dtype=torch.float64)
    for part, weight, bias in zip(
        (plain.query, plain.key, plain.value), attn.c_attn.weight.mT.chunk(3), attn.c_attn.bias.chunk(3)
    ):
        part.weight.copy_(weight), part.bias.copy_(bias)
    plain.out.weight.copy_(attn.c_proj.weight.mT), plain.out.bias.copy_(attn.c_proj.bias)
    layer = GradientBoostedAttention.from_attention(plain, rounds=3)
    layer.corrections.load_state_dict(attn.corrections.state_dict())
    mask = torch.ones(7, 7).bool().tril()[None, None]
    assert torch.allclose(attn(x, attention_mask=mask)[0], layer(x), atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_what_learns_first(gp, name):
    model = gp.boost(family(name), freeze=True).train()
    model(IDS, labels=IDS).loss.backward()
    learning = {
        n.split("corrections.0.")[-1] for n, w in model.named_parameters() if w.grad is not None and w.grad.any()
    }
    assert learning <= {"value.weight", "value.bias"} and "value.weight" in learning
    assert all("corrections" in n for n, w in model.named_parameters() if w.requires_grad)
    assert all(w.requires_grad for w in gp.boost(family(name)).parameters())


def quantisation(how):
    """What transformers is told to quantise by a library, if it is here."""
    import transformers as hf

    if how == "torchao int8":
        return hf.TorchAoConfig(pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig())
    pytest.importorskip("bitsandbytes")
    return hf.BitsAndBytesConfig(**{how: True})


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", "torchao int8"),  # which leaves GPT-2 as it is: its maps are no `nn.Linear`
        ("llama", "load_in_8bit"),
        ("llama", "load_in_4bit"),
        ("gpt2", "load_in_8bit"),
        ("gpt2", "load_in_4bit"),
    ],
)
def test_a_quantised_model_is_boosted_without_a_change_and_its_corrections_learn(gp, tmp_path, name, how):
    plain, told = family(name, width=128), dict(quantization_config=quantisation(how), device_map="cpu")
    plain.save_pretrained(tmp_path)
    with torch.no_grad():
        model = type(plain).from_pretrained(tmp_path, dtype=torch.float32, **told).eval()
        wanted = model(IDS).logits
        assert torch.equal(gp.boost(model, freeze=True)(IDS).logits, wanted)
        assert not torch.equal(plain(IDS).logits, wanted)
    # Anew: after an inference, weights of 4 bits may be packed so that no gradient goes through them.
    model = type(plain).from_pretrained(tmp_path, dtype=torch.float32, **told)
    model = shaken(gp.boost(model, freeze=True), 3, 0.3, "corrections").train()
    model(IDS, labels=IDS).loss.backward()
    learning = {n for n, w in model.named_parameters() if w.grad is not None and w.grad.any()}
    assert learning >= {n for n, _ in model.named_parameters() if "corrections" in n and n.endswith("weight")}
    assert all("corrections" in n for n in learning)


@torch.no_grad()
def test_the_books_own_model_is_boosted_too(gp, tmp_path):
    plain = gp.GbattnForCausalLM.from_language_model(book_model("grouped"))
    model = gp.boost(copy.deepcopy(plain), 3, kv_from="input", layers=[1])
    assert torch.equal(model(IDS).logits, plain(IDS).logits)
    shaken(model, scale=0.3, only="corrections")
    text = [model.generate(IDS, attention_mask=REAL, use_cache=c, **GREEDY) for c in (True, False)]
    assert torch.equal(*text)
    assert torch.equal(model.to_language_model()(IDS), model(IDS).logits)
    model.save_pretrained(tmp_path)
    loaded = gp.GbattnForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    again = gp.boost(loaded, layers=[0])  # a loaded config has strings for numbers
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    with refused("model"):
        gp.boost(loaded)
    restored = gp.unboost(again)
    assert restored.config.to_model_config() == plain.config.to_model_config()
    assert torch.equal(restored(IDS).logits, plain(IDS).logits)
    assert {*restored.state_dict()} == {*plain.state_dict()}
    assert torch.equal(restored.generate(IDS, **GREEDY), plain.generate(IDS, **GREEDY))
    restored.save_pretrained(tmp_path / "plain")
    loaded = gp.GbattnForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(loaded(IDS).logits, plain(IDS).logits)
    with refused("model"):
        gp.unboost(restored)


def test_a_layer_with_options_of_its_own_gets_them_back(gp):
    own = {1: dict(attention_options=dict(qk_norm=True), ffn="swiglu")}
    config = gp.GbattnConfig(vocab_size=40, d_model=16, n_layers=2, n_heads=2, overrides=own)
    model = gp.unboost(gp.boost(gp.GbattnForCausalLM(config)))
    assert model.config.to_model_config() == gp.GbattnForCausalLM(model.config).config.to_model_config()
    assert model.config.overrides[1]["attention_options"] == dict(qk_norm=True) and 0 not in model.config.overrides


@pytest.mark.parametrize(
    "options, argument",
    [
        (dict(rounds=1), "rounds"),
        (dict(kv_from="shared"), "kv_from"),
        (dict(gate="row"), "gate"),
        (dict(layers=[]), "layers"),
        (dict(freeze=1), "freeze"),
    ],
)
def test_boost_names_what_is_wrong(gp, options, argument):
    with refused(argument):
        gp.boost(family("llama"), **options)


def test_boost_takes_a_model_once_and_unboost_what_boost_returned(gp):
    from transformers import GPT2Config

    model = family("llama")
    with refused("model"):
        gp.unboost(model)
    with refused("model"):
        gp.boost(gp.boost(model))
    with refused("boosting"):
        gp.BoostedGPT2LMHeadModel(gp.BoostedGPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=40))
    odd = family("gpt2")
    odd.config = GPT2Config(**{**odd.config.to_dict(), "reorder_and_upcast_attn": True})
    with refused("model"):
        gp.boost(odd)


@pytest.mark.parametrize("part", ["attention", "projection", "compiled"])
@pytest.mark.parametrize("name", ("gpt2", "llama", "gbattn"))
def test_a_forward_that_an_instance_holds_is_refused_and_nothing_changes(gp, name, part):
    """The class that boost and unboost change would not reach it."""
    from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_submodules

    plain = family(name) if name != "gbattn" else gp.GbattnForCausalLM.from_language_model(book_model("standard"))
    for change in (gp.boost, gp.unboost):
        model = copy.deepcopy(plain) if change is gp.boost else shaken(gp.boost(copy.deepcopy(plain)))
        with torch.no_grad():
            logits, config = model(IDS).logits, model.config.to_dict()
        suffix = {"gpt2": "h.1.attn", "llama": "layers.1.self_attn", "gbattn": "blocks.1.attention"}[name]
        (layer,) = (module for path, module in model.named_modules() if path.endswith(suffix))
        hooked = [*layer.children()][0] if part == "projection" else layer
        if part == "compiled":
            hooked.forward = torch.compile(hooked.forward, backend="eager")
        else:
            add_hook_to_module(hooked, ModelHook())
        weights = {*model.state_dict()}
        with refused("model"):
            change(model)
        if part == "compiled":
            del hooked.forward
        else:
            remove_hook_from_submodules(model)
        with torch.no_grad():
            assert torch.equal(model(IDS).logits, logits)
        assert model.config.to_dict() == config and {*model.state_dict()} == weights
        changed = change(model)
        if change is gp.boost:
            changed(IDS, labels=IDS).loss.backward()
            moved = [w.grad is not None and w.grad.any() for n, w in changed.named_parameters() if "value.weight" in n]
            assert moved and all(moved)
        else:
            assert changed(IDS).logits.isfinite().all() and {*changed.state_dict()} == {*plain.state_dict()}


def test_attention_of_another_class_is_refused(gp):
    class Other(type(family("llama").model.layers[0].self_attn)):
        """Somebody's own."""

    model = family("llama")
    model.model.layers[1].self_attn.__class__ = Other
    with refused("model"):
        gp.boost(model)
    assert type(model).__name__ == "LlamaForCausalLM" and not any("corrections" in n for n in model.state_dict())


@torch.no_grad()
def test_a_boosted_model_shows_the_weights_of_its_own_round(gp):
    plain = family("llama")
    plain.set_attn_implementation("eager")
    model = gp.boost(copy.deepcopy(plain))
    shown = [m(IDS, output_attentions=True).attentions for m in (plain, model)]
    with eval_mode(model):
        assert len(shown[1]) == 2 and all(torch.equal(a, b) for a, b in zip(*shown))


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_boosted_model_takes_a_draft_back_as_the_plain_one_does(gp, name):
    plain = family(name)
    model = gp.boost(copy.deepcopy(plain), 3)
    options = dict(prompt_lookup_num_tokens=3, **GREEDY)
    prompt = IDS[:1, :3].repeat(1, 3)  # which repeats, and is longer than a window
    texts = [m.generate(prompt, **o) for m in (plain, model) for o in (GREEDY, options)]
    assert all(torch.equal(texts[0], text) for text in texts)


@pytest.mark.parametrize("kind", ATTENTION)
def test_a_model_of_transformers_can_be_pickled(gp, kind):
    model = gp.GbattnForCausalLM.from_language_model(book_model(kind))
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert [type(m) for m in again.modules()] == [type(m) for m in model.modules()]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_trainer_resumes_a_boosted_model_and_keeps_its_best(gp, tmp_path, name):
    from transformers import Trainer, TrainingArguments

    rows = [dict(input_ids=row, labels=row) for row in IDS.repeat(8, 1)]
    settings = dict(max_steps=4, per_device_train_batch_size=4, learning_rate=0.01, report_to=[], use_cpu=True)
    settings |= dict(eval_strategy="steps", eval_steps=1, save_steps=1, load_best_model_at_end=True)
    settings |= dict(disable_tqdm=True, dataloader_pin_memory=False)
    settings |= dict(metric_for_best_model="loss", greater_is_better=True)  # so the first one is the best
    arguments = TrainingArguments(str(tmp_path), **settings)

    def trained(**options):
        trainer = Trainer(gp.boost(family(name)), arguments, train_dataset=rows, eval_dataset=rows[:4])
        trainer.train(**options)
        return trainer

    first = trained()
    losses = [entry["eval_loss"] for entry in first.state.log_history if "eval_loss" in entry]
    assert len(losses) == 4 and losses[-1] < losses[0] - 0.01
    assert first.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-4)
    again = trained(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", (*FAMILIES, "gbattn"))
def test_trainer_smooths_labels_that_are_shifted(gp, name, tmp_path):
    from transformers import Trainer, TrainingArguments

    book = gp.GbattnForCausalLM.from_language_model(book_model("standard"))
    model = gp.boost(book if name == "gbattn" else family(name))
    settings = dict(label_smoothing_factor=0.1, report_to=[], use_cpu=True)
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings))
    logs = model(IDS).logits[:, :-1].log_softmax(-1)
    wanted = -0.9 * logs.gather(-1, IDS[:, 1:, None]).mean() - 0.1 * logs.mean()
    assert torch.allclose(trainer.compute_loss(model, dict(input_ids=IDS, labels=IDS)), wanted)


def test_trainer_trains_the_corrections_alone(gp, tmp_path):
    from transformers import Trainer, TrainingArguments

    model = gp.boost(gp.GbattnForCausalLM.from_language_model(book_model("standard")), freeze=True)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    rows = [dict(input_ids=row, labels=row) for row in IDS.repeat(20, 1)]
    settings = dict(max_steps=10, per_device_train_batch_size=4, learning_rate=0.01, report_to=[])
    settings |= dict(save_strategy="no", use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False)
    result = Trainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=rows).train()
    assert result.global_step == 10
    moved = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved and all("corrections" in name for name in moved)
    assert (
        model(IDS, labels=IDS).loss
        < gp.GbattnForCausalLM.from_language_model(book_model("standard"))(IDS, labels=IDS).loss
    )


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (dict(input_ids=IDS + 40), "input_ids"),
        (dict(input_ids=-IDS - 1), "input_ids"),
        (dict(input_ids=IDS.repeat(1, 4)), "position_ids"),
        (dict(input_ids=IDS, position_ids=torch.arange(9)[None] + 30), "position_ids"),
    ],
)
def test_a_token_or_position_beyond_its_table_is_named(gp, call, name):
    model = gp.GbattnForCausalLM(gp.GbattnConfig.from_model_config(ModelConfig(**SIZES)))
    with refused(name):
        model(**call)
