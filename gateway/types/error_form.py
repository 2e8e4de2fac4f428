"""How errors are written to clients: each face has a form, and a path has the form of the face that owns it.

The application hands the table to whoever may refuse a request before its face sees it: the HTTP wire, the
authorizer, the rate limit service, and Envoy's own replies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from contract.errors import MillraceError

# How clients of most APIs send a key, as messages advise it; a form has its own API's way in its place.
KEY_ADVICE = "`authorization: Bearer <key>`"


class ErrorForm(Protocol):
    """An error as one face writes it."""

    # Header in which every response of the face says how many milliseconds it took; "" for none.
    elapsed_header: str
    # Further header in which every response of the face has the request's id; "" for none.
    request_id_header: str = ""

    def status(self, error: MillraceError) -> int:
        """The HTTP status of the response: the error table's, unless the API has another one."""
        return error.mapping.http_status

    def body(self, error: MillraceError, request_id: str = "") -> bytes:
        """The body of the response; some APIs repeat the request's id in it."""

    def headers(self, error: MillraceError) -> dict[str, str]:
        """The headers that say something of the error or of its body."""

    def event(self, error: MillraceError, request_id: str = "") -> bytes:
        """The same inside an event stream."""
        return b"data: " + self.body(error, request_id) + b"\n\n"


@dataclass(frozen=True, kw_only=True)
class ErrorForms:
    """The form of every path."""

    # The form of gRPC calls, whatever their path.
    grpc: ErrorForm
    # The forms of paths that begin so; the first one that fits is used.
    by_prefix: Mapping[str, ErrorForm] = field(default_factory=dict)
    # The form of all other paths, and of bytes that have none.
    default: ErrorForm

    def of(self, path: str, content_type: str = "") -> ErrorForm:
        """The form for a request to `path` with this content type."""
        if content_type.startswith("application/grpc"):
            return self.grpc
        found = (form for prefix, form in self.by_prefix.items() if path.startswith(prefix))
        return next(found, self.default)


def whole_s(seconds: float) -> int:
    """A time to wait as headers and messages tell it: who waits so long does not come too early."""
    return max(1, math.ceil(seconds))


def retry_headers(error: MillraceError) -> dict[str, str]:
    """When to come back, in whole seconds and in milliseconds; {} where a retry does not help."""
    if error.retry_after_s is None:
        return {}
    return {
        "retry-after": str(whole_s(error.retry_after_s)),
        "retry-after-ms": str(max(1, math.ceil(error.retry_after_s * 1000))),
    }
