"""Spans: their parents, the identity of the request that each one carries, and who makes and sends them.

`setup` is called once a process, in its main. Without a receiver no span is recorded, but the trace context
still passes through, so that services behind this one may record. The environment and `[observability]` say
how OpenTelemetry's SDK makes and sends them (`make_provider`).

A span costs many times what a step of one does. So one span records what a request goes through in a
service: its steps are one attribute of it, and spans of their own only where somebody will look
for them (`Telemetry.step`). Readers of the local store get both back as spans (`decode.py`), and the details
of a span, which are one attribute as well, as attributes of it.
"""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import TypeAlias

import msgspec
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision, ParentBasedTraceIdRatio
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from observability.emit import names
from observability.emit.config import Export, ObservabilityConfig
from observability.emit.names import SpanName
from runtime.errors import ConfigError

_IDENTITY_KEY = otel_context.create_key("millrace-identity")
# A receiver that is away must not hold up a service that ends.
_SHUTDOWN_LIMIT_S = 3.0
_JSON = msgspec.json.Encoder()
_W3C = TraceContextTextMapPropagator()
# What our own services send; other headers are the propagator's to judge.
_TRACEPARENT = re.compile("00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_SCOPE = InstrumentationScope("millrace")
# Types of attributes that the SDK keeps as they are.
_PLAIN = frozenset({str, int, float, bool, tuple})

Attributes = Mapping[str, AttributeValue]
# A span of this process, or the caller's (`RemoteSpan`), whose identity goes on; or a context that has both,
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


class RemoteSpan(NonRecordingSpan):
    """The caller's span, in another process, with the identity that the spans below it get.

    Its headers are read when somebody asks for them: most short steps of it leave nothing. Below an empty or
    invalid one spans begin a trace of their own.
    """

    def __init__(
        self, traceparent: str, tracestate: str = "", identity: RequestIdentity | None = None
    ) -> None:
        super().__init__(INVALID_SPAN_CONTEXT)
        self._headers: tuple[str, str] | None = (traceparent, tracestate)
        self.identity: Attributes = {} if identity is None else identity.attributes()

    def get_span_context(self) -> SpanContext:
        """The caller's; invalid where the headers are."""
        if self._headers is not None:
            self._context = _remote_context(*self._headers)
            self._headers = None
        return self._context


def _remote_context(traceparent: str, tracestate: str) -> SpanContext:
    found = None if tracestate else _TRACEPARENT.fullmatch(traceparent)
    if found is not None:
        trace_id, span_id, flags = (int(each, 16) for each in found.groups())
        return SpanContext(trace_id, span_id, True, TraceFlags(flags))
    return trace.get_current_span(context_from_traceparent(traceparent, tracestate)).get_span_context()


class LateSpan(NonRecordingSpan):
    """A span that is made when it ends, with its attributes at once, for the SDK's processors: one that the
    SDK makes at its start costs several times as much, in locks and copies at every call. Until then it is an
    identity, a start, and the steps that are one of its attributes.
    """

    def __init__(
        self,
        context: SpanContext,
        parent: SpanContext | None,
        name: str,
        kind: SpanKind,
        attributes: Attributes,
        links: Sequence[Link],
        start_ns: int,
    ) -> None:
        super().__init__(context)
        self.parent = parent
        self.name = name
        self.kind = kind
        self.attributes = attributes
        self.links = links
        self.start_ns = start_ns
        # Each with its start and end in monotonic seconds.
        self.steps: list[tuple[SpanName, float, float, Attributes]] = []
        self.is_open = True

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        return self.is_open

    def steps_since(self, zero_ns: int) -> list[tuple[SpanName, int, float, Attributes]]:
        """Its steps with start and milliseconds; `zero_ns` is when the monotonic clock began, Unix time."""
        return [
            (name, zero_ns + round(begin_s * 1e9), round(max(0.0, end_s - begin_s) * 1000, 6), attributes)
            for name, begin_s, end_s, attributes in self.steps
        ]

    @property
    def identity(self) -> Attributes:
        """What the spans below it say of the request."""
        return {key: self.attributes[key] for key in names.IDENTITY if key in self.attributes}


def context_from_traceparent(traceparent: str, tracestate: str = "") -> Context:
    """Context whose current span is the remote one; without a span when the header is empty or invalid."""
    return _W3C.extract({"traceparent": traceparent, "tracestate": tracestate}, Context())


def traceparent_of(span: Span) -> tuple[str, str]:
    """(traceparent, tracestate) that makes `span` the parent in the next hop; empty if it is invalid."""
    context = span.get_span_context()
    if not context.is_valid:
        return "", ""
    flags = int(context.trace_flags)
    traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"
    return traceparent, context.trace_state.to_header() if context.trace_state else ""


class Telemetry:
    """Makes the spans of one service. Safe to use from several threads and from asyncio."""

    def __init__(self, service: str, config: ObservabilityConfig, provider: TracerProvider | None) -> None:
        self.service = service
        self.config = config
        # Generation of the GenAI attribute names.
        self.semconv = config.semconv_generation()
        self._provider = provider
        self._keeps = provider is not None and config.sampled_share() > 0

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
        get it by `parent=span`. Below a span that is not recorded nothing is: that span itself is the answer.
        """
        if isinstance(parent, Span):
            above, found = parent, None
        else:
            above, found = trace.get_current_span(parent), current_identity(parent)
        if type(parent) is NonRecordingSpan or self._provider is None:
            return above
        identity = _identity_of(above) if found is None else found.attributes()
        return self._begun(name, above, kind, {**identity, **(attributes or {})}, links, start_s)

    def _begun(
        self,
        name: SpanName,
        above: Span,
        kind: SpanKind,
        attributes: Attributes,
        links: Sequence[Link],
        start_s: float | None,
    ) -> Span:
        """A span below another one, if the sampler wants it; below an invalid one it begins a trace."""
        provider = self._provider
        assert provider is not None, "without a provider nothing begins"
        context = above.get_span_context()
        parent = context if context.is_valid else None
        ids = provider.id_generator
        trace_id = ids.generate_trace_id() if parent is None else parent.trace_id
        sampled = provider.sampler.should_sample(
            trace.set_span_in_context(above, Context()), trace_id, name, kind, attributes, links
        )
        is_random = ids.is_trace_id_random() if parent is None else parent.trace_flags.random_trace_id
        flags = TraceFlags.SAMPLED if sampled.decision is Decision.RECORD_AND_SAMPLE else TraceFlags.DEFAULT
        flags |= TraceFlags.RANDOM_TRACE_ID if is_random else TraceFlags.DEFAULT
        own = SpanContext(
            trace_id,
            ids.generate_span_id(),
            is_remote=False,
            trace_flags=TraceFlags(flags),
            trace_state=sampled.trace_state,
        )
        if sampled.decision is Decision.DROP:
            return NonRecordingSpan(own)
        start_ns = time.time_ns() if start_s is None else unix_ns(start_s)
        return LateSpan(own, parent, name, kind, sampled.attributes or {}, links, start_ns)

    def keep(self, name: SpanName, *, parent: Span, kind: SpanKind, start_s: float) -> Span:
        """A span that is recorded although its trace is not, for what somebody will look for all the same: a
        refusal, a request that was slow. `parent` itself where this process records nothing at all.
        """
        above = parent.get_span_context()
        if not self._keeps or not above.is_valid:
            return parent
        sampled = TraceFlags(above.trace_flags | TraceFlags.SAMPLED)
        chosen = SpanContext(above.trace_id, above.span_id, True, sampled, above.trace_state)
        return self._begun(name, NonRecordingSpan(chosen), kind, _identity_of(parent), (), start_s)

    def end(
        self,
        span: Span,
        *,
        end_s: float | None = None,
        attributes: Attributes | None = None,
        details: Attributes | None = None,
        error: str = "",
    ) -> None:
        """Ends a span at `end_s` monotonic seconds (default now); `error` marks it as failed.

        `attributes` are what traces are searched and compared by, `details` what is read of one that was
        found: they are recorded in one attribute, DETAILS.
        """
        if not isinstance(span, LateSpan) or not span.is_open:
            return
        provider = self._provider
        assert provider is not None, "nobody else makes spans"
        span.is_open = False
        zero_ns = unix_ns(0.0)
        found = {**span.attributes, **(attributes or {})}
        if details:
            found[names.DETAILS] = _JSON.encode(details).decode()
        if span.steps:
            found[names.STEPS] = _JSON.encode(span.steps_since(zero_ns)).decode()
        limits = provider._span_limits
        made = ReadableSpan(
            span.name,
            span.get_span_context(),
            span.parent,
            provider.resource,
            _bounded(found, limits),
            links=span.links[: limits.max_links],
            kind=span.kind,
            status=Status(StatusCode.ERROR, error) if error else Status(),
            start_time=span.start_ns,
            end_time=time.time_ns() if end_s is None else zero_ns + round(end_s * 1e9),
            instrumentation_scope=_SCOPE,
        )
        provider._active_span_processor.on_end(made)

    def record(
        self,
        name: SpanName,
        *,
        start_s: float,
        end_s: float,
        parent: Parent = None,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
        error: str = "",
    ) -> Span:
        """A span over a time that has passed, in monotonic seconds. Returned, ended, for use as a parent."""
        span = self.start(name, parent=parent, attributes=attributes, links=links, start_s=start_s)
        if span is not parent:
            # Clocks of two processes may disagree by less than a tick; a span never ends before it starts.
            self.end(span, end_s=max(start_s, end_s), error=error)
        return span

    def step(
        self,
        name: SpanName,
        *,
        of: Span,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
        links: Sequence[Link] = (),
        error: str = "",
        is_notable: bool = False,
    ) -> None:
        """Something that `of` went through, in monotonic seconds: recorded in its attribute STEPS.

        It is a span below `of` where it is notable, failed, has links, or took LONG_MS: samplers and
        searches look at spans alone, and what is shorter explains little.

        The caller's span (`RemoteSpan`) cannot record steps: below it they leave spans from DELAY_MS on, and
        nothing where they were shorter.
        """
        long_ms = names.LONG_MS if of.is_recording() else names.DELAY_MS
        if is_notable or links or error or (end_s - start_s) * 1000 >= long_ms:
            self.record(
                name,
                parent=of,
                start_s=start_s,
                end_s=end_s,
                attributes=attributes,
                links=links,
                error=error,
            )
        else:
            self.record_step(name, of=of, start_s=start_s, end_s=end_s, attributes=attributes)

    def record_step(
        self,
        name: SpanName,
        *,
        of: Span,
        start_s: float,
        end_s: float,
        attributes: Attributes | None = None,
    ) -> None:
        """The same, and never a span. All steps of a span are one attribute: events cost several times as
        much to make, to keep and to encode.
        """
        if isinstance(of, LateSpan) and of.is_open:
            of.steps.append((name, start_s, end_s, attributes or {}))

    @contextmanager
    def span(
        self,
        name: SpanName,
        *,
        parent: Parent = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes | None = None,
    ) -> Iterator[Span]:
        """A current span around a block of plain or async code (not across a `yield` of a generator).

        An exception marks it as failed with the exception's type; the message may hold the client's text and
        stays out of the trace unless content capture is on.
        """
        span = self.start(name, parent=parent, kind=kind, attributes=attributes)
        # The request's identity is kept.
        context = parent if isinstance(parent, Context) else None
        token = otel_context.attach(trace.set_span_in_context(span, context))
        error = ""
        try:
            yield span
        except BaseException as failure:
            error = type(failure).__name__
            if self.config.capture_content:
                error = f"{error}: {failure}"
            raise
        finally:
            otel_context.detach(token)
            self.end(span, error=error)

    def flush(self) -> bool:
        """Sends what is queued; whether nothing is left."""
        return self._provider is None or self._provider.force_flush()

    def shutdown(self) -> None:
        """Sends what is queued and stops; takes a few seconds at most when the receiver is away."""
        if self._provider is not None:
            # The SDK would go on for half a minute.
            ending = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
            ending.start()
            ending.join(_SHUTDOWN_LIMIT_S)


def _identity_of(span: Span) -> Attributes:
    """What the spans below `span` say of the request."""
    return span.identity if isinstance(span, LateSpan | RemoteSpan) else {}


def _bounded(attributes: Attributes, limits: SpanLimits) -> Attributes:
    """Within the SDK's limits, of which those on lengths are seldom set."""
    most, longest = limits.max_span_attributes, limits.max_span_attribute_length
    is_plain = longest is None and (most is None or len(attributes) <= most)
    if is_plain and all(type(value) in _PLAIN for value in attributes.values()):
        return attributes
    return BoundedAttributes(most, attributes, max_value_len=longest)


def unix_ns(monotonic_s: float) -> int:
    """The moment `monotonic_s` of CLOCK_MONOTONIC (time.monotonic()) in nanoseconds since the Unix epoch.

    CLOCK_MONOTONIC is the same in every process of a machine, so moments may come from another process. The
    clocks' distance is asked each time: it changes when the wall clock is corrected.
    """
    return time.time_ns() - time.monotonic_ns() + round(monotonic_s * 1e9)


class OwnRandomIds(IdGenerator):
    """Ids from a generator of the provider's own, which begins with the system's randomness. The SDK's come
    from Python's global one: an engine that seeds it would repeat them.
    """

    def __init__(self) -> None:
        self._bits = random.Random(os.urandom(32)).getrandbits

    def generate_span_id(self) -> int:
        """64 bits, not all 0."""
        return self._bits(64) or 1

    def generate_trace_id(self) -> int:
        """128 bits, not all 0."""
        return self._bits(128) or 1

    def is_trace_id_random(self) -> bool:
        """All bits are."""
        return True


def make_provider(service: str, config: ObservabilityConfig) -> TracerProvider | None:
    """A provider that sends to everyone who gets the spans; None where nobody does.

    Raises ConfigError for variables and settings that contradict each other.
    """
    config.check()
    exports = config.exports()
    if not exports:
        return None
    share = config.sampled_share()
    provider = TracerProvider(
        resource=_resource(service),
        # None: the SDK reads OTEL_TRACES_SAMPLER.
        sampler=ParentBasedTraceIdRatio(share) if config.has_own_sampler() else None,
        id_generator=OwnRandomIds(),
        # Whoever made it ends it, within a limit of time.
        shutdown_on_exit=False,
    )
    for export in exports:
        try:
            processor = BatchSpanProcessor(_exporter(export), **config.batching())
        except ValueError as error:
            raise ConfigError(f"export of spans to {export.url}: {error}") from error
        provider.add_span_processor(processor)
    return provider


def edge_resource() -> dict[str, str]:
    """What Envoy's spans say of their maker; the process is the one that writes its configuration."""
    return {
        key: str(value)
        for key, value in _resource(names.ENVOY).attributes.items()
        # Envoy has settings of its own for these.
        if key != "service.name" and not key.startswith("telemetry.")
    }


def _resource(service: str) -> Resource:
    """Who makes the spans, over which go OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME."""
    own = {
        "service.name": service,
        "service.namespace": "millrace",
        "service.version": metadata.version("millrace"),
        # The same name by which engines and gateways know each other.
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
    }
    return Resource.create(own).merge(OTELResourceDetector().detect())


def _exporter(export: Export) -> SpanExporter:
    # Each protocol's exporter brings libraries that the other does without.
    if export.protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http import trace_exporter as http

        return http.OTLPSpanExporter(endpoint=None if export.is_standard else export.url)
    from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc

    if export.is_standard:
        return grpc.OTLPSpanExporter()
    return grpc.OTLPSpanExporter(endpoint=export.url, insecure=not export.is_secure)


def setup(service: str, config: ObservabilityConfig) -> Telemetry:
    """Spans of this process as the environment and `config` say. Once a process, before any span.

    Raises ConfigError.
    """
    provider = make_provider(service, config)
    if provider is not None:
        trace.set_tracer_provider(provider)
    return Telemetry(service, config, provider)
