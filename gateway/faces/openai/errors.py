"""Errors in OpenAI's form, whole and as events of a stream."""

from __future__ import annotations

from http import HTTPStatus

import msgspec

from contract.errors import MillraceError
from gateway.faces.openai.answer_types import Error, ErrorDetail
from gateway.types.error_form import ErrorForm, retry_headers

_encode = msgspec.json.Encoder().encode


class OpenAiErrors(ErrorForm):
    """OpenAI's form of errors (see ErrorForm)."""

    elapsed_header = "openai-processing-ms"

    def body(self, error: MillraceError, request_id: str = "") -> bytes:
        """JSON of `{"error": {message, type, param, code, reason}}`, whose `reason` is the error table's own
        name; numbers for programs are added as `metadata`.
        """
        detail = ErrorDetail(
            message=error.message,
            type=error.mapping.openai_type,
            param=error.field or None,
            code=error.reason.openai_code,
            reason=error.reason,
            metadata=error.metadata or msgspec.UNSET,
        )
        return _encode(Error(detail))

    def headers(self, error: MillraceError) -> dict[str, str]:
        """Content type, when to come back, and the scheme of credentials where they are asked for."""
        headers = {"content-type": "application/json", **retry_headers(error)}
        if error.mapping.http_status == HTTPStatus.UNAUTHORIZED:
            headers["www-authenticate"] = "Bearer"
        return headers


ERRORS = OpenAiErrors()


def error_event(error: MillraceError) -> bytes:
    """An error inside a stream that has begun."""
    return b"data: " + ERRORS.body(error) + b"\n\n"
