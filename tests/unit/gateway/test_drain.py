"""A gateway that stops lets streams finish, and tells those whose time is up, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import msgspec
import pytest
from grpc_status import rpc_status
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2
from sqlalchemy import select

from contract.errors import Reason
from contract.proto.status import from_status
from gateway.ledger.tables import REQUESTS, open_ledger
from gateway.limits.store import MemoryLimitStore
from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import encode

BODY = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
METADATA = ((CONTEXT_HEADER, signed_context()),)


def endless() -> ScriptedEngine:
    return ScriptedEngine(reply=lambda submit, choice: encode("x") * 4000, step_s=0.01)


async def _read_on(responses: AsyncIterator[object]) -> None:
    async for _ in responses:
        pass


async def test_http_stream_beyond_the_drain_limit_ends_with_an_error_event() -> None:
    engine = endless()
    async with deployed(engine, tables={"gateway": {"drain_limit_s": 0.1}}) as stack:
        async with stack.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
            lines = response.aiter_lines()
            await anext(lines)
            drained = asyncio.create_task(stack.gateway.drain())
            rest = [line async for line in lines if line]
            await drained
        error = msgspec.json.decode(rest[-1].removeprefix("data: "))["error"]
        assert error["reason"] == Reason.DRAINING.value
        assert "drain limit of 0.1 s" in error["message"]
        assert stack.gateway.num_open == 0
        while engine.num_running:
            engine.changed.clear()
            await asyncio.wait_for(engine.changed.wait(), 10)


async def test_grpc_stream_beyond_the_drain_limit_ends_with_a_rich_status() -> None:
    async with deployed(endless(), tables={"gateway": {"drain_limit_s": 0.1}}) as stack:
        message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content="hi")
        request = inference_pb2.ChatRequest(
            model="tiny", conversation=chat_pb2.Conversation(messages=[message])
        )
        responses = aiter(stack.inference.Chat(request, metadata=METADATA))
        await anext(responses)
        drained = asyncio.create_task(stack.gateway.drain())
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await _read_on(responses)
        await drained
        status = rpc_status.from_call(ended.value)
        assert status is not None
        error = from_status(status)
        assert (error.reason, error.retry_after_s) == (Reason.DRAINING, 1.0)
        assert stack.gateway.num_open == 0


async def test_stream_within_the_drain_limit_finishes() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: encode("x") * 30, step_s=0.005)
    async with deployed(engine, tables={"gateway": {"drain_limit_s": 20.0}}) as stack:
        async with stack.http.stream("POST", "/v1/chat/completions", json=BODY) as response:
            lines = response.aiter_lines()
            await anext(lines)
            drained = asyncio.create_task(stack.gateway.drain())
            rest = [line async for line in lines if line]
        await drained
        assert rest[-1] == "data: [DONE]"
        assert (await stack.chat()).status_code == 503


async def test_requests_are_taken_until_whoever_balances_has_noticed() -> None:
    """Envoy learns of a gateway that leaves by its health checks, and sends requests until then."""
    async with deployed(tables={"gateway": {"drain_notice_s": 600.0}}) as stack:
        drained = asyncio.create_task(stack.gateway.drain())
        while (await stack.http.get("/health")).status_code == 200:
            await asyncio.sleep(0.01)
        assert (await stack.chat()).status_code == 200
        drained.cancel()


async def test_requests_that_ended_just_before_the_gateway_stopped_are_in_the_ledger(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    async with deployed(tables={"gateway": {"ledger": {"url": url}}}) as stack:
        for _ in range(3):
            assert (await stack.chat()).status_code == 200
        await stack.gateway.drain()
    with open_ledger(url).connect() as connection:
        assert len(connection.execute(select(REQUESTS)).all()) == 3


async def test_requests_that_the_stop_itself_ends_are_in_the_ledger(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    tables = {"gateway": {"ledger": {"url": url}}}
    async with deployed(endless(), tables=tables) as stack:
        response = await stack.http.send(
            stack.http.build_request("POST", "/v1/chat/completions", json=BODY), stream=True
        )
        await anext(response.aiter_lines())
        await stack.gateway.stop()
        await response.aclose()
    with open_ledger(url).connect() as connection:
        assert len(connection.execute(select(REQUESTS)).all()) == 1


async def test_a_limit_store_that_fails_to_close_keeps_nobody_from_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(store: MemoryLimitStore) -> None:
        raise RuntimeError("the store does not close")

    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    async with deployed(tables={"gateway": {"ledger": {"url": url}}}) as stack:
        assert (await stack.chat()).status_code == 200
        with monkeypatch.context() as patched:
            patched.setattr(MemoryLimitStore, "close", fail)
            with pytest.raises(RuntimeError, match="does not close"):
                await stack.gateway.stop()
        with open_ledger(url).connect() as connection:
            assert len(connection.execute(select(REQUESTS)).all()) == 1
