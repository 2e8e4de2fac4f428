"""Interactive chats alone and beside the batches of two tenants, in turns on one stack."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time

import httpx
from sqlalchemy import create_engine, func, select

from benchmarks.batches.lines import URL, begun, read
from benchmarks.engine.report import percentile
from benchmarks.stack import RunningStack, running_stack
from gateway.ledger.tables import REQUESTS

# Tokens of an answer by tenant, whose weights are equal: shares are of work, not of lines.
TENANTS = {"brief": 16, "lengthy": 48}
CHAT_TOKENS = 32
_TURNS = 2
_WARM_S = 8.0
# Until the ledger has what ended before.
_LEDGER_S = 1.0
_CONFIG = """
[tiers.interactive]
priority = 20
ttft_target_ms = 500
[tiers.batch]
priority = 0
[gateway]
default_tier = "interactive"
"""
_TENANT = """
[tenants.{tenant}]
[[keys.entries]]
id = "{tenant}-1"
tenant = "{tenant}"
hash = "sha256:{hash}"
"""


def _key(tenant: str) -> str:
    return f"mr-batches-of-{tenant}"


def _config() -> str:
    entries = [
        _TENANT.format(tenant=each, hash=hashlib.sha256(_key(each).encode()).hexdigest()) for each in TENANTS
    ]
    return _CONFIG + "".join(entries)


async def run(num_lines: int, rate: float, seconds: float) -> dict[str, object]:
    """The figures; `num_lines` are those of both batches."""
    with running_stack(_config()) as stack:
        async with _client(stack, stack.state.api_key) as chatting:
            return await _measured(stack, chatting, num_lines, rate, seconds / _TURNS)


def _client(stack: RunningStack, key: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=stack.url, headers=headers, timeout=120, trust_env=False)


async def _measured(
    stack: RunningStack, chatting: httpx.AsyncClient, num_lines: int, rate: float, turn_s: float
) -> dict[str, object]:
    model, draw = stack.state.model, random.Random(0)
    await _chats(chatting, model, rate, _WARM_S, draw)
    alone: list[float] = []
    together: list[float] = []
    shares: list[float] = []
    num_done, took_s = 0, 0.0
    for _ in range(_TURNS):
        alone += await _chats(chatting, model, rate, turn_s, draw)
        async with _client(stack, _key("brief")) as brief, _client(stack, _key("lengthy")) as lengthy:
            half = num_lines // 2 // _TURNS
            paths = {
                client: await begun(client, model, half, TENANTS[tenant])
                for client, tenant in ((brief, "brief"), (lengthy, "lengthy"))
            }
            await _chats(chatting, model, rate, _WARM_S, draw)
            before, began_s = await _done(paths), time.monotonic()
            since_ms = round(time.time() * 1000)
            together += await _chats(chatting, model, rate, turn_s, draw)
            until_ms = round(time.time() * 1000)
            num_done += await _done(paths) - before
            took_s += time.monotonic() - began_s
            left = [await _left(client, path) for client, path in paths.items()]
            for client, path in paths.items():
                await client.post(f"{path}/cancel")
        await asyncio.sleep(_LEDGER_S)
        if min(left) > 0:
            # With nothing left of one, the other has it all.
            shares.append(_share(stack, since_ms, until_ms))
    return {
        **_percentiles("alone", alone),
        **_percentiles("beside", together),
        "ttft_p99_ratio": round(percentile(together, 0.99) / percentile(alone, 0.99), 3),
        "chats": len(together),
        "lines_per_s": round(num_done / took_s, 2),
        "lines_done": num_done,
        "share_of_brief_tenant": ", ".join(map(str, shares)) or "one of the batches ended: give more --lines",
    }


async def _done(paths: dict[httpx.AsyncClient, str]) -> int:
    batches = [await read(client, path) for client, path in paths.items()]
    return sum(int(each["request_counts"]["completed"]) for each in batches)


async def _left(client: httpx.AsyncClient, path: str) -> int:
    counts = (await read(client, path))["request_counts"]
    return int(counts["total"]) - int(counts["completed"]) - int(counts["failed"])


async def _chats(
    client: httpx.AsyncClient, model: str, rate: float, seconds: float, draw: random.Random
) -> list[float]:
    """Seconds to the first token of each chat that was sent meanwhile, in a Poisson process."""
    found: list[float] = []

    async def one(number: int) -> None:
        body = {
            "model": model,
            "stream": True,
            "max_tokens": CHAT_TOKENS,
            "messages": [{"role": "user", "content": f"Hello, {number}!"}],
        }
        sent_s = time.monotonic()
        async with client.stream("POST", URL, json=body) as answer:
            answer.raise_for_status()
            first_s = 0.0
            async for text in answer.aiter_lines():
                if not first_s and text.startswith("data: {"):
                    first_s = time.monotonic() - sent_s
        found.append(first_s)

    running, ends_s = [], time.monotonic() + seconds
    while time.monotonic() < ends_s:
        running.append(asyncio.create_task(one(draw.randrange(10**9))))
        await asyncio.sleep(draw.expovariate(rate))
    await asyncio.gather(*running)
    return found


def _percentiles(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_ttft_p{each}_ms": round(percentile(seconds, each / 100) * 1000, 1) for each in (50, 99)}


def _share(stack: RunningStack, since_ms: int, until_ms: int) -> float:
    """Of the tokens of lines that ended meanwhile, what the tenant with short answers got; half is fair."""
    columns = REQUESTS.c
    tokens = func.sum(columns.prompt_tokens + columns.completion_tokens)
    query = (
        select(columns.tenant, tokens)
        .where(columns.ended_unix_ms.between(since_ms, until_ms), columns.tenant.in_(TENANTS))
        .group_by(columns.tenant)
    )
    ledger = create_engine(stack.ledger_url)
    with ledger.connect() as connection:
        served = {tenant: int(total) for tenant, total in connection.execute(query)}
    ledger.dispose()
    return round(served.get("brief", 0) / max(1, sum(served.values())), 4)
