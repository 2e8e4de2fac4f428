"""Three tiers at three and six times what a model can do: who is accepted, and what of it is kept?

`python -m benchmarks.door [--checkpoint DIR] [--loads 3,6] [--seconds 20] [--json OUT]`, or `--virtual`

Starts the whole stack (Envoy, gateway, tokenizer, an engine with a real model), measures what it can do, and
has clients ask for more: two equal tenants, of which one has 120 clients and the other 50; a tenth of each is
gold, four tenths are silver, half is bronze. A client's requests come up at random moments; it sends one
after the other, and comes back as told when it was refused, every second client in whole seconds. Then the
same loads again with one queue, first come, first served.

Prints per tier how many requests were accepted and how many of those met the tier's targets for the time to
the first token and per output token (goodput); the accepted tokens of the two tenants since the tier's door
was full (to be equal where both want more than half of what there is); and of `Retry-After` how often it was
within a factor of two of the time until it was the request's turn, and how often a request was accepted when
it was back as told. Its turn is when as many of its tenant and tier were accepted as had been refused before
it and still waited, and one more. A truth below one second counts as one: whole seconds are told.

At six times the load little is left for the tiers below the top: two tenants that were accepted sixty
requests each and differ by six differ by 10 %, and that difference does not grow with time. So runs that show
the aims take minutes (--seconds 160).

With --virtual the real scheduler serves such loads (--seeds) in virtual time: the same on every machine. The
device is a fast one, whose answers take a second, or one as slow as two cores (--device slow), whose answers
take four: there a run must be as many times longer to show the same.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.engine.report import Row, options, percentile, publish
from benchmarks.engine.virtual import Arrival, Device, Served, poisson, simulate
from benchmarks.stack import RunningStack, running_stack
from engine.config import SchedulerConfig
from gateway.auth.directory import hash_key
from gateway.auth.secret import KEY_PREFIX
from services.bench.client import BenchTarget, Client
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
class ClientPlan:
    """One client, and the moments at which its requests come up; it has one of them under way at a time."""

    tenant: str
    tier: str
    # It reads Retry-After in whole seconds, as most do, and not retry-after-ms.
    whole_seconds: bool
    moments_s: tuple[float, ...]

    def told_s(self, retry_after_s: float) -> float:
        """How long it stays away."""
        return max(1.0, math.ceil(retry_after_s)) if self.whole_seconds else retry_after_s


@dataclass(frozen=True)
class Asked:
    """One attempt at a request, and what became of it."""

    tier: str
    tenant: str
    at_s: float
    accepted: bool
    # Number of the request, and when it was first attempted.
    request: int = 0
    first_s: float = 0.0
    # It met its targets.
    good: bool = False
    # Of its answer, also while it was not ended.
    tokens: int = 0
    ttft_s: float = math.inf
    retry_after_s: float | None = None


def clients(rate_per_s: float, seconds: float, seed: int = 0) -> list[ClientPlan]:
    """Every tenant's clients, each tier's share of them, with their parts of the load."""
    rng, total = random.Random(seed), sum(CLIENTS.values())
    return [
        ClientPlan(tenant, tier, index % 2 == 0, tuple(poisson(rng, rate_per_s / total, seconds)))
        for tenant, count in CLIENTS.items()
        for tier, (share, _, _) in TIERS.items()
        for index in range(round(share * count))
    ]


def number_of(client: int, index: int) -> int:
    """Of a client's request: no two have the same, and it is the seed of the prompt."""
    return client * 10_000 + index


def retry_ratios(asked: Sequence[Asked], end_s: float) -> list[float]:
    """What refusals said over the time until it was their turn: until as many requests of the same tenant and
    tier had been accepted as had been refused before and still waited, and one more. Where that was not by
    the end, what is twice overdue was told too little (0), and nothing is known of the rest.
    """
    ratios = []
    for key in {(each.tier, each.tenant) for each in asked}:
        mine = [each for each in asked if (each.tier, each.tenant) == key]
        accepted_s = {each.request: each.at_s for each in mine if each.accepted}
        in_turn_s, refused = sorted(accepted_s.values()), [each for each in mine if not each.accepted]
        for each in refused:
            before = {
                other.request for other in refused if other.first_s < each.first_s and other.at_s <= each.at_s
            }
            num_before = sum(accepted_s.get(request, math.inf) > each.at_s for request in before)
            turn = bisect_right(in_turn_s, each.at_s) + num_before
            told_s = max(1.0, math.ceil(each.retry_after_s or 0.0))
            if turn < len(in_turn_s):
                ratios.append(told_s / max(1.0, in_turn_s[turn] - each.at_s))
            elif end_s - each.at_s > 2.0 * told_s:
                ratios.append(0.0)
    return ratios


