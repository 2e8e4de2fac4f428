"""What other clients write into messages is ignored and named; what they ask for is served."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.contract.test_errors_http import TOOL, allowed_tools
from tests.unit.gateway.rig.deployment import Deployment, deployed

IGNORED = "x-millrace-ignored"
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Deployment]:
    async with deployed() as running:
        yield running


# The second turn as LiteLLM sends it: keys of its own in the answer, in its call, and in a text part.
SECOND_TURN: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": None,
        "provider_specific_fields": {"refusal": None},
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "caller": 1,
                "function": {"name": "add", "arguments": "{}", "parsed": {"huge": 10**30}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
]


@pytest.mark.parametrize("padding", [0, 100_000], ids=["small", "large"])
async def test_strange_keys_of_messages_are_ignored_and_named(stack: Deployment, padding: int) -> None:
    tool = {"type": "function", "function": {"name": "add", "description": " " * padding}}
    response = await stack.chat(messages=SECOND_TURN, tools=[tool], max_tokens=2)
    assert response.status_code == 200, response.text
    prepared = stack.tokenizer.prepared[-1].conversation
    assert [each.content for each in prepared.messages] == ["hi", "", "3"]
    assert prepared.messages[1].tool_calls[0].name == "add"
    assert response.headers[IGNORED].split(", ") == [
        "messages[0].content[0].cache_control",
        "messages[1].provider_specific_fields",
        "messages[1].tool_calls[0].caller",
        "messages[1].tool_calls[0].function.parsed",
    ]


async def test_strange_keys_of_tools_are_ignored_and_named(stack: Deployment) -> None:
    function = {"name": "add", "parameters": {"type": "object", "title": "kept"}, "examples": [1]}
    tool = {"type": "function", "function": function, "cache_control": {"type": "ephemeral"}}
    response = await stack.chat(tools=[tool], max_tokens=2)
    assert response.status_code == 200, response.text
    (kept,) = stack.tokenizer.prepared[-1].conversation.tools
    assert (kept.name, "kept" in kept.parameters_json) == ("add", True)
    assert response.headers[IGNORED] == "tools[0].cache_control, tools[0].function.examples"


@pytest.mark.parametrize("field", ["messages", "tools"])
async def test_what_cannot_be_read_inside_a_strange_key_is_refused(stack: Deployment, field: str) -> None:
    body = f'{{"model":"tiny","messages":[{{"role":"user","content":"x"}}],"{field}":[{{"odd":1e999}}]}}'
    response = await stack.http.post("/v1/chat/completions", content=body)
    assert (response.status_code, "out of range" in response.text) == (400, True)


async def test_what_is_known_is_read_as_strictly_beside_strange_keys(stack: Deployment) -> None:
    response = await stack.chat(messages=[{"role": "user", "content": 7, "odd": 1}])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages[0].content")
    response = await stack.chat(messages=[{"role": "user", "content": "x", "odd": 1}], surprise=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "surprise")


async def test_the_header_is_bounded_and_cannot_be_ended_by_a_name(stack: Deployment) -> None:
    odd = {"a\r\nset-cookie: x\u2028": 1, "k" * 500: 1, **{f"odd{number}": 1 for number in range(50)}}
    response = await stack.chat(messages=[{"role": "user", "content": "x", **odd}])
    assert response.status_code == 200
    value = response.headers[IGNORED]
    assert value.startswith("messages[0].a\\r\\nset-cookie: x\\u2028, messages[0].kkk")
    assert value.endswith(" and 44 more")
    assert len(value) < 700
    assert "set-cookie" not in response.headers


async def test_nothing_is_named_where_nothing_is_ignored(stack: Deployment) -> None:
    assert IGNORED not in (await stack.chat()).headers


@pytest.mark.parametrize(("mode", "expected"), [("auto", 0), ("required", 3)])
async def test_of_the_tools_the_allowed_ones_are_offered(stack: Deployment, mode: str, expected: int) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    response = await stack.chat(tools=[TOOL, other], tool_choice=allowed_tools(mode, "add"))
    assert response.status_code == 200, response.text
    conversation = stack.tokenizer.prepared[-1].conversation
    assert [each.name for each in conversation.tools] == ["add"]
    assert conversation.tool_choice.mode == expected


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_of_every_chunk_counts_up_to_the_last(stack: Deployment, path: str) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
    if path.endswith("v1/completions"):
        asked = {"prompt": "hi"}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = await stack.events(path, max_tokens=5, stream_options=options, **asked)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert chunks[-1]["usage"] == last["usage"]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
