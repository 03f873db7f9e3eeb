"""The commands train, evaluate, generate and tokenize, from end to end on a small text, and their faults."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gbattn.corpora import bigram_loss, bits_per_byte, train_tokenizer
from gbattn.lab.commands import write
from gbattn.lab.commands.options import TRAINING, many
from gbattn.lab.token_cache import load_corpus, manifest_checksum
from gbattn.language_model import LanguageModel
from gbattn.training import evaluate
from tiny_model import DIVERGING, PROGRAM, SHORT, SMALL, copy_files, denied, sentences

pytestmark = pytest.mark.usefixtures("own_places")


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
    denied(call("generate", *words, "--stream", "--samples", 2), 2, "--stream: got 2 samples; want one")


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
    denied(outcome, 2, f"--precision: got '{precision}' without a GPU")


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
    denied(call("evaluate", "--folder", folder, "--context", 8), 2, "--context: got 8; want an integer from 0 to 7")


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
    denied(call("generate", "-", "--folder", trained), 2, "PROMPT: got a closed standard input; want text there")


def test_what_would_command_a_terminal_is_not_shown(call, trained, monkeypatch):
    monkeypatch.setattr(write, "continued", lambda *words, **how: ["a\x1b[31mb\x9b\r\n\tc é 😀"])
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

    class Trained(BaseException):
        pass

    def train(*words, **how):
        raise Trained

    monkeypatch.setattr("gbattn.lab.run_folder.train", train)
    code, out, err = call(*words, "--json")
    again = json.loads(out)
    assert code == 0 and f"{tmp_path} holds the run up to step 20: finished" in err
    assert again == once
    assert (tmp_path / "model.safetensors").read_bytes() == before
    denied(call(*words, "--seed", 3), 2, "--folder: got training.seed = 3; want")
    history = json.loads((tmp_path / "history.json").read_text())
    (tmp_path / "history.json").write_text(json.dumps(history | {"finished": False}))
    with pytest.raises(Trained):
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
    denied(outcome, 2, "--folder: got fingerprint = ", "to go on with the run in")


def test_another_run_in_the_folder(text, trained, call):
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    outcome = call("train", text, "--folder", trained, *SHORT, "--learning-rate", "0.5", "--norm", "post")
    denied(
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
    denied(call("train", text, "--folder", tmp_path, *SHORT), 2, "--folder: got", "thesis.tex", "new or empty folder")
    denied(
        call("train", text, "--folder", tmp_path / "thesis.tex", *SHORT), 2, "--folder: got", "thesis.tex, a file; want"
    )
    denied(call("train", text, "--folder", tmp_path / "thesis.tex" / "in", *SHORT), 2, "--folder: got", "a file; want")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_drafts_of_a_killed_run_are_in_nobodys_way(text, trained, tmp_path, call, result):
    """A folder that holds nothing else is free, and who goes on clears them; other files are left."""
    folder, drafts = tmp_path / "m", ("run.json.draft-0123abcd", "model.safetensors.draft-89efcdab")
    folder.mkdir()
    for name in (".lock", *drafts):
        (folder / name).write_text("{")
    (folder / "my.draft-2").write_text("mine")
    denied(call("train", text, "--folder", folder, *SHORT), 2, "which holds my.draft-2 and no run.json")
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
    denied(call("train", text, "--folder", "/proc/self/model", *SHORT), 1, "/proc/self/model")


def test_a_folder_without_a_checkpoint_is_free(text, tmp_path, call, result):
    """A run that was refused or that ended early keeps nothing that could be lost."""
    words = ["train", text, "--folder", tmp_path / "m", *SHORT]
    denied(call(*words, "--warmup-steps", "20"), 2, "--warmup-steps: got 20; want fewer than the 20 steps")
    if not torch.cuda.is_available():
        denied(call(*words, "--precision", "fp16"), 2, "--precision: got 'fp16' without a GPU")
    denied(call(*words, *DIVERGING), 1, "is nan in step")
    assert result(*words)["steps"] == 20
    assert not json.loads((tmp_path / "m" / "run.json").read_text())["training"]["warmup_steps"]
    denied(call(*words, "--warmup-steps", "20"), 2, "--folder: got training.warmup_steps = 20; want")


def test_a_model_without_its_checkpoints_is_not_overwritten(text, trained, tmp_path, call):
    copy_files(trained, tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    denied(call("train", text, "--folder", tmp_path, *SHORT, "--seed", "9"), 2, "--folder: got training.seed = 9; want")
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_run_of_another_program_is_not_overwritten(text, tmp_path, call):
    (tmp_path / "run.json").write_text("{}")
    denied(call("train", text, "--folder", tmp_path, *SHORT), 1, "run.json: got the file of another program")
    assert (tmp_path / "run.json").read_text() == "{}"


@pytest.mark.parametrize("words", [["train", "TEXT", *SHORT], ["run", "quick"]])
def test_under_torchrun(text, tmp_path, call, monkeypatch, words):
    """Each process would take the folder, or a run, for itself."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = f"WORLD_SIZE: got 2; want 1, as gbattn {words[0]} is one process; "
    denied(call(*(text if word == "TEXT" else word for word in words)), 1, said)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once(text, tmp_path, call):
    from filelock import FileLock

    with FileLock(tmp_path / ".lock"):
        denied(call("train", text, "--folder", tmp_path, *SHORT), 1, "another gbattn train at work")


