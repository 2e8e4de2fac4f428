"""Sequences with a state beside keys and values: where they begin, and what copies of it cost."""

from __future__ import annotations

import pytest

from engine.types import MemoryPlan
from tests.unit.engine.checked_runner import State
from tests.unit.engine.driver import Driver, memory_plan

# Blocks have four tokens.
INTERVAL = 32


def stateful(num_blocks: int = 200, num_states: int = 20, **options: int) -> MemoryPlan:
    return memory_plan(num_blocks, num_states=num_states, **({"state_interval": INTERVAL} | options))


def computed(driver: Driver, prompt: list[int], **fields: object) -> int:
    """Tokens that a request computes until its end; its answer has one."""
    before = driver.runner.num_computed_tokens
    driver.submit(prompt, max_tokens=1, **fields)
    driver.run()
    driver.check_everything()
    return driver.runner.num_computed_tokens - before


def test_the_same_prompt_begins_at_its_last_whole_block() -> None:
    driver = Driver(memory=stateful())
    prompt = list(range(27))
    assert computed(driver, prompt) == 27
    assert computed(driver, prompt) == 3
    # Of a prompt that ends with a block, the last token is computed anyhow, and with it its block.
    assert computed(driver, prompt[:24]) == 24
    assert computed(driver, prompt[:24]) == 4


def test_where_prompts_part_the_second_leaves_a_copy_for_the_third() -> None:
    driver = Driver(memory=stateful())
    shared = [7] * 21
    assert computed(driver, [*shared, *range(10, 17)]) == 28
    # Blocks are there up to 20, but no state.
    assert computed(driver, [*shared, *range(20, 27)]) == 28
    assert computed(driver, [*shared, *range(30, 37)]) == 28 - 20


def test_long_prompts_and_answers_leave_copies_on_the_way() -> None:
    driver = Driver(memory=stateful(), max_num_batched_tokens=512)
    prompt = [index % 50 for index in range(70)]
    assert computed(driver, prompt) == 70
    assert computed(driver, [*prompt[:66], 1, 2, 3]) == 69 - 64
    first = driver.submit([3] * 30, max_tokens=40)
    driver.run()
    conversation = [*[3] * 30, *driver.tokens(first), 9]
    assert computed(driver, conversation) == len(conversation) - 64


@pytest.mark.parametrize("overlap", [False, True])
def test_copies_that_made_room_come_back_from_the_host(overlap: bool) -> None:
    # Fourteen prompts for ten slots, and room for sixteen on the host.
    memory = stateful(num_states=10)
    prompts = [[10 * first + each for each in range(27)] for first in range(14)]
    with_host = Driver(memory=memory, overlap=overlap, num_host_blocks=128)
    assert [computed(with_host, prompt) for prompt in prompts] == [27] * 14
    # Again and again: what is copied from the host stays there.
    for _ in range(2):
        assert [computed(with_host, prompt) for prompt in prompts] == [3] * 14
    without = Driver(memory=memory, overlap=overlap)
    for prompt in prompts:
        computed(without, prompt)
    assert computed(without, prompts[0]) == 27


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_right", [0, 1, 3])
def test_a_sequence_goes_on_behind_the_drafts_that_were_right(overlap: bool, num_right: int) -> None:
    driver = Driver(memory=stateful(), overlap=overlap)

    def propose(state: State) -> tuple[int, ...]:
        right = [300 + (state.tokens[-1] - 300 + step) % 700 for step in range(1, num_right + 1)]
        return (*right, 7)

    driver.runner.propose = propose
    prompt = [3] * 30
    first = driver.submit(prompt, max_tokens=40)
    driver.run()
    # Every state that a row began with was checked.
    assert driver.tokens(first) == driver.expected(first)
    # A step in flight draws the first one by itself.
    drafted = any(row.draft_token_ids for plan in driver.plans for row in plan.scheduled)
    assert drafted is not (overlap and not num_right)
    conversation = [*prompt, *driver.tokens(first), 9]
    driver.runner.propose = lambda state: ()
    assert computed(driver, conversation) == len(conversation) - 64
    cache = driver.scheduler._state.cache
    assert cache.states.pool.num_available == cache.states.pool.num_slots


def test_a_row_has_no_more_drafts_than_there_are_slots() -> None:
    driver = Driver(memory=stateful(num_states=9), max_num_seqs=8)
    driver.runner.propose = lambda state: (7, 7, 7)
    requests = [driver.submit([number] * 9, max_tokens=20) for number in range(3)]
    driver.run()
    driver.check_everything()
    for request in requests:
        assert driver.tokens(request) == driver.expected(request)
    drafted = [sum(len(row.draft_token_ids) for row in plan.scheduled) for plan in driver.plans]
    assert max(drafted) == 1


def test_a_copy_on_the_host_goes_with_its_block() -> None:
    driver = Driver(memory=memory_plan(32, num_states=9, state_interval=8), num_host_blocks=4)
    assert computed(driver, [5] * 40) == 40
    # Takes every block, those of the host as well.
    computed(driver, list(range(126)))
    computed(driver, list(range(50, 176)))
    assert computed(driver, [5] * 40) == 40


def test_without_a_prefix_cache_there_are_no_copies() -> None:
    driver = Driver(memory=stateful(), prefix_caching=False)
    assert computed(driver, list(range(20))) == 20
    assert computed(driver, list(range(20))) == 20
    assert not any(row.snapshots for plan in driver.plans for row in plan.scheduled)


def test_a_copy_goes_with_its_block() -> None:
    driver = Driver(memory=memory_plan(32, num_states=40, state_interval=8))
    assert computed(driver, [5] * 40) == 40
    # Takes every block.
    computed(driver, list(range(126)))
    assert computed(driver, [5] * 40) == 40


def test_choices_begin_with_copies_of_the_prompts_state() -> None:
    driver = Driver(memory=stateful())
    request = driver.submit(list(range(30)), max_tokens=6, n=3)
    driver.run()
    driver.check_everything()
    assert [driver.tokens(request, choice) for choice in range(3)] == [
        driver.expected(request, choice) for choice in range(3)
    ]
    # Two of them begin at the last whole block.
    assert driver.runner.num_computed_tokens == 30 + 2 * 2 + 3 * 5


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_states", [12, 20])
def test_beams_go_on_from_their_parents_states(overlap: bool, num_states: int) -> None:
    answers = []
    for memory in (memory_plan(200), stateful(num_states=num_states)):
        driver = Driver(memory=memory, overlap=overlap)
        request = driver.submit([1, 2, 3, 4, 5], max_tokens=12, n=3, beam_width=4, best_of=3)
        driver.run()
        answers.append([driver.tokens(request, choice) for choice in range(3)])
    assert answers[0] == answers[1]
    assert all(answers[0])
