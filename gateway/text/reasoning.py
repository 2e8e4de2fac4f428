"""Separates thoughts, `<think> … </think>` or in another family's tags, from the answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from contract.formats import REASONING, ReasoningForm
from gateway.text.delta import TextDelta
from gateway.text.markers import split_at_marker


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


class _TaggedAnswer:
    """Takes the tags off an answer that has some: the first if it begins so, and then the other."""

    def __init__(self, answer: TextParser, form: ReasoningForm) -> None:
        self._answer = answer
        self._form = form
        self._held = ""
        # None: the answer has not begun.
        self._is_tagged: bool | None = None

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser."""
        text, self._held = self._held + text, ""
        if self._is_tagged is None:
            stripped, opens = text.lstrip("\n"), self._form.answer_open
            if not stripped.startswith(opens) and opens.startswith(stripped):
                self._held = text
                return
            self._is_tagged = stripped.startswith(opens)
            text = stripped.removeprefix(opens) if self._is_tagged else text
        if self._is_tagged:
            before, mark, rest = split_at_marker(text, (self._form.answer_close,))
            self._held = "" if mark else rest
            text = before + rest if mark else before
        if text:
            self._answer.feed(text, delta)

    def finish(self, delta: TextDelta) -> None:
        """See TextParser."""
        if self._held:
            self._answer.feed(self._held, delta)
        self._answer.finish(delta)


class ThinkParser:
    """Reasoning between `<think>` and `</think>`, or the tags of `form`, at the start of the answer; the rest
    goes to `answer`.

    Line breaks around the reasoning and before the answer belong to the format and are dropped. Only text
    at the very start can open reasoning: a `<think>` that the answer mentions later is content.
    """

    def __init__(self, answer: TextParser, *, opened: bool, form: ReasoningForm = REASONING["think"]) -> None:
        self._answer = _TaggedAnswer(answer, form) if form.answer_open else answer
        self._form = form
        # A function of the class: a bound one would make a cycle, which only the garbage collector ends. The
        # template has written the opening tag already where reasoning is opened.
        self._step: _Step = ThinkParser._think if opened else ThinkParser._before
        self._held = ""
        self._at_start = True

    @property
    def thinking(self) -> bool:
        """Whether text that comes now is reasoning."""
        return self._step is ThinkParser._think

    @property
    def is_over(self) -> bool:
        """Whether all text that comes is the answer's."""
        return self._step is ThinkParser._after_think

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser."""
        if self._step is ThinkParser._after_think:
            self._after_think(text, delta)
            return
        text, self._held = self._held + text, ""
        step = None
        while text and step is not self._step:
            step = self._step
            text = step(self, text, delta)
        self._held = text

    def finish(self, delta: TextDelta) -> None:
        """See TextParser. Reasoning that never ended stays reasoning."""
        if self._step is ThinkParser._before:
            self._answer.feed(self._held, delta)
        elif self._step is ThinkParser._think:
            delta.reasoning += self._held.rstrip("\n")
        self._held = ""
        self._answer.finish(delta)

    def _before(self, text: str, delta: TextDelta) -> str:
        stripped = text.lstrip("\n")
        opens = self._form.open
        if stripped.startswith(opens):
            self._step = ThinkParser._think
            return stripped[len(opens) :]
        if opens.startswith(stripped):
            return text
        self._step = ThinkParser._after_think
        self._at_start = False
        return text

    def _think(self, text: str, delta: TextDelta) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            if not text:
                return ""
            self._at_start = False
        before, marker, rest = split_at_marker(text, (self._form.close,))
        if marker is not None:
            delta.reasoning += before.rstrip("\n")
            self._step = ThinkParser._after_think
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


_Step: TypeAlias = Callable[[ThinkParser, str, TextDelta], str]
