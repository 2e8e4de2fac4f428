"""Prefixes on disk: found again, read into blocks that nobody else uses, recomputed where damaged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv import state_name
from tests.unit.engine.driver import Driver, memory_plan
from tests.unit.engine.pretend_disk import Entries, PretendDisk
from tests.unit.engine.scheduler.test_walk import FAST, OPERATIONS, WINDOWS, Walk

PROMPT = list(range(1, 41))


def served(entries: Entries, **options: object) -> Driver:
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
    entries: Entries = {}
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
    entries: Entries = {}
    ask(served(entries), cache_salt=b"acme")
    other = served(entries)
    assert ask(other, cache_salt=b"umbrella") == 0
    assert other.disk is not None
    assert other.disk.num_read == 0


def test_a_damaged_entry_is_recomputed() -> None:
    entries: Entries = {}
    ask(served(entries))
    second = served(entries)
    assert second.disk is not None
    second.disk.damaged = {list(entries)[3]}
    assert ask(second) == 12
    # It was written again.
    assert ask(served(entries)) == 36


def test_requests_for_the_same_prefix_read_it_once() -> None:
    entries: Entries = {}
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
    entries: Entries = {}
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
    entries: Entries = {}
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


# Copies of states are left every 32 tokens, and where a prompt begins again: at its last whole block.
STATEFUL = memory_plan(200, 4, num_states=20, state_interval=32)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_another_engine_finds_blocks_and_the_state_behind_them(overlap: bool, num_host_blocks: int) -> None:
    entries: Entries = {}
    options = {"memory": STATEFUL, "overlap": overlap, "num_host_blocks": num_host_blocks}
    assert ask(served(entries, **options)) == 0
    second = served(entries, **options)
    assert ask(second) == 36
    assert second.runner.num_computed_tokens == 4 + 3
    # Nine blocks, and a state; from now on they are there.
    assert second.disk is not None
    assert second.disk.num_read == 10
    assert ask(second) == 36
    assert second.disk.num_read == 10
    second.check_everything()


def test_blocks_are_read_up_to_a_state_and_no_further() -> None:
    entries: Entries = {}
    ask(served(entries, memory=STATEFUL))
    blocks = served({}, memory=STATEFUL)
    name = blocks.submit(PROMPT, max_tokens=1)
    hashes = blocks.scheduler._state.groups[name].sequences[0].hasher
    hashes.extend(PROMPT, 40)
    second = served(entries, memory=STATEFUL)
    assert second.disk is not None
    del entries[state_name(hashes.hashes[8])]
    # The one before.
    assert ask(second) == 32
    assert second.disk.num_read == 8 + 1
    del entries[state_name(hashes.hashes[7])]
    third = served({each: entries[each] for each in hashes.hashes[:9]}, memory=STATEFUL)
    assert ask(third) == 0
    assert third.disk is not None
    assert third.disk.num_read == 0


def test_a_damaged_state_is_computed_again() -> None:
    entries: Entries = {}
    ask(served(entries, memory=STATEFUL))
    (*_, last) = [name for name, content in entries.items() if len(content) == 1]
    second = served(entries, memory=STATEFUL)
    assert second.disk is not None
    second.disk.damaged = {last}
    assert ask(second) < 36
    assert ask(served(entries, memory=STATEFUL)) == 36
    second.check_everything()


def test_a_state_alone_is_read_where_its_blocks_are_there() -> None:
    # Few slots: copies go long before the blocks.
    memory = memory_plan(200, 4, num_states=10, state_interval=32)
    driver = served({}, memory=memory)
    assert ask(driver) == 0
    for number in range(6):
        ask(driver, [100 + number] * 40)
    assert driver.disk is not None
    before = driver.disk.num_read
    assert ask(driver) == 36
    assert driver.disk.num_read == before + 1
    driver.check_everything()


def test_requests_for_the_same_state_read_it_once() -> None:
    entries: Entries = {}
    ask(served(entries, memory=STATEFUL))
    second = served(entries, memory=STATEFUL)
    assert second.disk is not None
    ids = [second.submit([*PROMPT[:36], 90 + last, 1, 2], max_tokens=2) for last in range(3)]
    second.run()
    assert second.disk.num_read == 10
    for request_id in ids:
        assert second.tokens(request_id) == second.expected(request_id)
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
    num_states=st.sampled_from((0, 9, 12, 40)),
)
def test_walks_over_a_disk_that_outlives_engines(
    seed: int,
    operations: list[str],
    overlap: bool,
    faults: bool,
    num_blocks: int,
    num_host_blocks: int,
    window: int | None,
    num_states: int,
) -> None:
    entries: Entries = {}
    for life in range(2):
        walk = Walk(
            seed + life,
            faults=faults,
            memory=memory_plan(num_blocks, num_states=num_states),
            overlap=overlap,
            num_host_blocks=num_host_blocks,
            window=window,
            disk=PretendDisk(seed + life, entries),
        )
        for operation in operations:
            walk.operate(operation)
        walk.finish()
