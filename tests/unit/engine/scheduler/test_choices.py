"""best_of and beam search, against their definitions computed the slow way."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from contract.prefix import PrefixHasher
from engine.scheduler.beams import BeamSearch
from engine.scheduler.sequence import RequestGroup, Sequence
from engine.types import FinishReason, GrammarSpec, Request, SamplingParams, StepResult, TokenLogprobs
from tests.unit.engine.checked_runner import alternatives, expected_token
from tests.unit.engine.driver import Driver, memory_plan

PROMPT = [5, 9, 2, 7, 1, 1, 3]


def test_best_of_returns_the_most_likely_choices_whole() -> None:
    driver = Driver()
    request = driver.submit(PROMPT, max_tokens=5, n=2, best_of=5)
    other = driver.submit(PROMPT, max_tokens=5)
    driver.run()

    def mean(choice: int) -> float:
        tokens = [expected_token(tuple(PROMPT), 0, choice, position) for position in range(5)]
        return sum(-(token % 7) / 10 - 0.01 for token in tokens) / 5

    ranked = sorted(range(5), key=lambda choice: (-mean(choice), choice))[:2]
    for place, choice in enumerate(ranked):
        assert driver.tokens(request, place) == driver.expected(request, choice)
    assert len(driver.events[request]) == 2, "nothing is known before the last choice has ended"
    assert not any(event.logprobs for event in driver.events[request]), "nobody asked for them"
    assert driver.events[request][0].first_token
    assert driver.tokens(other) == driver.expected(other)
    assert driver.scheduler.num_unreferenced_blocks == driver.memory.num_blocks


def test_cancelling_best_of_and_beams_ends_every_returned_choice() -> None:
    driver = Driver()
    for fields in ({"n": 2, "best_of": 4}, {"n": 2, "beam_width": 3}):
        request = driver.submit(PROMPT, max_tokens=50, **fields)  # type: ignore[arg-type]
        for _ in range(4):
            driver.step()
        driver.cancel(request)
        assert [event.choice_index for event in driver.events[request]] == [0, 1]
        assert all(event.finish_reason is FinishReason.CANCELLED for event in driver.events[request])
    driver.run()
    assert driver.runner.num_states() == 0


class CountingDriver(Driver):
    """Counts the tokens that the runner has sampled."""

    num_sampled = 0

    def _collect(self, result: StepResult) -> None:
        self.num_sampled += sum(len(each.token_ids) for each in result.results)
        super()._collect(result)

    def told(self, request_id: int) -> tuple[int, int]:
        """(tokens returned, tokens of candidates and beams) by the request's events."""
        events = self.events[request_id]
        return (
            sum(len(event.token_ids) for event in events),
            sum(event.statistics.candidate_tokens for event in events if event.statistics),
        )


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [64, 26])
@pytest.mark.parametrize(
    "fields", [{"n": 2, "best_of": 6}, {"n": 1, "beam_width": 4, "stop_token_ids": (11,)}, {"n": 3}]
)
def test_what_is_returned_and_what_is_not_is_all_that_was_sampled(
    fields: dict[str, Any], num_blocks: int, overlap: bool
) -> None:
    driver = CountingDriver(memory=memory_plan(num_blocks, 4, 24), overlap=overlap, watermark=0.0)
    requests = [driver.submit([*PROMPT, index], max_tokens=12, **fields) for index in range(3)]
    driver.run()
    assert driver.num_sampled == sum(sum(driver.told(request)) for request in requests)
    assert bool(driver.told(requests[0])[1]) == ("best_of" in fields or "beam_width" in fields)


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 4}, {"n": 2, "beam_width": 3}])
def test_what_was_sampled_for_whoever_leaves_is_told(fields: dict[str, Any]) -> None:
    driver = CountingDriver()
    request = driver.submit(PROMPT, max_tokens=50, **fields)
    for _ in range(7):
        driver.step()
    assert driver.withheld[request] == driver.num_sampled, "told as it goes on, too"
    driver.cancel(request)
    assert driver.num_sampled > 7
    assert driver.told(request) == (0, driver.num_sampled)


