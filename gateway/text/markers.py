"""Finds a marker such as `<tool_call>` in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """Splits `text` at the earliest of `markers`.

    Returns (text before it, the marker, rest). Without one: (text that cannot belong to a marker, None, the
    tail that might yet become one).
    """
    found = ((start, -len(each), each) for each in markers if (start := text.find(each)) >= 0)
    start, _, marker = min(found, default=(-1, 0, ""))
    if marker:
        return text[:start], marker, text[start + len(marker) :]
    keep = longest_partial_suffix(text, markers)
    return text[: len(text) - keep], None, text[len(text) - keep :]


def longest_partial_suffix(text: str, patterns: Sequence[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of one of the patterns."""
    longest = 0
    for pattern in patterns:
        start = text.find(pattern[0], max(0, len(text) - len(pattern) + 1))
        while 0 <= start < len(text) - longest:
            if pattern.startswith(text[start:]):
                longest = len(text) - start
            start = text.find(pattern[0], start + 1)
    return longest
