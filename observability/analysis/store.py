"""The local span store: SQLite, written by the receiver, read by the terminal commands at the same time.

What exporters send is kept as it came, one row a message: most spans are never looked at, and taking each one
apart to index it would be work for all of them. Who asks has SQLite search the bytes, and decodes the few
messages that have what was asked for.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from observability.analysis.decode import StoredSpan, decode
from observability.analysis.source import LATE_NS, SpanSource, StoreError
from observability.emit import names

# Share of a limit that is left when it was passed, so that it is not passed again at once.
_KEPT_SHARE = 0.9
_SCHEMA_VERSION = 2
# The file's size is looked at after so many messages.
_CHECK_EVERY = 16
# Messages that are looked through for the newest request.
_NEWEST_MESSAGES = 64
_TRACE_ID_BYTES = 16
# The largest number that SQLite takes.
_NO_END_NS = 2**63 - 1

_SCHEMA = """
DROP TABLE IF EXISTS spans;
CREATE TABLE IF NOT EXISTS messages (
  sequence INTEGER PRIMARY KEY,
  received_ns INTEGER NOT NULL,
  num_spans INTEGER NOT NULL,
  data BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS messages_by_time ON messages (received_ns);
"""


class SpanStore:
    """One connection to the store. Not for use by several threads at once; open one each."""

    def __init__(self, path: Path, *, max_spans: int, max_bytes: int) -> None:
        """Opens for writing and creates what is missing; raises StoreError when that fails."""
        self._max_spans = max_spans
        self._max_bytes = max_bytes
        self._num_unchecked = 0
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
            (self._num_spans,) = self._db.execute("SELECT total(num_spans) FROM messages").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot open the span store {path}: {error}") from error

    def add(self, messages: Sequence[tuple[int, bytes]], *, received_ns: int | None = None) -> None:
        """Writes ExportTraceServiceRequests, each with the number of its spans, in one transaction.

        `received_ns` is in Unix nanoseconds, default now.
        """
        now_ns = time.time_ns() if received_ns is None else received_ns
        with self._db:
            self._db.executemany(
                "INSERT INTO messages (received_ns, num_spans, data) VALUES (?, ?, ?)",
                [(now_ns, num_spans, data) for num_spans, data in messages],
            )
        self._num_spans += sum(num_spans for num_spans, _ in messages)
        self._num_unchecked += len(messages)
        self._trim()

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def _trim(self) -> None:
        if self._num_spans > self._max_spans:
            self._delete_oldest(self._num_spans - _KEPT_SHARE * self._max_spans, "num_spans")
        if self._num_unchecked >= _CHECK_EVERY:
            self._num_unchecked = 0
            used = self._used_bytes()
            if used > self._max_bytes:
                self._delete_oldest(used - _KEPT_SHARE * self._max_bytes, "length(data)")

    def _delete_oldest(self, excess: float, measure: str) -> None:
        """Deletes the oldest messages until `excess` of `measure` is gone; the newest always stays."""
        last, (newest,) = 0, self._db.execute("SELECT max(sequence) FROM messages").fetchone()
        sizes = self._db.execute(f"SELECT sequence, num_spans, {measure} FROM messages ORDER BY sequence")
        for sequence, num_spans, size in sizes:
            if excess <= 0 or sequence == newest:
                break
            last, excess = sequence, excess - size
            self._num_spans -= num_spans
        sizes.close()
        with self._db:
            self._db.execute("DELETE FROM messages WHERE sequence <= ?", (last,))
        # The pragma frees pages as its rows are read.
        self._db.execute("PRAGMA incremental_vacuum").fetchall()

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


class SpanReader(SpanSource):
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
            self._db.execute("SELECT 1 FROM messages LIMIT 1")
        except sqlite3.Error as error:
            raise StoreError(f"{path} is not a span store: {error}") from error

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def trace(self, trace_id: str) -> list[StoredSpan]:
        """See SpanSource."""
        try:
            wanted = bytes.fromhex(trace_id)
        except ValueError:
            return []
        if len(wanted) != _TRACE_ID_BYTES:
            return []
        found: dict[str, StoredSpan] = {}
        for data in self._containing(wanted):
            found |= {span.span_id: span for span in decode(data, trace_id=wanted)}
        return sorted(found.values(), key=lambda span: span.start_ns)

    def traces_of_request(self, request_id: str) -> list[str]:
        """See SpanSource."""
        if not request_id:
            return []
        newest: dict[str, tuple[bool, int]] = {}
        for data in self._containing(request_id.encode()):
            for span in decode(data):
                is_ours = span.request_id == request_id
                if is_ours or span.attributes.get(names.CLIENT_REQUEST_ID) == request_id:
                    found = newest.get(span.trace_id, (False, 0))
                    newest[span.trace_id] = max(found, (is_ours, span.start_ns))
        return sorted(newest, key=lambda trace_id: newest[trace_id], reverse=True)

    def last_trace(self) -> str:
        """See SpanSource."""
        for name in (names.GATEWAY_REQUEST, names.ENVOY_INGRESS):
            found = [
                span
                for data in self._containing(name.encode(), limit=_NEWEST_MESSAGES)
                for span in decode(data, wanted=(name,))
            ]
            if found:
                return max(found, key=lambda span: span.start_ns).trace_id
        for (data,) in self._db.execute("SELECT data FROM messages ORDER BY sequence DESC LIMIT 1"):
            return next((span.trace_id for span in decode(data)), "")
        return ""

    def spans_named(
        self, name: str, *, since_ns: int, until_ns: int | None = None, limit: int = 100_000
    ) -> list[StoredSpan]:
        """See SpanSource."""
        last_ns = _NO_END_NS if until_ns is None else until_ns
        messages = self._containing(
            name.encode(), received_from_ns=since_ns, received_to_ns=min(_NO_END_NS, last_ns + LATE_NS)
        )
        found = [
            span
            for data in messages
            for span in decode(data, wanted=(name,), since_ns=since_ns)
            if span.start_ns <= last_ns
        ]
        return sorted(found, key=lambda span: -span.start_ns)[:limit]

    def spans_between(self, wanted: Collection[str], start_ns: int, end_ns: int) -> list[StoredSpan]:
        """See SpanSource."""
        found: dict[str, StoredSpan] = {}
        for name in wanted:
            messages = self._containing(
                name.encode(), received_from_ns=start_ns, received_to_ns=end_ns + LATE_NS
            )
            for data in messages:
                for span in decode(data, wanted=(name,)):
                    if span.start_ns < end_ns and span.end_ns > start_ns:
                        found[span.span_id] = span
        return sorted(found.values(), key=lambda span: span.start_ns)

    def _containing(
        self, text: bytes, *, limit: int = -1, received_from_ns: int = 0, received_to_ns: int = _NO_END_NS
    ) -> Iterator[bytes]:
        """Messages that have these bytes somewhere, the newest first."""
        rows = self._db.execute(
            "SELECT data FROM messages WHERE received_ns BETWEEN ? AND ? AND instr(data, ?) > 0 "
            "ORDER BY received_ns DESC, sequence DESC LIMIT ?",
            (received_from_ns, received_to_ns, text, limit),
        )
        for (data,) in rows:
            yield data
