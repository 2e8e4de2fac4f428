"""The local span store: SQLite, written by the receiver, read by the terminal commands at the same time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from observability import names

# Share of the rows that goes when a limit is passed, so that it is not passed again at once.
_TRIM_SHARE = 0.1
_SCHEMA_VERSION = 1
# Limits are looked at after so many spans, or after one in a hundred of the limit.
_TRIM_EVERY_SPANS = 200
# Spans that are looked up by name; an index over all of them would cost as much as the rows.
_INDEXED = (names.GATEWAY_REQUEST, names.ENVOY_INGRESS, names.ENGINE_PREFILL)
_IS_INDEXED = f"name IN ({', '.join(repr(str(name)) for name in _INDEXED)})"

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS spans (
  sequence INTEGER PRIMARY KEY,
  trace_id TEXT NOT NULL,
  span_id TEXT NOT NULL,
  parent_id TEXT NOT NULL,
  service TEXT NOT NULL,
  name TEXT NOT NULL,
  start_ns INTEGER NOT NULL,
  end_ns INTEGER NOT NULL,
  request_id TEXT NOT NULL,
  error TEXT NOT NULL,
  attributes TEXT NOT NULL,
  links TEXT NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS spans_by_trace ON spans (trace_id, span_id);
CREATE INDEX IF NOT EXISTS spans_by_request ON spans (request_id) WHERE request_id <> '';
CREATE INDEX IF NOT EXISTS spans_by_name ON spans (name, start_ns)
  WHERE {_IS_INDEXED};
"""
_COLUMNS = (
    "trace_id, span_id, parent_id, service, name, start_ns, end_ns, request_id, error, attributes, links"
)
_INSERT = f"INSERT OR REPLACE INTO spans ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


_encode = msgspec.json.Encoder().encode


class StoreError(Exception):
    """The store cannot answer; the message says why and what to do."""


@dataclass(frozen=True)
class StoredSpan:
    """One finished span. Ids are lower-case hex, `parent_id` is "" for a root, times are Unix nanoseconds."""

    trace_id: str
    span_id: str
    parent_id: str
    service: str
    name: str
    start_ns: int
    end_ns: int
    # "" when the span succeeded.
    error: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)
    # (trace id, span id) of spans of other requests.
    links: tuple[tuple[str, str], ...] = ()

    @property
    def duration_ms(self) -> float:
        """Length of the span."""
        return (self.end_ns - self.start_ns) / 1e6

    @property
    def request_id(self) -> str:
        """The request's id under whichever key the service writes it; "" when it has none."""
        found = self.attributes.get(names.REQUEST_ID) or self.attributes.get(names.ENVOY_REQUEST_ID)
        return str(found) if found else ""


