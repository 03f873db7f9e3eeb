"""An update as a graph of CUDA: captured once, then replayed by one call."""

import time
from collections.abc import Callable

import torch

from gbattn.ground.arguments import require
from gbattn.training import Run, TrainConfig, learn


def captured(function: Callable, cure: str) -> tuple[torch.cuda.CUDAGraph, object]:
    """Record what a function does on the GPU, and what it returns; nothing is computed."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            return graph, function()
    except RuntimeError as error:
        first = str(error).partition("\n")[0][:200]
        raise RuntimeError(f"the capture failed: {first}; {cure}") from error


class Graph:
    """`gbattn.training.learn` as a graph of CUDA, captured once and replayed, so that the GPU
    does not wait for Python between one kernel and the next."""

    def __init__(self, config: TrainConfig, accelerator):
        device, processes = accelerator.device.type, accelerator.num_processes
        for fits, got, want in (
            (device == "cuda", f"device {device}", "False, or a GPU"),
            (processes == 1, f"{processes} processes", "one process"),
            (config.precision != "fp16", "fp16", "another precision"),
            (config.document_end is None, "document_end", "windows that are all alike"),
        ):
            require(fits, "capture", f"True with {got}", want)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.eager = 3  # updates that come first, and allocate what is to stay

    def __call__(self, run: Run, parts: list, scored: int) -> tuple[torch.Tensor, ...]:
        if self.eager:
            return self._warm_up(run, parts, scored)
        if self.graph is None:
            self._capture(run, parts, scored)
        for part, new_part in zip(self.inputs, parts):
            for x, new_x in zip(part, new_part):
                x.copy_(new_x, non_blocking=True)
        self.graph.replay()  # draws from the generator as it stands
        return tuple(x.clone() for x in self.outputs)

    def _warm_up(self, run: Run, parts: list, scored: int) -> tuple[torch.Tensor, ...]:
        self.eager -= 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = learn(run, parts, scored)
        torch.cuda.current_stream().wait_stream(stream)
        return found

    def _capture(self, run: Run, parts: list, scored: int) -> None:
        """Record what an update does; nothing is computed, and no clock counts it."""
        began = time.perf_counter()
        self.inputs = [[x.to(run.accelerator.device) for x in part] for part in parts]
        self.graph, self.outputs = captured(lambda: learn(run, self.inputs, scored), "capture=False trains without it")
        run.since += time.perf_counter() - began
