"""Steps with prompts last as long as those who are answered in them can bear, in virtual time."""

from __future__ import annotations

import math

import pytest

from benchmarks.engine.steps import MeasuredDevice
from benchmarks.engine.virtual import Arrival, Outcome, plan_result, simulate
from engine.config import CacheConfig, SchedulerConfig
from engine.policy.pace import LONGEST_GAP
from engine.scheduler import Scheduler
from engine.scheduler.held_back import ANSWER_PACE
from engine.scheduler.step_room import StepRoom
from engine.types import FinishReason, Request, SamplingParams, SchedulerOutput
from tests.unit.engine.driver import Driver, memory_plan

DEVICE = MeasuredDevice()
STREAMS = 32


def burst(
    tpot_s: float | None, *, config: SchedulerConfig | None = None, ttft_s: float | None = None
) -> Outcome:
    """32 streams at once; a step of all of their answers takes 122 ms, a chunk of 512 tokens 620."""
    arrivals = [
        Arrival(0.0, 256, 128, "tier", "all", ttft_target_s=ttft_s, tpot_target_s=tpot_s)
        for _ in range(STREAMS)
    ]
    return simulate(arrivals, config or SchedulerConfig(max_num_seqs=64), DEVICE)


def longest_gap_s(outcome: Outcome) -> float:
    return max(max(each.gaps_s) for each in outcome.served)


def mean_ttft_s(outcome: Outcome) -> float:
    return sum(each.ttft_s or math.inf for each in outcome.served) / len(outcome.served)


@pytest.mark.parametrize("tpot_s", [0.15, 0.2, 0.4])
def test_every_answer_keeps_its_pace_and_no_gap_is_longer_than_three_targets(tpot_s: float) -> None:
    outcome = burst(tpot_s)
    assert all(each.finish is FinishReason.LENGTH for each in outcome.served)
    assert max(each.tpot_s or math.inf for each in outcome.served) <= tpot_s
    # A little more while the device is not known yet.
    assert longest_gap_s(outcome) <= 1.1 * min(LONGEST_GAP * tpot_s, 1.0)


def test_without_a_target_prompts_are_computed_as_fast_as_in_whole_steps() -> None:
    ours = burst(None)
    whole = burst(None, config=SchedulerConfig(max_num_seqs=64, step_target_ms=0.0))
    assert ours.duration_s <= 1.02 * whole.duration_s
    assert mean_ttft_s(ours) <= 1.05 * mean_ttft_s(whole)
    assert longest_gap_s(ours) <= 1.05 < longest_gap_s(whole)


def test_a_longer_target_lets_prompts_be_computed_faster() -> None:
    found = [mean_ttft_s(burst(tpot_s)) for tpot_s in (0.15, 0.2, 0.4)]
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.6 * found[0]


@pytest.mark.parametrize("ttft_s", [None, 2.0])
def test_a_target_beyond_reach_leaves_nobody_out(ttft_s: float | None) -> None:
    outcome = burst(0.03, ttft_s=ttft_s)
    assert all(each.finish is FinishReason.LENGTH for each in outcome.served)
    # As many answers at once as a quarter of the time for prompts, or half, comes to.
    assert outcome.duration_s < 2.5 * burst(None).duration_s


def test_the_same_load_is_served_in_the_same_steps() -> None:
    one, other = ([each.token_times_s for each in burst(0.2).served] for _ in range(2))
    assert one == other


def beside(*arrivals: Arrival) -> Outcome:
    """Sixteen answers of a tier that promises 100 ms, which leaves 19 beside them, and what comes later."""
    streams = [Arrival(0.0, 16, 200, "low", "low", 0, tpot_target_s=0.1) for _ in range(16)]
    return simulate([*streams, *arrivals], SchedulerConfig(max_num_seqs=64), DEVICE)


@pytest.mark.parametrize(("priority", "least_s", "most_s"), [(0, 0.8, 3.0), (10, 0.2, 0.5)])
def test_the_first_token_of_a_higher_tier_does_not_wait_for_the_pace_of_a_lower_one(
    priority: int, least_s: float, most_s: float
) -> None:
    # Early, so that nobody has anything in hand: as soon as the first tokens are there.
    (late,) = beside(Arrival(0.6, 128, 8, "late", "late", priority)).of("late")
    assert late.ttft_s is not None
    assert least_s <= late.ttft_s <= most_s


def test_a_short_prompt_does_not_wait_until_there_is_time_for_a_large_chunk() -> None:
    (short,) = beside(Arrival(5.0, 20, 8, "short", "short", 0)).of("short")
    (large,) = beside(Arrival(5.0, 400, 8, "large", "large", 0)).of("large")
    assert short.ttft_s is not None
    assert large.ttft_s is not None
    assert short.ttft_s < 0.4 < large.ttft_s


class Uneven(MeasuredDevice):
    """A device whose steps take up to a sixth more or less than they should."""

    def seconds(self, plan: SchedulerOutput) -> float:
        return super().seconds(plan) * (1 + (plan.step_id * 7919 % 101 - 50) / 300)


def test_the_pace_is_kept_on_a_device_that_cannot_be_foreseen() -> None:
    arrivals = [Arrival(0.0, 256, 64, "tier", "all", tpot_target_s=0.2) for _ in range(STREAMS)]
    outcome = simulate(arrivals, SchedulerConfig(max_num_seqs=64), Uneven())
    assert max(each.tpot_s or math.inf for each in outcome.served) <= 0.2


