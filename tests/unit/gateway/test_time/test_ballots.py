"""Answers that say the same are the same vote, and a hostile pattern costs nobody much."""

from __future__ import annotations

from typing import Any

import pytest

from contract.errors import MillraceError
from gateway.test_time.ballots import compiled, vote
from gateway.text.delta import ToolCallDelta
from gateway.types.deliberation import ScorerSpec


def said(type_: str, text: str, pattern: str = "") -> str | None:
    spec = ScorerSpec(type=type_, pattern=pattern)
    return vote(spec, compiled(spec, "scorer"), text, [])


@pytest.mark.parametrize(
    ("type_", "text", "expected"),
    [
        ("number", "first 3, then 1,234.50 apples", "1234.5"),
        ("number", "it is -12.", "-12"),
        ("number", "1e3", "1000"),
        ("number", "none", None),
        ("boxed", r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        ("boxed", r"\boxed{7} or rather \boxed{ 8.0 }", "8"),
        ("boxed", r"\boxed{open", None),
        ("json", 'Here:\n```json\n{"b": 1, "a": [2]}\n```', None),
        ("json", '```json\n{"b": 1, "a": [2]}\n```', '{"a": [2], "b": 1}'),
        ("json", '{"a": [2], "b": 1}', '{"a": [2], "b": 1}'),
        ("json", '{"a": ', None),
        ("auto", r"\boxed{5}, not 6", "5"),
        ("auto", "the answer is 6.0", "6"),
        ("auto", "  Paris\n is it ", "paris is it"),
        ("auto", "", None),
    ],
)
def test_what_an_answer_votes_for(type_: str, text: str, expected: str | None) -> None:
    assert said(type_, text) == expected


def test_a_pattern_gives_its_first_group_of_the_last_match() -> None:
    assert said("regex", "x=1 then x=2.50", r"x=([\d.]+)") == "2.5"
    assert said("regex", "yes or no", "yes|no") == "no"
    assert said("regex", "maybe", "yes|no") is None


def test_a_pattern_that_takes_too_long_finds_nothing() -> None:
    assert said("regex", "a" * 40 + "b", r"(a|a|aa)+$") is None


def test_a_broken_pattern_is_refused_by_name() -> None:
    with pytest.raises(MillraceError) as refused:
        said("regex", "", "(")
    assert refused.value.field == "scorer.pattern"


def test_calls_are_votes_whatever_the_order_of_their_arguments() -> None:
    def called(arguments: str) -> str | None:
        call: Any = ToolCallDelta(0, "call_1", "add", arguments)
        return vote(ScorerSpec(type="auto"), None, "", [call])

    assert called('{"a": 1, "b": 2}') == called('{"b":2,"a":1}') != called('{"a": 1}')


def test_long_answers_that_begin_alike_are_different_votes() -> None:
    assert said("auto", "a" * 300 + "b") != said("auto", "a" * 300 + "c")
