"""Bad input in, OpenAI's error body out: the field is named and the status is the table's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from contract.errors import Reason
from tests.unit.gateway.rig.deployment import Deployment, deployed

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def allowed_tools(mode: str, *names: str) -> dict[str, Any]:
    """OpenAI's choice among some of the tools."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Deployment]:
    async with deployed() as running:
        yield running


pytestmark = pytest.mark.asyncio(loop_scope="module")

# (body beyond model and messages, reason, field)
CHAT_CASES: list[tuple[dict[str, Any], Reason, str]] = [
    ({"temperature": 3}, Reason.INVALID_ARGUMENT, "temperature"),
    ({"temperature": "hot"}, Reason.INVALID_ARGUMENT, "temperature"),
    ({"top_p": 0}, Reason.INVALID_ARGUMENT, "top_p"),
    ({"n": 0}, Reason.INVALID_ARGUMENT, "n"),
    ({"n": 2, "temperature": 0}, Reason.INVALID_ARGUMENT, "n"),
    ({"max_tokens": 0}, Reason.INVALID_ARGUMENT, "max_tokens"),
    ({"max_completion_tokens": 100_000}, Reason.CONTEXT_LENGTH_EXCEEDED, "max_completion_tokens"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, Reason.INVALID_ARGUMENT, "max_tokens"),
    ({"stop": [""]}, Reason.INVALID_ARGUMENT, "stop"),
    ({"stop": ["a"] * 17}, Reason.INVALID_ARGUMENT, "stop"),
    ({"seed": -(2**63) - 1}, Reason.INVALID_ARGUMENT, "seed"),
    ({"logit_bias": {"7": 101}}, Reason.INVALID_ARGUMENT, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, Reason.INVALID_ARGUMENT, "logit_bias"),
    ({"logit_bias": {"x": 1}}, Reason.INVALID_ARGUMENT, "logit_bias"),
    ({"stop_token_ids": [1, 2.0]}, Reason.INVALID_ARGUMENT, "stop_token_ids[1]"),
    ({"allowed_token_ids": [1.0]}, Reason.INVALID_ARGUMENT, "allowed_token_ids[0]"),
    ({"top_logprobs": 2}, Reason.INVALID_ARGUMENT, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, Reason.INVALID_ARGUMENT, "top_logprobs"),
    ({"messages": []}, Reason.INVALID_ARGUMENT, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, Reason.INVALID_ARGUMENT, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, Reason.INVALID_ARGUMENT, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, Reason.INVALID_ARGUMENT, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        Reason.UNSUPPORTED_FIELD,
        "messages[0].content[0].type",
    ),
    ({"tool_choice": "required"}, Reason.INVALID_ARGUMENT, "tool_choice"),
    ({"tools": [{"type": "custom"}]}, Reason.UNSUPPORTED_FIELD, "tools[0].type"),
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, Reason.UNSUPPORTED_FIELD, "tools[0].type"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}},
        Reason.UNSUPPORTED_FIELD,
        "tool_choice.type",
    ),
    (
        {"tools": [TOOL], "tool_choice": allowed_tools("auto", "nobody")},
        Reason.INVALID_ARGUMENT,
        "tool_choice.allowed_tools.tools[0].function.name",
    ),
    (
        {"tools": [TOOL], "tool_choice": allowed_tools("maybe", "add")},
        Reason.INVALID_ARGUMENT,
        "tool_choice.allowed_tools.mode",
    ),
    (
        {"tools": [TOOL], "tool_choice": allowed_tools("auto")},
        Reason.INVALID_ARGUMENT,
        "tool_choice.allowed_tools.tools",
    ),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "type": "custom", "custom": {}}]}]},
        Reason.INVALID_ARGUMENT,
        "messages[0].tool_calls[0].type",
    ),
    ({"verbosity": "low"}, Reason.UNSUPPORTED_FIELD, "verbosity"),
    ({"response_format": {"type": "xml"}}, Reason.INVALID_ARGUMENT, "response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "impossible"}}}},
        Reason.GRAMMAR_REFUSED,
        "response_format.json_schema",
    ),
    ({"guided_json": {"type": "impossible"}}, Reason.GRAMMAR_REFUSED, "guided_json"),
    (
        {"structured_outputs": {"json": {"type": "impossible"}}},
        Reason.GRAMMAR_REFUSED,
        "structured_outputs.json",
    ),
    ({"guided_choice": []}, Reason.INVALID_ARGUMENT, "guided_choice"),
    ({"structured_outputs": {"choice": [""]}}, Reason.INVALID_ARGUMENT, "structured_outputs.choice"),
    (
        {"response_format": {"type": "json_object", "regex": "a"}},
        Reason.INVALID_ARGUMENT,
        "response_format.regex",
    ),
    (
        {"response_format": {"type": "text", "json_schema": {"schema": {}}}},
        Reason.INVALID_ARGUMENT,
        "response_format.json_schema",
    ),
    ({"beam_width": 2, "temperature": 0.7}, Reason.INVALID_ARGUMENT, "temperature"),
    ({"beam_width": 2, "logit_bias": {"7": 1}}, Reason.INVALID_ARGUMENT, "logit_bias"),
    ({"beam_width": 2, "repetition_penalty": 1.1}, Reason.INVALID_ARGUMENT, "repetition_penalty"),
    ({"allowed_token_ids": []}, Reason.INVALID_ARGUMENT, "allowed_token_ids"),
    (
        {"ignore_eos": True, "response_format": {"type": "json_object"}},
        Reason.INVALID_ARGUMENT,
        "ignore_eos",
    ),
    ({"ignore_eos": True, "guided_regex": "a"}, Reason.INVALID_ARGUMENT, "ignore_eos"),
    (
        {"ignore_eos": True, "tools": [TOOL], "tool_choice": "required"},
        Reason.INVALID_ARGUMENT,
        "ignore_eos",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n" * 65, "schema": {}}}},
        Reason.INVALID_ARGUMENT,
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}},
        Reason.INVALID_ARGUMENT,
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        Reason.INVALID_ARGUMENT,
        "guided_regex",
    ),
    ({"stream_options": {"include_usage": True}}, Reason.INVALID_ARGUMENT, "stream_options"),
    ({"service_tier": "platinum"}, Reason.TIER_NOT_ALLOWED, "service_tier"),
    ({"model": "nobody"}, Reason.MODEL_NOT_FOUND, "model"),
    ({"functions": [{"name": "f"}]}, Reason.UNSUPPORTED_FIELD, "functions"),
    ({"store": True}, Reason.UNSUPPORTED_FIELD, "store"),
    ({"modalities": ["audio"]}, Reason.UNSUPPORTED_FIELD, "modalities"),
    ({"surprise": 1}, Reason.UNSUPPORTED_FIELD, "surprise"),
    ({"reasoning_effort": "vast"}, Reason.INVALID_ARGUMENT, "reasoning_effort"),
    (
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        Reason.INVALID_ARGUMENT,
        "chat_template_kwargs.enable_thinking",
    ),
    ({"metadata": {str(key): "" for key in range(17)}}, Reason.INVALID_ARGUMENT, "metadata"),
    ({"metadata": {"k" * 65: ""}}, Reason.INVALID_ARGUMENT, "metadata." + "k" * 64),
    ({"metadata": {"user": "a"}, "user": "b"}, Reason.INVALID_ARGUMENT, "metadata.user"),
    ({"prompt_logprobs": 1}, Reason.UNSUPPORTED_FIELD, "prompt_logprobs"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        Reason.UNSUPPORTED_FIELD,
        "stream_options.include_obfuscation",
    ),
    ({"best_of": 3, "stream": True}, Reason.INVALID_ARGUMENT, "best_of"),
]


