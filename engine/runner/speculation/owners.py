"""How drafts fared in all of an owner's sequences: what a new one of them begins with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.runner.speculation.acceptance import Acceptance

# How fast the experience with an owner's sequences fades, and where it begins: share and number of
# drafts. Owners whose experience is kept.
_FADING, _FIRST_SHARE, _FIRST_WEIGHT = 0.98, 0.5, 4.0
_MOST_OWNERS = 1024


@dataclass
class OwnerExperience:
    """Of one owner."""

    acceptance: Acceptance = field(
        default_factory=lambda: Acceptance(_FADING, share=_FIRST_SHARE, weight=_FIRST_WEIGHT)
    )
    # Share of lookups that found something.
    found: float = _FIRST_SHARE

    def looked_up(self, *, found: bool) -> None:
        """Takes a lookup in."""
        self.found = _FADING * self.found + (1 - _FADING) * found

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


def num_held(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Leading drafts that were drawn."""
    held = 0
    while held < min(len(drafts), len(drawn)) and drawn[held] == drafts[held]:
        held += 1
    return held
