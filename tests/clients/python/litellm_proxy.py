"""LiteLLM as a proxy between OpenAI's SDK, which it brings along, and the stack."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

import openai
from report import (
    ANSWER,
    API_KEY,
    BASE_URL,
    CITIES,
    ENVIRONMENT,
    LIMITED_KEY,
    MODEL,
    OUT,
    QUESTION,
    RESULT,
    TOO_LONG,
    WEATHER,
    question_of,
    refused,
    works,
)

START_S = 120.0
NAMES = {"nano": API_KEY, "limited": LIMITED_KEY, "stranger": "mr-wrong"}


def models() -> str:
    """The proxy's configuration: JSON, which is YAML."""
    listed = [
        {
            "model_name": name,
            "litellm_params": {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": key},
        }
        for name, key in NAMES.items()
    ]
    settings = {
        "num_retries": 0,
        # Else it would ask for them at /v1/responses.
        "use_chat_completions_url_for_anthropic_messages": True,
    }
    # What is refused in one test is asked again in the next.
    router = {"disable_cooldowns": True}
    return json.dumps({"model_list": listed, "litellm_settings": settings, "router_settings": router})


@contextmanager
def proxy() -> Iterator[str]:
    """The proxy's own base URL, while it runs."""
    (OUT / "proxy.yaml").write_text(models(), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(ENVIRONMENT / "bin" / "litellm"), "--config", str(OUT / "proxy.yaml")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--telemetry", "False"]
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = subprocess.Popen(command, env=environment)
    try:
        ends_s = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the proxy ended"
                assert time.monotonic() < ends_s, "the proxy does not answer"
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def five_turns(client: openai.OpenAI) -> None:
    """Messages go back as the proxy gave them."""
    messages: list = []
    for city in CITIES:
        messages.append({"role": "user", "content": question_of(city)})
        options = {"model": "nano", "tools": [WEATHER], "temperature": 0}
        called = client.chat.completions.create(messages=messages, tool_choice="required", **options)
        messages.append(called.choices[0].message)
        (call, *_) = called.choices[0].message.tool_calls
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(RESULT)})
        answer = client.chat.completions.create(messages=messages, tool_choice="none", **options)
        messages.append(answer.choices[0].message)
        assert answer.choices[0].message.content


def anthropic_message(url: str) -> str:
    """An answer to a request in Anthropic's form, which the proxy turns into OpenAI's."""
    mark = {"cache_control": {"type": "ephemeral"}}
    body = {
        "model": "nano",
        "max_tokens": 40,
        "system": [{"type": "text", "text": "Be brief.", **mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": question_of("Paris"), **mark}]}],
        "tools": [
            {
                "name": "get_weather",
                "description": "Get the current weather in a city",
                "input_schema": WEATHER["function"]["parameters"],
                **mark,
            }
        ],
    }
    headers = {"x-api-key": "any", "content-type": "application/json", "anthropic-version": "2023-06-01"}
    request = urllib.request.Request(f"{url}/v1/messages", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        (used,) = [each for each in json.load(response)["content"] if each["type"] == "tool_use"]
    return used["name"]


with proxy() as url:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
    asked = {"model": "nano", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    with works("answer"):
        assert ANSWER in client.chat.completions.create(**asked).choices[0].message.content
    with works("stream"):
        chunks = list(client.chat.completions.create(stream=True, **asked))
        assert ANSWER in "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
    with works("usage of a stream"):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        usages = [each.usage for each in client.chat.completions.create(**options, **asked) if each.usage]
        assert usages[-1].total_tokens > usages[-1].completion_tokens > 0
    with works("five turns with tools"):
        five_turns(client)
    with works("cache marks on messages and tools"):
        assert anthropic_message(url) == "get_weather"
    with works("models"):
        assert {each.id for each in client.models.list()} >= set(NAMES)
    with refused("context too long", openai.BadRequestError, "maximum context length"):
        client.chat.completions.create(model="nano", messages=[{"role": "user", "content": TOO_LONG}])
    with refused("wrong key", openai.AuthenticationError, "key"):
        client.chat.completions.create(**{**asked, "model": "stranger"})
    with refused("too many requests", openai.RateLimitError, "requests a minute"):
        for _ in range(2):
            client.chat.completions.create(**{**asked, "model": "limited"})
