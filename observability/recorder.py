"""Records spans and sends them by OTLP over gRPC, at a fraction of the SDK's cost a span.

A request has twenty spans over all services, and services answer a thousand requests a second: what a span
costs on the path of a request, and what its encoding takes from the interpreter, decide how much tracing
everything costs. So a span here is its fields; nothing is validated or copied, and the OTLP message is
built from them in the background. The interfaces are OpenTelemetry's, so everything else of it works with
these spans.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.util.types import AttributeValue

_log = logging.getLogger(__name__)

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED = TraceFlags(TraceFlags.DEFAULT)
_BATCH = 512


class RecordedSpan(Span):
    """One span. After `end` nothing changes it any more."""

    __slots__ = (
        "attributes",
        "context",
        "end_ns",
        "events",
        "kind",
        "links",
        "name",
        "parent",
        "recorder",
        "start_ns",
        "status",
    )

    def __init__(
        self,
        recorder: SpanRecorder,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind,
        attributes: dict[str, Any],
        links: Sequence[Link],
        start_ns: int,
    ) -> None:
        self.recorder = recorder
        self.name = name
        self.context = context
        self.parent = parent
        self.kind = kind
        self.attributes = attributes
        self.links = links
        self.start_ns = start_ns
        # 0 while it is open.
        self.end_ns = 0
        self.status: Status | None = None
        self.events: list[tuple[str, int, Mapping[str, Any]]] = []

    def end(self, end_time: int | None = None) -> None:
        """Ends it, once, at Unix nanoseconds (default now)."""
        if not self.end_ns:
            self.end_ns = time.time_ns() if end_time is None else end_time
            self.recorder.take(self)

    def get_span_context(self) -> SpanContext:
        """Its ids."""
        return self.context

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
            self.events.append((name, timestamp or time.time_ns(), dict(attributes or {})))

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


# Takes spans within so many seconds; whether it did.
Export: TypeAlias = Callable[[Sequence[RecordedSpan], float], bool]
# Attributes that a span takes from the context it starts in.
Inherited: TypeAlias = Callable[[Context | None], Mapping[str, AttributeValue]]


class OtlpExport:
    """Sends spans to an OTLP receiver over gRPC. What it does not take is lost, and said once."""

    def __init__(self, target: str, resource: Mapping[str, str], *, secure: bool = False) -> None:
        self._resource = resource
        self._failing = False
        credentials = grpc.ssl_channel_credentials() if secure else None
        self._channel = (
            grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        )
        self._stub: Any = trace_service_pb2_grpc.TraceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def __call__(self, spans: Sequence[RecordedSpan], timeout_s: float) -> bool:
        """Sends one batch."""
        try:
            self._stub.Export(encode(spans, self._resource), timeout=timeout_s)
        except grpc.RpcError as error:
            if not self._failing:
                _log.warning("spans are lost, the receiver does not take them: %s", error.code().name)
            self._failing = True
            return False
        self._failing = False
        return True


class SpanRecorder(trace.TracerProvider):
    """Makes spans, and exports those that ended every `delay_s`. More than `max_queued` waiting are
    dropped.
    """

    def __init__(
        self,
        export: Export,
        inherited: Inherited,
        *,
        sample_ratio: float = 1.0,
        delay_s: float = 0.2,
        max_queued: int = 20_000,
        timeout_s: float = 3.0,
    ) -> None:
        self._export = export
        self._bound = round(sample_ratio * 2**64)
        self._delay_s = delay_s
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._inherited = inherited
        # Of our own: seeding the global one must not make two processes' ids collide.
        self._random = random.Random()
        self._ended: deque[RecordedSpan] = deque()
        self._sending = threading.Lock()
        self._stopped = threading.Event()
        self._tracer = _Tracer(self)
        self._thread = threading.Thread(target=self._send_forever, name="spans", daemon=True)
        self._thread.start()

    def get_tracer(self, *arguments: Any, **options: Any) -> trace.Tracer:
        """The one tracer; which library asks makes no difference."""
        return self._tracer

    def start_span(
        self,
        name: str,
        context: Context | None,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue] | None,
        links: Sequence[Link] | None,
        start_ns: int | None,
    ) -> Span:
        """A span below the one in `context` (default: the current one), if its trace is recorded."""
        parent: SpanContext | None = trace.get_current_span(context).get_span_context()
        if parent is not None and parent.is_valid:
            trace_id, sampled, state = parent.trace_id, parent.trace_flags.sampled, parent.trace_state
        else:
            parent = None
            trace_id = self._random.getrandbits(128) or 1
            sampled, state = (trace_id & (2**64 - 1)) < self._bound, None
        span_id = self._random.getrandbits(64) or 1
        flags = _SAMPLED if sampled else _NOT_SAMPLED
        own = SpanContext(trace_id, span_id, False, flags, state)
        if not sampled:
            return NonRecordingSpan(own)
        found = dict(self._inherited(context))
        if attributes:
            found.update(attributes)
        return RecordedSpan(self, name, own, parent, kind, found, links or (), start_ns or time.time_ns())

    def take(self, span: RecordedSpan) -> None:
        """A span has ended."""
        if len(self._ended) < self._max_queued:
            self._ended.append(span)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Sends what has ended; False when the receiver did not take it."""
        return self._send_ended(timeout_millis / 1000)

    def shutdown(self) -> None:
        """Sends what has ended, and ends."""
        self._stopped.set()
        self._thread.join(self._timeout_s)
        self._send_ended(self._timeout_s)

    def _send_forever(self) -> None:
        while not self._stopped.wait(self._delay_s):
            self._send_ended(self._timeout_s)

    def _send_ended(self, timeout_s: float) -> bool:
        with self._sending:
            while self._ended:
                batch = [self._ended.popleft() for _ in range(min(len(self._ended), _BATCH))]
                if not self._export(batch, timeout_s):
                    return False
            return True


