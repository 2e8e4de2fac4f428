"""Object keywords that the back end lacks or takes only alone: counts with optional properties, names."""

from __future__ import annotations

from itertools import combinations
from math import comb
from typing import Any

import jsonschema_rs

from tokenizer_svc.grammar.schema.arrays import finite_values
from tokenizer_svc.grammar.schema.context import Context, SchemaLocation, SchemaPart
from tokenizer_svc.grammar.schema.shapes import ALL_TYPES, Schema, any_of, for_type

_MAX_CASES = 300


def count_properties(part: SchemaPart) -> None:
    """minProperties and maxProperties beside optional properties, as cases of which of these are there."""
    if not ("minProperties" in part.out or "maxProperties" in part.out):
        return
    properties = part.out.get("properties", {})
    required = list(dict.fromkeys(part.out.get("required", ())))
    optional = [name for name in properties if name not in required and properties[name] is not False]
    closed = part.out.get("additionalProperties") is False and not part.out.get("patternProperties")
    least = max(0, _integer(part.out.get("minProperties"), 0) - len(required))
    most = _integer(part.out["maxProperties"], 0) - len(required) if "maxProperties" in part.out else None
    if closed and most is not None and most >= len(optional):
        del part.out["maxProperties"]
        most = None
    if least == 0:
        part.out.pop("minProperties", None)
    if least >= 2 and not closed:
        part.context.approximate("minProperties", part.place, "names that occur twice are counted twice")
    if not optional or (least == 0 and most is None) or (most is not None and most < 0):
        return
    if closed and least <= 1 and most in (None, 1):
        # At least one, at most one and exactly one are known to the back end.
        return
    sizes = range(least + 1) if most is None else range(min(most, len(optional)) + 1)
    smallest, largest = part.out.pop("minProperties", None), part.out.pop("maxProperties", None)
    if sum(comb(len(optional), size) for size in sizes) > _MAX_CASES:
        keyword = "minProperties" if least else "maxProperties"
        part.give_up(keyword, f"more than {_MAX_CASES} cases of which properties are there")
        if closed and least and not required:
            part.out["minProperties"] = 1
        return
    cases: list[Schema] = []
    for size in sizes:
        # Enough of the listed ones alone: the rest may be there or not.
        if most is None and size == least:
            cases += ({"required": list(chosen)} for chosen in combinations(optional, size))
        elif size >= least or not closed:
            bounds = {"minProperties": smallest} if smallest is not None and size < least else {}
            bounds |= {"maxProperties": largest} if largest is not None else {}
            cases += (_exactly(chosen, optional) | bounds for chosen in combinations(optional, size))
    part.extra.append(for_type("object", part.types, any_of(cases)))


def _exactly(chosen: tuple[str, ...], optional: list[str]) -> dict[str, Schema]:
    return {"required": list(chosen), "properties": {name: False for name in optional if name not in chosen}}


def property_names(part: SchemaPart) -> None:
    """Names as listed properties, or as the one pattern of patternProperties."""
    rule = part.node["propertyNames"]
    inside = part.place.at("propertyNames")
    if rule is True or rule == {}:
        return
    allowed = part.context.positive(rule, inside, frozenset({"string"}))
    if allowed is False:
        part.out["maxProperties"] = 0
        return
    names = finite_values(part.context, rule, inside)
    rest = part.out.get("additionalProperties", True)
    properties: dict[str, Schema] = dict(part.out.get("properties", {}))
    accepts = _name_test(part.context, allowed)
    if accepts is None:
        part.give_up("propertyNames", "the names' schema refers to itself")
        return
    properties = {name: each if accepts(name) else False for name, each in properties.items()}
    patterns = part.out.get("patternProperties", {})
    if names is not None:
        for name in names:
            if isinstance(name, str) and name not in properties and accepts(name):
                matching = [each for pattern, each in patterns.items() if _matches(pattern, name)]
                properties[name] = {"allOf": matching} if matching else rest
        part.out.pop("patternProperties", None)
        part.out["properties"] = properties
        part.out["additionalProperties"] = False
        return
    pattern = name_pattern(allowed)
    if pattern is None or patterns:
        part.give_up("propertyNames", "only a set of names, one pattern or one length is expressible")
        return
    part.out["properties"] = properties
    part.out["patternProperties"] = {pattern: rest}
    part.out["additionalProperties"] = False


def name_pattern(schema: Schema) -> str | None:
    """The one pattern that a schema of strings amounts to; None when it is more than that."""
    if not isinstance(schema, dict):
        return None
    rules = {key: value for key, value in schema.items() if key != "type"}
    if set(rules) == {"pattern"}:
        return str(rules["pattern"])
    if rules and set(rules) <= {"minLength", "maxLength"}:
        least, most = rules.get("minLength", 0), rules.get("maxLength", "")
        return f"^(?s:.{{{least},{most}}})$"
    return None


def unevaluated_properties(part: SchemaPart) -> None:
    """Where nothing depends on the value, the evaluated names are known and this is additionalProperties."""
    rule = part.node["unevaluatedProperties"]
    if rule is True:
        return
    names: dict[str, Schema] = {}
    patterns: dict[str, Schema] = {}
    known = _evaluated(part.context, part.node, part.place, names, patterns, 0)
    if known is None:
        part.give_up("unevaluatedProperties", "which properties are evaluated depends on the value")
    elif known:
        rest = part.context.positive(rule, part.place.at("unevaluatedProperties"), ALL_TYPES)
        part.extra.append({"properties": names, "patternProperties": patterns, "additionalProperties": rest})


def _evaluated(
    context: Context,
    node: Any,
    place: SchemaLocation,
    names: dict[str, Schema],
    patterns: dict[str, Schema],
    depth: int,
) -> bool | None:
    """Collects names; False when every property is evaluated, None when it depends."""
    if not isinstance(node, dict):
        return True
    if depth > 8 or any(
        keyword in node
        for keyword in ("anyOf", "oneOf", "if", "not", "dependentSchemas", "$dynamicRef", "$recursiveRef")
    ):
        return None
    if "additionalProperties" in node or (depth and "unevaluatedProperties" in node):
        return False
    names.update(dict.fromkeys(node.get("properties", {}), True))
    patterns.update(dict.fromkeys(node.get("patternProperties", {}), True))
    parts = [(each, place.at("allOf", index)) for index, each in enumerate(node.get("allOf", ()))]
    if isinstance(node.get("$ref"), str):
        target = context.resolve(node["$ref"], place)
        if target is None:
            return None
        parts.append((target.node, SchemaLocation(target.path, target.base)))
    for part, inside in parts:
        known = _evaluated(context, part, inside, names, patterns, depth + 1)
        if not known:
            return known
    return True


def _name_test(context: Context, schema: Schema) -> Any:
    # The definitions that the schema needs are finished unless it is part of one of them.
    try:
        validator = jsonschema_rs.validator_for({"$defs": context.finished(), "allOf": [schema]})
    except (ValueError, jsonschema_rs.ReferencingError):
        return None
    return validator.is_valid


def _matches(pattern: str, name: str) -> bool:
    validator = jsonschema_rs.validator_for({"type": "string", "pattern": pattern})
    return bool(validator.is_valid(name))


def _integer(value: Any, otherwise: int) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else otherwise
