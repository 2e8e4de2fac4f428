"""Who comes first: tiers, fairness, deadlines, aging, long prompts, preemption."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.types import FinishReason
from tests.unit.engine.driver import Driver, memory_plan


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start * 31 + index) % 200 for index in range(length)]


def test_chunked_prefill_gives_the_same_tokens_as_one_piece() -> None:
    outputs = []
    for budget in (1, 7, 16, 64):
        driver = Driver(max_num_batched_tokens=budget, max_num_seqs=1)
        request = driver.submit(prompt(50), max_tokens=6)
        driver.run()
        driver.check_everything()
        outputs.append(driver.tokens(request))
    assert outputs[0] == driver.expected(request)
    assert all(each == outputs[0] for each in outputs)


def test_decodes_go_before_prefill_chunks() -> None:
    driver = Driver(max_num_batched_tokens=16)
    first = driver.submit(prompt(8), max_tokens=30)
    driver.step()
    driver.submit(prompt(64, 2), max_tokens=2)
    for _ in range(4):
        driver.step()
    # One token per step, undisturbed by the long prompt beside it.
    assert len(driver.tokens(first)) == 5
    assert all(plan.num_tokens <= 16 for plan in driver.plans)
    driver.run()
    driver.check_everything()


def test_long_prompts_take_at_most_their_share_while_others_have_work() -> None:
    driver = Driver(
        memory=memory_plan(400, 4, 800),
        max_num_batched_tokens=32,
        long_prefill_tokens=40,
        long_prefill_share=0.5,
    )
    driver.submit(prompt(400), max_tokens=2)
    driver.submit(prompt(300, 3), max_tokens=2)
    short = driver.submit(prompt(12, 2), max_tokens=2)
    driver.step()
    (plan,) = driver.plans
    lengths = {new.sequence_id: len(new.token_ids) for new in plan.new_sequences}
    tokens = {lengths.get(row.sequence_id): row.num_tokens for row in plan.scheduled}
    assert sum(count for length, count in tokens.items() if length and length > 40) <= 16
    assert tokens[12] == 12, "the short prompt passes the long ones"
    assert driver.first_token_s(short) == pytest.approx(driver.step_s)
    driver.run()
    driver.check_everything()


def test_a_long_prompt_alone_takes_the_whole_budget() -> None:
    driver = Driver(max_num_batched_tokens=32, long_prefill_tokens=16, long_prefill_share=0.25)
    driver.submit(prompt(96), max_tokens=1)
    driver.run()
    assert len([plan for plan in driver.plans if plan.scheduled]) == 3


def test_the_higher_tier_is_admitted_first() -> None:
    driver = Driver(max_num_seqs=1)
    low = driver.submit(prompt(8), max_tokens=1, priority=1)
    high = driver.submit(prompt(8, 2), max_tokens=1, priority=5)
    driver.run()
    assert driver.first_token_s(high) < driver.first_token_s(low)


def test_inside_a_tier_the_nearest_deadline_is_admitted_first() -> None:
    driver = Driver(max_num_seqs=1)
    late = driver.submit(prompt(8), max_tokens=1, ttft_deadline_s=9.0)
    early = driver.submit(prompt(8, 2), max_tokens=1, ttft_deadline_s=1.0)
    driver.run()
    assert driver.first_token_s(early) < driver.first_token_s(late)


def test_a_flooding_tenant_does_not_delay_a_quiet_one() -> None:
    driver = Driver(max_num_seqs=2, fairness_band_tokens=16)
    for index in range(30):
        driver.submit(prompt(8, index), max_tokens=8, tenant="flood")
    for _ in range(30):
        driver.step()
    quiet = driver.submit(prompt(8, 99), max_tokens=8, tenant="quiet")
    driver.run()
    # At most what was running when it came, not the queue before it.
    assert driver.first_token_s(quiet) <= 9 * driver.step_s
    driver.check_everything()


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.5), (3.0, 0.75)])
def test_two_backlogged_tenants_are_served_by_weight(weight: float, share: float) -> None:
    driver = Driver(max_num_seqs=2, fairness_band_tokens=8, max_num_batched_tokens=16)
    for index in range(60):
        driver.submit(prompt(8, index), max_tokens=8, tenant="a", weight=weight)
        driver.submit(prompt(8, index + 100), max_tokens=8, tenant="b")
    for _ in range(180):
        driver.step()
    served: Counter[str] = Counter()
    for request_id, request in driver.requests.items():
        served[request.tenant] += len(driver.tokens(request_id))
    assert served["a"] / served.total() == pytest.approx(share, abs=0.1)


def test_who_idles_earns_no_credit() -> None:
    driver = Driver(max_num_seqs=1, fairness_band_tokens=8)
    for index in range(20):
        driver.submit(prompt(8, index), max_tokens=4, tenant="busy")
    for _ in range(40):
        driver.step()
    for index in range(20):
        driver.submit(prompt(8, index + 50), max_tokens=4, tenant="idle")
    for _ in range(40):
        driver.step()
    before = sum(len(driver.tokens(r)) for r, q in driver.requests.items() if q.tenant == "busy")
    # Both are served from now on; the newcomer does not get all of it.
    assert before > 20 * 4 // 2 + 4


def test_aging_lets_the_lowest_tier_through_a_steady_stream_of_higher_ones() -> None:
    driver = Driver(max_num_seqs=2, aging_s=1.0, aging_interval=4)
    low = driver.submit(prompt(8), max_tokens=2, priority=0)
    for index in range(400):
        if index % 2 == 0:
            driver.submit(prompt(8, index), max_tokens=4, priority=9)
        driver.step()
        if driver.finish(low):
            break
    assert driver.finish(low) is FinishReason.LENGTH
    driver.run()
    driver.check_everything()


def test_a_higher_tier_displaces_a_lower_one_when_all_places_are_taken() -> None:
    driver = Driver(max_num_seqs=2)
    low = [driver.submit(prompt(8, index), max_tokens=20, priority=0) for index in range(2)]
    for _ in range(3):
        driver.step()
    high = driver.submit(prompt(8, 9), max_tokens=3, priority=5)
    driver.step()
    assert driver.tokens(high), "served in the very next step"
    driver.run()
    driver.check_everything()
    preemptions = [
        event.statistics.num_preemptions for r in low for event in driver.events[r] if event.statistics
    ]
    assert sorted(preemptions) == [0, 1]
    assert all(driver.tokens(each) == driver.expected(each) for each in low)
    _check_comeback(driver, low)


def _check_comeback(driver: Driver, requests: list[int]) -> None:
    """The one that was displaced comes back where its absence ends, and computes again what it lost."""
    (away,) = [
        event.statistics
        for r in requests
        for event in driver.events[r]
        if event.statistics and event.statistics.num_preemptions
    ]
    ((start_s, end_s),) = away.absences_s
    ((back_s, token_s, num_tokens),) = away.comebacks_s
    assert start_s < end_s == back_s <= token_s
    assert num_tokens >= 1
    assert away.recomputed_tokens <= num_tokens


def test_kv_pressure_preempts_the_lowest_rank_and_everybody_finishes() -> None:
    driver = Driver(memory=memory_plan(24, 4, 96), max_num_seqs=6, watermark=0.0)
    requests = [driver.submit(prompt(12, index), max_tokens=40) for index in range(6)]
    driver.run()
    driver.check_everything()
    assert all(driver.tokens(each) == driver.expected(each) for each in requests)
    load = driver.scheduler.load(driver.now)
    assert load.num_preemptions == load.counters.preemptions["kv_pressure"] > 0
    assert load.step_p50_s > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_who_waits_for_the_step_under_way_alone_is_held_back_by_nobody(overlap: bool) -> None:
    """Also where others were, a while ago."""
    driver = Driver(max_num_seqs=2, overlap=overlap)
    crowd = [driver.submit(prompt(8, index), max_tokens=6) for index in range(5)]
    driver.run()
    running = driver.submit(prompt(8, 7), max_tokens=20)
    for _ in range(4):
        driver.step()
    late = driver.submit(prompt(8, 8), max_tokens=4)
    # It came while the step ran.
    driver.wait(0.004)
    driver.run()
    driver.check_everything()
    delayed = {
        each: dict(driver.events[each][-1].statistics.delayed_by_s) for each in (*crowd, running, late)
    }
    assert set(delayed[crowd[-1]]) == {"batch_full"}
    assert delayed[running] == {}
    assert delayed[late] == {}


def test_everybody_behind_full_blocks_is_told_that_they_were_full() -> None:
    """Also those whose prompts no longer fit the step in which the first of them begins."""
    driver = Driver(memory=memory_plan(24, 4, 96), watermark=0.0)
    holder = driver.submit(prompt(80, 9), max_tokens=12)
    for _ in range(3):
        driver.step()
    waiting = [driver.submit(prompt(24, index), max_tokens=4) for index in range(3)]
    driver.run()
    for each in waiting:
        delays = driver.events[each][-1].statistics.delayed_by_s
        assert max(delays, key=delays.get) == "kv_pressure", delays
    assert not driver.events[holder][-1].statistics.delayed_by_s.get("kv_pressure")


@pytest.mark.parametrize("max_preemptions", [1, 3])
def test_preemptions_are_bounded_for_every_sequence(max_preemptions: int) -> None:
    driver = Driver(
        memory=memory_plan(20, 4, 76), max_num_seqs=8, watermark=0.0, max_preemptions=max_preemptions
    )
    for index in range(30):
        driver.submit(prompt(4, index), max_tokens=60, priority=index % 2)
    driver.run(20_000)
    driver.check_everything()
    for events in driver.events.values():
        for event in events:
            if event.statistics:
                assert event.statistics.num_preemptions <= max_preemptions


def test_impossible_requests_are_refused_with_the_numbers() -> None:
    driver = Driver(memory=memory_plan(8, 4, 64))
    too_long = driver.submit(prompt(64), max_tokens=1)
    never = driver.submit(prompt(20), max_tokens=30)
    assert driver.failure(too_long) == "CONTEXT_LENGTH_EXCEEDED"
    assert driver.failure(never) == "NEVER_FITS"
    (event,) = driver.events[never]
    assert event.failure
    assert event.failure.metadata["total_blocks"] == "8"
    assert event.failure.metadata["needed_blocks"] == "13"
    exact = driver.submit(prompt(20), max_tokens=13)
    driver.run()
    assert driver.finish(exact) is FinishReason.LENGTH


def test_the_tiers_context_limit_applies() -> None:
    driver = Driver()
    refused = driver.submit(prompt(40), max_context_tokens=40, tier="basic")
    cut = driver.submit(prompt(30), max_tokens=40, max_context_tokens=40)
    driver.run()
    assert driver.failure(refused) == "CONTEXT_LENGTH_EXCEEDED"
    assert len(driver.tokens(cut)) == 10
    assert driver.finish(cut) is FinishReason.LENGTH


def test_a_full_queue_refuses_with_a_delay_whoever_has_more_than_is_left() -> None:
    driver = Driver(max_waiting=8)
    flood = [driver.submit(prompt(8), tenant="flood") for _ in range(20)]
    (event,) = driver.events[flood[-1]]
    assert event.failure
    assert event.failure.reason == "QUEUE_LIMIT_EXCEEDED"
    assert event.failure.retry_after_s
    # Half of the room is left for others, and half of that for those after them.
    assert [bool(driver.failure(each)) for each in flood] == [False] * 4 + [True] * 16
    for tenant, accepted in (("second", 2), ("third", 1)):
        others = [driver.submit(prompt(8), tenant=tenant) for _ in range(5)]
        assert sum(not driver.failure(each) for each in others) == accepted
    driver.run()
    assert all(driver.finish(each) for each in flood)


def test_a_request_that_would_wait_too_long_is_refused_at_once() -> None:
    driver = Driver(max_num_seqs=1, max_waiting=1000)
    for index in range(40):
        driver.submit(prompt(8, index), max_tokens=10)
    for _ in range(60):
        driver.step()
    # About 34 requests ahead of 0.1 s each.
    refused = driver.submit(prompt(8), queue_deadline_s=driver.now + 1.0)
    assert driver.failure(refused) == "QUEUE_LIMIT_EXCEEDED"
    accepted = driver.submit(prompt(8), queue_deadline_s=driver.now + 30.0)
    driver.run()
    assert driver.finish(accepted) is FinishReason.LENGTH


def test_deadlines_end_requests_wherever_they_are() -> None:
    driver = Driver(max_num_seqs=1)
    running = driver.submit(prompt(8), max_tokens=50, deadline_s=0.1)
    waiting = driver.submit(prompt(8, 2), max_tokens=50, deadline_s=0.1)
    queued = driver.submit(prompt(8, 3), max_tokens=50, queue_deadline_s=0.05)
    driver.run()
    assert driver.finish(running) is FinishReason.DEADLINE
    assert driver.finish(waiting) is FinishReason.DEADLINE
    assert driver.failure(queued) == "QUEUE_LIMIT_EXCEEDED"
    assert driver.tokens(running)
    driver.check_everything()


def test_cancelling_frees_everything_within_one_step() -> None:
    driver = Driver()
    request = driver.submit(prompt(40), max_tokens=50, n=3)
    for _ in range(5):
        driver.step()
    assert driver.runner.num_states() == 3
    driver.cancel(request)
    assert driver.scheduler.num_unreferenced_blocks == driver.memory.num_blocks
    driver.step()
    assert driver.runner.num_states() == 0
    driver.check_everything()


def _steps_told(driver: Driver, request: int) -> int:
    return max(event.statistics.num_steps for event in driver.events[request] if event.statistics)


@pytest.mark.parametrize("sampling", [{}, {"n": 2}, {"beam_width": 2}])
def test_who_leaves_during_the_first_step_is_told_to_have_had_it(sampling: dict[str, int]) -> None:
    driver = Driver(overlap=True)
    early = driver.submit(prompt(8), max_tokens=50, **sampling)
    driver.cancel(early)
    assert _steps_told(driver, early) == 0
    request = driver.submit(prompt(8, 2), max_tokens=50, **sampling)
    driver.step()
    assert len(driver.scheduler._state.in_flight) == 1
    driver.cancel(request)
    assert _steps_told(driver, request) == 1
    driver.run()
    driver.check_everything()


def test_further_choices_share_the_prompts_blocks() -> None:
    driver = Driver(memory=memory_plan(64, 4, 128))
    request = driver.submit(prompt(38), max_tokens=3, n=4, prompt_logprobs=None)
    driver.step()
    driver.step()
    driver.step()
    used = driver.memory.num_blocks - driver.scheduler.num_unreferenced_blocks
    # Ten blocks of prompt, of which the last one is copied for three children, and their growth.
    assert used <= 10 + 3 + 4
    driver.run()
    for choice in range(4):
        assert driver.tokens(request, choice) == driver.expected(request, choice)
    # 38 for the prompt, one more for each further choice, and two decodes each.
    assert driver.runner.num_computed_tokens == 38 + 3 + 4 * 2


def test_stop_tokens_end_a_choice_and_respect_min_tokens() -> None:
    driver = Driver()
    tokens = driver.expected(driver.submit(prompt(8), max_tokens=10))
    stopped = driver.submit(prompt(8), max_tokens=10, stop_token_ids=(tokens[2],))
    later = driver.submit(prompt(8), max_tokens=10, min_tokens=5, stop_token_ids=(tokens[2], tokens[6]))
    driver.run()
    assert driver.tokens(stopped) == tokens[:3]
    assert driver.finish(stopped) is FinishReason.STOP
    assert driver.events[stopped][-1].stop_token_id == tokens[2]
    assert driver.tokens(later) == tokens[:7]


def test_a_continued_request_goes_on_where_the_other_engine_stopped() -> None:
    driver = Driver()
    whole = driver.submit(prompt(10), max_tokens=12, seed=3)
    driver.run()
    tokens = driver.tokens(whole)
    rest = driver.submit(prompt(10), max_tokens=12, seed=3, output_token_ids=tuple(tokens[:5]))
    driver.run()
    assert driver.tokens(rest) == tokens[5:]


def test_a_cached_prefix_is_not_computed_again_and_never_covers_the_whole_prompt() -> None:
    driver = Driver()
    driver.submit(prompt(32), max_tokens=1)
    driver.run()
    before = driver.runner.num_computed_tokens
    again = driver.submit(prompt(32), max_tokens=1)
    driver.run()
    assert driver.runner.num_computed_tokens - before == 4
    first = next(event.first_token for event in driver.events[again] if event.first_token)
    assert first
    assert first.cached_prompt_tokens == 28


def test_tenants_with_different_salts_share_nothing() -> None:
    driver = Driver()
    for salt in (b"a", b"b"):
        request = driver.submit(prompt(32), max_tokens=1, cache_salt=salt)
        driver.run()
        first = next(event.first_token for event in driver.events[request] if event.first_token)
        assert first
        assert first.cached_prompt_tokens == 0


def test_drafts_are_verified_and_rejected_ones_rolled_back() -> None:
    for overlap in (False, True):
        driver = Driver(overlap=overlap)
        calls = iter(range(10_000))

        def propose(state: object, calls: object = calls) -> tuple[int, ...]:
            # Right, half right and wrong proposals in turn.
            number = next(calls)  # type: ignore[call-overload]
            last = state.tokens[-1]  # type: ignore[attr-defined]
            right = [300 + (last - 300 + step) % 700 for step in (1, 2, 3)]
            return ((), tuple(right), (right[0], 5, 6), (7, 8))[number % 4]

        driver.runner.propose = propose
        requests = [driver.submit(prompt(9, index), max_tokens=25) for index in range(3)]
        driver.run()
        driver.check_everything()
        for request in requests:
            assert driver.tokens(request) == driver.expected(request)
            statistics = driver.events[request][-1].statistics
            assert statistics
            # Overlapped steps leave no time to draft.
            assert overlap or 0 < statistics.accepted_tokens < statistics.drafted_tokens


def test_restores_from_host_memory_replace_recomputation() -> None:
    driver = Driver(memory=memory_plan(16, 4, 60), num_host_blocks=32)
    first = prompt(40, 1)
    driver.submit(first, max_tokens=1)
    driver.run()
    # Takes every device block, so that the first prompt's content moves to the host.
    driver.submit(prompt(55, 2), max_tokens=1)
    driver.run()
    before = driver.runner.num_computed_tokens
    again = driver.submit(first, max_tokens=1)
    driver.run()
    assert driver.runner.num_computed_tokens - before == 4
    assert any(plan.restores for plan in driver.plans)
    (statistics,) = [event.statistics for event in driver.events[again] if event.statistics]
    ((start_s, end_s, num_tokens),) = statistics.restores_s
    assert start_s < end_s
    # The rest was on the device still.
    assert 0 < num_tokens <= 36
    driver.check_everything()


def test_what_is_faster_to_compute_is_not_restored() -> None:
    driver = Driver(memory=memory_plan(16, 4, 60), num_host_blocks=32, host_bytes_per_s=1.0)
    driver.submit(prompt(40, 1), max_tokens=1)
    driver.run()
    driver.submit(prompt(55, 2), max_tokens=1)
    driver.run()
    driver.submit(prompt(40, 1), max_tokens=1)
    driver.run()
    # One byte per second from the host, thousands of tokens per second from the device.
    assert not any(plan.restores for plan in driver.plans)
    driver.check_everything()