def kept_ratio(asked: Sequence[Asked], end_s: float) -> float:
    """Share of refusals whose request was accepted when back as told, of those told to be by the end."""
    accepted_s = {each.request: each.at_s for each in asked if each.accepted}
    back = [
        accepted_s.get(each.request, math.inf) - each.at_s <= told_s
        for each in asked
        if not each.accepted and each.at_s + (told_s := 1.5 + (each.retry_after_s or 0.0)) < end_s
    ]
    return sum(back) / len(back) if back else 1.0


def full_door_tokens(asked: Sequence[Asked]) -> dict[str, int]:
    """Tokens of accepted requests by tenant, from the first refusal on, if any: until then all have room."""
    full_s = min((each.at_s for each in asked if not each.accepted), default=0.0)
    later = [each for each in asked if each.accepted and each.at_s >= full_s]
    return {tenant: sum(each.tokens for each in later if each.tenant == tenant) for tenant in CLIENTS}


def rows_of(name: str, load: float, asked: Sequence[Asked], end_s: float) -> list[Row]:
    """One row a tier."""
    rows: list[Row] = []
    for tier, (_, _, targets) in TIERS.items():
        mine = [each for each in asked if each.tier == tier]
        accepted = [each for each in mine if each.accepted]
        tokens = full_door_tokens(mine)
        ratios = retry_ratios(mine, end_s)
        near = sum(0.5 <= each <= 2.0 for each in ratios)
        rows.append(
            {
                "configuration": name,
                "load": load,
                "tier": tier,
                "target s": (targets.ttft_ms or 0) / 1000,
                "requests": len({each.request for each in mine}),
                "accepted": len(accepted),
                "good": sum(each.good for each in accepted),
                "good of accepted %": 100 * sum(each.good for each in accepted) / max(1, len(accepted)),
                "TTFT p99 s": percentile([each.ttft_s for each in accepted], 0.99),
                "tokens many": tokens["many"],
                "tokens few": tokens["few"],
                "many : few": tokens["many"] / tokens["few"] if tokens["few"] else "",
                "refusals": len(mine) - len(accepted),
                "Retry-After within x2 %": 100 * near / len(ratios) if ratios else "",
                "accepted when back %": 100 * kept_ratio(mine, end_s) if ratios else "",
                "longest Retry-After s": max((each.retry_after_s or 0.0 for each in mine), default=0.0),
            }
        )
    return rows


# Under a virtual clock.


DEVICES = {
    "fast": Device(step_s=0.006, token_s=0.0001, num_blocks=4096),
    "slow": Device(step_s=0.020, token_s=0.0003, num_blocks=4096),
}


