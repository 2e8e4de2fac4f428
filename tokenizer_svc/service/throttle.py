"""How fast one tenant may send large requests.

Receiving a message costs the process that everybody shares up to a millisecond per megabyte, whatever becomes
of it. Whoever is refused at once could send the next at once: so the answer waits as well. What waits is
kept, though: beyond what a tenant could be served of in time, it is refused at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from contract.errors import MillraceError, Reason

# Bytes of large requests that a tenant may send at a time, and per second in the long run. Of English text
# the latter is about a million tokens.
_BURST_BYTES = 16 * 1024 * 1024
_BYTES_PER_S = 4 * 1024 * 1024
# Bytes of large requests of one tenant that may wait: more than it is served of before a request times out.
_MAX_WAITING_BYTES = 128 * 1024 * 1024
_PRUNE_EVERY = 256


class Throttle:
    """Makes tenants wait. Use from one event loop."""

    def __init__(
        self,
        *,
        burst_bytes: int = _BURST_BYTES,
        bytes_per_s: float = _BYTES_PER_S,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst_s = burst_bytes / bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._max_waiting_bytes = max_waiting_bytes
        self._clock = clock
        # Bytes of each tenant's requests that wait.
        self._waiting: dict[str, int] = {}
        # When all that the tenant has sent would have come at the allowed rate.
        self._even_s: dict[str, float] = {}
        self._num_waits = 0

    def wait_s(self, tenant: str, num_bytes: int) -> float:
        """How long a request of so many bytes has to wait; it counts from now on."""
        now_s = self._clock()
        self._num_waits += 1
        if self._num_waits % _PRUNE_EVERY == 0:
            self._even_s = {name: even_s for name, even_s in self._even_s.items() if even_s > now_s}
        # Delay caused by what the tenant sent before, so that a request alone never waits, however large.
        before_s = max(0.0, self._even_s.get(tenant, 0.0) - now_s)
        self._even_s[tenant] = now_s + before_s + num_bytes / self._bytes_per_s
        return max(0.0, before_s - self._burst_s)

    async def wait(self, tenant: str, num_bytes: int) -> None:
        """Waits so long. Raises QUEUE_LIMIT_EXCEEDED where more waits already than may."""
        wait_s = self.wait_s(tenant, num_bytes)
        if wait_s <= 0:
            return
        waiting = self._waiting.get(tenant, 0)
        if waiting + num_bytes > self._max_waiting_bytes:
            raise MillraceError(
                Reason.QUEUE_LIMIT_EXCEEDED,
                f"large requests of this tenant with {waiting} bytes wait; the limit is "
                f"{self._max_waiting_bytes}; send fewer at a time",
                field="input",
                retry_after_s=1.0,
            )
        self._waiting[tenant] = waiting + num_bytes
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._waiting[tenant] -= num_bytes
            if not self._waiting[tenant]:
                del self._waiting[tenant]
