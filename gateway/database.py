"""Opens the databases of the gateway: SQLite by default, PostgreSQL by URL."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import (
    ArgumentError,
    DBAPIError,
    IntegrityError,
    NoSuchModuleError,
    OperationalError,
    ProgrammingError,
)

from runtime.errors import ConfigError

# For libpq: a server of which nothing comes any more counts as away after this long. What a query takes is
# not limited by it: the server's kernel answers meanwhile.
_SILENCE: dict[str, int] = {
    "connect_timeout": 5,
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

_LIBPQ_DRIVERS = frozenset({"psycopg", "psycopg2"})

# How long several processes that start at once may be in one another's way, and how often each looks again.
_START_LIMIT_S = 10.0
_PAUSE_S = 0.02


def database_url(text: str) -> URL:
    """A SQLAlchemy URL; a text without "://" is the path of an SQLite file. Raises ArgumentError."""
    return make_url(text if "://" in text else f"sqlite:///{text}")


def open_database(url: str, prepare: Callable[[Engine], None], *, key: str) -> Engine:
    """Connects and has `prepare` make the tables, again where another process is in its way; raises
    ConfigError naming the configuration key.
    """
    try:
        parsed = database_url(url)
        is_sqlite = parsed.get_backend_name() == "sqlite"
        if is_sqlite and parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        # Options in the URL win over ours.
        patience = {name: value for name, value in _SILENCE.items() if name not in parsed.query}
        # A connection that the server closed meanwhile is replaced instead of failing the next write.
        engine = create_engine(
            parsed,
            pool_pre_ping=not is_sqlite,
            connect_args=patience if parsed.get_driver_name() in _LIBPQ_DRIVERS else {},
        )
        if is_sqlite:
            event.listen(engine, "connect", _prepare_sqlite)
        _prepare(engine, prepare)
    except (ArgumentError, NoSuchModuleError, OSError, DBAPIError) as error:
        raise ConfigError(f"{key}: {_redacted(url)}: {str(error).splitlines()[0]}") from error
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: {_redacted(url)}: the database driver {error.name!r} is not installed; "
            "for PostgreSQL: pip install 'psycopg[binary]' and a URL postgresql+psycopg://..."
        ) from error
    return engine


def _prepare(engine: Engine, prepare: Callable[[Engine], None]) -> None:
    ends_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            prepare(engine)
        except (OperationalError, ProgrammingError, IntegrityError) as error:
            # Several gateways start at once and another one was first with some of the tables.
            if not _is_race(error) or time.monotonic() >= ends_s:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _is_race(error: DBAPIError) -> bool:
    """Whether a look at what is there by now helps; nothing does with a server that cannot be reached."""
    return isinstance(error, ProgrammingError | IntegrityError) or any(
        words in str(error.orig) for words in ("database is locked", "already exists")
    )


def _prepare_sqlite(connection: sqlite3.Connection, _record: Any) -> None:
    # Another process may hold the write lock for a moment; waited for in milliseconds, set before all else
    # because switching to the log takes the lock too.
    connection.execute("PRAGMA busy_timeout=5000")
    _use_write_ahead_log(connection)
    # Commits survive the death of the process; the last ones may be lost when the machine loses power.
    connection.execute("PRAGMA synchronous=NORMAL")


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """With it readers do not wait for the writer.

    Of several processes that switch a new file at once, SQLite tells all but one that it is locked, without
    regard to the time-out: each holds what the others wait for.
    """
    ends_s = time.monotonic() + _START_LIMIT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() >= ends_s:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


def _redacted(url: str) -> str:
    try:
        return database_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return "not a database URL"
