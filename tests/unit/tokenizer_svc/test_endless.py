"""What has no finite value is refused at once, by its place, whichever keyword and front end it came by."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.chat import (
    EbnfFormat,
    JsonSchemaFormat,
    LarkFormat,
    RegexFormat,
    ResponseFormat,
    ToolChoiceMode,
)
from tests.unit.tokenizer_svc.test_schema_soundness import accepts, reply, takes
from tokenizer_svc.config import BUNDLED_CHECKPOINT, PromptLimitsConfig
from tokenizer_svc.grammar.backend import Backend
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import GrammarRequest, ToolRules, ToolSpec, WorkRefusal

_BACKEND = Backend((BUNDLED_CHECKPOINT / "tokenizer.json").read_text(encoding="utf-8"), ())
_ITSELF = {"$ref": "#"}
_NEXT = {"type": "object", "properties": {"kind": {"const": "a"}, "next": _ITSELF}, "required": ["kind"]}
_OLD = {"$schema": "http://json-schema.org/draft-07/schema#"}


def _requiring(name: str, reference: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"$ref": reference}}, "required": [name]}


# Schemas without a finite value, each with the place that the refusal names.
ENDLESS: dict[str, tuple[dict[str, Any], str]] = {
    "two objects": (
        {
            "$defs": {"a": _requiring("b", "#/$defs/b"), "b": _requiring("a", "#/$defs/a")},
            "$ref": "#/$defs/a",
        },
        "#/$defs/a",
    ),
    "inside": (
        {"$defs": {"loop": _requiring("x", "#/$defs/loop")}, **_requiring("in", "#/$defs/loop")},
        "#/$defs/loop",
    ),
    "beside a reference": (
        {"$defs": {"n": {"type": "object", "properties": {"x": {"$ref": "#/$defs/n", "required": ["x"]}},
                         "required": ["x"]}}, "$ref": "#/$defs/n"},
        "#/$defs/n",
    ),
    "additionalProperties": ({"type": "object", "additionalProperties": _ITSELF, "minProperties": 1}, "#"),
    "patternProperties": (
        {"type": "object", "patternProperties": {"^a": _ITSELF}, "additionalProperties": False,
         "minProperties": 1},
        "#",
    ),
    "unevaluatedProperties": ({"type": "object", "unevaluatedProperties": _ITSELF, "minProperties": 1}, "#"),
    "propertyNames": (
        {"type": "object", "propertyNames": {"enum": ["a"]}, "additionalProperties": _ITSELF,
         "minProperties": 1},
        "#",
    ),
    "one of the optional ones": (
        {"type": "object", "properties": {"x": _ITSELF, "y": _ITSELF}, "additionalProperties": False,
         "minProperties": 1},
        "#",
    ),
    "more than the finite ones": (
        {"type": "object", "properties": {"x": {"type": "string"}}, "additionalProperties": _ITSELF,
         "minProperties": 2},
        "#",
    ),
    "too many cases": (
        {"type": "object", "properties": {f"p{number}": _ITSELF for number in range(30)},
         "additionalProperties": False, "minProperties": 3},
        "#",
    ),
    "items": ({"type": "array", "items": _ITSELF, "minItems": 1}, "#"),
    "prefixItems": ({"type": "array", "prefixItems": [{"type": "string"}, _ITSELF], "minItems": 2}, "#"),
    "items of draft 7": ({**_OLD, "type": "array", "items": [_ITSELF], "minItems": 1}, "#"),
    "additionalItems": (
        {**_OLD, "type": "array", "items": [{"type": "string"}], "additionalItems": _ITSELF, "minItems": 2},
        "#",
    ),
    "unevaluatedItems": ({"type": "array", "unevaluatedItems": _ITSELF, "minItems": 1}, "#"),
    "contains": ({"type": "array", "contains": _ITSELF}, "#"),
    "contains of draft 7": ({**_OLD, "type": "array", "contains": _ITSELF}, "#"),
    "minContains": ({"type": "array", "contains": _ITSELF, "minContains": 2}, "#"),
    "contains among few": ({"type": "array", "contains": _ITSELF, "maxItems": 3}, "#"),
    "allOf": ({"allOf": [{"type": "object", "properties": {"x": _ITSELF}}, {"required": ["x"]}]}, "#"),
    "anyOf": ({"anyOf": [{"type": "array", "items": _ITSELF, "minItems": 1}, _requiring("x", "#")]}, "#"),
    "oneOf": ({"oneOf": [{"type": "array", "items": _ITSELF, "minItems": 1}, _requiring("x", "#")]}, "#"),
    "not": ({"type": "object", "properties": {"x": _ITSELF}, "not": {"properties": {"x": False}}}, "#"),
    "then": (
        {**_NEXT, "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["next"]}},
        "#",
    ),
    "else": (
        {**_NEXT, "if": {"properties": {"kind": {"const": "b"}}}, "else": {"required": ["next"]}},
        "#",
    ),
    "dependentRequired": ({**_NEXT, "dependentRequired": {"kind": ["next"]}}, "#"),
    "dependentSchemas": ({**_NEXT, "dependentSchemas": {"kind": {"required": ["next"]}}}, "#"),
    "dependencies": ({**_OLD, **_NEXT, "dependencies": {"kind": ["next"]}}, "#"),
    "$anchor": ({"$anchor": "me", **_requiring("x", "#me")}, "#"),
    "$dynamicRef": (
        {"$dynamicAnchor": "me", "type": "object", "properties": {"x": {"$dynamicRef": "#me"}},
         "required": ["x"]},
        "#",
    ),
}  # fmt: skip


def _refusal(request: GrammarRequest) -> WorkRefusal:
    refused = build(request, _BACKEND, PromptLimitsConfig()).refused
    assert refused is not None
    return refused


@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_without_a_finite_value_is_refused_by_its_place(name: str, strict: bool) -> None:
    schema, place = ENDLESS[name]
    refused = _refusal(GrammarRequest(response_format=JsonSchemaFormat(json.dumps(schema), strict=strict)))
    assert refused.field == "response_format.json_schema"
    # Strict mode may refuse a keyword before that.
    assert f"no finite value matches the schema at {place}:" in refused.message or (
        strict and "cannot be enforced exactly" in refused.message
    )


@pytest.mark.parametrize(
    "name", [name for name, (schema, _) in ENDLESS.items() if schema.get("type", "object") == "object"]
)
def test_so_is_a_tool_with_such_parameters(name: str) -> None:
    schema, place = ENDLESS[name]
    tools = (
        ToolSpec(name="fine", parameters_json='{"type": "object"}'),
        ToolSpec(name="endless", parameters_json=json.dumps({"type": "object", **schema}), strict=True),
    )
    rules = ToolRules(tools=tools, mode=ToolChoiceMode.AUTO, parallel=False, format="hermes")
    refused = _refusal(GrammarRequest(tools=rules))
    assert refused.field == "tools[1].function.parameters"
    assert refused.message.startswith("tool 'endless': ")
    # Strict mode may refuse a keyword before that.
    assert f"no finite value matches the schema at {place}" in refused.message or (
        "cannot be enforced exactly" in refused.message
    )


@pytest.mark.parametrize(
    ("form", "part"),
    [
        (LarkFormat('start: "a" x\nx: "b" x | y\ny: "c" y\n'), "'y'"),
        (LarkFormat('start: "a" | "b" x\nx: "c" x\n'), "'x'"),
        (LarkFormat('start: "a" start? "b" start\n'), "'start'"),
        (LarkFormat('start: "a" X\nX: /[^\\s\\S]/\n'), "'start'"),
        (
            LarkFormat('start: "a" x\nx: %json {"type": "array", "items": {"$ref": "#"}, "minItems": 1}\n'),
            "'x'",
        ),
        (EbnfFormat('root ::= "a" root'), "'root'"),
        (EbnfFormat('root ::= "(" root ")" | [a-z]+ | x\nx ::= [0-9] x'), "'x'"),
        (RegexFormat(r"a[^\s\S]b"), "no text matches the pattern"),
    ],
)
def test_a_grammar_with_a_rule_that_never_ends_is_refused_by_its_name(
    form: ResponseFormat, part: str
) -> None:
    assert part in _refusal(GrammarRequest(response_format=form)).message


@pytest.mark.parametrize(
    "form",
    [
        LarkFormat('start: "a" | start "b"\nunused: "c" unused\n'),
        EbnfFormat('root ::= "a" root | ""'),
        RegexFormat(r"a|b[^\s\S]"),
    ],
)
def test_recursion_that_ends_is_none_of_these(form: ResponseFormat) -> None:
    assert build(GrammarRequest(response_format=form), _BACKEND, PromptLimitsConfig()).built is not None


def test_recursion_that_ends_is_accepted() -> None:
    tree = {
        "type": "object",
        "properties": {"left": _ITSELF, "right": {"anyOf": [_ITSELF, {"type": "null"}]}},
        "required": ["right"],
    }
    assert accepts(tree, {"left": {"right": None}, "right": {"right": None}})
    nested = {"type": "array", "prefixItems": [{"type": "string"}, _ITSELF], "minItems": 1}
    assert accepts(nested, ["a", ["b", ["c"]]])


def test_what_never_ends_cannot_be_written_where_it_may_be_left_out() -> None:
    schema = {
        "$defs": {"loop": _requiring("x", "#/$defs/loop")},
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"$ref": "#/$defs/loop"}},
        "required": ["a"],
    }
    built = reply(schema)
    assert takes(built, '{"a":1}')
    assert takes(built, '{"a":1,"c":2}')
    assert not takes(built, '{"a":1,"b":{"x')
