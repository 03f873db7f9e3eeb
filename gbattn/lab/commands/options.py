"""What the commands share: the rules of their options, errors in the words of a terminal, lines and tables."""

import os
import re
import sys
from contextlib import contextmanager
from pathlib import Path

from gbattn.ground.arguments import (
    COUNT,
    FLAG,
    PATH,
    ArgumentError,
    Rule,
    check,
    instance,
    is_count,
    one_of,
    optional,
    require,
)
from gbattn.ground.files import check_folder
from gbattn.ground.records import results_folder
from gbattn.ground.terminal import printable

# What `gbattn train` takes where it is told nothing: a small model, a short training.
MODEL = dict(
    vocab_size=1024,
    max_length=128,
    d_model=96,
    n_layers=2,
    attention="boosted",
    attention_options={"shift": True},
    positions="rotary",
)


TRAINING = dict(
    steps=2800,
    batch_size=8,
    learning_rate=3e-3,
    evaluate_every=700,
    checkpoint_every=100,
)


def check_options(**arguments: object) -> None:
    """Check arguments of the commands, each by the rule of its name."""
    check(**{name: (x, rule_of(name)) for name, x in arguments.items()})


def rule_of(name: str) -> Rule:
    """Return the rule of an argument of the commands."""
    if name in ("model", "training"):
        from gbattn.language_model import ModelConfig
        from gbattn.training import TrainConfig

        config = {"model": ModelConfig, "training": TrainConfig}[name]
        return instance(config, f"a {config.__name__}")
    return _RULES[name]


def _all(holds, x: object) -> bool:
    return isinstance(x, tuple | list) and all(map(holds, x))


def _are_names(x: object) -> bool:
    return _all(lambda name: isinstance(name, str), x)


_COUNTS = ("samples", "workers", "together", "rounds", "batch_size", "new_tokens", "tokens", "sample")
_FLAGS = ("tensorboard", "capture", "stream", "untrained")
_RULES: dict[str, Rule] = (
    dict.fromkeys(_COUNTS, COUNT)
    | dict.fromkeys(_FLAGS, FLAG)
    | {
        "corpus": instance(str, "a name, or a folder as a string"),
        "stop": (_are_names, "a tuple of strings"),
        "split": optional(one_of("train", "valid", "test")),
        "text": PATH,
        "report": PATH,
        "results": PATH,
        "run": (lambda x: isinstance(x, str) and x != "", "a folder that gbattn train wrote, or the id of a run"),
        "shard": (
            lambda x: _all(is_count, x) and len(x) == 2 and x[0] <= x[1],
            "K/N with K from 1 to N, such as 2/8",
        ),
        "beside": (_are_names, "a tuple of names"),
        "arms": (lambda x: _are_names(x) and 0 < len(x) == len(set(x)), "a tuple of names, each once"),
        "dtype": one_of("float32", "bfloat16"),
    }
)


@contextmanager
def renamed(**names: str):
    """Give arguments of the library, in its errors, the names of ours."""
    try:
        yield
    except ArgumentError as error:
        if error.argument not in names:
            raise
        raise ArgumentError(names[error.argument], error.got, error.want) from None


def check_one_process(command: str, instead: str) -> None:
    """Stop under torchrun and its like, which start a program several times."""
    processes = os.environ.get("WORLD_SIZE") or "1"
    want = f"1, as gbattn {command} is one process; {instead}"
    require(processes == "1", "WORLD_SIZE", processes, want)


def tell(*words: object) -> None:
    """A line on standard error, where progress goes."""
    print(*map(printable, map(str, words)), file=sys.stderr, flush=True)


def many(count: int, what: str) -> str:
    """A count and what is counted, in the plural but for one."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def aligned(table: list[list[str]]) -> list[str]:
    """The lines of a table: its first column is text, the others are numbers."""
    first, *rest = (max(map(len, column)) for column in zip(*table))
    return ["  ".join([f"{name:{first}}", *(f"{x:>{w}}" for x, w in zip(cells, rest))]) for name, *cells in table]


def shown(text: str) -> str:
    """A text without what would command a terminal."""
    return re.sub(r"[^\n\t\x20-\x7e\xa0-\U0010ffff]", "\ufffd", text)


def folder_of_records(results: Path | None) -> Path:
    """Where records are: as asked, else where `results_folder` finds them, else here."""
    if results is None:
        try:
            results = results_folder()
        except ArgumentError:
            results = Path("results")
    check_options(results=results)
    check_folder("results", Path(results))
    return Path(results)
