"""The store of a deployment: what Jaeger keeps, read by its query service's API (`/api/v3`, OTLP as JSON).

Jaeger finds spans by service, operation and attribute; steps that services record in one attribute are found
in what it answers. It answers whole traces, a page at a time, and as they came: without `raw_traces` it would
move spans by the skew of clocks that it believes in.
"""

from __future__ import annotations

import json
import time
from base64 import b64encode
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import httpx
from google.protobuf import json_format
from opentelemetry.proto.trace.v1 import trace_pb2

from observability.analysis.decode import StoredSpan, decode
from observability.analysis.source import LATE_NS, SpanSource, StoreError
from observability.emit import names

# Traces in one answer.
_PAGE = 500
# How far back a request, and the newest one, are looked for.
_DAYS_NS = 7 * 24 * 3600 * 1_000_000_000
_HOURS_NS = 24 * 3600 * 1_000_000_000
_TIMEOUT_S = 30.0
_ID_KEYS = frozenset({"traceId", "spanId", "parentSpanId"})
# Digits of a span's and of a trace's id in hex; in base64, protobuf's own form, they have 12 and 24.
_HEX_LENGTHS = frozenset({16, 32})


class JaegerReader(SpanSource):
    """Reads one Jaeger, named by the address of its query service."""

    def __init__(self, url: str) -> None:
        self.name = f"the Jaeger at {url}"
        self._client = httpx.Client(base_url=url.rstrip("/"), timeout=_TIMEOUT_S)

    def close(self) -> None:
        """Closes its connections."""
        self._client.close()

    def trace(self, trace_id: str) -> list[StoredSpan]:
        """See SpanSource."""
        if len(trace_id) != max(_HEX_LENGTHS) or not set(trace_id) <= set("0123456789abcdef"):
            return []
        found = {
            span.span_id: span for span in self._ask(f"/api/v3/traces/{trace_id}", {"raw_traces": "true"})
        }
        return sorted(found.values(), key=lambda span: span.start_ns)

    def traces_of_request(self, request_id: str) -> list[str]:
        """See SpanSource."""
        if not request_id:
            return []
        now_ns = time.time_ns()
        newest: dict[str, tuple[bool, int]] = {}
        for key in (names.REQUEST_ID, names.CLIENT_REQUEST_ID):
            # Requests that the edge refused have no span of the gateway's.
            for service in (names.GATEWAY, names.ENVOY):
                query = {"attributes": json.dumps({key: request_id})}
                for span in self._search(service, now_ns - _DAYS_NS, now_ns, query):
                    found = newest.get(span.trace_id, (False, 0))
                    newest[span.trace_id] = max(found, (span.request_id == request_id, span.start_ns))
                if newest:
                    break
        return sorted(newest, key=lambda trace_id: newest[trace_id], reverse=True)

    def last_trace(self) -> str:
        """See SpanSource."""
        now_ns = time.time_ns()
        for service, name in ((names.GATEWAY, names.GATEWAY_REQUEST), (names.ENVOY, names.ENVOY_INGRESS)):
            page = self._page(service, now_ns - _HOURS_NS, now_ns, {"operation_name": name})
            found = [span for span in page if span.name == name]
            if found:
                return max(found, key=lambda span: span.start_ns).trace_id
        return ""

    def spans_named(
        self, name: str, *, since_ns: int, until_ns: int | None = None, limit: int = 100_000
    ) -> list[StoredSpan]:
        """See SpanSource."""
        found: dict[str, StoredSpan] = {}
        last_ns = time.time_ns() if until_ns is None else until_ns
        for span in self._search(_service(name), since_ns, last_ns, {"operation_name": name}):
            if span.name == name and since_ns <= span.start_ns <= last_ns:
                found[span.span_id] = span
            if len(found) >= limit:
                break
        return sorted(found.values(), key=lambda span: -span.start_ns)

    def spans_between(self, wanted: Collection[str], start_ns: int, end_ns: int) -> list[StoredSpan]:
        """See SpanSource."""
        found: dict[str, StoredSpan] = {}
        for service in {_service(name) for name in wanted}:
            for span in self._search(service, start_ns - LATE_NS, end_ns, {}):
                if span.name in wanted and span.start_ns < end_ns and span.end_ns > start_ns:
                    found[span.span_id] = span
        return sorted(found.values(), key=lambda span: span.start_ns)

    def _search(
        self, service: str, start_ns: int, end_ns: int, query: Mapping[str, str]
    ) -> Iterator[StoredSpan]:
        """Spans of all traces with a matching span that started in [start_ns, end_ns], page by page."""
        operation = query.get("operation_name", "")
        seen: set[str] = set()
        while True:
            page = self._page(service, start_ns, end_ns, query)
            fresh = {span.trace_id for span in page} - seen
            yield from (span for span in page if span.trace_id in fresh)
            seen |= fresh
            begun = [
                span.start_ns
                for span in page
                if span.service == service and operation in ("", span.name) and span.start_ns >= start_ns
            ]
            if not fresh or not begun:
                return
            # The newest come first, and how many at a time is the server's choice, too.
            end_ns = min(begun)

    def _page(self, service: str, start_ns: int, end_ns: int, query: Mapping[str, str]) -> list[StoredSpan]:
        asked = {
            "service_name": service,
            "start_time_min": _rfc3339(start_ns),
            "start_time_max": _rfc3339(end_ns),
            # Releases before and after the attribute got another name.
            "num_traces": str(_PAGE),
            "search_depth": str(_PAGE),
            "raw_traces": "true",
            **query,
        }
        return list(self._ask("/api/v3/traces", {f"query.{key}": value for key, value in asked.items()}))

    def _ask(self, path: str, parameters: Mapping[str, str]) -> Iterator[StoredSpan]:
        """Spans of an answer; none where nothing was found."""
        try:
            answer = self._client.get(path, params=dict(parameters))
            if answer.status_code == httpx.codes.NOT_FOUND:
                return
            answer.raise_for_status()
            for document in _documents(answer.text):
                yield from decode(_otlp(document.get("result", document)))
        except httpx.HTTPError as error:
            raise StoreError(
                f"{self.name} does not answer ({error}); name its query service, as http://127.0.0.1:16686"
            ) from error
        except (ValueError, AttributeError, json_format.ParseError) as error:
            raise StoreError(
                f"{self.name} answers what is no OTLP ({error}); Jaeger 2 serves it at /api/v3"
            ) from error


def _service(name: str) -> str:
    return names.ENVOY if name == names.ENVOY_INGRESS else name.partition(".")[0]


def _rfc3339(unix_ns: int) -> str:
    seconds, nanos = divmod(unix_ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}.{nanos:09d}Z"


def _documents(text: str) -> Iterator[dict[str, Any]]:
    """One document, or one for each chunk of a stream."""
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        document, position = decoder.raw_decode(text, position)
        yield document
        position += len(text[position:]) - len(text[position:].lstrip())


def _otlp(traces: dict[str, Any]) -> bytes:
    """OTLP in JSON as protobuf's bytes, which an ExportTraceServiceRequest has as well."""
    message = json_format.ParseDict(
        _with_base64_ids(traces), trace_pb2.TracesData(), ignore_unknown_fields=True
    )
    return message.SerializeToString()


def _with_base64_ids(value: Any) -> Any:
    """OTLP writes ids in hex, where protobuf's JSON has bytes in base64."""
    if isinstance(value, list):
        return [_with_base64_ids(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: b64encode(bytes.fromhex(each)).decode()
        if key in _ID_KEYS and len(each) in _HEX_LENGTHS
        else _with_base64_ids(each)
        for key, each in value.items()
    }
