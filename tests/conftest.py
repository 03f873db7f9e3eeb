"""The tests are about single bits, which a CPU repeats: training keeps off a GPU, even where there is one.
test_on_a_gpu.py is what goes there."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"
if workers := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):  # which share the cores, and with them what they start
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, os.cpu_count() // int(workers))))
