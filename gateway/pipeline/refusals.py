"""How fast a tenant is told refusals. Each costs little, but a client that repeats at once what was refused
lives at its neighbours' expense: it is answered later instead (a tarpit).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import islice

# So long a refusal waits at most, and so much of a tenant's rate it may be told at once, in seconds.
_LIMIT_S = 1.0
_BURST_S = 1.0
# Refusals that wait at a time. Each holds a request's head: some 20 KB.
_MAX_WAITING = 1024


class Refusals:
    """A generic cell rate for each tenant. Use from one event loop."""

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._interval_s = 1 / per_s
        self._clock = clock
        self._sleep = sleep
        # When the rate of what a tenant was told so far is over. Entries of the past say nothing.
        self._even_s: dict[str, float] = {}
        self._num_waiting = 0

    async def turn(self, tenant: str) -> None:
        """Returns when one more refusal may be told: at once, or, beyond the rate, a second later at most."""
        now_s = self._clock()
        wait_s = self._even_s.get(tenant, now_s) - now_s - _BURST_S
        if wait_s < _LIMIT_S:
            self._note(tenant, now_s)
        if wait_s <= 0 or self._num_waiting >= _MAX_WAITING:
            return
        self._num_waiting += 1
        try:
            await self._sleep(min(wait_s, _LIMIT_S))
        finally:
            self._num_waiting -= 1

    def _note(self, tenant: str, now_s: float) -> None:
        # The first is whose last refusal lies furthest back: each is put at the end when it changes.
        before_s = self._even_s.pop(tenant, now_s)
        for oldest in list(islice(self._even_s, 2)):
            if self._even_s[oldest] <= now_s:
                del self._even_s[oldest]
        self._even_s[tenant] = max(before_s, now_s) + self._interval_s
