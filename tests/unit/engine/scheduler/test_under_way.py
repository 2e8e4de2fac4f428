"""Prompts that arrive together and share their beginning: who computes it, who waits, and who does not."""

from __future__ import annotations

from typing import Any

import pytest

from engine.kv import Prefix
from engine.types import SchedulerOutput
from tests.unit.engine.driver import Driver, memory_plan

SHARED = list(range(1, 49))


def prompt(index: int, shared: list[int] | None = None) -> list[int]:
    """A shared beginning and eight tokens of its own."""
    return [*(SHARED if shared is None else shared), *(100 + 10 * index + each for each in range(8))]


def driver_for(num_tokens: int = 64, **options: object) -> Driver:
    return Driver(
        memory=memory_plan(400, 4, 200), max_num_batched_tokens=num_tokens, long_prefill_tokens=400, **options
    )


def computed(plans: list[SchedulerOutput]) -> int:
    """Prompt tokens that were computed, decodes left out."""
    return sum(row.num_tokens for plan in plans for row in plan.scheduled if row.num_tokens > 1)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_beginning_that_arrives_six_times_at_once_is_computed_once(overlap: bool) -> None:
    driver = driver_for(overlap=overlap)
    requests = [driver.submit(prompt(index), max_tokens=3) for index in range(6)]
    driver.run()
    driver.check_everything()
    assert computed(driver.plans) == len(SHARED) + 6 * 8
    assert all(driver.tokens(each) == driver.expected(each) for each in requests)


def test_blocks_are_taken_over_chunk_by_chunk_and_waited_for_in_between() -> None:
    # Three chunks for the shared part.
    driver = driver_for(16)
    for index in range(3):
        driver.submit(prompt(index), max_tokens=2)
    for _ in range(3):
        driver.step()
    assert [len(plan.scheduled) for plan in driver.plans] == [1, 1, 1]
    driver.run()
    driver.check_everything()
    assert computed(driver.plans) == len(SHARED) + 3 * 8


def test_blocks_of_those_who_wait_are_not_looked_up_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    # A long prompt leaves half of a step, in which others are looked for.
    driver = Driver(memory=memory_plan(400, 4, 200), max_num_batched_tokens=8, long_prefill_tokens=8)
    num_lookups = 0
    requests = [driver.submit(prompt(index), max_tokens=2) for index in range(9)]
    cache = driver.scheduler._state.cache
    find_prefix = cache.find_prefix

    def counted(*given: Any, **named: Any) -> Prefix:
        nonlocal num_lookups
        num_lookups += 1
        return find_prefix(*given, **named)

    monkeypatch.setattr(cache, "find_prefix", counted)
    for _ in range(7):
        driver.step()
    # The first one computes 28 of 48 tokens: the others are found to wait for it once.
    assert [len(plan.scheduled) for plan in driver.plans] == [1] * 7
    assert num_lookups <= 2 * len(requests)
    driver.run()
    driver.check_everything()
    assert all(driver.tokens(each) == driver.expected(each) for each in requests)


def test_who_shares_nothing_is_not_held_up() -> None:
    driver = driver_for(128)
    for index in range(3):
        driver.submit(prompt(index), max_tokens=2)
    driver.submit(prompt(9, [7] * 48), max_tokens=2)
    driver.step()
    (plan,) = driver.plans
    assert [row.num_tokens for row in plan.scheduled] == [56, 56]


@pytest.mark.parametrize(("num_shared", "num_rows"), [(8, 2), (12, 2), (16, 1), (20, 1)])
def test_a_small_part_is_not_worth_waiting_for(num_shared: int, num_rows: int) -> None:
    driver = driver_for(256)
    for index in range(2):
        own = [1000 + 100 * index + each for each in range(60 - num_shared)]
        driver.submit([*SHARED[:num_shared], *own], max_tokens=2)
    driver.step()
    assert len(driver.plans[0].scheduled) == num_rows


def test_a_higher_tier_does_not_wait_for_a_lower_one() -> None:
    driver = driver_for(16)
    driver.submit(prompt(0), max_tokens=2, priority=0)
    driver.step()
    high = driver.submit(prompt(1), max_tokens=2, priority=5)
    driver.step()
    # It takes over what is there, and computes the next chunk by itself.
    rows = {row.start: row.num_tokens for row in driver.plans[1].scheduled}
    assert rows == {16: 16}
    assert driver.plans[1].new_sequences[0].num_prompt_tokens == 56
    driver.run()
    driver.check_everything()
    assert driver.tokens(high) == driver.expected(high)


def test_the_others_go_on_when_the_one_that_computes_is_cancelled() -> None:
    driver = driver_for(16)
    first = driver.submit(prompt(0), max_tokens=2)
    others = [driver.submit(prompt(index), max_tokens=2) for index in (1, 2)]
    driver.step()
    driver.cancel(first)
    driver.run()
    driver.check_everything()
    assert all(driver.tokens(each) == driver.expected(each) for each in others)
    assert computed(driver.plans) == 16 + (len(SHARED) - 16) + 2 * 8


def test_other_salts_and_no_prefix_cache_share_nothing() -> None:
    for options, salts in (({}, (b"a", b"b")), ({"prefix_caching": False}, (b"", b""))):
        driver = driver_for(128, **options)
        for index, salt in enumerate(salts):
            driver.submit(prompt(index), max_tokens=2, cache_salt=salt)
        driver.step()
        assert [row.num_tokens for row in driver.plans[0].scheduled] == [56, 56]


def test_log_probabilities_of_the_prompt_wait_for_nobody() -> None:
    driver = driver_for(128)
    driver.submit(prompt(0), max_tokens=2)
    driver.submit(prompt(1), max_tokens=2, prompt_logprobs=1)
    driver.step()
    assert [row.num_tokens for row in driver.plans[0].scheduled] == [56, 56]
