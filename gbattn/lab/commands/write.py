"""`gbattn generate`: what a model writes after a prompt."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gbattn.ground.arguments import require
from gbattn.lab.commands.options import check_options, many, renamed, shown, tell

if TYPE_CHECKING:
    from gbattn.corpora import Corpus
    from gbattn.language_model import ModelConfig


def tokens_of(prompt: str, reader: "Corpus"):
    """The tokens of a prompt, one or more; what the tokenizer loses of it is told."""
    with renamed(text="prompt"):
        tokens = reader.encode(prompt)
    want = "text that makes a token or more"
    require(len(tokens) > 0, "prompt", repr(prompt), want)
    read = reader.decode(tokens)
    if "".join(read.split()) != "".join(prompt.split()):
        tell(f"the tokenizer lost some of the prompt: {shown(read)!r} is left")
    return tokens


def room_for(config: "ModelConfig", read: int, enough: int) -> int:
    """How many tokens a model can write after so many, up to what is enough."""
    learned = config.positions == "learned"
    return min(enough, config.max_length - read) if learned else enough


def continued(model, reader: "Corpus", tokens, samples: int, stop=(), write=None, **how) -> list[str]:
    """What a model writes after the tokens of a prompt, which each text begins with."""
    import torch

    from gbattn.lab.text_stream import TextStream

    text = TextStream(reader, stop=stop, write=write)
    device = next(model.parameters()).device
    rows = torch.tensor(tokens.astype("int64"), device=device).repeat(samples, 1)
    prompt = reader.decode(tokens)
    if write is not None:
        write(0, prompt)
    model.generate(rows, stream=text, **how)
    return [prompt + said for said in text.finish()]


def _tell_piece(_: int, text: str) -> None:
    print(shown(text), end="", file=sys.stderr, flush=True)


def generate_text(
    prompt: str = "Return a",
    *,
    folder: Path = Path("gbattn-model"),
    max_new_tokens: int | None = None,
    temperature: float = 0.6,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: tuple[str, ...] = (),
    samples: int = 1,
    seed: int = 1,
    stream: bool = False,
    device: str | None = None,
) -> dict:
    """Let a trained model continue a text.

    Parameters
    ----------
    prompt : str
        The text to continue; - reads it from standard input.
    folder : Path
        One that gbattn train wrote.
    max_new_tokens : int, optional
        How many tokens are added: by default 100, or as many as learned positions
        leave.
    temperature : float
        Logits are divided by it: less is safer, and 0 always takes the most
        probable token.
    top_k : int, optional
        Draw only from the k most probable tokens.
    top_p : float, optional
        Draw only from the most probable tokens whose share is at least p.
    repetition_penalty : float
        Above 1, what has occurred, in the prompt too, becomes less probable.
    stop : tuple of str
        A text ends before the first of these.
    samples : int
        How many continuations, each with random numbers of its own.
    seed : int
        Of the draws; the same seed gives the same text. The sample that gbattn train
        wrote has seed 0.
    stream : bool
        Show the text on standard error, too, while it is written; one sample only.
    device : str, optional
        cpu or cuda; by default a GPU if there is one.
    """
    from gbattn.lab.run_folder import RunFolder

    check_options(samples=samples, stream=stream, stop=stop)
    require(samples == 1 or not stream, "stream", f"{samples} samples", "one")
    model, reader = RunFolder(folder).open(device)
    if prompt == "-":
        want = "text there, or a prompt"
        require(sys.stdin is not None, "prompt", "a closed standard input", want)
        prompt = sys.stdin.read()
    tokens = tokens_of(prompt, reader)
    if max_new_tokens is None:
        max_new_tokens = room_for(model.config, len(tokens), 100)
        want = f"fewer than max_length = {model.config.max_length}, as positions are learned"
        require(max_new_tokens > 0, "prompt", many(len(tokens), "token"), want)
    how = dict(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    how |= dict(top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty)
    how |= dict(stop=stop, write=_tell_piece if stream else None)
    texts = continued(model, reader, tokens, samples, **how)
    if stream:
        tell()
    return {"folder": str(folder), "prompt": prompt, "seed": seed, "texts": texts}


def say_generated(result: dict) -> str:
    """What a terminal shows of the result of `generate_text`."""
    return "\n\n---\n\n".join(map(shown, result["texts"]))
