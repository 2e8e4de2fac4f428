"""Low-rank adapters natively, at every level, against the formula."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from numpy.typing import NDArray

from kernels.adapters.native import NativeChanges
from kernels.adapters.rows import NO_ADAPTER, AdapterRows
from kernels.native.library import NativeLibrary, StepStruct
from tests.kernels.adapters_cases import SHAPES, expected, fill, some_rows


def add(
    native: NativeLibrary,
    changes: NativeChanges,
    x: NDArray[np.float32],
    out: NDArray[np.float32],
    slots: list[int],
    threads: int = 2,
) -> NDArray[np.float32]:
    """What the ops make of out; whatever nobody writes is NaN."""
    rows = AdapterRows.of(np.array(slots, np.int64))
    step = StepStruct()
    if rows is not None:
        step.num_adapter_blocks = len(rows.blocks)
        step.adapter_rows, step.adapter_blocks = rows.rows.ctypes.data, rows.blocks.ctypes.data
    inner = np.full((len(x), changes.inner_width), np.nan, np.float32)
    result = out.copy()
    native.run(changes.ops(native, ctypes.addressof(step), x, result, inner), num_threads=threads)
    return result


def make(name: str, *, bfloat16: bool = False) -> NativeChanges:
    inputs, sizes, ranks = SHAPES[name]
    most = max(max(parts) for parts in ranks)
    changes = NativeChanges(inputs, sizes, num_slots=len(ranks), max_rank=most, bfloat16=bfloat16)
    changes.up.fill(0xFFFF if bfloat16 else np.nan)
    changes.down.fill(0xFFFF if bfloat16 else np.nan)
    return changes


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 9, 70])
def test_rows_of_several_adapters_get_what_theirs_add(native: NativeLibrary, name: str, count: int) -> None:
    changes = make(name)
    drawn = fill(changes, name)
    x, out, slots = some_rows(name, count)
    np.testing.assert_allclose(
        add(native, changes, x, out, slots), expected(drawn, x, out, slots), rtol=2e-5, atol=2e-3
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_a_row_has_the_bits_that_it_has_alone(native: NativeLibrary, name: str, bfloat16: bool) -> None:
    changes = make(name, bfloat16=bfloat16)
    fill(changes, name)
    x, out, slots = some_rows(name, 70)
    together = add(native, changes, x, out, slots, threads=3)
    assert np.isfinite(together).all()
    for row in range(0, 70, 7):
        part = slice(row, row + 1)
        assert np.array_equal(add(native, changes, x[part], out[part], slots[part], 1), together[part])


def test_bfloat16_is_the_product_of_rounded_weights(native: NativeLibrary) -> None:
    name = "q, k and v"
    changes = make(name, bfloat16=True)
    drawn = fill(changes, name)
    x, out, slots = some_rows(name, 20)
    np.testing.assert_allclose(
        add(native, changes, x, out, slots), expected(drawn, x, out, slots), rtol=0.05, atol=0.6
    )


def test_rows_of_the_base_model_alone_are_no_blocks() -> None:
    assert AdapterRows.of(np.full(5, NO_ADAPTER)) is None


def test_blocks_hold_each_row_once_and_one_slot_each() -> None:
    slots = np.array([2, -1, 0, 2, 2, 0, -1, *[1] * 17])
    rows = AdapterRows.of(slots)
    assert rows is not None
    assert sorted(rows.rows) == [row for row, slot in enumerate(slots) if slot >= 0]
    covered = []
    for first, count, slot in rows.blocks:
        assert 1 <= count <= 8
        assert (slots[rows.rows[first : first + count]] == slot).all()
        covered += range(first, first + count)
    assert covered == list(range(len(rows.rows)))


def test_a_slot_takes_another_adapter(native: NativeLibrary) -> None:
    name = "odd"
    changes = make(name)
    drawn = fill(changes, name)
    changes.put(2, drawn[0])
    x, out, _ = some_rows(name, 3)
    assert np.array_equal(add(native, changes, x, out, [2, 2, 2]), add(native, changes, x, out, [0, 0, 0]))
    changes.put(2, [None])
    assert np.array_equal(add(native, changes, x, out, [2, 2, 2]), out)
