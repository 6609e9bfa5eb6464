# Springtide's commands. `make` alone lists them.
#   make run ARGS="--engine sim --gpus 8"     more for `springtide up`
#   make test ARGS="-k drain"                 more for pytest
#   make setup PYTHON=python3.12              another interpreter for a new .venv

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
export PYTHON

BIN := .venv/bin
BUF := node_modules/.bin/buf
PACKAGES := $(wildcard springtide controlplane nodeagent router provisioner simulator bench examples)
ARGS :=

.PHONY: help setup run test test-fast test-gpu swarm check format protos baseline lock bench clean

help: ## list the commands
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

setup: ## build .venv; quick when nothing changed
	@scripts/setup.sh

run: setup ## start the whole system here with a small real model; Ctrl-C stops it
	@exec $(BIN)/springtide up $(ARGS)

test: ## everything: checks, tests, the real vLLM and a systemd container
	@scripts/setup.sh dev
	@scripts/system_packages.sh
	@scripts/setup_buf.sh
	@scripts/environments.sh
	@$(MAKE) check
	@scripts/run_tests.sh $(ARGS)

test-fast: ## all tests but those marked heavy or slow: under five minutes
	@scripts/setup.sh dev
	@$(BIN)/python -m pytest -m "not heavy and not slow" $(ARGS)

test-gpu: ## real vLLM and SGLang on this host's GPUs: SPRINGTIDE_VLLM_PYTHON and SPRINGTIDE_SGLANG_PYTHON name theirs
	@scripts/setup.sh dev
	@SPRINGTIDE_GPU_TESTS=1 $(BIN)/python -m pytest tests/gpu $(ARGS)

swarm: ## random worlds until one fails: ARGS="--minutes 10", ARGS="--first 1000 --seeds 5000", ARGS="--seed 7"
	@scripts/setup.sh dev
	@$(BIN)/python -m simulator swarm $(ARGS)

check: ## lint, format, types, import rules, protos
	@scripts/setup.sh dev
	@scripts/setup_buf.sh
	@echo "== ruff";          $(BIN)/ruff check . && $(BIN)/ruff format --check .
	@echo "== mypy";          $(BIN)/mypy $(PACKAGES) tests
	@echo "== import rules";  $(BIN)/lint-imports --no-logo
	@echo "== protos";        $(BUF) lint && $(BUF) format --diff --exit-code
	@$(BUF) breaking --against protos/baseline.binpb
	@scripts/generate_protos.sh --check

format: ## put code and protos into their form
	@scripts/setup.sh dev
	@scripts/setup_buf.sh
	@$(BIN)/ruff check --fix-only --quiet . ; $(BIN)/ruff format . ; $(BUF) format --write

protos: ## generate springtide/v1 from protos/
	@scripts/setup.sh dev
	@scripts/generate_protos.sh

baseline: ## at a release: make today's protos what later ones must stay compatible with
	@scripts/setup_buf.sh
	@$(BUF) build --output protos/baseline.binpb

lock: ## write requirements/*.txt again (ARGS=--upgrade moves to the newest releases)
	@scripts/lock.sh $(ARGS)

bench: ## the router beside its peers, into docs/benchmarks (ARGS=--quick: under three minutes)
	@scripts/setup.sh
	@bench/setup.sh
	@$(BIN)/python -m bench $(ARGS)

clean: ## remove environments, caches and what a stack wrote here
	rm -rf .venv .venv-vllm .venv-bench .venv-bench-python node_modules build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .springtide
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
