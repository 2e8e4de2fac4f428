"""Many requests that think longer, in every way, beside others: who leaves leaves limits whole, and what was
decided is what a replay of the record decides.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from millrace.engine.v1 import engine_pb2

from gateway.test_time.deliberations import strategy_of
from gateway.test_time.strategies import Event, replay
from gateway.test_time.stream import DeliberateStream
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.vocabulary import END_ID, encode
from tests.unit.gateway.test_time.test_stream import BODIES, CHAT, TIER, in_ledger, settled, streams

__all__ = ["streams"]

NUM_REQUESTS = 64
SAMPLES = 4
TOKENS = 100_000_000
WAYS: list[dict[str, Any]] = [
    {"strategy": "best_of", "samples": SAMPLES},
    {"strategy": "best_of", "samples": SAMPLES, "scorer": {"type": "verifier", "model": "big"}},
    {"strategy": "self_consistency", "samples": SAMPLES},
    {"strategy": "deepconf", "samples": SAMPLES},
    {"strategy": "escalate", "model": "big", "confidence": 0.9},
    {"strategy": "critique_revise", "samples": 2},
    {"strategy": "search", "samples": SAMPLES},
]


def reply(submit: engine_pb2.Submit, choice: int) -> list[int]:
    """Two lines of which the second ends; yes, where it is asked."""
    if "Proposed answer" in bytes(submit.prompt_token_ids).decode():
        return [*encode("Yes"), END_ID]
    return [*encode(f"first I think\nthen it is {choice % 2}"), END_ID]


def check_replay(stream: DeliberateStream) -> None:
    """The record, written and read again, leads a fresh strategy to the same steps, bit by bit."""
    record = msgspec.msgpack.encode(stream.events)
    fresh = strategy_of(stream._plan.ask, stream._plan.scorer)
    steps = replay(fresh, msgspec.msgpack.decode(record, type=list[Event]))
    assert msgspec.msgpack.encode(steps) == msgspec.msgpack.encode(stream.steps)


@pytest.mark.parametrize("leaves", ["while it is computed", "at once", "never"])
async def test_limits_are_whole_after_64_requests_of_which_some_leave(
    leaves: str, tmp_path: Path, streams: list[DeliberateStream]
) -> None:
    tables = {
        **TIER,
        "served": {"models": {"tiny": {"path": "t"}, "big": {"path": "b"}}},
        # So many at a time, and no more: as many samples again are accepted when all have ended.
        "tenant": {"max_concurrent_streams": NUM_REQUESTS * (SAMPLES + 1), "tokens_per_minute": TOKENS},
        "gateway": {"ledger": {"url": f"sqlite:///{tmp_path}/ledger.sqlite"}},
    }
    engines = [
        ScriptedEngine(reply=reply, step_s=0.002),
        ScriptedEngine(name="engine-1", model="big", reply=reply, step_s=0.002),
    ]
    async with deployed(*engines, tables=tables) as stack:

        async def one(number: int) -> httpx.Response:
            body = {**BODIES[CHAT], "test_time": WAYS[number % len(WAYS)], "seed": number}
            return await stack.http.post(CHAT, json=body, timeout=60)

        asking = [asyncio.create_task(one(number)) for number in range(NUM_REQUESTS)]
        chats = [asyncio.create_task(stack.chat(max_tokens=40)) for _ in range(8)]
        if leaves == "while it is computed":
            await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
        gone = [] if leaves == "never" else [task for task in asking[::2] if not task.done()]
        for task in gone:
            task.cancel()
        told = await asyncio.gather(*asking, return_exceptions=True)
        staying = [each for task, each in zip(asking, told, strict=True) if task not in gone]
        assert {each.status_code for each in staying if isinstance(each, httpx.Response)} == {200}
        assert all(isinstance(each, httpx.Response) for each in staying)
        texts = {(await each).json()["choices"][0]["message"]["content"] for each in chats}
        assert texts == {"first I think\nthen it is 0"}
        await settled(stack)
        again = [stack.chat(n=SAMPLES, max_tokens=1) for _ in range(NUM_REQUESTS)]
        assert {each.status_code for each in await asyncio.gather(*again)} == {200}
        await settled(stack)
        last = await stack.chat(max_tokens=1)
        left = int(last.headers["x-ratelimit-remaining-tokens"])
    rows = in_ledger(tmp_path)
    # A row for each model and question, all of them ended, and the limit lacks what they say and no more.
    assert "INTERRUPTED" not in {row[4] for row in rows}
    assert TOKENS - left == sum(sum(row[1:4]) for row in rows)
    for stream in streams:
        check_replay(stream)
    if leaves == "never":
        assert len(streams) == NUM_REQUESTS
        assert {stream.steps[-1].ended_by for stream in streams} >= {"decided", "all_samples"}
