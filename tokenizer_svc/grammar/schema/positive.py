"""A schema as the back end takes it: what it knows is copied, the rest is rewritten exactly or reported."""

from __future__ import annotations

import re
from typing import Any

from tokenizer_svc.grammar.backend import pattern_is_readable
from tokenizer_svc.grammar.schema.arrays import contains, finite_values, unique_items
from tokenizer_svc.grammar.schema.automata import plain
from tokenizer_svc.grammar.schema.back_end_numbers import is_rounded
from tokenizer_svc.grammar.schema.cases import gather
from tokenizer_svc.grammar.schema.conditions import conditional, dependencies
from tokenizer_svc.grammar.schema.context import METASCHEMAS, Context, Place
from tokenizer_svc.grammar.schema.document import SINCE, Draft, Target
from tokenizer_svc.grammar.schema.objects import count_properties, property_names, unevaluated_properties
from tokenizer_svc.grammar.schema.one_of import one_of
from tokenizer_svc.grammar.schema.shapes import (
    ALL_TYPES,
    Schema,
    all_of,
    any_of,
    type_names,
    types_of_keyword,
)
from tokenizer_svc.grammar.schema.strings import (
    BACKEND_FORMATS,
    FORMAT_LIMITS,
    OTHER_FORMATS,
    STANDARD_FORMATS,
    split_lookaheads,
)

# Copied as they are.
_COPIED = frozenset(
    {
        "const", "enum", "minItems", "maxItems", "required", "minLength", "maxLength", "minimum", "maximum",
        "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties",
    }
)  # fmt: skip
_COUNTED = frozenset({"Items", "Length", "Properties"})
_SCHEMA_MAPS = frozenset({"properties", "patternProperties"})
_SCHEMA_LISTS = frozenset({"allOf", "anyOf"})
# Rewritten from the whole node, in a second pass.
_REWRITTEN = frozenset(
    {
        "oneOf", "not", "if", "dependencies", "dependentRequired", "dependentSchemas", "uniqueItems",
        "contains", "propertyNames", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef",
        "$recursiveRef",
    }
)  # fmt: skip
_BY_CASES = frozenset(
    {"if", "not", "oneOf", "allOf", "dependencies", "dependentRequired", "dependentSchemas"}
)
# A type, and what constrains nothing.
_PLAIN = frozenset(
    {
        "type", "title", "description", "default", "examples", "$comment", "deprecated", "readOnly",
        "writeOnly",
    }
)  # fmt: skip
# Values of a listing that are tried one by one.
_MAX_FILTERED = 500


def positive(context: Context, node: Any, place: Place, types: frozenset[str]) -> Schema:
    """The schema for the back end. Only values of `types` can occur here."""
    context.count()
    if isinstance(node, bool):
        return node
    if not isinstance(node, dict):
        return context.give_up("schema", place, "a schema must be an object or a boolean")
    if node.keys() <= _PLAIN:
        return _plain(context, node, place, types)
    place = context.enter(node, place)
    if context.document.draft <= Draft.DRAFT7 and isinstance(node.get("$ref"), str) and has_constraints(node):
        return _old_reference(context, node, place, types)
    return _entered(context, node, place, types)


