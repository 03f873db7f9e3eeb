"""The training loop: from the newest checkpoint, or from the beginning, to the end."""

import itertools
import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from gbattn.corpora import Batch, TokenStream, as_array, sequential_windows
from gbattn.ground.arguments import FLAG, PATH, check, instance, optional, require
from gbattn.ground.files import check_folder, lock_folder
from gbattn.ground.packages import check_packages
from gbattn.ground.terminal import printable
from gbattn.lab.checkpoints import (
    StoredRun,
    identity_of,
    last_good,
    note_what_is_left,
    put_back,
    resume,
    save_checkpoint,
    tensors_of,
)
from gbattn.lab.cuda_graph import Graph
from gbattn.lab.processes import accelerator_of, float32_products, placed
from gbattn.training import (
    History,
    RateGroup,
    Run,
    SummedLoss,
    TrainConfig,
    backward,
    check_documents,
    check_finite,
    check_summed,
    decay_groups,
    learning_rate,
    parts_of,
    read_losses,
    split_groups,
    summed_loss,
    unwrapped,
    update,
    window_length,
    with_documents,
)


def start_run(
    model: nn.Module,
    corpus,
    config: TrainConfig,
    folder: Path | None = None,
    rates: Iterable[RateGroup] = (),
    capture: bool = False,
) -> StoredRun:
    """A run before its first update: model, optimiser and text on what accelerate finds."""
    called, model = unwrapped(model)
    length, rates = window_length(model, config.length), tuple(rates)
    stream = TokenStream(corpus.train, length, config.batch_size, config.seed)
    steps, accelerator = config.total_steps(stream), accelerator_of(config.precision)
    _check_fit(model, corpus, config, stream, steps, accelerator.num_processes)
    graph = Graph(config, accelerator) if capture else None
    sharded, own = accelerator.is_fsdp2, placed(model, accelerator)
    groups = decay_groups(own, config.weight_decay, config.decay)
    learning = [p for group in groups for p in group["params"]]
    groups = split_groups(own, groups, rates)
    for group in groups if capture else ():
        group["lr"] = torch.zeros((), device=accelerator.device)
    fused = accelerator.device.type in ("cpu", "cuda")
    optimizer = torch.optim.AdamW(groups, betas=config.betas, fused=fused, capturable=capture)
    summed = SummedLoss(own if sharded else called)
    module, optimizer = accelerator.prepare(summed, optimizer)
    scored = module if sharded else called
    if config.compile:
        torch.compiler.reset()  # what a run compiles depends on no run before
        module = torch.compile(module, dynamic=False)
    return StoredRun(
        model=own,
        module=module,
        learning=learning,
        optimizer=optimizer,
        accelerator=accelerator,
        config=config,
        stream=stream,
        steps=steps,
        rates=rates,
        graph=graph,
        whole=model,
        scored=scored,
        corpus=corpus,
        folder=folder,
        identity=identity_of(model, corpus, config, accelerator, rates, folder),
    )


def _check_fit(model, corpus, config: TrainConfig, stream: TokenStream, steps: int, processes: int) -> None:
    """What no argument shows alone: that model, text, batch and processes fit."""
    learning_rate(config, 0, steps)
    size, parts = config.batch_size, processes * config.accumulation
    got = f"{size} for {processes} processes"
    want = "a multiple of processes times accumulation"
    require(size % parts == 0, "batch_size", got, want)
    check_documents(model, config.document_end)
    n_valid = len(corpus.valid)
    require(n_valid > 1, "corpus", f"{n_valid} tokens of valid", "2 or more")
    owners = getattr(model, "config", None), corpus
    has, needs = (getattr(owner, "vocab_size", None) for owner in owners)
    if needs is None:  # of arrays
        arrays = stream.tokens, as_array(corpus.valid)
        needs = 1 + max(int(array.max()) for array in arrays)
    fits, want = has is None or has >= needs, f"the {needs} of the corpus, or more"
    require(fits, "model", f"a vocabulary of {has}", want)


