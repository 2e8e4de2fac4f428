"""Prompts that an encoder reads are computed in one step each, whatever else is in the batch, and all of
them are.
"""

from __future__ import annotations

import random

import pytest

from engine.types import FinishReason
from tests.unit.engine.driver import Driver, memory_plan

BUDGET = 32


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_prompt_is_one_row(seed: int, overlap: bool) -> None:
    chance = random.Random(seed)
    memory = memory_plan(num_blocks=2 * (BUDGET // 4 + 8), max_model_len=BUDGET)
    driver = Driver(memory=memory, overlap=overlap, whole_prompts=True, prefix_caching=False)
    lengths = {}
    for number in range(40):
        length = chance.choice((1, 3, 7, 16, 29, BUDGET - 1))
        tenant, tier = f"t{chance.randrange(3)}", chance.choice((0, 10))
        asked = driver.submit(
            [chance.randrange(9) for _ in range(length)], max_tokens=1, tenant=tenant, priority=tier
        )
        lengths[asked] = length
        if number % 3 == 0:
            driver.step()
    driver.run()
    driver.check_everything()
    rows = [row for plan in driver.plans for row in plan.scheduled]
    assert sorted(row.num_tokens for row in rows) == sorted(lengths.values())
    assert all(row.start == 0 and row.samples for row in rows)
    assert all(sum(row.num_tokens for row in plan.scheduled) <= BUDGET for plan in driver.plans)
    for asked in lengths:
        assert driver.events[asked][-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", [BUDGET, BUDGET - 1, BUDGET // 2, BUDGET // 2 - 1, BUDGET // 4])
def test_a_small_prompt_comes_in_within_a_few_steps_beside_hundreds_of_another_tenant(
    length: int, overlap: bool
) -> None:
    """Prompts that wait hold neither blocks nor slots, and each token counts: none is ahead of another by
    more than a prompt.
    """
    memory = memory_plan(num_blocks=2 * (BUDGET // 4 + 8), max_model_len=BUDGET)
    driver = Driver(memory=memory, overlap=overlap, whole_prompts=True, prefix_caching=False)
    for _ in range(300):
        driver.submit([1] * length, max_tokens=1, tenant="big")
    for _ in range(6):
        driver.step()
        scheduled = {row.sequence_id for plan in driver.plans[-2:] for row in plan.scheduled}
        assert driver.scheduler.load(driver.now).num_running <= len(scheduled)
    for _ in range(12):
        small, num_plans = driver.submit([2] * 3, max_tokens=1, tenant="small"), len(driver.plans)
        while not driver.events[small]:
            driver.step()
        assert len(driver.plans) - num_plans <= 2 + overlap
    driver.run()
    driver.check_everything()


def test_short_prompts_do_not_hold_up_a_long_one() -> None:
    memory = memory_plan(num_blocks=2 * (BUDGET // 4 + 8), max_model_len=BUDGET)
    driver = Driver(memory=memory, whole_prompts=True, prefix_caching=False)
    for _ in range(3):
        driver.submit([1] * 10, max_tokens=1)
    long = driver.submit([2] * (BUDGET - 1), max_tokens=1)
    for _ in range(20):
        driver.submit([3] * 10, max_tokens=1)
    steps = 0
    while not driver.events[long]:
        driver.step()
        steps += 1
    assert steps <= 3
    driver.run()
    driver.check_everything()
