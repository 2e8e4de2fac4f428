"""What a large body holds is counted before anything is made of it, however it is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.errors import MillraceError, Reason
from gateway.config import RequestConfig
from gateway.intake.json_shape import BodyShape

VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=6) | st.sampled_from(['"', "\\", '\\"', "[{,]", "a\\"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
BODIES = st.dictionaries(st.sampled_from(["messages", "tools", "x", "prompt"]), VALUES, min_size=1)


def fed(body: bytes, size: int, **limits: int) -> MillraceError | None:
    shape = BodyShape(RequestConfig(**limits))
    try:
        for start in range(0, len(body), size):
            shape.feed(body[start : start + size])
    except MillraceError as error:
        return error
    return None


def num_values(value: Any) -> int:
    """Commas and opening brackets of a value."""
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    if parts is None:
        return 0
    return 1 + max(0, len(parts) - 1) + sum(map(num_values, parts))


def depth(value: Any) -> int:
    parts = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if parts is None else 1 + max(map(depth, parts), default=0)


@given(BODIES, st.integers(1, 7), st.booleans())
def test_counts_are_those_of_the_parsed_body_however_it_is_cut(
    body: dict[str, Any], size: int, ascii_only: bool
) -> None:
    wire = json.dumps(body, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    fields = list(body.items())
    # The comma behind a field counts as the field's.
    most = max(max(num_values(value) + (at < len(fields) - 1), 1) for at, (_, value) in enumerate(fields))
    assert fed(wire, size, max_values=most, max_token_ids=most) is None
    deep = depth(body)
    assert fed(wire, size, max_depth=deep) is None
    if deep > 1:
        error = fed(wire, size, max_depth=deep - 1)
        assert error is not None
        assert error.reason is Reason.MALFORMED_BODY
    if most > 1:
        error = fed(wire, size, max_values=most - 1, max_token_ids=most - 1)
        assert error is not None
        assert error.reason is Reason.INVALID_ARGUMENT
        assert error.field in body


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"model": "m", "tokens": [1] * 200}, "tokens"),
        ({"model": "m", "messages": [{"role": "user", "content": "a"}] * 60}, "messages"),
        ({"messages": [{"content": [{"type": "text", "text": "a"}] * 60}]}, "messages"),
        ({"messages": [{"tool_calls": [{"id": "a", "function": {"name": "f"}}] * 60}]}, "messages"),
        ({"model": "m", "metadata": {f"k{at}": "v" for at in range(200)}}, "metadata"),
        ({"guided_choice": [f"c{at}" for at in range(200)]}, "guided_choice"),
        ({"chat_template_kwargs": {"a": [{"b": [1]}] * 60}}, "chat_template_kwargs"),
        ({"documents": [{"title": "a"}] * 200}, "documents"),
    ],
)
def test_what_is_too_much_is_told_by_its_field(body: dict[str, Any], field: str) -> None:
    error = fed(json.dumps(body).encode(), 50, max_values=100, max_token_ids=100)
    assert error is not None
    assert (error.reason, error.field) == (Reason.INVALID_ARGUMENT, field)
    assert "more than 100" in error.message


def test_what_stands_in_texts_is_no_value() -> None:
    text = ',[{"\\' * 500
    assert (
        fed(json.dumps({"messages": [{"content": text}], "prompt": text}).encode(), 64, max_values=10) is None
    )


def test_a_field_that_is_named_again_and_again_is_refused() -> None:
    error = fed(b"{" + b'"model":"m",' * 2000 + b"}", 100)
    assert error is not None
    assert "name each once" in error.message
