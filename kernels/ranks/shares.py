"""How what is counted is shared among ranks: in order, none with more than one beyond another's. No numpy."""

from __future__ import annotations


def share_of(count: int, rank: int, num_ranks: int) -> slice:
    """The part of `count` that a rank has; as `share` of op.h."""
    return slice(count * rank // num_ranks, count * (rank + 1) // num_ranks)
