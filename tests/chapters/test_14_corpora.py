"""Chapter 14: the claims with their mutants, the cache and its faults, the order of the data, errors."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from claims import claim
from gbattn import corpora
from gbattn.corpora import (
    SPLITS,
    PackedBatch,
    TokenStream,
    bigram_loss,
    bits_per_byte,
    pack_documents,
    python_docs,
    sequential_windows,
    train_tokenizer,
)
from gbattn.lab.downloads import HUB
from gbattn.lab.text_stream import TextStream
from gbattn.lab.token_cache import load_corpus, open_corpus
from gbattn.language_model import LanguageModel, ModelConfig

ENGLISH = "the cat sat on the mat. The dog didn't; it lay there, 12 days.\n" * 20
TEXTS = {
    "train": ENGLISH + "café naïve 😀 …\n\n  indented\tand\r\nmore\n",
    "valid": "the dog sat on the mat, été\n",
    "test": "a zebra, a yak — ß\n\n\n",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A local corpus; the name of its folder is a pattern to the library that reads it."""
    folder = tmp_path_factory.mktemp("texts") / "a [1] b*"
    folder.mkdir()
    for split, text in TEXTS.items():
        (folder / f"{split}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(folder, cache):
    return load_corpus(folder, vocab_size=300, cache=cache)


def as_read(text):
    """Line ends become newlines, as Python reads text."""
    return text.replace("\r\n", "\n")


# ---- Claims ----

BYTE_LEVEL = train_tokenizer([ENGLISH], 400)
SEEN_ONLY = train_tokenizer([ENGLISH], 400, recipe="published")


def round_trip(text, tokenizer):
    back = tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
    width = max(len(text), len(back), 1)
    codes = lambda s: np.array([*map(ord, s)] + [-1] * (width - len(s)), dtype=np.float64)
    return codes(back), codes(text)


@claim(st.text(), tolerance=0.0, mutant=lambda text: round_trip(text, SEEN_ONLY), examples=300)
def test_prop_round_trip(text):
    """What a byte-level tokenizer spells is the text. Mutant: the published recipe."""
    return round_trip(text, BYTE_LEVEL)


class Code:
    """Independent bytes with drawn probabilities, cut into tokens in two ways."""

    def __init__(self, seed, n):
        rng = np.random.default_rng(seed)
        self.p = rng.dirichlet(np.ones(8))
        self.text = rng.integers(0, 8, n)
        self.cuts = [np.flatnonzero(rng.random(n - 1) < share) + 1 for share in (0.2, 0.7)]

    def nats(self, cuts):
        """The loss of each token: a token's probability is that of the bytes it spells."""
        return np.array([-np.log(self.p[part]).sum() for part in np.split(self.text, cuts)])


codes = st.builds(Code, st.integers(0, 2**31), st.integers(30, 200))


def rescaled(code, exponent):
    (few, many), n = [code.nats(cuts) for cuts in code.cuts], len(code.text)
    left = [bits_per_byte(few.sum(), n), np.exp(few.mean())]
    right = [bits_per_byte(many.sum(), n), np.exp(many.mean()) ** exponent(len(many), len(few))]
    return np.log(left), np.log(right)


@claim(codes, tolerance=1e-10, mutant=lambda c: rescaled(c, lambda many, few: 1.0))
def test_prop_tokenizer_rescales(c):
    """Bits per byte agree, perplexities to the power n'/n. Mutant: perplexities agree."""
    return rescaled(c, lambda many, few: many / few)


class Maps:
    """A text model P under a lossy encoder e, and a token model Q under a decoder d that knows several spellings."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.P, self.e = rng.dirichlet(np.ones(12)), rng.integers(0, 5, 12)
        self.Q, self.d = rng.dirichlet(np.ones(12)), np.concatenate([np.arange(5), rng.integers(0, 5, 7)])


def tokens_and_text(p, choice, forgotten):
    """Bits of the tokens against bits of the text, more by the choice of a spelling, less by what is forgotten."""
    written = p.Q[:, None] * (p.d[:, None] == np.arange(5))  # (a): Q of tokens t and the text that they spell
    x = np.arange(5)  # the spelling e(x) of text x is sequence x
    spelling = (written / written.sum(0))[x, x]
    read = p.P[:, None] * (p.e[:, None] == np.arange(5))  # (b): P of a text and its tokens
    kept = (read / read.sum(0).clip(1e-300))[np.arange(12), p.e]
    left = [-np.log2(p.Q[:5]), -np.log2([p.P[p.e == t].sum() for t in p.e])]
    right = [
        -np.log2([p.Q[p.d == t].sum() for t in x]) - choice * np.log2(spelling),
        -np.log2(p.P) + forgotten * np.log2(kept),
    ]
    return np.concatenate(left), np.concatenate(right)


@claim(
    st.builds(Maps, st.integers(0, 2**31)),
    tolerance=1e-10,
    mutant=lambda p: tokens_and_text(p, choice=1, forgotten=0),
)
def test_prop_discount(p):
    """Bits of tokens = of text + of the spelling − of what is forgotten. Mutant: nothing is forgotten."""
    return tokens_and_text(p, choice=1, forgotten=1)


class Cut:
    def __init__(self, n, length, context, batch_size):
        self.n, self.length, self.batch_size = n, length, batch_size
        self.context = context % length
        self.tokens = np.arange(n, dtype=np.uint16)


cuts = st.builds(Cut, st.integers(2, 80), st.integers(1, 12), st.integers(0, 11), st.integers(1, 5))


def times_scored(p, batches):
    count = np.zeros(p.n)
    for inputs, targets in batches:
        scored = targets[targets != -100].numpy()
        assert (inputs >= 0).all(), "an input was masked"
        assert ((targets == -100) | (targets == inputs + 1)).all()
        np.add.at(count, scored, 1.0)
    wanted = np.ones(p.n)
    wanted[0] = 0
    return count, wanted


def published_windows(p):
    """Windows of T tokens with T − 1 targets, the last batch left out."""
    rows = torch.from_numpy(p.tokens[: p.n // p.length * p.length].astype(np.int64)).reshape(-1, p.length)
    for i in range(0, len(rows) - p.batch_size, p.batch_size):
        yield rows[i : i + p.batch_size, :-1], rows[i : i + p.batch_size, 1:]


@claim(cuts, tolerance=0.0, mutant=lambda p: times_scored(p, published_windows(p)), examples=300)
def test_prop_every_token_once(p):
    """Sequential windows score each token but the first once. Mutant: the published evaluation."""
    return times_scored(p, sequential_windows(p.tokens, p.length, context=p.context, batch_size=p.batch_size))


# ---- Tokenizers ----


def test_training_a_tokenizer_twice_gives_the_same_merges():
    assert train_tokenizer([ENGLISH], 400).to_str() == BYTE_LEVEL.to_str()


def test_the_byte_alphabet_is_the_library_s():
    from tokenizers.pre_tokenizers import ByteLevel

    assert set(corpora._byte_of()) == set(ByteLevel.alphabet())
    for byte in range(128):  # what the library writes for each ASCII byte, without pre-tokenising
        (token, _), *more = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(byte))
        assert not more and corpora._byte_of()[token] == byte


@pytest.mark.parametrize(
    "recipe, text, lost", [("published", "Zut, a 😀 cat", set("Zu😀 ")), ("byte-level", "Zut 😀", set())]
)
def test_what_a_recipe_loses(recipe, text, lost):
    tokenizer = {"published": SEEN_ONLY, "byte-level": BYTE_LEVEL}[recipe]
    spellings = corpora._spellings(json.loads(tokenizer.to_str()), recipe)
    spelled = b"".join(spellings[i] for i in tokenizer.encode(text).ids).decode()
    assert set(text) - set(spelled) == lost


def test_unknown_characters_are_no_unknown_token_in_the_published_recipe():
    assert SEEN_ONLY.token_to_id("<unk>") == 1
    assert SEEN_ONLY.encode("😀 ß").ids == []


# ---- The embedded corpus ----


def test_python_docs_is_split_by_module_and_says_nothing_twice():
    texts = python_docs()
    names = [name for split in SPLITS for name in texts[split]]
    assert len(names) == len(set(names))
    unit = lambda name: name if name.startswith("topic ") else name.split(".")[0]
    units = {split: {unit(name) for name in texts[split]} for split in SPLITS}
    assert (
        not units["train"] & units["valid"]
        and not units["train"] & units["test"]
        and not units["valid"] & units["test"]
    )
    paragraphs = [
        tuple(p.split()) for s in SPLITS for t in texts[s].values() for p in re.split(r"\n\s*\n", t) if p.split()
    ]
    assert len(paragraphs) == len(set(paragraphs))
    known = set().union(*map(corpora._runs, texts["train"].values()))
    held_out = [p for s in ("valid", "test") for t in texts[s].values() for p in t.split("\n\n")]
    assert not any(corpora._runs(p) & known for p in held_out)
    sizes = {split: sum(len(text.encode()) for text in texts[split].values()) for split in SPLITS}
    assert 1e6 < sum(sizes.values()) < 5e6
    assert all(0.08 < sizes[split] / sum(sizes.values()) < 0.16 for split in ("valid", "test"))


def test_the_rules_against_leaks_on_a_small_text():
    said = "one two three four five six seven eight nine"
    texts = {
        "a.b": f"{said}\n \nshort",
        "z": f"  {said}\n\nlonger than the other, by far and away and more",
        "b": "short",
    }
    assert corpora._without_repeats(texts) == {
        "z": "  one two three four five six seven eight nine\n\nlonger than the other, by far and away and more",
        "a.b": "short",
    }
    held = {"v": f"well, {said}!\n\nkept", "w": f"{said} ten"}
    clean = corpora._without_leaks({"train": {"z": texts["z"]}, "valid": held, "test": {}})
    assert clean == {"train": {"z": texts["z"]}, "valid": {"v": "kept"}, "test": {}}


def test_a_package_goes_to_one_split_by_its_name():
    words = {f"package{i}.{part}": "x" * 100 for i in range(100) for part in "ab"}
    splits = corpora._split_by_module(words)
    assert {split: len(names) for split, names in splits.items()} == {"train": 160, "valid": 20, "test": 20}
    more = corpora._split_by_module(words | {"package0.c": "x"})
    assert sum(name in more["test"] for name in splits["test"]) >= 18  # one more module moves next to nothing


def test_docstrings_come_in_the_order_of_the_source():
    source = '''
    """module"""
    class A:
        """class"""
        x = "no docstring"
        def f(self):
            """method"""
            try:
                pass
            except ValueError:
                def g(): "inner"
    async def h(): "last"
    '''
    tree = corpora.ast.parse(textwrap.dedent(source))
    assert list(corpora._docstrings(tree)) == ["module", "class", "method", "inner", "last"]


def test_a_python_without_sources_or_topics(monkeypatch, tmp_path):
    monkeypatch.setattr(corpora.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        ValueError, match="python-docs: got hardly any source files in .* want a Python with its standard library"
    ):
        corpora._documents.__wrapped__()
    (tmp_path / "os.py").write_text('"""A landmark, and no library."""')
    with pytest.raises(ValueError, match="python-docs: got hardly any source files in"):
        corpora._documents.__wrapped__()
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(ValueError, match=r"python-docs: got .*broken.py, line 1: .*; want a Python with"):
        corpora._documents.__wrapped__()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(ValueError, match="python-docs: got a Python without pydoc_data.topics; want"):
        corpora._documents.__wrapped__()


# ---- The cache ----


def test_a_corpus_spells_its_text(corpus):
    assert corpus.lossless and corpus.vocab_size == 300 and corpus.name == "a [1] b*"
    for split in SPLITS:
        tokens, text = getattr(corpus, split), as_read(TEXTS[split])
        assert isinstance(tokens, np.memmap) and tokens.dtype == np.uint16 and not tokens.flags.writeable
        assert corpus.decode(tokens) == text
        assert corpus.n_bytes(tokens) == corpus.text_bytes(split) == len(text.encode())


@given(text=st.text())
@settings(max_examples=100, derandomize=True, database=None, deadline=None)
def test_encode_and_decode(corpus, text):
    assert corpus.decode(corpus.encode(text)) == text


def test_a_character_cut_in_two_reads_as_a_replacement(corpus):
    assert corpus.decode(corpus.encode("😀")[:-1]).endswith("\ufffd")


def test_decode_refuses_numbers_that_are_no_tokens(corpus):
    for number in (-1, 300):
        for call in (corpus.decode, corpus.n_bytes):
            with pytest.raises(ValueError, match=re.escape("tokens: got a number outside; want 0 to 299")):
                call([number])
    with pytest.raises(ValueError, match="tokens: got dtype float64; want integers, 0 to 299"):
        corpus.decode([1.5])
    with pytest.raises(ValueError, match="tokens: got a number outside"):
        corpus.decode([-100])  # not scored is not a token
    assert corpus.decode([]) == ""
    tokens = corpus.test[:6]
    assert corpus.decode(tokens[None]) == corpus.decode(tokens)
    with pytest.raises(ValueError, match=r"tokens: got shape \(2, 3\); want one sequence: decode each row"):
        corpus.decode(tokens.reshape(2, 3))


@pytest.mark.parametrize("context", (0, 5))
def test_windows_give_the_bytes_of_all_tokens_but_the_first(corpus, context):
    """Targets that are not scored are no bytes."""
    windows = sequential_windows(corpus.test, 8, context=context, batch_size=2)
    assert sum(corpus.n_bytes(targets) for _, targets in windows) == corpus.n_bytes(corpus.test[1:])
    assert corpus.n_bytes(np.array([-100, 65, -100])) == corpus.n_bytes([65])
    assert corpus.n_bytes([]) == corpus.n_bytes(torch.full((2, 3), -100)) == 0


class Elsewhere(torch.Tensor):
    """A tensor that NumPy cannot read before it is on the CPU."""

    def __array__(self, *args, **options):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


def test_tokens_of_another_device(corpus):
    here = torch.tensor([70, 71, 72])
    there = here.as_subclass(Elsewhere)
    assert corpus.decode(there) == corpus.decode(here)
    assert corpus.n_bytes(there) == corpus.n_bytes(here) == 3
    assert torch.equal(TokenStream(there, 1, 1, 0).batch(0).inputs, TokenStream(here, 1, 1, 0).batch(0).inputs)


def test_rows_of_different_lengths(corpus):
    for use in (corpus.decode, corpus.n_bytes, lambda tokens: TokenStream(tokens, 1, 1, 0)):
        with pytest.raises(ValueError, match="tokens: got what is no array .*; want token ids"):
            use([[1, 2], [3]])


def test_a_text_that_utf_8_cannot_write(corpus):
    with pytest.raises(ValueError, match="text: got a lone surrogate at 1; want a string that UTF-8 can write"):
        corpus.encode("a\ud800")


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
    monkeypatch.setattr(corpora, "_write_corpus", None)
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


def test_nobody_edits_the_embedded_corpus():
    texts = python_docs()
    name, text = next(iter(texts["train"].items()))
    texts["train"][name] = "mine"
    del texts["valid"]
    assert python_docs()["train"][name] == text and [*python_docs()] == [*SPLITS]


def test_python_docs_with_another_text_is_another_corpus(tmp_path, monkeypatch):
    """Two distributions of one version of Python may share a cache."""
    for test in ("some text\n", "other text\n"):
        texts = {split: {"a": "some text\n"} for split in SPLITS} | {"test": {"a": test}}
        monkeypatch.setattr(corpora, "python_docs", lambda texts=texts: texts)
        corpus = load_corpus(vocab_size=256, cache=tmp_path)
        assert corpus.decode(corpus.test) == test + "\n\n\n"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_first_tokens_are_those_of_the_whole(corpus, folder, cache):
    for limit in (2, 37, len(corpus.train) - 1, len(corpus.train)):
        head = load_corpus(folder, vocab_size=300, max_train_tokens=limit, cache=cache)
        assert np.array_equal(head.train, corpus.train[:limit]) and head.lossless
        assert head.text_bytes("train") == corpus.n_bytes(corpus.train[:limit])
        assert np.array_equal(head.test, corpus.test)


def test_the_published_recipe_says_that_it_loses(folder, cache):
    lossy = load_corpus(folder, tokenizer="published", vocab_size=300, max_train_tokens=50, cache=cache)
    assert not lossy.lossless and len(lossy.train) == 50
    assert lossy.n_bytes(lossy.test) < lossy.text_bytes("test") == len(TEXTS["test"].encode())
    assert lossy.text_bytes("train") < len(ENGLISH)
    assert lossy.decode(lossy.valid[:3]) == "the dog sat"


def tokens_by_one(corpus, *texts):
    """The tokens of texts, one column at a time; a shorter one repeats its last."""
    rows = [corpus.encode(text).tolist() for text in texts]
    longest = max(map(len, rows))
    rows = torch.tensor([row + row[-1:] * (longest - len(row)) for row in rows])
    return rows.split(1, dim=1)


def test_a_text_streams_in_whole_characters(corpus):
    written = []
    text = TextStream(corpus, write=lambda b, new: written.append(new))
    for new in tokens_by_one(corpus, "a smile: 😀!"):
        assert not text(new)
    assert text.finish() == ["a smile: 😀!"] == ["".join(written)]
    assert not any("\ufffd" in new for new in written)
    half = TextStream(corpus)
    half(torch.tensor([corpus.encode("😀").tolist()[:-1]]))
    assert half.finish()[0].endswith("\ufffd")


@settings(max_examples=40, deadline=None)
@given(st.text("ab\n", min_size=1, max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3))
def test_a_text_ends_before_its_first_stop_string(corpus, said, stop):
    written = []
    text = TextStream(corpus, stop=stop, write=lambda b, new: written.append(new))
    done = [text(new) for new in tokens_by_one(corpus, said)]
    wanted, ended = said, False
    for n in range(len(said) + 1):  # letter by letter; of stop strings that end together, the longest
        ends = [one for one in stop if said[:n].endswith(one)]
        if ends:
            wanted, ended = said[: n - max(map(len, ends))], True
            break
    assert text.finish() == [wanted] and "".join(written) == wanted and done[-1] == ended


def test_texts_of_a_batch_end_each_for_itself_and_all_together(corpus):
    text = TextStream(corpus, stop=["."])
    done = [text(new) for new in tokens_by_one(corpus, "one. two three four", "one two three. four")]
    assert text.finish() == ["one", "one two three"] and done[-1] and not done[0]


def test_a_stream_of_the_published_recipe_has_spaces(folder, cache):
    lossy = load_corpus(folder, tokenizer="published", vocab_size=300, max_train_tokens=50, cache=cache)
    text = TextStream(lossy)
    text(torch.from_numpy(lossy.valid[:3].astype("int64"))[None])
    assert text.finish() == [" the dog sat"]
    with pytest.raises(ValueError, match="stop: got 'x'; want a list of strings that are not empty"):
        TextStream(lossy, stop="x")
    with pytest.raises(ValueError, match="stop: got"):
        TextStream(lossy, stop=[""])
    with pytest.raises(ValueError, match=r"new: got shape \(2, 1\); want \(1, n\)"):
        text(torch.zeros(2, 1).long())
    with pytest.raises(ValueError, match="write: got 3; want None or a callable"):
        TextStream(lossy, write=3)


@pytest.mark.parametrize("limit, head", [(2, "na"), (3, "naπve"), (4, "naπve aπb"), (5, "naπve aπb  foo")])
def test_a_limit_counts_the_bytes_of_text_where_characters_are_lost(limit, head, tmp_path):
    """A character that is lost inside a word shifts the library's offsets."""
    text = "naπve aπb  foo bar"
    tokenizer = train_tokenizer(["n a ve ve ab ab foo foo bar bar"] * 9, 40, "published")
    assert tokenizer.encode(text).tokens == ["n", "a", "ve", "ab", "foo", "bar"]
    spellings = corpora._spellings(json.loads(tokenizer.to_str()), "published")
    found = corpora._encode_split(tmp_path / "x.bin", [text], tokenizer, spellings, np.dtype("<u2"), limit)
    assert found["tokens"] == limit and found["bytes"] == len(head.encode()) and not found["lossless"]


@pytest.mark.parametrize("types, dtype", [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_32_bits_where_16_do_not_suffice(types, dtype, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(corpora, "_spellings", lambda *a: [b""] * types)
    rows, source = corpora._from_folder(folder)
    recipe = source | {
        "tokenizer": "byte-level",
        "vocab_size": 300,
        "max_train_tokens": None,
        "tokenizer_characters": 10**8,
    }
    corpora._write_corpus(tmp_path / "wide", recipe, rows)
    wide = open_corpus(tmp_path / "wide")
    assert wide.train.dtype == dtype and not wide.lossless


def test_a_run_that_is_cut_off_leaves_nothing(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(corpora, "_versions", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        load_corpus(folder, vocab_size=300, cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_two_that_write_at_once(folder, tmp_path, monkeypatch):
    rows, source = corpora._from_folder(folder)
    first = load_corpus(folder, vocab_size=300, cache=tmp_path)
    corpora._write_corpus(first.folder, first.manifest["recipe"], rows)  # the second to finish
    assert [p.name for p in tmp_path.iterdir()] == [first.folder.name]
    assert open_corpus(first.folder).fingerprint == first.fingerprint


BARE = """
import sys
for name in ("datasets", "tokenizers"):
    sys.modules[name] = None
import gbattn.corpora as corpora
corpus = corpora.open_corpus(sys.argv[1])
print(corpus.decode(corpus.test), corpus.n_bytes(corpus.test), len(corpus.train))
load = lambda: corpora.load_corpus(sys.argv[2], cache=sys.argv[3])
for call in (lambda: corpus.encode("a"), lambda: corpora.train_tokenizer(["a"]), load):
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


def test_without_the_reader_of_text(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"datasets: got a Python that cannot import it; want pip install 'gbattn\[data\] @"
    ):
        load_corpus("wikitext-2", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert load_corpus(folder, vocab_size=300, cache=tmp_path).lossless  # text files need no reader


def spoil(folder, name, change):
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


SPOILT = {
    "truncated": ("train.bin", lambda b: b[:-1], r"train\.bin: got \d+ bytes; want \d+ bytes: a cache as load_corpus"),
    "changed": (
        "valid.bin",
        lambda b: bytes([b[0] ^ 1]) + b[1:],
        r"valid\.bin: got bytes that do not match their checksum",
    ),
    "other tokenizer": ("tokenizer.json", lambda b: b + b" ", r"tokenizer\.json: got bytes that do not match"),
    "no JSON": ("corpus.json", lambda b: b"{", r"corpus\.json: got format None; want 'gbattn corpus 1': a cache"),
    "a list": ("corpus.json", lambda b: b"[]", r"corpus\.json: got format None"),
    "foreign": ("corpus.json", lambda b: b"{}", r"corpus\.json: got format None"),
    "other vocabulary": (
        "corpus.json",
        lambda b: b.replace(b'"vocab_size": 300,\n "tok', b'"vocab_size": 301,\n "tok'),
        r"corpus\.json: got contents that do not match their checksum; want a cache",
    ),
    "other bytes": (
        "corpus.json",
        lambda b: b.replace(b'"bytes": ', b'"bytes": 1'),
        r"corpus\.json: got contents that do not match",
    ),
    "no checksum": (
        "corpus.json",
        lambda b: b.replace(b"sha256", b"sha1"),
        r"corpus\.json: got contents that do not match",
    ),
    "newer": ("corpus.json", lambda b: b.replace(b"corpus 1", b"corpus 2"), r"got format 'gbattn corpus 2'"),
}


@pytest.mark.parametrize("name, change, error", SPOILT.values(), ids=SPOILT)
def test_a_spoilt_cache_is_refused(corpus, tmp_path, name, change, error):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    before = (copy / name).read_bytes()
    spoil(copy, name, change)
    assert (copy / name).read_bytes() != before
    with pytest.raises(ValueError, match=error):
        open_corpus(copy)


def test_a_missing_file_and_a_folder_that_is_no_cache(corpus, tmp_path):
    with pytest.raises(ValueError, match="folder: got .* without corpus.json; want a cache as load_corpus writes it"):
        open_corpus(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    (copy / "test.bin").unlink()
    with pytest.raises(ValueError, match="folder: got .* without test.bin; want a cache"):
        open_corpus(copy)


@pytest.mark.parametrize("manifest", [None, "{}", '{"format": "somebody else"}', "no JSON"])
def test_nobody_is_told_to_delete_a_folder_of_text(manifest, tmp_path):
    local(tmp_path, train=b"our own", valid=b"text", test=b"here")
    if manifest:
        (tmp_path / "corpus.json").write_text(manifest)
    with pytest.raises(ValueError, match="want .*a cache as load_corpus writes it; or load_corpus.folder.") as caught:
        open_corpus(tmp_path)
    assert "delete the folder" not in str(caught.value)
    corpus = load_corpus(tmp_path, vocab_size=256, cache=tmp_path / "cache")  # which it is no cache for
    assert corpus.decode(corpus.train) == "our own"


def test_a_cache_of_another_version_may_be_deleted(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    spoil(copy, "corpus.json", lambda b: b.replace(b"corpus 1", b"corpus 2"))
    with pytest.raises(ValueError, match="delete the folder"):
        open_corpus(copy)
    with pytest.raises(ValueError, match="a finished cache; want open_corpus"):
        load_corpus(copy)


def test_without_verification_only_sizes_are_compared(corpus, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    spoil(copy, "valid.bin", lambda b: bytes([b[0] ^ 1]) + b[1:])
    assert len(open_corpus(copy, verify=False).valid) == len(corpus.valid)
    spoil(copy, "valid.bin", lambda b: b[:-2])
    with pytest.raises(ValueError, match="valid.bin"):
        open_corpus(copy, verify=False)


def signed(folder, change):
    """Change the manifest of a folder, with a checksum that fits."""
    path = folder / "corpus.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["sha256"] = corpora.manifest_checksum(manifest)
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
                with pytest.raises(ValueError, match=r"corpus\.json, [\w.]+: got .*; want ") as caught:
                    open_corpus(copy, verify=verify)
                assert ".".join(place) in str(caught.value) and len(str(caught.value)) < 600
            tried += 1
    assert tried > 500 and outside.read_text() == "mine"


@pytest.mark.parametrize("place", ["format", "tokenizer", "else"])
def test_json_that_nests_too_deep_is_refused_by_its_name(corpus, tmp_path, place):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    opened = open_corpus(copy)
    for depth in (*range(930, 1000), 100_000):
        (copy / "corpus.json").write_text(f'{{"{place}": {"[" * depth + "]" * depth}, "format": "gbattn corpus 1"}}')
        with pytest.raises(ValueError, match=r"corpus\.json"):
            open_corpus(copy)
    with pytest.raises(ValueError, match="name_or_folder: got .*; want SPLIT.txt"):
        load_corpus(copy)
    (copy / "tokenizer.json").write_text("[" * 100_000)
    opened.manifest["tokenizer"]["sha256"] = corpora.file_checksum(copy / "tokenizer.json")
    for use in (lambda: opened.decode([1]), lambda: opened.encode("a")):
        with pytest.raises(ValueError, match=r"tokenizer\.json: got RecursionError"):
            use()


@pytest.mark.parametrize("number", [300, 65_535])
def test_numbers_beyond_the_vocabulary_are_refused(corpus, tmp_path, number):
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    np.full(len(corpus.valid), number, "<u2").tofile(copy / "valid.bin")
    signed(copy, lambda m: m["splits"]["valid"].update(sha256=corpora.file_checksum(copy / "valid.bin")))
    message = r"valid\.bin: got a token id outside the vocabulary; want ids below vocab_size = 300"
    with pytest.raises(ValueError, match=message):
        open_corpus(copy)
    with pytest.raises(ValueError, match="tokens: got a number outside; want 0 to 299"):
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
    signed(copy, lambda m: m["tokenizer"].update(sha256=corpora.file_checksum(copy / "tokenizer.json")))
    opened = open_corpus(copy)
    message = r"tokenizer\.json: got no vocabulary of 300 tokens, numbered from 0 on; want the file"
    for use in (lambda: opened.vocabulary, lambda: opened.decode([1]), lambda: opened.n_bytes(opened.test)):
        with pytest.raises(ValueError, match=message):
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
    signed(copy, lambda m: m["tokenizer"].update(sha256=corpora.file_checksum(copy / "tokenizer.json")))
    with pytest.raises(ValueError, match=rf"tokenizer\.json: got settings of no 'byte-level' recipe: {name}"):
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
    want = "a cache as load_corpus writes it; or load_corpus"
    with pytest.raises(ValueError, match=f"without tokens, such as that of a trained model; want {want}") as error:
        open_corpus(tmp_path)
    assert "delete the folder" not in str(error.value)


TOKENIZER_FAULTS = {
    "missing": (lambda path: path.unlink(), "no such file; want the file that corpus.json was written with: copy"),
    "empty": (lambda path: path.write_text(""), "bytes that do not match their checksum; want the file"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "bytes that do not match"),
    "foreign": (lambda path: path.write_text(train_tokenizer(["b"], 300).to_str()), "bytes that do not match"),
}


@pytest.mark.parametrize("change, error", TOKENIZER_FAULTS.values(), ids=TOKENIZER_FAULTS)
def test_a_tokenizer_that_is_not_the_one_of_the_tokens(corpus, tmp_path, change, error):
    """It is compared when it is used, however the folder was opened."""
    copy = tmp_path / "copy"
    shutil.copytree(corpus.folder, copy)
    opened = open_corpus(copy)
    change(copy / "tokenizer.json")
    for use in (lambda: opened.encode("a"), lambda: opened.decode([1]), lambda: opened.n_bytes(opened.test)):
        with pytest.raises(ValueError, match=rf"tokenizer\.json: got {error}"):
            use()


def test_a_tokenizer_that_its_library_cannot_read(corpus, tmp_path, monkeypatch):
    """As one of a newer version may be."""
    opened = open_corpus(corpus.folder)
    made = corpus.manifest["made_with"]["tokenizers"]
    tokenizer = json.loads((corpus.folder / "tokenizer.json").read_text())
    tokenizer["model"]["merges"] = [["no", "token"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    monkeypatch.setitem(vars(opened), "_tokenizer_file", tmp_path / "tokenizer.json")
    with pytest.raises(
        ValueError, match=rf"tokenizer\.json: got what tokenizers .* cannot read .*want tokenizers {made}"
    ):
        opened.encode("a")


# ---- Sources and their faults ----


def local(tmp_path, **texts):
    for split, text in texts.items():
        path = tmp_path / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return tmp_path


FAULTS = {
    "split missing": (
        dict(train=b"a"),
        "name_or_folder: got .* without valid, test; want SPLIT.txt or a folder SPLIT of .txt",
    ),
    "empty": (dict(train=b"abc", valid=b"", test=b"c"), "valid.txt: got no text in it; want a file with text"),
    "blank": (dict(train=b" \n\n", valid=b"b", test=b"c"), "train.txt: got no text in it"),
    "Latin-1": (
        dict(train=b"a\ncaf\xe9\n", valid=b"b", test=b"c"),
        "train.txt: got byte 0xe9 in line 2; want UTF-8; iconv",
    ),
    "one token": (
        dict(train=b"abc, abd", valid=b"b", test=b"c"),
        "valid: got 1 tokens; want a split with two tokens or more",
    ),
    "two places": (
        {"train": b"abc", "valid": b"b", "test": b"c", "train/more": b"d"},
        "name_or_folder: got .*train.txt and .*train; want one of the two",
    ),
}


@pytest.mark.parametrize("code", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_a_text_in_another_encoding_is_named_with_its_encoding(code, tmp_path):
    texts = dict(train="a b\n".encode(code), valid=b"b", test=b"c")
    with pytest.raises(ValueError, match=f"train.txt: got .*{code}"):
        load_corpus(local(tmp_path, **texts), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_file_with_nuls_is_no_text(tmp_path):
    texts = dict(train=b"a b c d e f\n" * 9 + b"\0\n", valid=b"b", test=b"c")
    with pytest.raises(ValueError, match="train.txt: got .*binary"):
        load_corpus(local(tmp_path, **texts), cache=tmp_path / "cache")


@pytest.mark.parametrize("recipe", ["byte-level", "published"])
def test_no_word_that_the_tokenizer_learns_from_is_longer_than_1024(recipe):
    tokenizer = train_tokenizer(["a" * 8192], 300, recipe)
    assert max(map(len, tokenizer.get_vocab())) == 1024
    tokens = tokenizer.encode("a" * 8192).tokens
    assert "".join(tokens) == "a" * 8192 and len(tokens) == 8


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


@pytest.mark.parametrize("texts, error", FAULTS.values(), ids=FAULTS)
def test_faults_of_a_folder(tmp_path, texts, error):
    with pytest.raises(ValueError, match=error):
        load_corpus(local(tmp_path, **texts), cache=tmp_path / "cache")


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
    with pytest.raises(
        ValueError, match="name_or_folder: got .*deep, which cannot be listed .Permission denied.; want"
    ):
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
    with pytest.raises(ValueError, match="name_or_folder: got .*back, which is read already; want links to other"):
        load_corpus(many, vocab_size=256, cache=cache)
    (elsewhere / "back").unlink()
    (elsewhere / "d.txt").symlink_to(tmp_path / "gone.txt")
    with pytest.raises(ValueError, match="d.txt: got no file that can be read; want a text file"):
        load_corpus(many, vocab_size=256, cache=cache)


def test_a_byte_order_mark_is_dropped(tmp_path, cache):
    mark = "\ufeff".encode()
    corpus = load_corpus(
        local(tmp_path, train=mark + b"ab", valid=b"cd", test=mark + b"ef"), vocab_size=256, cache=cache
    )
    assert (corpus.decode(corpus.train), corpus.text_bytes("train")) == ("ab", 2)
    with pytest.raises(ValueError, match="valid.txt: got no text in it"):
        load_corpus(local(tmp_path, train=b"ab", valid=mark, test=b"ef"), cache=cache)


@pytest.mark.parametrize("name", ["python-docs", "wikitext-2"])
def test_a_path_is_a_folder_whatever_its_name(name, tmp_path, cache, monkeypatch):
    (tmp_path / name).mkdir()
    local(tmp_path / name, train=b"our own", valid=b"text", test=b"here")
    monkeypatch.chdir(tmp_path)
    corpus = load_corpus(Path(name), vocab_size=256, cache=cache)
    assert corpus.decode(corpus.train) == "our own"


def test_a_cache_of_another_recipe_in_the_place_of_one(folder, tmp_path):
    asked, other = (load_corpus(folder, vocab_size=size, cache=tmp_path).folder for size in (260, 258))
    shutil.rmtree(asked)
    other.rename(asked)
    with pytest.raises(ValueError, match="got a cache of another recipe; want its own: delete it"):
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
    with pytest.raises(ValueError, match="cache: got .*cannot be written .Permission denied.; want .*GBATTN_CACHE"):
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
    pieces = list(corpora._pieces([line], 50))
    assert "".join(pieces) == line and max(map(len, pieces)) <= 150
    assert [i for piece in pieces for i in tokenizer.encode(piece).ids] == tokenizer.encode(line).ids
    assert list(corpora._pieces(["x" * 120, "y"], 50)) == ["x" * 50, "x" * 70, "y"]


def test_the_bytes_of_a_limit_that_is_the_whole(folder, tmp_path):
    whole = load_corpus(folder, tokenizer="published", vocab_size=60, cache=tmp_path)
    limit = len(whole.train)
    same = load_corpus(folder, tokenizer="published", vocab_size=60, max_train_tokens=limit, cache=tmp_path)
    assert not same.lossless and same.text_bytes("train") == whole.text_bytes("train")


SLOW = """
import sys, time
from gbattn import corpora
corpora._versions = lambda: time.sleep(60)  # when all but the manifest is written
corpora.load_corpus(sys.argv[1], vocab_size=256, cache=sys.argv[2])
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
    with pytest.raises(
        ValueError, match="name_or_folder: got 'wikitext'; want one of python-docs, wikitext-103, wikitext-2, openweb"
    ):
        load_corpus("wikitext")
    with pytest.raises(ValueError, match="name_or_folder: got ''; want one of python-docs, .*or a folder with"):
        load_corpus("")
    with pytest.raises(ValueError, match="name_or_folder: got None; want a name or a folder"):
        load_corpus(None)
    (tmp_path / "file").write_text("no folder")
    for blocked in ("file", "file/sub"):
        with pytest.raises(ValueError, match="cache: got .*file, a file; want a folder"):
            load_corpus(cache=tmp_path / blocked)
    for wrong in (3, ""):
        with pytest.raises(ValueError, match=f"cache: got {wrong!r}; want None or a path"):
            load_corpus(cache=wrong)
    for wrong in ("False", 0, None):
        for opened in ((open_corpus, corpus.folder), (load_corpus,)):
            with pytest.raises(ValueError, match=f"verify: got {wrong!r}; want True or False"):
                opened[0](*opened[1:], verify=wrong)
    with pytest.raises(ValueError, match="folder: got None; want a path"):
        open_corpus(None)
    with pytest.raises(ValueError, match=r"vocab_size: got 18446744073709551616; want .* at most 2\*\*24"):
        load_corpus(vocab_size=2**64)
    with pytest.raises(ValueError, match="a finished cache; want open_corpus"):
        load_corpus(corpus.folder)
    with pytest.raises(ValueError, match="tokenizer: got 'words'; want one of 'byte-level', 'published'"):
        load_corpus(tokenizer="words")
    with pytest.raises(ValueError, match="vocab_size: got 255; want an integer, 256 or more"):
        load_corpus(vocab_size=255)
    for count in (0, 1, True, 2.5):
        with pytest.raises(ValueError, match="max_train_tokens: got .*; want None or an integer, 2 or more"):
            load_corpus(max_train_tokens=count)
    with pytest.raises(ValueError, match="recipe: got 'words'; want one of"):
        train_tokenizer(["a"], recipe="words")
    with pytest.raises(ValueError, match="vocab_size: got 255; want an integer, 256 or more"):
        train_tokenizer(["a"], 255)
    with pytest.raises(ValueError, match=r"texts: got one string; want an iterable of strings: \[text\]"):
        train_tokenizer("abc")
    with pytest.raises(ValueError, match="split: got 'dev'"):
        corpus.text_bytes("dev")
    with pytest.raises(ValueError, match="text: got list; want one string"):
        corpus.encode(["a"])


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
        real = corpora._load
        monkeypatch.setattr(corpora, "_load", lambda package: fake if package == "datasets" else real(package))
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


def test_the_tokenizer_learns_from_the_head_of_the_text():
    recipe = {"tokenizer": "byte-level", "tokenizer_characters": 100_000}
    assert "".join(corpora._tokenizer_text(["x" * 70_000, "y" * 70_000, "z"], recipe)) == "x" * 70_000 + "y" * 30_000
    recipe = {"tokenizer": "published", "tokenizer_rows": 2}
    assert list(corpora._tokenizer_text(["a\n", " \n", "b", "c"], recipe)) == ["a\n", "b"]


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


# ---- Batches ----


def collected(stream, steps):
    return torch.stack([torch.stack(stream.batch(step)) for step in range(steps)])


@given(st.integers(2, 200), st.integers(1, 9), st.integers(1, 7), st.integers(0, 2**32 - 1))
@settings(max_examples=60, derandomize=True, database=None, deadline=None)
def test_a_pass_visits_every_window_once(n, length, batch_size, seed):
    tokens = np.arange(n, dtype=np.uint16)
    if n <= length:
        return
    stream = TokenStream(tokens, length, batch_size, seed)
    passes = batch_size * stream.n_windows  # whole passes in whole batches
    starts = collected(stream, stream.n_windows)[:, 0, :, 0].reshape(-1).numpy()
    for epoch in range(passes // stream.n_windows):
        one = starts[epoch * stream.n_windows : (epoch + 1) * stream.n_windows]
        assert sorted(one) == [length * i for i in range(stream.n_windows)]


def test_targets_are_the_text_one_token_on():
    stream = TokenStream(np.arange(1000, dtype=np.uint16), 7, 3, seed=0)
    inputs, targets = next(stream)
    assert inputs.shape == targets.shape == (3, 7) and inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, inputs + 1)
    assert len(stream.tokens) == 1000 and stream.n_windows == 142 and stream.steps_per_epoch == 47


def test_the_order_is_the_seed_s_alone_and_resumes_anywhere():
    tokens = np.arange(5000, dtype=np.uint32)
    make = lambda **how: TokenStream(tokens, 16, 4, **{"seed": 3} | how)
    whole = [next(stream) for stream in [make()] for _ in range(200)]  # three passes
    torch.manual_seed(1), np.random.seed(1)
    stream = make(step=137)
    for step in range(137, 200):
        assert torch.equal(next(stream).inputs, whole[step].inputs)
    assert stream.step == 200
    stream.step = 5
    assert torch.equal(next(stream).inputs, whole[5].inputs)
    assert torch.equal(make().batch(150).inputs, whole[150].inputs)
    assert torch.equal(make().batch(np.int8(100)).inputs, whole[100].inputs)
    assert not torch.equal(next(make(seed=4)).inputs, whole[0].inputs)
    first, second = (sorted(b.inputs[0, 0].item() for b in whole[a:b]) for a, b in ((0, 78), (78, 156)))
    assert first != second  # passes have orders of their own


def test_the_order_stays_what_it_is():
    """Records name their seed, so an order may never change."""
    stream = TokenStream(np.arange(101, dtype=np.uint16), 10, 5, seed=42)
    assert collected(stream, 4)[:, 0, :, 0].tolist() == [
        [50, 0, 60, 40, 20],
        [70, 30, 10, 80, 90],
        [30, 10, 20, 90, 50],
        [0, 60, 80, 70, 40],
    ]


def test_a_packed_batch_trains_a_model_as_separate_sequences_would():
    tokens = np.array([1, 2, 3, 0, 4, 5, 0, 1, 1, 2, 0, 3, 4], dtype=np.uint16)
    inputs, targets, documents = pack_documents(next(TokenStream(tokens, 12, 1, 0)), 0)
    sizes = dict(vocab_size=6, d_model=8, n_layers=1, n_heads=2, max_length=12)
    model = LanguageModel(ModelConfig(**sizes), dtype=torch.float64)
    loss = model(inputs, targets, reduction="sum", documents=documents)
    rows = [[1, 2, 3, 0], [4, 5, 0], [1, 1, 2, 0], [3, 4]]
    alone = [torch.tensor([row]) for row in rows]
    wanted = sum(model(row[:, :-1], row[:, 1:].contiguous(), reduction="sum") for row in alone)
    assert abs(loss - wanted) < 1e-10


def test_a_token_that_ends_a_document_tells_them_apart_in_a_window():
    stream = TokenStream(np.random.RandomState(0).randint(0, 9, 300), 16, 4, seed=3)
    for step in range(8):
        batch = stream.batch(step)
        packed, last = pack_documents(batch, 7), batch.inputs == 7  # of its document
        assert type(packed) is PackedBatch and torch.equal(packed.inputs, batch.inputs)
        assert torch.equal(packed.targets, batch.targets.masked_fill(last, -100))
        own = packed.documents
        assert own.dtype == torch.int64 and (own[:, 0] == 0).all()
        assert ((own[:, 1:] - own[:, :-1]) == last[:, :-1]).all()
    with pytest.raises(ValueError, match="end: got -1; want an integer, 0 or more"):
        pack_documents(batch, -1)


def test_windows_of_a_memory_map_are_copies(corpus):
    before = np.array(corpus.train)
    inputs, targets = next(TokenStream(corpus.train, 8, 2, seed=0))
    inputs.zero_(), targets.zero_()
    assert np.array_equal(corpus.train, before)


def test_an_overlap_gives_each_target_its_context():
    batches = list(sequential_windows(np.arange(50), 10, context=6, batch_size=3))
    scored = [(i, t) for b in batches for i, t in zip(b.inputs, b.targets)]
    for _, targets in scored[1:]:
        first = (targets != -100).nonzero()[0].item()
        assert first >= 6
    assert all(len(b.inputs) <= 3 for b in batches) and batches[0].inputs.shape == (3, 10)


def test_faults_of_batches():
    tokens = np.arange(100)
    for name, call in {
        "tokens: got dtype float64, shape (3,); want token ids of shape (n,)": lambda: TokenStream(
            np.zeros(3), 1, 1, 0
        ),
        "tokens: got dtype int64, shape (2, 2)": lambda: sequential_windows(np.zeros((2, 2), int), 1),
        "tokens: got numbers from -100 to 3; want token ids, 0 or more": lambda: sequential_windows([3, -100], 1),
        "tokens: got numbers from -1 to 99; want token": lambda: TokenStream(np.append(tokens, -1), 1, 1, 0),
        "tokens: got numbers from 0 to 9223372036854775808": lambda: TokenStream(
            np.array([0, 2**63], np.uint64), 1, 1, 0
        ),
        "length: got 0; want a positive integer": lambda: TokenStream(tokens, 0, 1, 0),
        "batch_size: got 1.5; want a positive integer": lambda: TokenStream(tokens, 1, 1.5, 0),
        "seed: got -1; want an integer from 0 to 2**32 - 1": lambda: TokenStream(tokens, 1, 1, -1),
        "step: got -1; want an integer, 0 or more": lambda: TokenStream(tokens, 1, 1, 0).batch(-1),
        "step: got True": lambda: TokenStream(tokens, 1, 1, 0, step=True),
        "tokens: got 100 tokens; want at least length + 1 = 101": lambda: TokenStream(tokens, 100, 1, 0),
        "tokens: got 1 tokens; want at least 2": lambda: sequential_windows(tokens[:1], 4),
        "context: got 4; want an integer from 0 to 3": lambda: sequential_windows(tokens, 4, context=4),
        "length: got 0": lambda: sequential_windows(tokens, 0),
        "batch_size: got 0": lambda: sequential_windows(tokens, 4, batch_size=0),
        "nats: got nan; want a finite number": lambda: bits_per_byte(math.nan, 3),
        "n_bytes: got 0; want a positive integer": lambda: bits_per_byte(1.0, 0),
    }.items():
        with pytest.raises(ValueError, match=re.escape(name)):
            call()


def test_bits_per_byte_by_hand():
    assert bits_per_byte(6 * math.log(2), 3) == pytest.approx(2)
    assert bits_per_byte(np.float16(100), 100_000) == pytest.approx(100 / math.log(2) / 1e5)
    with pytest.raises(ValueError, match="nats: got -5; want a finite number, 0 or more"):
        bits_per_byte(-5, 3)


def test_the_module_is_named_in_the_import_of_nothing_heavy():
    code = "import sys, gbattn.corpora; print({'datasets', 'tokenizers', 'sklearn', 'matplotlib'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
    assert Path(corpora.__file__).name == "corpora.py"


# ---- The bigram model ----


def bigram_by_counting(train, a, b, V):
    """The probability of b after a, pair by pair."""
    pairs = list(zip(train, train[1:]))
    counts = {pair: pairs.count(pair) for pair in pairs}
    once, twice = ([*counts.values()].count(n) for n in (1, 2))
    D = once / (once + 2 * twice) if once else 0.5
    p = (sum(y == b for _, y in counts) + 1) / (len(counts) + V)
    total = sum(x == a for x, _ in pairs)
    if not total:
        return p
    return (max(counts.get((a, b), 0) - D, 0) + D * sum(x == a for x, _ in counts) * p) / total


TRAIN = st.lists(st.integers(0, 4), min_size=2, max_size=30)


@settings(deadline=None)
@given(TRAIN, TRAIN)
def test_the_bigram_loss_is_that_of_a_distribution(train, valid):
    """What follows each token sums to one; the loss is its mean, at any length."""
    at = lambda *pair: math.exp(-bigram_loss(np.array(train), np.array(pair), 6))
    for a in range(6):
        assert math.fsum(at(a, b) for b in range(6)) == pytest.approx(1)
    nats = [-math.log(bigram_by_counting(train, a, b, 6)) for a, b in zip(valid, valid[1:])]
    assert bigram_loss(np.array(train), np.array(valid), 6) == pytest.approx(math.fsum(nats) / len(nats))


def test_the_bigram_loss_of_a_known_language():
    """Near the entropy of a Markov chain, over more tokens than are read at once; an unlearnable text costs ln V."""
    rng = np.random.default_rng(0)
    step = rng.choice([1, 2, 5], size=2**22 + 5000, p=[0.5, 0.25, 0.25])
    chain = (np.cumsum(step) % 50).astype(np.uint16)
    entropy = 1.5 * math.log(2)
    assert bigram_loss(chain[:-2000], chain[-2000:], 50) == pytest.approx(entropy, abs=0.05)
    assert bigram_loss(chain[-50_000:], chain, 50) == pytest.approx(entropy, abs=0.05)
    noise = rng.integers(0, 50, 200_000)
    assert bigram_loss(noise[:100_000], noise[100_000:], 50) == pytest.approx(math.log(50), abs=0.03)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([0], [0, 1], 2), "train: got 1 tokens; want 2 or more"),
        (([0, 1], [], 2), "tokens: got dtype float64, shape .*; want token"),
        (([0, 1], [0], 2), "valid: got 1 tokens; want 2 or more"),
        (([0, 2], [0, 1], 2), "train: got a number outside; want 0 to 1"),
        (([0, 1], [0, -100], 2), "tokens: got numbers from -100 to 0; want token ids, 0 or more"),
        (([0, 1], [0, 1], True), "vocab_size: got True; want a positive integer"),
        (([0, 1], [0, 1], 2.5), "vocab_size: got 2.5; want a positive integer"),
        (("text", [0, 1], 2), "tokens: got dtype"),
    ],
)
def test_a_bigram_model_wants_tokens(arguments, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        bigram_loss(*arguments)
