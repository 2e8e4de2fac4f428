"""Prepare calls on one stream: what a caller does not take keeps it from sending more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from millrace.tokenizer.v1 import tokenizer_pb2

from tokenizer_svc import stream
from tokenizer_svc.stream import CallStream

_NUM_CALLS = 60


async def test_answers_that_nobody_takes_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_IN_WORK", 8)
    begun = 0

    async def answer(call: tokenizer_pb2.PrepareCall) -> tokenizer_pb2.PrepareResponse:
        nonlocal begun
        begun += 1
        return tokenizer_pb2.PrepareResponse()

    async def calls() -> AsyncIterator[tokenizer_pb2.PrepareStreamRequest]:
        for number in range(_NUM_CALLS):
            yield tokenizer_pb2.PrepareStreamRequest(calls=[tokenizer_pb2.PrepareCall(id=number)])

    answers = CallStream(answer).serve(calls())
    first = await anext(answers)
    for _ in range(100):
        await asyncio.sleep(0)
    assert begun <= len(first.answers) + 8
    ids = [each.id for each in first.answers]
    async for message in answers:
        ids += [each.id for each in message.answers]
    assert sorted(ids) == list(range(_NUM_CALLS))
