"""A domain error in OpenAI's form: body and headers."""

from __future__ import annotations

import math

import msgspec

from contract.errors import MillraceError

_encoder = msgspec.json.Encoder()


def error_body(error: MillraceError) -> bytes:
    """JSON of `{"error": {message, type, param, code}}`; numbers for programs are added as `metadata`."""
    detail: dict[str, object] = {
        "message": error.message,
        "type": error.mapping.openai_type,
        "param": error.field or None,
        "code": error.reason.value,
    }
    if error.metadata:
        detail["metadata"] = error.metadata
    return _encoder.encode({"error": detail})


def error_headers(error: MillraceError) -> dict[str, str]:
    """Headers besides the content type: when to come back, in whole seconds and in milliseconds."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(max(1, math.ceil(error.retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(error.retry_after_s * 1000))),
    }
