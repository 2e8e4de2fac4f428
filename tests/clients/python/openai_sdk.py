"""OpenAI's own SDK for Python."""

from __future__ import annotations

import asyncio
import json

import openai
import pooled
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
    WEATHER,
    question_of,
    refused,
    works,
)

client = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}


def five_turns() -> None:
    """The client's own messages go back as they came, five times."""
    messages: list = []
    for city in CITIES:
        messages.append({"role": "user", "content": question_of(city)})
        options = {"model": MODEL, "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
        called = client.chat.completions.create(messages=messages, tool_choice="required", **options)
        messages.append(called.choices[0].message)
        (call, *_) = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["city"], call
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(RESULT)})
        answer = client.chat.completions.create(messages=messages, tool_choice="none", **options)
        messages.append(answer.choices[0].message)
        assert answer.choices[0].message.content
    assert len(messages) == 4 * len(CITIES)


async def asynchronous() -> None:
    """Several at once on one client."""
    async with openai.AsyncOpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0) as many:
        answers = await asyncio.gather(*(many.chat.completions.create(**ASKED) for _ in range(4)))
    assert all(ANSWER in each.choices[0].message.content for each in answers)


with works("answer"):
    assert ANSWER in client.chat.completions.create(**ASKED).choices[0].message.content
with works("stream"):
    chunks = list(client.chat.completions.create(stream=True, **ASKED))
    assert ANSWER in "".join(each.choices[0].delta.content or "" for each in chunks)
with works("usage of a stream"):
    *_, last = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **ASKED)
    assert last.usage.total_tokens > last.usage.completion_tokens > 0
with works("five turns with tools"):
    five_turns()
with works("tools in a stream"):
    asked = {"messages": [{"role": "user", "content": question_of("Paris")}], "tools": [WEATHER]}
    with client.chat.completions.stream(model=MODEL, temperature=0, **asked) as events:
        names = [e.name for e in events if e.type == "tool_calls.function.arguments.done"]
    assert names == ["get_weather"], names
with works("structured output"):
    asked = {"model": MODEL, "messages": [{"role": "user", "content": PERSON}], "temperature": 0}
    parsed = client.chat.completions.parse(response_format=Person, **asked).choices[0].message.parsed
    assert (parsed.age, parsed.city) == (34, "Oslo"), parsed
with works("log-probabilities"):
    answer = client.chat.completions.create(logprobs=True, top_logprobs=3, **ASKED)
    assert all(len(each.top_logprobs) == 3 for each in answer.choices[0].logprobs.content)
with works("allowed tools"):
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "get_weather"}}]}
    answer = client.chat.completions.create(
        tools=[WEATHER], tool_choice={"type": "allowed_tools", "allowed_tools": allowed}, **ASKED
    )
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
with works("a stream that is left"), client.chat.completions.create(stream=True, **ASKED) as left:
    assert next(iter(left)).choices
with works("several at once"):
    asyncio.run(asynchronous())
with works("completions"):
    assert client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5).choices[0].text
with works("models"):
    assert client.models.retrieve(MODEL).id in [each.id for each in client.models.list()]
with refused("context too long", openai.BadRequestError, "context_length_exceeded"):
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": TOO_LONG}])
with refused("unknown model", openai.NotFoundError, "model_not_found"):
    client.chat.completions.create(**{**ASKED, "model": "nobody"})
with refused("wrong key", openai.AuthenticationError, "invalid_api_key"):
    client.with_options(api_key="mr-wrong").chat.completions.create(**ASKED)
with refused("too many requests", openai.RateLimitError, "rate_limit_exceeded"):
    for _ in range(2):
        client.with_options(api_key=LIMITED_KEY).chat.completions.create(**ASKED)
with refused("images", openai.BadRequestError, "messages[0].content[0].type"):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": [part]}])
with works("responses"):
    response = client.responses.create(model=MODEL, input="hi", max_output_tokens=20)
    assert response.output_text, response
    with client.responses.stream(model=MODEL, input="hi", max_output_tokens=20) as events:
        texts = [each.delta for each in events if each.type == "response.output_text.delta"]
    assert texts
with works("responses over a WebSocket"):
    socket = openai.OpenAI(base_url=BASE_URL, api_key=API_KEY).responses.connect()
    with socket as connection:
        last = None
        for question in ("hi", "And now?"):
            connection.response.create(
                model=MODEL, input=question, previous_response_id=last, store=False, max_output_tokens=20
            )
            ended = next(
                each for each in connection if each.type in ("response.completed", "response.incomplete")
            )
            assert ended.response.output_text, ended
            assert ended.response.previous_response_id == last
            last = ended.response.id
with works("embeddings"):
    embedder = openai.OpenAI(base_url=f"{pooled.URL}/v1", api_key=pooled.KEY, max_retries=0)
    for form in (openai.NOT_GIVEN, "float", "base64"):
        made = embedder.embeddings.create(model="embed", input=pooled.TEXTS, encoding_format=form)
        for each in made.data:
            if form != "base64":
                pooled.check_embedding(each.embedding, each.index)
    assert made.usage.prompt_tokens > 0
with refused("embeddings of a model that generates", openai.BadRequestError, "cannot embed"):
    client.embeddings.create(model=MODEL, input="hi")
with refused("custom tools", openai.BadRequestError, "tools[0].type"):
    client.chat.completions.create(tools=[{"type": "custom", "custom": {"name": "f"}}], **ASKED)
with refused("verbosity", openai.BadRequestError, "verbosity"):
    client.chat.completions.create(verbosity="low", **ASKED)
with refused("answers that are stored", openai.BadRequestError, "store"):
    client.chat.completions.create(store=True, **ASKED)
