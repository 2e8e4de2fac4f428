"""The rewritten schema as a whole: what is in it, and its keywords as the back end must be told them.

Large schemas are looked at once; of what need not change, nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import Any

from tokenizer_svc.grammar.schema.back_end_numbers import BOUNDS, is_moved, is_rounded
from tokenizer_svc.grammar.schema.shapes import NUMBERS, Schema, all_of, any_of, type_of_value

_REFERENCE = "#/$defs/"
# Keywords whose values are schemas by name, and those whose values are none.
_MAPS = frozenset({"properties", "patternProperties", "$defs"})
_DATA = frozenset({"enum", "const", "required", "x-guidance"})
_CONTAINERS = (dict, list)


class Contents:
    """What a schema and the definitions that it needs hold."""

    def __init__(self, schema: Schema, definitions: dict[str, Schema]) -> None:
        self.keywords: set[str] = set()
        # Names of definitions that are referred to.
        self.references: set[str] = set()
        # Whether a listed value is a number that the back end would round, and a bound is no whole number.
        self.is_rounded = False
        self.has_fractions = False
        # Whether a bound is one that the back end would take for another.
        self.is_wide = False
        self._definitions = definitions
        pending = [schema]
        while pending:
            node = pending.pop()
            if isinstance(node, dict):
                self._note(node, pending)

    def _note(self, node: dict[str, Any], pending: list[Any]) -> None:
        """Looks at one node; what stands in it becomes pending."""
        self.keywords.update(node)
        for keyword, value in node.items():
            if isinstance(value, dict):
                if keyword in _MAPS:
                    pending += value.values()
                elif keyword != "const":
                    pending.append(value)
            elif isinstance(value, list):
                if keyword not in _DATA:
                    pending += value
                elif keyword == "enum":
                    self.is_rounded = self.is_rounded or is_rounded(value)
            elif keyword == "$ref":
                self._follow(value, pending)
            elif keyword in BOUNDS:
                self.is_wide = self.is_wide or is_moved(keyword, value)
                self.has_fractions = self.has_fractions or (
                    isinstance(value, float) and not value.is_integer()
                )
        if "const" in node:
            self.is_rounded = self.is_rounded or is_rounded(node["const"])

    def _follow(self, reference: Any, pending: list[Any]) -> None:
        if isinstance(reference, str) and reference.startswith(_REFERENCE):
            name = reference.removeprefix(_REFERENCE)
            if name not in self.references:
                self.references.add(name)
                pending.append(self._definitions[name])


def schemas_in(node: dict[str, Any]) -> list[Any]:
    """The schemas that stand in one, of maps and lists each."""
    found: list[Any] = []
    for keyword, value in node.items():
        if keyword in _MAPS and isinstance(value, dict):
            found += value.values()
        elif keyword not in _DATA:
            found += value if isinstance(value, list) else [value]
    return [each for each in found if isinstance(each, dict)]


def with_change(schema: Schema, change: Callable[[dict[str, Any]], Schema]) -> Schema:
    """`schema` with `change` made to each of its nodes, the inner ones first.

    `change` copies what it changes; of a schema that stays as it is, so do all its objects.
    """
    if isinstance(schema, list):
        parts = [with_change(each, change) if isinstance(each, _CONTAINERS) else each for each in schema]
        return schema if all(map(is_, parts, schema)) else parts
    if not isinstance(schema, dict):
        return schema
    written: dict[str, Any] | None = None
    for keyword, value in schema.items():
        if not isinstance(value, _CONTAINERS) or keyword in _DATA:
            continue
        if keyword in _MAPS and isinstance(value, dict):
            named = {name: with_change(each, change) for name, each in value.items()}
            changed: Any = value if all(map(is_, named.values(), value.values())) else named
        else:
            changed = with_change(value, change)
        if changed is not value:
            written = dict(schema) if written is None else written
            written[keyword] = changed
    return change(schema if written is None else written)


def without_rounded(node: dict[str, Any]) -> dict[str, Any]:
    """A node with types in place of listed values that the back end would write as others."""
    listed = {"const": [node["const"]] if "const" in node else [], "enum": node.get("enum", [])}
    rounded = {key: values for key, values in listed.items() if any(map(is_rounded, values))}
    if not rounded:
        return node
    instead: list[Schema] = []
    for key in node:
        if key in rounded:
            kept = [each for each in rounded[key] if not is_rounded(each)]
            types = {type_of_value(each) for each in rounded[key] if is_rounded(each)}
            names = {"number" if each in NUMBERS else each for each in types}
            instead.append(any_of([{"enum": kept} if kept else False, {"type": sorted(names)}]))
    aside = {key: node[key] for key in ("$defs", "x-guidance") if key in node}
    whole = all_of([{key: each for key, each in node.items() if key not in {*rounded, *aside}}, *instead])
    return {**(whole if isinstance(whole, dict) else {}), **aside}
