"""Votes: when those that are in decide what all of them would.

The samples of a request are voters, of whom the first have been asked. Whether an answer would have more than
half of all of them is tested as in an audit of an election, by sampling without replacement: the ratio of
the likelihood of what was seen under a mixture of electorates that the answer wins, to that under the
likeliest one that it does not win, is a test martingale, so that looking after every vote costs nothing
(Waudby-Smith and Ramdas, Confidence sequences for sampling without replacement, NeurIPS 2020; Ville's
inequality bounds how often it ever passes 1/alpha).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import comb, inf

# Weight of the electorate that is of one mind: models that can answer at all mostly agree with themselves.
# Any weights are valid; these say where little is to be lost.
_UNANIMOUS = 0.75


@lru_cache(maxsize=4096)
def evidence(num_for: int, num_cast: int, num_voters: int) -> float:
    """How much likelier `num_for` of the first `num_cast` votes are if more than half of all voters are for
    an answer than if at most half of them are; infinity where the latter is impossible.
    """
    half = num_voters // 2
    against = max(_ways(most, num_for, num_cast, num_voters) for most in range(half + 1))
    winning = range(half + 1, num_voters)
    favourable = float(_ways(num_voters, num_for, num_cast, num_voters))
    if winning:
        others = sum(_ways(each, num_for, num_cast, num_voters) for each in winning) / len(winning)
        favourable = _UNANIMOUS * favourable + (1 - _UNANIMOUS) * others
    return favourable / against if against else inf


def _ways(num_of_all: int, num_for: int, num_cast: int, num_voters: int) -> int:
    """Proportional to the chance of what was seen, where `num_of_all` voters are for the answer."""
    return comb(num_of_all, num_for) * comb(num_voters - num_of_all, num_cast - num_for)


def leader(votes: Mapping[str, float]) -> str | None:
    """The answer with most votes, of equals the one that came first; None without a vote."""
    return max(votes, key=votes.__getitem__, default=None)


def decided(votes: Mapping[str, float], num_cast: int, num_voters: int, confidence: float) -> bool:
    """Whether the leader is the answer of all voters: for certain, or with this confidence.

    `num_cast` counts those, too, who voted for nothing.
    """
    first = leader(votes)
    if first is None:
        return False
    second = max((number for answer, number in votes.items() if answer != first), default=0)
    if votes[first] - second > num_voters - num_cast:
        return True
    # One vote agrees with nobody: of many answers with few votes each, any could be the first.
    agrees = votes[first] > 1
    return agrees and evidence(int(votes[first]), num_cast, num_voters) * (1 - confidence) >= 1


def votes_needed(votes: Mapping[str, float], num_cast: int, num_voters: int, confidence: float) -> int:
    """Fewest further votes that could decide: so many are asked for at a time, since with fewer nothing
    ends, and more could turn out to be needless. At least 1, and no more than there are.
    """
    first = leader(votes) or "the first answer"
    for more in range(1, num_voters - num_cast + 1):
        hoped = {**votes, first: votes.get(first, 0) + more}
        if decided(hoped, num_cast + more, num_voters, confidence):
            return more
    return max(1, num_voters - num_cast)
