"""Errors in Anthropic's form, whole and as events of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Literal, TypeAlias

import msgspec

from contract.errors import MillraceError, Reason
from gateway.types.error_form import KEY_ADVICE, ErrorForm, retry_headers

_encode = msgspec.json.Encoder().encode

ErrorType: TypeAlias = Literal[
    "invalid_request_error",
    "authentication_error",
    "billing_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "api_error",
    "overloaded_error",
]
# Anthropic's own status for what passes by itself.
_OVERLOADED = 529
# The API's words for statuses; those that are not here are the caller's fault below 500.
_TYPES: Mapping[int, ErrorType] = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",
    504: "timeout_error",
    _OVERLOADED: "overloaded_error",
}
# Statuses that are not the error table's. A budget that is used up is no limit of a minute: SDKs would try
# again at once.
_STATUSES: Mapping[Reason, int] = {
    Reason.BUDGET_EXHAUSTED: 402,
    Reason.QUEUE_LIMIT_EXCEEDED: _OVERLOADED,
}


class ErrorDetails(msgspec.Struct, frozen=True):
    """For programs: the error table's own name in lower case, the field at fault, and the numbers."""

    error_code: str
    field: str | None
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ApiError(msgspec.Struct, frozen=True):
    """`message` tells what happened, the limit and the remedy."""

    type: ErrorType
    message: str
    details: ErrorDetails


class ApiErrorBody(msgspec.Struct, frozen=True, kw_only=True):
    """An error, as a body or in an event."""

    type: Literal["error"] = "error"
    error: ApiError
    request_id: str | None


class AnthropicErrors(ErrorForm):
    """Anthropic's form of errors (see ErrorForm)."""

    elapsed_header = ""
    request_id_header = "request-id"

    def status(self, error: MillraceError) -> int:
        """The error table's status, but for what passes by itself (529) and for budgets (402)."""
        status = _STATUSES.get(error.reason, error.mapping.http_status)
        return _OVERLOADED if status == 503 else status

    def body(self, error: MillraceError, request_id: str = "") -> bytes:
        """JSON of `{"type": "error", "error": {type, message, details}, "request_id"}`."""
        status = self.status(error)
        fallback: ErrorType = "invalid_request_error" if status < 500 else "api_error"
        details = ErrorDetails(error.reason.lower(), error.field or None, error.metadata or msgspec.UNSET)
        shown = ApiError(_TYPES.get(status, fallback), _message(error), details)
        return _encode(ApiErrorBody(error=shown, request_id=request_id or None))

    def headers(self, error: MillraceError) -> dict[str, str]:
        """Content type, when to come back, and the limit that was reached."""
        headers = {"content-type": "application/json", **retry_headers(error)}
        if error.reason is Reason.REQUEST_RATE_EXCEEDED:
            headers["anthropic-ratelimit-requests-limit"] = error.metadata["limit"]
            headers["anthropic-ratelimit-requests-remaining"] = "0"
        return headers

    def event(self, error: MillraceError, request_id: str = "") -> bytes:
        """An event of the type error."""
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"


def _message(error: MillraceError) -> str:
    """Of a prompt that is too long the API's own words come first: agents shorten a conversation by them. A
    key is asked for where the API's clients have it.
    """
    if error.mapping.http_status == HTTPStatus.UNAUTHORIZED:
        return error.message.replace(KEY_ADVICE, f"`x-api-key: <key>`, or {KEY_ADVICE}")
    num_tokens, limit = map(error.metadata.get, ("prompt_tokens", "max_context_tokens"))
    if error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED or num_tokens is None:
        return error.message
    return f"prompt is too long: {num_tokens} tokens > {limit} maximum. {error.message}"


ERRORS = AnthropicErrors()


def error_event(error: MillraceError, request_id: str) -> bytes:
    """An error inside a stream that has begun."""
    return b"event: error\ndata: " + ERRORS.body(error, request_id) + b"\n\n"