def test_prompts_that_are_late_have_as_much_of_the_time_as_answers() -> None:
    assert mean_ttft_s(burst(0.1, ttft_s=2.0)) < 0.8 * mean_ttft_s(burst(0.1))


def tpot_overlapped_s(tpot_s: float) -> tuple[float, list[float]]:
    """Mean time per token of the slowest of 32 answers, where each plan is made while a step runs; and by how
    much each step began earlier or later than was expected, as a part of what it took.
    """
    errors = []
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=64), CacheConfig(prefix_caching=False), DEVICE.memory(), model="m"
    )
    times: dict[int, list[float]] = {}
    for index in range(STREAMS):
        request = Request(
            request_id=index,
            external_id=str(index),
            prompt_token_ids=tuple(range(index * 256, index * 256 + 256)),
            sampling=SamplingParams(max_tokens=128),
            tpot_target_s=tpot_s,
        )
        scheduler.submit(request, 0.0)
    now, running = 0.0, None
    while scheduler.has_work:
        begins_s = StepRoom(scheduler._state).starts_s(now)
        plan = scheduler.schedule(now)
        if running is not None:
            result, now = running
            scheduler.update(result, now)
            for event in scheduler.drain_events():
                times.setdefault(event.request_id, []).extend([now] * len(event.token_ids))
        running = (plan_result(plan), now + DEVICE.seconds(plan)) if plan.scheduled else None
        if running is not None:
            errors.append(abs(begins_s - now) / DEVICE.seconds(plan))
        if running is None and plan.released:
            scheduler.update(plan_result(plan), now)
    return max((each[-1] - each[0]) / (len(each) - 1) for each in times.values()), errors


@pytest.mark.parametrize("tpot_s", [0.15, 0.2])
def test_the_pace_is_kept_where_plans_are_made_while_a_step_runs(tpot_s: float) -> None:
    slowest_s, errors = tpot_overlapped_s(tpot_s)
    assert slowest_s <= tpot_s
    assert sorted(errors)[int(0.9 * len(errors))] < 0.1, "a plan knows when its step will begin"


def busy(**config: object) -> Driver:
    """Four answers whose pace is beyond reach, with a batch for four; a step takes 0.1 s."""
    driver = Driver(
        memory=memory_plan(1600, 16, 800), max_num_batched_tokens=600, max_num_seqs=4, step_s=0.1, **config
    )
    driver.runner.compute_s = 0.1
    for index in range(4):
        driver.submit([index] * 8, max_tokens=60, tpot_target_s=0.01)
    for _ in range(8):
        driver.step()
    return driver


@pytest.mark.parametrize("fields", [{"priority": 5}, {"tenant": "other"}])
def test_who_takes_a_slot_from_somebody_does_not_wait_for_a_pace(fields: dict[str, object]) -> None:
    driver = busy()
    urgent = driver.submit([9] * 8, max_tokens=2, **fields)
    driver.step()
    assert driver.events[urgent], "computed with the next step"
    driver.run()
    driver.check_everything()


def test_after_a_preemption_the_pace_begins_anew() -> None:
    driver = busy()
    # The newest loses its slot, and has it back when the urgent ones have ended.
    for index in range(3):
        driver.submit([20 + index] * 8, max_tokens=10, priority=5)
    for _ in range(30):
        driver.step()
    running = driver.scheduler._state.running
    back = [each for each in running if each.took.num_preemptions]
    assert back
    for each in back:
        assert each.pace_start is not None
        assert each.first_token_s is not None
        assert each.pace_start[0] > each.first_token_s
        assert each.pace_start[1] > each.num_prompt_tokens + 1


@pytest.mark.parametrize("options", [{"beam_width": 2}, {"n": 1, "best_of": 2}])
def test_an_answer_that_is_sent_at_its_end_has_no_pace(options: dict[str, int]) -> None:
    driver = Driver(
        memory=memory_plan(1600, 16, 800),
        max_num_batched_tokens=600,
        long_prefill_tokens=500,
        step_target_ms=0.0,
    )
    driver.submit([1] * 8, max_tokens=40, tpot_target_s=0.001, temperature=1.0, **options)  # type: ignore[arg-type]
    for _ in range(5):
        driver.step()
    driver.submit([2] * 400, max_tokens=2)
    driver.step()
    assert max(row.num_tokens for row in driver.plans[-1].scheduled) == 400


def test_a_prompt_that_waits_for_the_pace_of_answers_says_so() -> None:
    driver = Driver(memory=memory_plan(1600, 16, 800), max_num_batched_tokens=600, max_num_seqs=8, step_s=0.1)
    driver.runner.compute_s = 0.1
    for index in range(4):
        driver.submit([index] * 8, max_tokens=60, tpot_target_s=0.11)
    for _ in range(8):
        driver.step()
    late = driver.submit([9] * 300, max_tokens=2)
    begun_s = driver.now
    (sequence,) = driver.scheduler._state.groups[late].sequences
    while not driver.events[late]:
        driver.step()
    held_s = sequence.took.delayed_by_s[ANSWER_PACE]
    assert 0.1 <= held_s <= driver.now - begun_s
    assert sum(sequence.took.delayed_by_s.values()) <= driver.now - begun_s
    # Whose prompts were computed at once were not held back.
    for request_id, group in driver.scheduler._state.groups.items():
        if request_id != late:
            assert ANSWER_PACE not in group.sequences[0].took.delayed_by_s
    driver.run()
