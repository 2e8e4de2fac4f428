"""What requests that are large or refused may take of the process that everybody shares: memory, and turns on
its event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from weakref import WeakValueDictionary

from contract.errors import MillraceError, Reason
from gateway.config import DEFAULT_REQUEST_LIMITS, RequestConfig
from gateway.engines.mailbox import Backlog
from gateway.pipeline.refusals import Refusals
from gateway.tokenizer.stream import ByteShares
from gateway.types.slices import Pace, Slices
from runtime.memory import GiveBack

# Smaller requests are parsed as they come: the worst of them takes some milliseconds.
LARGE_BYTES = 64 * 1024
# Until a large request is prepared there are what was parsed of it, the message to the tokenizer service, and
# that message on its way: its bytes count so often.
_BODY_COPIES = 3


class Intake:
    """Large requests of all tenants, from their first byte to their answer. Use from one event loop."""

    def __init__(self, limits: RequestConfig = DEFAULT_REQUEST_LIMITS) -> None:
        self.limits = limits
        self.pace = Pace()
        self.refusals = Refusals(limits.refusals_per_s)
        self._held = ByteShares(limits.max_held_bytes)
        # Tenants with a large request that is being parsed, or waits for that, and how many.
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}
        self._give_back = GiveBack()
        # Of tenants with requests under way.
        self._backlogs: WeakValueDictionary[str, Backlog] = WeakValueDictionary()

    def backlog(self, tenant: str) -> Backlog:
        """What waits for this tenant's clients to read on."""
        found = self._backlogs.get(tenant)
        if found is None:
            limits = self.limits
            found = self._backlogs[tenant] = Backlog(limits.max_unread, limits.max_unread_of_tenant)
        return found

    def hold(self, tenant: str) -> Hold:
        """Room for one request, which takes none until it is told how large it is."""
        return Hold(self, tenant)

    def take(self, tenant: str, num_bytes: int) -> None:
        """Raises QUEUE_LIMIT_EXCEEDED where the tenant holds its share, GATEWAY_FULL where all do."""
        if self._held.take(tenant, num_bytes):
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
            f"large requests fill this gateway's room of {limit} bytes (gateway.request.max_held_bytes); "
            "send the request again",
            metadata=metadata,
            retry_after_s=1.0,
        )

    def give(self, tenant: str, num_bytes: int) -> None:
        """Takes `take` back."""
        self._held.give(tenant, num_bytes)
        self._give_back.soon()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[Slices]:
        """Around work on one large request: a tenant has one at a time."""
        lock, num_users = self._turns.get(tenant, (asyncio.Lock(), 0))
        self._turns[tenant] = (lock, num_users + 1)
        try:
            async with lock:
                yield Slices(self.pace)
        finally:
            lock, num_users = self._turns.pop(tenant)
            if num_users > 1:
                self._turns[tenant] = (lock, num_users - 1)


class Hold:
    """Bytes of one request. Leaving it gives them back."""

    __slots__ = ("_intake", "_num_bytes", "_tenant")

    def __init__(self, intake: Intake, tenant: str) -> None:
        self._intake = intake
        self._tenant = tenant
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """So many bytes more; raises as `Intake.take` does."""
        self._intake.take(self._tenant, num_bytes)
        self._num_bytes += num_bytes

    def grow_by_body(self, num_bytes: int) -> None:
        """So many bytes more of the request itself; raises as `Intake.take` does."""
        self.grow(_BODY_COPIES * num_bytes)

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._num_bytes:
            self._intake.give(self._tenant, self._num_bytes)
            self._num_bytes = 0
