"""Overload is refused from the lowest tier up, with a time that measured rates support."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import AdmissionConfig, TierConfig
from gateway.overload import Admission, EngineQueue, StartRate
from gateway.tiers import Tier
from services.errors import MillraceError, Reason

GOLD = Tier("gold", TierConfig(priority=2, queue_limit_ms=10_000))
SILVER = Tier("silver", TierConfig(priority=1))
BATCH = Tier("batch", TierConfig(priority=0))
TIERS = {tier.name: tier for tier in (GOLD, SILVER, BATCH)}
# Sheds batch at 10 s of waiting work, silver at 20 s, gold at 30 s.
CONFIG = AdmissionConfig(max_backlog_s=30.0, rate_memory_s=10.0)
IDLE = EngineQueue(
    num_running=1, num_waiting=0, max_num_seqs=8, pending_prefill_tokens=0, prefill_tokens_per_s=1000.0
)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def admission(clock: Clock | None = None) -> Admission:
    return Admission(TIERS, CONFIG, clock=clock or Clock())


def queue(backlog_s: float) -> EngineQueue:
    return replace(IDLE, num_waiting=3, pending_prefill_tokens=round(backlog_s * 1000))


def refusal(subject: Admission, tier: Tier, *queues: EngineQueue) -> MillraceError:
    with pytest.raises(MillraceError) as caught:
        subject.admit(tier, 100, queues)
    assert caught.value.reason is Reason.QUEUE_LIMIT_EXCEEDED
    return caught.value


def test_free_engine_takes_everybody_at_once() -> None:
    for tier in TIERS.values():
        assert admission().admit(tier, 100_000, [queue(1000), IDLE]).wait_s == 0.0


def test_nothing_measured_refuses_nobody() -> None:
    unknown = replace(queue(1000), prefill_tokens_per_s=0.0)
    assert admission().admit(BATCH, 100, [unknown]).wait_s == 0.0


@pytest.mark.parametrize(
    ("backlog_s", "taken"),
    [(9.0, ["gold", "silver", "batch"]), (11.0, ["gold", "silver"]), (21.0, ["gold"]), (31.0, [])],
)
def test_lowest_tier_is_shed_first(backlog_s: float, taken: list[str]) -> None:
    subject = admission()
    # Nothing of gold's own waits, so that its queue limit is kept.
    subject.enter(BATCH)
    got = []
    for tier in TIERS.values():
        try:
            subject.admit(tier, 1, [queue(backlog_s)])
            got.append(tier.name)
        except MillraceError:
            pass
    assert got == taken


def test_come_back_when_the_excess_is_worked_off() -> None:
    error = refusal(admission(), BATCH, queue(14.0), queue(17.0))
    assert error.retry_after_s == pytest.approx(4.0)
    assert error.metadata["backlog_ms"] == "14000"


def test_own_tiers_wait_is_limited() -> None:
    subject = admission()
    subject.enter(GOLD)
    subject.enter(BATCH)
    assert subject.admit(GOLD, 100, [queue(19.0)]).wait_s == pytest.approx(9.6)
    error = refusal(subject, GOLD, queue(20.0))
    assert error.metadata["queue_limit_ms"] == "10000"
    assert error.metadata["expected_wait_ms"] == "10100"
    assert error.retry_after_s == 0.25


def test_full_engine_is_judged_by_how_fast_it_starts_requests() -> None:
    clock = Clock()
    subject = admission(clock)
    for _ in range(50):
        clock.now_s += 0.5
        subject.enter(SILVER).started()
    full = replace(IDLE, num_running=8, num_waiting=30)
    estimate = subject.admit(SILVER, 10, [full])
    # Two a second are started and 30 are ahead.
    assert estimate.wait_s == pytest.approx(15.5, rel=0.1)
    assert estimate.position == 30
    assert refusal(subject, BATCH, full).retry_after_s == pytest.approx(5.0, abs=1.0)


def test_ticket_counts_once() -> None:
    subject = admission()
    ticket = subject.enter(GOLD)
    ticket.started()
    ticket.started()
    ticket.ended()
    assert subject.estimate(GOLD, 1, [queue(1.0)]).position == 3
    assert subject._waiting == {2: 0}


@given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=200), st.floats(0.1, 20.0))
def test_rate_lies_between_the_slowest_and_the_fastest_pace(gaps_s: list[float], memory_s: float) -> None:
    clock = Clock()
    rate = StartRate(memory_s, clock)
    for gap_s in gaps_s:
        clock.now_s += gap_s
        rate.started()
    measured = rate.per_s()
    assert measured == 0.0 or measured > 0
    clock.now_s += 50 * memory_s
    assert rate.per_s() == 0.0


@given(st.floats(0, 100), st.floats(0, 100), st.sampled_from(list(TIERS.values())))
def test_more_work_never_helps(one_s: float, other_s: float, tier: Tier) -> None:
    less, more = sorted((one_s, other_s))
    subject = admission()
    try:
        subject.admit(tier, 10, [queue(less)])
    except MillraceError:
        refusal(subject, tier, queue(more + 0.01))
