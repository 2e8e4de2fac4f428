"""Where finished spans are read from: the local store, or the store of a deployment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection

from contract.chat import CHAT_ID, COMPLETION_ID, MESSAGE_ID
from observability.analysis.decode import StoredSpan

# How much later than its start a span may end or be received: the longest stream, and the exporter's delay.
LATE_NS = 1_800 * 1_000_000_000


class StoreError(Exception):
    """The store cannot answer; the message says why and what to do."""


class SpanSource(ABC):
    """What every store of spans answers. All of it raises StoreError when the store does not."""

    # Its name in messages.
    name = "the span store"

    @abstractmethod
    def trace(self, trace_id: str) -> list[StoredSpan]:
        """All spans of a trace by start time; empty when it is not there. One that came twice counts once."""

    @abstractmethod
    def traces_of_request(self, request_id: str) -> list[str]:
        """Ids of the traces of a request, by our id or by the one that its client gave it, the newest first.

        Ours comes first: clients may send any id, that of somebody else's request too.
        """

    @abstractmethod
    def last_trace(self) -> str:
        """Id of the trace of the newest request; "" when there is none. Failed requests count too."""

    @abstractmethod
    def spans_named(
        self, name: str, *, since_ns: int, until_ns: int | None = None, limit: int = 100_000
    ) -> list[StoredSpan]:
        """Spans of a name that started in [since_ns, until_ns], the newest first; None sets no end."""

    @abstractmethod
    def spans_between(self, wanted: Collection[str], start_ns: int, end_ns: int) -> list[StoredSpan]:
        """Spans with one of some names that overlap [start_ns, end_ns], by start time."""

    @abstractmethod
    def close(self) -> None:
        """Releases what it holds."""

    def find(self, what: str) -> list[StoredSpan]:
        """Spans of the trace that `what` names: "last", a request id (ours, an answer's or the client's own)
        or a trace id.

        Raises StoreError, which says how to go on, when nothing is found.
        """
        if what == "last":
            trace_id = self.last_trace()
            if not trace_id:
                raise StoreError(f"{self.name} is empty; send a request first")
            return self.trace(trace_id)
        ours = what.removeprefix(CHAT_ID).removeprefix(COMPLETION_ID).removeprefix(MESSAGE_ID)
        ids = dict.fromkeys((ours, what))
        for trace_id in (*(found for each in ids for found in self.traces_of_request(each)), what):
            spans = self.trace(trace_id)
            if spans:
                return spans
        raise StoreError(
            f"no request or trace {what!r} in {self.name}; spans arrive a moment after the request ends "
            "and the oldest are dropped; 'last' names the newest request"
        )
