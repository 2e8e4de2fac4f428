"""What a draw reads, what it is asked and what comes of it: for all that draw.

Shape letters: R rows, N slots, W wide rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

# A sequence's sampling options, each once and by the name that a request calls it. The table of sequences,
# the native SampleRow and the Triton kernels' RowOptions copy from here whatever they call by the same name.
# An option as wide as the vocabulary is given by the index of its row; NO_ROW where there is none.
OPTIONS = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("repetition_penalty", np.float32),
        ("seed", np.uint64),
        ("choice", np.int64),
        ("min_tokens", np.int64),
        ("bias_row", np.int64),
        ("count_row", np.int64),
    ]
)
NO_ROW = -1
_NONE = np.array([], np.int64)


class WideRows(Protocol):
    """Rows [W, V], and the same memory as a tensor."""

    rows: Any

    @property
    def tensor(self) -> Tensor:
        """Where draws read it."""


class Tables(Protocol):
    """What is known of all sequences, by slot (engine/sampling/table.py keeps it)."""

    vocab_size: int
    options: NDArray[np.void]  # [N] of OPTIONS
    # Whether the most likely token is all that is wanted, of logits as they are.
    plain: NDArray[np.bool_]  # [N]
    stop_ids: dict[int, tuple[int, ...]]

    @property
    def biases(self) -> WideRows:
        """Added to logits."""

    @property
    def output_counts(self) -> WideRows:
        """Occurrences of each token in the output."""

    @property
    def seen(self) -> WideRows:
        """Whether a token is in prompt or output."""


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Which sequence each row of logits belongs to, and what it must respect."""

    slots: NDArray[np.int64]  # [R]
    # Number of output tokens before the one drawn in this row.
    positions: NDArray[np.int64]  # [R]
    # Draft tokens before a row, counted by penalties on top of the table: (row, token) pairs.
    draft_rows: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    draft_tokens: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    # Rows under a grammar, and the tokens that it allows: bit i % 32 of word i / 32.
    grammar_rows: NDArray[np.int64] = field(default_factory=lambda: _NONE)
    grammar_masks: NDArray[np.int32] | None = None
    # Keys of each row's noise [R] on the device, where only that knows the positions.
    noise_keys: Tensor | None = None


def early_stops(table: Tables, rows: SamplingRows) -> list[tuple[int, int]]:
    """(row, token) of the stop tokens that min_tokens forbids."""
    if not table.stop_ids:
        return []
    early = np.flatnonzero(rows.positions < table.options["min_tokens"][rows.slots])
    return [(row, token) for row in early.tolist() for token in table.stop_ids.get(int(rows.slots[row]), ())]


def forbidden_tokens(masks: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """Masks [R, V / 32] -> whether a grammar forbids the token [R, V]."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    return np.ascontiguousarray(bits[:, :vocab_size] == 0)


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Outcome per row."""

    tokens: NDArray[np.int64]  # [R]
    finite: NDArray[np.bool_]  # [R] the model's logits were finite
    allowed: NDArray[np.bool_]  # [R] at least one token was allowed
    processed: Any  # [R, V] logits after penalties, biases and masks; minus infinity is excluded
