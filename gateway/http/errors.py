"""Errors in OpenAI's body, from the one table."""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import MillraceError, Reason
from gateway.openai_error import error_body


def error_event(error: MillraceError) -> bytes:
    """An error inside a stream that has begun."""
    return b"data: " + error_body(error) + b"\n\n"


def unexpected() -> MillraceError:
    """What a client is told of a failure that nobody foresaw."""
    return MillraceError(
        Reason.INTERNAL, "an unexpected failure; the gateway's log has the details under this request's id"
    )


def not_found(path: str, remedies: Mapping[str, str]) -> MillraceError:
    """ROUTE_NOT_FOUND, with a remedy for paths of OpenAI's API that are not served."""
    remedy = remedies.get(path, "see /openapi.json for what is served")
    return MillraceError(Reason.ROUTE_NOT_FOUND, f"there is nothing at {path}: {remedy}")
