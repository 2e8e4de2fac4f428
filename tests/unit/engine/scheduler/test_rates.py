"""Chunks by time: what a step may hold while somebody is being answered."""

from __future__ import annotations

import math

import pytest

from engine.policy.rates import LEAST_CHUNK_PER_DECODE, LEAST_CHUNK_TOKENS, StepRate
from engine.types import SchedulerOutput
from tests.unit.engine.checked_runner import FinishedStep
from tests.unit.engine.driver import Driver, memory_plan


def prompt(start: int, length: int = 400) -> list[int]:
    return [(start * 31 + index) % 200 for index in range(length)]


def in_proportion(driver: Driver, tokens_per_s: float) -> None:
    """Makes a step take as long as its tokens do, and no longer."""
    launch = driver.runner.launch

    def timed(plan: SchedulerOutput) -> FinishedStep:
        driver.runner.compute_s = plan.num_tokens / tokens_per_s
        return launch(plan)

    driver.runner.launch = timed  # type: ignore[method-assign]


def busy_driver(
    step_target_ms: float, *, step_s: float = 1.0, lengths: tuple[int, ...] = (400, 400, 400)
) -> Driver:
    """One sequence decodes; a step of 400 prompt tokens took `step_s`, and more prompts have come."""
    driver = Driver(
        memory=memory_plan(1600, 4, 800),
        max_num_batched_tokens=600,
        long_prefill_tokens=500,
        step_target_ms=step_target_ms,
        check=False,
    )
    driver.runner.compute_s = step_s
    driver.submit(prompt(1), max_tokens=30)
    driver.step()
    for index, length in enumerate(lengths):
        driver.submit(prompt(3 + index, length), max_tokens=2)
    driver.step()
    return driver


def test_while_somebody_decodes_a_step_is_cut_to_its_target_time() -> None:
    # 400 tokens a second: half a second is 200 tokens, one of which is decoded.
    assert busy_driver(500).plans[1].num_tokens == 200


def test_without_a_target_or_on_a_fast_device_the_token_budget_rules() -> None:
    assert busy_driver(0).plans[1].num_tokens == 600
    assert busy_driver(500, step_s=0.01).plans[1].num_tokens == 600


def test_a_chunk_never_becomes_so_small_that_it_wastes_the_device() -> None:
    assert busy_driver(500, step_s=100.0).plans[1].num_tokens == 1 + LEAST_CHUNK_TOKENS


def test_a_chunk_grows_with_the_sequences_that_decode_beside_it() -> None:
    driver = Driver(
        memory=memory_plan(1600, 4, 800),
        max_num_batched_tokens=600,
        max_num_seqs=20,
        long_prefill_tokens=500,
        step_target_ms=500,
        check=False,
    )
    driver.runner.compute_s = 100.0
    for index in range(16):
        driver.submit(prompt(index, 8), max_tokens=30)
    driver.step()
    driver.submit(prompt(40), max_tokens=2)
    driver.step()
    assert driver.plans[1].num_tokens == 16 + 16 * LEAST_CHUNK_PER_DECODE


def test_own_prompts_may_take_longer_than_those_of_a_neighbour() -> None:
    chunks = []
    for tenant in ("own", "other"):
        driver = Driver(
            memory=memory_plan(1600, 4, 800),
            max_num_batched_tokens=600,
            long_prefill_tokens=5000,
            step_target_ms=1000,
            neighbour_step_ms=250,
            check=False,
        )
        in_proportion(driver, 400.0)
        driver.submit(prompt(1), max_tokens=30, tenant="own")
        driver.step()
        driver.wait(5.0)
        driver.submit(prompt(3, 500), max_tokens=2, tenant=tenant)
        driver.step()
        chunks.append(driver.plans[-1].num_tokens)
    assert chunks == [400, 100]


def test_nobody_decoding_the_whole_budget_goes_to_prompts() -> None:
    driver = busy_driver(500)
    driver.run()
    for index in range(3):
        driver.submit(prompt(7 + index), max_tokens=2)
    driver.step()
    assert driver.plans[-1].num_tokens == 600
    driver.run()
    driver.check_everything()


def test_long_prompts_get_their_share_of_the_cut_step() -> None:
    driver = busy_driver(500, lengths=(700,))
    decode, chunk = driver.plans[1].scheduled
    assert (decode.num_tokens, chunk.num_tokens) == (1, 99)


@pytest.mark.parametrize("balance", [math.inf, 1000.0, 3.0])
@pytest.mark.parametrize("start", [0, 7, 4000])
@pytest.mark.parametrize("work", [1.0, 24.0, 700.0])
def test_as_many_tokens_as_so_much_work(balance: float, start: int, work: float) -> None:
    rate = StepRate(balance)
    num_tokens = rate.tokens_for(work, start)
    assert num_tokens == 1 or rate.work(start, num_tokens) <= work * (1 + 1e-9)
    assert rate.work(start, num_tokens + 1) > work * (1 - 1e-9)
    assert rate.tokens_for(0.5, start) == 0


