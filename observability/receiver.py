"""OTLP over gRPC into the local span store: what a collector would do, for a machine that has none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from observability import names
from observability.metrics import Metrics
from observability.store import SpanStore, StoredSpan

_log = logging.getLogger(__name__)

SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"
# Spans waiting to be written; beyond them the senders are told that theirs were refused.
MAX_QUEUED_SPANS = 50_000
_MAX_BATCH_SPANS = 5_000
# Spans that come within this time of each other are written together.
_GATHER_S = 0.1


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Queues what exporters send and writes it in batches, so that no exporter waits for the disk."""

    def __init__(self, store: SpanStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        self._queued: list[StoredSpan] = []
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()

    async def Export(
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """Takes the spans; says how many were refused when the queue is full."""
        spans = list(spans_of(request))
        room = MAX_QUEUED_SPANS - len(self._queued)
        self._queued.extend(spans[:room])
        self._wake.set()
        response = trace_service_pb2.ExportTraceServiceResponse()
        if len(spans) > room:
            response.partial_success.rejected_spans = len(spans) - room
            response.partial_success.error_message = f"more than {MAX_QUEUED_SPANS} spans wait to be written"
            self._metrics.add(names.SPANS_DROPPED, len(spans) - room)
        return response

    async def write_until_closed(self) -> None:
        """Writes batches until `close`, then what is left."""
        while self._queued or not self._closing.is_set():
            if not self._queued:
                self._wake.clear()
                await self._wake.wait()
                await self._gather()
                continue
            batch, self._queued = self._queued[:_MAX_BATCH_SPANS], self._queued[_MAX_BATCH_SPANS:]
            try:
                await asyncio.to_thread(self._store.add, batch)
            except sqlite3.Error as error:
                # Losing spans is better than losing the service; the count shows it.
                _log.error("cannot write %d spans: %s", len(batch), error)
                self._metrics.add(names.SPANS_DROPPED, len(batch))
            else:
                self._metrics.add(names.SPANS_STORED, len(batch))

    async def _gather(self) -> None:
        # A transaction costs as much as a dozen spans; several services send at about the same time.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), _GATHER_S)

    def close(self) -> None:
        """Lets `write_until_closed` return once the queue is empty."""
        self._closing.set()
        self._wake.set()


def spans_of(request: trace_service_pb2.ExportTraceServiceRequest) -> Iterator[StoredSpan]:
    """The spans of one export, with the resource's service name."""
    for resource_spans in request.resource_spans:
        service = "unknown"
        for pair in resource_spans.resource.attributes:
            if pair.key == "service.name":
                service = pair.value.string_value
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                yield _stored(service, span)


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
        attributes=_attributes(span.attributes),
        links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    pair: KeyValue
    for pair in pairs:
        found[pair.key] = _value(pair.value)
    return found


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
