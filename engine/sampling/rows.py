"""What a draw is asked, and what comes of it, row by row: for all that draw.

Shape letters: R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Which sequence each row of logits belongs to, and what it must respect."""

    slots: NDArray[np.int64]  # [R]
    # Number of output tokens before the one drawn in this row.
    positions: NDArray[np.int64]  # [R]
    # Draft tokens before a row, counted by penalties on top of the table: (row, token) pairs.
    draft_rows: NDArray[np.int64]
    draft_tokens: NDArray[np.int64]
    # Rows under a grammar, and the tokens that it allows: bit i % 32 of word i / 32.
    grammar_rows: NDArray[np.int64]
    grammar_masks: NDArray[np.int32] | None


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Outcome per row."""

    tokens: NDArray[np.int64]  # [R]
    finite: NDArray[np.bool_]  # [R] the model's logits were finite
    allowed: NDArray[np.bool_]  # [R] at least one token was allowed
    processed: Any  # [R, V] logits after penalties, biases and masks; minus infinity is excluded
