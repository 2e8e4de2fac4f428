"""Rewriting keeps the meaning: an independent validator judges the schema before and after alike."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.unit.tokenizer_svc.schemas import documents, values
from tokenizer_svc.grammar.schema.compiler import CompiledSchema, SchemaRefused, compile_schema


def compiled(schema: Any, *, strict: bool = True) -> CompiledSchema:
    return compile_schema(schema, strict=strict, max_depth=64)


def validator(schema: Any) -> Any:
    return jsonschema_rs.Draft202012Validator(schema)


def plain(schema: Any) -> Any:
    return {key: value for key, value in schema.items() if key != "x-guidance"}


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
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


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(schema=documents(), instances=st.lists(values, min_size=12, max_size=12))
def test_lenient_rewriting_never_refuses_what_matches(schema: Any, instances: list[Any]) -> None:
    try:
        before = validator(schema)
        after = validator(plain(compiled(schema, strict=False).schema))
    except (ValueError, jsonschema_rs.ValidationError, SchemaRefused):
        assume(False)
    for instance in instances:
        assert after.is_valid(instance) or not before.is_valid(instance), instance
