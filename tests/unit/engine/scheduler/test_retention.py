"""Answers that forget: which blocks they hold and look at, and that nobody else finds what they computed."""

from __future__ import annotations

import pytest

from contract.retention import Retention
from engine.types import FinishReason, KeptBlocks
from tests.unit.engine.driver import Driver, memory_plan

BLOCK = 4


def window(num_tokens: int) -> Retention:
    return Retention(policy="window+sinks", window_tokens=num_tokens)


def share(keep: float) -> Retention:
    return Retention(policy="window+sinks", keep=keep)


@pytest.mark.parametrize(
    ("asked", "num_prompt", "num_recent", "start"),
    [
        (None, 100, None, 0),
        (Retention(policy="full"), 100, None, 0),
        # A quarter of 100 tokens are seven blocks, of which one is the first.
        (share(0.25), 100, 6, 100),
        (share(0.1), 30, 2, 30),
        (share(1.0), 30, 7, 32),
        # Three blocks at least, and nothing is forgotten before there are more.
        (window(1), 5, 2, 12),
        (window(40), 5, 9, 40),
    ],
)
def test_what_is_kept_of_a_prompt(
    asked: Retention | None, num_prompt: int, num_recent: int | None, start: int
) -> None:
    kept = KeptBlocks.of(asked, num_prompt, BLOCK)
    if num_recent is None:
        assert kept is None
        return
    assert kept is not None
    assert (kept.num_sinks, kept.num_recent, kept.start) == (1, num_recent, start)
    assert kept.num_hidden(start - 1) == 0
    for position in range(start, start + 30):
        seen = 1 + position // BLOCK + 1 - kept.first_recent(position)
        assert seen == 1 + num_recent == position // BLOCK + 1 - kept.num_hidden(position)
        assert kept.num_hidden(kept.alike_until(position) - 1) == kept.num_hidden(position)
        assert kept.num_hidden(kept.alike_until(position)) == kept.num_hidden(position) + 1


