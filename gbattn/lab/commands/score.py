"""`gbattn evaluate`: a text, scored by a trained model."""

from pathlib import Path

from gbattn.ground.arguments import ArgumentError, require
from gbattn.lab.commands.options import check_options, renamed
from gbattn.lab.commands.text import say_losses, text_of


def _read_text(path: Path) -> str:
    """A text as `load_corpus` reads it."""
    from gbattn.lab.downloads import text_checksum

    check_options(text=path)
    require(path.is_file(), "text", str(path), "a file")
    try:
        text_checksum(path)
    except ValueError as error:
        raise ArgumentError("text", f"{error}", "UTF-8 text") from None
    return path.read_text("utf-8-sig")


def evaluate_model(
    *,
    folder: Path = Path("gbattn-model"),
    split: str | None = None,
    text: Path | None = None,
    corpus: str | None = None,
    context: int = 0,
    batch_size: int = 32,
    cache: Path | None = None,
    device: str | None = None,
) -> dict:
    """Score a text with a trained model, every token once.

    Parameters
    ----------
    folder : Path
        One that gbattn train wrote.
    split : {"test", "valid", "train"}, optional
        Which part of the corpus it was trained on; test by default.
    text : Path, optional
        A UTF-8 file to score instead, cut by the model's own tokenizer; read as in
        training, with line ends as newlines and without a byte-order mark.
    corpus : str, optional
        Where the corpus is now, if it is not where it was in training: a folder of
        text, or one that gbattn tokenize wrote.
    context : int
        Tokens that a window shares with the one before and does not score again,
        from 0 to less than a window: more context, fewer surprises, more work.
    batch_size : int
        Windows at once.
    cache : Path, optional
        Where tokenized texts are kept; GBATTN_CACHE by default, else
        ~/.cache/gbattn.
    device : str, optional
        cpu or cuda; by default a GPU if there is one.
    """
    from gbattn.lab.run_folder import RunFolder
    from gbattn.training import evaluate

    check_options(split=split)
    for name, value in {"corpus": corpus, "split": split}.items():
        alone = text is None or value is None
        require(alone, name, f"{value!r} with --text", "one of the two")
    run, split = RunFolder(folder), split or "test"
    (model, reader), settings = run.open(device), run.read()
    if text is not None:
        content, about = _read_text(text), str(text)
        tokens, n_bytes = reader.encode(content), len(content.encode())
        n_bytes = reader.n_bytes(tokens[1:]) if reader.lossless else n_bytes
    else:
        reader = text_of(settings, corpus, cache)
        tokens, about = getattr(reader, split), f"{reader.name} {split}"
        n_bytes = reader.scored_bytes(split)
    options = dict(context=context, batch_size=batch_size, n_bytes=n_bytes)
    length = settings["training"].get("length")
    with renamed(tokens="text"):
        found = evaluate(model, tokens, length=length, **options)
    about = {"folder": str(folder), "text": about, "lossless": reader.lossless}
    return about | found._asdict()


def say_evaluated(result: dict) -> str:
    """What a terminal shows of the result of `evaluate_model`."""
    return f"{result['text']}: {say_losses(result)}"
