"""What the benchmarks share: methods that take turns, and medians of their times."""

import statistics
import time
from collections.abc import Callable

# A library's threads spin for a while after their work and take a core from whoever comes next, and threads that
# sleep take long to wake. So each turn begins with this many seconds of the method itself, untimed.
SETTLE = 0.1


def interleaved_medians(
    methods: dict[str, Callable], runs: int, *, settle: float = SETTLE, finish: Callable = lambda: None
) -> dict[str, tuple[float, float, float]]:
    """Return (median, smallest, largest) seconds of one call of each method; they take turns.

    `finish` waits until the work of a call is done, where a call only orders it.
    """
    seconds = {name: [] for name in methods}
    for _ in range(runs):
        for name, method in methods.items():
            settled = time.perf_counter() + settle
            while time.perf_counter() < settled:
                method()
                finish()
            start = time.perf_counter()
            method()
            finish()
            seconds[name].append(time.perf_counter() - start)
    return {name: (statistics.median(times), min(times), max(times)) for name, times in seconds.items()}
