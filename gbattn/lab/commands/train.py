"""`gbattn train`: a model, its training and a sample."""

import importlib.util
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gbattn.ground.arguments import require
from gbattn.lab.commands.options import check_one_process, check_options, many, renamed, shown, tell
from gbattn.lab.commands.text import RECIPE, is_folder, losses_of, say_losses, text_as_asked
from gbattn.lab.commands.write import continued, room_for, tokens_of

if TYPE_CHECKING:
    from gbattn.corpora import Corpus
    from gbattn.language_model import LanguageModel, ModelConfig
    from gbattn.training import TrainConfig


def _writer(text, config, prompt: str, count: int | None, temperature) -> Callable:
    """A function that lets a model write the sample of `train`, if it can be."""
    why = "that needs tokenizers"
    if importlib.util.find_spec("tokenizers"):
        tokens, why = tokens_of(prompt, text), ""
        if count is None and (count := room_for(config, len(tokens), 80)) < 1:
            why = "the prompt takes all positions"
    if why:
        tell(f"no sample will be written: {why}")

    def write(model: "LanguageModel") -> str | None:
        if why:
            return None
        how = dict(max_new_tokens=count, temperature=temperature)
        with renamed(max_new_tokens="sample_tokens"):
            return continued(model, text, tokens, 1, **how)[0]

    return write


def train_model(
    corpus: str = "python-docs",
    prompt: str = "Return a",
    *,
    folder: Path = Path("gbattn-model"),
    model: "ModelConfig",
    training: "TrainConfig",
    tokenizer: str = "byte-level",
    max_train_tokens: int | None = None,
    cache: Path | None = None,
    temperature: float = 0.6,
    sample_tokens: int | None = None,
    tensorboard: bool = False,
    capture: bool = False,
) -> dict:
    """Train a language model on a text, save it, and let it write.

    Without any option: a small boosted model, on the documentation that comes with
    Python. The folder keeps checkpoints: after an interruption, the same command
    resumes from there, to the same result. It is one process: under torchrun or
    accelerate launch, call gbattn.lab.training.train.

    Parameters
    ----------
    corpus : str
        python-docs, which needs no download; wikitext-103, wikitext-2 or
        openwebtext; a folder with train.txt, valid.txt and test.txt; or a folder
        that gbattn tokenize wrote, whose recipe applies.
    prompt : str
        What the trained model continues at the end, if tokenizers is installed.
    folder : Path
        Where model, tokenizer and checkpoints go. One that holds anything else is
        refused.
    model : gbattn.language_model.ModelConfig
        The model; its ``vocab_size`` is what the tokenizer is asked to reach.
    training : gbattn.training.TrainConfig
        The training.
    tokenizer : {"byte-level", "published"}
        The recipe; that of the published runs loses text.
    max_train_tokens : int, optional
        How many tokens of the training text to keep, from its start.
    cache : Path, optional
        Where tokenized texts are kept; GBATTN_CACHE by default, else
        ~/.cache/gbattn.
    temperature : float
        Of that sample: 0 always takes the most probable token.
    sample_tokens : int, optional
        Length of that sample: by default 80, or as many as learned positions leave.
    tensorboard : bool
        Whether to write TensorBoard's files as well, to ``checkpoints/tensorboard``
        in the folder.
    capture : bool
        On a GPU: replay an update as one CUDA graph, for small models.
    """
    from gbattn.lab.processes import check_precision
    from gbattn.lab.run_folder import RunFolder
    from gbattn.language_model import LanguageModel, parameter_count

    run = RunFolder(folder)
    check_options(tensorboard=tensorboard, capture=capture)
    check_options(model=model, training=training)
    check_precision(training.precision)  # before the text is read
    instead = "under torchrun or accelerate launch, call gbattn.lab.training.train"
    check_one_process("train", instead)
    run.check_free()
    recipe = dict(tokenizer=tokenizer, max_train_tokens=max_train_tokens)
    recipe |= dict(vocab_size=model.vocab_size)
    text = text_as_asked(corpus, cache, **recipe)
    model = replace(model, vocab_size=text.vocab_size)
    learner = LanguageModel(model, seed=training.seed)
    _check_window(learner, training, text)
    write = _writer(text, model, prompt, sample_tokens, temperature)
    write(learner)  # complains before the work
    count = parameter_count(model).total
    _tell_what(text, model, count)
    settings = {
        "corpus": str(Path(corpus).resolve()) if is_folder(corpus) else corpus,
        "recipe": {name: text.manifest["recipe"][name] for name in RECIPE},
        "fingerprint": text.fingerprint,
        "model": model.to_dict(),
        "training": training.to_dict(),
    }
    with run.claim(text, settings), renamed(folder=str(run.checkpoints)):
        if reached := run.step:
            then = "finished" if run.history() else "going on from there"
            tell(f"{folder} holds the run up to step {reached}: {then}")
        options = dict(tensorboard=tensorboard, capture=capture)
        history = run.train(learner, text, training, **options)
    found = {"folder": str(folder), "corpus": text.name, "fingerprint": text.fingerprint, "parameters": count}
    return found | _outcome(text, training, history) | {"sample": write(learner)}


def _outcome(text: "Corpus", training: "TrainConfig", history) -> dict:
    """What a training came to, and what a bigram model of the same text pays."""
    from gbattn.corpora import bigram_loss

    loss = history.best_loss if training.keep == "best" else history.validation_loss[-1]
    bigram = bigram_loss(text.train, text.valid, text.vocab_size)
    return {
        "steps": history.step[-1],
        "best_step": history.best_step,
        "validation": losses_of(text, "valid", loss),
        "bigram": losses_of(text, "valid", bigram),
        "seconds": round(history.seconds[-1], 1),
    }


def _check_window(model: "LanguageModel", training: "TrainConfig", text: "Corpus") -> None:
    from gbattn.training import window_length

    length = window_length(model, training.length)
    window = "max_length" if training.length is None else "length"
    want = f"fewer than the {len(text.train):,} tokens of the training text"
    require(length < len(text.train), window, length, want)


def _tell_what(text: "Corpus", model: "ModelConfig", count: int) -> None:
    tell(
        f"{text.name}: vocabulary size {text.vocab_size:,}, {len(text.train):,} tokens to "
        f"learn from, {len(text.valid):,} to validate\n{model.attention} attention, "
        f"{many(model.n_layers, 'layer')}, width {model.d_model}: {count:,} parameters"
    )


def say_trained(result: dict) -> str:
    """What a terminal shows of the result of `train_model`."""
    more = f"gbattn generate --folder {shlex.quote(result['folder'])}"
    lines = (
        f"validation: {say_losses(result['validation'])}\n"
        f"a bigram model: {say_losses(result['bigram'])}\n"
        f"saved in {result['folder']} after {many(result['steps'], 'step')} and "
        f"{many(round(result['seconds']), 'second')} of updates ({more} writes more)"
    )
    return f"{lines}\n\n{shown(result['sample'])}" if result["sample"] else lines
