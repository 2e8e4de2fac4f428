"""A step is as long as those who are answered in it can bear, and prompts are never left out for good."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.policy.pace import AIM, LONGEST_GAP, Answers, Pace, PromptsLeft, StepLimits, chunk_work, pace_of
from engine.policy.rates import LEAST_CHUNK_PER_DECODE, LEAST_CHUNK_TOKENS
from engine.policy.step_time import StepTime

LOW, HIGH = 0, 10
NOW = 100.0


def device(answers_s: float = 0.1, chunk_s: float = 0.09, token_s: float = 0.001) -> StepTime:
    """A step of answers takes the first time, a chunk adds the second, and for each token the third."""
    time = StepTime()
    for decodes in (1, 8) * 5:
        time.observe(decodes, 0, answers_s)
    for chunk in (32, 512) * 5:
        time.observe(8, chunk, answers_s + chunk_s + token_s * chunk)
    return time


def answers(*paces: Pace) -> Answers:
    return Answers(num_rows=8, work=8.0, paces=paces, starts_s=NOW)


def pace(target_s: float, in_hand_s: float = 0.0, priority: int = LOW) -> Pace:
    return Pace(priority, target_s, NOW + target_s + in_hand_s)


def prompts(
    work: float = 10_000.0, *, waited_s: float = 0.0, is_late: bool = False, tier: int = LOW
) -> PromptsLeft:
    return PromptsLeft(tier, work, waited_s, is_late)


def step_s(time: StepTime, work: float) -> float:
    return time.decode_s(8.0) + time.chunk_s(work)


devices = st.builds(
    device,
    answers_s=st.floats(0.001, 1.0),
    chunk_s=st.floats(0.0, 0.5),
    token_s=st.floats(1e-5, 0.05),
)
paces = st.lists(
    st.builds(pace, st.floats(0.005, 3.0), st.floats(-20.0, 20.0), st.sampled_from((LOW, HIGH))),
    min_size=1,
    max_size=5,
)
limits = st.sampled_from((0.0, 0.075, 1.0))


@given(devices, paces, st.floats(1.0, 1e5), limits)
def test_no_step_is_longer_than_an_answer_can_bear(
    time: StepTime, owed: list[Pace], work: float, limit_s: float
) -> None:
    """But for the share that prompts have in any case: they have not waited for it here."""
    found = chunk_work(time, answers(*owed), prompts(work), StepLimits(limit_s))
    decode_s = time.decode_s(8.0)
    for each in owed if found else ():
        # One that the answers alone cannot keep binds a step by three times theirs.
        bound_s = each.gap_s(NOW) if each.target_s > decode_s else LONGEST_GAP * decode_s
        assert step_s(time, found) <= bound_s * (1 + 1e-6)


@given(devices, st.floats(0.005, 3.0), st.floats(1.0, 1e5), st.floats(0.0, 100.0), st.booleans(), limits)
def test_without_anything_in_hand_the_target_is_kept_where_a_smaller_chunk_would_have_kept_it(
    time: StepTime, target_s: float, work: float, waited_s: float, is_late: bool, limit_s: float
) -> None:
    asked = prompts(work, waited_s=waited_s, is_late=is_late)
    found = chunk_work(time, answers(pace(target_s)), asked, StepLimits(limit_s))
    if found and step_s(time, found) > target_s * (1 + 1e-6):
        # Prompts make up for what they have waited, with half of the time at most, in small chunks.
        assert time.chunk_s(found) <= waited_s * (1 + 1e-6)
        assert found <= max(LEAST_CHUNK_TOKENS, time.chunk_at(0.75)) * (1 + 1e-6)


@given(devices, paces, st.floats(1.0, 1e5), limits)
def test_prompts_are_not_left_out_for_longer_than_three_times_what_they_take(
    time: StepTime, owed: list[Pace], work: float, limit_s: float
) -> None:
    worth_it = min(work, max(LEAST_CHUNK_TOKENS, time.chunk_at(0.75)))
    asked = prompts(work, waited_s=3.0 * time.chunk_s(worth_it))
    found = chunk_work(time, answers(*owed), asked, StepLimits(limit_s))
    assert found >= min(work, LEAST_CHUNK_TOKENS)
    assert found >= min(work, time.chunk_at(0.5)) * (1 - 1e-6)


@given(devices, st.floats(1.0, 1e5))
def test_with_nobody_who_minds_the_whole_step_is_for_prompts(time: StepTime, work: float) -> None:
    assert chunk_work(time, answers(), prompts(work), StepLimits(0.0)) == math.inf
    found = chunk_work(time, answers(), prompts(work), StepLimits(1.0))
    decode_s = time.decode_s(8.0)
    least = max(LEAST_CHUNK_TOKENS, LEAST_CHUNK_PER_DECODE * 8, time.chunk_at(0.5))
    # No more than the limit, or than the answers take.
    assert found == pytest.approx(least) or step_s(time, found) == pytest.approx(max(1.0, 2 * decode_s))


@given(devices, st.floats(0.2, 3.0), st.floats(0.0, 10.0), st.floats(0.0, 10.0), st.floats(1.0, 1e5))
def test_more_in_hand_never_makes_a_step_shorter(
    time: StepTime, target_s: float, less_s: float, more_s: float, work: float
) -> None:
    one, other = (
        chunk_work(time, answers(pace(target_s, in_hand_s)), prompts(work), StepLimits(1.0))
        for in_hand_s in (less_s, less_s + more_s)
    )
    assert other >= one


def test_prompts_wait_until_answers_are_far_enough_ahead_for_the_full_rate() -> None:
    time = device()
    # 100 ms of 200 are left: 10 tokens, at a tenth of the rate that 800 have.
    assert chunk_work(time, answers(pace(0.2)), prompts(), StepLimits(1.0)) == 0.0
    assert chunk_work(time, answers(pace(0.2, 0.2)), prompts(), StepLimits(1.0)) == 0.0
    # No gap is longer than three targets: that is as much as can ever be in one step.
    assert chunk_work(time, answers(pace(0.2, 0.4)), prompts(), StepLimits(1.0)) == pytest.approx(410)
    assert chunk_work(time, answers(pace(0.2, 9.0)), prompts(), StepLimits(1.0)) == pytest.approx(410)
    # Who has little to compute waits for no more than that takes.
    assert chunk_work(time, answers(pace(0.2, 0.05)), prompts(60), StepLimits(1.0)) == pytest.approx(60)


def test_an_answer_that_is_behind_catches_up_and_is_not_waited_for_when_that_cannot_be() -> None:
    assert pace(0.2, -0.03).gap_s(NOW) == pytest.approx(0.17)
    assert pace(0.2, -0.3).gap_s(NOW) == pytest.approx(0.15)
    assert pace(0.2, -5.0).gap_s(NOW) == pytest.approx(0.2)


def test_the_pace_counts_from_the_first_token_and_is_a_little_faster_than_the_target() -> None:
    found = pace_of(LOW, 0.2, NOW, 10)
    assert found.target_s == pytest.approx(AIM * 0.2)
    assert found.due_s == pytest.approx(NOW + 10 * AIM * 0.2)


def test_the_pace_of_a_lower_tier_does_not_hold_up_a_higher_one() -> None:
    time, owed = device(), answers(pace(0.2))
    assert chunk_work(time, owed, prompts(), StepLimits(1.0)) == 0.0
    # But three targets are the longest step for anybody.
    assert chunk_work(time, owed, prompts(tier=HIGH), StepLimits(1.0)) == pytest.approx(410)


def test_a_pace_that_answers_alone_cannot_have_does_not_bind_those_that_they_can() -> None:
    time, hopeless = device(), pace(0.06)
    assert chunk_work(time, answers(hopeless), prompts(), StepLimits(1.0)) == 0.0
    # Three times the step that the answers have alone.
    assert chunk_work(time, answers(hopeless, pace(0.3, 5.0)), prompts(), StepLimits(1.0)) == pytest.approx(
        110
    )


@pytest.mark.parametrize(
    ("owed", "is_late", "tier", "share", "tokens"),
    [
        (pace(0.11), False, LOW, 0.25, 90),
        (pace(0.11), True, LOW, 0.5, 270),
        # Answers of a higher tier are not made late by prompts that are.
        (pace(0.11, priority=HIGH), True, LOW, 0.25, 90),
        (pace(0.06), False, LOW, 0.5, 270),
    ],
)
def test_prompts_that_waited_have_their_part_of_the_time(
    owed: Pace, is_late: bool, tier: int, share: float, tokens: int
) -> None:
    time = device()
    waits_s = (1 / share - 1) * time.chunk_s(tokens)
    for waited_s, expected in ((0.99 * waits_s, 0.0), (1.01 * waits_s, tokens)):
        asked = prompts(waited_s=waited_s, is_late=is_late, tier=tier)
        assert chunk_work(time, answers(owed), asked, StepLimits(1.0)) == pytest.approx(expected)


def test_while_nothing_was_measured_nothing_is_held_back() -> None:
    assert chunk_work(StepTime(), answers(pace(0.2)), prompts(), StepLimits(1.0)) == math.inf


@pytest.mark.parametrize(("chunk_s", "tokens"), [(0.0, 150), (0.04, 120), (0.2, 600), (0.5, 1500)])
def test_beside_neighbours_a_step_is_short_unless_that_makes_prompts_slow(
    chunk_s: float, tokens: int
) -> None:
    """100 ms for answers, and as many for prompts; or what three quarters of their best rate takes."""
    time, limits = device(chunk_s=chunk_s, token_s=0.001), StepLimits(3.0, 0.25)
    asked = prompts()._replace(has_neighbours=True)
    found = chunk_work(time, answers(), asked, limits)
    assert found == pytest.approx(tokens, rel=0.01)
    assert chunk_work(time, answers(), prompts(), limits) > found
    # Never longer than any step.
    assert chunk_work(time, answers(), asked, StepLimits(0.2, 0.25)) <= found
