"""Engines of several ranks lose one of them, or are told to end, under running streams: every answer is whole
and the same, and no rank stays behind.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import psutil

from tests.chaos.streams import Answer, ask, connected, first_of, numbers
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, Stack, eventually, running_stack

NUM_ANSWERS = 8
NUM_NUMBERS = 120
# Of the bundled model; some answers have none.
ADAPTERS = ("", "pirate", "entries")
_RANKS = """
[engine]
num_threads = 2
[engine.parallel]
tensor = 2
"""


def last_rank(stack: Stack, name: str) -> psutil.Process:
    """The process of an engine that follows another one."""
    children = psutil.Process(stack.pid(name)).children(recursive=True)
    (found,) = [each for each in children if "engine.runner.ranks.worker" in each.cmdline()]
    return found


async def answers(stack: Stack, *endings: tuple[str, signal.Signals]) -> list[Answer]:
    """All answers, in whose course engines lose a rank (SIGKILL) or are told to end (SIGTERM)."""
    async with connected(stack) as client:
        begun = [asyncio.Event() for _ in range(NUM_ANSWERS)]
        options = {**numbers(NUM_NUMBERS, 1200), "temperature": 0.7, "logprobs": True}
        asked = [
            asyncio.ensure_future(
                ask(
                    *(client, stack, f"Count to {number}.", event),
                    adapter=ADAPTERS[number % len(ADAPTERS)],
                    seed=number,
                    **options,
                )
            )
            for number, event in enumerate(begun)
        ]
        await first_of(begun)
        for name, number in endings:
            rank, back = last_rank(stack, name), f"{name} is ready again"
            os.kill(rank.pid if number == signal.SIGKILL else stack.pid(name), number)
            assert await asyncio.to_thread(eventually, lambda back=back: back in stack.output.read_text()), (
                stack.transcript()
            )
            assert not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE
        return await asyncio.gather(*asked)


@needs_weights
def test_what_was_under_way_is_answered_elsewhere(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--engines", "2", config=CONFIG + _RANKS) as stack:
        undisturbed = asyncio.run(answers(stack))
        assert {answer.finish_reason for answer in undisturbed} == {"stop"}
        assert len({answer.text for answer in undisturbed}) == NUM_ANSWERS
        endings = ("engine-0", signal.SIGKILL), ("engine-1", signal.SIGTERM)
        assert asyncio.run(answers(stack, *endings)) == undisturbed
        (address,) = stack.addresses("gateway", "metrics")
        exposed = httpx.get(f"http://{address}/metrics", trust_env=False).text
        assert 'millrace_resubmissions_total{outcome="continued"}' in exposed
        stack.assert_nothing_leaked()
