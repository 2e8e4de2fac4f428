"""Proof that no value matches two schemas. A proof is right; its absence says nothing."""

from __future__ import annotations

import math
from typing import Any

from tokenizer_svc.grammar.backend import string_schema_is_empty
from tokenizer_svc.grammar.schema.arrays import finite_values
from tokenizer_svc.grammar.schema.context import Context, SchemaLocation
from tokenizer_svc.grammar.schema.shapes import ALL_TYPES, FRACTION, key_of, same, type_of_value

_MAX_DEPTH = 6
_STRING_RULES = ("pattern", "minLength", "maxLength", "format")

# A schema and where it stands.
Located = tuple[Any, SchemaLocation]


class View:
    """The conjunction that a schema amounts to, seen through allOf and references."""

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []
        self.places: list[SchemaLocation] = []

    def add(self, context: Context, node: Any, place: SchemaLocation, depth: int = 0) -> None:
        if not isinstance(node, dict) or depth > _MAX_DEPTH:
            return
        place = context.enter(node, place)
        self.rules.append(node)
        self.places.append(place)
        for each, inside in context.conjuncts(node, place):
            self.add(context, each, inside, depth + 1)

    def required(self) -> set[str]:
        names: set[str] = set()
        for rule in self.rules:
            if isinstance(rule.get("required"), list):
                names.update(name for name in rule["required"] if isinstance(name, str))
        return names

    def property(self, name: str) -> list[Located]:
        """Schemas that a property must match."""
        found: list[Located] = []
        for rule, place in zip(self.rules, self.places, strict=True):
            properties = rule.get("properties", {})
            if name in properties:
                found.append((properties[name], place.at("properties", name)))
            elif "additionalProperties" in rule and not rule.get("patternProperties"):
                found.append((rule["additionalProperties"], place.at("additionalProperties")))
        return found

    def names(self) -> set[str] | None:
        """All names that properties can have; None when any others can be there."""
        allowed: set[str] | None = None
        for rule in self.rules:
            if rule.get("additionalProperties") is False and not rule.get("patternProperties"):
                names = set(rule.get("properties", {}))
                allowed = names if allowed is None else allowed & names
        return allowed

    def states(self, keyword: str, value: Any) -> bool:
        """Whether the very same constraint is part of it."""
        if keyword == "if":
            return False
        return any(keyword in rule and same(rule[keyword], value) for rule in self.rules)

    def states_all(self, node: dict[str, Any], keywords: tuple[str, ...]) -> bool:
        """Whether one part of it has the same keywords, which look at each other, with the same values."""
        return any(
            all(same(rule.get(keyword, True), node.get(keyword, True)) for keyword in keywords)
            for rule in self.rules
        )

    def types(self, context: Context) -> frozenset[str]:
        """Types that its values can have."""
        types = ALL_TYPES
        for rule, place in zip(self.rules, self.places, strict=True):
            types &= context.types_of(rule, place)
        return types


def disjoint(
    context: Context,
    left: Located,
    right: Located,
    types: frozenset[str] = ALL_TYPES,
    depth: int = 0,
    around: Located | None = None,
) -> bool:
    """Whether it is proven that no value of `types` matches both; values match `around` as well."""
    if left[0] is False or right[0] is False:
        return True
    if depth > _MAX_DEPTH:
        return False
    common = types & context.types_of(*left) & context.types_of(*right)
    if not common:
        return True
    first, second = View(), View()
    first.add(context, *left)
    second.add(context, *right)
    if _unions_apart(context, first, right, common, depth) or _unions_apart(
        context, second, left, common, depth
    ):
        return True
    left_values, right_values = finite_values(context, *left), finite_values(context, *right)
    if left_values is not None and right_values is not None:
        return not {key_of(each) for each in left_values} & {key_of(each) for each in right_values}
    if around is not None:
        first.add(context, *around)
    return all(
        _apart(context, kind, first, second, left_values, right_values, depth) for kind in common - {FRACTION}
    ) and (FRACTION not in common or _ranges_apart((first, second)))


def _unions_apart(context: Context, view: View, other: Located, types: frozenset[str], depth: int) -> bool:
    """Whether one of the unions that `view` is a part of has no option that meets `other`."""
    for node, place in zip(view.rules, view.places, strict=True):
        for keyword in ("anyOf", "oneOf"):
            options = node.get(keyword)
            if isinstance(options, list) and all(
                disjoint(context, (each, place.at(keyword, index)), other, types, depth + 1)
                for index, each in enumerate(options)
            ):
                return True
    return False


def _apart(
    context: Context,
    kind: str,
    first: View,
    second: View,
    left_values: list[Any] | None,
    right_values: list[Any] | None,
    depth: int,
) -> bool:
    match kind:
        case "object":
            return any(
                disjoint(context, one, other, depth=depth + 1)
                for name in sorted(first.required() | second.required())
                for one in first.property(name) or [(True, SchemaLocation("", ""))]
                for other in second.property(name) or [(True, SchemaLocation("", ""))]
            )
        case "array":
            return _sizes_apart((first, second), "minItems", "maxItems")
        case "string":
            return _sizes_apart((first, second), "minLength", "maxLength") or _strings_apart(
                first, second, left_values, right_values
            )
        case "integer":
            return _ranges_apart((first, second))
    return False


def _numbers(views: tuple[View, View], *keywords: str) -> list[float]:
    return [
        rule[keyword]
        for view in views
        for rule in view.rules
        for keyword in keywords
        if isinstance(rule.get(keyword), int | float) and not isinstance(rule.get(keyword), bool)
    ]


def _sizes_apart(views: tuple[View, View], least: str, most: str) -> bool:
    return max(_numbers(views, least), default=0) > min(_numbers(views, most), default=math.inf)


def _ranges_apart(views: tuple[View, View]) -> bool:
    lower = max(_numbers(views, "minimum", "exclusiveMinimum"), default=-math.inf)
    upper = min(_numbers(views, "maximum", "exclusiveMaximum"), default=math.inf)
    is_open = lower in _numbers(views, "exclusiveMinimum") or upper in _numbers(views, "exclusiveMaximum")
    return lower > upper or (is_open and lower == upper)


def _strings_apart(
    first: View, second: View, left_values: list[Any] | None, right_values: list[Any] | None
) -> bool:
    parts = [
        {"type": "string", **{key: rule[key] for key in _STRING_RULES if key in rule}}
        for view in (first, second)
        for rule in view.rules
        if any(key in rule for key in _STRING_RULES)
    ]
    parts += [
        {"enum": [value for value in values if type_of_value(value) == "string"]}
        for values in (left_values, right_values)
        if values is not None
    ]
    return bool(parts) and string_schema_is_empty(parts)
