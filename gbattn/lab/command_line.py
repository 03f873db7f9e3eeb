"""The program `gbattn`: words of a terminal become arguments of a command, a failure becomes a line and a number.

The options of model and training are the fields of their dataclasses, and what those refuse, the program refuses.
Nothing that is slow to load is loaded before it is needed.
"""

import ast
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
import threading
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from gbattn.ground.arguments import ArgumentError
from gbattn.ground.terminal import describe_error, printable
from gbattn.lab.commands import COMMANDS
from gbattn.lab.commands.options import MODEL, TRAINING
from gbattn.lab.commands.text import carried_recipe


class Option(NamedTuple):
    """An option of a command: its ``name`` in Python, ``type``, ``default`` (the
    constant ``dataclasses.MISSING`` if there is none), what it is for (``help``),
    whose it is (``owner``: the command's, or that of the dataclass ``ModelConfig``
    or ``TrainConfig``), and whether it is a ``word`` that needs no dashes."""

    name: str
    type: object
    default: object
    help: str
    owner: str = ""
    word: bool = False

    @property
    def typed(self) -> str:
        """The name as typed in a terminal, ``--like-this``, or ``THIS`` for a word."""
        return self.name.upper() if self.word else _dashed(self.name)


def _dashed(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _help_of(docstring: str) -> dict[str, str]:
    """What a numpydoc docstring says of each parameter, with its choices."""
    from docstring_parser import parse

    found = {}
    for entry in parse(docstring).params:
        text = re.sub(r"`+|\*(?=\w)", "", " ".join(entry.description.split()))
        choices = re.findall('"(.+?)"', entry.type_name)
        text += f" One of {', '.join(choices)}." if choices else ""
        found |= dict.fromkeys(entry.arg_name.split(", "), text)
    return found


_CONFIGS = {
    "ModelConfig": ("gbattn.language_model", MODEL),
    "TrainConfig": ("gbattn.training", TRAINING),
}
# Where the docstring of a dataclass sends its reader elsewhere, or has less.
PLAINER_HELP = {
    "vocab_size": "Vocabulary size that the tokenizer is to reach, and the model has; "
    "of a folder that gbattn tokenize wrote, what it reached.",
    "d_model": "Width of the residual stream.",
    "n_layers": "Blocks.",
    "n_heads": "Heads of each attention.",
    "norm": "Where a sublayer is normalised: pre, post or none.",
    "normalizer": "By what: layernorm, rmsnorm, dyt or derf.",
    "attention": "A registered name: multi_head, linear (with --positions learned), "
    "twicing or boosted; others with --imports.",
    "ffn": "The feed-forward sublayer: gelu, swiglu, relu or none.",
    "attention_options": "What that layer takes besides, as JSON, such as "
    "'{\"rounds\": 3}': rounds, kv_from, gate, dropout and so on.",
    "overrides": "What differs in a layer, by its number from 0, as JSON, such as "
    '\'{"0": {"attention": "multi_head"}}\'.',
    "seed": "Of the initial weights, of the order of the text, and of dropout.",
}


def _config(name: str) -> type:
    return getattr(importlib.import_module(_CONFIGS[name][0]), name)


def _declared(name: str) -> type:
    """A dataclass with the fields and the docstring of a config, from its source:
    importing it would load torch."""
    path = importlib.util.find_spec(_CONFIGS[name][0]).origin
    tree = ast.parse(Path(path).read_text("utf-8"))
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    found = next(node for node in classes if node.name == name)
    # Without what it does or inherits, which has no fields.
    found.bases = []
    found.body = [x for x in found.body if isinstance(x, ast.Expr | ast.AnnAssign)]
    scope = {"dataclass": dataclass, "field": field}
    exec(compile(ast.Module([found], []), path, "exec"), scope)
    return scope[name]


def _fields_of(name: str) -> list[Option]:
    """The fields of a dataclass, with the defaults that they have here."""
    config = _declared(name)
    help_of = _help_of(config.__doc__) | PLAINER_HELP
    found = []
    for entry in fields(config):
        factory, default = entry.default_factory, entry.default
        default = default if factory is MISSING else factory()
        default = _CONFIGS[name][1].get(entry.name, default)
        option = (entry.name, entry.type, default, help_of[entry.name], name)
        found.append(Option(*option))
    return found


def options(command: str) -> list[Option]:
    """Return the options of a command, those of its dataclasses included.

    Parameters
    ----------
    command : str
        A name in `gbattn.lab.commands.COMMANDS`.

    Notes
    -----
    Source: the appendix on the command line.
    """
    if not (isinstance(command, str) and command in COMMANDS):
        raise ArgumentError("command", repr(command), f"one of {', '.join(COMMANDS)}")
    function, _, instead = COMMANDS[command]
    help_of, found = _help_of(function.__doc__), []
    for name, p in inspect.signature(function).parameters.items():
        if p.annotation in _CONFIGS:
            found += [o for o in _fields_of(p.annotation) if o.name not in instead]
            continue
        default = MISSING if p.default is p.empty else p.default
        word = p.kind is p.POSITIONAL_OR_KEYWORD
        found.append(Option(name, p.annotation, default, help_of[name], word=word))
    return found


class _UsageError(ValueError):
    """A word or an option that is at fault."""


def _path(word: str) -> Path | None:
    if not word:  # Path("") would be this folder
        raise ValueError("want a path, such as . for this folder")
    # A shell leaves the ~ of --folder=~/x alone.
    return None if word == "None" else Path(word).expanduser()


def _json(word: str) -> dict | None:
    return None if word == "None" else json.loads(word)


def _share(word: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+/\d+", word, re.ASCII):
        raise ValueError("want K/N, such as 2/8")
    k, n = word.split("/")
    return int(k), int(n)


_SPELLINGS = {  # how one word stands for a value, and back
    dict: ("JSON", json.loads, json.dumps),
    dict | None: ("{None}|JSON", _json, lambda x: json.dumps(x) if x else str(x)),
    tuple[int, int]: ("K/N", _share, lambda pair: "{}/{}".format(*pair)),
    Path: ("PATH", _path, str),
    Path | None: ("{None}|PATH", _path, str),
}


def _spelled(kind: object) -> object:
    """The type as tyro reads it from a word."""
    from tyro.constructors import PrimitiveConstructorSpec

    if kind not in _SPELLINGS:
        return kind
    metavar, read, write = _SPELLINGS[kind]
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [write(value)],
    )
    return Annotated[kind, spec]


_COMMON = {
    "json": "Write the result to standard output as one JSON object.",
    "imports": "A module to import first, here or installed, for the attention layers "
    "that it registers; several with commas between.",
}
_JSON = Option("json", bool, False, _COMMON["json"])
_IMPORTS = Option("imports", str, "", _COMMON["imports"])


def _import(modules: str) -> None:
    """Import modules by their names, those in this folder, too."""
    if modules and os.getcwd() not in sys.path:
        # Last, so that a file here takes the place of no module of a package.
        sys.path.append(os.getcwd())
    for name in filter(None, modules.split(",")):
        got = f"--imports: got {name!r}; want a module in this folder or installed"
        if not all(map(str.isidentifier, name.split("."))):
            raise _UsageError(got)
        try:
            found = getattr(importlib.import_module(name), "__file__", None)
        except ModuleNotFoundError as error:
            if not f"{name}.".startswith(f"{error.name}."):
                raise
            raise _UsageError(got) from None
        here = Path(*name.split(".")).with_suffix(".py")
        if here.is_file() and not (found and here.samefile(found)):
            raise _UsageError(f"{got}, and {here} here has the name of one of those")


def arguments_of(command: str, words: Sequence[str]) -> dict:
    """Return the keyword arguments that these words spell, and whether to write JSON."""
    import tyro
    from tyro.conf import FlagCreatePairsOff, OmitArgPrefixes, Positional, arg

    (function, _, instead), groups = COMMANDS[command], {}
    for option in [*options(command), _IMPORTS, _JSON]:
        marks = [arg(help=option.help, metavar=_metavar(option))]
        # A word that is typed as an option is one.
        marks += [Positional] * (option.word and not _is_typed(option.name, words))
        marks += [FlagCreatePairsOff] * (option is _JSON)
        kind = Annotated[(_spelled(option.type), *marks)]
        default = field(default_factory=lambda value=option.default: value)
        default = field() if option.default is MISSING else default
        groups.setdefault(option.owner, []).append((option.name, kind, default))
    entries = groups.pop("")
    for owner, inner in groups.items():
        group = make_dataclass(owner, inner, kw_only=True)
        group.__doc__ = f"The fields of gbattn's {owner}."
        default = field(default_factory=group)
        entries.append((owner, OmitArgPrefixes[group], default))
    stand_in = make_dataclass(command, entries, kw_only=True)
    about = inspect.getdoc(function).partition("\nParameters\n")[0]
    # tyro joins the lines that are not indented, and doubles the empty ones.
    parts = about.replace("`", "").split("\n\n")
    about = (f"  {line}" for part in parts for line in textwrap.wrap(part, 77))
    how = dict(prog=f"gbattn {command}", description="\n".join(about))
    chosen = vars(tyro.cli(stand_in, args=list(words), **how))
    _import(chosen.pop("imports"))
    for name, p in inspect.signature(function).parameters.items():
        if p.annotation in _CONFIGS:
            values = vars(chosen.pop(p.annotation))
            values |= {entry: chosen[own][0] for entry, own in instead.items()}
            chosen[name] = _configured(p.annotation, values, words)
    return chosen | _carried(chosen, words)


def _is_typed(name: str, words: Sequence[str]) -> bool:
    """Whether an option is among the words, whatever its value."""
    return _dashed(name) in (word.split("=")[0].replace("_", "-") for word in words)


def _metavar(option: Option) -> str | None:
    """How the help shows the value of a word; brackets say that it may be left out."""
    if not option.word:
        return None
    shown = option.typed + " ..." * isinstance(option.default, tuple)
    return shown if option.default is MISSING else f"[{shown}]"


def _configured(name: str, values: dict, words: Sequence[str]):
    """A config of these values. What it refuses is a usage error, which names the
    option that holds the field: the dropout of --attention-options is not --dropout."""

    def refusal(**other) -> ArgumentError | None:
        try:
            _config(name)(**values | other)
        except ArgumentError as error:
            return error
        return None

    if values.get("epochs") is not None and not _is_typed("steps", words):
        values["steps"] = None
    if not (error := refusal()):
        return _config(name)(**values)
    key = f'"{error.argument}":'
    for option in ("attention_options", "overrides"):
        inside = key in json.dumps(values.get(option))
        if inside and str(refusal(**{option: {}})) != str(error):
            raise _UsageError(f"{_dashed(option)}, {error}")
    raise error


def _carried(chosen: dict, words: Sequence[str]) -> dict:
    """The recipe of a text that was tokenized before, in place of options that were
    not typed."""
    if "tokenizer" not in chosen:
        return {}
    recipe = carried_recipe(chosen["corpus"])
    recipe = {n: x for n, x in recipe.items() if not _is_typed(n, words)}
    if "model" in chosen and "vocab_size" in recipe:
        size = recipe.pop("vocab_size")
        recipe["model"] = replace(chosen["model"], vocab_size=size)
    return recipe


def _as_typed(command: str, words: Sequence[str], error: ValueError) -> ValueError:
    """The same error with options as they are typed; a usage error if it is about
    options only."""
    if not isinstance(error, ArgumentError):
        return error
    typed = {
        option.name: option.typed if not _is_typed(option.name, words)
        else _dashed(option.name)
        for option in options(command)
    }  # fmt: skip
    typed |= {name: typed[own] for name, own in COMMANDS[command].instead.items()}
    names = error.argument.split(", ")
    if not all(name in typed for name in names):
        return error
    argument = ", ".join(typed[name] for name in names)
    return _UsageError(ArgumentError(argument, error.got, error.want))


_OVERVIEW = """usage: gbattn COMMAND [words and options]

Attention as regression, boosting inside a layer.

{}

gbattn COMMAND --help lists the options of a command. A word may be typed as
an option, too: generate "A list" or generate --prompt "A list". All take
--json, and --imports MODULE for attention layers of your own.
Exit codes: 0 done, 1 failed, 2 a word or an option is at fault (which and
why is on standard error), 130 stopped by Ctrl-C, 143 by SIGTERM. gbattn
--version says which version this is."""


def _result(command: str, words: Sequence[str]) -> str:
    """What a command writes to standard output."""
    try:
        chosen = arguments_of(command, words)
        as_json = chosen.pop("json")
        result = COMMANDS[command].function(**chosen)
    except ValueError as error:
        raise _as_typed(command, words, error) from None
    if as_json:
        return json.dumps(_plain(result))
    return printable(COMMANDS[command].say(result))


def _act(words: list[str]) -> int:
    command, *rest = words or ["--help"]
    if command in ("-h", "--help", "help"):
        lines = (f"  {name:10}{inspect.getdoc(one.function).splitlines()[0]}" for name, one in COMMANDS.items())
        written = _OVERVIEW.format("\n".join(lines))
    elif command == "--version":
        from gbattn import __version__

        written = f"gbattn {__version__}"
    elif command in COMMANDS:
        written = _result(command, rest)
    else:
        known = ", ".join(COMMANDS)
        print(f"gbattn: no command {command!r}; there are {known}", file=sys.stderr)
        return 2
    print(written, flush=True)
    return 0


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does, with an exit code of its own."""


@contextmanager
def _heeding_sigterm():
    """Let SIGTERM end a command as Ctrl-C does, unless our caller handles it."""

    def end(*_):
        raise _Terminated

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _plain(value: object) -> object:
    """The value as JSON can hold it, which has no infinities."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def main(words: Sequence[str] | None = None) -> int:
    """Run a command line.

    Parameters
    ----------
    words : sequence of str, optional
        Such as ``["generate", "A list is"]``; by default those after the name of
        the program.

    Returns
    -------
    int
        The exit code: 0 done, 1 failed, 2 a word or an option is at fault, 130
        stopped by Ctrl-C, 143 by SIGTERM. Standard error says which and why.

    Notes
    -----
    Results go to standard output, all else to standard error: an error that is not
    ours as one line, or in full with ``GBATTN_DEBUG`` set. Source: the appendix on
    the command line.
    """
    words = sys.argv[1:] if words is None else words
    good = isinstance(words, Sequence) and not isinstance(words, str)
    if not (good and all(isinstance(word, str) for word in words)):
        raise ArgumentError("words", repr(words), "a sequence of strings")
    about = " ".join(["gbattn", *words[:1]])
    for name in ("stdout", "stderr"):  # which a shell may have closed
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    if hasattr(sys.stdout, "reconfigure"):  # ? for what its encoding lacks
        sys.stdout.reconfigure(errors="replace")
    try:
        with _heeding_sigterm():
            return _act(list(words))
    except SystemExit as end:  # tyro has said why
        return end.code
    except BrokenPipeError:  # whoever read standard output has gone, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as stop:
        code = 143 if isinstance(stop, _Terminated) else 130
        why = f"\n{about}: stopped; {stop}".rstrip("; ")
    except ModuleNotFoundError as error:
        cure = "pip install 'gbattn[cli] @ git+https://github.com/gbattn/gbattn'"
        code, why = 1, f"{about}: needs {error.name}: {cure}"
    except _UsageError as error:
        why = f"{about}: {' '.join(str(error).split())} (see {about} --help)"
        code = 2
    except (
        ValueError,
        OSError,
        ArithmeticError,
        MemoryError,
        RuntimeError,
    ) as error:
        if os.environ.get("GBATTN_DEBUG"):
            raise
        code, why = 1, f"{about}: {describe_error(error)}"
    print(why, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
