"""Two engines with vLLM's core, 64 mixed streams, and the death of one engine: nothing accepted is lost.

Needs vLLM's environment (E2E_VLLM_PYTHON, or what `millrace engine install vllm` made), and four gigabytes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import openai
import pytest

from engine.config import VllmConfig
from engine.vllm_core.environment import find_python
from services.errors import ConfigError
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import LIMIT_S, VLLM_PYTHON, VLLM_SETTINGS, Stack, eventually, running_stack

# Two engines of this make take minutes to start where processors are few.
pytestmark = [pytest.mark.e2e, needs_weights, pytest.mark.timeout(900)]

# In which an engine of it is there again.
LOADS_LIMIT_S = 300.0

NUM_STREAMS = 64
NUM_TOKENS = 48
TIERS = ("interactive", "auto", "batch")
# Bounded, so that an answer cannot run away.
DIGIT = {"type": "integer", "minimum": 0, "maximum": 99}
NUM_NUMBERS = 12
SCHEMA = {
    "type": "object",
    "properties": {
        "numbers": {"type": "array", "items": DIGIT, "minItems": NUM_NUMBERS, "maxItems": NUM_NUMBERS}
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
GUIDED = {
    "max_tokens": 400,
    "response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}},
}
PLAIN = {"max_tokens": NUM_TOKENS, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    try:
        find_python(VllmConfig(python=VLLM_PYTHON))
    except ConfigError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("vllm")
    with running_stack(folder, "--engine", "vllm", "--engines", "2", environment=VLLM_SETTINGS) as stack:
        yield stack


async def ask(client: openai.AsyncOpenAI, stack: Stack, number: int, begun: asyncio.Event) -> str:
    """One stream; every eighth leaves early, every fourth is held to a schema. Checks its own answer."""
    is_guided, leaves = number % 4 == 1, number % 8 == 7
    stream = await client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": f"Tell story number {number}."}],
        seed=number,
        temperature=0.8 if number % 2 else 0.0,
        stream=True,
        stream_options={"include_usage": True},
        service_tier=TIERS[number % 3],  # type: ignore[call-overload]
        **(GUIDED if is_guided else PLAIN),
    )
    text, finish_reason, usage = "", None, 0
    async for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
        begun.set()
        if leaves and text:
            await stream.close()
            return "left"
    if is_guided:
        assert len(json.loads(text)["numbers"]) == NUM_NUMBERS, text
        return "guided"
    assert (finish_reason, usage) == ("length", NUM_TOKENS)
    return "plain"


async def ask_all(stack: Stack, victim: str) -> list[str]:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.state.api_key, max_retries=0, timeout=3 * LIMIT_S
    ) as client:
        begun = [asyncio.Event() for _ in range(NUM_STREAMS)]
        streams = [
            asyncio.ensure_future(ask(client, stack, number, event)) for number, event in enumerate(begun)
        ]
        first = [asyncio.ensure_future(event.wait()) for event in begun[:8]]
        await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        os.kill(stack.pid(victim), signal.SIGKILL)
        return await asyncio.gather(*streams)


def test_nothing_accepted_is_lost_with_an_engine(engines: Stack) -> None:
    ends = asyncio.run(ask_all(engines, "engine-0"))
    assert ends.count("left") <= NUM_STREAMS // 8
    assert ends.count("guided") == NUM_STREAMS // 4
    assert ends.count("plain") + ends.count("left") == NUM_STREAMS - NUM_STREAMS // 4
    back = "engine-0 is ready again"
    assert eventually(lambda: back in engines.output.read_text(), LOADS_LIMIT_S), engines.transcript()
    engines.assert_nothing_leaked()
