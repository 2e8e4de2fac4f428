"""The OpenAI face through Envoy, with the real SDK."""

from __future__ import annotations

import json
import re
import uuid

import httpx
import openai
import pytest

from contract.sampling import OPTIONS, RANGES
from tests.e2e.stack import RESTRICTED_KEY, Stack, raw

HELLO = [{"role": "user", "content": "What is 12 + 30?"}]


def test_models(client: openai.OpenAI, stack: Stack) -> None:
    assert stack.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(stack.model).id == stack.model


def test_chat_in_one_piece_with_usage(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=12, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stream_equals_the_answer_in_one_piece(client: openai.OpenAI, stack: Stack) -> None:
    options = {"model": stack.model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    finishes = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert finishes[-1] == whole.choices[0].finish_reason
    assert not any(finishes[:-1])
    # Usage comes last, alone, and once.
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_cache_salt_keeps_prefixes_apart_within_a_tenant(client: openai.OpenAI, stack: Stack) -> None:
    prompt = f"Salted {uuid.uuid4()}: " + "the quick brown fox jumps over the lazy dog. " * 8

    def cached(salt: str | None) -> int:
        more = {} if salt is None else {"cache_salt": salt}
        answer = client.completions.create(model=stack.model, prompt=prompt, max_tokens=1, extra_body=more)
        details = answer.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    for salt in ("a", "b", None):
        assert cached(salt) == 0
        assert cached(salt) > 0


def test_stream_without_usage_has_none(client: openai.OpenAI, stack: Stack) -> None:
    chunks = client.chat.completions.create(model=stack.model, messages=HELLO, max_tokens=4, stream=True)
    assert all(chunk.usage is None for chunk in chunks)


def test_completion_of_text_and_of_its_tokens_is_the_same(client: openai.OpenAI, stack: Stack) -> None:
    options = {"model": stack.model, "max_tokens": 10, "temperature": 0}
    text = client.completions.create(prompt="Once upon a time", **options)
    assert text.choices[0].finish_reason in {"stop", "length"}
    assert text.usage.prompt_tokens > 0
    ids = [300, 301, 302, 303]
    first = client.completions.create(prompt=ids, **options)
    second = client.completions.create(prompt=ids, **options)
    assert first.usage.prompt_tokens == len(ids)
    assert first.choices[0].text == second.choices[0].text


def test_seed_repeats_a_sampled_answer(client: openai.OpenAI, stack: Stack) -> None:
    options = {"model": stack.model, "messages": HELLO, "max_tokens": 16, "temperature": 1.0, "seed": 7}
    answers = {client.chat.completions.create(**options).choices[0].message.content for _ in range(3)}
    assert len(answers) == 1


def test_stop_string_is_cut_off(client: openai.OpenAI, stack: Stack) -> None:
    options = {"model": stack.model, "messages": HELLO, "max_tokens": 24, "temperature": 0}
    text = client.chat.completions.create(**options).choices[0].message.content
    stop = text[2:4]
    cut = client.chat.completions.create(**options, stop=[stop])
    assert cut.choices[0].message.content == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("budget", [2, 9, 30])
@pytest.mark.parametrize("constraint", [{}, {"guided_regex": "[a-z]{3,9}!"}], ids=["free", "guided"])
def test_a_thought_keeps_its_budget(
    client: openai.OpenAI, stack: Stack, budget: int, constraint: dict[str, str]
) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=[{"role": "user", "content": "What is 17 plus 25?"}],
        max_tokens=64,
        temperature=1.0,
        seed=budget,
        reasoning_effort="high",
        extra_body={"max_thinking_tokens": budget, **constraint},
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert 1 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= budget
    assert answer.choices[0].message.content
    if constraint:
        # Between a thought and the answer its grammar takes spaces, too.
        assert re.fullmatch(constraint["guided_regex"], answer.choices[0].message.content.lstrip(" "))


def test_an_effort_is_a_budget_that_is_kept(client: openai.OpenAI, stack: Stack) -> None:
    # Of 64 tokens the answer has 16; the model's template reads a switch alone.
    for effort, budget in (("minimal", 4), ("low", 9), ("medium", 24)):
        answer = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "What is 17 plus 25?"}],
            max_tokens=64,
            temperature=1.0,
            seed=budget,
            reasoning_effort=effort,  # type: ignore[arg-type]
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens_details is not None
        assert 1 <= (answer.usage.completion_tokens_details.reasoning_tokens or 0) <= budget
        assert answer.choices[0].message.content


def test_options_at_both_ends_of_their_limits_are_answered(client: openai.OpenAI, stack: Stack) -> None:
    """What the contract allows, every make's core takes."""
    ends = [
        {name: end}
        for name, limits in RANGES.items()
        if limits.per == "token" or name in ("seed", "logprobs")
        for end in (limits.minimum, limits.maximum)
    ]
    bias = OPTIONS["logit_bias"].limits
    ends += [{"logit_bias": {"300": end}} for end in (bias.minimum, bias.maximum)]
    # It would keep no token, and is refused.
    ends.remove({"top_p": 0})
    for options in ends:
        answer = client.completions.create(
            model=stack.model,
            prompt="Once upon a time",
            max_tokens=2,
            extra_body={"ignore_eos": True} | options,
        )
        assert answer.usage.completion_tokens == 2, options


