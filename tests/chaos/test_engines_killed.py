"""Engines die by SIGKILL, or stand still by SIGSTOP, under running streams: every accepted stream completes,
byte for byte the same, and the limits have back what was held for them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chaos.limits import assert_limits_are_whole, held, limited
from tests.chaos.streams import Answer, ask, assert_numbers, connected, first_of, numbers, plain
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import Stack, eventually, running_stack
from tests.redis_server import RedisServer

pytestmark = pytest.mark.e2e

NUM_STREAMS = 18
NUM_TOKENS = 150
# Slow enough that every kill finds streams running.
ENVIRONMENT = {"MILLRACE_ENGINE__SIMULATION__STEP_MS": "20"}


@pytest.fixture
def engines(tmp_path: Path, redis: RedisServer) -> Iterator[Stack]:
    options = ("--simulated", "--engines", "3")
    with running_stack(tmp_path, *options, config=limited(redis), environment=ENVIRONMENT) as stack:
        yield stack


async def ask_all(stack: Stack, server: RedisServer, *signals: signal.Signals) -> list[Answer]:
    async with connected(stack) as client:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        options = {**plain(NUM_TOKENS), "temperature": 0.8, "logprobs": True}
        streams = [
            asyncio.ensure_future(
                ask(client, stack, f"Tell story number {number}.", event, seed=number, **options)
            )
            for number, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        assert held(server)[0] == NUM_STREAMS
        for index, number in enumerate(signals):
            name = f"engine-{index}"
            os.kill(stack.pid(name), number)
            back = f"{name} is ready again"
            assert await asyncio.to_thread(eventually, lambda back=back: back in stack.output.read_text()), (
                stack.transcript()
            )
        return await asyncio.gather(*streams)


def test_dead_engines_change_nothing_that_a_client_reads(engines: Stack, redis: RedisServer) -> None:
    undisturbed = asyncio.run(ask_all(engines, redis))
    assert {answer.finish_reason for answer in undisturbed} == {"length"}
    assert {answer.num_logprobs for answer in undisturbed} == {NUM_TOKENS}
    disturbed = asyncio.run(ask_all(engines, redis, signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL))
    assert disturbed == undisturbed
    engines.assert_nothing_leaked()
    assert_limits_are_whole(engines, redis)


# --- the bundled model: the grammar's state is found again from the tokens so far ---------------------------

# Enough of them that every answer is still under way when its engine is killed.
NUM_NUMBERS = 160
NUM_GUIDED = 6


@needs_weights
def test_guided_answers_go_on_inside_their_grammar(tmp_path: Path) -> None:
    async def all_of_them(stack: Stack, *, kill: bool) -> list[Answer]:
        async with connected(stack) as client:
            begun = [asyncio.Event() for _ in range(NUM_GUIDED)]
            options = {**numbers(NUM_NUMBERS, 1500), "temperature": 0}
            answers = [
                asyncio.ensure_future(ask(client, stack, f"Count to {number}.", event, **options))
                for number, event in enumerate(begun)
            ]
            pids = [stack.pid(f"engine-{number}") for number in range(2)]
            # All are under way by the time that one of them has its first text.
            await first_of(begun)
            if kill:
                # Requests of one shape go where their prefix is cached, which may be one engine for all of
                # them: each is killed in turn. The answers become no longer before that is done.
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                number = len(killed) % 2
                killed.append(f"engine-{number}")
                os.kill(pids[number], signal.SIGKILL)
                os.kill(pids[1 - number], signal.SIGCONT)
            return await asyncio.gather(*answers)

    def is_back(stack: Stack) -> bool:
        return stack.output.read_text().count(f"{killed[-1]} is ready again") == killed.count(killed[-1])

    def has_continued(stack: Stack) -> bool:
        (address,) = stack.addresses("gateway", "metrics")
        exposed = httpx.get(f"http://{address}/metrics", trust_env=False).text
        return 'millrace_resubmissions_total{outcome="continued"}' in exposed

    killed: list[str] = []
    with running_stack(tmp_path, "--engines", "2") as stack:
        undisturbed = asyncio.run(all_of_them(stack, kill=False))
        for answer in undisturbed:
            assert_numbers(answer, NUM_NUMBERS)
        while not has_continued(stack):
            assert len(killed) < 4, "no engine had anything to continue when it was killed"
            assert asyncio.run(all_of_them(stack, kill=True)) == undisturbed
            assert eventually(lambda: is_back(stack)), stack.transcript()
        stack.assert_nothing_leaked()
