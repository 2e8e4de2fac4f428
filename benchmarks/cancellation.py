"""A client that leaves in the middle of a stream: how soon is everything free that was held for it?

`python -m benchmarks.cancellation [--rounds 10] [--step-ms 100]`

Starts a whole stack with a simulated engine of known step time. In every round several streams run, as many
as the tenant's limit allows, then all of them end in one way: the client disconnects (HTTP/1.1, HTTP/2,
gRPC), its deadline passes, a stop string is met. From that moment two things are asked for over and over: how
many requests and blocks the engine holds, and how many requests the gateway holds. The bound is one step and
50 ms. Both questions are answered by the running processes, so that the times contain a round trip. The next
round takes every slot of the limit again, and would be refused if one had not come back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
from millrace.common.v1 import chat_pb2
from millrace.engine.v1 import engine_pb2, engine_pb2_grpc
from millrace.inference.v1 import inference_pb2, inference_pb2_grpc

from benchmarks.stack import RunningStack, running_stack, write_result

NUM_STREAMS = 8
MARGIN_MS = 50.0
CONFIG = f"""
[tenants.development]
max_concurrent_streams = {NUM_STREAMS}
[engine.simulation]
step_ms = %f
"""
PROMPT = "Go on and on."
# Moment at which the clients left, in seconds of time.perf_counter.
Way = Callable[["Clients"], Awaitable[float]]


class Clients:
    """Opens streams in each way and leaves them."""

    def __init__(self, stack: RunningStack, step_s: float) -> None:
        self.step_s = step_s
        self._state = stack.state
        self._host, _, port = self._state.address.rpartition(":")
        self._port = int(port)
        self._engine = stack.addresses("engine", "grpc")[0]
        self._gateway = stack.addresses("gateway", "metrics")[0]

    def body(self, **options: Any) -> bytes:
        """A chat request that goes on for long."""
        return json.dumps(
            {
                "model": self._state.model,
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": 1000,
                "ignore_eos": True,
                "stream": True,
                **options,
            }
        ).encode()

    async def _open(self, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        body = self.body(**options)
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"authorization: Bearer {self._state.api_key}\r\ncontent-length: {len(body)}\r\n\r\n".encode()
            + body
        )
        await reader.readuntil(b"data: ")
        return reader, writer

    async def http1(self) -> float:
        """Clients close their connections."""
        streams = await asyncio.gather(*(self._open() for _ in range(NUM_STREAMS)))
        await asyncio.sleep(2 * self.step_s)
        left_s = time.perf_counter()
        for _, writer in streams:
            writer.close()
        return left_s

    async def http2(self) -> float:
        """Clients end while their HTTP/2 streams are open."""
        command = [
            *("curl", "--silent", "--no-buffer", "--http2-prior-knowledge"),
            f"http://{self._state.address}/v1/chat/completions",
            *("--header", f"authorization: Bearer {self._state.api_key}"),
            *("--header", "content-type: application/json", "--data", self.body().decode()),
        ]
        clients = [
            await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            for _ in range(NUM_STREAMS)
        ]
        for client in clients:
            assert client.stdout is not None
            await client.stdout.readuntil(b"data: ")
        left_s = time.perf_counter()
        for client in clients:
            client.kill()
        await asyncio.gather(*(client.wait() for client in clients))
        return left_s

    async def _call(self, channel: grpc.aio.Channel, timeout_s: float | None) -> Any:
        message = chat_pb2.Message(role=chat_pb2.ROLE_USER, content=PROMPT)
        request = inference_pb2.ChatRequest(
            model=self._state.model, conversation=chat_pb2.Conversation(messages=[message])
        )
        request.sampling.max_tokens = 1000
        request.sampling.ignore_eos = True
        metadata = (("authorization", f"Bearer {self._state.api_key}"),)
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        call = stub.Chat(request, metadata=metadata, timeout=timeout_s)
        await call.read()
        return call

    async def grpc_cancel(self) -> float:
        """Clients cancel their calls."""
        async with grpc.aio.insecure_channel(self._state.address) as channel:
            calls = await asyncio.gather(*(self._call(channel, None) for _ in range(NUM_STREAMS)))
            await asyncio.sleep(2 * self.step_s)
            left_s = time.perf_counter()
            for call in calls:
                call.cancel()
            return left_s

    async def grpc_deadline(self) -> float:
        """The deadlines of all calls pass."""
        async with grpc.aio.insecure_channel(self._state.address) as channel:
            # Set a little apart by the calls themselves; the last one counts.
            calls = await asyncio.gather(*(self._call(channel, 6 * self.step_s) for _ in range(NUM_STREAMS)))
            with contextlib.suppress(grpc.RpcError):
                while True:
                    if await calls[-1].read() is grpc.aio.EOF:  # type: ignore[attr-defined]
                        break
            return time.perf_counter()

    async def stop_string(self) -> float:
        """An answer meets its stop string; the moment is when its client reads so."""
        # Every letter is a stop string, so that the answer ends with its first token that has one.
        streams = await asyncio.gather(
            *(self._open(stop=list("eaionrtsl"), min_tokens=4) for _ in range(NUM_STREAMS))
        )
        await asyncio.gather(*(reader.readuntil(b'"finish_reason":"stop"') for reader, _ in streams))
        left_s = time.perf_counter()
        for _, writer in streams:
            writer.close()
        return left_s

    async def engine_free_s(self) -> float:
        """When the engine holds no request and no block."""
        async with grpc.aio.insecure_channel(self._engine) as channel:
            stub: Any = engine_pb2_grpc.EngineServiceStub(channel)
            while True:
                held = await stub.CheckInvariants(engine_pb2.CheckInvariantsRequest())
                if not held.ok:
                    raise SystemExit(held.violation)
                if not held.num_requests and held.num_unreferenced_blocks == held.num_total_blocks:
                    return time.perf_counter()

    async def reservations_free_s(self) -> float:
        """When the gateway holds no stream any more."""
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                exposed = (await client.get(f"http://{self._gateway}/metrics")).text
                open_ = [
                    line for line in exposed.splitlines() if line.startswith("millrace_active_requests{")
                ]
                if not sum(float(line.rsplit(" ", 1)[1]) for line in open_):
                    return time.perf_counter()


WAYS: dict[str, Way] = {
    "HTTP/1.1 disconnect": Clients.http1,
    "HTTP/2 disconnect": Clients.http2,
    "gRPC cancel": Clients.grpc_cancel,
    "gRPC deadline": Clients.grpc_deadline,
    "stop string": Clients.stop_string,
}


async def measure(clients: Clients, leave: Way, rounds: int) -> dict[str, list[float]]:
    """Milliseconds from leaving to free, for the engine and for the reservations."""
    times: dict[str, list[float]] = {"engine": [], "reservations": []}
    for _ in range(rounds):
        left_s = await leave(clients)
        engine_s, gateway_s = await asyncio.gather(clients.engine_free_s(), clients.reservations_free_s())
        times["engine"].append((engine_s - left_s) * 1000)
        times["reservations"].append((gateway_s - left_s) * 1000)
    return times


async def run(stack: RunningStack, rounds: int, step_ms: float) -> list[dict[str, Any]]:
    """Prints one line a way."""
    bound_ms = step_ms + MARGIN_MS
    print(
        f"{NUM_STREAMS} streams, steps of {step_ms:g} ms, bound {bound_ms:g} ms; median / longest of {rounds}"
    )
    print(f"{'way':22}{'engine, ms':>22}{'gateway, ms':>22}{'within bound':>14}")
    rows = []
    clients = Clients(stack, step_ms / 1000)
    for way, leave in WAYS.items():
        if leave is Clients.http2 and shutil.which("curl") is None:
            print(f"{way:22} skipped: curl is not installed")
            continue
        times = await measure(clients, leave, rounds)
        within = sum(
            max(pair) <= bound_ms for pair in zip(times["engine"], times["reservations"], strict=True)
        )
        cells = [f"{statistics.median(each):.0f} / {max(each):.0f}" for each in times.values()]
        print(f"{way:22}{cells[0]:>22}{cells[1]:>22}{within:>9} of {rounds}")
        rows.append({"way": way, "within_bound": within, **{f"{key}_ms": t for key, t in times.items()}})
    return rows


def main() -> None:
    """Prints the table, and writes it as JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--step-ms", type=float, default=100.0)
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    with running_stack(CONFIG % options.step_ms, "--simulated") as stack:
        rows = asyncio.run(run(stack, options.rounds, options.step_ms))
    bound = {"step_ms": options.step_ms, "bound_ms": options.step_ms + MARGIN_MS}
    write_result(options.json, {**bound, "streams": NUM_STREAMS, "rounds": options.rounds, "ways": rows})


if __name__ == "__main__":
    main()
