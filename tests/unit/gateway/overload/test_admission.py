"""Overload is refused from the lowest tier up, with a time that measured rates support."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.errors import MillraceError, Reason
from gateway.config import AdmissionConfig, TierConfig
from gateway.overload import Admission, EngineQueue, WaitingLine
from gateway.tiers import Tier

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
    assert error.metadata["backlog_s"] == "14.000"


def test_own_tiers_wait_is_limited() -> None:
    subject = admission()
    # Half of what waits is gold's.
    subject.enter(GOLD)
    subject.enter(BATCH)
    assert subject.admit(GOLD, 100, [queue(19.0)]).wait_s == pytest.approx(9.6)
    error = refusal(subject, GOLD, queue(20.0))
    assert error.metadata["queue_limit_s"] == "10.000"
    assert error.metadata["expected_wait_s"] == "10.100"
    assert error.retry_after_s == 0.25


def test_full_engine_is_judged_by_how_fast_it_starts_requests() -> None:
    clock = Clock()
    subject = admission(clock)
    waiting = [subject.enter(SILVER) for _ in range(130)]
    for _ in range(100):
        clock.now_s += 0.5
        waiting.pop().started()
    full = replace(IDLE, num_running=8, num_waiting=30)
    estimate = subject.estimate(SILVER, 10, [full])
    # Two a second are started and 30 are ahead.
    assert estimate.wait_s == pytest.approx(15.5, rel=0.1)
    assert estimate.position == 30
    assert refusal(subject, BATCH, full).retry_after_s == pytest.approx(5.0, abs=1.5)
    # Gold goes first, whatever waits below it.
    assert subject.admit(GOLD, 10, [full]).position == 0


def test_tier_gets_what_higher_ones_leave_over() -> None:
    clock = Clock()
    subject = admission(clock)
    full = replace(IDLE, num_running=8, num_waiting=1)
    silver = subject.enter(SILVER)
    for _ in range(200):
        gold = subject.enter(GOLD)
        clock.now_s += 0.1
        gold.started()
    # Gold is served at once, silver has waited for 20 s and still does.
    assert subject.estimate(GOLD, 1, [full]).wait_s < 0.2
    assert subject.estimate(SILVER, 1, [full]).wait_s > 5.0
    silver.ended()


def test_idle_time_says_nothing_about_the_pace() -> None:
    clock = Clock()
    subject = admission(clock)
    full = replace(IDLE, num_running=8, num_waiting=1)
    for _ in range(50):
        ticket = subject.enter(SILVER)
        clock.now_s += 0.1
        ticket.started()
        clock.now_s += 100.0
    assert subject.estimate(SILVER, 1, [full]).wait_s == pytest.approx(0.1, rel=0.1)


def test_ticket_counts_once() -> None:
    subject = admission()
    ticket = subject.enter(GOLD)
    ticket.started()
    ticket.started()
    ticket.ended()
    assert subject.estimate(GOLD, 1, [queue(1.0)]).position == 0


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=200), st.integers(1, 50))
def test_line_is_never_negative_and_longer_lines_wait_longer(
    steps: list[tuple[bool, float]], more: int
) -> None:
    clock = Clock()
    line = WaitingLine(10.0, clock)
    for enters, passed_s in steps:
        clock.now_s += passed_s
        if enters:
            line.enter()
        elif line.num_waiting:
            line.leave(started=True)
        assert line.wait_s(1) >= 0.0
        assert line.wait_s(1 + more) >= line.wait_s(1)


@given(st.floats(0, 100), st.floats(0, 100), st.sampled_from(list(TIERS.values())))
def test_more_work_never_helps(one_s: float, other_s: float, tier: Tier) -> None:
    less, more = sorted((one_s, other_s))
    subject = admission()
    try:
        subject.admit(tier, 10, [queue(less)])
    except MillraceError:
        refusal(subject, tier, queue(more + 0.01))
