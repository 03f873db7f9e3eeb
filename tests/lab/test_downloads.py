"""Where text comes from: a folder, the Hub, and their faults."""

import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from refusals import refused

from gbattn.lab.downloads import HUB
from gbattn.lab.token_cache import load_corpus
from texts import local


def test_without_the_reader_of_text(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused("datasets", "gbattn[data]"):
        load_corpus("wikitext-2", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert load_corpus(folder, vocab_size=300, cache=tmp_path).lossless  # text files need no reader


FAULTS = {
    "split missing": (dict(train=b"a"), "name_or_folder", "SPLIT.txt", "valid, test"),
    "empty": (dict(train=b"abc", valid=b"", test=b"c"), "valid.txt", "", ""),
    "blank": (dict(train=b" \n\n", valid=b"b", test=b"c"), "train.txt", "", ""),
    "Latin-1": (dict(train=b"a\ncaf\xe9\n", valid=b"b", test=b"c"), "train.txt", "iconv", "line 2"),
    "one token": (dict(train=b"abc, abd", valid=b"b", test=b"c"), "valid", "", ""),
    "two places": (
        {"train": b"abc", "valid": b"b", "test": b"c", "train/more": b"d"},
        "name_or_folder",
        "",
        "train.txt",
    ),
}


@pytest.mark.parametrize("code", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_a_text_in_another_encoding_is_named_with_its_encoding(code, tmp_path):
    texts = dict(train="a b\n".encode(code), valid=b"b", test=b"c")
    with refused(tmp_path / "train.txt", want="iconv", got=code):
        load_corpus(local(tmp_path, **texts), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_with_nuls_is_no_text(tmp_path):
    texts = dict(train=b"a b c d e f\n" * 9 + b"\0\n", valid=b"b", test=b"c")
    with refused(tmp_path / "train.txt"):
        load_corpus(local(tmp_path, **texts), cache=tmp_path / "cache")


def test_a_folder_is_read_however_deep(tmp_path, cache):
    local(tmp_path, valid=b"b b", test=b"c c")
    place, made = tmp_path, []
    for name in ["train"] + 1200 * ["d"]:
        place = f"{place}/{name}"
        os.mkdir(place)
        made.append(place)
    Path(place, "a.txt").write_text("a a a")
    try:
        assert len(load_corpus(tmp_path, vocab_size=256, cache=cache).train) == 5
    finally:  # shutil.rmtree calls itself
        os.remove(f"{place}/a.txt")
        for folder in reversed(made):
            os.rmdir(folder)


@pytest.mark.parametrize("texts, named, want, got", FAULTS.values(), ids=FAULTS)
def test_faults_of_a_folder(tmp_path, texts, named, want, got):
    with refused(tmp_path / named if named.endswith(".txt") else named, want, got):
        load_corpus(local(tmp_path, **texts), cache=tmp_path / "cache")
    assert not [*tmp_path.glob("cache/*")]


def test_a_folder_of_files(tmp_path, cache):
    for name, text in {
        "train/c.txt": "last",
        "train/b.txt": "second\n",
        "train/a.txt": "first",
        "valid/x.txt": "v v\n",
        "test/x.txt": "t t\n",
    }.items():
        path = tmp_path / "many" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    corpus = load_corpus(tmp_path / "many", vocab_size=256, cache=cache)
    assert corpus.decode(corpus.train) == "first\nsecond\nlast"


def test_a_folder_that_cannot_be_listed(tmp_path, cache, monkeypatch):
    local(tmp_path, **{"train/a": b"a a", "train/deep/b": b"b b", "valid": b"v v", "test": b"t t"})
    listed = os.scandir

    def scandir(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with refused("name_or_folder"):
        load_corpus(tmp_path, vocab_size=256, cache=cache)


def test_files_behind_links_are_read_and_hidden_ones_not(tmp_path, cache):
    many, elsewhere = tmp_path / "many", tmp_path / "elsewhere"
    for path, text in {
        many / "train" / "a" / "a.txt": "first\n",
        many / "train" / "a-b.txt": "second\n",
        many / "train" / ".checkpoints" / "old.txt": "a draft\n",
        many / "train" / ".hidden.txt": "hidden\n",
        many / "train" / "folder.txt" / "notes.md": "no text file\n",
        elsewhere / "C.TXT": "third\n",
        many / "valid.txt": "v v\n",
        many / "test.txt": "t t\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (many / "train" / "b").symlink_to(elsewhere)
    corpus = load_corpus(many, vocab_size=256, cache=cache)
    assert corpus.decode(corpus.train) == "first\nsecond\nthird\n"
    (elsewhere / "back").symlink_to(many / "train")
    with refused("name_or_folder"):
        load_corpus(many, vocab_size=256, cache=cache)
    (elsewhere / "back").unlink()
    (elsewhere / "d.txt").symlink_to(tmp_path / "gone.txt")
    with refused(many / "train" / "b" / "d.txt"):
        load_corpus(many, vocab_size=256, cache=cache)


def test_a_byte_order_mark_is_dropped(tmp_path, cache):
    mark = "\ufeff".encode()
    corpus = load_corpus(
        local(tmp_path, train=mark + b"ab", valid=b"cd", test=mark + b"ef"), vocab_size=256, cache=cache
    )
    assert (corpus.decode(corpus.train), corpus.text_bytes("train")) == ("ab", 2)
    with refused(tmp_path / "valid.txt"):
        load_corpus(local(tmp_path, train=b"ab", valid=mark, test=b"ef"), cache=cache)


@pytest.mark.parametrize("name", ["python-docs", "wikitext-2"])
def test_a_path_is_a_folder_whatever_its_name(name, tmp_path, cache, monkeypatch):
    (tmp_path / name).mkdir()
    local(tmp_path / name, train=b"our own", valid=b"text", test=b"here")
    monkeypatch.chdir(tmp_path)
    corpus = load_corpus(Path(name), vocab_size=256, cache=cache)
    assert corpus.decode(corpus.train) == "our own"


class Hub:
    """A stand-in for the loader: rows as the Hub has them, and a note of what was asked."""

    def __init__(self, rows):
        self.rows, self.asked, self.read = rows, [], 0

    def load_dataset(self, path, config=None, *, split, streaming):
        self.asked.append((path, config, split, streaming))

        def rows():
            for text in self.rows[split]:
                self.read += 1
                yield {"text": text}

        return rows()


@pytest.fixture
def hub(monkeypatch):
    def install(rows):
        fake = Hub(rows)
        module = ModuleType("datasets")
        module.__spec__, module.load_dataset = ModuleSpec("datasets", None), fake.load_dataset
        monkeypatch.setitem(sys.modules, "datasets", module)
        return fake

    return install


def test_wikitext_comes_line_by_line(hub, tmp_path):
    rows = ["", " = Title = \n", "", " Some text , with a @-@ dash \n"]
    fake = hub({"train": rows * 5, "validation": rows, "test": rows})
    corpus = load_corpus("wikitext-103", vocab_size=260, cache=tmp_path)
    assert corpus.decode(corpus.valid) == "\n = Title = \n\n Some text , with a @-@ dash \n"
    asked = [
        ("Salesforce/wikitext", "wikitext-103-raw-v1", split, False)
        for split in ("train", "train", "validation", "test")
    ]
    assert fake.asked == asked and corpus.name == "wikitext-103"
    assert HUB["wikitext-2"].config == "wikitext-2-raw-v1"
    load_corpus("wikitext-103", vocab_size=260, cache=tmp_path)
    assert len(fake.asked) == 4  # the second time from the cache
    shutil.copytree(corpus.folder, tmp_path / "carried" / corpus.folder.name)
    carried = load_corpus("wikitext-103", vocab_size=260, cache=tmp_path / "carried")
    assert len(fake.asked) == 4 and carried.fingerprint == corpus.fingerprint  # nor by who gets the folder


def test_openwebtext_is_streamed_and_not_read_to_the_end(hub, tmp_path):
    page = "Some page, and its number: {}.\nTwo lines. " + "word " * 200
    fake = hub({"train": [page.format(i) for i in range(6_000)]})
    corpus = load_corpus("openwebtext", vocab_size=256, max_train_tokens=100_000, cache=tmp_path / "a")
    assert all(streaming for *_, streaming in fake.asked)
    assert corpus.decode(corpus.valid).count("\n\n") == 1000 and corpus.decode(corpus.test).startswith(
        page.format(1000)
    )
    assert len(corpus.train) == 100_000 and corpus.decode(corpus.train).startswith(page.format(2000))
    assert fake.read < 13_000  # all of it once, for the tokenizer; 1,000 and 2,000; and not all of it for train


def test_a_hub_that_cannot_be_reached(tmp_path):
    """The real library, told that it is offline, so that the test takes no part of a minute."""
    code = """
import sys
from gbattn.lab.token_cache import load_corpus
for name in ("wikitext-2", "openwebtext"):
    try:
        load_corpus(name, cache=sys.argv[1])
    except ValueError as error:
        print(error)
"""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=env)
    lines = done.stdout.splitlines()
    assert len(lines) == 2, done.stderr
    for line, name in zip(lines, ("wikitext-2", "openwebtext")):
        assert line.startswith(f"{name}: got ConnectionError: ")
        assert "want a network that reaches the Hugging Face Hub, and there a dataset that" in line
        assert "or open_corpus on a finished cache" in line
