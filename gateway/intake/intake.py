"""What requests that are large or refused may take of the process that everybody shares: memory, and time of
its event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from weakref import WeakValueDictionary

from contract.errors import MillraceError, Reason
from gateway.config import DEFAULT_REQUEST_LIMITS, RequestConfig
from gateway.engines.mailbox import Backlog
from gateway.intake.budget import TenantBytes
from gateway.intake.refusals import Refusals
from runtime.memory import GiveBack

# After so much work on a large request others go on.
SLICE_S = 0.002
# For the time that large requests take, all of them together, everybody else has so many times as much. One
# iteration of the loop in between would not do: a request has a dozen events, each of which would wait for
# one slice, and gRPC's thread, which reports them, gets the interpreter's lock late where the loop never
# sleeps.
_TIMES_OTHERS = 3


class SliceThrottle:
    """When the next slice of any large request may begin. Use from one event loop."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.clock = clock
        self.sleep = sleep
        self._next_s = 0.0

    def wait_s(self, worked_s: float) -> float:
        """How long whoever has worked so long has to wait; it counts from now on."""
        now_s = self.clock()
        self._next_s = max(self._next_s, now_s) + _TIMES_OTHERS * worked_s
        return self._next_s - now_s


class Slices:
    """One request's. Without a throttle everybody else has one iteration of the loop after each."""

    __slots__ = ("_began_s", "_clock", "_throttle")

    def __init__(self, throttle: SliceThrottle | None = None) -> None:
        self._throttle = throttle
        self._clock = time.monotonic if throttle is None else throttle.clock
        self._began_s = self._clock()

    async def breathe(self) -> None:
        """Lets others go on where a slice is over; to be called between pieces of work."""
        if self._clock() - self._began_s >= SLICE_S:
            await self.rest()

    async def rest(self) -> None:
        """Lets others go on now."""
        if self._throttle is None:
            await asyncio.sleep(0)
        else:
            await self._throttle.sleep(self._throttle.wait_s(self._clock() - self._began_s))
        self._began_s = self._clock()


# Smaller requests are parsed as they come: the worst of them takes some milliseconds.
LARGE_BYTES = 64 * 1024
# Until a large request is prepared there are what was parsed of it, the message to the tokenizer service, and
# that message on its way: its bytes count so often.
_BODY_COPIES = 3


class Intake:
    """Large requests of all tenants, from their first byte to their answer. Use from one event loop."""

    def __init__(self, limits: RequestConfig = DEFAULT_REQUEST_LIMITS) -> None:
        self.limits = limits
        self.throttle = SliceThrottle()
        self.refusals = Refusals(limits.refusals_per_s)
        self._held = TenantBytes(limits.max_held_bytes)
        # Tenants with a large request that is being parsed, or waits for that, and how many.
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._give_back = GiveBack()
        # By tenant; one without requests under way is forgotten.
        self._backlogs: WeakValueDictionary[str, Backlog] = WeakValueDictionary()

    def backlog(self, tenant: str) -> Backlog:
        """What waits for this tenant's clients to read on."""
        found = self._backlogs.get(tenant)
        if found is None:
            limits = self.limits
            found = self._backlogs[tenant] = Backlog(limits.max_unread, limits.max_unread_of_tenant)
        return found

    def lease(self, tenant: str) -> ByteLease:
        """For the bytes of one request, none at first."""
        return ByteLease(self, tenant)

    def acquire(self, tenant: str, num_bytes: int) -> None:
        """Raises QUEUE_LIMIT_EXCEEDED where the tenant holds its share, GATEWAY_FULL where all do."""
        if self._held.acquire(tenant, num_bytes):
            return
        own, limit = self._held.of.get(tenant, 0), self.limits.max_held_bytes
        metadata = {"limit_bytes": str(limit), "held_bytes": str(own)}
        if own:
            raise MillraceError(
                Reason.QUEUE_LIMIT_EXCEEDED,
                f"large requests of this tenant with {own} bytes are under way; {num_bytes} more are over "
                f"its share of {limit} bytes (gateway.request.max_held_bytes): send fewer at a time",
                metadata=metadata,
                retry_after_s=1.0,
            )
        raise MillraceError(
            Reason.GATEWAY_FULL,
            f"large requests fill this gateway's space of {limit} bytes (gateway.request.max_held_bytes); "
            "send the request again",
            metadata=metadata,
            retry_after_s=1.0,
        )

    def release(self, tenant: str, num_bytes: int) -> None:
        """Undoes `acquire`."""
        self._held.release(tenant, num_bytes)
        self._give_back.soon()

    def slices(self) -> Slices:
        """For work on a large request, beside which everybody else has most of the time."""
        return Slices(self.throttle)

    @asynccontextmanager
    async def exclusive(self, tenant: str) -> AsyncIterator[Slices]:
        """Around work on one large request: a tenant has one at a time."""
        lock, num_users = self._locks.get(tenant, (asyncio.Lock(), 0))
        self._locks[tenant] = (lock, num_users + 1)
        try:
            async with lock:
                yield self.slices()
        finally:
            lock, num_users = self._locks.pop(tenant)
            if num_users > 1:
                self._locks[tenant] = (lock, num_users - 1)


class ByteLease:
    """Bytes of one request. Leaving it gives them back."""

    __slots__ = ("_intake", "_num_bytes", "_tenant")

    def __init__(self, intake: Intake, tenant: str) -> None:
        self._intake = intake
        self._tenant = tenant
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """So many bytes more; raises as `Intake.acquire` does."""
        self._intake.acquire(self._tenant, num_bytes)
        self._num_bytes += num_bytes

    def grow_by_body(self, num_bytes: int) -> None:
        """So many bytes more of the request itself; raises as `Intake.acquire` does."""
        self.grow(_BODY_COPIES * num_bytes)

    def release(self) -> None:
        """Gives all of them back."""
        if self._num_bytes:
            self._intake.release(self._tenant, self._num_bytes)
            self._num_bytes = 0

    def __enter__(self) -> ByteLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
