"""What the benchmarks share: methods that take turns, their times and ratios, and the memory they need."""

import argparse
import ctypes
import itertools
import json
import math
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

# A library's threads spin for a while after their work and take a core from whoever comes next, and threads that
# sleep take long to wake. So each turn begins with this many seconds of the method itself, untimed.
SETTLE = 0.1


def counted(text: str) -> int:
    """Read a number of runs for a command line: at least one, or nothing is measured."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not 1 or more")
    return number


class Ratio(NamedTuple):
    """How many times as long, in the median turn, and the ends of its 95 % interval."""

    median: float
    low: float
    high: float

    def known_to(self, share: float) -> bool:
        """Whether the interval ends at most this share of the median away from it."""
        return max(self.high - self.median, self.median - self.low) <= share * self.median


@dataclass(frozen=True)
class Times:
    """Seconds of one call, turn by turn."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> dict[str, float]:
        """Median, smallest and largest, as records name them."""
        return {
            "median_seconds": self.median,
            "smallest_seconds": min(self.seconds),
            "largest_seconds": max(self.seconds),
        }

    def over(self, other: "Times") -> Ratio:
        """Divide turn by turn: a machine that is slow for seconds at a time is slow for both sides of a turn.

        The interval is that of the sign test, which asks of the turns only that they be independent; fewer than six
        turns have none, and their range stands in for it.
        """
        found = sorted(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))
        n = len(found)
        at_most = itertools.accumulate(math.comb(n, k) / 2**n for k in range(n))  # so many turns lie below the median
        end = max(1, sum(probability <= 0.025 for probability in at_most))
        return Ratio(statistics.median(found), found[end - 1], found[-end])


def take_turns(
    methods: dict[str, Callable],
    runs: int,
    *,
    settle: float = SETTLE,
    wait: Callable = lambda: None,
    patience: int = 1,
    enough: Callable[[dict[str, Times]], bool] = lambda times: True,
) -> dict[str, Times]:
    """Return the times of one call of each method, over `runs` turns or more.

    `wait` returns when the work that a call has ordered is done. Turns go on, up to `patience` times `runs`, until
    the times are `enough`.
    """
    seconds = {name: [] for name in methods}
    collected = lambda: {name: Times(tuple(found)) for name, found in seconds.items()}
    for turn in range(patience * runs):
        if turn >= runs and enough(collected()):
            break
        for name, method in methods.items():
            settled = time.perf_counter() + settle
            if settle:
                method()  # whatever the clock says: to ask it may take longer than to settle
            while time.perf_counter() < settled:
                method()
            wait()
            start = time.perf_counter()
            method()
            wait()
            seconds[name].append(time.perf_counter() - start)
    return collected()


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


def return_memory() -> None:
    """Give back to the system, once, what this process keeps; blocks of another size would not fit into it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


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
