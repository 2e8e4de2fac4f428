"""What one request holds of its limits, from admission to its last token."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

import msgspec

from gateway.limits.store import LeaseReturn, MeterChange, Settlement, WindowChange, WindowDemand


class MeterHold(msgspec.Struct, frozen=True):
    """A charge on a monthly meter, in the meter's unit (tokens or billionths of the currency unit)."""

    key: str
    limit: int
    prompt_cost: int
    cached_prompt_cost: int
    completion_cost: int
    # What was charged so far.
    charged: int


class Holds(msgspec.Struct):
    """Everything that a reservation has charged and will have to correct."""

    # Under which it was charged.
    operation: str = ""
    bucket: int = 0
    windows: list[WindowDemand] = []
    leases: list[LeaseReturn] = []
    meters: list[MeterHold] = []
    # Completion tokens that are paid for, over all sequences.
    completion_tokens: int = 0
    # Sequences that are computed together and told of at the end.
    num_sequences: int = 1
    # The most that the request may generate by its own word; None when it does not say.
    asked_tokens: int | None = None


class _Limiter(Protocol):
    def close_reservation(self, reservation: Reservation, settlement: Settlement) -> Awaitable[None]: ...

    def extend_reservation(self, reservation: Reservation) -> Awaitable[int]: ...


class Reservation:
    """Tokens, slots of streams and budget, held until `settle` or `cancel`; the first of them counts."""

    def __init__(self, limiter: _Limiter, holds: Holds, prompt_tokens: int) -> None:
        self._limiter = limiter
        self.holds = holds
        self.prompt_tokens = prompt_tokens
        self.is_open = True

    def remaining_completion_budget(self) -> int | None:
        """Completion tokens that are paid for, in all; None when the request cannot go beyond them.

        A stream that gets there calls `extend`, and stops with finish reason BUDGET when that grants nothing.
        """
        holds = self.holds
        if holds.asked_tokens is not None:
            return holds.completion_tokens if self.is_short else None
        return holds.completion_tokens if holds.windows or holds.meters else None

    @property
    def is_short(self) -> bool:
        """Whether less is paid for than was asked for."""
        holds = self.holds
        return holds.asked_tokens is not None and holds.completion_tokens < holds.asked_tokens

    @property
    def tokens_per_sequence(self) -> int:
        """Completion tokens that are paid for of each of the sequences."""
        return self.holds.completion_tokens // self.holds.num_sequences

    async def extend(self) -> int:
        """Reserves more for a stream that has used up what is paid for; returns the tokens added, 0 for none.

        Tokens per minute are charged without asking, monthly limits only as far as they go.
        """
        return await self._limiter.extend_reservation(self) if self.is_open else 0

    async def settle(self, prompt_tokens: int, billed_tokens: int, *, cached_prompt_tokens: int = 0) -> None:
        """Replaces what was reserved by what was used and gives the slots of its streams back."""
        if self.is_open:
            self.is_open = False
            used = self._correction(prompt_tokens, cached_prompt_tokens, billed_tokens)
            await self._limiter.close_reservation(self, used)

    async def cancel(self) -> None:
        """Gives everything back: no engine has worked for the request."""
        if self.is_open:
            self.is_open = False
            await self._limiter.close_reservation(self, self._correction(0, 0, 0))

    def _correction(self, prompt_tokens: int, cached_tokens: int, billed_tokens: int) -> Settlement:
        tokens = prompt_tokens + billed_tokens
        windows = (
            WindowChange(window.key, self.holds.bucket, tokens - window.amount)
            for window in self.holds.windows
        )
        meters = (
            MeterChange(
                meter.key,
                (prompt_tokens - cached_tokens) * meter.prompt_cost
                + cached_tokens * meter.cached_prompt_cost
                + billed_tokens * meter.completion_cost
                - meter.charged,
            )
            for meter in self.holds.meters
        )
        return Settlement(
            windows=tuple(change for change in windows if change.delta),
            meters=tuple(change for change in meters if change.delta),
        )
