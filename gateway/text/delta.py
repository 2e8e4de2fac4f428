"""What one piece of a stream adds to an answer."""

from __future__ import annotations

from copy import copy

import msgspec


class ToolCallDelta(msgspec.Struct, gc=False):
    """A piece of a tool call: id and name come first, arguments follow in pieces."""

    index: int
    # Set on the first piece of a call only.
    id: str = ""
    name: str = ""
    # A piece of the arguments' JSON text.
    arguments: str = ""


class TextDelta(msgspec.Struct):
    """Text of one piece, sorted by what it is."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []

    def absorb_text(self, later: TextDelta) -> None:
        """Adds the text that came right after this, which stays as it is."""
        self.content += later.content
        self.reasoning += later.reasoning
        for piece in later.tool_calls:
            # Both may still be read.
            self.add_call(copy(piece))

    def add_call(self, piece: ToolCallDelta) -> None:
        """Adds a piece of a call, joining it to the previous piece of the same call."""
        if self.tool_calls and self.tool_calls[-1].index == piece.index:
            last = self.tool_calls[-1]
            last.id = last.id or piece.id
            last.name = last.name or piece.name
            last.arguments += piece.arguments
        else:
            self.tool_calls.append(piece)
