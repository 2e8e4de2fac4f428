"""What many short texts of one request cost the gateway, beside as many requests of one text.

    python -m benchmarks.many_texts [--texts 1024] [--tokens 5] [--rounds 5] [--json FILE]

The gateway runs alone in this process, whose processor time is told. Client, tokenizer service and engine are
scripted, answer at once, and run in another process. On the second line every text is a request of its
own, 64 at a time: what a gateway pays that has no way for texts to travel together.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import msgspec
from millrace.tokenizer.v1 import tokenizer_pb2_grpc

from gateway.app import Gateway
from gateway.faces.error_forms import ERROR_FORMS
from gateway.settings import load_settings
from observability.emit import tracing
from observability.emit.config import ObservabilityConfig
from observability.emit.metrics import Metrics
from runtime.context import CONTEXT_HEADER
from runtime.server import GrpcServer
from tests.unit.gateway.rig import deployment
from tests.unit.gateway.rig.pooling import PoolingEngine, PoolingTokenizer

AT_A_TIME = 64


async def _others(pipe: Connection) -> None:
    """Everybody but the gateway; asks as the pipe says, and tells how long each round took."""
    tokenizer = GrpcServer("127.0.0.1:0")
    tokenizer.add(
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server,
        PoolingTokenizer(),
        "millrace.tokenizer.v1.TokenizerService",
    )
    await tokenizer.start()
    await tokenizer.set_serving(True)
    engine = await deployment.serve_engine(PoolingEngine())
    pipe.send((tokenizer.port, engine.port))
    loop = asyncio.get_running_loop()
    url = await loop.run_in_executor(None, pipe.recv)
    context = {CONTEXT_HEADER: deployment.signed_context()}
    limits = httpx.Limits(max_connections=AT_A_TIME)
    async with httpx.AsyncClient(base_url=url, headers=context, timeout=120, limits=limits) as client:
        while inputs := await loop.run_in_executor(None, pipe.recv):
            started_s = time.monotonic()
            left = iter(inputs)
            await asyncio.gather(*(_ask(client, left) for _ in range(min(AT_A_TIME, len(inputs)))))
            pipe.send(time.monotonic() - started_s)
    await tokenizer.stop(0)
    await engine.stop(0)


async def _ask(client: httpx.AsyncClient, left: Any) -> None:
    for given in left:
        answer = await client.post("/v1/embeddings", json={"model": "tiny", "input": given})
        answer.raise_for_status()


def _child(pipe: Connection) -> None:
    asyncio.run(_others(pipe))


async def measure(texts: list[str], num_rounds: int, pipe: Connection) -> dict[str, dict[str, float]]:
    """Milliseconds of the gateway's processor and of the clock, the median of the rounds."""
    ports = [cast("GrpcServer", SimpleNamespace(port=port)) for port in pipe.recv()]
    settings = load_settings(deployment.tables_of(ports[0], ports[1:], {}))
    telemetry = tracing.Telemetry("gateway", ObservabilityConfig(), None)
    gateway = Gateway(settings, telemetry, Metrics(), ERROR_FORMS)
    await gateway.start()
    loop, found = asyncio.get_running_loop(), {}
    try:
        await gateway.wait_ready()
        pipe.send(f"http://127.0.0.1:{gateway.http.port}")
        ways: dict[str, list[Any]] = {"in one request": [texts], "in one request each": list(texts)}
        for name, inputs in ways.items():
            rounds = []
            # The first one warms up.
            for _ in range(num_rounds + 1):
                began_s = time.process_time()
                pipe.send(inputs)
                seconds = await loop.run_in_executor(None, pipe.recv)
                rounds.append((time.process_time() - began_s, seconds))
            processor_s, clock_s = (statistics.median(each) for each in zip(*rounds[1:], strict=True))
            found[name] = {"processor_ms": processor_s * 1000, "clock_ms": clock_s * 1000}
        pipe.send(None)
    finally:
        await gateway.stop()
    return found


def main() -> int:
    """Prints a line for each way, and writes JSON where it is asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=5, help="of each text; the rig's tokens are characters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_child, args=(there,))
    process.start()
    texts = [f"{index:0{options.tokens}}"[-options.tokens :] for index in range(options.texts)]
    found = asyncio.run(measure(texts, options.rounds, here))
    process.join()
    for name, figures in found.items():
        each_us = figures["processor_ms"] * 1000 / options.texts
        print(f"{name:20} {figures['processor_ms']:9.1f} ms of processor {each_us:8.1f} us a text", end="")
        print(f" {figures['clock_ms']:9.1f} ms")
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode({"texts": options.texts, **found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
