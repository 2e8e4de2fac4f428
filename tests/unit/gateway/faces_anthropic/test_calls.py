"""Calls in Anthropic's form: their input is an object, whole or cut, and no markup of them is text."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gateway.faces.anthropic import answer_types as answers
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine

from .test_messages import TOOL, call, joined, says, streamed, whole


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, "}"]}', {"a": [1, "}"]}),
        ("[1]", {}),
        ('"text"', {}),
        ('{"a": nothing}', {}),
        (
            '{"a": "x, }", "b": {"c": [1, 2], "d": 3}, "e": nothing}',
            {"a": "x, }", "b": {"c": [1, 2], "d": 3}},
        ),
    ],
)
async def test_the_input_of_a_call_is_an_object_whatever_the_model_wrote(
    arguments: str, expected: dict[str, Any]
) -> None:
    async with deployed(ScriptedEngine(reply=says(call(arguments)))) as stack:
        (block,) = (await whole(stack, tools=[TOOL])).content
        assert isinstance(block, answers.ToolUseAnswer)
        assert block.input == expected
        assert block.id.startswith("toolu_")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {}),
        ('{"pa', {}),
        ('{"path": "/a", "lines": [1, 2', {"path": "/a"}),
        ('{"path": "/a", "num": 12', {"path": "/a"}),
        ('{"path": "/a"', {"path": "/a"}),
        ('{"path": "/a", "text": "b, c', {"path": "/a"}),
        ('{"deep": {"a": 1, "b": 2}, "more": {"a": 1, "b"', {"deep": {"a": 1, "b": 2}}),
    ],
)
@pytest.mark.parametrize("tokens_per_step", [1, 5000])
async def test_a_call_that_max_tokens_cut_has_the_members_that_are_whole(
    arguments: str, expected: dict[str, Any], tokens_per_step: int
) -> None:
    cut = call(arguments).removesuffix("}\n</tool_call>")
    limits = {"tools": [TOOL], "max_tokens": len(cut)}
    engine = ScriptedEngine(reply=says(cut + "and more"), tokens_per_step=tokens_per_step)
    async with deployed(engine) as stack:
        message = await whole(stack, **limits)
        events = await streamed(stack, **limits)
    (block,) = message.content
    assert isinstance(block, answers.ToolUseAnswer)
    assert (block.name, block.input, message.stop_reason) == ("add", expected, "max_tokens")
    assert joined(events) == message


async def test_a_call_that_was_cut_before_its_name_is_no_text() -> None:
    for text in ("<tool_call>", '<tool_call>\n{"name": "ad'):
        async with deployed(ScriptedEngine(reply=says(f"sure\n{text}d"))) as stack:
            message = await whole(stack, tools=[TOOL], max_tokens=len(f"sure\n{text}"))
        assert [msgspec.to_builtins(each)["text"] for each in message.content] == ["sure"]
        assert message.stop_reason == "max_tokens"


async def test_eager_tools_have_their_arguments_as_they_come() -> None:
    async with deployed(ScriptedEngine(reply=says(call('{"a": 1}')))) as stack:
        for is_eager in (False, True):
            events = await streamed(stack, tools=[{**TOOL, "eager_input_streaming": is_eager}])
            pieces = [each for each in events if isinstance(each, answers.BlockDelta)]
            assert (len(pieces) > 1) is is_eager
            assert joined(events).content[0].input == {"a": 1}  # type: ignore[union-attr]
