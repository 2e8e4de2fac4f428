"""Answers and conversations of which a part is missing say so."""

from __future__ import annotations

from typing import Any

from gateway.faces.unserved import WARNING_HEADER
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine

from .test_responses import (
    ADD,
    ANSWERS,
    APPLY,
    PATCH,
    PATCH_CALL,
    events,
    post,
    says,
    serving,
    without_moments,
)


async def test_an_answer_that_is_cut_says_so() -> None:
    for text, kind in (
        ("It is 4, I think.", "message"),
        (ANSWERS["call"], "message"),
        (PATCH_CALL, "custom_tool_call"),
    ):
        async with serving(text) as stack:
            limit = 60 if kind == "custom_tool_call" else 25
            whole = (await post(stack, tools=[ADD, APPLY], max_output_tokens=limit)).json()
            streamed = await events(stack, tools=[ADD, APPLY], max_output_tokens=limit)
        if text.startswith("It"):
            assert whole["status"] == "completed"
            continue
        assert whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert whole["completed_at"] is None
        last = whole["output"][-1]
        assert (last["type"], last["status"]) == (kind, "incomplete")
        if kind == "custom_tool_call":
            assert PATCH.startswith(last["input"])
        assert streamed[-1]["type"] == "response.incomplete"
        assert without_moments(streamed[-1]["response"]) == without_moments(whole)


async def test_a_call_that_was_cut_is_an_item_that_is_not_complete() -> None:
    so_far = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b'
    for text, expected in ((so_far, '{"a": 1, "b'), (so_far[:26], ""), (so_far[:20], None)):
        async with serving(text + "dd") as stack:
            whole = (await post(stack, tools=[ADD], max_output_tokens=len(text))).json()
            streamed = await events(stack, tools=[ADD], max_output_tokens=len(text))
        assert whole["status"] == "incomplete"
        told = [(each["type"], each["status"], each["arguments"]) for each in whole["output"]]
        assert told == ([] if expected is None else [("function_call", "incomplete", expected)])
        assert streamed[-1]["type"] == "response.incomplete"
        assert without_moments(streamed[-1]["response"]) == without_moments(whole)


async def test_the_oldest_turns_go_where_truncation_is_asked_for() -> None:
    turns = [
        each
        for number in range(6)
        for each in ({"role": "user", "content": f"{number}" * 40}, {"role": "assistant", "content": "ok"})
    ]
    body: dict[str, Any] = {
        "instructions": "Stay.",
        "input": [*turns, {"role": "user", "content": "last"}],
        "max_output_tokens": 20,
    }
    async with deployed(ScriptedEngine(max_model_len=200, reply=says("ok"))) as stack:
        refused = await post(stack, **body)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        served = await post(stack, truncation="auto", **body)
        assert served.status_code == 200, served.text
        left = [each.content for each in stack.tokenizer.prepared[-1].conversation.messages]
        assert (left[0], left[-1]) == ("Stay.", "last")
        assert left[1:-1] == [each for pair in range(3, 6) for each in (f"{pair}" * 40, "ok")]
        assert "left out the oldest 3 of 7 turns" in served.headers[WARNING_HEADER]
        left_out = served.json()["left_out"]
        assert (left_out["num_turns"], left_out["of_turns"]) == (3, 7)
        assert left_out["num_tokens"] > 3 * 40
        streamed = [each for each in await events(stack, truncation="auto", **body) if "response" in each]
        assert [each["response"]["left_out"] for each in streamed] == [left_out] * 3
        whole = {**body, "input": "hi"}
        assert "left_out" not in (await post(stack, truncation="auto", **whole)).json()
