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

# Work on inputs below this many characters is done sooner than handed to a thread.
INLINE_CHARACTERS = 4 * 1024
# A text from this size on is some tenths of a second of work.
_HUGE_CHARACTERS = 1024 * 1024


class TextThreads:
    """Use from one event loop."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(max(2, os.cpu_count() or 2), "text")
        self._huge = ThreadPoolExecutor(1, "huge-text")
        # A mutex, and how many calls use it, by tenant and whether the work is huge.
        self._mutexes: dict[tuple[str, bool], tuple[asyncio.Lock, int]] = {}

    async def run(self, num_characters: int, work: Callable[[], Result], tenant: str) -> Result:
        """The result of `work`, which handles that many characters."""
        if num_characters < INLINE_CHARACTERS:
            return work()
        huge = num_characters >= _HUGE_CHARACTERS
        key = (tenant, huge)
        mutex, num_users = self._mutexes.get(key, (asyncio.Lock(), 0))
        self._mutexes[key] = (mutex, num_users + 1)
        try:
            await mutex.acquire()
            job = (self._huge if huge else self._long).submit(work)
        except BaseException:
            self._leave(key)
            raise
        done = asyncio.wrap_future(job)
        done.add_done_callback(lambda _: self._ended(key, done))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            # What a thread has begun it ends, and the tenant's next waits for that.
            job.cancel()
            raise

    def _ended(self, key: tuple[str, bool], done: asyncio.Future[Result]) -> None:
        if not done.cancelled():
            # Nobody may be left whom it concerns.
            done.exception()
        self._mutexes[key][0].release()
        self._leave(key)

    def _leave(self, key: tuple[str, bool]) -> None:
        mutex, num_users = self._mutexes.pop(key)
        if num_users > 1:
            self._mutexes[key] = (mutex, num_users - 1)

    def close(self) -> None:
        """Gives up what has not begun."""
        self._long.shutdown(wait=False, cancel_futures=True)
        self._huge.shutdown(wait=False, cancel_futures=True)
