"""Every table of the configuration, decoded by its owner."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.config import EngineConfig
from gateway.settings import load_settings
from observability.emit.config import ObservabilityConfig
from services.config import ENV_PREFIX, load_section, read_tables
from services.supervisor.config import SupervisorConfig
from tokenizer_svc.config import load as load_tokenizer


def accept(config: Path, environment: Mapping[str, str]) -> None:
    """Raises ConfigError for a key, in the file or among the variables, that no owner knows."""
    ours = {name: value for name, value in environment.items() if name.startswith(ENV_PREFIX)}
    tables = read_tables(config, ours)
    load_settings(tables)
    load_tokenizer(tables)
    load_section(tables, "engine", EngineConfig).validate()
    load_section(tables, "observability", ObservabilityConfig)
    load_section(tables, "supervisor", SupervisorConfig)
