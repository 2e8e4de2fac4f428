"""The tables of stored state. Every key begins with the tenant; what a client sent or got is sealed."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    event,
)

from gateway.database import open_database

# Longest id that is looked for; those that are given out are shorter.
MAX_ID = 64

_METADATA = MetaData()


def _keys(*names: str) -> tuple[Column[Any], ...]:
    tenant = Column("tenant", String(63), primary_key=True)
    return tenant, *(Column(name, String(MAX_ID), primary_key=True) for name in names)


# Bytes of a tenant in all tables.
USED = Table("store_used", _METADATA, *_keys(), Column("num_bytes", BigInteger, nullable=False))

RESPONSES = Table(
    "store_responses",
    _METADATA,
    *_keys("id"),
    # The response that it continues; "" for none.
    Column("previous_id", String(MAX_ID), nullable=False),
    Column("status", String(16), nullable=False),
    Column("is_background", Integer, nullable=False),
    Column("expires_unix_ms", BigInteger, nullable=False, index=True),
    # Of the row and of everything that is deleted with it.
    Column("num_bytes", BigInteger, nullable=False),
    # The resource as JSON, without its output, whose items are rows of their own.
    Column("body", LargeBinary, nullable=False),
    # What continues a response.
    Index("store_responses_by_previous", "tenant", "previous_id"),
)

CONVERSATIONS = Table(
    "store_conversations",
    _METADATA,
    *_keys("id"),
    Column("expires_unix_ms", BigInteger, nullable=False, index=True),
    # The next item's position.
    Column("next_position", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    # The resource as JSON.
    Column("body", LargeBinary, nullable=False),
)

# Items of responses and of conversations, in order. Those of a response's output come after its input.
ITEMS = Table(
    "store_items",
    _METADATA,
    *_keys("owner_id"),
    Column("position", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(MAX_ID), nullable=False),
    Column("is_output", Integer, nullable=False),
    Column("num_bytes", Integer, nullable=False),
    # JSON.
    Column("body", LargeBinary, nullable=False),
    Index("store_items_by_id", "tenant", "id"),
)

# Events of background responses, several a row: a msgpack array of the bytes of each.
EVENTS = Table(
    "store_events",
    _METADATA,
    *_keys("response_id"),
    # Sequence number of the first one, and how many there are.
    Column("first", BigInteger, primary_key=True, autoincrement=False),
    Column("num_events", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
)

# Background responses that have not ended: who computes them, until when without a sign of life, and what is
# needed to compute them anew.
WORK = Table(
    "store_work",
    _METADATA,
    *_keys("response_id"),
    Column("owner", String(MAX_ID), nullable=False),
    Column("lease_until_unix_ms", BigInteger, nullable=False, index=True),
    # Gateways that have had it.
    Column("num_owners", Integer, nullable=False),
    Column("body", LargeBinary, nullable=False),
)


def open_store(url: str) -> Engine:
    """The database of stored state; raises ConfigError naming gateway.store.url."""

    def prepare(engine: Engine) -> None:
        if engine.dialect.name == "sqlite":
            # What is deleted is overwritten, not just forgotten. For connections to come, and for this one.
            event.listen(engine, "connect", _secure_delete)
            engine.dispose()
        _METADATA.create_all(engine)

    return open_database(url, prepare, key="gateway.store.url")


def _secure_delete(connection: Any, _record: Any) -> None:
    connection.execute("PRAGMA secure_delete=ON")
