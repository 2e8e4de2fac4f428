"""The complement of a schema, for the back end: everything that does not match, among the types at hand.

A schema is a conjunction of keywords, each about values of one type; its complement is the union of their
complements. Where one has no exact form, more is accepted and the report names the keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, pairwise
from typing import Any

from msgspec import structs

from tokenizer_svc.grammar.schema.arrays import finite_values
from tokenizer_svc.grammar.schema.automata import outside
from tokenizer_svc.grammar.schema.back_end_numbers import ROUNDED, is_rounded
from tokenizer_svc.grammar.schema.context import Context, SchemaLocation, SchemaPart
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

# Values of the types of a schema object that break one of its keywords.
Complement = Callable[[SchemaPart], Schema]


def negative(context: Context, node: Any, place: SchemaLocation, types: frozenset[str]) -> Schema:
    """A schema that, among values of `types`, admits those that `node` does not."""
    return complement(context, node, place, types, KEYWORDS)


def complement(
    context: Context,
    node: Any,
    place: SchemaLocation,
    types: frozenset[str],
    keywords: Mapping[str, Complement],
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
    part = SchemaPart(context, node, place, types)
    for keyword in node:
        if context.document.draft < SINCE.get(keyword, Draft.DRAFT4):
            continue
        broken = keywords.get(keyword)
        if broken is not None:
            context.met(keyword, place)
            if _KINDS.get(keyword, "") in {"", *types}:
                options.append(broken(part))
    return any_of(options)


def _of_types(context: Context, types: frozenset[str], place: SchemaLocation) -> Schema:
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


def _const(part: SchemaPart) -> Schema:
    return _values(part.context, "const", [part.node["const"]], part.place, part.types)


def _enum(part: SchemaPart) -> Schema:
    if not isinstance(part.node["enum"], list):
        return part.give_up("enum", "must be a list")
    return _values(part.context, "enum", part.node["enum"], part.place, part.types)


def _values(
    context: Context, keyword: str, values: list[Any], place: SchemaLocation, types: frozenset[str]
) -> Schema:
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
    def complement(part: SchemaPart) -> Schema:
        limit = part.node[keyword]
        if isinstance(limit, bool):
            # Draft 4: a flag beside minimum or maximum, which looks at it.
            return False
        exclusive = part.node.get("exclusive" + keyword[0].upper() + keyword[1:]) is True
        plain = {"exclusiveMaximum": "maximum", "exclusiveMinimum": "minimum"}
        return typed("number", part.types, {plain[opposite] if exclusive else opposite: limit})

    return complement


def _size(kind: str, keyword: str, opposite: str, step: int) -> Callable[..., Schema]:
    def complement(part: SchemaPart) -> Schema:
        limit = int(part.node[keyword]) + step
        if limit < 0:
            return False
        if kind == "object" and opposite == "minProperties" and limit >= 2:
            part.context.approximate(keyword, part.place, "names that occur twice are counted twice")
        return typed(kind, part.types, {opposite: limit})

    return complement


def _no_form(kind: str, keyword: str, note: str, *, never_broken: bool = False) -> Callable[..., Schema]:
    def complement(part: SchemaPart) -> Schema:
        relevant = part.types & NUMBERS if kind == "number" else part.types & {kind}
        if not relevant or part.node[keyword] is never_broken:
            return False
        part.give_up(keyword, note)
        return _of_types(part.context, relevant, part.place)

    return complement


def _pattern(part: SchemaPart) -> Schema:
    pattern = part.node["pattern"]
    texts = listed(pattern) if isinstance(pattern, str) else None
    if texts is not None:
        return {"type": "string", "pattern": excluding(texts)}
    rest = outside(pattern) if isinstance(pattern, str) else None
    if rest is not None:
        return {"type": "string", "pattern": rest}
    part.give_up("pattern", "strings outside the pattern have no small exact form")
    return {"type": "string"}


def _format(part: SchemaPart) -> Schema:
    if part.node["format"] not in _FORMATS:
        return False
    part.give_up("format", "strings outside a format have no exact form")
    return {"type": "string"}


def required(part: SchemaPart) -> Schema:
    names = part.node["required"]
    return any_of(typed("object", part.types, {"properties": {name: False}}) for name in names)


def _properties(part: SchemaPart) -> Schema:
    options = []
    for name, rule in part.node["properties"].items():
        outside = part.outside(rule, "properties", name)
        if outside is not False:
            options.append({"type": "object", "properties": {name: outside}, "required": [name]})
    return any_of(options)


def additional(part: SchemaPart) -> Schema:
    rule = part.node["additionalProperties"]
    if rule is True or rule == {}:
        return False
    names = list(part.node.get("properties", {}))
    if rule is not False or part.node.get("patternProperties") or len(names) > _MAX_LISTED:
        part.give_up("additionalProperties", "that some other property breaks it has no exact form")
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


def _patterns(part: SchemaPart) -> Schema:
    rules = part.node["patternProperties"]
    if all(rule is True or rule == {} for rule in rules.values()):
        return False
    part.give_up("patternProperties", "that some property breaks it has no exact form")
    return {"type": "object", "minProperties": 1}


def items(part: SchemaPart) -> Schema:
    keyword = "items" if isinstance(part.node.get("items"), list) else "prefixItems"
    first: list[Any] = part.node.get(keyword, [])
    options = [
        {
            "type": "array",
            "minItems": index + 1,
            "prefixItems": [*[True] * index, part.outside(rule, keyword, index)],
        }
        for index, rule in enumerate(first)
    ]
    rest_keyword = "additionalItems" if isinstance(part.node.get("items"), list) else "items"
    rest = part.node.get(rest_keyword, True)
    if isinstance(rest, list) or rest is True or rest == {}:
        return any_of(options)
    outside = part.outside(rest, rest_keyword)
    longest = part.node.get("maxItems")
    if outside is True:
        options.append({"type": "array", "minItems": len(first) + 1})
    elif outside is not False and isinstance(longest, int) and longest <= 2 * _MAX_LISTED:
        # Longer arrays break maxItems already.
        options += [
            {"type": "array", "minItems": index + 1, "prefixItems": [*[True] * index, outside]}
            for index in range(len(first), longest)
        ]
    elif outside is not False:
        part.give_up(rest_keyword, "that some item breaks it has no exact form")
        options.append({"type": "array", "minItems": len(first) + 1})
    return any_of(options)


def _contains(part: SchemaPart) -> Schema:
    if part.node.get("minContains") == 0 and "maxContains" not in part.node:
        return False
    if "minContains" in part.node or "maxContains" in part.node:
        part.give_up("contains", "counting matches has no exact equivalent")
        return {"type": "array"}
    return {"type": "array", "items": part.outside(part.node["contains"], "contains")}


def _names(part: SchemaPart) -> Schema:
    rule = part.node["propertyNames"]
    inner = rule.get("not") if isinstance(rule, dict) and set(rule) == {"not"} else None
    names = finite_values(part.context, inner, part.place.at("propertyNames", "not"))
    if names is not None and isinstance(inner, dict) and set(inner) <= {"const", "enum"}:
        # Some name breaks it when one of the few forbidden ones is there.
        return any_of({"type": "object", "required": [each]} for each in names if isinstance(each, str))
    outside = part.context.negative(rule, part.place.at("propertyNames"), frozenset({"string"}))
    if outside is False:
        return False
    if outside is not True and outside != {"type": ["string"]}:
        part.give_up("propertyNames", "that some name breaks it has no exact form")
    return {"type": "object", "minProperties": 1}


def _any(part: SchemaPart) -> Schema:
    return all_of(_each(part, "anyOf"))


def _all(part: SchemaPart) -> Schema:
    return any_of(_each(part, "allOf"))


def _one(part: SchemaPart) -> Schema:
    positives = [part.beside(each, "oneOf", index) for index, each in enumerate(part.node["oneOf"])]
    return any_of([all_of(_each(part, "oneOf")), *(all_of(pair) for pair in combinations(positives, 2))])


def _each(part: SchemaPart, keyword: str) -> list[Schema]:
    return [part.unlike(each, keyword, index) for index, each in enumerate(part.node[keyword])]


def _not(part: SchemaPart) -> Schema:
    schema = part.beside(part.node["not"], "not")
    if part.types == ALL_TYPES or schema is False:
        return schema
    names = type_names(part.types)
    # Fractions alone have no name; what surrounds the schema keeps whole numbers out.
    return all_of([{"type": names}, schema]) if names is not None else schema


def _condition(part: SchemaPart) -> Schema:
    met = part.beside(part.node["if"], "if")
    options = []
    if "then" in part.node:
        options.append(all_of([met, part.unlike(part.node["then"], "then")]))
    if "else" in part.node:
        unmet = part.unlike(part.node["if"], "if")
        options.append(all_of([unmet, part.unlike(part.node["else"], "else")]))
    return any_of(options)


def _dependencies(keyword: str) -> Complement:
    def complement(part: SchemaPart) -> Schema:
        options = []
        for name, wanted in part.node[keyword].items():
            rule = {"required": wanted} if isinstance(wanted, list) else wanted
            broken = part.context.negative(rule, part.place.at(keyword, name), frozenset({"object"}))
            options.append(all_of([{"type": "object", "required": [name]}, broken]))
        return any_of(options)

    return complement


def reference(part: SchemaPart) -> Schema:
    target = part.context.resolve(part.node["$ref"], part.place)
    if target is None:
        return part.give_up("$ref", "points outside the schema, or to nothing")
    name = part.context.define(target, "n", part.types, part.context.negative)
    definition = part.context.definitions[name]
    return definition if isinstance(definition, bool) else {"$ref": f"#/$defs/{name}"}


def _dynamic(keyword: str) -> Complement:
    def complement(part: SchemaPart) -> Schema:
        if not part.context.document.is_one_resource():
            part.give_up(keyword, "dynamic references are not resolved")
            return True
        return reference(structs.replace(part, node={"$ref": part.node[keyword]}))

    return complement


# Keywords about values of one type, which values of others cannot break.
_KINDS = {
    **dict.fromkeys(("pattern", "format"), "string"),
    **dict.fromkeys(("items", "prefixItems", "contains", "unevaluatedItems"), "array"),
    **dict.fromkeys(("properties", "additionalProperties", "patternProperties", "propertyNames"), "object"),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), "object"),
    "unevaluatedProperties": "object",
}
_UNEVALUATED = "that some value which nothing else evaluates breaks it has no exact form"
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
    "prefixItems": lambda part: False if "items" in part.node else items(part),
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
    "$dynamicRef": _dynamic("$dynamicRef"),
    "$recursiveRef": _dynamic("$recursiveRef"),
    "unevaluatedItems": _no_form("array", "unevaluatedItems", _UNEVALUATED, never_broken=True),
    "unevaluatedProperties": _no_form("object", "unevaluatedProperties", _UNEVALUATED, never_broken=True),
}
