"""Spans: where they go, who their parents are, and that each one carries its request's identity.

`setup` is called once a process, in its main. Without an OTLP endpoint no span is recorded, but the trace
context still passes through, so that services behind this one may record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol, TypeAlias

import grpc
import msgspec
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.trace import Link, Span, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from observability import names, sdk
from observability.clock import offset_ns, unix_ns
from observability.config import ObservabilityConfig
from observability.names import SpanName
from observability.recorder import OtlpExport, SpanRecorder
from observability.spans import RecordedSpan, RemoteSpan

_IDENTITY_KEY = otel_context.create_key("millrace-identity")
# A receiver that is away must not hold up a service that ends.
_EXPORT_TIMEOUT_S = 3.0
_W3C = TraceContextTextMapPropagator()
_PLAIN_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")

Attributes = Mapping[str, AttributeValue]
# A span of this process, or the caller's (`remote_span`), whose identity goes on; or a context that has both,
# by default the current one.
Parent: TypeAlias = Span | Context | None


class RequestIdentity(msgspec.Struct, frozen=True):
    """What every span of a request carries. Empty parts are left out."""

    request_id: str
    client_request_id: str = ""
    tenant: str = ""
    tier: str = ""

    def attributes(self) -> dict[str, AttributeValue]:
        """The identity as span attributes."""
        pairs = (
            (names.REQUEST_ID, self.request_id),
            (names.CLIENT_REQUEST_ID, self.client_request_id),
            (names.TENANT, self.tenant),
            (names.TIER, self.tier),
        )
        return {key: value for key, value in pairs if value}


def with_identity(identity: RequestIdentity, parent: Context | None = None) -> Context:
    """`parent` (default: the current context) in which every new span gets the identity's attributes."""
    return otel_context.set_value(_IDENTITY_KEY, identity, parent)


def current_identity(context: Context | None = None) -> RequestIdentity | None:
    """The identity in `context` (default: the current one), if it has one."""
    identity = otel_context.get_value(_IDENTITY_KEY, context)
    return identity if isinstance(identity, RequestIdentity) else None


def remote_span(
    traceparent: str, tracestate: str = "", identity: RequestIdentity | None = None
) -> RemoteSpan:
    """The caller's span, as the parent of this service's; those below it get the identity.

    An empty or invalid header makes them begin a trace of their own.
    """
    attributes = None if identity is None else identity.attributes()
    plain = None if tracestate else _PLAIN_TRACEPARENT.fullmatch(traceparent)
    if plain is None:
        extracted = _W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())
        found = trace.get_current_span(extracted).get_span_context()
        return RemoteSpan(found.trace_id, found.span_id, found.trace_flags, found.trace_state, attributes)
    # By far the most common form; the propagator takes several times as long for it.
    trace_id, span_id, flags = plain.groups()
    return RemoteSpan(int(trace_id, 16), int(span_id, 16), int(flags, 16), None, attributes)


def context_from_traceparent(traceparent: str, tracestate: str = "") -> Context:
    """Context whose current span is the remote one; without a span when the header is empty or invalid."""
    remote = remote_span(traceparent, tracestate)
    return trace.set_span_in_context(remote, Context()) if remote.trace_id and remote.span_id else Context()


def traceparent_of(span: Span) -> tuple[str, str]:
    """(traceparent, tracestate) that makes `span` the parent in the next hop; empty if it is invalid."""
    if type(span) is RecordedSpan:
        trace_id, span_id, flags, state = span.lineage.trace_id, span.span_id, 1, span.lineage.trace_state
    else:
        trace_id, span_id, _, flags, state, is_valid = span.get_span_context()
        if not is_valid:
            return "", ""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}", state.to_header() if state else ""


