"""Answers as Jaeger's query service documents it (`GET /api/v3/traces`, OTLP as JSON), from OTLP messages.

Jaeger's own binary is no package of any index that tests may use: this shows that what is asked for and what
is read are what the documentation says, with spans as the services send them.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import datetime
from typing import Any
from urllib.parse import SplitResult, parse_qs

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

from tests.unit.observability.stand_in_server import serving

Messages = Callable[[], Iterable[bytes]]
# Most traces in an answer, whatever is asked for.
MOST_TRACES = 40


def _flat(messages: Iterable[bytes]) -> Iterator[tuple[str, trace_pb2.Span]]:
    for data in messages:
        for resource in trace_service_pb2.ExportTraceServiceRequest.FromString(data).resource_spans:
            service = next(
                pair.value.string_value for pair in resource.resource.attributes if pair.key == "service.name"
            )
            for scope in resource.scope_spans:
                yield from ((service, span) for span in scope.spans)


def _nanos(text: str) -> int:
    whole, _, fraction = text.rstrip("Z").partition(".")
    return int(datetime.fromisoformat(f"{whole}+00:00").timestamp()) * 1_000_000_000 + int(
        fraction.ljust(9, "0")
    )


class _Query:
    """The parameters of a search; those that are not known are refused, as nothing is found by them."""

    KNOWN = frozenset(
        {
            *("service_name", "operation_name", "attributes", "start_time_min", "start_time_max"),
            *("num_traces", "search_depth", "raw_traces"),
        }
    )

    def __init__(self, text: str) -> None:
        given = {key.removeprefix("query."): value for key, (value,) in parse_qs(text).items()}
        assert set(given) <= self.KNOWN, set(given) - self.KNOWN
        assert given["raw_traces"] == "true", "spans would be moved"
        self.service, self.operation = given["service_name"], given.get("operation_name", "")
        self.attributes: dict[str, str] = json.loads(given.get("attributes", "{}"))
        self.first_ns, self.last_ns = _nanos(given["start_time_min"]), _nanos(given["start_time_max"])
        self.depth = min(int(given["search_depth"]), MOST_TRACES)

    def matches(self, service: str, span: trace_pb2.Span) -> bool:
        found = {pair.key: pair.value.string_value for pair in span.attributes}
        # The collector gives Envoy's spans the same key.
        found.setdefault("millrace.request_id", found.get("guid:x-request-id", ""))
        return (
            service == self.service
            and self.operation in ("", span.name)
            and self.first_ns <= span.start_time_unix_nano <= self.last_ns
            and self.attributes.items() <= found.items()
        )


def _search(messages: Iterable[bytes], query: _Query) -> list[tuple[str, trace_pb2.Span]]:
    spans = list(_flat(messages))
    newest: dict[bytes, int] = {}
    for service, span in spans:
        if query.matches(service, span):
            newest[span.trace_id] = max(newest.get(span.trace_id, 0), span.start_time_unix_nano)
    chosen = sorted(newest, key=lambda trace_id: -newest[trace_id])[: query.depth]
    return [(service, span) for service, span in spans if span.trace_id in chosen]


def _hexed(value: Any) -> Any:
    """OTLP's JSON: ids in hex."""
    if isinstance(value, list):
        return [_hexed(each) for each in value]
    if not isinstance(value, dict):
        return value
    ids = {"traceId", "spanId", "parentSpanId"}
    return {key: b64decode(each).hex() if key in ids else _hexed(each) for key, each in value.items()}


def _answer(spans: Iterable[tuple[str, trace_pb2.Span]]) -> bytes:
    data = trace_pb2.TracesData()
    for service, span in spans:
        resource = data.resource_spans.add()
        resource.resource.attributes.add(key="service.name").value.string_value = service
        resource.scope_spans.add().spans.append(span)
    found = json_format.MessageToDict(data, use_integers_for_enums=True)
    return json.dumps({"result": _hexed(found)}).encode()


def jaeger(messages: Messages, address: tuple[str, int] = ("127.0.0.1", 0)) -> AbstractContextManager[str]:
    """The address of one that has what `messages` returns when it is asked."""

    def answer(url: SplitResult) -> tuple[int, bytes]:
        wanted = url.path.removeprefix("/api/v3/traces").strip("/")
        if wanted:
            spans = [pair for pair in _flat(messages()) if pair[1].trace_id.hex() == wanted]
        else:
            spans = _search(messages(), _Query(url.query))
        if not spans:
            return 404, b'{"error":{"httpCode":404,"message":"No traces found"}}'
        return 200, _answer(spans)

    return serving(answer, address)
