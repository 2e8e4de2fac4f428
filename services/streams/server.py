"""Serves bidirectional calls of our own clients with the same handlers that gRPC's server has."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from services.streams import frames
from services.streams.connection import Connection
from services.streams.messages import Pieces, StreamEnd, parser, timeout_s, to_trailers
from services.streams.stream import Stream

_log = logging.getLogger(__name__)

# A client of ours opens one.
MAX_STREAMS = 16
# What a message that waits for the handler takes beside its content.
_KEPT_BYTES = 64
# For handlers that were cancelled, to give back what they hold.
_CANCELLED_S = 5.0


class ServerStreams:
    """All connections for streams of one server. `find` has gRPC's own handler object for a method's path."""

    def __init__(self, find: Callable[[str], Any], max_message_bytes: int) -> None:
        self.find = find
        self.max_message_bytes = max_message_bytes
        self.connections: set[ServerConnection] = set()
        self.is_draining = False

    def connection(self) -> ServerConnection:
        """The protocol for a connection that has been accepted."""
        return ServerConnection(self)

    async def stop(self, grace_s: float) -> None:
        """Takes no new calls, and cancels those that still run after `grace_s` seconds."""
        self.is_draining = True
        for connection in self.connections:
            connection.go_away()
        tasks = [call.task for each in self.connections for call in each.calls if call.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        for connection in list(self.connections):
            connection.close("the server has stopped")
        if tasks:
            await asyncio.wait(tasks, timeout=_CANCELLED_S)


class ServerConnection(Connection):
    """The server's side: clients open streams, each is a call."""

    answers = True

    def __init__(self, streams: ServerStreams) -> None:
        super().__init__({frames.MAX_CONCURRENT_STREAMS: MAX_STREAMS}, streams.max_message_bytes)
        self.calls: set[ServerCall] = set()
        self._streams = streams

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._streams.connections.add(self)

    def closed(self) -> None:
        """See Connection."""
        self._streams.connections.discard(self)

    def may_open(self, number: int) -> bool:
        """See Connection."""
        return number % 2 == 1

    def was_open(self, number: int) -> bool:
        """See Connection."""
        return 0 < number <= self.last_stream

    def accept(self, number: int) -> Stream | None:
        """See Connection."""
        if self._streams.is_draining or len(self.streams) >= MAX_STREAMS:
            self._count_idle()
            self.write(frames.reset(number, frames.REFUSED_STREAM))
            return None
        return self.new_stream(number)

    def begin(self, stream: Stream, headers: dict[str, str]) -> None:
        """See Connection."""
        # A stream that begins and is reset costs more than a frame that carries nothing.
        for _ in range(100):
            self._count_idle()
        call = ServerCall(stream, headers)
        stream.receiver = call
        call.start(self._streams.find, self.calls)

    def refuse(self, stream: Stream, end: StreamEnd) -> None:
        """See Connection."""
        call = stream.receiver
        stream.receiver = None
        if not isinstance(call, ServerCall):
            stream.reset(frames.PROTOCOL_ERROR)
            return
        call.answer(end)
        call.failed(end)


