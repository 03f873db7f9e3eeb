"""A folder for one run: its settings, its tokenizer, its checkpoints and, in the end, its model."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from gbattn.corpora import Corpus, check_recipe
from gbattn.ground.arguments import COUNT, PATH, STRING, ArgumentError, check, check_entries, optional, require
from gbattn.ground.files import check_folder, left_drafts, lock_folder, read_json, write_atomic
from gbattn.lab.checkpoints import checkpoints, put_back, tensors_of
from gbattn.lab.processes import check_device
from gbattn.lab.token_cache import MANIFEST, TokenizerFile, read_manifest
from gbattn.lab.training import train
from gbattn.language_model import LanguageModel, ModelConfig
from gbattn.training import History, TrainConfig, unwrapped

_RUN, _RUN_FORMAT = "run.json", "gbattn run 1"
_RECIPE = {"tokenizer", "max_train_tokens", "vocab_size"}
_RUN_ENTRIES = {
    "corpus": STRING,
    "fingerprint": STRING,
    "recipe": (lambda x: isinstance(x, dict) and x.keys() == _RECIPE, "a recipe"),
    "recipe.max_train_tokens": optional(COUNT),
}


class RunFolder:
    """A folder that holds one training run.

    Parameters
    ----------
    folder : str or Path
        The folder, which need not exist. Its path is the attribute ``path``; the
        path of its checkpoints is ``checkpoints``.

    Notes
    -----
    It holds ``run.json`` (corpus, recipe, fingerprint, model and training), the
    tokenizer (``corpus.json``, ``tokenizer.json``), checkpoints and, of a finished
    run, the model and ``history.json``. Source: chapter 15.
    """

    def __init__(self, folder: str | Path):
        check(folder=(folder, PATH))
        self.path = Path(folder)
        self.checkpoints = self.path / "checkpoints"

    @property
    def has_model(self) -> bool:
        """Whether a run has finished here and its model was saved."""
        return (self.path / "model.safetensors").is_file()

    @property
    def step(self) -> int:
        """The number of saved updates, of the newest checkpoint, else of a finished run."""
        if found := checkpoints(self.checkpoints):
            return max(found)
        history = self.history()
        return history.step[-1] if history else 0

    def check_free(self) -> None:
        """Check that the folder holds nothing but a run."""
        check_folder("folder", self.path)
        files = {file.name for file in self.path.glob("*")}
        free = {".lock"} | {draft.name for draft in left_drafts(self.path)}
        foreign = sorted(files - free)[:3] if _RUN not in files else []
        got = f"{self.path}, which holds {', '.join(foreign)} and no {_RUN}"
        want = "a new or empty folder, or one that gbattn train made"
        require(not foreign, "folder", got, want)

    def read(self) -> dict:
        """Corpus, recipe, fingerprint, model and training of the run."""
        path, want = self.path / _RUN, "a folder that gbattn train made"
        require(path.is_file(), "folder", f"{self.path} without {_RUN}", want)
        found = read_json(path, want)
        known = isinstance(found, dict) and found.get("format") == _RUN_FORMAT
        require(known, str(path), "the file of another program or version", want)
        cure = "what gbattn train wrote: copy it again, or train into another folder"
        with _undamaged(path, "a file", cure):
            check_entries(_RUN, found, _RUN_ENTRIES, cure)
            recipe = found["recipe"]
            check_recipe("tokenizer", recipe["tokenizer"], recipe["vocab_size"])
            TrainConfig(**found["training"])
            ModelConfig.from_dict(found["model"])
        return found

    def history(self) -> History | None:
        """The history of a finished run whose model was saved, else None."""
        path = self.path / "history.json"
        if not path.is_file():
            return None
        cure = "what gbattn train wrote: copy or delete it"
        found = read_json(path, cure)
        with _undamaged(path, "a history", cure):  # JSON has no infinite norms
            norms = [math.inf if x is None else x for x in found["gradient_norm"]]
            history = History.from_dict(found | {"gradient_norm": norms})
        return history if history.finished and self.has_model else None

    @contextmanager
    def claim(self, corpus: Corpus, settings: dict) -> Iterator[None]:
        """Hold the folder for a run of these settings, and write them and the
        tokenizer; refuse other settings than those of a checkpoint or model here."""
        # The path in full, as a folder may be called like an argument.
        busy = str(self.path.resolve()), "another gbattn train at work"
        with lock_folder(self.path, *busy, "another folder, or patience"):
            for draft in left_drafts(self.path):
                draft.unlink()
            if (self.path / _RUN).is_file():
                there, here = _flat(self.read()), _flat(settings)
                free = {"format", "corpus", "training.checkpoint_every"}
                names = (there | here).keys() - free
                names = sorted(n for n in names if there.get(n) != here.get(n))
                got, want = (", ".join(f"{name} = {found.get(name)}" for name in names) for found in (here, there))
                want += f", to go on with the run in {self.path}; or another folder"
                unused = not checkpoints(self.checkpoints) and not self.has_model
                require(unused or not names, "folder", got, want)
            self._write(_RUN, {"format": _RUN_FORMAT} | settings)
            # Byte for byte, as the one holds the checksum of the other.
            for file in (corpus.manifest["tokenizer"]["file"], MANIFEST):
                content = (corpus.folder / file).read_bytes()
                write_atomic(self.path / file, content)
            yield

    def train(
        self,
        model: LanguageModel,
        corpus: Corpus,
        config: TrainConfig,
        *,
        tensorboard: bool = False,
        capture: bool = False,
    ) -> History:
        """Train a model from the newest checkpoint on, and save it; if the run has
        finished and its checkpoints are gone, load the saved weights instead. The
        error for an interruption or a full disk says what is saved."""
        done = self.history()
        if done and not checkpoints(self.checkpoints):
            saved = LanguageModel.from_pretrained(self.path)
            put_back(unwrapped(model)[1], tensors_of(saved))
            return done
        options = dict(tensorboard=tensorboard, capture=capture)
        options["folder"] = self.checkpoints
        try:
            history = train(model, corpus, config, **options)
        except KeyboardInterrupt as stop:
            raise type(stop)(self._saved()) from None
        norms = [x if math.isfinite(x) else None for x in history.gradient_norm]
        found = history.to_dict() | {"gradient_norm": norms}
        try:
            unwrapped(model)[1].save_pretrained(self.path)
            self._write("history.json", found)
        except OSError as error:
            raise OSError(f"{error}; {self._saved()}") from None
        return history

    def open(self, device: str | None = None) -> tuple[LanguageModel, Corpus]:
        """The model of a finished run, by default on a GPU if there is one, and the
        corpus of its training without the tokens, to encode and decode."""
        self.read()
        want = "a finished one: the same gbattn train once more goes on with it"
        got = f"{self.path}, a run that was stopped"
        require(self.has_model, "folder", got, want)
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        check_device(device)
        model = LanguageModel.from_pretrained(self.path, device=device)
        return model, self._tokenizer()

    def _tokenizer(self) -> Corpus:
        path = self.path / MANIFEST
        cure = "what gbattn train wrote; the same command once more writes it again"
        require(path.is_file(), str(path), "no such file", cure)
        manifest = read_manifest(path, cure)
        none = np.empty(0, manifest["splits"]["train"]["dtype"])
        return Corpus(self.path, manifest, TokenizerFile(self.path, manifest), none, none, none)

    def _saved(self) -> str:
        step = max(checkpoints(self.checkpoints), default=0)
        said = f"step {step} is kept in {self.path}; the same command goes on from there"
        return said if step else "nothing is kept yet"

    def _write(self, name: str, content: dict) -> None:
        text = json.dumps(content, indent=1) + "\n"
        write_atomic(self.path / name, text.encode())


@contextmanager
def _undamaged(path: Path, what: str, cure: str) -> Iterator[None]:
    """Name the file in what is wrong with its entries."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArgumentError(str(path), f"{what} that is damaged ({error})", cure) from None


def _flat(settings: dict) -> dict:
    """Each setting under one name, as JSON has it."""
    found = {}
    for name, value in settings.items():
        parts = value.items() if isinstance(value, dict) else [(None, value)]
        found |= {f"{name}.{k}" if k else name: json.dumps(v) for k, v in parts}
    return found
