"""Prepare calls on one stream: what a caller does not take keeps it from sending more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from millrace.tokenizer.v1 import tokenizer_pb2

from tokenizer_svc import stream
from tokenizer_svc.stream import CallStream, StreamResponse
from tokenizer_svc.wire import Call, LargeAnswer

_NUM_CALLS = 60


def ids_of(message: StreamResponse) -> list[int]:
    if isinstance(message, bytes):
        message = tokenizer_pb2.PrepareStreamResponse.FromString(message)
    return [each.id for each in message.answers]


async def test_answers_that_nobody_takes_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_IN_WORK", 8)
    begun = 0

    async def answer(call: Call) -> tokenizer_pb2.PrepareResponse:
        nonlocal begun
        begun += 1
        return tokenizer_pb2.PrepareResponse()

    async def calls() -> AsyncIterator[list[Call]]:
        for number in range(_NUM_CALLS):
            yield [Call(tokenizer_pb2.PrepareCall(id=number), tokenizer_pb2.PrepareRequest())]

    answers = CallStream(answer).serve(calls())
    first = ids_of(await anext(answers))
    for _ in range(100):
        await asyncio.sleep(0)
    assert begun <= len(first) + 8
    ids = first
    async for message in answers:
        ids += ids_of(message)
    assert sorted(ids) == list(range(_NUM_CALLS))


async def test_large_answers_are_messages_of_their_own() -> None:
    async def answer(call: Call) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
        response = tokenizer_pb2.PrepareResponse(token_ids=[call.id] * 300)
        return LargeAnswer((response.SerializeToString(),)) if call.id % 2 else response

    async def calls() -> AsyncIterator[list[Call]]:
        yield [
            Call(tokenizer_pb2.PrepareCall(id=number), tokenizer_pb2.PrepareRequest()) for number in range(5)
        ]

    found: dict[int, list[int]] = {}
    async for sent in CallStream(answer).serve(calls()):
        message = sent
        if isinstance(sent, bytes):
            message = tokenizer_pb2.PrepareStreamResponse.FromString(sent)
            assert len(message.answers) == 1
        found |= {each.id: list(each.response.token_ids) for each in message.answers}
    assert found == {number: [number] * 300 for number in range(5)}


async def test_what_is_answered_at_once_waits_for_nobody_and_keeps_no_more_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "MAX_IN_WORK", 8)
    slow = asyncio.Event()
    read = 0

    async def answer(call: Call) -> tokenizer_pb2.PrepareResponse:
        await slow.wait()
        return tokenizer_pb2.PrepareResponse(token_ids=[call.id])

    def at_once(call: Call) -> dict[str, list[int]] | None:
        return None if call.id == 0 else {"token_ids": [call.id]}

    async def calls() -> AsyncIterator[list[Call]]:
        nonlocal read
        for number in range(_NUM_CALLS):
            read += 1
            yield [Call(tokenizer_pb2.PrepareCall(id=number), tokenizer_pb2.PrepareRequest())]

    answers = CallStream(answer, at_once).serve(calls())
    first = await anext(answers)
    assert isinstance(first, tokenizer_pb2.PrepareStreamResponse)
    found = {each.id: list(each.response.token_ids) for each in first.answers}
    assert found
    assert 0 not in found
    for _ in range(100):
        await asyncio.sleep(0)
    assert read <= len(found) + 2 + 8
    slow.set()
    async for message in answers:
        assert isinstance(message, tokenizer_pb2.PrepareStreamResponse)
        found |= {each.id: list(each.response.token_ids) for each in message.answers}
    assert found == {number: [number] for number in range(_NUM_CALLS)}


async def test_a_stream_that_has_much_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SLICE_S", 0.0)
    answered = 0
    seen: list[int] = []

    async def answer(call: Call) -> tokenizer_pb2.PrepareResponse:
        raise AssertionError("everything is answered at once")

    def at_once(call: Call) -> dict[str, list[int]]:
        nonlocal answered
        answered += 1
        return {"token_ids": [call.id]}

    async def calls() -> AsyncIterator[list[Call]]:
        for number in range(_NUM_CALLS):
            yield [Call(tokenizer_pb2.PrepareCall(id=number), tokenizer_pb2.PrepareRequest())]

    async def other() -> None:
        while answered < _NUM_CALLS:
            seen.append(answered)
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(other())
    async for _ in CallStream(answer, at_once).serve(calls()):
        pass
    await beside
    # One message at a time, between two turns of somebody else.
    assert len(set(seen)) >= _NUM_CALLS - 2
