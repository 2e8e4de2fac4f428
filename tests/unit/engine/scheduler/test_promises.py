"""What a request is told when it is submitted holds: who is accepted is served."""

from __future__ import annotations

import random
import re

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from engine.policy.rates import EventRate
from engine.types import FinishReason
from tests.unit.engine.driver import Driver, memory_plan

PROMPT = [5, 9, 2, 7, 1, 1, 3, 8]


def queue_s(driver: Driver, request_id: int) -> float:
    """Time until the request was first computed."""
    first = next(event.first_token for event in driver.events[request_id] if event.first_token)
    assert first
    return first.first_scheduled_s - first.arrival_s


def flood(
    driver: Driver, num_steps: int, *, priority: int, limit_s: float | None, every: int = 1
) -> list[int]:
    """Submits one request every few steps while the engine runs."""
    requests = []
    for index in range(num_steps):
        if index % every == 0:
            deadline = None if limit_s is None else driver.now + limit_s
            requests.append(
                driver.submit(
                    [*PROMPT, index % 90], max_tokens=10, priority=priority, queue_deadline_s=deadline
                )
            )
        driver.step()
    return requests


def test_an_accepted_request_outlives_its_queue_limit() -> None:
    """The engine was wrong, or stood still: the request is late, and served."""
    driver = Driver(max_num_seqs=1)
    driver.submit(PROMPT, max_tokens=5)
    late = driver.submit(PROMPT, max_tokens=5, queue_deadline_s=0.1)
    driver.wait(10.0)
    driver.run()
    assert driver.finish(late) is FinishReason.LENGTH
    driver.check_everything()


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_under_overload_those_accepted_start_within_their_limit(max_num_seqs: int) -> None:
    # A request takes 0.1 s of a place; far more come.
    driver = Driver(max_num_seqs=max_num_seqs, max_waiting=10_000)
    requests = flood(driver, 1000, priority=0, limit_s=2.0)
    driver.run()
    refused = [each for each in requests if driver.failure(each)]
    served = [each for each in requests if driver.finish(each) is FinishReason.LENGTH]
    assert len(refused) + len(served) == len(requests)
    assert len(refused) > 100
    # Nobody is refused beside free places: at least nine tenths of what fits is served.
    assert len(served) > 0.9 * max_num_seqs * 10.0 / 0.1
    assert max(queue_s(driver, each) for each in served) <= 2.0
    driver.check_everything()


def test_a_due_request_starts_though_higher_tiers_fill_the_engine() -> None:
    driver = Driver(max_num_seqs=2, aging_s=1e9)
    for index in range(2):
        driver.submit([*PROMPT, index], max_tokens=20, priority=5)
    low = [driver.submit([*PROMPT, index], max_tokens=4, queue_deadline_s=2.0) for index in range(2)]
    # From now on two places of work come for every one that there is.
    high = flood(driver, 400, priority=5, limit_s=None, every=2)
    assert all(queue_s(driver, each) <= 2.0 for each in low)
    driver.run()
    assert all(driver.finish(each) is FinishReason.LENGTH for each in (*low, *high))
    driver.check_everything()


def test_a_due_request_that_finds_no_place_holds_up_no_higher_tier() -> None:
    driver = Driver(max_num_seqs=2, aging_s=1e9)
    for index in range(2):
        driver.submit([index, *PROMPT], max_tokens=60, priority=1)
    driver.step()
    middle = driver.submit(PROMPT, max_tokens=3, priority=1, queue_deadline_s=0.1)
    driver.wait(0.2)
    high = driver.submit(PROMPT, max_tokens=3, priority=5)
    driver.step()
    assert driver.tokens(high), "displaces at once"
    assert not driver.tokens(middle)
    driver.run()
    driver.check_everything()


def test_the_lowest_tier_is_refused_first_and_a_flood_costs_its_own_tenant() -> None:
    driver = Driver(max_num_seqs=4, max_waiting=10_000, fairness_band_tokens=32)
    refused = {"high": 0, "quiet": 0, "flood": 0}
    for index in range(1500):
        # Forty places a second come free; the three ask for 20, 5 and 100.
        for name, every, priority in (("high", 5, 5), ("quiet", 20, 0), ("flood", 1, 0)):
            if index % every == 0:
                request = driver.submit(
                    [*PROMPT, index % 90],
                    max_tokens=10,
                    priority=priority,
                    tenant=name,
                    queue_deadline_s=driver.now + 3.0,
                )
                refused[name] += bool(driver.failure(request))
        driver.step()
    driver.run()
    driver.check_everything()
    assert refused["high"] == 0
    assert refused["quiet"] <= 5, "at the start, when nothing is known"
    assert refused["flood"] > 750


