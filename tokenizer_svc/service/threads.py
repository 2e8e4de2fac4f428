"""Where work on texts is done: at once when it is short, else in threads, and the longest in a thread of its
own, so that no prompt waits for one that is much longer than itself. A tenant has one thread at a time, so
that none waits for another's prompts.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

# Work on inputs below this many characters takes less time than handing it to a thread.
INLINE_CHARACTERS = 4 * 1024
# From here on a text takes some tenths of a second.
_HUGE_CHARACTERS = 1024 * 1024


class TextThreads:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "text")
        self._huge = ThreadPoolExecutor(1, "huge-text")
        # Tenants with work in threads, and how much of it.
        self._turns: dict[tuple[str, bool], tuple[asyncio.Lock, int]] = {}

    async def run(self, num_characters: int, work: Callable[[], Result], tenant: str) -> Result:
        """The result of `work`, which handles that many characters."""
        if num_characters < INLINE_CHARACTERS:
            return work()
        huge = num_characters >= _HUGE_CHARACTERS
        key = (tenant, huge)
        turn, num_users = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = (turn, num_users + 1)
        try:
            async with turn:
                executor = self._huge if huge else self._long
                return await asyncio.get_running_loop().run_in_executor(executor, work)
        finally:
            turn, num_users = self._turns.pop(key)
            if num_users > 1:
                self._turns[key] = (turn, num_users - 1)

    def close(self) -> None:
        """Gives up what has not begun."""
        self._long.shutdown(wait=False, cancel_futures=True)
        self._huge.shutdown(wait=False, cancel_futures=True)
