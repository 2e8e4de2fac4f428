"""Two engines with vLLM's core, 64 mixed streams, and the death of one engine: nothing accepted is lost, and
no limit keeps anything of it. An engine of two ranks ends with either of them, and comes back.

Needs vLLM's environment (E2E_VLLM_PYTHON, or what `millrace engine install vllm` made), and four gigabytes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from tests.chaos.limits import assert_limits_are_whole, held, limited
from tests.chaos.streams import ask, assert_numbers, connected, first_of, numbers, plain
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import LIMIT_S, VLLM_SETTINGS, Stack, eventually, running_stack
from tests.redis_server import RedisServer

# Two engines of this make take minutes to start where processors are few.
pytestmark = [pytest.mark.e2e, needs_weights, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm")]

# In which an engine of it is there again.
LOADS_LIMIT_S = 300.0

NUM_STREAMS = 64
NUM_TOKENS = 48
NUM_NUMBERS = 12
TIERS = ("interactive", "auto", "batch")


@pytest.fixture
def engines(tmp_path: Path, redis: RedisServer) -> Iterator[Stack]:
    options = ("--engine", "vllm", "--engines", "2")
    with running_stack(tmp_path, *options, config=limited(redis), environment=VLLM_SETTINGS) as stack:
        # The gateway is ready with the first of them.
        assert eventually(lambda: stack.num_attached() == 2, LOADS_LIMIT_S), stack.transcript()
        yield stack


async def mixed(client: openai.AsyncOpenAI, stack: Stack, number: int, begun: asyncio.Event) -> str:
    """One stream; every eighth leaves early, every fourth is held to a schema. Checks its own answer."""
    is_guided, leaves = number % 4 == 1, number % 8 == 7
    answer = await ask(
        client,
        stack,
        f"Tell story number {number}.",
        begun,
        leaves=leaves,
        seed=number,
        temperature=0.8 if number % 2 else 0.0,
        service_tier=TIERS[number % 3],
        **(numbers(NUM_NUMBERS, 400) if is_guided else plain(NUM_TOKENS)),
    )
    if is_guided:
        assert_numbers(answer, NUM_NUMBERS)
        return "guided"
    if leaves and answer.finish_reason is None:
        return "left"
    assert (answer.finish_reason, answer.completion_tokens) == ("length", NUM_TOKENS)
    return "plain"


async def ask_all(stack: Stack, server: RedisServer, victim: str) -> list[str]:
    async with connected(stack, 3 * LIMIT_S) as client:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [
            asyncio.ensure_future(mixed(client, stack, number, event)) for number, event in enumerate(begun)
        ]
        # A stream that is refused never begins.
        first = asyncio.ensure_future(first_of(begun[:8]))
        await asyncio.wait([first, *streams], return_when=asyncio.FIRST_COMPLETED)
        for each in streams:
            if each.done():
                each.result()
        assert held(server)[0] > 0
        os.kill(stack.pid(victim), signal.SIGKILL)
        return await asyncio.gather(*streams)


def is_back(stack: Stack) -> bool:
    return eventually(lambda: "engine-0 is ready again" in stack.output.read_text(), LOADS_LIMIT_S)


def test_nothing_accepted_is_lost_with_an_engine(engines: Stack, redis: RedisServer) -> None:
    try:
        ends = asyncio.run(ask_all(engines, redis, "engine-0"))
    except openai.OpenAIError as error:
        raise AssertionError(f"{error}\n{engines.transcript()}") from error
    assert ends.count("left") <= NUM_STREAMS // 8
    assert ends.count("guided") == NUM_STREAMS // 4
    assert ends.count("plain") + ends.count("left") == NUM_STREAMS - NUM_STREAMS // 4
    assert is_back(engines), engines.transcript()
    engines.assert_nothing_leaked()
    assert_limits_are_whole(engines, redis)


def test_two_ranks_serve_and_end_together(tmp_path: Path) -> None:
    def answered(stack: Stack) -> str:
        with stack.openai() as client:
            answer = client.chat.completions.create(
                model=stack.model,
                messages=[{"role": "user", "content": "Hello!"}],
                temperature=0,
                **plain(NUM_TOKENS),
            )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == NUM_TOKENS
        return answer.choices[0].message.content or ""

    def ranks(stack: Stack) -> list[psutil.Process]:
        return [
            each
            for each in psutil.Process(stack.pid("engine-0")).children(recursive=True)
            if "Worker" in each.name()
        ]

    def answered_again(stack: Stack) -> bool:
        try:
            return answered(stack) == before
        except openai.InternalServerError:
            # The edge hears a moment later that there is an engine again.
            return False

    options = ("--engine", "vllm", "--tensor-parallel-size", "2")
    with running_stack(tmp_path, *options, environment=VLLM_SETTINGS) as stack:
        before = answered(stack)
        victims = ranks(stack)
        assert len(victims) == 2, [each.name() for each in victims]
        victims[1].kill()
        assert is_back(stack), stack.transcript()
        assert not victims[0].is_running()
        assert eventually(lambda: answered_again(stack)), stack.transcript()
        stack.assert_nothing_leaked()
