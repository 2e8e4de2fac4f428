"""What stays of one layer's forgotten keys, and the most that they would have weighed. The meter fills it and
asks it.

Of every block the keys stay in eight bits, a step for each channel of each block, with the length of what
rounding took of each key, in steps: a score is then known up to that length times the length of the query in
steps (Cauchy-Schwarz), and so is the weight that the key would have had. Beyond MOST_WHOLE_BLOCKS blocks the
oldest leave their boxes alone, the least and the most of each channel; of boxes beyond MOST_BOXES, neighbours
become one. So an endless answer has constant memory, and a bound that grows loose.

Shape letters: K kv heads, G queries of a kv head, D key dim, B blocks, P block size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.types.retention import MOST_BOXES, MOST_WHOLE_BLOCKS

Floats = NDArray[np.float32]

_LEVELS = 255.0
# Part of all that is attended to which blocks may have too much, together, by being told from their boxes.
_FROM_BOXES = 1e-3
# Of the lengths of a key and a query, for each of their elements: what float32 may take of a score.
_ROUNDING = 2.0**-22


class LayerKeys:
    """The forgotten keys of one layer."""

    def __init__(self) -> None:
        self.num_blocks = 0
        # Of blocks that are here whole, for each channel [K, B, D]: the least, and the step between two
        # levels; for each key the levels [K, B, P, D] and the length that rounding took [K, B, P]; for each
        # block what scores may be off by float32 arithmetic, as a part of the query's length [K, B].
        self._low = self._step = self._lengths = np.zeros((0, 0, 0), np.float32)
        self._off = np.zeros((0, 0), np.float32)
        self._levels = np.zeros((0, 0, 0, 0), np.uint8)
        # Boxes of others, with the keys in each [B].
        self._boxes: list[Floats] = []
        self._counts = np.zeros(0, np.int64)

    def add(self, keys: Floats) -> None:
        """Keys [K, B, P, D] of blocks that follow those before."""
        for first in range(0, keys.shape[1], MOST_WHOLE_BLOCKS):
            self._add(keys[:, first : first + MOST_WHOLE_BLOCKS])

    def _add(self, keys: Floats) -> None:
        count = keys.shape[1]
        low, high = keys.min(2), keys.max(2)
        step = np.maximum((high - low) / _LEVELS, np.float32(1e-30))
        levels = np.rint((keys - low[:, :, None]) / step[:, :, None])
        taken = (keys - (low[:, :, None] + levels * step[:, :, None])) / step[:, :, None]
        lengths = np.linalg.norm(taken, axis=3) * np.float32(1.0001)
        off = np.linalg.norm(keys, axis=3).max(2) * np.float32(_ROUNDING * keys.shape[3])
        whole: tuple[Any, ...] = (low, step, levels.astype(np.uint8), lengths, off)
        held: tuple[Any, ...] = (self._low, self._step, self._levels, self._lengths, self._off)
        if self.num_blocks:
            excess = max(0, self._low.shape[1] + count - MOST_WHOLE_BLOCKS)
            self._leave_boxes(excess)
            whole = tuple(
                np.concatenate((old[:, excess:], new), 1) for old, new in zip(held, whole, strict=True)
            )
        self._low, self._step, self._levels, self._lengths, self._off = whole
        self.num_blocks += count

    def _leave_boxes(self, count: int) -> None:
        if not count:
            return
        low, wide = self._low[:, :count], _LEVELS * self._step[:, :count]
        boxes = [low, low + wide + 1e-6 * (np.abs(low) + wide)]
        counts = np.full(count, self._levels.shape[2])
        if self._boxes:
            boxes = [np.concatenate(pair, 1) for pair in zip(self._boxes, boxes, strict=True)]
            counts = np.concatenate((self._counts, counts))
        while counts.size > MOST_BOXES:
            even = counts.size // 2 * 2
            merged = [
                np.concatenate((pick(box[:, 0:even:2], box[:, 1:even:2]), box[:, even:]), 1)
                for pick, box in zip((np.minimum, np.maximum), boxes, strict=True)
            ]
            counts = np.concatenate((counts[0:even:2] + counts[1:even:2], counts[even:]))
            boxes = merged
        self._boxes, self._counts = boxes, counts

    def log_mass(self, q: Floats, log_seen: Floats, soft_cap: float | None) -> NDArray[np.float64]:
        """At least the logarithm of the weights' sum [K, G] that scaled queries [K, G, D] would have given to
        the forgotten keys, where what they look at has the sum exp(`log_seen`).
        """
        sums: list[Floats] = []
        if self._boxes:
            low, high = self._boxes
            scores = np.maximum(q, 0) @ high.swapaxes(1, 2) + np.minimum(q, 0) @ low.swapaxes(1, 2)
            reach = np.maximum(np.abs(low), np.abs(high)).swapaxes(1, 2)
            scores += np.float32(_ROUNDING * q.shape[2]) * (np.abs(q) @ reach)
            sums.append(capped(scores, soft_cap) + np.log(self._counts, dtype=np.float32))
        num_whole, block_size = self._levels.shape[1:3]
        at_low = q @ self._low.swapaxes(1, 2) + np.linalg.norm(q, axis=2)[..., None] * self._off[:, None]
        most = at_low + np.maximum(q, 0) @ (_LEVELS * self._step).swapaxes(1, 2)
        most = capped(most, soft_cap) + np.float32(np.log(block_size))
        least = log_seen[..., None] + np.log(_FROM_BOXES / num_whole)
        for head in range(q.shape[0]):
            read = np.flatnonzero((most[head] > least[head]).any(0))
            if read.size:
                steps = q[head][None] * self._step[head, read][:, None]  # [B, G, D]
                scores = steps @ self._levels[head, read].astype(np.float32).swapaxes(1, 2)  # [B, G, P]
                scores += at_low[head][:, read].T[..., None]
                scores += np.linalg.norm(steps, axis=2)[..., None] * self._lengths[head, read][:, None]
                most[head][:, read] = log_sum(capped(scores, soft_cap)).T
        sums.append(most)
        return log_sum(np.concatenate(sums, 2))


def capped(scores: Any, soft_cap: float | None) -> Any:
    """Scores as a model with a soft cap has them."""
    return scores if soft_cap is None else np.float32(soft_cap) * np.tanh(scores / np.float32(soft_cap))


def log_sum(scores: Floats) -> NDArray[np.float64]:
    """Logarithm of the exponentials' sum over the last axis."""
    most = scores.max(-1, keepdims=True)
    total = np.exp(scores - most).sum(-1, dtype=np.float64)
    found: NDArray[np.float64] = np.log(total) + most[..., 0]
    return found
