"""The text of an experiment: found in its folder or in a cache that was carried here, and no other is taken for it."""

import shutil
from dataclasses import replace

from refusals import refused

from gbattn.experiments import CorpusSpec
from gbattn.lab.texts import load_text
from tiny_experiment import TINY


def test_a_text_is_that_of_the_folder_of_corpora(corpora, tmp_path, monkeypatch):
    shutil.copytree(corpora / "tiny", tmp_path / "tiny")
    (tmp_path / "tiny" / "valid.txt").write_text("a cat sat on the dog and ran on a mat\n")
    found = set()
    for folder in (corpora, tmp_path):
        monkeypatch.setenv("GBATTN_CORPORA", str(folder))
        found.add(load_text(TINY.corpus).fingerprint)
    assert len(found) == 2


def test_another_text_than_the_pinned_one_is_refused(corpora, monkeypatch):
    with refused("tiny"):
        load_text(CorpusSpec(name="tiny", vocab_size=260, fingerprint="000"), corpora)
    monkeypatch.setenv("GBATTN_CORPORA", str(corpora))
    assert load_text(CorpusSpec(name="tiny", vocab_size=260)).vocab_size == 260
    monkeypatch.delenv("GBATTN_CORPORA")
    with refused("corpora"):
        load_text(CorpusSpec(name="elsewhere"))


def test_a_cache_that_was_carried_here_needs_no_text(corpora, monkeypatch, tmp_path):
    """It is known by its fingerprint; a corpus of the same name with another one is not taken for it."""
    here = load_text(CorpusSpec(name="tiny", vocab_size=260), corpora)
    shorter = load_text(CorpusSpec(name="tiny", vocab_size=260, max_train_tokens=100), corpora)
    for corpus in (here, shorter):
        shutil.copytree(corpus.folder, tmp_path / "cache" / corpus.folder.name)
    monkeypatch.setenv("GBATTN_CACHE", str(tmp_path / "cache"))
    for corpus in (here, shorter):
        pinned = CorpusSpec(name="tiny", vocab_size=260, fingerprint=corpus.fingerprint)
        found = load_text(replace(pinned, max_train_tokens=len(corpus.train)), tmp_path)
        assert found.folder.parent == tmp_path / "cache" and len(found.train) == len(corpus.train)
    with refused("corpora"):
        load_text(CorpusSpec(name="tiny", vocab_size=260, fingerprint="000"), tmp_path)


def test_of_a_carried_cache_a_whole_copy_is_taken(corpora, monkeypatch, tmp_path):
    """No draft, and none that is damaged; one of another text is not even read."""
    spec = CorpusSpec(name="tiny", vocab_size=260)
    here, other = load_text(spec, corpora), load_text(replace(spec, max_train_tokens=90), corpora)
    names = ("tiny-0.draft-1", "tiny-1", "tiny-2", "tiny-3")
    for name, corpus in zip(names, (here, other, here, here)):
        shutil.copytree(corpus.folder, tmp_path / name)
    (tmp_path / "tiny-1" / "train.bin").unlink()
    (tmp_path / "tiny-2" / "train.bin").write_bytes(b"no")
    (tmp_path / "tiny-4").mkdir()
    (tmp_path / "tiny-4" / "corpus.json").write_text("no")
    monkeypatch.setenv("GBATTN_CACHE", str(tmp_path))
    pinned = replace(spec, fingerprint=here.fingerprint, max_valid_tokens=77)  # none that was loaded before
    assert load_text(pinned, tmp_path).folder == tmp_path / "tiny-3"
