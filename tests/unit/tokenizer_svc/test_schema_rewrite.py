"""Rewriting keeps the meaning: an independent validator judges the schema before and after alike."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.unit.tokenizer_svc.schemas import documents, values
from tokenizer_svc.grammar.endless import without_contains
from tokenizer_svc.grammar.schema.compiler import CompiledSchema, SchemaRefused, compile_schema
from tokenizer_svc.grammar.schema.finished import with_change


def compiled(schema: Any, *, strict: bool = True) -> CompiledSchema:
    return compile_schema(schema, strict=strict, max_depth=64)


def validator(schema: Any) -> Any:
    return jsonschema_rs.Draft202012Validator(schema)


def plain(schema: Any) -> Any:
    # A schema of `contains` that is left is no part of the grammar: it tells whether a finite array is there.
    plain = with_change(schema, without_contains)
    return {key: value for key, value in plain.items() if key != "x-guidance"}


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=documents(), instances=st.lists(values, min_size=12, max_size=12))
def test_strict_rewriting_is_exact(schema: Any, instances: list[Any]) -> None:
    try:
        before = validator(schema)
    except (ValueError, jsonschema_rs.ValidationError):
        assume(False)
    try:
        after = validator(plain(compiled(schema).schema))
    except SchemaRefused as refused:
        if "no value matches" in str(refused):
            assert not any(before.is_valid(each) for each in instances)
        return
    for instance in instances:
        assert after.is_valid(instance) == before.is_valid(instance), (instance, compiled(schema).schema)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=documents(), instances=st.lists(values, min_size=12, max_size=12))
def test_lenient_rewriting_never_refuses_what_matches(schema: Any, instances: list[Any]) -> None:
    try:
        before = validator(schema)
        after = validator(plain(compiled(schema, strict=False).schema))
    except (ValueError, jsonschema_rs.ValidationError, SchemaRefused):
        assume(False)
    for instance in instances:
        assert after.is_valid(instance) or not before.is_valid(instance), instance


KEYWORDS = (
    "type", "enum", "const", "properties", "required", "items", "prefixItems", "additionalProperties",
    "oneOf", "anyOf", "allOf", "not", "if", "then", "dependencies", "dependentRequired", "minLength",
    "pattern", "minItems", "maxItems", "uniqueItems", "contains", "propertyNames", "patternProperties",
    "minProperties", "$ref", "format", "minimum", "multipleOf", "$id", "$defs", "unevaluatedProperties",
)  # fmt: skip
junk = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-1, 2), st.sampled_from(("a", "(", "#/x", "object", 0.5))
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from((*KEYWORDS, "a")), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), junk, min_size=1, max_size=3), strict=st.booleans())
def test_malformed_schemas_are_refused_or_understood(schema: Any, strict: bool) -> None:
    with contextlib.suppress(SchemaRefused):
        compiled(schema, strict=strict)


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"not": {"$dynamicRef": "#/$defs/p"}}, [None, 1], [[], [1]]),
        ({"oneOf": [{"type": "null"}, {"$dynamicRef": "#/$defs/p"}]}, [None, []], [1, "x"]),
        ({"if": {"$dynamicRef": "#/$defs/p"}, "then": {"maxItems": 1}}, [[], [1], 1], [[1, 2]]),
        # One condition, and what follows from it differs.
        (
            {
                "oneOf": [
                    {"if": {"type": "array"}, "then": {"maxItems": 1}, "else": False},
                    {"if": {"type": "array"}, "then": {"minItems": 1}, "else": False},
                ]
            },
            [[], [1, 2]],
            [[1], None],
        ),
    ],
)
def test_what_a_reference_or_a_condition_says_is_also_negated(
    schema: Any, valid: list[Any], invalid: list[Any]
) -> None:
    after = validator(plain(compiled({**schema, "$defs": {"p": {"type": "array"}}}).schema))
    assert all(map(after.is_valid, valid))
    assert not any(map(after.is_valid, invalid))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"properties": {"a": {"minimum": "1"}}}, "/properties/a/minimum"),
        ({"required": True}, "/required"),
        ({"exclusiveMinimum": None}, "/exclusiveMinimum"),
    ],
)
def test_malformed_keywords_are_refused_by_their_place(schema: Any, path: str) -> None:
    with pytest.raises(SchemaRefused, match=f"malformed: .* at {path}$"):
        compiled(schema, strict=False)


@pytest.mark.parametrize("keyword", ["dependentSchemas", "dependencies"])
def test_what_depends_on_itself_is_refused_as_other_loops_are(keyword: str) -> None:
    with pytest.raises(SchemaRefused, match="leads back to itself without end"):
        compiled({"type": "object", keyword: {"a": {"$ref": "#"}}}, strict=False)
    with pytest.raises(SchemaRefused, match="leads back to itself without end"):
        compiled({"$dynamicAnchor": "me", "anyOf": [{"$dynamicRef": "#me"}, {"type": "null"}]}, strict=False)


def test_equal_numbers_and_unequal_booleans_are_told_apart() -> None:
    schema = {"oneOf": [{"const": 1}, {"const": True}, {"enum": [1.0, 2]}]}
    after = validator(plain(compiled(schema).schema))
    assert [after.is_valid(each) for each in (1, True, 2, 1.0, 3)] == [False, True, True, False, False]


def test_what_is_exact_is_also_small() -> None:
    """Conditions on one property make as many cases as it has values, not twice as many for each."""
    kinds = [f"kind{number}" for number in range(12)]
    schema = {
        "type": "object",
        "properties": {"kind": {"type": "string"}},
        "allOf": [
            {
                "if": {"properties": {"kind": {"const": kind}}, "required": ["kind"]},
                "then": {"required": [kind]},
            }
            for kind in kinds
        ],
    }
    rewritten = compiled(schema).schema
    assert len(str(rewritten)) < 6_000
    after = validator(plain(rewritten))
    assert after.is_valid({"kind": "kind3", "kind3": 1})
    assert not after.is_valid({"kind": "kind3", "kind4": 1})
    assert after.is_valid({"kind": "other"})


@pytest.mark.parametrize(
    ("schema", "keyword", "path"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems", "/uniqueItems"),
        ({"properties": {"a": {"not": {"multipleOf": 3}}}}, "multipleOf", "/properties/a/not/multipleOf"),
        ({"$ref": "http://example.com/x"}, "$ref", "/$ref"),
        ({"type": "string", "pattern": "a(?<!b)c"}, "pattern", "/pattern"),
        ({"type": "array", "contains": {"const": 1}}, "contains", "/contains"),
        ({"type": "object", "minProperties": 2}, "minProperties", "/minProperties"),
        ({"properties": {"a/b": {"$dynamicRef": "#x"}}}, "$dynamicRef", "/properties/a~1b/$dynamicRef"),
        ({"not": {"unevaluatedItems": False}}, "unevaluatedItems", "/not/unevaluatedItems"),
        (
            {"if": {"unevaluatedProperties": {"type": "null"}}, "then": {"required": ["a"]}},
            "unevaluatedProperties",
            "/if/unevaluatedProperties",
        ),
        # What constrains nothing because its value is none for it.
        ({"minProperties": "1"}, "minProperties", "/minProperties"),
        ({"items": {"uniqueItems": "true"}}, "uniqueItems", "/items/uniqueItems"),
        ({"type": "array", "prefixItems": {}}, "prefixItems", "/prefixItems"),
        ({"type": "string", "format": 5}, "format", "/format"),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum", "/exclusiveMinimum"),
        (
            {"type": "integer", "minimum": 1, "exclusiveMaximum": True},
            "exclusiveMaximum",
            "/exclusiveMaximum",
        ),
    ],
)
def test_strict_refusals_name_keyword_and_path(schema: Any, keyword: str, path: str) -> None:
    with pytest.raises(SchemaRefused, match="cannot be enforced exactly") as caught:
        compiled(schema)
    assert caught.value.enforcement is not None
    status = (caught.value.enforcement.unenforced + caught.value.enforcement.approximated)[0]
    assert (status.keyword, status.path) == (keyword, path)


def test_references_by_identifier_and_anchor() -> None:
    schema = {
        "$id": "https://example.com/root.json",
        "properties": {
            "a": {"$ref": "item.json"},
            "b": {"$ref": "#name"},
            "c": {"$ref": "item.json#/$defs/deep"},
        },
        "$defs": {
            "item": {"$id": "item.json", "type": "integer", "$defs": {"deep": {"type": "null"}}},
            "named": {"$anchor": "name", "type": "string"},
        },
    }
    after = validator(plain(compiled(schema).schema))
    assert after.is_valid({"a": 1, "b": "x", "c": None})
    assert not any(after.is_valid(each) for each in ({"a": "x"}, {"b": 1}, {"c": 1}))


_TOLD = """
import json, sys
from tokenizer_svc.grammar.schema.compiler import compile_schema
compiled = compile_schema(json.loads(sys.argv[1]), strict=False, max_depth=64)
print(json.dumps(compiled.schema), compiled.enforcement)
"""


def test_every_process_writes_the_same() -> None:
    # Texts hash otherwise in each: nothing may come in the order of a set.
    schema = {
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        "not": {"required": ["c"]},
        "dependentRequired": {"a": ["d"]},
        "if": {"required": ["e"]},
        "then": {"required": ["f"]},
    }
    command = [sys.executable, "-c", _TOLD, json.dumps(schema)]
    told = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": str(seed)}, capture_output=True, check=True
        ).stdout
        for seed in range(4)
    }
    assert len(told) == 1
