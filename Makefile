# The commands of this repository. They need Python 3.11 or newer with venv, and make; nothing else, no compiler.
#
# Which build of torch is installed is pip's choice: constraints.txt pins the version, not the build. Where PyPI is the
# only index, Linux gets the CUDA build, which also runs on a machine without a GPU but takes 3 GB more. To prefer the CPU
# build, point pip at an index or a folder that has it, by pip's own settings (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS).
# Another Python: `make setup PYTHON=python3.12`.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
OLDEST := .venv/oldest-transformers
FAST := -m "not slow and not gpu"
PARALLEL := -n 2 --dist worksteal --durations=15

# The rooms that touch transformers' models and caches are tested on the oldest supported version too.
OLDEST_PINS := transformers==5.17.0 huggingface_hub==1.33.0 httpx==0.28.1 httpcore==1.0.9
OLDEST_TESTS := $(wildcard tests/test_target*.py tests/test_embedded.py tests/test_decode*.py tests/test_drafter*.py tests/test_hybrid*.py)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
PIP_INSTALL := $(BIN)/pip install --quiet --quiet --no-input

.PHONY: help setup quickstart test test-all test-oldest lint bench results-check

help:
	@echo "make setup       make .venv and install the pinned packages (about a minute; the other targets do it by themselves)"
	@echo "make quickstart  measure the bundled drafter, train it further, check that it is lossless   (options: ARGS=...)"
	@echo "make test        the fast tests, then those of the model rooms on the oldest supported transformers"
	@echo "make test-all    the slow tests too (minutes)"
	@echo "make lint        ruff and mypy"
	@echo "make results-check  derive the published figures from their raw rows and demand no difference"
	@echo "make bench       the benchmarks   (options: ARGS=...)"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "setup: $(PYTHON) is missing or older than 3.11. Run: make setup PYTHON=python3.12 (or what you have)." >&2; exit 1; }
	@echo "setup: making .venv and installing the packages of constraints.txt; about a minute, longer on a slow line ..."
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $@
	@echo "setup: done"

$(OLDEST)/.ready: $(READY) Makefile
	@echo "setup: adding the oldest supported transformers, beside the newest ..."
	@rm -rf $(OLDEST)
	@$(PIP_INSTALL) --no-deps --target $(OLDEST) $(OLDEST_PINS)
	@touch $@

quickstart: setup
	@$(BIN)/draftloop quickstart $(ARGS)

test: setup
	$(BIN)/python -m pytest $(PARALLEL) $(FAST)
	@$(MAKE) --no-print-directory test-oldest

test-oldest: $(OLDEST)/.ready
	@PYTHONPATH="$(CURDIR)/$(OLDEST)" $(BIN)/python -c 'import transformers as t; print("again, with transformers", t.__version__)'
	PYTHONPATH="$(CURDIR)/$(OLDEST)" $(BIN)/python -m pytest $(PARALLEL) $(FAST) $(OLDEST_TESTS)

test-all: setup
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu"
	@$(MAKE) --no-print-directory test-oldest

lint: setup
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

results-check: setup
	$(BIN)/python benchmarks/results.py check

bench: setup
	$(BIN)/python benchmarks/run.py $(ARGS)
