"""Drafts from a tenant's own recent answers: what is found, for whom, and what it may take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.runner import ModelRunner
from engine.runner.speculation.answers import RecentAnswers
from engine.runner.speculation.suffixes import Match, SuffixAutomaton
from engine.speculation_config import SpeculationConfig
from engine.types import SamplingParams
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.cuda.test_queued_speculation import Watched, requests_of
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

TEXT = st.lists(st.integers(0, 2), max_size=16)
LONG = 1e9


def times(texts: list[list[int]], passage: list[int]) -> int:
    """How often a passage occurs."""
    size = len(passage)
    return sum(text[at : at + size] == passage for text in texts for at in range(len(text) - size + 1))


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, np.int64)


@given(texts=st.lists(TEXT, max_size=5), query=TEXT, cut=st.integers(0, 16))
def test_an_automaton_finds_what_brute_force_finds(
    texts: list[list[int]], query: list[int], cut: int
) -> None:
    automaton, match = SuffixAutomaton(), Match()
    for number, text in enumerate(texts):
        if number == len(texts) // 2:
            # What grows meanwhile does not lead a match astray.
            automaton.follow(match, query[:cut])
        automaton.begin()
        for token in text:
            automaton.read(token)
    automaton.follow(match, query[cut:] if texts else query)
    assert not match.length or times(texts, query[-match.length :])
    assert automaton.num_states <= 2 * sum(map(len, texts)) + 1
    whole = Match()
    automaton.follow(whole, query)
    known = [size for size in range(1, len(query) + 1) if times(texts, query[-size:])]
    assert whole.length == max(known, default=0)
    if whole.length:
        passage = query[-whole.length :]
        (found, *_) = *automaton.likely(whole, 1, 0.0), None
        expected = max(times(texts, [*passage, token]) for token in range(3))
        assert (found is None) == (expected == 0)
        assert found is None or times(texts, [*passage, found]) == expected


def test_the_most_frequent_continuation_wins_while_it_is_frequent_enough() -> None:
    automaton = SuffixAutomaton()
    for text in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5], [1, 2, 9, 9]):
        automaton.begin()
        for token in text:
            automaton.read(token)
    match = Match()
    automaton.follow(match, [7, 1, 2])
    assert match.length == 2
    assert automaton.likely(match, 4, 0.3) == [3, 5]
    assert automaton.likely(match, 4, 0.6) == [3]
    assert automaton.likely(match, 1, 0.3) == [3]
    assert automaton.likely(match, 4, 0.8) == []


def found(answers: RecentAnswers, owner: tuple[str, bytes], text: list[int]) -> tuple[int, ...]:
    return answers.continuation(owner, None, array(text), 4)[2]


def test_nobody_is_offered_what_others_were_answered() -> None:
    answers = RecentAnswers(10_000)
    answers.add(("a", b"salt"), array([1, 2, 3, 4, 5]))
    answers.learn(LONG)
    assert found(answers, ("a", b"salt"), [1, 2, 3]) == (4, 5)
    for other in (("b", b"salt"), ("a", b"other"), ("a", b""), ("", b"salt"), ("b", b"")):
        assert found(answers, other, [1, 2, 3]) == ()


def test_a_match_goes_on_along_the_text_and_begins_anew_when_pools_change() -> None:
    answers, owner = RecentAnswers(80_000), ("a", b"")
    answers.add(owner, array(list(range(100))))
    answers.learn(LONG)
    match, length, drafts = answers.continuation(owner, None, array([5, 6]), 2)
    assert (length, drafts) == (2, (7, 8))
    match, length, drafts = answers.continuation(owner, match, array([5, 6, 7, 8]), 2)
    assert (length, drafts) == (4, (9, 10))
    # So much that the older half is given up.
    for first in (1_000, 20_000, 40_000):
        answers.add(owner, array(list(range(first, first + 10_000))))
        answers.learn(LONG)
    _, length, drafts = answers.continuation(owner, match, array([5, 6, 7, 8, 9]), 2)
    assert (length, drafts) == (0, ())
    assert found(answers, owner, [40_000, 40_001]) == (40_002, 40_003, 40_004, 40_005)


def test_memory_is_bounded_and_a_flood_costs_its_own_tenant_alone() -> None:
    answers = RecentAnswers(8_000)
    answers.add(("small", b""), array([1, 2, 3, 4, 5]))
    answers.learn(LONG)
    for number in range(60):
        # Texts and salts without end.
        salt = number.to_bytes(1, "big") if number % 2 else b""
        answers.add(("flood", salt), array([(number * 997 + at) % 5_000 for at in range(900)]))
        answers.learn(LONG)
        weights = [pool.weight for pool in answers.pools.values()]
        assert answers.num_tokens == sum(weights) <= 8_000
    assert found(answers, ("small", b""), [1, 2, 3]) == (4, 5)
    assert found(answers, ("flood", bytes([59])), [59 * 997 % 5_000, (59 * 997 + 1) % 5_000])


def test_what_waits_to_be_read_is_bounded_and_read_in_the_time_that_is_given() -> None:
    answers = RecentAnswers(8_000)
    for number in range(50):
        answers.add(("a", b""), array([number] * 500))
    answers.learn(0.0)
    assert not answers.pools
    answers.learn(1e-9)
    # At least a little, and no more.
    assert 0 < sum(half.num_tokens for half in answers.pools["a", b""].halves) < 100
    answers.learn(LONG)
    assert found(answers, ("a", b""), [49, 49])
    assert not found(answers, ("a", b""), [3, 3])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "llama", max_position_embeddings=128)
    return path


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[ModelRunner]:
    speculation = SpeculationConfig(method="suffix", min_acceptance=0.0)
    runner = open_runner(folder, speculation=speculation, cache={"block_size": 4})
    yield runner
    runner.close()


def test_the_same_question_again_is_answered_in_fewer_steps_for_the_same_tenant_only(
    runner: ModelRunner,
) -> None:
    """With high temperature no text repeats itself, so all that is found is in earlier answers."""
    driver = Driver(runner)

    def asked(tenant: str, salt: bytes = b"") -> Job:
        sampling = SamplingParams(temperature=3.0, seed=7, max_tokens=64)
        job = Job(
            prompt_of(12, 199),
            num_tokens=40,
            sampling=sampling,
            speculate=True,
            tenant=tenant,
            cache_salt=salt,
        )
        return driver.run([job])[0]

    first = asked("a")
    # Learning takes a share of the steps' time, so that others' steps have to go by.
    drafter = runner.proposer.drafter
    assert drafter is not None
    asked("b")
    drafter.learn(LONG)
    again, salted, other = asked("a"), asked("a", b"s"), asked("c")
    assert first.output[:40] == again.output[:40] == salted.output[:40] == other.output[:40]
    assert again.num_accepted > 15
    assert again.num_steps < 0.6 * first.num_steps
    assert salted.num_accepted == other.num_accepted == first.num_accepted < 5
    for one, two in itertools.pairwise((first, salted, other)):
        assert one.num_steps == two.num_steps


@pytest.mark.parametrize("min_acceptance", [0.0, 0.1], ids=["always", "priced"])
def test_tokens_are_those_of_plain_decoding(folder: Path, min_acceptance: float) -> None:
    """Through loop and scheduler, for several tenants, in a cache too small for all that runs: every kind of
    sampling, choices, prefixes that are shared, and answers that another engine began.
    """
    requests = [
        msgspec.structs.replace(request, tenant=f"t{request.request_id % 3}", cache_salt=salt)
        for request, salt in zip(requests_of(6), itertools.cycle((b"", b"", b"s")), strict=False)
    ]
    plain = Watched(open_runner(folder, cache={"block_size": 4}), False, 1 << 20)
    plain.run(requests)
    # Each again, beginning with a part of its answer where it has one choice.
    again = [
        msgspec.structs.replace(
            request,
            request_id=100 + request.request_id,
            output_token_ids=tuple(plain.tokens(request.request_id)[: request.request_id % 4]),
        )
        for request in requests
        if request.sampling.n == 1 and len(plain.tokens(request.request_id)) > 4
    ]
    speculation = SpeculationConfig(method="suffix", min_ngram=1, min_acceptance=min_acceptance)
    drafted = Watched(open_runner(folder, speculation=speculation, cache={"block_size": 4}), False, 44)
    drafted.run([*requests, *again], seed=6)
    for request in requests:
        for choice in range(request.sampling.n):
            expected = plain.tokens(request.request_id, choice)
            assert drafted.tokens(request.request_id, choice) == expected, (request.request_id, choice)
        assert drafted.reasons(request.request_id) == plain.reasons(request.request_id)
        assert drafted.logprobs(request.request_id) == plain.logprobs(request.request_id)
    for request in again:
        expected = plain.tokens(request.request_id - 100)
        assert [*request.output_token_ids, *drafted.tokens(request.request_id)] == expected
    assert drafted.sum_of("num_preemptions") > 0
    if not min_acceptance:
        assert drafted.sum_of("accepted_tokens") > 50
