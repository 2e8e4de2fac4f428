"""Numbers beyond 2^53 are enforced as they are written, wherever they stand and however they are bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest

from contract.chat import ToolChoiceMode
from tests.unit.tokenizer_svc.test_schema_soundness import _BACKEND, _LIMITS, reply, takes
from tokenizer_svc.grammar.build import build
from tokenizer_svc.grammar.request import GrammarRequest, ToolRules, ToolSpec
from tokenizer_svc.grammar.schema.document import VALIDATORS, Draft

EDGES = (2**53, 2**53 + 1, 2**62 + 7, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**20, 10**30)
NUMBERS = [sign * edge for edge in EDGES for sign in (1, -1)]


def agrees(schema: Any, values: list[Any]) -> None:
    """The strict grammar takes each of the values exactly if an independent validator does."""
    built = reply(schema)
    assert built.built is not None, built.refused
    judge = VALIDATORS[Draft.DRAFT2020_12](schema)
    for value in values:
        assert takes(built, json.dumps(value)) == judge.is_valid(value), value


def around(number: int) -> list[Any]:
    return [0, 1, -1, *(number + step for step in range(-3, 4)), number * 10, -number]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": 0, "maximum": 0},
        {"exclusiveMinimum": -1, "exclusiveMaximum": 1},
        {"minimum": 0},
        {"maximum": 0},
        {"exclusiveMinimum": 0},
        {"exclusiveMaximum": 0},
        {"minimum": -2, "maximum": 2},
    ],
)
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_intervals_are_exact(number: int, bounds: dict[str, int], kind: str) -> None:
    schema = {"type": kind, **{keyword: number + step for keyword, step in bounds.items()}}
    agrees(schema, around(number))


@pytest.mark.parametrize("number", NUMBERS)
def test_listed_numbers_are_exact(number: int) -> None:
    agrees({"const": number}, around(number))
    agrees({"enum": [number, "a", None]}, [*around(number), "a", None, "b"])


@pytest.mark.parametrize("step", [2, 3, 7, 2**53 + 1])
def test_multiples_between_large_bounds(step: int) -> None:
    low = (2**53 + 1) * 1_000
    agrees({"type": "integer", "multipleOf": step, "minimum": low, "maximum": low + 20}, around(low + 9))


def test_a_bound_in_powers_of_ten() -> None:
    agrees({"type": "integer", "minimum": 1e20, "maximum": 1e20}, around(10**20))


N = 2**53 + 1
ONE = {"type": "integer", "minimum": N, "maximum": N}
PLACES: list[tuple[Any, list[Any]]] = [
    (
        {"type": "object", "properties": {"id": ONE, "n": {"type": "string"}}, "required": ["id"]},
        [{"id": N}, {"id": N, "n": "x"}, {"n": "x"}, {"id": N + 1}, {"id": N, "other": [1]}, {}],
    ),
    (
        {"type": "object", "properties": {"a": ONE, "b": ONE}, "additionalProperties": False},
        [{}, {"a": N}, {"b": N}, {"a": N, "b": N}, {"a": N, "c": 1}, {"b": N - 1}],
    ),
    (
        {"type": "object", "properties": {"a": True}, "additionalProperties": ONE},
        [{}, {"a": 1}, {"a": 1, "b": N}, {"b": N}, {"b": N, "c": N}, {"b": 1}],
    ),
    ({"type": "array", "items": ONE, "minItems": 1, "maxItems": 2}, [[], [N], [N, N], [N, N, N], [1]]),
    ({"type": "array", "items": ONE}, [[], [N], [N, N, N], [N, 1]]),
    (
        {"type": "array", "prefixItems": [{"type": "string"}, ONE], "items": {"type": "null"}, "minItems": 1},
        [[], ["a"], ["a", N], ["a", N, None], ["a", N, None, None], ["a", 1], [N]],
    ),
    (
        {"type": "array", "prefixItems": [ONE, ONE], "items": False},
        [[], [N], [N, N], [N, N, N]],
    ),
    ({"type": ["integer", "null"], "minimum": N}, [None, N, N - 1, N + 5, "a"]),
    ({"minimum": N}, [None, "a", [1], {"a": 1}, N, N - 1]),
    ({"anyOf": [ONE, {"type": "string"}]}, [N, "a", N - 1, None]),
    ({"oneOf": [ONE, {"type": "string"}]}, [N, "a", N - 1, None]),
    ({"allOf": [{"type": "integer"}, {"minimum": N}, {"maximum": N + 1}]}, [N, N + 1, N + 2, N - 1]),
    (
        {
            "$defs": {
                "node": {
                    "type": "object",
                    "properties": {"v": {"const": N}, "next": {"$ref": "#/$defs/node"}},
                    "required": ["v"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/node",
        },
        [{"v": N}, {"v": N, "next": {"v": N}}, {"v": N, "next": {"v": N - 1}}, {}],
    ),
    ({"enum": [[N, 1], {"a": N}]}, [[N, 1], {"a": N}, [N - 1, 1], {"a": N - 1}]),
]


@pytest.mark.parametrize(("schema", "values"), PLACES)
def test_wherever_they_stand(schema: Any, values: list[Any]) -> None:
    agrees(schema, values)


def test_in_the_parameters_of_a_tool() -> None:
    tool = ToolSpec(
        name="f",
        parameters_json=json.dumps({"type": "object", "properties": {"id": ONE}, "required": ["id"]}),
        strict=True,
    )
    rules = ToolRules(tools=(tool,), mode=ToolChoiceMode.REQUIRED, parallel=False, format="hermes")
    built = build(GrammarRequest(tools=rules), _BACKEND, _LIMITS)
    call = '<tool_call>\n{"name": "f", "arguments": {"id": %d}}\n</tool_call>'
    assert takes(built, call % N)
    assert not takes(built, call % (N + 1))


@pytest.mark.parametrize("keyword", ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
def test_a_bound_that_has_no_exact_form_is_told(keyword: str) -> None:
    schema = {"type": "object", "patternProperties": {"^a": {"type": "integer", keyword: 2**53 + 1}}}
    refused = reply(schema).refused
    assert refused is not None
    assert f"{keyword} at /patternProperties/^a/{keyword}" in refused.message
    lenient = reply(schema, strict=False).built
    assert lenient is not None
    assert lenient.enforcement is not None
    assert [each.keyword for each in lenient.enforcement.approximated] == [keyword]
