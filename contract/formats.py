"""Names of the formats in which models write tool calls and reasoning, and the marks of which they are made:
the tokenizer service finds them and leads answers by them, gateways read them, engines write their ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

# From version 11 of its tokenizers on, Mistral writes the name before the arguments, at first with the id
# between them; DeepSeek from V3.1 on writes it before the separator, and arguments without a fence. GLM from
# 4.7 on writes no line breaks.
ToolCallFormat = Literal[
    "hermes", "llama3", "llama4", "mistral", "mistral_v11", "mistral_v13", "deepseek", "deepseek_v31",
    "deepseek_v32", "deepseek_v4", "deepseek_v41", "qwen_xml", "glm", "glm47", "kimi", "minimax", "harmony",
    "granite", "gemma4", "functiongemma", "phi4", "functools", "command",
]  # fmt: skip
# Calls that the template writes in none of them.
UNKNOWN_FORMAT = "unknown"
ReasoningFormat = Literal["think", "mistral", "gemma4", "command", "granite", "harmony"]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


class ReasoningForm(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around thoughts, and around the answer after them."""

    open: str = THINK_OPEN
    close: str = THINK_CLOSE
    answer_open: str = ""
    answer_close: str = ""


REASONING: Mapping[str, ReasoningForm] = {
    "think": ReasoningForm(),
    "mistral": ReasoningForm(open="[THINK]", close="[/THINK]"),
    "gemma4": ReasoningForm(open="<|channel>thought\n", close="<channel|>"),
    "command": ReasoningForm(
        open="<|START_THINKING|>",
        close="<|END_THINKING|>",
        answer_open="<|START_RESPONSE|>",
        answer_close="<|END_RESPONSE|>",
    ),
    "granite": ReasoningForm(answer_open="<response>", answer_close="</response>"),
    "harmony": ReasoningForm(
        open="<|channel|>analysis<|message|>",
        close="<|end|><|start|>assistant",
        answer_open="<|channel|>final<|message|>",
    ),
}


class TaggedForm(msgspec.Struct, frozen=True, kw_only=True):
    """Calls whose arguments stand one by one between marks: `open (call_open NAME name_close (key_open KEY
    key_close value_open VALUE value_close)* call_close)* close`, with white space between the parts.
    """

    open: str
    close: str
    # Empty: the name follows `open`, and `close` ends the call.
    call_open: str = ""
    # Empty: the first argument ends the name, or the call's end does.
    name_close: str = ""
    call_close: str = ""
    key_open: str
    key_close: str
    value_open: str = ""
    value_close: str
    # One of it on both sides of a value belongs to the format.
    pad: str = ""
    # Follows a key with "true" or "false": whether the value is a text.
    kind: str = ""


def _glm(name_close: str) -> TaggedForm:
    return TaggedForm(
        open="<tool_call>",
        close="</tool_call>",
        name_close=name_close,
        key_open="<arg_key>",
        key_close="</arg_key>",
        value_open="<arg_value>",
        value_close="</arg_value>",
    )


def _dsml(calls: str, call: str, argument: str) -> TaggedForm:
    """DeepSeek's markup by the names of its tags."""
    return TaggedForm(
        open=f"<｜DSML｜{calls}>",
        close=f"</｜DSML｜{calls}>",
        call_open=f'<｜DSML｜{call} name="',
        name_close='">',
        call_close=f"</｜DSML｜{call}>",
        key_open=f'<｜DSML｜{argument} name="',
        key_close='">',
        value_close=f"</｜DSML｜{argument}>",
        kind='" string="',
    )


TAGGED: Mapping[str, TaggedForm] = {
    "qwen_xml": TaggedForm(
        open="<tool_call>",
        close="</tool_call>",
        call_open="<function=",
        name_close=">",
        call_close="</function>",
        key_open="<parameter=",
        key_close=">",
        value_close="</parameter>",
        pad="\n",
    ),
    "glm": _glm("\n"),
    "glm47": _glm(""),
    "minimax": TaggedForm(
        open="<minimax:tool_call>",
        close="</minimax:tool_call>",
        call_open='<invoke name="',
        name_close='">',
        call_close="</invoke>",
        key_open='<parameter name="',
        key_close='">',
        value_close="</parameter>",
    ),
    "deepseek_v32": _dsml("function_calls", "invoke", "parameter"),
    "deepseek_v4": _dsml("tool_calls", "invoke", "parameter"),
    "deepseek_v41": _dsml(" calls", " invoke", " parameter"),
}


class JsonForm(msgspec.Struct, frozen=True, kw_only=True):
    """Calls that are JSON objects with name and arguments between two marks: one, or a list of them."""

    open: str
    close: str
    is_list: bool = True


JSON: Mapping[str, JsonForm] = {
    "hermes": JsonForm(open="<tool_call>", close="</tool_call>", is_list=False),
    "granite": JsonForm(open="<|tool_call|>", close="]"),
    "phi4": JsonForm(open="<|tool_call|>", close="<|/tool_call|>"),
    "functools": JsonForm(open="functools", close="]"),
    "command": JsonForm(open="<|START_ACTION|>", close="<|END_ACTION|>"),
}


class SectionForm(msgspec.Struct, frozen=True, kw_only=True):
    """A section of calls, each in marks of its own: `call_open NAME separator {ARGUMENTS} call_close`."""

    # In place of the name stands an id that holds it, which the template writes again.
    has_ids: bool = False
    open: str
    close: str
    call_open: str
    separator: str
    call_close: str


_DEEPSEEK = SectionForm(
    open="<｜tool▁calls▁begin｜>",
    close="<｜tool▁calls▁end｜>",
    call_open="<｜tool▁call▁begin｜>",
    separator="<｜tool▁sep｜>",
    call_close="<｜tool▁call▁end｜>",
)
SECTIONS: Mapping[str, SectionForm] = {
    "deepseek": _DEEPSEEK,
    "deepseek_v31": _DEEPSEEK,
    "kimi": SectionForm(
        has_ids=True,
        open="<|tool_calls_section_begin|>",
        close="<|tool_calls_section_end|>",
        call_open="<|tool_call_begin|>",
        separator="<|tool_call_argument_begin|>",
        call_close="<|tool_call_end|>",
    ),
}


class BracedForm(msgspec.Struct, frozen=True, kw_only=True):
    """Calls `open NAME{KEY:VALUE,…}close` whose texts stand between two quotes and are not escaped."""

    open: str
    close: str
    quote: str


BRACED: Mapping[str, BracedForm] = {
    "gemma4": BracedForm(open="<|tool_call>call:", close="}<tool_call|>", quote='<|"|>'),
    "functiongemma": BracedForm(
        open="<start_function_call>call:", close="}<end_function_call>", quote="<escape>"
    ),
}
