"""Waits until a process answers, on the protocol that its clients use, and until it answers no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channels import connect
from services.hang import ProcessSilence
from services.supervisor.edge import local_client
from services.supervisor.process import ChildProcess, ProcessEnded, ProcessSpec

_PAUSE_S = 0.05
# Of one question.
_LIMIT_S = 5.0
# A service that computes may be silent for so long. Unlike an engine's core none has work of minutes.
_BUSY_LIMIT_S = 60.0

_Probe: TypeAlias = Callable[[], Awaitable[bool]]


async def wait_healthy(child: ChildProcess, limit_s: float) -> None:
    """Returns when `child` said that it is ready and its health endpoint agrees.

    Raises ProcessEnded when it ends before that, TimeoutError after `limit_s` seconds.
    """
    async with asyncio.timeout(limit_s):
        if child.spec.says_ready:
            await child.wait_ready_line()
        if child.spec.health:
            await _until(child, lambda: _serving(child.spec))
        if child.spec.health_url:
            await _until(child, lambda: _answers(child.spec.health_url))


async def _until(child: ChildProcess, probe: _Probe) -> None:
    while not await probe():
        if not child.running:
            raise ProcessEnded(child.spec.name, await child.wait())
        await asyncio.sleep(_PAUSE_S)


async def wait_hung(child: ChildProcess, limit_s: float) -> str:
    """Returns, with why, when a process that has not ended has not answered for `limit_s` seconds, though it
    was not busy. That it is not ready for work is an answer.
    """
    silence = ProcessSilence(limit_s, child.pid, _BUSY_LIMIT_S)
    asking = asyncio.create_task(_keep_asking(child, silence, limit_s))
    try:
        return await silence.lasts()
    finally:
        asking.cancel()


async def _keep_asking(child: ChildProcess, silence: ProcessSilence, limit_s: float) -> None:
    while True:
        if child.spec.health:
            answers = await _ask(child.spec, limit_s / 2) is not None
        else:
            answers = not child.spec.health_url or await _status(child.spec.health_url, limit_s / 2) > 0
        if answers:
            silence.heard()
        await asyncio.sleep(limit_s / 4)


async def _serving(spec: ProcessSpec) -> bool:
    return bool(await _ask(spec, _LIMIT_S) == health_pb2.HealthCheckResponse.SERVING)


async def _ask(spec: ProcessSpec, limit_s: float) -> int | None:
    """What the health service says; None where it does not answer."""
    async with grpc.aio.insecure_channel(spec.health) if spec.is_plain else connect(spec.health) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=limit_s, wait_for_ready=False
            )
        except grpc.aio.AioRpcError:
            return None
    return int(answer.status)


async def _answers(url: str) -> bool:
    return await _status(url, _LIMIT_S) == httpx.codes.OK


async def _status(url: str, limit_s: float) -> int:
    """The status of the answer; 0 where there is none."""
    async with local_client() as client:
        try:
            return (await client.get(url, timeout=limit_s)).status_code
        except httpx.HTTPError:
            return 0
