"""Errors of the wire itself: what no face has foreseen, and paths that no face has."""

from __future__ import annotations

from collections.abc import Mapping

from contract.errors import MillraceError, Reason


def unexpected() -> MillraceError:
    """INTERNAL, for a failure that nobody foresaw."""
    return MillraceError(
        Reason.INTERNAL, "an unexpected failure; the gateway's log has the details under this request's id"
    )


def not_found(path: str, remedies: Mapping[str, str]) -> MillraceError:
    """ROUTE_NOT_FOUND, with a remedy for paths that clients of some face may expect."""
    remedy = remedies.get(path, "see /openapi.json for what is served")
    return MillraceError(Reason.ROUTE_NOT_FOUND, f"there is nothing at {path}: {remedy}")
