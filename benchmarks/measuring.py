"""What the benchmarks share: methods that take turns, medians of their times, and the memory they need."""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

# A library's threads spin for a while after their work and take a core from whoever comes next, and threads that
# sleep take long to wake. So each turn begins with this many seconds of the method itself, untimed.
SETTLE = 0.1


def interleaved_medians(
    methods: dict[str, Callable], runs: int, *, settle: float = SETTLE, wait: Callable = lambda: None
) -> dict[str, tuple[float, float, float]]:
    """Return (median, smallest, largest) seconds of one call of each method; they take turns.

    `wait` returns when the work that a call has ordered is done.
    """
    seconds = {name: [] for name in methods}
    for _ in range(runs):
        for name, method in methods.items():
            settled = time.perf_counter() + settle
            while time.perf_counter() < settled:
                method()
            wait()
            start = time.perf_counter()
            method()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times), min(times), max(times)) for name, times in seconds.items()}


@contextmanager
def silence():
    """Keep what the profiler's C++ writes to standard error off the screen."""
    screen, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(nowhere)


def peak_bytes(call: Callable, device: torch.device) -> int:
    """Return the bytes that one call allocates at its highest, above what was there before it."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    events = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e["name"] == "[memory]")
    highest = level = 0
    for _, change in events:
        level += change
        highest = max(highest, level)
    return highest