def test_a_refusal_says_how_long_to_stay_away() -> None:
    driver = Driver(max_num_seqs=1, max_waiting=10_000)
    for index in range(40):
        driver.submit([*PROMPT, index], max_tokens=10)
    for _ in range(200):
        driver.step()
    refused = driver.submit(PROMPT, tier="basic", queue_deadline_s=driver.now + 1.0)
    (event,) = driver.events[refused]
    assert event.failure
    expected_s = float(event.failure.metadata["expected_s"])
    num_waiting = driver.scheduler.load(driver.now).num_waiting
    assert expected_s == pytest.approx(num_waiting * 0.1, rel=0.25)
    assert event.failure.retry_after_s == pytest.approx(expected_s - 0.7, abs=0.11)


def test_a_refusal_names_the_wait_that_is_over_already() -> None:
    driver = Driver(max_num_seqs=1)
    for index in range(3):
        driver.submit([*PROMPT, index], max_tokens=10)
    for _ in range(12):
        driver.step()
    refused = driver.submit(
        PROMPT, tier="basic", arrival_s=driver.now - 4.0, queue_deadline_s=driver.now - 1.0
    )
    (event,) = driver.events[refused]
    assert event.failure
    told = re.search(
        r"expected ([\d.]+) s after the request came; tier 'basic' allows 3.0 s", event.failure.message
    )
    assert told
    expected_s = float(event.failure.metadata["expected_s"])
    assert float(told[1]) == pytest.approx(4.0 + expected_s, abs=0.06)


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(seed=st.integers(0, 1 << 30), overlap=st.booleans(), num_blocks=st.sampled_from((24, 60)))
def test_nothing_is_accepted_and_then_dropped(seed: int, overlap: bool, num_blocks: int) -> None:
    """Whatever comes: a request is refused in the answer to its submission, or it is served to its end."""
    rng = random.Random(seed)
    driver = Driver(memory=memory_plan(num_blocks, 4, 76), overlap=overlap, max_num_seqs=4)
    accepted = []
    for _ in range(60):
        request = driver.submit(
            [rng.randrange(99) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 30),
            n=rng.choice((1, 1, 3)),
            priority=rng.randrange(3),
            tenant=rng.choice("ab"),
            queue_deadline_s=driver.now + rng.choice((0.05, 0.5, 2.0)),
        )
        if not driver.events[request]:
            accepted.append(request)
        if rng.random() < 0.05:
            driver.wait(rng.random() * 3)
        for _ in range(rng.randrange(4)):
            driver.step()
    driver.run()
    driver.check_everything()
    for request in accepted:
        assert driver.finish(request) is FinishReason.LENGTH


def test_a_rate_fades_stands_still_and_knows_its_error() -> None:
    rate = EventRate(10.0)
    for index in range(1, 1001):
        rate.count(index * 0.1)
    assert rate.per_s(100.0) == pytest.approx(10.0, rel=0.05)
    assert rate.per_s(100.0, deviations=2.0) == pytest.approx(10.0 + 2 * 100**0.5 / 10, rel=0.05)
    assert rate.per_s(110.0) == pytest.approx(10.0 * 0.37, rel=0.05)
    rate.run(110.0, running=False)
    rate.count(200.0, 1000)
    assert rate.per_s(300.0) == pytest.approx(10.0 * 0.37, rel=0.05)


def test_what_can_no_longer_be_kept_yields_to_what_can_and_is_served_all_the_same() -> None:
    driver = Driver(max_num_seqs=1, aging_s=1e9)
    driver.submit(PROMPT, max_tokens=30)
    driver.step()
    hopeless = driver.submit([1, *PROMPT], max_tokens=5, ttft_deadline_s=0.1)
    hopeful = [driver.submit([each, *PROMPT], max_tokens=5, ttft_deadline_s=5.0 + each) for each in (3, 2)]
    driver.run()
    assert queue_s(driver, hopeful[1]) < queue_s(driver, hopeful[0]) < queue_s(driver, hopeless)
    assert driver.finish(hopeless) is FinishReason.LENGTH
    driver.check_everything()


