# Everyday commands. `make demo` and `make test` need nothing but Python 3.11 or 3.12 and a C++ compiler.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint format docs bench gpu clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/python -m tests.compile_cuda

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/typing

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.run

# For a machine with a GPU and no network: works in the Python it is given and downloads nothing.
gpu:
	@$(PYTHON) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch sees no CUDA device")'
	$(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .
	$(PYTHON) -m pytest -n $(WORKERS) --dist worksteal -m "gpu and not slow"
	$(PYTHON) -m benchmarks.run

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The stamps are newer than pyproject.toml once its dependencies are installed; the second covers the first. Python compiles
# a module as it is imported: most of what comes with PyTorch never is.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable .
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[docs]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $(VENV)/.installed $@
