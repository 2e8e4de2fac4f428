"""What an API key is: a prefix that secret scanners recognise, and 32 random bytes."""

from __future__ import annotations

import secrets

KEY_PREFIX = "mr-"


def new_secret() -> str:
    """A fresh API key with 256 bits of randomness."""
    return KEY_PREFIX + secrets.token_urlsafe(32)
