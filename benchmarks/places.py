"""One tenant asks once for 64 answers of 1,500 tokens and holds every place; what does an equal tenant get?

Starts the whole stack with the bundled model. The first tenant asks for n = 64, or best_of = 64; once it
decodes, the second asks for 64 answers one by one, or for n = 64 as well. Told are the second's first token,
its tokens over the window that begins with it, and what share they are of all that the engine generated:
half, and a first token within 1 s, are the aims. Candidates of best_of are counted as generated when they
end; so what was generated is what steps computed, less prompts and what was computed again.

    python -m benchmarks.places [--seconds 12] [--json OUT]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.neighbour.tenants import CONFIG, KEYS
from benchmarks.stack import RunningStack, running_stack, write_result
from observability.emit import names
from services.supervisor.config import BUNDLED_MODEL

_PLACES, _TOKENS = 64, 1500
# From its first step to the second tenant's requests: all its answers are under way then.
_HEAD_START_S = 2.0
_POLL_S = 0.02


class _Answers:
    """What one tenant has got so far."""

    def __init__(self) -> None:
        self.num_tokens: dict[int, int] = {}
        self.first_s: float | None = None

    def total(self) -> int:
        return sum(self.num_tokens.values())


async def _ask(
    client: httpx.AsyncClient, tenant: str, asked: dict[str, Any], answers: _Answers, at: int
) -> None:
    """Until it is cancelled or has ended; a stream says with each event how many tokens it has had."""
    body = {"model": BUNDLED_MODEL.name, "prompt": f"Story {at} of {tenant}:", "max_tokens": _TOKENS}
    body |= {"ignore_eos": True, "temperature": 1.0, "stream": "best_of" not in asked, **asked}
    if body["stream"]:
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    headers = {"authorization": f"Bearer {KEYS[tenant]}"}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        if answer.status_code != httpx.codes.OK:
            raise SystemExit(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and (usage := json.loads(line[6:]).get("usage")):
                answers.num_tokens[at] = usage["completion_tokens"]
                answers.first_s = answers.first_s or time.perf_counter()


async def _read(stack: RunningStack, name: str, label: str = "") -> float:
    return await asyncio.to_thread(stack.counter, "engine", name, label)


async def _generated(stack: RunningStack) -> float:
    """Tokens that steps have sampled, of candidates that are under way too."""
    computed = await _read(stack, f"{names.STEP_TOKENS.name}_sum")
    prompts = await _read(stack, names.PROMPT_TOKENS_DONE.name, 'source="computed"')
    return computed - prompts - await _read(stack, names.RECOMPUTED.name)


async def _beside(
    stack: RunningStack, first: dict[str, Any], second: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """The figures of one pair: the second tenant asks `second` as often as it has to for as many answers."""
    equal, num_requests = _Answers(), _PLACES // second["n"]
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=120, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        tasks = [group.create_task(_ask(client, "attacker", first, _Answers(), 0))]
        while not await _read(stack, names.REQUESTS_RUNNING.name):
            await asyncio.sleep(_POLL_S)
        await asyncio.sleep(_HEAD_START_S)
        asked_s = time.perf_counter()
        tasks += [
            group.create_task(_ask(client, "neighbour", second, equal, at)) for at in range(num_requests)
        ]
        while equal.first_s is None:
            await asyncio.sleep(_POLL_S)
        begun = (await _generated(stack), equal.total())
        await asyncio.sleep(seconds)
        ended = (await _generated(stack), equal.total())
        for task in tasks:
            task.cancel()
    generated, its_own = (end - begin for begin, end in zip(begun, ended, strict=True))
    return {
        "first": json.dumps(first),
        "second": f"{num_requests} x {json.dumps(second)}",
        "ttft_s": round(equal.first_s - asked_s, 3),
        "tokens_s": round(its_own / seconds),
        "share": round(its_own / generated, 3),
    }


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of each window")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(
        f"{'first asks':18} {'second asks':18} {'first token s':>14} {'its tokens/s':>13} {'its share':>10}"
    )
    with running_stack(CONFIG) as stack:
        for first in ({"n": _PLACES}, {"best_of": _PLACES}):
            for second in ({"n": 1}, {"n": _PLACES}):
                row = asyncio.run(_beside(stack, first, second, options.seconds))
                rows.append(row)
                print(
                    f"{row['first']:18} {row['second']:18} {row['ttft_s']:14.3f} {row['tokens_s']:13} "
                    f"{row['share']:10.3f}",
                    flush=True,
                )
    write_result(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
