"""Three tiers at three and six times what a model can do: who is accepted, and what of it is kept?

`python -m benchmarks.door [--checkpoint DIR] [--loads 3,6] [--seconds 20] [--json OUT]`, or `--virtual`

Starts the whole stack (Envoy, gateway, tokenizer, an engine with a real model), measures what it can do, then
sends more at random moments: a tenth as gold, four as silver, half as bronze, from two equal tenants, of
which one has 120 clients and the other 50. Then the same again to one queue, first come, first served. Prints
per tier how many were accepted and how many of those met the tier's targets for the time to the first token
and per output token (goodput); the accepted tokens of the two tenants since the tier's door was full (to be
equal where both want more than half of what there is); and how often `Retry-After` was within a factor of two
of the time after which a request of the same tenant and tier was accepted. It is told in whole seconds, so a
truth below one second counts as one.

With --virtual the real scheduler serves the same load under a virtual clock: the same on every machine.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.engine.report import Row, publish
from benchmarks.engine.virtual import Arrival, Device, Served, percentile, poisson, simulate
from benchmarks.stack import RunningStack, running_stack
from engine.config import SchedulerConfig
from gateway.auth.directory import hash_key
from gateway.auth.secret import KEY_PREFIX
from services.bench.client import Client, Target
from services.bench.records import RequestRecord, Targets
from services.bench.run import choose_model
from services.bench.workload import PlannedRequest

# Tier: part of the load, priority, targets in milliseconds.
TIERS = {
    "gold": (0.1, 30, Targets(ttft_ms=2000, tpot_ms=400)),
    "silver": (0.4, 20, Targets(ttft_ms=4000, tpot_ms=800)),
    "bronze": (0.50, 10, Targets(ttft_ms=8000, tpot_ms=1600)),
}
CLIENTS = {"many": 120, "few": 50}
PROMPT_TOKENS = 128
COMPLETION_TOKENS = 160
MAX_NUM_SEQS = 16
# Requests that are sent at once to see what the engine can do.
CAPACITY_REQUESTS = 64
ONE_QUEUE, OURS = "one queue", "tiers"

_TENANTS = "".join(
    f"""[tenants.{name}]
