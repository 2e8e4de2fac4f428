"""Rewritten patterns match what Python's engine matches, and complements what it does not."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenizer_svc.grammar.schema.automata import outside, plain
from tokenizer_svc.grammar.schema.strings import listed

PATTERNS = (
    "^a", "b$", "ab", "^(a|b)*c?$", "^(?!ab)[a-c]+$", "^(?=.*a)(?=.*b)[^c]+$", "^(a|b($|c))*$", "(?!$)",
    "^(/?([.]{2}|[a-c]*)($|/))*$",
    "^[^ab]{1,3}$", "^(?:a(?!b)|b(?=c))+?", "a.c", r"\d\s?\w", "^$", "", "^(?!.*bb)[abc]*$", "c|^a", "a{2,}$",
    "(?!a)b", "^a*b*c*$", "(?!a)^.", "a$$", "(^a|b)c", "x?^a", "(?=^a)a", "(?!a)b*$", "^(^a)?b", "(a|^b){2}",
)  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(st.sampled_from("abcd 1\né\x7f🙂"), max_size=7))
def test_same_language_and_complement(pattern: str, text: str) -> None:
    # Python's $ also matches before a final line break; the end of the text is meant.
    expected = re.search(pattern.replace("$", r"\Z"), text, re.ASCII) is not None
    inside, beyond = plain(pattern), outside(pattern)
    if inside is not None:
        assert (re.search(inside.replace("$", r"\Z"), text) is not None) == expected
    if beyond is not None:
        found = re.search(beyond[:-1] + r"\Z", text) is not None
        assert found != expected


def test_most_of_them_have_a_form() -> None:
    without = {pattern for pattern in PATTERNS if plain(pattern) is None or outside(pattern) is None}
    # A repetition of look-aheads has none, nor has an anchor that may or may not be at the beginning; and
    # nothing is outside of the empty pattern, or of one that matches the end.
    assert without == {"^(?:a(?!b)|b(?=c))+?", "", "x?^a", "(a|^b){2}", "(?!a)b*$"}


@pytest.mark.parametrize("pattern", [r"\bword", "(a)\\1", "(?i)a", "(?<=a)b", "(", "a{1000}", "(.*a.{9}){5}"])
def test_what_is_beyond_them_has_no_form(pattern: str) -> None:
    assert outside(pattern) is None


def test_parts_that_expressions_share_are_looked_at_once() -> None:
    # Few distinct parts, and 5^20 ways to them.
    assert outside("^(c1d3g3.{4,8}){20}") is None


@pytest.mark.parametrize("pattern", ["^[[a]$", "^[+--b]$", "^[a&&b]$", "^(?![[a])"])
def test_classes_that_python_may_read_otherwise_one_day_go_to_no_log(pattern: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert outside(pattern) is not None
        listed(pattern)
