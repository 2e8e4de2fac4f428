"""Reads the gateway's tables as one and checks what one of them says about another.

A wrong name is found at start, with the key that holds it, and never during a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.config import (
    EnvoyConfig,
    GatewayConfig,
    KeyEntry,
    KeysConfig,
    LimitValues,
    TenantConfig,
    TierConfig,
)
from services.addresses import is_this_machine
from services.config import HealthConfig, ModelConfig, SecurityConfig, decode_table, load_section
from services.errors import ConfigError

# Names travel in headers, Redis keys and metric labels.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")

# Values of OpenAI's `service_tier` that mean "the caller's own tier" and therefore cannot name one.
OWN_TIER_ALIASES = frozenset({"auto", "default"})


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All tables that a gateway process needs, checked against each other."""

    gateway: GatewayConfig
    tiers: dict[str, TierConfig]
    tenants: dict[str, TenantConfig]
    keys: KeysConfig
    envoy: EnvoyConfig
    security: SecurityConfig
    health: HealthConfig
    model: ModelConfig


def load_settings(tables: Mapping[str, Any]) -> Settings:
    """Decodes and cross-checks; raises ConfigError naming the key, what is wrong with it and the remedy."""
    settings = Settings(
        gateway=load_section(tables, "gateway", GatewayConfig),
        tiers=_load_map(tables, "tiers", TierConfig),
        tenants=_load_map(tables, "tenants", TenantConfig),
        keys=load_section(tables, "keys", KeysConfig),
        envoy=load_section(tables, "envoy", EnvoyConfig),
        security=load_section(tables, "security", SecurityConfig),
        health=load_section(tables, "health", HealthConfig),
        model=load_section(tables, "model", ModelConfig),
    )
    settings = _with_defaults(settings)
    _check_addresses(settings)
    _check_tiers(settings)
    _check_tenants(settings)
    check_keys(settings.keys.entries, settings.tenants, settings.tiers, settings.gateway.default_tier)
    _check_development_key(settings)
    _check_jwt(settings)
    _check_limits(settings)
    return settings


