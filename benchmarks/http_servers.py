"""Which server carries the HTTP face: uvicorn or granian's embedded one, under the gateway's kind of request.

`pip install --target build/granian granian==2.8.7`
`python -m benchmarks.http_servers --granian build/granian [--output FILE]`
`python -m benchmarks.http_servers --servers joined direct [--output FILE]`

One bare ASGI application in a process with one uvloop, as the gateway has it: a POST of JSON that is answered
with JSON, and a stream of 128 events, each sent in a turn of the event loop of its own. The servers take
turns, several times; figures are medians. Granian is no dependency: it is installed beside the environment.
`joined` and `direct` are uvicorn with the gateway's connections: with a transport that writes once a turn of
the event loop, and as they are, where each write is a call of the system.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import msgspec
import uvloop

from benchmarks.gateways.load import Figures, Load, Peer, measure
from benchmarks.stack import write_result
from gateway.http.connection import Connection

_TURNS = 5
_LOADS = {
    "answers_32": Load(32, 16_000, 0),
    "answers_1": Load(1, 3_000, 0),
    "streams_64": Load(64, 640, 128),
}
_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
_COMPARED = ("uvicorn", "granian")

Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


async def application(scope: dict[str, Any], receive: Receive, send: Send) -> None:
    """Streams `max_tokens` events; answers at once where there are none to send."""
    body = b""
    more = True
    while more:
        message = await receive()
        body += message["body"]
        more = message["more_body"]
    num_events = json.loads(body)["max_tokens"]
    if not num_events:
        answer = json.dumps({"object": "chat.completion", "choices": [{"text": "word"}]}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(answer)),
            (b"x-request-id", b"4bf92f35-77b3-4da6-a3ce-929d0e0e4736"),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": answer, "more_body": False})
        return
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(num_events):
        await send({"type": "http.response.body", "body": _EVENT, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


class JoiningTransport:
    """Writes once a turn of the event loop."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._unsent: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """See asyncio.WriteTransport."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self.flush)
        self._unsent.append(data)

    def flush(self) -> None:
        """Writes what waits for the end of the turn."""
        unsent, self._unsent = self._unsent, []
        if unsent and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))

    def close(self) -> None:
        """See asyncio.BaseTransport."""
        self.flush()
        self._transport.close()


class Joined(Connection):
    """The gateway's connection with writes joined; an answer's end goes at once."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(cast(asyncio.Transport, JoiningTransport(transport)))

    def on_response_complete(self) -> None:
        """The answer is over."""
        cast(JoiningTransport, self.transport).flush()
        super().on_response_complete()


async def _serve_uvicorn(port: int, http: Any = "httptools") -> None:
    import uvicorn

    config = uvicorn.Config(
        application,
        port=port,
        http=http,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        proxy_headers=False,
    )
    await uvicorn.Server(config).serve()


async def _serve_granian(port: int) -> None:
    from granian.server.embed import Server

    await Server(
        application, port=port, interface="asginl", http="1", websockets=False, log_enabled=False
    ).serve()


_SERVERS: dict[str, Callable[[int], Coroutine[Any, Any, None]]] = {
    "uvicorn": _serve_uvicorn,
    "granian": _serve_granian,
    "joined": partial(_serve_uvicorn, http=Joined),
    "direct": partial(_serve_uvicorn, http=Connection),
}


def serve(name: str, port: int) -> None:
    """Runs one server until it is killed."""
    uvloop.run(_SERVERS[name](port))


def _turn(name: str, granian: Path | None) -> dict[str, Figures]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = dict(os.environ)
    if granian is not None:
        environment["PYTHONPATH"] = str(granian.resolve())
    command = [sys.executable, "-m", "benchmarks.http_servers", "--serve", name, "--port", str(port)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            return uvloop.run(_load(Peer(name, "127.0.0.1", port, "key", "model"), process))
        finally:
            process.kill()


async def _load(peer: Peer, process: subprocess.Popen[bytes]) -> dict[str, Figures]:
    await _listening(peer.port, process)
    figures = {}
    for name, load in _LOADS.items():
        await measure(peer, Load(load.concurrency, load.concurrency * 10, load.num_tokens))
        figures[name] = await measure(peer, load, [("server", process.pid)])
    return figures


async def _listening(port: int, process: subprocess.Popen[bytes]) -> None:
    while True:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}; its message is above")
        with suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.05)


def _summary(turns: list[dict[str, Figures]]) -> dict[str, float]:
    def median(load: str, figure: Callable[[Figures], float]) -> float:
        return round(statistics.median(figure(turn[load]) for turn in turns), 3)

    return {
        "requests_per_s_at_32": median("answers_32", lambda each: each.requests_per_s),
        "server_cpu_ms_a_request_at_32": median("answers_32", lambda each: each.cpu_ms["server"]),
        "latency_p50_ms_at_1": median("answers_1", lambda each: each.latency_p50_ms),
        "tokens_per_s_at_64": median("streams_64", lambda each: each.tokens_per_s),
        "server_cpu_us_a_token_at_64": median("streams_64", lambda each: each.cpu_ms["server"] / 128 * 1000),
        "num_failed": sum(each.num_failed for turn in turns for each in turn.values()),
    }


def _granian_version(granian: Path) -> str:
    found = next(iter(metadata.distributions(name="granian", path=[str(granian)])), None)
    if found is None:
        raise SystemExit(f"there is no granian in {granian}; pip install --target {granian} granian")
    return found.version


def main() -> None:
    """Prints both servers' figures, and writes them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--servers", nargs="+", choices=_SERVERS, default=_COMPARED, help="what is compared")
    parser.add_argument("--granian", type=Path, help="the folder that granian is installed in")
    parser.add_argument("--output", type=Path, help="write the figures here as JSON")
    parser.add_argument("--serve", choices=_SERVERS, help="only serve, for the benchmark's own use")
    parser.add_argument("--port", type=int, default=0)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.port)
        return
    versions = {name: metadata.version("uvicorn") for name in arguments.servers}
    if "granian" in versions:
        if arguments.granian is None:
            parser.error("--granian: name the folder")
        versions["granian"] = _granian_version(arguments.granian)
    turns: dict[str, list[dict[str, Figures]]] = {name: [] for name in versions}
    for _ in range(_TURNS):
        for name, taken in turns.items():
            taken.append(_turn(name, arguments.granian))
            print(f"{name:8} {_summary(taken[-1:])}", flush=True)
    figures = {name: {"version": versions[name], **_summary(taken)} for name, taken in turns.items()}
    print(json.dumps(figures, indent=2))
    write_result(arguments.output, {**msgspec.to_builtins(figures), "num_turns": _TURNS})


if __name__ == "__main__":
    main()
