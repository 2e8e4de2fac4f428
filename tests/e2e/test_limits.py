"""Limits of tenants, seen by the SDK as what they are."""

from __future__ import annotations

import openai
import pytest

from tests.e2e.stack import CONCURRENT_KEY, LIMITED_KEY, Stack, eventually

HELLO = [{"role": "user", "content": "Hi"}]


def test_requests_per_minute(stack: Stack) -> None:
    refusals = []
    with stack.openai(LIMITED_KEY) as client:
        for attempt in range(4):
            try:
                client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=1)
            except openai.RateLimitError as error:
                refusals.append((attempt, error.response))
    # Two are served. The window may turn over between two requests, so not all others need be refused.
    assert refusals
    assert refusals[0][0] >= 2
    for _, response in refusals:
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) > 0


def test_concurrent_streams_and_their_release(stack: Stack) -> None:
    def one_more(client: openai.OpenAI) -> bool:
        try:
            client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=1)
        except openai.RateLimitError:
            return False
        return True

    with stack.openai(CONCURRENT_KEY) as client:
        stream = client.chat.completions.create(
            model=stack.model,
            messages=HELLO,
            max_tokens=3000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as raised:
            client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=1)
        assert "concurren" in raised.value.message
        stream.close()
        assert eventually(lambda: one_more(client))
