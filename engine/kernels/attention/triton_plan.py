"""Which pieces of which histories the attention kernels compute: the host's half of the Triton back end.

An item is one launch of the inner loop: some rows (tokens) against one stretch of one history. Rows that
compute few tokens (decode, verification) are split: their history is cut into parts that begin at fixed
positions, each part leaves an unnormalized sum, and a second kernel merges the parts in order. Other rows
(prefill) go in tiles whose one item covers the whole history. How a row is cut depends on its own sequence
alone, so its result does not depend on the batch. Sequences whose block tables begin alike share the items of
that prefix: its keys and values are read once for all of them.

Shape letters: T tokens, I items, S sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.kernels.attention.ragged import RaggedBatch

# Positions of the shortest part; longer histories have longer ones, so that no row has more than MOST_PARTS.
PART = 256
MOST_PARTS = 64


@dataclass(frozen=True, kw_only=True)
class Items:
    """One kernel's work. All int32; token ids of the items lie one after another in `rows`."""

    rows: NDArray[np.int32]
    fields: NDArray[np.int32]  # [6, I] first in rows, number of rows, sequence, first and end position, part


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    """One step. Parts of row r are numbers part_base[r] to part_base[r] + part_count[r]."""

    split: Items
    whole: Items
    positions: NDArray[np.int32]  # [T]
    part_base: NDArray[np.int32]  # [T]
    part_count: NDArray[np.int32]  # [T] 0 for rows that are not split
    num_parts: int
    block_tables: NDArray[np.int32]  # [S, C]


def part_size(context_len: int) -> int:
    """Positions of a part of a history of this length: a power of two times PART."""
    size = PART
    while size * MOST_PARTS < context_len:
        size *= 2
    return size


def most_parts(max_context_len: int) -> int:
    """Parts of the history of up to so many positions that has the most."""
    return min(MOST_PARTS, -(-max_context_len // PART))


def make_plan(
    batch: RaggedBatch, *, split_rows: int, tile_rows: int, window: int | None = None
) -> AttentionPlan:
    """The work of one layer kind. Sequences with at most `split_rows` new tokens are split, others go in
    tiles of `tile_rows` tokens; `window` leaves out what no row of an item can see.
    """
    starts, lengths = batch.query_starts, batch.context_lens
    num_tokens = int(starts[-1])
    positions = np.concatenate(
        [np.arange(length - count, length) for length, count in zip(lengths, np.diff(starts), strict=True)]
    ).astype(np.int32)
    part_base, part_count = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
    split, whole = _Builder(), _Builder()
    small = [index for index in range(len(lengths)) if starts[index + 1] - starts[index] <= split_rows]
    total = 0
    for index in small:
        last = int(lengths[index])
        parts = -(-last // part_size(last))
        for token in range(int(starts[index]), int(starts[index + 1])):
            part_base[token], part_count[token] = total, parts
            total += parts
    shared = dict.fromkeys(small, 0)
    for members, length in _shared_prefixes(batch, small):
        rows = [token for index in members for token in range(int(starts[index]), int(starts[index + 1]))]
        for first in range(0, len(rows), split_rows):
            some = rows[first : first + split_rows]
            split.cut(
                some,
                members[0],
                0,
                length,
                part_size(int(lengths[members[0]])),
                _reach(positions, some, window),
            )
        shared.update(dict.fromkeys(members, length))
    for index in range(len(lengths)):
        rows, last = list(range(int(starts[index]), int(starts[index + 1]))), int(lengths[index])
        if index in shared:
            split.cut(rows, index, shared[index], last, part_size(last), _reach(positions, rows, window))
            continue
        for first in range(0, len(rows), tile_rows):
            some = rows[first : first + tile_rows]
            whole.add(some, index, _reach(positions, some, window), int(positions[some[-1]]) + 1, 0)
    return AttentionPlan(
        split=split.items(),
        whole=whole.items(longest_first=True),
        positions=positions,
        part_base=part_base,
        part_count=part_count,
        num_parts=total,
        block_tables=batch.block_tables.astype(np.int32),
    )


def _reach(positions: NDArray[np.int32], rows: list[int], window: int | None) -> int:
    """First position that any of `rows` can see."""
    return 0 if window is None else max(0, int(positions[rows].min()) - window + 1)


def _shared_prefixes(batch: RaggedBatch, small: list[int]) -> Iterator[tuple[list[int], int]]:
    """Groups of sequences, and the positions that they share: whole parts, none being computed now."""
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in small:
        size = part_size(int(batch.context_lens[index]))
        alike[int(batch.block_tables[index, 0]), size].append(index)
    for (_, size), members in alike.items():
        if len(members) == 1:
            continue
        old = batch.context_lens[members] - batch.query_lens[members]
        width = int(old.min()) // batch.block_size
        tables = batch.block_tables[members, :width]
        different = np.flatnonzero((tables != tables[0]).any(axis=0))
        length = (int(different[0]) if different.size else width) * batch.block_size
        if length >= size:
            yield members, length // size * size


class _Builder:
    """Collects items."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._fields: list[tuple[int, int, int, int, int, int]] = []

    def add(self, rows: list[int], sequence: int, begin: int, end: int, part: int) -> None:
        self._fields.append((len(self._rows), len(rows), sequence, begin, end, part))
        self._rows.extend(rows)

    def cut(self, rows: list[int], sequence: int, begin: int, end: int, size: int, reach: int) -> None:
        """One item for each part between begin (a part's first position) and end. A part that no row can see
        stays an item without positions, so that its sum is written all the same.
        """
        for first in range(begin, end, size):
            last = min(first + size, end)
            self.add(rows, sequence, min(max(first, reach), last), last, first // size)

    def items(self, *, longest_first: bool = False) -> Items:
        """What was collected. Long items that begin last would be waited for alone."""
        fields = np.array(self._fields, np.int32).reshape(-1, 6).T
        if longest_first:
            fields = fields[:, np.argsort(fields[3] - fields[4], kind="stable")]
        return Items(rows=np.array(self._rows, np.int32), fields=np.ascontiguousarray(fields))
