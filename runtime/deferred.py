"""What nobody waits for, done together some milliseconds later.

A request leaves books to keep: spans, counters, the ledger. Done at once, they stand between this request's
message and the process that it wakes, on whatever processor both share. Done for several requests together
they take no less in all, but one request in many meets them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

_log = logging.getLogger(__name__)

# How long work may wait for more of its kind, in seconds.
DELAY_S = 0.05
# Calls in one iteration of the event loop; half of the queue where that is more. What comes in meanwhile need
# not wait for the whole queue, and the queue stays bounded.
_PER_ITERATION = 16

Work: TypeAlias = Callable[..., object]


class Deferred:
    """Calls in the order in which they were given, on the event loop. Whoever ends must `flush`."""

    def __init__(self, delay_s: float = DELAY_S) -> None:
        self._delay_s = delay_s
        self._waiting: deque[tuple[Work, tuple[Any, ...]]] = deque()
        self._is_due = False

    def call(self, work: Work, *arguments: Any) -> None:
        """Calls `work` soon. What it raises is logged and hinders nothing else."""
        self._waiting.append((work, arguments))
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(self._delay_s, self._begin)

    def flush(self) -> None:
        """Does everything that waits, now."""
        self._run(len(self._waiting))

    def _begin(self) -> None:
        self._run(max(_PER_ITERATION, len(self._waiting) // 2))
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin)
        else:
            self._is_due = False

    def _run(self, count: int) -> None:
        waiting = self._waiting
        while waiting and count > 0:
            count -= 1
            work, arguments = waiting.popleft()
            try:
                work(*arguments)
            except Exception:
                _log.exception("what follows a request has failed")
