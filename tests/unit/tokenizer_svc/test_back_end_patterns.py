"""Patterns mean to the back end what they mean to an independent validator."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tokenizer_svc.test_schema_soundness import accepts, reply
from tokenizer_svc.grammar.schema.back_end_patterns import back_end_pattern

TEXTS = [
    "", "a", "b", "z", "A", ":", "]", "[", ":]", "b]", "&", "a&", "~", "-", '"', "\\", 'a"', "a\\", "/", "<",
    " ", "\n", "\t", "\x1f", "\u00a0", "\ufeff", "\u2028", "\x85", "\u200b", "é", "中", "🙂", "0", "_",
]  # fmt: skip


@pytest.mark.parametrize(
    "pattern",
    [
        # Sets in sets, and operations on sets, are characters.
        "[[:alpha:]]", "[a[b]c]", "[a-z&&[^b]]", "[a~~b]", "[[]", "[^[\\]]", "^[\\w[&]$", "[\\-a]",
        # Classes with every control character.
        '^[^"]$', "^[^\\\\]*$", '[^"\\\\]', '^[^<>"]+$', "^[\\x00-!]$", "^[^ -~]$",
        '^[^\\w"]$', "^[^\\P{L}]$",
        # White space, and control characters by letter.
        "\\s", "\\S", "[\\s]", "[^\\s]", "[\\S]", "[^\\S]", "^[\\s\\S]$", "\\cI", "[\\cI-\\cJ]",
    ],
)  # fmt: skip
def test_patterns_are_those_of_ecma(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    judge = jsonschema_rs.Draft202012Validator(schema)
    for text in TEXTS:
        assert accepts(schema, text) == judge.is_valid(text), text


@pytest.mark.parametrize("pattern", ["\\s", "^\\S$", "^[^\\s]$", "^[[]$", '^[^"]$', "^[a&&b]$"])
def test_so_are_complements(pattern: str) -> None:
    schema = {"type": "string", "not": {"pattern": pattern}}
    judge = jsonschema_rs.Draft202012Validator(schema)
    for text in TEXTS:
        assert accepts(schema, text) == judge.is_valid(text), text


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"not": {"const": '"'}}, '"'),
        ({"type": "string", "not": {"enum": ['a"', "\\"]}}, "\\"),
        ({"type": "object", "patternProperties": {'^[^"]$': {}}, "additionalProperties": False}, {'"': 1}),
        ({"type": "object", "propertyNames": {"pattern": "^[^\\\\]$"}}, {"\\": 1}),
        ({"properties": {"pattern": {"pattern": '^[^"]$'}}, "required": ["pattern"]}, {"pattern": '"'}),
    ],
)
def test_quotes_and_backslashes_are_kept_out_wherever_patterns_stand(schema: Any, value: Any) -> None:
    assert not jsonschema_rs.Draft202012Validator(schema).is_valid(value)
    assert not accepts(schema, value)


def test_branches_are_told_apart_by_what_their_patterns_mean() -> None:
    schema = {"type": "string", "oneOf": [{"pattern": "^[[:alpha:]]$"}, {"pattern": "^[a:]\\]$"}]}
    assert not accepts(schema, ":]")


def test_what_is_listed_is_no_pattern() -> None:
    value = {"pattern": "[[]", "patternProperties": 1}
    assert accepts({"const": value}, value)
    assert accepts({"enum": [1, value]}, value)


items = st.sampled_from(
    [
        "a",
        "z",
        "-",
        "&",
        "~",
        "[",
        "\\]",
        "\\\\",
        "\\-",
        '"',
        " ",
        "\\x00",
        "\\u0041",
        "é",
        "\\w",
        "\\W",
        "\\s",
        "\\d",
    ]
)


@settings(deadline=None)
@given(st.lists(items, min_size=1, max_size=5).map("".join), st.booleans())
def test_any_class_is_that_of_ecma(body: str, negated: bool) -> None:
    schema = {"type": "string", "pattern": f"^[{'^' if negated else ''}{body}]$"}
    try:
        judge = jsonschema_rs.Draft202012Validator(schema)
    except ValueError:
        # A range that ends before it begins, or at a set.
        return
    if reply(schema).built is None:
        # Nothing matches but U+0000.
        assert not any(judge.is_valid(text) for text in TEXTS)
        return
    for text in TEXTS:
        assert accepts(schema, text) == judge.is_valid(text), text


@pytest.mark.parametrize("pattern", ["^a$", "\\d+", "a|b", "[]", "[^]", "[a", "\\", "(?s:.)"])
def test_what_needs_no_other_form_is_left(pattern: str) -> None:
    assert back_end_pattern(pattern) == pattern
