"""Logs: one JSON object a line on stderr, with trace and request id, and never a secret."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any, TextIO

from opentelemetry import trace

from observability.emit.tracing import current_identity

_REDACTED = "[redacted]"
# Names of fields whose values are secrets, wherever they appear.
_SECRET_NAMES = re.compile(
    r"authorization|secret|password|passwd|api[_-]?key|token$|credential|cookie|signature|private_key",
    re.IGNORECASE,
)
# Secrets inside free text: bearer credentials, our own and OpenAI-style keys, name=value pairs, URL
# passwords.
_SECRET_TEXT = (
    (re.compile(r"(?i)\b(bearer|basic)\s+[\w.~+/=-]{6,}"), rf"\1 {_REDACTED}"),
    (re.compile(r"\b(mr|sk|pk)-[\w-]{6,}"), rf"\1-{_REDACTED}"),
    (
        re.compile(r"(?i)\b(\w*(?:secret|password|api[_-]?key))(['\"]?\s*[=:]\s*)['\"]?[^\s'\",}]+"),
        rf"\1\2{_REDACTED}",
    ),
    (re.compile(r"(\w+://[^\s:/@]*):[^\s@/]+@"), rf"\1:{_REDACTED}@"),
)
# Attributes that every LogRecord has; what else is there came with `extra=`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def redact(text: str) -> str:
    """`text` without what looks like a credential."""
    for pattern, replacement in _SECRET_TEXT:
        text = pattern.sub(replacement, text)
    return text


class JsonFormatter(logging.Formatter):
    """Formats a record as one line of JSON: time, level, service, logger, message, ids, `extra` fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """One line; anything that JSON lacks is written as text."""
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": redact(record.getMessage()),
        }
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            line["trace_id"] = f"{span.trace_id:032x}"
            line["span_id"] = f"{span.span_id:016x}"
        identity = current_identity()
        if identity is not None:
            line["request_id"] = identity.request_id
        for name, value in vars(record).items():
            if name not in _STANDARD:
                line[name] = _clean(name, value)
        if record.exc_info:
            line["exception"] = redact(self.formatException(record.exc_info))
        return json.dumps(line, ensure_ascii=False, default=lambda value: redact(str(value)))


def _clean(name: str, value: Any) -> Any:
    if _SECRET_NAMES.search(name):
        return _REDACTED
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, dict):
        return {str(key): _clean(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean("", item) for item in value]
    return value


def configure(service: str, level: str = "info", stream: TextIO | None = None) -> None:
    """Sends the whole process's logs as JSON to `stream` (default stderr), replacing earlier handlers."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
