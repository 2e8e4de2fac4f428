"""Every table of the configuration, decoded by its owner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from engine.config import EngineConfig
from gateway.config import EnvoyConfig, GatewayConfig, KeysConfig, TenantConfig, TierConfig
from gateway.settings import load_settings
from observability.emit.config import ObservabilityConfig
from runtime.config import ENV_PREFIX, HealthConfig, ModelConfig, SecurityConfig, load_section, read_tables
from services.supervisor.config import SupervisorConfig
from tokenizer_svc.config import TokenizerConfig
from tokenizer_svc.config import load as load_tokenizer

# Tables of the file and what they are decoded into; of those with a table for each name, that one.
TABLES: dict[str, type[msgspec.Struct]] = {
    "engine": EngineConfig,
    "envoy": EnvoyConfig,
    "gateway": GatewayConfig,
    "health": HealthConfig,
    "keys": KeysConfig,
    "model": ModelConfig,
    "observability": ObservabilityConfig,
    "security": SecurityConfig,
    "supervisor": SupervisorConfig,
    "tenants.<name>": TenantConfig,
    "tiers.<name>": TierConfig,
    "tokenizer": TokenizerConfig,
}


def known_settings() -> dict[str, type[msgspec.Struct] | None]:
    """Every table and key by its path ("gateway.limits.store"); a table with what it is decoded into."""
    found: dict[str, type[msgspec.Struct] | None] = {}
    for name, kind in TABLES.items():
        found[name] = kind
        found |= _inside(name, kind)
    return found


def _inside(path: str, kind: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct] | None]:
    found: dict[str, type[msgspec.Struct] | None] = {}
    for field in msgspec.structs.fields(kind):
        key = f"{path}.{field.name}"
        found[key] = None
        for inner, where in _tables_of(field.type, key):
            found[where] = inner
            found |= _inside(where, inner)
    return found


def _tables_of(kind: Any, key: str) -> Iterator[tuple[type[msgspec.Struct], str]]:
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind, key
    for inner in get_args(kind):
        if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
            # A table for each name, or a list of tables.
            yield inner, f"{key}.<name>" if isinstance(kind, type) or "dict" in str(kind) else key


def accept(config: Path, environment: Mapping[str, str]) -> None:
    """Raises ConfigError for a key, in the file or among the variables, that no owner knows."""
    ours = {name: value for name, value in environment.items() if name.startswith(ENV_PREFIX)}
    tables = read_tables(config, ours)
    load_settings(tables)
    load_tokenizer(tables)
    load_section(tables, "engine", EngineConfig).validate()
    load_section(tables, "observability", ObservabilityConfig)
    load_section(tables, "supervisor", SupervisorConfig)
