"""Whether an answer has come to repeat itself, as a small model does that has lost its way.

The criterion is exact: the answer ends with one piece of text over and over, at least five times in a row, at
least 400 characters in all, and the piece has at most 400. Numbers that go on count as different text: a list
that somebody asked for is none that repeats itself.
"""

from __future__ import annotations

_TIMES = 5
_LEAST_CHARACTERS = 400
_LONGEST_PIECE = 400
# More of the end need not be looked at.
_WINDOW = _TIMES * _LONGEST_PIECE
# Characters between two looks.
_STRIDE = 64


class RepetitionWatch:
    """Reads one answer, piece by piece."""

    def __init__(self) -> None:
        self._end = ""
        self._unseen = 0

    def repeats(self, piece: str) -> bool:
        """Whether the answer repeats itself, up to and with this piece."""
        self._end = (self._end + piece)[-_WINDOW:]
        self._unseen += len(piece)
        if self._unseen < _STRIDE:
            return False
        self._unseen = 0
        return is_repetition(self._end)


def is_repetition(text: str) -> bool:
    """Whether a text ends with one piece of it over and over; see above."""
    backwards = text[-_WINDOW:][::-1]
    # By length of a beginning of `backwards`: its longest proper beginning that is its end as well. The rest
    # is the shortest piece that the beginning is made of (Knuth, Morris and Pratt).
    borders = [0] * (len(backwards) + 1)
    border = 0
    for length in range(2, len(backwards) + 1):
        character = backwards[length - 1]
        while border and backwards[border] != character:
            border = borders[border]
        if backwards[border] == character:
            border += 1
        borders[length] = border
        period = length - border
        if period <= _LONGEST_PIECE and length >= max(_LEAST_CHARACTERS, _TIMES * period):
            return True
    return False
