# Two targets do everything on a fresh machine: `make demo` trains, `make test` tests. Both make the environment first.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SPEC ?= specs/examples/tiny-gpt.yaml

.PHONY: demo test lint bench campaigns clean

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/dtrain run $(SPEC)

test: $(VENV)/.installed
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --ignore tests/job
	$(BIN)/python -m pytest tests/job

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed
	$(BIN)/python -m tests.benchmarks.memory_tier
	$(BIN)/python -m tests.benchmarks.storage
	$(BIN)/python -m tests.benchmarks.restart
	$(BIN)/python -m tests.benchmarks.loops
	$(BIN)/python -m tests.benchmarks.scale
	$(BIN)/python -m tests.benchmarks.predict

campaigns: $(VENV)/.installed
	$(BIN)/python -m tests.campaigns.kill_storage --kills 1000 --seed 1
	$(BIN)/python -m tests.campaigns.bit_flips --flips 10000 --seed 1
	$(BIN)/python -m tests.campaigns.faults --faults 200 --seed 1
	$(BIN)/python -m tests.campaigns.faults --faults 200 --seed 1 --peer
	$(BIN)/python -m tests.campaigns.elastic --faults 40 --seed 1 --nodes 2:4
	$(BIN)/python -m pytest --hypothesis-profile anew tests/planners tests/specs tests/tiers
	$(BIN)/python -m pytest tests/job -m campaign
	$(BIN)/python -m tests.campaigns.soak --minutes 30 --seed 1

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
