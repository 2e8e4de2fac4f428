"""Asks Millrace over gRPC from Python: a thin asynchronous client over the generated stubs.

It needs grpcio and protobuf alone. The messages are those of `millrace.inference.v1` and
`millrace.common.v1`, which the same wheel brings; an option is named as its field there.
"""

from millrace_client.client import MillraceClient
from millrace_client.errors import (
    CallCancelledError,
    DeadlineExceededError,
    InternalServerError,
    InvalidRequestError,
    LimitExceededError,
    MillraceApiError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from millrace_client.retry import RetryPolicy
from millrace_client.stream import AnswerStream
from millrace_client.transport import TlsFiles

__version__ = "0.1.0"

__all__ = [
    "AnswerStream",
    "CallCancelledError",
    "DeadlineExceededError",
    "InternalServerError",
    "InvalidRequestError",
    "LimitExceededError",
    "MillraceApiError",
    "MillraceClient",
    "NotFoundError",
    "PermissionDeniedError",
    "RetryPolicy",
    "TlsFiles",
    "UnauthenticatedError",
    "UnavailableError",
]
