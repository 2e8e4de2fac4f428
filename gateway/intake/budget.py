"""Bytes that all tenants share, so that one alone never has all of them.

A tenant may have as much as is left free after it (dynamic thresholds, Choudhury and Hahne 1998): one alone
gets half, several get less each, and there is always something left for whoever comes next. What does not fit
is refused (`TenantBytes`), or waits behind its own tenant's requests alone (`ByteBudget`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from contract.errors import MillraceError, Reason

# Bytes under way on one stream: fewer than the service reads of it before it stops reading.
MAX_UNDER_WAY_BYTES = 32 * 1024 * 1024
# Bytes that wait for a stream, half of them one tenant's: more than the service gets through within the time
# that a request has.
MAX_WAITING_BYTES = 256 * 1024 * 1024


class TenantBytes:
    """Bytes of each tenant, under one limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.of: dict[str, int] = {}

    def acquire(self, tenant: str, num_bytes: int) -> bool:
        """Whether there was space. One call alone fits, however large it is."""
        own = self.of.get(tenant, 0)
        if own + num_bytes > self._max_bytes - self._num_bytes and self._num_bytes:
            return False
        self.of[tenant] = own + num_bytes
        self._num_bytes += num_bytes
        return True

    def release(self, tenant: str, num_bytes: int) -> None:
        """Undoes `acquire`."""
        self._num_bytes -= num_bytes
        self.of[tenant] -= num_bytes
        if not self.of[tenant]:
            del self.of[tenant]


class ByteBudget:
    """Bytes that may be under way, shared among tenants. Use from one event loop."""

    def __init__(
        self, *, max_bytes: int = MAX_UNDER_WAY_BYTES, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._under_way = TenantBytes(max_bytes)
        self._waiting = TenantBytes(max_waiting_bytes)
        # Calls of each tenant that wait; the first tenant in order is admitted next.
        self._queues: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    async def acquire(self, tenant: str, num_bytes: int) -> None:
        """Waits until the tenant is next. Raises QUEUE_LIMIT_EXCEEDED where as much of it waits as may."""
        if tenant not in self._queues and self._under_way.acquire(tenant, num_bytes):
            return
        if not self._waiting.acquire(tenant, num_bytes):
            raise MillraceError(
                Reason.QUEUE_LIMIT_EXCEEDED,
                f"requests of this tenant with {self._waiting.of.get(tenant, 0)} bytes wait to be prepared, "
                "and there is no space for more; send fewer at a time",
                field="input",
                retry_after_s=1.0,
            )
        waiting = (num_bytes, asyncio.get_running_loop().create_future())
        self._queues.setdefault(tenant, deque()).append(waiting)
        try:
            await waiting[1]
        except asyncio.CancelledError:
            if waiting[1].cancelled():
                self._leave(tenant, waiting)
                self._admit()
            else:
                self.release(tenant, num_bytes)
            raise

    def release(self, tenant: str, num_bytes: int) -> None:
        """The call has ended, in whatever way."""
        self._under_way.release(tenant, num_bytes)
        self._admit()

    def _admit(self) -> None:
        """Lets in what fits, one call of each tenant after another."""
        has_admitted = True
        while has_admitted:
            has_admitted = False
            for tenant, queue in list(self._queues.items()):
                num_bytes, waiter = queue[0]
                # One that is cancelled leaves by itself.
                if not waiter.done() and self._under_way.acquire(tenant, num_bytes):
                    self._leave(tenant, queue[0])
                    waiter.set_result(None)
                    has_admitted = True

    def _leave(self, tenant: str, waiting: tuple[int, asyncio.Future[None]]) -> None:
        queue = self._queues.pop(tenant)
        queue.remove(waiting)
        self._waiting.release(tenant, waiting[0])
        if queue:
            # To the end: every other tenant comes before this one's next call.
            self._queues[tenant] = queue
