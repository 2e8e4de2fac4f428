"""What requests are refused with in several packages."""

from __future__ import annotations

from contract.errors import MillraceError, Reason


def invalid(message: str, field: str) -> MillraceError:
    """INVALID_ARGUMENT."""
    return MillraceError(Reason.INVALID_ARGUMENT, message, field=field)


def no_input() -> MillraceError:
    """INVALID_ARGUMENT for a request without a prompt."""
    return invalid("there is no input; set messages, a text or token ids", "input")


def too_large(what: str, limit: int, field: str) -> MillraceError:
    """REQUEST_TOO_LARGE."""
    return MillraceError(
        Reason.REQUEST_TOO_LARGE, f"{what}; the limit is {limit}: send less in one request", field=field
    )
