"""Work on large requests in slices, between which everybody else has the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

# After so much work on a large request it is the turn of others.
SLICE_S = 0.002
# For the time that large requests take, all of them together, everybody else has so many times as much. One
# turn of the loop in between would not do: a request has a dozen events, each of which would wait for one
# slice, and gRPC's thread, which tells of them, gets the interpreter's lock late where the loop never sleeps.
_TIMES_OTHERS = 3


class Pace:
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
    """One request's. Without a pace everybody else has one turn of the loop after each."""

    __slots__ = ("_began_s", "_clock", "_pace")

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace
        self._clock = time.monotonic if pace is None else pace.clock
        self._began_s = self._clock()

    async def breathe(self) -> None:
        """Lets others go on where a slice is over; to be called between pieces of work."""
        if self._clock() - self._began_s >= SLICE_S:
            await self.rest()

    async def rest(self) -> None:
        """Lets others go on now."""
        if self._pace is None:
            await asyncio.sleep(0)
        else:
            await self._pace.sleep(self._pace.wait_s(self._clock() - self._began_s))
        self._began_s = self._clock()