def _in_step(windows: Iterator[Batch], process: int, processes: int) -> Iterator[Batch]:
    """What one of several processes evaluates of these windows. All evaluate as often,
    as those that share the weights must: one that has none left scores nothing."""
    while group := list(itertools.islice(windows, processes)):
        targets = torch.full_like(group[0].targets, -100)
        nothing = group[0]._replace(targets=targets)
        yield group[process] if process < len(group) else nothing


def log_point(run: Run) -> None:
    """Make the updates since the last point into a point of the learning curve."""
    losses, norms = zip(*run.unlogged)
    history = run.history
    history.step.append(run.step)
    history.loss.append(math.fsum(losses) / len(losses))
    history.gradient_norm.append(math.fsum(norms) / len(norms))
    history.learning_rate.append(learning_rate(run.config, run.step - 1, run.steps))
    history.tokens.append(run.step * run.config.batch_size * run.stream.length)
    history.seconds.append(run.seconds)
    run.unlogged = []


def _validate(run: StoredRun) -> None:
    """Evaluate the validation split."""
    from accelerate.utils import gather_object

    size = run.config.evaluate_batch_size
    windows = sequential_windows(run.corpus.valid, run.stream.length, batch_size=size)
    windows = (with_documents(x, run.config.document_end) for x in windows)
    share = _in_step(windows, run.process, run.processes)
    nats, n_tokens = map(sum, zip(*gather_object([summed_loss(run.scored, share)])))
    note_validation(run, nats / n_tokens, tensors_of(run.model))


def note_validation(run: Run, loss: float, weights: dict[str, torch.Tensor]) -> None:
    """Note a validation loss; copy the weights, which go by name, if they are the best."""
    history = run.history
    check_finite(run, "validation loss", loss, run.step - 1, "after")
    history.validation_step.append(run.step)
    history.validation_loss.append(loss)
    if history.best_loss is None or loss < history.best_loss:
        history.best_step, history.best_loss = run.step, loss
        if run.config.keep == "best":
            run.best = {name: x.clone() for name, x in weights.items()}


@contextmanager
def display(run: StoredRun, progress: bool, tensorboard: bool) -> Iterator[Callable]:
    """A function that shows scalars of the run's step on a progress bar and in
    TensorBoard's files, or in neither."""
    main, texts = run.accelerator.is_main_process, {}
    with ExitStack() as stack:
        if progress and main:
            from tqdm import tqdm

            # In 80 columns there is room for a bar only without what tqdm adds.
            form = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
            options = dict(initial=run.step, total=run.steps, bar_format=form)
            bar = stack.enter_context(tqdm(**options))
        if tensorboard and main:
            from torch.utils.tensorboard import SummaryWriter

            place, first = str(run.folder / "tensorboard"), run.step + 1
            writer = stack.enter_context(SummaryWriter(place, purge_step=first))

        def show(scalars: dict[str, float], **of_bar: str) -> None:
            texts.update(of_bar)
            if progress and main:
                bar.set_postfix_str(", ".join(texts.values()), refresh=False)
                bar.update(run.step - bar.n)
            for name, x in scalars.items() if tensorboard and main else ():
                writer.add_scalar(name, x, run.step)

        yield show


def show_point(show: Callable, history: History) -> None:
    """Show the newest point of the learning curve."""
    tokens, seconds = ([0, *x][-2:] for x in (history.tokens, history.seconds))
    speed = (tokens[1] - tokens[0]) / max(seconds[1] - seconds[0], 1e-9)
    loss = history.loss[-1]
    scalars = {"loss/training": loss, "tokens per second": speed}
    scalars |= {"gradient norm": history.gradient_norm[-1]}
    scalars |= {"learning rate": history.learning_rate[-1]}
    show(scalars, loss=f"loss {loss:.3f}", speed=f"{speed:,.0f} tokens/s")


def evaluation_due(run: Run) -> bool:
    """Whether the validation split is evaluated now."""
    if run.step == run.steps:
        return True
    if run.config.evaluate_every is not None:
        return run.step % run.config.evaluate_every == 0
    size, windows = run.config.batch_size, run.stream.n_windows
    return run.step * size // windows > (run.step - 1) * size // windows


