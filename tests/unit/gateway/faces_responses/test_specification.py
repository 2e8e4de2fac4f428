"""The cases that Open Responses publishes to try a server by, over both transports, against its types.

Their ids are the specification's (compliance tests of 2026-04-24); those of connections are in test_socket.
What they try of a model's wits is scripted here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from openresponses_types import types as spec

from tests.unit.gateway.faces_responses.test_responses import CALL, events, post, roles, serving
from tests.unit.gateway.faces_responses.test_socket import opened, send, turn, until_end

WEATHER = {
    "type": "function",
    "name": "add",
    "description": "Adds two numbers",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
}


def said(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content, **fields}


def has_text(response: dict[str, Any]) -> bool:
    return response["output"][-1]["content"][0]["text"] == "It is 4."


def has_call(response: dict[str, Any]) -> bool:
    return any(each["type"] == "function_call" and each["name"] == "add" for each in response["output"])


# By id: the body, what the model says, whether the response is right, and who has spoken in the prompt.
CASES: dict[str, tuple[dict[str, Any], str, Callable[[dict[str, Any]], bool], list[str]]] = {
    "basic-response": ({"input": [said("user", "2+2?")]}, "It is 4.", has_text, ["user"]),
    "assistant-phase": (
        {
            "input": [
                said("assistant", "I look it up.", phase="commentary"),
                said("assistant", "It is 4.", phase="final_answer"),
                said("user", "Again?"),
            ]
        },
        "It is 4.",
        has_text,
        ["assistant", "user"],
    ),
    "system-prompt": (
        {"input": [said("system", "Be a pirate."), said("user", "2+2?")]},
        "It is 4.",
        has_text,
        ["system", "user"],
    ),
    "tool-calling": ({"input": [said("user", "2+2?")], "tools": [WEATHER]}, CALL, has_call, ["user"]),
    "multi-turn": (
        {"input": [said("user", "I am Alice."), said("assistant", "Hello!"), said("user", "Who am I?")]},
        "It is 4.",
        has_text,
        ["user", "assistant", "user"],
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_published_cases_of_answers(case: str) -> None:
    body, says, is_right, speakers = CASES[case]
    async with serving(says) as stack, opened(stack) as socket:
        whole = (await post(stack, **body)).json()
        streamed = (await events(stack, **body))[-1]["response"]
        framed = await turn(socket, **body)
        prompts = [roles(each.conversation.messages) for each in stack.tokenizer.prepared]
    for response in (whole, streamed, framed):
        spec.ResponseResource.model_validate(response)
        assert response["status"] == "completed"
        assert is_right(response)
    assert prompts == 3 * [speakers]


async def test_published_case_of_an_image() -> None:
    """The models read text: it is refused by its place, on both transports."""
    parts = [
        {"type": "input_text", "text": "What?"},
        {"type": "input_image", "image_url": "data:image/png;,"},
    ]
    async with serving() as stack, opened(stack) as socket:
        whole = (await post(stack, input=[said("user", parts)])).json()["error"]
        framed = await turn(socket, input=[said("user", parts)])
    for error in (whole, framed):
        assert (error["type"], error["param"]) == ("invalid_request_error", "input[0].content[1].type")


async def test_published_cases_of_compaction() -> None:
    given = [said("user", "We launch on Tuesday."), said("assistant", "Noted.")]
    async with serving() as stack:
        made = await post(stack, "/compact", input=given, prompt_cache_key="a key")
        missing = await stack.http.post("/v1/responses/compact", json={"input": given})
    spec.CompactResource.model_validate(made.json())
    assert made.json()["output"][-1]["type"] == "compaction"
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")


async def test_published_case_of_messages_in_a_row() -> None:
    """websocket-sequential-responses, sent one behind the other and together."""
    async with serving() as stack, opened(stack) as socket:
        for _ in range(2):
            assert (await turn(socket, store=False))["status"] == "completed"
        for _ in range(2):
            await send(socket, store=False)
        ids = [(await until_end(socket))[-1]["response"]["id"] for _ in range(2)]
    assert len(set(ids)) == 2