@pytest.mark.parametrize(("extra", "reason", "field"), CHAT_CASES, ids=lambda value: str(value)[:50])
async def test_chat_names_the_field(
    stack: Deployment, extra: dict[str, Any], reason: Reason, field: str
) -> None:
    response = await stack.http.post(CHAT, json={"model": "tiny", "messages": MESSAGES, **extra})
    error = response.json()["error"]
    assert (error["reason"], error["param"]) == (reason.value, field), error["message"]
    assert error["code"] == reason.openai_code
    assert response.status_code == reason.mapping.http_status
    assert error["type"] == reason.mapping.openai_type
    assert (
        field.split("[", maxsplit=1)[0].rsplit(".", maxsplit=1)[-1] in error["message"]
        or reason is Reason.CONTEXT_LENGTH_EXCEEDED
    )
    assert response.headers["x-request-id"] == "request-1"


@pytest.mark.parametrize(
    "extra",
    [{"max_tokens": 100_000}, {"messages": [{"role": "user", "content": "x" * 5000}]}],
    ids=["completion", "prompt"],
)
async def test_a_context_that_is_too_long_is_told_as_openai_does(
    stack: Deployment, extra: dict[str, Any]
) -> None:
    error = (await stack.chat(**extra)).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith("This model's maximum context length is 4096 tokens. However, ")
    # LangChain sees nothing but the message.
    assert "context_length_exceeded" in error["message"]