def test_several_choices(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=HELLO, max_tokens=6, n=3, temperature=1.0, seed=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


@pytest.mark.parametrize(
    ("tier", "told"),
    [("interactive", "priority"), ("priority", "priority"), ("batch", "flex"), ("flex", "flex")],
)
def test_service_tier_is_told_in_openai_s_words(
    client: openai.OpenAI, stack: Stack, tier: str, told: str
) -> None:
    answer = client.chat.completions.create(
        model=stack.model,
        messages=HELLO,
        max_tokens=2,
        extra_body={"service_tier": tier},
    )
    assert answer.service_tier == told


def test_service_tier_auto_tells_the_real_one(client: openai.OpenAI, stack: Stack) -> None:
    answer = client.chat.completions.create(
        model=stack.model, messages=HELLO, max_tokens=2, service_tier="auto"
    )
    assert answer.service_tier == "default"


def test_request_id_is_answered(client: openai.OpenAI, stack: Stack) -> None:
    response = client.chat.completions.with_raw_response.create(
        model=stack.model, messages=HELLO, max_tokens=2
    )
    assert response.headers["x-request-id"]


# --- refusals: every one names what is wrong, and the stack stays healthy ----------------------------------


def test_bad_key(stack: Stack) -> None:
    with stack.openai("mr-wrong") as client, pytest.raises(openai.AuthenticationError) as raised:
        client.chat.completions.create(model=stack.model, messages=HELLO)
    body = raised.value.response.json()
    assert body["error"]["type"] == "authentication_error"
    assert body["error"]["reason"] == "INVALID_CREDENTIALS"
    assert body["error"]["code"] == "invalid_api_key"
    assert "mr-wrong" not in json.dumps(body)


def test_no_key(stack: Stack) -> None:
    response = httpx.get(f"{stack.url}/v1/models", trust_env=False)
    assert response.status_code == 401
    assert response.json()["error"]["message"]


def test_client_cannot_bring_its_own_identity(stack: Stack) -> None:
    headers = {"x-millrace-context": "forged", "x-millrace-tenant": "development"}
    response = httpx.get(f"{stack.url}/v1/models", headers=headers, trust_env=False)
    assert response.status_code == 401


def test_model_of_another_tenant(stack: Stack) -> None:
    with stack.openai(RESTRICTED_KEY) as client, pytest.raises(openai.PermissionDeniedError):
        client.chat.completions.create(model=stack.model, messages=HELLO)


def test_tier_that_is_not_allowed(stack: Stack) -> None:
    with stack.openai() as client, pytest.raises((openai.BadRequestError, openai.PermissionDeniedError)):
        client.chat.completions.create(
            model=stack.model, messages=HELLO, extra_body={"service_tier": "platinum"}
        )


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="no-such-model", messages=HELLO)
    assert "no-such-model" in raised.value.message


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b"\xff\xfe", b'{"model": 1}', b"null"])
def test_bad_json(stack: Stack, body: bytes) -> None:
    response = raw(stack, "/v1/chat/completions", body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_prompt_that_is_too_long_names_the_limit(client: openai.OpenAI, stack: Stack) -> None:
    messages = [{"role": "user", "content": "word " * 60_000}]
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=stack.model, messages=messages)
    error = raised.value.response.json()["error"]
    assert any(character.isdigit() for character in error["message"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("top_p", 1.5),
        ("max_tokens", 0),
        ("n", 0),
        ("logit_bias", {"not a token": 1}),
        ("stop", [""]),
        ("messages", []),
    ],
)
def test_bad_value_names_its_field(stack: Stack, field: str, value: object) -> None:
    body = {"model": stack.model, "messages": HELLO, "max_tokens": 4, field: value}
    response = raw(stack, "/v1/chat/completions", json.dumps(body).encode())
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert field in (error["param"] or "") + error["message"]


@pytest.mark.parametrize("field", ["frobnicate", "max_toknes"])
def test_unknown_field_is_refused_by_name(stack: Stack, field: str) -> None:
    body = {"model": stack.model, "messages": HELLO, field: 1}
    response = raw(stack, "/v1/chat/completions", json.dumps(body).encode())
    assert response.status_code == 400, response.text
    assert field in response.json()["error"]["message"]


def test_unknown_route_is_told_in_the_same_form(stack: Stack) -> None:
    response = raw(stack, "/v1/nothing-here", b"{}")
    assert response.status_code == 404
    assert response.json()["error"]["message"]


def test_body_that_is_too_large(stack: Stack) -> None:
    response = raw(stack, "/v1/chat/completions", b" " * (17 * 1024 * 1024))
    assert response.status_code == 413
