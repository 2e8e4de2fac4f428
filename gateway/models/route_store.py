"""Weights of aliases that a rollout has set, in a database that all gateways share.

`millrace rollout` writes them (services.rollout), `route_watch` reads them.
"""

from __future__ import annotations

import msgspec
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Engine,
    Float,
    MetaData,
    String,
    Table,
    Text,
    delete,
    insert,
    select,
    update,
)

from gateway.database import open_database

_METADATA = MetaData()

_WEIGHTS = Table(
    "route_weights",
    _METADATA,
    Column("alias", String(256), primary_key=True),
    # Weights by model as JSON: those in force, and those without the candidate.
    Column("weights", Text, nullable=False),
    Column("without", Text, nullable=False),
    # The file's weights when these were set.
    Column("configured", Text, nullable=False),
    Column("is_running", Boolean, nullable=False),
    # It changes while somebody watches.
    Column("heartbeat", BigInteger, nullable=False),
    # After so long without a change of it `without` holds; 0 waits for ever.
    Column("dead_man_s", Float, nullable=False),
)


class RouteWeights(msgspec.Struct, frozen=True, kw_only=True):
    """What a rollout says of one alias."""

    alias: str
    # By model.
    weights: dict[str, float]
    without: dict[str, float]
    configured: dict[str, float]
    is_running: bool
    heartbeat: int
    dead_man_s: float = 0.0


def open_route_store(url: str, *further: MetaData) -> Engine:
    """The database, with `further` tables beside this one; raises ConfigError naming gateway.rollout.url."""

    def prepare(engine: Engine) -> None:
        for each in (_METADATA, *further):
            each.create_all(engine)

    return open_database(url, prepare, key="gateway.rollout.url")


def read_weights(connection: Connection) -> list[RouteWeights]:
    """Those of all aliases."""
    return [
        RouteWeights(
            alias=row.alias,
            weights=_decoded(row.weights),
            without=_decoded(row.without),
            configured=_decoded(row.configured),
            is_running=row.is_running,
            heartbeat=row.heartbeat,
            dead_man_s=row.dead_man_s,
        )
        for row in connection.execute(select(_WEIGHTS))
    ]


def write_weights(connection: Connection, weights: RouteWeights) -> None:
    """Takes the place of what the alias had."""
    connection.execute(delete(_WEIGHTS).where(_WEIGHTS.c.alias == weights.alias))
    encoded = {
        name: msgspec.json.encode(getattr(weights, name)).decode()
        for name in ("weights", "without", "configured")
    }
    connection.execute(insert(_WEIGHTS).values(**{**msgspec.structs.asdict(weights), **encoded}))


def beat(connection: Connection, alias: str, heartbeat: int) -> None:
    """A sign of life."""
    connection.execute(update(_WEIGHTS).where(_WEIGHTS.c.alias == alias).values(heartbeat=heartbeat))


def _decoded(text: str) -> dict[str, float]:
    return msgspec.json.decode(text, type=dict[str, float])
