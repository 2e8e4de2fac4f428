"""How fast one tenant may send large requests.

Receiving a message costs the process that everybody shares up to a millisecond per megabyte, whatever becomes
of it. Whoever is refused at once could send the next at once: so the answer waits as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

# Bytes of large requests that a tenant may send at a time, and per second in the long run. Of English text
# the latter is about a million tokens.
_BURST_BYTES = 16 * 1024 * 1024
_BYTES_PER_S = 4 * 1024 * 1024
_PRUNE_EVERY = 256


class Pace:
    """Makes tenants wait. Use from one event loop."""

    def __init__(
        self,
        *,
        burst_bytes: int = _BURST_BYTES,
        bytes_per_s: float = _BYTES_PER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._burst_s = burst_bytes / bytes_per_s
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        # When all that the tenant has sent would have come at the allowed rate.
        self._even_s: dict[str, float] = {}
        self._num_waits = 0

    def wait_s(self, tenant: str, num_bytes: int) -> float:
        """How long a request of so many bytes has to wait; it counts from now on."""
        now_s = self._clock()
        self._num_waits += 1
        if self._num_waits % _PRUNE_EVERY == 0:
            self._even_s = {name: even_s for name, even_s in self._even_s.items() if even_s > now_s}
        # What the tenant sent before: a request alone never waits, however large.
        before_s = max(0.0, self._even_s.get(tenant, 0.0) - now_s)
        self._even_s[tenant] = now_s + before_s + num_bytes / self._bytes_per_s
        return max(0.0, before_s - self._burst_s)

    async def wait(self, tenant: str, num_bytes: int) -> None:
        """Waits so long."""
        if (wait_s := self.wait_s(tenant, num_bytes)) > 0:
            await asyncio.sleep(wait_s)
