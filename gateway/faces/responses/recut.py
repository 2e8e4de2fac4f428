"""Deltas cut by their text, not by an engine's messages: computed anew, they are the same."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.pipeline.delta import ChoiceDelta
from gateway.text.delta import ToolCallDelta

# Characters of a delta: some tokens.
_CHARACTERS = 32


class Recut:
    """Feeds on the deltas of one choice."""

    def __init__(self, *, whole: bool = False) -> None:
        """`whole` gives each part of an answer in one delta: log-probabilities belong to tokens, whose texts
        cannot be cut.
        """
        self._characters = None if whole else _CHARACTERS
        # "reasoning", "content", or the index of a call.
        self._kind: str | int = ""
        self._held = ChoiceDelta()

    def feed(self, delta: ChoiceDelta) -> Iterator[ChoiceDelta]:
        """What is complete; all of it with the last delta."""
        calls = delta.tool_calls
        if calls and calls[0].index == self._kind:
            # What belongs to the call that is open comes before what ends it.
            yield from self._add(calls[0].index, calls[0].arguments)
            calls = calls[1:]
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning)
        if delta.content:
            yield from self._add("content", delta.content)
        self._held.logprobs += delta.logprobs
        for piece in calls:
            if piece.index != self._kind:
                yield from self._flush()
                self._kind = piece.index
                yield ChoiceDelta(tool_calls=[ToolCallDelta(piece.index, piece.id, piece.name)])
            yield from self._add(piece.index, piece.arguments)
        if delta.finish_reason is not None:
            yield from self._flush()
            yield ChoiceDelta(finish_reason=delta.finish_reason)

    def _add(self, kind: str | int, text: str) -> Iterator[ChoiceDelta]:
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
        if isinstance(self._kind, int):
            return self._held.tool_calls[0].arguments if self._held.tool_calls else ""
        return self._held.reasoning if self._kind == "reasoning" else self._held.content

    def _put(self, text: str) -> None:
        logprobs, self._held = self._held.logprobs, self._made(text)
        self._held.logprobs = logprobs

    def _made(self, text: str) -> ChoiceDelta:
        if isinstance(self._kind, int):
            return ChoiceDelta(tool_calls=[ToolCallDelta(self._kind, arguments=text)])
        return ChoiceDelta(reasoning=text) if self._kind == "reasoning" else ChoiceDelta(content=text)

    def _flush(self) -> Iterator[ChoiceDelta]:
        held, is_empty = self._held, not self._text
        self._held = ChoiceDelta()
        if not is_empty or held.logprobs:
            yield held
