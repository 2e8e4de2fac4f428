"""Which model of an alias a request gets: the same one for the same caller, in the shares of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

_WHOLE = 1 << 64


@dataclass(frozen=True, slots=True)
class SetRoute:
    """Weights of an alias by model that a rollout has set over the file's."""

    weights: Mapping[str, float]
    # Without the candidate: these hold when nobody has watched for too long.
    without: Mapping[str, float]
    # The file's when they were set. Another file is a later word, which wins.
    configured: Mapping[str, float]
    # Monotonic, in seconds.
    ends_s: float = math.inf

    def over(self, configured: Mapping[str, float], now_s: float) -> Mapping[str, float]:
        """What holds where the file says `configured`."""
        if configured != self.configured:
            return configured
        return self.weights if now_s < self.ends_s else self.without


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
