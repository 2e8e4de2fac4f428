"""What hostile grammars of one tenant do to the Prepare calls of others: nothing, is the aim.

Starts the service, measures well-behaved tenants alone, then again while another tenant floods it with
grammars that run over every budget. Prints both beside each other.

    python benchmarks/tokenizer_isolation.py [--seconds 8] [--tenants 4] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
from millrace.common.v1 import chat_pb2, context_pb2
from millrace.tokenizer.v1 import tokenizer_pb2, tokenizer_pb2_grpc

from services.context import sign
from services.status import from_rpc_error

_ROOT = Path(__file__).resolve().parent.parent
_SECRET = "benchmark secret of at least 16"
# Calls of one well-behaved tenant, per second.
_RATE = 10.0


def context(tenant: str) -> context_pb2.SignedContext:
    """A signed context of one tenant."""
    who = context_pb2.RequestContext(
        request_id="bench", tenant=tenant, issued_unix_ms=round(time.time() * 1000)
    )
    return sign(who, _SECRET.encode())


def schema_format(schema: Any, *, strict: bool) -> chat_pb2.ResponseFormat:
    """A response format of a JSON schema."""
    return chat_pb2.ResponseFormat(
        json_schema=chat_pb2.JsonSchema(schema_json=json.dumps(schema), strict=strict)
    )


def good_request(tenant: str, number: int) -> tokenizer_pb2.PrepareRequest:
    """A short chat with a schema that nobody has sent before, so that the cache does not hide the workers."""
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 30},
            "kind": {"enum": ["sun", "rain", f"{tenant}-{number}"]},
            "place": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "kind"],
        "additionalProperties": False,
    }
    messages = [chat_pb2.Message(role=chat_pb2.ROLE_USER, content=f"What is the weather like? ({number})")]
    return tokenizer_pb2.PrepareRequest(
        context=context(tenant),
        conversation=chat_pb2.Conversation(messages=messages),
        response_format=schema_format(schema, strict=True),
    )


def hostile_requests(number: int) -> list[tokenizer_pb2.PrepareRequest]:
    """Deep nesting, doubling definitions, huge enumerations, large repetitions, endless references."""
    doubling: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/d{level + 1}", "type": "object"} for side in "ab"},
        }
        for level in range(40)
    }
    doubling["d40"] = {"type": "object", "minProperties": number}
    conjunction = [
        {"anyOf": [{"properties": {f"p{i}_{j}_{number}": {"type": "string"}}} for j in range(4)]}
        for i in range(12)
    ]
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "title": f"{number}"}}}
    nested = '{"items":' * 5000 + f"{number}"
    forms = [
        schema_format({"$ref": "#/$defs/d0", "$defs": doubling}, strict=False),
        schema_format({"allOf": conjunction}, strict=False),
        schema_format({"enum": [f"{number}-{each}" * 3 for each in range(30_000)]}, strict=False),
        chat_pb2.ResponseFormat(json_schema=chat_pb2.JsonSchema(schema_json=nested)),
        chat_pb2.ResponseFormat(regex=f"(.*a.{{60}}){{40}}{number}"),
        schema_format(loop, strict=True),
    ]
    return [
        tokenizer_pb2.PrepareRequest(context=context("hostile"), text="x", response_format=form)
        for form in forms
    ]


async def behave(stub: Any, tenant: str, seconds: float, latencies_ms: list[float], numbers: Any) -> None:
    """Calls at a steady rate; a late answer delays only the next call of the same tenant."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        start = time.perf_counter()
        await stub.Prepare(good_request(tenant, next(numbers)))
        elapsed = time.perf_counter() - start
        latencies_ms.append(elapsed * 1e3)
        await asyncio.sleep(max(0.0, 1 / _RATE - elapsed))


async def attack(target: str, rounds: list[list[tokenizer_pb2.PrepareRequest]], seconds: float) -> Any:
    """Six hostile requests at a time, without a pause; what became of them."""
    outcomes: Counter[str] = Counter()
    async with grpc.aio.insecure_channel(target) as channel:
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)

        async def one(request: tokenizer_pb2.PrepareRequest) -> None:
            request.context.CopyFrom(context("hostile"))
            try:
                await stub.Prepare(request)
                outcomes["accepted"] += 1
            except grpc.RpcError as error:
                failure = from_rpc_error(error)
                outcomes[f"{failure.reason} {failure.metadata.get('overrun', '')}".strip()] += 1

        async def all_rounds() -> None:
            for requests in itertools.cycle(rounds):
                await asyncio.gather(*map(one, requests))

        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(all_rounds(), seconds)
    return outcomes


def attacker(target: str, seconds: float, begin: Any, results: Any) -> None:
    """A process of its own: attackers sit elsewhere, and what they compute is not the service's matter."""
    os.nice(19)
    rounds = [hostile_requests(number) for number in range(1_000_000, 1_000_030)]
    results.put("ready")
    begin.wait()
    results.put(dict(asyncio.run(attack(target, rounds, seconds))))


async def phase(stub: Any, num_tenants: int, seconds: float, numbers: Any) -> list[float]:
    """Latencies of all well-behaved tenants over one phase, in milliseconds."""
    latencies_ms: list[float] = []
    await asyncio.gather(
        *(behave(stub, f"tenant-{index}", seconds, latencies_ms, numbers) for index in range(num_tenants))
    )
    return latencies_ms


def summary(latencies_ms: list[float]) -> dict[str, float]:
    """Calls and quantiles."""
    ordered = sorted(latencies_ms)
    return {
        "calls": len(ordered),
        **{
            name: round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2)
            for name, share in (("p50_ms", 0.5), ("p95_ms", 0.95), ("p99_ms", 0.99), ("max_ms", 1.0))
        },
    }


async def run(seconds: float, num_tenants: int) -> dict[str, Any]:
    """Both phases against a service of our own."""
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
    target = (await process.stdout.readline()).decode().partition("grpc=")[2].split()[0]
    numbers = itertools.count(1)
    processes = multiprocessing.get_context("spawn")
    begin, results = processes.Event(), processes.Queue()
    hostile = processes.Process(target=attacker, args=(target, seconds, begin, results))
    hostile.start()
    try:
        async with grpc.aio.insecure_channel(target) as channel:
            stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            await asyncio.to_thread(results.get)
            await phase(stub, num_tenants, 1.0, numbers)
            alone = await phase(stub, num_tenants, seconds, numbers)
            begin.set()
            attacked = await phase(stub, num_tenants, seconds, numbers)
            outcomes = await asyncio.to_thread(results.get)
    finally:
        hostile.terminate()
        process.terminate()
        await process.wait()
    return {"alone": summary(alone), "under attack": summary(attacked), "hostile": outcomes}


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0, help="length of each of the two phases")
    parser.add_argument("--tenants", type=int, default=4, help="well-behaved tenants")
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.seconds, arguments.tenants))
    print(f"{'Prepare of well-behaved tenants':34}{'alone':>10}{'under attack':>15}")
    for key in report["alone"]:
        print(f"{key:34}{report['alone'][key]:>10}{report['under attack'][key]:>15}")
    print("outcomes of hostile calls:", report["hostile"])
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
