"""The cache of tokens: what it says of itself, and its faults."""

import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from refusals import refused

from gbattn.corpora import SPLITS, spellings, train_tokenizer
from gbattn.ground.arguments import ArgumentError
from gbattn.ground.files import file_checksum
from gbattn.lab.downloads import rows_from_folder
from gbattn.lab.token_cache import (
    encode_split,
    load_corpus,
    manifest_checksum,
    open_corpus,
    pieces_of,
    tokenizer_text,
    write_corpus,
)
from texts import TEXTS, local


def test_the_manifest_says_how_it_was_made(corpus):
    manifest = json.loads((corpus.folder / "corpus.json").read_text())
    assert manifest["recipe"]["tokenizer"] == "byte-level" and manifest["recipe"]["max_train_tokens"] is None
    assert set(manifest["made_with"]) == {"python", "gbattn", "tokenizers", "datasets"}
    for split in SPLITS:
        assert set(manifest["splits"][split]) == {"file", "dtype", "tokens", "bytes", "lossless", "sha256"}
    assert sorted(p.name for p in corpus.folder.iterdir()) == [
        "corpus.json", "test.bin", "tokenizer.json", "train.bin", "valid.bin",
    ]  # fmt: skip


def test_made_once_then_opened(corpus, folder, cache, monkeypatch):
    monkeypatch.setattr("gbattn.lab.token_cache.write_corpus", None)
    again = load_corpus(folder, vocab_size=np.int64(300), cache=cache)
    assert again.folder == corpus.folder and again.fingerprint == corpus.fingerprint
    monkeypatch.setenv("GBATTN_CACHE", str(cache))
    assert load_corpus(folder, vocab_size=300).folder == corpus.folder


def test_other_text_or_another_recipe_is_another_corpus(corpus, folder, cache, tmp_path):
    other = load_corpus(folder, vocab_size=301, cache=cache)
    assert other.folder != corpus.folder and other.fingerprint != corpus.fingerprint
    changed = tmp_path / folder.name
    shutil.copytree(folder, changed)
    (changed / "test.txt").write_text("else")
    assert load_corpus(changed, vocab_size=300, cache=cache).folder != corpus.folder


def test_python_docs_with_another_text_is_another_corpus(tmp_path, monkeypatch):
    """Two distributions of one version of Python may share a cache."""
    for test in ("some text\n", "other text\n"):
        texts = {split: {"a": "some text\n"} for split in SPLITS} | {"test": {"a": test}}
        monkeypatch.setattr("gbattn.lab.downloads.python_docs", lambda texts=texts: texts)
        corpus = load_corpus(vocab_size=256, cache=tmp_path)
        assert corpus.decode(corpus.test) == test + "\n\n\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_first_tokens_are_those_of_the_whole(corpus, folder, cache):
    for limit in (2, 37, len(corpus.train) - 1, len(corpus.train)):
        head = load_corpus(folder, vocab_size=300, max_train_tokens=limit, cache=cache)
        assert np.array_equal(head.train, corpus.train[:limit]) and head.lossless
        assert head.text_bytes("train") == corpus.n_bytes(corpus.train[:limit])
        assert np.array_equal(head.test, corpus.test)


@pytest.mark.parametrize("limit, head", [(2, "na"), (3, "naπve"), (4, "naπve aπb"), (5, "naπve aπb  foo")])
def test_a_limit_counts_the_bytes_of_text_where_characters_are_lost(limit, head, tmp_path):
    """A character that is lost inside a word shifts the library's offsets."""
    text = "naπve aπb  foo bar"
    tokenizer = train_tokenizer(["n a ve ve ab ab foo foo bar bar"] * 9, 40, "published")
    assert tokenizer.encode(text).tokens == ["n", "a", "ve", "ab", "foo", "bar"]
    vocabulary = spellings(json.loads(tokenizer.to_str()), "published")
    found = encode_split(tmp_path / "x.bin", [text], tokenizer, vocabulary, np.dtype("<u2"), limit)
    assert found["tokens"] == limit and found["bytes"] == len(head.encode()) and not found["lossless"]


