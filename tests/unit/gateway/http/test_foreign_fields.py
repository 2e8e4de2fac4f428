"""A field that another API has is refused with the one to send here, unless it asks for what happens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.gateway.rig.deployment import deployed

HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HI},
    "messages": {"messages": HI, "max_tokens": 9},
    "responses": {"input": "hi"},
}


@pytest.mark.parametrize(
    ("path", "field", "value", "remedy"),
    [
        ("chat/completions", "background", True, "by /v1/responses"),
        ("chat/completions", "previous_response_id", "resp_1", "send all messages, or use /v1/responses"),
        ("chat/completions", "conversation", "conv_1", "send all messages, or use /v1/responses"),
        ("chat/completions", "reasoning", {"effort": "low"}, "send reasoning_effort"),
        ("chat/completions", "max_output_tokens", 9, "max_completion_tokens"),
        ("chat/completions", "truncation", "auto", "send truncate_prompt_tokens"),
        ("messages", "store", True, "use /v1/responses"),
        ("messages", "background", True, "use /v1/messages/batches or /v1/responses"),
        ("messages", "previous_response_id", "resp_1", "send all turns"),
        ("messages", "conversation", {"id": "conv_1"}, "send all turns"),
        ("messages", "reasoning_effort", "low", "send output_config.effort"),
        ("messages", "max_thinking_tokens", 9, "send thinking.budget_tokens"),
        ("responses", "reasoning_effort", "low", "send reasoning.effort"),
        ("responses", "max_tokens", 9, "send max_output_tokens"),
        ("responses", "truncate_prompt_tokens", 9, "send truncation auto"),
    ],
)
async def test_it_is_refused_with_the_field_of_this_api(
    path: str, field: str, value: Any, remedy: str
) -> None:
    async with deployed() as stack:
        body = {"model": "tiny", **BODIES[path]}
        refused = await stack.http.post(f"/v1/{path}", json={**body, field: value})
        error = refused.json()["error"]
        assert refused.status_code == 400
        assert (error.get("param") or error["details"]["field"]) == field
        assert remedy in error["message"]
        assert (await stack.http.post(f"/v1/{path}", json={**body, field: None})).status_code == 200


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
@pytest.mark.parametrize("said", [{"store": False}, {"background": False}, {"truncation": "disabled"}])
async def test_it_is_taken_where_it_asks_for_what_happens_anyway(path: str, said: dict[str, Any]) -> None:
    async with deployed() as stack:
        answered = await stack.http.post(f"/v1/{path}", json={"model": "tiny", **BODIES[path], **said})
        assert answered.status_code == 200, answered.text
