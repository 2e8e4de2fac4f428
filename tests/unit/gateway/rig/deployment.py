"""A gateway process's parts in this process, wired by sockets to a scripted tokenizer and engines."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
import msgspec
from millrace.common.v1 import context_pb2
from millrace.engine.v1 import engine_pb2_grpc
from millrace.inference.v1 import inference_pb2_grpc
from millrace.tokenizer.v1 import tokenizer_pb2_grpc

from gateway.app import Gateway
from gateway.engines.types import EngineState
from gateway.faces.error_forms import ERROR_FORMS
from gateway.settings import load_settings
from gateway.types.error_form import ErrorForms
from observability.emit import tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from runtime.context import CONTEXT_HEADER, sign, to_header
from runtime.server import GrpcServer
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer

SECRET = "a secret of this test"


def signed_context(
    request_id: str = "request-1",
    *,
    tier: str = "standard",
    allowed_models: tuple[str, ...] = (),
    tenant: str = "acme",
    cache_salt: bytes = b"",
) -> str:
    """The header that the edge would have made."""
    context = context_pb2.RequestContext(
        request_id=request_id,
        tenant=tenant,
        cache_salt=cache_salt,
        key_id="k1",
        tier=tier,
        allowed_models=allowed_models,
        issued_unix_ms=time.time_ns() // 1_000_000,
    )
    return to_header(sign(context, SECRET.encode()))


@dataclass
class Deployment:
    """What a test drives and looks at."""

    gateway: Gateway
    metrics: Metrics
    tokenizer: ByteTokenizer
    engines: list[ScriptedEngine]
    engine_servers: list[GrpcServer]
    http: httpx.AsyncClient
    channel: grpc.aio.Channel
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def inference(self) -> Any:
        """A stub of the gRPC face."""
        return inference_pb2_grpc.InferenceServiceStub(self.channel)

    async def chat(self, **body: Any) -> httpx.Response:
        """POSTs a chat completion with a default message."""
        return await self.http.post(
            "/v1/chat/completions",
            json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **body},
        )

    async def events(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The events of a stream, `[DONE]` checked and left out."""
        response = await self.http.post(path, json={"model": "tiny", "stream": True, **body})
        assert response.status_code == 200, response.text
        blocks = response.text.strip().split("\n\n")
        assert blocks[-1] == "data: [DONE]"
        return [msgspec.json.decode(block.removeprefix("data: ")) for block in blocks[:-1]]


async def _listen(register: Any, servicer: Any, name: str, listen: str = "127.0.0.1:0") -> GrpcServer:
    server = GrpcServer(listen)
    server.add(register, servicer, name)
    await server.start()
    await server.set_serving(True)
    return server


async def serve_engine(engine: ScriptedEngine, listen: str = "127.0.0.1:0") -> GrpcServer:
    """Starts an engine."""
    register = engine_pb2_grpc.add_EngineServiceServicer_to_server
    return await _listen(register, engine, "millrace.engine.v1.EngineService", listen)


async def _stop_all(servers: list[GrpcServer]) -> None:
    """Those of this moment: a test may have put another in the place of one."""
    for server in servers:
        await server.stop(0)


@asynccontextmanager
async def deployed(
    *engines: ScriptedEngine,
    tokenizer: ByteTokenizer | None = None,
    tables: dict[str, Any] | None = None,
    telemetry: tracing.Telemetry | None = None,
    error_forms: ErrorForms = ERROR_FORMS,
) -> AsyncIterator[Deployment]:
    """A gateway that is ready, with these engines (one by default)."""
    served = list(engines) or [ScriptedEngine()]
    tokenizer = tokenizer or ByteTokenizer()
    async with AsyncExitStack() as stack:
        tokenizer_server = await _listen(
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server,
            tokenizer,
            "millrace.tokenizer.v1.TokenizerService",
        )
        stack.push_async_callback(tokenizer_server.stop, 0)
        servers = [await serve_engine(engine) for engine in served]
        stack.push_async_callback(_stop_all, servers)
        metrics = Metrics()
        settings = load_settings(tables_of(tokenizer_server, servers, tables or {}))
        telemetry = telemetry or tracing.Telemetry("gateway", ObservabilityConfig(), None)
        gateway = Gateway(settings, telemetry, metrics, error_forms)
        await gateway.start()
        stack.push_async_callback(gateway.stop)
        await gateway.wait_ready()
        # Which engines there are is nothing that a test should have to wait for.
        while any(each.state is EngineState.CONNECTING for each in gateway.fleet.attachments):
            await gateway.fleet.wait_change(1.0)
        http = httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{gateway.http.port}",
            headers={CONTEXT_HEADER: signed_context()},
            timeout=20,
        )
        await stack.enter_async_context(http)
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{gateway.grpc.port}"))
        yield Deployment(gateway, metrics, tokenizer, served, servers, http, channel)


def tables_of(tokenizer: GrpcServer, engines: list[GrpcServer], more: dict[str, Any]) -> dict[str, Any]:
    """The settings of a gateway between these services."""
    return {
        "security": {"context_secret": SECRET},
        # The services of this rig say nothing that they were not asked for.
        "health": {"silence_limit_s": more.get("silence_limit_s", 3600.0)},
        **more.get("served", {"model": {"name": "tiny", "aliases": ["default"], **more.get("model", {})}}),
        "tiers": {"standard": more.get("tier", {}), "fast": {"priority": 5, **more.get("fast", {})}},
        "keys": more.get("keys", {}),
        "tenants": {
            "acme": {"allowed_tiers": ["fast"], **more.get("tenant", {})},
            **more.get("tenants", {}),
        },
        "gateway": {
            "grpc_listen": "127.0.0.1:0",
            "http_listen": "127.0.0.1:0",
            "tokenizer": f"127.0.0.1:{tokenizer.port}",
            "engines": [f"127.0.0.1:{engine.port}" for engine in engines],
            "ledger": {"url": ""},
            **more.get("gateway", {}),
        },
    }
