"""Requests that end before their first token: charged if their prompt was computed, on both faces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from millrace.common.v1 import chat_pb2
from millrace.inference.v1 import inference_pb2

from runtime.context import CONTEXT_HEADER
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine

TABLES = {"tenant": {"tokens_per_minute": 100_000}}
PROMPT = "a prompt of some length"


async def remaining_tokens(rig: Deployment) -> int:
    """What the tenant may still use, the request that asks not counted."""
    answer = await rig.chat(max_tokens=1)
    assert answer.status_code == 200, answer.text
    return int(answer.headers["x-ratelimit-remaining-tokens"])


async def leave_over_http(rig: Deployment, engine: ScriptedEngine) -> None:
    asking = asyncio.create_task(rig.chat(messages=[{"role": "user", "content": PROMPT}], stream=True))
    await submitted(engine)
    asking.cancel()
    with pytest.raises((asyncio.CancelledError, httpx.HTTPError)):
        await asking


async def leave_over_grpc(rig: Deployment, engine: ScriptedEngine) -> None:
    request = inference_pb2.ChatRequest(model="tiny")
    request.conversation.messages.add(role=chat_pb2.ROLE_USER, content=PROMPT)
    call = rig.inference.Chat(request, metadata=((CONTEXT_HEADER, signed_context()),))
    await submitted(engine)
    call.cancel()


async def exceed_a_deadline(rig: Deployment, engine: ScriptedEngine) -> None:
    request = inference_pb2.ChatRequest(model="tiny")
    request.conversation.messages.add(role=chat_pb2.ROLE_USER, content=PROMPT)
    call = rig.inference.Chat(request, metadata=((CONTEXT_HEADER, signed_context()),), timeout=1.0)
    await submitted(engine)
    assert (await call.code()).name == "DEADLINE_EXCEEDED"


async def submitted(engine: ScriptedEngine) -> None:
    while engine.num_running == 0:
        await asyncio.sleep(0.001)


Leave = Callable[[Deployment, ScriptedEngine], Awaitable[None]]


@pytest.mark.parametrize("leave", [leave_over_http, leave_over_grpc, exceed_a_deadline])
@pytest.mark.parametrize("num_steps", [0, 1])
async def test_a_prompt_is_charged_if_it_was_computed(leave: Leave, num_steps: int) -> None:
    engine = ScriptedEngine(steps_when_cancelled=num_steps)
    async with deployed(engine, tables=TABLES) as rig:
        one_request = await remaining_tokens(rig) - await remaining_tokens(rig)
        before = await remaining_tokens(rig)
        engine.gate.clear()
        await leave(rig, engine)
        async with asyncio.timeout(10):
            while rig.gateway.num_open:
                await asyncio.sleep(0.005)
        engine.gate.set()
        assert before - await remaining_tokens(rig) == one_request + num_steps * num_prompt_tokens()


def num_prompt_tokens() -> int:
    """Of the request that was left; the rig's tokenizer encodes bytes."""
    return len(f"{chat_pb2.ROLE_USER}: {PROMPT}\n".encode())
