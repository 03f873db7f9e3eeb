"""The tests are about single bits, which a CPU repeats: training keeps off a GPU, even where there is one.
test_on_a_gpu.py is what goes there."""

import os

os.environ["ACCELERATE_USE_CPU"] = "true"
