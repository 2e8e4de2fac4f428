"""`service_tier`, honoured or refused by name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import msgspec
import pytest
from millrace.common.v1 import context_pb2

from contract.errors import MillraceError, Reason
from gateway.auth.verifier import write_tier
from gateway.config import TierConfig
from gateway.settings import load_settings
from gateway.tiers import Tier, Tiers
from gateway.types.request import Identity
from runtime.errors import ConfigError

SETTINGS = load_settings(
    {
        "tiers": {"standard": {}, "gold": {"priority": 5}, "secret": {}},
        "tenants": {"acme": {"allowed_tiers": ["gold"]}, "rich": {"tier": "gold", "weight": 3.0}},
    }
)


def identity(tenant: str, tier: str) -> Identity:
    return Identity(request_id="r", tenant=tenant, key_id="k", tier=tier)


@pytest.mark.parametrize(
    ("tenant", "own", "requested", "expected"),
    [
        ("acme", "standard", "", "standard"),
        ("acme", "standard", "auto", "standard"),
        ("acme", "standard", "default", "standard"),
        ("acme", "standard", "gold", "gold"),
        ("rich", "gold", "auto", "gold"),
        ("rich", "gold", "gold", "gold"),
        # A key's own tier may differ from its tenant's; the tenant's stays open to it.
        ("acme", "gold", "auto", "gold"),
        ("acme", "gold", "standard", "standard"),
    ],
)
def test_allowed(tenant: str, own: str, requested: str, expected: str) -> None:
    assert Tiers(SETTINGS).resolve(identity(tenant, own), requested).name == expected


@pytest.mark.parametrize("requested", ["secret", "no-such-tier", "flex"])
def test_refused_alike_whether_it_exists_or_not(requested: str) -> None:
    with pytest.raises(MillraceError) as caught:
        Tiers(SETTINGS).resolve(identity("acme", "standard"), requested)
    assert caught.value.reason is Reason.TIER_NOT_ALLOWED
    assert caught.value.field == "service_tier"
    assert caught.value.message.endswith("use one of: auto, default, standard, gold")


CALLED = Tiers(
    load_settings(
        {
            "gateway": {"default_tier": "standard"},
            "tiers": {
                "standard": {"openai_name": "default"},
                "gold": {"openai_name": "priority"},
                "slow": {"openai_name": "flex"},
            },
            "tenants": {"acme": {"allowed_tiers": ["gold"]}, "rich": {"tier": "gold"}},
        }
    )
)


@pytest.mark.parametrize(
    ("tenant", "own", "requested", "expected"),
    [
        ("acme", "standard", "priority", "gold"),
        ("acme", "standard", "gold", "gold"),
        ("acme", "gold", "auto", "gold"),
        # Where a tier is called "default", that word means it.
        ("acme", "gold", "default", "standard"),
    ],
)
def test_a_tier_is_found_by_what_openai_calls_it(
    tenant: str, own: str, requested: str, expected: str
) -> None:
    tier = CALLED.resolve(identity(tenant, own), requested)
    assert tier.name == expected
    assert tier.openai_name == {"gold": "priority", "standard": "default"}[expected]


@pytest.mark.parametrize(
    ("tenant", "own", "requested", "words"),
    [
        ("acme", "standard", "flex", "auto, standard, gold, default, priority"),
        ("rich", "gold", "default", "auto, gold, priority"),
    ],
)
def test_openai_s_name_widens_nothing(tenant: str, own: str, requested: str, words: str) -> None:
    with pytest.raises(MillraceError) as caught:
        CALLED.resolve(identity(tenant, own), requested)
    assert caught.value.reason is Reason.TIER_NOT_ALLOWED
    assert caught.value.message.endswith(f"use one of: {words}")


@pytest.mark.parametrize(
    "tiers",
    [
        {"standard": {"openai_name": "flex"}, "gold": {"openai_name": "flex"}},
        {"standard": {"openai_name": "flex"}, "flex": {}},
        {"flex": {"openai_name": "priority"}, "standard": {"openai_name": "flex"}},
    ],
)
def test_a_name_leads_to_one_tier(tiers: dict[str, dict[str, str]]) -> None:
    with pytest.raises(ConfigError, match=r"tiers\.\w+\.openai_name: 'flex' leads to \[tiers\.\w+\] already"):
        load_settings({"tiers": tiers})


@pytest.mark.parametrize(
    ("config", "accepted_within_ms"),
    [
        (TierConfig(), None),
        (TierConfig(ttft_target_ms=500), 500),
        (TierConfig(ttft_target_ms=500, queue_limit_ms=900), 500),
        (TierConfig(ttft_target_ms=500, queue_limit_ms=90), 90),
        (TierConfig(ttft_target_ms=500, admission="best_effort"), None),
        (TierConfig(ttft_target_ms=500, admission="best_effort", queue_limit_ms=900), 900),
    ],
)
def test_guaranteed_tiers_take_what_meets_the_target_and_best_effort_what_comes(
    config: TierConfig, accepted_within_ms: int | None
) -> None:
    context = context_pb2.RequestContext(queue_limit_ms=1)
    write_tier(context, Tier("a", config), tenant_weight=1.0)
    limit_ms = context.queue_limit_ms if context.HasField("queue_limit_ms") else None
    assert limit_ms == accepted_within_ms
    # What was accepted is not refused when another engine continues it, and keeps its deadline.
    write_tier(context, Tier("a", config).accepted, tenant_weight=1.0)
    assert not context.HasField("queue_limit_ms")
    assert context.HasField("ttft_target_ms") == (config.ttft_target_ms is not None)


def test_promises_of_another_tier_replace_all_of_the_first() -> None:
    context = context_pb2.RequestContext()
    write_tier(
        context, Tier("a", TierConfig(priority=1, ttft_target_ms=5, max_context_tokens=9)), tenant_weight=1.0
    )
    write_tier(context, Tier("b", TierConfig(priority=2, weight=2.0, queue_limit_ms=7)), tenant_weight=3.0)
    assert (context.tier, context.priority, context.weight, context.queue_limit_ms) == ("b", 2, 6.0, 7)
    assert not context.HasField("ttft_target_ms")
    assert not context.HasField("max_context_tokens")


@pytest.mark.parametrize("path", ["config/millrace.toml", "k8s/base/millrace.toml"])
def test_what_is_shipped_answers_late_rather_than_not_at_all(path: str) -> None:
    tables = tomllib.loads((Path(__file__).parents[4] / path).read_text())
    tiers = load_settings(tables).tiers
    assert tiers
    assert all(tier.accepted_within_ms is None for tier in tiers.values())
    assert load_settings({}).tiers["standard"].accepted_within_ms is None


@pytest.mark.parametrize("requested", ["", "auto", "default", "standard", "flex"])
def test_lines_of_batches_run_behind_the_lowest_tier(requested: str) -> None:
    line = msgspec.structs.replace(identity("rich", "gold"), in_batch=True)
    tier = Tiers(SETTINGS).resolve(line, requested)
    assert (tier.name, tier.config.priority) == ("standard", -1)
    # It waits as long as it takes, and no other model answers it.
    assert tier.config.accepted_within_ms is None
    assert not tier.config.fallback


def test_lines_of_batches_get_no_other_tier() -> None:
    line = msgspec.structs.replace(identity("rich", "gold"), in_batch=True)
    with pytest.raises(MillraceError) as caught:
        Tiers(SETTINGS).resolve(line, "gold")
    assert (caught.value.reason, caught.value.field) == (Reason.TIER_NOT_ALLOWED, "service_tier")
    assert "'standard'" in caught.value.message