def test_a_folder_is_called_like_an_option(text, tmp_path, call, monkeypatch):
    """What is said of the folder is not said of the option."""
    from filelock import FileLock

    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt").mkdir()
    with FileLock(tmp_path / "prompt" / ".lock"):
        said = f"gbattn train: {tmp_path / 'prompt'}: got another gbattn train at work; want another folder"
        denied(call("train", text, "--folder", "prompt", *SHORT), 1, said)


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
    denied(call(*(places.get(word, word) for word in words)), 2, *parts)
    assert not (tmp_path / "gbattn-model").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="A GPU is no mistake here.")
@pytest.mark.parametrize("command", ["evaluate", "bench"])
def test_a_gpu_that_is_not_there(call, trained, command):
    words = {"evaluate": ["evaluate", "--folder", trained], "bench": ["bench", *SMALL]}[command]
    denied(call(*words, "--device", "cuda"), 2, "--device: got 'cuda'", "want cpu, or cuda")


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
    denied(call("evaluate", "--folder", model), 2, f"--corpus: got none, and {before} is gone; want where the text")
    moved = result("evaluate", "--folder", model, "--corpus", now)
    assert moved["loss"] == price["loss"]


def test_a_damaged_checkpoint_is_no_option(text, tmp_path, call, result):
    result("train", text, "--folder", tmp_path / "m", *SHORT)
    (weights,) = (tmp_path / "m" / "checkpoints").glob("step-*/training.json")
    weights.write_text("no")
    denied(call("train", text, "--folder", tmp_path / "m", *SHORT), 1, "checkpoints: got", "delete that one")


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
    denied(call("generate", "--folder", tmp_path), 2 if stopped else 1, str(named), "; want ")
    if name != "tokenizer.json":  # which only --text reads
        denied(call("evaluate", "--folder", tmp_path), 2 if stopped else 1, str(named), "; want ")


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
        denied(outcome, 1, f"{path}: got a file that is damaged", "; want what gbattn train wrote")
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

    class Trained(BaseException):
        pass

    def train(*words, **how):
        raise Trained

    monkeypatch.setattr("gbattn.lab.run_folder.train", train)
    outcome = call("train", text, "--folder", tmp_path, *SHORT)
    denied(outcome, 1, f"{path}: got ", "; want what gbattn train wrote: copy or delete it")


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
    (tmp_path / "torch").mkdir()  # which has folders of its own
    own = dict.fromkeys(["TORCHINDUCTOR_CACHE_DIR", "TMPDIR"], str(tmp_path / "torch"))
    options = dict(cwd=tmp_path, env=os.environ | own)
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
    denied(call("train", hostile, "--folder", folder, *SHORT[2:]), 1, "corpus.json, tokenizer.file")
    after = state()
    assert {path: after[path] for path in before} == before
    assert all(path.parent == folder and path.name in ("run.json", ".lock") for path in after.keys() - before.keys())


def test_a_foreign_tokenizer_is_found_out(text, trained, tmp_path, call, result):
    """One of the same size, of another text; and the same training once more puts it right."""
    copy_files(trained, tmp_path)
    other = train_tokenizer([sentences(200, 7).upper()], 300).to_str()
    (tmp_path / "tokenizer.json").write_text(other)
    said = [str(tmp_path / "tokenizer.json"), "do not match their checksum; want the file that corpus.json was written"]
    denied(call("generate", "--folder", tmp_path), 1, *said)
    denied(call("evaluate", "--folder", tmp_path, "--text", Path(text) / "test.txt"), 1, *said)
    shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints")
    result("train", text, "--folder", tmp_path, *SHORT)
    words = ["generate", "a cat", "--max-new-tokens", "4", "--folder"]
    assert result(*words, tmp_path)["texts"] == result(*words, trained)["texts"]


