"""OTLP over gRPC into the local span store: what a collector would do, for a machine that has none."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from observability.analysis.store import SpanStore
from observability.emit import names
from observability.emit.metrics import Metrics

_log = logging.getLogger(__name__)

SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"
# Spans waiting to be written; beyond them the senders are told that theirs were refused.
MAX_QUEUED_SPANS = 50_000
MAX_QUEUED_BYTES = 128 * 1024 * 1024
# Messages that come within this time of each other are written together.
_GATHER_S = 0.5
# An ExportTraceServiceResponse that says nothing: all was taken.
_TAKEN = b""


class TraceReceiver:
    """Queues what exporters send and writes it in batches, so that no exporter waits for the disk.

    Messages are read to count their spans; the store keeps them as they came.
    """

    def __init__(self, store: SpanStore, metrics: Metrics) -> None:
        self._store = store
        self._metrics = metrics
        for counter in (names.SPANS_STORED, names.SPANS_DROPPED):
            metrics.begin(counter)
        self._queued: list[tuple[int, bytes]] = []
        self._num_queued = 0
        self._num_queued_bytes = 0
        self._wake = asyncio.Event()
        self._closing = asyncio.Event()

    async def export(self, data: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        """Takes the spans; says how many were refused when the queue is full."""
        try:
            num_spans = _count_spans(data)
        except DecodeError:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no ExportTraceServiceRequest")
        if not num_spans:
            # Nothing to keep, and no number of such messages would pass the first limit.
            return _TAKEN
        if self._num_queued + num_spans > MAX_QUEUED_SPANS:
            return self._refuse(num_spans, f"more than {MAX_QUEUED_SPANS} spans wait to be written")
        if self._num_queued_bytes + len(data) > MAX_QUEUED_BYTES:
            return self._refuse(num_spans, f"more than {MAX_QUEUED_BYTES} bytes wait to be written")
        self._queued.append((num_spans, data))
        self._num_queued += num_spans
        self._num_queued_bytes += len(data)
        self._wake.set()
        return _TAKEN

    def _refuse(self, num_spans: int, why: str) -> bytes:
        response = trace_service_pb2.ExportTraceServiceResponse()
        response.partial_success.rejected_spans = num_spans
        response.partial_success.error_message = why
        self._metrics.add(names.SPANS_DROPPED, num_spans)
        return response.SerializeToString()

    async def write_until_closed(self) -> None:
        """Writes what is queued until `close`, then what is left."""
        while self._queued or not self._closing.is_set():
            if not self._queued:
                self._wake.clear()
                await self._wake.wait()
                await self._gather()
                continue
            messages, num_spans = self._queued, self._num_queued
            self._queued, self._num_queued, self._num_queued_bytes = [], 0, 0
            try:
                await asyncio.to_thread(self._store.add, messages)
            except sqlite3.Error as error:
                # Losing spans is better than losing the service; the count shows it.
                _log.error("cannot write %d spans: %s", num_spans, error)
                self._metrics.add(names.SPANS_DROPPED, num_spans)
            else:
                self._metrics.add(names.SPANS_STORED, num_spans)

    async def _gather(self) -> None:
        # A transaction costs as much as several messages; several services send at about the same time.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), _GATHER_S)

    def close(self) -> None:
        """Lets `write_until_closed` return once the queue is empty."""
        self._closing.set()
        self._wake.set()


def _count_spans(data: bytes) -> int:
    """Spans of a message; raises DecodeError for bytes that are none. gRPC bounds their number."""
    request = trace_service_pb2.ExportTraceServiceRequest.FromString(data)
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def add_to_server(receiver: TraceReceiver, server: grpc.aio.Server) -> None:
    """Registers the receiver, as a generated `add_…_to_server` would, but for bytes."""
    method = grpc.unary_unary_rpc_method_handler(
        receiver.export, request_deserializer=bytes, response_serializer=bytes
    )
    handler = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Export": method})
    server.add_generic_rpc_handlers((handler,))
