"""Text that goes to a terminal."""

import re
from collections.abc import Iterable

# But for tab and newline, and with those that reverse a line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text with its control characters escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def with_progress(steps: Iterable, progress: bool, what: str) -> Iterable:
    """The steps, with a progress bar labelled with what they are, if tqdm is
    installed."""
    if not progress:
        return steps
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return steps
    return tqdm(steps, desc=what)


def describe_error(error: Exception) -> str:
    """Return an error's message on one line: in full for a ValueError, else its first
    line, cut to 300 characters, since a compiler's can have a thousand."""
    message = str(error).strip()
    if not isinstance(error, ValueError):
        line = message.partition("\n")[0]
        message = line if len(line) <= 300 else f"{line[:299]}…"
    return printable(" ".join(message.split())) or type(error).__name__
