"""A corpus as a folder of tokens that describes itself: written once, checked when it is opened."""

import glob
import hashlib
import itertools
import json
import os
import platform
import re
import reprlib
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path

import numpy as np

from gbattn.corpora import (
    NEEDS_NEITHER,
    SPLITS,
    TOKENIZERS,
    Corpus,
    check_ids,
    check_recipe,
    spellings,
    train_tokenizer,
)
from gbattn.ground.arguments import (
    FLAG,
    PATH,
    ArgumentError,
    check,
    check_entries,
    instance,
    integer,
    one_of,
    optional,
    require,
)
from gbattn.ground.files import check_folder, file_checksum, read_json, write_atomic
from gbattn.ground.packages import load_package
from gbattn.lab.downloads import HUB, Rows, rows_from_folder, rows_from_hub, rows_from_python

FORMAT = "gbattn corpus 1"
MANIFEST = "corpus.json"
_NO_CACHE = "a cache as load_corpus writes it; or load_corpus(folder) for a folder of text"
_TOKENIZER_CURE = (
    "the file that corpus.json was written with: copy the folder again, or make it again by the command that made it"
)


def _flat_settings(tokenizer: dict) -> dict:
    """The settings of a tokenizer's JSON but vocabulary and merges, by their names."""
    model = {f"model.{name}": x for name, x in tokenizer["model"].items()}
    found = tokenizer | model
    return {name: x for name, x in found.items() if name not in ("model", "model.vocab", "model.merges")}


