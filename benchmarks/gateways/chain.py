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

from services.channels import SERVER_OPTIONS, connect

_METHOD = "/chain.Echo/Pass"
# About what a request is on its way to the tokenizer service.
_MESSAGE = bytes(300)
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
_ANSWER = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    b"%x\r\n%b\r\n0\r\n\r\n" % (len(_EVENT), _EVENT)
)


class _Front(asyncio.Protocol):
    """One connection; requests come one at a time."""

    def __init__(self, calls: list[Any]) -> None:
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
            await call.write(_MESSAGE)
            await call.read()
        self._transport.write(_ANSWER)


async def _serve_front(port: int, services: list[int]) -> None:
    channels = [connect(f"127.0.0.1:{number}") for number in services]
    methods: list[Any] = [channel.stream_stream(_METHOD, None, None) for channel in channels]
    calls = [method() for method in methods]
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

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers = {"Pass": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("chain.Echo", handlers),))
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


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
