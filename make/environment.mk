# The environment in .venv: Python, torch, Millrace with its pinned dependencies, and what the checks need.

PIP := $(BIN)/python -m pip --disable-pip-version-check
PIP_VERSION := 26.0
# Build tools of the editable install, so that pip needs no second, isolated environment.
BUILD_TOOLS := hatchling editables
INPUTS := pyproject.toml constraints.txt

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
