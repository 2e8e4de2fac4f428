"""The real Envoy in front of a small gateway made of the real edge services and echoing faces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import yaml
from envoy_api.service.ratelimit.v3 import rls_pb2_grpc
from millrace.common.v1 import context_pb2
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.auth.authorizer import AUTHORIZE_PREFIX, Authorizer, HttpCallers
from gateway.auth.directory import KeyDirectory, hash_key
from gateway.auth.verifier import CallerVerifier, identity_from_context
from gateway.envoy.bootstrap import build
from gateway.envoy.replies import DOCUMENTS
from gateway.faces.error_forms import ERROR_FORMS
from gateway.http.application import authorize, known
from gateway.http.exchange import Exchange, Handler
from gateway.http.server import HttpServer
from gateway.intake.refusals import Refusals
from gateway.limits.counter import RequestCounter, RequestLimiter
from gateway.limits.servicer import RateLimitServicer
from gateway.limits.store import MemoryLimitStore, unix_ms
from gateway.settings import load_settings
from gateway.tiers import Tiers
from gateway.types.error_form import ErrorForms
from gateway.types.request import Caller
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from observability.emit.tracing import Telemetry
from runtime.context import CONTEXT_HEADER, from_header, to_header, verify
from runtime.deferred import Deferred
from runtime.server import GrpcServer
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
        # The context of a caller for the services behind.
        self.sign: Callable[[Caller], context_pb2.SignedContext]
        self.items: asyncio.Queue[str | None] = asyncio.Queue()

    async def Chat(
        self, request: inference_pb2.ChatRequest, context: Any
    ) -> AsyncIterator[inference_pb2.ChatResponse]:
        self.metadata = dict(context.invocation_metadata())
        while (item := await self.items.get()) is not None:
            yield inference_pb2.ChatResponse(model=item)

    async def http(self, exchange: Exchange) -> None:
        """The HTTP face."""
        if exchange.path == "/events":
            await self._events(exchange)
            return
        if exchange.path == "/health":
            context = exchange.headers.get(CONTEXT_HEADER.encode(), b"no context")
            await exchange.respond(200, context, [(b"content-type", b"text/plain")])
            return
        # Tells what arrived, and from whom.
        headers = {name.decode(): value.decode() for name, value in exchange.headers.items()}
        if exchange.caller is not None:
            headers[CONTEXT_HEADER] = to_header(self.sign(exchange.caller))
        body = {"headers": headers, "num_bytes": len(exchange.take_body())}
        await exchange.respond(200, json.dumps(body).encode())

    async def _events(self, exchange: Exchange) -> None:
        """Server-sent events, as they are put into the queue."""
        await exchange.begin_events()
        while (item := await self.items.get()) is not None:
            await exchange.write(f"data: {item}\n\n".encode())
        await exchange.end_events(b"data: [DONE]\n\n")


class Edge:
    """Envoy and the gateway behind it, both on free ports."""

    def __init__(self, folder: Path, error_forms: ErrorForms = ERROR_FORMS, **tables: dict[str, Any]) -> None:
        """`tables` are merged over TABLES."""
        self._error_forms = error_forms
        self.faces = Faces()
        self.spans = InMemorySpanExporter()
        self._tables = {name: {**TABLES.get(name, {}), **tables.get(name, {})} for name in {*TABLES, *tables}}
        self.address = self.admin = ""
        self.grpc = GrpcServer("127.0.0.1:0")
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._authorizer: Authorizer | None = None
        self._face: Handler | None = None
        # Nothing here may refuse a large body before Envoy does.
        self.http = HttpServer(self._answer, "127.0.0.1:0", max_body_bytes=1 << 30, error_forms=ERROR_FORMS)
        # A second gateway's, where a test asks for one.
        self.other_http = HttpServer(
            self._answer, "127.0.0.1:0", max_body_bytes=1 << 30, error_forms=ERROR_FORMS
        )

    async def _answer(self, exchange: Exchange) -> None:
        assert self._authorizer is not None
        assert self._face is not None
        if exchange.path in ("/health", *DOCUMENTS):
            await self.faces.http(exchange)
        elif exchange.path.startswith(AUTHORIZE_PREFIX):
            await authorize(self._authorizer, exchange)
        else:
            await self._face(exchange)

    async def start(self, otlp_endpoint: str = "", *, with_other: bool = False) -> None:
        """Starts the gateway's servers and then Envoy; returns when a request gets through."""
        settings = load_settings(self._tables)
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        telemetry = Telemetry("gateway", ObservabilityConfig(), provider)
        metrics = Metrics()
        directory = KeyDirectory(settings)
        store = MemoryLimitStore(lease_ttl_s=30, clock=unix_ms)
        tiers = Tiers(settings)
        self._authorizer = Authorizer(
            directory, tiers, settings.security.secret(), telemetry, metrics, Deferred(), self._error_forms
        )
        counter = RequestCounter(RequestLimiter(store, directory), telemetry, metrics)
        verifier = CallerVerifier(settings.security, tiers)
        self.faces.sign = lambda caller: verifier.sign(
            caller,
            tiers.resolve(caller.identity, ""),
            (caller.identity.traceparent, caller.identity.tracestate),
        )
        callers = HttpCallers(self._authorizer, verifier)
        self._face = known(callers, counter, self.faces.http)
        ratelimit = RateLimitServicer(counter, Refusals(100).throttle, self._error_forms)
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
        await self.http.start()
        tables = json.loads(json.dumps(self._tables))
        tables["envoy"]["gateway_grpc"] = [f"127.0.0.1:{self.grpc.port}"]
        tables["envoy"]["gateway_http"] = [f"127.0.0.1:{self.http.port}"]
        if with_other:
            await self.other_http.start()
            tables["envoy"]["gateway_http"].append(f"127.0.0.1:{self.other_http.port}")
        await self._start_envoy(
            build(load_settings(tables), ObservabilityConfig(otlp_endpoint=otlp_endpoint), self._error_forms)
        )

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
            self.admin = admin = f"http://{admin_file.read_text()}"
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
        await self.http.stop()
        await self.other_http.stop()
        await self.grpc.stop(0)


def verified(header: str) -> Any:
    """The identity in a context header, if its signature holds."""
    context = verify(from_header(header), SECRET.encode(), now_unix_ms=unix_ms(), max_age_s=60)
    return identity_from_context(context), context