def _checkpoint_due(run: StoredRun) -> bool:
    """Whether a checkpoint is due, besides those at evaluations."""
    every = run.config.checkpoint_every
    return every is not None and run.step % every == 0


@contextmanager
def _after_an_update(run: StoredRun) -> Iterator[None]:
    """Note Ctrl-C and SIGTERM for the end of an update, where a checkpoint can be
    written; the second acts at once. Several processes would stop at different
    steps."""

    def note(number, frame):
        run.stopped = number
        restore()

    def restore():
        for number, handler in handlers.items():
            signal.signal(number, handler)

    main = threading.current_thread() is threading.main_thread()
    possible = main and run.folder is not None and run.processes == 1
    found = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    ignored = (None, signal.SIG_IGN)
    handlers = {n: h for n, h in found.items() if possible and h not in ignored}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        restore()


def _stop(run: StoredRun) -> None:
    """Hand on the signal, which ends the run unless whoever handles it returns."""
    number, run.stopped = run.stopped, None
    message = f"stopped after step {run.step}; {last_good(run.folder)}"
    message += ", and the same call continues from there"
    handler = signal.getsignal(number)
    if handler is signal.default_int_handler:
        raise KeyboardInterrupt(message)
    if handler is not signal.SIG_DFL:
        return signal.raise_signal(number)
    print(printable(message), file=sys.stderr)  # Python prints nothing for an exit
    raise SystemExit(128 + number)


