"""Takes spans over OTLP/gRPC on port 4317 and answers /spans with them as JSON lines, on port 16686."""

from __future__ import annotations

import http.server
import json
import pathlib
import signal
import sys
import threading
from concurrent import futures
from typing import Any

import grpc
import yaml
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
configuration = yaml.safe_load(pathlib.Path(sys.argv[1].removeprefix("--config=")).read_text())
targets = [exporter["endpoint"] for exporter in configuration["exporters"].values() if "endpoint" in exporter]
onward = [grpc.insecure_channel(target).unary_unary(METHOD) for target in targets]
spans: list[str] = []
pool = futures.ThreadPoolExecutor(2)


def export(data: bytes, _: grpc.ServicerContext) -> bytes:
    for resource in trace_service_pb2.ExportTraceServiceRequest.FromString(data).resource_spans:
        names = {each.key: each.value.string_value for each in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                kept = {
                    "service": names.get("service.name"),
                    "name": span.name,
                    "trace": span.trace_id.hex(),
                    "span": span.span_id.hex(),
                    "parent": span.parent_span_id.hex(),
                    "attributes": {each.key: each.value.string_value for each in span.attributes},
                }
                spans.append(json.dumps(kept))
    for send in onward:
        pool.submit(send, data, timeout=10, wait_for_ready=True)
    return trace_service_pb2.ExportTraceServiceResponse().SerializeToString()


class Receiver(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(export) if details.method == METHOD else None


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = "\n".join(spans).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


server = grpc.server(futures.ThreadPoolExecutor(8))
server.add_generic_rpc_handlers((Receiver(),))
server.add_insecure_port("0.0.0.0:4317")
server.start()
pages = http.server.ThreadingHTTPServer(("0.0.0.0", 16686), Page)
threading.Thread(target=pages.serve_forever, daemon=True).start()
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
stopped.wait()
server.stop(1).wait()
pool.shutdown()
