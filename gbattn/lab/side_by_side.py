"""Runs that are alike but for seed and learning rate, trained side by side as one stack of models.

A model of half a million parameters does not fill a GPU. In a stack every weight has one more dimension, so each kernel
does the work of all runs, and one call of an optimiser or of an evaluation serves them all.
"""

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from gbattn.corpora import TokenStream, sequential_windows
from gbattn.experiments import PlannedRun
from gbattn.head import loss_of_logits
from gbattn.lab.cuda_graph import captured
from gbattn.lab.processes import accelerator_of, float32_products
from gbattn.lab.training import evaluation_due, log_point, note_validation
from gbattn.language_model import LanguageModel
from gbattn.training import Run, check_finite, decay_groups, learning_rate, step_seed, window_length


def can_be_stacked(runs: Sequence[PlannedRun]) -> bool:
    """Whether runs differ in nothing but seed and learning rate, and need nothing that a stack lacks: parts of a batch,
    documents, compilation, mixed precision."""
    first, t = runs[0], runs[0].train
    alike = lambda one: replace(one.train, seed=t.seed, learning_rate=t.learning_rate) == t
    same = all((one.model, one.corpus) == (first.model, first.corpus) and alike(one) for one in runs)
    return same and (t.accumulation, t.document_end, t.compile) == (1, None, False) and t.precision in ("no", "tf32")


class Replayed:
    """A function of tensors. On a GPU its fourth call with inputs of one shape captures it, and that and later calls
    with this shape replay the graph."""

    def __init__(self, function: Callable, device: torch.device):
        self.function, self.device = function, device
        self.shape, self.eager, self.graph = None, 3, None

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        inputs = [x.to(self.device, non_blocking=True) for x in inputs]
        self.shape = self.shape or inputs[0].shape
        if self.device.type != "cuda" or inputs[0].shape != self.shape:
            return self.function(*inputs)
        if self.eager:
            self.eager -= 1
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found = self.function(*inputs)
            torch.cuda.current_stream().wait_stream(stream)
            return found
        if self.graph is None:
            self.inputs = [x.clone() for x in inputs]
            self.graph, self.output = captured(lambda: self.function(*self.inputs), "together=1 trains without it")
        for x, new_x in zip(self.inputs, inputs):
            x.copy_(new_x)
        self.graph.replay()
        return self.output.clone()


@dataclass(kw_only=True)
class Row(Run):
    """One run of a stack: its history, the best weights so far, and what stopped it."""

    best: dict[str, torch.Tensor] | None = None
    error: FloatingPointError | None = None