def held_by_one(retention: Retention, *, num_tokens: int, overlap: bool) -> list[int]:
    """Blocks that a sequence of 16 tokens of prompt holds after each step."""
    memory = memory_plan(num_tokens // BLOCK + 1, BLOCK, num_tokens + 1)
    driver = Driver(memory=memory, check=False, overlap=overlap)
    driver.submit(range(16), max_tokens=num_tokens - 16, retention=retention)
    held = []
    while driver.scheduler.has_work:
        driver.step()
        held.append(memory.num_blocks - driver.scheduler.num_unreferenced_blocks)
    driver.check_everything()
    return held


@pytest.mark.parametrize("overlap", [False, True])
def test_an_endless_answer_holds_the_same_number_of_blocks(overlap: bool) -> None:
    held = held_by_one(window(64), num_tokens=480, overlap=overlap)
    # 16 blocks of 120, and one that a step in flight may be about to give back.
    assert max(held) <= 16 + (2 if overlap else 1)
    assert set(held[80:-3]) <= {15, 16, 17}


def test_an_answer_may_be_longer_than_the_cache() -> None:
    driver = Driver(memory=memory_plan(24, BLOCK, 400))
    endless = driver.submit(range(10), max_tokens=300, retention=window(32))
    refused = driver.submit(range(10), max_tokens=300)
    driver.run()
    driver.check_everything()
    assert driver.finish(endless) is FinishReason.LENGTH
    assert driver.failure(refused) == "NEVER_FITS"


def test_more_than_the_cache_is_refused_though_it_forgets() -> None:
    driver = Driver(memory=memory_plan(24, BLOCK, 400))
    request = driver.submit(range(10), max_tokens=300, retention=window(90))
    assert driver.failure(request) == "NEVER_FITS"


@pytest.mark.parametrize(("beyond", "fits"), [("recompute", False), ("refuse", True)])
def test_who_may_come_to_need_everything_must_fit_with_everything(beyond: str, fits: bool) -> None:
    driver = Driver(memory=memory_plan(24, BLOCK, 400))
    asked = Retention(policy="window+sinks", window_tokens=32, max_lost=0.5, beyond=beyond)
    request = driver.submit(range(10), max_tokens=300, retention=asked)
    if fits:
        driver.run()
        assert driver.finish(request) is FinishReason.LENGTH
    else:
        assert driver.failure(request) == "NEVER_FITS"
        assert driver.events[request][0].failure.field == "kv.max_lost"


MEASURED = Retention(policy="window+sinks", window_tokens=32, max_lost=1.0, beyond="refuse")


@pytest.mark.parametrize(("num_blocks", "together"), [(140, 2), (139, 1), (69, 0)])
def test_forgotten_keys_have_their_part_of_the_memory(num_blocks: int, together: int) -> None:
    """Each of these answers forgets 70 blocks: of 309 tokens 8 blocks are kept."""
    driver = Driver(memory=memory_plan(256, BLOCK, 400, num_forgotten_blocks=num_blocks))
    asked = [driver.submit(range(k, k + 10), max_tokens=300, retention=MEASURED) for k in (0, 20, 40)]
    plain = driver.submit(range(60, 70), max_tokens=300)
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        running = [each for each in driver.scheduler._state.running if each.num_measured_blocks]
        most = max(most, len(running))
        assert sum(each.num_measured_blocks for each in running) <= num_blocks
    assert most == together
    assert driver.finish(plain) is FinishReason.LENGTH
    for request in asked:
        if together:
            assert driver.finish(request) is FinishReason.LENGTH
        else:
            assert driver.failure(request) == "NEVER_FITS"
            failure = driver.events[request][0].failure
            assert failure is not None
            assert failure.field == "kv.max_lost"
            assert "engine.cache.forgotten_bytes" in failure.message


@pytest.mark.parametrize("first", [share(0.25), None])
def test_prompts_are_shared_and_answers_that_forget_are_not(first: Retention | None) -> None:
    driver = Driver(memory=memory_plan(64, BLOCK, 128))
    one = driver.submit(range(40), max_tokens=24, retention=first)
    driver.run()
    # The same prompt finds all of its blocks but that of the last token, whoever computed them.
    driver.submit(range(40), max_tokens=2, retention=None if first else share(0.25))
    driver.run()
    whole = (*range(40), *driver.tokens(one))
    third = driver.submit(whole, max_tokens=2)
    driver.run()
    driver.check_everything()
    found = [driver.events[each][0].first_token.cached_prompt_tokens for each in (2, third)]
    # Of the answer itself only what was computed of everything.
    assert found == [36, 40 if first else 60]
    assert driver.finish(third) is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_preempted_answers_go_on_as_if_nothing_had_been(overlap: bool, prefix_caching: bool) -> None:
    """Their slots go to others at several lengths, and they are computed again block by block."""
    driver = Driver(
        memory=memory_plan(40, BLOCK, 128), overlap=overlap, prefix_caching=prefix_caching, max_num_seqs=3
    )
    for index in range(3):
        driver.submit(range(index, index + 30), max_tokens=60, retention=window(12 + 8 * index))
    for index in range(3):
        for _ in range(14):
            driver.step()
        driver.submit([index] * 9, max_tokens=8, n=3, priority=10)
    driver.run()
    driver.check_everything()
    assert driver.scheduler.load(driver.now).counters.num_preemptions > 0
    assert all(driver.finish(request) is FinishReason.LENGTH for request in driver.requests)


def test_a_continued_answer_is_computed_as_it_was() -> None:
    driver = Driver(memory=memory_plan(64, BLOCK, 256))
    whole = driver.submit(range(30), max_tokens=60, seed=3, retention=share(0.5))
    driver.run()
    output = tuple(driver.tokens(whole)[:41])
    rest = driver.submit(range(30), max_tokens=60, seed=3, retention=share(0.5), output_token_ids=output)
    driver.run()
    driver.check_everything()
    assert driver.tokens(rest) == driver.tokens(whole)[41:]


@pytest.mark.parametrize("max_num_seqs", [1, 8])
def test_choices_begin_with_the_whole_prompt(max_num_seqs: int) -> None:
    driver = Driver(memory=memory_plan(64, BLOCK, 128), max_num_seqs=max_num_seqs)
    request = driver.submit(range(50), max_tokens=30, n=3, retention=share(0.25))
    driver.run()
    driver.check_everything()
    assert [driver.finish(request, choice) for choice in range(3)] == [FinishReason.LENGTH] * 3


def test_a_beam_search_keeps_its_blocks_and_looks_at_the_same() -> None:
    driver = Driver(memory=memory_plan(64, BLOCK, 128))
    asked = {"max_tokens": 30, "n": 2, "best_of": 2, "beam_width": 2}
    forgets = driver.submit(range(40), retention=share(0.25), **asked)
    driver.run()
    assert driver.finish(forgets) is FinishReason.LENGTH
    assert driver.scheduler.num_unreferenced_blocks == 64


def test_drafts_end_where_something_is_forgotten() -> None:
    driver = Driver(memory=memory_plan(64, BLOCK, 128))
    driver.runner.propose = lambda state: (300 + (state.tokens[-1] - 300 + 1) % 700, 7)
    driver.submit(range(20), max_tokens=60, retention=window(40))
    driver.run()
    driver.check_everything()
    rows = [row for plan in driver.plans for row in plan.scheduled]
    assert any(row.draft_token_ids for row in rows)
    assert not any(row.draft_token_ids for row in rows if row.start + row.num_tokens > 40)
