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
    ],
)
def test_other_forms_are_the_input_as_they_stand(written: str, expected: str) -> None:
    assert read([written]) == read(list(written)) == expected