class Stack:
    """Models of one configuration with all their weights along a dimension of their own, on what accelerate finds.

    Parameters
    ----------
    models : sequence of gbattn.language_model.LanguageModel
        The rows, with the weights that each begins with.
    """

    def __init__(self, models: Sequence[LanguageModel]):
        self.accelerator = accelerator_of("no")
        self.device, self.rows = self.accelerator.device, len(models)
        for model in models:
            model.to(self.device)
        weights, self.buffers = stack_module_state(list(models))
        self.weights = {name: x.detach() for name, x in weights.items()}
        self.model = copy.deepcopy(models[0]).to("meta")  # what is called with the weights of each row
        self.evaluated = Replayed(self._evaluate, self.device)

    def _loss(self, weights: dict, buffers: dict, *batch: torch.Tensor) -> torch.Tensor:
        inputs, targets = batch
        with sdpa_kernel(SDPBackend.MATH):  # of fused attention, as of a fused loss, vmap has no batched backward pass
            logits = functional_call(self.model, (weights, buffers), inputs)
        return loss_of_logits(logits, targets, reduction="sum")

    @torch.no_grad()
    def _evaluate(self, *batch: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        both = self.weights, self.buffers
        return vmap(self._loss, in_dims=(0, 0, None, None))(*both, *batch)

    def gradients(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[dict, torch.Tensor]:
        """Return the gradient of the mean loss of each row by the name of its weights, and that loss, (rows,), of
        batches (rows, B, T). Dropout draws for each row alone."""
        self.model.train()
        mean = lambda *x: self._loss(*x) / inputs[0].numel()
        return vmap(grad_and_value(mean), randomness="different")(self.weights, self.buffers, inputs, targets)

    def of_row(self, row: int) -> dict[str, torch.Tensor]:
        """Return the weights of one row by name, which share its memory."""
        return {name: x[row] for name, x in self.weights.items()}

    def losses(self, tokens: np.ndarray, length: int, batch_size: int) -> tuple[list[float], int]:
        """Return the summed loss of each row on a text, in nats, and how many tokens were scored."""
        nats, n_tokens = [], 0
        for batch in sequential_windows(tokens, length, batch_size=batch_size):
            nats.append(self.evaluated(*batch))
            n_tokens += int((batch.targets != -100).sum())
        return torch.stack(nats).double().sum(0).tolist(), n_tokens


class _Learner:
    """AdamW with a learning rate and a gradient's length for each row."""

    def __init__(self, stack: Stack, config):
        self.stack, self.clip = stack, config.clip
        self.rates = torch.zeros(stack.rows, device=stack.device)
        names = {id(p): name for name, p in stack.model.named_parameters()}
        groups, self.owners = [], []
        for group in decay_groups(stack.model, config.weight_decay, config.decay):
            own = [names[id(p)] for p in group["params"]]
            for row in range(stack.rows) if own else ():
                params = [stack.weights[name][row] for name in own]
                groups.append(dict(params=params, weight_decay=group["weight_decay"], lr=self.rates[row]))
                self.owners += [(parameter, name, row) for parameter, name in zip(params, own)]
        self.optimizer = torch.optim.AdamW(groups, betas=config.betas, fused=True, capturable=self.rates.is_cuda)
        self.step = Replayed(self._step, stack.device)

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Update each row; return its loss and its gradient's length, (2, rows)."""
        gradients, losses = self.stack.gradients(inputs, targets)
        lengths = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients.values()]
        norms = torch.linalg.vector_norm(torch.stack(lengths), dim=0)
        if self.clip is not None:
            factors = (self.clip / (norms + 1e-6)).clamp(max=1.0)  # as torch's clip_grad_norm_
            gradients = {name: g * factors.view(-1, *[1] * (g.ndim - 1)) for name, g in gradients.items()}
        for parameter, name, row in self.owners:
            parameter.grad = gradients[name][row]
        self.optimizer.step()
        return torch.stack([losses, norms])

    def update(self, runs: list[Row]) -> torch.Tensor:
        """Update every row once; return what `_step` does."""
        step, config = runs[0].step, runs[0].config
        rates = [learning_rate(run.config, step, run.steps) for run in runs]
        self.rates.copy_(torch.tensor(rates))
        torch.manual_seed(step_seed(config.seed, step))
        batches = {run.config.seed: run.stream for run in runs}
        batches = {seed: stream.batch(step) for seed, stream in batches.items()}
        parts = [torch.stack(part) for part in zip(*(batches[run.config.seed] for run in runs))]
        for run in runs:
            run.step += 1
        return self.step(*parts)


def _read(runs: list[Row], unread: list[torch.Tensor]) -> None:
    """Fetch the losses of the updates since the last time, and count their seconds."""
    found = torch.stack(unread).tolist()  # waits for the device
    now = time.perf_counter()
    for row, run in enumerate(runs):
        run.seconds, run.since = run.seconds + now - run.since, now
        try:
            for step, (losses, norms) in enumerate(found, run.step - len(found)):
                if run.error is None:
                    check_finite(run, "loss", losses[row], step)
                    check_finite(run, "gradient norm", norms[row], step)
                    run.unlogged.append((losses[row], norms[row]))
        except FloatingPointError as error:
            run.error = error


def _validate(stack: "Stack", tokens: np.ndarray, runs: list[Row], length: int) -> None:
    """Evaluate every row on the validation split."""
    nats, n_tokens = stack.losses(tokens, length, runs[0].config.evaluate_batch_size)
    for row, run in enumerate(runs):
        try:
            if run.error is None:
                note_validation(run, nats[row] / n_tokens, stack.of_row(row))
        except FloatingPointError as error:
            run.error = error
        run.since = time.perf_counter()


def train_side_by_side(stack: Stack, corpus, configs: Sequence) -> list[Row]:
    """Train every row of a stack on a text, to the end, and leave it with the weights of its best evaluation, or the
    last, as the configurations say.

    Parameters
    ----------
    stack : Stack
    corpus
        As `gbattn.lab.training.train` takes it.
    configs : sequence of gbattn.training.TrainConfig
        One for each row, alike but for seed and learning rate.

    Returns
    -------
    list of Row
        With a ``history`` each. A row whose numbers stop being finite has an ``error``; the others go on.

    Notes
    -----
    Each row sees the batches that `gbattn.lab.training.train` would give it. What dropout draws depends on the stack.
    The seconds of each history are those of the whole stack. Nothing is written, so nothing resumes.
    """
    first = configs[0]
    length = window_length(stack.model, first.length)
    runs = []
    for config in configs:
        stream = TokenStream(corpus.train, length, config.batch_size, config.seed)
        both = dict(stream=stream, steps=config.total_steps(stream), config=config)
        runs.append(
            Row(model=stack.model, module=None, learning=[], optimizer=None, accelerator=stack.accelerator, **both)
        )
    learner = _Learner(stack, first)
    gpus = [stack.device] if stack.device.type == "cuda" else []
    with torch.random.fork_rng(gpus), float32_products(first.precision):
        unread = []
        for run in runs:
            run.since = time.perf_counter()
        while runs[0].step < runs[0].steps and any(run.error is None for run in runs):
            unread.append(learner.update(runs))
            log = runs[0].step % first.log_every == 0 or runs[0].step == runs[0].steps
            evaluation = evaluation_due(runs[0])
            if log or evaluation:
                _read(runs, unread)
                unread = []
            for run in runs if log else ():
                if run.error is None:
                    log_point(run)
            if evaluation:
                _validate(stack, corpus.valid, runs, length)
    for row, run in enumerate(runs):
        run.history.finished = run.error is None
        for name, x in (run.best or {}).items():
            stack.weights[name][row].copy_(x)
    return runs
