"""What waits to be written on a long-lived stream, and what of it goes in one message.

gRPC's asyncio wakes the event loop for every message, so a stream sends few: what is put within one turn of
the event loop goes together. A stream has one writer, which takes, and waits until its write is accepted:
what is put meanwhile waits here, so congestion is the outbox's length.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")

# More would hold up whoever reads the message, and everybody behind it.
MAX_TOGETHER_BYTES = 256 * 1024
# Few, so that the peer need not wait for the last to begin the first.
MAX_TOGETHER = 8
# Far more than a peer that reads is ever behind.
MAX_WAITING = 16_384


class OutboxFull(Exception):
    """The peer does not take what is sent to it; the item was not put."""


class Outbox(Generic[Item]):
    """Items for one writer, from one event loop. `size` is an item's bytes on the wire.

    An item beyond MAX_TOGETHER_BYTES goes alone.
    """

    __slots__ = (
        "_error",
        "_is_closed",
        "_is_writing",
        "_items",
        "_max_together",
        "_max_waiting",
        "_size",
        "_waiter",
    )

    def __init__(
        self,
        size: Callable[[Item], int],
        *,
        max_together: int | None = MAX_TOGETHER,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._size = size
        self._max_together = max_together
        self._max_waiting = max_waiting
        self._items: deque[Item] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._is_writing = False
        self._is_closed = False
        self._error: Exception | None = None

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    @property
    def is_closed(self) -> bool:
        """Whether nothing more is taken in."""
        return self._is_closed

    @property
    def is_flushed(self) -> bool:
        """Whether the transport has accepted everything."""
        return not self._items and not self._is_writing

    def put(self, item: Item) -> None:
        """Adds an item, which goes in the next turn of the event loop at the earliest. Raises OutboxFull."""
        if len(self._items) >= self._max_waiting:
            raise OutboxFull
        self._items.append(item)
        self._wake()

    def clear(self) -> None:
        """Drops what waits."""
        self._items.clear()

    def close(self, error: Exception | None = None) -> None:
        """The writer ends when it has taken what waits: well, or with `error`."""
        if not self._is_closed:
            self._is_closed, self._error = True, error
            self._wake()

    async def take(self) -> list[Item]:
        """What goes into one message; the one before it is written. Empty when the outbox was closed."""
        self._is_writing = False
        while not self._items:
            if self._is_closed:
                if self._error is not None:
                    raise self._error
                return []
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_writing = True
        return self._together()

    def _together(self) -> list[Item]:
        items, size = self._items, self._size
        taken = [items.popleft()]
        if items and self._max_together != 1:
            num_bytes = size(taken[0])
            while items and len(taken) != self._max_together:
                num_bytes += size(items[0])
                if num_bytes > MAX_TOGETHER_BYTES:
                    break
                taken.append(items.popleft())
        return taken

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
