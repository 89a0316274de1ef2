# Everyday commands. `make demo` and `make test` need nothing but Python 3.11 or newer and a C++ compiler.

PYTHON ?= python3
WORKERS ?= 2
TORCH ?= torch==2.13.*
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-torch lint format docs bench gpu clean

demo: $(VENV)/.installed
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal
	$(BIN)/python -m tests.compile_cuda

# The tests on another PyTorch, in an environment of its own, which stays for the next time; PYTHON says of which Python.
# TESTS=tests/smoke takes a minute. Constraints that pip has from elsewhere are for the usual environment.
test-torch:
	@test -n "$(VERSION)" || { echo "make test-torch VERSION=2.15 [TESTS=tests/smoke] [PYTHON=python3.13]"; exit 2; }
	$(MAKE) .venv-torch-$(VERSION)/.installed
	.venv-torch-$(VERSION)/bin/python -m pytest -n $(WORKERS) --dist worksteal $(TESTS)

.venv-torch-%/.installed: pyproject.toml
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	PIP_CONSTRAINT=/dev/null $(@D)/bin/python -m pip install --quiet --no-compile "torch==$*.*" --editable '.[dev]'
	touch $@

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

# TORCH is the PyTorch that the tests' expectations are written for; `make test-torch` tries others.
# The stamps are newer than pyproject.toml once its dependencies are installed; the second covers the first. Python compiles
# a module as it is imported: most of what comes with PyTorch never is.
$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable . '$(TORCH)'
	touch $@

$(VENV)/.installed-docs: pyproject.toml | $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[docs]'
	touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]' '$(TORCH)'
	touch $(VENV)/.installed $@
