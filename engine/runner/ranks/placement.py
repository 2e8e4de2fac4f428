"""Which ranks should hold which experts of a layer, by the rows that these get. Plain arithmetic.

Shape letters: X experts, G groups of ranks, each of which holds X / G of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


def group_loads(positions: Ints, loads: Floats, num_groups: int) -> Floats:
    """Loads [..., X] of experts at positions [..., X] -> those of groups [..., G]."""
    by_position = np.empty_like(loads)
    np.put_along_axis(by_position, positions, loads, -1)
    found: Floats = by_position.reshape(*loads.shape[:-1], num_groups, -1).sum(-1)
    return found


def imbalance(by_group: Floats) -> Floats:
    """How many times the mean the most loaded of [..., G] has [...]; 1 where nobody has any."""
    mean = by_group.mean(-1)
    found: Floats = np.divide(by_group.max(-1), mean, out=np.ones_like(mean), where=mean > 0)
    return found


def longest_first(positions: Ints, loads: Floats, num_groups: int, slack: float) -> Ints:
    """The group that each expert should be in [X], as many in each: the most loaded one first, each goes to
    the group that has least so far (Graham's rule). Of groups that have about as little, with no more beyond
    than `slack` of a group's mean load, it stays in its own.
    """
    size = len(loads) // num_groups
    totals, counts = np.zeros(num_groups), np.zeros(num_groups, np.int64)
    wanted = np.empty(len(loads), np.int64)
    beyond = slack * float(loads.sum()) / num_groups
    for expert in np.argsort(-loads, kind="stable"):
        open_totals = np.where(counts < size, totals, np.inf)
        best, own = int(open_totals.argmin()), int(positions[expert]) // size
        group = own if open_totals[own] <= open_totals[best] + beyond else best
        wanted[expert] = group
        totals[group] += loads[expert]
        counts[group] += 1
    return wanted


def exchanges(positions: Ints, wanted: Ints, loads: Floats) -> list[tuple[int, int]]:
    """Pairs of experts that change places, one pair after another, until each is in the group that is wanted
    [X], of which each has as many; the most loaded first.
    """
    size = int(np.bincount(wanted)[0])
    groups, targets = (positions // size).tolist(), wanted.tolist()
    order, found = np.argsort(-loads, kind="stable").tolist(), []
    for expert in order:
        own, target = groups[expert], targets[expert]
        if own == target:
            continue
        leaving = [each for each in order if groups[each] == target != targets[each]]
        other = next((each for each in leaving if targets[each] == own), leaving[-1])
        groups[expert], groups[other] = target, own
        found.append((expert, other))
    return found
