"""How the benchmarks take turns, what they make of the times, and that they measure what they say.

Nothing here is timed.
"""

import itertools
import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import attention_layers
import least_squares
import measuring
import training_step
from measuring import Times, take_turns


@pytest.mark.parametrize(("turns", "low", "high"), [(3, 1, 3), (6, 1, 6), (9, 2, 8), (15, 4, 12), (45, 16, 30)])
def test_a_ratio_has_the_interval_of_the_sign_test(turns, low, high):
    order = random.Random(turns).sample(range(1, turns + 1), turns)
    ratio = Times(tuple(float(i) for i in order)).over(Times((1.0,) * turns))
    assert ratio == ((turns + 1) / 2, low, high)


def test_the_interval_covers_the_median_as_often_as_it_says():
    draw, ones = random.Random(0), Times((1.0,) * 15)
    ratios = (Times(tuple(math.exp(draw.gauss(0, 0.1)) for _ in range(15))).over(ones) for _ in range(2000))
    share = sum(ratio.low <= 1 <= ratio.high for ratio in ratios) / 2000
    assert 0.95 < share < 0.98  # 0.965, since turns come whole


def test_a_drift_of_the_machine_cancels_in_a_ratio_and_not_in_the_medians():
    drift = (1.0, 1.0, 1.0, 2.0, 3.0, 3.0, 3.0)
    half = Times((1.0, 1.0, 1.0, 1.0, 3.0, 3.0, 3.0))  # the second of each turn meets the change one turn later
    assert Times(drift).over(half).median == 1.0
    assert Times(drift).median / half.median == 2.0
    assert not Times(drift).over(half).known_to(0.5)
    assert Times(drift).over(Times(drift)).known_to(0.0)


def test_turns_alternate_and_go_on_until_the_times_are_enough():
    said = []
    methods = {name: lambda name=name: said.append(name) for name in "ab"}
    timed = take_turns(methods, 2, settle=0.0, patience=5, enough=lambda times: len(times["a"].seconds) == 4)
    assert said == ["a", "b"] * 4
    assert [len(times.seconds) for times in timed.values()] == [4, 4]
    assert len(take_turns(methods, 2, settle=0.0, patience=3, enough=lambda times: False)["b"].seconds) == 6
    assert len(take_turns(methods, 2, settle=0.0)["b"].seconds) == 2


def test_an_untimed_call_comes_first_however_slow_the_clock(monkeypatch):
    said, clock = [], itertools.count()
    monkeypatch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    take_turns({name: lambda name=name: said.append(name) for name in "ab"}, 2, settle=1e-6)
    assert said == ["a", "a", "b", "b"] * 2


# ---- Layers ----


def layer_options(**changed):
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "compile": False, "runs": 1, "whole": False}
    options |= {"author": None, "layers": None}
    return SimpleNamespace(**options | changed)


def test_every_method_is_compiled_and_none_a_second_time(monkeypatch):
    B, T, D, H = 1, 8, 16, 2
    programs, fused, name = Counter(), set(), None

    def backend(graph, inputs):
        programs[name] += 1
        if "scaled_dot_product_attention" in graph.code:
            fused.add(name)
        return graph

    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda method, **how: real(method, backend=backend, **how))
    made, x = attention_layers.layers(D, H, False), torch.randn(B, T, D)
    methods = attention_layers.methods_of(made, D, H, T, "kept", layer_options(compile=True))
    uncompiled = attention_layers.methods_of(made, D, H, T, "kept", layer_options())
    for _ in range(2):
        for name, method in methods.items():
            with torch.no_grad():
                answer = method(x)
                if name not in ("nn.MultiheadAttention", "multi_head transformers"):  # have weights of their own
                    torch.testing.assert_close(answer, uncompiled[name](x))
    assert len(methods) > 8 and programs == dict.fromkeys(methods, 1)
    for name in attention_layers.WITH_NAIVE:
        assert {name, f"{name} floor"} <= fused and f"{name} naive" not in fused


