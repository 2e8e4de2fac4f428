"""Answers that forget: which blocks they hold and look at, and that nobody else finds what they computed."""

from __future__ import annotations

import pytest

from contract.retention import POLICIES, Retention
from engine.types import ChosenTokens, FinishReason, KeptBlocks
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


@pytest.mark.parametrize(
    ("asked", "num_prompt", "num_chosen", "first_voter"),
    [
        # A quarter of 402 tokens are 101: two are the last block's, 25 blocks are chosen.
        (Retention(policy="snapkv", keep=0.25), 402, 25, 370),
        (Retention(policy="h2o", keep=0.25), 402, 25, 0),
        (Retention(policy="kvzap", keep=0.5), 402, 50, 0),
        (Retention(policy="kvzap", window_tokens=1), 402, 32, 0),
        # Never less than voters, and than three blocks.
        (Retention(policy="snapkv", window_tokens=1), 402, 8, 370),
        (Retention(policy="h2o", window_tokens=1), 400, 3, 0),
        # Where all of it is kept, nothing is chosen.
        (Retention(policy="snapkv", keep=1.0), 402, None, 0),
        (Retention(policy="h2o", window_tokens=400), 402, None, 0),
        (Retention(policy="snapkv", window_tokens=1), 33, None, 0),
    ],
)
def test_what_is_chosen_of_a_prompt(
    asked: Retention, num_prompt: int, num_chosen: int | None, first_voter: int
) -> None:
    kept = KeptBlocks.of(asked, num_prompt, BLOCK)
    if num_chosen is None:
        assert kept is None
        return
    assert isinstance(kept, ChosenTokens)
    assert (kept.num_fresh, kept.first_voter, kept.start) == (num_chosen, first_voter, num_prompt)
    assert kept.num_hidden(num_prompt - 1) == 0
    for position in (num_prompt, num_prompt + 99):
        assert kept.num_hidden(position) == num_prompt // BLOCK - num_chosen
        assert kept.first_recent(position) == num_prompt // BLOCK
    assert kept.alike_until(5) == num_prompt


@pytest.mark.parametrize(("policy", "found"), [("snapkv", 28), ("h2o", 0)])
@pytest.mark.parametrize("first", [True, False])
def test_chosen_tokens_are_nobody_elses(policy: str, found: int, first: bool) -> None:
    """The prompt's own blocks stay for all; a chooser begins in time for all voters."""
    asked = Retention(policy=policy, window_tokens=1)
    driver = Driver(memory=memory_plan(64, BLOCK, 128))
    one = driver.submit(range(60), max_tokens=9, retention=asked if first else None)
    driver.run()
    chooser = driver.submit(range(60), max_tokens=9, retention=asked)
    driver.run()
    # Of what was computed behind the choice nothing is found.
    whole = driver.submit((*range(60), *driver.tokens(one)), max_tokens=9)
    driver.run()
    driver.check_everything()
    cached = [driver.events[each][0].first_token.cached_prompt_tokens for each in (chooser, whole)]
    assert cached == [found, 60 if first else 68]


@pytest.mark.parametrize("overlap", [False, True])
def test_the_prompt_goes_back_when_it_is_chosen_from(overlap: bool) -> None:
    memory = memory_plan(40, BLOCK, 101)
    driver = Driver(memory=memory, check=False, overlap=overlap, prefix_caching=False)
    driver.submit(range(62), max_tokens=8, retention=Retention(policy="h2o", window_tokens=20))
    held = []
    while driver.scheduler.has_work:
        driver.step()
        held.append(memory.num_blocks - driver.scheduler.num_unreferenced_blocks)
    driver.check_everything()
    # 16 blocks of the prompt and 5 for 18 tokens that are chosen beside the last two.
    assert max(held) == 21
    assert held[-4] == 5 + 2


def test_what_is_kept_beside_the_prompt_must_fit() -> None:
    driver = Driver(memory=memory_plan(20, BLOCK, 128))
    asked = [Retention(policy="h2o", window_tokens=each) for each in (16, 24)]
    fits, refused = (driver.submit(range(56), max_tokens=9, retention=each) for each in asked)
    driver.run()
    driver.check_everything()
    assert driver.finish(fits) is FinishReason.LENGTH
    assert driver.failure(refused) == "NEVER_FITS"


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
@pytest.mark.parametrize(("policy", "num_prompt"), [("window+sinks", 30), ("snapkv", 60), ("h2o", 30)])
def test_preempted_answers_go_on_as_if_nothing_had_been(
    overlap: bool, prefix_caching: bool, policy: str, num_prompt: int
) -> None:
    """Their slots go to others at several lengths, and they are computed again block by block, or their
    prompts chosen from again.
    """
    driver = Driver(
        memory=memory_plan(40, BLOCK, 128), overlap=overlap, prefix_caching=prefix_caching, max_num_seqs=3
    )
    for index in range(3):
        asked = Retention(policy=policy, window_tokens=12 + 8 * index)
        driver.submit(range(index, index + num_prompt), max_tokens=90 - num_prompt, retention=asked)
    for index in range(3):
        for _ in range(14):
            driver.step()
        driver.submit([index] * 9, max_tokens=8, n=3, priority=10)
    driver.run()
    driver.check_everything()
    assert driver.scheduler.load(driver.now).counters.num_preemptions > 0
    assert all(driver.finish(request) is FinishReason.LENGTH for request in driver.requests)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_a_continued_answer_is_computed_as_it_was(policy: str) -> None:
    asked = Retention(policy=policy, keep=0.5)
    driver = Driver(memory=memory_plan(64, BLOCK, 256))
    whole = driver.submit(range(70), max_tokens=60, seed=3, retention=asked)
    driver.run()
    output = tuple(driver.tokens(whole)[:41])
    rest = driver.submit(range(70), max_tokens=60, seed=3, retention=asked, output_token_ids=output)
    driver.run()
    driver.check_everything()
    assert driver.tokens(rest) == driver.tokens(whole)[41:]


@pytest.mark.parametrize("max_num_seqs", [1, 8])
@pytest.mark.parametrize("policy", POLICIES[1:])
def test_choices_begin_with_the_whole_prompt(max_num_seqs: int, policy: str) -> None:
    driver = Driver(memory=memory_plan(80, BLOCK, 128), max_num_seqs=max_num_seqs)
    request = driver.submit(range(50), max_tokens=30, n=3, retention=Retention(policy=policy, keep=0.25))
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
