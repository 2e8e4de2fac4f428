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
# Tag of the images, as docker-compose.yml builds them.
IMAGE_TAG ?= $(or $(MILLRACE_TAG),0.1.0)
# Arguments for pytest, for example: make test PYTEST_ARGS="-k scheduler"
PYTEST_ARGS ?=
# Tests to run instead of all of a target: make test-unit TESTS=tests/unit/engine/kv, or names in a file: TESTS=@FILE
TESTS ?=
# Processes that run tests; 0 is none beside pytest's own. Many tests wait for others: three keep two cores busy.
WORKERS ?= 3
# Files are shared out in their order: those with few tests take longest, and would come last otherwise.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_VERSION := 26.0
# Build tools of the editable install, so that pip needs no second, isolated environment.
BUILD_TOOLS := hatchling editables
INPUTS := pyproject.toml constraints.txt

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

# --- running ----------------------------------------------------------------------------------------------

.PHONY: serve
serve: $(VENV)/.installed ## Install what is missing and serve the bundled model on 127.0.0.1:8080
	@exec $(BIN)/millrace serve $(ARGS)

.PHONY: install
install: $(VENV)/.installed ## Install what running needs, into .venv

# What compose gives containers of the checkout, whose users are nobody on this machine.
MOUNTED := config/millrace.toml k8s/base/envoy.sh k8s/components/second-model/millrace.toml \
	observability/collector/config.yaml observability/jaeger/config.yaml observability/prometheus/prometheus.yml \
	observability/prometheus/alerts.yml observability/grafana/provisioning observability/grafana/dashboards

.PHONY: up
up: mounted ## Start the containers of docker-compose.yml
	@command -v docker >/dev/null || { echo "make up needs Docker with compose; without Docker use: make serve" >&2; exit 1; }
	docker compose up --build --detach --wait

.PHONY: mounted
mounted: ## Let containers read what compose gives them of this checkout, as after a clone with umask 077
	@closed=$$(find $(MOUNTED) \( -type d ! -perm -005 \) -o \( -type f ! -perm -004 \)); \
	[ -z "$$closed" ] || { echo "opened to containers' users (chmod a+rX):" $$closed; chmod -R a+rX $(MOUNTED); }

.PHONY: roll
roll: ## Replace gateways and engines by the images that were built since, one container at a time
	docker compose build
	for service in engine gateway; do services/roll.sh $$service; done

.PHONY: down
down: ## Stop the containers
	@command -v docker >/dev/null || { echo "make down needs Docker with compose" >&2; exit 1; }
	docker compose down

.PHONY: certificates
certificates: ## Make an authority and a certificate for localhost, for TLS on this machine
	sh services/envoy/make-certificates.sh certificates

.PHONY: image-ages
image-ages: $(VENV)/.installed ## Name the images of others that nobody has looked at for too long
	$(BIN)/python -m services.third_party_images

.PHONY: image-digests
image-digests: $(VENV)/.installed ## Pin the images of others by the digests that their registries tell, by Docker
	$(BIN)/python -m services.image_digests

.PHONY: sbom
sbom: dev ## Write what each image holds to build/sbom (CycloneDX); with Docker, Debian's packages as well
	MILLRACE_TAG=$(IMAGE_TAG) services/bills.sh build/sbom

.PHONY: release
release: dev ## Wheel, images, bills of materials and sums in build/release; RELEASE_KEY=... (OpenSSH) signs
	RELEASE_KEY='$(RELEASE_KEY)' services/release.sh build/release

# --- checking ---------------------------------------------------------------------------------------------

.PHONY: test
test: $(VENV)/bin/python ## Lint, types, architecture, unit and end-to-end tests; ARGS="lint unit" runs two stages
	@$(BIN)/python -m tests.stages $(or $(ARGS),install lint unit e2e)

.PHONY: test-unit
test-unit: dev redis ## Tests that start no stack, without those of kernels for GPUs
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not e2e" --durations=10 \
		$(if $(TESTS),,--ignore $(GPU_TESTS)) \
		$(PYTEST_ARGS) $(TESTS)

# What machines with a GPU run, under Triton's interpreter: minutes of computing.
GPU_TESTS := tests/kernels/triton

