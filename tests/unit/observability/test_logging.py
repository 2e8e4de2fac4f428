"""Logs are one JSON object a line and hold no secret."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import context as otel_context

from observability.emit import logging as json_logging
from observability.emit import tracing


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    json_logging.configure("gateway", "info", stream)
    yield stream
    root.handlers[:] = handlers
    root.setLevel(level)


def _lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_record_is_one_line_with_its_extra_fields_and_ids(stream: io.StringIO) -> None:
    context = tracing.with_identity(
        tracing.RequestIdentity("r-9"), tracing.context_from_traceparent(f"00-{'a' * 32}-{'b' * 16}-01")
    )
    token = otel_context.attach(context)
    try:
        logging.getLogger("here").warning("two\nlines %d", 5, extra={"engine": "e0", "waited_s": 0.5})
    finally:
        otel_context.detach(token)
    (line,) = _lines(stream)
    assert line["message"] == "two\nlines 5"
    assert (line["level"], line["service"], line["logger"]) == ("warning", "gateway", "here")
    assert (line["trace_id"], line["span_id"], line["request_id"]) == ("a" * 32, "b" * 16, "r-9")
    assert (line["engine"], line["waited_s"]) == ("e0", 0.5)


def test_exceptions_are_logged_inside_the_line(stream: io.StringIO) -> None:
    try:
        raise RuntimeError("password=hunter2000")
    except RuntimeError:
        logging.getLogger("here").exception("failed")
    (line,) = _lines(stream)
    assert "RuntimeError" in line["exception"]
    assert "hunter2000" not in line["exception"]


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer s3cr3t-value-123",
        "key mr-s3cr3t-value-123 was used",
        "key sk-s3cr3t-value-123",
        "context_secret = 's3cr3t-value-123'",
        'api_key: "s3cr3t-value-123"',
        "postgresql://millrace:s3cr3t-value-123@db:5432/ledger",
        "redis://:s3cr3t-value-123@redis:6379/0",
    ],
)
def test_secrets_in_messages_are_redacted(stream: io.StringIO, text: str) -> None:
    logging.getLogger("here").info("%s", text)
    assert "s3cr3t" not in stream.getvalue()


@settings(deadline=None)
@given(
    st.sampled_from(["authorization", "context_secret", "redis_password", "api_key", "X-Api-Key", "cookie"]),
    st.text(st.characters(categories=["L", "N"]), min_size=9),
)
def test_secret_fields_are_redacted_at_any_depth(name: str, secret: str) -> None:
    record = logging.makeLogRecord({"msg": "m", "headers": {"list": [{name: secret}]}, name: secret})
    line = json.loads(json_logging.JsonFormatter("s").format(record))
    assert line[name] == "[redacted]"
    assert line["headers"] == {"list": [{name: "[redacted]"}]}


def test_numbers_about_tokens_are_not_secrets() -> None:
    record = logging.makeLogRecord({"msg": "m", "prompt_tokens": 12, "max_tokens": 5})
    line = json.loads(json_logging.JsonFormatter("s").format(record))
    assert (line["prompt_tokens"], line["max_tokens"]) == (12, 5)
