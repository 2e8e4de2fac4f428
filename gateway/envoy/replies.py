"""Envoy's own answers in OpenAI's error form, with reasons of the suite's error table."""

from __future__ import annotations

from typing import Any

from contract.errors import MillraceError, Reason

_NO_GATEWAY = "no gateway process answers; retry shortly"
_NO_AUTHORIZATION = "no gateway process authorized the request in time; retry shortly"
_IS_GRPC: dict[str, Any] = {
    "header_filter": {
        "header": {"name": "content-type", "string_match": {"prefix": "application/grpc"}},
    }
}

# What Envoy refuses with a 403 of its own; others with this status are the gateway's, with its body.
_IS_UPGRADE: dict[str, Any] = {"header_filter": {"header": {"name": "upgrade", "present_match": True}}}
_NO_UPGRADE = "HTTP/1.1, HTTP/2 and gRPC are spoken here, and no WebSockets; use stream: true"

# What Envoy says by its response flags (%RESPONSE_FLAGS% in its documentation), as the suite says it.
# Not here: UAEX and RL, whose bodies the gateway wrote itself.
_BY_FLAG: tuple[tuple[tuple[str, ...], Reason, str], ...] = (
    (("UH", "UF", "UC", "LR", "UR"), Reason.ENGINE_UNAVAILABLE, _NO_GATEWAY),
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
# The authorization service failed; a denial by it has another status and the gateway's own body.
_UNAUTHORIZED_BY_FAILURE = ("UAEX", 503)
_BY_STATUS: tuple[tuple[int, Reason, str], ...] = (
    (404, Reason.ROUTE_NOT_FOUND, "there is no such path here"),
    (408, Reason.DEADLINE_EXCEEDED, "the request was not sent in time"),
    (431, Reason.REQUEST_TOO_LARGE, "the request's headers are larger than the edge accepts"),
    (400, Reason.MALFORMED_BODY, "the request is not valid HTTP"),
    (426, Reason.MALFORMED_BODY, "HTTP/1.1, HTTP/2 and gRPC are spoken here, and no other protocol"),
    (501, Reason.MALFORMED_BODY, "of the transfer codings only chunked is understood"),
)


def local_reply_config(max_body_bytes: int) -> dict[str, Any]:
    """Mappers for the HTTP connection manager. gRPC clients get the text as their status message."""
    too_large = f"the request body is larger than {max_body_bytes} bytes (gateway.max_body_bytes); send less"
    flag, status = _UNAUTHORIZED_BY_FAILURE
    cases: list[tuple[dict[str, Any], Reason, str]] = [
        (_all_of(_has_flag(flag), _has_status(status)), Reason.ENGINE_UNAVAILABLE, _NO_AUTHORIZATION),
        *((_has_flag(*flags), reason, message) for flags, reason, message in _BY_FLAG),
        (_has_status(413), Reason.REQUEST_TOO_LARGE, too_large),
        *((_has_status(status), reason, message) for status, reason, message in _BY_STATUS),
        (_all_of(_has_status(403), _IS_UPGRADE), Reason.MALFORMED_BODY, _NO_UPGRADE),
    ]
    mappers = []
    for when, reason, message in cases:
        mappers.append(_grpc_mapper(when, message))
        mappers.append(_http_mapper(when, MillraceError(reason, message)))
    return {"mappers": mappers}


def _grpc_mapper(when: dict[str, Any], message: str) -> dict[str, Any]:
    return {
        "filter": _all_of(when, _IS_GRPC),
        "body_format_override": {"text_format_source": {"inline_string": message}},
    }


def _http_mapper(when: dict[str, Any], error: MillraceError) -> dict[str, Any]:
    body = {
        "message": error.message,
        "type": error.mapping.openai_type,
        "param": None,
        "code": error.reason.value,
    }
    # What passes by itself is worth another try.
    retry = {"header": {"key": "retry-after", "value": "1"}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    return {
        "filter": when,
        "status_code": error.mapping.http_status,
        **({"headers_to_add": [retry]} if error.mapping.http_status in {429, 503} else {}),
        "body_format_override": {"json_format": {"error": body}, "content_type": "application/json"},
    }


def _all_of(*filters: dict[str, Any]) -> dict[str, Any]:
    return {"and_filter": {"filters": list(filters)}}


def _has_flag(*flags: str) -> dict[str, Any]:
    return {"response_flag_filter": {"flags": list(flags)}}


def _has_status(status: int) -> dict[str, Any]:
    value = {"default_value": status, "runtime_key": f"millrace.local_reply.{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}
