"""Domain errors and the one table that maps them to gRPC and HTTP.

Every refusal names the field at fault, the limit and the remedy. A service raises MillraceError with a
Reason; the faces translate it with the table below and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import grpc
import msgspec


@dataclass(frozen=True, slots=True)
class FaceMapping:
    """How one reason appears on the two faces."""

    grpc_code: grpc.StatusCode
    http_status: int
    # `type` of OpenAI's error body.
    openai_type: str


_BAD = FaceMapping(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error")
_LARGE = FaceMapping(grpc.StatusCode.RESOURCE_EXHAUSTED, 413, "invalid_request_error")
_UNKNOWN = FaceMapping(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error")
_FORBIDDEN = FaceMapping(grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error")
_MISSING = FaceMapping(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error")
_NO_ROUTE = FaceMapping(grpc.StatusCode.UNIMPLEMENTED, 404, "invalid_request_error")
_NO_METHOD = FaceMapping(grpc.StatusCode.UNIMPLEMENTED, 405, "invalid_request_error")
_LIMIT = FaceMapping(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error")
_QUOTA = FaceMapping(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "insufficient_quota")
_LATE = FaceMapping(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error")
_LEFT = FaceMapping(grpc.StatusCode.CANCELLED, 499, "cancelled_error")
_UNFIT = FaceMapping(grpc.StatusCode.FAILED_PRECONDITION, 503, "service_unavailable_error")
_DOWN = FaceMapping(grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error")
_BROKEN = FaceMapping(grpc.StatusCode.INTERNAL, 500, "server_error")


class Reason(StrEnum):
    """What went wrong, as `google.rpc.ErrorInfo.reason` and as `reason` in OpenAI's error body."""

    mapping: FaceMapping
    # `code` of OpenAI's error body: its own word, which clients look for, else ours in lower case.
    openai_code: str

    def __new__(cls, name: str, mapping: FaceMapping, openai_code: str = "") -> Self:
        """A member as it is written below."""
        member = str.__new__(cls, name)
        member._value_, member.mapping = name, mapping
        member.openai_code = openai_code or name.lower()
        return member

    INVALID_ARGUMENT = "INVALID_ARGUMENT", _BAD, "invalid_value"
    MALFORMED_BODY = "MALFORMED_BODY", _BAD
    UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD", _BAD, "unsupported_parameter"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE", _LARGE
    TEMPLATE_FAILED = "TEMPLATE_FAILED", _BAD
    GRAMMAR_REFUSED = "GRAMMAR_REFUSED", _BAD
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED", _BAD
    NEVER_FITS = "NEVER_FITS", _BAD, "context_length_exceeded"
    MISSING_CREDENTIALS = "MISSING_CREDENTIALS", _UNKNOWN, "invalid_api_key"
    INVALID_CREDENTIALS = "INVALID_CREDENTIALS", _UNKNOWN, "invalid_api_key"
    CONTEXT_SIGNATURE_INVALID = "CONTEXT_SIGNATURE_INVALID", _UNKNOWN
    MODEL_NOT_ALLOWED = "MODEL_NOT_ALLOWED", _FORBIDDEN, "model_not_found"
    TIER_NOT_ALLOWED = "TIER_NOT_ALLOWED", _FORBIDDEN
    TENANT_NOT_ALLOWED = "TENANT_NOT_ALLOWED", _FORBIDDEN
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND", _MISSING
    STORED_NOT_FOUND = "STORED_NOT_FOUND", _MISSING
    ROUTE_NOT_FOUND = "ROUTE_NOT_FOUND", _NO_ROUTE
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED", _NO_METHOD
    REQUEST_RATE_EXCEEDED = "REQUEST_RATE_EXCEEDED", _LIMIT, "rate_limit_exceeded"
    TOKEN_RATE_EXCEEDED = "TOKEN_RATE_EXCEEDED", _LIMIT, "rate_limit_exceeded"
    CONCURRENCY_EXCEEDED = "CONCURRENCY_EXCEEDED", _LIMIT, "rate_limit_exceeded"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED", _QUOTA, "insufficient_quota"
    STORE_FULL = "STORE_FULL", _QUOTA
    QUEUE_LIMIT_EXCEEDED = "QUEUE_LIMIT_EXCEEDED", _LIMIT, "rate_limit_exceeded"
    LIMITS_UNAVAILABLE = "LIMITS_UNAVAILABLE", _DOWN
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE", _DOWN
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED", _LATE
    CANCELLED = "CANCELLED", _LEFT
    VOCABULARY_MISMATCH = "VOCABULARY_MISMATCH", _UNFIT
    DRAINING = "DRAINING", _DOWN
    GATEWAY_FULL = "GATEWAY_FULL", _DOWN
    ENGINE_UNAVAILABLE = "ENGINE_UNAVAILABLE", _DOWN
    ENGINE_LOST = "ENGINE_LOST", _DOWN
    TOKENIZER_UNAVAILABLE = "TOKENIZER_UNAVAILABLE", _DOWN
    POISONED_REQUEST = "POISONED_REQUEST", _BAD
    STEP_FAILED = "STEP_FAILED", _BROKEN, "server_error"
    INTERNAL = "INTERNAL", _BROKEN, "server_error"


# Longest message, in characters: it may repeat what a client has sent, which has any length.
MAX_MESSAGE = 2048
MAX_FIELD = 256
# Domain of google.rpc.ErrorInfo in every status of this suite.
ERROR_DOMAIN = "millrace"


class MillraceError(Exception):
    """A refusal or failure that the caller gets in full.

    `message` says what happened, the limit and the remedy. `field` is the request field at fault in the
    caller's own terms, or "". `metadata` holds the numbers for programs. `retry_after_s` is set only when a
    retry may help.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str = "",
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE // 2]} … {message[-MAX_MESSAGE // 2 :]}"
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field[:MAX_FIELD]
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    @property
    def mapping(self) -> FaceMapping:
        """Status codes of both faces."""
        return self.reason.mapping


class RequestFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A MillraceError in plain data, for another process; `reason` is a name from the table."""

    reason: str
    message: str
    field: str = ""
    metadata: dict[str, str] = {}
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: MillraceError) -> RequestFailure:
        """A raised error."""
        return cls(
            reason=error.reason.value,
            message=error.message,
            field=error.field,
            metadata=error.metadata,
            retry_after_s=error.retry_after_s,
        )


def invalid(field: str, problem: str, reason: Reason = Reason.INVALID_ARGUMENT) -> MillraceError:
    """INVALID_ARGUMENT, or another reason, that names the field."""
    return MillraceError(reason, f"{field}: {problem}", field=field)


def context_length(limit: int, problem: str) -> str:
    """The message of CONTEXT_LENGTH_EXCEEDED, for prompt and completion together: it begins as OpenAI's, by
    which frameworks know it, and ends with OpenAI's code, which others look for in the text.
    """
    return (
        f"This model's maximum context length is {limit} tokens. However, {problem} (context_length_exceeded)"
    )


def unsupported(field: str, remedy: str, problem: str = "not supported") -> MillraceError:
    """UNSUPPORTED_FIELD that names the field."""
    return invalid(field, f"{problem}; {remedy}", Reason.UNSUPPORTED_FIELD)