class Attentions(TorchFunctionMode):
    """Counts the fused calls, and the softmaxes by the shape of their weights."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        name = getattr(function, "__name__", "")
        if name in ("softmax", "scaled_dot_product_attention"):
            self.found[name, tuple(result.shape)] += 1
        return result


@pytest.mark.parametrize(("name", "rounds"), [*zip(attention_layers.WITH_NAIVE, (1, 2, 2))])
def test_a_naive_form_builds_its_weights_and_a_layer_does_not(name, rounds):
    B, T, D, H = 2, 6, 16, 4
    layers, x = attention_layers.layers(D, H, False), torch.randn(B, T, D)
    methods = attention_layers.methods_of(layers, D, H, T, "kept", layer_options())
    found, answers = {}, {}
    for method in (name, f"{name} floor", f"{name} naive"):
        with Attentions() as calls:
            answers[method] = methods[method](x)
        found[method] = dict(calls.found)
    fused = {("scaled_dot_product_attention", (B, H, T, D // H)): rounds}
    assert found == {name: fused, f"{name} floor": fused, f"{name} naive": {("softmax", (B, H, T, T)): rounds}}
    torch.testing.assert_close(answers[f"{name} naive"], answers[name])
    answers[f"{name} naive"].sum().backward()
    assert all(weight.grad is not None for weight in layers[name].parameters())


def test_a_naive_form_that_is_none_is_found_in_half_precision_too(monkeypatch):
    right = attention_layers.naive
    wrong = lambda *given: lambda x, **how: 1.2 * right(*given)(x, **how)
    monkeypatch.setattr(attention_layers, "naive", wrong)
    monkeypatch.setattr(attention_layers, "methods_of", lambda *given: pytest.fail("nothing is wrong, it says"))
    with pytest.raises(SystemExit, match="naive"):
        attention_layers.benchmark_layers((1, 64, 16, 2), "kept", layer_options(dtype=torch.bfloat16))


@pytest.fixture
def told(monkeypatch):
    """What the benchmark of the layers goes through for these arguments."""

    def run(*arguments):
        done = []
        monkeypatch.setattr(sys, "argv", ["attention_layers.py", *arguments])
        monkeypatch.setattr(attention_layers, "keep_memory", lambda: done.append("memory is kept") or True)
        monkeypatch.setattr(attention_layers, "benchmark_layers", lambda shape, memory, options: done.append(memory))
        monkeypatch.setattr(attention_layers, "benchmark_decoding", lambda options: done.append("decoding"))
        attention_layers.main()
        return done

    return run


def test_memory_is_returned_before_it_is_kept(told):
    whole = ["returned", "memory is kept", "kept", "memory is kept", "decoding"]
    assert told("--shapes", "0") == told("--shapes", "0", "--memory", "kept", "returned") == whole


def test_decoding_is_timed_with_memory_kept_or_not_at_all(told):
    assert told("--shapes", "0", "--memory", "returned") == ["returned", "memory is kept", "decoding"]
    assert told("--shapes", "0", "--memory", "returned", "--modes", "compiled") == ["returned"]
    both = told("--shapes", "0", "--memory", "returned", "--modes", "eager", "compiled")
    assert both == ["returned", "memory is kept", "decoding", "returned"]
    assert told("--shapes", "0", "--memory", "returned", "--no-decoding") == ["returned"]


def test_some_layers_are_timed_alone(monkeypatch, tmp_path, capsys, told):
    monkeypatch.setenv("GBATTN_RESULTS", str(tmp_path))
    options = layer_options(layers=["twicing"], machine={}, prefix="", settle=1e-6, wait=lambda: None)
    attention_layers.benchmark_layers((1, 256, 16, 2), "kept", options)
    names = {json.loads(path.read_text())["settings"]["method"] for path in tmp_path.rglob("*.json")}
    assert {"twicing", "twicing floor", "twicing naive"} < names and "multi_head" not in names
    with pytest.raises(SystemExit):
        told("--layers", "thrice")
    assert "--layers: thrice; known are multi_head, twicing" in capsys.readouterr().err


AUTHOR = """
import torch
class CausalAttention(torch.nn.Module):
    def __init__(self, d_model, n_heads):
        super().__init__()
        self.value = torch.nn.Linear(d_model, d_model)
    def forward(self, x):
        return self.value(x).cumsum(1)
