"""Tools and their calls as templates read them: parsed, with what a schema refers to in its place.

A template that writes a schema whole gets it as the client sent it. One that reads single fields of it finds
nothing behind `$ref`, or in `anyOf` beside `null`: it gets the fields that those lead to as well.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

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
# Clients write null where they have nothing to say.
_NEVER_NULL = frozenset(_LED_TO) - {"const"}
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
# Values of these are no schemas.
_DATA = frozenset({"const", "enum", "default", "examples"})
_ANY = {"type": "any", "description": ""}


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
    parameters = {"type": "object"} | function["parameters"]
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
    schema = {key: value for key, value in schema.items() if value is not None or key not in _NEVER_NULL}
    if schema.get("type") == "object" or "properties" in schema:
        properties = schema.get("properties")
        items = properties.items() if isinstance(properties, dict) else ()
        schema = {"required": []} | schema | {"properties": {name: _part(each) for name, each in items}}
    if schema.get("type") == "array" or "items" in schema:
        schema["items"] = _part(schema.get("items"))
    for key in _LISTS:
        if key in schema:
            schema[key] = [_part(each) for each in _list_of(schema, key)]
    return schema


def _part(schema: Any) -> dict[str, Any]:
    """A schema inside another."""
    return _ANY | _completed(schema) if isinstance(schema, dict) else _ANY


class _Resolver:
    def __init__(self, document: dict[str, Any]) -> None:
        self._left = _MAX_RESOLVED
        # Schemas by the names that they give themselves, and what names inside each schema are relative to.
        self._named: dict[str, Any] = {"": document}
        self._bases: dict[int, str] = {}
        self._index(document, "")

    def resolved(self, schema: Any, above: tuple[int, ...], depth: int = 0) -> Any:
        """`schema` with what it leads to; `above` are those (by id) that are being resolved."""
        if not isinstance(schema, dict):
            return schema
        self._left -= 1
        found: dict[str, Any] = {}
        if depth < _MAX_REFERENCE_DEPTH and self._left > 0:
            for target in map(self._target, [schema] * len(_REFERENCES), _REFERENCES):
                if target is not None and id(target) not in above:
                    found = _merged(found, self.resolved(target, (*above, id(target)), depth + 1))
        given = {
            key: self._inside(key, value, above, depth + 1)
            for key, value in schema.items()
            if value is not None or key not in _NEVER_NULL
        }
        for each in _list_of(given, "allOf"):
            found = _merged(found, _led_to(each))
        branches = _list_of(given, "anyOf") or _list_of(given, "oneOf")
        return _typed(_merged(_merged(found, _of_branches(branches)), given))

    def _inside(self, key: str, value: Any, above: tuple[int, ...], depth: int) -> Any:
        if key in ("properties", "patternProperties") and isinstance(value, dict):
            return {name: self.resolved(each, above, depth) for name, each in value.items()}
        if key in _LISTS and isinstance(value, list):
            return [self.resolved(each, above, depth) for each in value]
        return self.resolved(value, above, depth) if key in ("items", "additionalProperties") else value

    def _index(self, node: Any, base: str) -> None:
        if isinstance(node, list):
            for each in node:
                self._index(each, base)
        if not isinstance(node, dict):
            return
        for key in ("$id", "id"):
            # As an address of its own, `id` is of draft 4, and an annotation of many programs.
            if isinstance(name := node.get(key), str) and (key == "$id" or name.startswith("#")):
                base = self._name(node, *urldefrag(_joined(base, name)))
        for key in ("$anchor", "$dynamicAnchor"):
            if isinstance(node.get(key), str):
                self._name(node, base, node[key])
        self._bases[id(node)] = base
        for key, each in node.items():
            if key not in _DATA:
                self._index(each, base)

    def _name(self, node: dict[str, Any], url: str, fragment: str) -> str:
        self._named.setdefault(f"{url}#{fragment}" if fragment else url, node)
        return url

    def _target(self, schema: dict[str, Any], keyword: str) -> dict[str, Any] | None:
        """What a reference leads to; None where that is nothing, or another document."""
        reference = schema.get(keyword)
        if not isinstance(reference, str):
            return None
        url, fragment = urldefrag(_joined(self._bases.get(id(schema), ""), reference))
        fragment = unquote(fragment)
        value = self._named.get(url if not fragment or fragment.startswith("/") else f"{url}#{fragment}")
        for part in fragment.split("/")[1:] if fragment.startswith("/") else ():
            name = part.replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and name.isdecimal() and int(name) < len(value):
                value = value[int(name)]
            else:
                value = value.get(name) if isinstance(value, dict) else None
        return value if isinstance(value, dict) else None


def _joined(base: str, reference: str) -> str:
    # A fragment alone stays in the resource, whatever scheme its address has.
    return base + reference if reference.startswith("#") else urljoin(base, reference)


def _merged(schema: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """One that says what both say; `more` has the last word."""
    both = schema | more
    properties, others = schema.get("properties"), more.get("properties")
    if isinstance(properties, dict) and isinstance(others, dict):
        both["properties"] = properties | {
            name: _merged(properties[name], each)
            if isinstance(properties.get(name), dict) and isinstance(each, dict)
            else each
            for name, each in others.items()
        }
    required = [*_list_of(schema, "required"), *_list_of(more, "required")]
    if required:
        both["required"] = [each for index, each in enumerate(required) if each not in required[:index]]
    return both


def _typed(schema: dict[str, Any]) -> dict[str, Any]:
    if "type" not in schema:
        values = _list_of(schema, "enum") or [schema.get("const")]
        types = list(dict.fromkeys(_TYPES[type(each)] for each in values if type(each) in _TYPES))
        if not types and ("properties" in schema or "items" in schema):
            types = ["object" if "properties" in schema else "array"]
        if types:
            schema["type"] = types[0] if len(types) == 1 else types
    return schema


def _led_to(schema: Any) -> dict[str, Any]:
    return {key: schema[key] for key in _LED_TO if key in schema} if isinstance(schema, dict) else {}


def _list_of(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _of_branches(branches: list[Any]) -> dict[str, Any]:
    """What the branches of a choice say: all of the only one beside `null`, the types of several."""
    others = [each for each in branches if isinstance(each, dict) and not _is_null(each)]
    if len(others) == 1:
        return _led_to(others[0])
    if not others:
        return {"type": "null"} if branches and all(isinstance(each, dict) for each in branches) else {}
    types: list[str] = []
    for each in others:
        named = each.get("type")
        types += named if isinstance(named, list) else [named] if isinstance(named, str) else []
    types = [each for each in dict.fromkeys(types) if each != "null"]
    found: dict[str, Any] = {"type": types[0] if len(types) == 1 else types} if types else {}
    if all("const" in each or "enum" in each for each in others):
        found["enum"] = [value for each in others for value in _list_of(each, "enum") or [each.get("const")]]
    return found


def _is_null(schema: dict[str, Any]) -> bool:
    values = (schema.get("type"), schema.get("enum"))
    return "null" in values or ["null"] in values or [None] in values or schema.get("const", 0) is None
