"""Prompt lookup: what followed the last time that the text ended like this (Saxena, 2023)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def continuation(
    tokens: NDArray[np.int64], *, longest: int, shortest: int, num_drafts: int
) -> tuple[int, ...]:
    """Up to num_drafts tokens that followed the latest earlier occurrence of the longest suffix of `tokens`
    [L] that has one, among suffixes of `longest` down to `shortest` tokens; empty when none has.
    """
    for size in range(min(longest, tokens.size - 1), shortest - 1, -1):
        suffix = tokens[-size:]
        # Starts whose match ends before the last token, so that at least one token follows.
        starts = np.flatnonzero(tokens[: tokens.size - size] == suffix[0])
        for index in range(1, size):
            starts = starts[tokens[starts + index] == suffix[index]]
        if starts.size:
            first = int(starts[-1]) + size
            return tuple(tokens[first : first + num_drafts].tolist())
    return ()
