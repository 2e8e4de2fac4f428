"""What messages that have come take of their tenant's room, until they are parsed or their call has ended."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from millrace.inference.v1 import inference_pb2

from contract.errors import MillraceError
from gateway.auth.authorizer import TENANT_HEADER
from gateway.config import RequestConfig
from gateway.faces.grpc.large import Unparsed, _if_small, _Parser
from gateway.faces.grpc.servicer import FULL_NAME
from gateway.faces.grpc.unread import UnreadMessages
from gateway.intake.intake import LARGE_BYTES, Intake

LARGEST = 4 * LARGE_BYTES
KIND = inference_pb2.TokenizeRequest


class Calls:
    """Calls of one tenant, each of which is a task, and what reads their messages."""

    def __init__(self, room_bytes: int) -> None:
        self.unread = UnreadMessages(LARGEST, room_bytes)
        self.tasks: list[asyncio.Task[None]] = []
        self.readers: list[Any] = []
        self.ends = asyncio.Event()

    async def begin(self) -> None:
        self.tasks.append(asyncio.create_task(self._call()))
        # A call that has room goes on at once.
        for _ in range(5):
            await asyncio.sleep(0)

    async def _call(self) -> None:
        details: Any = SimpleNamespace(
            method=f"/{FULL_NAME}/Tokenize", invocation_metadata=((TENANT_HEADER, "acme"),)
        )
        parse = _if_small(KIND.FromString)
        handler = grpc.unary_unary_rpc_method_handler(print, request_deserializer=parse)

        async def found(_: Any) -> Any:
            return handler

        self.readers.append((await self.unread.intercept_service(found, details)).request_deserializer)
        await self.ends.wait()

    async def finish(self) -> None:
        self.ends.set()
        await asyncio.gather(*self.tasks)


def message(num_bytes: int) -> bytes:
    return KIND(model="m", text="a" * num_bytes).SerializeToString()


async def test_a_large_message_keeps_its_room_until_it_is_dropped() -> None:
    # A tenant alone has half of the room: one message whose size is unknown.
    calls = Calls(2 * LARGEST)
    await calls.begin()
    await calls.begin()
    assert len(calls.readers) == 1, "the second one waits for room"
    large = calls.readers[0](message(LARGEST - 100))
    await asyncio.sleep(0)
    assert isinstance(large, Unparsed)
    assert len(calls.readers) == 1
    large.drop()
    assert large.data == b""
    await calls.begin()
    assert len(calls.readers) == 2
    assert calls.readers[1](message(10)).text == "a" * 10
    await calls.begin()
    assert len(calls.readers) == 3, "a small one keeps none"
    await calls.finish()


async def test_a_call_that_ends_before_its_message_is_parsed_gives_its_room_back() -> None:
    calls = Calls(2 * LARGEST)
    await calls.begin()
    calls.readers[0](message(LARGEST - 100))
    await calls.begin()
    assert len(calls.readers) == 1
    await calls.finish()
    assert len(calls.readers) == 2


@pytest.mark.parametrize("broken", [False, True])
async def test_bytes_are_dropped_as_soon_as_they_are_parsed(broken: bool) -> None:
    parser = _Parser(KIND, None, Intake(RequestConfig()))  # type: ignore[arg-type]
    data = message(2 * LARGE_BYTES)
    large = Unparsed(data[:-1] if broken else data)
    dropped: list[int] = []
    large.when_dropped(lambda: dropped.append(len(large)))
    if broken:
        with pytest.raises(MillraceError):
            await parser.parsed(large, "acme")
    else:
        assert (await parser.parsed(large, "acme")).text == "a" * 2 * LARGE_BYTES
    assert dropped == [0]
