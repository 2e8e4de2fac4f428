"""Anthropic's own SDK for Python."""

from __future__ import annotations

import asyncio
import json

import anthropic
from person import Person
from report import (
    ADDRESS,
    ANSWER,
    API_KEY,
    CITIES,
    LIMITED_KEY,
    MODEL,
    PERSON,
    QUESTION,
    RESULT,
    TOO_LONG,
    WEATHER,
    question_of,
    refused,
    works,
)

# The SDK sends the key in `x-api-key`.
OPTIONS = {"base_url": f"http://{ADDRESS}", "api_key": API_KEY, "max_retries": 0}
client = anthropic.Anthropic(**OPTIONS)
FUNCTION = WEATHER["function"]
TOOL = {
    "name": FUNCTION["name"],
    "description": FUNCTION["description"],
    "input_schema": FUNCTION["parameters"],
    "cache_control": {"type": "ephemeral"},
}
GREEDY = {"extra_body": {"temperature": 0}}
ASKED = {
    "model": MODEL,
    "max_tokens": 60,
    "messages": [{"role": "user", "content": QUESTION}],
    **GREEDY,
}


def text_of(message: anthropic.types.Message) -> str:
    return "".join(each.text for each in message.content if each.type == "text")


def five_turns() -> None:
    """The client's own messages go back as they came, five times."""
    messages: list = []
    options = {"model": MODEL, "max_tokens": 60, "tools": [TOOL], **GREEDY}
    for city in CITIES:
        messages.append({"role": "user", "content": question_of(city)})
        called = client.messages.create(messages=messages, tool_choice={"type": "any"}, **options)
        assert called.stop_reason == "tool_use", called
        messages.append({"role": "assistant", "content": called.content})
        calls = [each for each in called.content if each.type == "tool_use"]
        assert calls[0].input["city"], calls
        results = [
            {"type": "tool_result", "tool_use_id": each.id, "content": json.dumps(RESULT)} for each in calls
        ]
        messages.append({"role": "user", "content": results})
        counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL])
        answer = client.messages.create(messages=messages, tool_choice={"type": "none"}, **options)
        usage = answer.usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted.input_tokens, (usage, counted)
        messages.append({"role": "assistant", "content": answer.content})
        assert text_of(answer)


async def asynchronous() -> None:
    """Several at once on one client."""
    async with anthropic.AsyncAnthropic(**OPTIONS) as many:
        answers = await asyncio.gather(*(many.messages.create(**ASKED) for _ in range(4)))
    assert all(ANSWER in text_of(each) for each in answers)


with works("answer"):
    whole = client.messages.create(**ASKED)
    assert ANSWER in text_of(whole), whole
    assert whole.id == f"msg_{whole._request_id}", whole
with works("stream"), client.messages.stream(**ASKED) as events:
    assert "".join(events.text_stream) == text_of(whole)
with works("usage of a stream"), client.messages.stream(**ASKED) as events:
    usage = events.get_final_message().usage
    assert usage.input_tokens + usage.cache_read_input_tokens > usage.output_tokens > 0
with works("five turns with tools"):
    five_turns()
with works("tools in a stream"):
    asked = {"messages": [{"role": "user", "content": question_of("Paris")}], "tools": [TOOL]}
    with client.messages.stream(model=MODEL, max_tokens=60, **asked, **GREEDY) as events:
        (call,) = [each for each in events.get_final_message().content if each.type == "tool_use"]
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"}), call
with works("structured output"):
    asked = {"model": MODEL, "max_tokens": 60, "messages": [{"role": "user", "content": PERSON}]}
    parsed = client.messages.parse(output_format=Person, **asked, **GREEDY).parsed_output
    assert (parsed.age, parsed.city) == (34, "Oslo"), parsed
with works("cache marks on messages and tools"):
    marked = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert client.messages.create(system=marked, **ASKED).content
with works("a stream that is left"), client.messages.create(stream=True, **ASKED) as left:
    assert next(iter(left)).type == "message_start"
with works("several at once"):
    asyncio.run(asynchronous())
with works("models"):
    assert client.models.retrieve(MODEL).id in [each.id for each in client.models.list()]
with refused("too many requests", anthropic.RateLimitError, "rate_limit_error"):
    for _ in range(2):
        client.with_options(api_key=LIMITED_KEY).messages.create(**ASKED)
with refused("context too long", anthropic.BadRequestError, "context_length_exceeded"):
    client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": TOO_LONG}]})
with refused("unknown model", anthropic.NotFoundError, "not_found_error"):
    client.messages.create(**{**ASKED, "model": "nobody"})
with refused("wrong key", anthropic.AuthenticationError, "authentication_error"):
    client.with_options(api_key="mr-wrong").messages.create(**ASKED)
with refused("images", anthropic.BadRequestError, "messages[0].content[0].type"):
    source = {"type": "base64", "media_type": "image/png", "data": "aaaa"}
    pictures = [{"role": "user", "content": [{"type": "image", "source": source}]}]
    client.messages.create(**{**ASKED, "messages": pictures})
with refused("hosted tools", anthropic.BadRequestError, "tools[0].type"):
    client.messages.create(tools=[{"type": "web_search_20250305", "name": "web_search"}], **ASKED)
with refused("thoughts that were changed", anthropic.BadRequestError, "messages[1].content[0].signature"):
    changed = {"type": "thinking", "thinking": "changed", "signature": "mr1.AAAA"}
    turns = [*ASKED["messages"], {"role": "assistant", "content": [changed]}, *ASKED["messages"]]
    client.messages.create(**{**ASKED, "messages": turns})
