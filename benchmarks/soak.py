"""Clients that misbehave for minutes: do file descriptors, memory or held requests grow?

`python -m benchmarks.soak [--seconds 120]`

Starts a whole simulated stack. Clients open streams and leave them at random moments over HTTP/1.1 and gRPC,
send half a request and vanish, send garbage, or use a wrong key. File descriptors and resident memory of
every process are printed: after a first round, which fills pools and caches; at the end; and when all clients
have been gone for some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from typing import Any

import grpc
import psutil
from millrace.common.v1 import chat_pb2
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.engine.report import options
from benchmarks.neighbour.requests import Target, chat_body, json_fields, request_head
from benchmarks.stack import RunningStack, running_stack, write_result

NUM_CLIENTS = 24
WARM_UP_S = 20.0
REST_S = 12.0
CONFIG = """
[engine.simulation]
step_ms = 20.0
[envoy]
# A client that sends half a request is cut off after this long.
request_headers_timeout_s = 5.0
"""


class Rascals:
    """Clients that do everything wrong that a network allows: attackers on raw sockets, no load."""

    def __init__(self, stack: RunningStack, seed: int) -> None:
        self._random = random.Random(seed)
        host, _, port = stack.state.address.rpartition(":")
        self._target = Target(host, int(port), stack.state.api_key, stack.state.model)
        self.done: Counter[str] = Counter()

    async def misbehave(self, end_s: float) -> None:
        """One client after another until the end."""
        tricks = (
            self._leave_http,
            self._leave_http,
            self._leave_grpc,
            self._half,
            self._garbage,
            self._no_key,
        )
        while time.monotonic() < end_s:
            trick = self._random.choice(tricks)
            with contextlib.suppress(OSError, grpc.RpcError, asyncio.IncompleteReadError):
                await trick()
            self.done[trick.__name__.strip("_")] += 1

    def _request(self, target: Target) -> bytes:
        messages = json.dumps([{"role": "user", "content": "x" * self._random.randrange(1, 400)}])
        path, body = chat_body(target, json_fields(max_tokens=400, stream=True), messages.encode())
        return request_head(target, path, len(body)) + body

    async def _send(self, data: bytes, *, wait_s: float) -> None:
        reader, writer = await asyncio.open_connection(self._target.host, self._target.port)
        try:
            writer.write(data)
            await writer.drain()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    while await reader.read(65536):
                        pass
        finally:
            if self._random.random() < 0.5:
                writer.transport.abort()
            writer.close()

    async def _leave_http(self) -> None:
        await self._send(self._request(self._target), wait_s=self._random.random())

    async def _half(self) -> None:
        data = self._request(self._target)
        await self._send(data[: self._random.randrange(len(data))], wait_s=self._random.random() * 0.2)

    async def _garbage(self) -> None:
        await self._send(self._random.randbytes(512), wait_s=0.2)

    async def _no_key(self) -> None:
        await self._send(self._request(self._target._replace(key="mr-wrong")), wait_s=0.05)

    async def _leave_grpc(self) -> None:
        message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content="Go on.")
        request = inference_pb2.ChatRequest(
            model=self._target.model, conversation=chat_pb2.Conversation(messages=[message])
        )
        async with grpc.aio.insecure_channel(self._target.authority()) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Chat(
                request,
                metadata=(("authorization", f"Bearer {self._target.key}"),),
                timeout=self._random.random(),
            )
            for _ in range(self._random.randrange(20)):
                await call.read()
            call.cancel()


def look(stack: RunningStack) -> dict[str, tuple[int, float]]:
    """File descriptors and resident MiB of every process."""
    found = {}
    for name, pid in stack.pids().items():
        process = psutil.Process(pid)
        found[name] = (process.num_fds(), round(process.memory_info().rss / 2**20, 1))
    return found


def held(stack: RunningStack) -> int:
    """Requests that engines hold."""
    total = 0
    for address in stack.addresses("engine", "grpc"):
        with grpc.insecure_channel(address) as channel:
            stub = engine_pb2_grpc.EngineServiceStub(channel)
            answer = stub.CheckInvariants(engine_pb2.CheckInvariantsRequest(), timeout=30)
            if not answer.ok:
                raise SystemExit(answer.violation)
            total += answer.num_requests
    return total


async def run(stack: RunningStack, seconds: float) -> dict[str, Any]:
    """Warm-up, abuse, rest; what was seen after each."""
    rascals = Rascals(stack, seed=0)
    seen = {}
    for moment, length_s in (("warm", WARM_UP_S), ("end", seconds)):
        end_s = time.monotonic() + length_s
        await asyncio.gather(*(rascals.misbehave(end_s) for _ in range(NUM_CLIENTS)))
        seen[moment] = look(stack)
    await asyncio.sleep(REST_S)
    seen["rest"] = look(stack)
    return {"seconds": seconds, "clients": dict(rascals.done), "held": held(stack), "seen": seen}


def main() -> None:
    """Prints one line a process, and JSON with --json."""
    parser = options(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    chosen = parser.parse_args()
    with running_stack(CONFIG, "--simulated") as stack:
        result = asyncio.run(run(stack, chosen.seconds))
    print(f"{sum(result['clients'].values())} clients: {result['clients']}; requests held: {result['held']}")
    print(f"{'file descriptors / MiB':24}" + "".join(f"{moment:>16}" for moment in result["seen"]))
    for name in result["seen"]["warm"]:
        cells = (result["seen"][moment][name] for moment in result["seen"])
        print(f"{name:24}" + "".join(f"{fds:>7} /{rss:>7}" for fds, rss in cells))
    write_result(chosen.json, result)


if __name__ == "__main__":
    main()
