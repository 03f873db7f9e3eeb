"""Text that goes to a terminal."""

import re

# But for tab and newline, and with those that reverse a line.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return a text with its control characters escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