def manifest_checksum(manifest: dict) -> str:
    """Return the checksum of a manifest, of everything in it but its field sha256."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


# Checksums come with the folder, so they do not show whether its entries are valid:
# each entry that is used has a rule.
_SHA256 = (
    lambda x: isinstance(x, str) and re.fullmatch("[0-9a-f]{64}", x) is not None,
    "a SHA-256 in hexadecimal digits",
)
_SHORT = (
    lambda x: isinstance(x, str) and x.isprintable() and len(x) <= 255,
    "at most 255 characters that can be printed",
)
_SIZE = integer("a positive integer below 2**63", lambda x: 0 < x < 2**63)
_SPLIT = {
    "dtype": one_of("uint16", "uint32"),
    "tokens": _SIZE,
    "bytes": _SIZE,
    "lossless": FLAG,
    "sha256": _SHA256,
}
_ENTRIES = {
    "vocab_size": integer("an integer, 1 to 2**32", lambda x: 0 < x <= 2**32),
    "recipe.corpus": (lambda x: _SHORT[0](x) and "/" not in x, "a name, no path"),
    "recipe.tokenizer": one_of(*TOKENIZERS),
    "recipe.vocab_size": _SIZE,
    "recipe.max_train_tokens": optional(_SIZE),
    "made_with.tokenizers": _SHORT,
    "tokenizer.file": one_of("tokenizer.json"),
    "tokenizer.sha256": _SHA256,
} | {
    f"splits.{split}.{name}": rule
    for split in SPLITS
    for name, rule in (_SPLIT | {"file": one_of(f"{split}.bin")}).items()
}


class TokenizerFile:
    """The tokenizer of a folder, read when it is used; then its checksum is compared.

    Parameters
    ----------
    folder : Path
        The cache, or the folder of a trained model.
    manifest : dict
        What ``corpus.json`` says.
    """

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self.manifest = folder, manifest

    @cached_property
    def path(self) -> Path:
        """The file, whose checksum is compared."""
        part = self.manifest["tokenizer"]
        path = self.folder / part["file"]
        require(path.is_file(), str(path), "no such file", _TOKENIZER_CURE)
        same = file_checksum(path) == part["sha256"]
        require(same, str(path), "bytes that do not match their checksum", _TOKENIZER_CURE)
        return path

    @cached_property
    def vocabulary(self) -> list[bytes]:
        """The bytes of each token id."""
        path, size = self.path, self.manifest["vocab_size"]
        tokenizer = read_json(path, _TOKENIZER_CURE)
        try:
            found = spellings(tokenizer, self.manifest["recipe"]["tokenizer"])
        except (LookupError, TypeError, AttributeError, ValueError):
            found = []  # of other JSON, or with numbers that are not 0, 1, 2, …
        got = f"no vocabulary of {size} tokens, numbered from 0 on"
        require(len(found) == size, str(path), got, _TOKENIZER_CURE)
        return found

    def encode(self, text: str) -> np.ndarray:
        """The token ids of a text, int64 of shape (n,); needs ``tokenizers``."""
        require(isinstance(text, str), "text", type(text).__name__, "one string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            got = f"a lone surrogate at {error.start}"
            raise ArgumentError("text", got, "a string that UTF-8 can write") from None
        ids = np.array(self._tokenizer.encode(text).ids, dtype=np.int64)
        return check_ids(ids, self.manifest["vocab_size"], f"{self.path}, tokens")

    @cached_property
    def _tokenizer(self):
        library = load_package("data", "tokenizers", also=NEEDS_NEITHER)
        path, recipe, _ = self.path, self.manifest["recipe"]["tokenizer"], self.vocabulary
        plain = json.loads(train_tokenizer([], 256, recipe).to_str())
        found = read_json(path, _TOKENIZER_CURE)
        settings = _flat_settings(plain), _flat_settings(found)
        # With settings that are not ours the library may end the process.
        differ = [n for n, x in settings[1].items() if x != settings[0].get(n)]
        got = f"settings of no {recipe!r} recipe: {', '.join(differ)[:200]}"
        require(not differ, str(path), got, _TOKENIZER_CURE)
        try:
            return library.Tokenizer.from_str(json.dumps(found))
        except Exception as error:  # the library raises nothing narrower
            got = f"what tokenizers {library.__version__} cannot read ({error})"
            version = self.manifest["made_with"]["tokenizers"]
            raise ArgumentError(str(path), got, f"tokenizers {version}, which wrote it") from None


def _manifest_at(path: Path) -> tuple[dict, object]:
    """The JSON of a manifest and its format; {} and None if the file is not one."""
    try:
        manifest = json.loads(path.read_text("utf-8"))
        return manifest, manifest.get("format")
    except (OSError, ValueError, AttributeError, RecursionError):
        return {}, None


def _is_cache_format(format: object) -> bool:
    """Whether a format is that of a cache, of any version."""
    return isinstance(format, str) and format.startswith("gbattn corpus ")


def read_manifest(path: Path, cure: str) -> dict:
    """The manifest at a path, if it is as it was written."""
    manifest, found = _manifest_at(path)
    want = f"{FORMAT!r}: {cure if _is_cache_format(found) else _NO_CACHE}"
    require(found == FORMAT, str(path), f"format {reprlib.repr(found)}", want)
    same = manifest.get("sha256") == manifest_checksum(manifest)
    require(same, str(path), "contents that do not match their checksum", cure)
    check_entries(path, manifest, _ENTRIES, cure)
    return manifest


def _cut(row: str, size: int) -> Iterator[str]:
    """Cut a row that is longer than twice `size` characters, if possible before
    whitespace, where the tokens are those of the whole row."""
    start = 0
    while len(row) - start > 2 * size:
        gap = max(row.rfind(space, start, start + size) for space in " \n\t")
        length = len(row[start : max(start, gap)].rstrip()) or size
        yield row[start : start + length]
        start += length
    yield row[start:]


def pieces_of(rows: Iterable[str], size: int = 2**16) -> Iterator[str]:
    """Join and cut rows to pieces of `size` to three times as many characters."""
    buffer, length = [], 0
    for row in itertools.chain.from_iterable(_cut(row, size) for row in rows):
        buffer.append(row)
        length += len(row)
        if length >= size:
            yield "".join(buffer)
            buffer, length = [], 0
    if length:
        yield "".join(buffer)


def tokenizer_text(rows: Iterable[str], recipe: dict) -> Iterator[str]:
    """The head of the training text, on which the tokenizer is trained."""
    if recipe["tokenizer"] == "published":
        not_blank = (row for row in rows if row.strip())
        yield from itertools.islice(not_blank, recipe["tokenizer_rows"])
        return
    left = recipe["tokenizer_characters"]
    for piece in pieces_of(rows):
        yield piece[:left]
        left -= len(piece)
        if left <= 0:
            return


def _text_up_to(text: str, spelled: str) -> bytes:
    """The head of a text from which a lossy tokenizer spells these characters. It drops
    none of them elsewhere, so first matches are right."""
    end = 0
    for character in spelled:
        end = text.index(character, end) + 1
    return text[:end].encode()


def _append(path: Path, content: bytes) -> None:
    """Append to a file; an error names it, unlike the system's own on a full disk."""
    # Not `write_atomic`: the tokens of a split do not fit in memory.
    try:
        with path.open("ab") as file:
            file.write(content)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(error.errno, why, str(path)) from None


