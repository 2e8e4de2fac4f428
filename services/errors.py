"""Errors as the runtime and every service raise them: the contract's, and the one of a configuration."""

from __future__ import annotations

from contract.errors import ERROR_DOMAIN, TABLE, FaceMapping, MillraceError, Reason

__all__ = ["ERROR_DOMAIN", "TABLE", "ConfigError", "FaceMapping", "MillraceError", "Reason"]


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, key and remedy."""
