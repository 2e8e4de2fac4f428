"""Envoy's own answers in OpenAI's error form, with reasons of the suite's error table."""

from __future__ import annotations

import re
from base64 import b64encode
from typing import Any

from contract.errors import MillraceError, Reason
from contract.proto.status import to_status
from gateway.auth.authorizer import NO_CREDENTIALS
from gateway.openai_error import error_detail

# What needs no key: Envoy itself says who asks too often.
PUBLIC_PATHS = ("/health", "/openapi.json", "/grpc.health.v1.Health/Check")
_TOO_OFTEN = "this is asked for too often, by all clients together; ask less often"
_NO_GATEWAY = "no gateway is ready: none answers, or they lack an engine or the tokenizer; retry shortly"
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
    (401, Reason.MISSING_CREDENTIALS, NO_CREDENTIALS),
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
        (_all_of(_has_status(429), _is_public()), Reason.QUEUE_LIMIT_EXCEEDED, _TOO_OFTEN),
        (_has_status(413), Reason.REQUEST_TOO_LARGE, too_large),
        *((_has_status(status), reason, message) for status, reason, message in _BY_STATUS),
        (_all_of(_has_status(403), _IS_UPGRADE), Reason.MALFORMED_BODY, _NO_UPGRADE),
    ]
    # Denials by the gateway have its own body.
    mappers: list[dict[str, Any]] = [{"filter": _all_of(_has_flag(flag), _has_status(401))}]
    for when, reason, message in cases:
        error = MillraceError(reason, message)
        mappers.append(_grpc_mapper(when, error))
        mappers.append(_http_mapper(when, error))
    return {"mappers": mappers}


def _grpc_mapper(when: dict[str, Any], error: MillraceError) -> dict[str, Any]:
    details = b64encode(to_status(error).SerializeToString()).decode().rstrip("=")
    # Of other statuses Envoy makes other codes, which clients do not take together with ours.
    is_rich = error.reason is Reason.MISSING_CREDENTIALS
    return {
        "filter": _all_of(when, _IS_GRPC),
        **({"headers_to_add": [_header("grpc-status-details-bin", details)]} if is_rich else {}),
        "body_format_override": {"text_format_source": {"inline_string": error.message}},
    }


def _http_mapper(when: dict[str, Any], error: MillraceError) -> dict[str, Any]:
    # What passes by itself is worth another try.
    more = {429: [_header("retry-after", "1")], 503: [_header("retry-after", "1")]}
    more[401] = [_header("www-authenticate", "Bearer")]
    status = error.mapping.http_status
    return {
        "filter": when,
        "status_code": error.mapping.http_status,
        **({"headers_to_add": more[status]} if status in more else {}),
        "body_format_override": {
            "json_format": {"error": error_detail(error)},
            "content_type": "application/json",
        },
    }


def _header(key: str, value: str) -> dict[str, Any]:
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _is_public() -> dict[str, Any]:
    paths = "|".join(map(re.escape, PUBLIC_PATHS))
    regex = {"safe_regex": {"regex": f"(?:{paths})(?:\\?.*)?"}}
    return {"header_filter": {"header": {"name": ":path", "string_match": regex}}}


def _all_of(*filters: dict[str, Any]) -> dict[str, Any]:
    return {"and_filter": {"filters": list(filters)}}


def _has_flag(*flags: str) -> dict[str, Any]:
    return {"response_flag_filter": {"flags": list(flags)}}


def _has_status(status: int) -> dict[str, Any]:
    value = {"default_value": status, "runtime_key": f"millrace.local_reply.{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}
