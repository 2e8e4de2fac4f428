"""OpenAI's agents over chat completions, and over Responses by HTTP and by WebSocket."""

from __future__ import annotations

import asyncio
import json

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    OpenAIResponsesWSModel,
    Runner,
    RunResultStreaming,
    function_tool,
)
from agents import set_tracing_disabled as disable_tracing
from person import Person
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

disable_tracing(True)


called: list[str] = []


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather in a city"""
    called.append(city)
    return json.dumps(RESULT)


def agent(key: str = API_KEY, name: str = MODEL, **options: object) -> Agent:
    """An agent that asks this model."""
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=key, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=100, include_usage=True)
    model = OpenAIChatCompletionsModel(model=name, openai_client=client)
    return Agent(name="agent", model=model, model_settings=settings, **options)


def run(what: Agent, said: object) -> object:
    """What it says in the end."""
    return Runner.run_sync(what, said, max_turns=6)


def five_turns() -> None:
    """A conversation in which the model itself decides to call."""
    weather, said = agent(tools=[get_weather]), []
    for city in CITIES:
        result = run(weather, [*said, {"role": "user", "content": question_of(city)}])
        assert result.final_output
        said = result.to_input_list()
    assert called[:1] == [CITIES[0]], called


async def streamed(what: Agent, said: str) -> tuple[RunResultStreaming, int]:
    """The end of a stream, and how many events came before it."""
    result = Runner.run_streamed(what, said, max_turns=6)
    events = [each async for each in result.stream_events()]
    return result, len(events)


async def over_responses(kind: type[OpenAIResponsesModel]) -> None:
    """What an agent does with the other API: tools that it calls itself, in streams, and a schema."""
    client = openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
    settings = ModelSettings(temperature=0, max_tokens=100, store=False)
    model = kind(model=MODEL, openai_client=client)

    def made(**options: object) -> Agent:
        return Agent(name="agent", model=model, model_settings=settings, **options)

    answered = await Runner.run(made(), QUESTION)
    assert ANSWER in answered.final_output
    weather, said = made(tools=[get_weather]), []
    called.clear()
    for city in CITIES:
        asked = [*said, {"role": "user", "content": question_of(city)}]
        result = await Runner.run(weather, asked, max_turns=6)
        assert result.final_output
        said = result.to_input_list()
    assert called[:1] == [CITIES[0]], called
    called.clear()
    streamed = Runner.run_streamed(weather, question_of("Oslo"), max_turns=6)
    assert len([each async for each in streamed.stream_events()]) > 3
    assert called[:1] == ["Oslo"], called
    assert streamed.context_wrapper.usage.output_tokens > 0
    assert (await Runner.run(made(output_type=Person), PERSON)).final_output.age == 34


with works("answer"):
    assert ANSWER in run(agent(), QUESTION).final_output
with works("stream"):
    result, num_events = asyncio.run(streamed(agent(), QUESTION))
    assert ANSWER in result.final_output
    assert num_events > 3
with works("usage of a stream"):
    used = asyncio.run(streamed(agent(), QUESTION))[0].context_wrapper.usage
    assert used.input_tokens > 0 < used.output_tokens, used
with works("five turns with tools"):
    five_turns()
with works("tools in a stream"):
    called.clear()
    assert asyncio.run(streamed(agent(tools=[get_weather]), question_of("Oslo")))[0].final_output
    assert called[:1] == ["Oslo"], called
with works("structured output"):
    assert run(agent(output_type=Person), PERSON).final_output.age == 34
with refused("context too long", openai.BadRequestError, "context_length_exceeded"):
    run(agent(), TOO_LONG)
with refused("unknown model", openai.NotFoundError, "model_not_found"):
    run(agent(name="nobody"), QUESTION)
for name, kind in (
    ("responses", OpenAIResponsesModel),
    ("responses over a WebSocket", OpenAIResponsesWSModel),
):
    with works(name):
        asyncio.run(over_responses(kind))
with refused("wrong key", openai.AuthenticationError, "invalid_api_key"):
    run(agent("mr-wrong"), QUESTION)
with refused("too many requests", openai.RateLimitError, "rate_limit_exceeded"):
    for _ in range(2):
        run(agent(LIMITED_KEY), QUESTION)
