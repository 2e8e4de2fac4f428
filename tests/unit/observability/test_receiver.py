"""Spans from a real exporter, over gRPC, through the receiver's process, into the store."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from observability.analysis import receiver
from observability.analysis.store import SpanReader, SpanStore
from observability.emit import names, tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from observability.emit.tracing import RequestIdentity, Telemetry, make_provider


@asynccontextmanager
async def _running(store: Path, **more: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    environment = {
        **os.environ,
        "MILLRACE_OBSERVABILITY__LISTEN": "127.0.0.1:0",
        "MILLRACE_OBSERVABILITY__STORE": str(store),
        **more,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "observability", env=environment, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line.startswith("ready observability otlp="), line
        yield process, line.split("otlp=")[1].split()[0]
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.wait(), 30)


def _telemetry(service: str, address: str) -> Telemetry:
    # Made like tracing.setup's, without the process-wide provider that only one test could set.
    config = ObservabilityConfig(store_endpoint=address)
    return Telemetry(service, config, make_provider(service, config))


async def test_two_services_become_one_trace_and_a_sigterm_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "traces.sqlite"
    async with _running(path) as (process, address):
        gateway, engine = _telemetry("gateway", address), _telemetry("engine", address)
        context = tracing.with_identity(RequestIdentity("r-1", tenant="acme"))
        root = gateway.start(names.GATEWAY_REQUEST, parent=context)
        remote = tracing.context_from_traceparent(*tracing.traceparent_of(root))
        engine.record(
            names.ENGINE_REQUEST,
            start_s=time.monotonic(),
            end_s=time.monotonic(),
            parent=tracing.with_identity(RequestIdentity("r-1"), remote),
            attributes={names.NUM_STEPS: 3, names.DELAYED_BY: ["kv_pressure"], names.STREAMING: True},
            error="lost",
        )
        short_s = time.monotonic()
        gateway.step(names.GATEWAY_ROUTE, of=root, start_s=short_s, end_s=short_s + 0.002)
        gateway.end(root, details={names.FACE: "http", names.TTFT_PARTS[names.TtftPart.QUEUE]: 1.5})
        await asyncio.to_thread(gateway.shutdown)
        await asyncio.to_thread(engine.shutdown)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0
    child, parent, step = sorted(SpanReader(path).find("r-1"), key=lambda span: (span.service, span.name))
    assert (child.service, parent.service) == ("engine", "gateway")
    assert child.parent_id == parent.span_id
    assert child.error == "lost"
    assert child.attributes[names.NUM_STEPS] == 3
    assert child.attributes[names.DELAYED_BY] == ["kv_pressure"]
    assert child.attributes[names.STREAMING] is True
    assert parent.attributes[names.TENANT] == "acme"
    # A short step travels as an attribute and is read as a span.
    assert (step.name, step.parent_id, step.request_id) == (names.GATEWAY_ROUTE, parent.span_id, "r-1")
    assert step.duration_ms == pytest.approx(2.0)
    # Details are stored in one attribute, too, and are read as attributes.
    assert parent.attributes[names.FACE] == "http"
    assert parent.attributes[names.TTFT_PARTS[names.TtftPart.QUEUE]] == 1.5
    assert {names.STEPS, names.DETAILS}.isdisjoint({**parent.attributes, **step.attributes})


async def test_it_is_healthy_when_ready_and_exposes_metrics(tmp_path: Path) -> None:
    async with (
        _running(tmp_path / "t.sqlite", MILLRACE_OBSERVABILITY__METRICS_LISTEN="127.0.0.1:0") as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service=receiver.SERVICE_NAME))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("MILLRACE_OBSERVABILITY__MAX_SPANS", "1", "max_spans"),
        ("MILLRACE_OBSERVABILITY__NOPE", "1", "nope"),
        ("MILLRACE_OBSERVABILITY__STORE", "/proc/none/x.sqlite", "observability.store"),
        ("MILLRACE_OBSERVABILITY__LISTEN", "203.0.113.1:1", "cannot listen"),
    ],
)
async def test_a_bad_configuration_ends_with_code_2_and_one_line(
    tmp_path: Path, variable: str, value: str, expected: str
) -> None:
    environment = {**os.environ, "MILLRACE_OBSERVABILITY__STORE": str(tmp_path / "t.sqlite"), variable: value}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "observability", env=environment, stderr=asyncio.subprocess.PIPE
    )
    _, error = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 2
    assert expected in error.decode().splitlines()[-1]


@pytest.mark.parametrize("limit", ["MAX_QUEUED_SPANS", "MAX_QUEUED_BYTES"])
async def test_senders_are_told_when_the_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    full = 3 if limit == "MAX_QUEUED_SPANS" else _request(3).ByteSize()
    monkeypatch.setattr(receiver, limit, full)
    store = SpanStore(tmp_path / "t.sqlite", max_spans=1000, max_bytes=1 << 30)
    metrics = Metrics()
    servicer = receiver.TraceReceiver(store, metrics)
    server = grpc.aio.server()
    receiver.add_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = trace_service_pb2_grpc.TraceServiceStub(channel)
            # A message without spans occupies no space.
            await stub.Export(_request(0))
            taken = await stub.Export(_request(3))
            refused = await stub.Export(_request(2))
            empty = await stub.Export(_request(0))
    finally:
        await server.stop(None)
    assert taken.partial_success.rejected_spans == 0
    assert refused.partial_success.rejected_spans == 2
    assert str(full) in refused.partial_success.error_message
    assert not empty.HasField("partial_success")
    servicer.close()
    await servicer.write_until_closed()
    assert len(SpanReader(tmp_path / "t.sqlite").find("last")) == 3
    assert metrics.registry.get_sample_value(names.SPANS_DROPPED.name) == 2
    assert metrics.registry.get_sample_value(names.SPANS_STORED.name) == 3


def _request(count: int) -> trace_service_pb2.ExportTraceServiceRequest:
    request = trace_service_pb2.ExportTraceServiceRequest()
    scope = request.resource_spans.add().scope_spans.add()
    for number in range(count):
        scope.spans.add(trace_id=b"t" * 16, span_id=bytes([number] * 8), name="x")
    return request


async def test_bytes_that_are_no_otlp_are_the_senders_mistake(tmp_path: Path) -> None:
    async with (
        _running(tmp_path / "t.sqlite") as (_, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        export = channel.unary_unary(f"/{receiver.SERVICE_NAME}/Export")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await export(b"no protobuf")
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert await export(_request(2).SerializeToString()) == b""
