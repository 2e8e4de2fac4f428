"""Votes end early no more often against all votes than they may: by counting every order there is."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from math import inf

import pytest

from gateway.test_time.votes import decided, evidence, leader, votes_needed


def electorates(num_voters: int, num_answers: int) -> Iterator[tuple[int, ...]]:
    """Every way in which all voters may be divided among some answers."""
    if num_answers == 1:
        yield (num_voters,)
        return
    for first in range(num_voters + 1):
        for rest in electorates(num_voters - first, num_answers - 1):
            yield (first, *rest)


def chance_of_error(electorate: tuple[int, ...], confidence: float, abstaining: int = 0) -> float:
    """How often votes of this electorate, asked in any order, end on an answer that has fewer than another.
    The last `abstaining` groups vote for nothing.
    """
    num_voters, parties = sum(electorate), len(electorate) - abstaining
    most = max(electorate[:parties])

    @cache
    def errs(cast: tuple[int, ...]) -> float:
        num_cast = sum(cast)
        votes = {str(party): float(cast[party]) for party in range(parties) if cast[party]}
        if decided(votes, num_cast, num_voters, confidence):
            # Of equals any may lead: the worst is counted.
            best = max(votes.values())
            return float(
                any(electorate[int(each)] < most for each, number in votes.items() if number == best)
            )
        if num_cast == num_voters:
            return 0.0
        return sum(
            (electorate[group] - cast[group])
            / (num_voters - num_cast)
            * errs((*cast[:group], cast[group] + 1, *cast[group + 1 :]))
            for group in range(len(cast))
            if cast[group] < electorate[group]
        )

    return errs((0,) * len(electorate))


@pytest.mark.parametrize("confidence", [0.5, 0.8, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("num_voters", [2, 3, 4, 5, 8, 11])
def test_votes_end_against_all_votes_no_more_often_than_they_may(num_voters: int, confidence: float) -> None:
    worst = max(
        chance_of_error(electorate, confidence, abstaining=1) for electorate in electorates(num_voters, 4)
    )
    assert worst <= 1 - confidence + 1e-12


def test_votes_that_agree_end_early() -> None:
    assert [votes_needed({}, 0, 8, confidence) for confidence in (0.7, 0.9, 0.95, 0.99)] == [2, 3, 4, 5]
    assert votes_needed({}, 0, 32, 0.95) < 8


def test_no_more_are_asked_than_could_decide() -> None:
    votes = {"a": 3.0, "b": 1.0}
    more = votes_needed(votes, 4, 8, 0.95)
    hoped = {"a": 3.0 + more, "b": 1.0}
    assert decided(hoped, 4 + more, 8, 0.95)
    assert not any(decided({**votes, "a": 3.0 + fewer}, 4 + fewer, 8, 0.95) for fewer in range(1, more))


def test_a_lead_that_nobody_can_make_up_is_certain() -> None:
    # Two of five are left, and the lead is three: nothing of it is a matter of confidence.
    assert decided({"a": 3.0}, 3, 5, 0.9999)
    assert not decided({"a": 2.0, "b": 1.0}, 3, 5, 0.9999)
    assert evidence(5, 5, 8) == inf


def test_those_who_vote_for_nothing_are_voters() -> None:
    assert decided({"a": 4.0}, 4, 8, 0.95)
    assert not decided({"a": 2.0}, 6, 8, 0.95)
    assert not decided({}, 8, 8, 0.5)
    assert leader({}) is None
    assert leader({"b": 2.0, "a": 2.0}) == "b", "of equals the first"
