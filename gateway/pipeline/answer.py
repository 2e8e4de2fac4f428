"""What a face writes: one or several attempts that are begun together or not at all, and end together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import TracebackType

from gateway.pipeline.attempt import Attempt
from gateway.pipeline.delta import ChoiceDelta, Usage


class Answer:
    """Attempts in the order in which they were asked for. Use as an async context manager: leaving it settles
    them all, whatever happened.
    """

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self.attempts = attempts

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close(error)

    async def close(self, error: BaseException | None = None) -> None:
        """Settles every attempt, with `error` as what ended it; once, however often it is called."""
        for attempt in reversed(self.attempts):
            await attempt.close(error)

    def cancel(self) -> None:
        """Ends every attempt because its client went away."""
        for attempt in self.attempts:
            attempt.cancel()

    def usages(self) -> list[Usage]:
        """Of each attempt so far; final once `deltas` has ended."""
        return [attempt.usage() for attempt in self.attempts]

    async def deltas(self) -> AsyncIterator[tuple[int, list[ChoiceDelta]]]:
        """(index of the attempt, its deltas) as they come; ends when all attempts have ended.

        Raises the MillraceError that ended one of them.
        """
        if len(self.attempts) == 1:
            while deltas := await self.attempts[0].take():
                yield 0, deltas
            return
        running = {asyncio.ensure_future(each.take()): index for index, each in enumerate(self.attempts)}
        try:
            while running:
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    index = running.pop(task)
                    if deltas := task.result():
                        yield index, deltas
                        running[asyncio.ensure_future(self.attempts[index].take())] = index
        finally:
            for task in running:
                task.cancel()
