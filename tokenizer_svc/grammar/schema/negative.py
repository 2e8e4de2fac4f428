"""The complement of a schema, for the back end: everything that does not match, among the types at hand.

A schema is a conjunction of keywords, each about values of one type; its complement is the union of their
complements. Where one has no exact form, more is accepted and the report names the keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, pairwise
from typing import Any

from tokenizer_svc.grammar.schema.arrays import finite_values
from tokenizer_svc.grammar.schema.automata import outside
from tokenizer_svc.grammar.schema.back_end_numbers import ROUNDED, is_rounded
from tokenizer_svc.grammar.schema.context import Context, Place
from tokenizer_svc.grammar.schema.document import SINCE, Draft
from tokenizer_svc.grammar.schema.shapes import (
    ALL_TYPES,
    FRACTION,
    NUMBERS,
    Schema,
    all_of,
    any_of,
    type_names,
    type_of_value,
    types_of_keyword,
)
from tokenizer_svc.grammar.schema.strings import (
    BACKEND_FORMATS,
    OTHER_FORMATS,
    STANDARD_FORMATS,
    excluding,
    listed,
)

_MAX_LISTED = 4
# Other names are annotations, which nothing breaks.
_FORMATS = BACKEND_FORMATS | OTHER_FORMATS | set(STANDARD_FORMATS)

# (context, node, place, types) → values of `types` that break one keyword of the node.
Complement = Callable[[Context, dict[str, Any], Place, frozenset[str]], Schema]


def negative(context: Context, node: Any, place: Place, types: frozenset[str]) -> Schema:
    """A schema that, among values of `types`, admits those that `node` does not."""
    return complement(context, node, place, types, KEYWORDS)


def complement(
    context: Context, node: Any, place: Place, types: frozenset[str], keywords: Mapping[str, Complement]
) -> Schema:
    """The same by the given complements of single keywords; one that is not among them never breaks."""
    context.count()
    if isinstance(node, bool):
        return not node
    if not isinstance(node, dict):
        return context.give_up("schema", place, "a schema must be an object or a boolean")
    place = context.enter(node, place)
    if context.document.draft <= Draft.DRAFT7 and isinstance(node.get("$ref"), str):
        # These drafts ignore what stands beside a reference. Breaking that alone is not enough, then.
        node = {"$ref": node["$ref"]}
    if context.unwritable(node, place):
        # Any value may break what is not written.
        return True
    options: list[Schema] = []
    if "type" in node:
        admitted = types_of_keyword(node["type"])
        options.append(_of_types(context, types - admitted, place))
        types &= admitted
    if not types:
        return any_of(options)
    for keyword in node:
        if context.document.draft < SINCE.get(keyword, Draft.DRAFT4):
            continue
        broken = keywords.get(keyword)
        if broken is not None:
            context.met(keyword, place)
            if _KINDS.get(keyword, "") in {"", *types}:
                options.append(broken(context, node, place, types))
    return any_of(options)


def _of_types(context: Context, types: frozenset[str], place: Place) -> Schema:
    names = type_names(types)
    if names is None:
        context.give_up("type", place, "numbers that are not whole cannot be told apart")
        names = type_names(types | NUMBERS)
    return {"type": names} if names else False


def typed(kind: str, types: frozenset[str], rules: dict[str, Schema]) -> Schema:
    """`rules` for values of one type, nothing for others; numbers as `types` has them."""
    if kind == "number":
        if not types & NUMBERS:
            return False
        return {"type": "number" if FRACTION in types else "integer", **rules}
    return {"type": kind, **rules} if kind in types else False


def _const(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    return _values(context, "const", [node["const"]], place, types)


def _enum(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    if not isinstance(node["enum"], list):
        return context.give_up("enum", place, "must be a list")
    return _values(context, "enum", node["enum"], place, types)


def _values(context: Context, keyword: str, values: list[Any], place: Place, types: frozenset[str]) -> Schema:
    if is_rounded(values):
        context.approximate(keyword, place, ROUNDED)
        values = [value for value in values if not is_rounded(value)]
    by_type: dict[str, list[Any]] = {}
    for value in values:
        by_type.setdefault(type_of_value(value), []).append(value)
    numbers = [*by_type.get("integer", ()), *by_type.get(FRACTION, ())]
    untouched = types - set(by_type) - (NUMBERS if numbers else frozenset())
    options = [_of_types(context, untouched, place)] if untouched else []
    if "boolean" in by_type and "boolean" in types:
        options += [{"const": each} for each in (True, False) if each not in by_type["boolean"]]
    if "string" in by_type:
        options.append(typed("string", types, {"pattern": excluding(by_type["string"])}))
    if numbers and types & NUMBERS:
        options += _between(sorted(set(numbers)), types)
    for kind in ("array", "object"):
        if kind in by_type and kind in types:
            described = [_described(value) for value in by_type[kind]]
            options.append(
                all_of(
                    [{"type": kind}]
                    + [negative(context, each, place.at(keyword), frozenset({kind})) for each in described]
                )
            )
    return any_of(options)


def _between(numbers: list[Any], types: frozenset[str]) -> list[Schema]:
    kind = "number" if FRACTION in types else "integer"
    if FRACTION not in types:
        numbers = [each for each in numbers if float(each).is_integer()]
        if not numbers:
            return [{"type": kind}]
    edges = [None, *numbers, None]
    options: list[Schema] = []
    for lower, upper in pairwise(edges):
        if kind == "integer" and lower is not None and upper is not None and upper - lower <= 1:
            continue
        rules: dict[str, Schema] = {"type": kind}
        rules |= {"exclusiveMinimum": lower} if lower is not None else {}
        rules |= {"exclusiveMaximum": upper} if upper is not None else {}
        options.append(rules)
    return options


def _described(value: Any) -> Schema:
    """A constant as a schema of its parts."""
    if isinstance(value, list):
        return {
            "type": "array",
            "minItems": len(value),
            "maxItems": len(value),
            "prefixItems": [{"const": each} for each in value],
        }
    return {
        "type": "object",
        "properties": {name: {"const": each} for name, each in value.items()},
        "required": list(value),
        "additionalProperties": False,
    }


def _bound(keyword: str, opposite: str) -> Callable[..., Schema]:
    def complement(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
        limit = node[keyword]
        if isinstance(limit, bool):
            # Draft 4: a flag beside minimum or maximum, which looks at it.
            return False
        exclusive = node.get("exclusive" + keyword[0].upper() + keyword[1:]) is True
        plain = {"exclusiveMaximum": "maximum", "exclusiveMinimum": "minimum"}
        return typed("number", types, {plain[opposite] if exclusive else opposite: limit})

    return complement


def _size(kind: str, keyword: str, opposite: str, step: int) -> Callable[..., Schema]:
    def complement(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
        limit = int(node[keyword]) + step
        if limit < 0:
            return False
        if kind == "object" and opposite == "minProperties" and limit >= 2:
            context.approximate(keyword, place, "names that occur twice are counted twice")
        return typed(kind, types, {opposite: limit})

    return complement


def _no_form(kind: str, keyword: str, note: str) -> Callable[..., Schema]:
    def complement(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
        relevant = types & NUMBERS if kind == "number" else types & {kind}
        if not relevant or node[keyword] is False:
            return False
        context.give_up(keyword, place, note)
        return _of_types(context, relevant, place)

    return complement


def _pattern(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    texts = listed(node["pattern"]) if isinstance(node["pattern"], str) else None
    if texts is not None:
        return {"type": "string", "pattern": excluding(texts)}
    rest = outside(node["pattern"]) if isinstance(node["pattern"], str) else None
    if rest is not None:
        return {"type": "string", "pattern": rest}
    context.give_up("pattern", place, "strings outside the pattern have no small exact form")
    return {"type": "string"}


def _format(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    if node["format"] not in _FORMATS:
        return False
    context.give_up("format", place, "strings outside a format have no exact form")
    return {"type": "string"}


def required(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    return any_of(typed("object", types, {"properties": {name: False}}) for name in node["required"])


def _properties(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    options = []
    for name, rule in node["properties"].items():
        outside = context.negative(rule, place.at("properties", name), ALL_TYPES)
        if outside is not False:
            options.append({"type": "object", "properties": {name: outside}, "required": [name]})
    return any_of(options)


def additional(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    rule = node["additionalProperties"]
    if rule is True or rule == {}:
        return False
    names = list(node.get("properties", {}))
    if rule is not False or node.get("patternProperties") or len(names) > _MAX_LISTED:
        context.give_up("additionalProperties", place, "that some other property breaks it has no exact form")
        return {"type": "object", "minProperties": 1}
    # One property more than those listed that are there, for every choice of these.
    options = []
    for size in range(len(names) + 1):
        for chosen in combinations(names, size):
            absent = {name: False for name in names if name not in chosen}
            options.append(
                {
                    "type": "object",
                    "properties": {**dict.fromkeys(chosen, True), **absent},
                    "required": list(chosen),
                    "minProperties": size + 1,
                }
            )
    return any_of(options)


def _patterns(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    rules = node["patternProperties"]
    if all(rule is True or rule == {} for rule in rules.values()):
        return False
    context.give_up("patternProperties", place, "that some property breaks it has no exact form")
    return {"type": "object", "minProperties": 1}


def items(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    keyword = "items" if isinstance(node.get("items"), list) else "prefixItems"
    first: list[Any] = node.get(keyword, [])
    options = [
        {
            "type": "array",
            "minItems": index + 1,
            "prefixItems": [*[True] * index, context.negative(rule, place.at(keyword, index), ALL_TYPES)],
        }
        for index, rule in enumerate(first)
    ]
    rest_keyword = "additionalItems" if isinstance(node.get("items"), list) else "items"
    rest = node.get(rest_keyword, True)
    if isinstance(rest, list) or rest is True or rest == {}:
        return any_of(options)
    outside = context.negative(rest, place.at(rest_keyword), ALL_TYPES)
    longest = node.get("maxItems")
    if outside is True:
        options.append({"type": "array", "minItems": len(first) + 1})
    elif outside is not False and isinstance(longest, int) and longest <= 2 * _MAX_LISTED:
        # Longer arrays break maxItems already.
        options += [
            {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, outside]}
            for index in range(len(first), longest)
        ]
    elif outside is not False:
        context.give_up(rest_keyword, place, "that some item breaks it has no exact form")
        options.append({"type": "array", "minItems": len(first) + 1})
    return any_of(options)


def _contains(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    if "minContains" in node or "maxContains" in node:
        context.give_up("contains", place, "counting matches has no exact equivalent")
        return {"type": "array"}
    return {"type": "array", "items": context.negative(node["contains"], place.at("contains"), ALL_TYPES)}


def _names(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    rule = node["propertyNames"]
    inner = rule.get("not") if isinstance(rule, dict) and set(rule) == {"not"} else None
    listed = finite_values(context, inner, place.at("propertyNames", "not")) if inner is not None else None
    if listed is not None and isinstance(inner, dict) and set(inner) <= {"const", "enum"}:
        # Some name breaks it when one of the few forbidden ones is there.
        return any_of({"type": "object", "required": [each]} for each in listed if isinstance(each, str))
    outside = context.negative(rule, place.at("propertyNames"), frozenset({"string"}))
    if outside is False:
        return False
    if outside is not True and outside != {"type": ["string"]}:
        context.give_up("propertyNames", place, "that some name breaks it has no exact form")
    return {"type": "object", "minProperties": 1}


def _any(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    return all_of(_each(context, node["anyOf"], place, "anyOf", types))


def _all(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    return any_of(_each(context, node["allOf"], place, "allOf", types))


def _one(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    branches = node["oneOf"]
    none = all_of(_each(context, branches, place, "oneOf", types))
    positives = [
        context.positive(each, place.at("oneOf", index), types) for index, each in enumerate(branches)
    ]
    return any_of([none, *(all_of(pair) for pair in combinations(positives, 2))])


def _each(
    context: Context, nodes: list[Any], place: Place, keyword: str, types: frozenset[str]
) -> list[Schema]:
    return [context.negative(each, place.at(keyword, index), types) for index, each in enumerate(nodes)]


def _not(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    return _restricted(context, context.positive(node["not"], place.at("not"), types), types, place)


def _restricted(context: Context, schema: Schema, types: frozenset[str], place: Place) -> Schema:
    if types == ALL_TYPES or schema is False:
        return schema
    names = type_names(types)
    # Fractions alone have no name; what surrounds the schema keeps whole numbers out.
    return all_of([{"type": names}, schema]) if names is not None else schema


def _condition(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    met = context.positive(node["if"], place.at("if"), types)
    options = []
    if "then" in node:
        options.append(all_of([met, context.negative(node["then"], place.at("then"), types)]))
    if "else" in node:
        unmet = context.negative(node["if"], place.at("if"), types)
        options.append(all_of([unmet, context.negative(node["else"], place.at("else"), types)]))
    return any_of(options)


def _dependencies(keyword: str) -> Complement:
    def complement(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
        options = []
        for name, wanted in node[keyword].items():
            rule = {"required": wanted} if isinstance(wanted, list) else wanted
            broken = context.negative(rule, place.at(keyword, name), frozenset({"object"}))
            options.append(all_of([{"type": "object", "required": [name]}, broken]))
        return any_of(options)

    return complement


def reference(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    target = context.resolve(node["$ref"], place)
    if target is None:
        return context.give_up("$ref", place, "points outside the schema, or to nothing")
    name = context.define(target, "n", types, context.negative)
    definition = context.definitions[name]
    return definition if isinstance(definition, bool) else {"$ref": f"#/$defs/{name}"}


# Keywords about values of one type, which values of others cannot break.
_KINDS = {
    **dict.fromkeys(("pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "contains"), "array"),
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "propertyNames"), "object"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "object"),
}
KEYWORDS: dict[str, Complement] = {
    "const": _const,
    "enum": _enum,
    "minimum": _bound("minimum", "exclusiveMaximum"),
    "maximum": _bound("maximum", "exclusiveMinimum"),
    "exclusiveMinimum": _bound("exclusiveMinimum", "maximum"),
    "exclusiveMaximum": _bound("exclusiveMaximum", "minimum"),
    "multipleOf": _no_form("number", "multipleOf", "numbers that are no multiples have no exact form"),
    "minLength": _size("string", "minLength", "maxLength", -1),
    "maxLength": _size("string", "maxLength", "minLength", 1),
    "minItems": _size("array", "minItems", "maxItems", -1),
    "maxItems": _size("array", "maxItems", "minItems", 1),
    "minProperties": _size("object", "minProperties", "maxProperties", -1),
    "maxProperties": _size("object", "maxProperties", "minProperties", 1),
    "pattern": _pattern,
    "format": _format,
    "required": required,
    "properties": _properties,
    "additionalProperties": additional,
    "patternProperties": _patterns,
    "items": items,
    "prefixItems": lambda context, node, place, types: (
        False if "items" in node else items(context, node, place, types)
    ),
    "uniqueItems": _no_form("array", "uniqueItems", "arrays with repeated items have no exact form"),
    "contains": _contains,
    "propertyNames": _names,
    "anyOf": _any,
    "allOf": _all,
    "oneOf": _one,
    "not": _not,
    "if": _condition,
    "dependencies": _dependencies("dependencies"),
    "dependentRequired": _dependencies("dependentRequired"),
    "dependentSchemas": _dependencies("dependentSchemas"),
    "$ref": reference,
}
