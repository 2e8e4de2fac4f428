"""The plan of attention, made of arrays, is the one that a loop over sequences, parts and tiles makes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.ragged import RaggedBatch
from kernels.attention.triton_plan import make_plan, part_sizes
from tests.kernels.attention import batch_of

BLOCK = 16


def part_size(context_len: int) -> int:
    return int(part_sizes(np.array([context_len]))[0])


def plain_plan(batch: RaggedBatch, *, split_rows: int, tile_rows: int, window: int | None) -> dict[str, Any]:
    """One sequence after another."""
    starts, lengths = batch.query_starts.tolist(), batch.context_lens.tolist()
    tokens = [range(starts[index], starts[index + 1]) for index in range(len(lengths))]
    positions = [
        lengths[index] - len(rows) + place for index, rows in enumerate(tokens) for place in range(len(rows))
    ]
    base, count, total = [0] * len(positions), [0] * len(positions), 0
    small = [index for index, rows in enumerate(tokens) if len(rows) <= split_rows]
    for index in small:
        for row in tokens[index]:
            base[row], count[row] = total, -(-lengths[index] // part_size(lengths[index]))
            total += count[row]

    def reach(rows: list[int]) -> int:
        return 0 if window is None else max(0, min(positions[row] for row in rows) - window + 1)

    split: list[tuple[list[int], tuple[int, ...]]] = []
    whole: list[tuple[list[int], tuple[int, ...]]] = []

    def cut(rows: list[int], sequence: int, begin: int, end: int, size: int) -> None:
        for first in range(begin, end, size):
            last = min(first + size, end)
            split.append((rows, (sequence, min(max(first, reach(rows)), last), last, first // size)))

    shared = dict.fromkeys(small, 0)
    alike: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in small:
        alike[int(batch.block_tables[index, 0]), part_size(lengths[index])].append(index)
    for (_, size), members in alike.items():
        length = 0
        width = min(lengths[index] - len(tokens[index]) for index in members) // BLOCK
        for column in range(width):
            if len({int(batch.block_tables[index, column]) for index in members}) > 1:
                break
            length += BLOCK
        length = length // size * size
        if len(members) == 1 or not length:
            continue
        rows = [row for index in members for row in tokens[index]]
        for first in range(0, len(rows), split_rows):
            cut(rows[first : first + split_rows], members[0], 0, length, size)
        shared |= dict.fromkeys(members, length)
    for index, own in enumerate(map(list, tokens)):
        if index in shared:
            cut(own, index, shared[index], lengths[index], part_size(lengths[index]))
            continue
        for first in range(0, len(own), tile_rows):
            some = own[first : first + tile_rows]
            whole.append((some, (index, reach(some), positions[some[-1]] + 1, 0)))

    def items(some: list[tuple[list[int], tuple[int, ...]]]) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        return [rows for rows, _ in some], [fields for _, fields in some]

    whole.sort(key=lambda item: item[1][1] - item[1][2])
    return {
        "positions": positions,
        "part_base": base,
        "part_count": count,
        "num_parts": total,
        "split": items(split),
        "whole": items(whole),
    }


def found_plan(batch: RaggedBatch, **options: Any) -> dict[str, Any]:
    plan = make_plan(batch, **options)

    def items(some: Any) -> tuple[list[list[int]], list[tuple[int, ...]]]:
        # Kernels read them by their place in memory.
        assert some.fields.flags.c_contiguous
        first, count, *_ = some.fields
        rows = [some.rows[at : at + size].tolist() for at, size in zip(first, count, strict=True)]
        assert sum(map(len, rows)) == some.rows.size, "rows that no item has"
        return rows, [tuple(fields) for fields in some.fields[2:].T.tolist()]

    arrays = {name: getattr(plan, name).tolist() for name in ("positions", "part_base", "part_count")}
    return arrays | {"num_parts": plan.num_parts, "split": items(plan.split), "whole": items(plan.whole)}


def drawn_batch(
    dice: np.random.Generator, num_sequences: int, most_new: int, longest: int, prefixes: int
) -> RaggedBatch:
    """Decode rows, verification and chunks; some tables begin alike, with or without a given-up block."""
    new = np.where(
        dice.random(num_sequences) < 0.6, 1, dice.integers(1, most_new, num_sequences, endpoint=True)
    )
    lengths = new + dice.integers(0, longest, num_sequences, endpoint=True)
    columns = -(-int(lengths.max()) // BLOCK)
    tables = np.arange(num_sequences * columns).reshape(num_sequences, columns)
    for index in range(num_sequences):
        if prefixes and dice.random() < 0.7:
            alike = int(dice.integers(0, columns, endpoint=True))
            tables[index, :alike] = -1000 * dice.integers(1, prefixes, endpoint=True) - np.arange(alike)
    return batch_of(lengths, new, tables, BLOCK)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    num_sequences=st.integers(1, 24),
    most_new=st.sampled_from((1, 5, 100)),
    longest=st.sampled_from((20, 1500, 40_000)),
    prefixes=st.integers(0, 3),
    split_rows=st.sampled_from((1, 4, 16)),
    tile_rows=st.sampled_from((1, 16, 64)),
    window=st.sampled_from((None, 1, 40, 1000)),
)
def test_any_step(
    seed: int,
    num_sequences: int,
    most_new: int,
    longest: int,
    prefixes: int,
    split_rows: int,
    tile_rows: int,
    window: int | None,
) -> None:
    batch = drawn_batch(np.random.default_rng(seed), num_sequences, most_new, longest, prefixes)
    options = {"split_rows": split_rows, "tile_rows": tile_rows, "window": window}
    assert found_plan(batch, **options) == plain_plan(batch, **options)


@pytest.mark.parametrize("most_new", [1, 300])
def test_a_full_batch(most_new: int) -> None:
    batch = drawn_batch(np.random.default_rng(7), 128, most_new, 20_000, 2)
    options = {"split_rows": 4, "tile_rows": 16, "window": None}
    assert found_plan(batch, **options) == plain_plan(batch, **options)


def test_a_shared_prefix_is_read_once() -> None:
    tables = np.arange(120).reshape(3, 40)
    tables[1:, :32] = tables[0, :32]
    plan = make_plan(batch_of([600, 580, 620], [1, 1, 1], tables), split_rows=4, tile_rows=16)
    shared = [(begin, end) for count, begin, end in plan.split.fields[[1, 3, 4]].T.tolist() if count == 3]
    assert shared == [(0, 256), (256, 512)]
    alone = [(begin, end) for count, begin, end in plan.split.fields[[1, 3, 4]].T.tolist() if count == 1]
    assert alone == [(512, 600), (512, 580), (512, 620)]


def test_parts_grow_with_the_history_and_stay_few() -> None:
    assert part_size(1) == part_size(64 * 256) == 256
    assert part_size(64 * 256 + 1) == 512
    assert all(-(-length // part_size(length)) <= 64 for length in (1, 10_000, 131_072, 1_000_000))
