"""Traces as the services write them, with known times and causes, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from observability.analysis.decode import StoredSpan
from observability.analysis.store import SpanStore
from observability.emit import names
from observability.emit.names import Cause, TtftPart

MS = 1_000_000
START_NS = 1_800_000_000 * 1_000_000_000

PARTS: Mapping[TtftPart, float] = {
    TtftPart.NETWORK: 2.0,
    TtftPart.PREPROCESS: 8.0,
    TtftPart.QUEUE: 20.0,
    TtftPart.PREFILL: 60.0,
    TtftPart.FIRST_DECODE: 9.0,
    TtftPart.SERIALIZE: 1.0,
}


def request_trace(
    request_id: str = "request-1",
    *,
    number: int = 1,
    parts_ms: Mapping[TtftPart, float] = PARTS,
    delays_ms: Mapping[Cause, float] | None = None,
    attributes: Mapping[str, Any] | None = None,
    start_ns: int = START_NS,
    decode_ms: float = 100.0,
) -> list[StoredSpan]:
    """One request from Envoy to the decode summary. `number` makes its ids; `attributes` go on its span."""
    trace_id = f"{number:032x}"
    spans: list[StoredSpan] = []
    clock_ns = start_ns

    def span(name: str, parent: str, start: int, end: int, **more: Any) -> str:
        span_id = f"{number:08x}{len(spans) + 1:08x}"
        service = names.ENVOY if name == names.ENVOY_INGRESS else name.partition(".")[0]
        key = names.ENVOY_REQUEST_ID if service == names.ENVOY else names.REQUEST_ID
        found = {str(key): request_id, **more.pop("attributes", {})}
        spans.append(StoredSpan(trace_id, span_id, parent, service, str(name), start, end, attributes=found))
        return span_id

    parts = {part: round(parts_ms.get(part, 0.0) * MS) for part in TtftPart}
    end_ns = start_ns + sum(parts.values()) + round(decode_ms * MS)
    root = span(names.ENVOY_INGRESS, "", start_ns, end_ns)
    clock_ns += parts[TtftPart.NETWORK]
    found: dict[str, Any] = {str(names.TTFT_PARTS[part]): nanos / MS for part, nanos in parts.items()}
    found[str(names.TTFT_MS)] = sum(parts.values()) / MS
    found |= {str(names.TENANT): "acme", str(names.TIER): "standard", str(names.OUTCOME): "stop"}
    causes = dict(sorted((delays_ms or {}).items(), key=lambda item: -item[1]))
    if causes:
        found[str(names.DELAYED_BY)] = [str(cause) for cause in causes]
        found |= {str(names.DELAYED_BY_MS[cause]): milliseconds for cause, milliseconds in causes.items()}
    found |= {str(key): value for key, value in (attributes or {}).items()}
    gateway = span(names.GATEWAY_REQUEST, root, clock_ns, end_ns, attributes=found)
    prepared = clock_ns + parts[TtftPart.PREPROCESS]
    prepare = span(names.GATEWAY_PREPARE, gateway, clock_ns, prepared)
    span(names.TOKENIZER_PREPARE, prepare, clock_ns, prepared)
    engine = span(names.ENGINE_REQUEST, gateway, prepared, end_ns)
    clock_ns = prepared
    for name, part in (
        (names.ENGINE_QUEUE, TtftPart.QUEUE),
        (names.ENGINE_PREFILL, TtftPart.PREFILL),
        (names.ENGINE_FIRST_DECODE, TtftPart.FIRST_DECODE),
    ):
        span(name, engine, clock_ns, clock_ns + parts[part])
        clock_ns += parts[part]
    span(names.ENGINE_DECODE, engine, clock_ns, end_ns, attributes={str(names.NUM_STEPS): 12})
    return spans


def write(store: SpanStore, spans: Iterable[StoredSpan]) -> None:
    """Puts spans into a store as their services would send them, when the last of them ended."""
    found = list(spans)
    services = dict.fromkeys(span.service for span in found)
    messages = [message([span for span in found if span.service == service]) for service in services]
    counts = [sum(span.service == service for span in found) for service in services]
    received_ns = max(span.end_ns for span in found)
    store.add(list(zip(counts, messages, strict=True)), received_ns=received_ns)


def message(spans: list[StoredSpan]) -> bytes:
    """An ExportTraceServiceRequest of one service's spans, by the generated classes."""
    request = trace_service_pb2.ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.add(key="service.name").value.string_value = spans[0].service
    scope = group.scope_spans.add()
    for span in spans:
        sent = scope.spans.add(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            parent_span_id=bytes.fromhex(span.parent_id),
            name=span.name,
            start_time_unix_nano=span.start_ns,
            end_time_unix_nano=span.end_ns,
        )
        if span.error:
            sent.status.code = trace_pb2.Status.STATUS_CODE_ERROR
            sent.status.message = span.error
        for key, value in span.attributes.items():
            sent.attributes.add(key=key).value.CopyFrom(_any(value))
    return request.SerializeToString()


def _any(value: Any) -> common_pb2.AnyValue:
    match value:
        case bool():
            return common_pb2.AnyValue(bool_value=value)
        case int():
            return common_pb2.AnyValue(int_value=value)
        case float():
            return common_pb2.AnyValue(double_value=value)
        case list() | tuple():
            return common_pb2.AnyValue(
                array_value=common_pb2.ArrayValue(values=[_any(item) for item in value])
            )
        case _:
            return common_pb2.AnyValue(string_value=str(value))
