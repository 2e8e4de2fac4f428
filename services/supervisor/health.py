"""Waits until a process answers, on the protocol that its clients use."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.channels import connect
from services.supervisor.edge import local_client
from services.supervisor.process import ChildProcess, ProcessEnded

_PAUSE_S = 0.05

_Probe: TypeAlias = Callable[[], Awaitable[bool]]


async def wait_healthy(child: ChildProcess, limit_s: float) -> None:
    """Returns when `child` said that it is ready and its health endpoint agrees.

    Raises ProcessEnded when it ends before that, TimeoutError after `limit_s` seconds.
    """
    async with asyncio.timeout(limit_s):
        if child.spec.says_ready:
            await child.wait_ready_line()
        if child.spec.health:
            await _until(child, lambda: _serving(child.spec.health))
        if child.spec.health_url:
            await _until(child, lambda: _answers(child.spec.health_url))


async def _until(child: ChildProcess, probe: _Probe) -> None:
    while not await probe():
        if not child.running:
            raise ProcessEnded(child.spec.name, await child.wait())
        await asyncio.sleep(_PAUSE_S)


async def _serving(address: str) -> bool:
    async with connect(address) as channel:
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=5.0, wait_for_ready=False
            )
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _answers(url: str) -> bool:
    async with local_client() as client:
        try:
            return (await client.get(url)).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False
