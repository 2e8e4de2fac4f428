"""What only the back end stops at, or does not end with: named by keyword and path, or left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.chat import JsonSchemaFormat, ToolChoiceMode
from tests.unit.tokenizer_svc.test_schema_soundness import accepts, refusal, unenforced
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import GrammarRequest, ToolRules, ToolSpec, WorkerReply
from tokenizer_svc.text import formats

_BACKEND = Backend((BUNDLED_CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"), ())
OVERLAPPING = {"patternProperties": {"^a": {"type": "string"}, "b$": {"type": "integer"}}}
OTHER = ToolSpec(
    name="other", parameters_json=json.dumps({"properties": {"y": {"pattern": "^a$"}}}), strict=True
)


def reply_to_tools(*tools: ToolSpec, schema: Any = None) -> WorkerReply:
    mode = ToolChoiceMode.REQUIRED if schema is None else ToolChoiceMode.AUTO
    form = None if schema is None else JsonSchemaFormat(json.dumps(schema))
    rules = ToolRules(tools=tools, mode=mode, parallel=True, format=formats.HERMES)
    limits = PromptLimitsConfig(max_schema_depth=64, max_artifact_bytes=1 << 20)
    return build(GrammarRequest(tools=rules, response_format=form), _BACKEND, limits)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        # Each alone is told; together they have 62,615,533 remainders, of which the library makes states.
        ({"allOf": [{"multipleOf": 7919}, {"multipleOf": 7907}]}, "/allOf/1/multipleOf"),
        # The library cuts off common multiples beyond 32 bits.
        ({"allOf": [{"multipleOf": 8633}, {"multipleOf": 10**6}]}, "/allOf/1/multipleOf"),
        ({"items": {"anyOf": [{"type": "string"}, {"multipleOf": 1000003}]}}, "/items/anyOf/1/multipleOf"),
        (
            {
                "properties": {"type": {"multipleOf": 7907, "$ref": "#/$defs/a"}, "multipleOf": {}},
                "$defs": {"a": {"multipleOf": 0.7919}},
            },
            "/properties/type/multipleOf",
        ),
        # Alternatives are told side by side, which takes as many states.
        ({"anyOf": [{"multipleOf": 7919}, {"multipleOf": 7907}]}, "/anyOf/1/multipleOf"),
        ({"properties": {"a": {"items": {"$ref": "#"}, "multipleOf": 999983}}}, "/properties/a/multipleOf"),
    ],
)
def test_divisors_without_an_end_are_named(schema: Any, place: str) -> None:
    assert refusal(schema).startswith(f"multipleOf at {place} cannot be enforced")
    assert unenforced(schema) == [place]


@pytest.mark.parametrize(
    ("divisors", "common"),
    [((89, 97), 89 * 97), ((13, 10**6), 13 * 10**6), ((0.5, 7), 7), ((6, 4), 12), ((1, 0.25), 1)],
)
def test_divisors_that_can_be_told_hold_together(divisors: tuple[float, ...], common: int) -> None:
    schema = {"allOf": [{"multipleOf": each} for each in divisors]}
    assert accepts(schema, 3 * common)
    assert not any(accepts(schema, each) for each in divisors if each % common)


def test_divisors_of_other_values_do_not_hold_together() -> None:
    other = {"type": "string", "multipleOf": 1000003}
    assert accepts({"anyOf": [{"multipleOf": 7919}, other]}, 7919)
    assert accepts({"properties": {"a": {"multipleOf": 7919}}, "multipleOf": 7907}, {"a": 7919})


def test_what_it_stops_at_in_a_tool_is_named_or_left_out() -> None:
    parameters = {"type": "object", "properties": {"x": OVERLAPPING}}
    refused = reply_to_tools(
        OTHER, ToolSpec(name="hard", parameters_json=json.dumps(parameters), strict=True)
    ).refused
    assert refused is not None
    assert refused.field == "tools[1].function.parameters"
    place = "/properties/x/patternProperties"
    assert refused.message.startswith(f"tool 'hard': patternProperties at {place} cannot be enforced")
    built = reply_to_tools(OTHER, ToolSpec(name="hard", parameters_json=json.dumps(parameters))).built
    assert built is not None
    assert built.enforcement is not None
    assert [each.path for each in built.enforcement.unenforced] == [f"/tools/1/parameters{place}"]
    # The other tool's requirements are still there.
    assert b'"pattern":"^a$"' in built.payload


def test_what_it_stops_at_in_the_answer_beside_tools_is_named() -> None:
    refused = reply_to_tools(OTHER, schema={"properties": {"x": OVERLAPPING}}).refused
    assert refused is not None
    assert refused.field == "response_format.json_schema"
    assert refused.message.startswith("patternProperties at /properties/x/patternProperties cannot")