def long_prompts_beside(balance: float) -> Driver:
    """One sequence decodes while a long prompt of its tenant is computed."""
    driver = Driver(
        memory=memory_plan(1600, 4, 2000),
        max_num_batched_tokens=600,
        long_prefill_tokens=5000,
        step_target_ms=100,
        attention_balance=balance,
        check=False,
    )
    # 2,000 tokens a second.
    driver.runner.compute_s = 0.1
    driver.submit(prompt(1, 200), max_tokens=40)
    driver.step()
    driver.submit(prompt(3, 1900), max_tokens=2)
    return driver


def test_chunks_become_smaller_with_the_context_that_they_look_back_on() -> None:
    driver = long_prompts_beside(500.0)
    speed = driver.scheduler._state.speed
    while not any(plan.num_tokens == 2 for plan in driver.plans[1:]):
        # What a step takes is its work.
        plan = driver.scheduler.schedule(driver.now)
        driver.plans.append(plan)
        work = sum(speed.work(row.start, row.num_tokens) for row in plan.scheduled)
        driver.runner.compute_s = work / 2000.0
        result = driver.runner.launch(plan).wait()
        driver.now += driver.runner.compute_s
        driver.scheduler.update(result, driver.now)
    chunks = [plan.num_tokens for plan in driver.plans[2:] if plan.num_tokens > 2]
    assert chunks[0] > 2 * chunks[-2] > 0, "the work of a chunk stays, its tokens become fewer"


def test_a_prompt_that_is_computed_leaves_other_tenants_their_part_of_a_step() -> None:
    driver = Driver(
        memory=memory_plan(1600, 4, 800),
        max_num_batched_tokens=600,
        long_prefill_tokens=5000,
        step_target_ms=500,
        neighbour_step_ms=500,
        check=False,
    )
    in_proportion(driver, 400.0)
    driver.submit(prompt(1), max_tokens=30, tenant="long")
    driver.step()
    driver.submit(prompt(3, 700), max_tokens=2, tenant="long")
    driver.step()
    driver.submit(prompt(5, 60), max_tokens=2, tenant="short")
    driver.step()
    # 400 tokens a second, so 200 a step: of those that the long prompt would take the short one has its own.
    alone, shared = ([row.num_tokens for row in plan.scheduled] for plan in driver.plans[1:])
    assert alone == [1, 199]
    assert shared[0] == 1
    assert shared[2] == 60
    assert shared[1] <= 110


def unanswered_driver() -> Driver:
    """400 tokens a second were measured, of prompts that have ended: nobody is being answered."""
    driver = Driver(
        memory=memory_plan(1600, 4, 800),
        max_num_batched_tokens=600,
        long_prefill_tokens=5000,
        step_target_ms=500,
        neighbour_step_ms=500,
        check=False,
    )
    in_proportion(driver, 400.0)
    driver.submit(prompt(1), max_tokens=1, tenant="many")
    driver.run()
    return driver


def test_tenants_share_a_step_in_time_before_anybody_is_answered() -> None:
    driver = unanswered_driver()
    for index in range(3):
        driver.submit(prompt(3 + index), max_tokens=2, tenant="many")
    driver.submit(prompt(9, 60), max_tokens=2, tenant="short")
    driver.step()
    # So 200 a step, of which half is another tenant's; alone they have the whole budget.
    assert sorted(row.num_tokens for row in driver.plans[-1].scheduled) == [60, 100]


@pytest.mark.parametrize(("ago_s", "num_tokens"), [(0.5, 200), (5.0, 600)])
def test_a_step_is_short_for_tenants_that_asked_a_moment_ago(ago_s: float, num_tokens: int) -> None:
    driver = unanswered_driver()
    driver.submit(prompt(9, 20), max_tokens=1, tenant="short")
    driver.run()
    driver.wait(ago_s)
    for index in range(3):
        driver.submit(prompt(3 + index), max_tokens=2, tenant="many")
    driver.step()
    assert driver.plans[-1].num_tokens == num_tokens


def test_short_prompts_begin_together_where_a_step_takes_longer_than_its_target() -> None:
    driver = Driver(
        memory=memory_plan(1600, 16, 800), max_num_batched_tokens=600, step_target_ms=75, check=False
    )
    driver.runner.compute_s = 0.1
    for _ in range(20):
        # Never is one of them answered alone.
        driver.submit(prompt(1, 30), max_tokens=9)
        driver.step()
        begun = len(driver.plans)
        for _ in range(7):
            driver.submit(prompt(1, 30), max_tokens=8)
        driver.run()
        all_begun = next(n for n, plan in enumerate(driver.plans[begun:]) if len(plan.scheduled) == 8)
        assert all_begun <= 2
