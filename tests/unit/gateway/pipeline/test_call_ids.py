"""Ids of tool calls: templates get them back with the next turn, and some take only what they know."""

from __future__ import annotations

import re

import pytest

from contract.formats import UNKNOWN_FORMAT
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import END_ID, encode

BODY = {
    "model": "tiny",
    "n": 2,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
}
CALLS = {
    "hermes": '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2,
    # Mistral's templates refuse every id that has not nine letters and digits.
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {}}]',
    "mistral_v11": "[TOOL_CALLS]f[CALL_ID]aaaaaaaaa[ARGS]{}[TOOL_CALLS]f[CALL_ID]aaaaaaaaa[ARGS]{}",
    "mistral_v13": "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]f[ARGS]{}",
}
NINE = r"[a-zA-Z0-9]{9}"


@pytest.mark.parametrize(
    ("name", "form"),
    [("hermes", r"call_\w+"), ("mistral", NINE), ("mistral_v11", NINE), ("mistral_v13", NINE)],
)
async def test_ids_are_unique_and_of_the_form_that_templates_take(name: str, form: str) -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: [*encode(CALLS[name]), END_ID])
    tokenizer = ByteTokenizer()
    tokenizer.tool_call_format = name
    async with deployed(engine, tokenizer=tokenizer) as stack:
        answer = (await stack.http.post("/v1/chat/completions", json=BODY)).json()
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert all(re.fullmatch(form, each) for each in ids), ids


async def test_a_call_that_a_stop_string_cuts_is_not_told_as_a_call() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"city": 1}}</tool_call>'
    engine = ScriptedEngine(reply=lambda submit, choice: [*encode(text), END_ID])
    async with deployed(engine) as stack:
        cut = (await stack.http.post("/v1/chat/completions", json={**BODY, "stop": "city"})).json()
        whole = (await stack.http.post("/v1/chat/completions", json={**BODY, "stop": "none"})).json()
    assert [choice["finish_reason"] for choice in cut["choices"]] == ["stop", "stop"]
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["tool_calls", "tool_calls"]


async def test_plain_arguments_get_the_types_of_the_requests_tools() -> None:
    arguments = "".join(f"<parameter={key}>\n7\n</parameter>\n" for key in "ns")
    text = f"<tool_call>\n<function=f>\n{arguments}</function>\n</tool_call>"
    engine = ScriptedEngine(reply=lambda submit, choice: [*encode(text), END_ID])
    tokenizer = ByteTokenizer()
    tokenizer.tool_call_format = "qwen_xml"
    types = {"n": {"type": "integer"}, "s": {"type": "string"}}
    function = {"name": "f", "parameters": {"type": "object", "properties": types}}
    body = {**BODY, "n": 1, "tools": [{"type": "function", "function": function}]}
    async with deployed(engine, tokenizer=tokenizer) as stack:
        answer = (await stack.http.post("/v1/chat/completions", json=body)).json()
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": '{"n": 7, "s": "7"}'}


async def test_tools_of_a_model_whose_calls_nobody_can_read_are_refused() -> None:
    tokenizer = ByteTokenizer()
    tokenizer.tool_call_format = UNKNOWN_FORMAT
    async with deployed(ScriptedEngine(), tokenizer=tokenizer) as stack:
        answer = await stack.http.post("/v1/chat/completions", json=BODY)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert "writes tool calls in a format that is not known here" in answer.json()["error"]["message"]
