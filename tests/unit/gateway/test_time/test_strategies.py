"""What strategies do after what becomes of samples; the same events lead to the same steps."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from contract.outputs import TokenLogprobs
from gateway.test_time.confidence import Groups, threshold, window_of
from gateway.test_time.strategies import (
    BestSample,
    Concluded,
    Decision,
    DeepConf,
    Event,
    Grown,
    Rated,
    Sample,
    SelfConsistency,
    Strategy,
    replay,
)


def ended(index: int, vote: str | None = None, logprob: float = -1.0, *, complete: bool = True) -> Sample:
    return Sample(index=index, is_complete=complete, mean_logprob=logprob, vote=vote, num_tokens=10)


def after(strategy: Strategy, *events: Event) -> Decision:
    """The last step."""
    return replay(strategy, events)[-1]


# --- best of -----------------------------------------------------------------------------------------------


def test_the_likeliest_of_all_samples_wins_and_one_that_was_cut_does_not() -> None:
    samples = [ended(0, logprob=-0.5), ended(1, logprob=-0.1, complete=False), ended(2, logprob=-0.4)]
    steps = replay(BestSample(3), samples)
    assert [each.start for each in steps] == [3, 0, 0, 0]
    assert (steps[-1].winner, steps[-1].ended_by) == (2, "all_samples")


def test_samples_that_were_all_cut_still_give_an_answer() -> None:
    cut = [ended(index, logprob=-index, complete=False) for index in range(2)]
    assert after(BestSample(2), *cut).winner == 0


def test_a_model_rates_all_samples_at_once() -> None:
    steps = replay(
        BestSample(2, rates=True), [ended(1), ended(0, logprob=-9.0), Rated(scores={0: 0.7, 1: 0.2})]
    )
    assert steps[2].rate == (0, 1)
    assert steps[-1].winner == 0


def test_a_check_that_is_passed_ends_the_others_and_those_begin_as_they_are_needed() -> None:
    strategy = BestSample(8, rates=True, enough=1.0)
    events: list[Event] = []
    for index in range(3):
        events += [ended(index), Rated(scores={index: 0.0})]
    events += [ended(4), Rated(scores={4: 1.0})]
    steps = replay(strategy, events)
    assert [each.start for each in steps if each.start] == [1, 1, 2]
    assert [each.rate for each in steps if each.rate] == [(0,), (1,), (2,), (4,)]
    assert (steps[-1].winner, steps[-1].ended_by) == (4, "decided")


def test_where_no_sample_passes_the_likeliest_is_given() -> None:
    events: list[Event] = []
    for index in range(2):
        events += [ended(index, logprob=-2.0 + index), Rated(scores={index: 0.0})]
    assert after(BestSample(2, rates=True, enough=1.0), *events) == Decision(winner=1, ended_by="all_samples")


# --- votes -------------------------------------------------------------------------------------------------


def test_votes_that_agree_are_over_after_half_of_them() -> None:
    steps = replay(SelfConsistency(8, 0.95), [ended(index, "7", -index) for index in range(4)])
    assert steps[0].start == 4
    assert (steps[-1].winner, steps[-1].ended_by) == (0, "decided")


def test_more_are_asked_where_votes_differ_and_no_more_than_there_are() -> None:
    votes = ["7", "8", "7", "8", "7", "8", "7", "7"]
    events: list[Event] = [ended(index, each) for index, each in enumerate(votes)]
    strategy = SelfConsistency(8, 0.95)
    steps = replay(strategy, events)
    assert sum(each.start for each in steps) == 8
    assert (steps[-1].winner, steps[-1].ended_by) == (0, "all_samples")
    assert strategy.votes() == {"7": 5, "8": 3}


def test_samples_without_an_answer_vote_for_nothing_and_the_likeliest_is_given() -> None:
    events = [ended(index, None, -index) for index in range(8)]
    assert after(SelfConsistency(8, 0.95), *events) == Decision(winner=0, ended_by="all_samples")


@pytest.mark.parametrize(
    "make", [lambda: BestSample(4), lambda: SelfConsistency(4, 0.95), lambda: DeepConf(4, 0.95)]
)
def test_the_end_of_time_or_budget_gives_the_best_so_far(make: Callable[[], Strategy]) -> None:
    cut = ended(0, complete=False)
    assert after(make(), cut, Concluded(ended_by="deadline")) == Decision(winner=0, ended_by="deadline")
    assert after(make(), Concluded(ended_by="budget")) == Decision(winner=None, ended_by="budget")


# --- confidence --------------------------------------------------------------------------------------------


def grown(index: int, *confidences: float) -> Grown:
    return Grown(index=index, confidences=confidences)


def warm_up(num: int, sure: float = 4.0, votes: str = "abcd") -> list[Event]:
    """Traces of 32 tokens, whose windows are therefore of 8."""
    events: list[Event] = []
    for index in range(num):
        events += [grown(index, *[sure + index / 10] * 32), ended(index, votes[index])]
    return events


def test_a_trace_below_the_threshold_of_those_that_warmed_up_ends_at_its_first_weak_window() -> None:
    strategy = DeepConf(8, 0.95)
    # The threshold is 4.03; a window is whole after eight tokens.
    steps = replay(strategy, [*warm_up(4), grown(4, *[0.0] * 7), grown(5, *[4.5] * 9), grown(5, 0.0, 0.0)])
    assert [each.start for each in steps if each.start] == [4, 4]
    assert [each.end for each in steps[-3:]] == [(), (), (5,)]


def test_votes_weigh_as_much_as_the_weakest_window() -> None:
    strategy = DeepConf(4, 0.99)
    events: list[Event] = [
        grown(0, *[2.0] * 32),
        ended(0, "a"),
        grown(1, *[2.2] * 32),
        ended(1, "b"),
        *[grown(2, 5.0) for _ in range(32)],
        ended(2, "b"),
        *[grown(3, 9.0) for _ in range(32)],
        ended(3, "c"),
    ]
    step = after(strategy, *events)
    assert strategy.votes() == {"a": 2.0, "b": pytest.approx(7.2), "c": pytest.approx(9.0)}
    assert (step.winner, step.ended_by) == (3, "all_samples")


def test_traces_that_agree_while_they_warm_up_are_enough() -> None:
    step = after(DeepConf(8, 0.95), *warm_up(4, votes="aaaa"))
    assert (step.winner, step.ended_by) == (3, "decided")


def test_confidence_of_a_token_is_that_of_the_others_being_unlikely() -> None:
    sure = TokenLogprobs(1, -0.01, (1, 2), (-0.01, -5.0))
    unsure = TokenLogprobs(1, -0.7, (1, 2), (-0.7, -0.7))
    forbidden = TokenLogprobs(1, 0.0, (1, 2), (0.0, float("-inf")))
    assert sure.confidence(2) == pytest.approx(2.505)
    assert unsure.confidence(2) == unsure.confidence(1) == pytest.approx(0.7)
    assert forbidden.confidence(2) == forbidden.confidence(0) == 0.0


def test_windows_slide_over_a_trace() -> None:
    groups = Groups()
    groups.add([4.0, 4.0, 1.0, 1.0])
    assert groups.weakest(2) == 1.0
    assert groups.weakest(8) == 2.5
    groups.add([9.0])
    assert groups.weakest(2, since=4) == 5.0
    assert threshold([1.0, 2.0, 3.0]) == pytest.approx(1.2)
    assert window_of([10, 100, 4000]) == 25


# --- replay ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "make", [lambda: BestSample(8), lambda: SelfConsistency(8, 0.95), lambda: DeepConf(8, 0.9)]
)
def test_live_decisions_equal_a_replay(make: Callable[[], Strategy], seed: int) -> None:
    """Samples that grow and end in any order; what the strategy starts and ends is what happens."""
    rng = random.Random(seed)
    live, events, steps = make(), list[Event](), list[Decision]()

    def see(step: Decision) -> None:
        steps.append(step)
        running.extend(range(len(left), len(left) + step.start))
        left.extend(rng.randrange(8, 40) for _ in range(step.start))
        for index in step.end:
            running.remove(index)

    left: list[int] = []
    running: list[int] = []
    see(live.begin())
    while not steps[-1].ended_by:
        index = rng.choice(running)
        number = min(left[index], rng.randrange(1, 5))
        left[index] -= number
        event: Event = Grown(index=index, confidences=tuple(rng.uniform(1, 5) for _ in range(number)))
        if not left[index]:
            running.remove(index)
            event = ended(index, rng.choice("aaab"), -rng.random())
        elif not live.watches:
            continue
        events.append(event)
        see(live.take(event))
        assert live.watches or not steps[-1].end
    assert steps == replay(make(), events)
    assert len(left) <= 8
