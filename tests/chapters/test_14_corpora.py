"""Chapter 14: the claims with their mutants, tokenizers, the embedded corpus, the order of the data."""

import ast
import json
import math
import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from claims import claim
from gbattn import corpora
from gbattn.corpora import (
    SPLITS,
    PackedBatch,
    TokenStream,
    bigram_loss,
    bits_per_byte,
    byte_alphabet,
    docstrings,
    documentation,
    pack_documents,
    python_docs,
    sequential_windows,
    spellings,
    split_by_module,
    train_tokenizer,
    without_leaks,
    without_repeats,
    word_runs,
)
from gbattn.lab.token_cache import load_corpus
from gbattn.language_model import LanguageModel, ModelConfig
from texts import ENGLISH, TEXTS, as_read

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

    assert set(byte_alphabet()) == set(ByteLevel.alphabet())
    for byte in range(128):  # what the library writes for each ASCII byte, without pre-tokenising
        (token, _), *more = ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(byte))
        assert not more and byte_alphabet()[token] == byte


@pytest.mark.parametrize(
    "recipe, text, lost", [("published", "Zut, a 😀 cat", set("Zu😀 ")), ("byte-level", "Zut 😀", set())]
)
def test_what_a_recipe_loses(recipe, text, lost):
    tokenizer = {"published": SEEN_ONLY, "byte-level": BYTE_LEVEL}[recipe]
    vocabulary = spellings(json.loads(tokenizer.to_str()), recipe)
    spelled = b"".join(vocabulary[i] for i in tokenizer.encode(text).ids).decode()
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
    known = set().union(*map(word_runs, texts["train"].values()))
    held_out = [p for s in ("valid", "test") for t in texts[s].values() for p in t.split("\n\n")]
    assert not any(word_runs(p) & known for p in held_out)
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
    assert without_repeats(texts) == {
        "z": "  one two three four five six seven eight nine\n\nlonger than the other, by far and away and more",
        "a.b": "short",
    }
    held = {"v": f"well, {said}!\n\nkept", "w": f"{said} ten"}
    clean = without_leaks({"train": {"z": texts["z"]}, "valid": held, "test": {}})
    assert clean == {"train": {"z": texts["z"]}, "valid": {"v": "kept"}, "test": {}}


def test_a_package_goes_to_one_split_by_its_name():
    words = {f"package{i}.{part}": "x" * 100 for i in range(100) for part in "ab"}
    splits = split_by_module(words)
    assert {split: len(names) for split, names in splits.items()} == {"train": 160, "valid": 20, "test": 20}
    more = split_by_module(words | {"package0.c": "x"})
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
    tree = ast.parse(textwrap.dedent(source))
    assert list(docstrings(tree)) == ["module", "class", "method", "inner", "last"]


def test_a_python_without_sources_or_topics(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with refused("python-docs"):
        documentation()
    (tmp_path / "os.py").write_text('"""A landmark, and no library."""')
    with refused("python-docs"):
        documentation()
    (tmp_path / "broken.py").write_text("def f(:")
    with refused("python-docs"):
        documentation()
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with refused("python-docs"):
        documentation()


# ---- The cache ----


def test_a_corpus_spells_its_text(corpus, folder):
    assert corpus.lossless and corpus.vocab_size == 300 and corpus.name == folder.name
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
            with refused("tokens"):
                call([number])
    with refused("tokens"):
        corpus.decode([1.5])
    with refused("tokens"):
        corpus.decode([-100])  # not scored is not a token
    assert corpus.decode([]) == ""
    tokens = corpus.test[:6]
    assert corpus.decode(tokens[None]) == corpus.decode(tokens)
    with refused("tokens"):
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
        with refused("tokens"):
            use([[1, 2], [3]])


def test_a_text_that_utf_8_cannot_write(corpus):
    with refused("text"):
        corpus.encode("a\ud800")


def test_nobody_edits_the_embedded_corpus():
    texts = python_docs()
    name, text = next(iter(texts["train"].items()))
    texts["train"][name] = "mine"
    del texts["valid"]
    assert python_docs()["train"][name] == text and [*python_docs()] == [*SPLITS]


def test_the_published_recipe_says_that_it_loses(folder, cache):
    lossy = load_corpus(folder, tokenizer="published", vocab_size=300, max_train_tokens=50, cache=cache)
    assert not lossy.lossless and len(lossy.train) == 50
    assert lossy.n_bytes(lossy.test) < lossy.text_bytes("test") == len(TEXTS["test"].encode())
    assert lossy.text_bytes("train") < len(ENGLISH)
    assert lossy.decode(lossy.valid[:3]) == "the dog sat"


# ---- Sources and their faults ----


@pytest.mark.parametrize("recipe", ["byte-level", "published"])
def test_no_word_that_the_tokenizer_learns_from_is_longer_than_1024(recipe):
    tokenizer = train_tokenizer(["a" * 8192], 300, recipe)
    assert max(map(len, tokenizer.get_vocab())) == 1024
    tokens = tokenizer.encode("a" * 8192).tokens
    assert "".join(tokens) == "a" * 8192 and len(tokens) == 8


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
    with refused("end"):
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
    for argument, call in [
        ("tokens", lambda: TokenStream(np.zeros(3), 1, 1, 0)),
        ("tokens", lambda: sequential_windows(np.zeros((2, 2), int), 1)),
        ("tokens", lambda: sequential_windows([3, -100], 1)),
        ("tokens", lambda: TokenStream(np.append(tokens, -1), 1, 1, 0)),
        ("tokens", lambda: TokenStream(np.array([0, 2**63], np.uint64), 1, 1, 0)),
        ("length", lambda: TokenStream(tokens, 0, 1, 0)),
        ("batch_size", lambda: TokenStream(tokens, 1, 1.5, 0)),
        ("seed", lambda: TokenStream(tokens, 1, 1, -1)),
        ("step", lambda: TokenStream(tokens, 1, 1, 0).batch(-1)),
        ("step", lambda: TokenStream(tokens, 1, 1, 0, step=True)),
        ("tokens", lambda: TokenStream(tokens, 100, 1, 0)),
        ("tokens", lambda: sequential_windows(tokens[:1], 4)),
        ("context", lambda: sequential_windows(tokens, 4, context=4)),
        ("length", lambda: sequential_windows(tokens, 0)),
        ("batch_size", lambda: sequential_windows(tokens, 4, batch_size=0)),
        ("nats", lambda: bits_per_byte(math.nan, 3)),
        ("n_bytes", lambda: bits_per_byte(1.0, 0)),
    ]:
        with refused(argument):
            call()


def test_bits_per_byte_by_hand():
    assert bits_per_byte(6 * math.log(2), 3) == pytest.approx(2)
    assert bits_per_byte(np.float16(100), 100_000) == pytest.approx(100 / math.log(2) / 1e5)
    with refused("nats"):
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
    "arguments, argument",
    [
        (([0], [0, 1], 2), "train"),
        (([0, 1], [], 2), "tokens"),
        (([0, 1], [0], 2), "valid"),
        (([0, 2], [0, 1], 2), "train"),
        (([0, 1], [0, -100], 2), "tokens"),
        (([0, 1], [0, 1], 2.5), "vocab_size"),
        (("text", [0, 1], 2), "tokens"),
    ],
)
def test_a_bigram_model_wants_tokens(arguments, argument):
    with refused(argument):
        bigram_loss(*arguments)
