"""Answers of /v1/account, /v1/usage and /v1/status as types, from which their OpenAPI document is made."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta, Struct

Natural: TypeAlias = Annotated[int, Meta(ge=0)]


class TierCard(Struct, frozen=True, kw_only=True):
    """A tier that the key may ask for by `service_tier`; the first one is its own. Targets in ms."""

    name: str
    service_tier: str
    ttft_target_ms: int | None
    tpot_target_ms: int | None


class TokenPrices(Struct, frozen=True, kw_only=True):
    """Currency units for a million tokens."""

    prompt: float
    cached_prompt: float
    completion: float


class Account(Struct, frozen=True, kw_only=True):
    """Whose key it is, and what it may do. `prices` are by the names in /v1/models."""

    tenant: str
    key: str
    tiers: list[TierCard]
    prices: dict[str, TokenPrices]
    # Whether /v1/conversations keeps what the tenant puts there, and whether /v1/status answers.
    keeps_conversations: bool
    is_operator: bool


class UsageSum(Struct, frozen=True, kw_only=True):
    """Sums of the requests that ended in a day (2026-11-27, UTC), or that have the `group` in common."""

    group: str
    num_requests: Natural
    computed_prompt_tokens: Natural
    cached_prompt_tokens: Natural
    # Those of candidates and beams, which are paid for, included.
    completion_tokens: Natural
    cost: float


class UsageTable(Struct, frozen=True, kw_only=True):
    """Usage of the key's tenant since a moment; `is_kept` is false where this deployment keeps no ledger."""

    object: Literal["list"] = "list"
    by: str
    since: Natural
    is_kept: bool
    data: list[UsageSum]


class TierTotals(Struct, frozen=True, kw_only=True):
    """Of one tier, what this gateway has counted since it was started; `active` is now.

    Buckets are pairs of an upper bound in seconds (null: none) and how many were no longer.
    """

    name: str
    active: Natural
    num_requests: Natural
    num_refused: Natural
    num_judged: Natural
    num_met: Natural
    completion_tokens: Natural
    # Accepted requests that have met all targets of the tier.
    num_good: Natural
    cost: float
    ttft_buckets: list[tuple[float | None, Natural]]
    tpot_buckets: list[tuple[float | None, Natural]]


class EngineCard(Struct, frozen=True, kw_only=True):
    """An engine by its own last report. `kv_usage` is the share of its blocks that sequences refer to."""

    address: str
    model: str | None
    state: str
    num_running: Natural
    num_waiting: Natural
    oldest_wait_s: float
    kv_usage: float | None
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    # Median of its latest steps; null before the first.
    step_p50_s: float | None
    # Since it was started.
    prefix_queried_tokens: Natural
    prefix_hit_tokens: Natural
    num_preemptions: Natural


class DeploymentStatus(Struct, frozen=True, kw_only=True):
    """What runs, seen from the gateway that answers. Two of them give rates: `at_s` is its own clock."""

    gateway: str
    at_s: float
    tiers: list[TierTotals]
    engines: list[EngineCard]


class AccountError(Struct, frozen=True):
    """`error` has message, type, param, code and reason, as in /openapi.json."""

    error: dict[str, Any]


ANSWERS: tuple[type[Struct], ...] = (Account, UsageTable, DeploymentStatus, AccountError)
