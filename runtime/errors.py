"""The error of a configuration; what requests are refused with is the contract's (contract/errors.py)."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration cannot be used; the message names file, key and remedy."""
