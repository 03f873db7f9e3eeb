"""Where the text of a corpus comes from: this Python, the Hugging Face Hub, a folder of files."""

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from gbattn.corpora import NEEDS_NEITHER, SPLITS, python_docs
from gbattn.ground.arguments import ArgumentError, require
from gbattn.ground.packages import load_package


def documents_checksum(texts: dict[str, dict[str, str]]) -> str:
    """Return the SHA-256 of the texts of `gbattn.corpora.python_docs`."""
    return hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()


class HubText(NamedTuple):
    """The place of a corpus on the Hugging Face Hub, and the rows of its splits.

    ``splits`` maps each split to (its split on the Hub, first row, last row + 1); a
    row that does not end in ``ending`` gets it.
    """

    path: str
    config: str | None
    splits: dict[str, tuple[str, int, int | None]]
    ending: str
    streaming: bool


_OFFICIAL = {split: (on_hub, 0, None) for split, on_hub in zip(SPLITS, ("train", "validation", "test"))}
HUB: dict[str, HubText] = {
    f"wikitext-{size}": HubText("Salesforce/wikitext", f"wikitext-{size}-raw-v1", _OFFICIAL, "\n", False)
    for size in ("103", "2")
} | {
    "openwebtext": HubText(
        "Skylion007/openwebtext",
        None,
        {
            "train": ("train", 2000, None),
            "valid": ("train", 0, 1000),
            "test": ("train", 1000, 2000),
        },
        "\n\n",
        True,
    )
}
# The rows of a split, by its name.
Rows = Callable[[str], Iterator[str]]


def rows_from_hub(name: str) -> tuple[Rows, dict]:
    """The rows of a corpus of `HUB`, and its entries of a recipe."""
    hub = HUB[name]
    cure = (
        "a network that reaches the Hugging Face Hub, and there a dataset that the installed "
        "`datasets` can read; or the text as a folder of your own; or open_corpus on a finished "
        "cache, carried here from a machine that has one; or 'python-docs', which needs no download"
    )

    def rows(split):
        on_hub, start, stop = hub.splits[split]
        options = dict(split=on_hub, streaming=hub.streaming)
        library = load_package("data", "datasets", also=NEEDS_NEITHER)
        try:
            found = library.load_dataset(hub.path, hub.config, **options)
            for row in itertools.islice(found, start, stop):
                text = row["text"]
                yield text if text.endswith(hub.ending) else text + hub.ending
        except Exception as error:  # whatever it is, the cure is the same
            first = (str(error).splitlines() or [""])[0]
            raise ArgumentError(name, f"{type(error).__name__}: {first}", cure) from None

    return rows, {"corpus": name, "source": hub._asdict()}


def rows_from_python() -> tuple[Rows, dict]:
    """The rows of `gbattn.corpora.python_docs`, and its entries of a recipe."""
    texts = python_docs()
    rows = lambda split: (text + "\n\n\n" for text in texts[split].values())
    source = {"sha256": documents_checksum(texts)}
    return rows, {"corpus": "python-docs", "source": source}


def _encoding_of(head: bytes) -> str:
    """What the first bytes of a file with NULs seem to be."""
    head = head[: len(head) // 4 * 4]
    for code in ("UTF-32LE", "UTF-32BE"):
        with suppress(UnicodeDecodeError):
            return code if head.decode(code) else "a binary file"
    even, odd = head[::2].count(0), head[1::2].count(0)
    if max(even, odd) < max(4 * min(even, odd), len(head) / 16):
        return "a binary file"
    return "UTF-16LE" if odd > even else "UTF-16BE"


def text_checksum(path: Path) -> str:
    """Return the SHA-256 of a file, which must be text in UTF-8 and not blank."""
    require(path.is_file(), str(path), "no file that can be read", "a text file")
    digest, blank = hashlib.sha256(), True
    cure = "UTF-8; iconv converts other encodings"
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            digest.update(line)
            if b"\0" in line:
                file.seek(0)
                what = f"NULs, as if it were {_encoding_of(file.read(2**16))}"
                raise ArgumentError(str(path), what, cure)
            try:
                blank = not line.decode("utf-8-sig").strip() and blank
            except UnicodeDecodeError as error:
                got = f"byte 0x{line[error.start]:02x} in line {number}"
                raise ArgumentError(str(path), got, cure) from None
    require(not blank, str(path), "no text in it", "a file with text")
    return digest.hexdigest()


def _text_files(folder: Path) -> list[Path]:
    """The .txt files below a folder by name, also behind links, without hidden ones."""

    # os.walk calls itself at each level in Python 3.11, and a resolved path asks for
    # each folder above it.
    found, visited, waiting = [], set(), [str(folder)]
    while waiting:
        place = waiting.pop()
        try:
            here, entries = os.stat(place), list(os.scandir(place))
        except OSError as error:
            got = f"{place}, which cannot be listed ({error.strerror})"
            raise ArgumentError("name_or_folder", got, "folders that can be read") from None
        new, got = (here.st_dev, here.st_ino), f"{place}, which is read already"
        require(new not in visited, "name_or_folder", got, "links to other folders")
        visited.add(new)
        entries = [entry for entry in entries if not entry.name.startswith(".")]
        for entry in entries:
            if os.path.isdir(entry.path):
                waiting.append(entry.path)
            elif entry.name.lower().endswith(".txt"):
                found.append(Path(entry.path))
    return sorted(found, key=lambda path: path.relative_to(folder).parts)


def rows_from_folder(folder: Path) -> tuple[Rows, dict]:
    """The rows of a folder of text, and its entries of a recipe."""
    files = {}
    for split in SPLITS:
        single, many = folder / f"{split}.txt", folder / split
        both = single.is_file() and many.is_dir()
        got = f"{single} and {many}"
        require(not both, "name_or_folder", got, "one of the two")
        listed = _text_files(many) if many.is_dir() else []
        files[split] = [single] if single.is_file() else listed
    missing = [split for split in SPLITS if not files[split]]
    want = f"SPLIT.txt or a folder SPLIT of .txt files for each of {', '.join(SPLITS)}"
    got = f"{folder} without {', '.join(missing)}"
    require(not missing, "name_or_folder", got, want)
    inside = lambda path: path.relative_to(folder).as_posix()
    source = {split: {inside(path): text_checksum(path) for path in paths} for split, paths in files.items()}

    def rows(split):
        last = "\n"
        for path in files[split]:
            with path.open(encoding="utf-8-sig") as file:
                for row in file:  # files are separated by a newline at least
                    yield row if last.endswith("\n") else "\n" + row
                    last = row

    # Some characters that a terminal does not show are commands to it.
    name = (x if x.isprintable() else "?" for x in folder.resolve().name)
    return rows, {"corpus": "".join(name), "source": source}
