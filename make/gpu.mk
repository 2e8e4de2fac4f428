# On a machine with a GPU: its own Python with torch and triton, no environment, no network.

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
