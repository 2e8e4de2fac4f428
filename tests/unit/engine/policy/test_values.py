"""Policies answer from values alone: no scheduler, no sequence and no cache take part."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import SchedulerConfig
from engine.policy.isolation import FailureIsolation
from engine.policy.line import Line, Waiter
from engine.policy.shares import Account, Shares
from engine.types import Request, SamplingParams

LOW, HIGH = 0, 10


@dataclass(frozen=True)
class Record:
    """What runs."""

    account: Account
    boosted: bool = False
    sequence_id: int = 0
    num_confirmed: int = 0
    is_finished: bool = False


def waiter(number: int, tenant: str = "a", priority: int = LOW, **fields: float) -> Waiter:
    request = Request(
        request_id=number,
        external_id=str(number),
        prompt_token_ids=(1, 2, 3),
        sampling=SamplingParams(),
        tenant=tenant,
        priority=priority,
        **fields,  # type: ignore[arg-type]
    )
    return Waiter(number, request, (number, 0), num_slots=1, num_tokens=3, prompt_s=0.0)


def in_order(line: Line, now: float) -> list[int]:
    found = []
    while (first := line.first(now, set())) is not None:
        line.admitted(first, now)
        found.append(first)
    return found


def test_tier_then_service_then_slots_then_slack_then_arrival() -> None:
    shares = Shares(output_token_cost=2.0, band_tokens=10)
    line = Line(SchedulerConfig(aging_s=1000.0), shares)
    shares.acquire((LOW, "holds"), 1.0)
    for each in (
        waiter(1, "served"),
        waiter(2, "holds"),
        waiter(3, ttft_deadline_s=9.0),
        waiter(4, ttft_deadline_s=5.0),
        waiter(5, ttft_deadline_s=5.0),
        waiter(6, "z", HIGH),
        waiter(7, ttft_deadline_s=0.5),
    ):
        shares.enter((each.request.priority, each.request.tenant))
        line.push(each)
    shares.charge((LOW, "served"), 1.0, 5, 10)
    # The seventh can no longer meet its deadline.
    assert in_order(line, 1.0) == [6, 4, 5, 3, 7, 2, 1]
    assert len(line) == line.pending_tokens == 0


def test_the_aged_and_the_due_come_before_higher_tiers() -> None:
    line = Line(SchedulerConfig(aging_interval=2, aging_s=30.0), Shares(2.0, 10))
    for each in (waiter(1), waiter(2, queue_deadline_s=60.0), waiter(3, "a", HIGH), waiter(4, "a", HIGH)):
        line.push(each)
    assert line.first(50.0, set()) == 2
    assert line.first(50.0, set(), with_due=False) == 3
    assert not line.admitted(3, 50.0)
    assert line.admitted(1, 50.0), "one of two admissions"


def test_lower_tiers_make_room_and_then_the_newest_of_who_holds_more() -> None:
    shares, mine = Shares(2.0, 10), (HIGH, "mine")
    kept = Record((HIGH, "many"), boosted=True)
    many = [Record((HIGH, "many"), sequence_id=number) for number in range(3)]
    low = Record((LOW, "mine"))
    running = [kept, *many, low]
    for each in running:
        shares.acquire(each.account, 1.0)
    assert list(shares.victims(mine, 1.0, running, lambda _: True)) == [low, *reversed(many)]
    assert next(shares.victims(mine, 1.0, running, lambda each: each is not low)) is many[-1]
    shares.acquire(mine, 1.0)
    assert dict(shares.donors(mine, 1.0)) == {(HIGH, "many"): 2}
    shares.enter(mine)
    shares.enter((HIGH, "many"))
    shares.charge(mine, 1.0, 100, 0)
    assert not dict(shares.donors(mine, 1.0)), "it was served more"


def test_suspects_are_halved_until_one_fails_alone() -> None:
    isolation: FailureIsolation[Record] = FailureIsolation()
    rows = [Record((LOW, "a"), sequence_id=number) for number in range(4)]
    assert isolation.failed([(each, 5) for each in rows], "why")
    assert isolation.allowed() == {0, 1}
    assert isolation.failed([(each, 5) for each in rows[:2]], "why")
    assert isolation.allowed() == {0}
    assert not isolation.wants_probe
    assert isolation.failed([(rows[0], 5)], "why")
    assert isolation.wants_probe
    good = Record((LOW, ""), sequence_id=9)
    isolation.probe(good)
    assert isolation.allowed() == {9}
    assert not isolation.wants_probe
    assert isolation.succeeded() == [(rows[0], "why")]


def test_a_probe_that_fails_says_that_it_is_the_runner() -> None:
    isolation: FailureIsolation[Record] = FailureIsolation()
    accused, good = (Record((LOW, "a"), sequence_id=number) for number in range(2))
    assert isolation.failed([(accused, 5)], "why")
    isolation.probe(good)
    assert not isolation.failed([(good, 1)], "why")
