"""vLLM's own environment: where it is, and what is installed there. `install` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from engine.config import VllmConfig, load
from engine.vllm_core.install import home, mark_of, version_at
from runtime.errors import ConfigError


def find_python(config: VllmConfig, environ: Mapping[str, str] | None = None) -> Path:
    """The interpreter that has vLLM; raises ConfigError where there is none, or it is being installed."""
    python = Path(config.python) if config.python else home(environ) / "bin" / "python"
    where, folder = "engine.vllm.python" if config.python else "engine.make", python.parent.parent
    if mark_of(folder).exists():
        raise ConfigError(
            f"{where}: the installation in {folder} was interrupted, or still runs; wait for it, or run "
            "`millrace engine install vllm` again"
        )
    if not python.is_file():
        raise ConfigError(
            f"{where}: there is no interpreter at {python}; run `millrace engine install vllm`, or let "
            "engine.vllm.python name one whose environment has vLLM"
        )
    return python


def check(tables: Mapping[str, Any]) -> str:
    """vLLM's version and interpreter; raises ConfigError where `[engine]` has none."""
    python = find_python(load(tables).vllm)
    version = version_at(python)
    if not version:
        raise ConfigError(
            f"engine.vllm.python: {python} has no vLLM; name one that has, or none and run "
            "`millrace engine install vllm`"
        )
    return f"{version} at {python}"