.PHONY: test-e2e
test-e2e: dev redis ## Tests of running stacks over the network
	@# Two stacks at a time are what two cores carry.
	$(BIN)/python -m pytest $(PARALLEL) $(if $(filter 0,$(WORKERS)),,-n 2) -m "e2e and not gpu and not vllm" \
		--durations=10 $(PYTEST_ARGS) $(TESTS)

.PHONY: test-vllm
test-vllm: dev redis ## Kill engines that have vLLM's core, which `millrace engine install vllm` installs
	$(BIN)/python -m pytest -n 0 -m vllm --durations=10 $(PYTEST_ARGS) $(or $(TESTS),tests/chaos)

.PHONY: test-containers
test-containers: dev ## Start docker-compose.yml and k8s/ with a real container engine, and use what runs
	@# The engine is stopped if it was started for this.
	trap 'tests/containers/prepare.sh stop' EXIT; MILLRACE_TAG=test tests/containers/prepare.sh && \
	DOCKER_CONFIG=$(CURDIR)/build/containers/docker-config DOCKER_BUILDKIT=0 MILLRACE_TAG=test TEST_CONTAINERS=1 \
		PATH=$$PATH:$(CURDIR)/build/containers/packages/kubectl/usr/bin \
		$(BIN)/python -m pytest -n 0 -s --durations=10 $(PYTEST_ARGS) \
		$(or $(TESTS),tests/containers tests/deployment/test_kubernetes_rendering.py)

# What starts processes of its own Python has none here.
ARM_TESTS := tests/kernels/native/test_gemm.py tests/kernels/native/test_rows.py tests/kernels/native/test_sampling.py \
	tests/kernels/native/test_experts.py tests/kernels/native/test_adapters.py tests/kernels/native/test_attention.py

.PHONY: test-arm
test-arm: dev ## Run the native kernels' tests as on ARM's processors, emulated by QEMU; root on Debian gets it installed
	tests/arm/prepare.sh
	CXX=aarch64-linux-gnu-g++ NATIVE_KERNELS_CACHE=build/arm/native \
		$(BIN)/python -m kernels.native.build --machine aarch64
	tests/arm/python -m pytest -q -p no:cacheprovider -k "not self_check and not its_check" \
		--durations=10 $(PYTEST_ARGS) $(or $(TESTS),$(ARM_TESTS))

.PHONY: test-fast
test-fast: dev redis ## Unit tests, contracts and import rules, without what took long when it last ran
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not e2e" --fast --durations=5 \
		tests/unit tests/contract tests/architecture $(PYTEST_ARGS)

.PHONY: test-clients
test-clients: dev ## Drive one stack by clients that nobody here wrote, and write docs/clients.md; ARGS=litellm runs one
	$(BIN)/python -m tests.clients --write docs/clients.md --torch '$(PIP_ARGS) "$(TORCH)"' $(ARGS) $(TESTS)

