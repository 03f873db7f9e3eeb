"""What the benchmarks share: methods that take turns, medians of their times, and the memory they need."""

import ctypes
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Collection
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# A library's threads spin for a while after their work and take a core from whoever comes next, and threads that
# sleep take long to wake. So each turn begins with this many seconds of the method itself, untimed.
SETTLE = 0.1


class Times(NamedTuple):
    """Seconds of one call, over so many turns."""

    median: float
    smallest: float
    largest: float
    turns: int


def interleaved_medians(
    methods: dict[str, Callable],
    runs: int,
    *,
    settle: float = SETTLE,
    wait: Callable = lambda: None,
    patience: int = 1,
    steady: Collection[str] = (),
) -> dict[str, Times]:
    """Return the times of one call of each method; they take turns.

    `wait` returns when the work that a call has ordered is done. A machine that others use is slow for seconds at a
    time: turns go on, up to `patience` times `runs`, until the medians of the methods named in `steady` lie within 5 %
    of their smallest.
    """
    seconds = {name: [] for name in methods}
    for turn in range(patience * runs):
        if turn >= runs and all(statistics.median(seconds[name]) <= 1.05 * min(seconds[name]) for name in steady):
            break
        for name, method in methods.items():
            settled = time.perf_counter() + settle
            while time.perf_counter() < settled:
                method()
            wait()
            start = time.perf_counter()
            method()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: Times(statistics.median(times), min(times), max(times), len(times)) for name, times in seconds.items()
    }


def keep_memory() -> bool:
    """Let this process keep the memory that it frees, from now on; return whether the C library can.

    By default glibc gives large blocks back to the system, which hands them out again page by page, each zeroed anew.
    How often depends on what ran before, so two methods are compared on their arithmetic only when nobody pays for it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # No block by mmap, no trimming, and a heap that grows by 256 MB at a time (malloc.h: M_MMAP_MAX,
    # M_TRIM_THRESHOLD, M_TOP_PAD).
    return all([mallopt(-4, 0), mallopt(-1, -1), mallopt(-2, 2**28)])


def page_faults(call: Callable) -> int:
    """Return how many pages of memory the system hands out during one call."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


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
