"""Parsers of the formats in which models write tool calls, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.text.delta import TextDelta
from gateway.text.tool_calls.hermes import HermesParser

# Makes the id of the call with this index.
CallIds = Callable[[int], str]


class ToolCallParser(Protocol):
    """A TextParser that takes calls out of the text."""

    # Calls begun so far.
    num_calls: int
    # Calls completed so far.
    num_complete: int

    def feed(self, text: str, delta: TextDelta) -> None:
        """Adds content and pieces of calls that are certain."""
        ...

    def finish(self, delta: TextDelta) -> None:
        """Adds what was held back; text that never became a call is content."""
        ...


PARSERS: Mapping[str, Callable[[CallIds], ToolCallParser]] = {
    "hermes": HermesParser,
}

# Tokens that these formats are made of. They are read by the parser even where the tokenizer calls them
# special.
MARKERS: Mapping[str, tuple[str, ...]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
}
