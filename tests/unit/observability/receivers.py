"""OTLP receivers on real sockets, as a collector has them: over gRPC and over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2


class Received(trace_service_pb2_grpc.TraceServiceServicer):
    """What exporters have sent."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.messages: list[trace_service_pb2.ExportTraceServiceRequest] = []
        # Headers and path of the last message.
        self.headers: dict[str, str] = {}
        self.path = ""

    @property
    def spans(self) -> list[trace_pb2.Span]:
        """Of all messages."""
        return [
            span
            for message in self.messages
            for group in message.resource_spans
            for scope in group.scope_spans
            for span in scope.spans
        ]

    @property
    def resources(self) -> list[dict[str, str]]:
        """Texts of each process that has sent."""
        found = [
            {pair.key: pair.value.string_value for pair in group.resource.attributes}
            for message in self.messages
            for group in message.resource_spans
        ]
        return [each for index, each in enumerate(found) if each not in found[:index]]

    def take(self, message: Any, headers: Mapping[str, str], path: str) -> None:
        """Keeps a message."""
        self.headers = {key.lower(): value for key, value in headers.items()}
        self.path = path
        self.messages.append(message)

    def Export(self, request: Any, context: Any) -> Any:
        """Over gRPC."""
        self.take(request, dict(context.invocation_metadata()), "")
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def over_grpc() -> Iterator[Received]:
    """A receiver at http://host:port."""
    received = Received()
    server = grpc.server(ThreadPoolExecutor(4))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(received, server)
    received.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield received
    finally:
        server.stop(None).wait()


@contextmanager
def over_http() -> Iterator[Received]:
    """A receiver at http://host:port, whatever the path."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = trace_service_pb2.ExportTraceServiceRequest.FromString(self._body())
            received.take(message, dict(self.headers), self.path)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def _body(self) -> bytes:
            if "content-length" in self.headers:
                return self.rfile.read(int(self.headers["content-length"]))
            # Envoy sends chunks, each with its size before it and a line's end behind it.
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    received.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


RECEIVERS = {"grpc": over_grpc, "http/protobuf": over_http}
