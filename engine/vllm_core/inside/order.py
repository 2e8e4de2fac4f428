"""A fair order between the tenants of a tier.

vLLM serves by priority, then by the moment of arrival. A request's "arrival" here is its start tag of
start-time fair queueing (Goyal, Vin and Cheng, 1996): tenants that compete get service by their weights, and
who was silent gains nothing by it. Service is counted in tokens.
"""

from __future__ import annotations

from typing import Any

# Longest answer that is charged before it is known, in tokens, and the price of its tokens in prompt tokens.
_FORESEEN_TOKENS = 256
_OUTPUT_COST = 2.0


class FairOrder:
    """Virtual time of every tier, and how far each of its tenants is served."""

    def __init__(self) -> None:
        self._now: dict[int, float] = {}
        self._served: dict[tuple[int, str], float] = {}

    def tag(self, request: dict[str, Any]) -> float:
        """The tag of a new request."""
        tier, options = request["priority"], request["sampling"]
        account = (tier, request["tenant"])
        start = max(self._now.get(tier, 0.0), self._served.get(account, 0.0))
        foreseen = min(options["max_tokens"], _FORESEEN_TOKENS) * options["n"]
        cost = len(request["prompt_token_ids"]) + _OUTPUT_COST * foreseen
        self._served[account] = start + cost / request["weight"]
        return start

    def begins(self, tier: int, tag: float) -> None:
        """A request with this tag has a batch slot: the tier's time is at least that."""
        self._now[tier] = max(self._now.get(tier, 0.0), tag)

    def forget(self) -> None:
        """Nobody waits: nobody is ahead of anybody."""
        self._now.clear()
        self._served.clear()
