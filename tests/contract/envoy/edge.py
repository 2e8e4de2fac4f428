"""The real Envoy in front of a small gateway made of the real edge services and echoing faces."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml
from envoy_api.service.auth.v3 import external_auth_pb2_grpc
from envoy_api.service.ratelimit.v3 import rls_pb2_grpc
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from gateway.auth.convert import identity_from_context
from gateway.auth.directory import KeyDirectory, hash_key
from gateway.auth.servicer import AuthorizationServicer
from gateway.envoy.bootstrap import build
from gateway.limits.memory import MemoryLimitStore, unix_ms
from gateway.limits.requests import RequestLimiter
from gateway.limits.servicer import RateLimitServicer
from gateway.settings import load_settings
from gateway.tiers import Tiers
from observability.config import ObservabilityConfig
from observability.metrics import Metrics
from observability.tracing import Telemetry
from services.context import CONTEXT_HEADER, from_header, verify
from services.server import GrpcServer
from services.supervisor.edge import envoy_binary

SECRET = "a secret for contract tests"
GOOD_KEY = "mr-good"
SLOW_KEY = "mr-limited"
REVOKED_KEY = "mr-revoked"
REQUESTS_PER_MINUTE = 2
MAX_BODY_BYTES = 4096

TABLES: dict[str, Any] = {
    "security": {"context_secret": SECRET},
    "gateway": {"max_body_bytes": MAX_BODY_BYTES},
    "tiers": {"standard": {"priority": 3, "ttft_target_ms": 900}, "batch": {}},
    "tenants": {
        "acme": {"allowed_tiers": ["batch"], "weight": 2.0},
        "limited": {"tier": "batch", "requests_per_minute": REQUESTS_PER_MINUTE},
    },
    "keys": {
        "entries": [
            {"id": "good", "tenant": "acme", "hash": hash_key(GOOD_KEY), "allowed_models": ["m"]},
            {"id": "slow", "tenant": "limited", "hash": hash_key(SLOW_KEY)},
            {"id": "revoked", "tenant": "acme", "hash": hash_key(REVOKED_KEY), "disabled": True},
        ]
    },
    "envoy": {"access_log": "", "listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "concurrency": 1},
}


class Faces(inference_pb2_grpc.InferenceServiceServicer):
    """Streams what it is told to, one item at a time, so that buffering on the way would be seen."""

    def __init__(self) -> None:
        self.metadata: dict[str, str] = {}
        self.items: asyncio.Queue[str | None] = asyncio.Queue()

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Any
    ) -> AsyncIterator[inference_pb2.ChatResponse]:
        self.metadata = dict(context.invocation_metadata())
        while (item := await self.items.get()) is not None:
            yield inference_pb2.ChatResponse(model=item)

    async def echo(self, request: Request) -> Response:
        """Tells what arrived at the HTTP face."""
        body = await request.body()
        return JSONResponse({"headers": dict(request.headers), "num_bytes": len(body)})

    async def events(self, request: Request) -> Response:
        """Server-sent events, as they are put into the queue."""

        async def stream() -> AsyncIterator[str]:
            while (item := await self.items.get()) is not None:
                yield f"data: {item}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    async def health(self, request: Request) -> Response:
        """Envoy's health check, and a public page."""
        return PlainTextResponse(request.headers.get(CONTEXT_HEADER, "no context"))


class Edge:
    """Envoy and the gateway behind it, both on free ports."""

    def __init__(self, folder: Path, **tables: dict[str, Any]) -> None:
        """`tables` are merged over TABLES."""
        self.faces = Faces()
        self.spans = InMemorySpanExporter()
        self._tables = {name: {**TABLES.get(name, {}), **tables.get(name, {})} for name in {*TABLES, *tables}}
        self.address = ""
        self.grpc = GrpcServer("127.0.0.1:0")
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        app = Starlette(
            routes=[
                Route("/health", self.faces.health),
                Route("/events", self.faces.events),
                Route("/{path:path}", self.faces.echo, methods=["GET", "POST"]),
            ]
        )
        self._http = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        self._http_task: asyncio.Task[None] | None = None

    async def start(self, otlp_endpoint: str = "") -> None:
        """Starts the gateway's servers and then Envoy; returns when a request gets through."""
        settings = load_settings(self._tables)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        telemetry = Telemetry("gateway", ObservabilityConfig(), provider)
        metrics = Metrics()
        directory = KeyDirectory(settings)
        store = MemoryLimitStore(lease_ttl_s=30, clock=unix_ms)
        authorization = AuthorizationServicer(
            directory, Tiers(settings), settings.security.secret(), telemetry, metrics
        )
        ratelimit = RateLimitServicer(RequestLimiter(store, directory), telemetry, metrics)
        self.grpc.add(
            external_auth_pb2_grpc.add_AuthorizationServicer_to_server,
            authorization,
            "envoy.service.auth.v3.Authorization",
        )
        self.grpc.add(
            rls_pb2_grpc.add_RateLimitServiceServicer_to_server,
            ratelimit,
            "envoy.service.ratelimit.v3.RateLimitService",
        )
        self.grpc.add(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            self.faces,
            "millrace.inference.v1.InferenceService",
        )
        await self.grpc.start()
        await self.grpc.set_serving(True)
        self._http_task = asyncio.create_task(self._http.serve())
        while not self._http.started:
            await asyncio.sleep(0.01)
        http_port = self._http.servers[0].sockets[0].getsockname()[1]
        tables = json.loads(json.dumps(self._tables))
        tables["envoy"]["gateway_grpc"] = [f"127.0.0.1:{self.grpc.port}"]
        tables["envoy"]["gateway_http"] = [f"127.0.0.1:{http_port}"]
        await self._start_envoy(build(load_settings(tables), otlp_endpoint))

    async def _start_envoy(self, bootstrap: dict[str, Any]) -> None:
        config = self._folder / "envoy.yaml"
        admin_file = self._folder / "admin"
        config.write_text(yaml.safe_dump(bootstrap))
        self._process = await asyncio.create_subprocess_exec(
            str(envoy_binary()),
            *("-c", str(config), "--use-dynamic-base-id", "--log-level", "warning"),
            *("--concurrency", "1", "--admin-address-path", str(admin_file)),
        )
        async with httpx.AsyncClient() as client:
            while not (admin_file.exists() and admin_file.read_text()):
                assert self._process.returncode is None, "Envoy ended; its message is above"
                await asyncio.sleep(0.02)
            admin = f"http://{admin_file.read_text()}"
            while (await client.get(f"{admin}/ready")).status_code != 200:
                await asyncio.sleep(0.02)
            listeners = (await client.get(f"{admin}/listeners?format=json")).json()
            port = listeners["listener_statuses"][0]["local_address"]["socket_address"]["port_value"]
            self.address = f"127.0.0.1:{port}"
            while (await client.get(f"http://{self.address}/health")).status_code != 200:
                await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Ends Envoy and the servers."""
        if self._process is not None:
            self._process.terminate()
            await self._process.wait()
        self._http.should_exit = True
        if self._http_task is not None:
            with contextlib.suppress(asyncio.CancelledError):
                await self._http_task
        await self.grpc.stop(0)


def verified(header: str) -> Any:
    """The identity in a context header, if its signature holds."""
    context = verify(from_header(header), SECRET.encode(), now_unix_ms=unix_ms(), max_age_s=60)
    return identity_from_context(context), context
