"""Reads the gateway's tables as one and checks what one of them says about another.

A wrong name is found at start, with the key that holds it, and never during a request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from contract.errors import MillraceError, invalid
from contract.retention import check as check_retention
from contract.sampling import OPTIONS, SamplingParams, check
from gateway.config import (
    EnvoyConfig,
    GatewayConfig,
    KeyEntry,
    KeysConfig,
    LimitValues,
    PriceConfig,
    RetentionConfig,
    TenantConfig,
    TierConfig,
)
from runtime.addresses import is_this_machine
from runtime.config import HealthConfig, ModelConfig, SecurityConfig, decode_table, load_section
from runtime.errors import ConfigError
from runtime.models import Models, load_models

# Names travel in headers, Redis keys and metric labels.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HASH = re.compile(r"sha256:[0-9a-f]{64}")

# Values of OpenAI's `service_tier` that mean "the caller's own tier" and therefore cannot name one; a tier
# may declare "default" as its word (`openai_name`).
OWN_TIER_ALIASES = frozenset({"auto", "default"})
# In [tiers.<name>.fallback]: any model.
ANY_MODEL = "*"
# In [gateway.store].tenants: every tenant.
ANY_TENANT = "*"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """All tables that a gateway process needs, checked against each other."""

    gateway: GatewayConfig
    tiers: dict[str, TierConfig]
    tenants: dict[str, TenantConfig]
    keys: KeysConfig
    envoy: EnvoyConfig
    security: SecurityConfig
    health: HealthConfig
    models: Models


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
        models=load_models(tables),
    )
    settings = _with_defaults(settings)
    _check_addresses(settings)
    _check_tiers(settings)
    _check_tenants(settings)
    check_models(settings.models, settings)
    check_keys(settings.keys.entries, settings.tenants, settings.tiers, settings.gateway.default_tier)
    _check_development_key(settings)
    _check_jwt(settings)
    _check_limits(settings)
    _check_store(settings)
    return settings


def load_live(tables: Mapping[str, Any], settings: Settings) -> Models:
    """What may change while a gateway runs, checked against what does not; raises ConfigError."""
    models = load_models(tables)
    check_models(models, settings)
    return models


def priced(gateway: GatewayConfig, models: Models) -> dict[str, PriceConfig]:
    """All prices, by the names that clients ask for; a model's own go before `[gateway.prices]`."""
    found = dict(gateway.prices)
    for name, model in models.models.items():
        if model.prices:
            own = decode_table(f"models.{name}.prices", model.prices, PriceConfig)
            found |= dict.fromkeys(model.names, own)
    return found


def check_models(models: Models, settings: Settings) -> None:
    """Raises ConfigError for a model's prices, defaults, tenants or tiers that cannot be meant."""
    priced(settings.gateway, models)
    for name, model in models.models.items():
        key = f"models.{name}"
        for field, names, known in (
            ("tenants", model.tenants, settings.tenants),
            ("tiers", model.tiers, settings.tiers),
        ):
            for each in names:
                if each not in known:
                    raise ConfigError(f"{key}.{field}: there is no [{field}.{each}]; known: {_known(known)}")
        _check_defaults(key, model)
    for tier, config in settings.tiers.items():
        for each in (*(name for name in config.fallback if name != ANY_MODEL), *config.fallback.values()):
            if not any(each in model.names for model in models.models.values()):
                raise ConfigError(
                    f"tiers.{tier}.fallback: there is no model {each!r}; known: {_known(models.models)}"
                )


def _check_defaults(key: str, model: ModelConfig) -> None:
    for name, value in model.defaults.items():
        option = OPTIONS.get(name)
        if option is None or option.limits.per != "token" or option.kind not in (int, float):
            raise ConfigError(f"{key}.defaults.{name}: it is no sampling option with a number; leave it out")
        try:
            given: dict[str, Any] = {name: option.kind(value)}
            check(SamplingParams(**given), invalid)
        except (MillraceError, TypeError, ValueError) as error:
            raise ConfigError(f"{key}.defaults.{name}: {error}") from error


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
    development, gateway = settings.keys.development_tenant, settings.gateway
    if settings.keys.development_hash:
        tenants = {development: TenantConfig(allowed_tiers=tuple(tiers)), **tenants}
        gateway = msgspec.structs.replace(gateway, admin_tenants=(*gateway.admin_tenants, development))
    return msgspec.structs.replace(settings, gateway=gateway, tiers=tiers, tenants=tenants)


