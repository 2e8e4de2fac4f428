"""Deltas cut by their text, not by an engine's messages: computed anew, they are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from gateway.pipeline.delta import ChoiceDelta
from gateway.text.delta import TextPart, ThoughtPart, ToolCallDelta

# Characters of a delta: some tokens.
_CHARACTERS = 32
_Kind: TypeAlias = type[TextPart] | type[ThoughtPart] | int


class Recut:
    """Feeds on the deltas of one choice."""

    def __init__(self, *, whole: bool = False) -> None:
        """`whole` gives each part of an answer in one delta: log-probabilities belong to tokens, whose texts
        cannot be cut.
        """
        self._characters = None if whole else _CHARACTERS
        # Of text and thoughts the type, of a call its index.
        self._kind: _Kind = TextPart
        self._held = ChoiceDelta()

    def feed(self, delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
        """What is complete; all of it with the last delta."""
        logprobs = delta.logprobs
        for part in delta.runs():
            if isinstance(part, ToolCallDelta):
                if part.index != self._kind:
                    self._held.logprobs += logprobs
                    logprobs = []
                    yield from self._flush()
                    self._kind = part.index
                    yield ChoiceDelta([ToolCallDelta(part.index, part.id, part.name)])
                yield from self._add(part.index, part.arguments)
            else:
                yield from self._add(type(part), part.text)
        self._held.logprobs += logprobs
        if delta.finish_reason is not None:
            yield from self._flush()
            yield ChoiceDelta(finish_reason=delta.finish_reason)

    def _add(self, kind: _Kind, text: str) -> Iterator[ChoiceDelta]:
        if kind != self._kind:
            yield from self._flush()
            self._kind = kind
        whole = self._text + text
        if self._characters is not None:
            while len(whole) >= self._characters:
                piece, whole = whole[: self._characters], whole[self._characters :]
                yield self._made(piece)
        self._put(whole)

    @property
    def _text(self) -> str:
        return "".join([part.text for part in self._held.parts])

    def _put(self, text: str) -> None:
        logprobs, self._held = self._held.logprobs, self._made(text)
        self._held.logprobs = logprobs

    def _made(self, text: str) -> ChoiceDelta:
        if isinstance(self._kind, int):
            return ChoiceDelta([ToolCallDelta(self._kind, arguments=text)])
        return ChoiceDelta([self._kind(text)] if text else [])

    def _flush(self) -> Iterator[ChoiceDelta]:
        held, is_empty = self._held, not self._text
        self._held = ChoiceDelta()
        if not is_empty or held.logprobs:
            yield held