.PHONY: test-rehearsal
test-rehearsal: dev redis ## Kernels for GPUs under Triton's interpreter, and every phase of `make bench-gpu` over tiny shapes
	WHOLE_REHEARSAL=1 $(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --durations=10 $(PYTEST_ARGS) \
		$(or $(TESTS),$(GPU_TESTS) tests/e2e/test_gpu_lease.py)

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

.PHONY: proto-check
proto-check: dev ## Check the stubs for drift and lint the protos
	$(BIN)/python proto/generate.py --check
	cd proto && ../$(BIN)/buf lint

.PHONY: bench
bench: $(VENV)/.installed ## Run one module of benchmarks/, for example: make bench BENCH=engine.fairness
	$(BIN)/python -m benchmarks.$(BENCH) $(ARGS)

# --- on a machine with a GPU: its own Python with torch and triton, no environment, no network ----------------

# Python of the machine with the GPU, for packages that travel there.
GPU_PYTHON_VERSION ?= 3.12
GPU_SITE := build/gpu-site
# What was brought along comes before the machine's own packages.
GPU_RUN = PATH=$(CURDIR)/$(GPU_SITE)/bin:$$PATH PYTHONPATH=$(GPU_SITE):.:contract/stubs $(PYTHON)
GPU_INSTALL = $(PIP) install -q --no-deps --no-compile --upgrade --only-binary=:all: --implementation cp \
	--python-version $(GPU_PYTHON_VERSION) --platform manylinux2014_x86_64 \
	$(foreach tag,2_39 2_35 2_34 2_31 2_28 2_27 2_24 2_17,--platform manylinux_$(tag)_x86_64)

.PHONY: gpu-bundle
gpu-bundle: build/gpu-bundle.tar.xz ## Fetch what a lease needs and machines may lack, into build/gpu-bundle.tar.xz

build/gpu-bundle.tar.xz: benchmarks/gpu/requirements.txt | $(VENV)/bin/python
	@rm -rf build/gpu-bundle
	$(GPU_INSTALL) --target build/gpu-bundle --requirement $<
	XZ_OPT="-9 -T0" tar -cJf $@ -C build/gpu-bundle .

.PHONY: gpu-serve-bundle
gpu-serve-bundle: dev ## The same for requests through sockets, with Envoy, into build/gpu-serve-bundle.tar.xz
	@rm -rf build/gpu-serve-bundle
	$(GPU_INSTALL) --target build/gpu-serve-bundle --requirement benchmarks/gpu/requirements-serve.txt
	install -D "$$($(BIN)/python -c 'from services.supervisor.edge import envoy_binary; print(envoy_binary())')" \
		build/gpu-serve-bundle/bin/envoy
	@# As in the images: the services can tell their version, because the project counts as installed.
	version=$$(sed -n 's/^version = "\(.*\)"$$/\1/p' pyproject.toml); \
	metadata=build/gpu-serve-bundle/millrace-$$version.dist-info; mkdir -p "$$metadata"; \
	printf 'Metadata-Version: 2.1\nName: millrace\nVersion: %s\n' "$$version" >"$$metadata/METADATA"
	XZ_OPT="-9 -T0" tar -cJf build/gpu-serve-bundle.tar.xz -C build/gpu-serve-bundle .

.PHONY: gpu-site
gpu-site:
	@$(PYTHON) -c 'import torch, triton' || { echo "$(PYTHON) has no torch and triton; name one: make $(MAKECMDGOALS) PYTHON=..." >&2; exit 1; }
	@for bundle in $(wildcard build/gpu-bundle.tar.xz build/gpu-serve-bundle.tar.xz); do \
		$(PYTHON) -m tarfile --extract $$bundle $(GPU_SITE); done
	@$(GPU_RUN) -c 'import msgspec, llguidance' || { \
		echo "where there is a network: make gpu-bundle, then bring build/gpu-bundle.tar.xz along" >&2; exit 1; }

.PHONY: test-gpu
test-gpu: gpu-site ## The tests that need a GPU, with $(PYTHON): make test-gpu PYTHON=/opt/torch/bin/python3
	@# Most of the time goes into compiling kernels, which processes do side by side.
	workers=$$($(GPU_RUN) -c 'import xdist; print("-n 10")' 2>/dev/null || true); \
	$(GPU_RUN) -m pytest -m gpu tests/gpu $$workers -p no:cacheprovider --durations=10 $(PYTEST_ARGS)

.PHONY: bench-gpu
bench-gpu: gpu-site ## Measure on a GPU into benchmarks/results/gpu-*; ARGS="first", "proof", "serve", "first --rehearse"
	$(GPU_RUN) -m benchmarks.gpu.lease $(ARGS)

# A Python with what such a machine has (requirements-machine.txt), where there is none: PyPI's torch for CUDA, without CUDA.
GPU_PYTHON ?= build/gpu-python/bin/python
# From which that environment is made.
GPU_BASE_PYTHON ?= $(firstword $(wildcard $(HOME)/.pyenv/versions/$(GPU_PYTHON_VERSION).*/bin/python3) python$(GPU_PYTHON_VERSION))

build/gpu-python/bin/python: benchmarks/gpu/requirements-machine.txt benchmarks/gpu/absent_cuda.py
	@$(GPU_BASE_PYTHON) -c 'import venv' || { \
		echo "Python $(GPU_PYTHON_VERSION) is needed: name one (GPU_BASE_PYTHON=...), or a whole environment (GPU_PYTHON=...)" >&2; exit 1; }
	@rm -rf build/gpu-python && $(GPU_BASE_PYTHON) -m venv build/gpu-python
	$@ -m pip --disable-pip-version-check install -q --no-deps --no-compile --requirement $<
	$@ benchmarks/gpu/absent_cuda.py

.PHONY: test-gpu-versions
test-gpu-versions: dev build/gpu-bundle.tar.xz $(GPU_PYTHON) ## Compile all kernels for sm_80 and sm_90 and rehearse, here and as where the GPU is
	$(MAKE) compile-there PYTHON=$(GPU_PYTHON)
	$(BIN)/python -m benchmarks.gpu.compile_ahead --beside build/compiled-there.json --write benchmarks/results/kernels_compiled_ahead.json
	$(MAKE) test-there PYTHON=$(GPU_PYTHON)
	WHOLE_REHEARSAL=1 $(BIN)/python -m pytest -n 0 tests/kernels/triton/test_gpu_rehearsal.py $(PYTEST_ARGS)

.PHONY: compile-there
compile-there: gpu-site
	$(GPU_RUN) -m benchmarks.gpu.compile_ahead --write build/compiled-there.json

.PHONY: test-there
test-there: gpu-site
	WHOLE_REHEARSAL=1 $(GPU_RUN) -m pytest $(PARALLEL) -m "not gpu" tests/kernels/triton --durations=20 $(PYTEST_ARGS)

.PHONY: redis
redis:
	@if command -v redis-server >/dev/null; then exit 0; fi; \
	echo "The tests of shared limits need redis-server, which is not installed."; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		echo "Installing it with apt-get ..."; \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq redis-server >/dev/null; \
	else \
		echo "Install it (Debian, Ubuntu: apt-get install redis-server; macOS: brew install redis) and repeat." >&2; \
		exit 1; \
	fi

# --- environment ------------------------------------------------------------------------------------------

.PHONY: dev
dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@if [ -z "$(PYTHON)" ]; then \
		echo "Millrace needs Python 3.11 or newer; found: $$(python3 --version 2>&1 || echo none)." >&2; \
		echo "Install one, or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; fi
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "Millrace needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." >&2; exit 1; }
	@echo "[1/3] Creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
		echo "Python's venv module failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@$(PIP) install -q pip==$(PIP_VERSION)

