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
        delta.say(text)

    def finish(self, delta: TextDelta) -> None:
        """See TextParser."""


class _TaggedAnswer:
    """Takes the tags off an answer that begins with one. The closing tag is the format's where the end
    follows it, or the mark `calls` that opens the calls; anywhere else it is text.
    """

    def __init__(self, answer: TextParser, form: ReasoningForm, calls: str) -> None:
        self._answer = answer
        self._form = form
        self._calls = calls
        self._held = ""
        # None: the answer has not begun.
        self._is_tagged: bool | None = None
        # Line breaks before the answer; the closing tag, and white space behind it, until more comes.
        self._blank: list[str] = []
        self._is_closed = False

    def feed(self, text: str, delta: TextDelta) -> None:
        """See TextParser."""
        text, self._held = self._held + text, ""
        if self._is_tagged is None:
            text = self._begin(text, delta)
        while text and self._is_tagged:
            text = self._behind(text, delta) if self._is_closed else self._inside(text, delta)
        if text:
            self._answer.feed(text, delta)

    def finish(self, delta: TextDelta) -> None:
        """See TextParser."""
        if self._held or not self._is_closed:
            self._answer.feed("".join(self._blank) + self._held, delta)
        self._answer.finish(delta)

    def _begin(self, text: str, delta: TextDelta) -> str:
        stripped, opens = text.lstrip("\n"), self._form.answer_open
        self._blank.append(text[: len(text) - len(stripped)])
        if not stripped.startswith(opens) and opens.startswith(stripped):
            self._held = stripped
            return ""
        self._is_tagged = stripped.startswith(opens)
        blank, self._blank = "".join(self._blank), []
        return stripped.removeprefix(opens) if self._is_tagged else blank + stripped

    def _inside(self, text: str, delta: TextDelta) -> str:
        before, mark, rest = split_at_marker(text, (self._form.answer_close,))
        if before:
            self._answer.feed(before, delta)
        if mark is None:
            self._held = rest
            return ""
        self._is_closed, self._blank = True, [mark]
        return rest

    def _behind(self, text: str, delta: TextDelta) -> str:
        stripped = text.lstrip()
        self._blank.append(text[: len(text) - len(stripped)])
        if self._calls and stripped.startswith(self._calls):
            self._is_tagged = False
            return stripped
        if not stripped or self._calls.startswith(stripped):
            self._held = stripped
            return ""
        self._answer.feed("".join(self._blank), delta)
        self._is_closed, self._blank = False, []
        return stripped


class ThinkParser:
    """Reasoning between `<think>` and `</think>`, or the tags of `form`, at the start of the answer; the rest
    goes to `answer`.

    Line breaks around the reasoning and before the answer belong to the format and are dropped. Only text
    at the very start can open reasoning: a `<think>` that the answer mentions later is content.

    Where tags are tokens (`take`), those alone open and close, and tags that are spelled are text.
    """

    def __init__(
        self, answer: TextParser, *, opened: bool, form: ReasoningForm = REASONING["think"], calls: str = ""
    ) -> None:
        """`calls` opens tool calls, where they are looked for."""
        self._answer = _TaggedAnswer(answer, form, calls) if form.answer_open else answer
        self._form = form
        # A function of the class: a bound one would make a cycle, which only the garbage collector ends. The
        # template has written the opening tag already where reasoning is opened.
        self._step: _Step = ThinkParser._think if opened else ThinkParser._before
        self._held = ""
        # Line breaks that belong to the format if nothing of the kind follows them.
        self._num_breaks = 0
        self._at_start = True
        self._by_tokens = False
        # What the opening tag says behind its token.
        self._name = ""

    @property
    def thinking(self) -> bool:
        """Whether text that comes now is reasoning."""
        return self._step is ThinkParser._think

    @property
    def answers(self) -> bool:
        """Whether text that comes now may be the answer's."""
        return not self.thinking

    @property
    def is_over(self) -> bool:
        """Whether all text that comes is the answer's."""
        return self._step is ThinkParser._after_think

    def take(self, text: str, token: str, thinks: bool | None, delta: TextDelta) -> None:
        """Reads the text of one token; `thinks` says whether a thought goes on behind it, None before one. A
        `token` at which that changes is a tag, or the first one of an answer without a thought.
        """
        self._by_tokens = True
        if thinks and self._step is ThinkParser._before:
            self._step, self._num_breaks = ThinkParser._think, 0
            self._name = self._form.open.removeprefix(token)
        elif thinks is False and self._step is ThinkParser._think:
            self.feed(text.removesuffix(token), delta)
            delta.think(self._held)
            self._step, self._held, self._num_breaks = ThinkParser._after_think, "", 0
            self._at_start = True
        elif thinks is False and self._step is ThinkParser._before:
            self._step, self._at_start = ThinkParser._after_think, False
            self._answer.feed(self._breaks() + text, delta)
        else:
            self.feed(text, delta)

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
            self._answer.feed(self._breaks() + self._held, delta)
        elif self._step is ThinkParser._think and self._held:
            delta.think(self._breaks() + self._held)
        self._held = ""
        self._answer.finish(delta)

    def _breaks(self) -> str:
        breaks, self._num_breaks = "\n" * self._num_breaks, 0
        return breaks

    def _before(self, text: str, delta: TextDelta) -> str:
        stripped = text.lstrip("\n")
        self._num_breaks += len(text) - len(stripped)
        if self._by_tokens:
            # Nothing but line breaks, of which the last one may still come.
            return stripped
        opens = self._form.open
        if stripped.startswith(opens):
            self._step, self._num_breaks = ThinkParser._think, 0
            return stripped[len(opens) :]
        if opens.startswith(stripped):
            return stripped
        self._step = ThinkParser._after_think
        self._at_start = False
        return self._breaks() + stripped

    def _think(self, text: str, delta: TextDelta) -> str:
        if self._at_start:
            if self._name.startswith(text) and text != self._name:
                return text
            text = text.removeprefix(self._name).lstrip("\n")
            self._name = ""
            if not text:
                return ""
            self._at_start = False
        tags = () if self._by_tokens else (self._form.close,)
        before, marker, rest = split_at_marker(text, tags)
        certain = before.rstrip("\n")
        if certain:
            delta.think(self._breaks() + certain)
        self._num_breaks += len(before) - len(certain)
        if marker is not None:
            self._step, self._num_breaks = ThinkParser._after_think, 0
            self._at_start = True
        return rest

    def _after_think(self, text: str, delta: TextDelta) -> str:
        if self._at_start:
            text = text.lstrip("\n")
            if not text:
                return ""
            self._at_start = False
        self._answer.feed(text, delta)
        return ""


_Step: TypeAlias = Callable[[ThinkParser, str, TextDelta], str]
