"""Takes spans over OTLP/gRPC on port 4317, and answers on port 16686 as Jaeger's query service does."""

from __future__ import annotations

import pathlib
import signal
import sys
import threading
from concurrent import futures
from typing import Any

import grpc
import yaml
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from tests.unit.observability.jaeger_stand_in import jaeger

METHOD = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
configuration = yaml.safe_load(pathlib.Path(sys.argv[1].removeprefix("--config=")).read_text())
targets = [exporter["endpoint"] for exporter in configuration["exporters"].values() if "endpoint" in exporter]
onward = [grpc.insecure_channel(target).unary_unary(METHOD) for target in targets]
messages: list[bytes] = []
pool = futures.ThreadPoolExecutor(2)


def export(data: bytes, _: grpc.ServicerContext) -> bytes:
    messages.append(data)
    for send in onward:
        pool.submit(send, data, timeout=10, wait_for_ready=True)
    return trace_service_pb2.ExportTraceServiceResponse().SerializeToString()


class Receiver(grpc.GenericRpcHandler):
    def service(self, details: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(export) if details.method == METHOD else None


server = grpc.server(futures.ThreadPoolExecutor(8))
server.add_generic_rpc_handlers((Receiver(),))
server.add_insecure_port("0.0.0.0:4317")
server.start()
stopped = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stopped.set())
with jaeger(lambda: tuple(messages), ("0.0.0.0", 16686)):
    stopped.wait()
    server.stop(1).wait()
    pool.shutdown()
