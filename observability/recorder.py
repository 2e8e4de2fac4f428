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
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, TraceFlags
from opentelemetry.util.types import AttributeValue

from observability.otlp import encode, encode_resource, encode_span
from observability.spans import Lineage, RecordedSpan, RemoteSpan

_log = logging.getLogger(__name__)

_NOT_SAMPLED = TraceFlags(TraceFlags.DEFAULT)
_LOW_BITS = 2**64 - 1
# Spans in one message; a call costs as much as the encoding of a hundred.
_BATCH = 2048
EXPORT_METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


# Takes what was kept of spans within so many seconds; whether it did.
Export: TypeAlias = Callable[[Sequence[Any], float], bool]
# What is kept of a span that has ended.
Keep: TypeAlias = Callable[[RecordedSpan], Any]
# Attributes that a span takes from the context it starts in.
Inherit: TypeAlias = Callable[[Context | None], Mapping[str, AttributeValue]]


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
        identity = self._inherit(context)
        if type(parent) is RecordedSpan:
            lineage = parent.lineage.identified(identity) if identity else parent.lineage
            return self._started(lineage, parent.span_id, name, kind, attributes, links, start_time)
        above = parent.get_span_context()
        remote = RemoteSpan(above.trace_id, above.span_id, above.trace_flags, above.trace_state, identity)
        return self.start_below(remote, name, kind, attributes, links, start_time)

    def start_below(
        self,
        parent: Span,
        name: str,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
    ) -> Span:
        """A span below `parent`, with its identity; `parent` itself where its trace is not recorded."""
        if type(parent) is RecordedSpan:
            return self.start_inside(parent, name, kind, attributes, links, start_time)
        if type(parent) is not RemoteSpan:
            return parent
        if parent.trace_id and parent.span_id:
            if not parent.flags & TraceFlags.SAMPLED:
                return parent
            lineage = Lineage(parent.trace_id, parent.trace_state, parent.identity)
            return self._started(lineage, parent.span_id, name, kind, attributes, links, start_time)
        trace_id = self._random_bits(128) or 1
        if trace_id & _LOW_BITS >= self._bound:
            span_id = self._random_bits(64) or 1
            return NonRecordingSpan(SpanContext(trace_id, span_id, False, _NOT_SAMPLED))
        return self._started(
            Lineage(trace_id, None, parent.identity), 0, name, kind, attributes, links, start_time
        )

    def start_inside(
        self,
        parent: RecordedSpan,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue] | None,
        links: Sequence[Link] | None,
        start_ns: int | None,
    ) -> RecordedSpan:
        """The same where the parent is one of ours, as nearly always."""
        return self._started(parent.lineage, parent.span_id, name, kind, attributes, links, start_ns)

    def _started(
        self,
        lineage: Lineage,
        parent_id: int,
        name: str,
        kind: SpanKind,
        attributes: Mapping[str, AttributeValue] | None,
        links: Sequence[Link] | None,
        start_ns: int | None,
    ) -> RecordedSpan:
        return RecordedSpan(
            self,
            lineage,
            name,
            self._random_bits(64) or 1,
            parent_id,
            kind,
            dict(attributes) if attributes else {},
            links or (),
            start_ns or time.time_ns(),
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
