# Checks beside those that `make test` runs, and what tests need of the machine.

# Files are shared out in their order: those with few tests take longest, and would come last otherwise.
PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

# What machines with a GPU run, under Triton's interpreter: minutes of computing.
GPU_TESTS := tests/kernels/triton

.PHONY: test-random
test-random: dev redis ## Tests by properties, with 500 examples each that no run had before
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not e2e and not agents and not quantizer" \
		--hypothesis-profile=random $(PYTEST_ARGS) $(or $(TESTS),$$(grep -rl --include=test_*.py hypothesis tests/unit tests/contract))

.PHONY: test-vllm
test-vllm: dev redis ## Kill engines that have vLLM's core, which `millrace engine install vllm` installs
	$(BIN)/python -m pytest -n 0 -m vllm --durations=10 $(PYTEST_ARGS) $(or $(TESTS),tests/chaos)

.PHONY: test-quantize
test-quantize: dev ## Quantize by every scheme and method; `python -m services.quantize.environment` installs what does
	$(BIN)/python -m pytest -n 0 -m quantizer --durations=10 $(PYTEST_ARGS) $(or $(TESTS),tests/unit/services/quantize)

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
	tests/kernels/native/test_experts.py tests/kernels/native/test_adapters.py tests/kernels/native/test_attention.py \
	tests/kernels/native/test_per_layer.py tests/kernels/native/test_recurrent.py

.PHONY: test-arm
test-arm: dev ## Run the native kernels' tests as on ARM's processors, emulated by QEMU; root on Debian gets it installed
	tests/arm/prepare.sh
	CXX=aarch64-linux-gnu-g++ NATIVE_KERNELS_CACHE=build/arm/native \
		$(BIN)/python -m kernels.native.build --machine aarch64
	tests/arm/python -m pytest -q -p no:cacheprovider -k "not self_check and not its_check" \
		--durations=10 $(PYTEST_ARGS) $(or $(TESTS),$(ARM_TESTS))

.PHONY: test-clients
test-clients: dev ## Drive one stack by clients that nobody here wrote, and write docs/clients.md; ARGS=litellm runs one
	$(BIN)/python -m tests.clients --write docs/clients.md --torch '$(PIP_ARGS) "$(TORCH)"' $(ARGS) $(TESTS)

.PHONY: test-agents
test-agents: dev ## Coding agents from npm, unmodified, over a stack whose engine plays a script; AGENTS_RUNS=50 repeats their task
	$(BIN)/python -m pytest -n 0 -m agents --durations=10 $(PYTEST_ARGS) $(or $(TESTS),tests/agents)

.PHONY: test-rehearsal
test-rehearsal: dev redis ## Kernels for GPUs under Triton's interpreter, and every phase of `make bench-gpu` over tiny shapes
	WHOLE_REHEARSAL=1 $(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --durations=10 $(PYTEST_ARGS) \
		$(or $(TESTS),$(GPU_TESTS) tests/e2e/test_gpu_lease.py)

.PHONY: proto-check
proto-check: dev ## Check the stubs for drift and lint the protos
	$(BIN)/python proto/generate.py --check
	cd proto && ../$(BIN)/buf lint

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
