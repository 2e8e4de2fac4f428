"""LiteLLM in the caller's process."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
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

OPTIONS = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY, "temperature": 0}
OPTIONS["num_retries"] = 0
ASKED = {**OPTIONS, "messages": [{"role": "user", "content": QUESTION}]}
PERSON_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def five_turns() -> None:
    """Messages go back with the keys that LiteLLM adds to them."""
    messages: list = []
    for city in CITIES:
        messages.append({"role": "user", "content": question_of(city)})
        called = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="required", **OPTIONS)
        message = called.choices[0].message
        messages.append(message.model_dump())
        (call, *_) = message.tool_calls
        assert json.loads(call.function.arguments)["city"], call
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(RESULT)})
        answer = litellm.completion(messages=messages, tools=[WEATHER], tool_choice="none", **OPTIONS)
        messages.append(answer.choices[0].message.model_dump())
        assert answer.choices[0].message.content


with works("answer"):
    assert ANSWER in litellm.completion(**ASKED).choices[0].message.content
with works("stream"):
    chunks = list(litellm.completion(stream=True, **ASKED))
    assert ANSWER in "".join(each.choices[0].delta.content or "" for each in chunks)
with works("usage of a stream"):
    chunks = litellm.completion(stream=True, stream_options={"include_usage": True}, **ASKED)
    usages = [each.usage for each in chunks if getattr(each, "usage", None)]
    assert usages[-1].total_tokens > usages[-1].completion_tokens > 0
with works("five turns with tools"):
    five_turns()
with works("tools in a stream"):
    asked = {"messages": [{"role": "user", "content": question_of("Paris")}], "tools": [WEATHER]}
    whole = litellm.stream_chunk_builder(list(litellm.completion(stream=True, **asked, **OPTIONS)))
    assert whole.choices[0].message.tool_calls[0].function.name == "get_weather"
with works("structured output"):
    schema = {"name": "person", "strict": True, "schema": PERSON_SCHEMA}
    format_ = {"type": "json_schema", "json_schema": schema}
    asked = {"messages": [{"role": "user", "content": PERSON}], "response_format": format_}
    answer = litellm.completion(**asked, **OPTIONS)
    assert json.loads(answer.choices[0].message.content)["age"] == 34
with works("cache marks on messages and tools"):
    mark = {"cache_control": {"type": "ephemeral"}}
    part = {"type": "text", "text": question_of("Paris"), **mark}
    asked = {"messages": [{"role": "user", "content": [part]}], "tools": [{**WEATHER, **mark}]}
    assert litellm.completion(**asked, **OPTIONS).choices[0].message.tool_calls
with works("fallback when a context is too long"):
    here = {name: value for name, value in OPTIONS.items() if name != "num_retries"}
    elsewhere = {"model": "openai/large", "api_key": "any", "mock_response": "from elsewhere"}
    router = litellm.Router(
        model_list=[
            {"model_name": "small", "litellm_params": here},
            {"model_name": "large", "litellm_params": elsewhere},
        ],
        context_window_fallbacks=[{"small": ["large"]}],
        num_retries=0,
    )
    answer = router.completion(model="small", messages=[{"role": "user", "content": TOO_LONG}])
    assert answer.choices[0].message.content == "from elsewhere"
with refused("context too long", litellm.ContextWindowExceededError, "maximum context length"):
    litellm.completion(messages=[{"role": "user", "content": TOO_LONG}], **OPTIONS)
with refused("unknown model", litellm.NotFoundError, "nobody"):
    litellm.completion(**{**ASKED, "model": "openai/nobody"})
with refused("wrong key", litellm.AuthenticationError, "key"):
    litellm.completion(**{**ASKED, "api_key": "mr-wrong"})
with refused("too many requests", litellm.RateLimitError, "requests a minute"):
    for _ in range(2):
        litellm.completion(**{**ASKED, "api_key": LIMITED_KEY})
with refused("images", litellm.BadRequestError, "messages[0].content[0].type"):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
    litellm.completion(messages=[{"role": "user", "content": [part]}], **OPTIONS)
