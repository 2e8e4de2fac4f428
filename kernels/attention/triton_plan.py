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

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kernels.attention.ragged import RaggedBatch, ragged_ranges

# Positions of the shortest part; longer histories have longer ones, so that no row has more than MOST_PARTS.
PART = 256
MOST_PARTS = 64


@dataclass(frozen=True, kw_only=True)
class Items:
    """One kernel's work. All int32; token ids of the items lie one after another in `rows`."""

    rows: NDArray[np.int32]
    fields: NDArray[np.int32]  # [6, I] first in rows, number of rows, sequence, first and end position, part


_NO_ITEMS = Items(rows=np.zeros(0, np.int32), fields=np.zeros((6, 0), np.int32))


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


def part_sizes(context_lens: NDArray[np.int64]) -> NDArray[np.int64]:
    """Positions of a part of a history of each length [S]: a power of two times PART."""
    sizes = np.full_like(context_lens, PART)
    while (short := sizes * MOST_PARTS < context_lens).any():
        sizes[short] *= 2
    return sizes


def most_parts(max_context_len: int) -> int:
    """Parts of the history of up to so many positions that has the most."""
    return min(MOST_PARTS, -(-max_context_len // PART))


def make_plan(
    batch: RaggedBatch, *, split_rows: int, tile_rows: int, window: int | None = None
) -> AttentionPlan:
    """The work of one layer kind. Sequences with at most `split_rows` new tokens are split, others go in
    tiles of `tile_rows` tokens; `window` leaves out what no row of an item can see. Arrays over sequences,
    items and tokens: nothing is done one by one but groups that share a prefix.
    """
    starts, ends, counts = batch.query_starts[:-1], batch.context_lens, batch.query_lens
    positions = ragged_ranges(ends - counts, counts)
    sizes = part_sizes(ends)
    few = counts <= split_rows
    part_count = np.repeat(np.where(few, -(-ends // sizes), 0), counts)
    part_base = np.where(part_count > 0, np.cumsum(part_count) - part_count, 0)
    small, large = np.flatnonzero(few), np.flatnonzero(~few)
    shared = np.zeros_like(ends)
    split: list[_Cut] = []
    for members, length in _shared_prefixes(batch, small, sizes):
        shared[members] = length
        rows = ragged_ranges(starts[members], counts[members])
        for first in range(0, rows.size, split_rows):
            some = rows[first : first + split_rows]
            split.append(_cut_prefix(some, positions[some], int(members[0]), length, sizes, window))
    if small.size:
        split.append(_cut_histories(small, starts, counts, ends, shared, sizes, window))
    return AttentionPlan(
        split=_items(split),
        whole=_items([_tiles(large, starts, counts, ends, tile_rows, window)] if large.size else []),
        positions=positions.astype(np.int32),
        part_base=part_base.astype(np.int32),
        part_count=part_count.astype(np.int32),
        num_parts=int(part_count.sum()),
        block_tables=batch.block_tables.astype(np.int32),
    )


def _reach(first_positions: NDArray[np.int64], window: int | None) -> NDArray[np.int64]:
    """First position that a row at each of these can see."""
    if window is None:
        return np.zeros_like(first_positions)
    reach: NDArray[np.int64] = np.maximum(0, first_positions - window + 1)
    return reach


def _shared_prefixes(
    batch: RaggedBatch, small: NDArray[np.int64], sizes: NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.int64], int]]:
    """Groups of sequences, and the positions that they share: whole parts, none being computed now."""
    if small.size < 2:
        return
    # Sequences can share nothing unless they agree in the first block.
    alike = (batch.block_tables[small, 0] << 32) + sizes[small]
    _, first, group, count = np.unique(alike, return_index=True, return_inverse=True, return_counts=True)
    old = batch.context_lens - batch.query_lens
    for number in sorted(np.flatnonzero(count > 1), key=lambda each: int(first[each])):
        members = small[group == number]
        size = int(sizes[members[0]])
        width = int(old[members].min()) // batch.block_size
        tables = batch.block_tables[members, :width]
        different = np.flatnonzero((tables != tables[0]).any(axis=0))
        length = (int(different[0]) if different.size else width) * batch.block_size
        if length >= size:
            yield members, length // size * size


# Token ids of items, one after another, and for each item all but where its own begin [5, I].
_Cut = tuple[NDArray[np.int64], NDArray[np.int64]]


def _cut_prefix(
    rows: NDArray[np.int64],
    positions: NDArray[np.int64],
    sequence: int,
    length: int,
    sizes: NDArray[np.int64],
    window: int | None,
) -> _Cut:
    """An item with all of `rows` for each part of a prefix that they share."""
    size = int(sizes[sequence])
    begins = np.arange(0, length, size)
    ends = begins + size
    # A part that no row can see stays an item without positions, so that its sum is written all the same.
    seen = np.minimum(np.maximum(begins, _reach(positions.min(keepdims=True), window)), ends)
    every = np.ones_like(begins)
    fields = np.stack((rows.size * every, sequence * every, seen, ends, begins // size))
    return np.tile(rows, begins.size), fields


def _cut_histories(
    small: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    shared: NDArray[np.int64],
    sizes: NDArray[np.int64],
    window: int | None,
) -> _Cut:
    """Items of sequences that are split, for each part behind what they share."""
    num_parts = -(-(context_lens[small] - shared[small]) // sizes[small])
    owners = np.repeat(small, num_parts)
    size, last = sizes[owners], context_lens[owners]
    begins = shared[owners] + ragged_ranges(np.zeros_like(num_parts), num_parts) * size
    ends = np.minimum(begins + size, last)
    seen = np.minimum(np.maximum(begins, _reach(last - counts[owners], window)), ends)
    fields = np.stack((counts[owners], owners, seen, ends, begins // size))
    return ragged_ranges(starts[owners], counts[owners]), fields


def _tiles(
    large: NDArray[np.int64],
    starts: NDArray[np.int64],
    counts: NDArray[np.int64],
    context_lens: NDArray[np.int64],
    tile_rows: int,
    window: int | None,
) -> _Cut:
    """Items of prompts: one over the whole history for each tile, long ones first: those that begin last
    would be waited for alone.
    """
    num_tiles = -(-counts[large] // tile_rows)
    owners = np.repeat(large, num_tiles)
    within = ragged_ranges(np.zeros_like(num_tiles), num_tiles) * tile_rows
    rows = np.minimum(tile_rows, counts[owners] - within)
    position = context_lens[owners] - counts[owners] + within
    seen, ends = _reach(position, window), position + rows
    fields = np.stack((rows, owners, seen, ends, np.zeros_like(owners)))
    order = np.argsort(seen - ends, kind="stable")
    return ragged_ranges((starts[owners] + within)[order], rows[order]), fields[:, order]


def _items(cuts: list[_Cut]) -> Items:
    if not cuts:
        return _NO_ITEMS
    rows, fields = (np.concatenate(parts, axis=-1) for parts in zip(*cuts, strict=True))
    first = np.cumsum(fields[0]) - fields[0]
    fields = np.ascontiguousarray(np.concatenate((first[None], fields)), np.int32)
    return Items(rows=rows.astype(np.int32), fields=fields)