def virtual(
    load: float, seconds: float, *, device: Device = DEVICES["fast"], one_queue: bool = False, seed: int = 0
) -> list[Asked]:
    """The load on a simulated device with 16 places."""
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, step_target_ms=0.0)
    burst = [Arrival(0.0, PROMPT_TOKENS, COMPLETION_TOKENS, "gold") for _ in range(CAPACITY_REQUESTS)]
    capacity_per_s = CAPACITY_REQUESTS / simulate(burst, config, device).duration_s
    plans = clients(load * capacity_per_s, seconds, seed)
    first_s: dict[int, float] = {}

    def attempt(number: int, at_s: float) -> list[Arrival]:
        client, index = divmod(number, 10_000)
        plan = plans[client]
        if index >= len(plan.moments_s) or max(at_s, plan.moments_s[index]) >= seconds:
            return []
        limit_s = None if one_queue else (TIERS[plan.tier][2].ttft_ms or 0) / 1000
        first_s.setdefault(number, max(at_s, plan.moments_s[index]))
        return [
            Arrival(
                max(at_s, plan.moments_s[index]),
                PROMPT_TOKENS,
                COMPLETION_TOKENS,
                plan.tier,
                "all" if one_queue else plan.tenant,
                0 if one_queue else TIERS[plan.tier][1],
                limit_s,
                limit_s,
                prompt=number,
            )
        ]

    def follows(one: Served) -> list[Arrival]:
        number = one.arrival.prompt or 0
        if one.accepted or one.retry_after_s is None:
            return attempt(number + 1, one.ended_s)
        return attempt(number, one.ended_s + plans[number // 10_000].told_s(one.retry_after_s))

    offered = [arrival for client in range(len(plans)) for arrival in attempt(number_of(client, 0), 0.0)]
    return [
        _of_virtual(each, plans[(each.arrival.prompt or 0) // 10_000].tenant, first_s)
        for each in simulate(offered, config, device, follows=follows).served
    ]


def _of_virtual(served: Served, tenant: str, first_s: dict[int, float]) -> Asked:
    tier, targets = served.arrival.kind, TIERS[served.arrival.kind][2]
    times = served.token_times_s
    tpot_s = (times[-1] - times[0]) / max(1, len(times) - 1) if times else math.inf
    in_time = served.ttft_s is not None and served.ttft_s * 1000 <= (targets.ttft_ms or 0)
    return Asked(
        tier=tier,
        tenant=tenant,
        at_s=served.arrival.at_s,
        accepted=served.accepted,
        request=served.arrival.prompt or 0,
        first_s=first_s[served.arrival.prompt or 0],
        good=in_time and tpot_s * 1000 <= (targets.tpot_ms or 0),
        tokens=len(times),
        ttft_s=served.ttft_s or math.inf,
        retry_after_s=served.retry_after_s,
    )


# On the real stack.


async def ask(client: Client, request: PlannedRequest, tenant: str, began_s: float, first_s: float) -> Asked:
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
        request=request.index,
        first_s=first_s or record.start_s - began_s,
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
    target = BenchTarget.parse(stack.url, stack.state.api_key)
    model = await choose_model(target, "")
    client, turn = Client(target), asyncio.Semaphore(MAX_NUM_SEQS)

    async def one(index: int) -> RequestRecord:
        async with turn:
            return await client.run(planned(index, 0.0, "", model))

    records = await asyncio.gather(*(one(10**7 + index) for index in range(CAPACITY_REQUESTS)))
    failed = [record for record in records if not record.ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first one: {failed[0].error}")
    await client.close()
    return len(records) / (max(each.end_s for each in records) - min(each.start_s for each in records))


async def real(stack: RunningStack, rate_per_s: float, seconds: float, seed: int) -> list[Asked]:
    """Sends the load; what has not ended twice the longest target after its start is late."""
    model = await choose_model(BenchTarget.parse(stack.url, stack.state.api_key), "")
    limit_s = 2 * max((targets.ttft_ms or 0) for _, _, targets in TIERS.values()) / 1000
    pools = {
        name: Client(BenchTarget.parse(stack.url, KEY_PREFIX + name), limit_s=limit_s) for name in CLIENTS
    }
    plans, asked = clients(rate_per_s, seconds, seed), list[Asked]()
    loop = asyncio.get_running_loop()
    began_s, began_loop_s = time.perf_counter(), loop.time()

    async def serve(client: int, plan: ClientPlan) -> None:
        for index, moment_s in enumerate(plan.moments_s):
            at_s, first_s = max(moment_s, loop.time() - began_loop_s), 0.0
            request = planned(seed * 10**8 + number_of(client, index), at_s, plan.tier, model)
            while True:
                if at_s >= seconds:
                    return
                await asyncio.sleep(began_loop_s + at_s - loop.time())
                attempt = await ask(pools[plan.tenant], request, plan.tenant, began_s, first_s)
                asked.append(attempt)
                if attempt.retry_after_s is None:
                    break
                first_s = attempt.first_s
                at_s = loop.time() - began_loop_s + plan.told_s(attempt.retry_after_s)

    await asyncio.gather(*(serve(client, plan) for client, plan in enumerate(plans)))
    for pool in pools.values():
        await pool.close()
    return asked


def measure(checkpoint: Path | None, loads: Sequence[float], seconds: float) -> list[Row]:
    """Rows of both configurations at every load; the capacity is that of the first."""
    rows: list[Row] = []
    arguments = () if checkpoint is None else ("--model", str(checkpoint))
    able_per_s = 0.0
    for name in (OURS, ONE_QUEUE):
        with running_stack(CONFIGS[name], *arguments) as stack:
            able_per_s = able_per_s or asyncio.run(capacity(stack))
            for number, load in enumerate(loads):
                asked = asyncio.run(real(stack, load * able_per_s, seconds, number))
                rows += rows_of(name, load, asked, seconds)
    print(f"capacity: {able_per_s:.2f} requests/s of {PROMPT_TOKENS} + {COMPLETION_TOKENS} tokens")
    return rows


def main() -> None:
    """Prints the table, and JSON with --json."""
    parser = options(__doc__)
    parser.add_argument(
        "--checkpoint", type=Path, help="a model in Hugging Face format; else the bundled one"
    )
    parser.add_argument("--loads", default="3,6", help="multiples of what the stack can do")
    parser.add_argument("--seconds", type=float, default=20.0, help="during which requests come")
    parser.add_argument("--virtual", action="store_true", help="the scheduler alone, under a virtual clock")
    parser.add_argument("--device", choices=sorted(DEVICES), default="fast", help="with --virtual")
    parser.add_argument("--seeds", type=int, default=1, help="with --virtual: so many different loads")
    chosen = parser.parse_args()
    loads = [float(text) for text in chosen.loads.split(",")]
    if chosen.virtual:
        title, rows, device = f"The door ({chosen.device} simulated device)", [], DEVICES[chosen.device]
        for one_queue, load, seed in itertools.product((True, False), loads, range(chosen.seeds)):
            asked = virtual(load, chosen.seconds, device=device, one_queue=one_queue, seed=seed)
            found = rows_of(ONE_QUEUE if one_queue else OURS, load, asked, chosen.seconds)
            rows += [{"seed": seed, **row} for row in found]
    else:
        title, rows = "The door", measure(chosen.checkpoint, loads, chosen.seconds)
    publish(title, rows, chosen.json)


if __name__ == "__main__":
    main()