tier = "gold"
allowed_tiers = ["silver", "bronze"]
[[keys.entries]]
id = "{name}-1"
tenant = "{name}"
hash = "{hash_key(KEY_PREFIX + name)}"
"""
    for name in CLIENTS
)
_ENGINE = f"""
[engine.scheduler]
max_num_seqs = {MAX_NUM_SEQS}
[gateway]
default_tier = "gold"
[gateway.ledger]
url = ""
{_TENANTS}
"""
CONFIGS = {
    ONE_QUEUE: _ENGINE + "".join(f"[tiers.{name}]\n" for name in TIERS),
    OURS: _ENGINE
    + "".join(
        f"[tiers.{name}]\npriority = {priority}\n"
        f"ttft_target_ms = {round(targets.ttft_ms or 0)}\ntpot_target_ms = {round(targets.tpot_ms or 0)}\n"
        for name, (_, priority, targets) in TIERS.items()
    ),
}


@dataclass(frozen=True)
class Asked:
    """One request, and what became of it."""

    tier: str
    tenant: str
    at_s: float
    accepted: bool
    # It met its targets.
    good: bool = False
    # Of its answer, also while it was not ended.
    tokens: int = 0
    ttft_s: float = math.inf
    retry_after_s: float | None = None


def arrivals(rate_per_s: float, seconds: float, seed: int = 0) -> list[tuple[float, str, str]]:
    """(moment, tier, tenant) of every request."""
    rng = random.Random(seed)
    shares = [share for share, _, _ in TIERS.values()]
    return [
        (
            at,
            rng.choices(list(TIERS), shares)[0],
            rng.choices(list(CLIENTS), list(CLIENTS.values()))[0],
        )
        for at in poisson(rng, rate_per_s, seconds)
    ]


def retry_ratios(asked: Sequence[Asked]) -> list[float]:
    """What refusals said over the time until a request of the same tenant and tier was accepted."""
    ratios = []
    for refused in asked:
        if refused.retry_after_s is None:
            continue
        later = (
            each.at_s - refused.at_s
            for each in asked
            if each.accepted
            and each.at_s > refused.at_s
            and (each.tier, each.tenant) == (refused.tier, refused.tenant)
        )
        truth_s = min(later, default=None)
        if truth_s is not None:
            ratios.append(max(1, math.ceil(refused.retry_after_s)) / max(1.0, truth_s))
    return ratios


def full_door_tokens(asked: Sequence[Asked]) -> dict[str, int]:
    """Tokens of accepted requests by tenant, from the first refusal on: until then there is room for all."""
    full_s = min((each.at_s for each in asked if not each.accepted), default=math.inf)
    later = [each for each in asked if each.accepted and each.at_s >= full_s]
    return {tenant: sum(each.tokens for each in later if each.tenant == tenant) for tenant in CLIENTS}


def rows_of(name: str, load: float, asked: Sequence[Asked]) -> list[Row]:
    """One row a tier."""
    rows: list[Row] = []
    for tier, (_, _, targets) in TIERS.items():
        mine = [each for each in asked if each.tier == tier]
        accepted = [each for each in mine if each.accepted]
        tokens = full_door_tokens(mine)
        ratios = retry_ratios(mine)
        near = sum(0.5 <= each <= 2.0 for each in ratios)
        rows.append(
            {
                "configuration": name,
                "load": load,
                "tier": tier,
                "target s": (targets.ttft_ms or 0) / 1000,
                "asked": len(mine),
                "accepted": len(accepted),
                "good": sum(each.good for each in accepted),
                "good of accepted %": 100 * sum(each.good for each in accepted) / max(1, len(accepted)),
                "TTFT p99 s": percentile([each.ttft_s for each in accepted], 0.99),
                "tokens many : few": tokens["many"] / tokens["few"] if tokens["few"] else "",
                "refused": len(mine) - len(accepted),
                "Retry-After within x2 %": 100 * near / len(ratios) if ratios else "",
                "longest Retry-After s": max((each.retry_after_s or 0.0 for each in mine), default=0.0),
            }
        )
    return rows


# Under a virtual clock.


def virtual(load: float, seconds: float, *, one_queue: bool = False) -> list[Asked]:
    """The load on a simulated device: 16 places, 6 ms a step and 0.1 ms a token."""
    device = Device(step_s=0.006, token_s=0.0001, num_blocks=4096)
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, step_target_ms=0.0)
    burst = [Arrival(0.0, PROMPT_TOKENS, COMPLETION_TOKENS, "gold") for _ in range(CAPACITY_REQUESTS)]
    capacity_per_s = CAPACITY_REQUESTS / simulate(burst, config, device).duration_s
    offered = []
    for at, tier, tenant in arrivals(load * capacity_per_s, seconds):
        _, priority, targets = TIERS[tier]
        limit_s = None if one_queue else (targets.ttft_ms or 0) / 1000
        offered.append(
            Arrival(
                at,
                PROMPT_TOKENS,
                COMPLETION_TOKENS,
                tier,
                "all" if one_queue else tenant,
                0 if one_queue else priority,
                limit_s,
                limit_s,
            )
        )
    served = simulate(offered, config, device).served
    tenants = [tenant for _, _, tenant in arrivals(load * capacity_per_s, seconds)]
    return [_of_virtual(each, tenant) for each, tenant in zip(served, tenants, strict=True)]


def _of_virtual(served: Served, tenant: str) -> Asked:
    tier, targets = served.arrival.kind, TIERS[served.arrival.kind][2]
    times = served.token_times_s
    tpot_s = (times[-1] - times[0]) / max(1, len(times) - 1) if times else math.inf
    in_time = served.ttft_s is not None and served.ttft_s * 1000 <= (targets.ttft_ms or 0)
    return Asked(
        tier=tier,
        tenant=tenant,
        at_s=served.arrival.at_s,
        accepted=served.accepted,
        good=in_time and tpot_s * 1000 <= (targets.tpot_ms or 0),
        tokens=len(times),
        ttft_s=served.ttft_s or math.inf,
        retry_after_s=served.retry_after_s,
    )


# On the real stack.


async def ask(client: Client, request: PlannedRequest, tenant: str, began_s: float) -> Asked:
    """Sends one request and says what became of it."""
    record = await client.run(request)
    told = re.search(r"try again in ([\d.]+) s", record.error) if record.status == 429 else None
    if record.status not in {0, 200} and told is None:
        raise SystemExit(f"neither an answer nor a refusal for now: {record.status} {record.error[:200]}")
    return Asked(
        tier=record.tier,
        tenant=tenant,
        at_s=record.start_s - began_s,
        accepted=told is None,
        good=record.ok and TIERS[record.tier][2].met(record),
        tokens=record.completion_tokens or len(record.chunk_times_s),
        ttft_s=record.ttft_s if record.chunk_times_s else math.inf,
        retry_after_s=float(told[1]) if told else None,
    )


def planned(index: int, at_s: float, tier: str, model: str) -> PlannedRequest:
    """A request whose prompt shares nothing with others."""
    rng = random.Random(index)
    body = {
        "model": model,
        "prompt": [rng.randrange(300, 2000) for _ in range(PROMPT_TOKENS)],
        "max_tokens": COMPLETION_TOKENS,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "service_tier": tier,
    }
    return PlannedRequest(
        index=index,
        start_s=at_s,
        tier=tier,
        path="/v1/completions",
        body=msgspec.json.encode(body),
        prompt_tokens=PROMPT_TOKENS,
    )


async def capacity(stack: RunningStack) -> float:
    """Requests a second that the stack answers when it always has some to do."""
    target = Target.parse(stack.url, stack.state.api_key)
    model = await choose_model(target, "")
    client, turn = Client(target), asyncio.Semaphore(MAX_NUM_SEQS)

    async def one(index: int) -> RequestRecord:
        async with turn:
            return await client.run(planned(index, 0.0, "", model))

    records = await asyncio.gather(*(one(10**6 + index) for index in range(CAPACITY_REQUESTS)))
    failed = [record for record in records if not record.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first one: {failed[0].error}")
    await client.close()
    return len(records) / (max(each.end_s for each in records) - min(each.start_s for each in records))


async def real(stack: RunningStack, rate_per_s: float, seconds: float, first_index: int) -> list[Asked]:
    """Sends the load; what has not ended twice the longest target after its start is late."""
    model = await choose_model(Target.parse(stack.url, stack.state.api_key), "")
    limit_s = 2 * max((targets.ttft_ms or 0) for _, _, targets in TIERS.values()) / 1000
    clients = {name: Client(Target.parse(stack.url, KEY_PREFIX + name), limit_s=limit_s) for name in CLIENTS}
    loop = asyncio.get_running_loop()
    began_s, began_loop_s, tasks = time.perf_counter(), loop.time(), []
    for index, (at, tier, tenant) in enumerate(arrivals(rate_per_s, seconds)):
        await asyncio.sleep(max(0.0, began_loop_s + at - loop.time()))
        request = planned(first_index + index, at, tier, model)
        tasks.append(asyncio.create_task(ask(clients[tenant], request, tenant, began_s)))
    asked = list(await asyncio.gather(*tasks))
    for client in clients.values():
        await client.close()
    return asked


def measure(checkpoint: Path | None, loads: Sequence[float], seconds: float) -> list[Row]:
    """Rows of both configurations at every load; the capacity is that of the first."""
    rows: list[Row] = []
    arguments = () if checkpoint is None else ("--model", str(checkpoint))
    able_per_s = 0.0
    for name in (OURS, ONE_QUEUE):
        with running_stack(CONFIGS[name], *arguments) as stack:
            able_per_s = able_per_s or asyncio.run(capacity(stack))
            for number, load in enumerate(loads if name == OURS else loads[:1]):
                asked = asyncio.run(real(stack, load * able_per_s, seconds, 10_000 * number))
                rows += rows_of(name, load, asked)
    print(f"capacity: {able_per_s:.2f} requests/s of {PROMPT_TOKENS} + {COMPLETION_TOKENS} tokens")
    return rows


def main() -> None:
    """Prints the table, and JSON with --json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--checkpoint", type=Path, help="a model in Hugging Face format; else the bundled one"
    )
    parser.add_argument("--loads", default="3,6", help="multiples of what the stack can do")
    parser.add_argument("--seconds", type=float, default=20.0, help="during which requests come")
    parser.add_argument("--virtual", action="store_true", help="the scheduler alone, under a virtual clock")
    parser.add_argument("--json", type=Path, help="write the result here too")
    options = parser.parse_args()
    loads = [float(text) for text in options.loads.split(",")]
    if options.virtual:
        title, rows = "The door (simulated device)", []
        for one_queue in (True, False):
            for load in loads:
                asked = virtual(load, options.seconds, one_queue=one_queue)
                rows += rows_of(ONE_QUEUE if one_queue else OURS, load, asked)
    else:
        title, rows = "The door", measure(options.checkpoint, loads, options.seconds)
    publish(title, rows, options.json)


if __name__ == "__main__":
    main()
