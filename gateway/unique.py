"""Numbers that no other process draws, and that nobody needs to be kept from guessing.

A call into the system for each of them would take longer than most steps of a request.
"""

from __future__ import annotations

import random
import secrets

_source = random.Random(secrets.randbits(256))


def unique_hex() -> str:
    """128 random bits, as 32 hexadecimal digits."""
    return f"{_source.getrandbits(128):032x}"


def random_seed() -> int:
    """A seed for sampling, non-negative, of 63 bits."""
    return _source.getrandbits(63)
