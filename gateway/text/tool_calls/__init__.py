"""Parsers of the formats in which models write tool calls, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from gateway.text.delta import TextDelta
from gateway.text.tool_calls import deepseek, hermes, llama3, mistral
from gateway.text.tool_calls.deepseek import DeepSeekParser
from gateway.text.tool_calls.hermes import HermesParser
from gateway.text.tool_calls.llama3 import Llama3Parser
from gateway.text.tool_calls.mistral import MistralParser

# Makes the id of the call with this index.
CallIds = Callable[[int], str]


class ToolCallParser(Protocol):
    """A TextParser that takes calls out of the text."""

    # Calls completed so far.
    num_complete: int

    @property
    def num_calls(self) -> int:
        """Calls begun so far."""
        ...

    def feed(self, text: str, delta: TextDelta) -> None:
        """Adds content and pieces of calls that are certain."""
        ...

    def finish(self, delta: TextDelta) -> None:
        """Adds what was held back; text that never became a call is content."""
        ...


PARSERS: Mapping[str, Callable[[CallIds], ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "mistral_v11": MistralParser,
    "mistral_v13": MistralParser,
    "deepseek": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
}

_DEEPSEEK = (
    deepseek.CALLS_BEGIN,
    deepseek.CALLS_END,
    deepseek.CALL_BEGIN,
    deepseek.CALL_END,
    deepseek.SEPARATOR,
)
_MISTRAL = (mistral.MARKER, mistral.ARGUMENTS, mistral.CALL_ID)
# Tokens that these formats are made of. They are read by the parser even where the tokenizer calls them
# special.
MARKERS: Mapping[str, tuple[str, ...]] = {
    "hermes": (hermes.OPEN, hermes.CLOSE),
    "llama3": (llama3.TAG,),
    "mistral": _MISTRAL,
    "mistral_v11": _MISTRAL,
    "mistral_v13": _MISTRAL,
    "deepseek": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
}
