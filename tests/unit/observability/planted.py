"""Traces as the services write them, with known times and causes, for tests of what reads them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from observability import names
from observability.names import Cause, TtftPart
from observability.store import StoredSpan

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
