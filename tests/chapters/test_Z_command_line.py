"""The command line: every command from end to end on a small text, its words, its exit codes, Ctrl-C, faults."""

import importlib.util
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gbattn import command_line, commands, experiments
from gbattn.blocks import NORMALIZERS, PLACEMENTS
from gbattn.comparison import compare
from gbattn.corpora import bigram_loss, bits_per_byte, train_tokenizer
from gbattn.experiments import Arm, CorpusSpec, Experiment
from gbattn.ground.records import results_folder
from gbattn.lab.catalogue import EXPERIMENTS
from gbattn.lab.checkpoints import checkpoints
from gbattn.lab.command_line import main, options
from gbattn.lab.commands import COMMANDS
from gbattn.lab.commands.options import MODEL, TRAINING
from gbattn.lab.records import records_of
from gbattn.lab.token_cache import load_corpus, manifest_checksum
from gbattn.language_model import LanguageModel, ModelConfig, parameter_count
from gbattn.training import TrainConfig, evaluate

PROGRAM = [sys.executable, "-P", "-c", "import sys; from gbattn.command_line import main; sys.exit(main())"]
WORDS = "the a cat dog sees likes big small red house and runs to with under tree".split()
SMALL = "--vocab-size 300 --d-model 16 --n-layers 1 --n-heads 2 --max-length 16 --batch-size 4".split()
SHORT = [*SMALL, *"--steps 20 --prompt cat --sample-tokens 5".split()]
DIVERGING = "--learning-rate 1e30 --clip None --log-every 1".split()


def sentences(n, seed):
    draw = random.Random(seed)
    return "\n".join(" ".join(draw.choice(WORDS) for _ in range(8)) + "." for _ in range(n))


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Nothing here reads or writes the caches of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GBATTN_CACHE", "GBATTN_RUNS"):
            patch.setenv(name, str(tmp_path_factory.mktemp("cache")))
        patch.delenv("GBATTN_RESULTS", raising=False)
        patch.delenv("GBATTN_CORPORA", raising=False)
        patch.setenv("COLUMNS", "100")
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / "tiny"
    folder.mkdir()
    for split, n, seed in (("train", 1500, 1), ("valid", 150, 2), ("test", 150, 3)):
        (folder / f"{split}.txt").write_text(sentences(n, seed))
    return str(folder)


@pytest.fixture
def call(capsys):
    """Run a command in this process: its exit code, what it wrote, what it told."""

    def run(*words):
        capsys.readouterr()
        code = main([str(word) for word in words])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def result(call):
    """Run a command that succeeds; its JSON, which is all that it may write."""

    def run(*words):
        code, out, err = call(*words, "--json")
        assert code == 0, err
        (line,) = out.splitlines()
        return json.loads(line, parse_constant=pytest.fail)

    return run


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "trained"
    assert main(["train", text, "--folder", str(folder), *SHORT]) == 0
    return folder


def copy_files(source, target):
    for path in source.iterdir():
        if path.is_file():
            (target / path.name).write_bytes(path.read_bytes())


def refused(outcome, code, *parts):
    """The exit code, nothing on standard output, and one line that says why."""
    got, out, err = outcome
    assert (got, out) == (code, ""), (got, out, err)
    last = err.strip().splitlines()[-1]
    assert last.startswith("gbattn") and "Traceback" not in err, err
    assert all(part in last for part in parts), last


