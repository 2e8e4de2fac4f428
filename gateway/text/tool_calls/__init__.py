"""Parsers of the formats in which models write tool calls, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.text.tool_calls import deepseek, hermes, llama3, mistral
from gateway.text.tool_calls.deepseek import DeepSeekParser
from gateway.text.tool_calls.hermes import HermesParser
from gateway.text.tool_calls.llama3 import Llama3Parser
from gateway.text.tool_calls.mistral import MistralParser
from gateway.text.tool_calls.parser import CallIds, ToolCallParser

PARSERS: Mapping[str, Callable[[CallIds], ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "mistral_v11": MistralParser,
    "mistral_v13": MistralParser,
    "deepseek": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
}

# Tokens that these formats are made of. They are read by the parser even where the tokenizer calls them
# special.
MARKERS: Mapping[str, tuple[str, ...]] = {
    "hermes": hermes.MARKERS,
    "llama3": llama3.MARKERS,
    "mistral": mistral.MARKERS,
    "mistral_v11": mistral.MARKERS,
    "mistral_v13": mistral.MARKERS,
    "deepseek": deepseek.MARKERS,
    "deepseek_v31": deepseek.MARKERS,
}
