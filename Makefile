# Two targets do everything on a fresh machine: `make demo` trains, `make test` tests. Both make the environment first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SPEC ?= specs/examples/tiny-gpt.yaml

.PHONY: demo test lint bench clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/dtrain run $(SPEC)

test: $(VENV)/.installed
	$(BIN)/python -m pytest

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.memory_tier

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
