"""Attempts need no connection, and several of one request need no machinery of their own."""

from __future__ import annotations

import time

import msgspec

from contract.chat import TextPrompt
from contract.sampling import SamplingOptions
from gateway.auth.verifier import Arrival
from gateway.pipeline.attempt import Attempt
from gateway.types.request import Caller, GenerationRequest
from tests.unit.gateway.rig.deployment import Deployment, deployed, signed_context
from tests.unit.gateway.rig.engine import ScriptedEngine

REQUEST = GenerationRequest(
    model="tiny", prompt=TextPrompt("a prompt"), sampling=SamplingOptions(max_tokens=10), face="test"
)


def nobody(rig: Deployment) -> Caller:
    """A caller whose request has come by no connection."""
    arrival = Arrival(received_s=time.monotonic())
    return rig.gateway._pipeline.callers.verify(signed_context(), arrival)


async def text_of(attempt: Attempt) -> str:
    said = ""
    while deltas := await attempt.drain():
        said += "".join(delta.content for delta in deltas)
    return said


async def test_an_attempt_needs_no_connection() -> None:
    async with deployed(ScriptedEngine()) as rig:
        async with await rig.gateway._pipeline.begin(nobody(rig), REQUEST) as attempt:
            assert await text_of(attempt) == "hello 0"
        assert attempt.usage().billed_tokens == attempt.usage().completion_tokens > 0
        assert not rig.gateway.num_open


async def test_several_attempts_and_a_judge_are_one_answer() -> None:
    def longest(texts: list[str]) -> int:
        return max(range(len(texts)), key=lambda index: len(texts[index]))

    lengths = [2, 5, 3]
    requests = [
        msgspec.structs.replace(REQUEST, sampling=SamplingOptions(max_tokens=length)) for length in lengths
    ]
    async with deployed(ScriptedEngine()) as rig:
        async with await rig.gateway._pipeline.answer(nobody(rig), requests) as answer:
            texts = [""] * len(requests)
            async for index, deltas in answer.deltas():
                texts[index] += "".join(delta.content for delta in deltas)
        assert longest(texts) == 1
        assert sum(each.billed_tokens for each in answer.usages()) == sum(lengths)
        assert not rig.gateway.num_open
