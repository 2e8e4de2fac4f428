"""The cache's memory comes before it is used, and no more of it than was asked for."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.model.families import read_spec
from engine.runner.kv_storage import KvStorage, Prefault
from engine.types import NewSequence, SamplingParams, ScheduledSequence, SchedulerOutput

BLOCK = (2, 16, 64)  # float32: 8 KiB
NUM_BLOCKS = 4096


def tensors(count: int = 3) -> list[Tensor]:
    return [torch.empty(NUM_BLOCKS, *BLOCK) for _ in range(count)]


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


@contextmanager
def prefault(
    parts: list[Tensor], ahead_blocks: int, populate: Callable[[int, int], bool] | None = None
) -> Iterator[Prefault]:
    with closing(Prefault(parts, ahead_blocks=ahead_blocks, populate=populate)) as made:
        yield made


def num_resident(tensor: Tensor) -> int:
    """Pages of the tensor that the system has given, by the page map of this process."""
    first = -(-tensor.data_ptr() // mmap.PAGESIZE)
    last = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(8 * first)
        entries = pages.read(8 * (last - first))
    # The top bit of an entry says that the page is there.
    return sum(entry >> 7 for entry in entries[7::8])


def test_blocks_are_asked_for_ahead_of_those_in_use_and_no_further() -> None:
    parts, asked = tensors(), [(0, 0)]

    def populate(address: int, num_bytes: int) -> bool:
        asked.append((address, address + num_bytes))
        return True

    with prefault(parts, 100, populate) as made:
        until(lambda: made.num_blocks == 100)
        made.use(50)
        until(lambda: made.num_blocks == 150)
        # Fewer than before: nothing is given back, and nothing asked for twice.
        made.use(10)
        made.use(NUM_BLOCKS)
        until(lambda: made.num_blocks == NUM_BLOCKS)
    asked.sort()
    for part in parts:
        begin, end = part.data_ptr(), part.data_ptr() + part.nbytes
        mine = [(max(a, begin), b) for a, b in asked if begin < b <= end]
        assert mine[0][0] == begin
        assert mine[-1][1] == end
        for (_, before), (after, _) in pairwise(mine):
            # Whole pages: the border page is named by both.
            assert before - mmap.PAGESIZE < after <= before
        assert max(b - a for a, b in mine) <= (2 << 20) + mmap.PAGESIZE


def test_blocks_without_memory_are_not_asked_for() -> None:
    (part,), asked = tensors(1), []

    def populate(address: int, num_bytes: int) -> bool:
        asked.append(address + num_bytes - part.data_ptr())
        return True

    with closing(Prefault([part], ahead_blocks=100, most=300, populate=populate)) as made:
        made.use(250)
        until(lambda: made.num_blocks == 300)
    with closing(Prefault([part], ahead_blocks=100, most=300, populate=populate)) as made:
        until(lambda: made.num_blocks == 100)
        made.leave_out([220, 210])
        made.use(250)
        until(lambda: made.num_blocks == 210)
    assert max(asked) == 300 * part[0].nbytes


def test_memory_is_there_before_anybody_writes() -> None:
    # Not torch's own, which may be memory that other tests have written and given back.
    part = torch.frombuffer(mmap.mmap(-1, tensors(1)[0].nbytes), dtype=torch.float32).view(NUM_BLOCKS, *BLOCK)
    per_block = part[0].nbytes // mmap.PAGESIZE
    # Fewer than half, because a huge page brings memory behind the last block along.
    num_ahead = NUM_BLOCKS // 2 - 100
    with prefault([part], num_ahead) as made:
        until(lambda: made.num_blocks == num_ahead or not made._thread.is_alive())
        if not made.num_blocks:
            pytest.skip("this kernel gives memory only when it is written")
        resident = num_resident(part)
        assert (num_ahead - 1) * per_block <= resident < NUM_BLOCKS * per_block


def test_a_system_that_does_not_know_how_is_asked_once() -> None:
    asked: list[int] = []

    def populate(address: int, num_bytes: int) -> bool:
        asked.append(num_bytes)
        return False

    with prefault(tensors(), 100, populate) as made:
        until(lambda: not made._thread.is_alive())
        made.use(500)
        assert made.num_blocks == 0
    assert len(asked) == 1


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="priorities of threads are Linux's")
def test_what_holds_the_interpreters_lock_gets_its_share_of_a_busy_machine() -> None:
    policies: list[tuple[int, int]] = []

    def populate(address: int, num_bytes: int) -> bool:
        thread = threading.get_native_id()
        policies.append((os.sched_getscheduler(thread), os.getpriority(os.PRIO_PROCESS, thread)))
        return False

    with prefault(tensors(1), 100, populate):
        until(lambda: bool(policies))
    (policy, nice), *_ = policies
    # Steps wait for its locks: one of a lower weight held them for seconds.
    assert policy in {os.SCHED_BATCH, os.SCHED_OTHER}
    assert nice <= os.getpriority(os.PRIO_PROCESS, 0)


def test_a_plan_moves_the_border() -> None:
    spec = read_spec(Path("models/millrace-nano"))
    options = {"block_size": 16, "kv_dtype": "float32", "device": torch.device("cpu")}
    storage = KvStorage(spec, num_blocks=64, ahead_blocks=4, **options)  # type: ignore[arg-type]
    with closing(storage):
        until(lambda: storage.num_prefaulted_blocks == 4)
        new = NewSequence(1, (5,) * 40, 40, SamplingParams(), 0, None, "", (0, 1, 2))
        row = ScheduledSequence(1, 0, 40, (), True)
        storage.apply(SchedulerOutput(step_id=1, new_sequences=(new,), scheduled=(row,)))
        until(lambda: storage.num_prefaulted_blocks == 7)
        later = ScheduledSequence(1, 48, 1, (9,), True)
        storage.apply(SchedulerOutput(step_id=2, scheduled=(later,)))
        until(lambda: storage.num_prefaulted_blocks == 14)
    assert storage.num_prefaulted_blocks == 0
