"""How fast refusals are sent to a tenant. Each costs little, but a client that repeats at once what was
refused lives at its neighbours' expense: it is answered later instead (a tarpit).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from itertools import islice

from contract.errors import MillraceError

# Longest wait of a refusal, and how many seconds' worth of a tenant's rate are answered without one.
LIMIT_S = 1.0
_BURST_S = 1.0
# Refusals of a tenant that wait at a time; further ones are sent at once. Each holds a request's head, and
# over gRPC its message: some 20 KB, and 64 KB at most.
_MAX_WAITING = 1024


def is_the_callers(error: MillraceError) -> bool:
    """Whether it is the caller's doing, and not a failure of this side, which is sent at once."""
    return error.mapping.http_status < HTTPStatus.INTERNAL_SERVER_ERROR


class Refusals:
    """A generic cell rate for each tenant of this gateway. Use from one event loop."""

    def __init__(
        self,
        per_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._interval_s = 1 / per_s
        self._clock = clock
        self._sleep = sleep
        # When the refusals sent to a tenant are within its rate again. Moments of the past say nothing.
        self._even_s: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()

    async def throttle(self, tenant: str) -> None:
        """Returns when one more refusal may be sent: at once, or, beyond the rate, a second later at most."""
        now_s = self._clock()
        wait_s = self._even_s.get(tenant, now_s) - now_s - _BURST_S
        if wait_s < LIMIT_S:
            self._note(tenant, now_s)
        if wait_s <= 0 or self._num_waiting[tenant] >= _MAX_WAITING:
            return
        self._num_waiting[tenant] += 1
        try:
            await self._sleep(min(wait_s, LIMIT_S))
        finally:
            self._num_waiting[tenant] -= 1
            # Counts of 0 are forgotten.
            self._num_waiting += Counter()

    def _note(self, tenant: str, now_s: float) -> None:
        # The first is whose last refusal lies furthest back: each is put at the end when it changes.
        before_s = self._even_s.pop(tenant, now_s)
        for oldest in list(islice(self._even_s, 2)):
            if self._even_s[oldest] <= now_s:
                del self._even_s[oldest]
        self._even_s[tenant] = max(before_s, now_s) + self._interval_s
