"""What prompts may add to a step beside answers: as much work as its time allows, shared among tenants.

Tokens do not say how long a step takes: one at the end of a long context is several times the work of one at
the beginning (see `StepPace`). And a prompt that has started goes on before others, so a tenant's prompts may
take no more than its part of a step while other tenants' wait or are computed, too; a part that nobody takes
makes the step shorter.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from engine.policy.pace import LEAST_CHUNK_TOKENS
from engine.policy.shares import Account


class PromptWork:
    """Work that is left of one step. Without a limit there is always room."""

    def __init__(
        self, limit: float = math.inf, long_share: float = 1.0, sharers: Collection[Account] = ()
    ) -> None:
        self._left = limit
        self._long_left = limit * long_share
        # Part of each tenant of a tier, and what was taken of it.
        self._parts = {
            priority: max(LEAST_CHUNK_TOKENS, limit / num_tenants)
            for priority, num_tenants in Counter(priority for priority, _ in sharers).items()
        }
        self._taken: dict[Account, float] = {}

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit at all."""
        return self._left < math.inf

    @property
    def is_used_up(self) -> bool:
        """Whether not one token more has room."""
        return self._left < 1.0

    def room(self, account: Account, *, is_long: bool) -> float:
        """Work that a prompt of the account may add."""
        part = self._parts.get(account[0], math.inf) - self._taken.get(account, 0.0)
        return min(self._left, part, self._long_left if is_long else math.inf)

    def take(self, account: Account, work: float, *, is_long: bool) -> None:
        """A prompt of the account takes so much; negative work is given back."""
        if self.is_limited:
            self._left -= work
            self._taken[account] = self._taken.get(account, 0.0) + work
            if is_long:
                self._long_left -= work
