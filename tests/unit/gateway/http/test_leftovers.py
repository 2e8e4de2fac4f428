"""A request that has ended leaves nothing to the garbage collector, whose looks hold up every stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from millrace.engine.v1 import engine_pb2

from contract.errors import MillraceError, Reason
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import END_ID, written
from tests.unit.leftovers import leftovers

NUM_REQUESTS = 5
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<think>hm</think>\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "x"]}}\n</tool_call>'


def _writes(text: str) -> Callable[[engine_pb2.Submit, int], list[int]]:
    return lambda submit, choice: [*written(text), END_ID]


async def _serve(stack: Deployment, status: int, body: dict[str, Any]) -> None:
    for _ in range(NUM_REQUESTS):
        response = await stack.chat(**body)
        assert response.status_code == status, response.text
    await _settled(stack)


async def _settled(stack: Deployment) -> None:
    """Until the books of all requests are done, and the calls that do them are over."""
    async with asyncio.timeout(10):
        while stack.gateway.num_open:
            await asyncio.sleep(0)
    # What is told of requests later is told before a page of metrics.
    await stack.http.get("/metrics")


async def _leave_nothing(leave: Callable[[], Awaitable[None]]) -> None:
    # The first one makes what stays.
    await leave()
    with leftovers() as found:
        for _ in range(NUM_REQUESTS):
            await leave()
    assert not found


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, {}),
        (200, {"stream": True}),
        (200, {"n": 2, "logprobs": True}),
        (200, {"stream": True, "tools": TOOLS}),
        (400, {"temperature": -1}),
        (400, {"max_tokens": 100_000}),
        (404, {"model": "another"}),
        (400, {"no_such_field": 1}),
        # The tokenizer service's refusal.
        (400, {"guided_json": {"type": "impossible"}}),
    ],
)
async def test_a_request_leaves_nothing_to_the_collector(status: int, body: dict[str, Any]) -> None:
    async with deployed(ScriptedEngine(reply=_writes(CALL))) as stack:
        await _serve(stack, status, body)
        with leftovers() as found:
            await _serve(stack, status, body)
        assert not found


async def test_an_engines_refusal_leaves_nothing_to_the_collector() -> None:
    refusal = MillraceError(Reason.INVALID_ARGUMENT, "sampling.seed: no", field="sampling.seed")
    async with deployed(ScriptedEngine(refusal=refusal)) as stack:
        await _serve(stack, 400, {})
        with leftovers() as found:
            await _serve(stack, 400, {})
        assert not found


async def test_a_client_that_leaves_leaves_nothing_to_the_collector() -> None:
    engine = ScriptedEngine(reply=_writes("a long answer " * 100))
    async with deployed(engine) as stack:

        async def leave() -> None:
            engine.gate.set()
            body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            async with stack.http.stream("POST", "/v1/chat/completions", json=body) as response:
                async for _ in response.aiter_bytes():
                    engine.gate.clear()
                    break
            await _settled(stack)

        await _leave_nothing(leave)


class HeldTokenizer(ByteTokenizer):
    """Answers a request when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.release = asyncio.Event(), asyncio.Event()

    async def Prepare(self, request: Any, context: Any) -> Any:
        self.begun.set()
        await self.release.wait()
        return await super().Prepare(request, context)


async def test_a_client_that_leaves_before_it_is_accepted_leaves_nothing_to_the_collector() -> None:
    tokenizer = HeldTokenizer()
    async with deployed(tokenizer=tokenizer) as stack:

        async def leave() -> None:
            tokenizer.begun.clear()
            tokenizer.release.clear()
            asking = asyncio.ensure_future(stack.chat())
            await tokenizer.begun.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            async with asyncio.timeout(10):
                while stack.gateway.http._server.server_state.tasks:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
            tokenizer.release.set()
            await _settled(stack)

        await _leave_nothing(leave)
