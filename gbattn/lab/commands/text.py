"""`gbattn tokenize`, and the text that other commands read."""

from pathlib import Path
from typing import TYPE_CHECKING

from gbattn.ground.arguments import require
from gbattn.lab.commands.options import MODEL, aligned, check_options, renamed, tell

if TYPE_CHECKING:
    from gbattn.corpora import Corpus

RECIPE = ("tokenizer", "max_train_tokens", "vocab_size")


def is_folder(corpus: str) -> bool:
    """Whether a corpus is named by its folder. A name that gbattn knows is none,
    whatever lies here."""
    from gbattn.lab.downloads import HUB

    check_options(corpus=corpus)
    return corpus not in ("", "python-docs", *HUB) and Path(corpus).is_dir()


def carried_recipe(corpus: str) -> dict:
    """Return how the text of a folder that `tokenize_corpus` wrote was cut into tokens,
    an empty dictionary for any other corpus."""
    from gbattn.lab.token_cache import MANIFEST, read_manifest

    if not is_folder(corpus):
        return {}
    try:
        recipe = read_manifest(Path(corpus) / MANIFEST, "")["recipe"]
    except (OSError, ValueError):  # of a text, or a damaged one: see `load_named`
        return {}
    return {name: recipe[name] for name in RECIPE}


def load_named(corpus: str, recipe: dict, cache: Path | None) -> "Corpus":
    """A corpus by its name, from a folder of text, or from a finished cache."""
    from gbattn.lab.token_cache import MANIFEST, load_corpus, open_corpus

    with renamed(name_or_folder="corpus", folder="corpus"):
        if is_folder(corpus) and (Path(corpus) / MANIFEST).is_file():
            return open_corpus(corpus)
        tell(f"reading {corpus}")
        return load_corpus(corpus, cache=cache, **recipe)


def text_as_asked(corpus: str, cache: Path | None, **recipe) -> "Corpus":
    """A corpus that is cut into tokens as asked. How a finished cache was cut is
    decided, and the options must not differ."""
    text = load_named(corpus, recipe, cache)
    for name, value in recipe.items():
        decided = text.manifest["recipe"][name]
        want = f"{decided}, as in {text.folder}"
        require(value == decided, name, value, want)
    return text


def text_of(run: dict, corpus: str | None, cache: Path | None) -> "Corpus":
    """The text of a run, where it is now."""
    place = Path(run["corpus"])
    there = corpus is not None or place.is_dir() or not place.is_absolute()
    want = "where the text of the training is now, or --text and another"
    require(there, "corpus", f"none, and {place} is gone", want)
    corpus = run["corpus"] if corpus is None else corpus
    text = load_named(corpus, run["recipe"], cache)
    got = f"a text with fingerprint {text.fingerprint}"
    want = f"{run['fingerprint']}, as in training; --text scores any other text"
    require(text.fingerprint == run["fingerprint"], "corpus", got, want)
    return text


def tokenize_corpus(
    corpus: str = "python-docs",
    *,
    vocab_size: int = MODEL["vocab_size"],
    tokenizer: str = "byte-level",
    max_train_tokens: int | None = None,
    cache: Path | None = None,
) -> dict:
    """Turn a text into tokens, in a folder that can be moved.

    On a machine without a network and without tokenizers, gbattn train takes that
    folder in place of a name.

    Parameters
    ----------
    corpus : str
        python-docs, which needs no download; wikitext-103, wikitext-2 or
        openwebtext; or a folder with train.txt, valid.txt and test.txt.
    vocab_size : int
        Vocabulary size to reach.
    tokenizer : {"byte-level", "published"}
        The recipe; that of the published runs loses text.
    max_train_tokens : int, optional
        How many tokens of the training text to keep, from its start.
    cache : Path, optional
        Where tokenized texts are kept; GBATTN_CACHE by default, else
        ~/.cache/gbattn.
    """
    recipe = dict(tokenizer=tokenizer, max_train_tokens=max_train_tokens)
    found = text_as_asked(corpus, cache, vocab_size=vocab_size, **recipe)
    splits = found.manifest["splits"].items()
    return {
        "folder": str(found.folder),
        "corpus": found.name,
        "fingerprint": found.fingerprint,
        "vocab_size": found.vocab_size,
        "lossless": found.lossless,
        "tokens": {name: split["tokens"] for name, split in splits},
        "bytes": {name: split["bytes"] for name, split in splits},
    }


def say_tokenized(result: dict) -> str:
    """What a terminal shows of the result of `tokenize_corpus`."""
    tokens, n_bytes = result["tokens"], result["bytes"]
    table = [[n, f"{tokens[n]:,} tokens", f"{n_bytes[n]:,} bytes"] for n in tokens]
    loss = "every byte kept" if result["lossless"] else "some text lost"
    last = f"{result['vocab_size']:,} token types, {loss}, in {result['folder']}"
    return "\n".join([*aligned(table), last])


def losses_of(corpus: "Corpus", split: str, loss: float) -> dict:
    """A mean loss on a split, in all units of `evaluate`."""
    from gbattn.training import Evaluation

    n_tokens = len(getattr(corpus, split)) - 1
    n_bytes = corpus.scored_bytes(split)
    found = Evaluation.of(loss * n_tokens, n_tokens, n_bytes)
    return found._asdict() | {"lossless": corpus.lossless}


def say_losses(found: dict) -> str:
    """What a terminal shows of a loss in all its units."""
    line = (
        f"{found['loss']:.3f} nats a token, perplexity {found['perplexity']:,.1f}, "
        f"{found['bits_per_byte']:.3f} bits per byte"
    )
    lossy = "; of what this tokenizer keeps, it loses text: compare with no other"
    return line + lossy * (not found["lossless"])
