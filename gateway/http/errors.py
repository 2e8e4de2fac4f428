"""Errors of the wire itself: what no face has foreseen, and paths that no face has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from contract.errors import MillraceError, Reason


def unexpected() -> MillraceError:
    """INTERNAL, for a failure that nobody foresaw."""
    return MillraceError(
        Reason.INTERNAL, "an unexpected failure; the gateway's log has the details under this request's id"
    )


def not_found(path: str, remedies: Mapping[str, str], descriptions: Sequence[str] = ()) -> MillraceError:
    """ROUTE_NOT_FOUND, with a remedy for paths that clients of some face may expect. Others are told where
    what is served is described, each API by itself; without `descriptions` that is the API's own.
    """
    described = ", ".join(descriptions) or "the openapi.json of its API"
    remedy = remedies.get(path, f"for what is served see {described}")
    return MillraceError(Reason.ROUTE_NOT_FOUND, f"there is nothing at {path}: {remedy}")