class BoostedCausalAttention(CausalAttention): ...
class TwicingCausalAttention(CausalAttention): ...
"""


def test_what_others_have_is_timed_beside_ours(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "author.py").write_text(AUTHOR)
    layers, (x, y) = attention_layers.layers(16, 2, False), torch.randn(2, 1, 8, 16)
    y[:, :5] = x[:, :5]
    methods = attention_layers.methods_of(layers, 16, 2, 8, "kept", layer_options(author=tmp_path / "author.py"))
    pairs = "multi_head", "twicing", "boosted residual feature"
    others = {"multi_head transformers", *(f"{name} author" for name in pairs)}
    assert others <= {*methods}
    for name in others:  # causal without being told
        changed = (methods[name](x) - methods[name](y)).abs().amax((0, 2)) > 1e-6
        assert changed.tolist() == [False] * 5 + [True] * 3
    groups = attention_layers.groups_of(methods)
    assert {*groups} == {*layers} and others == {n for group in groups.values() for n in group} & others
    compared = {name for layer, group in groups.items() for name, *_ in attention_layers.comparisons(layer, group)}
    assert others <= compared


# ---- Training steps ----


def test_the_textbook_keeps_no_gradients_between_steps(monkeypatch):
    """Else its memory would be counted from a higher level than that of the others."""
    models = []

    class Textbook(training_step.Textbook):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            models.append(self)

    monkeypatch.setattr(training_step, "Textbook", Textbook)
    B, T, D, H, layers, V = shape = training_step.SHAPES["quick"]
    batch = torch.randint(V, (2, B, T))
    run = SimpleNamespace(stream=SimpleNamespace(batch=lambda step: batch))
    step = training_step.textbook_step(run, shape, torch.device("cpu"), "no", False)
    before = [parameter.detach().clone() for parameter in models[0].parameters()]
    step()
    assert all(parameter.grad is None for parameter in models[0].parameters())
    assert not any(torch.equal(a, b) for a, b in zip(before, models[0].parameters(), strict=True))


def test_one_arm_is_timed_against_the_standard_one_whose_records_stay(monkeypatch, tmp_path):
    pytest.importorskip("accelerate")
    arguments = ["--quick", "--arms", "twicing last2", "--precisions", "no", "--folder", str(tmp_path)]
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(sys, "argv", ["training_step.py", *arguments])
    kept = tmp_path / "benchmark-training-step" / "quick-no-standard.json"
    kept.parent.mkdir()
    kept.write_text('{"measured": {"over_standard": 1.0, "predicted_ratio": 0.0}}')
    training_step.main()
    assert json.loads(kept.read_text())["measured"].popitem() == ("predicted_ratio", 0.0)
    kept.unlink()
    records = {path.stem: json.loads(path.read_text())["measured"] for path in tmp_path.glob("*-step/*.json")}
    assert records.keys() == {f"quick-no-twicing-last2{kind}" for kind in ("", "-plain", "-products")}
    assert all(measured["over_standard"] > 0 for measured in records.values())
    # Two layers of four have the second look, which is two of the many products of a layer.
    assert 1 < records["quick-no-twicing-last2"]["predicted_ratio"] < 1.15


# ---- GPT-2 ----


def test_the_gpt2_that_is_timed_has_our_weights(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    import against_gpt2

    monkeypatch.setattr(sys, "argv", ["against_gpt2.py", "--quick", "--folder", str(tmp_path)])
    monkeypatch.setattr(torch, "compile", lambda module, **options: module)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: None)
    against_gpt2.main()
    (path,) = tmp_path.glob("*/quick.json")
    measured = json.loads(path.read_text())["measured"]
    assert len(measured) == 14 and all(row["over_gpt2"] > 0 for row in measured.values())

    right = against_gpt2.gpt2_of

    def wrong(model):
        gpt2 = right(model)
        gpt2.transformer.h[0].attn.c_attn.bias.data[0] += 1
        return gpt2

    monkeypatch.setattr(against_gpt2, "gpt2_of", wrong)
    with pytest.raises(AssertionError):
        against_gpt2.main()


@pytest.mark.parametrize(("found", "arguments"), [("mps", []), ("cuda", ["--device", "cpu"])])
def test_a_device_that_cannot_be_timed_is_refused(monkeypatch, found, arguments):
    accelerate = pytest.importorskip("accelerate")
    monkeypatch.setattr(accelerate, "Accelerator", lambda: SimpleNamespace(device=torch.device(found)))
    monkeypatch.setattr(training_step, "benchmark", lambda *given: pytest.fail("was timed"))
    monkeypatch.setattr(sys, "argv", ["training_step.py", *arguments])
    with pytest.raises(SystemExit, match="ACCELERATE_USE_CPU"):
        training_step.main()


# ---- Command lines ----


@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [(module, ["--runs", "0"]) for module in (attention_layers, least_squares, training_step)]
    + [(attention_layers, ["--shapes", "-1"]), (attention_layers, ["--dtype", "int32"])]
    + [(attention_layers, ["--device", "cuda", "--memory", "returned"])]
    + [(module, ["--device", "cuda:1"]) for module in (attention_layers, training_step)],
    ids=lambda part: part.__name__ if hasattr(part, "__name__") else " ".join(part),
)
def test_bad_arguments_are_refused(monkeypatch, capsys, benchmark, arguments):
    for name in ("benchmark", "benchmark_layers", "benchmark_decoding", "benchmark_regression"):
        if hasattr(benchmark, name):
            monkeypatch.setattr(benchmark, name, lambda *given: pytest.fail("was timed"))
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit) as refused:
        benchmark.main()
    assert refused.value.code == 2 and arguments[0] in capsys.readouterr().err
