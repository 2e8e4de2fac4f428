"""Refusals and failures as exceptions, one class for each kind of remedy.

Millrace words every refusal so that it says what happened, the limit and the remedy; `message` is that text.
For programs there are `reason` (of the table in docs/reference.md), `field` and the numbers in `metadata`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

from millrace_client.details import DETAILS_KEY, StatusDetails, read_details

# Names under which `metadata` has the number that was exceeded.
_LIMITS = ("limit", "limit_bytes", "max_context_tokens", "drain_limit_s")


class MillraceApiError(Exception):
    """A call that Millrace has not answered in full.

    `reason` is in upper case; the name of the gRPC code where a server before the gateway has refused.
    `field` is the request's field at fault, or "". `retry_after_s` is set where a later try may help.
    """

    def __init__(self, code: grpc.StatusCode, message: str, details: StatusDetails) -> None:
        super().__init__(f"{details.reason or code.name}: {message}")
        self.code = code
        self.message = message
        self.reason = details.reason or code.name
        self.field = details.field
        self.metadata = details.metadata
        self.retry_after_s = details.retry_after_s

    @property
    def limit(self) -> float | None:
        """The number that was exceeded, in the unit that the message names; None where there is none."""
        for name in _LIMITS:
            try:
                return float(self.metadata[name])
            except (KeyError, ValueError):
                continue
        return None


class InvalidRequestError(MillraceApiError):
    """The request can never be served as it is: `field` says where, the message what to change."""


class UnauthenticatedError(MillraceApiError):
    """No key, or one that is not known."""


class PermissionDeniedError(MillraceApiError):
    """The key may not use this model or tier."""


class NotFoundError(MillraceApiError):
    """There is no such model or method."""


class LimitExceededError(MillraceApiError):
    """A limit of the tenant's or the server's is reached; see `retry_after_s`."""


class DeadlineExceededError(MillraceApiError):
    """The call was not answered within its time."""


class CallCancelledError(MillraceApiError):
    """The server has given the call up; a call that this client cancels raises nothing."""


class UnavailableError(MillraceApiError):
    """Nobody answers now. A stream that had begun has lost what was still to come."""


class InternalServerError(MillraceApiError):
    """The server failed."""


_CLASSES: dict[grpc.StatusCode, type[MillraceApiError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequestError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNIMPLEMENTED: NotFoundError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: LimitExceededError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
}


def is_task_cancelled() -> bool:
    """Whether the present task is cancelled: gRPC raises CancelledError where the call alone was, too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def closed_early() -> MillraceApiError:
    """The exception for a call whose client was closed while it was under way."""
    message = "the client was closed before the answer had ended; close it after the last answer"
    return CallCancelledError(grpc.StatusCode.CANCELLED, message, StatusDetails())


def error_of(error: grpc.aio.AioRpcError) -> MillraceApiError:
    """The exception for a call's status."""
    details = StatusDetails()
    trailing: Any = error.trailing_metadata() or ()
    for key, value in trailing:
        if key == DETAILS_KEY and isinstance(value, bytes):
            details = read_details(value)
    code = error.code()
    return _CLASSES.get(code, InternalServerError)(code, error.details() or code.name, details)
