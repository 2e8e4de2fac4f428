"""Streams whose work runs late, in whatever order the rules allow: streams of a device at their worst."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from engine.runner.streams import Streams

Work = Callable[[], None]
Mark = tuple["LateStream", int]


class LateStream:
    """Queues work and waits; runs one entry at a time when told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._entries: deque[Work | Mark] = deque()
        self._queued = 0
        self._done = 0

    def run(self, work: Work) -> None:
        self._queued += 1
        self._entries.append(work)

    def record(self) -> Mark:
        return self, self._queued

    def wait(self, mark: Mark | None) -> None:
        if mark is not None:
            self._entries.append(mark)

    def is_reached(self, position: int) -> bool:
        return self._done >= position

    @property
    def is_idle(self) -> bool:
        return not self._entries

    def advance(self) -> bool:
        """Runs the next work. False when there is none, or it must wait."""
        while self._entries and not callable(self._entries[0]):
            stream, position = self._entries[0]
            if not stream.is_reached(position):
                return False
            self._entries.popleft()
        if not self._entries:
            return False
        work = self._entries.popleft()
        assert callable(work)
        work()
        self._done += 1
        return True


class LateStreams:
    """Two late streams and who goes on next. `favourite` always runs as far as it can before the other."""

    def __init__(self, seed: int, favourite: str = "") -> None:
        self.compute, self.copy = LateStream("compute"), LateStream("copy")
        self._random = random.Random(seed)
        self._favourite = favourite

    @property
    def streams(self) -> Streams:
        return Streams(compute=self.compute, copy=self.copy)

    def _order(self) -> list[LateStream]:
        both = [self.compute, self.copy]
        if self._favourite:
            return sorted(both, key=lambda stream: stream.name != self._favourite)
        self._random.shuffle(both)
        return both

    def some(self) -> None:
        """Runs a random number of entries."""
        for _ in range(self._random.randrange(8)):
            if not any(stream.advance() for stream in self._order()):
                return

    def all(self) -> None:
        """Runs everything; fails when streams wait for each other."""
        while any(stream.advance() for stream in self._order()):
            pass
        assert self.compute.is_idle, "the model's stream waits for ever"
        assert self.copy.is_idle, "the copy stream waits for ever"
