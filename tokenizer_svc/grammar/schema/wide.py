"""Schemas with numbers that the back end would round, as Lark: the numbers exactly, the rest as schemas.

The back end reads numbers as floating-point ones. Where a schema has others, the parts on the way to them are
written as rules: objects with listed properties, arrays, unions, references. What is on the way and has no
such form makes the whole None, and the caller reports the number.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from tokenizer_svc.grammar.schema.back_end_numbers import BOUNDS, is_rounded, is_wide
from tokenizer_svc.grammar.schema.finished import Contents, schemas_in
from tokenizer_svc.grammar.schema.shapes import (
    ALL_TYPES,
    FRACTION,
    NUMBERS,
    Schema,
    type_names,
    type_of_value,
    types_of_keyword,
)
from tokenizer_svc.grammar.schema.strings import excluding

_REFERENCE = "#/$defs/"
# White space as in the layout of all other schemas.
_MARKS = {name: f"/{text}/" for name, text in {
    "COMMA": r",(\x20|\n\x20{0,32})?", "COLON": r":\x20?", "OPENS": r"\{",
    "CLOSES": r"\}", "BEGINS": r"\[", "ENDS": r"\]",
}.items()}  # fmt: skip
_OF_NUMBERS = frozenset({*BOUNDS, "multipleOf"})
_OF_OBJECTS = frozenset({"properties", "required", "additionalProperties"})
_OF_ARRAYS = frozenset({"items", "prefixItems", "minItems", "maxItems"})
# Multiples that are listed one by one, and repetitions that are written.
_MAX_LISTED = 256


class _NoRule(Exception):
    """A part on the way to a number cannot be written."""


def as_lark(schema: Schema, definitions: Mapping[str, Schema], layout: Mapping[str, Any]) -> str | None:
    """The grammar of a rewritten schema; None where a part of it has no form."""
    try:
        return _Writer(definitions, layout).whole(schema)
    except (_NoRule, RecursionError):
        return None


class _Writer:
    def __init__(self, definitions: Mapping[str, Schema], layout: Mapping[str, Any]) -> None:
        self._definitions, self._layout = definitions, layout
        self._rules: dict[str, str] = {}
        self._wide: dict[int, bool] = {}

    def whole(self, schema: Schema) -> str:
        body = self._rule(schema)
        rules = {"start": body, **self._rules, **_MARKS}
        return "".join(f"{name}: {rule}\n" for name, rule in rules.items())

    def _named(self, body: str) -> str:
        name = f"w{len(self._rules)}"
        self._rules[name] = body
        return name

    def _is_wide(self, node: Any) -> bool:
        """Whether there is such a number in the node, or in what it refers to."""
        if not isinstance(node, dict):
            return False
        if id(node) not in self._wide:
            self._wide[id(node)] = False
            self._wide[id(node)] = (
                any(is_wide(node.get(keyword)) for keyword in _OF_NUMBERS)
                or is_rounded(node.get("enum", []))
                or is_rounded(node.get("const"))
                or self._is_wide(self._target(node))
                or any(map(self._is_wide, schemas_in(node)))
            )
        return self._wide[id(node)]

    def _target(self, node: dict[str, Any]) -> Schema:
        return self._definitions.get(str(node.get("$ref")).removeprefix(_REFERENCE))

    def _rule(self, node: Schema) -> str:
        if not self._is_wide(node):
            return self._embedded(node)
        if set(node) == {"$ref"}:
            name = node["$ref"].removeprefix(_REFERENCE)
            if name not in self._rules:
                self._rules[name] = ""
                self._rules[name] = self._rule(self._definitions[name])
            return str(name)
        if set(node) == {"allOf"}:
            return self._rule(_merged(node["allOf"]))
        if set(node) == {"anyOf"}:
            return self._named(" | ".join(map(self._rule, node["anyOf"])))
        if "const" in node or "enum" in node:
            return self._listed(node)
        return self._by_types(node)

    def _embedded(self, node: Schema) -> str:
        if node is False:
            raise _NoRule
        schema = {} if node is True else node
        names = sorted(Contents(schema, dict(self._definitions)).references)
        defined = {"$defs": {name: self._definitions[name] for name in names}} if names else {}
        return self._named(f"%json {json.dumps({**schema, **defined, 'x-guidance': self._layout})}")

    def _listed(self, node: dict[str, Any]) -> str:
        if set(node) - {"type", "const", "enum"}:
            raise _NoRule
        values = node["enum"] if "enum" in node else [node["const"]]
        types = types_of_keyword(node.get("type", [*ALL_TYPES, "number"]))
        texts = [json.dumps(each) for each in values if type_of_value(each) in types]
        if not texts or any(isinstance(each, float) and is_rounded(each) for each in values):
            raise _NoRule
        return self._named(" | ".join(map(json.dumps, texts)))

    def _by_types(self, node: dict[str, Any]) -> str:
        """A plain node: what it says of each type that has a wide number in it, and the rest as it is."""
        types = types_of_keyword(node["type"]) if "type" in node else ALL_TYPES
        options: list[str] = []
        rest = {key: value for key, value in node.items() if key != "type"}
        for kinds, keywords, write in (
            (NUMBERS, _OF_NUMBERS, self._number),
            (frozenset({"object"}), _OF_OBJECTS, self._object),
            (frozenset({"array"}), _OF_ARRAYS, self._array),
        ):
            own = {key: rest.pop(key) for key in keywords & rest.keys()}
            if types & kinds and (self._is_wide(own) or (own and not rest.keys() and types <= kinds)):
                options.append(write(own, types))
                types -= kinds
            else:
                rest |= own
        names = type_names(types)
        if self._is_wide(rest) or (types and names is None):
            raise _NoRule
        if names:
            options.append(self._embedded({"type": names, **rest}))
        return self._named(" | ".join(options))

    def _number(self, node: dict[str, Any], types: frozenset[str]) -> str:
        low, high = _bounds(node)
        step = node.get("multipleOf")
        if step is not None:
            return self._multiples(low, high, step)
        first = None if low is None else -(-low[0] // 1) + (low[1] and low[0] == low[0] // 1)
        last = None if high is None else high[0] // 1 - (high[1] and high[0] == high[0] // 1)
        whole = "|".join(_between(first, last))
        texts = [f"({whole})" + (r"(\.0+)?" if FRACTION in types else "")] if whole else []
        if FRACTION in types:
            if any(bound is not None and bound[0] != bound[0] // 1 for bound in (low, high)):
                raise _NoRule
            parts = "|".join(_unit_intervals(low and int(low[0]), high and int(high[0])))
            texts += [rf"({parts})\.[0-9]*[1-9][0-9]*"] if parts else []
        if not texts:
            raise _NoRule
        return self._named(f"/{'|'.join(texts)}/")

    def _multiples(self, low: Any, high: Any, step: Any) -> str:
        if low is None or high is None or not isinstance(step, int) or step <= 0:
            raise _NoRule
        first, last = -(-low[0] // step), high[0] // step
        if last - first > _MAX_LISTED:
            raise _NoRule
        excluded = {bound for bound, is_exclusive in (low, high) if is_exclusive}
        found = [number * step for number in range(first, last + 1) if number * step not in excluded]
        if not found:
            raise _NoRule
        return self._named(" | ".join(f'"{each}"' for each in found))

    def _object(self, node: dict[str, Any], types: frozenset[str]) -> str:
        properties, required = node.get("properties", {}), list(node.get("required", ()))
        names = [*properties, *(name for name in required if name not in properties)]
        more = node.get("additionalProperties", True)
        other = ""
        if more is not False:
            others = {"type": "string", "pattern": excluding(names)} if names else {"type": "string"}
            other = f"{self._embedded(others)} COLON {self._rule(more)}"
        # Members from here on: the first of all, and those after others.
        first = self._named(f"{other} (COMMA {other})* |") if other else ""
        after = self._named(f"(COMMA {other})*") if other else ""
        for name in reversed(names):
            schema = properties.get(name, more)
            if schema is False:
                if name in required:
                    raise _NoRule
                continue
            key = json.dumps(json.dumps(name, ensure_ascii=False), ensure_ascii=False)
            member = f"{key} COLON {self._rule(schema)}"
            without = [] if name in required else [first or '""']
            first, after = (
                self._named(" | ".join([f"{member} {after}", *without])),
                self._named(
                    " | ".join([f"COMMA {member} {after}", *([] if name in required else [after or '""'])])
                ),
            )
        return self._named(f"OPENS {first} CLOSES")

    def _array(self, node: dict[str, Any], types: frozenset[str]) -> str:
        first, rest = node.get("prefixItems", []), node.get("items", True)
        least, most = node.get("minItems", 0), node.get("maxItems")
        if max(least, most or 0) > _MAX_LISTED:
            raise _NoRule
        # Items from here on, the last ones first.
        after = ""
        if rest is not False and (most is None or most > len(first)):
            item = self._rule(rest)
            bounds = f"{max(0, least - len(first))},{'' if most is None else most - len(first)}"
            after = self._named(f"(COMMA {item}){{{bounds}}}")
            head = self._named(
                f"{item} (COMMA {item}){{{max(0, least - 1)},{'' if most is None else most - 1}}}"
            )
        if not first:
            if not after:
                return '"[]"'
            return self._named(f"BEGINS {head}{'?' if not least else ''} ENDS")
        kept = first if most is None else first[:most]
        if least > len(kept) and not after:
            raise _NoRule
        for index in reversed(range(len(kept))):
            body = f"{'COMMA ' if index else ''}{self._rule(kept[index])} {after}"
            after = self._named(body if index < least else f"({body})?")
        return self._named(f"BEGINS {after} ENDS")


def _merged(parts: list[Schema]) -> Schema:
    """One node for several that say different things of a value."""
    merged: dict[str, Any] = {}
    for part in parts:
        if not isinstance(part, dict) or not {*part, *merged}.isdisjoint({"$ref", "anyOf", "allOf"}):
            raise _NoRule
        if any(merged.get(key, value) != value for key, value in part.items()):
            raise _NoRule
        merged |= part
    return merged


def _bounds(node: dict[str, Any]) -> tuple[Any, Any]:
    """The tightest lower and upper bound, each with whether it is excluded; None where there is none."""
    found: dict[int, Any] = {1: None, -1: None}
    for keyword, inwards in BOUNDS.items():
        value = node.get(keyword)
        if isinstance(value, bool) or value is None:
            continue
        is_exclusive = keyword.startswith("exclusive") or node.get("exclusive" + keyword.capitalize()) is True
        bound = (Fraction(str(value)) if isinstance(value, float) else Fraction(value), is_exclusive)
        known = found[inwards]
        if known is None or (inwards * (bound[0] - known[0]), is_exclusive) > (0, known[1]):
            found[inwards] = bound
    return found[1], found[-1]


def _between(first: int | None, last: int | None) -> Iterator[str]:
    """Regular expressions for whole numbers from `first` to `last`, each None where there is no bound."""
    if first is not None and last is not None and first > last:
        return
    if first is None or first < 0:
        largest = None if first is None else -int(first)
        smallest = 1 if last is None or last >= 0 else -int(last)
        yield from (f"-({each})" for each in _digits(smallest, largest))
    if last is None or last >= 0:
        yield from _digits(max(0, int(first or 0)), None if last is None else int(last))


def _unit_intervals(low: int | None, high: int | None) -> Iterator[str]:
    """Expressions for the digits before the point of all fractions that lie between two whole numbers."""
    if low is None or low < 0:
        smallest = 0 if high is None or high >= 0 else -high
        largest = None if low is None else -low - 1
        if largest is None or smallest <= largest:
            yield from (f"-({each})" for each in _digits(smallest, largest))
    if high is None or high > 0:
        first, last = max(0, low or 0), None if high is None else high - 1
        if last is None or first <= last:
            yield from _digits(first, last)


def _digits(first: int, last: int | None) -> Iterator[str]:
    """Expressions for numbers that are not negative, without zeros in front."""
    if last is None:
        size = len(str(first))
        yield from _digits(first, 10**size - 1)
        yield f"[1-9][0-9]{{{size},}}"
        return
    while first <= last:
        # The number of digits at the end that may be any digits.
        free = 0
        while first > 0 and first % 10 ** (free + 1) == 0 and first + 10 ** (free + 1) - 1 <= last:
            free += 1
        head = first // 10**free
        upper = min(head // 10 * 10 + 9, (last + 1) // 10**free - 1)
        digit = f"[{head % 10}-{upper % 10}]" if upper > head else str(head % 10)
        tail = f"[0-9]{{{free}}}" if free else ""
        yield f"{head // 10 or ''}{digit}{tail}"
        first = (upper + 1) * 10**free
