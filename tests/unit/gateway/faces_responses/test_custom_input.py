"""The text of a custom tool's call is the same however its JSON was cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.faces.responses.custom_input import CustomInput


def read(pieces: list[str]) -> str:
    reader = CustomInput()
    told = "".join([reader.feed(piece) for piece in pieces]) + reader.finish()
    assert told == reader.text
    return told


@given(text=st.text(), ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_any_text_comes_back_character_by_character(text: str, ascii_only: bool, indent: int | None) -> None:
    written = json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent)
    assert read(list(written)) == read([written]) == text


@given(cut=st.integers(0, 40))
def test_a_cut_text_is_what_was_there(cut: int) -> None:
    written = json.dumps({"input": "*** Begin\n\U0001f642 \\ end"})[:cut]
    whole = "*** Begin\n\U0001f642 \\ end"
    if cut >= len('{"input": "'):
        assert whole.startswith(read(list(written)))


def test_text_is_told_before_its_end() -> None:
    reader = CustomInput()
    pieces = ['{"in', 'put": "a', "b\\", 'n"', "}"]
    assert [reader.feed(piece) for piece in pieces] == ["", "a", "b", "\n", ""]


@given(st.lists(st.sampled_from(['"', "\\", "u", "d83d", "\\ude42", "}", "{", " ", "n", "é", '"}', "0041"])))
def test_nothing_of_a_malformed_text_is_lost_at_any_cut(parts: list[str]) -> None:
    text = "".join(parts)
    whole = read(['{"input": "' + text + '."}'])
    assert whole == read(['{"input": "', *parts, '."}']) == read(list('{"input": "' + text + '."}'))
    # Escapes alone become shorter.
    assert whole.endswith(".")
    for kept in ("é", "{", " "):
        assert whole.count(kept) == text.count(kept)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("print(1)", "print(1)"),
        ('{"code": "x"}', '{"code": "x"}'),
        ("{}", "{}"),
        ("", ""),
        # Models write line ends as they are, and escapes that JSON does not know.
        ('{"input": "a\nb\tc"}', "a\nb\tc"),
        ('{"input": "\\d+"}', "\\d+"),
        # Beside them those that it knows are read.
        ('{"input": "a\\nb \\d \\t."}', "a\nb \\d \t."),
        # What looks like an escape and is none, and what does not end the text.
        ('{"input": "C:\\users\\new"}', "C:\\users\new"),
        ('{"input": "\\u12"}', "\\u12"),
        ('{"input": "a\\u00zz b"}', "a\\u00zz b"),
        ('{"input": "\\ud83d and \\ude42 \\ud83dx\\ud83d\\u0041"}', "\\ud83d and \\ude42 \\ud83dx\\ud83dA"),
        ('{"input": "say "hi" now"}', 'say "hi" now'),
        ('{"input": "{"a": "b"} "}', '{"a": "b"} '),
        ('{"input": "x", "more": 1}', 'x", "more": 1}'),
        ('{ "input" :\n"x" }\n', "x"),
        ('{"in put": "x"}', '{"in put": "x"}'),
    ],
)
def test_other_forms_are_the_input_as_they_stand(written: str, expected: str) -> None:
    assert read([written]) == read(list(written)) == expected