# ---- The words ----


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_the_list_of_commands_loads_nothing_heavy(word):
    program = (
        "import sys; from gbattn.command_line import main; main(); print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program, word], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert {"gbattn.command_line", "gbattn.commands"} <= loaded
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
        "import sys; from gbattn.command_line import main; main(); print(*sys.modules, sep='\\n', file=sys.stderr)"
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
    refused(call("generate", "--prompt", "", *words), 2, "--prompt: got ''")


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
    assert set(command_line._PLAINER) <= set(help_of)
    own = {(name, option.name): option.help for name in COMMANDS for option in options(name)}
    assert own["evaluate", "split"].endswith("One of test, valid, train.")
    assert own["bench", "dtype"].endswith("One of float32, bfloat16.")
    assert own["train", "tokenizer"].endswith("One of byte-level, published.")


def test_the_defaults_of_train():
    chosen = command_line._parsed("train", [])
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
    chosen = command_line._parsed("train", words)
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
    refused(call(*words), 2, *parts)


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


# ---- Train, evaluate, generate ----


def test_a_session(text, tmp_path, call, result):
    folder = tmp_path / "model"
    found = result("train", text, "--folder", folder, *SHORT)
    assert (found["steps"], found["corpus"], found["folder"]) == (20, "tiny", str(folder))
    price = found["validation"]
    assert found["bigram"].keys() == price.keys()
    assert price["perplexity"] == pytest.approx(math.exp(price["loss"]))
    assert 0 < price["loss"] < math.log(300)
    assert found["sample"].startswith("cat")
    assert found["parameters"] == sum(p.numel() for p in LanguageModel.from_pretrained(folder).parameters())

    # The same numbers, from the files alone, by another way.
    corpus = load_corpus(text, vocab_size=300)
    pairs = bigram_loss(corpus.train, corpus.valid, 300)
    bits = bits_per_byte(pairs * (len(corpus.valid) - 1), corpus.n_bytes(corpus.valid[1:]))
    told = dict(loss=pairs, perplexity=math.exp(pairs), bits_per_byte=bits, n_tokens=len(corpus.valid) - 1)
    assert found["bigram"] == pytest.approx(told | {"lossless": True})
    model = LanguageModel.from_pretrained(folder)
    for split in ("valid", "test"):
        tokens = getattr(corpus, split)
        wanted = evaluate(model, tokens, n_bytes=corpus.n_bytes(tokens[1:]))
        got = result("evaluate", "--folder", folder, "--split", split, "--device", "cpu")
        assert {name: got[name] for name in wanted._asdict()} == pytest.approx(wanted._asdict(), rel=1e-6)
        if split == "valid":
            assert price.pop("lossless") and price == pytest.approx(wanted._asdict(), rel=1e-6)
        own = result("evaluate", "--folder", folder, "--text", Path(text) / f"{split}.txt", "--device", "cpu")
        assert own["loss"] == pytest.approx(wanted.loss, rel=1e-6)
    nearer = result("evaluate", "--folder", folder, "--context", 8, "--device", "cpu")
    assert nearer["n_tokens"] == wanted.n_tokens and nearer["loss"] != wanted.loss

    words = ["the dog", "--folder", folder, "--max-new-tokens", 6, "--device", "cpu"]
    two = result("generate", *words, "--samples", 2, "--seed", 4)["texts"]
    assert two == result("generate", *words, "--samples", 2, "--seed", 4)["texts"]
    assert two[:1] == result("generate", *words, "--seed", 4)["texts"] and two[1] != two[0]
    assert two[1:] != result("generate", *words, "--seed", 5)["texts"]  # of no other seed
    assert all(one.startswith("the dog") and len(one) > 7 for one in two)
    greedy = [result("generate", *words, *how)["texts"] for how in (["--temperature", 0], ["--top-k", 1, "--seed", 9])]
    assert greedy[0] == greedy[1]
    code, out, err = call("generate", *words)
    assert code == 0 and out.startswith("the dog") and err == ""
    same = ["generate", "cat", "--folder", folder, "--max-new-tokens", 5, "--device", "cpu"]
    assert result(*same, "--seed", 0)["texts"] == [found["sample"]] != result(*same)["texts"]
    code, streamed, err = call("generate", *words, "--stream")
    assert code == 0 and streamed == err == out
    said = result("generate", *words)["texts"][0].removeprefix("the dog")
    (stopped,) = result("generate", *words, "--stop", "qqq", said[1])["texts"]
    assert stopped == "the dog" + said[: said.index(said[1])]
    (punished,) = result("generate", *words, "--temperature", 0, "--repetition-penalty", 1e6)["texts"]
    assert punished != greedy[0][0]
    refused(call("generate", *words, "--stream", "--samples", 2), 2, "--stream: got 2 samples; want one")


def test_a_text_is_scored_as_training_reads_it(text, trained, tmp_path, result):
    """Without its byte-order mark, line ends as newlines."""
    plain = (Path(text) / "test.txt").read_bytes()
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbf" + plain.replace(b"\n", b"\r\n"))
    words = ["evaluate", "--folder", trained, "--device", "cpu"]
    found, wanted = result(*words, "--text", tmp_path / "marked.txt"), result(*words)
    names = ("loss", "bits_per_byte", "n_tokens")
    assert [found[name] for name in names] == pytest.approx([wanted[name] for name in names])


def test_a_home_is_found_where_the_shell_leaves_it(text, tmp_path, result, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert result("train", text, "--folder=~/m", *SHORT)["folder"] == str(tmp_path / "m")
    result("evaluate", "--folder=~/m", "--text=~/m/run.json")
    assert not (tmp_path / "~").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="A GPU is no mistake here.")
@pytest.mark.parametrize("precision", ["fp16", "tf32"])
def test_a_precision_that_wants_a_gpu_is_refused_before_the_text_is_read(call, monkeypatch, tmp_path, precision):
    monkeypatch.setattr("gbattn.lab.token_cache.load_corpus", lambda *words, **how: pytest.fail("the text was read"))
    outcome = call("train", "--folder", tmp_path / "m", "--precision", precision)
    refused(outcome, 2, f"--precision: got '{precision}' without a GPU")


def test_the_words_of_train_and_evaluate(text, trained, call):
    code, out, err = call("train", text, "--folder", trained, *SHORT)
    assert code == 0
    assert "holds the run up to step 20: finished" in err and "going on" not in err
    assert f"(gbattn generate --folder {trained} writes more)" in out
    number = r" \d\.\d{3} nats a token, perplexity [\d,]+\.\d, \d\.\d{3} bits per byte\n"
    assert re.match(f"validation:{number}a bigram model:{number}saved in ", out)
    assert "\ncat" in out
    code, out, err = call("evaluate", "--folder", trained)
    assert code == 0 and re.match(r"tiny test: ", out) and "bits per byte" in out


def test_evaluation_reads_as_much_at_once_as_training(text, tmp_path, call, result):
    folder = tmp_path / "model"
    words = ["train", text, "--folder", folder, *SHORT, "--length", 8]
    price = result(*words)["validation"]
    again = result("evaluate", "--folder", folder, "--split", "valid", "--device", "cpu")
    assert {name: again[name] for name in price} == pytest.approx(price, rel=1e-6)
    model, valid = LanguageModel.from_pretrained(folder), load_corpus(text, vocab_size=300).valid
    assert again["loss"] == pytest.approx(evaluate(model, valid, length=8).loss, rel=1e-6)
    assert again["loss"] != pytest.approx(evaluate(model, valid).loss, rel=1e-6)
    refused(call("evaluate", "--folder", folder, "--context", 8), 2, "--context: got 8; want an integer from 0 to 7")


def test_a_tokenizer_that_loses_text_is_named_with_each_price(text, tmp_path, call, result):
    words = ["--folder", tmp_path / "model"]
    code, out, err = call("train", text, *words, *SHORT, "--tokenizer", "published", "--prompt", "the cat Zürich")
    assert code == 0 and "it loses text: compare with no other" in out
    assert "the tokenizer lost some of the prompt: 'the cat" in err and "is left" in err
    code, out, err = call("evaluate", *words, "--device", "cpu")
    assert code == 0 and "it loses text: compare with no other" in out
    assert result("evaluate", *words, "--device", "cpu")["lossless"] is False
    for prompt, lost in (("the cat Zürich", True), ("the  cat\n", False)):
        code, out, err = call("generate", prompt, *words, "--max-new-tokens", 2, "--device", "cpu")
        assert code == 0 and ("lost some of the prompt" in err) == lost


def test_a_built_in_name_is_the_built_in_text(text, tmp_path, call, result, monkeypatch):
    """Whatever folder of that name lies here; and the name is what is recorded."""
    built_in = load_corpus(text, vocab_size=300)
    names = []
    load = lambda name, **recipe: names.append(name) or built_in
    monkeypatch.setattr("gbattn.lab.token_cache.load_corpus", load)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(built_in.folder, tmp_path / "wikitext-2")
    (tmp_path / "wikitext-2" / "train.bin").unlink()
    result("train", "wikitext-2", "--folder", "m", *SHORT)
    assert json.loads((tmp_path / "m" / "run.json").read_text())["corpus"] == "wikitext-2"
    result("evaluate", "--folder", "m")
    assert names == ["wikitext-2", "wikitext-2"]


def test_a_trained_folder_stands_alone(trained, tmp_path, result):
    """It can be moved: model, tokenizer and all."""
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("run.json", "config.json", "model.safetensors", "corpus.json", "tokenizer.json"):
        (moved / name).write_bytes((trained / name).read_bytes())
    words = ["generate", "a cat", "--max-new-tokens", "4", "--folder"]
    assert result(*words, moved)["texts"] == result(*words, trained)["texts"]


def test_the_prompt_from_standard_input(trained, result, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO("a red tree"))
    found = result("generate", "-", "--folder", trained, "--max-new-tokens", "3")
    assert found["prompt"] == "a red tree" and found["texts"][0].startswith("a red tree")


def test_a_prompt_from_a_standard_input_that_is_closed(trained, call, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # as Python has it then
    refused(call("generate", "-", "--folder", trained), 2, "PROMPT: got a closed standard input; want text there")


def test_what_would_command_a_terminal_is_not_shown(call, trained, monkeypatch):
    monkeypatch.setattr(commands, "_continued", lambda *words, **how: ["a\x1b[31mb\x9b\r\n\tc é 😀"])
    _, out, _ = call("generate", "--folder", trained)
    assert out == "a�[31mb��\n\tc é 😀\n"


def test_a_finished_run_is_not_done_again(text, trained, result):
    before = (trained / "history.json").read_bytes()
    found = result("train", text, "--folder", trained, *SHORT, "--checkpoint-every", "3")
    assert found["steps"] == 20
    assert (trained / "history.json").read_bytes() == before


def test_a_finished_run_without_its_checkpoints_is_not_done_again(text, tmp_path, call, result, monkeypatch):
    words = ["train", text, "--folder", tmp_path, *SHORT]
    once = result(*words)
    shutil.rmtree(tmp_path / "checkpoints")
    before = (tmp_path / "model.safetensors").read_bytes()
    monkeypatch.setattr("gbattn.lab.run_folder.train", lambda *words, **how: pytest.fail("trained again"))
    code, out, err = call(*words, "--json")
    again = json.loads(out)
    assert code == 0 and f"{tmp_path} holds the run up to step 20: finished" in err
    assert again == once
    assert (tmp_path / "model.safetensors").read_bytes() == before
    refused(call(*words, "--seed", 3), 2, "--folder: got training.seed = 3; want")
    history = json.loads((tmp_path / "history.json").read_text())
    (tmp_path / "history.json").write_text(json.dumps(history | {"finished": False}))
    with pytest.raises(pytest.fail.Exception, match="trained again"):
        call(*words)


def test_a_run_goes_on_where_its_text_has_moved(tmp_path, call, result):
    """The text is known by its fingerprint; where it lies is written down anew."""
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    for split in ("train", "valid", "test"):
        (before / f"{split}.txt").write_text(sentences(200, 6))
    once = result("train", before, "--folder", tmp_path / "m", *SHORT)
    before.rename(now)
    code, out, err = call("train", now, "--folder", tmp_path / "m", *SHORT, "--json")
    assert code == 0 and "up to step 20: finished" in err
    assert json.loads(out)["validation"] == once["validation"]
    assert json.loads((tmp_path / "m" / "run.json").read_text())["corpus"] == str(now)
    result("evaluate", "--folder", tmp_path / "m")
    (now / "train.txt").write_text(sentences(200, 7))
    outcome = call("train", now, "--folder", tmp_path / "m", *SHORT)
    refused(outcome, 2, "--folder: got fingerprint = ", "to go on with the run in")


def test_another_run_in_the_folder(text, trained, call):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    outcome = call("train", text, "--folder", trained, *SHORT, "--learning-rate", "0.5", "--norm", "post")
    refused(
        outcome,
        2,
        "training.learning_rate = 0.5",
        f"training.learning_rate = {TRAINING['learning_rate']}",
        'model.norm = "pre"',
    )
    assert before == {path: path.read_bytes() for path in before}


def test_the_history_is_json_whatever_is_in_it(text, tmp_path, call, monkeypatch):
    """In fp16 an update whose gradient is not finite is skipped, and its point is infinite."""
    from gbattn.lab import run_folder

    def infinite(*words, **how):
        history = real(*words, **how)
        history.gradient_norm[0] = math.inf
        return history

    real = run_folder.train
    monkeypatch.setattr(run_folder, "train", infinite)
    assert call("train", text, "--folder", tmp_path, *SHORT)[0] == 0
    found = json.loads((tmp_path / "history.json").read_text(), parse_constant=pytest.fail)
    assert found["gradient_norm"][0] is None
    assert call("train", text, "--folder", tmp_path, *SHORT)[0] == 0


def test_a_foreign_folder_is_left_alone(text, tmp_path, call):
    (tmp_path / "thesis.tex").write_text("do not lose me")
    refused(call("train", text, "--folder", tmp_path, *SHORT), 2, "--folder: got", "thesis.tex", "new or empty folder")
    refused(
        call("train", text, "--folder", tmp_path / "thesis.tex", *SHORT), 2, "--folder: got", "thesis.tex, a file; want"
    )
    refused(call("train", text, "--folder", tmp_path / "thesis.tex" / "in", *SHORT), 2, "--folder: got", "a file; want")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_drafts_of_a_killed_run_are_in_nobodys_way(text, trained, tmp_path, call, result):
    """A folder that holds nothing else is free, and who goes on clears them; other files are left."""
    folder, drafts = tmp_path / "m", ("run.json.draft-0123abcd", "model.safetensors.draft-89efcdab")
    folder.mkdir()
    for name in (".lock", *drafts):
        (folder / name).write_text("{")
    (folder / "my.draft-2").write_text("mine")
    refused(call("train", text, "--folder", folder, *SHORT), 2, "which holds my.draft-2 and no run.json")
    (folder / "my.draft-2").rename(tmp_path / "my.draft-2")
    words = ["train", text, "--folder", folder, *SHORT]
    assert result(*words)["steps"] == 20
    assert (folder / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()
    assert not [*folder.glob("*draft*")]
    (tmp_path / "my.draft-2").rename(folder / "my.draft-2")
    (folder / drafts[1]).write_text("half")
    result(*words)
    assert [path.name for path in folder.glob("*draft*")] == ["my.draft-2"]


KILLED = """
import contextlib, io, json, os, sys
from pathlib import Path
import torch
from gbattn.lab.command_line import main

torch.set_num_threads(1)
text, place, *words = sys.argv[1:]
root, changes, last = "", 0, -1

def hook(event, args):
    global changes
    writes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
    writes = writes or event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE != os.O_RDONLY
    if writes and root and root in str(args[0]):
        changes += 1
        if changes == last:
            os._exit(9)  # before the change: no handler, no finally

def train(folder):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        return main(["train", text, "--folder", str(folder), *words]), err.getvalue()

def of(folder):
    return (folder / "model.safetensors").read_bytes()

sys.addaudithook(hook)
whole = Path(place, "whole")
root = str(whole)
assert train(whole)[0] == 0
n, root, found = changes, "", []
for last in sorted({5, 6, *range(8, n, n // 4), n}):
    folder = Path(place, str(last))
    if os.fork() == 0:
        changes, root = 0, str(folder)
        train(folder)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    again, err = train(folder)
    same = again == 0 and of(folder) == of(whole)
    left = [path.name for path in folder.rglob("*draft*")]
    found.append([last, code, again, same, left])
print(json.dumps(found))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each kill has a process of its own")
def test_killed_before_any_change_of_a_file_the_same_command_ends_in_the_same_bits(text, tmp_path):
    """At points from the first file of a run to its last: nothing is refused, and no draft is left."""
    words = [*SMALL, *"--steps 8 --checkpoint-every 3 --evaluate-every 4 --prompt cat --sample-tokens 3".split()]
    command = [sys.executable, "-P", "-c", KILLED, text, tmp_path, *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 6 and [code for _, code, *_ in found] == [9] * len(found)
    assert [one for one in found if one[2:] != [0, True, []]] == []


def test_who_only_reads_a_folder_writes_nothing_in_it(text, trained, tmp_path, result):
    """So it may be one that cannot be written to."""
    copy_files(trained, tmp_path)
    state = lambda: {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}
    before = state()
    result("generate", "a cat", "--max-new-tokens", "2", "--folder", tmp_path)
    result("evaluate", "--text", f"{text}/test.txt", "--folder", tmp_path)
    assert state() == before


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="no folder here that not even root can write to")
def test_a_folder_that_cannot_be_written_to_is_named(text, call):
    refused(call("train", text, "--folder", "/proc/self/model", *SHORT), 1, "/proc/self/model")


def test_a_folder_without_a_checkpoint_is_free(text, tmp_path, call, result):
    """A run that was refused or that ended early keeps nothing that could be lost."""
    words = ["train", text, "--folder", tmp_path / "m", *SHORT]
    refused(call(*words, "--warmup-steps", "20"), 2, "--warmup-steps: got 20; want fewer than the 20 steps")
    if not torch.cuda.is_available():
        refused(call(*words, "--precision", "fp16"), 2, "--precision: got 'fp16' without a GPU")
    refused(call(*words, *DIVERGING), 1, "is nan in step")
    assert result(*words)["steps"] == 20
    assert not json.loads((tmp_path / "m" / "run.json").read_text())["training"]["warmup_steps"]
    refused(call(*words, "--warmup-steps", "20"), 2, "--folder: got training.warmup_steps = 20; want")


def test_a_model_without_its_checkpoints_is_not_overwritten(text, trained, tmp_path, call):
    copy_files(trained, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    refused(
        call("train", text, "--folder", tmp_path, *SHORT, "--seed", "9"), 2, "--folder: got training.seed = 9; want"
    )
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_run_of_another_program_is_not_overwritten(text, tmp_path, call):
    (tmp_path / "run.json").write_text("{}")
    refused(call("train", text, "--folder", tmp_path, *SHORT), 1, "run.json: got the file of another program")
    assert (tmp_path / "run.json").read_text() == "{}"


@pytest.mark.parametrize("words", [["train", "TEXT", *SHORT], ["run", "quick"]])
def test_under_torchrun(text, tmp_path, call, monkeypatch, words):
    """Each process would take the folder, or a run, for itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = f"WORLD_SIZE: got 2; want 1, as gbattn {words[0]} is one process; "
    refused(call(*(text if word == "TEXT" else word for word in words)), 1, said)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once(text, tmp_path, call):
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"):
        refused(call("train", text, "--folder", tmp_path, *SHORT), 1, "another gbattn train at work")


def test_a_folder_is_called_like_an_option(text, tmp_path, call, monkeypatch):
    """What is said of the folder is not said of the option."""
    from filelock import FileLock

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt").mkdir()
    with FileLock(tmp_path / "prompt" / ".lock"):
        said = f"gbattn train: {tmp_path / 'prompt'}: got another gbattn train at work; want another folder"
        refused(call("train", text, "--folder", "prompt", *SHORT), 1, said)


@pytest.mark.parametrize(
    "words, parts",
    [
        (["train", "nowhere"], ["CORPUS: got 'nowhere'", "python-docs"]),
        (["train", "TORN"], ["CORPUS: got", "without"]),
        (["train", ""], ["CORPUS: got ''; want one of python-docs"]),
        (["tokenize", ""], ["CORPUS: got ''; want one of python-docs"]),
        (["evaluate", "--folder", "TRAINED", "--corpus", ""], ["--corpus: got ''; want one of python-docs"]),
        (["train", "TEXT", *SHORT, "--cache", "short/sub"], ["--cache: got short, a file; want a folder"]),
        (["train", "TEXT", *SHORT, "--max-length", "90000"], ["--max-length: got 90000; want fewer than the"]),
        (["train", "TEXT", *SHORT, "--length", "90000"], ["--length: got 90000; want fewer than the", "training text"]),
        (
            ["train", "TEXT", *SHORT, "--length", "17", "--positions", "learned"],
            ["--length: got 17; want at most max_length = 16, as positions are learned"],
        ),
        (
            ["train", "TEXT", "--attention", "linear"],
            ["--positions: got 'rotary' with attention='linear'", "'learned'"],
        ),
        (["bench", "linear"], ["--positions: got 'rotary' with attention='linear'", "want 'learned'"]),
        (["train", "TEXT", "--prompt", "", *SHORT[:-4]], ["--prompt: got ''"]),
        (["train", "TEXT", *SHORT, "--temperature", "-1"], ["--temperature: got -1.0"]),
        (["train", "TEXT", *SHORT, "--sample-tokens", "0"], ["--sample-tokens: got 0"]),
        (["train", "TEXT", *SHORT, "--tokenizer", "magic"], ["--tokenizer: got 'magic'"]),
        (
            ["evaluate", "--folder", "nowhere"],
            ["--folder: got nowhere without run.json; want a folder that gbattn train made"],
        ),
        (
            ["evaluate", "--folder", "TRAINED", "--split", "dev"],
            ["--split: got 'dev'; want None or one of 'train', 'valid', 'test'"],
        ),
        (
            ["evaluate", "--folder", "TRAINED", "--corpus", "OTHER"],
            ["--corpus: got a text with fingerprint", "--text scores"],
        ),
        (["evaluate", "--folder", "TRAINED", "--corpus", "nowhere"], ["--corpus: got 'nowhere'"]),
        (
            ["evaluate", "--folder", "TRAINED", "--text", "SHORT", "--corpus", "TEXT"],
            ["--corpus: got", "with --text; want one of"],
        ),
        (
            ["evaluate", "--folder", "TRAINED", "--text", "SHORT", "--split", "test"],
            ["--split: got 'test' with --text; want one of the two"],
        ),
        (["evaluate", "--folder", "TRAINED", "--text", "BINARY"], ["--text: got", "want UTF-8 text"]),
        (["evaluate", "--folder", "TRAINED", "--text", "nowhere"], ["--text: got nowhere; want a file"]),
        (["evaluate", "--folder", "TRAINED", "--text", "SHORT"], ["--text: got 1 token"]),
        (["evaluate", "--folder", "TRAINED", "--context", "16"], ["--context: got 16"]),
        (["evaluate", "--folder", "TRAINED", "--device", "abacus"], ["--device: got 'abacus'", "want cpu, or cuda"]),
        (["generate", "--folder", "TRAINED", "--device", "meta"], ["--device: got 'meta'", "want cpu, or cuda"]),
        (["generate", "--folder", "nowhere"], ["--folder: got nowhere without run.json"]),
        (["generate", "", "--folder", "TRAINED"], ["PROMPT: got ''"]),
        (["generate", "a\udcff", "--folder", "TRAINED"], ["PROMPT: got a lone surrogate"]),
        (["generate", "--folder", "TRAINED", "--samples", "0"], ["--samples: got 0; want a positive integer"]),
        (["generate", "--folder", "TRAINED", "--top-p", "2"], ["--top-p: got 2.0"]),
        (["tokenize", "nowhere"], ["CORPUS: got 'nowhere'"]),
        (["tokenize", "TEXT", "--vocab-size", "3"], ["--vocab-size: got 3"]),
        (["run", "--workers", "0"], ["--workers: got 0; want a positive integer"]),
        (["run", "nothing"], ["NAME: got 'nothing'; want one of quick"]),
        (["run", "quick", "--shard", "3/2"], ["--shard: got (3, 2); want K/N with K from 1 to N, such as 2/8"]),
        (["run", "quick", "--shard", "0/2"], ["--shard: got (0, 2); want K/N"]),
        (["run", "quick", "--results", "short"], ["--results: got short, a file; want a folder"]),
        (["run", "--results", "short"], ["--results: got short, a file; want a folder"]),
        (["run", "quick", "--work", "short"], ["--work: got short (", "want one that can be written to"]),
        (
            ["run", "mini-sweep", "--results", "r"],
            ["--corpora: got nothing; want a folder that holds wikipedia-en-2019,"],
        ),
        (
            ["compare", "mini", "--results", "nowhere"],
            ["NAME: got 'mini', of which nowhere has no run; want", "gbattn run"],
        ),
        (["compare", "quick", "--results", "nowhere"], ["NAME: got 'quick'", "gbattn run quick runs it"]),
        (["compare", "qiuck", "--results", "nowhere"], ["NAME: got 'qiuck'", "want one of quick, mini-sweep"]),
        (["diagnose", "nowhere"], ["RUN: got 'nowhere'; want a folder that gbattn train wrote, or the id of a run"]),
        (["diagnose", ""], ["RUN: got ''; want a folder that gbattn train wrote, or the id of a run"]),
        (["diagnose", "TRAINED", "--split", "dev"], ["--split: got 'dev'"]),
        (["diagnose", "TRAINED", "--tokens", "0"], ["--tokens: got 0; want a positive integer"]),
        (["diagnose", "TRAINED", "--batch-size", "1"], ["--batch-size: got 1; want 2 or more"]),
        (["diagnose", "TRAINED", "--tokens", "9"], ["--tokens: got 10 tokens; want at least 257"]),
        (["diagnose", "TRAINED", "--report", "short/page.html"], ["--report: got short, a file; want a folder"]),
        (["bench", "magic"], ["ARMS: got 'magic'; want one of"]),
        (["bench", "boosted", "magic"], ["ARMS: got 'magic'; want one of"]),
        (["bench", "boosted", "boosted"], ["ARMS: got ('boosted', 'boosted'); want a tuple of names, each once"]),
        (["bench", "--rounds", "0"], ["--rounds: got 0"]),
        (["bench", "--new-tokens", "0"], ["--new-tokens: got 0"]),
        (["bench", "--dtype", "int8"], ["--dtype: got 'int8'; want one of 'float32', 'bfloat16'"]),
        (["bench", "--device", "gpu"], ["--device: got 'gpu'", "want cpu, or cuda"]),
    ],
)
def test_an_option_at_fault_is_named(call, text, trained, tmp_path, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    for split in ("train", "valid", "test"):
        (other / f"{split}.txt").write_text(sentences(30, 9))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "short").write_text("a")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "corpus.json").write_bytes((trained / "corpus.json").read_bytes())
    names = ("OTHER", "BINARY", "SHORT", "TORN")
    places = {"TEXT": text, "TRAINED": trained} | {name: tmp_path / name.lower() for name in names}
    refused(call(*(places.get(word, word) for word in words)), 2, *parts)
    assert not (tmp_path / "gbattn-model").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="A GPU is no mistake here.")
@pytest.mark.parametrize("command", ["evaluate", "bench"])
def test_a_gpu_that_is_not_there(call, trained, command):
    words = {"evaluate": ["evaluate", "--folder", trained], "bench": ["bench", *SMALL]}[command]
    refused(call(*words, "--device", "cuda"), 2, "--device: got 'cuda'", "want cpu, or cuda")


def test_a_text_that_has_moved(tmp_path, call, result):
    """Evaluation asks where it is now."""
    before, now = tmp_path / "before", tmp_path / "now"
    before.mkdir()
    for split in ("train", "valid", "test"):
        (before / f"{split}.txt").write_text(sentences(200, 5))
    model = tmp_path / "model"
    result("train", before, "--folder", model, *SHORT)
    price = result("evaluate", "--folder", model)
    before.rename(now)
    refused(call("evaluate", "--folder", model), 2, f"--corpus: got none, and {before} is gone; want where the text")
    moved = result("evaluate", "--folder", model, "--corpus", now)
    assert moved["loss"] == price["loss"]


def test_a_damaged_checkpoint_is_no_option(text, tmp_path, call, result):
    result("train", text, "--folder", tmp_path / "m", *SHORT)
    (weights,) = (tmp_path / "m" / "checkpoints").glob("step-*/training.json")
    weights.write_text("no")
    refused(call("train", text, "--folder", tmp_path / "m", *SHORT), 1, "checkpoints: got", "delete that one")


BARE = '{"format": "gbattn corpus 1", "splits": {"train": {"dtype": "uint16"}}}'
TORN = '{"format": "gbattn run 1", "corpus": "tiny", "fingerprint": "", "recipe": {}}'
DEEP = "[" * 100_000


@pytest.mark.parametrize("name, content", [("corpus.json", None), ("corpus.json", "{}"), ("run.json", "[1]"),
                                           ("run.json", '{"format": 2}'), ("config.json", "{"),
                                           ("model.safetensors", None), ("model.safetensors", "no"),
                                           ("corpus.json", BARE), ("run.json", '{"format": "gbattn run 1"}'),
                                           ("run.json", TORN), ("run.json", DEEP),
                                           ("tokenizer.json", None), ("tokenizer.json", ""),
                                           ("tokenizer.json", '{"version":'), ("tokenizer.json", "{}")])  # fmt: skip
def test_a_damaged_folder(trained, tmp_path, call, name, content):
    copy_files(trained, tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    stopped = (name, content) == ("model.safetensors", None)  # for all that can be seen
    named = tmp_path if stopped else tmp_path / name
    refused(call("generate", "--folder", tmp_path), 2 if stopped else 1, str(named), "; want ")
    if name != "tokenizer.json":  # which only --text reads
        refused(call("evaluate", "--folder", tmp_path), 2 if stopped else 1, str(named), "; want ")


@pytest.mark.parametrize(
    "place, value",
    [
        ("corpus", 3),
        ("corpus", None),
        ("fingerprint", ["x"]),
        ("recipe tokenizer", "magic"),
        ("recipe tokenizer", ["byte-level"]),
        ("recipe vocab_size", "300"),
        ("recipe vocab_size", True),
        ("recipe max_train_tokens", -1),
        ("recipe max_train_tokens", "all"),
        ("training batch_size", "4"),
        ("training length", 2.5),
        ("training magic", 1),
        ("training", [1]),
        ("model d_model", "wide"),
        ("model", None),
    ],
)
def test_a_run_that_says_nonsense(text, trained, tmp_path, call, place, value):
    """It is refused by the name of its file, by every command that reads it."""
    shutil.copytree(trained, tmp_path / "m")
    path = tmp_path / "m" / "run.json"
    *part, name = place.split()
    found = json.loads(path.read_text())
    (found[part[0]] if part else found)[name] = value
    path.write_text(json.dumps(found))
    for words in (["evaluate"], ["generate"], ["train", text, *SHORT]):
        outcome = call(*words, "--folder", tmp_path / "m")
        refused(outcome, 1, f"{path}: got a file that is damaged", "; want what gbattn train wrote")
    assert path.read_text() == json.dumps(found)


@pytest.mark.parametrize(
    "change",
    [
        lambda found: found | {"best_loss": "low"},
        lambda found: found | {"best_loss": math.nan},
        lambda found: found | {"best_loss": found["best_loss"] - 1},
        lambda found: found | {"best_step": None},
        lambda found: found | {"loss": found["loss"][:-1]},
        lambda found: found | {"validation_loss": [*found["validation_loss"], 1.0]},
        lambda found: found | {"loss": [math.nan for _ in found["loss"]]},
        lambda found: found | {"loss": [None for _ in found["loss"]]},
        lambda found: found | {"seconds": ["1" for _ in found["seconds"]]},
        lambda found: found | {"step": [20.5 for _ in found["step"]]},
        lambda found: found | {"step": 20},
        lambda found: found | {"finished": "yes"},
        lambda found: found | {"more": 1},
        lambda found: [found],
        lambda found: DEEP,
        lambda found: "{",
    ],
)
def test_a_history_that_says_nonsense(text, trained, tmp_path, call, monkeypatch, change):
    """It is refused by the name of its file, and the model that was trained is left."""
    copy_files(trained, tmp_path)
    path = tmp_path / "history.json"
    found = change(json.loads(path.read_text()))
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    monkeypatch.setattr("gbattn.lab.run_folder.train", lambda *words, **how: pytest.fail("trained again"))
    outcome = call("train", text, "--folder", tmp_path, *SHORT)
    refused(outcome, 1, f"{path}: got ", "; want what gbattn train wrote: copy or delete it")


HOSTILE = r"""
import contextlib, io, json, os, random, shutil, sys, traceback
from pathlib import Path
import torch
from gbattn.lab.command_line import main
from gbattn.ground.files import file_checksum
from gbattn.lab.token_cache import manifest_checksum

torch.set_num_threads(1)
trained, text, place, *words = sys.argv[1:]
draw, folder, watched, done = random.Random(0), Path(place, "m"), False, []
VALUES = [None, True, -1, 0, 2.5, 10**9, 10**30, 1e308, "", "x", "../../x", "/etc/passwd", "\ud800", [], {}, [[1]]]
RUN = ["pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"]
PICKLE = b"\x80\x04cos\nsystem\n(S'touch executed'\ntR."
COMMANDS = [["generate", "cat", "--max-new-tokens", "2"], ["evaluate", "--text", f"{text}/test.txt"]]
COMMANDS += [["train", text, *words]]

def hook(event, args):
    writes = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir")
    writes = writes or event == "open" and isinstance(args[2], int) and args[2] & os.O_ACCMODE != os.O_RDONLY
    elsewhere = writes and str(args[0])[0] == "/" and not str(args[0]).startswith((place, "/dev"))
    if watched and (event in RUN or elsewhere):
        done.append([event, str(args)])

def places(x, at=()):
    yield at
    for key, inner in x.items() if isinstance(x, dict) else enumerate(x[:3]) if isinstance(x, list) else ():
        yield from places(inner, (*at, key))

def changed(content):
    kind = draw.randrange(8)
    if kind == 0:
        return draw.choice([content[: draw.randrange(len(content))], PICKLE, b"[" * 10**5])
    found = json.loads(content)
    *outer, last = draw.choice([at for at in places(found) if at])
    inner = found
    for key in outer:
        inner = inner[key]
    if kind == 1:
        del inner[last]
    else:
        inner[last] = draw.choice(VALUES)
    return sealed(found)

def sealed(found):
    if "sha256" in found:
        found["sha256"] = manifest_checksum(found)
    return json.dumps(found).encode()

sys.addaudithook(hook)
for number in range(72):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(trained, folder)
    newest = max(folder.glob("checkpoints/step-*"))
    files = [folder / f"{name}.json" for name in ("run", "config", "corpus", "history", "tokenizer")]
    path = [*files, newest / "training.json"][number % 6]
    path.write_bytes(changed(path.read_bytes()))
    if path.name == "tokenizer.json":
        manifest = json.loads(files[2].read_bytes())
        manifest["tokenizer"]["sha256"] = file_checksum(path)
        files[2].write_bytes(sealed(manifest))
    command = COMMANDS[2] if path.name in ("history.json", "training.json") else draw.choice(COMMANDS)
    out, err, watched = io.StringIO(), io.StringIO(), True
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*command, "--folder", str(folder)])
        if code and ": got " not in err.getvalue().splitlines()[-1]:
            done.append([number, path.name, code, err.getvalue()])
    except BaseException:
        done.append([number, path.name, traceback.format_exc()])
    watched = False
print(json.dumps(done))
"""


def test_whatever_a_folder_says_it_is_read_or_refused_by_name(text, trained, tmp_path):
    """Files that were written to deceive, with checksums that fit: no error is another one than those of the book,
    nothing is written elsewhere, nothing is executed, and no pickle is read."""
    command = [sys.executable, "-P", "-c", HOSTILE, trained, text, tmp_path, *SHORT]
    (tmp_path / "torch").mkdir()  # which has a folder of its own
    options = dict(cwd=tmp_path, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")})
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "torch"]


@pytest.mark.parametrize("name", ["../../bashrc", "run.json", "there/tokenizer.json", "ABSOLUTE"])
def test_a_corpus_from_elsewhere_writes_nowhere_else(text, tmp_path, call, name):
    """Nor over a file of the run."""
    found = json.loads(call("tokenize", text, "--vocab-size", 300, "--cache", tmp_path / "cache", "--json")[1])
    hostile, folder = tmp_path / "from" / "x" / "corpus", tmp_path / "to" / "y" / "m"
    shutil.copytree(found["folder"], hostile)
    (tmp_path / "to" / "y").mkdir(parents=True)
    (tmp_path / "to" / "bashrc").write_text("mine")
    name = str(tmp_path / "evil") if name == "ABSOLUTE" else name
    (hostile / name).parent.mkdir(exist_ok=True)
    shutil.copy(hostile / "tokenizer.json", hostile / name)
    said = json.loads((hostile / "corpus.json").read_text())
    said["tokenizer"]["file"] = name
    said["sha256"] = manifest_checksum(said)
    (hostile / "corpus.json").write_text(json.dumps(said))
    state = lambda: {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    before = state()
    refused(call("train", hostile, "--folder", folder, *SHORT[2:]), 1, "corpus.json, tokenizer.file")
    after = state()
    assert {path: after[path] for path in before} == before
    assert all(path.parent == folder and path.name in ("run.json", ".lock") for path in after.keys() - before.keys())


def test_a_foreign_tokenizer_is_found_out(text, trained, tmp_path, call, result):
    """One of the same size, of another text; and the same training once more puts it right."""
    copy_files(trained, tmp_path)
    other = train_tokenizer([sentences(200, 7).upper()], 300).to_str()
    (tmp_path / "tokenizer.json").write_text(other)
    said = [str(tmp_path / "tokenizer.json"), "do not match their checksum; want the file that corpus.json was written"]
    refused(call("generate", "--folder", tmp_path), 1, *said)
    refused(call("evaluate", "--folder", tmp_path, "--text", Path(text) / "test.txt"), 1, *said)
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    result("train", text, "--folder", tmp_path, *SHORT)
    words = ["generate", "a cat", "--max-new-tokens", "4", "--folder"]
    assert result(*words, tmp_path)["texts"] == result(*words, trained)["texts"]


@pytest.mark.parametrize("package", ["tyro", "tokenizers", "accelerate", "safetensors.torch"])
def test_without_an_extra(text, tmp_path, call, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    corpus = tmp_path / "text"  # not in the cache
    corpus.mkdir()
    for split in ("train", "valid", "test"):
        (corpus / f"{split}.txt").write_text(sentences(40, 5))
    outcome = call("train", corpus, "--folder", tmp_path / "model", *SHORT)
    refused(outcome, 1, package.split(".")[0], "pip install 'gbattn[")


def test_an_error_that_is_not_ours_is_one_short_line(trained, call, monkeypatch):
    def broken(*words, **how):
        raise RuntimeError("no kernel\n" + "generated code\n" * 9000)

    def endless(*words, **how):
        raise RuntimeError("x" * 9000)

    words = ["generate", "--folder", trained]
    monkeypatch.setattr(commands, "_continued", broken)
    assert call(*words)[2] == "gbattn generate: no kernel\n"
    monkeypatch.setenv("GBATTN_DEBUG", "1")
    with pytest.raises(RuntimeError, match="generated code"):
        call(*words)
    monkeypatch.delenv("GBATTN_DEBUG")
    monkeypatch.setattr(commands, "_continued", endless)
    assert len(call(*words)[2]) < 340


@pytest.mark.skipif(os.name != "posix", reason="The size of a file is limited as POSIX does it.")
def test_a_full_disk(text, tmp_path, result):
    """Which file, and what is kept."""
    words = ["train", text, "--folder", tmp_path / "m", *SHORT]
    done = result(*words)
    (tmp_path / "m" / "history.json").unlink()
    wide = ["import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))", PROGRAM[-1]]
    program = [sys.executable, "-c", "; ".join(wide)]
    full = subprocess.run([*program, *map(str, words)], capture_output=True, text=True)
    assert full.returncode == 1 and "Traceback" not in full.stderr
    last = full.stderr.strip().splitlines()[-1]
    assert "File too large" in last and str(tmp_path / "m") in last, last
    assert not list((tmp_path / "m").glob("*draft*"))
    assert result(*words)["validation"] == done["validation"]


def test_a_disk_that_is_full_at_the_end(text, tmp_path, call, result, monkeypatch):
    from pathlib import Path as P

    def full(path, content):
        if path.name.startswith("history.json"):
            raise OSError(28, "No space left on device")
        return write(path, content)

    write, words = P.write_bytes, ["train", text, "--folder", tmp_path / "m", *SHORT]
    monkeypatch.setattr(P, "write_bytes", full)
    outcome = call(*words)
    refused(outcome, 1, f"No space left on device: '{tmp_path / 'm' / 'history.json'}'; step 20 is kept in")
    monkeypatch.setattr(P, "write_bytes", write)
    assert result(*words)["steps"] == 20


def test_a_mistake_of_ours_is_not_hidden(monkeypatch, trained):
    def broken(*words, **how):
        raise TypeError("a bug")

    monkeypatch.setattr(commands, "_continued", broken)
    with pytest.raises(TypeError, match="a bug"):
        main(["generate", "--folder", str(trained)])


def test_a_loss_that_is_not_finite(text, tmp_path, call):
    refused(call("train", text, "--folder", tmp_path / "m", *SHORT, *DIVERGING), 1, "is nan in step")


def test_weights_that_are_not_finite(trained, tmp_path, call):
    copy_files(trained, tmp_path)
    model = LanguageModel.from_pretrained(trained)
    with torch.no_grad():
        model.head_weight[7] = math.nan
    model.save_pretrained(tmp_path)
    refused(call("generate", "--folder", tmp_path), 1, "model: got logits that are not finite")
    refused(call("evaluate", "--folder", tmp_path), 1, "model: got a loss of nan; want a finite one")


LEARNED = [*SMALL, "--positions", "learned"]


def test_a_default_length_is_cut_to_the_room_there_is(text, tmp_path, call, result):
    """A length that was typed is refused, and named."""
    words = ["train", text, "--folder", tmp_path / "m", *LEARNED, "--steps", 2, "--prompt", "the cat"]
    refused(call(*words, "--sample-tokens", 80), 2, "--sample-tokens: got", "at most max_length = 16")
    assert not (tmp_path / "m").exists()
    sample = result(*words)["sample"]
    assert sample.startswith("the cat") and len(sample) > 7
    words = ["generate", "the dog", "--folder", tmp_path / "m"]
    (found,) = result(*words)["texts"]
    assert found.startswith("the dog") and len(found) > 8
    refused(call(*words, "--max-new-tokens", 16), 2, "--max-new-tokens: got", "at most max_length = 16")
    words[1] = "a cat sees " * 9
    refused(call(*words), 2, "PROMPT: got ", " tokens; want fewer than max_length = 16, as positions are learned")
    bench = ["bench", "boosted", *LEARNED, "--rounds", 1]
    assert result(*bench)["arms"][0]["written_tokens_per_second"] > 0
    refused(call(*bench, "--new-tokens", 16), 2, "--new-tokens: got 16; want fewer than max_length = 16")
    refused(call(*bench, "--max-length", 1), 2, "--max-length: got 1; want 2 or more, as positions are learned")


def test_a_prompt_that_fills_the_window_is_no_reason_not_to_train(text, tmp_path, call):
    words = ["train", text, "--folder", tmp_path / "m", *LEARNED, "--steps", 1, "--prompt", "a cat sees " * 9]
    code, out, err = call(*words, "--json")
    assert code == 0 and json.loads(out)["sample"] is None
    assert "no sample will be written: the prompt takes all positions" in err
    assert ", 1 layer, width 16: " in err
    code, out, err = call(*words)
    assert "after 1 step and" in out
    assert commands._many(1, "second") == "1 second" and commands._many(2000, "second") == "2,000 seconds"


# ---- Ctrl-C ----


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

    refused(call("generate", "--folder", stopped), 2, "--folder: got", "a run that was stopped", "gbattn train")
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


def test_sigterm_is_left_to_who_sees_to_it(call, monkeypatch):
    seen = []
    monkeypatch.setattr(command_line, "_act", lambda words: seen.append(signal.getsignal(signal.SIGTERM)) or 0)
    before = signal.getsignal(signal.SIGTERM)
    assert call("run")[0] == 0 and signal.getsignal(signal.SIGTERM) is before is signal.SIG_DFL
    mine = lambda *_: None
    try:
        signal.signal(signal.SIGTERM, mine)
        assert call("run")[0] == 0 and signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen[0] is not signal.SIG_DFL and seen[1] is mine


@pytest.mark.parametrize("module", ["gbattn", "gbattn.command_line"])
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


# ---- Tokenize ----


def test_tokenize(text, tmp_path, call, result):
    found = result("tokenize", text, "--vocab-size", 300, "--cache", tmp_path)
    corpus = load_corpus(text, vocab_size=300, cache=tmp_path)
    assert found["folder"] == str(corpus.folder) and found["fingerprint"] == corpus.fingerprint
    assert found["tokens"] == {split: len(getattr(corpus, split)) for split in ("train", "valid", "test")}
    assert found["bytes"]["test"] == (Path(text) / "test.txt").stat().st_size
    code, out, err = call("tokenize", text, "--vocab-size", 300, "--cache", tmp_path)
    assert code == 0 and "300 token types, every byte kept, in" in out and f"{found['tokens']['train']:,}" in out


def test_train_reads_a_cache_that_was_carried(text, tmp_path, result, monkeypatch):
    carried = tmp_path / "carried"
    Path(result("tokenize", text, "--vocab-size", 300, "--cache", tmp_path)["folder"]).rename(carried)
    found = result("train", carried, "--folder", tmp_path / "model", *SHORT)
    assert found["fingerprint"] == load_corpus(text, vocab_size=300).fingerprint
    assert result("train", carried, "--folder", tmp_path / "model", *SHORT[2:])["steps"] == 20  # the same run
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert result("evaluate", "--folder", tmp_path / "model")["text"] == "tiny test"
    assert result("evaluate", "--folder", tmp_path / "model", "--corpus", text)["text"] == "tiny test"


def test_train_where_tokenizers_is_not(text, tmp_path, call, monkeypatch):
    """A carried text is enough; the sample alone is left out, and said to be."""
    code, out, _ = call("tokenize", text, "--vocab-size", 300, "--cache", tmp_path, "--json")
    carried = json.loads(out)["folder"]
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    words = ["train", carried, "--folder", tmp_path / "model", *SHORT]
    code, out, err = call(*words)
    assert code == 0 and "no sample will be written: that needs tokenizers" in err
    assert out.startswith("validation: ") and out.rstrip().endswith("writes more)")
    code, out, err = call(*words, "--json")
    assert code == 0 and json.loads(out)["sample"] is None
    assert call("evaluate", "--folder", tmp_path / "model")[0] == 0


@pytest.mark.parametrize(
    "words, parts",
    [
        (["--vocab-size", "400"], ["--vocab-size: got 400; want 300, as in"]),
        (["--tokenizer", "published"], ["--tokenizer: got published; want byte-level, as in"]),
        (["--max-train-tokens", "500"], ["--max-train-tokens: got 500; want None, as in"]),
    ],
)
def test_the_recipe_of_a_carried_text_stands(text, tmp_path, call, monkeypatch, words, parts):
    monkeypatch.chdir(tmp_path)
    carried = json.loads(call("tokenize", text, "--vocab-size", 300, "--json")[1])["folder"]
    refused(call("train", carried, *SHORT[2:], *words), 2, *parts)
    refused(call("tokenize", carried, *words), 2, *parts)
    assert not (tmp_path / "gbattn-model").exists()


def test_an_option_that_is_typed_counts_where_it_is_the_default(text, tmp_path, call, result):
    recipe = ["--vocab-size", 300, "--tokenizer", "published", "--max-train-tokens", 900]
    carried = result("tokenize", text, *recipe, "--cache", tmp_path)["folder"]
    for words in (["tokenize", carried], ["train", carried, "--folder", tmp_path / "m", *SHORT[2:]]):
        for name, default in (("vocab-size", 2048), ("tokenizer", "byte-level"), ("max-train-tokens", None)):
            refused(call(*words, f"--{name}={default}"), 2, f"--{name}: got {default}; want")
            refused(call(*words, f"--{name.replace('-', '_')}", default), 2, f"--{name}: got {default}; want")
        result(*words)
        result(*words, *recipe)


# ---- Run and compare ----


@pytest.fixture
def experiment(monkeypatch, text):
    made = Experiment(
        name="tiny",
        question="does it run?",
        corpus=CorpusSpec(name="tiny", vocab_size=300),
        model=dict(max_length=16, d_model=8, n_layers=1, n_heads=2),
        train=dict(steps=6, batch_size=4),
        arms=(Arm(name="standard"), Arm(name="twicing", model={"attention": "twicing"})),
        seeds=(1, 2),
    )
    monkeypatch.setitem(EXPERIMENTS, "tiny", made)
    monkeypatch.setenv("GBATTN_CORPORA", str(Path(text).parent))
    return made


OWN = """question = "mine?"
arms = ["standard", "twicing"]
seeds = [1, 2]
corpus = { name = "tiny", vocab_size = 300 }
model = { max_length = 16, d_model = 8, n_layers = 1, n_heads = 2 }
train = { steps = 6, batch_size = 4 }
[arm.twicing]
model = { attention = "twicing" }
"""


def test_an_experiment_of_ones_own(text, tmp_path, call, result, monkeypatch):
    """Run and compared by its file, its records beside those of others under the name of the file."""
    monkeypatch.setenv("GBATTN_CORPORA", str(Path(text).parent))
    path, place = tmp_path / "own.toml", ["--results", tmp_path / "results"]
    path.write_text(OWN)
    found = result("run", path, *place, "--work", tmp_path / "work")["experiments"][0]
    assert (found["name"], found["done"], found["runs"]) == ("own", 4, 4)
    assert len(list((tmp_path / "results" / "own").glob("*.json"))) == 4
    rows = result("compare", path, *place)["rows"]
    assert sorted((row["arm"], row["n"]) for row in rows) == [("standard", 2), ("twicing", 2)]
    path.write_text(OWN.replace("question", "qestion"))
    refused(call("run", path, *place), 1, str(path), "qestion")
    refused(call("compare", tmp_path / "none.toml", *place), 2, "none.toml; want a TOML file")


LAYER = """from gbattn.attention import MultiHeadAttention, register
from gbattn.cost import COUNTS, counts

@register("doubled")
class Doubled(MultiHeadAttention):
    def attend_heads(self, inputs, q, k, v):
        F, A = super().attend_heads(inputs, q, k, v)
        return 2 * F, A

counts(Doubled)(COUNTS[MultiHeadAttention])
"""


@pytest.mark.parametrize("name", ["..x", ".x", "x.", "a b", "x/y", "my_lair.x", "json.x", "statistics"])
def test_a_module_that_cannot_be_imported_is_named(call, tmp_path, monkeypatch, name):
    """Also one whose file is here, but which Python finds elsewhere under that name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "statistics.py").write_text("raise SystemExit")
    refused(call("run", "--imports", name), 2, f"--imports: got {name!r}; want a module in this folder or installed")


def test_a_layer_of_ones_own(text, tmp_path):
    """In a module here: it is known to the workers, too, and another source is another run."""
    words = ["run", "own.toml", "--results", "results", "--work", "work", "--workers", "2"]
    environment = os.environ | {"GBATTN_CORPORA": str(Path(text).parent)}

    def gbattn(*words):
        options = dict(cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        return subprocess.run([*PROGRAM, *words], **options)

    (tmp_path / "own.toml").write_text(OWN.replace("twicing", "doubled"))
    (tmp_path / "my_layer.py").write_text(LAYER)
    # Files that are called like modules of Python and of packages are none of ours.
    here = {name for name in sys.stdlib_module_names if importlib.util.find_spec(name)}  # not winreg, for one
    for name in {*here, "numpy", "torch", "tokenizers", "accelerate", "filelock", "gbattn", "tyro"}:
        (tmp_path / f"{name}.py").write_text(f"open('executed', 'a').write('{name} '); raise SystemExit('{name}')")
    done = gbattn(*words)
    assert done.returncode == 1 and "got 'doubled'; want one of 'multi_head'" in done.stderr
    assert "a layer registers when its module is imported" in done.stderr
    done = gbattn(*words, "--imports", "my_lair")
    assert done.returncode == 2 and "--imports: got 'my_lair'; want a module in this folder" in done.stderr
    done = gbattn(*words, "--imports", "my_layer")
    assert done.returncode == 0 and "4 of   4 runs" in done.stdout, done.stderr
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
    records = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results" / "own").iterdir()}
    assert len(records) == 4
    assert all(one["provenance"]["command"] == "gbattn run own.toml" for one in records.values())
    (tmp_path / "own_copy.toml").write_text((tmp_path / "own.toml").read_text())
    done = gbattn("run", "own_copy.toml", *words[2:], "--imports", "my_layer")
    assert done.returncode == 0 and done.stderr.count(": has run for own\n") == 4, done.stderr
    (tmp_path / "my_layer.py").write_text(LAYER.replace("2 * F", "3 * F"))
    done = gbattn("compare", "own.toml", *words[2:4], "--imports", "my_layer")
    assert "2 of 4 runs are in" in done.stdout, done.stdout
    (tmp_path / "my_layer.py").write_text(LAYER.replace("2 * F", "4 * F").partition("counts(Doubled)")[0])
    done = gbattn("run", "own.toml", *words[2:], "--imports", "my_layer")
    assert done.returncode == 1 and "want a layer whose count is registered" in done.stderr
    assert ": starts" not in done.stderr


def test_run_and_compare(experiment, tmp_path, call, result, monkeypatch):
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    half = result("run", "tiny", *place, "--shard", "1/2")["experiments"][0]
    refused(call("compare", "tiny", *place[:2], "--confidence", "2"), 2, "--confidence: got 2.0; want a number between")
    assert (half["done"], half["left"]) == (2, "about") and half["hours_left"] >= 0
    code, out, err = call("compare", "tiny", *place[:2])
    assert code == 0 and out.endswith("\n2 of 4 runs are in, so no ordering is decided\n")
    done = result("run", "tiny", *place)["experiments"][0]
    assert (done["done"], done["hours_left"]) == (4, 0)

    records = records_of("tiny", tmp_path / "results")
    rows = result("compare", "tiny", *place[:2])["rows"]
    assert rows == [row._asdict() for row in compare(records)]
    code, out, err = call("compare", "tiny", *place[:2], "--metric", "test_perplexity")
    assert code == 0 and "test_perplexity" in out and "paired by seed" in out
    assert re.search(r"^standard +2 +\d+\.\d{4} +\d+\.\d{4} +– +– +[\d,]+ +[1-9][\d,]*\.\d$", out, re.M)
    assert "diverged" not in out
    refused(call("compare", "tiny", *place[:2], "--metric", "beauty"), 2, "--metric: got 'beauty'")
    monkeypatch.setattr(experiments, "_product_rate", lambda: pytest.fail("a speed that nobody asked for"))
    code, out, err = call("run", "tiny", *place)
    assert code == 0 and "4 of   4 runs" in out and "empty" not in err
    code, out, err = call("run", "tiny", *place, "--shard", "3/8")
    assert code == 0 and "part 3/8 of tiny is empty: there is nothing to run here" in err


def test_diagnose_a_folder(trained, tmp_path, call, result, monkeypatch):
    page = tmp_path / "new" / "page.html"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gbattn-model").mkdir()
    copy_files(trained, tmp_path / "gbattn-model")
    words = ["diagnose", "--report", page, "--batch-size", 4, "--sample", 128]
    assert result(*words)["run"] == "gbattn-model"
    words.insert(1, trained)
    found = result(*words)
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["settings"]["split"] == "test" and not record["settings"]["untrained"]
    assert found["cosine"] == [layer["descent1"]["cosine"][0] for layer in record["measured"]["layers"]]
    text = page.read_text()
    assert text.count("<svg") == 3 and str(trained) in text
    assert ("stands for a correction" in text) == bool(found["halves"])
    assert not re.search(r"""(?:src|href)=["']?http""", text)  # nothing outside of it
    assert "gradient of the loss" in text
    code, out, err = call(*words, "--untrained", "--split", "valid", "--tokens", 400)
    assert code == 0 and re.search(r"^0 +[+-]0\.\d{3} +[+-]\d\.\d{4}$", out, re.M) and "as it is" in err
    record = json.loads(page.with_suffix(".json").read_text())
    assert record["settings"]["untrained"] and record["measured"]["tokens"] <= 400


def test_diagnose_a_run_of_the_queue_which_is_trained_again(experiment, tmp_path, call, result):
    """Another folder of runs is that of a machine that has the records alone."""
    place = ["--results", tmp_path / "results"]
    result("run", "tiny", *place, "--work", tmp_path / "work")
    one = records_of("tiny", tmp_path / "results")[1].settings
    words = [one["id"], *place, "--report", tmp_path / "page.html", "--batch-size", 4, "--sample", 64]
    found = result("diagnose", *words, "--work", tmp_path / "work")
    code, out, err = call("diagnose", *words, "--work", tmp_path / "other", "--json")
    assert code == 0 and "it is trained again" in err and json.loads(out) == found
    settings_ = json.loads((tmp_path / "page.json").read_text())["settings"]
    assert (settings_["arm"], settings_["seed"], settings_["of"]) == (one["arm"], one["seed"], "tiny")
    assert len(records_of("tiny", tmp_path / "results")) == 4
    refused(call("diagnose", "0" * 12, *place), 2, "RUN: got '000000000000'; want a folder that gbattn train wrote")


def test_compare_takes_each_arm_of_a_sweep_at_its_best(experiment, tmp_path, call, result, monkeypatch):
    sweep = replace(experiment, name="tiny-sweep", seeds=(1,), grid={"learning_rate": (1e-3, 3e-2)})
    monkeypatch.setitem(EXPERIMENTS, "tiny-sweep", sweep)
    result("run", "tiny-sweep", "--results", tmp_path / "results", "--work", tmp_path / "work")
    rows = result("compare", "tiny-sweep", "--results", tmp_path / "results", "--metric", "valid_loss")["rows"]
    losses = {}
    for record in records_of("tiny-sweep", tmp_path / "results"):
        losses.setdefault(record.settings["arm"], []).append(record.measured["valid_loss"])
    assert {row["arm"]: row["mean"] for row in rows} == {arm: min(of) for arm, of in losses.items()}
    place = "--results", tmp_path / "results"
    assert result("compare", "tiny-sweep", *place)["untuned"] == ["standard", "twicing"]  # of two rates, both are edges
    code, out, err = call("compare", "tiny-sweep", *place)
    assert code == 0 and out.endswith("so no ordering is decided: standard, twicing\n")

    monkeypatch.setitem(EXPERIMENTS, "tiny", replace(experiment, rates_from=sweep))
    result("run", "tiny", *place, "--work", tmp_path / "work")
    assert result("compare", "tiny", *place)["untuned"] == ["standard", "twicing"]
    shutil.rmtree(tmp_path / "results" / "tiny-sweep")
    unfinished = "got 0 of the 4 runs of tiny-sweep; want all of them: run tiny-sweep first"
    refused(call("compare", "tiny", *place), 1, f"compare: tiny: {unfinished}")
    refused(call("run", "tiny", *place), 1, f"run: tiny: {unfinished}")
    grid = {"norm": ("pre", "post"), "learning_rate": (1e-3,)}
    monkeypatch.setitem(EXPERIMENTS, "tiny-grid", replace(experiment, name="tiny-grid", seeds=(1,), grid=grid))
    result("run", "tiny-grid", *place, "--work", tmp_path / "work")
    refused(call("compare", "tiny-grid", *place), 2, "'tiny-grid', which varies norm in each arm")


def test_compare_sets_experiments_beside_each_other(experiment, tmp_path, call, result, monkeypatch):
    """And takes the first arm where none is called standard."""
    place = ["--results", tmp_path / "results"]
    arms = (Arm(name="calm", label="with dropout", train={"weight_decay": 0.5}),)
    more = replace(experiment, name="tiny-more", arms=arms)
    monkeypatch.setitem(EXPERIMENTS, "tiny-more", more)
    for name in ("tiny", "tiny-more"):
        result("run", name, *place, "--work", tmp_path / "work")
    alone = result("compare", "tiny-more", *place)
    assert alone["reference"] == "calm" and [row["arm"] for row in alone["rows"]] == ["calm"]
    both = result("compare", "tiny-more", "--beside", "tiny", *place)
    assert both["reference"] == "standard" and (both["done"], both["planned"]) == (6, 6)
    records = records_of("tiny-more", tmp_path / "results") + records_of("tiny", tmp_path / "results")
    assert both["rows"] == [row._asdict() for row in compare(records)]
    code, out, err = call("compare", "tiny-more", "--beside", "tiny", *place)
    assert code == 0 and re.search(r"^with dropout \(calm\) +2 ", out, re.M)
    refused(call("compare", "tiny", "--beside", "nothing", *place), 2, "--beside: got 'nothing'; want one of")
    refused(call("compare", "tiny", "--beside", "tiny", *place), 1, "records: got two of arm standard and seed 1")


def test_what_diverged_is_counted(experiment, tmp_path, call, result):
    """A run that diverged is in no mean, and in the table all the same."""
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    result("run", "tiny", *place)
    paths = sorted((tmp_path / "results" / "tiny").glob("twicing-*.json"))
    for gone, path in enumerate(paths, 1):
        record = json.loads(path.read_text())
        record["measured"]["diverged"] = True
        path.write_text(json.dumps(record))
        code, out, err = call("compare", "tiny", *place[:2])
        assert code == 0 and re.search(rf"^diverged, left out: twicing {gone}$", out, re.M)
        assert re.search(rf"^twicing +{2 - gone} ", out, re.M) and "inf" not in out
    rows = {row["arm"]: row for row in result("compare", "tiny", *place[:2])["rows"]}
    assert rows["twicing"]["mean"] is None and rows["twicing"]["diverged"] == 2


RECORDS = Path(__file__).parents[2] / "results" / "18_perplexity"


def test_the_list_of_experiments_counts_as_the_queue_does(tmp_path, result):
    """Sweeps, what is tuned by them, other grids; unfinished, half finished, finished; here and in the book."""
    names = ["mini-sweep", "mini", "mini-high", "paper-wikipedia", "quick", "blocks-postln"]
    for name in names:
        if (RECORDS / name).is_dir():
            shutil.copytree(RECORDS / name, tmp_path / name)
    for path in sorted((tmp_path / "mini-sweep").glob("*.json"))[::3]:
        path.unlink()
    listed = result("run", "--results", tmp_path)["experiments"]
    assert [one["name"] for one in listed] == list(EXPERIMENTS)
    listed = {one["name"]: one for one in listed}
    for name in set(names) - {"mini"}:  # which cannot be run before its sweep is finished again
        wanted = experiments.status_of(name, tmp_path)
        assert (listed[name]["done"], listed[name]["runs"]) == (wanted.done, wanted.runs), name
        if wanted.left == "about":
            assert listed[name] == wanted._asdict()
    assert listed["mini-sweep"]["hours_left"] > 0 and listed["mini"]["done"] == 30
    assert result("run", "--results", RECORDS.parent)["experiments"] != [*listed.values()]


def test_the_list_of_experiments_goes_on_past_a_damaged_record(tmp_path, call, result):
    shutil.copytree(RECORDS / "mini-sweep", tmp_path / "mini-sweep")
    shutil.copytree(RECORDS / "mini-warm", tmp_path / "mini-warm")
    first = min((tmp_path / "mini-sweep").glob("*.json"))
    for damaged in ('{"experiment": "mini", "settings": {}, "measured": {}}', "[1]", "\0", ""):
        first.write_text(damaged)
        listed = {one["name"]: one for one in result("run", "--results", tmp_path)["experiments"]}
        assert listed["mini-sweep"]["done"] is None and str(first) in listed["mini-sweep"]["why"]
        assert listed["mini-warm"]["done"] == 15
    code, out, err = call("run", "--results", tmp_path)
    assert code == 0 and str(first) in out and re.search(r"^mini-sweep +\? of +30 runs", out, re.M)


@pytest.mark.parametrize("words", [["--workers", 2], ["--shard", "1/2"], ["--corpora", "."], ["--capture"]])
def test_the_list_of_experiments_drops_no_option(call, tmp_path, words):
    refused(call("run", "--results", tmp_path, *words), 2, "NAME: got None")


def test_a_damaged_record_is_said_where_it_is(experiment, tmp_path, call, result):
    """A queue does what else it can."""
    place = ["--results", tmp_path / "results", "--work", tmp_path / "work"]
    result("run", "tiny", *place)
    first, second, *_ = sorted((tmp_path / "results" / "tiny").glob("*.json"))
    first.write_text('{"experiment": "tiny", "settings": {}, "measured": {}}')
    second.unlink()
    refused(call("run", "tiny", *place), 1, f"gbattn run: {first}: got a damaged record; want a whole one")
    assert second.is_file()


def test_a_table_has_room():
    """Columns as wide as what is in them; pairs are shown where some are missing."""
    row = dict(label="a", n=3, mean=1.0, sd=None, difference=None, low=None, high=None, parameters=1, diverged=0)
    row["training_flops"] = 3e12
    rows = [row | dict(arm="a", pairs=0, training_flops=None)]  # each of its runs diverged
    rows += [row | dict(arm="b", pairs=3, difference=-12345.678, low=-123456.7, high=-1234.5, mean=98765.4)]
    table = dict(rows=rows, metric="validation_bits_per_byte", reference="a", done=1, planned=1, untuned=())
    head, *lines = commands._say_compared(table).splitlines()[:3]
    assert head.split() == ["runs", "validation_bits_per_byte", "sd", "difference", "interval", "parameters", "TFLOPs"]
    assert len({len(line) for line in (head, *lines)}) == 1
    cells = re.split(r" {2,}", lines[1])
    assert cells[1:] == ["3", "98765.4000", "–", "-12345.6780", "-123456.7000 … -1234.5000", "1", "3.0"]
    rows[1] |= dict(pairs=2)
    head, *lines = commands._say_compared(table).splitlines()[:3]
    assert head.split()[4] == "pairs" and re.split(r" {2,}", lines[1])[5] == "2"


def test_an_estimate_is_said_from_a_minute_on():
    one = dict(name="s", question="?", runs=9, done=1, left="at least")
    said = lambda hours: commands._say_status(one | {"hours_left": hours}).splitlines()[0]
    assert said(0.01).endswith("1 of   9 runs")
    assert said(0.5).endswith("runs, at least 30 minutes to go")
    assert said(1760.7).endswith("runs, at least 73 days to go")
    assert said(1.25).endswith("runs, at least 1.2 hours to go")
    assert said(None).endswith("1 of   9 runs")


@pytest.mark.parametrize("flops", [2e6, 3.4e10, 5e13, 1.2e18])
def test_compare_prints_a_size_and_no_zero(flops):
    row = dict(label="a", n=3, mean=1.0, sd=None, difference=None, low=None, high=None, parameters=1, diverged=0)
    rows = [row | dict(arm=arm, pairs=3, training_flops=times * flops) for arm, times in (("a", 1), ("b", 20))]
    table = dict(rows=rows, metric="test_loss", reference="a", done=1, planned=1, untuned=())
    head, *lines = commands._say_compared(table).splitlines()[:3]
    scale = {"M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}[head.split()[-1].removesuffix("FLOPs")]
    said = [float(line.split()[-1].replace(",", "")) * scale for line in lines]
    assert said == pytest.approx([flops, 20 * flops], rel=0.05)


def test_where_records_are(tmp_path, monkeypatch):
    assert commands._folder_of_records(None) == results_folder()  # of the book
    monkeypatch.chdir(tmp_path)
    assert commands._folder_of_records(None) == Path("results")
    assert commands._folder_of_records(Path("there")) == Path("there")
    monkeypatch.setenv("GBATTN_RESULTS", "elsewhere")
    assert commands._folder_of_records(None) == Path("elsewhere")


def test_ctrl_c_in_a_queue(experiment, tmp_path, call, monkeypatch):
    def press(*words, **how):
        raise KeyboardInterrupt

    monkeypatch.setattr("gbattn.lab.queue.run", press)
    code, out, err = call("run", "tiny", "--results", tmp_path)
    assert (code, out) == (130, "") and "what is finished is in" in err and "the same command goes on" in err


# ---- Bench ----


def test_bench(call, result):
    words = ["bench", "multi_head", "boosted", *SMALL, "--rounds", 1, "--new-tokens", 3]
    found = result(*words)
    assert [row["arm"] for row in found["arms"]] == ["multi_head", "boosted"]
    sizes = dict(vocab_size=300, d_model=16, n_layers=1, n_heads=2, max_length=16, positions="rotary")
    sizes["attention_options"] = MODEL["attention_options"]
    for row in found["arms"]:
        config = ModelConfig(attention=row["arm"], **sizes)
        assert row["parameters"] == parameter_count(config).total
        assert row["training_tokens_per_second"] == pytest.approx(4 * 16 / row["step_seconds"])
        assert row["of_product_rate"] > 0 and row["written_tokens_per_second"] > 0
    assert found["machine"]["flops"] > 0
    code, out, err = call(*words)
    assert code == 0 and "GFLOP/s" in out and re.search(r"^boosted +[\d,]+ ", out, re.M)


def test_bench_takes_options_of_its_arms(call, result):
    """The options of an attention go to the arms that are measured, and to no other."""
    rounds = ["--attention-options", '{"rounds": 3}']
    words = [*SMALL, "--rounds", 1, "--new-tokens", 2, *rounds]
    (row,) = result("bench", "boosted", *words)["arms"]
    sizes = dict(vocab_size=300, d_model=16, n_layers=1, n_heads=2, max_length=16, positions="rotary")
    config = ModelConfig(attention="boosted", attention_options={"rounds": 3}, **sizes)
    assert row["parameters"] == parameter_count(config).total
    for arms in (["multi_head"], ["boosted", "multi_head"]):
        refused(call("bench", *arms, *words), 2, "--attention-options: got", "'rounds'", "'multi_head' takes")


def test_no_result_has_a_number_that_json_lacks():
    assert command_line._plain({"a": [math.inf, (math.nan, 1.5)], "b": None}) == {"a": [None, [None, 1.5]], "b": None}


# ---- The functions behind the commands ----

TOY, SOME = ModelConfig(vocab_size=300, max_length=16), TrainConfig(steps=2)


@pytest.mark.parametrize(
    "function, how, message",
    [
        ("train_model", dict(tensorboard="False"), "tensorboard: got 'False'; want True or False"),
        ("train_model", dict(folder=3), "folder: got 3; want a path"),
        ("train_model", dict(folder=""), "folder: got ''; want a path"),
        ("train_model", dict(corpus=3), "corpus: got 3; want a name, or a folder as a string"),
        ("train_model", dict(model={}), "model: got {}; want a ModelConfig"),
        ("train_model", dict(training=3), "training: got 3; want a TrainConfig"),
        ("train_model", dict(max_train_tokens=2.5), "max_train_tokens: got 2.5; want None or an integer, 2 or more"),
        ("train_model", dict(max_train_tokens=True), "max_train_tokens: got True; want"),
        ("train_model", dict(cache=3), "cache: got 3; want None or a path"),
        ("evaluate_model", dict(folder=True), "folder: got True; want a path"),
        ("evaluate_model", dict(split=3), "split: got 3; want None or one of"),
        ("generate_text", dict(samples=True), "samples: got True; want a positive integer"),
        ("generate_text", dict(samples="2"), "samples: got '2'; want a positive integer"),
        ("generate_text", dict(folder=None), "folder: got None; want a path"),
        ("generate_text", dict(stream=1), "stream: got 1; want True or False"),
        ("generate_text", dict(stop="."), "stop: got '.'; want a tuple of strings"),
        ("tokenize_corpus", dict(corpus=None), "corpus: got None; want a name"),
        ("tokenize_corpus", dict(vocab_size=300.5), "vocab_size: got 300.5; want an integer"),
        ("run_experiment", dict(workers=True), "workers: got True; want a positive integer"),
        ("run_experiment", dict(capture=1), "capture: got 1; want True or False"),
        ("run_experiment", dict(workers=1.5), "workers: got 1.5; want a positive integer"),
        ("run_experiment", dict(shard="12"), "shard: got '12'; want K/N"),
        ("run_experiment", dict(shard=(1.0, 2)), "shard: got (1.0, 2); want K/N"),
        ("run_experiment", dict(results=3), "results: got 3; want a path"),
        ("run_experiment", dict(name=["quick"]), "name: got ['quick']; want one of quick"),
        ("compare_arms", dict(name="quick", confidence="0.9", reference="standard"), "name: got 'quick', of which"),
        ("compare_arms", dict(name=["quick"]), "name: got ['quick']; want one of quick"),
        ("compare_arms", dict(name="quick", beside="mini"), "beside: got 'mini'; want a tuple of names"),
        ("measure_arms", dict(rounds=2.5), "rounds: got 2.5; want a positive integer"),
        ("measure_arms", dict(batch_size=True), "batch_size: got True; want a positive integer"),
        ("measure_arms", dict(new_tokens="3"), "new_tokens: got '3'; want a positive integer"),
        ("measure_arms", dict(arms="boosted"), "arms: got 'boosted'; want a tuple of names"),
        ("measure_arms", dict(arms=(["boosted"],)), "arms: got (['boosted'],); want a tuple of names"),
        ("measure_arms", dict(model="small"), "model: got 'small'; want a ModelConfig"),
        ("measure_arms", dict(device=["cpu"]), "device: got ['cpu']"),
        ("options", dict(command="learn"), "command: got 'learn'; want one of train"),
        ("options", dict(command=["train"]), "command: got ['train']; want one of train"),
        ("main", dict(words="train"), "words: got 'train'; want a sequence of strings"),
        ("main", dict(words=[1]), "words: got [1]; want a sequence of strings"),
        ("main", dict(words=3), "words: got 3; want a sequence of strings"),
    ],
)
def test_a_function_refuses_what_no_word_says(tmp_path, monkeypatch, function, how, message):
    monkeypatch.chdir(tmp_path)
    configs = {"train_model": dict(model=TOY, training=SOME), "measure_arms": dict(model=TOY)}
    with pytest.raises(ValueError) as caught:
        module = command_line if function in ("options", "main") else commands
        getattr(module, function)(**configs.get(function, {}) | how)
    assert str(caught.value).startswith(message)
    assert list(tmp_path.iterdir()) == []