def slow_beam_search(
    prompt: list[int], *, width: int, max_tokens: int, stop: int, n: int
) -> list[tuple[list[int], float]]:
    """The definition, on whole token lists."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    finished: list[tuple[list[int], float]] = []
    for length in range(1, max_tokens + 1):
        candidates = [
            (score + logprob, [*tokens, token])
            for tokens, score in beams
            for token, logprob in zip(*alternatives(prompt + tokens, 2 * width), strict=True)
        ]
        candidates.sort(key=lambda each: -each[0])
        beams = []
        for place, (score, tokens) in enumerate(candidates):
            if len(beams) == width:
                break
            if tokens[-1] == stop:
                if place < width:
                    finished.append((tokens, score / length))
            else:
                beams.append((tokens, score))
        if len(finished) >= width:
            break
        if length == max_tokens:
            finished += [(tokens, score / length) for tokens, score in beams]
    return sorted(finished, key=lambda each: -each[1])[:n]


@pytest.mark.parametrize("grammar", [None, GrammarSpec(digest="", payload=b"", backend="")])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("num_blocks", [200, 26])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_beam_search_finds_what_its_definition_finds(
    width: int, num_blocks: int, overlap: bool, grammar: GrammarSpec | None
) -> None:
    # With 26 blocks beams lose theirs to the sequences beside them and come back.
    driver = Driver(memory=memory_plan(num_blocks, 4, 24), overlap=overlap, watermark=0.0)
    stop = 11
    searches = [
        driver.submit(
            [*PROMPT, index],
            max_tokens=12,
            n=width,
            best_of=width,
            beam_width=width,
            stop_token_ids=(stop,),
            grammar=grammar,
        )
        for index in range(3)
    ]
    beside = [driver.submit([*PROMPT, index], max_tokens=15) for index in range(4)]
    driver.run()
    for index, request in enumerate(searches):
        expected = slow_beam_search([*PROMPT, index], width=width, max_tokens=12, stop=stop, n=width)
        assert [driver.tokens(request, place) for place in range(width)] == [tokens for tokens, _ in expected]
    for request in beside:
        assert driver.tokens(request) == driver.expected(request)
    # Where they stand in a grammar is copied, not found again.
    assert bool(driver.runner.num_forks) == bool(grammar)
    assert driver.scheduler.num_unreferenced_blocks == driver.memory.num_blocks
    assert driver.runner.num_states() == 0


@settings(max_examples=30, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(
    seed=st.integers(0, 1 << 30),
    max_preemptions=st.integers(1, 3),
    num_blocks=st.sampled_from((24, 30, 44)),
    overlap=st.booleans(),
    guided=st.booleans(),
)
def test_beams_are_preempted_a_bounded_number_of_times_and_end(
    seed: int, max_preemptions: int, num_blocks: int, overlap: bool, guided: bool
) -> None:
    rng = random.Random(seed)
    driver = Driver(
        memory=memory_plan(num_blocks, 4, 48),
        overlap=overlap,
        watermark=0.0,
        max_preemptions=max_preemptions,
        max_num_seqs=rng.choice((3, 4, 6)),
    )
    grammar = GrammarSpec(digest="", payload=b"", backend="") if guided else None
    requests = []
    for _ in range(8):
        width = rng.choice((0, 2, 3))
        requests.append(
            driver.submit(
                [rng.randrange(99) for _ in range(rng.randrange(1, 14))],
                max_tokens=24,
                n=max(1, width),
                beam_width=width,
                grammar=grammar if width else None,
                priority=rng.randrange(2),
            )
        )
        for _ in range(rng.randrange(8)):
            driver.step()
    cancelled = rng.choice(requests)
    driver.cancel(cancelled)
    driver.run()
    for request in requests:
        statistics = [event.statistics for event in driver.events[request] if event.statistics]
        refused = driver.failure(request) == "NEVER_FITS"
        assert statistics or refused or request == cancelled
        assert all(each.num_preemptions <= max_preemptions for each in statistics)
    assert driver.scheduler.num_requests == 0
    assert driver.scheduler.num_unreferenced_blocks == num_blocks
    assert driver.runner.num_states() == 0


def test_beams_that_can_only_end_give_as_many_answers_as_asked_for() -> None:
    sampling = SamplingParams(n=3, best_of=3, beam_width=3, max_tokens=9, stop_token_ids=(2,))
    request = Request(request_id=1, external_id="1", prompt_token_ids=(5,), sampling=sampling)
    group, search = RequestGroup(request), BeamSearch(sampling)
    beams = []
    for index, logprob in enumerate((-1.0, -0.5)):
        beam = Sequence(
            sequence_id=index,
            group=group,
            choice_index=0,
            sampling=sampling,
            max_tokens_total=10,
            hasher=PrefixHasher(model="m", adapter="", salt=b"", block_size=4),
        )
        beam.token_ids.append(7 + index)
        beam.sum_logprob = logprob
        search.report(beam, TokenLogprobs(2, -0.1, (2,), (-0.1,)))
        beams.append(beam)
    assert search.advance(beams) == []
    assert [answer.token_ids for answer in search.best()] == [(8, 2), (7, 2), (8, 2)]
