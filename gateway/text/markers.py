"""Finds a marker such as `<tool_call>` in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.text.stop_strings import longest_partial_suffix


def split_at_marker(text: str, markers: Sequence[str]) -> tuple[str, str | None, str]:
    """Splits `text` at the earliest of `markers`.

    Returns (text before it, the marker, rest). Without one: (text that cannot belong to a marker, None, the
    tail that might yet become one).
    """
    best: tuple[int, int, str] | None = None
    for marker in markers:
        start = text.find(marker)
        if start >= 0 and (best is None or (start, -len(marker)) < best[:2]):
            best = (start, -len(marker), marker)
    if best is not None:
        start, _, marker = best
        return text[:start], marker, text[start + len(marker) :]
    keep = longest_partial_suffix(text, markers)
    return text[: len(text) - keep], None, text[len(text) - keep :]
