"""Tools and their calls as templates read them: parsed, with what a schema refers to in its place.

A template that writes a schema whole gets it as the client sent it. One that reads single fields of it finds
nothing behind `$ref`, or in `anyOf` beside `null`: it gets the fields that those lead to as well.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from contract.chat import Message, Tool
from tokenizer_svc.refusals import invalid

# Levels of nesting in a tool's schema and in a call's arguments.
MAX_DEPTH = 128
# References are followed down to this level, and in one tool until so many schemas were read: each may lead
# to others, and a schema of a few lines could fill the memory.
_MAX_REFERENCE_DEPTH = 32
_MAX_RESOLVED = 10_000
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_LED_TO = ("type", "description", "enum", "const", "properties", "required", "items", "additionalProperties")


def call_arguments(arguments_json: str, *, objects_only: bool) -> Any:
    """A call's arguments. What is no JSON (an answer may have ended in the middle of a call), or nested too
    deep to be rendered, stays the text that the model wrote; `objects_only` puts what is no object into one.
    """
    text = arguments_json or "{}"
    try:
        value = json.loads(text)
        if _deeper_than(value, MAX_DEPTH):
            value = text
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, dict) or not objects_only:
        return value
    return {} if value is None else {"arguments": value}


def with_naming_ids(messages: Sequence[Message]) -> list[Message]:
    """The conversation with ids that hold the names of what they call, as templates need them that write the
    ids alone (Kimi's): clients bring ids of other servers.
    """
    taken = {call.id for message in messages for call in message.tool_calls}
    given: dict[str, str] = {}
    made: list[Message] = []
    for message in messages:
        calls = []
        for call in message.tool_calls:
            form = f"functions.{call.name}:"
            is_own = call.id.startswith(form) and call.id.removeprefix(form).isdecimal()
            numbers = itertools.count(len(given))
            new = next(id_ for number in numbers if (id_ := f"{form}{number}") not in taken)
            given[call.id] = call.id if is_own else new
            taken.add(given[call.id])
            calls.append(msgspec.structs.replace(call, id=given[call.id]))
        result_of = given.get(message.tool_call_id, message.tool_call_id)
        made.append(msgspec.structs.replace(message, tool_calls=tuple(calls), tool_call_id=result_of))
    return made


def tool_value(tool: Tool, index: int) -> dict[str, Any]:
    """A tool as it was sent; raises INVALID_ARGUMENT for a schema that is no JSON object."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters_json:
        function["parameters"] = _parameters(tool, index)
    return {"type": "function", "function": function}


def resolved(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool of whose schema every part says its type and description itself, as far as it has them."""
    function = tool["function"]
    parameters = function.get("parameters")
    if parameters is None:
        return tool
    return tool | {"function": function | {"parameters": _Resolver(parameters).resolved(parameters, ())}}


def completed(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool with all that a client may leave out."""
    function = {"description": "", "parameters": {}} | tool["function"]
    parameters = {"type": "object", "required": []} | function["parameters"]
    return tool | {"function": function | {"parameters": _completed(parameters)}}


def _parameters(tool: Tool, index: int) -> dict[str, Any]:
    field, what = f"tools[{index}].function.parameters", f"the schema of tool {index}'s arguments"
    try:
        parameters = json.loads(tool.parameters_json)
    except RecursionError as error:
        raise invalid(f"{what} is nested deeper than {MAX_DEPTH} levels; nest less", field) from error
    except ValueError as error:
        raise invalid(f"{what} is not JSON: {error}", field) from error
    if not isinstance(parameters, dict):
        raise invalid(f"{what} must be a JSON object", field)
    if _deeper_than(parameters, MAX_DEPTH):
        raise invalid(f"{what} is nested deeper than {MAX_DEPTH} levels; nest less", field)
    return parameters


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        level = [each for each in level if isinstance(each, dict | list)]
        if not level:
            return False
        level = [child for each in level for child in (each.values() if isinstance(each, dict) else each)]
    return True


def _completed(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return schema | {"properties": {}}
    return schema | {
        "properties": {
            name: {"type": "any", "description": ""} | each if isinstance(each, dict) else {"type": "any"}
            for name, each in properties.items()
        }
    }


class _Resolver:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._left = _MAX_RESOLVED

    def resolved(self, schema: Any, above: tuple[str, ...], depth: int = 0) -> Any:
        """`schema` with what it leads to; `above` are the references that it stands behind."""
        if not isinstance(schema, dict):
            return schema
        self._left -= 1
        found: dict[str, Any] = {}
        reference = schema.get("$ref")
        follows = depth < _MAX_REFERENCE_DEPTH and self._left > 0
        if isinstance(reference, str) and reference not in above and follows:
            found |= self.resolved(self._target(reference), (*above, reference), depth + 1) or {}
        schema = {key: self._inside(key, value, above, depth + 1) for key, value in schema.items()}
        for each in _list_of(schema, "allOf"):
            found |= {key: each[key] for key in _LED_TO if isinstance(each, dict) and key in each}
        found |= _of_branches(_list_of(schema, "anyOf") or _list_of(schema, "oneOf"))
        schema = found | schema
        if "type" not in schema:
            values = _list_of(schema, "enum") or [schema.get("const")]
            types = list(dict.fromkeys(_TYPES[type(each)] for each in values if type(each) in _TYPES))
            if types:
                schema["type"] = types[0] if len(types) == 1 else types
        return schema

    def _inside(self, key: str, value: Any, above: tuple[str, ...], depth: int) -> Any:
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            return {name: self.resolved(each, above, depth) for name, each in value.items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            return [self.resolved(each, above, depth) for each in value]
        return self.resolved(value, above, depth) if key in ("items", "additionalProperties") else value

    def _target(self, reference: str) -> dict[str, Any] | None:
        value: Any = self._document
        if reference != "#" and not reference.startswith("#/"):
            # Another document, or a name in this one.
            return None
        for part in unquote(reference[1:]).split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else None


def _list_of(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _of_branches(branches: list[Any]) -> dict[str, Any]:
    """What the branches of a choice say: all of the only one beside `null`, the types of several."""
    others = [each for each in branches if isinstance(each, dict) and each.get("type") != "null"]
    if len(others) == 1:
        return {key: others[0][key] for key in _LED_TO if key in others[0]}
    types: list[str] = []
    for each in others:
        named = each.get("type")
        types += named if isinstance(named, list) else [named] if isinstance(named, str) else []
    return {"type": list(dict.fromkeys(types))} if types else {}
