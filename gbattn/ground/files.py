"""Files that are whole or not there, folders that one process holds, JSON that names its file."""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gbattn.ground.arguments import ArgumentError, require


def check_folder(name: str, folder: Path) -> None:
    """Check that a folder exists, or can be created: no file is in its way."""
    there = next(path for path in (folder, *folder.parents) if path.exists())
    require(there.is_dir(), name, f"{there}, a file", "a folder")


@contextmanager
def lock_folder(folder: Path, argument: str, got: str, want: str) -> Iterator[None]:
    """Lock a folder, created if it does not exist, against other processes that lock
    it; the system releases it when this process dies."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(folder / ".lock").acquire(timeout=0)
    except Timeout:
        raise ArgumentError(argument, got, want) from None
    with lock:
        yield


def read_json(path: Path, want: str) -> object:
    """The JSON of a file; an error names the file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        got = f"{type(error).__name__}: {str(error)[:200]}"
        raise ArgumentError(str(path), got, want) from None


def through_json(name: str, value: object) -> object:
    """A copy as JSON would restore it; an error names the argument that JSON cannot write."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (RecursionError, TypeError, ValueError) as error:
        raise ArgumentError(name, str(error), "what JSON can write") from None


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file next to its destination, flush it to disk, and move it into place
    once complete; an error names the file, which a full disk's own does not."""
    # A name of its own, as another process may write the same file.
    draft = path.with_name(f"{path.name}.draft-{uuid.uuid4().hex[:8]}")
    try:
        draft.write_bytes(content)
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        why = error.strerror or str(error)
        raise OSError(error.errno, why, str(path)) from None
    finally:
        draft.unlink(missing_ok=True)


def left_drafts(folder: Path, name: str = "") -> list[Path]:
    """The drafts of `write_atomic` in a folder, of the file of that name or of all:
    where nobody else writes, those of killed processes."""
    form = (re.escape(name) or ".+") + r"\.draft-[0-9a-f]{8}"
    return [x for x in folder.glob("*.draft-*") if re.fullmatch(form, x.name)]