def _old_reference(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    """A reference with constraints beside it, in a draft that ignores them.

    Whoever wrote them meant them, and what holds besides is valid by the draft as well: so they are enforced
    where that takes nothing back. What cannot be enforced, or leaves no value, is ignored, as the draft says.
    """
    reference = _entered(context, {"$ref": node["$ref"]}, place, types)
    unenforced, approximated = dict(context.unenforced), dict(context.approximated)
    whole = _entered(context, node, place, types)
    if whole is not False and (unenforced, approximated) == (context.unenforced, context.approximated):
        return whole
    context.unenforced, context.approximated = unenforced, approximated
    return reference


def _entered(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    context.look_for_rounded(node, place)
    types &= context.types_of(node, place)
    if not types:
        return False
    values = _filtered(context, node, place)
    if values is not None:
        return {"enum": values} if values else False
    closing = _closing_loop(context, node, place) if "$ref" in node else None
    return closing if closing is not None else _conjunction(context, node, place, types)


def _plain(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    """What most of any schema is: a type with annotations."""
    if "type" not in node:
        return {}
    context.met("type", place)
    admitted = types_of_keyword(node["type"])
    if not admitted:
        return context.give_up("type", place, f"unknown type {node['type']!r}")
    return {"type": node["type"]} if admitted & types else False


def _conjunction(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    out: dict[str, Schema] = {}
    extra: list[Schema] = []
    unwritable = context.unwritable(node, place)
    if unwritable:
        node = {keyword: value for keyword, value in node.items() if keyword not in unwritable}
    if "object" in types and not _BY_CASES.isdisjoint(node):
        node = _without_cases(context, node, place, types, extra)
    for keyword, value in node.items():
        if context.document.draft < SINCE.get(keyword, Draft.DRAFT4):
            continue
        if keyword in _COPIED:
            context.met(keyword, place)
            # A count may be written 2.0.
            is_count = keyword[3:] in _COUNTED and isinstance(value, float) and value.is_integer()
            out[keyword] = int(value) if is_count else value
        elif keyword == "type":
            context.met(keyword, place)
            if not types_of_keyword(value):
                return context.give_up("type", place, f"unknown type {value!r}")
            out[keyword] = value
        elif keyword in _REWRITTEN:
            context.met(keyword, place)
            _rewritten(context, node, keyword, place, types, out, extra)
        else:
            _nested(context, node, keyword, value, place, types, out, extra)
    _object_rules(context, node, place, types, out, extra)
    return all_of([out, *extra])


def _object_rules(
    context: Context,
    node: dict[str, Any],
    place: Place,
    types: frozenset[str],
    out: dict[str, Schema],
    extra: list[Schema],
) -> None:
    """Keywords that look at the other object keywords, once these are there."""
    draft = context.document.draft
    if "object" not in types:
        return
    if "propertyNames" in node and draft >= SINCE["propertyNames"]:
        property_names(context, node, place, types, out)
    if "unevaluatedProperties" in node and draft >= SINCE["unevaluatedProperties"]:
        unevaluated_properties(context, node, place, out, extra)
    count_properties(context, place, types, out, extra)


def _without_cases(
    context: Context, node: dict[str, Any], place: Place, types: frozenset[str], extra: list[Schema]
) -> dict[str, Any]:
    """The node without the conditions that were written as finite cases; these go to `extra`."""
    others = type_names(types - {"object"})
    if others is None:
        return node
    gathered = gather(context, node, place)
    if not gathered.keywords and not gathered.members:
        return node
    for keyword in gathered.keywords:
        context.met(keyword, place)
    for index in gathered.members:
        for keyword in node["allOf"][index]:
            context.met(keyword, place.at("allOf", index))
    union = gathered.union
    if others:
        # Other values are not concerned by cases of properties; the conditions are taken one by one.
        taken = {key: node[key] for key in gathered.keywords}
        members = [
            each if index in gathered.members else True for index, each in enumerate(node.get("allOf", ()))
        ]
        general = context.positive({**taken, "allOf": members}, place, types - {"object"})
        union = any_of([union, all_of([{"type": others}, general])])
    extra.append(union)
    rest = {key: value for key, value in node.items() if key not in gathered.keywords}
    if gathered.members:
        # Places of the remaining members do not change: a taken one is true.
        rest["allOf"] = [
            True if index in gathered.members else each for index, each in enumerate(node["allOf"])
        ]
    return rest


def _filtered(context: Context, node: dict[str, Any], place: Place) -> list[Any] | None:
    """The values that match, where a schema with keywords to rewrite lists its values anyway."""
    if _REWRITTEN.isdisjoint(node) and "allOf" not in node:
        return None
    values = finite_values(context, node, place)
    if values is None or len(values) > _MAX_FILTERED or is_rounded(values):
        return None
    matches = context.document.matcher(place.path)
    if matches is None:
        return None
    for keyword in node:
        if keyword in _COPIED or keyword in _REWRITTEN or keyword in _SCHEMA_LISTS or keyword == "type":
            context.met(keyword, place)
    return [value for value in values if matches(value)]


def _nested(
    context: Context,
    node: dict[str, Any],
    keyword: str,
    value: Any,
    place: Place,
    types: frozenset[str],
    out: dict[str, Schema],
    extra: list[Schema],
) -> None:
    if keyword in _SCHEMA_MAPS and isinstance(value, dict):
        context.met(keyword, place)
        out[keyword] = {
            name: _any_type(context, each, place.at(keyword, name)) for name, each in value.items()
        }
    elif keyword in _SCHEMA_LISTS and isinstance(value, list):
        context.met(keyword, place)
        out[keyword] = [
            context.positive(each, place.at(keyword, index), types) for index, each in enumerate(value)
        ]
    elif keyword == "additionalProperties":
        context.met(keyword, place)
        out[keyword] = _any_type(context, value, place.at(keyword))
    elif keyword in ("items", "prefixItems", "additionalItems"):
        _items(context, node, keyword, value, place, out)
    elif keyword == "$ref":
        context.met(keyword, place)
        _reference(context, value, place, out, extra)
    elif keyword == "pattern":
        context.met(keyword, place)
        _pattern(context, value, place, out, extra)
    elif keyword == "format" and isinstance(value, str):
        # A format that the specification does not define is an annotation.
        if value in BACKEND_FORMATS:
            context.met(keyword, place)
            out[keyword] = value
            if value in FORMAT_LIMITS and "string" in types:
                extra.append(FORMAT_LIMITS[value])
        elif value in STANDARD_FORMATS:
            context.met(keyword, place)
            extra.append({"pattern": STANDARD_FORMATS[value]} if "string" in types else True)
        elif value in OTHER_FORMATS and "string" in types:
            context.give_up(keyword, place, f"{value!r} has no grammar here")


def _any_type(context: Context, node: Any, place: Place) -> Schema:
    return context.positive(node, place, ALL_TYPES)


def _items(
    context: Context, node: dict[str, Any], keyword: str, value: Any, place: Place, out: dict[str, Schema]
) -> None:
    """Arrays of schemas are written as prefixItems, and what follows them as items, for every draft."""
    context.met(keyword, place)
    is_list = isinstance(node.get("items"), list)
    if (keyword == "items" and is_list) or (keyword == "prefixItems" and isinstance(value, list)):
        out["prefixItems"] = [
            _any_type(context, each, place.at(keyword, index)) for index, each in enumerate(value)
        ]
    elif keyword == "additionalItems":
        if is_list:
            out["items"] = _any_type(context, value, place.at(keyword))
    elif keyword == "items":
        out["items"] = _any_type(context, value, place.at(keyword))


def _reference(
    context: Context, reference: Any, place: Place, out: dict[str, Schema], extra: list[Schema]
) -> None:
    if not isinstance(reference, str):
        context.give_up("$ref", place, "a reference must be a text")
        return
    target = context.resolve(reference, place)
    if target is None:
        if reference.rstrip("#") in METASCHEMAS:
            out["$ref"] = reference
        else:
            context.give_up("$ref", place, f"{reference!r} points outside the schema, or to nothing")
        return
    name = context.define(target, "p", ALL_TYPES, context.positive)
    definition = context.definitions[name]
    if isinstance(definition, bool):
        extra.append(definition)
    else:
        out["$ref"] = f"#/$defs/{name}"


def _closing_loop(context: Context, node: dict[str, Any], place: Place) -> Schema | None:
    """A reference with constraints beside it, inside what it refers to.

    The back end cannot intersect a definition that is still open. The intersection becomes a definition of
    its own, with the body of the referred one written out; inside it the same place is a plain reference.
    """
    if not isinstance(node["$ref"], str) or not has_constraints(node):
        return None
    target = context.resolve(node["$ref"], place)
    if target is None or not context.is_defining(target, "p", ALL_TYPES):
        return None

    def written_out(_: Any, inside: Place, types: frozenset[str]) -> Schema:
        body = context.positive(target.node, Place(target.path, target.base), types)
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return all_of([body, context.positive(beside, inside, types)])

    here = Target(node, place.path, place.base)
    return {"$ref": f"#/$defs/{context.define(here, 'c', ALL_TYPES, written_out)}"}


def has_constraints(node: dict[str, Any]) -> bool:
    """Whether there is anything that constrains beside $ref."""
    return any(
        key in _COPIED
        or key in _REWRITTEN
        or key in _SCHEMA_MAPS
        or key in _SCHEMA_LISTS
        or key in _BESIDE_REF
        for key in node
    )


_BESIDE_REF = frozenset({"type", "items", "prefixItems", "additionalProperties", "pattern", "format"})


# Perhaps an anchor that is not the pattern's last character, a word's edge, a back-reference or a property.
_DOUBTFUL = re.compile(r"(?<!\\)\$.|\\[bBkpP1-9]")


def _pattern(context: Context, value: Any, place: Place, out: dict[str, Schema], extra: list[Schema]) -> None:
    if not isinstance(value, str):
        context.give_up("pattern", place, "a pattern must be a text")
        return
    parts = split_lookaheads(value)
    if parts is None or (_DOUBTFUL.search(value) and not pattern_is_readable(value)):
        rewritten = plain(value)
        if rewritten is None:
            context.give_up(
                "pattern",
                place,
                "look-arounds, inner anchors, word edges and back-references have no small equivalent here",
            )
            return
        parts = [rewritten]
    out["pattern"] = parts[-1]
    extra += [{"pattern": part} for part in parts[:-1]]


def _rewritten(
    context: Context,
    node: dict[str, Any],
    keyword: str,
    place: Place,
    types: frozenset[str],
    out: dict[str, Schema],
    extra: list[Schema],
) -> None:
    value = node[keyword]
    match keyword:
        case "oneOf":
            one_of(context, node, place, types, out, extra)
        case "not":
            extra.append(context.negative(value, place.at("not"), types))
        case "if":
            extra.append(conditional(context, node, place, types))
        case "dependencies" | "dependentRequired" | "dependentSchemas" if "object" in types:
            extra += dependencies(context, keyword, value, place, types)
        case "uniqueItems" if value is True and "array" in types:
            extra.append(unique_items(context, node, place, types))
        case "contains" if "array" in types:
            extra.append(contains(context, node, place, types))
        case "unevaluatedItems" if "array" in types and value is not True:
            context.give_up(keyword, place, "has no exact equivalent")
        case "$dynamicRef" | "$recursiveRef":
            context.give_up(keyword, place, "dynamic references are not resolved")
        case _:
            # About other types than can occur, or taken with the other object keywords.
            pass
