"""Streams whose engines are killed: how they are asked for, and what is kept of an answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NamedTuple

import openai

from tests.e2e.stack import LIMIT_S, Stack


class Answer(NamedTuple):
    """What a client has read, to the end or until it left."""

    text: str
    finish_reason: str | None
    completion_tokens: int
    num_logprobs: int


def connected(stack: Stack, limit_s: float = LIMIT_S) -> openai.AsyncOpenAI:
    """A client that repeats nothing by itself."""
    return openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key=stack.state.api_key, max_retries=0, timeout=limit_s
    )


def numbers(count: int, max_tokens: int) -> dict[str, Any]:
    """Options of an answer in a schema. It is bounded, so that it cannot run away."""
    digit = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {
        "type": "object",
        "properties": {
            "numbers": {"type": "array", "items": digit, "minItems": count, "maxItems": count},
            "done": {"const": True},
        },
        "required": ["numbers", "done"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}}
    return {"max_tokens": max_tokens, "response_format": form}


def plain(num_tokens: int) -> dict[str, Any]:
    """Options of an answer that has so many tokens."""
    return {"max_tokens": num_tokens, "extra_body": {"ignore_eos": True}}


def assert_numbers(answer: Answer, count: int) -> None:
    """It is whole, and in its schema."""
    found = json.loads(answer.text)
    assert (len(found["numbers"]), found["done"]) == (count, True), answer


async def ask(
    client: openai.AsyncOpenAI,
    stack: Stack,
    question: str,
    begun: asyncio.Event,
    *,
    leaves: bool = False,
    adapter: str = "",
    **options: Any,
) -> Answer:
    """One stream; `begun` is set by its first text, at which one that leaves does so."""
    stream: Any = await client.chat.completions.create(
        model=f"{stack.model}:{adapter}" if adapter else stack.model,
        messages=[{"role": "user", "content": question}],
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    text, finish_reason, usage, num_logprobs = "", None, 0, 0
    async for chunk in stream:
        if chunk.usage is not None:
            usage = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
            num_logprobs += len(choice.logprobs.content or ()) if choice.logprobs else 0
        if text:
            begun.set()
        if text and leaves:
            await stream.close()
            break
    return Answer(text, finish_reason, usage, num_logprobs)


async def first_of(events: list[asyncio.Event]) -> None:
    """Until one of them is set."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    for each in waiting:
        each.cancel()
