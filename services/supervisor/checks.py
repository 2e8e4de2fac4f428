"""Every table is checked by its owner before the first process starts: a mistake is one line, at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from checkpoint.files import find
from engine import config as engine
from engine.model.families import read_spec
from engine.vllm_core import environment
from gateway.settings import load_settings
from observability.emit import config as observability
from runtime.config import ModelConfig, SecurityConfig, load_section, read_tables, without_models
from services.supervisor.layout import Layout
from tokenizer_svc import config as tokenizer

# Module that runs as a process to what decodes and checks its tables; none imports anything heavy.
_CHECKS: Mapping[str, Callable[[Mapping[str, Any]], object]] = {
    "observability": observability.load,
    "tokenizer_svc": tokenizer.load,
    "engine": engine.load,
    "gateway": load_settings,
}


def check_tables(layout: Layout, environ: Mapping[str, str] = os.environ) -> None:
    """Raises the ConfigError with which the first process that cannot use its settings would end."""
    shared = read_tables(layout.config, {**environ, **layout.environment})
    load_section(shared, "model", ModelConfig)
    load_section(shared, "security", SecurityConfig).secret()
    # Envoy, which has no table here, is told of the same receivers.
    observability.load(shared)
    is_read_by_ours = False
    for spec in layout.processes:
        tables = read_tables(layout.config, {**environ, **layout.environment, **spec.environment})
        for module in _CHECKS:
            if module in spec.argv:
                _CHECKS[module](tables)
        if "engine" in spec.argv:
            table = tables.get("engine", {})
            # vLLM knows more architectures than the engine's own core.
            is_read_by_ours = not table.get("simulated") and table.get("make") != "vllm"
            if table.get("make") == "vllm":
                environment.check(tables)
    if is_read_by_ours:
        for model in layout.models.models.values():
            check_checkpoint(model.path)


def check_checkpoint(path: str) -> None:
    """Raises ConfigError for one that engines do not read."""
    # The engine's own reading of config.json, which knows what architectures there are.
    read_spec(find(path))


def check_live(layout: Layout, environ: Mapping[str, str], changed: Mapping[str, Any]) -> None:
    """Raises ConfigError for `changed` tables that gateways or the tokenizer service would not take."""
    tables = {**without_models(read_tables(layout.config, environ)), **changed}
    for module in ("tokenizer_svc", "gateway"):
        _CHECKS[module](tables)
