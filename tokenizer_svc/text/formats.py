"""In which format a checkpoint writes tool calls and reasoning; the names that output parsers know."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from contract.formats import THINK_CLOSE

HERMES = "hermes"
LLAMA3 = "llama3"
MISTRAL = "mistral"
# From version 11 of its tokenizers on: the name before the arguments, at first with the id between them.
MISTRAL_V11 = "mistral_v11"
MISTRAL_V13 = "mistral_v13"
DEEPSEEK = "deepseek"
# From V3.1 on: the name before the separator, and the arguments without a fence.
DEEPSEEK_V31 = "deepseek_v31"
THINK = "think"


def tool_call_format(templates: Mapping[str, str], tokens: Collection[str]) -> str:
    """Name of the tool-call format that the templates write, or ""."""
    source = "\n".join(templates.values())
    if "<tool_call>" in source:
        return HERMES
    if "<｜tool▁calls▁begin｜>" in source:
        return DEEPSEEK if "```json" in source else DEEPSEEK_V31
    if "[TOOL_CALLS]" in source and "[ARGS]" in source:
        return MISTRAL_V11 if "[CALL_ID]" in source else MISTRAL_V13
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<|python_tag|>" in tokens and "tools" in source:
        return LLAMA3
    return ""


def reasoning_format(templates: Mapping[str, str], tokens: Collection[str]) -> str:
    """Name of the reasoning format, or ""."""
    source = "\n".join(templates.values())
    return THINK if THINK_CLOSE in source or THINK_CLOSE in tokens else ""
