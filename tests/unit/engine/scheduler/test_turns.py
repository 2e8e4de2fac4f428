"""Who was refused keeps a turn: it is taken in when it is back as told, and nobody loses by that."""

from __future__ import annotations

import random
import re

import pytest

from benchmarks.engine.virtual import Arrival, Device, Served, simulate
from engine.config import SchedulerConfig
from engine.policy.tickets import OPEN_S, Tickets
from engine.types import FinishReason
from tests.unit.engine.driver import Driver

PROMPT = [5, 9, 2, 7, 1, 1, 3, 8]
LIMIT_S = 1.0


class Door:
    """One place that takes 0.1 s for a request, and a line before it as long as the limit allows."""

    def __init__(self) -> None:
        self.driver = Driver(max_num_seqs=1, max_waiting=10_000, fairness_band_tokens=32)
        self.num_asked = 0
        # Until speed and turnover are known.
        for _ in range(20):
            self.driver.submit(self.new(), max_tokens=10)
        self.driver.run()

    def new(self) -> list[int]:
        """A prompt like no other."""
        self.num_asked += 1
        return [*PROMPT, self.num_asked % 90, self.num_asked // 90]

    def ask(self, prompt: list[int], tenant: str = "a") -> float | None:
        """How long the request was told to stay away; None when it was accepted."""
        driver = self.driver
        request = driver.submit(prompt, max_tokens=10, tenant=tenant, queue_deadline_s=driver.now + LIMIT_S)
        failure = driver.events[request][0].failure if driver.events[request] else None
        return failure.retry_after_s if failure else None

    def fill(self) -> tuple[list[int], float]:
        """Asks until a request is refused; that one, and what it was told."""
        for _ in range(100):
            prompt = self.new()
            told_s = self.ask(prompt)
            if told_s is not None:
                return prompt, told_s
        raise AssertionError("the door is never full")

    def pass_s(self, seconds: float, *, flooded_by: str = "") -> list[float | None]:
        """Lets time pass, in which a tenant may ask with every step; what it was told."""
        told, until_s = [], self.driver.now + seconds
        while self.driver.now < until_s:
            if flooded_by:
                told.append(self.ask(self.new(), flooded_by))
            self.driver.step()
        return told


def test_who_is_back_as_told_goes_before_newcomers() -> None:
    door = Door()
    refused, told_s = door.fill()
    door.pass_s(told_s, flooded_by="a")
    assert door.ask(door.new()) is not None
    assert door.ask(refused) is None
    assert door.ask(refused) is not None, "a turn is used once"
    door.driver.run()
    door.driver.check_everything()


def test_a_turn_is_its_tenants_and_its_requests_alone() -> None:
    door = Door()
    refused, told_s = door.fill()
    for _ in range(3):
        door.fill()
    # The other tenant's line is as full.
    while door.ask(door.new(), "b") is None:
        pass
    door.pass_s(told_s, flooded_by="b")
    assert door.ask(refused, "b") is not None, "nobody takes it by sending the same prompt"
    assert door.ask(refused) is None


def test_many_that_come_back_as_told_are_taken_in_the_order_of_their_refusals() -> None:
    door = Door()
    due = []
    for _ in range(20):
        refused, told_s = door.fill()
        due.append((door.driver.now + told_s, refused))
    assert [each for _, each in sorted(due)] == [each for _, each in due]
    assert due[-1][0] - due[0][0] == pytest.approx(1.9, rel=0.5), "a place takes 0.1 s"
    accepted = 0
    for due_s, refused in due:
        door.pass_s(max(0.0, due_s - door.driver.now))
        accepted += door.ask(refused) is None
    assert accepted >= 18
    door.driver.run()
    door.driver.check_everything()


def test_turns_that_nobody_comes_back_for_hold_up_nobody() -> None:
    door = Door()
    for _ in range(60):
        door.fill()
    told = door.pass_s(20.0, flooded_by="b")
    # 200 places, less those that were taken before.
    assert sum(each is None for each in told) >= 180
    told_last = [each for each in told[-200:] if each is not None]
    assert max(told_last) <= 2.0, "what does not come back is no longer counted on"
    turns = door.driver.scheduler._door.tickets
    door.pass_s(60.0 + OPEN_S)
    turns.open_slots(0, door.driver.now)
    assert not any(line.tickets for line in turns._lines.values())


def at_once(rng: random.Random) -> list[Arrival]:
    """Four hundred requests in one moment, a third of each tier."""
    tiers = [("interactive", 20, 2.0), ("standard", 10, 6.0), ("batch", 0, None)]
    names = [tiers[index % 3] for index in range(400)]
    rng.shuffle(names)
    return [
        Arrival(1.0, 128, 64, tier, "t", priority, limit_s, limit_s, prompt=index)
        for index, (tier, priority, limit_s) in enumerate(names)
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_of_many_at_once_those_refused_are_told_what_happens_and_come_before_lower_tiers(seed: int) -> None:
    told: dict[int, list[tuple[float, float]]] = {}

    def follows(one: Served) -> list[Arrival]:
        if one.accepted or one.retry_after_s is None:
            return []
        arrival = one.arrival
        told.setdefault(arrival.prompt or 0, []).append((arrival.at_s, one.retry_after_s))
        return [Arrival(**{**vars(arrival), "at_s": arrival.at_s + one.retry_after_s})]

    # The engine has worked before: 14 requests a second.
    warm = [Arrival(0.0, 128, 64, "batch", "t", 0) for _ in range(32)]
    device, config = Device(step_s=0.006, token_s=0.0001), SchedulerConfig(max_num_seqs=16)
    served = simulate([*warm, *at_once(random.Random(seed))], config, device, follows=follows).served
    assert all(each.finish is FinishReason.LENGTH for each in served if each.accepted)
    assert sum(each.accepted for each in served) == len(warm) + 400, "everybody is served in the end"
    times = {
        tier: [each.token_times_s[0] for each in served if each.accepted and each.arrival.kind == tier]
        for tier in ("interactive", "standard", "batch")
    }
    means = [sum(each) / len(each) for each in times.values()]
    assert means == sorted(means), "a tier that may be refused comes before one that waits"
    assert max(times["standard"]) < max(times["batch"])
    # Again, if more of a higher tier came in the same moment than had when it asked.
    assert max(len(each) for each in told.values()) <= 6
    assert sum(len(each) == 1 for each in told.values()) > len(told) / 2


def test_the_sentence_of_a_refusal_is_true() -> None:
    driver = Driver(max_num_seqs=2, max_waiting=10_000)
    messages = []
    for index in range(12):
        request = driver.submit(
            [*PROMPT, index], max_tokens=10, priority=5, tier="top", queue_deadline_s=driver.now + 1.0
        )
        failure = driver.events[request][0].failure if driver.events[request] else None
        if failure:
            messages.append(failure.message)
    assert messages
    assert all("how fast this engine is has yet to be measured" in each for each in messages)
    assert all("try again in 1.0 s" in each for each in messages)
    driver.run()
    assert all(re.search("higher", each) is None for each in messages)


def test_who_is_refused_again_is_told_to_come_behind_those_who_asked_before_and_are_due_as_well() -> None:
    turns, account = Tickets(), (0, "a")
    # The last one was told too little, as forecasts err: it is back before those who asked before it.
    for asked_s, prompt, due_s in ((0.0, 1, 4.0), (0.5, 2, 4.0), (1.0, 3, 3.0)):
        turns.refuse(account, prompt, 1, due_s, asked_s)

    def line_s(prompt: int) -> float:
        return turns.line_s(account, prompt, 100, 4.5, 2.0)

    assert line_s(1) == 0.0
    assert line_s(2) > 0.0
    assert line_s(3) == pytest.approx(2 * line_s(2)), "the two that are due and have not come go before it"
    turns.refuse(account, 1, 1, 9.0, 4.5)
    assert line_s(3) == pytest.approx(2 * line_s(2)), "who was sent away again keeps its place"


def test_what_a_refusal_tells_goes_by_the_pace_at_which_the_tier_gets_places() -> None:
    turns, account, other = Tickets(), (0, "a"), (0, "b")
    assert turns.wait_s(0, 4, 0.0, 8.0) == 8.0, "nobody was sent away"
    for prompt in range(3):
        turns.refuse(account, prompt, 1, 100.0, 0.0)
        turns.refuse(other, prompt, 1, 100.0, 0.0)
    assert turns.wait_s(0, 4, 0.0, 8.0) == 8.0, "nobody was accepted since"
    for second in range(1, 61):
        turns.accept(account, -1, 1, 100.0, float(second))
        turns.accept(other, -1, 1, 100.0, float(second))
    # Two places a second, though what comes free, less what others take, would have been half of one.
    assert turns.wait_s(0, 4, 60.0, 8.0) == pytest.approx(2.0, rel=0.2)
    assert turns.wait_s(1, 4, 60.0, 8.0) == 8.0, "another tier's pace is its own"
