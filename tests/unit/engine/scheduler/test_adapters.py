"""More adapters than slots: each comes by use, none stays for ever, nobody computes with a missing one."""

from __future__ import annotations

import random

import pytest

from engine.scheduler.adapters import AdapterSlots
from engine.types import SchedulerOutput
from tests.unit.engine.driver import Driver, memory_plan


class Loader:
    """Brings adapters after some steps; fails those that are named."""

    def __init__(self, *, delay_steps: int = 2) -> None:
        self.delay_steps = delay_steps
        self.failing: set[str] = set()
        self.slots: dict[int, str] = {}
        self.begun: list[str] = []
        self._under_way: list[list[int]] = []

    def begin(self, slot: int, name: str) -> None:
        assert slot not in [each[0] for each in self._under_way], "two at once"
        self.slots[slot] = ""
        self.begun.append(name)
        self._under_way.append([slot, self.delay_steps, len(self.begun) - 1])

    def finished(self) -> list[tuple[int, str]]:
        done = []
        for each in self._under_way:
            each[1] -= 1
            if each[1] <= 0:
                name = self.begun[each[2]]
                failed = name in self.failing
                self.slots[each[0]] = "" if failed else name
                done.append((each[0], f"{name} is broken" if failed else ""))
        self._under_way = [each for each in self._under_way if each[1] > 0]
        return done


class AdapterDriver(Driver):
    """A driver that checks that rows find their adapters in their slots."""

    def __init__(self, num_slots: int, **options: object) -> None:
        super().__init__(**options)  # type: ignore[arg-type]
        self.loader = Loader()
        self.scheduler._state.adapters = AdapterSlots(num_slots, self.loader)
        self.places: dict[int, tuple[str, int]] = {}
        launch = self.runner.launch

        def checked(plan: SchedulerOutput) -> object:
            for new in plan.new_sequences:
                self.places[new.sequence_id] = (new.adapter, new.adapter_slot)
            for row in plan.scheduled:
                name, slot = self.places[row.sequence_id]
                assert slot == -1 if not name else self.loader.slots[slot] == name
            return launch(plan)

        self.runner.launch = checked  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_slots", [1, 2])
def test_many_adapters_take_turns_in_few_slots(overlap: bool, num_slots: int) -> None:
    # So few blocks that sequences are preempted, and lose their adapters; and some steps fail.
    driver = AdapterDriver(num_slots, overlap=overlap, memory=memory_plan(num_blocks=20))
    rng = random.Random(num_slots)
    driver.runner.fault = lambda plan: "injected" if rng.random() < 0.03 else ""
    ids = [
        driver.submit(
            [rng.randrange(20) for _ in range(rng.randrange(1, 20))],
            max_tokens=rng.randrange(1, 9),
            n=rng.choice((1, 1, 2)),
            adapter=rng.choice(("", "a", "b", "c", "d", "e")),
            tenant=rng.choice("xy"),
            priority=rng.choice((0, 0, 1)),
        )
        for _ in range(60)
    ]
    driver.run()
    driver.check_everything()
    assert all(driver.finish(each) for each in ids)


def test_a_request_that_waits_for_its_adapter_says_so() -> None:
    driver = AdapterDriver(1)
    request_id = driver.submit([1, 2, 3], adapter="a")
    driver.run()
    end = driver.events[request_id][-1]
    assert list(end.statistics.delayed_by_s) == ["cold_adapter"]
    again = driver.submit([1, 2, 3], adapter="a")
    driver.run()
    assert not driver.events[again][-1].statistics.delayed_by_s
    assert driver.loader.begun == ["a"]


def test_no_stream_of_requests_keeps_a_slot_from_others() -> None:
    driver = AdapterDriver(1, max_num_seqs=4)
    waiting = 0
    for index in range(200):
        # More requests for "a" than there are places, all the time.
        while len(driver.scheduler._state.waiting) < 6:
            driver.submit([index % 20, 5], max_tokens=6, adapter="a")
        if index == 20:
            waiting = driver.submit([7], max_tokens=2, adapter="b")
        driver.step()
        if waiting and any(event.finish_reason for event in driver.events[waiting]):
            assert index < 60
            return
    raise AssertionError("b never came")


def test_others_go_on_while_an_adapter_is_loaded() -> None:
    driver = AdapterDriver(2)
    driver.loader.delay_steps = 50
    slow = driver.submit([1, 2], adapter="a")
    fast = [driver.submit([3, index], max_tokens=3) for index in range(40)]
    for _ in range(45):
        driver.step()
    assert all(any(event.finish_reason for event in driver.events[each]) for each in fast)
    assert not driver.events[slow]
    driver.run()
    driver.check_everything()


def test_an_adapter_that_cannot_be_loaded_fails_its_requests_alone() -> None:
    driver = AdapterDriver(1)
    driver.loader.failing = {"a"}
    failed = [driver.submit([1], adapter="a") for _ in range(2)]
    served = driver.submit([1], adapter="b")
    driver.run()
    for request_id in failed:
        failure = driver.events[request_id][-1].failure
        assert (failure.field, failure.message) == ("adapter", "a is broken")
    assert driver.tokens(served) == driver.expected(served)


def test_the_adapter_that_was_used_least_recently_leaves() -> None:
    driver = AdapterDriver(2)
    for name in ("a", "b", "a", "c", "a", "b"):
        driver.submit([1], adapter=name)
        driver.run()
    assert driver.loader.begun == ["a", "b", "c", "b"]
