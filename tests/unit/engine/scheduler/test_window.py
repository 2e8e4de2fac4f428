"""Blocks behind a window that every layer has: when they are given up, and what that does to the books."""

from __future__ import annotations

import pytest

from contract.prefix import PrefixHasher
from engine.kv import KvCache
from engine.kv.block_pool import BlockTable
from engine.types import FinishReason
from tests.unit.engine.driver import Driver, memory_plan


def held_by_one(window: int | None, *, num_tokens: int, block_size: int = 16) -> int:
    """Most blocks that a sequence holds while it grows from 16 to `num_tokens` tokens."""
    memory = memory_plan(num_tokens // block_size + 1, block_size, num_tokens + 1)
    driver = Driver(memory=memory, window=window, check=False, prefix_caching=False)
    driver.submit(range(16), max_tokens=num_tokens - 16)
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, memory.num_blocks - driver.scheduler.num_unreferenced_blocks)
    driver.check_everything()
    return most


def test_a_long_sequence_holds_its_window_and_little_more() -> None:
    assert held_by_one(None, num_tokens=640) == 40
    # The window, one block of slack, and one of which a part has left the window.
    assert held_by_one(128, num_tokens=640) == 128 // 16 + 2


@pytest.mark.parametrize(
    ("window", "num_tokens", "given_up"), [(None, 400, 0), (8, 7, 0), (8, 14, 0), (8, 15, 1), (1, 40, 9)]
)
def test_one_block_of_slack_stays(window: int | None, num_tokens: int, given_up: int) -> None:
    cache = KvCache(num_blocks=100, block_size=4, window=window)
    assert cache.num_behind_window(num_tokens) == given_up


def test_blocks_given_up_serve_prefix_hits_until_they_are_evicted() -> None:
    cache = KvCache(num_blocks=8, block_size=4, window=4)
    hasher = PrefixHasher(model="m", adapter="", salt=b"", block_size=4)
    hasher.extend(list(range(24)), 24)
    table = BlockTable()
    cache.prepare_write(table, 0, 24)
    cache.register(table, hasher, 24)
    cache.give_up(table, 24)
    assert (len(table), table.num_given_up, cache.num_available) == (6, 4, 6)
    assert table.block_ids[:4] == [8] * 4
    assert (table.drain_given_up(), table.drain_given_up()) == (4, 0)
    cache.check_invariants([table])
    assert cache.find_prefix(hasher, 24).num_revived == 4
    other = BlockTable()
    cache.prepare_write(other, 0, 12)
    cache.check_invariants([table, other])
    # The last of them went first.
    assert cache.find_prefix(hasher, 24).num_blocks == 3
    cache.free(table)
    cache.free(other)
    assert cache.num_available == 8


def test_a_plan_names_what_is_given_up_once() -> None:
    driver = Driver(window=8)
    driver.submit(range(60), max_tokens=20)
    driver.run()
    driver.check_everything()
    rows = [row for plan in driver.plans for row in plan.scheduled]
    told = [row.num_given_up for row in rows if row.num_given_up]
    assert told == sorted(set(told))
    assert told[-1] >= (78 - 8) // 4 - 1


def test_a_choice_that_starts_late_computes_what_its_sibling_gave_up() -> None:
    # Places for one: the second choice starts when the first has left the prompt far behind.
    driver = Driver(window=8, max_num_seqs=1, prefix_caching=False)
    request = driver.submit(range(40), max_tokens=30, n=2)
    driver.run()
    driver.check_everything()
    assert driver.finish(request, 1) is FinishReason.LENGTH


def test_choices_start_upon_a_prompt_whose_head_is_given_up() -> None:
    driver = Driver(window=8)
    driver.submit(range(60), max_tokens=10, n=3)
    driver.run()
    driver.check_everything()
    spare = driver.memory.num_blocks
    tables = [new.block_ids for plan in driver.plans for new in plan.new_sequences]
    assert any(table[0] == spare for table in tables)
    # The prompt is computed once.
    assert driver.runner.num_computed_tokens < 60 + 3 * 12


def test_a_beam_search_keeps_its_blocks() -> None:
    driver = Driver(window=8)
    driver.submit(range(40), max_tokens=20, n=2, best_of=2, beam_width=2)
    for _ in range(12):
        driver.step()
    assert not any(row.num_given_up for plan in driver.plans for row in plan.scheduled)
    driver.cancel(1)
    driver.run()
