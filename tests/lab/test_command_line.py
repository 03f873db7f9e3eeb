"""The program: its words and their help, exit codes, Ctrl-C and SIGTERM, and errors that are one line."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from functools import wraps
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from gbattn.blocks import NORMALIZERS, PLACEMENTS
from gbattn.lab import command_line, commands
from gbattn.lab.checkpoints import checkpoints
from gbattn.lab.command_line import main, options
from gbattn.lab.commands import COMMANDS, write
from gbattn.lab.commands.options import MODEL, TRAINING
from gbattn.language_model import LanguageModel, ModelConfig, parameter_count
from gbattn.training import TrainConfig
from tiny_model import PROGRAM, SHORT, SMALL, denied, sentences

pytestmark = pytest.mark.usefixtures("own_places")


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_the_list_of_commands_loads_nothing_heavy(word):
    program = (
        "import sys; from gbattn.lab.command_line import main; main(); print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, word], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert {"gbattn.lab.command_line", "gbattn.lab.commands"} <= loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "tyro", "accelerate", "tokenizers"}


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_the_list_of_commands(call, words):
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    for name, command in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(command.function.__doc__.splitlines()[0])}$", out, re.M)
    assert max(map(len, out.splitlines())) < 80


def test_the_version(call):
    import gbattn

    assert call("--version") == (0, f"gbattn {gbattn.__version__}\n", "")


HEAVY = {"torch", "numpy", "matplotlib", "accelerate", "tokenizers"}


@pytest.mark.parametrize("words", [*([name, "--help"] for name in COMMANDS), ["run"], ["run", "--results", "new"]])
def test_help_and_the_list_of_experiments_load_no_torch_and_fit_a_terminal(words, tmp_path):
    """In a checkout of the book, and elsewhere."""
    program = (
        "import sys; from gbattn.lab.command_line import main; main(); print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    place = dict(cwd=tmp_path if "new" in words else Path(__file__).parent, env=os.environ | {"COLUMNS": "80"})
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=True, **place)
    assert not set(done.stderr.split()) & HEAVY and list(tmp_path.iterdir()) == []
    lines = done.stdout.splitlines()
    assert max(len(line) for line in lines if not line.startswith("records: ")) <= 80
    if words[0] == "run" and len(words) != 2:
        assert re.search(r"^mini +(0|30) of +30 runs$", done.stdout, re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_may_be_left_out_stands_in_brackets(call, command):
    usage = call(command, "--help")[1].splitlines()[0]
    for option in options(command):
        if option.word:
            may_be_left_out = option.default is not command_line.MISSING
            assert (f"[{option.typed}" in usage) == may_be_left_out and option.typed in usage
    assert command == "compare" or call(command, "--help")[1].find("(required)") == -1


def test_a_word_may_be_typed_as_an_option(text, trained, tmp_path, call, result):
    words = ["--folder", trained, "--max-new-tokens", 4]
    said = result("generate", "the dog", *words)["texts"]
    assert said == result("generate", "--prompt", "the dog", *words)["texts"]
    assert said == result("generate", "--prompt=the dog", *words)["texts"]
    assert call("generate", "a cat", "--prompt", "the dog", *words)[0] == 2  # one of them would be dropped
    small = [*SMALL, "--steps", 2, "--sample-tokens", 5]
    as_words = result("train", text, "the dog", "--folder", tmp_path / "words", *small)
    as_options = result("train", "--corpus", text, "--prompt", "the dog", "--folder", tmp_path / "options", *small)
    assert as_words["sample"] == as_options["sample"] and as_words["sample"].startswith("the dog")
    denied(call("generate", "--prompt", "", *words), 2, "--prompt: got ''")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_mentions_every_option(call, command):
    code, out, err = call(command, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: gbattn {command} ")
    assert "--json" in out and "``" not in out
    plain = " ".join(re.sub(r"[│╭╰─╮╯]", " ", out).split())
    for option in options(command):
        name = option.name.upper() if option.word else "--" + option.name.replace("_", "-")
        assert re.search(rf"(?<![\w-]){name}\b", out), name
        assert option.help.endswith(".") and option.help in plain, option


def test_the_options_of_train_are_the_fields_of_its_dataclasses():
    found = [(option.owner, option.name) for option in options("train") if option.owner]
    wanted = [(kind.__name__, entry.name) for kind in (ModelConfig, TrainConfig) for entry in fields(kind)]
    assert found == wanted
    names = [option.name for option in options("train")]
    assert len(set(names)) == len(names)


def choices_of(config, name, **rest):
    """What a dataclass says that it would have taken, in place of nonsense."""
    with pytest.raises(ValueError) as caught:
        config(**{name: "nonsense"}, **rest)
    wanted = str(caught.value).partition("; want ")[2]
    return re.findall(r"'([\w-]+)'", wanted) or re.findall(r"[\w-]+", wanted.removeprefix("one of"))


def test_the_help_names_every_choice():
    help_of = {option.name: option.help for option in options("train")}
    choices = {"norm": PLACEMENTS, "normalizer": NORMALIZERS}
    for config, rest in ((ModelConfig, dict(vocab_size=9)), (TrainConfig, dict(steps=1))):
        chosen = [entry.name for entry in fields(config) if entry.type is str]
        choices |= {name: choices_of(config, name, **rest) for name in chosen}
    assert {"schedule", "precision", "decay", "keep", "positions", "attention", "ffn", "norm"} <= set(choices)
    assert choices["precision"] == ["no", "tf32", "bf16", "fp16"] and "boosted" in choices["attention"]
    # Registered where chapters 17, 22, 24 and 29 are loaded: an arm of one experiment, and layers of neighbours.
    later = {"boosted_trial", "fast_feed_forward", "sinkhorn", "hierarchical"}
    choices["attention"] = sorted({*choices["attention"]} - later)
    for name, found in choices.items():
        assert all(re.search(rf"(?<![\w-]){choice}\b", help_of[name]) for choice in found), name
    assert set(command_line.PLAINER_HELP) <= set(help_of)
    own = {(name, option.name): option.help for name in COMMANDS for option in options(name)}
    assert own["evaluate", "split"].endswith("One of test, valid, train.")
    assert own["bench", "dtype"].endswith("One of float32, bfloat16.")
    assert own["train", "tokenizer"].endswith("One of byte-level, published.")


def test_the_defaults_of_train():
    chosen = command_line.arguments_of("train", [])
    assert chosen["model"] == ModelConfig(**MODEL)
    assert chosen["training"] == TrainConfig(**TRAINING)
    assert chosen["model"].attention == "boosted"
    assert (chosen["corpus"], chosen["folder"], chosen["json"]) == ("python-docs", Path("gbattn-model"), False)
    assert parameter_count(chosen["model"]).total < 2_000_000


maybe = lambda values: st.none() | values


CONFIGS = st.fixed_dictionaries(
    {
        "learning_rate": st.floats(1e-6, 1),
        "betas": st.tuples(st.floats(0, 0.9), st.floats(0, 0.999)),
        "clip": maybe(st.floats(0.1, 9)),
        "warmup_steps": maybe(st.integers(0, 99)),
        "compile": st.booleans(),
        "precision": st.sampled_from(["no", "bf16"]),
        "seed": st.integers(0, 2**32 - 1),
        "evaluate_every": maybe(st.integers(1, 99)),
    }
)


@settings(max_examples=25, deadline=None)
@given(CONFIGS, st.booleans(), st.dictionaries(st.sampled_from(["0", "1"]), st.just({"attention": "twicing"})))
def test_what_is_said_is_what_is_meant(training, visits, overrides):
    """Any config can be spelled, and is read as it was meant."""
    length = {"epochs": 1.5} if visits else {"steps": 7}
    words = ["--overrides", json.dumps(overrides), "--attention-options", '{"rounds": 3}']
    for name, value in (training | length).items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{dashed}" if value else f"--no-{dashed}")
        else:
            words += [f"--{dashed}", *map(str, value if isinstance(value, tuple) else [value])]
    chosen = command_line.arguments_of("train", words)
    assert chosen["training"] == TrainConfig(**TRAINING | {"steps": None} | training | length)
    assert chosen["model"] == ModelConfig(**MODEL | {"overrides": overrides, "attention_options": {"rounds": 3}})


@pytest.mark.parametrize(
    "words, parts",
    [
        (["train", "--d-model", "0"], ["--d-model: got 0; want a positive integer", "gbattn train --help"]),
        (["train", "--steps", "3", "--epochs", "1"], ["--steps, --epochs: got", "want exactly one of the two"]),
        (["train", "--attention", "magic"], ["--attention: got 'magic'; want one of"]),
        (["train", "--attention-options", '{"rounds": 0}'], ["--attention-options, rounds: got 0"]),
        (["train", "--attention-options", '{"dropout": 2}'], [": --attention-options, dropout: got 2"]),
        (["train", "--attention-options", '{"dropout": 0.1}', "--dropout", "2"], [": --dropout: got 2"]),
        (["train", "--overrides", '{"1": {"d_ffn": 0}}'], [": --overrides, d_ffn: got 0"]),
        (["bench", "--attention-options", '{"dropout": 2}'], [": --attention-options, dropout: got 2"]),
        (["learn"], ["gbattn: no command 'learn'; there are train, evaluate"]),
    ],
)
def test_words_that_are_not_understood(call, words, parts):
    denied(call(*words), 2, *parts)


@pytest.mark.parametrize(
    "words, part",
    [
        (["train", "--nonsense", "3"], "--nonsense"),
        (["train", "--folder", ""], "want a path, such as . for this folder"),
        (["evaluate", "--text="], "want a path, such as . for this folder"),
        (["run", "--results", ""], "want a path, such as . for this folder"),
        (["train", "--d-model", "wide"], "--d-model"),
        (["train", "--overrides", "{a"], "--overrides"),
        (["run", "quick", "--shard", "2"], "K/N, such as 2/8"),
        (["run", "quick", "--shard", "a/b"], "K/N, such as 2/8"),
        (["compare"], "NAME"),
        (["bench", "--attention", "boosted"], "--attention"),
    ],
)
def test_words_that_the_parser_refuses(call, words, part):
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert part in err and f"gbattn {words[0]} --help" in err


@pytest.mark.parametrize("package", ["tyro", "tokenizers", "accelerate", "safetensors.torch"])
def test_without_an_extra(text, trained, tmp_path, call, monkeypatch, package):
    """All are loaded by now, `trained` sees to it: one that is half loaded is not one that is missing."""
    monkeypatch.setitem(sys.modules, package, None)
    corpus = tmp_path / "text"  # not in the cache
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text(sentences(40, 5))
    outcome = call("train", corpus, "--folder", tmp_path / "model", *SHORT)
    denied(outcome, 1, package.split(".")[0], "pip install 'gbattn[")


def test_an_error_that_is_not_ours_is_one_short_line(trained, call, monkeypatch):
    def broken(*words, **how):
        raise RuntimeError("no kernel\n" + "generated code\n" * 9000)

    def endless(*words, **how):
        raise RuntimeError("x" * 9000)

    words = ["generate", "--folder", trained]
    monkeypatch.setattr(write, "continued", broken)
    assert call(*words)[2] == "gbattn generate: no kernel\n"
    monkeypatch.setenv("GBATTN_DEBUG", "1")
    with pytest.raises(RuntimeError, match="generated"):
        call(*words)
    monkeypatch.delenv("GBATTN_DEBUG")
    monkeypatch.setattr(write, "continued", endless)
    assert len(call(*words)[2]) < 340


def test_a_mistake_of_ours_is_not_hidden(monkeypatch, trained):
    class Bug(TypeError):
        pass

    def broken(*words, **how):
        raise Bug

    monkeypatch.setattr(write, "continued", broken)
    with pytest.raises(Bug):
        main(["generate", "--folder", str(trained)])


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is sent as a POSIX signal here.")
def test_ctrl_c_keeps_the_checkpoint(text, tmp_path, call, result):
    """Stopped and started again, a run ends as one that was never stopped, bit for bit."""
    length = [*SMALL, *"--prompt cat --sample-tokens 5 --steps 300 --checkpoint-every 15 --log-every 10".split()]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    words = ["train", text, "--folder", str(stopped), *length]
    # A shell that runs the tests in the background has told its children to ignore Ctrl-C.
    heeding = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {PROGRAM[-1]}"
    program = [*PROGRAM[:-1], heeding]
    process = subprocess.Popen([*program, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while not checkpoints(stopped / "checkpoints") and time.monotonic() < limit:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    last = err.strip().splitlines()[-1]
    step = int(re.search(r"stopped; step (\d+) is kept in", last)[1])
    assert 15 <= step < 300 and last.endswith("the same command goes on from there"), err
    assert "Traceback" not in err

    denied(call("generate", "--folder", stopped), 2, "--folder: got", "a run that was stopped", "gbattn train")
    code, out, err = call(*words, "--json")
    assert code == 0 and f"up to step {step}: going on" in err
    again, once = json.loads(out), result("train", text, "--folder", whole, *length)
    assert again["validation"] == once["validation"] and again["sample"] == once["sample"]
    curves = [json.loads((folder / "history.json").read_text()) for folder in (stopped, whole)]
    assert again["seconds"] == round(curves[0]["seconds"][-1], 1)  # of both parts
    assert [curve.pop("seconds") and curve for curve in curves] == [curves[0]] * 2 and len(curves[0]["loss"]) == 30
    weights = [LanguageModel.from_pretrained(folder).state_dict() for folder in (stopped, whole)]
    assert all(torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


@pytest.mark.skipif(os.name != "posix", reason="SIGTERM is a POSIX signal.")
def test_sigterm_ends_a_run_as_ctrl_c_does(text, tmp_path, call):
    length = [*SMALL, *"--prompt cat --sample-tokens 5 --steps 400 --checkpoint-every 15 --log-every 10".split()]
    words = ["train", text, "--folder", str(tmp_path / "m"), *length]
    process = subprocess.Popen([*PROGRAM, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    limit = time.monotonic() + 60
    while not checkpoints(tmp_path / "m" / "checkpoints") and time.monotonic() < limit:
        time.sleep(0.02)
    process.terminate()
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "") and "Traceback" not in err, err
    last = err.strip().splitlines()[-1]
    step = int(re.search(r"gbattn train: stopped; step (\d+) is kept in", last)[1])
    assert 15 <= step < 400 and last.endswith("the same command goes on from there"), err
    code, out, err = call(*words, "--json")
    assert code == 0 and f"up to step {step}: going on" in err and json.loads(out)["steps"] == 400


@pytest.mark.skipif(os.name != "posix", reason="SIGTERM is a POSIX signal.")
@pytest.mark.parametrize("workers", [1, 2])
def test_sigterm_in_a_queue_leaves_no_process(text, tmp_path, workers):
    """And the same command goes on."""
    program = f"""if 1:
        import sys
        from gbattn.lab.command_line import main
        from gbattn.experiments import Arm, CorpusSpec, Experiment
        from gbattn.lab.catalogue import EXPERIMENTS
        EXPERIMENTS["tiny"] = Experiment(
            name="tiny", question="?", corpus=CorpusSpec(name="tiny", vocab_size=300),
            model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2),
            train=dict(steps=100_000, batch_size=4, checkpoint_every=20, evaluate_every=100_000),
            arms=(Arm(name="standard"), Arm(name="twicing", model={{"attention": "twicing"}})), seeds=(1, 2))
        sys.exit(main(["run", "tiny", "--workers", "{workers}"]))"""
    places = dict(GBATTN_RESULTS=tmp_path / "r", GBATTN_RUNS=tmp_path / "w", GBATTN_CORPORA=Path(text).parent)
    environment = os.environ | {name: str(place) for name, place in places.items()}
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    limit = time.monotonic() + 120
    there = lambda: len(list((tmp_path / "w").glob("*/checkpoints/step-*")))
    while there() < workers and time.monotonic() < limit and process.poll() is None:
        time.sleep(0.05)
    process.terminate()
    _, err = process.communicate(timeout=60)  # until the last process has let go of the pipe
    assert process.returncode == 143, err
    assert "gbattn run: stopped; what is finished is in" in err.strip().splitlines()[-1]
    time.sleep(0.5)
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def answering(monkeypatch, answer):
    """`gbattn run` with the same options, and what a function answers."""
    run = COMMANDS["run"]
    monkeypatch.setitem(COMMANDS, "run", run._replace(function=wraps(run.function)(lambda **how: answer())))


def test_sigterm_is_left_to_who_sees_to_it(call, monkeypatch):
    seen, answer = [], {"folder": "", "experiments": []}
    answering(monkeypatch, lambda: seen.append(signal.getsignal(signal.SIGTERM)) or answer)
    before = signal.getsignal(signal.SIGTERM)
    assert call("run")[0] == 0 and signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL
    mine = lambda *_: None
    try:
        signal.signal(signal.SIGTERM, mine)
        assert call("run")[0] == 0 and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen[0] is not signal.SIG_DFL and seen[1] is mine


@pytest.mark.parametrize("module", ["gbattn", "gbattn.lab.command_line"])
def test_it_is_a_module_that_runs(module):
    done = subprocess.run([sys.executable, "-m", module, "run", "nothing"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "") and "NAME: got 'nothing'" in done.stderr
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True)
    assert done.returncode == 0 and re.fullmatch(r"gbattn [\d.]+\n", done.stdout)


def test_ctrl_c_before_the_first_checkpoint(text, tmp_path, call, monkeypatch):
    def press(*words, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("gbattn.lab.run_folder.train", press)
    code, out, err = call("train", text, "--folder", tmp_path / "m", *SHORT)
    assert (code, out) == (130, "") and err.endswith("gbattn train: stopped; nothing is kept yet\n")


def test_ctrl_c_anywhere(call, monkeypatch, text):
    def press(*words, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("gbattn.lab.token_cache.load_corpus", press)
    code, out, err = call("tokenize", text)
    assert (code, out) == (130, "") and err.strip().endswith("gbattn tokenize: stopped")


@pytest.mark.skipif(os.name != "posix", reason="It takes a POSIX shell.")
@pytest.mark.parametrize("closed", [">&-", "2>&-"])
def test_a_stream_that_is_closed(closed):
    command = [*PROGRAM, "--help"]
    done = subprocess.run(["sh", "-c", f'"$@" {closed}', "sh", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and bool(done.stdout) == (closed == "2>&-")


def test_a_terminal_without_greek():
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    done = subprocess.run([*PROGRAM, "train", "--help"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and b"--weight-decay" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="A closed pipe is a signal here.")
def test_a_reader_who_leaves():
    process = subprocess.Popen([*PROGRAM, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(60) == 1


def test_no_result_has_a_number_that_json_lacks(result, monkeypatch):
    answering(monkeypatch, lambda: {"a": [math.inf, (math.nan, 1.5)], "b": None})
    assert result("run") == {"a": [None, [None, 1.5]], "b": None}


TOY, SOME = ModelConfig(vocab_size=300, max_length=16), TrainConfig(steps=2)


@pytest.mark.parametrize(
    "function, how, argument",
    [
        ("train_model", dict(tensorboard="False"), "tensorboard"),
        ("train_model", dict(folder=3), "folder"),
        ("train_model", dict(corpus=3), "corpus"),
        ("train_model", dict(model={}), "model"),
        ("train_model", dict(training=3), "training"),
        ("train_model", dict(max_train_tokens=2.5), "max_train_tokens"),
        ("train_model", dict(cache=3), "cache"),
        ("evaluate_model", dict(folder=True), "folder"),
        ("evaluate_model", dict(split=3), "split"),
        ("generate_text", dict(samples=True), "samples"),
        ("generate_text", dict(folder=None), "folder"),
        ("generate_text", dict(stream=1), "stream"),
        ("generate_text", dict(stop="."), "stop"),
        ("tokenize_corpus", dict(corpus=None), "corpus"),
        ("tokenize_corpus", dict(vocab_size=300.5), "vocab_size"),
        ("run_or_list", dict(workers=True), "workers"),
        ("run_or_list", dict(capture=1), "capture"),
        ("run_or_list", dict(shard="12"), "shard"),
        ("run_or_list", dict(results=3), "results"),
        ("run_or_list", dict(name=["quick"]), "name"),
        ("compare_arms", dict(name="quick", confidence="0.9", reference="standard"), "name"),
        ("compare_arms", dict(name=["quick"]), "name"),
        ("compare_arms", dict(name="quick", beside="mini"), "beside"),
        ("measure_arms", dict(rounds=2.5), "rounds"),
        ("measure_arms", dict(batch_size=True), "batch_size"),
        ("measure_arms", dict(new_tokens="3"), "new_tokens"),
        ("measure_arms", dict(arms="boosted"), "arms"),
        ("measure_arms", dict(model="small"), "model"),
        ("measure_arms", dict(device=["cpu"]), "device"),
        ("options", dict(command="learn"), "command"),
        ("main", dict(words="train"), "words"),
        ("main", dict(words=[1]), "words"),
    ],
)
def test_a_function_refuses_what_no_word_says(tmp_path, monkeypatch, function, how, argument):
    monkeypatch.chdir(tmp_path)
    configs = {"train_model": dict(model=TOY, training=SOME), "measure_arms": dict(model=TOY)}
    with refused(argument):
        module = command_line if function in ("options", "main") else commands
        getattr(module, function)(**configs.get(function, {}) | how)
    assert list(tmp_path.iterdir()) == []
