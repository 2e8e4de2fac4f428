"""Sums over the ledger: what was used and what it cost, by tenant, tier, model, path, day and more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Engine, Integer, case, func, literal_column, select

from gateway.ledger.tables import REQUESTS
from gateway.limits.prices import NANOS_PER_UNIT
from gateway.limits.store import meter_key
from observability.emit.names import LENGTH_BOUNDS, length_bucket

# Written into the statement: PostgreSQL must see the same expression in SELECT and GROUP BY.
_DAY_MS: ColumnElement[int] = literal_column(str(24 * 3600 * 1000), BigInteger)

_BUCKET: ColumnElement[str] = case(
    *(
        (
            REQUESTS.c.prompt_tokens <= literal_column(str(bound), Integer),
            literal_column(f"'{length_bucket(bound)}'"),
        )
        for bound in LENGTH_BOUNDS
    ),
    else_=literal_column(f"'{length_bucket(LENGTH_BOUNDS[-1] + 1)}'"),
)

# Columns by which rows can be grouped. Days are whole days since the epoch, in UTC.
DIMENSIONS: dict[str, ColumnElement[Any]] = {
    "tenant": REQUESTS.c.tenant,
    "tier": REQUESTS.c.tier,
    "model": REQUESTS.c.model,
    "key": REQUESTS.c.key_id,
    "outcome": REQUESTS.c.outcome,
    "face": REQUESTS.c.face,
    "path": REQUESTS.c.path,
    "guided": REQUESTS.c.guided,
    "adapter": REQUESTS.c.adapter,
    "retries": REQUESTS.c.num_retries,
    "client-request": REQUESTS.c.client_request_id,
    # Range of lengths that the prompt's falls into.
    "bucket": _BUCKET,
    "day": REQUESTS.c.ended_unix_ms - REQUESTS.c.ended_unix_ms % _DAY_MS,
}

_C = REQUESTS.c
# Numbers of each group: times in milliseconds, cost in currency units. The types are named, because
# PostgreSQL's sums are decimals.
NUMBERS: dict[str, tuple[ColumnElement[Any], Callable[[Any], int | float]]] = {
    "num_requests": (func.count(), int),
    # Prompt tokens that were computed; those from the prefix cache are in `cached_prompt_tokens`.
    "computed_prompt_tokens": (func.sum(_C.prompt_tokens - _C.cached_prompt_tokens), int),
    **{
        column.name: (func.sum(column), column.type.python_type)
        for column in _C
        if column.info.get("is_summed")
    },
    "cost": (func.sum(_C.cost_nanos), lambda nanos: int(nanos) / NANOS_PER_UNIT),
    "engine_cost": (func.sum(_C.engine_cost_nanos), lambda nanos: int(nanos) / NANOS_PER_UNIT),
}


@dataclass(frozen=True, slots=True)
class UsageRow:
    """One group."""

    # Values of the dimensions, in the order asked for; a day is its first millisecond since the epoch.
    group: tuple[Any, ...]
    # By the names of NUMBERS.
    numbers: dict[str, int | float]


def month_sums(engine: Engine, month: str) -> dict[str, int]:
    """What monthly meters ought to hold at least, by their keys: tokens and cost of the requests that began
    in the month ("2026-11", UTC), of each tenant and each key.
    """
    begin = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC).timestamp() * 1000
    tokens = func.sum(_C.prompt_tokens + _C.completion_tokens + _C.candidate_tokens)
    sums: dict[str, int] = {}
    with engine.connect() as connection:
        for kind, holder in (("tenant", _C.tenant), ("key", _C.key_id)):
            query = select(holder, tokens, func.sum(_C.cost_nanos)).group_by(holder)
            query = query.where(_C.ended_unix_ms >= begin, _C.ended_unix_ms - _C.duration_ms >= begin)
            for name, num_tokens, nanos in connection.execute(query):
                sums[meter_key(f"{kind}:{name}", "tokens", month)] = int(num_tokens)
                sums[meter_key(f"{kind}:{name}", "cost", month)] = int(nanos)
    return sums


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
    query = select(*groups, *(number.label(name) for name, (number, _) in NUMBERS.items()))
    if since_unix_ms is not None:
        query = query.where(REQUESTS.c.ended_unix_ms >= since_unix_ms)
    if until_unix_ms is not None:
        query = query.where(REQUESTS.c.ended_unix_ms < until_unix_ms)
    if tenant:
        query = query.where(REQUESTS.c.tenant == tenant)
    query = query.group_by(*groups).order_by(*groups) if groups else query
    with engine.connect() as connection:
        rows = connection.execute(query).mappings().all()
    return [
        UsageRow(
            tuple(row[group.name] for group in groups),
            {name: shown(row[name]) for name, (_, shown) in NUMBERS.items()},
        )
        for row in rows
        if row["num_requests"]
    ]