def _compile(run: StoredRun) -> None:
    """Let torch compile both passes, which counts in no clock."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        parts, scored = parts_of(run, run.step)
        backward(run, parts[-1], scored)
    except TorchDynamoException as error:  # with all of the compiler's output
        first = (str(error).splitlines() or [type(error).__name__])[0][:200]
        cure = "compile=False trains without it"
        raise RuntimeError(f"torch.compile failed: {first}; {cure}") from error


_CORPUS = (
    lambda x: hasattr(x, "train") and hasattr(x, "valid"),
    "a Corpus, or anything with tokens as train and valid",
)


def train(
    model: nn.Module,
    corpus,
    config: TrainConfig,
    *,
    folder: str | Path | None = None,
    progress: bool = True,
    tensorboard: bool = False,
    rates: Iterable[RateGroup] = (),
    capture: bool = False,
) -> History:
    """Train a model on a text, on what accelerate finds: a CPU, a GPU, or several
    processes under ``torchrun``, each with a copy of the weights or a shard of them.

    Parameters
    ----------
    model : torch.nn.Module
        Called as ``model(inputs, targets, reduction="sum")``, token ids (B, T)
        each, for the summed loss in nats. If its ``forward`` names no ``reduction``,
        then as ``model(inputs, targets)`` if it names ``targets``, and as
        ``model(inputs)`` if it does not, or names ``labels`` as Hugging Face's models
        do; it must return logits (B, T, V), alone, in a tuple or as ``.logits``. It
        is trained in place, moved to accelerate's device, and left in evaluation mode
        with the weights that ``config.keep`` names. Around it may be what
        ``torch.compile`` or ``DataParallel`` returns: names and checkpoints are those
        of the model itself.
    corpus : gbattn.corpora.Corpus
        Or anything with token ids of shape (n,) as ``train`` and ``valid``.
    config : gbattn.training.TrainConfig
        All settings.
    folder : str or Path, optional
        Where checkpoints go, one folder each; the newest and the best are kept. If
        it holds one of the same run, the run continues from there and, where the
        arithmetic repeats its bits (one CPU, one release of torch, equally many
        threads), ends in the same bits as if it had never stopped. The same run must
        also begin with the same weights: pass the model as it was built, or as a run
        in this folder left it; a model of another seed needs another folder.
    progress : bool
        Whether to draw a progress bar on standard error.
    tensorboard : bool
        Whether to write TensorBoard's files to ``folder/tensorboard``.
    rates : iterable of gbattn.training.RateGroup
        Parameters that learn at a multiple of the learning rate; the others learn at
        the rate itself. With multiples of 1 the run gives the same bits as without.
    capture : bool
        Whether to capture an update once as a CUDA graph and replay it: the same
        kernels, launched by one call. It needs one process, a GPU, no ``"fp16"``, no
        ``document_end``, and a model whose passes wait for no number from the GPU.

    Returns
    -------
    gbattn.training.History

    Raises
    ------
    FloatingPointError
        When a loss, or but for ``"fp16"`` a gradient, is not finite, naming step,
        learning rate and batch. The last good checkpoint is kept; the model is left
        as it is, up to ``log_every`` updates later.
    OSError
        When a checkpoint cannot be written, naming the file and the last good one.
    RuntimeError
        When ``torch.compile`` fails, or the capture.
    KeyboardInterrupt, SystemExit
        On Ctrl-C; on SIGTERM, with code 143. A single process with a folder finishes
        the update and writes a checkpoint first; a second signal acts at once.

    Notes
    -----
    Batches depend on seed and step alone, what dropout draws on seed, step and
    process; the caller's generators, of CPU and GPU, are left as they were.
    Several processes with ``ACCELERATE_USE_FSDP=true`` and ``FSDP_VERSION=2`` share
    the weights, their gradients and the moments. They train a copy, and at the end the
    model itself, where it was, has all of the trained weights in every process.

    accelerate's state of this process begins anew, and with ``config.compile`` what
    torch had compiled before is forgotten. A folder in which another process trains
    is refused. Source: chapter 15.
    """
    check(
        progress=(progress, FLAG),
        tensorboard=(tensorboard, FLAG),
        capture=(capture, FLAG),
        config=(config, instance(TrainConfig, "a TrainConfig")),
        corpus=(corpus, _CORPUS),
        folder=(folder, optional(PATH)),
    )
    where = folder is not None or not tensorboard
    require(where, "tensorboard", "True without a folder", "a folder to write to")
    needed = {"tqdm": progress, "tensorboard": tensorboard, "accelerate": True}
    needed |= dict.fromkeys(("filelock", "safetensors"), folder is not None)
    check_packages("train", *(name for name, why in needed.items() if why))
    if folder is not None:
        folder = Path(folder)
        check_folder("folder", folder)
    run = start_run(model, corpus, config, folder, rates, capture)
    with ExitStack() as stack:
        if folder is not None and run.accelerator.is_main_process:
            got = f"{folder}, in which another training is at work"
            want = "another folder, or patience"
            stack.enter_context(lock_folder(folder, "folder", got, want))
        try:
            _go(run, progress, tensorboard)
        except FloatingPointError as error:
            raise FloatingPointError(f"{error}; {last_good(folder)}") from error
        finally:
            note_what_is_left(run)
    return run.history


def _go(run: StoredRun, progress: bool, tensorboard: bool) -> None:
    """Train from the newest checkpoint, or from the beginning, to the end."""
    model, config = run.model, run.config
    if run.folder:
        resume(run)
    gpus = [run.accelerator.device] if run.accelerator.device.type == "cuda" else []
    with (
        torch.random.fork_rng(gpus),
        float32_products(config.precision),
        display(run, progress, tensorboard) as show,
    ):
        check_summed(run.scored, run.corpus.valid, run.stream.length)
        model.train()
        if config.compile and run.step < run.steps:
            _compile(run)
        run.optimizer.zero_grad()  # of that, of a run that was stopped, of the caller
        run.since = time.perf_counter()
        with _after_an_update(run):
            while run.step < run.steps:
                update(run)
                if run.step % config.log_every == 0 or run.step == run.steps:
                    read_losses(run)
                    log_point(run)
                    show_point(show, run.history)
                stopped = run.stopped is not None
                evaluation = evaluation_due(run)
                if evaluation or stopped or _checkpoint_due(run):
                    read_losses(run)
                    if evaluation:
                        _validate(run)
                        loss = run.history.validation_loss[-1]
                        show({"loss/validation": loss}, valid=f"valid {loss:.3f}")
                    run.history.finished = run.step == run.steps
                    if run.folder:
                        save_checkpoint(run)
                    if stopped:
                        _stop(run)
                    run.since = time.perf_counter()
        if run.best is not None:
            put_back(model, run.best)
        if run.sharded:
            put_back(run.whole, tensors_of(run.model))
    run.whole.eval()
