"""How drafts fared in all of an owner's sequences, what a new one of them begins with; and what is fair
between owners whose sequences share steps.

Shape letters: N drafts, O owners.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.runner.speculation.acceptance import Acceptance
from engine.runner.speculation.progress import DraftProgress

# How fast the experience with an owner's sequences fades, and where it begins: share and number of
# drafts. Owners whose experience is kept.
_FADING, _FIRST_SHARE, _FIRST_WEIGHT = 0.98, 0.5, 4.0
_MOST_OWNERS = 1024
# How fast the memory of what a sequence's lookups brought fades.
_FOUND_FADING = 0.8
# A draft must gain so many times what it costs at least, as costs are measured with noise; and what a step
# may be longer for others' drafts.
LEAST_MARGIN, SLACK = 1.15, 0.01
# Part of an owner's tokens that may be late, which leaves half of a hundredth to what else delays them; and
# steps' worth of late ones that it bears at a time, as one attempt in vain may bring.
_LATE_SHARE, _MOST_LATE = 0.005, 8.0
# Further ones that it bears once its ended answers say that drafts would have held: looking alone is felt
# where steps are short, and not each look finds something.
_MOST_EXPECTED = 16.0


@dataclass
class OwnerExperience:
    """Of one owner."""

    acceptance: Acceptance = field(
        default_factory=lambda: Acceptance(_FADING, share=_FIRST_SHARE, weight=_FIRST_WEIGHT)
    )
    # Share of lookups that found something.
    found: float = _FIRST_SHARE
    # Steps' worth of its tokens that were late, less what may be; and the latest step of which it is known.
    late: float = _MOST_LATE
    at_step: int = 0

    def looked_up(self, *, found: bool) -> None:
        """Takes a lookup in."""
        self.found = _FADING * self.found + (1 - _FADING) * found

    def came(self, lateness: float, step: int) -> int:
        """Takes in how late a step was for its sequences on average; steps until it bears one that is late.
        What was early makes up for as much.
        """
        fewest = min(0.0, self.late)
        self.late = max(fewest, self.late - _LATE_SHARE * (step - self.at_step) + lateness)
        self.at_step = step
        return max(0, math.ceil((self.late - _MOST_LATE) / _LATE_SHARE))

    def expects_gain(self) -> None:
        """Its answers say that drafts would hold, which an attempt finds out."""
        self.late = -_MOST_EXPECTED

    def looked_back(self, drafts: Sequence[int], drawn: Sequence[int]) -> int:
        """Takes in what would have been found in a text that is known meanwhile, and returns how much of it
        would have held.
        """
        self.looked_up(found=bool(drafts))
        held = num_held(drafts, drawn)
        if drafts:
            self.acceptance.saw(min(len(drafts), len(drawn)), held)
        return held


class Owners:
    """Experience by owner, of those that were served lately."""

    def __init__(self) -> None:
        # The least recently served first.
        self._known: dict[str, OwnerExperience] = {}

    def of(self, owner: str) -> OwnerExperience:
        """What is known of an owner."""
        found = self._known.pop(owner, None)
        if found is None:
            found = OwnerExperience()
            if len(self._known) >= _MOST_OWNERS:
                del self._known[next(iter(self._known))]
        self._known[owner] = found
        return found

    def verified(self, progress: DraftProgress, owner: str, num_drafted: int, num_accepted: int) -> None:
        """Books how drafts fared."""
        progress.verified(num_drafted, num_accepted)
        self.of(owner).acceptance.saw(num_drafted, num_accepted)

    def compared(self, progress: DraftProgress, owner: str, text: NDArray[np.int64]) -> None:
        """Books how drafts would have fared that were not verified, by the sequence's tokens [L]."""
        drafts = progress.unverified
        drawn = text[progress.num_known_then :][: len(drafts)].tolist()
        held = num_held(drafts, drawn)
        if held == len(drawn) < len(drafts):
            return
        progress.unverified = ()
        progress.acceptance.saw(len(drafts), held)
        self.of(owner).acceptance.saw(len(drafts), held)

    def looked_up(self, progress: DraftProgress, owner: str, *, found: bool) -> None:
        """Books a lookup."""
        known = self.of(owner)
        before = known.found if progress.found is None else progress.found
        progress.found = _FOUND_FADING * before + (1 - _FOUND_FADING) * found
        known.looked_up(found=found)


def num_held(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Leading drafts that were drawn."""
    held = 0
    while held < min(len(drafts), len(drawn)) and drawn[held] == drafts[held]:
        held += 1
    return held


def all_gain(owners: Sequence[str], chances: Sequence[float], share: float) -> bool:
    """Whether lookups that take this share of a step are expected to bring every owner as much."""
    expected: dict[str, list[float]] = {}
    for owner, chance in zip(owners, chances, strict=True):
        expected.setdefault(owner, []).append(chance)
    return all(sum(each) / len(each) >= LEAST_MARGIN * share for each in expected.values())


def leaves_each_as_much(
    owners: Sequence[str],
    whose: NDArray[np.int64],
    tokens: NDArray[np.floating[Any]],
    factors: NDArray[np.floating[Any]],
) -> NDArray[np.bool_]:
    """Whether the first so many drafts [N] leave every owner as many tokens a second as without."""
    names, owner_of = np.unique(np.array(owners), return_inverse=True)
    if names.size == 1:
        return np.ones(tokens.size, np.bool_)
    owned = np.bincount(owner_of, minlength=names.size)  # [O]
    theirs = np.arange(names.size)[:, None] == owner_of[whose]  # [O, N]
    grown = 1 + np.cumsum(np.where(theirs, tokens, 0.0), axis=1) / owned[:, None]
    return np.asarray((grown * (1 + SLACK) >= factors).all(axis=0))