def encode_split(path: Path, rows, tokenizer, vocabulary, dtype, limit) -> dict:
    """Write the tokens of one split and return its entry of the manifest."""
    digest, n_tokens, n_bytes, lossless = hashlib.sha256(), 0, 0, True
    pieces = pieces_of(rows)
    while n_tokens != limit and (batch := list(itertools.islice(pieces, 16))):
        content = b""
        for piece, coded in zip(batch, tokenizer.encode_batch(batch)):
            ids, text = coded.ids, piece.encode()
            spelled = b"".join(vocabulary[number] for number in ids)
            lossless = lossless and spelled == text
            if limit is not None and n_tokens + len(ids) > limit:
                ids = ids[: limit - n_tokens]
                # A token may end inside a character, but not outside the text.
                cut = b"".join(vocabulary[number] for number in ids)
                text = cut if lossless else _text_up_to(piece, cut.decode())
            content += np.array(ids, dtype=dtype).tobytes()
            n_tokens, n_bytes = n_tokens + len(ids), n_bytes + len(text)
            if n_tokens == limit:
                break
        digest.update(content)
        _append(path, content)
    want = "a split with two tokens or more"
    require(n_tokens > 1, path.stem, f"{n_tokens} tokens", want)
    return {
        "file": path.name,
        "dtype": dtype.name,
        "tokens": n_tokens,
        "bytes": n_bytes,
        "lossless": lossless,
        "sha256": digest.hexdigest(),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("gbattn", "tokenizers", "datasets"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


@contextmanager
def _locked_draft(draft: Path) -> Iterator[None]:
    """Lock a folder before it is created, and remove it in the end. The system
    releases the lock when the process dies, so a draft that can be locked has no
    owner and may be removed."""
    path = draft.with_name(f".{draft.name}.lock")
    lock = load_package("data", "filelock", also=NEEDS_NEITHER).FileLock(path, timeout=0)
    with lock:
        try:
            yield
        finally:
            shutil.rmtree(draft, ignore_errors=True)
            with suppress(OSError):  # some systems keep what is open
                os.unlink(lock.lock_file)


def write_corpus(folder: Path, recipe: dict, rows: Rows) -> None:
    """Write a cache to a draft, and move that into place when it is complete."""
    draft = folder.with_name(f"{folder.name}.draft-{uuid.uuid4().hex[:8]}")
    with ExitStack() as stack:
        try:
            draft.parent.mkdir(parents=True, exist_ok=True)
            for old in draft.parent.glob(f"{glob.escape(folder.name)}.draft-*"):
                with suppress(OSError), _locked_draft(old):
                    pass  # of a killed process; to lock another's is an OSError
            stack.enter_context(_locked_draft(draft))
            draft.mkdir()
        except OSError as error:
            got = f"{draft.parent}, which cannot be written ({error.strerror})"
            want = "another folder, by the argument or GBATTN_CACHE"
            raise ArgumentError("cache", got, want) from None
        _fill(draft, recipe, rows)
        try:
            draft.rename(folder)
        except OSError:  # another process was first, with the same cache
            if not (folder / MANIFEST).is_file():
                raise


def _fill(draft: Path, recipe: dict, rows: Rows) -> None:
    """Write the files of a cache."""
    text = tokenizer_text(rows("train"), recipe)
    tokenizer = train_tokenizer(text, recipe["vocab_size"], recipe["tokenizer"])
    write_atomic(draft / "tokenizer.json", tokenizer.to_str().encode())
    vocabulary = spellings(json.loads(tokenizer.to_str()), recipe["tokenizer"])
    dtype = np.dtype("<u2" if len(vocabulary) <= 2**16 else "<u4")
    limits = {"train": recipe["max_train_tokens"]}
    splits = {}
    for split in SPLITS:
        target, limit = draft / f"{split}.bin", limits.get(split)
        options = (tokenizer, vocabulary, dtype, limit)
        splits[split] = encode_split(target, rows(split), *options)
    digest = file_checksum(draft / "tokenizer.json")
    manifest = {
        "format": FORMAT,
        "recipe": recipe,
        "made_with": _versions(),
        "vocab_size": len(vocabulary),
        "tokenizer": {"file": "tokenizer.json", "sha256": digest},
        "splits": splits,
    }
    manifest["sha256"] = manifest_checksum(manifest)
    write_atomic(draft / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())


def open_corpus(folder: str | Path, *, verify: bool = True) -> Corpus:
    """Open a finished cache: neither ``datasets`` nor ``tokenizers`` nor a network
    is needed.

    Parameters
    ----------
    folder : str or Path
        A folder that `load_corpus` wrote, here or on another machine.
    verify : bool
        Whether to read all files, and to check checksums and token ids. Without it
        only the checksum of ``corpus.json`` and the sizes of the token files are
        checked, and the tokenizer's checksum when it is used.

    Notes
    -----
    Source: chapter 14.
    """
    check(folder=(folder, PATH), verify=(verify, FLAG))
    folder = Path(folder).absolute()  # of what is read later
    cure = "a cache as load_corpus writes it; delete the folder and load the corpus again, or copy it again"
    path = folder / MANIFEST
    require(path.is_file(), "folder", f"{folder} without {MANIFEST}", _NO_CACHE)
    manifest = read_manifest(path, cure)
    splits = manifest["splits"]
    exist = any((folder / part["file"]).exists() for part in splits.values())
    got = f"{folder} without tokens, such as that of a trained model"
    require(exist, "folder", got, _NO_CACHE)
    for part in (manifest["tokenizer"], *splits.values()):
        path = folder / part["file"]
        require(path.is_file(), "folder", f"{folder} without {path.name}", cure)
        size = expected = path.stat().st_size
        if "tokens" in part:
            expected = part["tokens"] * np.dtype(part["dtype"]).itemsize
        want = f"{expected} bytes: {cure}"
        require(size == expected, str(path), f"{size} bytes", want)
        same = not verify or file_checksum(path) == part["sha256"]
        require(same, str(path), "bytes that do not match their checksum", cure)
    arrays, size = {}, manifest["vocab_size"]
    for split in SPLITS:
        path = folder / splits[split]["file"]
        dtype = np.dtype(splits[split]["dtype"]).newbyteorder("<")
        arrays[split] = np.memmap(path, dtype=dtype, mode="r")
        known = not verify or int(arrays[split].max()) < size
        want = f"ids below vocab_size = {size}: {cure}"
        require(known, str(path), "a token id outside the vocabulary", want)
    return Corpus(folder, manifest, TokenizerFile(folder, manifest), **arrays)


def cache_root(cache: str | Path | None) -> Path:
    """The folder of caches."""
    check(cache=(cache, optional(PATH)))
    root = Path(cache or os.environ.get("GBATTN_CACHE") or "~/.cache/gbattn")
    root = root.expanduser()
    check_folder("cache", root)
    return root


_LIMIT = optional(integer("an integer, 2 or more", lambda x: x > 1))


def load_corpus(
    name_or_folder: str | Path = "python-docs",
    *,
    tokenizer: str = "byte-level",
    vocab_size: int = 4096,
    max_train_tokens: int | None = None,
    cache: str | Path | None = None,
    verify: bool = True,
) -> Corpus:
    """Return a corpus as tokens, from the cache or, the first time, from its text.

    Parameters
    ----------
    name_or_folder : str or Path
        ``"python-docs"``, which needs no download; ``"wikitext-103"``,
        ``"wikitext-2"`` or ``"openwebtext"`` from the Hugging Face Hub; or a folder
        that holds, for each of train, valid and test, a UTF-8 file SPLIT.txt or a
        folder SPLIT of .txt files, read in order of name, without hidden ones. (Pass
        a folder with one of those four names as a Path.) Line ends are read as
        newlines, a byte-order mark is dropped, and a missing last newline is added
        before another file.
    tokenizer : {"byte-level", "published"}
        The recipe of `train_tokenizer`, which reads the first 100,000,000 characters of
        train; in the published recipe, its first 100,000 rows that are not blank.
    vocab_size : int
        The vocabulary size to reach; that of the result is `Corpus.vocab_size`.
    max_train_tokens : int, optional
        Use only this many tokens from the start of train; the published comparison
        used 10,000,000.
    cache : str or Path, optional
        The folder of caches; by default ``GBATTN_CACHE``, else ``~/.cache/gbattn``.
    verify : bool
        As in `open_corpus`.

    Raises
    ------
    OSError
        Naming a file that could not be written, as on a full disk; no part of the
        cache remains.

    Notes
    -----
    The rows of OpenWebText come in one split; its first 1,000 are valid here, the
    next 1,000 test. Source: chapter 14.
    """
    check_recipe("tokenizer", tokenizer, vocab_size)
    check(
        name_or_folder=(name_or_folder, instance(str | Path, "a name or a folder")),
        max_train_tokens=(max_train_tokens, _LIMIT),
        verify=(verify, FLAG),
    )
    root = cache_root(cache)
    rows, source = _rows_of(name_or_folder)
    recipe = source | {
        "tokenizer": tokenizer,
        "vocab_size": int(vocab_size),
        "max_train_tokens": max_train_tokens and int(max_train_tokens),
        "tokenizer_rows": 100_000,
        "tokenizer_characters": 100_000_000,
    }
    recipe_json = json.dumps(recipe, sort_keys=True)
    folder = root / _folder_name(recipe["corpus"], recipe_json)
    if not folder.is_dir():
        write_corpus(folder, recipe, rows)
    corpus = open_corpus(folder, verify=verify)
    same = json.dumps(corpus.manifest["recipe"], sort_keys=True) == recipe_json
    require(same, str(folder), "a cache of another recipe", "its own: delete it")
    return corpus


def _rows_of(name_or_folder: str | Path) -> tuple[Rows, dict]:
    """The rows of a name or of a folder of text, and its entries of a recipe."""
    named = isinstance(name_or_folder, str)
    name, path = str(name_or_folder), Path(name_or_folder)
    if named and name in HUB:
        return rows_from_hub(name)
    if named and name == "python-docs":
        return rows_from_python()
    known = ", ".join(["python-docs", *HUB])
    want = f"one of {known}, or a folder with train.txt, valid.txt and test.txt"
    exists = bool(name) and path.is_dir()  # the path of no name is this folder
    require(exists, "name_or_folder", repr(name), want)
    finished = _is_cache_format(_manifest_at(path / MANIFEST)[1])
    want = "open_corpus(folder) for it, or a folder of text"
    require(not finished, "name_or_folder", f"{path}, a finished cache", want)
    return rows_from_folder(path)


def _folder_name(corpus: str, recipe_json: str) -> str:
    """The name of a cache: that of the corpus, as far as it is short, and the recipe's hash."""
    short = corpus[:100]
    while len(os.fsencode(short)) > 200:  # file systems count bytes, up to 255
        short = short[:-1]
    return f"{short}-{hashlib.sha256(recipe_json.encode()).hexdigest()[:12]}"
