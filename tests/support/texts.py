"""Small texts for corpora."""

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
