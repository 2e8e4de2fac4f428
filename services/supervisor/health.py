"""Waits until a process answers, on the protocol that its clients use, and until it answers no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import TypeAlias

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from runtime.channels import connect
from runtime.hang import ProcessSilence
from runtime.server import MODEL_HEALTH
from services.supervisor.edge import local_client
from services.supervisor.process import ChildProcess, ProcessEnded, ProcessSpec

_PAUSE_S = 0.05
# One question may take so long.
_LIMIT_S = 5.0
# A service that computes may be silent for so long. Unlike an engine's core none has work of minutes.
_BUSY_LIMIT_S = 60.0

# Takes how long the answer may take, in seconds; None where there was none.
_Ask: TypeAlias = Callable[[float], Awaitable[int | None]]
_Connected: TypeAlias = Callable[[], AbstractAsyncContextManager[_Ask]]


async def wait_healthy(child: ChildProcess, limit_s: float) -> dict[str, str]:
    """Returns what `child` said when it was ready, as soon as its health endpoint agrees.

    Raises ProcessEnded when it ends before that, TimeoutError after `limit_s` seconds.
    """
    said = {}
    async with asyncio.timeout(limit_s):
        if child.spec.says_ready:
            said = await child.wait_ready_line()
        if child.spec.health:
            await _until(child, partial(_questions, child.spec), health_pb2.HealthCheckResponse.SERVING)
        if child.spec.health_url:
            await _until(child, partial(_requests, child.spec.health_url), httpx.codes.OK)
    return said


async def wait_model(spec: ProcessSpec, name: str, *, served: bool, limit_s: float) -> None:
    """Returns when a gateway says that a version of a model can be asked, or that it cannot; raises
    TimeoutError.
    """
    async with asyncio.timeout(limit_s), _questions(spec, f"{MODEL_HEALTH}{name}") as ask:
        while (await ask(_LIMIT_S) == health_pb2.HealthCheckResponse.SERVING) is not served:
            await asyncio.sleep(_PAUSE_S)


async def _until(child: ChildProcess, connected: _Connected, wanted: int) -> None:
    while True:
        async with connected() as ask:
            if await ask(_LIMIT_S) == wanted:
                return
        if not child.running:
            raise ProcessEnded(child.spec.name, await child.wait())
        await asyncio.sleep(_PAUSE_S)


async def wait_hung(child: ChildProcess, limit_s: float) -> str:
    """Returns, with why, when a process that has not ended has not answered for `limit_s` seconds, though it
    was not busy. That it is not ready for work is an answer.
    """
    silence = ProcessSilence(limit_s, child.pid, _BUSY_LIMIT_S)
    asking = asyncio.create_task(_keep_asking(child.spec, silence, limit_s))
    try:
        return await silence.lasts()
    finally:
        asking.cancel()


async def _keep_asking(spec: ProcessSpec, silence: ProcessSilence, limit_s: float) -> None:
    while True:
        # A connection for every question costs both sides milliseconds. After one that was not answered it is
        # a new one all the same: gRPC pauses before it connects a kept channel again.
        async with _questions(spec) if spec.health else _requests(spec.health_url) as ask:
            while await ask(limit_s / 2) is not None:
                silence.heard()
                await asyncio.sleep(limit_s / 3)
        await asyncio.sleep(limit_s / 3)


@asynccontextmanager
async def _questions(spec: ProcessSpec, name: str = "") -> AsyncIterator[_Ask]:
    """Asks a health service about a name, or the server as a whole; the answer is its status."""
    async with grpc.aio.insecure_channel(spec.health) if spec.is_plain else connect(spec.health) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def ask(limit_s: float) -> int | None:
            try:
                question = health_pb2.HealthCheckRequest(service=name)
                return int((await stub.Check(question, timeout=limit_s)).status)
            except grpc.aio.AioRpcError:
                return None

        yield ask


@asynccontextmanager
async def _requests(url: str) -> AsyncIterator[_Ask]:
    """Asks for a page; the answer is its status. Without a page nobody is asked, which is an answer."""
    async with local_client() as client:

        async def ask(limit_s: float) -> int | None:
            try:
                return (await client.get(url, timeout=limit_s)).status_code if url else 0
            except httpx.HTTPError:
                return None

        yield ask
