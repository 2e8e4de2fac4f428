"""The hops of our path and nothing else: what is left of its added latency when no process does any work.

`python -m benchmarks.gateways.chain front --port N --services N N`
`python -m benchmarks.gateways.chain service --port N [--core]`

The front answers each HTTP request with one event, after a message on a stream to each of two gRPC services,
one after the other. These echo, as the tokenizer service and the engine's front would answer; the second
passes each message through a process of its own over a socket pair, as an engine does. Client libraries,
event loops, channel options and the number of messages are ours; there are no spans, limits, templates or
steps.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
import httptools
import uvloop

from contract.errors import Reason
from runtime.outbox import Outbox
from runtime.server import GrpcServer, wait_for_signal
from runtime.stream_client import run_stream

_METHOD = "/chain.Echo/Pass"
# About what a request is on its way to the tokenizer service.
_MESSAGE = bytes(300)
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(_EVENT), _EVENT)
)


class Echo:
    """A stream to a service, one question at a time."""

    def __init__(self, target: str) -> None:
        self._answer: asyncio.Future[bytes] | None = None
        self._outbox: Outbox[bytes] = Outbox(len, max_together=1)
        self._task = asyncio.ensure_future(
            run_stream(target, _METHOD, self._outbox, b"".join, self._take, unavailable=Reason.INTERNAL)
        )
        self._task.add_done_callback(self._end)

    async def ask(self, message: bytes) -> bytes:
        """What the service echoes."""
        self._answer = asyncio.get_running_loop().create_future()
        self._outbox.put(message)
        return await self._answer

    def _take(self, message: bytes) -> None:
        assert self._answer is not None, "a question comes first"
        self._answer.set_result(message)

    def _end(self, task: asyncio.Task[None]) -> None:
        raise SystemExit(f"a service has ended its stream: {task.exception()}")


class _Front(asyncio.Protocol):
    """One connection; requests come one at a time."""

    def __init__(self, calls: list[Echo]) -> None:
        self._calls = calls
        self._parser = httptools.HttpRequestParser(self)
        self._tasks: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        task = asyncio.get_running_loop().create_task(self._answer())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self) -> None:
        for call in self._calls:
            await call.ask(_MESSAGE)
        self._transport.write(_ANSWER)


async def _serve_front(port: int, services: list[int]) -> None:
    calls = [Echo(f"127.0.0.1:{number}") for number in services]
    server = await asyncio.get_running_loop().create_server(lambda: _Front(calls), "127.0.0.1", port)
    await server.serve_forever()


def _core(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


async def _serve_service(port: int, *, has_core: bool) -> None:
    core: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    if has_core:
        ours, theirs = socket.socketpair()
        multiprocessing.get_context("fork").Process(target=_core, args=(theirs,), daemon=True).start()
        core = await asyncio.open_connection(sock=ours)

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in requests:
            if core is not None:
                core[1].write(message)
                await core[0].readexactly(len(message))
            yield message

    def register(handler: Any, server: Any) -> None:
        handlers = {"Pass": grpc.stream_stream_rpc_method_handler(handler)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("chain.Echo", handlers),))

    server = GrpcServer(f"127.0.0.1:{port}")
    server.add(register, echo, "chain.Echo")
    await server.start()
    await wait_for_signal()
    await server.stop(0)


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("role", choices=("front", "service"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--services", type=int, nargs=2, default=[])
    parser.add_argument("--core", action="store_true")
    arguments = parser.parse_args()
    if arguments.role == "front":
        uvloop.run(_serve_front(arguments.port, arguments.services))
    else:
        uvloop.run(_serve_service(arguments.port, has_core=arguments.core))


if __name__ == "__main__":
    main()