def test_the_highest_tier_is_not_told_that_higher_ones_take_every_place() -> None:
    driver = Driver(memory=memory_plan(400, 4, 300), max_num_seqs=2, max_waiting=10_000)
    for index in range(12):
        driver.submit([index, *PROMPT], max_tokens=100, priority=5)
    for _ in range(450):
        driver.step()
    # For half a minute nothing ends. That is no rate: answers have limits, which say when the next one will.
    driver.wait(60.0)
    request = driver.submit(PROMPT, max_tokens=5, priority=5, queue_deadline_s=driver.now + 0.001)
    (event,) = driver.events[request]
    assert event.failure
    assert "higher tiers" not in event.failure.message
    assert float(event.failure.metadata["expected_s"]) < 10.0
    assert event.failure.retry_after_s == pytest.approx(1.5, abs=0.01)


def test_whoever_cannot_start_behind_higher_tiers_is_told_a_bounded_time() -> None:
    driver = Driver(max_num_seqs=2, max_waiting=10_000)
    flood(driver, 300, priority=5, limit_s=None, every=2)
    request = driver.submit(PROMPT, max_tokens=5, priority=0, queue_deadline_s=driver.now + 1.0)
    (event,) = driver.events[request]
    assert event.failure
    # They have come for three seconds, and may for three more.
    assert "the first token is expected 1" in event.failure.message
    assert 2.0 <= (event.failure.retry_after_s or 0.0) <= 20.0


def test_without_a_limit_nobody_is_refused_however_slow_the_engine_is() -> None:
    driver = Driver(memory=memory_plan(400, 4, 100), max_num_seqs=2, step_s=1.0)
    driver.submit(PROMPT, max_tokens=4)
    driver.run()
    requests = [
        driver.submit([*PROMPT, each], max_tokens=4, ttft_deadline_s=driver.now + 2.0) for each in range(32)
    ]
    assert not any(driver.failure(each) for each in requests)
    driver.run()
    assert all(driver.finish(each) is FinishReason.LENGTH for each in requests)
    assert max(driver.first_token_s(each) for each in requests) > 30.0, "it is slow"


def shared(driver: Driver, index: int, **fields: object) -> int:
    return driver.submit([*range(1, 97), 200 + index], max_tokens=8, **fields)


def test_a_prefix_that_many_wait_for_is_forecast_once() -> None:
    driver = Driver(memory=memory_plan(800, 4, 200), max_num_seqs=16, max_num_batched_tokens=32, step_s=0.1)
    driver.runner.compute_s = 0.1
    driver.submit([7] * 150, max_tokens=4)
    driver.run()
    assert driver.scheduler._state.speed.full_prefill_tokens_per_s
    # About 0.3 s for the common part and some tokens for each; 32 times as much if each paid for it.
    requests = [shared(driver, each, queue_deadline_s=driver.now + 4.0) for each in range(32)]
    assert not any(driver.failure(each) for each in requests)
    assert driver.scheduler.load(driver.now).pending_prefill_tokens <= 97 + 31
    other = [
        driver.submit([200 + each] * 97, max_tokens=8, queue_deadline_s=driver.now + 4.0)
        for each in range(32)
    ]
    assert any(driver.failure(each) for each in other)
    driver.run()
    driver.check_everything()
    assert max(driver.first_token_s(each) for each in requests) <= 4.0


def test_sixteen_at_a_time_pay_once_for_the_prefix_that_they_share() -> None:
    driver = Driver(memory=memory_plan(800, 4, 200), max_num_seqs=16, max_num_batched_tokens=32, step_s=0.1)
    driver.runner.compute_s = 0.1
    driver.submit([7] * 150, max_tokens=4)
    driver.run()
    requests: list[int] = []
    while len(requests) < 32 or driver.scheduler.num_requests:
        while len(requests) < 32 and driver.scheduler.num_requests < 16:
            requests.append(shared(driver, len(requests), queue_deadline_s=driver.now + 4.0))
            assert not driver.failure(requests[-1])
        driver.step()
    assert max(driver.first_token_s(each) for each in requests) <= 4.0


def test_a_flow_lasts_from_its_first_event_to_its_last() -> None:
    rate = EventRate(10.0)
    for index in range(30):
        rate.count(index * 0.1)
    assert rate.lasted_s() == pytest.approx(2.9, abs=0.15)
    rate.count(100.0)
    assert rate.lasted_s() == 0.0, "another flow begins"
