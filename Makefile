# `make serve` and `make test` are all that a newcomer needs: Python >= 3.11 and make. `make help` lists the rest.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LISTEN ?= 127.0.0.1:8000
SEED ?= $(shell date +%s)
# Tests run in so many processes, a file in one: most wait for sandboxes and clients rather than compute.
JOBS ?= 3
PYTEST_ARGS ?=

.PHONY: help serve test lint clients image torture bench wheel clean

help: ## Say what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(VENV)/ready: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "toolhost needs Python 3.11 or newer; set PYTHON=…" >&2; exit 1; }
	@echo "Making $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -e '.[all]' --group dev
	@touch $@

serve: $(VENV)/ready ## Start the host on the embedded default (LISTEN=host:port)
	@$(BIN)/toolhost setup
	@exec $(BIN)/toolhost serve --listen $(LISTEN)

lint: $(VENV)/ready ## Ruff, strict typing, the rooms' import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

test: $(VENV)/ready lint ## Run all that this machine can; name what it could not, and why
	@$(BIN)/toolhost setup
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --cov --cov-report=term:skip-covered $(PYTEST_ARGS)

clients: $(VENV)/ready ## Build the environments of the clients that tests drive (vLLM's classes, mcp 1.12, 1.x, 2.x, …)
	$(BIN)/python -m tests.clients.environments

image: $(VENV)/ready ## Build the sandbox image on the Docker engine (BASE_IMAGE=name, where the public one cannot be had)
	$(BIN)/toolhost setup --docker $(if $(BASE_IMAGE),--base-image $(BASE_IMAGE))

torture: $(VENV)/ready ## The long form of random and soak tests (SEED=n); output is kept in .cache/torture
	@mkdir -p .cache/torture
	@echo "seed $(SEED)" | tee .cache/torture/$(SEED).log
	@TOOLHOST_TEST_SEED=$(SEED) $(BIN)/python -m pytest -m torture --timeout=3600 $(PYTEST_ARGS) 2>&1 | tee -a .cache/torture/$(SEED).log; exit $${PIPESTATUS[0]}

bench: $(VENV)/ready ## Measure, in ratios within one run (BENCH_ARGS=--full for all of it)
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

wheel: $(VENV)/ready ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

clean: ## Remove what was made in this clone
	rm -rf $(VENV) dist build .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage
