"""Prefixes on disk: found again, read into blocks that nobody else uses, recomputed where damaged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine.driver import Driver, memory_plan
from tests.unit.engine.pretend_disk import PretendDisk
from tests.unit.engine.scheduler.test_walk import FAST, OPERATIONS, WINDOWS, Walk

PROMPT = list(range(1, 41))


def served(entries: dict[bytes, list[int | None]], **options: object) -> Driver:
    """A driver whose disk has done everything."""
    driver = Driver(disk=PretendDisk(entries=entries), **options)  # type: ignore[arg-type]
    driver.disk_share = 1.0
    return driver


def ask(driver: Driver, prompt: list[int] = PROMPT, **fields: object) -> int:
    """Serves one prompt; returns the tokens of it that were not computed."""
    request_id = driver.submit(prompt, max_tokens=4, **fields)
    driver.run()
    assert driver.tokens(request_id) == driver.expected(request_id)
    first = next(event.first_token for event in driver.events[request_id] if event.first_token)
    return first.cached_prompt_tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_another_engine_finds_the_prefix(overlap: bool, num_host_blocks: int) -> None:
    entries: dict[bytes, list[int | None]] = {}
    first = served(entries, overlap=overlap, num_host_blocks=num_host_blocks)
    assert ask(first) == 0
    # The last token is left to compute.
    second = served(entries, overlap=overlap, num_host_blocks=num_host_blocks)
    assert ask(second) == 36
    assert second.runner.num_computed_tokens == 4 + 3
    assert second.disk is not None
    assert second.disk.num_read == 9
    # From now on it is there.
    assert ask(second) == 36
    assert second.disk.num_read == 9
    second.check_everything()


def test_another_salt_finds_nothing() -> None:
    entries: dict[bytes, list[int | None]] = {}
    ask(served(entries), cache_salt=b"acme")
    other = served(entries)
    assert ask(other, cache_salt=b"umbrella") == 0
    assert other.disk is not None
    assert other.disk.num_read == 0


def test_a_damaged_entry_is_recomputed() -> None:
    entries: dict[bytes, list[int | None]] = {}
    ask(served(entries))
    second = served(entries)
    assert second.disk is not None
    second.disk.damaged = {list(entries)[3]}
    assert ask(second) == 12
    # It was written again.
    assert ask(served(entries)) == 36


def test_requests_for_the_same_prefix_read_it_once() -> None:
    entries: dict[bytes, list[int | None]] = {}
    ask(served(entries))
    second = served(entries)
    assert second.disk is not None
    ids = [second.submit([*PROMPT, last], max_tokens=2) for last in range(3)]
    second.run()
    assert second.disk.num_read == 10
    for request_id in ids:
        assert second.tokens(request_id) == second.expected(request_id)
    second.check_everything()


def test_reading_waits_for_steps_that_may_still_write() -> None:
    entries: dict[bytes, list[int | None]] = {}
    ask(served(entries))
    second = served(entries, overlap=True)
    disk = second.disk
    assert disk is not None
    running = second.submit([200] * 10, max_tokens=30)
    second.step()
    second.submit(PROMPT, max_tokens=2)
    plan_of_reading = second.scheduler.schedule(second.now)
    assert second.scheduler.is_loading
    assert disk._asked == []
    pending = second.runner.launch(plan_of_reading)
    second._pending.append((plan_of_reading, pending))
    # The step that ran before it has come back, its own has not.
    second._collect(second._pending.popleft()[1].wait())
    second._pending.append((later := second.scheduler.schedule(second.now), second.runner.launch(later)))
    assert disk._asked == []
    second._collect(second._pending.popleft()[1].wait())
    second._pending.append((later := second.scheduler.schedule(second.now), second.runner.launch(later)))
    assert len(disk._asked) == 1
    second.run()
    assert second.tokens(running) == second.expected(running)


def test_what_is_read_takes_no_block_of_those_who_run() -> None:
    entries: dict[bytes, list[int | None]] = {}
    ask(served(entries, memory=memory_plan(64, 4, 128)), list(range(1, 101)))
    second = served(entries, memory=memory_plan(30, 4, 120))
    running = [second.submit([99 + each] * 20, max_tokens=40) for each in range(2)]
    for _ in range(4):
        second.step()
    late = second.submit(list(range(1, 101)), max_tokens=2)
    second.run()
    for request_id in (*running, late):
        assert second.tokens(request_id) == second.expected(request_id)
    assert second.scheduler.load(second.now).counters.num_preemptions == 0
    second.check_everything()


@settings(max_examples=60, deadline=None, phases=FAST)
@given(
    seed=st.integers(0, 1 << 30),
    operations=st.lists(st.sampled_from(OPERATIONS), min_size=5, max_size=60),
    overlap=st.booleans(),
    faults=st.booleans(),
    num_blocks=st.sampled_from((34, 48, 200)),
    num_host_blocks=st.sampled_from((0, 16)),
    window=WINDOWS,
)
def test_walks_over_a_disk_that_outlives_engines(
    seed: int,
    operations: list[str],
    overlap: bool,
    faults: bool,
    num_blocks: int,
    num_host_blocks: int,
    window: int | None,
) -> None:
    entries: dict[bytes, list[int | None]] = {}
    for life in range(2):
        walk = Walk(
            seed + life,
            faults=faults,
            memory=memory_plan(num_blocks),
            overlap=overlap,
            num_host_blocks=num_host_blocks,
            window=window,
            disk=PretendDisk(seed + life, entries),
        )
        for operation in operations:
            walk.operate(operation)
        walk.finish()
