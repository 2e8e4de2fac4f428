"""The ledger's one table, and how its database is opened."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Float,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    create_engine,
    event,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError, ProgrammingError

from services.errors import ConfigError

_METADATA = MetaData()

# One row a request. Times in milliseconds, money in billionths of the currency unit.
REQUESTS = Table(
    "requests",
    _METADATA,
    # Made by the writer, so that a batch can be written again after an unclear failure.
    Column("entry_id", String(32), primary_key=True),
    Column("request_id", String(128), nullable=False, index=True),
    Column("ended_unix_ms", BigInteger, nullable=False, index=True),
    Column("tenant", String(63), nullable=False, index=True),
    Column("key_id", String(128), nullable=False),
    Column("tier", String(63), nullable=False),
    Column("model", String(256), nullable=False),
    Column("face", String(8), nullable=False),
    Column("outcome", String(64), nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_prompt_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("reasoning_tokens", Integer, nullable=False),
    # Tokens drafted and thrown away.
    Column("speculative_waste_tokens", Integer, nullable=False),
    # Tokens computed a second time after preemptions.
    Column("recomputed_tokens", Integer, nullable=False),
    Column("num_choices", Integer, nullable=False),
    Column("num_preemptions", Integer, nullable=False),
    Column("num_engines_lost", Integer, nullable=False),
    Column("grammar_ms", Float, nullable=False),
    Column("queue_ms", Float, nullable=False),
    Column("ttft_ms", Float),
    Column("duration_ms", Float, nullable=False),
    Column("cost_nanos", BigInteger, nullable=False),
    # The request's free labels as JSON.
    Column("labels", Text, nullable=False),
)


def open_database(url: str) -> Engine:
    """Connects and creates the table where it is missing; raises ConfigError naming gateway.ledger.url."""
    try:
        parsed = make_url(url)
        is_sqlite = parsed.get_backend_name() == "sqlite"
        if is_sqlite and parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        engine = create_engine(parsed)
        if is_sqlite:
            event.listen(engine, "connect", _prepare_sqlite)
        _create_tables(engine)
    except (ArgumentError, NoSuchModuleError, OSError, OperationalError) as error:
        raise ConfigError(f"gateway.ledger.url: {_redacted(url)}: {_first_line(error)}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"gateway.ledger.url: {_redacted(url)}: the database driver is not installed "
            f"({error.name}); for PostgreSQL: pip install 'psycopg[binary]' and postgresql+psycopg://..."
        ) from error
    return engine


def _create_tables(engine: Engine) -> None:
    try:
        _METADATA.create_all(engine)
    except (OperationalError, ProgrammingError):
        # Several gateways start at once and another one was first: now the tables are there.
        _METADATA.create_all(engine)


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    # With a write-ahead log readers do not wait for the writer. NORMAL: a committed batch survives the death
    # of the process; the last ones may be lost when the machine loses power.
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=5000"):
        connection.execute(f"PRAGMA {pragma}")


def _redacted(url: str) -> str:
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "not a database URL"


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
