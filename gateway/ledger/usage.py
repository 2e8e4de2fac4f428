"""Sums over the ledger: what was used and what it cost, by tenant, tier, model, key, outcome or day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Engine, func, literal_column, select

from gateway.ledger.tables import REQUESTS
from gateway.limits.prices import NANOS_PER_UNIT

# Written into the statement: PostgreSQL must see the same expression in SELECT and GROUP BY.
_DAY_MS: ColumnElement[int] = literal_column(str(24 * 3600 * 1000), BigInteger)

# What rows can be grouped by. Days are whole days since the epoch, in UTC.
DIMENSIONS: dict[str, ColumnElement[Any]] = {
    "tenant": REQUESTS.c.tenant,
    "tier": REQUESTS.c.tier,
    "model": REQUESTS.c.model,
    "key": REQUESTS.c.key_id,
    "outcome": REQUESTS.c.outcome,
    "face": REQUESTS.c.face,
    "day": REQUESTS.c.ended_unix_ms - REQUESTS.c.ended_unix_ms % _DAY_MS,
}

_SUMS = (
    "prompt_tokens",
    "cached_prompt_tokens",
    "completion_tokens",
    "speculative_waste_tokens",
    "recomputed_tokens",
    "grammar_ms",
    "queue_ms",
    "cost_nanos",
)


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group. Times in milliseconds, cost in currency units."""

    # Values of the dimensions, in the order asked for; a day is its first millisecond since the epoch.
    group: tuple[Any, ...]
    num_requests: int
    # Prompt tokens that were computed; those from the prefix cache are in `cached_prompt_tokens`.
    computed_prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    speculative_waste_tokens: int
    recomputed_tokens: int
    grammar_ms: float
    queue_ms: float
    cost: float


def usage(
    engine: Engine,
    by: Sequence[str],
    *,
    since_unix_ms: int | None = None,
    until_unix_ms: int | None = None,
    tenant: str = "",
) -> list[UsageRow]:
    """Sums of the requests that ended in [since, until), grouped and ordered by the named DIMENSIONS."""
    groups = [DIMENSIONS[name].label(f"group_{name}") for name in by]
    sums = [func.sum(REQUESTS.c[name]).label(name) for name in _SUMS]
    query = select(*groups, func.count().label("num_requests"), *sums)
    if since_unix_ms is not None:
        query = query.where(REQUESTS.c.ended_unix_ms >= since_unix_ms)
    if until_unix_ms is not None:
        query = query.where(REQUESTS.c.ended_unix_ms < until_unix_ms)
    if tenant:
        query = query.where(REQUESTS.c.tenant == tenant)
    query = query.group_by(*groups).order_by(*groups) if groups else query
    with engine.connect() as connection:
        rows = connection.execute(query).mappings().all()
    return [_row(tuple(row[group.name] for group in groups), row) for row in rows if row["num_requests"]]


def _row(group: tuple[Any, ...], row: Any) -> UsageRow:
    return UsageRow(
        group=group,
        num_requests=int(row["num_requests"]),
        computed_prompt_tokens=int(row["prompt_tokens"] - row["cached_prompt_tokens"]),
        cached_prompt_tokens=int(row["cached_prompt_tokens"]),
        completion_tokens=int(row["completion_tokens"]),
        speculative_waste_tokens=int(row["speculative_waste_tokens"]),
        recomputed_tokens=int(row["recomputed_tokens"]),
        grammar_ms=float(row["grammar_ms"]),
        queue_ms=float(row["queue_ms"]),
        cost=int(row["cost_nanos"]) / NANOS_PER_UNIT,
    )
