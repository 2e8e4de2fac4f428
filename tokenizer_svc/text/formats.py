"""In which format a checkpoint writes tool calls and reasoning, as its chat template shows: it is given a
call, and what it makes of the call is looked at. A template that writes none is known by what it says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping, Set
from typing import Any

from contract.formats import REASONING, THINK_CLOSE, UNKNOWN_FORMAT
from tokenizer_svc.text import sandbox

_log = logging.getLogger(__name__)
HERMES, LLAMA3, LLAMA4 = "hermes", "llama3", "llama4"
MISTRAL, MISTRAL_V11, MISTRAL_V13 = "mistral", "mistral_v11", "mistral_v13"
DEEPSEEK, DEEPSEEK_V31 = "deepseek", "deepseek_v31"

_TOOL_TEMPLATE, _DEFAULT_TEMPLATE = "tool_use", "default"
# What a trial may write, and how long it may take.
_MAX_CHARACTERS, _MAX_TRIAL_S = 1 << 20, 1.0
_NAME, _KEY, _VALUE = "probe_name", "probe_key", "probe_value"
_ARGUMENTS = rf'\{{\s*"{_KEY}": "{_VALUE}"\s*\}}'
# A call as a JSON object, up to its name; the arguments may come first.
_OBJECT = rf'\{{(?:[^{{}}]*|\s*"arguments": {_ARGUMENTS}, )"name":\s*"{_NAME}"'
# How each format writes the call of the trial.
_WRITTEN: Mapping[str, str] = {
    "qwen_xml": rf"<tool_call>\s*<function={_NAME}>\s*<parameter={_KEY}>\s*{_VALUE}\s*</parameter>",
    "glm47": rf"<tool_call>{_NAME}<arg_key>{_KEY}</arg_key><arg_value>{_VALUE}</arg_value></tool_call>",
    "glm": rf"<tool_call>{_NAME}\s*<arg_key>{_KEY}</arg_key>\s*<arg_value>{_VALUE}</arg_value>",
    HERMES: rf"<tool_call>\s*{_OBJECT}",
    "minimax": rf'<minimax:tool_call>\s*<invoke name="{_NAME}">\s*<parameter name="{_KEY}">{_VALUE}<',
    "deepseek_v32": rf'<｜DSML｜function_calls>\s*<｜DSML｜invoke name="{_NAME}">',
    "deepseek_v4": rf'<｜DSML｜tool_calls>\s*<｜DSML｜invoke name="{_NAME}">',
    "deepseek_v41": rf'<｜DSML｜ calls>\s*<｜DSML｜ invoke name="{_NAME}">',
    DEEPSEEK: rf"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{_NAME}",
    DEEPSEEK_V31: rf"<｜tool▁call▁begin｜>{_NAME}<｜tool▁sep｜>",
    "kimi": r"<\|tool_call_begin\|>[^<]*<\|tool_call_argument_begin\|>",
    "harmony": rf"to=functions\.{_NAME}",
    MISTRAL_V11: rf"\[TOOL_CALLS\]\s*{_NAME}\[CALL_ID\]",
    MISTRAL_V13: rf"\[TOOL_CALLS\]\s*{_NAME}\[ARGS\]",
    MISTRAL: rf"\[TOOL_CALLS\]\s*\[\s*{_OBJECT}",
    "gemma4": rf"<\|tool_call>call:{_NAME}\{{",
    "functiongemma": rf"<start_function_call>call:{_NAME}\{{",
    "phi4": rf"<\|tool_call\|>\s*\[\s*{_OBJECT}[^\]]*\]\s*<\|/tool_call\|>",
    "granite": rf"<\|tool_call\|>\s*\[\s*{_OBJECT}",
    "command": rf'<\|START_ACTION\|>\s*\[\s*\{{"tool_call_id": "\w+", "tool_name": "{_NAME}"',
    LLAMA4: rf"\[{_NAME}\({_KEY}=[\"']{_VALUE}[\"']\)\]",
    LLAMA3: rf'\{{"name": "{_NAME}", "parameters": {_ARGUMENTS}\}}',
}
# Marks of each in the source of a template that writes no calls; the first that has all its own is taken.
_TOLD: Mapping[str, tuple[str, ...]] = {
    "qwen_xml": ("<tool_call>", "<function="),
    "glm47": ("<tool_call>", "</arg_key><arg_value>"),
    "glm": ("<tool_call>", "<arg_key>"),
    HERMES: ("<tool_call>",),
    "minimax": ("<minimax:tool_call>",),
    "deepseek_v32": ("DSML", "function_calls>"),
    "deepseek_v4": ("DSML", "tool_calls>"),
    "deepseek_v41": ("DSML", " calls>"),
    DEEPSEEK: ("<｜tool▁calls▁begin｜>", "```json"),
    DEEPSEEK_V31: ("<｜tool▁calls▁begin｜>",),
    "kimi": ("<|tool_calls_section_begin|>",),
    MISTRAL_V11: ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    MISTRAL_V13: ("[TOOL_CALLS]", "[ARGS]"),
    MISTRAL: ("[TOOL_CALLS]",),
    "gemma4": ("<|tool_call>call:",),
    "functiongemma": ("<start_function_call>",),
    "command": ("<|START_ACTION|>", "tool_name"),
    "functools": ("functools[",),
}
# The same of templates that say nothing of calls but take tools: tokens that the model calls with.
_MEANT: Mapping[str, tuple[str, ...]] = {
    "phi4": ("<|tool_call|>", "<|/tool_call|>"),
    "granite": ("<|tool_call|>",),
    LLAMA4: ("<|python_start|>", "<|python_end|>"),
    LLAMA3: ("<|python_tag|>",),
}


def tool_call_format(
    templates: Mapping[str, str], tokens: Set[str], special_tokens: Mapping[str, str]
) -> str:
    """Name of the tool-call format that the templates write, "" for none; UNKNOWN_FORMAT, with a line in the
    log, where they write calls otherwise.
    """
    unknown = ""
    for written in _trials(templates, special_tokens):
        for name, pattern in _WRITTEN.items():
            if re.search(pattern, written):
                return name
        unknown = unknown or written
    source = "\n".join(templates.values())
    told = (name for name, marks in _TOLD.items() if all(mark in source for mark in marks))
    if not unknown:
        meant = (name for name, marks in _MEANT.items() if "tools" in source and tokens >= set(marks))
        return next(told, "") or next(meant, "")
    # What is written in another form than a format's own is not read as that format.
    name = next((name for name in told if name not in _WRITTEN), "")
    if not name:
        start = max(unknown.rfind(_NAME if _NAME in unknown else _KEY) - 60, 0)
        _log.warning(
            "the chat template writes tool calls in a format that is not known here (%r), and requests with "
            "tools are refused; if it is one of the known ones, name it with --tool-call-parser",
            unknown[start : start + 160],
        )
    return name or UNKNOWN_FORMAT


def reasoning_format(templates: Mapping[str, str], tokens: Set[str]) -> str:
    """Name of the reasoning format, or ""."""
    source = "\n".join(templates.values())
    if "<|channel|>" in source and "analysis" in source:
        return "harmony"
    for name in ("mistral", "gemma4", "command"):
        if REASONING[name].close in source:
            return name
    if THINK_CLOSE in source and REASONING["granite"].answer_close in source and "<response>" in source:
        # MiniMax has the results of tools in such tags.
        return "think" if "<minimax:" in source else "granite"
    if REASONING["mistral"].close in tokens:
        return "mistral"
    return "think" if THINK_CLOSE in source or THINK_CLOSE in tokens else ""


def _trials(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> Iterator[str]:
    """What the template makes of a call in each form that it takes, where the call is there."""
    source = templates.get(_TOOL_TEMPLATE, templates.get(_DEFAULT_TEMPLATE, ""))
    tool = {
        "type": "function",
        "function": {
            "name": "probe_tool",
            "description": "d",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
    for messages in _conversations():
        variables = {**special_tokens, "messages": messages, "tools": [tool], "add_generation_prompt": False}
        # A template may refuse a form in any way.
        with contextlib.suppress(Exception):
            text = _rendered(source, variables)
            if _NAME in text or _KEY in text:
                yield text


def _conversations() -> Iterator[list[dict[str, Any]]]:
    arguments = {_KEY: _VALUE}
    for written in (arguments, json.dumps(arguments)):
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": _NAME, "arguments": written},
        }
        for content in ({"content": ""}, {}, {"content": None}):
            yield [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call], **content}]


def _rendered(source: str, variables: dict[str, Any]) -> str:
    deadline_s = time.monotonic() + _MAX_TRIAL_S
    pieces: list[str] = []
    size = 0
    for piece in sandbox.environment().from_string(source).generate(**variables):
        pieces.append(piece)
        size += len(piece)
        if size > _MAX_CHARACTERS or time.monotonic() > deadline_s:
            break
    return "".join(pieces)
