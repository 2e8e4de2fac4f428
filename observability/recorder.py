"""Records spans and sends them by OTLP over gRPC, at a fraction of the SDK's cost a span.

A request has twenty spans over all services, and services answer a thousand requests a second: what a span
costs on the path of a request, and what its encoding takes from the interpreter, decide how much tracing
everything costs. So a span here is its fields, nothing is validated or copied, and when it ends only its
bytes are kept (otlp.py): spans that wait as objects are walked by the garbage collector again and again, and
encoded many at a time they keep the interpreter from the requests. The interfaces are OpenTelemetry's, so
everything else of it works with these spans.
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

from observability.otlp import encode, encode_inherited, encode_resource, encode_span

_log = logging.getLogger(__name__)

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_NOT_SAMPLED = TraceFlags(TraceFlags.DEFAULT)
# Spans in one message; a call costs as much as the encoding of a hundred.
_BATCH = 2048
EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


class Inherited:
    """Attributes that a span takes from the context it starts in, with their bytes."""

    __slots__ = ("attributes", "encoded")

    def __init__(self, attributes: Mapping[str, AttributeValue]) -> None:
        self.attributes = attributes
        self.encoded = encode_inherited(attributes)


NOTHING_INHERITED = Inherited({})


class RecordedSpan(Span):
    """One span. After `end` nothing changes it any more."""

    __slots__ = (
        "attributes",
        "context",
        "end_ns",
        "events",
        "inherited",
        "kind",
        "links",
        "name",
        "parent_id",
        "recorder",
        "span_id",
        "start_ns",
        "status",
        "trace_id",
        "trace_state",
    )

    def __init__(
        self,
        recorder: SpanRecorder,
        name: str,
        trace_id: int,
        span_id: int,
        parent_id: int,
        trace_state: TraceState | None,
        kind: SpanKind,
        inherited: Inherited,
        attributes: dict[str, Any],
        links: Sequence[Link],
        start_ns: int,
    ) -> None:
        self.recorder = recorder
        self.name = name
        self.trace_id = trace_id
        self.span_id = span_id
        # 0 for a root.
        self.parent_id = parent_id
        self.trace_state = trace_state
        self.kind = kind
        self.inherited = inherited
        self.attributes = attributes
        self.links = links
        self.start_ns = start_ns
        # Made when somebody asks for it.
        self.context: SpanContext | None = None
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
        context = self.context
        if context is None:
            context = SpanContext(self.trace_id, self.span_id, False, _SAMPLED, self.trace_state)
            self.context = context
        return context

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


# Takes what was kept of spans within so many seconds; whether it did.
Export: TypeAlias = Callable[[Sequence[Any], float], bool]
# What is kept of a span that has ended.
Keep: TypeAlias = Callable[[RecordedSpan], Any]
# What a span takes from the context it starts in.
Inherit: TypeAlias = Callable[[Context | None], Inherited]


class OtlpExport:
    """Sends spans to an OTLP receiver over gRPC. What it does not take is lost, and said once."""

    def __init__(
        self, target: str, resource: Mapping[str, str], *, credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`credentials` make the connection TLS."""
        self._resource = encode_resource(resource)
        self._failing = False
        self._channel = (
            grpc.secure_channel(target, credentials) if credentials else grpc.insecure_channel(target)
        )
        # Without serializers: bytes go out, and of the answer only the status matters.
        self._export: Any = self._channel.unary_unary(
            EXPORT_METHOD, request_serializer=None, response_deserializer=None
        )

    def __call__(self, spans: Sequence[bytes], timeout_s: float) -> bool:
        """Sends one batch."""
        try:
            self._export(encode(spans, self._resource), timeout=timeout_s)
        except grpc.RpcError as error:
            if not self._failing:
                _log.warning("spans are lost, the receiver does not take them: %s", error.code().name)
            self._failing = True
            return False
        self._failing = False
        return True


class SpanRecorder(trace.TracerProvider, trace.Tracer):
    """Makes spans, and exports those that ended every `delay_s`. More than `max_queued` waiting are
    dropped.
    """

    def __init__(
        self,
        export: Export,
        inherit: Inherit,
        *,
        keep: Keep = encode_span,
        sample_ratio: float = 1.0,
        delay_s: float = 0.5,
        max_queued: int = 20_000,
        timeout_s: float = 3.0,
    ) -> None:
        self._export = export
        self._keep = keep
        self._bound = round(sample_ratio * 2**64)
        self._delay_s = delay_s
        self._max_queued = max_queued
        self._timeout_s = timeout_s
        self._inherit = inherit
        # Of our own: seeding the global one must not make two processes' ids collide.
        self._random_bits = random.Random().getrandbits
        self._ended: deque[Any] = deque()
        self._sending = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._send_forever, name="spans", daemon=True)
        self._thread.start()

    def get_tracer(self, *arguments: Any, **options: Any) -> trace.Tracer:
        """The one tracer; which library asks makes no difference."""
        return self

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
        """A span below the one in `context` (default: the current one), if its trace is recorded."""
        parent = trace.get_current_span(context)
        span_id = self._random_bits(64) or 1
        state: TraceState | None
        if type(parent) is RecordedSpan:
            trace_id, parent_id, state = parent.trace_id, parent.span_id, parent.trace_state
        else:
            above = parent.get_span_context()
            if above.is_valid:
                trace_id, parent_id, state = above.trace_id, above.span_id, above.trace_state
                sampled = above.trace_flags.sampled
            else:
                trace_id, parent_id, state = self._random_bits(128) or 1, 0, None
                sampled = (trace_id & (2**64 - 1)) < self._bound
            if not sampled:
                return NonRecordingSpan(SpanContext(trace_id, span_id, False, _NOT_SAMPLED, state))
        return RecordedSpan(
            self,
            name,
            trace_id,
            span_id,
            parent_id,
            state,
            kind,
            self._inherit(context),
            dict(attributes) if attributes else {},
            links or (),
            start_time or time.time_ns(),
        )

    def start_as_current_span(self, name: str, *arguments: Any, **options: Any) -> Any:
        """A current span around a block."""
        return trace.use_span(self.start_span(name, *arguments, **options), end_on_exit=True)

    def take(self, span: RecordedSpan) -> None:
        """A span has ended."""
        if len(self._ended) < self._max_queued:
            self._ended.append(self._keep(span))

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
