"""Prepare calls on one stream: what a caller does not take keeps it from sending more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.errors import MillraceError, Reason
from contract.proto.status import from_detail
from runtime import memory
from tests.unit.large_pieces import nothing_large_is_kept
from tokenizer_svc.messages.wire import (
    LargeAnswer,
    StreamCall,
    TakenBack,
    UnreadableCall,
    WireCall,
    large,
    read_calls,
)
from tokenizer_svc.service import stream
from tokenizer_svc.service.stream import CallStream

_NUM_CALLS = 60


def call_of(number: int, text: str | None = None) -> WireCall:
    request = tokenizer_pb2.PrepareRequest() if text is None else tokenizer_pb2.PrepareRequest(text=text)
    return WireCall(tokenizer_pb2.PrepareCall(id=number), request)


async def numbered() -> AsyncIterator[list[StreamCall]]:
    """One call a message."""
    for number in range(_NUM_CALLS):
        yield [call_of(number)]


async def own_number(call: WireCall) -> tokenizer_pb2.PrepareResponse:
    """Answers at once."""
    return tokenizer_pb2.PrepareResponse(token_ids=[call.id])


async def the_rest(answers: AsyncIterator[bytes]) -> dict[int, list[int]]:
    """Everything that is still answered."""
    return {number: ids async for message in answers for number, ids in token_ids(message).items()}


async def turns() -> None:
    """Lets everybody who can go on do so."""
    for _ in range(100):
        await asyncio.sleep(0)


def token_ids(message: bytes) -> dict[int, list[int]]:
    answers = tokenizer_pb2.PrepareStreamResponse.FromString(message).answers
    return {each.id: list(each.response.token_ids) for each in answers}


async def test_answers_that_nobody_takes_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_IN_WORK", 8)
    begun = 0

    async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse:
        nonlocal begun
        begun += 1
        return tokenizer_pb2.PrepareResponse()

    answers = CallStream(answer).serve(numbered())
    first = list(token_ids(await anext(answers)))
    await turns()
    assert begun <= len(first) + 8
    assert sorted([*first, *await the_rest(answers)]) == list(range(_NUM_CALLS))


async def test_bytes_that_wait_for_answers_end_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MAX_BYTES_IN_WORK", 1_000_000)
    request = tokenizer_pb2.PrepareRequest(text="x" * 300_000)
    wire = request.SerializeToString()
    release = asyncio.Event()
    num_read = 0

    async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse:
        await release.wait()
        return tokenizer_pb2.PrepareResponse(token_ids=[call.id])

    async def calls() -> AsyncIterator[list[StreamCall]]:
        nonlocal num_read
        for number in range(_NUM_CALLS):
            num_read += 1
            head = tokenizer_pb2.PrepareCall(id=number)
            if number % 2:
                yield [WireCall(head, large(wire))]
            else:
                yield [WireCall(tokenizer_pb2.PrepareCall(id=number, request=request), request)]

    answers = CallStream(answer).serve(calls())
    first = asyncio.ensure_future(anext(answers))
    await turns()
    # The fourth is what went beyond.
    assert num_read == 4
    release.set()
    found = token_ids(await first) | await the_rest(answers)
    assert found == {number: [number] for number in range(_NUM_CALLS)}


async def test_answers_of_any_size_are_those_of_their_calls() -> None:
    async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse | LargeAnswer:
        size = 300_000 if call.id % 2 else 300
        response = tokenizer_pb2.PrepareResponse(token_ids=[call.id] * size)
        return LargeAnswer((response.SerializeToString(),)) if call.id % 2 else response

    async def calls() -> AsyncIterator[list[StreamCall]]:
        yield [call_of(number) for number in range(5)]

    found: dict[int, list[int]] = {}
    async for message in CallStream(answer).serve(calls()):
        answers = token_ids(message)
        # An answer that would delay others is sent alone.
        assert len(answers) == 1 or len(message) <= 256 * 1024
        found |= answers
    assert found == {number: [number] * (300_000 if number % 2 else 300) for number in range(5)}


async def test_what_is_answered_at_once_waits_for_nobody_and_keeps_no_more_than_its_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "MAX_IN_WORK", 8)
    slow = asyncio.Event()
    read = 0

    async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse:
        await slow.wait()
        return tokenizer_pb2.PrepareResponse(token_ids=[call.id])

    def at_once(call: WireCall) -> dict[str, list[int]] | None:
        return None if call.id == 0 else {"token_ids": [call.id]}

    async def calls() -> AsyncIterator[list[StreamCall]]:
        nonlocal read
        for number in range(_NUM_CALLS):
            read += 1
            yield [call_of(number)]

    answers = CallStream(answer, at_once).serve(calls())
    first = await anext(answers)
    found = token_ids(first)
    assert found
    assert 0 not in found
    await turns()
    assert read <= len(found) + 2 + 8
    slow.set()
    found |= await the_rest(answers)
    assert found == {number: [number] for number in range(_NUM_CALLS)}


async def test_a_stream_that_has_much_leaves_turns_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_SLICE_S", 0.0)
    answered = 0
    seen: list[int] = []

    async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse:
        raise AssertionError("everything is answered at once")

    def at_once(call: WireCall) -> dict[str, list[int]]:
        nonlocal answered
        answered += 1
        return {"token_ids": [call.id]}

    async def other() -> None:
        while answered < _NUM_CALLS:
            seen.append(answered)
            await asyncio.sleep(0)

    beside = asyncio.ensure_future(other())
    async for _ in CallStream(answer, at_once).serve(numbered()):
        pass
    await beside
    # One message at a time, between two turns of somebody else.
    assert len(set(seen)) >= _NUM_CALLS - 2


async def test_a_call_that_cannot_be_read_is_refused_and_the_others_are_answered() -> None:
    async def calls() -> AsyncIterator[list[StreamCall]]:
        yield [call_of(1), UnreadableCall(2)]
        yield [call_of(3)]

    answers = {
        each.id: each
        async for message in CallStream(own_number).serve(calls())
        for each in tokenizer_pb2.PrepareStreamResponse.FromString(message).answers
    }
    assert [list(answers[number].response.token_ids) for number in (1, 3)] == [[1], [3]]
    assert from_detail(answers[2].error).reason is Reason.MALFORMED_BODY


async def test_what_ends_the_reading_ends_the_stream_when_calls_are_answered() -> None:
    async def calls() -> AsyncIterator[list[StreamCall]]:
        yield [call_of(1)]
        raise MillraceError(Reason.MALFORMED_BODY, "no message")

    answers = CallStream(own_number).serve(calls())
    assert list(token_ids(await anext(answers))) == [1]
    with pytest.raises(MillraceError, match="no message"):
        await anext(answers)


async def test_memory_is_given_back_after_large_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = asyncio.Event()
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(memory, "GIVE_BACK_AFTER_S", 0.0)
    monkeypatch.setattr(memory, "give_back", lambda: loop.call_soon_threadsafe(given_back.set))

    async def answered(num_bytes: int) -> None:
        async def calls() -> AsyncIterator[list[StreamCall]]:
            call = call_of(1, "x" * num_bytes)
            wire = call.request.SerializeToString()  # type: ignore[union-attr]
            yield [WireCall(call.head, large(wire)) if num_bytes > 1000 else call]

        await the_rest(CallStream(own_number).serve(calls()))

    await answered(10)
    await asyncio.sleep(0)
    assert not given_back.is_set()
    await answered(300_000)
    await asyncio.wait_for(given_back.wait(), 20)


async def test_a_large_call_and_its_answer_are_not_kept_until_the_next_ones() -> None:
    ends = asyncio.Event()

    async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse:
        return tokenizer_pb2.PrepareResponse(token_ids=[300] * 1_000_000)

    async def calls() -> AsyncIterator[list[StreamCall]]:
        yield [call_of(1, "x" * 8_000_000)]
        await ends.wait()

    async with nothing_large_is_kept():
        answers = CallStream(answer).serve(calls())
        assert len(await anext(answers)) > 1_000_000
        following = asyncio.ensure_future(anext(answers, None))
    ends.set()
    assert await following is None


async def test_a_call_that_is_taken_back_is_given_up_and_the_others_go_on() -> None:
    begun: list[int] = []
    ended: list[int] = []

    async def answer(call: WireCall) -> tokenizer_pb2.PrepareResponse:
        begun.append(call.id)
        try:
            if call.id == 1:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append(call.id)
            raise
        return tokenizer_pb2.PrepareResponse(token_ids=[call.id])

    async def calls() -> AsyncIterator[list[StreamCall]]:
        yield [call_of(1), call_of(2)]
        while 1 not in begun:
            await asyncio.sleep(0)
        # One that is answered, and one that never was: both say nothing.
        yield [TakenBack(2), TakenBack(9)]
        yield [TakenBack(1), call_of(3)]

    assert await the_rest(CallStream(answer).serve(calls())) == {2: [2], 3: [3]}
    assert ended == [1]


@pytest.mark.parametrize("text", ["x", "x" * 300_000])
def test_a_call_without_a_request_takes_another_back(text: str) -> None:
    call = tokenizer_pb2.PrepareCall
    request = tokenizer_pb2.PrepareRequest(text=text)
    message = tokenizer_pb2.PrepareStreamRequest(calls=[call(id=1, request=request), call(id=1)])
    assert [type(each) for each in read_calls(message.SerializeToString())] == [WireCall, TakenBack]