async def test_what_a_chat_cannot_have_is_not_advised(stack: Deployment) -> None:
    assert "echo" not in (await stack.chat(max_tokens=0)).json()["error"]["message"]
    response = await stack.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "x", "max_tokens": 0}
    )
    assert "or set echo" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"model": NaN}',
        b'{"model": "tiny", "temperature": Infinity}',
        b'{"model": "tiny", "messages": [], "temperature": 1e999}',
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"metadata": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}",
        b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b', "model": "tiny"}',
    ],
    ids=range(11),
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/tokenize"])
async def test_what_is_not_a_request_is_refused(stack: Deployment, path: str, body: bytes) -> None:
    response = await stack.http.post(path, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["reason"] in ("MALFORMED_BODY", "INVALID_ARGUMENT", "UNSUPPORTED_FIELD")


@pytest.mark.parametrize(
    ("extra", "field"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [1, 2.0]}, "prompt[1]"),
        ({"prompt": [[1], [2, 3.0]]}, "prompt[1][1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": [100_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "x" * 5000}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
    ],
)
async def test_completions_name_the_field(stack: Deployment, extra: dict[str, Any], field: str) -> None:
    response = await stack.http.post("/v1/completions", json={"model": "tiny", **extra})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


async def test_ids_to_decode_are_integers_and_a_fields_own_number_may_be_whole(stack: Deployment) -> None:
    response = await stack.http.post("/detokenize", json={"tokens": [1, 2.0]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tokens[1]"
    assert (await stack.chat(max_tokens=1.0, seed=7.0, logit_bias={"7": 1.0})).status_code == 200


@pytest.mark.parametrize("key", ["007", "x", "1.0", "", " 7", "9" * 5000])
async def test_a_bias_for_no_token_is_refused_by_its_key(stack: Deployment, key: str) -> None:
    error = (await stack.chat(logit_bias={"7": 1, key: 1})).json()["error"]
    assert (error["reason"], error["param"]) == ("INVALID_ARGUMENT", "logit_bias")
    assert repr(key[:80]) in error["message"]


async def test_fields_without_effect_are_named_in_a_header(stack: Deployment) -> None:
    response = await stack.chat(
        prompt_cache_retention="24h", prediction=None, store=False, user="u", verbosity="medium"
    )
    assert response.status_code == 200
    warnings = response.headers.get_list("x-millrace-warning")
    assert len(warnings) == 1
    assert warnings[0].startswith("prompt_cache_retention ")


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 0),
        ({"response_format": {"type": "json_object"}}, 1),
        ({"response_format": {"type": "text"}}, 0),
        ({"tools": [TOOL]}, 0),
        ({"tools": [TOOL], "tool_choice": "required"}, 1),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}, 1),
    ],
)
async def test_min_tokens_beside_a_constraint_is_said_to_yield(
    stack: Deployment, extra: dict[str, Any], expected: int
) -> None:
    response = await stack.chat(min_tokens=2, **extra)
    assert response.status_code == 200
    warnings = response.headers.get_list("x-millrace-warning")
    assert [each.split()[0] for each in warnings] == ["min_tokens"] * expected


@pytest.mark.parametrize("extra", [{"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_ignore_eos_is_taken_where_nothing_constrains_the_answer(
    stack: Deployment, extra: dict[str, Any]
) -> None:
    assert (await stack.chat(ignore_eos=True, **extra)).status_code == 200


async def test_large_bodies_are_refused_by_declaration_and_by_content(stack: Deployment) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 1024 * 1024

    response = await stack.http.post(CHAT, content=pieces())
    assert response.status_code == 413
    assert response.json()["error"]["reason"] == "REQUEST_TOO_LARGE"


async def test_wrong_paths_and_methods(stack: Deployment) -> None:
    response = await stack.http.post("/v1/moderations", json={})
    assert response.status_code == 404
    assert "moderation" in response.json()["error"]["message"]
    response = await stack.http.get(CHAT)
    assert response.status_code == 405
    assert response.headers["allow"]
    assert response.json()["error"]["reason"] == "METHOD_NOT_ALLOWED"


async def test_requests_that_did_not_pass_the_edge_are_refused(stack: Deployment) -> None:
    for header in ("", "forged", "AAAA"):
        response = await stack.http.get("/v1/models", headers={"x-millrace-context": header})
        assert response.status_code == 401


async def test_nothing_is_left_behind(stack: Deployment) -> None:
    assert stack.gateway.num_open == 0
    assert (await stack.chat()).status_code == 200
