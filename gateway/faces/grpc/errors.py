"""Errors in gRPC's form, for those who set a body and headers: Envoy makes the status of the call."""

from __future__ import annotations

import base64

from contract.errors import MillraceError
from contract.proto.status import to_status
from gateway.types.error_form import ErrorForm, retry_headers

DETAILS_HEADER = "grpc-status-details-bin"


class GrpcErrors(ErrorForm):
    """gRPC's form of errors (see ErrorForm)."""

    elapsed_header = ""

    def body(self, error: MillraceError, request_id: str = "") -> bytes:
        """The message of the status; its code follows from the HTTP status."""
        return error.message.encode()

    def headers(self, error: MillraceError) -> dict[str, str]:
        """When to come back, and the rich status."""
        rich = base64.b64encode(to_status(error).SerializeToString()).decode()
        return {**retry_headers(error), DETAILS_HEADER: rich.rstrip("=")}
