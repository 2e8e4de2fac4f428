"""Envoy begins the trace; the gateway's authorization is part of it; the access log names it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from observability.emit import names
from runtime.server import GrpcServer

from .edge import SLOW_KEY, Edge

CLIENT_TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps Envoy's spans."""

    def __init__(self) -> None:
        self.spans: asyncio.Queue[trace_pb2.Span] = asyncio.Queue()

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.put_nowait(span)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.mark.parametrize("client_has_a_trace", [False, True])
async def test_one_trace(tmp_path: Path, client_has_a_trace: bool) -> None:
    # A collector that listens in one family alone, by a name that has addresses in both.
    collector = Collector()
    server = GrpcServer("127.0.0.1:0")
    server.add(trace_service_pb2_grpc.add_TraceServiceServicer_to_server, collector, "")
    await server.start()
    log = tmp_path / "access.log"
    edge = Edge(tmp_path, envoy={"access_log": str(log)})
    await edge.start(f"localhost:{server.port}")
    try:
        headers = {"authorization": f"Bearer {SLOW_KEY}", "x-request-id": "mine"}
        if client_has_a_trace:
            headers["traceparent"] = f"00-{CLIENT_TRACE}-b7ad6b7169203331-01"
        async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
            response = await client.get("/v1/models", headers=headers)
        spans = {}
        while names.ENVOY_INGRESS not in spans or spans[names.ENVOY_INGRESS]["http.url"].endswith("/health"):
            span = await collector.spans.get()
            tags = {item.key: item.value.string_value for item in span.attributes}
            spans[span.name] = {**tags, "trace": span.trace_id.hex(), "id": span.span_id.hex()}
        ingress = spans[names.ENVOY_INGRESS]
        trace_id = CLIENT_TRACE if client_has_a_trace else ingress["trace"]
        assert ingress["trace"] == trace_id
        assert ingress[names.REQUEST_ID] == response.headers["x-request-id"]
        assert ingress[names.CLIENT_REQUEST_ID] == "mine"
        assert (ingress[names.TENANT], ingress[names.KEY_ID]) == ("limited", "slow")
        # The request that goes on carries the trace, and so did the question to the gateway.
        assert response.json()["headers"]["traceparent"].split("-")[1] == trace_id
        # A question of the edge that is answered at once leaves nothing; a refusal is part of the trace.
        async with httpx.AsyncClient(base_url=f"http://{edge.address}") as client:
            refused = await client.get("/v1/models", headers={**headers, "authorization": "Bearer mr-none"})
        assert refused.status_code == 401
        while not edge.spans.get_finished_spans():
            await asyncio.sleep(0.01)
        (span,) = edge.spans.get_finished_spans()
        assert span.name == names.GATEWAY_AUTHORIZE
        assert span.parent is not None
        assert not client_has_a_trace or f"{span.parent.trace_id:032x}" == trace_id
    finally:
        await edge.stop()
        await server.stop(0)
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    (entry,) = [entry for entry in entries if entry["path"] == "/v1/models" and entry["status"] == 200]
    assert entry["trace_id"] == trace_id
    assert entry["request_id"] == response.headers["x-request-id"]
    assert (entry["tenant"], entry["key_id"], entry["status"]) == ("limited", "slow", 200)
