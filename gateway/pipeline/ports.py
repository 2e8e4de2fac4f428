"""What the pipeline needs of limits, admission and the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import msgspec

from contract.outputs import ChoiceStatistics
from gateway.identity import Identity
from gateway.tiers import Tier


class Reservation(Protocol):
    """Tokens and a stream slot held for one request. The first of settle and cancel counts."""

    def remaining_completion_budget(self) -> int | None:
        """Completion tokens that the budget allows in all; None when none applies."""
        ...

    async def extend(self) -> int:
        """Reserves more; returns the tokens added."""
        ...

    async def settle(
        self, prompt_tokens: int, completion_tokens: int, *, cached_prompt_tokens: int = 0
    ) -> None:
        """Replaces what was reserved by what was used."""
        ...

    async def cancel(self) -> None:
        """Gives everything back."""
        ...


class Limiter(Protocol):
    """Reserves before generation."""

    async def reserve(
        self,
        identity: Identity,
        prompt_tokens: int,
        max_completion_tokens: int | None,
        *,
        model: str = "",
        tier: Tier | None = None,
    ) -> Reservation:
        """Raises TOKEN_RATE_EXCEEDED, CONCURRENCY_EXCEEDED or BUDGET_EXHAUSTED."""
        ...

    def headers(self, identity: Identity) -> Mapping[str, str]:
        """x-ratelimit-* headers of an answer."""
        ...


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is kept of a request when it has ended. Times are seconds, moments Unix seconds."""

    identity: Identity
    model: str
    tier: str
    face: str
    # Finish reason of the first choice in lower case, or a reason of the error table.
    outcome: str
    ended_unix_s: float
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    num_choices: int
    num_engines_lost: int
    # Of all choices, on every engine.
    statistics: ChoiceStatistics
    queue_s: float
    ttft_s: float | None
    duration_s: float
    metadata: Mapping[str, str]


class Ledger(Protocol):
    """Where finished requests are written; never blocks."""

    def record(self, request: FinishedRequest) -> None:
        """Takes one finished request."""
        ...
