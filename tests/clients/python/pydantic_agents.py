"""Agents of pydantic-ai over OpenAI's chat completions."""

from __future__ import annotations

import asyncio
import json

import openai
import pydantic
from person import Person
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from report import (
    ANSWER,
    API_KEY,
    BASE_URL,
    CITIES,
    LIMITED_KEY,
    MODEL,
    PERSON,
    QUESTION,
    RESULT,
    TOO_LONG,
    question_of,
    refused,
    works,
)


def agent(key: str = API_KEY, name: str = MODEL, **options: object) -> Agent:
    """An agent that asks this model."""
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0)
    model = OpenAIChatModel(name, provider=OpenAIProvider(openai_client=client))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": 200}, **options)


class Anything(pydantic.BaseModel):
    """What a small model makes of a schema that it is only told about."""

    name: str = ""
    age: int = 0


asked_for: list[str] = []


def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    asked_for.append(city)
    return json.dumps(RESULT)


def five_turns() -> None:
    """A conversation in which the model itself decides to call."""
    weather, history = agent(tools=[get_weather]), []
    for city in CITIES:
        result = weather.run_sync(question_of(city), message_history=history)
        assert result.output
        history = result.all_messages()
    assert asked_for[:1] == [CITIES[0]], asked_for


async def streamed() -> tuple[str, int]:
    """The text of a stream, and the tokens that it took."""
    async with agent().run_stream(QUESTION) as result:
        return [text async for text in result.stream_text()][-1], result.usage.output_tokens


with works("answer"):
    assert ANSWER in agent().run_sync(QUESTION).output
with works("stream"):
    assert ANSWER in asyncio.run(streamed())[0]
with works("usage of a stream"):
    assert asyncio.run(streamed())[1] > 0
with works("five turns with tools"):
    five_turns()
for feature, made, kind in (
    ("tools", ToolOutput, Person),
    ("json_schema", NativeOutput, Person),
    ("json_mode", PromptedOutput, Anything),
):
    with works(f"structured output by {feature}"):
        assert isinstance(agent(output_type=made(kind)).run_sync(PERSON).output, kind)
with refused("context too long", ModelHTTPError, "context_length_exceeded"):
    agent().run_sync(TOO_LONG)
with refused("unknown model", ModelHTTPError, "model_not_found"):
    agent(name="nobody").run_sync(QUESTION)
with refused("wrong key", ModelHTTPError, "invalid_api_key"):
    agent("mr-wrong").run_sync(QUESTION)
with refused("too many requests", ModelHTTPError, "rate_limit_exceeded"):
    for _ in range(2):
        agent(LIMITED_KEY).run_sync(QUESTION)
