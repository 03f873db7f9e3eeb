"""The text that an experiment reads: from the cache, from a folder of texts, or refused."""

import os
from pathlib import Path

from gbattn.corpora import Corpus
from gbattn.experiments import CorpusSpec
from gbattn.ground.arguments import PATH, ArgumentError, check, optional
from gbattn.lab.downloads import HUB
from gbattn.lab.token_cache import MANIFEST, cache_root, load_corpus, open_corpus


def is_readers_own(spec: CorpusSpec) -> bool:
    """Return whether a text is neither in Python nor on the Hub."""
    return spec.name != "python-docs" and spec.name not in HUB


def cached_text(spec: CorpusSpec) -> Corpus | None:
    """Return the text with the fingerprint of a spec, if the cache has it whole, wherever its tokens were made."""
    if spec.fingerprint is None:
        return None
    for path in sorted(cache_root(None).glob(f"{spec.name}-*/{MANIFEST}")):
        folder = path.parent
        if ".draft-" in folder.name:
            continue
        try:
            if open_corpus(folder, verify=False).fingerprint == spec.fingerprint:
                return open_corpus(folder)
        except (OSError, ValueError):  # damaged; another copy may be whole
            continue
    return None


def own_folder(spec: CorpusSpec, corpora: str | Path | None = None) -> Path | None:
    """Return the folder of a text of one's own in `corpora` or in ``GBATTN_CORPORA``, if it is there."""
    root = corpora or os.environ.get("GBATTN_CORPORA")
    place = Path(root) / spec.name if root else None
    return place if place and place.is_dir() else None


def load_text(spec: CorpusSpec, corpora: str | Path | None = None) -> Corpus:
    """Return the corpus of a spec, from the cache if it is there; a text of one's own is read from the folder of that
    name in `corpora`, by default ``GBATTN_CORPORA``. Where a fingerprint is given and the cache has such a corpus, as
    when it was copied here, the text itself is not needed.

    It reads and hashes the whole text: call it once.
    """
    check(corpora=(corpora, optional(PATH)))
    if found := cached_text(spec):
        return found
    place = own_folder(spec, corpora) if is_readers_own(spec) else spec.name
    if place is None:
        got = str(corpora or os.environ.get("GBATTN_CORPORA", "nothing"))
        raise ArgumentError("corpora", got, f"a folder that holds {spec.name}, given here or in GBATTN_CORPORA")
    options = dict(tokenizer=spec.tokenizer, vocab_size=spec.vocab_size)
    found = load_corpus(place, max_train_tokens=spec.max_train_tokens, **options)
    if spec.fingerprint not in (None, found.fingerprint):
        want = f"{spec.fingerprint}, the text that this experiment is about"
        raise ArgumentError(spec.name, f"a text with fingerprint {found.fingerprint}", want)
    return found
