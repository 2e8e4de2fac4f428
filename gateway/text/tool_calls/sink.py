"""Where parsers put what they find: calls are numbered and get their ids here."""

from __future__ import annotations

from collections.abc import Callable

from gateway.text.delta import TextDelta, ToolCallDelta


class CallSink:
    """Writes content and pieces of calls into the current delta."""

    def __init__(self, call_id: Callable[[int], str]) -> None:
        self.num_begun = 0
        self.delta = TextDelta()
        self._call_id = call_id

    def begin(self, name: str) -> None:
        """A call's name is known."""
        index = self.num_begun
        self.num_begun += 1
        self.delta.add_call(ToolCallDelta(index=index, id=self._call_id(index), name=name))

    def argue(self, piece: str) -> None:
        """A piece of the arguments of the call that began last."""
        self.delta.add_call(ToolCallDelta(index=self.num_begun - 1, arguments=piece))

    def content(self, text: str) -> None:
        """Text that belongs to no call."""
        self.delta.content += text