@pytest.mark.skipif(os.name != "posix", reason="The size of a file is limited as POSIX does it.")
def test_a_full_disk(text, tmp_path, result):
    """Which file, and what is kept."""
    words = ["train", text, "--folder", tmp_path / "m", *SHORT]
    done = result(*words)
    (tmp_path / "m" / "history.json").unlink()
    # Some releases of torch write a file of their own when they load this.
    full = "import resource, torch._dynamo; resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))"
    program = [sys.executable, "-c", f"{full}; {PROGRAM[-1]}"]
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
    denied(outcome, 1, f"No space left on device: '{tmp_path / 'm' / 'history.json'}'; step 20 is kept in")
    monkeypatch.setattr(P, "write_bytes", write)
    assert result(*words)["steps"] == 20


def test_a_loss_that_is_not_finite(text, tmp_path, call):
    denied(call("train", text, "--folder", tmp_path / "m", *SHORT, *DIVERGING), 1, "is nan in step")


def test_weights_that_are_not_finite(trained, tmp_path, call):
    copy_files(trained, tmp_path)
    model = LanguageModel.from_pretrained(trained)
    with torch.no_grad():
        model.head_weight[7] = math.nan
    model.save_pretrained(tmp_path)
    denied(call("generate", "--folder", tmp_path), 1, "model: got logits that are not finite")
    denied(call("evaluate", "--folder", tmp_path), 1, "model: got a loss of nan; want a finite one")


LEARNED = [*SMALL, "--positions", "learned"]


def test_a_default_length_is_cut_to_the_room_there_is(text, tmp_path, call, result):
    """A length that was typed is refused, and named."""
    words = ["train", text, "--folder", tmp_path / "m", *LEARNED, "--steps", 2, "--prompt", "the cat"]
    denied(call(*words, "--sample-tokens", 80), 2, "--sample-tokens: got", "at most max_length = 16")
    assert not (tmp_path / "m").exists()
    sample = result(*words)["sample"]
    assert sample.startswith("the cat") and len(sample) > 7
    words = ["generate", "the dog", "--folder", tmp_path / "m"]
    (found,) = result(*words)["texts"]
    assert found.startswith("the dog") and len(found) > 8
    denied(call(*words, "--max-new-tokens", 16), 2, "--max-new-tokens: got", "at most max_length = 16")
    words[1] = "a cat sees " * 9
    denied(call(*words), 2, "PROMPT: got ", " tokens; want fewer than max_length = 16, as positions are learned")
    bench = ["bench", "boosted", *LEARNED, "--rounds", 1]
    assert result(*bench)["arms"][0]["written_tokens_per_second"] > 0
    denied(call(*bench, "--new-tokens", 16), 2, "--new-tokens: got 16; want fewer than max_length = 16")
    denied(call(*bench, "--max-length", 1), 2, "--max-length: got 1; want 2 or more, as positions are learned")


def test_a_prompt_that_fills_the_window_is_no_reason_not_to_train(text, tmp_path, call):
    words = ["train", text, "--folder", tmp_path / "m", *LEARNED, "--steps", 1, "--prompt", "a cat sees " * 9]
    code, out, err = call(*words, "--json")
    assert code == 0 and json.loads(out)["sample"] is None
    assert "no sample will be written: the prompt takes all positions" in err
    assert ", 1 layer, width 16: " in err
    code, out, err = call(*words)
    assert "after 1 step and" in out
    assert many(1, "second") == "1 second" and many(2000, "second") == "2,000 seconds"


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
    denied(call("train", carried, *SHORT[2:], *words), 2, *parts)
    denied(call("tokenize", carried, *words), 2, *parts)
    assert not (tmp_path / "gbattn-model").exists()


def test_an_option_that_is_typed_counts_where_it_is_the_default(text, tmp_path, call, result):
    recipe = ["--vocab-size", 300, "--tokenizer", "published", "--max-train-tokens", 900]
    carried = result("tokenize", text, *recipe, "--cache", tmp_path)["folder"]
    for words in (["tokenize", carried], ["train", carried, "--folder", tmp_path / "m", *SHORT[2:]]):
        for name, default in (("vocab-size", 2048), ("tokenizer", "byte-level"), ("max-train-tokens", None)):
            denied(call(*words, f"--{name}={default}"), 2, f"--{name}: got {default}; want")
            denied(call(*words, f"--{name.replace('-', '_')}", default), 2, f"--{name}: got {default}; want")
        result(*words)
        result(*words, *recipe)
