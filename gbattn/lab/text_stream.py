"""Text while it is generated: whole characters, up to a stop string."""

import codecs
from collections.abc import Callable, Sequence

import torch

from gbattn.corpora import Corpus, as_array
from gbattn.ground.arguments import check, optional, require


class TextStream:
    """Text as it is generated, up to a stop string: for ``stream=`` of
    `gbattn.language_model.LanguageModel.generate`.

    Parameters
    ----------
    corpus : gbattn.corpora.Corpus
        What spells the tokens.
    stop : sequence of str
        A text ends before the first of these that is complete.
    write : callable, optional
        Called with the number of a sequence and its new text, as soon as no further
        token can change it: never with part of a character or of a stop string.

    Notes
    -----
    Source: chapter 14.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        stop: Sequence[str] = (),
        write: Callable[[int, str], object] | None = None,
    ) -> None:
        fits = isinstance(stop, list | tuple) and all(isinstance(one, str) and one for one in stop)
        require(fits, "stop", repr(stop), "a list of strings that are not empty")
        check(write=(write, optional((callable, "a callable"))))
        self.corpus, self.stop, self.write = corpus, tuple(stop), write
        self._decoders, self._texts, self._ended, self._written = [], [], [], []

    def __call__(self, new: torch.Tensor) -> bool:
        """Read the next tokens (B, n); return whether all texts have ended."""
        rows = as_array(new)
        got = f"shape {rows.shape}"
        if not self._texts:
            B = len(rows) if rows.ndim else 0
            decoder = codecs.getincrementaldecoder("utf-8")
            self._decoders = [decoder(errors="replace") for _ in range(B)]
            self._texts, self._ended, self._written = [""] * B, [False] * B, [0] * B
        B = len(self._texts)
        require(rows.ndim == 2 and len(rows) == B, "new", got, f"({B}, n)")
        for b, ids in enumerate(rows):
            words = (self.corpus.vocabulary[i] for i in ids.tolist())
            between = self.corpus.separator  # and before: the text follows a prompt
            self._extend(b, b"".join(between + word for word in words))
        return all(self._ended)

    def _extend(self, b: int, spelled: bytes, final: bool = False) -> None:
        if self._ended[b]:
            return
        text = self._texts[b] + self._decoders[b].decode(spelled, final)
        # The first that is complete ends the text, whatever the tokens; the longest,
        # if two are.
        found = [(at + len(s), at) for s in self.stop if (at := text.find(s)) >= 0]
        self._ended[b] = bool(found)
        text = self._texts[b] = text[: min(found)[1]] if found else text
        # The beginning of a stop string may become one.
        sizes = range(1, max(map(len, self.stop), default=1))
        held = [n for n in sizes if text.endswith(tuple(s[:n] for s in self.stop))]
        held = 0 if final or self._ended[b] else max(held, default=0)
        start, upto = self._written[b], len(text) - held
        if self.write is not None and upto > start:
            self.write(b, text[start:upto])
            self._written[b] = upto

    def finish(self) -> list[str]:
        """Write what was held back, and return the texts, without their prompts."""
        for b in range(len(self._texts)):
            self._extend(b, b"", final=True)
        return list(self._texts)
