"""Every wrong configuration is refused at start, by the name of its key."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.auth.directory import hash_key
from gateway.settings import is_loopback, load_settings, split_address
from runtime.errors import ConfigError

HASH = hash_key("mr-x")


def key(**fields: Any) -> dict[str, Any]:
    return {"tenants": {"t": {}}, "keys": {"entries": [{"id": "k", "tenant": "t", "hash": HASH, **fields}]}}


def test_empty_configuration_has_one_tier_and_nobody_in_it() -> None:
    settings = load_settings({})
    assert list(settings.tiers) == ["standard"]
    assert settings.tenants == {}


def test_development_tenant_appears_with_its_key() -> None:
    tables = {"keys": {"development_hash": HASH}, "tiers": {"standard": {}, "gold": {}}}
    assert load_settings(tables).tenants["development"].allowed_tiers == ("standard", "gold")
    mine = {**tables, "tenants": {"development": {"tier": "gold"}}}
    assert load_settings(mine).tenants["development"].tier == "gold"


@pytest.mark.parametrize(
    ("tables", "named"),
    [
        ({"gateway": {"listen": "x"}}, "unknown field `listen`"),
        ({"gateway": {"limits": {"stor": ""}}}, "unknown field `stor`"),
        ({"gateway": {"default_tier": "gold"}, "tiers": {"standard": {}}}, "gateway.default_tier"),
        ({"gateway": {"grpc_listen": "50051"}}, "gateway.grpc_listen"),
        ({"gateway": {"http_listen": "localhost:99999"}}, "gateway.http_listen"),
        ({"gateway": {"engines": []}}, "gateway.engines"),
        ({"gateway": {"engines": ["a:1", "b"]}}, "gateway.engines[1]"),
        ({"gateway": {"discovery": "consul"}}, "gateway.discovery"),
        ({"gateway": {"max_body_bytes": 0}}, "max_body_bytes"),
        ({"gateway": {"limits": {"store": "memcached://x"}}}, "gateway.limits.store"),
        ({"gateway": {"limits": {"on_store_loss": "open"}}}, "on_store_loss"),
        ({"tiers": {"auto": {}}, "gateway": {"default_tier": "auto"}}, "[tiers.auto]"),
        ({"tiers": {"standard": {"prio": 1}}}, "tiers.standard.prio"),
        ({"tiers": {"standard": {"weight": 0}}}, "weight"),
        ({"tiers": 3}, "[tiers]"),
        ({"tenants": {"a b": {}}}, "tenants: 'a b'"),
        ({"tenants": {"t": {"tier": "gold"}}}, "tenants.t.tier"),
        ({"tenants": {"t": {"allowed_tiers": ["gold"]}}}, "tenants.t.allowed_tiers"),
        ({"tenants": {"t": {"requests_per_minute": 0}}}, "requests_per_minute"),
        ({"tenants": {"t": {"monthly_budget": 5.0}}}, "tenants.t.monthly_budget"),
        (key(hash="sha256:123"), "keys.entries[0] (k).hash"),
        (key(hash=HASH.upper()), "keys.entries[0] (k).hash"),
        (key(tenant="u"), "keys.entries[0] (k).tenant"),
        (key(tier="gold"), "keys.entries[0] (k).tier"),
        (key(id="a/b"), "keys.entries[0].id"),
        (key(monthly_budget=1.0), "monthly_budget"),
        ({"keys": {"development_hash": "mr-dev-local"}}, "keys.development_hash"),
        ({"keys": {"development_hash": HASH}, "envoy": {"listen": "0.0.0.0:8080"}}, "envoy.listen"),
        ({"keys": {"development_hash": HASH}, "gateway": {"http_listen": "[::]:80"}}, "gateway.http_listen"),
        ({"gateway": {"store": {"tenants": ["t"], "key": "k" * 32}}}, "gateway.store.tenants"),
        ({"gateway": {"store": {"tenants": ["*"], "key": "k" * 31}}}, "gateway.store.key"),
        ({"gateway": {"store": {"tenants": ["*"], "key_file": "/nowhere/key"}}}, "gateway.store.key_file"),
        ({"keys": {"jwt": {"issuer": "i"}}}, "keys.jwt"),
        ({"keys": {"jwt": {"issuer": "i", "jwks_file": "f", "jwks_url": "u"}}}, "keys.jwt"),
        (
            {"keys": {"jwt": {"issuer": "i", "jwks_file": "f", "tenants": {"o": "t"}}}},
            "keys.jwt.tenants.o",
        ),
    ],
)
def test_error_names_the_key(tables: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(tables)
    assert named in str(caught.value)


def test_same_key_twice_is_refused() -> None:
    entries = [{"id": name, "tenant": "t", "hash": HASH} for name in ("a", "b")]
    with pytest.raises(ConfigError, match=r"entries\[1\] \(b\): same id or hash as keys.entries\[0\] \(a\)"):
        load_settings({"tenants": {"t": {}}, "keys": {"entries": entries}})


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.8.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("gateway:1", False),
    ],
)
def test_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_addresses_with_ipv6_and_port_0() -> None:
    assert split_address("k", "[::1]:0") == ("::1", 0)
