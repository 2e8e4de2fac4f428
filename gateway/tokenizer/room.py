"""Room for calls that are under way to the tokenizer service, in bytes, shared among tenants.

What does not fit waits behind its own tenant's calls alone. A tenant may have as much as is left free after
it (dynamic thresholds, Choudhury and Hahne 1998): one alone gets half, several get less each, and there is
always something left for whoever comes next.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque

from contract.errors import MillraceError, Reason

# Of one stream. Fewer than the service reads of one before it waits.
MAX_UNDER_WAY_BYTES = 32 * 1024 * 1024
# Of one tenant half: more than the service takes from it within the time that a request has.
MAX_WAITING_BYTES = 256 * 1024 * 1024


class Shares:
    """Bytes of each tenant, under one limit."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.of: dict[str, int] = {}

    def take(self, tenant: str, num_bytes: int) -> bool:
        """Whether there was room. One call alone fits, however large it is."""
        own = self.of.get(tenant, 0)
        if own + num_bytes > self._max_bytes - self._num_bytes and self._num_bytes:
            return False
        self.of[tenant] = own + num_bytes
        self._num_bytes += num_bytes
        return True

    def give(self, tenant: str, num_bytes: int) -> None:
        """Takes `take` back."""
        self._num_bytes -= num_bytes
        self.of[tenant] -= num_bytes
        if not self.of[tenant]:
            del self.of[tenant]


class Room:
    """Use from one event loop."""

    def __init__(
        self, *, max_bytes: int = MAX_UNDER_WAY_BYTES, max_waiting_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._under_way = Shares(max_bytes)
        self._waiting = Shares(max_waiting_bytes)
        # Calls of each tenant that wait; the first tenant in order is admitted next.
        self._turns: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    async def acquire(self, tenant: str, num_bytes: int) -> None:
        """Waits for the tenant's turn. Raises QUEUE_LIMIT_EXCEEDED where as much of it waits as may."""
        if tenant not in self._turns and self._under_way.take(tenant, num_bytes):
            return
        if not self._waiting.take(tenant, num_bytes):
            raise MillraceError(
                Reason.QUEUE_LIMIT_EXCEEDED,
                f"requests of this tenant with {self._waiting.of.get(tenant, 0)} bytes wait to be prepared, "
                "and there is no room for more; send fewer at a time",
                field="input",
                retry_after_s=1.0,
            )
        turn = (num_bytes, asyncio.get_running_loop().create_future())
        self._turns.setdefault(tenant, deque()).append(turn)
        try:
            await turn[1]
        except asyncio.CancelledError:
            if turn[1].cancelled():
                self._leave(tenant, turn)
                self._admit()
            else:
                self.release(tenant, num_bytes)
            raise

    def release(self, tenant: str, num_bytes: int) -> None:
        """The call has ended, in whatever way."""
        self._under_way.give(tenant, num_bytes)
        self._admit()

    def _admit(self) -> None:
        """Lets in what fits, one call of each tenant in turn."""
        has_admitted = True
        while has_admitted:
            has_admitted = False
            for tenant, turns in list(self._turns.items()):
                num_bytes, waiter = turns[0]
                # One that is cancelled leaves by itself.
                if not waiter.done() and self._under_way.take(tenant, num_bytes):
                    self._leave(tenant, turns[0])
                    waiter.set_result(None)
                    has_admitted = True

    def _leave(self, tenant: str, turn: tuple[int, asyncio.Future[None]]) -> None:
        turns = self._turns.pop(tenant)
        turns.remove(turn)
        self._waiting.give(tenant, turn[0])
        if turns:
            # To the end: every other tenant comes before this one's next call.
            self._turns[tenant] = turns