def check_name(key: str, name: str) -> None:
    """Raises ConfigError unless `name` can travel in headers, labels and store keys."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{key}: {name!r} is not a name; use 1 to 63 of letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )


def check_keys(
    entries: tuple[KeyEntry, ...],
    tenants: Mapping[str, TenantConfig],
    tiers: Mapping[str, TierConfig],
    default_tier: str,
) -> None:
    """Raises ConfigError for the first key with a bad id, hash, tenant or tier, or that is there twice."""
    seen: dict[str, str] = {}
    for index, entry in enumerate(entries):
        key = f"keys.entries[{index}] ({entry.id})"
        check_name(f"keys.entries[{index}].id", entry.id)
        if not _HASH.fullmatch(entry.hash):
            raise ConfigError(
                f"{key}.hash: expected 'sha256:' and 64 lower-case hex digits; "
                "make one with `millrace keys create`"
            )
        if entry.tenant not in tenants:
            raise ConfigError(
                f"{key}.tenant: there is no [tenants.{entry.tenant}]; add it or correct the name"
            )
        tenant = tenants[entry.tenant]
        if entry.tier and entry.tier not in {tenant.tier or default_tier, *tenant.allowed_tiers}:
            raise ConfigError(
                f"{key}.tier: tenant {entry.tenant} may not use tier {entry.tier!r}; "
                f"add it to tenants.{entry.tenant}.allowed_tiers"
            )
        for unique in (entry.id, entry.hash):
            if unique in seen:
                raise ConfigError(f"{key}: same id or hash as {seen[unique]}; every key needs its own")
            seen[unique] = key


Item = TypeVar("Item", bound=msgspec.Struct)


def _load_map(tables: Mapping[str, Any], name: str, kind: type[Item]) -> dict[str, Item]:
    loaded: dict[str, Item] = {}
    section = tables.get(name, {})
    if not isinstance(section, Mapping):
        raise ConfigError(f"[{name}]: expected one table per name, as in [{name}.example]")
    for item_name, table in section.items():
        check_name(name, item_name)
        loaded[item_name] = decode_table(f"{name}.{item_name}", table, kind)
    return loaded


def _with_defaults(settings: Settings) -> Settings:
    tiers = settings.tiers or {settings.gateway.default_tier: TierConfig()}
    tenants = settings.tenants
    development = settings.keys.development_tenant
    if settings.keys.development_hash and development not in tenants:
        tenants = {**tenants, development: TenantConfig(allowed_tiers=tuple(tiers))}
    return msgspec.structs.replace(settings, tiers=tiers, tenants=tenants)


def _check_tiers(settings: Settings) -> None:
    for name in settings.tiers:
        if name in OWN_TIER_ALIASES:
            raise ConfigError(f"[tiers.{name}]: 'auto' and 'default' mean the tenant's own tier; rename it")
    default = settings.gateway.default_tier
    if default not in settings.tiers:
        raise ConfigError(
            f"gateway.default_tier: there is no [tiers.{default}]; known: {_known(settings.tiers)}"
        )


def _check_tenants(settings: Settings) -> None:
    for name, tenant in settings.tenants.items():
        for tier in filter(None, (tenant.tier, *tenant.allowed_tiers)):
            if tier not in settings.tiers:
                field = "tier" if tier == tenant.tier else "allowed_tiers"
                raise ConfigError(
                    f"tenants.{name}.{field}: there is no [tiers.{tier}]; known: {_known(settings.tiers)}"
                )


def _check_development_key(settings: Settings) -> None:
    if not settings.keys.development_hash:
        return
    if not _HASH.fullmatch(settings.keys.development_hash):
        raise ConfigError("keys.development_hash: expected 'sha256:' and 64 lower-case hex digits")
    listeners = {
        "envoy.listen": settings.envoy.listen,
        "gateway.grpc_listen": settings.gateway.grpc_listen,
        "gateway.http_listen": settings.gateway.http_listen,
    }
    for key, address in listeners.items():
        if not is_loopback(address):
            raise ConfigError(
                f"keys.development_hash: the development key is accepted on loopback only, but {key} is "
                f"{address}; remove it and create real keys with `millrace keys create`, or bind to 127.0.0.1"
            )


def _check_jwt(settings: Settings) -> None:
    jwt = settings.keys.jwt
    if not jwt.issuer:
        return
    if bool(jwt.jwks_file) == bool(jwt.jwks_url):
        raise ConfigError("keys.jwt: set exactly one of jwks_file and jwks_url")
    if not jwt.tenant_claim:
        raise ConfigError("keys.jwt.tenant_claim: name the claim that says which tenant a token belongs to")
    for value, tenant in jwt.tenants.items():
        if tenant not in settings.tenants:
            raise ConfigError(f"keys.jwt.tenants.{value}: there is no [tenants.{tenant}]")


def _check_limits(settings: Settings) -> None:
    store = settings.gateway.limits.store
    if store and not store.startswith(("redis://", "rediss://", "unix://")):
        raise ConfigError(f"gateway.limits.store: {store!r} is not a redis://, rediss:// or unix:// URL")
    owners = {f"tenants.{name}": tenant.limits for name, tenant in settings.tenants.items()}
    owners |= {f"keys.entries ({entry.id})": entry.limits for entry in settings.keys.entries}
    for owner, limits in owners.items():
        check_budget(f"{owner}.monthly_budget", limits, settings.gateway)


def check_budget(key: str, limits: LimitValues, gateway: GatewayConfig) -> None:
    """Raises ConfigError for a budget that nothing could be counted against."""
    if limits.monthly_budget is not None and not gateway.prices:
        raise ConfigError(
            f'{key}: a budget needs prices; add [gateway.prices."*"], or use monthly tokens instead'
        )


def _check_addresses(settings: Settings) -> None:
    gateway, envoy = settings.gateway, settings.envoy
    named: list[tuple[str, str]] = [
        ("gateway.grpc_listen", gateway.grpc_listen),
        ("gateway.http_listen", gateway.http_listen),
        ("gateway.tokenizer", gateway.tokenizer),
        ("envoy.listen", envoy.listen),
        ("envoy.admin", envoy.admin),
    ]
    named += [(f"gateway.engines[{index}]", address) for index, address in enumerate(gateway.engines)]
    named += [(f"envoy.gateway_grpc[{index}]", address) for index, address in enumerate(envoy.gateway_grpc)]
    named += [(f"envoy.gateway_http[{index}]", address) for index, address in enumerate(envoy.gateway_http)]
    if gateway.metrics_listen:
        named.append(("gateway.metrics_listen", gateway.metrics_listen))
    for key, address in named:
        split_address(key, address)
    if not gateway.engines and gateway.discovery == "static":
        raise ConfigError('gateway.engines: at least one engine is needed with discovery = "static"')
    if gateway.discovery != "static" and not gateway.discovery.startswith(("dns:", "file:")):
        raise ConfigError(
            f"gateway.discovery: {gateway.discovery!r} is none of 'static', 'dns:<host>:<port>' and "
            "'file:<path>'"
        )


def split_address(key: str, address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port"; raises ConfigError naming `key`."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdigit() or int(port) > 65535 or not host:
        raise ConfigError(f"{key}: {address!r} is not host:port")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether "host:port" can be reached from this machine only."""
    return is_this_machine(address.rpartition(":")[0].strip("[]"))


def _known(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names)) or "none"