class ServerCall:
    """One call: its requests, its context, and the task that runs the handler."""

    def __init__(self, stream: Stream, headers: Mapping[str, str]) -> None:
        self.task: asyncio.Task[None] | None = None
        self._stream = stream
        self._headers = headers
        self._requests: deque[bytes | Pieces] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._has_all = False
        self._has_begun = False
        self._is_over = False
        self._deserialize: Callable[[bytes | Pieces], Any] = bytes
        self._aborted: StreamEnd | None = None
        self._callbacks: list[Callable[[Any], Any]] = []
        self._on_request: Callable[[Any], None] | None = None
        self._serialize: Callable[[Any], bytes] = bytes
        limit_s = timeout_s(headers.get("grpc-timeout", ""))
        self._deadline_s = None if limit_s is None else time.monotonic() + limit_s
        self._timer: asyncio.TimerHandle | None = None

    def start(self, find: Callable[[str], Any], calls: set[ServerCall]) -> None:
        """Runs the handler of the headers' method. Raises StreamEnd for what cannot be served."""
        headers = self._headers
        if headers.get(":method") != "POST" or not headers.get("content-type", "").startswith(
            "application/grpc"
        ):
            raise StreamEnd(grpc.StatusCode.INVALID_ARGUMENT, "this is no call of gRPC")
        handler = find(headers.get(":path", ""))
        if handler is None:
            raise StreamEnd(
                grpc.StatusCode.UNIMPLEMENTED,
                f"{headers.get(':path', '')[:200]} is no stream that is served here",
            )
        # gRPC's handlers may have none: messages are bytes then.
        self._deserialize = parser(handler.request_deserializer or bytes)
        loop = asyncio.get_running_loop()
        self._serialize = handler.response_serializer or bytes
        self.task = loop.create_task(self._run(handler.stream_stream))
        calls.add(self)
        self.task.add_done_callback(lambda _: calls.discard(self))
        if self._deadline_s is not None:
            self._timer = loop.call_later(self._deadline_s - time.monotonic(), self._expire)

    # What the stream calls.

    def headers_received(self, headers: dict[str, str]) -> None:
        """See Receiver: a call is made with its headers."""

    def message_received(self, message: bytes | Pieces) -> None:
        """See Receiver."""
        if self._on_request is not None:
            self._on_request(self._parsed(message))
            return
        self._stream.hold(len(message) + _KEPT_BYTES)
        self._requests.append(message)
        self._wake()

    def ended(self, trailers: dict[str, str] | None) -> None:
        """See Receiver."""
        self._has_all = True
        self._wake()

    def failed(self, end: StreamEnd) -> None:
        """See Receiver."""
        self._is_over = True
        if self._timer is not None:
            # A task that was never begun ends without its own end.
            self._timer.cancel()
        if self.task is not None:
            self.task.cancel()

    def has_room(self) -> None:
        """See Receiver."""
        room, self._room = self._room, None
        if room is not None and not room.done():
            room.set_result(None)

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # What the handler reads.

    def __aiter__(self) -> ServerCall:
        return self

    async def __anext__(self) -> Any:
        while not self._requests:
            if self._has_all:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._parsed(self._next())

    def _next(self) -> bytes | Pieces:
        message = self._requests.popleft()
        self._stream.release(len(message) + _KEPT_BYTES)
        return message

    def _parsed(self, message: bytes | Pieces) -> Any:
        try:
            return self._deserialize(message)
        except DecodeError as error:
            raise StreamEnd(grpc.StatusCode.INTERNAL, "a message cannot be decoded") from error

    # What a handler may do with its context here alone: pass messages on without a change of tasks.

    def listen(self, on_request: Callable[[Any], None]) -> None:
        """From now on requests go to `on_request`, as they come; the iterator only tells the end. Those that
        have come before go first. It never waits, and what it keeps is its own to bound.
        """
        while self._requests:
            on_request(self._parsed(self._next()))
        self._on_request = on_request

    @property
    def is_congested(self) -> bool:
        """Whether the client does not take what was sent."""
        return self._stream.is_congested

    def send(self, response: Any) -> None:
        """Sends a response before whatever the handler yields next. For as long as not `is_congested`."""
        if self._stream.ended_here:
            return
        self._begin()
        self._stream.send(self._serialize(response))

    # What it does with its context, as with gRPC's.

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers of the call that are the caller's own."""
        return tuple((name, value) for name, value in self._headers.items() if not name.startswith(":"))

    def time_remaining(self) -> float | None:
        """Seconds until the caller's deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Calls it when the call is over, however it ended."""
        self._callbacks.append(callback)

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        """Ends the call with a status. Never returns."""
        rich = dict(trailing_metadata or ()).get("grpc-status-details-bin", b"")
        self._aborted = StreamEnd(code, details, rich)
        raise grpc.aio.AbortError

    async def _run(self, behavior: Callable[..., Any]) -> None:
        stream = self._stream
        try:
            async with aclosing(behavior(self, self)) as responses:
                async for response in responses:
                    self.send(response)
                    if stream.is_congested:
                        await self._wait_room()
            self.answer(StreamEnd(grpc.StatusCode.OK))
        except asyncio.CancelledError:
            if not self._is_over:
                # By the handler's own side: nobody may wait for what was to be sent.
                stream.reset(frames.CANCEL)
        except grpc.aio.AbortError:
            self.answer(self._aborted or StreamEnd(grpc.StatusCode.UNKNOWN))
        except StreamEnd as end:
            self.answer(end)
        except Exception:
            _log.exception("unexpected failure in %s", self._headers.get(":path"))
            self.answer(StreamEnd(grpc.StatusCode.INTERNAL, "an unexpected failure"))
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for callback in self._callbacks:
                callback(self)

    async def _wait_room(self) -> None:
        while self._stream.is_congested and not self._is_over:
            self._room = asyncio.get_running_loop().create_future()
            await self._room

    def _begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._stream.send_headers([(":status", "200"), ("content-type", "application/grpc")])

    def answer(self, end: StreamEnd) -> None:
        """Ends the call with a status."""
        head = [] if self._has_begun else [(":status", "200"), ("content-type", "application/grpc")]
        self._has_begun = True
        self._stream.end([*head, *to_trailers(end)])

    def _expire(self) -> None:
        self._is_over = True
        self.answer(StreamEnd(grpc.StatusCode.DEADLINE_EXCEEDED, "the caller's deadline has passed"))
        if self.task is not None:
            self.task.cancel()