class _Tracer(trace.Tracer):
    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder

    def start_span(
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,
        set_status_on_exception: bool = True,
    ) -> Span:
        return self._recorder.start_span(name, context, kind, attributes, links, start_time)

    def start_as_current_span(self, name: str, *arguments: Any, **options: Any) -> Any:
        return trace.use_span(self.start_span(name, *arguments, **options), end_on_exit=True)


def encode(
    spans: Sequence[RecordedSpan], resource: Mapping[str, str]
) -> trace_service_pb2.ExportTraceServiceRequest:
    """The OTLP message of some spans of one service."""
    request = trace_service_pb2.ExportTraceServiceRequest()
    resource_spans = request.resource_spans.add()
    _add_attributes(resource_spans.resource.attributes, resource)
    scope_spans = resource_spans.scope_spans.add()
    scope_spans.scope.name = "millrace"
    for span in spans:
        _encode_span(span, scope_spans.spans.add())
    return request


def _encode_span(span: RecordedSpan, message: trace_pb2.Span) -> None:
    context = span.context
    message.trace_id = context.trace_id.to_bytes(16, "big")
    message.span_id = context.span_id.to_bytes(8, "big")
    message.trace_state = context.trace_state.to_header()
    if span.parent is not None:
        message.parent_span_id = span.parent.span_id.to_bytes(8, "big")
    message.name = span.name
    # OTLP counts kinds from 1.
    message.kind = trace_pb2.Span.SpanKind.ValueType(span.kind.value + 1)
    message.start_time_unix_nano = span.start_ns
    message.end_time_unix_nano = span.end_ns
    _add_attributes(message.attributes, span.attributes)
    for name, time_ns, attributes in span.events:
        event = message.events.add(name=name, time_unix_nano=time_ns)
        _add_attributes(event.attributes, attributes)
    for link in span.links:
        linked = message.links.add(
            trace_id=link.context.trace_id.to_bytes(16, "big"),
            span_id=link.context.span_id.to_bytes(8, "big"),
        )
        _add_attributes(linked.attributes, link.attributes or {})
    if span.status is not None:
        message.status.code = trace_pb2.Status.StatusCode.ValueType(span.status.status_code.value)
        message.status.message = span.status.description or ""


def _add_attributes(target: Any, attributes: Mapping[str, Any]) -> None:
    for key, value in attributes.items():
        _set_value(target.add(key=key).value, value)


def _set_value(target: common_pb2.AnyValue, value: Any) -> None:
    match value:
        case bool():
            target.bool_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case str():
            target.string_value = value
        case bytes():
            target.bytes_value = value
        case list() | tuple():
            for item in value:
                _set_value(target.array_value.values.add(), item)
        case _:
            target.string_value = str(value)
