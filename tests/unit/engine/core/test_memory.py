"""Predicted and real memory of a small model."""

from __future__ import annotations

import mmap
from pathlib import Path

from engine.core.memory import MemoryWatch, _own_bytes
from tests.unit.engine.driver import memory_plan

MEGABYTE = 1 << 20


def fresh(num_megabytes: int) -> mmap.mmap:
    """Written memory of its own, whatever the heap has left over."""
    memory = mmap.mmap(-1, num_megabytes * MEGABYTE)
    for _ in range(num_megabytes):
        memory.write(b"w" * MEGABYTE)
    return memory


def test_growth_is_booked_under_its_part() -> None:
    watch = MemoryWatch()
    weights = fresh(40)
    watch.stage("load weights", 1.0)
    watch.stage("allocate KV cache", 0.0)
    watch.stage("allocate KV cache", 1.0)
    watch.start()
    plan = memory_plan(num_blocks=64, block_size=4)
    before = watch.use(plan, 0)
    fresh(30).close()
    after = watch.use(plan, 10)
    assert len(weights) <= before.weights_bytes < len(weights) + 20 * MEGABYTE
    assert after.kv_cache_bytes == 10 * plan.block_size * plan.kv_bytes_per_token
    # A peak that is over still counts.
    assert 25 * MEGABYTE < after.workspace_bytes - before.workspace_bytes < 45 * MEGABYTE


def test_what_was_freed_between_pieces_in_use_goes_back_now_and_then() -> None:
    watch = MemoryWatch()
    pieces: list[bytearray | None] = [bytearray(b"w" * 60_000) for _ in range(500)]
    for index in range(len(pieces)):
        if index % 10:
            pieces[index] = None
    before = _own_bytes()
    for _ in range(6):
        watch.use(memory_plan(num_blocks=64, block_size=4), 0)
    assert before - _own_bytes() > 15 * MEGABYTE


def test_what_is_packed_after_the_last_tensor_was_read_is_a_weight() -> None:
    watch = MemoryWatch()
    watch.stage("load weights", 1.0)
    head = fresh(40)
    watch.stage("allocate KV cache", 0.0)
    watch.stage("load draft model", 1.0)
    draft = fresh(30)
    watch.stage("allocate KV cache", 1.0)
    watch.start()
    used = watch.use(memory_plan(num_blocks=64, block_size=4), 0)
    assert 0 <= used.weights_bytes - len(head) - len(draft) < 20 * MEGABYTE
    assert used.workspace_bytes < 20 * MEGABYTE


def test_pages_of_a_file_are_neither_weights_nor_workspace(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"w" * 40 * MEGABYTE)
    watch = MemoryWatch()
    with checkpoint.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert sum(mapped[:: mmap.PAGESIZE]) > 0
        watch.stage("load weights", 1.0)
        watch.stage("allocate KV cache", 1.0)
        watch.start()
        used = watch.use(memory_plan(num_blocks=64, block_size=4), 0)
    assert used.weights_bytes < 20 * MEGABYTE
    assert used.workspace_bytes < 20 * MEGABYTE
