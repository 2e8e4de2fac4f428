"""Rewrites that are needed only where the back end stops at a definition that it could take otherwise.

They keep the meaning: a reference to something unsatisfiable is `false`; a conjunction with a recursive
definition becomes a definition of its own, in which the recursion ends at a plain reference.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizer_svc.grammar.schema.finished import with_change
from tokenizer_svc.grammar.schema.shapes import Schema, all_of, key_of

_PREFIX = "#/$defs/"
_UNSATISFIABLE = re.compile(r"^Unsatisfiable schema.*while processing \S*#/\$defs/(\w+)", re.DOTALL)
_CIRCULAR = "circular references with sibling keys"
# Conjunctions written out before giving up.
_MAX_WRITTEN_OUT = 2_000
# Definitions that are repaired one after the other.
MAX_REPAIRS = 12
_SAME_LEVEL = ("allOf", "anyOf")
_ASIDE = frozenset({"$defs", "x-guidance"})


def repair(schema: Schema, error: str) -> Schema | None:
    """The schema in a form that does not fail with `error` any more; None when there is no such form."""
    if not isinstance(schema, dict) or "$defs" not in schema:
        return None
    found = _UNSATISFIABLE.match(error)
    if found is not None and found.group(1) in schema["$defs"]:
        return without_definition(schema, found.group(1))
    if _CIRCULAR in error:
        try:
            return _Unroller(schema["$defs"]).run(schema)
        except _TooManyRepairs:
            return None
    return None


def without_definition(schema: dict[str, Any], name: str) -> Schema:
    """The schema with `false` wherever it refers to the definition of this name."""
    aside, body = _parted(schema)
    definitions = {key: value for key, value in aside["$defs"].items() if key != name}
    target = _PREFIX + name
    written = with_change(
        {"$defs": definitions, "allOf": [body]}, lambda node: False if node.get("$ref") == target else node
    )
    (body,) = written["allOf"]
    return {**(body if isinstance(body, dict) else {"enum": []}), **aside, "$defs": written["$defs"]}


def _parted(schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keywords that are no constraints (definitions, options), and the schema without them."""
    body = {key: value for key, value in schema.items() if key not in _ASIDE}
    return {key: value for key, value in schema.items() if key in _ASIDE}, body


class _TooManyRepairs(Exception):
    pass


class _Unroller:
    """Gives every conjunction with references a definition in which these are written out once."""

    def __init__(self, definitions: dict[str, Schema]) -> None:
        self._original = definitions
        self._names: dict[str, str] = {}
        self._new: dict[str, Schema] = {}
        self._num_written_out = 0

    def run(self, schema: dict[str, Any]) -> Schema:
        """The whole schema, rewritten."""
        aside, body = _parted(schema)
        result = self._rewritten(body)
        for name in sorted(self._original):
            self._new[name] = self._rewritten(self._original[name])
        return {**(result if isinstance(result, dict) else {"allOf": [result]}), **aside, "$defs": self._new}

    def _rewritten(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self._rewritten(each) for each in node]
        if not isinstance(node, dict):
            return node
        if self._is_conjunction(node):
            return {"$ref": _PREFIX + self._named(node)}
        return {
            key: value if key in ("enum", "const") else self._rewritten(value) for key, value in node.items()
        }

    def _is_conjunction(self, node: dict[str, Any]) -> bool:
        others = [key for key in node if key != "$ref"]
        if "$ref" in node:
            return bool(others)
        if "allOf" in node:
            return any(self._refers(each) for each in node["allOf"])
        return "anyOf" in node and len(others) > 1 and self._refers({"anyOf": node["anyOf"]})

    def _refers(self, node: Any) -> bool:
        if not isinstance(node, dict):
            return False
        return "$ref" in node or any(
            self._refers(each) for key in _SAME_LEVEL if key in node for each in node[key]
        )

    def _named(self, node: dict[str, Any]) -> str:
        key = key_of(node)
        name = self._names.get(key)
        if name is None:
            name = self._names[key] = f"u{len(self._names)}"
            expanded = self._expanded(node, frozenset())
            self._new[name] = self._below(expanded)
        return name

    def _expanded(self, node: Any, seen: frozenset[str]) -> Schema:
        """`node` without references at its own level."""
        self._num_written_out += 1
        if self._num_written_out > _MAX_WRITTEN_OUT:
            raise _TooManyRepairs
        if not isinstance(node, dict):
            return node
        parts: list[Schema] = []
        rest = {key: value for key, value in node.items() if key != "$ref" and key not in _SAME_LEVEL}
        reference = node.get("$ref")
        if isinstance(reference, str) and reference.startswith(_PREFIX):
            name = reference.removeprefix(_PREFIX)
            if name in seen:
                # It refers to itself with nothing in between: no value can be told to match.
                return False
            parts.append(self._expanded(self._original[name], seen | {name}))
        elif reference is not None:
            rest["$ref"] = reference
        parts.append(rest)
        parts += [self._expanded(each, seen) for each in node.get("allOf", ())]
        if "anyOf" in node:
            parts.append({"anyOf": [self._expanded(each, seen) for each in node["anyOf"]]})
        return all_of(parts)

    def _below(self, node: Any) -> Any:
        """Rewrites what stands inside properties and items; the level itself is written out already."""
        if not isinstance(node, dict):
            return node
        result: dict[str, Any] = {}
        for key, value in node.items():
            if key in _SAME_LEVEL:
                result[key] = [self._below(each) for each in value]
            elif key in ("enum", "const"):
                result[key] = value
            else:
                result[key] = self._rewritten(value)
        return result
