"""Formats of tool calls and reasoning: what the tokenizer service names, gateways read."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

from contract.formats import REASONING, ReasoningFormat, ToolCallFormat
from gateway.text.tool_calls import PARSERS
from tokenizer_svc.grammar.call_layouts import LAYOUTS


def test_every_tool_call_format_has_a_grammar_and_a_parser() -> None:
    assert set(get_args(ToolCallFormat)) == set(PARSERS) == set(LAYOUTS)


def test_every_reasoning_format_has_a_parser() -> None:
    assert set(get_args(ReasoningFormat)) == set(REASONING)


def test_the_reference_lists_every_format() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference.md").read_text(encoding="utf-8")
    names = (*get_args(ToolCallFormat), *get_args(ReasoningFormat))
    assert [name for name in names if f"`{name}`" not in text] == []
