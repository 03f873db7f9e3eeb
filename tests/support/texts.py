"""Small texts for corpora, and a corpus of them."""

import pytest

from gbattn.lab.token_cache import load_corpus

ENGLISH = "the cat sat on the mat. The dog didn't; it lay there, 12 days.\n" * 20

TEXTS = {
    "train": ENGLISH + "café naïve 😀 …\n\n  indented\tand\r\nmore\n",
    "valid": "the dog sat on the mat, été\n",
    "test": "a zebra, a yak — ß\n\n\n",
}


def as_read(text):
    """Line ends become newlines, as Python reads text."""
    return text.replace("\r\n", "\n")


def local(tmp_path, **texts):
    for split, text in texts.items():
        path = tmp_path / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return tmp_path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A local corpus; the name of its folder is a pattern to the library that reads it."""
    folder = tmp_path_factory.mktemp("texts") / "a [1] b*"
    folder.mkdir()
    for split, words in TEXTS.items():
        (folder / f"{split}.txt").write_text(words, encoding="utf-8", newline="")
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def corpus(folder, cache):
    return load_corpus(folder, vocab_size=300, cache=cache)