@pytest.mark.parametrize("types, dtype", [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_32_bits_where_16_do_not_suffice(types, dtype, tmp_path, folder, monkeypatch):
    monkeypatch.setattr("gbattn.lab.token_cache.spellings", lambda *a: [b""] * types)
    rows, source = rows_from_folder(folder)
    recipe = source | {
        "tokenizer": "byte-level",
        "vocab_size": 300,
        "max_train_tokens": None,
        "tokenizer_characters": 10**8,
    }
    write_corpus(tmp_path / "wide", recipe, rows)
    wide = open_corpus(tmp_path / "wide")
    assert wide.train.dtype == dtype and not wide.lossless


def test_a_run_that_is_cut_off_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "python_version", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_corpus(folder, vocab_size=300, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_that_write_at_once(folder, tmp_path, monkeypatch):
    rows, source = rows_from_folder(folder)
    first = load_corpus(folder, vocab_size=300, cache=tmp_path)
    write_corpus(first.folder, first.manifest["recipe"], rows)  # the second to finish
    assert [p.name for p in tmp_path.iterdir()] == [first.folder.name]
    assert open_corpus(first.folder).fingerprint == first.fingerprint


BARE = """
import sys
for name in ("datasets", "tokenizers"):
    sys.modules[name] = None
from gbattn.corpora import train_tokenizer
from gbattn.lab.token_cache import load_corpus, open_corpus
corpus = open_corpus(sys.argv[1])
print(corpus.decode(corpus.test), corpus.n_bytes(corpus.test), len(corpus.train))
load = lambda: load_corpus(sys.argv[2], cache=sys.argv[3])
for call in (lambda: corpus.encode("a"), lambda: train_tokenizer(["a"]), load):
    try:
        call()
    except ValueError as error:
        print(error)
print(sorted({"sklearn", "matplotlib", "pandas"} & set(sys.modules)))
"""


def test_a_cache_is_carried_to_a_machine_without_the_packages(corpus, folder, tmp_path):
    carried = tmp_path / "carried"
    shutil.copytree(corpus.folder, carried)
    command = [sys.executable, "-c", BARE, carried, folder, tmp_path]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONIOENCODING": "utf-8"}, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.removeprefix(TEXTS["test"]).splitlines()
    assert lines[0].split() == [str(len(TEXTS["test"].encode())), str(len(corpus.train))]
    install = "pip install 'gbattn[data] @ git+https://github.com/gbattn/gbattn'"
    error = f"tokenizers: got a Python that cannot import it; want {install}, or open_corpus"
    assert all(line.startswith(error) for line in lines[1:4])
    assert lines[4] == "[]"


def spoil(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


SPOILT = {
    "truncated": ("train.bin", lambda b: b[:-1]),
    "changed": ("valid.bin", lambda b: bytes([b[0] ^ 1]) + b[1:]),
    "other tokenizer": ("tokenizer.json", lambda b: b + b" "),
    "no JSON": ("corpus.json", lambda b: b"{"),
    "a list": ("corpus.json", lambda b: b"[]"),
    "foreign": ("corpus.json", lambda b: b"{}"),
    "other vocabulary": (
        "corpus.json",
        lambda b: b.replace(b'"vocab_size": 300,\n "tok', b'"vocab_size": 301,\n "tok'),
    ),
    "other bytes": ("corpus.json", lambda b: b.replace(b'"bytes": ', b'"bytes": 1')),
    "no checksum": ("corpus.json", lambda b: b.replace(b"sha256", b"sha1")),
    "newer": ("corpus.json", lambda b: b.replace(b"corpus 1", b"corpus 2")),
}


@pytest.mark.parametrize("name, change", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_cache_is_refused(corpus, tmp_path, name, change):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    before = (copy / name).read_bytes()
    spoil(copy, name, change)
    assert (copy / name).read_bytes() != before
    with refused(copy / name):
        open_corpus(copy)


def test_a_missing_file_and_a_folder_that_is_no_cache(corpus, tmp_path):
    with refused("folder"):
        open_corpus(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    (copy / "test.bin").unlink()
    with refused("folder"):
        open_corpus(copy)


@pytest.mark.parametrize("manifest", [None, "{}", '{"format": "somebody else"}', "no JSON"])
def test_nobody_is_told_to_delete_a_folder_of_text(manifest, tmp_path):
    local(tmp_path, train=b"our own", valid=b"text", test=b"here")
    if manifest:
        (tmp_path / "corpus.json").write_text(manifest)
    with refused(tmp_path / "corpus.json" if manifest else "folder", "load_corpus(folder)") as caught:
        open_corpus(tmp_path)
    assert "delete" not in caught.value.want
    corpus = load_corpus(tmp_path, vocab_size=256, cache=tmp_path / "cache")  # which it is no cache for
    assert corpus.decode(corpus.train) == "our own"


def test_a_cache_of_another_version_may_be_deleted(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    spoil(copy, "corpus.json", lambda b: b.replace(b"corpus 1", b"corpus 2"))
    with refused(copy / "corpus.json", "delete the folder"):
        open_corpus(copy)
    with refused("name_or_folder", "open_corpus"):
        load_corpus(copy)


def test_without_verification_only_sizes_are_compared(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    spoil(copy, "valid.bin", lambda b: bytes([b[0] ^ 1]) + b[1:])
    assert len(open_corpus(copy, verify=False).valid) == len(corpus.valid)
    spoil(copy, "valid.bin", lambda b: b[:-2])
    with refused(copy / "valid.bin"):
        open_corpus(copy, verify=False)


def signed(folder, change):
    """Change the manifest of a folder, with a checksum that fits."""
    path = folder / "corpus.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["sha256"] = manifest_checksum(manifest)
    path.write_text(json.dumps(manifest))


def entries(manifest, above=()):
    """Where each entry of a manifest is that somebody reads: its source nobody does."""
    for name, value in manifest.items():
        if name not in ("source", "sha256", "format") or above[:1] in (("splits",), ("tokenizer",)):
            yield (*above, name)
            if isinstance(value, dict):
                yield from entries(value, (*above, name))


UNREAD = {("recipe", "tokenizer_rows"), ("recipe", "tokenizer_characters")}

UNREAD |= {("made_with", package) for package in ("python", "gbattn", "datasets")}

NONSENSE = ["../x", "/etc/x", "", ".", "a\\b", "c:x", "nul\0", "\x1b[2J", "O", "run.json", "corpus.json"]

NONSENSE += [0, -1, 1.5, True, None, [], {}, [[]], 10**30, "a" * 10**6, math.nan]

HARMLESS = {  # what is neither a path nor a size, and can be shown
    ("recipe", "corpus"): {"", ".", "a\\b", "c:x", "O", "run.json", "corpus.json"},
    ("recipe", "max_train_tokens"): {None},
    ("made_with", "tokenizers"): {"../x", "/etc/x", "", ".", "a\\b", "c:x", "O", "run.json", "corpus.json"},
}


def test_no_entry_of_a_manifest_is_believed(corpus, tmp_path):
    """Whoever makes a folder makes its checksums."""
    copy, outside = tmp_path / "deep" / "copy", tmp_path / "x"
    shutil.copytree(corpus.folder, copy)
    outside.write_text("mine")
    whole, tried = (copy / "corpus.json").read_text(), 0
    for place in set(entries(corpus.manifest)) - UNREAD:
        for value in NONSENSE:
            there = corpus.manifest
            for name in place:
                there = there[name]
            harmless = any(value is x or type(value) is str and value == x for x in HARMLESS.get(place, ()))
            if harmless or (type(there), there) == (type(value), value):
                continue

            def change(manifest, place=place, value=value):
                for name in place[:-1]:
                    manifest = manifest[name]
                manifest[place[-1]] = value

            (copy / "corpus.json").write_text(whole)
            signed(copy, change)
            for verify in (True, False):
                with pytest.raises(ArgumentError) as caught:
                    open_corpus(copy, verify=verify)
                assert ".".join(place) in caught.value.argument and len(str(caught.value)) < 600
            tried += 1
    assert tried > 500 and outside.read_text() == "mine"


@pytest.mark.parametrize("place", ["format", "tokenizer", "else"])
def test_json_that_nests_too_deep_is_refused_by_its_name(corpus, tmp_path, place):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    opened = open_corpus(copy)
    for depth in (*range(930, 1000), 100_000):
        (copy / "corpus.json").write_text(f'{{"{place}": {"[" * depth + "]" * depth}, "format": "gbattn corpus 1"}}')
        with refused(copy / "corpus.json"):
            open_corpus(copy)
    with refused("name_or_folder"):
        load_corpus(copy)
    (copy / "tokenizer.json").write_text("[" * 100_000)
    opened.manifest["tokenizer"]["sha256"] = file_checksum(copy / "tokenizer.json")
    for use in (lambda: opened.decode([1]), lambda: opened.encode("a")):
        with refused(copy / "tokenizer.json"):
            use()


@pytest.mark.parametrize("number", [300, 65_535])
def test_numbers_beyond_the_vocabulary_are_refused(corpus, tmp_path, number):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    np.full(len(corpus.valid), number, "<u2").tofile(copy / "valid.bin")
    signed(copy, lambda m: m["splits"]["valid"].update(sha256=file_checksum(copy / "valid.bin")))
    with refused(copy / "valid.bin"):
        open_corpus(copy)
    with refused("tokens"):
        opened = open_corpus(copy, verify=False)
        opened.decode(opened.valid)


def replaced(number):
    """The vocabulary with another number for its last token."""

    def change(tokenizer):
        vocabulary = tokenizer["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = number

    return change


TOKENIZERS = {
    **{repr(x): replaced(x) for x in (-1, 0, 300, 2**32 - 1, 10**30, 1.5, "1", None, [], {})},
    "one more": lambda tokenizer: tokenizer["model"]["vocab"].update(more=300),
    "no byte": lambda tokenizer: tokenizer["model"]["vocab"].update({"語": tokenizer["model"]["vocab"].pop("!")}),
    "no vocabulary": lambda tokenizer: tokenizer["model"].pop("vocab"),
    "a list": lambda tokenizer: tokenizer["model"].update(vocab=[["a", 0]]),
    "no model": lambda tokenizer: tokenizer.update(model=3),
}


@pytest.mark.parametrize("change", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_vocabulary_that_is_none(corpus, tmp_path, change):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    change(tokenizer)
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    signed(copy, lambda m: m["tokenizer"].update(sha256=file_checksum(copy / "tokenizer.json")))
    opened = open_corpus(copy)
    for use in (lambda: opened.vocabulary, lambda: opened.decode([1]), lambda: opened.n_bytes(opened.test)):
        with refused(copy / "tokenizer.json"):
            use()


PAD = dict(direction="Right", pad_to_multiple_of=None, pad_id=0, pad_type_id=0, pad_token="a")

MARK = {"id": "x", "ids": [4_000_000_000], "tokens": ["x"]}

TEMPLATE = [{"SpecialToken": {"id": "x", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]

SETTINGS = {
    "post_processor": dict(type="TemplateProcessing", single=TEMPLATE, pair=TEMPLATE, special_tokens={"x": MARK}),
    "padding": dict(strategy={"Fixed": 9 * 10**12}, **PAD),  # the library asks for so much memory, and ends
    "truncation": dict(direction="Right", max_length=2, strategy="LongestFirst", stride=2),
    "normalizer": dict(type="Precompiled", precompiled_charsmap="AAAA"),
    "pre_tokenizer": dict(type="FixedLength", length=0),
    "model.continuing_subword_prefix": "ééé",
    "model.dropout": 0.5,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_tokenizer_of_another_recipe_never_reaches_its_library(corpus, tmp_path, name):
    """Which could end the process, or encode otherwise than the text was."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    *outer, inner = name.split(".")
    (tokenizer[outer[0]] if outer else tokenizer)[inner] = SETTINGS[name]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    signed(copy, lambda m: m["tokenizer"].update(sha256=file_checksum(copy / "tokenizer.json")))
    with refused(copy / "tokenizer.json", got=name):
        open_corpus(copy).encode("the cat")


def test_a_name_that_a_terminal_would_obey_is_not_kept(tmp_path):
    strange = tmp_path / "a\x1b[2Jb"
    strange.mkdir()
    texts = local(strange, train=b"ab", valid=b"cd", test=b"ef")
    assert load_corpus(texts, vocab_size=256, cache=tmp_path).name == "a?[2Jb"


def test_nobody_is_told_to_throw_a_model_away(corpus, tmp_path):
    """A folder of training has the manifest and the tokenizer of its text, and no tokens."""
    for name in ("corpus.json", "tokenizer.json"):
        shutil.copy(corpus.folder / name, tmp_path)
    with refused("folder", "load_corpus(folder)") as caught:
        open_corpus(tmp_path)
    assert "delete" not in caught.value.want


TOKENIZER_FAULTS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_text(""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "foreign": lambda path: path.write_text(train_tokenizer(["b"], 300).to_str()),
}


@pytest.mark.parametrize("change", TOKENIZER_FAULTS.values(), ids=TOKENIZER_FAULTS)
def test_a_tokenizer_that_is_not_the_one_of_the_tokens(corpus, tmp_path, change):
    """It is compared when it is used, however the folder was opened."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    opened = open_corpus(copy)
    change(copy / "tokenizer.json")
    for use in (lambda: opened.encode("a"), lambda: opened.decode([1]), lambda: opened.n_bytes(opened.test)):
        with refused(copy / "tokenizer.json", "copy the folder"):
            use()


def test_a_tokenizer_that_its_library_cannot_read(corpus, tmp_path):
    """As one of a newer version may be."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    made = corpus.manifest["made_with"]["tokenizers"]
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [["no", "token"]]
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    signed(copy, lambda m: m["tokenizer"].update(sha256=file_checksum(copy / "tokenizer.json")))
    opened = open_corpus(copy)
    with refused(copy / "tokenizer.json", f"tokenizers {made}"):
        opened.encode("a")


def test_a_cache_of_another_recipe_in_the_place_of_one(folder, tmp_path):
    asked, other = (load_corpus(folder, vocab_size=size, cache=tmp_path).folder for size in (260, 258))
    shutil.rmtree(asked)
    other.rename(asked)
    with refused(asked, "delete it"):
        load_corpus(folder, vocab_size=260, cache=tmp_path)


def test_a_corpus_opened_by_a_relative_path(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(corpus.folder.parent)
    relative = open_corpus(corpus.folder.name)
    monkeypatch.chdir(tmp_path)
    assert relative.decode(relative.train[:9]) == corpus.decode(corpus.train[:9])


def test_the_cache_may_be_under_home(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GBATTN_CACHE", "~/deep/cache")
    assert load_corpus(folder, vocab_size=256).folder.parent == tmp_path / "deep" / "cache"


def test_a_cache_that_cannot_be_written(folder, tmp_path, monkeypatch):
    def refuse(path, *args, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with refused("cache"):
        load_corpus(folder, vocab_size=256, cache=tmp_path)


def test_a_folder_with_a_long_name(tmp_path):
    long = tmp_path / ("x" * 240)
    long.mkdir()
    assert (
        len(load_corpus(local(long, train=b"ab", valid=b"cd", test=b"ef"), vocab_size=256, cache=tmp_path / "c").train)
        == 2
    )


@pytest.mark.parametrize(
    ("name", "kept"), [("語" * 80, "語" * 66), ("é" * 100, "é" * 100), ("x" * 101, "x" * 100), ("語" * 50, "語" * 50)]
)
def test_a_name_is_cut_by_its_bytes(name, kept, tmp_path):
    folder = tmp_path / name
    folder.mkdir()
    local(folder, train=b"ab", valid=b"cd", test=b"ef")
    assert load_corpus(folder, vocab_size=256, cache=tmp_path / "c").folder.name[:-13] == kept


@pytest.mark.parametrize("recipe", ["byte-level", "published"])
def test_a_long_line_is_cut_where_it_changes_no_token(recipe, tmp_path):
    words = np.random.default_rng(0).choice(["a", "bb", "ccc ", " dd\t", "e\n\n", "ü"], 3000)
    line = " ".join(words)
    tokenizer = train_tokenizer([line], 300, recipe)
    pieces = list(pieces_of([line], 50))
    assert "".join(pieces) == line and max(map(len, pieces)) <= 150
    assert [i for piece in pieces for i in tokenizer.encode(piece).ids] == tokenizer.encode(line).ids
    assert list(pieces_of(["x" * 120, "y"], 50)) == ["x" * 50, "x" * 70, "y"]


def test_the_bytes_of_a_limit_that_is_the_whole(folder, tmp_path):
    whole = load_corpus(folder, tokenizer="published", vocab_size=60, cache=tmp_path)
    limit = len(whole.train)
    same = load_corpus(folder, tokenizer="published", vocab_size=60, max_train_tokens=limit, cache=tmp_path)
    assert not same.lossless and same.text_bytes("train") == whole.text_bytes("train")


SLOW = """
import platform, sys, time
from gbattn.lab.token_cache import load_corpus
platform.python_version = lambda: time.sleep(60)  # asked for when all but the manifest is written
load_corpus(sys.argv[1], vocab_size=256, cache=sys.argv[2])
"""


def test_what_a_killed_process_left_is_removed_at_once(folder, tmp_path):
    """And what a living one is at work on is not."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, folder, tmp_path])
    drafts = lambda: [path for path in tmp_path.glob("*.draft-*") if (path / "test.bin").is_file()]
    while not drafts():
        assert process.poll() is None
        time.sleep(0.01)
    place = load_corpus(folder, vocab_size=256, cache=tmp_path).folder
    assert len(drafts()) == 1
    process.kill()
    process.wait()
    shutil.rmtree(place)
    load_corpus(folder, vocab_size=256, cache=tmp_path)
    assert [*tmp_path.iterdir()] == [place]


FULL = """
import resource, sys
from gbattn.lab.token_cache import load_corpus
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
try:
    load_corpus(sys.argv[1], vocab_size=256, cache=sys.argv[2])
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(os.name != "posix", reason="here files cannot be limited")
@pytest.mark.parametrize("size, name", [(100, "tokenizer.json"), (10_000, "train.bin")])
def test_a_file_that_cannot_be_written_is_named(size, name, tmp_path):
    texts = local(tmp_path / "a", train=b"0123456789" * 9999, valid=b"cd", test=b"ef")
    command = [sys.executable, "-c", FULL, texts, tmp_path / "cache", str(size)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert re.search(rf"File too large: '.*{name}'", said)
    assert [*(tmp_path / "cache").iterdir()] == []


def test_unknown_names_and_bad_options(tmp_path, corpus):
    with refused("name_or_folder"):
        load_corpus("wikitext")
    with refused("name_or_folder"):
        load_corpus("")
    with refused("name_or_folder"):
        load_corpus(None)
    (tmp_path / "file").write_text("no folder")
    for blocked in ("file", "file/sub"):
        with refused("cache"):
            load_corpus(cache=tmp_path / blocked)
    for wrong in (3, ""):
        with refused("cache"):
            load_corpus(cache=wrong)
    for wrong in ("False", 0, None):
        for opened in ((open_corpus, corpus.folder), (load_corpus,)):
            with refused("verify"):
                opened[0](*opened[1:], verify=wrong)
    with refused("folder"):
        open_corpus(None)
    with refused("vocab_size"):
        load_corpus(vocab_size=2**64)
    with refused("name_or_folder", "open_corpus"):
        load_corpus(corpus.folder)
    with refused("tokenizer"):
        load_corpus(tokenizer="words")
    with refused("vocab_size"):
        load_corpus(vocab_size=255)
    for count in (0, 1, True, 2.5):
        with refused("max_train_tokens"):
            load_corpus(max_train_tokens=count)
    with refused("recipe"):
        train_tokenizer(["a"], recipe="words")
    with refused("vocab_size"):
        train_tokenizer(["a"], 255)
    with refused("texts"):
        train_tokenizer("abc")
    with refused("split"):
        corpus.text_bytes("dev")
    with refused("text"):
        corpus.encode(["a"])


def test_the_tokenizer_learns_from_the_head_of_the_text():
    recipe = {"tokenizer": "byte-level", "tokenizer_characters": 100_000}
    assert "".join(tokenizer_text(["x" * 70_000, "y" * 70_000, "z"], recipe)) == "x" * 70_000 + "y" * 30_000
    recipe = {"tokenizer": "published", "tokenizer_rows": 2}
    assert list(tokenizer_text(["a\n", " \n", "b", "c"], recipe)) == ["a\n", "b"]
