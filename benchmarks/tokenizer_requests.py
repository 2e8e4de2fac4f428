"""Requests of well-behaved and of hostile tenants, for the isolation benchmark.

Everything hostile is inside the service's size limits where that makes it more expensive.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from millrace.common.v1 import chat_pb2, context_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from runtime.context import sign

SECRET = "benchmark secret of at least 16"
_MAX_GRAMMAR_BYTES = 1024 * 1024
# Of the bundled checkpoint's template.
_OPTION = "enable_thinking"
_WORDS = "the rain in spain stays mainly in the plain, 17 of 42 times; 雨 and Grüße too. "

Request = tokenizer_pb2.PrepareRequest


def context(tenant: str) -> context_pb2.SignedContext:
    """A signed context of one tenant."""
    who = context_pb2.RequestContext(
        request_id="bench", tenant=tenant, issued_unix_ms=round(time.time() * 1000)
    )
    return sign(who, SECRET.encode())


def _chat(*texts: str) -> chat_pb2.Conversation:
    roles = (chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT)
    return chat_pb2.Conversation(
        messages=[chat_pb2.Message(role=roles[index % 2], content=text) for index, text in enumerate(texts)]
    )


def _format(schema: Any, *, strict: bool) -> chat_pb2.ResponseFormat:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return chat_pb2.ResponseFormat(json_schema=chat_pb2.JsonSchema(schema_json=text, strict=strict))


def _weather(mark: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer", "minimum": 0, "maximum": 30},
            "kind": {"enum": ["sun", "rain", mark]},
            "place": {"oneOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "kind"],
        "additionalProperties": False,
    }


def _plain(tenant: str, number: int) -> Request:
    return Request(conversation=_chat(f"What is the weather like? ({number})"))


def _warm(tenant: str, number: int) -> Request:
    return Request(
        conversation=_chat(f"What is the weather like? ({number})"),
        response_format=_format(_weather("snow"), strict=True),
    )


def _cold(tenant: str, number: int) -> Request:
    return Request(
        conversation=_chat(f"What is the weather like? ({number})"),
        response_format=_format(_weather(f"{tenant}-{number}"), strict=True),
    )


def _history(tenant: str, number: int) -> Request:
    turns = [f"{tenant} {turn} " + _WORDS * 10 for turn in range(40)]
    return Request(conversation=_chat(*turns, f"And now? ({number})"))


def _tool(tenant: str, number: int) -> Request:
    request = Request(conversation=_chat(f"Call a tool. ({number})"))
    request.conversation.tools.add(name="weather", parameters_json=json.dumps(_weather("snow")))
    return request


# What a well-behaved tenant sends in turn; each fifth has a grammar that nobody has sent before.
_GOOD = {
    "plain": _plain,
    "warm schema": _warm,
    "cold schema": _cold,
    "long history": _history,
    "tools": _tool,
}


def good_request(tenant: str, number: int) -> tuple[str, Request]:
    """The kind and the request that has this number."""
    kind = list(_GOOD)[number % len(_GOOD)]
    request = _GOOD[kind](tenant, number)
    request.context.CopyFrom(context(tenant))
    return kind, request


def hostile_schemas(number: int) -> dict[str, Request]:
    """Doubling definitions, conjunctions, huge enumerations and objects, nesting, large repetitions, endless
    references, tools.
    """
    doubling: dict[str, Any] = {
        f"d{level}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/d{level + 1}", "type": "object"} for side in "ab"},
        }
        for level in range(40)
    }
    doubling["d40"] = {"type": "object", "minProperties": number}
    conjunction = [
        {"anyOf": [{"properties": {f"p{i}_{j}_{number}": {"type": "string"}}} for j in range(4)]}
        for i in range(12)
    ]
    loop = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a", "title": f"{number}"}}}
    words = [f"{number}-{each}" * 2 for each in range(34_000)]
    names = {f"{number}-{each}": {"type": "string"} for each in range(26_000)}
    depth = 60_000
    nested = '{"items":' * depth + f'{{"const":{number}}}' + "}" * depth
    forms = {
        "doubling": _format({"$ref": "#/$defs/d0", "$defs": doubling}, strict=False),
        "conjunction": _format({"allOf": conjunction}, strict=False),
        "enumeration": _format({"enum": words}, strict=False),
        "properties": _format({"type": "object", "properties": names}, strict=False),
        "nesting": _format(nested, strict=True),
        "repetition": chat_pb2.ResponseFormat(regex=f"(.*a.{{60}}){{40}}{number}"),
        "references": _format(loop, strict=True),
    }
    for name, form in forms.items():
        size = len(form.json_schema.schema_json)
        assert size <= _MAX_GRAMMAR_BYTES, f"{name} is refused by its size alone: {size} bytes"
    requests = {name: Request(text="x", response_format=form) for name, form in forms.items()}
    tools = Request(conversation=_chat("x"))
    tools.conversation.tools.add(name="f", parameters_json=json.dumps({"properties": names}))
    return {**requests, "tools": tools}


def _calls(number: int, num_calls: int) -> Request:
    """A history of so many calls of a tool and their results, which templates write as JSON."""
    request = Request(conversation=_chat(f"{number}"))
    messages = request.conversation.messages
    for each in range(num_calls):
        asked = messages.add(role=chat_pb2.ROLE_ASSISTANT)
        arguments = {f"argument {name}": [number, each, _WORDS] for name in range(5)}
        asked.tool_calls.add(id=f"c{each}", name="weather", arguments_json=json.dumps(arguments))
        messages.add(role=chat_pb2.ROLE_TOOL, tool_call_id=f"c{each}", content=f"{each} {_WORDS}")
    return request


def hostile_inputs(number: int) -> dict[str, Request]:
    """Prompts, histories, control tokens, calls, tools, their descriptions, an option: as large as may be."""
    megabytes = (_WORDS * 14_000)[: 1 << 20]
    # An option that the bundled template reads: unknown ones are refused before anything is rendered.
    options = Request(conversation=_chat("x"))
    options.conversation.template_options.update({_OPTION: [[number, each] for each in range(20_000)]})
    descriptions = Request(conversation=_chat("x"))
    for each in range(200):
        descriptions.conversation.tools.add(
            name=f"f{each}", description=f"{number}-{each} " + _WORDS * 100, parameters_json="{}"
        )
    descriptions.conversation.tool_choice.mode = chat_pb2.TOOL_CHOICE_MODE_NONE
    tools = Request(conversation=_chat("x"))
    for each in range(250):
        schema = {"properties": {f"{name}-{number}": {"type": "string"} for name in range(100)}}
        tools.conversation.tools.add(name=f"f{each}", parameters_json=json.dumps(schema))
    tools.conversation.tool_choice.mode = chat_pb2.TOOL_CHOICE_MODE_NONE
    return {
        "prompt": Request(text=f"{number}" + megabytes * 7),
        "message": Request(conversation=_chat(f"{number}" + megabytes * 4)),
        "history": Request(conversation=_chat(*(f"{number}-{each}" + _WORDS * 10 for each in range(4000)))),
        "control tokens": Request(conversation=_chat(f"{number}" + "<|im_start|><think>" * 100_000)),
        "options": options,
        "descriptions": descriptions,
        "calls": _calls(number, 2_000),
        "tools": tools,
    }


def hostile_crumbs(number: int) -> dict[str, Request]:
    """Just below the sizes from which on requests are given to workers, and grammars that take some
    milliseconds each.
    """
    quarter = (_WORDS * 3_300)[: 250 * 1024]
    tiny = Request()
    for each in range(4_000):
        role = (chat_pb2.ROLE_USER, chat_pb2.ROLE_ASSISTANT)[each % 2]
        tiny.conversation.messages.add(role=role, content=f"{number} {each} hello you there")
    tools = Request(conversation=_chat(f"{number}"))
    for each in range(200):
        schema = {"properties": {f"{number}{each}": {"type": "string"}}, "required": [f"{number}{each}"]}
        tools.conversation.tools.add(name=f"f{each}", parameters_json=json.dumps(schema))
    descriptions = Request(conversation=_chat(f"{number}"))
    for each in range(40):
        descriptions.conversation.tools.add(name=f"f{each}", description=f"{number}-{each} " + _WORDS * 3)
    descriptions.conversation.tool_choice.mode = chat_pb2.TOOL_CHOICE_MODE_NONE
    options = [{"type": "object", "properties": {f"p{number}{each}": {"const": each}}} for each in range(60)]
    nested: dict[str, Any] = {"const": number}
    for _ in range(100):
        nested = {"type": "array", "items": nested}
    rules = "".join(f'r{each}: "{number}" r{each + 1} | "{each}"\n' for each in range(800))
    grammar = chat_pb2.ResponseFormat(lark=f'start: r0\n{rules}r800: "x"\n')
    words = [f"{number} {each} choice" for each in range(1_200)]
    return {
        "messages": tiny,
        "tools": tools,
        "descriptions": descriptions,
        "calls": _calls(number, 45),
        "ids": Request(encoded=tokenizer_pb2.EncodedPrompt(ids=list(range(300, 700)) * 300)),
        "text": Request(text=f"{number}" + quarter),
        "control tokens": Request(conversation=_chat(f"{number}" + "<|im_start|><think>" * 12_000)),
        "union": Request(text="x", response_format=_format({"anyOf": options}, strict=False)),
        "nesting": Request(text="x", response_format=_format(nested, strict=True)),
        "regex": Request(
            text="x", response_format=chat_pb2.ResponseFormat(regex=f"(a|b|cd){{200}}x{number}")
        ),
        "lark": Request(text="x", response_format=grammar),
        "choice": Request(
            text="x", response_format=chat_pb2.ResponseFormat(choice=chat_pb2.Choice(options=words))
        ),
    }


# What the hostile tenant floods the service with.
ATTACKS: dict[str, Callable[[int], dict[str, Request]]] = {
    "schemas": hostile_schemas,
    "inputs": hostile_inputs,
    "crumbs": hostile_crumbs,
}
