"""What tenants have used of the workers lately, beyond what nearly all work needs."""

from __future__ import annotations

import time
from collections.abc import Callable

# Processor time that a tenant may use for long work at a time, and that grows back per second.
_ALLOWANCE_S = 0.25
# The part of it that a tenant may use at a priority that is not the lowest.
_GENTLE_S = 0.05
_REFILL = 0.1
# A tenant is out of debt after a minute at the latest.
_MAX_DEBT_S = 6.0


class Accounts:
    """Processor time of each tenant. Who is in debt computes only when nobody else wants to."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The processor time that each tenant had left, and when. Tenants that have all of it are not listed.
        self._left: dict[str, tuple[float, float]] = {}

    def left_s(self, tenant: str) -> float:
        """What the tenant may still use; negative when it is in debt."""
        found = self._left.get(tenant)
        if found is None:
            return _ALLOWANCE_S
        left_s, at_s = found
        now_left_s = left_s + (self._clock() - at_s) * _REFILL
        if now_left_s >= _ALLOWANCE_S:
            del self._left[tenant]
            return _ALLOWANCE_S
        return now_left_s

    def gentle_s(self, tenant: str) -> float:
        """What the tenant may still use before it computes only when nobody else wants to."""
        return self.left_s(tenant) - (_ALLOWANCE_S - _GENTLE_S)

    def charge(self, tenant: str, used_s: float) -> None:
        """Takes so much off."""
        if used_s > 0:
            left_s = self.left_s(tenant) - used_s
            self._left[tenant] = (max(-_MAX_DEBT_S, left_s), self._clock())

    def in_debt(self, tenant: str) -> bool:
        """Whether the tenant has used more than it may."""
        return tenant in self._left and self.left_s(tenant) < 0

    def prune(self) -> None:
        """Forgets tenants that owe nothing any more."""
        for tenant in list(self._left):
            self.left_s(tenant)
