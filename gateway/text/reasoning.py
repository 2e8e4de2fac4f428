"""Separates `<think> … </think>` from the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.text.delta import TextDelta
from gateway.text.markers import split_at_marker

OPEN, CLOSE = "<think>", "</think>"


class TextParser(Protocol):
    """One stage between plain text and a delta. The joined outcome does not depend on how the text was
    cut.
    """

    def feed(self, text: str, delta: TextDelta) -> None:
        """Adds what is certain to `delta`."""
        ...

    def finish(self, delta: TextDelta) -> None:
        """Adds what was held back."""
        ...


class ContentParser:
    """All text is content."""

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser."""
        delta.content += text

    def finish(self, delta: TextDelta) -> None:
        """See TextParser."""


class ThinkParser:
    """Reasoning between `<think>` and `</think>` at the start of the answer; the rest goes to `answer`.

    Line breaks around the reasoning and before the answer belong to the format and are dropped. Only text
    at the very start can open reasoning: a `<think>` that the answer mentions later is content.
    """

    def __init__(self, answer: TextParser, *, opened: bool) -> None:
        self._answer = answer
        # The template has written the opening tag already.
        self._step: Callable[[str, TextDelta], str] = self._think if opened else self._before
        self._held = ""
        self._at_start = True

    @property
    def thinking(self) -> bool:
        """Whether text that comes now is reasoning."""
        return self._step == self._think

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser."""
        if self._step == self._after_think:
            self._after_think(text, delta)
            return
        text, self._held = self._held + text, ""
        step = None
        while text and step != self._step:
            step = self._step
            text = step(text, delta)
        self._held = text

    def finish(self, delta: TextDelta) -> None:
        """See TextParser. Reasoning that never ended stays reasoning."""
        if self._step == self._before:
            self._answer.feed(self._held, delta)
        elif self._step == self._think:
            delta.reasoning += self._held.rstrip("\n")
        self._held = ""
        self._answer.finish(delta)

    def _before(self, text: str, delta: TextDelta) -> str:
        stripped = text.lstrip("\n")
        if stripped.startswith(OPEN):
            self._step = self._think
            return stripped[len(OPEN) :]
        if OPEN.startswith(stripped):
            return text
        self._step = self._after_think
        self._at_start = False
        return text

    def _think(self, text: str, delta: TextDelta) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            if not text:
                return ""
            self._at_start = False
        before, marker, rest = split_at_marker(text, (CLOSE,))
        if marker is not None:
            delta.reasoning += before.rstrip("\n")
            self._step = self._after_think
            self._at_start = True
            return rest
        certain = before.rstrip("\n")
        delta.reasoning += certain
        return text[len(certain) :]

    def _after_think(self, text: str, delta: TextDelta) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            if not text:
                return ""
            self._at_start = False
        self._answer.feed(text, delta)
        return ""