$(VENV)/.installed: $(INPUTS) | $(VENV)/bin/python
	@echo "[2/3] Installing $(TORCH) (the largest part; once per environment)"
	@# Alone: PyTorch's own index holds few versions of what torch needs, which comes with the rest.
	@$(PIP) install --no-deps $(PIP_ARGS) "$(TORCH)"
	@echo "[3/3] Installing Millrace and its pinned dependencies"
	@$(PIP) install -c constraints.txt $(BUILD_TOOLS)
	@$(PIP) install -c constraints.txt --no-build-isolation "$(TORCH)" -e .
	@$(BIN)/python -c 'import torch; \
		print(f"      torch {torch.__version__}:", f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build")'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "[dev] Installing what the checks need"
	@$(PIP) install -c constraints.txt --group dev
	@touch $@

.PHONY: constraints
constraints: ## Renew constraints.txt: newest versions that satisfy pyproject.toml
	@rm -rf .venv-constraints && $(PYTHON) -m venv .venv-constraints
	.venv-constraints/bin/python -m pip install -q pip==$(PIP_VERSION)
	.venv-constraints/bin/python -m pip install -q --no-deps $(PIP_ARGS) "$(TORCH)"
	.venv-constraints/bin/python -m pip install -q $(BUILD_TOOLS)
	.venv-constraints/bin/python -m pip install -q --no-build-isolation "$(TORCH)" -e . --group dev
	.venv-constraints/bin/python -m pip freeze --exclude-editable \
		| { grep -viE '^(torch|triton|nvidia-[^=]*|cuda-[^=]*|setuptools)(==| @)' || true; } >constraints.txt
	@rm -rf .venv-constraints

.PHONY: clean
clean: ## Remove the environment, caches and local state
	rm -rf $(VENV) .venv-constraints .millrace .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
