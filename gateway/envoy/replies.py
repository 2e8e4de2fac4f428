"""Envoy's own answers in OpenAI's error form, with reasons of the suite's error table."""

from __future__ import annotations

from typing import Any

import msgspec

from services.errors import MillraceError, Reason

_JSON = "application/json"
_RUNTIME = "millrace.local_reply"

# What Envoy says by its response flags (%RESPONSE_FLAGS% in its documentation), as the suite says it.
# Not here: UAEX and RL, whose bodies the gateway wrote itself.
_BY_FLAG: tuple[tuple[tuple[str, ...], Reason, str], ...] = (
    (
        ("NR",),
        Reason.ROUTE_NOT_FOUND,
        "there is no such path; the paths of this API are listed at /openapi.json",
    ),
    (("UH", "UF", "UC", "LR", "UR"), Reason.ENGINE_UNAVAILABLE, "no gateway process answers; retry shortly"),
    (
        ("UO", "OM"),
        Reason.QUEUE_LIMIT_EXCEEDED,
        "the edge has reached its limit of connections or requests; retry",
    ),
    (("UT", "DT", "SI"), Reason.DEADLINE_EXCEEDED, "the request took longer than the edge allows"),
    (
        ("RLSE",),
        Reason.LIMITS_UNAVAILABLE,
        "requests cannot be counted now, and are refused meanwhile; retry",
    ),
)
_BY_STATUS: tuple[tuple[int, Reason, str], ...] = (
    (408, Reason.DEADLINE_EXCEEDED, "the request was not sent in time"),
    (413, Reason.REQUEST_TOO_LARGE, "the request body is larger than the edge accepts"),
    (431, Reason.REQUEST_TOO_LARGE, "the request's headers are larger than the edge accepts"),
    (400, Reason.MALFORMED_BODY, "the request is not valid HTTP"),
)


def local_reply_config() -> dict[str, Any]:
    """Mappers for the HTTP connection manager. gRPC clients get the text as their status message."""
    mappers = [
        _mapper({"response_flag_filter": {"flags": list(flags)}}, reason, message, set_status=True)
        for flags, reason, message in _BY_FLAG
    ]
    mappers += [
        _mapper(_status_filter(status), reason, message, set_status=False)
        for status, reason, message in _BY_STATUS
    ]
    return {"mappers": mappers}


def body_too_large(limit_bytes: int) -> dict[str, Any]:
    """Direct response for a request whose declared length is beyond the limit."""
    error = MillraceError(
        Reason.REQUEST_TOO_LARGE,
        f"the request body is larger than {limit_bytes} bytes (gateway.max_body_bytes); send less",
    )
    return {"status": 413, "body": {"inline_string": msgspec.json.encode(_body(error)).decode()}}


def _mapper(when: dict[str, Any], reason: Reason, message: str, *, set_status: bool) -> dict[str, Any]:
    error = MillraceError(reason, message)
    mapper: dict[str, Any] = {
        "filter": when,
        "body_format_override": {"json_format": _body(error), "content_type": _JSON},
    }
    if set_status:
        mapper["status_code"] = error.mapping.http_status
    return mapper


def _body(error: MillraceError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.mapping.openai_type,
            "param": None,
            "code": error.reason.value,
        }
    }


def _status_filter(status: int) -> dict[str, Any]:
    return {
        "status_code_filter": {
            "comparison": {
                "op": "EQ",
                "value": {"default_value": status, "runtime_key": f"{_RUNTIME}.{status}"},
            }
        }
    }
