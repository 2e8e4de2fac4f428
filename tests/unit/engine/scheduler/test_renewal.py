"""Answers that are longer than the model has positions: what they take along, and what they hold."""

from __future__ import annotations

import pytest

from contract.retention import Retention
from engine.types import FinishReason, KeptBlocks, MemoryPlan
from tests.unit.engine.driver import Driver, memory_plan

BLOCK = 4
POSITIONS = 64


def window(num_tokens: int) -> Retention:
    return Retention(policy="window+sinks", window_tokens=num_tokens)


def plan(num_blocks: int = 64) -> MemoryPlan:
    return memory_plan(num_blocks, BLOCK, POSITIONS)


@pytest.mark.parametrize(
    ("asked", "num_carried"),
    [
        # Three blocks at least, half of the positions at most.
        (1, 12),
        (20, 20),
        (50, 32),
        (900, 32),
    ],
)
def test_what_an_answer_takes_along(asked: int, num_carried: int) -> None:
    kept = KeptBlocks.of(window(asked), 5, BLOCK, POSITIONS)
    assert kept is not None
    assert kept.renewal(POSITIONS - 1) is None
    looked_back = POSITIONS - 1
    for num_tokens in range(POSITIONS, 5 * POSITIONS):
        found = kept.renewal(num_tokens)
        assert found is not None
        assert (found.num_sinks, found.num_prompt) == (BLOCK, num_carried)
        before, looked_back = looked_back, num_tokens - found.num_left
        # One more than before, or what is taken along.
        assert looked_back == (num_carried if before == POSITIONS - 1 else before + 1)
        renewed = kept.renewed(again=True)
        assert renewed.renewal(num_tokens) == found
        assert renewed.num_hidden(num_carried - 1) == 0


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("asked", [1, 24, 500])
def test_a_stream_ends_where_it_was_to_and_holds_the_same(overlap: bool, asked: int) -> None:
    memory = plan()
    driver = Driver(memory=memory, check=False, overlap=overlap)
    stream = driver.submit(range(10), max_tokens=40 * POSITIONS, seed=3, retention=window(asked))
    held = []
    while driver.scheduler.has_work:
        driver.step()
        held.append(memory.num_blocks - driver.scheduler.num_unreferenced_blocks)
    driver.check_everything()
    assert driver.finish(stream) is FinishReason.LENGTH
    most = min(POSITIONS // BLOCK, max(3, asked // BLOCK) + (2 if overlap else 1))
    assert max(held[:POSITIONS]) == max(held[POSITIONS:]) <= most
    # No more is computed again than was drawn.
    assert driver.runner.num_computed_tokens <= 2 * 40 * POSITIONS + 10
    statistics = next(each.statistics for each in driver.events[stream] if each.statistics)
    assert statistics is not None
    assert statistics.num_preemptions == 0
    counters = driver.scheduler.load(driver.now).counters
    assert counters.num_renewals >= 40
    assert counters.renewal_s > 0
    assert len(statistics.renewals_s) == 32, "the last ones are told"
    assert all(
        start_s < end_s and tokens <= POSITIONS // 2 for start_s, end_s, tokens in statistics.renewals_s
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_streams_that_are_preempted_and_continued_go_on(overlap: bool) -> None:
    """Their slots go to others at several lengths, and each is continued from every third token."""
    driver = Driver(memory=plan(40), overlap=overlap, max_num_seqs=3)
    asked = [window(12 + 16 * index) for index in range(3)]
    streams = [
        driver.submit(range(index, index + 30), max_tokens=200, seed=index, retention=kv, n=1)
        for index, kv in enumerate(asked)
    ]
    for index in range(6):
        for _ in range(31):
            driver.step()
        driver.submit([index] * 9, max_tokens=8, n=3, priority=10)
    driver.run()
    assert driver.scheduler.load(driver.now).counters.num_preemptions > 0
    for index, (stream, kv) in enumerate(zip(streams, asked, strict=True)):
        tokens = driver.tokens(stream)
        for known in range(1, 200, 33):
            prompt, output = range(index, index + 30), tuple(tokens[:known])
            driver.submit(prompt, max_tokens=200, seed=index, retention=kv, output_token_ids=output)
    driver.run()
    driver.check_everything()


def test_what_a_stream_computes_beyond_the_positions_is_nobody_elses() -> None:
    driver = Driver(memory=plan())
    stream = driver.submit(range(20), max_tokens=90, retention=window(40))
    driver.run()
    tokens = [*range(20), *driver.tokens(stream)]
    # The very tokens that it took along: 32 of 64.
    carried = (*tokens[:BLOCK], *tokens[POSITIONS - 28 : POSITIONS])
    others = [driver.submit(each, max_tokens=2) for each in (carried, tokens[:40])]
    driver.run()
    driver.check_everything()
    found = [driver.events[each][0].first_token for each in others]
    assert [each and each.cached_prompt_tokens for each in found] == [BLOCK, 36]


@pytest.mark.parametrize(
    "retention",
    [
        None,
        Retention(policy="snapkv", window_tokens=20),
        Retention(policy="window+sinks", window_tokens=20, max_lost=1.0, beyond="refuse"),
        Retention(policy="window+sinks", window_tokens=20, if_possible=True),
    ],
)
def test_other_answers_end_with_the_positions(retention: Retention | None) -> None:
    driver = Driver(memory=plan())
    request = driver.submit(range(20), max_tokens=90, retention=retention)
    driver.run()
    assert driver.finish(request) is FinishReason.LENGTH
    assert len(driver.tokens(request)) == POSITIONS - 20


@pytest.mark.parametrize(("limit", "num_tokens"), [(None, 90), (70, 50), (40, 20)])
def test_a_tier_limits_streams_too(limit: int | None, num_tokens: int) -> None:
    driver = Driver(memory=plan())
    asked = {"retention": window(20), "max_context_tokens": limit}
    stream = driver.submit(range(20), max_tokens=90, **asked)
    driver.run()
    assert len(driver.tokens(stream)) == num_tokens
    assert driver.finish(stream) is FinishReason.LENGTH


def test_a_prompt_needs_positions_all_the_same() -> None:
    driver = Driver(memory=plan())
    fits, refused = (
        driver.submit(range(length), max_tokens=90, retention=window(20))
        for length in (POSITIONS - 1, POSITIONS)
    )
    driver.run()
    driver.check_everything()
    assert driver.finish(fits) is FinishReason.LENGTH
    assert driver.failure(refused) == "CONTEXT_LENGTH_EXCEEDED"


def test_a_model_of_hardly_any_positions_has_no_streams() -> None:
    driver = Driver(memory=memory_plan(64, BLOCK, 12))
    request = driver.submit(range(5), max_tokens=50, retention=window(1))
    driver.run()
    assert len(driver.tokens(request)) == 7
