"""Memory of a cache goes to the kind of blocks that the load needs, where only some layers have a window."""

from __future__ import annotations

import msgspec
import pytest

from engine.types import MemoryPlan
from tests.unit.engine.driver import Driver, memory_plan

# A block takes 8 bytes, a window block 12: divided for long sequences, and for short ones, of the same 1,760.
FOR_LONG = memory_plan(160, 4, 256, window=8, num_window_blocks=40, moves=True)
FOR_SHORT = memory_plan(100, 4, 256, window=8, num_window_blocks=80, moves=True)


def driver_of(memory: MemoryPlan) -> Driver:
    return Driver(memory=memory, max_num_seqs=40, watermark=0.0, max_num_batched_tokens=128)


def most_running(driver: Driver, prompt: int, output: int) -> int:
    """Of forty equal requests, how many run at once; all are answered."""
    for number in range(40):
        driver.submit([number] * prompt, max_tokens=output)
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, len(driver.scheduler._state.running))
    driver.check_everything()
    return most


@pytest.mark.parametrize(("memory", "prompt", "output"), [(FOR_LONG, 8, 12), (FOR_SHORT, 100, 20)])
def test_more_run_where_memory_follows(memory: MemoryPlan, prompt: int, output: int) -> None:
    stays = msgspec.structs.replace(memory, num_block_ids=0, num_window_block_ids=0)
    followed, stayed = (most_running(driver_of(each), prompt, output) for each in (memory, stays))
    assert followed >= 1.5 * stayed


def test_the_division_follows_from_one_load_to_the_next() -> None:
    driver = driver_of(FOR_SHORT)
    cache, found = driver.scheduler._state.cache, []
    for prompt in (100, 8, 100):
        most = most_running(driver, prompt, 12)
        found.append((cache.num_present, cache.num_present_window_blocks, most))
    long, short, again = found
    assert again == long
    assert short[0] < long[0]
    assert short[1] > long[1]
