"""Every table is checked by its owner before the first process starts: a mistake is one line, at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from services.checkpoint import find
from services.config import ModelConfig, SecurityConfig, load_section, read_tables, without_models
from services.supervisor.layout import Layout

# Module that runs as a process to the function that decodes and checks its tables. As with the processes
# themselves the supervisor knows names alone; these modules import nothing heavy.
_CHECKS: Mapping[str, tuple[str, str]] = {
    "observability": ("observability.emit.config", "load"),
    "tokenizer_svc": ("tokenizer_svc.config", "load"),
    "engine": ("engine.config", "load"),
    "gateway": ("gateway.settings", "load_settings"),
    "vllm": ("engine.vllm_core.environment", "check"),
}


def check_tables(layout: Layout, environ: Mapping[str, str] = os.environ) -> None:
    """Raises the ConfigError with which the first process that cannot use its settings would end."""
    shared = read_tables(layout.config, {**environ, **layout.environment})
    load_section(shared, "model", ModelConfig)
    load_section(shared, "security", SecurityConfig).secret()
    # Envoy, which has no table here, is told of the same receivers.
    _check("observability", shared)
    is_read_by_ours = False
    for spec in layout.processes:
        tables = read_tables(layout.config, {**environ, **layout.environment, **spec.environment})
        for module in _CHECKS:
            if module in spec.argv:
                _check(module, tables)
        if "engine" in spec.argv:
            engine = tables.get("engine", {})
            # vLLM knows more architectures than the engine's own core.
            is_read_by_ours = not engine.get("simulated") and engine.get("make") != "vllm"
            if engine.get("make") == "vllm":
                _check("vllm", tables)
    if is_read_by_ours:
        for model in layout.models.models.values():
            check_checkpoint(model.path)


def check_checkpoint(path: str) -> None:
    """Raises ConfigError for one that engines do not read."""
    # The engine's own reading of config.json, which knows what architectures there are.
    import_module("engine.model.families").read_spec(find(path))


def check_live(layout: Layout, environ: Mapping[str, str], changed: Mapping[str, Any]) -> None:
    """Raises ConfigError for `changed` tables that gateways or the tokenizer service would not take."""
    tables = {**without_models(read_tables(layout.config, environ)), **changed}
    for module in ("tokenizer_svc", "gateway"):
        _check(module, tables)


def _check(module: str, tables: Mapping[str, Any]) -> None:
    owner, function = _CHECKS[module]
    check: Callable[[Mapping[str, Any]], object] = getattr(import_module(owner), function)
    check(tables)
