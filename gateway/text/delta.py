"""What one piece of a stream adds to an answer: parts in the order in which the model wrote them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, TypeVar

import msgspec


class TextPart(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer's text."""

    text: str


class ThoughtPart(msgspec.Struct, frozen=True, gc=False):
    """A piece of what the model thinks."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a tool call: id and name come first, arguments follow in pieces."""

    index: int
    # Set on the first piece of a call only.
    id: str = ""
    name: str = ""
    # A piece of the arguments' JSON text.
    arguments: str = ""

    @property
    def text(self) -> str:
        """What grows from piece to piece."""
        return self.arguments


AnswerPart: TypeAlias = TextPart | ThoughtPart | ToolCallDelta
_Part = TypeVar("_Part", TextPart, ThoughtPart, ToolCallDelta, AnswerPart)


class TextDelta(msgspec.Struct):
    """Parts of one choice, in the order of the answer. What a run of one kind says may be cut anywhere."""

    parts: list[AnswerPart] = []

    def add(self, part: AnswerPart) -> None:
        """Adds what comes next. A part is joined to those before it while these are less than twice as long:
        so few are kept, and no text is copied more often than its length doubles.
        """
        parts = self.parts
        while parts and len(parts[-1].text) < 2 * len(part.text) and _is_one(parts[-1], part):
            part = _joined((parts.pop(), part))
        parts.append(part)

    def say(self, text: str) -> None:
        """Adds a piece of the answer's text."""
        if text:
            self.add(TextPart(text))

    def think(self, text: str) -> None:
        """Adds a piece of the thoughts."""
        if text:
            self.add(ThoughtPart(text))

    def absorb_text(self, later: TextDelta) -> None:
        """Adds the parts that came right after these; `later` stays as it is."""
        for part in later.parts:
            self.add(part)

    def runs(self) -> list[AnswerPart]:
        """The parts, each of them whole: no neighbours are of one kind, or of one call."""
        if len(self.parts) < 2:
            return self.parts
        return _runs(self.parts)

    @property
    def plain(self) -> str | None:
        """The text, where there is nothing else."""
        parts = self.parts
        if not parts:
            return ""
        return parts[0].text if len(parts) == 1 and type(parts[0]) is TextPart else None

    def without_thoughts(self) -> None:
        """Takes the thoughts out."""
        self.parts = [part for part in self.parts if type(part) is not ThoughtPart]

    @property
    def content(self) -> str:
        """All text of the answer."""
        return "".join([part.text for part in self.parts if type(part) is TextPart])

    @property
    def reasoning(self) -> str:
        """All thoughts."""
        return "".join([part.text for part in self.parts if type(part) is ThoughtPart])

    @property
    def tool_calls(self) -> list[ToolCallDelta]:
        """All calls, a piece of each."""
        return _runs(part for part in self.parts if type(part) is ToolCallDelta)


def _is_one(first: AnswerPart, then: AnswerPart) -> bool:
    """Whether both are pieces of one run."""
    if type(first) is not type(then):
        return False
    return not isinstance(first, ToolCallDelta) or first.index == then.index  # type: ignore[union-attr]


def _joined(run: Iterable[AnswerPart]) -> AnswerPart:
    first, *others = run
    if not others:
        return first
    text = "".join([first.text, *(part.text for part in others)])
    if isinstance(first, ToolCallDelta):
        return ToolCallDelta(first.index, first.id, first.name, text)
    return type(first)(text)


def _runs(parts: Iterable[_Part]) -> list[_Part]:
    runs: list[list[_Part]] = []
    for part in parts:
        if runs and _is_one(runs[-1][0], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return [_joined(run) for run in runs]  # type: ignore[misc]
