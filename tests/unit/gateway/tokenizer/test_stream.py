"""The stream of Prepare calls: answers find their calls; a stream that breaks fails its own calls alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from contract.chat import TextPrompt
from contract.errors import MillraceError, Reason
from contract.proto.status import to_detail
from gateway.intake.budget import ByteBudget
from gateway.tokenizer.client import TokenizerClient
from gateway.tokenizer.stream import PrepareStream, PrepareStreams
from runtime.channels import MAX_MESSAGE_BYTES
from runtime.server import GrpcServer
from runtime.streams import run_stream


class Service(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Answers in reverse order; "refuse" is refused, "break" ends the stream, "holdhold..." keeps it."""

    def __init__(self) -> None:
        self.num_streams = 0
        self.num_messages = 0
        self.taken_back: list[int] = []
        self.target = ""
        self.holds = asyncio.Event()
        self.released = asyncio.Event()

    async def PrepareStream(self, requests: Any, context: Any) -> Any:
        self.num_streams += 1
        async for message in requests:
            self.num_messages += 1
            if any(call.request.text == "break" for call in message.calls):
                await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
            if any(call.request.text.startswith("holdhold") for call in message.calls):
                self.holds.set()
                await self.released.wait()
            self.taken_back += [call.id for call in message.calls if not call.HasField("request")]
            answers = [self._answer(call) for call in reversed(message.calls) if call.HasField("request")]
            yield tokenizer_pb2.PrepareStreamResponse(answers=answers)

    def _answer(self, call: Any) -> Any:
        if call.request.text == "refuse":
            error = MillraceError(Reason.TEMPLATE_FAILED, "no", field="messages")
            return tokenizer_pb2.PrepareAnswer(id=call.id, error=to_detail(error))
        ids = [len(call.request.text)]
        return tokenizer_pb2.PrepareAnswer(id=call.id, response=tokenizer_pb2.PrepareResponse(token_ids=ids))


@asynccontextmanager
async def streaming() -> AsyncIterator[tuple[Service, PrepareStream]]:
    service = Service()
    server = GrpcServer("127.0.0.1:0")
    server.add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, service, "")
    await server.start()
    service.target = f"127.0.0.1:{server.port}"
    stream = PrepareStream(service.target)
    yield service, stream
    await stream.close()
    await server.stop(0)


def wire(text: str) -> bytes:
    return tokenizer_pb2.PrepareRequest(text=text).SerializeToString()


async def prepare(stream: PrepareStream, text: str) -> list[int]:
    answer = await stream.call(wire(text), ("", ""), 20.0, "")
    return list(answer.token_ids)


async def test_answers_find_their_calls_and_share_messages() -> None:
    async with streaming() as (service, stream):
        texts = ["x" * size for size in range(40)]
        answers = await asyncio.gather(*(prepare(stream, text) for text in texts))
        assert answers == [[len(text)] for text in texts]
        assert service.num_streams == 1
        assert service.num_messages < len(texts)


async def test_refusal_is_the_call_s_own() -> None:
    async with streaming() as (_, stream):
        refused, answered = await asyncio.gather(
            prepare(stream, "refuse"), prepare(stream, "fine"), return_exceptions=True
        )
        assert isinstance(refused, MillraceError)
        assert (refused.reason, refused.field) == (Reason.TEMPLATE_FAILED, "messages")
        assert answered == [4]


async def test_stream_that_breaks_fails_its_calls_and_is_opened_again() -> None:
    async with streaming() as (service, stream):
        assert await prepare(stream, "one") == [3]
        with pytest.raises(MillraceError) as lost:
            await prepare(stream, "break")
        assert lost.value.reason is Reason.TOKENIZER_UNAVAILABLE
        assert await prepare(stream, "four") == [4]
        assert service.num_streams == 2


async def test_nobody_waits_behind_a_large_request() -> None:
    async with streaming() as (service, _):
        streams = PrepareStreams(service.target)
        try:
            answered = await streams.call(wire("x" * 300_000), "", "", 20.0)
            assert list(answered.token_ids) == [300_000]
            assert (service.num_streams, service.num_messages) == (1, 1)
            # On one stream the second would be read only after the first has been answered.
            held = asyncio.ensure_future(streams.call(wire("hold" * 100_000), "", "", 20.0))
            await service.holds.wait()
            assert list((await streams.call(wire("wait"), "", "", 20.0)).token_ids) == [4]
            assert not held.done()
            service.released.set()
            assert list((await held).token_ids) == [400_000]
            assert service.num_streams == 2
        finally:
            await streams.close()


async def test_what_the_service_would_not_take_is_refused_and_leaves_the_others_alone() -> None:
    async with streaming() as (service, stream):
        held = asyncio.ensure_future(prepare(stream, "holdhold"))
        await service.holds.wait()
        # Documents take several times the bytes that they have as JSON.
        with pytest.raises(MillraceError) as refused:
            await prepare(stream, "x" * MAX_MESSAGE_BYTES)
        assert (refused.value.reason, refused.value.field) == (Reason.REQUEST_TOO_LARGE, "prompt")
        service.released.set()
        assert await held == [8]
        assert service.num_streams == 1


async def test_call_that_is_given_up_leaves_the_others_alone() -> None:
    async with streaming() as (_, stream):
        abandoned = asyncio.ensure_future(prepare(stream, "a"))
        kept = asyncio.ensure_future(prepare(stream, "bb"))
        await asyncio.sleep(0)
        abandoned.cancel()
        assert await kept == [2]


