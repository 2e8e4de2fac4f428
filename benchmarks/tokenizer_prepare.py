"""What one Prepare call costs the service's processor: unary calls beside calls on one stream, in one run.

Starts the service and sends the same short chats over both, so many at a time; the service's own processor
time is read from the kernel.

    python benchmarks/tokenizer_prepare.py [--calls 3000] [--concurrency 32] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
from millrace.common.v1 import chat_pb2, context_pb2
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from services.context import sign

_ROOT = Path(__file__).resolve().parent.parent
_SECRET = "benchmark secret of at least 16"
_TICKS = os.sysconf("SC_CLK_TCK")


def request(number: int) -> tokenizer_pb2.PrepareRequest:
    """A short chat."""
    who = context_pb2.RequestContext(request_id="bench", tenant="t", issued_unix_ms=round(time.time() * 1000))
    messages = [
        chat_pb2.Message(role=chat_pb2.ROLE_SYSTEM, content="You are brief and helpful."),
        chat_pb2.Message(role=chat_pb2.ROLE_USER, content=f"What is the weather in Zurich? ({number})"),
    ]
    return tokenizer_pb2.PrepareRequest(
        context=sign(who, _SECRET.encode()), conversation=chat_pb2.Conversation(messages=messages)
    )


def processor_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


async def unary(stub: Any, requests: list[Any], concurrency: int) -> None:
    """One call each."""
    numbers = iter(requests)

    async def worker() -> None:
        for each in numbers:
            await stub.Prepare(each)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


async def streamed(stub: Any, requests: list[Any], concurrency: int) -> None:
    """All on one stream; each answer makes room for the next request."""
    stream = stub.PrepareStream()
    numbers = iter(enumerate(requests))

    def calls(count: int) -> list[tokenizer_pb2.PrepareCall]:
        found = zip(range(count), numbers, strict=False)
        return [tokenizer_pb2.PrepareCall(id=number, request=each) for _, (number, each) in found]

    await stream.write(tokenizer_pb2.PrepareStreamRequest(calls=calls(concurrency)))
    num_answered = 0
    while num_answered < len(requests):
        answers = (await stream.read()).answers
        if any(each.HasField("error") for each in answers):
            raise RuntimeError(str(answers))
        num_answered += len(answers)
        if more := calls(len(answers)):
            await stream.write(tokenizer_pb2.PrepareStreamRequest(calls=more))
    await stream.done_writing()


async def run(num_calls: int, concurrency: int) -> dict[str, dict[str, float]]:
    """Both ways, in turn, three times; the best of each."""
    environment = {
        **os.environ,
        "MILLRACE_SECURITY__CONTEXT_SECRET": _SECRET,
        "MILLRACE_TOKENIZER__LISTEN": "127.0.0.1:0",
        "MILLRACE_MODEL__PATH": str(_ROOT / "models" / "millrace-nano"),
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tokenizer_svc", env=environment, stdout=asyncio.subprocess.PIPE, cwd=_ROOT
    )
    assert process.stdout is not None
    ready = (await process.stdout.readline()).decode()
    ways: dict[str, Callable[[Any, list[Any], int], Awaitable[None]]] = {
        "unary": unary, "stream": streamed,
    }  # fmt: skip
    found: dict[str, dict[str, float]] = {}
    try:
        async with grpc.aio.insecure_channel(ready.partition("grpc=")[2].split()[0]) as channel:
            stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            await unary(stub, [request(number) for number in range(200)], concurrency)
            for _ in range(3):
                for name, way in ways.items():
                    requests = [request(number) for number in range(num_calls)]
                    processor, start = processor_s(process.pid), time.perf_counter()
                    await way(stub, requests, concurrency)
                    used = processor_s(process.pid) - processor
                    figures = {
                        "service_us_per_call": round(used / num_calls * 1e6, 1),
                        "calls_per_s": round(num_calls / (time.perf_counter() - start)),
                    }
                    best = found.setdefault(name, figures)
                    if figures["service_us_per_call"] < best["service_us_per_call"]:
                        found[name] = figures
    finally:
        process.terminate()
        await process.wait()
    return found


def main() -> int:
    """Prints both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    found = asyncio.run(run(arguments.calls, arguments.concurrency))
    print(f"{'':8}{'service, us a call':>20}{'calls/s':>10}")
    for name, figures in found.items():
        print(f"{name:8}{figures['service_us_per_call']:>20}{figures['calls_per_s']:>10}")
    if arguments.json:
        report = {"calls": arguments.calls, "concurrency": arguments.concurrency, "ways": found}
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
