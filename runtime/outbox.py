"""What waits to be written on a long-lived stream, and what of it goes in one message.

gRPC's asyncio wakes the event loop for every message, so a stream sends few: what is put within one turn of
the event loop goes together. A stream has one writer, which takes, and waits until its write is accepted:
what is put meanwhile waits here, so congestion is the outbox's length.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")

# More would hold up whoever reads the message, and everybody behind it.
MAX_TOGETHER_BYTES = 256 * 1024
# Few, so that the peer need not wait for the last to begin the first.
MAX_TOGETHER = 8
# Far more than a peer that reads is ever behind.
MAX_WAITING = 16_384
MAX_WAITING_BYTES = 256 * 1024 * 1024


class OutboxFull(Exception):
    """The peer does not take what is sent to it; the item was not put."""


class Outbox(Generic[Item]):
    """Items for one writer, from one event loop. `size` is an item's bytes on the wire.

    An item beyond MAX_TOGETHER_BYTES goes alone. One item is kept however large it is.
    """

    def __init__(
        self,
        size: Callable[[Item], int],
        *,
        max_together: int | None = MAX_TOGETHER,
        max_waiting: int = MAX_WAITING,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._size = size
        self._max_together = max_together
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        # By ticket, each with its size.
        self._items: OrderedDict[int, tuple[int, Item]] = OrderedDict()
        self._last_ticket = 0
        # What waits has so many.
        self.num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._is_writing = False
        # Whether nothing more is taken in.
        self.is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_flushed(self) -> bool:
        """Whether the transport has accepted everything."""
        return not self._items and not self._is_writing

    def put(self, item: Item) -> int:
        """Adds an item, which goes in the next turn of the event loop at the earliest; its ticket.

        Raises OutboxFull.
        """
        size = self._size(item)
        is_over = self.num_bytes + size > self._max_waiting_bytes and bool(self._items)
        if is_over or len(self._items) >= self._max_waiting:
            raise OutboxFull
        self._last_ticket += 1
        self._items[self._last_ticket] = size, item
        self.num_bytes += size
        self._wake()
        return self._last_ticket

    def discard(self, ticket: int) -> bool:
        """Drops an item; False when it was taken already."""
        found = self._items.pop(ticket, None)
        if found is not None:
            self.num_bytes -= found[0]
        return found is not None

    def clear(self) -> None:
        """Drops what waits."""
        self._items.clear()
        self.num_bytes = 0

    def close(self, error: Exception | None = None) -> None:
        """The writer ends when it has taken what waits: well, or with `error`."""
        if not self.is_closed:
            self.is_closed, self._error = True, error
            self._wake()

    async def take(self) -> list[Item]:
        """What goes into one message; the one before it is written. Empty when the outbox was closed."""
        self._is_writing = False
        while not self._items:
            if self.is_closed:
                if self._error is not None:
                    raise self._error
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_writing = True
        return self._together()

    def _together(self) -> list[Item]:
        taken: list[Item] = []
        num_bytes = 0
        while self._items and len(taken) != self._max_together:
            ticket, (size, item) = next(iter(self._items.items()))
            num_bytes += size
            if taken and num_bytes > MAX_TOGETHER_BYTES:
                break
            self.discard(ticket)
            taken.append(item)
        return taken

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
