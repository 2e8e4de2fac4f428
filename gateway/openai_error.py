"""A domain error in OpenAI's form: body and headers."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from contract.errors import MillraceError

_encoder = msgspec.json.Encoder()


def error_body(error: MillraceError) -> bytes:
    """JSON of `{"error": {message, type, param, code, reason}}`; numbers for programs are added as
    `metadata`.
    """
    detail = error_detail(error)
    if error.metadata:
        detail["metadata"] = error.metadata
    return _encoder.encode({"error": detail})


def error_detail(error: MillraceError) -> dict[str, Any]:
    """What OpenAI's error body has, and the table's own name for it as `reason`."""
    return {
        "message": error.message,
        "type": error.mapping.openai_type,
        "param": error.field or None,
        "code": error.reason.openai_code,
        "reason": error.reason.value,
    }


def error_headers(error: MillraceError) -> dict[str, str]:
    """Headers besides the content type: when to come back, in whole seconds and in milliseconds."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(error.retry_after_s * 1000))),
    }
