"""An OpenAI-compatible back end that costs next to nothing: what any gateway in front of it adds is seen.

`python -m benchmarks.gateways.backend --port N [--step-ms S]`

Every answer has `max_tokens` tokens, one event each. Without a step each stream writes its next token as soon
as the others had their turn; with one, all streams get theirs once a step, as from an engine's batch.
"""

from __future__ import annotations

import argparse
import asyncio
from typing import cast

import httptools
import msgspec
import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class _Options(msgspec.Struct):
    """What matters of a request."""

    max_tokens: int = 16
    stream: bool = False


_decode = msgspec.json.Decoder(_Options).decode


def _event(text: str, finish_reason: str | None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    chunk = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "echo",
        "choices": [choice],
    }
    return _chunk(b"data: " + msgspec.json.encode(chunk) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_TOKEN = _event(" word", None)
_LAST = _event(" word", "stop") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class _Steps:
    """Calls every running stream once a step."""

    def __init__(self, step_s: float) -> None:
        self.running: set[_Connection] = set()
        self._step_s = step_s
        self._due_s = 0.0

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s + self._step_s, loop.time())
        loop.call_at(self._due_s, self._step)

    def _step(self) -> None:
        for stream in list(self.running):
            stream.advance()
        self.start()


class _Connection(asyncio.Protocol):
    def __init__(self, steps: _Steps | None) -> None:
        self._steps = steps
        self._parser = httptools.HttpRequestParser(self)
        self._body = b""
        self._left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._left = 0
        if self._steps is not None:
            self._steps.running.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = self._body, b""
        self._left = _decode(body or b"{}").max_tokens
        self._transport.write(_HEAD)
        if self._steps is None:
            self.advance()
        else:
            self._steps.running.add(self)

    def advance(self) -> None:
        """Writes one token."""
        if self._left <= 0:
            return
        self._left -= 1
        self._transport.write(_TOKEN if self._left else _LAST)
        if self._steps is None:
            asyncio.get_running_loop().call_soon(self.advance)
        elif not self._left:
            self._steps.running.discard(self)


async def _serve(port: int, step_ms: float) -> None:
    steps = _Steps(step_ms / 1000) if step_ms else None
    if steps is not None:
        steps.start()
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(steps), "127.0.0.1", port)
    await server.serve_forever()


def main() -> None:
    """Serves until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    uvloop.run(_serve(arguments.port, arguments.step_ms))


if __name__ == "__main__":
    main()
