"""How likely drafts are to hold, by their place behind the last token, the latest ones counting most."""

from __future__ import annotations

# Places that are told apart; those behind share the last one.
_PLACES = 8


class Acceptance:
    """Drafts that were decided: all that were accepted, and the first of each round that was not. What was
    decided before counts `fading` times as much with each further decision at the same place.
    """

    __slots__ = ("_accepted", "_fading", "_tried")

    def __init__(self, fading: float, *, share: float = 0.0, weight: float = 0.0) -> None:
        """It begins as if `weight` drafts at each place had been tried, with `share` of them accepted."""
        self._fading = fading
        self._tried = [weight] * _PLACES
        self._accepted = [share * weight] * _PLACES

    def saw(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in a round of drafts."""
        for place in range(min(num_accepted + (num_accepted < num_drafted), _PLACES)):
            self._tried[place] = self._tried[place] * self._fading + 1
            self._accepted[place] = self._accepted[place] * self._fading + (place < num_accepted)

    def share(self, place: int, weight: float, prior: Acceptance | None = None) -> float:
        """Probability that the draft at a place holds if those before it do. The experience with others
        counts as `weight` drafts; without it, as many that did not hold.
        """
        place = min(place, _PLACES - 1)
        expected = 0.0 if prior is None else prior._accepted[place] / prior._tried[place]
        return (self._accepted[place] + weight * expected) / (self._tried[place] + weight)
