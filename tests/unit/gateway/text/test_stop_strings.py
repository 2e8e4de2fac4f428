"""Stop strings: nothing of them is shown, nothing else is lost, no more is held back than may become one."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from gateway.text.choice import StopStrings
from gateway.text.delta import TextDelta
from gateway.text.markers import longest_partial_suffix
from gateway.text.reasoning import ContentParser

texts = st.text(alphabet="abc", max_size=30)
patterns = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def run(stop: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher, shown = StopStrings(stop, ContentParser()), TextDelta()
    num_fed = 0
    for piece in pieces:
        matcher.feed(piece, shown)
        num_fed += len(piece)
        assert len(shown.content) == num_fed - matcher.num_withheld
    matcher.finish(shown)
    return shown.content, matcher.matched


def reference(stop: list[str], text: str) -> tuple[str, str | None]:
    """Reads one character at a time and looks at everything so far."""
    for end in range(len(text) + 1):
        ended = [pattern for pattern in stop if text[:end].endswith(pattern)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(patterns, texts, st.lists(st.integers(0, 30), max_size=5))
def test_every_cut_gives_the_reference(stop: list[str], text: str, at: list[int]) -> None:
    bounds = [0, *sorted(at), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    assert run(stop, pieces) == reference(stop, text)


@given(patterns, texts)
def test_only_a_possible_beginning_is_held_back(stop: list[str], text: str) -> None:
    matcher, shown = StopStrings(stop, ContentParser()), TextDelta()
    matcher.feed(text, shown)
    if matcher.matched is None:
        held = text[len(shown.content) :]
        assert held == "" or any(pattern.startswith(held) for pattern in stop)
        assert len(held) == longest_partial_suffix(text, stop)