async def test_the_service_is_told_that_nobody_waits_for_a_call_that_it_has() -> None:
    async with streaming() as (service, stream):
        held = asyncio.ensure_future(prepare(stream, "holdhold"))
        await service.holds.wait()
        (number,) = stream._open
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        service.released.set()
        # Neither the next call nor one that was answered is taken back.
        assert await prepare(stream, "one") == [3]
        assert service.taken_back == [number]


async def test_calls_that_were_given_up_are_not_sent() -> None:
    async with streaming() as (service, stream):
        held = asyncio.ensure_future(prepare(stream, "holdhold"))
        await service.holds.wait()
        # The service reads nothing meanwhile: all but a few wait here.
        given_up = [asyncio.ensure_future(prepare(stream, "x" * 200_000)) for _ in range(100)]
        async with asyncio.timeout(30):
            while stream._outbox.num_bytes == 0:
                await asyncio.sleep(0)
        for each in given_up:
            each.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        # What the service has been sent already is taken back, in a few bytes each.
        assert stream._outbox.num_bytes < 100 * 20
        service.released.set()
        assert await held == [8]
        assert await prepare(stream, "one") == [3]
        assert service.num_messages < 60


async def test_a_call_without_an_answer_ends_in_time_and_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.tokenizer.stream._GRACE_S", 0.05)
    async with streaming() as (service, stream):
        held = asyncio.ensure_future(prepare(stream, "holdhold"))
        await service.holds.wait()
        with pytest.raises(MillraceError, match="within the time limit") as late:
            await stream.call(wire("late"), ("", ""), 0.05, "")
        assert late.value.reason is Reason.DEADLINE_EXCEEDED
        assert stream._outbox.num_bytes < 20
        service.released.set()
        assert await held == [8]


async def test_a_tenant_whose_calls_wait_holds_up_nobody_else() -> None:
    budget = ByteBudget(max_bytes=1_000_000)
    async with streaming() as (service, _):
        crowded = PrepareStream(service.target, budget)

        async def ask(text: str, tenant: str) -> list[int]:
            answer = await crowded.call(wire(text), ("", ""), 20.0, tenant)
            return list(answer.token_ids)

        try:
            held = asyncio.ensure_future(ask("holdhold", "other"))
            await service.holds.wait()
            flood = [asyncio.ensure_future(ask("x" * 200_000, "flood")) for _ in range(50)]
            await asyncio.sleep(0)
            # Of ten million bytes.
            assert crowded._outbox.num_bytes < 1_000_000
            last = asyncio.ensure_future(ask("small", "other"))
            service.released.set()
            assert await last == [5]
            assert not all(each.done() for each in flood)
            assert await held == [8]
            assert await asyncio.gather(*flood) == [[200_000]] * 50
        finally:
            await crowded.close()


async def served(service: Service, listen: str = "127.0.0.1:0") -> GrpcServer:
    server = GrpcServer(listen)
    server.add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, service, "")
    await server.start()
    return server


async def prepare_text(client: TokenizerClient, text: str, timeout_s: float = 20.0) -> tuple[int, ...]:
    prompt = TextPrompt(text)
    prepared = await client.prepare(
        model="", prompt=prompt, response_format=None, context=None, timeout_s=timeout_s
    )
    return prepared.token_ids


async def test_a_service_that_is_gone_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = asyncio.Event()

    async def run(*arguments: Any, **options: Any) -> None:
        try:
            await run_stream(*arguments, **options)
        except MillraceError:
            broken.set()
            raise

    monkeypatch.setattr("gateway.tokenizer.stream.run_stream", run)
    server = await served(Service())
    address = f"127.0.0.1:{server.port}"
    client = TokenizerClient(address)
    assert await prepare_text(client, "one") == (3,)
    await server.stop(0)
    await broken.wait()
    broken.clear()
    waiting = [asyncio.create_task(prepare_text(client, "x" * size)) for size in range(5)]
    # They have found out that nobody is there.
    await broken.wait()
    assert not any(each.done() for each in waiting)
    server = await served(Service(), address)
    assert await asyncio.gather(*waiting) == [(size,) for size in range(5)]
    await client.close()
    await server.stop(0)


async def test_a_service_that_says_nothing_is_asked_again() -> None:
    service = Service()
    server = await served(service)
    client = TokenizerClient(f"127.0.0.1:{server.port}", silence_limit_s=0.5)
    held = asyncio.create_task(prepare_text(client, "holdhold"))
    await service.holds.wait()
    async with asyncio.timeout(20):
        while service.num_streams == 1:
            await asyncio.sleep(0.01)
    service.released.set()
    assert await held == (8,)
    await client.close()
    await server.stop(0)


async def test_a_service_that_stays_away_is_waited_for_within_the_request_s_time() -> None:
    server = await served(Service())
    await server.stop(0)
    target = f"127.0.0.1:{server.port}"
    for comeback_s, timeout_s in ((0.5, 20.0), (20.0, 0.5)):
        client = TokenizerClient(target, comeback_s=comeback_s)
        async with asyncio.timeout(10):
            with pytest.raises(MillraceError) as away:
                await prepare_text(client, "one", timeout_s)
        await client.close()
        assert away.value.reason is Reason.TOKENIZER_UNAVAILABLE
        assert away.value.retry_after_s == 1.0


async def test_a_request_that_the_service_does_not_survive_is_sent_three_times_at_most() -> None:
    service = Service()
    server = await served(service)
    client = TokenizerClient(f"127.0.0.1:{server.port}")
    with pytest.raises(MillraceError) as lost:
        await prepare_text(client, "break")
    assert lost.value.reason is Reason.TOKENIZER_UNAVAILABLE
    assert "lost 3 times while it prepared this request" in lost.value.message
    assert service.num_messages == 3
    assert await prepare_text(client, "four") == (4,)
    await client.close()
    await server.stop(0)
