"""One span, and what the spans of a request have in common.

Nothing is validated or copied, and what all spans of one request in one service say alike (the trace, the
identity) is made into bytes once, in their lineage.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)
from opentelemetry.util.types import AttributeValue

from observability.otlp import encode_inherited, encode_lineage

if TYPE_CHECKING:
    from observability.recorder import SpanRecorder

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Lineage:
    """A trace as far as one service takes part in it, and the attributes that each span of it has."""

    __slots__ = ("_encoded", "identity", "trace_id", "trace_state")

    def __init__(
        self,
        trace_id: int,
        trace_state: TraceState | None = None,
        identity: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        self.trace_id = trace_id
        self.trace_state = trace_state or None
        self.identity = identity or {}
        self._encoded: tuple[bytes, bytes] | None = None

    @property
    def encoded(self) -> tuple[bytes, bytes]:
        """Trace and identity in bytes. Spans begin while somebody waits; they are encoded when they end."""
        if self._encoded is None:
            identity = encode_inherited(self.identity) if self.identity else b""
            self._encoded = encode_lineage(self.trace_id, self.trace_state), identity
        return self._encoded

    def identified(self, identity: Mapping[str, AttributeValue]) -> Lineage:
        """The same trace with other attributes on each span."""
        return self if identity == self.identity else Lineage(self.trace_id, self.trace_state, identity)


class RemoteSpan(NonRecordingSpan):
    """The caller's span, in another process, with the identity that the spans below it get."""

    def __init__(
        self,
        trace_id: int,
        span_id: int,
        flags: int,
        trace_state: TraceState | None = None,
        identity: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """All numbers 0 where the caller has no span."""
        self.trace_id = trace_id
        self.span_id = span_id
        self.flags = flags
        self.trace_state = trace_state
        self.identity = identity

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        return SpanContext(self.trace_id, self.span_id, True, TraceFlags(self.flags), self.trace_state)


class RecordedSpan(Span):
    """One span. After `end` nothing changes it any more."""

    __slots__ = (
        "attributes",
        "end_ns",
        "events",
        "kind",
        "lineage",
        "links",
        "name",
        "parent_id",
        "recorder",
        "span_id",
        "start_ns",
        "status",
    )

    def __init__(
        self,
        recorder: SpanRecorder,
        lineage: Lineage,
        name: str,
        span_id: int,
        parent_id: int,
        kind: SpanKind,
        attributes: dict[str, Any],
        links: Sequence[Link],
        start_ns: int,
    ) -> None:
        self.recorder = recorder
        self.lineage = lineage
        self.name = name
        self.span_id = span_id
        # 0 for a root.
        self.parent_id = parent_id
        self.kind = kind
        self.attributes = attributes
        self.links = links
        self.start_ns = start_ns
        # 0 while it is open.
        self.end_ns = 0
        self.status: Status | None = None
        self.events: Sequence[tuple[str, int, Mapping[str, Any]]] = ()

    def end(self, end_time: int | None = None) -> None:
        """Ends it, once, at Unix nanoseconds (default now)."""
        if not self.end_ns:
            self.end_ns = time.time_ns() if end_time is None else end_time
            self.recorder.take(self)

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        lineage = self.lineage
        return SpanContext(lineage.trace_id, self.span_id, False, _SAMPLED, lineage.trace_state)

    def set_attributes(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Adds attributes."""
        if not self.end_ns:
            self.attributes.update(attributes)

    def set_attribute(self, key: str, value: AttributeValue) -> None:
        """Adds one attribute."""
        if not self.end_ns:
            self.attributes[key] = value

    def add_event(
        self, name: str, attributes: Mapping[str, Any] | None = None, timestamp: int | None = None
    ) -> None:
        """Adds an event at Unix nanoseconds (default now)."""
        if not self.end_ns:
            self.events = (*self.events, (name, timestamp or time.time_ns(), dict(attributes or {})))

    def update_name(self, name: str) -> None:
        """Renames it."""
        self.name = name

    def is_recording(self) -> bool:
        """Whether it is open."""
        return not self.end_ns

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Marks success or failure."""
        if not self.end_ns:
            self.status = status if isinstance(status, Status) else Status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Mapping[str, Any] | None = None,
        timestamp: int | None = None,
        escaped: bool = False,
    ) -> None:
        """Adds the exception's type as an event; its message may hold what a client wrote."""
        self.add_event(
            "exception", {"exception.type": type(exception).__name__, **(attributes or {})}, timestamp
        )
