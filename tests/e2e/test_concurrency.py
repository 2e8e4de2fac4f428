"""Many streams at once: nobody's answer depends on who else is there."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import openai

from tests.e2e.conftest import needs_weights
from tests.e2e.stack import Stack

NUM_STREAMS = 32


def prompts() -> list[str]:
    """Short and long, with and without a common beginning."""
    return [
        f"What is {10 + index} + {7 * index % 90}?"
        if index % 2
        else "Remember: " + "the sky is blue. " * index + f"Repeat the number {index}."
        for index in range(NUM_STREAMS)
    ]


def ask(client: openai.OpenAI, model: str, prompt: str) -> str:
    chunks = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=24,
        temperature=0,
        stream=True,
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


@needs_weights
def test_32_streams_in_parallel_equal_the_same_prompts_alone(client: openai.OpenAI, stack: Stack) -> None:
    alone = [ask(client, stack.model, prompt) for prompt in prompts()]
    barrier = threading.Barrier(NUM_STREAMS)

    def ask_together(prompt: str) -> str:
        barrier.wait()
        return ask(client, stack.model, prompt)

    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        together = list(pool.map(ask_together, prompts()))
    assert together == alone
    assert len(set(alone)) > 1


async def test_clients_that_leave_do_not_disturb_those_who_stay(stack: Stack) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.state.api_key, max_retries=0
    ) as client:

        async def leave(index: int) -> None:
            stream = await client.chat.completions.create(
                model=stack.model,
                messages=[{"role": "user", "content": f"Count to a million, starting at {index}."}],
                max_tokens=2000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await anext(aiter(stream))
            await stream.close()

        async def stay(index: int) -> str | None:
            answer = await client.chat.completions.create(
                model=stack.model,
                messages=[{"role": "user", "content": f"What is {index} + 1?"}],
                max_tokens=8,
            )
            return answer.choices[0].finish_reason

        results = await asyncio.gather(*(leave(i) if i % 2 else stay(i) for i in range(16)))
    assert all(result in {"stop", "length"} for result in results[::2])
