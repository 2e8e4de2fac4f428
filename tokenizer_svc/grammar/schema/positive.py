"""A schema as the back end takes it: what it knows is copied, the rest is rewritten exactly or reported."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tokenizer_svc.grammar.backend import pattern_is_readable
from tokenizer_svc.grammar.schema.arrays import contains, finite_values, unevaluated_items, unique_items
from tokenizer_svc.grammar.schema.automata import plain
from tokenizer_svc.grammar.schema.back_end_numbers import BOUNDS, is_rounded
from tokenizer_svc.grammar.schema.cases import gather
from tokenizer_svc.grammar.schema.conditions import conditional, dependencies
from tokenizer_svc.grammar.schema.context import Context, SchemaLocation, SchemaPart
from tokenizer_svc.grammar.schema.document import DRAFTS, SINCE, Draft, RefTarget
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
# A reference, and what constrains nothing.
_REFERRING = (_PLAIN - {"type"}) | {"$ref"}
# Nodes without any of these are looked at keyword by keyword alone.
_INVOLVED = _REWRITTEN | _SCHEMA_LISTS | {"$id", "id", "$ref", "const", "enum", *BOUNDS}
# Values of a listing that are tried one by one.
_MAX_FILTERED = 500


def positive(context: Context, node: Any, place: SchemaLocation, types: frozenset[str]) -> Schema:
    """The schema for the back end. Only values of `types` can occur here."""
    context.count()
    if not isinstance(node, dict):
        known = isinstance(node, bool)
        return node if known else context.give_up("schema", place, "a schema must be an object or a boolean")
    if node.keys() <= _PLAIN:
        return _plain(context, node, place, types)
    if _INVOLVED.isdisjoint(node):
        if "type" in node:
            types &= types_of_keyword(node["type"])
        return _conjunction(context, node, place, types) if types else False
    if node.keys() <= _REFERRING:
        return _plain_reference(context, node, place, types)
    place = context.enter(node, place)
    is_old = context.document.draft <= Draft.DRAFT7 and isinstance(node.get("$ref"), str)
    write = _old_reference if is_old and has_constraints(node) else _entered
    return write(context, node, place, types)


def _plain_reference(
    context: Context, node: dict[str, Any], place: SchemaLocation, types: frozenset[str]
) -> Schema:
    """A reference with annotations."""
    if not types & context.types_of(node, place):
        return False
    part = SchemaPart(context, node, place, types)
    _reference(part, "$ref", node["$ref"])
    return all_of([part.out, *part.extra])


def _old_reference(
    context: Context, node: dict[str, Any], place: SchemaLocation, types: frozenset[str]
) -> Schema:
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


def _entered(context: Context, node: dict[str, Any], place: SchemaLocation, types: frozenset[str]) -> Schema:
    context.look_for_rounded(node, place)
    types &= context.types_of(node, place)
    if not types:
        return False
    values = _filtered(context, node, place)
    if values is not None:
        return {"enum": values} if values else False
    closing = _closing_loop(context, node, place) if "$ref" in node else None
    return closing if closing is not None else _conjunction(context, node, place, types)


def _plain(context: Context, node: dict[str, Any], place: SchemaLocation, types: frozenset[str]) -> Schema:
    """What most of any schema is: a type with annotations."""
    if "type" not in node:
        return {}
    context.met("type", place)
    admitted = types_of_keyword(node["type"])
    if not admitted:
        return context.give_up("type", place, f"unknown type {node['type']!r}")
    return {"type": node["type"]} if admitted & types else False


def _conjunction(
    context: Context, node: dict[str, Any], place: SchemaLocation, types: frozenset[str]
) -> Schema:
    part = SchemaPart(context, node, place, types)
    unwritable = context.unwritable(node, place)
    if unwritable:
        part.node = {keyword: value for keyword, value in node.items() if keyword not in unwritable}
    if "object" in types and not _BY_CASES.isdisjoint(part.node):
        part.node = _without_cases(part)
    writers = _WRITERS[context.document.draft]
    out = part.out
    for keyword, value in part.node.items():
        write = writers.get(keyword)
        if write is not None:
            write(part, keyword, value)
        elif keyword in _COPIED:
            part.met(keyword)
            # A count may be written 2.0.
            is_count = isinstance(value, float) and keyword[3:] in _COUNTED and value.is_integer()
            out[keyword] = int(value) if is_count else value
        elif keyword == "type":
            part.met(keyword)
            if not types_of_keyword(value):
                return context.give_up("type", place, f"unknown type {value!r}")
            out[keyword] = value
    _object_rules(part)
    if part.extra or len(out) < 2:
        return all_of([out, *part.extra])
    return out


def _object_rules(part: SchemaPart) -> None:
    """Keywords that look at the other object keywords, once these are there."""
    draft = part.context.document.draft
    if "object" not in part.types:
        return
    if "propertyNames" in part.node and draft >= SINCE["propertyNames"]:
        property_names(part)
    if "unevaluatedProperties" in part.node and draft >= SINCE["unevaluatedProperties"]:
        unevaluated_properties(part)
    count_properties(part)


def _without_cases(part: SchemaPart) -> dict[str, Any]:
    """The node without the conditions that were written as finite cases; these go to `extra`."""
    context, node, place = part.context, part.node, part.place
    others = type_names(part.types - {"object"})
    if others is None:
        return node
    gathered = gather(context, node, place)
    if not gathered.keywords and not gathered.members:
        return node
    # In the node's order, so that every process writes the same.
    taken = {key: value for key, value in node.items() if key in gathered.keywords}
    for keyword in taken:
        context.met(keyword, place)
    for index in gathered.members:
        for keyword in node["allOf"][index]:
            context.met(keyword, place.at("allOf", index))
    union = gathered.union
    if others:
        # Other values are not concerned by cases of properties; the conditions are taken one by one.
        members = [
            each if index in gathered.members else True for index, each in enumerate(node.get("allOf", ()))
        ]
        general = context.positive({**taken, "allOf": members}, place, part.types - {"object"})
        union = any_of([union, all_of([{"type": others}, general])])
    part.extra.append(union)
    rest = {key: value for key, value in node.items() if key not in gathered.keywords}
    if gathered.members:
        # Places of the remaining members do not change: a taken one is true.
        rest["allOf"] = [
            True if index in gathered.members else each for index, each in enumerate(node["allOf"])
        ]
    return rest


def _filtered(context: Context, node: dict[str, Any], place: SchemaLocation) -> list[Any] | None:
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


# (part, keyword, its value): writes the keyword into the part's `out`, or appends a schema to its `extra`.
_Writer = Callable[[SchemaPart, str, Any], None]


def _map(part: SchemaPart, keyword: str, value: Any) -> None:
    """Schemas by name or pattern."""
    if isinstance(value, dict):
        part.met(keyword)
        part.out[keyword] = {name: part.inside(each, keyword, name) for name, each in value.items()}


def _list(part: SchemaPart, keyword: str, value: Any) -> None:
    """Schemas of the same value."""
    if isinstance(value, list):
        part.met(keyword)
        part.out[keyword] = [part.beside(each, keyword, index) for index, each in enumerate(value)]


def _additional(part: SchemaPart, keyword: str, value: Any) -> None:
    part.met(keyword)
    part.out[keyword] = part.inside(value, keyword)


def _format(part: SchemaPart, keyword: str, value: Any) -> None:
    """A format that the specification does not define is an annotation."""
    if not isinstance(value, str):
        return
    if value in BACKEND_FORMATS:
        part.met(keyword)
        part.out[keyword] = value
        if value in FORMAT_LIMITS and "string" in part.types:
            part.extra.append(FORMAT_LIMITS[value])
    elif value in STANDARD_FORMATS:
        part.met(keyword)
        part.extra.append({"pattern": STANDARD_FORMATS[value]} if "string" in part.types else True)
    elif value in OTHER_FORMATS and "string" in part.types:
        part.give_up(keyword, f"{value!r} has no grammar here")


def _items(part: SchemaPart, keyword: str, value: Any) -> None:
    """Arrays of schemas are written as prefixItems, and what follows them as items, for every draft."""
    part.met(keyword)
    is_list = isinstance(part.node.get("items"), list)
    if (keyword == "items" and is_list) or (keyword == "prefixItems" and isinstance(value, list)):
        part.out["prefixItems"] = [part.inside(each, keyword, index) for index, each in enumerate(value)]
    elif keyword == "items" or (keyword == "additionalItems" and is_list):
        part.out["items"] = part.inside(value, keyword)


def _reference(part: SchemaPart, keyword: str, value: Any) -> None:
    part.met(keyword)
    if not isinstance(value, str):
        part.give_up(keyword, "a reference must be a text")
        return
    target = part.context.resolve(value, part.place)
    if target is None:
        if value.rstrip("#") in DRAFTS:
            part.out["$ref"] = value
        else:
            part.give_up(keyword, f"{value!r} points outside the schema, or to nothing")
        return
    name = part.context.define(target, "p", ALL_TYPES, part.context.positive)
    definition = part.context.definitions[name]
    if isinstance(definition, bool):
        part.extra.append(definition)
    else:
        part.out["$ref"] = f"#/$defs/{name}"


def _closing_loop(context: Context, node: dict[str, Any], place: SchemaLocation) -> Schema | None:
    """A reference with constraints beside it, inside what it refers to.

    The back end cannot intersect a definition that is still open. The intersection becomes a definition of
    its own, with the body of the referred one written out; inside it the same place is a plain reference.
    """
    if not isinstance(node["$ref"], str) or not has_constraints(node):
        return None
    target = context.resolve(node["$ref"], place)
    if target is None or not context.is_defining(target, "p", ALL_TYPES):
        return None

    def written_out(_: Any, inside: SchemaLocation, types: frozenset[str]) -> Schema:
        body = context.positive(target.node, SchemaLocation(target.path, target.base), types)
        beside = {key: value for key, value in node.items() if key != "$ref"}
        return all_of([body, context.positive(beside, inside, types)])

    here = RefTarget(node, place.path, place.base)
    return {"$ref": f"#/$defs/{context.define(here, 'c', ALL_TYPES, written_out)}"}


def has_constraints(node: dict[str, Any]) -> bool:
    """Whether there is anything that constrains beside $ref."""
    return not _CONSTRAINING.isdisjoint(node)


_CONSTRAINING = (
    _COPIED
    | _REWRITTEN
    | _SCHEMA_MAPS
    | _SCHEMA_LISTS
    | {"type", "items", "prefixItems", "additionalProperties", "pattern", "format"}
)


# Perhaps an anchor that is not the pattern's last character, a word's edge, a back-reference or a property.
_DOUBTFUL = re.compile(r"(?<!\\)\$.|\\[bBkpP1-9]")


def _pattern(part: SchemaPart, keyword: str, value: Any) -> None:
    part.met(keyword)
    if not isinstance(value, str):
        part.give_up("pattern", "a pattern must be a text")
        return
    parts = split_lookaheads(value)
    if parts is None or (_DOUBTFUL.search(value) and not pattern_is_readable(value)):
        rewritten = plain(value)
        if rewritten is None:
            part.give_up(
                "pattern",
                "look-arounds, inner anchors, word edges and back-references have no small equivalent here",
            )
            return
        parts = [rewritten]
    part.out["pattern"] = parts[-1]
    part.extra += [{"pattern": each} for each in parts[:-1]]


def _rewritten(part: SchemaPart, keyword: str, value: Any) -> None:
    part.met(keyword)
    match keyword:
        case "oneOf":
            one_of(part)
        case "not":
            part.extra.append(part.unlike(value, "not"))
        case "if":
            part.extra.append(conditional(part))
        case "dependencies" | "dependentRequired" | "dependentSchemas" if "object" in part.types:
            part.extra += dependencies(part, keyword)
        case "uniqueItems" if value is True and "array" in part.types:
            part.extra.append(unique_items(part))
        case "contains" if "array" in part.types:
            part.extra.append(contains(part))
        case "unevaluatedItems" if "array" in part.types and value is not True:
            part.extra.append(unevaluated_items(part))
        case "$dynamicRef" | "$recursiveRef" if (
            "$ref" not in part.node and part.context.document.is_one_resource()
        ):
            _reference(part, keyword, value)
        case "$dynamicRef" | "$recursiveRef":
            part.give_up(keyword, "dynamic references are not resolved")
        case _:
            # About other types than can occur, or taken with the other object keywords.
            pass


_ALL_WRITERS: dict[str, _Writer] = {
    **dict.fromkeys(_REWRITTEN, _rewritten),
    **dict.fromkeys(_SCHEMA_MAPS, _map),
    **dict.fromkeys(_SCHEMA_LISTS, _list),
    **dict.fromkeys(("items", "prefixItems", "additionalItems"), _items),
    "additionalProperties": _additional,
    "format": _format,
    "pattern": _pattern,
    "$ref": _reference,
}
# By draft: keywords that it does not have are annotations.
_WRITERS = {
    draft: {
        keyword: write for keyword, write in _ALL_WRITERS.items() if draft >= SINCE.get(keyword, Draft.DRAFT4)
    }
    for draft in Draft
}
