"""What one tenant learns of another's requests by the time of its own: nothing, is the aim.

Starts the whole stack with the bundled model. Before each probe a tenant sends either what is probed for or
something else of the same size, at random; then another tenant, or the same one, sends what is probed for and
looks at the time. How well the time tells the two apart is the area under the curve (Mann and Whitney): 0.5
is chance, 1 is certainty. Probed are the turns of a conversation, by /tokenize, and a schema, by a chat
request.

    python -m benchmarks.side_channels [--probes 600] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.neighbour.tenants import CONFIG, KEYS
from benchmarks.stack import RunningStack, running_stack, write_result
from services.bench.client import Client, Target
from services.bench.workload import PlannedRequest

# Enough text that it is encoded turn by turn, and few enough tokens that it could be asked about.
_TURNS, _WORDS = 12, 300
# What is asked for, by a number that makes it unlike all others.
Ask = Callable[[str, int], tuple[str, dict[str, Any]]]


def turns(model: str, number: int) -> tuple[str, dict[str, Any]]:
    """A history, to be tokenized."""
    words = random.Random(number)
    texts = [" ".join(f"w{words.randrange(10**6)}" for _ in range(_WORDS)) for _ in range(_TURNS)]
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return "/tokenize", {"model": model, "messages": messages}


def schema(model: str, number: int) -> tuple[str, dict[str, Any]]:
    """A chat request whose answer follows a schema."""
    properties = {
        f"p{number}_{at}": {"enum": [f"v{number}_{at}_{each}" for each in range(24)]} for at in range(55)
    }
    form = {"type": "object", "properties": properties, "additionalProperties": False}
    asked = {"name": "probe", "schema": form, "strict": False}
    return "/v1/chat/completions", {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "response_format": {"type": "json_schema", "json_schema": asked},
    }


CHANNELS: dict[str, Ask] = {"turns": turns, "schema": schema}


def area(hits: list[float], misses: list[float]) -> float:
    """Probability that a hit is quicker than a miss."""
    quicker = sum((hit < miss) + (hit == miss) / 2 for hit in hits for miss in misses)
    return quicker / (len(hits) * len(misses))


async def probe(stack: RunningStack, ask: Ask, victim: str, attacker: str, num_probes: int) -> dict[str, Any]:
    """The area, and the median times in milliseconds."""
    times: dict[bool, list[float]] = {True: [], False: []}
    numbers = iter(random.sample(range(10**9), 2 * num_probes))
    target = Target.parse(stack.url, "")
    clients = {name: Client(msgspec.structs.replace(target, api_key=key)) for name, key in KEYS.items()}

    async def send(tenant: str, number: int) -> float:
        path, body = ask(stack.state.model, number)
        content = msgspec.json.encode(body)
        request = PlannedRequest(index=number, start_s=0.0, tier="", path=path, body=content, prompt_tokens=0)
        record = await clients[tenant].run(request)
        if record.status != 200:
            raise SystemExit(f"{record.status}: {record.error}")
        return (record.end_s - record.start_s) * 1e3

    for at in range(num_probes):
        probed, other = next(numbers), next(numbers)
        # As many of both, in an order that nothing else follows.
        was_sent = random.Random(at // 2).random() < 0.5
        was_sent = was_sent if at % 2 else not was_sent
        await send(victim, probed if was_sent else other)
        times[was_sent].append(await send(attacker, probed))
    for client in clients.values():
        await client.close()
    return {
        "probes": num_probes,
        "area": round(area(times[True], times[False]), 3),
        "hit_ms": round(sorted(times[True])[len(times[True]) // 2], 2),
        "miss_ms": round(sorted(times[False])[len(times[False]) // 2], 2),
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--probes", type=int, default=600, help="of each kind")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    victim, attacker = KEYS
    rows: list[dict[str, Any]] = []
    print(f"{'channel':10} {'who probes':16} {'probes':>7} {'area':>7} {'hit ms':>8} {'miss ms':>8}")
    with running_stack(CONFIG) as stack:
        for name, ask in CHANNELS.items():
            for who, tenant in (("another tenant", attacker), ("the same", victim)):
                found = asyncio.run(probe(stack, ask, victim, tenant, options.probes))
                rows.append({"channel": name, "who": who, **found})
                print(
                    f"{name:10} {who:16} {found['probes']:7} {found['area']:7.3f} "
                    f"{found['hit_ms']:8.2f} {found['miss_ms']:8.2f}",
                    flush=True,
                )
    write_result(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
