"""OTLP bytes as spans: steps that services record in one attribute are spans again, and details attributes.

Only whoever reads traces pays for this, not the services that make them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import msgspec
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from observability.emit import names


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


class _StoredStep(msgspec.Struct, frozen=True, array_like=True):
    """See names.STEPS."""

    name: str
    start_ns: int
    # A day at most, and no number that is none: whoever reaches the receiver's port may have written it.
    duration_ms: Annotated[float, msgspec.Meta(ge=0.0, le=86_400_000.0)]
    attributes: dict[str, Any]


def decode(
    data: bytes, *, trace_id: bytes = b"", wanted: Collection[str] = (), since_ns: int = 0
) -> Iterator[StoredSpan]:
    """Spans of an ExportTraceServiceRequest: of one trace, with one of some names, started since a moment.

    Bytes that are no such message have no spans.
    """
    try:
        request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
    except DecodeError:
        return
    for resource_spans in request.resource_spans:
        service = "unknown"
        for pair in resource_spans.resource.attributes:
            if pair.key == "service.name":
                service = pair.value.string_value
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                if not trace_id or span.trace_id == trace_id:
                    yield from (
                        found
                        for found in _spans(service, span, wanted)
                        if (not wanted or found.name in wanted) and found.start_ns >= since_ns
                    )


def _spans(service: str, span: trace_pb2.Span, wanted: Collection[str]) -> Iterator[StoredSpan]:
    """A span, and its steps below it."""
    steps = [
        (index, step)
        for index, step in enumerate(_steps(span))
        if step.name in names.SPANS and (not wanted or step.name in wanted)
    ]
    if wanted and span.name not in wanted and not steps:
        return
    stored = _stored(service, span)
    yield stored
    identity = {str(key): stored.attributes[key] for key in names.IDENTITY if key in stored.attributes}
    for index, step in steps:
        yield StoredSpan(
            trace_id=stored.trace_id,
            # No other span's, as those are 16 hex digits.
            span_id=f"{stored.span_id}-{index}",
            parent_id=stored.span_id,
            service=service,
            name=step.name,
            start_ns=step.start_ns,
            end_ns=step.start_ns + round(step.duration_ms * 1e6),
            attributes={**identity, **step.attributes},
        )


def _steps(span: trace_pb2.Span) -> list[_StoredStep]:
    for pair in span.attributes:
        if pair.key == names.STEPS:
            try:
                return msgspec.json.decode(pair.value.string_value, type=list[_StoredStep])
            except msgspec.MsgspecError:
                # Not of our services.
                return []
    return []


def _stored(service: str, span: trace_pb2.Span) -> StoredSpan:
    failed = span.status.code == trace_pb2.Status.STATUS_CODE_ERROR
    return StoredSpan(
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        service=service,
        name=span.name,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        error=(span.status.message or "error") if failed else "",
        attributes=_with_details(_attributes(span.attributes)),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _with_details(attributes: dict[str, Any]) -> dict[str, Any]:
    attributes.pop(names.STEPS, None)
    details = attributes.pop(names.DETAILS, "")
    try:
        return msgspec.json.decode(details, type=dict[str, Any]) | attributes if details else attributes
    except (msgspec.MsgspecError, TypeError):
        # Not of our services.
        return attributes


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind is None:
        return None
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    if kind == "kvlist_value":
        return _attributes(value.kvlist_value.values)
    if kind == "bytes_value":
        return value.bytes_value.hex()
    return getattr(value, kind)