def _check_tiers(settings: Settings) -> None:
    for name in settings.tiers:
        if name in OWN_TIER_ALIASES:
            raise ConfigError(f"[tiers.{name}]: 'auto' and 'default' mean the tenant's own tier; rename it")
        _check_retention(f"tiers.{name}.kv", settings.tiers[name].kv)
    _check_openai_names(settings.tiers)
    default = settings.gateway.default_tier
    if default not in settings.tiers:
        raise ConfigError(
            f"gateway.default_tier: there is no [tiers.{default}]; known: {_known(settings.tiers)}"
        )


def _check_retention(key: str, kv: RetentionConfig) -> None:
    try:
        check_retention(kv.default, invalid, key)
    except MillraceError as error:
        raise ConfigError(error.message) from error
    for name, share in (("min_keep", kv.min_keep), ("max_lost", kv.max_lost)):
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"{key}.{name}: {share} is not above 0 and at most 1; set such a part, or none")
    if not kv.policies:
        raise ConfigError(f"{key}.policies: it is empty; name {kv.policy!r} at least, or leave it out")
    if kv.policy not in kv.policies:
        raise ConfigError(f"{key}.policy: {kv.policy!r} is not among {key}.policies; add it there")
    for name, own, least in (
        ("keep", kv.keep, kv.min_keep),
        ("window_tokens", kv.window_tokens, kv.min_window_tokens),
    ):
        if own is not None and least is not None and own < least:
            raise ConfigError(f"{key}.{name}: {own} is less than {key}.min_{name} = {least}; raise it")


def _check_openai_names(tiers: Mapping[str, TierConfig]) -> None:
    owners = {name: name for name in tiers}
    for name, tier in tiers.items():
        owner = owners.setdefault(tier.openai_name or name, name)
        if owner != name:
            raise ConfigError(
                f"tiers.{name}.openai_name: {tier.openai_name!r} leads to [tiers.{owner}] already; "
                "every tier needs its own"
            )


def _check_tenants(settings: Settings) -> None:
    for name in settings.gateway.admin_tenants:
        if name not in settings.tenants:
            raise ConfigError(f"gateway.admin_tenants: there is no [tenants.{name}]; add it")
    for name, tenant in settings.tenants.items():
        for tier in filter(None, (tenant.tier, *tenant.allowed_tiers)):
            if tier not in settings.tiers:
                field = "tier" if tier == tenant.tier else "allowed_tiers"
                raise ConfigError(
                    f"tenants.{name}.{field}: there is no [tiers.{tier}]; known: {_known(settings.tiers)}"
                )


def _check_store(settings: Settings) -> None:
    store = settings.gateway.store
    for name in store.tenants:
        if name != ANY_TENANT and name not in settings.tenants:
            raise ConfigError(
                f"gateway.store.tenants: there is no [tenants.{name}]; known: {_known(settings.tenants)}"
            )
    if store.tenants:
        store.secrets()
    if settings.gateway.batches.url and not settings.gateway.batches.directory:
        raise ConfigError("gateway.batches.url: set gateway.batches.directory, too: files are kept there")


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
        is_priced = any(model.prices for model in settings.models.models.values())
        check_budget(f"{owner}.monthly_budget", limits, settings.gateway, is_priced=is_priced)


def check_budget(key: str, limits: LimitValues, gateway: GatewayConfig, *, is_priced: bool = False) -> None:
    """Raises ConfigError for a budget that nothing could be counted against."""
    if limits.monthly_budget is not None and not (gateway.prices or is_priced):
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
