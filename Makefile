# Millrace. `make serve` runs it, `make test` checks it; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# A Python of at least 3.11; the first that is found, unless given: make serve PYTHON=/opt/python/bin/python3
PYTHON ?= $(shell for name in python3 python3.13 python3.12 python3.11; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
# Plain PyPI brings the CUDA build on Linux. A smaller CPU build comes from PyTorch's own index:
#   make serve PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0
# Extra arguments for the pip command that installs torch, and for that one only.
PIP_ARGS ?=
# Arguments for `millrace serve` or the benchmark, for example: make serve ARGS="--engines 2 --port 9090"
ARGS ?=
# Module of benchmarks/ for `make bench`.
BENCH ?= gateway_overhead
# Arguments for pytest, for example: make test PYTEST_ARGS="-k scheduler"
PYTEST_ARGS ?=
# Tests to run instead of all of a target: make test-unit TESTS=tests/unit/engine/kv, or names in a file: TESTS=@FILE
TESTS ?=
# Processes that run tests; 0 is none beside pytest's own. Many tests wait for others: three keep two cores busy.
WORKERS ?= 3

VENV := .venv
BIN := $(VENV)/bin

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

.PHONY: serve
serve: $(VENV)/.installed ## Install what is missing and serve the bundled model on 127.0.0.1:8080
	@exec $(BIN)/millrace serve $(ARGS)

.PHONY: install
install: $(VENV)/.installed ## Install what running needs, into .venv

.PHONY: up
up: mounted ## Start the containers of docker-compose.yml
	@command -v docker >/dev/null || { echo "make up needs Docker with compose; without Docker use: make serve" >&2; exit 1; }
	docker compose up --build --detach --wait

.PHONY: down
down: ## Stop the containers
	@command -v docker >/dev/null || { echo "make down needs Docker with compose" >&2; exit 1; }
	docker compose down

.PHONY: test
test: $(VENV)/bin/python ## Lint, types, architecture, unit and end-to-end tests; ARGS="lint unit" runs two stages
	@$(BIN)/python -m tests.stages $(or $(ARGS),install lint unit e2e)

.PHONY: test-fast
test-fast: dev redis ## Unit tests, contracts and import rules, without what took long when it last ran
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not e2e and not agents and not quantizer" --fast --durations=5 \
		tests/unit tests/contract tests/architecture $(PYTEST_ARGS)

.PHONY: test-unit
test-unit: dev redis ## Tests that start no stack, without those of kernels for GPUs
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not e2e and not agents and not quantizer" --durations=10 \
		$(if $(TESTS),,--ignore $(GPU_TESTS)) \
		$(PYTEST_ARGS) $(TESTS)

.PHONY: test-e2e
test-e2e: dev redis ## Tests of running stacks over the network
	@# Two stacks at a time are what two cores carry.
	$(BIN)/python -m pytest $(PARALLEL) $(if $(filter 0,$(WORKERS)),,-n 2) -m "e2e and not gpu and not vllm" \
		--durations=10 $(PYTEST_ARGS) $(TESTS)

.PHONY: lint
lint: dev ## Style, types and import rules
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

.PHONY: format
format: dev ## Rewrite the sources in the project's style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: proto
proto: dev ## Generate the stubs from proto/
	$(BIN)/python proto/generate.py
	$(BIN)/python -m tests.contract.golden_messages

.PHONY: bench
bench: $(VENV)/.installed ## Run one module of benchmarks/, for example: make bench BENCH=engine.fairness
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

.PHONY: clean
clean: ## Remove the environment, caches and local state
	rm -rf $(VENV) .venv-constraints .millrace .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# The rest by subject; `make help` lists all of it.
include make/environment.mk make/tests.mk make/containers.mk make/release.mk make/gpu.mk
