"""Whose the seconds of steps are: by tokens, by what they were for, and none lost, whatever happens."""

from __future__ import annotations

import pytest

from engine.types import EngineTime, FinishReason
from tests.unit.engine.checked_runner import State, expected_token
from tests.unit.engine.driver import Driver, memory_plan

STEP_S = 1.0


def driver_of(**options: object) -> Driver:
    driver = Driver(**options)  # type: ignore[arg-type]
    driver.runner.compute_s = STEP_S
    return driver


def parts(spent: EngineTime) -> tuple[float, ...]:
    return tuple(
        round(each, 6)
        for each in (spent.prefill_s, spent.decode_s, spent.speculative_waste_s, spent.recompute_s)
    )


def test_a_request_alone_has_all_of_its_steps() -> None:
    driver = driver_of()
    request = driver.submit([1] * 9, max_tokens=4)
    driver.run()
    assert parts(driver.engine_time(request)) == (1.0, 3.0, 0.0, 0.0)


def test_a_step_is_shared_by_tokens() -> None:
    driver = driver_of()
    long, short = driver.submit([1] * 12, max_tokens=2), driver.submit([2] * 4, max_tokens=2)
    driver.run()
    assert parts(driver.engine_time(long)) == (0.75, 0.5, 0.0, 0.0)
    assert parts(driver.engine_time(short)) == (0.25, 0.5, 0.0, 0.0)


def test_a_token_that_looks_back_on_more_is_more_work() -> None:
    driver = driver_of()
    driver.scheduler._state.speed.balance = 8.0
    long, short = driver.submit([1] * 16, max_tokens=2), driver.submit([2] * 8, max_tokens=2)
    driver.run()
    # 16 tokens that look back on 8 in the mean, 8 on 4; then one on 16.5, and one on 8.5.
    prefill, decode = 16 * 2.0 / (16 * 2.0 + 8 * 1.5), (1 + 16.5 / 8) / (2 + 25.0 / 8)
    assert parts(driver.engine_time(long)) == (round(prefill, 6), round(decode, 6), 0.0, 0.0)
    driver.check_costs()
    assert driver.engine_time(short).total_s > 0


def test_drafts_that_are_thrown_away_are_waste() -> None:
    driver = driver_of()
    prompt = [3] * 5

    def propose(state: State) -> tuple[int, ...]:
        position = len(state.tokens) - state.num_prompt_tokens
        return expected_token(tuple(prompt), state.sampling.seed, 0, position), 7

    driver.runner.propose = propose
    request = driver.submit(prompt, max_tokens=5)
    driver.run()
    drafted, accepted = driver.events[request][-1].statistics, driver.engine_time(request)
    assert drafted is not None
    num_wasted = drafted.drafted_tokens - drafted.accepted_tokens
    assert num_wasted > 0
    assert accepted.speculative_waste_s > 0
    assert accepted.total_s == pytest.approx(driver.busy_s)


def test_what_preemption_lost_is_recomputed() -> None:
    driver = driver_of(memory=memory_plan(16, 4, 64), prefix_caching=False)
    low = driver.submit([1] * 20, max_tokens=20)
    for _ in range(4):
        driver.step()
    driver.submit([2] * 40, max_tokens=20, priority=10)
    driver.run()
    driver.check_everything()
    assert driver.engine_time(low).recompute_s > 0
    assert driver.engine_time().total_s == pytest.approx(driver.busy_s)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("options", [{"n": 3}, {"n": 2, "best_of": 4}, {"n": 2, "beam_width": 3}], ids=str)
def test_choices_and_what_competes_with_them_are_told_once(overlap: bool, options: dict[str, int]) -> None:
    driver = driver_of(overlap=overlap)
    driver.submit([1] * 9, max_tokens=6, **options)
    driver.submit([2] * 9, max_tokens=9)
    driver.run()
    driver.check_costs()
    assert driver.busy_s > 6 * STEP_S


@pytest.mark.parametrize("reason", [FinishReason.CANCELLED, FinishReason.DEADLINE])
def test_who_leaves_has_had_its_part(reason: FinishReason) -> None:
    driver = driver_of()
    request = driver.submit([1] * 9, max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.cancel(request, reason)
    driver.run()
    assert parts(driver.engine_time(request)) == (1.0, 4.0, 0.0, 0.0)


def test_a_failed_step_is_somebodys_and_the_poisoned_request_tells_its_own() -> None:
    driver = driver_of()
    driver.runner.poison_token_id = 666
    guilty, other = driver.submit([666] * 4, max_tokens=4), driver.submit([2] * 4, max_tokens=4)
    driver.run()
    driver.check_everything()
    assert driver.failure(guilty) == "POISONED_REQUEST"
    assert driver.engine_time(guilty).recompute_s > 0
    assert driver.engine_time(other).recompute_s > 0


def test_what_is_computed_for_nobody_is_borne_by_the_next() -> None:
    driver = driver_of(overlap=True)
    # A stop token ends it while the next step, which is planned already, computes for it.
    stop = expected_token((1,) * 8, 0, 0, 2)
    first = driver.submit([1] * 8, max_tokens=9, stop_token_ids=(stop,))
    driver.run()
    assert driver.engine_time(first).total_s == driver.busy_s - STEP_S
    driver.submit([2] * 8, max_tokens=8)
    driver.run()
    assert driver.engine_time().total_s == pytest.approx(driver.busy_s)
