"""The tools that people use, on SmolLM2 with corrections that have moved. Each test skips without what it needs."""

import json
import shutil

import pytest
import torch

from gbattn.lab.real_model import INSTALL_SMOLLM2, has_smollm2, load_smollm2

IDS = torch.tensor([[504, 3575, 282, 4649, 314]])  # The capital of France is
LAYERS = [20, 29]
TEXT = dict(max_new_tokens=4, do_sample=False, pad_token_id=2)
pytestmark = pytest.mark.filterwarnings("ignore")  # of the tools


@pytest.fixture(name="cache", scope="module")
def fixture_cache(tmp_path_factory):
    """A folder with the plain model in safetensors."""
    if not has_smollm2():
        pytest.skip(f"SmolLM2 is not installed: {INSTALL_SMOLLM2}")
    cache = tmp_path_factory.mktemp("cache")
    load_smollm2(cache)
    yield cache
    shutil.rmtree(cache)


@pytest.fixture(name="real")
def fixture_real(cache):
    """Make the boosted model anew, always the same."""
    from gbattn.pretrained import boost

    def make(**options):
        torch.manual_seed(5)
        model = boost(load_smollm2(cache)[0], **dict(layers=LAYERS, gate="head") | options)
        for layer in model.config.boosting["layers"]:
            torch.nn.init.normal_(model.model.layers[layer].self_attn.corrections[0].value.weight, std=0.02)
        return model

    return make


@torch.no_grad()
def moved(model, names):
    """Move the weights with one of these names."""
    torch.manual_seed(6)
    for name, weight in model.named_parameters():
        if any(of in name for of in names) and weight.requires_grad:
            weight += 0.02 * torch.randn(weight.shape)


def test_peft_adds_lora_merges_it_and_saves_it(real, tmp_path):
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="target_modules"):  # peft knows models by a table
        peft.get_peft_model(real(), peft.LoraConfig(r=4))
    # The corrections learn and are saved beside LoRA, each by the name that ends its place.
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["corrections.0"])
    saved = tmp_path / "boosted"
    real().save_pretrained(saved)  # first: an adapter names the folder of the model under it
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(saved)
    logits = base(IDS).logits
    model = peft.get_peft_model(base, config)
    assert torch.equal(model(IDS).logits, logits)
    moved(model, ("lora_B",))
    model(IDS, labels=IDS).loss.backward()
    learning = {n for n, w in model.named_parameters() if w.grad is not None and w.grad.any()}
    assert all("lora_" in n or "corrections.0.modules_to_save" in n for n in learning)
    assert any("lora_" in n for n in learning) and any("corrections" in n for n in learning)
    moved(model, ("modules_to_save",))
    with torch.no_grad():
        changed = model(IDS).logits
        assert (changed - logits).abs().max() > 0.1
        model.save_pretrained(tmp_path / "adapter")
        told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == str(saved)
        again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved), tmp_path / "adapter")
        assert torch.equal(again(IDS).logits, changed)
        merged = model.merge_and_unload()
        assert type(merged).__name__ == "BoostedLlamaForCausalLM"
        assert torch.allclose(merged(IDS).logits, changed, atol=1e-3)
        assert torch.equal(merged.generate(IDS, **TEXT), again.generate(input_ids=IDS, **TEXT))


def test_trainer_resumes_with_the_same_weights(real, tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [dict(input_ids=row, labels=row) for row in (IDS[0].repeat(4) + 7 * i for i in range(8))]
    settings = dict(max_steps=4, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[])
    settings |= dict(use_cpu=True, disable_tqdm=True, dataloader_pin_memory=False)

    def trained(**options):
        model = real(layers=[29], freeze=True)
        trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings), train_dataset=rows)
        trainer.train(**options)
        return {n: w for n, w in trainer.model.named_parameters() if w.requires_grad}

    start = {n: w.clone() for n, w in real(layers=[29], freeze=True).named_parameters() if w.requires_grad}
    whole = trained()
    resumed = trained(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert whole.keys() == resumed.keys() == start.keys()
    assert all(torch.equal(whole[n], resumed[n]) for n in whole)
    assert not any(torch.equal(whole[n], start[n]) for n in whole)
    shutil.rmtree(tmp_path)


@torch.no_grad()
def test_the_forward_pass_is_exported_for_any_length(real):
    model, call = real(), dict(input_ids=IDS, use_cache=False)
    shapes = dict(input_ids={1: torch.export.Dim("T", min=2, max=64)}, use_cache=None)
    program = torch.export.export(model, (), call, dynamic_shapes=shapes, strict=False).module()
    for ids in (IDS, torch.cat([IDS, IDS.flip(1)], 1)):
        want = model(ids, use_cache=False).logits
        assert torch.allclose(program(input_ids=ids, use_cache=False).logits, want, atol=1e-3)


@torch.no_grad()
def test_a_step_of_decoding_is_exported(real):
    from transformers.integrations import executorch

    model = real()
    model.generation_config.use_cache = True
    model.generation_config.cache_implementation = "static"
    module = executorch.TorchExportableModuleWithStaticCache(model, batch_size=1, max_cache_len=12)
    at = lambda i: dict(input_ids=IDS[:, i : i + 1], cache_position=torch.tensor([i]))
    module(**at(0))  # appends the entries of further rounds
    program = torch.export.export(module, (), at(0), strict=False).module()
    steps = torch.cat([program(**at(i)) for i in range(IDS.shape[1])], 1)
    assert torch.allclose(steps, model(IDS, use_cache=False).logits, atol=1e-3)


@torch.no_grad()
def test_torchao_loads_a_boosted_folder_in_eight_bits_and_saves_it(real, tmp_path):
    quantization = pytest.importorskip("torchao.quantization")
    import transformers as hf

    model = real()
    logits = model(IDS).logits
    model.save_pretrained(tmp_path / "boosted")
    told = dict(quantization_config=hf.TorchAoConfig(quantization.Int8WeightOnlyConfig()), device_map="cpu")
    small = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "boosted", dtype=torch.float32, **told).eval()
    assert type(small.model.layers[20].self_attn.corrections[0].query.weight) is not torch.nn.Parameter
    quantised = small(IDS).logits
    assert 0 < (quantised - logits).norm() / logits.norm() < 0.1
    small.save_pretrained(tmp_path / "small")
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "small", device_map="cpu")
    assert torch.equal(again(IDS).logits, quantised)
