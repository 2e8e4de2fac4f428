"""What attention must know of a step: who computes which positions, and where the history lies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Host-side description of one step. Tokens of all sequences lie one after another on one axis, unpadded
    here.

    Shape letters: S sequences, C blocks of the longest sequence.
    """

    query_starts: NDArray[np.int64]  # [S + 1] first token of each sequence on the token axis, and the end
    context_lens: NDArray[np.int64]  # [S] tokens of history, those of this step included
    block_tables: NDArray[np.int64]  # [S, C] block ids; unused entries are 0
    block_size: int
    # Where votes of each sequence's queries go [S, 4], as in the kernels' Step; None where nobody votes.
    votes: NDArray[np.int64] | None = None
    # Whether what each sequence computes lies in one block, whose keys attention reads whole (ChannelCache).
    is_by_block: bool = False

    @property
    def query_lens(self) -> NDArray[np.int64]:
        """[S] tokens that each sequence computes."""
        return np.diff(self.query_starts)

    def by_block(self) -> tuple[RaggedBatch, NDArray[np.int64]]:
        """The same rows, each sequence cut where blocks end into pieces; and which [V] they are of."""
        size, ends, lens = self.block_size, self.context_lens, self.query_lens
        first = (ends - lens) // size
        counts = (ends - 1) // size + 1 - first
        owners = np.repeat(np.arange(ends.size), counts)
        after = (ragged_ranges(first, counts) + 1) * size
        begins = np.maximum(after - size, (ends - lens)[owners])
        cut_ends = np.minimum(after, ends[owners])
        cut = RaggedBatch(
            query_starts=np.concatenate(([0], np.cumsum(cut_ends - begins))),
            context_lens=cut_ends,
            block_tables=self.block_tables[owners],
            block_size=size,
            is_by_block=True,
        )
        return cut, owners


@dataclass(frozen=True, kw_only=True)
class DecodeBatch:
    """Rows of one new token each, in device buffers that stay where they are: what captured graphs read.

    Shape letters: B rows, C blocks of the longest context that there can be.
    """

    context_lens: Tensor  # [B] int32, this step's token included; 1 in rows that pad the batch
    block_tables: Tensor  # [B, C] int32; what lies beyond a row's context is undefined
    block_size: int
    # No row is ever longer, in tokens.
    max_context_len: int

    def first(self, rows: int) -> DecodeBatch:
        """The first rows of the same buffers."""
        return replace(self, context_lens=self.context_lens[:rows], block_tables=self.block_tables[:rows])


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What differs between layers, besides their weights."""

    scale: float
    # Tokens that are looked back on, the query's own included; None is all.
    window: int | None = None
    soft_cap: float | None = None
    # Tokens that form a chunk: of those before the query's own chunk none is looked at; None: there are none.
    chunk: int | None = None
    # Tokens behind the query's own that it sees as well, as far as the step computes them; 0 is none.
    ahead: int = 0

    @property
    def reach(self) -> Reach:
        """How far queries look."""
        return Reach(self.window, self.chunk, self.ahead)


class Reach(NamedTuple):
    """How far queries look: back over a window of tokens, their own included, and no further than the
    beginning of their own chunk of so many; and ahead.
    """

    window: int | None = None
    chunk: int | None = None
    ahead: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether they see everything before them."""
        return self.window is None and self.chunk is None

    def first(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first position that each query sees."""
        begins = np.zeros_like(positions)
        if self.window is not None:
            begins = np.maximum(positions - self.window + 1, 0)
        if self.chunk is not None:
            begins = np.maximum(begins, positions // self.chunk * self.chunk)
        return begins


def ragged_ranges(firsts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The numbers [first, first + count) of each, one after another."""
    before = np.cumsum(counts) - counts
    offsets: NDArray[np.int64] = np.repeat(firsts - before, counts)
    return np.arange(offsets.size) + offsets
