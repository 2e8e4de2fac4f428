"""A service of bidirectional calls, and both kinds of clients and servers to try it with."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry import trace

from contract.proto.status import from_rpc_error
from services.errors import MillraceError, Reason
from services.server import GrpcServer
from services.streams import front
from services.streams.client import ClientStream, open_stream
from services.streams.frames import PREFACE
from services.streams.server import ServerCall

SERVICE = "test.Streams"
LEAN, GRPC = "lean", "grpc"
# Client and server: our own speak to each other and to gRPC's.
PAIRS = ((LEAN, LEAN), (LEAN, GRPC), (GRPC, LEAN), (GRPC, GRPC))
_END = object()


class Streams:
    """What is served. Messages are bytes."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.begun = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.done = asyncio.Event()
        self.release = asyncio.Event()

    async def Echo(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message

    async def Count(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        sizes = [len(message) async for message in requests]
        yield f"{len(sizes)} {sum(sizes)}".encode()

    async def Refuse(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            raise MillraceError(
                Reason.TEMPLATE_FAILED, "50 % ümlaut\nline", field="messages", metadata={"at": "3"}
            )
        yield b""

    async def Break(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            yield message
            raise RuntimeError("secret")

    async def Tell(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        """Who calls: a header, the trace that is current, and whether there is a deadline."""
        metadata = dict(context.invocation_metadata())
        span = trace.get_current_span().get_span_context()
        left_s = context.time_remaining()
        yield f"{metadata.get('x-name')} {span.trace_id:x} {left_s is not None and left_s > 0}".encode()

    async def Hang(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        context.add_done_callback(lambda _: self.done.set())
        self.begun.set()
        try:
            yield b"begun"
            await self.release.wait()
            yield b"released"
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Direct(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        """Echoes without a change of tasks, where that is possible, once it has seen the first."""
        first = await anext(aiter(requests))
        yield b"first " + first
        if isinstance(context, ServerCall):
            context.listen(lambda message: context.send(b"direct " + message))
        async for message in requests:
            yield b"task " + message
        yield b"end"

    async def Flood(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            num_messages, size = map(int, message.split())
            for number in range(num_messages):
                yield number.to_bytes(4, "big").ljust(size, b".")
                self.num_sent += 1


def register(servicer: Streams, server: Any) -> None:
    """As generated code does."""
    names = [name for name in dir(servicer) if name[0].isupper()]
    handlers = {name: grpc.stream_stream_rpc_method_handler(getattr(servicer, name)) for name in names}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_registered_method_handlers(SERVICE, handlers)


@asynccontextmanager
async def serving(
    kind: str, monkeypatch: pytest.MonkeyPatch | None = None
) -> AsyncIterator[tuple[Streams, GrpcServer, str]]:
    """A server of ours or of gRPC's. With a monkeypatch, ours serves whoever comes."""
    servicer = Streams()
    server = GrpcServer("127.0.0.1:0", streams=kind == LEAN)
    if monkeypatch is not None:
        monkeypatch.setattr(front, "announces_streams", _everybody)
    server.add(register, servicer, SERVICE)
    await server.start()
    await server.set_serving(True)
    try:
        yield servicer, server, f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


def _everybody(first: bytes) -> bool | None:
    return True if len(first) >= len(PREFACE) else None


class LeanTalk:
    """A call by our client."""

    def __init__(self) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self.room = asyncio.Event()
        self.stream: ClientStream

    async def open(self, address: str, method: str, metadata: Any, **options: Any) -> LeanTalk:
        self.stream = await open_stream(
            address,
            f"/{SERVICE}/{method}",
            on_message=self.inbox.put_nowait,
            on_end=lambda error: self.inbox.put_nowait(error or _END),
            on_room=self.room.set,
            metadata=metadata,
            unavailable=Reason.ENGINE_UNAVAILABLE,
            **options,
        )
        return self

    async def send(self, message: bytes) -> None:
        self.stream.send(message)

    async def end(self) -> None:
        self.stream.end()

    def cancel(self) -> None:
        self.stream.cancel()

    async def take(self) -> bytes | None:
        item = await asyncio.wait_for(self.inbox.get(), 30)
        if isinstance(item, MillraceError):
            raise item
        return None if item is _END else item


class GrpcTalk:
    """The same by gRPC's."""

    async def open(self, address: str, method: str, metadata: Any, limit_s: float | None = None) -> GrpcTalk:
        big = [(f"grpc.max_{way}_message_length", -1) for way in ("send", "receive")]
        self.channel = grpc.aio.insecure_channel(address, options=big)
        make: Any = self.channel.stream_stream(f"/{SERVICE}/{method}")
        self.call = make(metadata=metadata, timeout=limit_s)
        return self

    async def send(self, message: bytes) -> None:
        await self.call.write(message)

    async def end(self) -> None:
        await self.call.done_writing()

    def cancel(self) -> None:
        self.call.cancel()

    async def take(self) -> bytes | None:
        try:
            message = await asyncio.wait_for(self.call.read(), 30)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, unavailable=Reason.ENGINE_UNAVAILABLE) from error
        return None if message is grpc.aio.EOF else message


@asynccontextmanager
async def talking(
    kind: str, address: str, method: str, metadata: Any = (), **options: Any
) -> AsyncIterator[Any]:
    """A call by either client."""
    talk: Any = LeanTalk() if kind == LEAN else GrpcTalk()
    await talk.open(address, method, metadata, **options)
    try:
        yield talk
    finally:
        talk.cancel()
        if kind == GRPC:
            await talk.channel.close()