class SpanSource(Protocol):
    """Where spans come from: our recorder, or a provider of OpenTelemetry's SDK."""

    def get_tracer(self, instrumenting_module_name: str, /) -> trace.Tracer:
        """Makes spans."""
        ...

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Exports what has ended."""
        ...

    def shutdown(self) -> None:
        """Exports what has ended, and ends."""
        ...


class Telemetry:
    """Makes the spans of one service. Safe to use from several threads and from asyncio."""

    def __init__(self, service: str, config: ObservabilityConfig, provider: SpanSource | None) -> None:
        self.service = service
        self.config = config
        # Generation of the GenAI attribute names.
        self.semconv = config.semconv_generation()
        self._provider = provider
        # Ours takes shorter ways than OpenTelemetry's interfaces have.
        self._recorder = provider if isinstance(provider, SpanRecorder) else None
        self.tracer: trace.Tracer = (
            trace.NoOpTracer() if provider is None else provider.get_tracer("millrace")
        )

    def start(
        self,
        name: SpanName,
        *,
        parent: Parent = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
        start_s: float | None = None,
    ) -> Span:
        """Starts a span that the caller ends with `end`. `start_s` is in monotonic seconds, default now.

        It is not made current: in async generators a current span would leak into the consumer. Children
        get it by `parent=span`.
        """
        start_ns = None if start_s is None else unix_ns(start_s)
        if type(parent) is RecordedSpan:
            return parent.recorder.start_inside(parent, name, kind, attributes, links, start_ns)
        return self._start(name, parent, kind, attributes, links, start_ns)

    def _start(
        self,
        name: SpanName,
        parent: Parent,
        kind: SpanKind,
        attributes: Attributes | None,
        links: Sequence[Link],
        start_ns: int | None,
    ) -> Span:
        if parent is None and self._recorder is not None:
            current = trace.get_current_span()
            if type(current) is RecordedSpan:
                return self._recorder.start_below(current, name, kind, attributes, links, start_ns)
        if parent is None or isinstance(parent, Context):
            return self.tracer.start_span(name, parent, kind, attributes, links, start_ns)
        if self._recorder is not None:
            return self._recorder.start_below(parent, name, kind, attributes, links, start_ns)
        if self._provider is None:
            return parent
        # The SDK looks for identity and parent in a context.
        context = trace.set_span_in_context(parent, Context())
        return self.tracer.start_span(name, context, kind, attributes, links, start_ns)

    def end(
        self,
        span: Span,
        *,
        end_s: float | None = None,
        attributes: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Ends a span at `end_s` monotonic seconds (default now); `error` marks it as failed."""
        if not span.is_recording():
            return
        if attributes:
            span.set_attributes(attributes)
        if error:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(None if end_s is None else unix_ns(end_s))

    def record(
        self,
        name: SpanName,
        *,
        start_s: float,
        end_s: float,
        parent: Parent = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
        error: str = "",
    ) -> Span:
        """A span over a time that has passed, in monotonic seconds. Returned, ended, for use as a parent."""
        offset = offset_ns()
        start_ns = offset + round(start_s * 1e9)
        if type(parent) is RecordedSpan:
            below = parent.recorder.start_inside(parent, name, kind, attributes, links, start_ns)
            if error:
                below.set_status(Status(StatusCode.ERROR, error))
            below.end(max(start_ns, offset + round(end_s * 1e9)))
            return below
        span = self._start(name, parent, kind, attributes, links, start_ns)
        if span.is_recording() and span is not parent:
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            # Clocks of two processes may disagree by less than a tick; a span never ends before it starts.
            span.end(max(start_ns, offset + round(end_s * 1e9)))
        return span

    def span(
        self,
        name: SpanName,
        *,
        parent: Parent = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> CurrentSpan:
        """A current span around a block of plain or async code (not across a `yield` of a generator).

        An exception marks it as failed with the exception's type; the message may hold the client's text and
        stays out of the trace unless content capture is on.
        """
        context = parent if isinstance(parent, Context) else None
        return CurrentSpan(self, self.start(name, parent=parent, kind=kind, attributes=attributes), context)

    def under(self, span: Span, parent: Context | None = None) -> Context:
        """Context in which `span` is the parent; the request's identity is kept."""
        return trace.set_span_in_context(span, parent)

    def flush(self, timeout_s: float = _EXPORT_TIMEOUT_S) -> bool:
        """Sends what is queued; False when the receiver did not take it in time."""
        return self._provider is None or self._provider.force_flush(round(timeout_s * 1000))

    def shutdown(self) -> None:
        """Sends what is queued and stops; takes a few seconds at most when the receiver is away."""
        if self._provider is not None:
            self._provider.shutdown()


class CurrentSpan:
    """A span that is current within a `with` block and ends with it."""

    __slots__ = ("_parent", "_span", "_telemetry", "_token")

    def __init__(self, telemetry: Telemetry, span: Span, parent: Context | None) -> None:
        self._telemetry = telemetry
        self._span = span
        self._parent = parent

    def __enter__(self) -> Span:
        self._token = otel_context.attach(self._telemetry.under(self._span, self._parent))
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        otel_context.detach(self._token)
        error = "" if kind is None else kind.__name__
        if error and self._telemetry.config.capture_content:
            error = f"{error}: {failure}"
        self._telemetry.end(self._span, error=error)


def setup(service: str, config: ObservabilityConfig) -> Telemetry:
    """Installs W3C propagation and, if there is an endpoint, export. Once a process, before any span.

    An endpoint that begins with https:// is reached over TLS, by the authorities that gRPC trusts. Raises
    ConfigError when an exporter is asked for that is not installed.
    """
    propagate.set_global_textmap(CompositePropagator([_W3C, W3CBaggagePropagator()]))
    if not config.otlp_endpoint:
        return Telemetry(service, config, None)
    if config.exporter == "sdk":
        source = sdk.provider(service, config, identity_attributes)
        trace.set_tracer_provider(source)
        return Telemetry(service, config, source)
    recorder = SpanRecorder(
        OtlpExport(
            config.otlp_endpoint.rpartition("://")[2],
            {"service.name": service, "service.namespace": "millrace"},
            credentials=(
                grpc.ssl_channel_credentials() if config.otlp_endpoint.startswith("https://") else None
            ),
        ),
        identity_attributes,
        sample_ratio=config.sample_ratio,
        delay_s=config.export_delay_ms / 1000,
        max_queued=config.max_queued_spans,
        timeout_s=_EXPORT_TIMEOUT_S,
    )
    trace.set_tracer_provider(recorder)
    return Telemetry(service, config, recorder)


def identity_attributes(context: Context | None = None) -> Attributes:
    """The request's identity, which travels in the context, for every span that starts in it."""
    identity = otel_context.get_value(_IDENTITY_KEY, context)
    return identity.attributes() if isinstance(identity, RequestIdentity) else {}


def span_context_of(traceparent: str) -> SpanContext:
    """The remote span that a W3C header names, for links; invalid when the header is."""
    return remote_span(traceparent).get_span_context()
