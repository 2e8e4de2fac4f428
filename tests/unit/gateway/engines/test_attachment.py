"""One engine's stream: who is lost with it, and when it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from millrace.common.v1 import context_pb2
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc

from contract.engines import CancelReason
from contract.sampling import SamplingParams
from gateway.engines.attachment import Attachment, Inbox, Lost
from gateway.engines.mailbox import Mailbox
from gateway.engines.types import EngineState, Submission
from runtime.server import GrpcServer


class Deaf(engine_pb2_grpc.EngineServiceServicer):
    """Welcomes gateways and then reads nothing, unless it is told to listen."""

    def __init__(self) -> None:
        self.num_gateways = 0
        self.listens = False
        self.messages: list[Any] = []

    async def Attach(self, requests: Any, context: Any) -> AsyncIterator[engine_pb2.AttachResponse]:
        await anext(aiter(requests))
        self.num_gateways += 1
        yield engine_pb2.AttachResponse(welcome=engine_pb2.Welcome(info=engine_pb2.EngineInfo()))
        while not self.listens:
            await asyncio.sleep(0.01)
        async for message in requests:
            self.messages.append(message)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


def submission(num_tokens: int) -> Submission:
    return Submission(
        context=context_pb2.SignedContext(),
        prompt_token_ids=(1,) * num_tokens,
        sampling=SamplingParams(seed=1, max_tokens=1),
    )


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Deaf, Attachment]]:
    servicer = Deaf()
    server = GrpcServer("127.0.0.1:0")
    server.add(engine_pb2_grpc.add_EngineServiceServicer_to_server, servicer, "")
    await server.start()
    attached = Attachment(f"127.0.0.1:{server.port}", gateway="g")
    attached.start()
    await until(lambda: attached.state is EngineState.READY)
    yield servicer, attached
    await attached.stop()
    await server.stop(0)


async def test_an_engine_that_takes_nothing_is_lost_and_attached_again(
    engine: tuple[Deaf, Attachment],
) -> None:
    servicer, attached = engine
    inbox: Inbox = Mailbox()
    for _ in range(64):
        attached.submit(submission(100_000), inbox)
        await asyncio.sleep(0)
    # What the engine's windows do not hold waits here; it is as good as full now.
    attached._outbox._max_waiting = len(attached._outbox)
    attached.submit(submission(1), inbox)
    lost: list[Any] = []
    while len(lost) < 65:
        lost += await asyncio.wait_for(inbox.take(), 30)
    assert all(isinstance(each, Lost) and each.error is None for each in lost)
    assert attached.num_losses == 1
    await until(lambda: attached.state is EngineState.READY)
    assert servicer.num_gateways == 2
    assert attached.num_open == 0


async def test_an_engine_that_says_nothing_is_lost_with_its_requests(
    engine: tuple[Deaf, Attachment],
) -> None:
    _, speaking = engine
    silent = Attachment(speaking.target, gateway="g", silence_limit_s=0.5)
    silent.start()
    try:
        await until(lambda: silent.state is EngineState.READY)
        inbox: Inbox = Mailbox()
        leg = silent.submit(submission(1), inbox)
        (lost,) = await asyncio.wait_for(inbox.take(), 30)
        assert isinstance(lost, Lost)
        assert (lost.leg, lost.error) == (leg, None)
        assert silent.num_open == 0
        assert speaking.num_losses == 0
    finally:
        await silent.stop()


async def test_an_attachment_that_is_stuck_can_still_be_stopped(engine: tuple[Deaf, Attachment]) -> None:
    _, attached = engine
    inbox: Inbox = Mailbox()
    attached._outbox._max_waiting = 0
    attached.submit(submission(1), inbox)
    async with asyncio.timeout(20):
        await attached.stop()
    assert attached._task is not None
    assert attached._task.cancelled()


async def test_what_is_sent_in_one_turn_goes_in_one_message(engine: tuple[Deaf, Attachment]) -> None:
    servicer, attached = engine
    servicer.listens = True
    inbox: Inbox = Mailbox()
    legs = [attached.submit(submission(1), inbox) for _ in range(3)]
    legs[0].cancel(CancelReason.CLIENT)
    await until(lambda: servicer.messages)
    (message,) = servicer.messages
    kinds = [each.WhichOneof("message") for each in message.several.requests]
    assert kinds == ["submit", "submit", "submit", "cancel"]
    assert attached.num_open == 2


async def test_a_stream_that_retires_stays_open_for_the_last_word(engine: tuple[Deaf, Attachment]) -> None:
    """Taken back before it retires or afterwards; what is said never is missed by nobody for ever."""
    _, attached = engine
    legs = [attached.submit(submission(1), Mailbox()) for _ in range(2)]
    legs[0].cancel(CancelReason.CLIENT)
    attached.retire()
    legs[1].cancel(CancelReason.CLIENT)
    await asyncio.sleep(0)
    words = [each.worked for each in legs]
    assert [word is not None and not word.done() for word in words] == [True, True]
    assert not attached.has_ended
    for leg in legs:
        ended = engine_pb2.RequestOutput(handle=leg.handle, finish_reason=1)
        attached._note_taken_back(ended)
    await until(lambda: attached.has_ended)
    assert all(word is not None and word.done() for word in words)


async def test_who_waits_for_a_last_word_hears_of_the_end(engine: tuple[Deaf, Attachment]) -> None:
    _, attached = engine
    leg = attached.submit(submission(1), Mailbox())
    leg.cancel(CancelReason.CLIENT)
    attached.retire()
    await attached.stop()
    assert leg.worked is not None
    await asyncio.wait_for(leg.worked, 30)
