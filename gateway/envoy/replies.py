"""Envoy's own answers in the form of the face that owns the path, with reasons of the suite's error table."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from contract.errors import MillraceError, Reason
from gateway.auth.authorizer import NO_CREDENTIALS
from gateway.faces.anthropic import batches_openapi as message_batches
from gateway.faces.anthropic import openapi as messages
from gateway.faces.openai import batches_openapi, openapi
from gateway.faces.pooled import openapi as pooled
from gateway.faces.responses import openapi as responses
from gateway.types.error_form import ErrorForm, ErrorForms
from gateway.ui import openapi as ui
from gateway.ui.files import PREFIX as UI_PREFIX

# The faces' own descriptions.
DOCUMENTS = (
    openapi.PATH,
    batches_openapi.PATH,
    messages.PATH,
    message_batches.PATH,
    responses.PATH,
    pooled.PATH,
    ui.PATH,
)
# Paths that need no key, beside those of the page. Envoy limits how often they are asked for.
PUBLIC_PATHS = ("/health", *DOCUMENTS, "/grpc.health.v1.Health/Check")
_TOO_OFTEN = "this is asked for too often, by all clients together; ask less often"
_NO_GATEWAY = "no gateway is ready: none answers, or they lack an engine or the tokenizer; retry shortly"
_NO_AUTHORIZATION = "no gateway process authorized the request in time; retry shortly"
# Envoy puts the request's id there.
_REQUEST_ID = "%REQ(X-REQUEST-ID)%"
_IS_GRPC: dict[str, Any] = {
    "header_filter": {
        "header": {"name": "content-type", "string_match": {"prefix": "application/grpc"}},
    }
}

# Envoy refuses upgrades with a 403 of its own; others with this status are the gateway's, with its body.
_IS_UPGRADE: dict[str, Any] = {"header_filter": {"header": {"name": "upgrade", "present_match": True}}}
_NO_UPGRADE = "WebSockets are opened at /v1/responses alone; use stream: true"

# Reasons and messages for Envoy's response flags (%RESPONSE_FLAGS% in its documentation).
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


def local_reply_config(max_body_bytes: int, error_forms: ErrorForms) -> dict[str, Any]:
    """Mappers for the HTTP connection manager, of which the first one that fits writes the reply: each case
    has one for gRPC, whose text becomes the status message, one for each prefix with a form of its own, and
    one for all other paths.
    """
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
        mappers.append(_grpc_mapper(when, error, error_forms.grpc))
        mappers += [
            _http_mapper(_all_of(when, _is_below(prefix)), error, form)
            for prefix, form in error_forms.by_prefix.items()
        ]
        mappers.append(_http_mapper(when, error, error_forms.default))
    return {"mappers": mappers}


def _grpc_mapper(when: dict[str, Any], error: MillraceError, form: ErrorForm) -> dict[str, Any]:
    # From other HTTP statuses Envoy derives other codes than the rich status has, and clients refuse the two
    # together.
    is_rich = error.reason is Reason.MISSING_CREDENTIALS
    headers = [_header(*header) for header in form.headers(error).items()]
    return {
        "filter": _all_of(when, _IS_GRPC),
        **({"headers_to_add": headers} if is_rich else {}),
        "body_format_override": {"text_format_source": {"inline_string": form.body(error).decode()}},
    }


def _http_mapper(when: dict[str, Any], error: MillraceError, form: ErrorForm) -> dict[str, Any]:
    headers, status = form.headers(error), form.status(error)
    content_type = headers.pop("content-type")
    if form.request_id_header:
        headers[form.request_id_header] = _REQUEST_ID
    if error.mapping.http_status in (429, 503):
        # Another try helps where the state passes by itself.
        headers["retry-after"] = "1"
    return {
        "filter": when,
        "status_code": status,
        **({"headers_to_add": [_header(*header) for header in headers.items()]} if headers else {}),
        "body_format_override": {
            "json_format": msgspec.json.decode(form.body(error, _REQUEST_ID)),
            "content_type": content_type,
        },
    }


def _header(key: str, value: str) -> dict[str, Any]:
    return {"header": {"key": key, "value": value}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}


def _is_public() -> dict[str, Any]:
    # One by one, because Envoy bounds the size of an expression.
    paths = (*map(re.escape, PUBLIC_PATHS), f"{re.escape(UI_PREFIX)}(?:/[^?]*)?")
    filters = [_has_path({"safe_regex": {"regex": f"{path}(?:\\?.*)?"}}) for path in paths]
    return {"or_filter": {"filters": filters}}


def _is_below(prefix: str) -> dict[str, Any]:
    return _has_path({"prefix": prefix})


def _has_path(match: dict[str, Any]) -> dict[str, Any]:
    return {"header_filter": {"header": {"name": ":path", "string_match": match}}}


def _all_of(*filters: dict[str, Any]) -> dict[str, Any]:
    return {"and_filter": {"filters": list(filters)}}


def _has_flag(*flags: str) -> dict[str, Any]:
    return {"response_flag_filter": {"flags": list(flags)}}


def _has_status(status: int) -> dict[str, Any]:
    value = {"default_value": status, "runtime_key": f"millrace.local_reply.{status}"}
    return {"status_code_filter": {"comparison": {"op": "EQ", "value": value}}}
