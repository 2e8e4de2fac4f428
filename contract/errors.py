"""Domain errors and the one table that maps them to gRPC and HTTP.

Every refusal names the field at fault, the limit and the remedy. A service raises MillraceError with a
Reason; the faces translate it with the table below and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import grpc
import msgspec


class Reason(StrEnum):
    """What went wrong, as `google.rpc.ErrorInfo.reason` and as the code in OpenAI's error body."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    MALFORMED_BODY = "MALFORMED_BODY"
    UNSUPPORTED_FIELD = "UNSUPPORTED_FIELD"
    REQUEST_TOO_LARGE = "REQUEST_TOO_LARGE"
    TEMPLATE_FAILED = "TEMPLATE_FAILED"
    GRAMMAR_REFUSED = "GRAMMAR_REFUSED"
    CONTEXT_LENGTH_EXCEEDED = "CONTEXT_LENGTH_EXCEEDED"
    NEVER_FITS = "NEVER_FITS"
    MISSING_CREDENTIALS = "MISSING_CREDENTIALS"
    INVALID_CREDENTIALS = "INVALID_CREDENTIALS"
    CONTEXT_SIGNATURE_INVALID = "CONTEXT_SIGNATURE_INVALID"
    MODEL_NOT_ALLOWED = "MODEL_NOT_ALLOWED"
    TIER_NOT_ALLOWED = "TIER_NOT_ALLOWED"
    TENANT_NOT_ALLOWED = "TENANT_NOT_ALLOWED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    ROUTE_NOT_FOUND = "ROUTE_NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    REQUEST_RATE_EXCEEDED = "REQUEST_RATE_EXCEEDED"
    TOKEN_RATE_EXCEEDED = "TOKEN_RATE_EXCEEDED"
    CONCURRENCY_EXCEEDED = "CONCURRENCY_EXCEEDED"
    BUDGET_EXHAUSTED = "BUDGET_EXHAUSTED"
    QUEUE_LIMIT_EXCEEDED = "QUEUE_LIMIT_EXCEEDED"
    LIMITS_UNAVAILABLE = "LIMITS_UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    VOCABULARY_MISMATCH = "VOCABULARY_MISMATCH"
    DRAINING = "DRAINING"
    GATEWAY_FULL = "GATEWAY_FULL"
    ENGINE_UNAVAILABLE = "ENGINE_UNAVAILABLE"
    ENGINE_LOST = "ENGINE_LOST"
    TOKENIZER_UNAVAILABLE = "TOKENIZER_UNAVAILABLE"
    POISONED_REQUEST = "POISONED_REQUEST"
    STEP_FAILED = "STEP_FAILED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class FaceMapping:
    """How one reason appears on the two faces."""

    grpc_code: grpc.StatusCode
    http_status: int
    # `type` of OpenAI's error body.
    openai_type: str


_BAD = (grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error")
_LIMIT = (grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error")
_DOWN = (grpc.StatusCode.UNAVAILABLE, 503, "service_unavailable_error")
_BROKEN = (grpc.StatusCode.INTERNAL, 500, "server_error")

TABLE: Mapping[Reason, FaceMapping] = {
    Reason.INVALID_ARGUMENT: FaceMapping(*_BAD),
    Reason.MALFORMED_BODY: FaceMapping(*_BAD),
    Reason.UNSUPPORTED_FIELD: FaceMapping(*_BAD),
    Reason.TEMPLATE_FAILED: FaceMapping(*_BAD),
    Reason.GRAMMAR_REFUSED: FaceMapping(*_BAD),
    Reason.CONTEXT_LENGTH_EXCEEDED: FaceMapping(*_BAD),
    Reason.NEVER_FITS: FaceMapping(*_BAD),
    Reason.POISONED_REQUEST: FaceMapping(*_BAD),
    Reason.REQUEST_TOO_LARGE: FaceMapping(grpc.StatusCode.RESOURCE_EXHAUSTED, 413, "invalid_request_error"),
    Reason.MISSING_CREDENTIALS: FaceMapping(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
    Reason.INVALID_CREDENTIALS: FaceMapping(grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"),
    Reason.CONTEXT_SIGNATURE_INVALID: FaceMapping(
        grpc.StatusCode.UNAUTHENTICATED, 401, "authentication_error"
    ),
    Reason.MODEL_NOT_ALLOWED: FaceMapping(grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error"),
    Reason.TIER_NOT_ALLOWED: FaceMapping(grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error"),
    Reason.TENANT_NOT_ALLOWED: FaceMapping(grpc.StatusCode.PERMISSION_DENIED, 403, "permission_error"),
    Reason.MODEL_NOT_FOUND: FaceMapping(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error"),
    Reason.ROUTE_NOT_FOUND: FaceMapping(grpc.StatusCode.UNIMPLEMENTED, 404, "invalid_request_error"),
    Reason.METHOD_NOT_ALLOWED: FaceMapping(grpc.StatusCode.UNIMPLEMENTED, 405, "invalid_request_error"),
    Reason.REQUEST_RATE_EXCEEDED: FaceMapping(*_LIMIT),
    Reason.TOKEN_RATE_EXCEEDED: FaceMapping(*_LIMIT),
    Reason.CONCURRENCY_EXCEEDED: FaceMapping(*_LIMIT),
    Reason.QUEUE_LIMIT_EXCEEDED: FaceMapping(*_LIMIT),
    Reason.BUDGET_EXHAUSTED: FaceMapping(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "insufficient_quota"),
    Reason.DEADLINE_EXCEEDED: FaceMapping(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "timeout_error"),
    Reason.CANCELLED: FaceMapping(grpc.StatusCode.CANCELLED, 499, "cancelled_error"),
    Reason.VOCABULARY_MISMATCH: FaceMapping(
        grpc.StatusCode.FAILED_PRECONDITION, 503, "service_unavailable_error"
    ),
    Reason.LIMITS_UNAVAILABLE: FaceMapping(*_DOWN),
    Reason.DRAINING: FaceMapping(*_DOWN),
    Reason.GATEWAY_FULL: FaceMapping(*_DOWN),
    Reason.ENGINE_UNAVAILABLE: FaceMapping(*_DOWN),
    Reason.ENGINE_LOST: FaceMapping(*_DOWN),
    Reason.TOKENIZER_UNAVAILABLE: FaceMapping(*_DOWN),
    Reason.STEP_FAILED: FaceMapping(*_BROKEN),
    Reason.INTERNAL: FaceMapping(*_BROKEN),
}

# What a client has sent is echoed up to here, in characters of a whole message.
MAX_MESSAGE = 2048
MAX_FIELD = 256
# Domain of google.rpc.ErrorInfo in every status of this suite.
ERROR_DOMAIN = "millrace"


class MillraceError(Exception):
    """A refusal or failure that the caller is told about in full.

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
        return TABLE[self.reason]


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


def unsupported(field: str, remedy: str, problem: str = "not supported") -> MillraceError:
    """UNSUPPORTED_FIELD that names the field."""
    return invalid(field, f"{problem}; {remedy}", Reason.UNSUPPORTED_FIELD)
