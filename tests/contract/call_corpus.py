"""Calls in every family's form, made by the family's own template over arguments and surroundings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from contract.chat import Tool
from tokenizer_svc.text import sandbox

_TEMPLATES = Path(__file__).parents[1] / "unit" / "tokenizer_svc" / "templates"

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "string"}},
        "options": {
            "type": "object",
            "properties": {
                "deep": {"type": "boolean"},
                "names": {"type": "array", "items": {"type": "string"}},
            },
        },
        "maybe": {"type": ["string", "null"]},
        "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "point": {"$ref": "#/$defs/point"},
        "kind": {"enum": ["a b", "c"]},
    },
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x"],
        }
    },
}
NAMES = ("get_weather", "fs-write_2", "f")
TOOLS = tuple(Tool(name=name, parameters_json=json.dumps(SCHEMA)) for name in NAMES)

ARGUMENTS: tuple[dict[str, Any], ...] = (
    {},
    {"text": "Zürich"},
    {"count": -3, "text": "42"},
    {"ratio": 2.5, "flag": True},
    {"flag": False, "maybe": None, "size": None},
    {"items": ["a, b", "c]", '"d"', ""], "text": "true"},
    {"options": {"deep": True, "names": ["x}", "{y"]}},
    {"point": {"x": 1, "y": 2}, "maybe": "some text"},
    {"kind": "a b", "size": 7},
    {"text": "a </parameter> b </arg_value> c </tool_call> } ] ) </invoke> [/TOOL_CALLS] <|tool_call_end|> "},
    {"text": 'def f(a):\n\treturn {"k": [a, \'b\']}  # \\n \\" 🙂\n\nprint(f(1))'},
    {"text": "", "items": [], "options": {}},
    {"text": '{"name": "g", "arguments": {}}', "count": 10**12},
)


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """What stands around an assistant's turn in the family's template."""

    head: str
    tail: str
    reasoning: str = ""
    # The family writes one call in a turn.
    single: bool = False
    # The template writes no text beside calls, or puts it into thoughts.
    calls_only: bool = False


FAMILIES: dict[str, Family] = {
    "hermes": Family(head="<|im_start|>assistant\n", tail="<|im_end|>\n", reasoning="think"),
    "qwen_xml": Family(head="<|im_start|>assistant", tail="<|im_end|>\n", reasoning="think"),
    "glm": Family(head="<|assistant|>", tail="", reasoning="think"),
    "glm47": Family(head="</think>", tail="", reasoning="think"),
    "minimax": Family(head="]~b]ai\n", tail="[e~[\n", reasoning="think"),
    "deepseek_v32": Family(head="</think>", tail="<｜end▁of▁sentence｜>", reasoning="think"),
    "deepseek_v4": Family(head="</think>", tail="<｜end▁of▁sentence｜>", reasoning="think"),
    "deepseek_v41": Family(head="</think>", tail="<｜end▁of▁sentence｜>", reasoning="think"),
    "deepseek": Family(
        head="<｜Assistant｜>", tail="<｜end▁of▁sentence｜>", reasoning="think", calls_only=True
    ),
    "deepseek_v31": Family(
        head="<｜Assistant｜></think>", tail="<｜end▁of▁sentence｜>", reasoning="think", calls_only=True
    ),
    "kimi": Family(head="<|im_assistant|>assistant<|im_middle|>", tail="<|im_end|>", reasoning="think"),
    "harmony": Family(head="<|start|>assistant", tail="", reasoning="harmony", single=True, calls_only=True),
    "granite": Family(
        head="<|start_of_role|>assistant<|end_of_role|>", tail="<|end_of_text|>\n", reasoning="granite"
    ),
    "phi4": Family(head="<|assistant|>", tail="<|end|>"),
    "functools": Family(head="<|assistant|>", tail="<|end|>"),
    "gemma4": Family(head="<|turn>model\n", tail="<turn|>\n", reasoning="gemma4", calls_only=True),
    "functiongemma": Family(head="<start_of_turn>model\n", tail="<end_of_turn>\n", calls_only=True),
    "command": Family(
        head="<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        tail="<|END_OF_TURN_TOKEN|>",
        reasoning="command",
        calls_only=True,
    ),
    "llama4": Family(head="<|header_start|>assistant<|header_end|>\n\n", tail="<|eot|>"),
    "llama3": Family(
        head="<|start_header_id|>assistant<|end_header_id|>\n\n",
        tail="<|eot_id|>",
        single=True,
        calls_only=True,
    ),
    "mistral": Family(head="[/INST]", tail="</s>", calls_only=True),
    "mistral_v11": Family(head="[/INST]", tail="</s>", calls_only=True),
    "mistral_v13": Family(head="[/INST]", tail="</s>", calls_only=True),
}
TEMPLATE_OF = {"hermes": "qwen_tools"}


def source_of(name: str) -> str:
    """The family's template."""
    return (_TEMPLATES / f"{TEMPLATE_OF.get(name, name)}.jinja").read_text(encoding="utf-8")


@cache
def _template(name: str) -> Any:
    return sandbox.environment().from_string(source_of(name))


def turn(name: str, calls: list[tuple[str, dict[str, Any]]], content: str = "") -> str:
    """What the model wrote, as its template has it in a history."""
    family = FAMILIES[name]
    texts = name in ("deepseek", "deepseek_v31")
    written = [
        {
            "id": f"functions.{called}:{index}" if name == "kimi" else f"abcdefgh{index}",
            "type": "function",
            "function": {
                "name": called,
                "arguments": json.dumps(given, ensure_ascii=False) if texts else given,
            },
        }
        for index, (called, given) in enumerate(calls)
    ]
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": written},
    ]
    text = _template(name).render(
        messages=messages, tools=None, add_generation_prompt=False, bos_token="", eos_token="</s>"
    )
    _, found, rest = (
        text.rpartition(family.head) if name != "harmony" else text.partition("q<|end|>" + family.head)
    )
    assert found, text
    return str(rest.removesuffix(family.tail))


def corpus(name: str) -> Iterator[tuple[str, str, list[tuple[str, dict[str, Any]]]]]:
    """(text, content, calls) of at least 40 answers."""
    family = FAMILIES[name]
    names = itertools.cycle(NAMES)
    for given, other in zip(ARGUMENTS, ARGUMENTS[5:] + ARGUMENTS[:5], strict=True):
        one, two = (next(names), given), (next(names), other)
        surroundings = [("", [one]), ("", [two])]
        if not family.calls_only:
            surroundings += [("I will look.\nSo: {", [one])]
        if not family.single:
            surroundings += [("", [one, two]), ("", [two, one, one])]
            if not family.calls_only:
                surroundings += [("Both [now].", [two, one])]
        for content, calls in surroundings:
            yield turn(name, calls, content), content, calls
    for called in NAMES:
        for count in range(5):
            calls = [(called, {"count": count, "text": f"n {count}"})]
            yield turn(name, calls), "", calls
