"""Parsers of the formats in which models write tool calls, by name."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.text.tool_calls.deepseek import DeepSeekParser
from gateway.text.tool_calls.hermes import HermesParser
from gateway.text.tool_calls.llama3 import Llama3Parser
from gateway.text.tool_calls.mistral import MistralParser
from gateway.text.tool_calls.parser import ToolCallParser

PARSERS: Mapping[str, type[ToolCallParser]] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "mistral_v11": MistralParser,
    "mistral_v13": MistralParser,
    "deepseek": DeepSeekParser,
    "deepseek_v31": DeepSeekParser,
}
