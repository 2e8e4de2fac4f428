"""Where one request's outputs wait to be taken: one reader, any number of writers, no locks."""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """An unbounded queue whose reader takes everything at once.

    A burst of outputs wakes the reader once. The bound is the request's own max_tokens.
    """

    __slots__ = ("_items", "_waiter")

    def __init__(self) -> None:
        self._items: list[Item] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, item: Item) -> None:
        """Adds an item and wakes the reader."""
        self._items.append(item)
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            if not waiter.done():
                waiter.set_result(None)

    async def take(self) -> list[Item]:
        """Everything that has come, oldest first; waits when there is nothing."""
        while not self._items:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        items = self._items
        self._items = []
        return items
