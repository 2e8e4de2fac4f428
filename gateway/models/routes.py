"""Which model of an alias a request gets: the same one for the same caller, in the shares of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from hashlib import blake2b

_WHOLE = 1 << 64


def sticky_key(tenant: str, prompt_cache_key: str) -> str:
    """What keeps its model: a conversation where its client names one, else a tenant."""
    return f"{tenant}\0{prompt_cache_key}"


def pick(alias: str, key: str, weights: Iterable[tuple[str, float]]) -> str:
    """The model for `key`: a hash of alias, key and model decides, so that every gateway picks the same, and
    a changed weight moves no more keys than it must (weighted rendezvous hashing; Schindelhauer and
    Schomaker, 2005).
    """
    return max(weights, key=lambda each: _score(alias, key, *each))[0]


def share(name: str, key: str) -> float:
    """A number from 0 to 1, exclusive, that is the same for the same key."""
    digest = blake2b(f"{name}\0{key}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / _WHOLE


def _score(alias: str, key: str, model: str, weight: float) -> float:
    if weight <= 0:
        return -1.0
    return -weight / math.log(share(f"{alias}\0{model}", key))
