"""Finds stop strings in text that arrives in pieces, and holds back no more than might become one."""

from __future__ import annotations

from collections.abc import Sequence


def longest_partial_suffix(text: str, patterns: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of the patterns."""
    longest = 0
    for pattern in patterns:
        for length in range(min(len(pattern) - 1, len(text)), longest, -1):
            if text.endswith(pattern[:length]):
                longest = length
                break
    return longest


class StopStrings:
    """Passes text through until a stop string is complete; the stop string itself is not passed on.

    When several match, the one that is complete first wins, and of those the longest: the outcome does not
    depend on how the text was cut.
    """

    __slots__ = ("_held", "_patterns", "matched")

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._held = ""
        # The stop string that ended the text.
        self.matched: str | None = None

    @property
    def is_armed(self) -> bool:
        """Whether there is anything to stop at."""
        return bool(self._patterns)

    def feed(self, text: str) -> str:
        """Text that is certain not to belong to a stop string; sets `matched` when one is complete."""
        if not self._patterns:
            return text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            start, self.matched = match
            self._held = ""
            return text[:start]
        keep = longest_partial_suffix(text, self._patterns)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, str] | None:
        found = ((start, each) for each in self._patterns if (start := text.find(each)) >= 0)
        return min(found, key=lambda match: (match[0] + len(match[1]), match[0]), default=None)
