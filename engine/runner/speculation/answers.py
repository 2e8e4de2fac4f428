"""A tenant's own recent answers, and drafts from them: texts of one tenant resemble each other.

Answers are kept by tenant and by the salt of their prefixes, and looked up under the same two alone, so that
neither a draft nor the time that it saves tells anybody of others' texts. All of them together have a bounded
number of tokens. Who has most of them gives up first, so that nobody's flood costs others theirs.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine.runner.speculation.suffixes import Match, SuffixAutomaton

Owner = tuple[str, bytes]

# The end of a text that is matched at first.
_TAIL_TOKENS = 64
# What is proposed followed so many of the passages that ended alike.
_LEAST_SHARE = 0.3
# What a pool counts at least, since it takes memory even where it is empty.
_LEAST_TOKENS = 256
# Tokens between two looks at the clock.
_AT_ONCE = 8
# One half of a pool has at most one of so many parts of the bound.
_PARTS = 8


@dataclass(kw_only=True)
class AnswerPool:
    """The latest answers of one owner, the older half and the newer one. `number` is another one whenever
    the halves are others.
    """

    number: int
    halves: list[SuffixAutomaton] = field(default_factory=lambda: [SuffixAutomaton()])

    @property
    def weight(self) -> int:
        """Tokens that it counts as."""
        return max(_LEAST_TOKENS, sum(half.num_tokens for half in self.halves))


@dataclass(kw_only=True)
class AnswerMatch:
    """How much of a text's end each half of a pool knows."""

    number: int
    matches: list[Match]
    # Tokens of the text that were followed.
    num_read: int


class RecentAnswers:
    """Pools by owner, of at most `max_tokens` tokens in all."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._half_tokens = max(1, max_tokens // _PARTS)
        # The least recently extended first.
        self.pools: dict[Owner, AnswerPool] = {}
        self._numbers = itertools.count()
        self._waiting: deque[tuple[Owner, NDArray[np.int64]]] = deque()
        self._num_waiting = 0
        # What of the first one that waits is read.
        self._num_read = 0
        self._allowed_s = 0.0

    def add(self, owner: Owner, output: NDArray[np.int64]) -> None:
        """Puts an answer in line; the longest waiting ones make room."""
        if not output.size:
            return
        self._waiting.append((owner, output.copy()))
        self._num_waiting += output.size
        while self._num_waiting > self._half_tokens and len(self._waiting) > 1:
            _, dropped = self._waiting.popleft()
            self._num_waiting -= dropped.size
            self._num_read = 0

    def learn(self, seconds: float) -> None:
        """Reads what waits; in the long run it takes no longer than it is given."""
        if not self._waiting:
            self._allowed_s = 0.0
            return
        self._allowed_s += seconds
        started = time.monotonic()
        while self._waiting and self._allowed_s > 0:
            self._read(_AT_ONCE)
            now = time.monotonic()
            self._allowed_s -= now - started
            started = now

    def _read(self, most: int) -> None:
        owner, output = self._waiting[0]
        pool = self._pool_of(owner)
        before = pool.weight
        if not self._num_read:
            pool.halves[-1].begin()
        for token in output[self._num_read : self._num_read + most].tolist():
            pool.halves[-1].read(token)
        self._num_read += most
        if self._num_read >= output.size:
            self._waiting.popleft()
            self._num_waiting -= output.size
            self._num_read = 0
        self.num_tokens += pool.weight - before
        while self.num_tokens > self.max_tokens:
            self._make_room()

    def _pool_of(self, owner: Owner) -> AnswerPool:
        """Where the owner's next token belongs: in its newer half."""
        pool = self.pools.pop(owner, None)
        if pool is None:
            pool = AnswerPool(number=next(self._numbers))
            self.num_tokens += pool.weight
        elif pool.halves[-1].num_tokens >= self._half_tokens:
            self.num_tokens -= pool.weight
            pool.halves = [pool.halves[-1], SuffixAutomaton()]
            pool.number = next(self._numbers)
            self.num_tokens += pool.weight
        self.pools[owner] = pool
        return pool

    def _make_room(self) -> None:
        """Whose tokens are the most gives up half a pool, of those that were not extended for longest."""
        weights: dict[str, int] = {}
        for (tenant, _), pool in self.pools.items():
            weights[tenant] = weights.get(tenant, 0) + pool.weight
        largest = max(weights, key=lambda tenant: weights[tenant])
        owner = next(each for each in self.pools if each[0] == largest)
        pool = self.pools[owner]
        self.num_tokens -= pool.weight
        del pool.halves[0]
        pool.number = next(self._numbers)
        if pool.halves:
            self.num_tokens += pool.weight
        else:
            del self.pools[owner]

    def continuation(
        self, owner: Owner, match: AnswerMatch | None, text: NDArray[np.int64], most: int
    ) -> tuple[AnswerMatch | None, int, tuple[int, ...]]:
        """What followed the end of `text` [L] in the owner's answers: where the text stands in them, to be
        given the next time, how many tokens of its end are known, and up to `most` tokens.
        """
        pool = self.pools.get(owner)
        if pool is None:
            return None, 0, ()
        if match is None or match.number != pool.number or text.size - match.num_read > _TAIL_TOKENS:
            matches = [Match() for _ in pool.halves]
            start = max(0, text.size - _TAIL_TOKENS)
            match = AnswerMatch(number=pool.number, matches=matches, num_read=start)
        fresh = text[match.num_read :].tolist()
        match.num_read = text.size
        best: tuple[int, ...] = ()
        longest = 0
        for half, place in zip(pool.halves, match.matches, strict=True):
            half.follow(place, fresh)
            # Of two equally long ones the newer.
            if place.length >= max(1, longest) and (found := half.likely(place, most, _LEAST_SHARE)):
                best, longest = tuple(found), place.length
        return match, longest, best
