"""What lookahead knows of a sequence's text: n-grams by their first token, and the window that makes more.

Jacobi iterations guess many tokens ahead at once: each is computed from guesses before it, again and again,
until nothing changes. They rarely settle in few steps, but on the way they come by n-grams that the model
would say somewhere (Fu et al., "Break the sequential dependency of LLM inference using lookahead decoding",
arXiv 2402.02057). The window keeps the latest guesses of several steps: level by level, column by column. A
column read downwards, with what the model says behind it, is an n-gram.

Shape letters: L levels, W columns.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# N-grams of a sequence; the first token that was added to least lately goes first.
MOST_NGRAMS = 16_384


class NgramPool:
    """N-grams by their first token, the latest `most_each` of each."""

    def __init__(self, most_each: int) -> None:
        self._most_each = most_each
        self._found: dict[int, dict[tuple[int, ...], None]] = {}
        self.num_ngrams = 0

    def add(self, first: int, rest: tuple[int, ...]) -> None:
        """Takes in a token and what followed it."""
        found = self._found.pop(first, {})
        self._found[first] = found
        self.num_ngrams -= len(found)
        found.pop(rest, None)
        found[rest] = None
        if len(found) > self._most_each:
            del found[next(iter(found))]
        self.num_ngrams += len(found)
        while self.num_ngrams > MOST_NGRAMS:
            self.num_ngrams -= len(self._found.pop(next(iter(self._found))))

    def after(self, token: int) -> list[tuple[int, ...]]:
        """What followed a token, the latest first."""
        return list(reversed(self._found.get(token, {})))


class LookaheadText:
    """One sequence's pool and window. Nobody else's text is in it, and it goes with the sequence."""

    def __init__(self, *, num_levels: int, num_columns: int, most_each: int) -> None:
        self.pool = NgramPool(most_each)
        self._shape = num_levels, num_columns
        self._window: NDArray[np.int64] | None = None  # [L, W]
        # Tokens that were known when the window was last computed, and those of which the pool has n-grams.
        self._num_known = self._num_read = 0

    def read(self, text: NDArray[np.int64]) -> None:
        """Takes in the n-grams of a text [L] that are new since the last time."""
        size = self._shape[0] + 1
        for start in range(max(0, self._num_read - size + 1), text.size - size + 1):
            first, *rest = text[start : start + size].tolist()
            self.pool.add(first, tuple(rest))
        self._num_read = text.size

    def window(self, text: NDArray[np.int64]) -> NDArray[np.int64]:
        """The guesses [L, W] behind a text [L]; at first tokens of it, from everywhere."""
        levels, columns = self._shape
        if self._window is None:
            spread = text[np.linspace(0, text.size - 1, levels + columns - 1).astype(np.int64)]
            self._window = np.stack([spread[level : level + columns] for level in range(levels)])
        self._num_known = text.size
        return self._window

    def computed(self, behind: list[int], num_tokens: int) -> None:
        """Takes in what the model says behind each column [W]; the text has so many tokens by now."""
        window = self._window
        assert window is not None, "it was computed"
        for column, last in zip(window.T.tolist(), behind, strict=True):
            self.pool.add(column[0], (*column[1:], last))
        # Levels move up, by which each column stands a token further on; so many columns go as are passed.
        moved = np.concatenate((window[1:], np.array([behind], np.int64)))
        self._window = np.roll(moved, -(max(1, num_tokens - self._num_known) - 1), axis=1)