class SpanStore:
    """One connection to the store. Not for use by several threads at once; open one each."""

    def __init__(self, path: Path, *, max_spans: int, max_bytes: int) -> None:
        """Opens for writing and creates what is missing; raises StoreError when that fails."""
        self._max_spans = max_spans
        self._max_bytes = max_bytes
        self._num_untrimmed = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # The receiver opens it in its main thread and writes from a worker, one at a time.
            self._db = sqlite3.connect(path, check_same_thread=False)
            # Takes effect for a new file only; lets space be given back without a rewrite.
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
            self._db.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the span store {path}: {error}") from error

    def add(self, spans: Iterable[StoredSpan]) -> None:
        """Writes a batch in one transaction. A span that is sent twice is kept once."""
        with self._db:
            self._num_untrimmed += self._db.executemany(_INSERT, map(_row, spans)).rowcount
        if self._num_untrimmed >= min(_TRIM_EVERY_SPANS, self._max_spans // 100):
            self._num_untrimmed = 0
            self._trim()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def _trim(self) -> None:
        first, last = self._db.execute("SELECT min(sequence), max(sequence) FROM spans").fetchone()
        if last is None:
            return
        span = last - first + 1
        if span > self._max_spans:
            self._delete_before(last - round(self._max_spans * (1 - _TRIM_SHARE)))
        elif (used := self._used_bytes()) > self._max_bytes:
            excess = 1 - (1 - _TRIM_SHARE) * self._max_bytes / used
            self._delete_before(first + max(1, round(span * excess)))

    def _delete_before(self, sequence: int) -> None:
        with self._db:
            self._db.execute("DELETE FROM spans WHERE sequence <= ?", (sequence,))
        # The pragma frees pages as its rows are read.
        self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


class SpanReader:
    """Reads a store that a receiver may be writing."""

    def __init__(self, path: Path) -> None:
        """Raises StoreError when there is no store."""
        if not path.is_file():
            raise StoreError(
                f"no span store at {path}; it appears when the local stack runs (millrace up), "
                "or name another one with --store"
            )
        try:
            self._db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            self._db.execute("SELECT 1 FROM spans LIMIT 1")
        except sqlite3.Error as error:
            raise StoreError(f"{path} is not a span store: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def trace(self, trace_id: str) -> list[StoredSpan]:
        """All spans of a trace by start time; empty when it is not there."""
        return self._select("WHERE trace_id = ? ORDER BY start_ns, sequence", (trace_id.lower(),))

    def traces_of_request(self, request_id: str) -> list[str]:
        """Ids of the traces that have a span of this request, the newest first."""
        rows = self._db.execute(
            "SELECT trace_id, max(start_ns) AS newest FROM spans WHERE request_id = ? "
            "GROUP BY trace_id ORDER BY newest DESC",
            (request_id,),
        )
        return [trace_id for trace_id, _ in rows]

    def last_trace(self) -> str:
        """Id of the trace of the newest request; "" when there is none. Failed requests count too."""
        for name in (names.GATEWAY_REQUEST, names.ENVOY_INGRESS):
            row = self._db.execute(
                f"SELECT trace_id FROM spans WHERE {_IS_INDEXED} AND name = ? ORDER BY start_ns DESC LIMIT 1",
                (str(name),),
            ).fetchone()
            if row is not None:
                return str(row[0])
        row = self._db.execute("SELECT trace_id FROM spans ORDER BY sequence DESC LIMIT 1").fetchone()
        return "" if row is None else str(row[0])

    def find(self, what: str) -> list[StoredSpan]:
        """Spans of the trace that `what` names: "last", a request id or a trace id.

        Raises StoreError, which says how to go on, when nothing is found.
        """
        if what == "last":
            trace_id = self.last_trace()
            if not trace_id:
                raise StoreError("the span store is empty; send a request first")
            return self.trace(trace_id)
        for trace_id in (*self.traces_of_request(what), what):
            spans = self.trace(trace_id)
            if spans:
                return spans
        raise StoreError(
            f"no request or trace {what!r} in the span store; spans arrive a moment after the request ends "
            "and the oldest are dropped; 'last' names the newest request"
        )

    def spans_named(self, name: str, *, since_ns: int, limit: int = 100_000) -> list[StoredSpan]:
        """The newest spans of an indexed name that started at or after `since_ns`."""
        assert name in _INDEXED, name
        return self._select(
            f"WHERE {_IS_INDEXED} AND name = ? AND start_ns >= ? ORDER BY start_ns DESC LIMIT ?",
            (str(name), since_ns, limit),
        )

    def spans_between(self, name: str, after_ns: int, start_ns: int, end_ns: int) -> list[StoredSpan]:
        """Spans of an indexed name that overlap [start_ns, end_ns] and began after `after_ns`."""
        assert name in _INDEXED, name
        return self._select(
            f"WHERE {_IS_INDEXED} AND name = ? AND start_ns > ? AND start_ns < ? AND end_ns > ? "
            "ORDER BY start_ns",
            (str(name), after_ns, end_ns, start_ns),
        )

    def _select(self, where: str, parameters: tuple[Any, ...]) -> list[StoredSpan]:
        rows = self._db.execute(f"SELECT {_COLUMNS} FROM spans {where}", parameters)
        return [_span(row) for row in rows]


def _row(span: StoredSpan) -> tuple[Any, ...]:
    return (
        span.trace_id,
        span.span_id,
        span.parent_id,
        span.service,
        span.name,
        span.start_ns,
        span.end_ns,
        span.request_id,
        span.error,
        _encode(span.attributes).decode(),
        _encode(span.links).decode(),
    )


def _span(row: tuple[Any, ...]) -> StoredSpan:
    trace_id, span_id, parent_id, service, name, start_ns, end_ns, _, error, attributes, links = row
    return StoredSpan(
        trace_id=trace_id,
        span_id=span_id,
        parent_id=parent_id,
        service=service,
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
        error=error,
        attributes=msgspec.json.decode(attributes),
        links=tuple((trace, span) for trace, span in msgspec.json.decode(links)),
    )
