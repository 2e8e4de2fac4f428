"""Array keywords that the back end lacks, where the number of cases is small."""

from __future__ import annotations

from itertools import permutations
from math import perm
from typing import Any

from tokenizer_svc.grammar.schema.context import Context, SchemaLocation, SchemaPart
from tokenizer_svc.grammar.schema.shapes import Schema, any_of, for_type, key_of, list_of, type_of_value
from tokenizer_svc.grammar.schema.strings import listed

# Arrangements written out for uniqueItems, and positions tried for contains.
_MAX_ARRANGEMENTS = 400
_MAX_POSITIONS = 8
_MAX_DEPTH = 8
# Keywords that may evaluate some of the items, depending on the value.
_EVALUATING = frozenset(
    {"allOf", "anyOf", "oneOf", "not", "if", "contains", "$ref", "$dynamicRef", "$recursiveRef"}
)


def unique_items(part: SchemaPart) -> Schema:
    """Every arrangement of a small set of values, or nothing to do for arrays of at most one item."""
    node, longest = part.node, part.node.get("maxItems")
    if isinstance(longest, int) and longest <= 1:
        return True
    values = finite_values(part.context, node.get("items", True), part.place.at("items"))
    if values is None or "prefixItems" in node or isinstance(node.get("items"), list):
        return part.give_up("uniqueItems", "has no exact equivalent unless the items are a small set")
    most = min(len(values), longest if isinstance(longest, int) else len(values))
    least = node.get("minItems", 0)
    sizes = range(least if isinstance(least, int) else 0, most + 1)
    if sum(perm(len(values), size) for size in sizes) > _MAX_ARRANGEMENTS:
        note = f"more than {_MAX_ARRANGEMENTS} arrangements of {len(values)} values"
        return part.give_up("uniqueItems", note)
    arrangements = [list(chosen) for size in sizes for chosen in permutations(values, size)]
    return for_type("array", part.types, {"enum": arrangements} if arrangements else False)


def finite_values(context: Context, node: Any, place: SchemaLocation, depth: int = 0) -> list[Any] | None:
    """All values of a schema that lists them (possibly a few too many); None when it does not."""
    if node is False:
        return []
    if not isinstance(node, dict) or depth > _MAX_DEPTH:
        return None
    listed_here = _listed_here(context, node, place)
    if listed_here is not None:
        return listed_here
    for part, inside in context.conjuncts(node, context.enter(node, place)):
        values = finite_values(context, part, inside, depth + 1)
        if values is not None:
            return values
    return None


def _listed_here(context: Context, node: dict[str, Any], place: SchemaLocation) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    if isinstance(node.get("enum"), list):
        unique = {key_of(value): value for value in node["enum"]}
        types = context.types_of(node, place)
        return [value for value in unique.values() if type_of_value(value) in types]
    match node.get("type"):
        case "boolean":
            return [True, False]
        case "null":
            return [None]
        case "string" if isinstance(node.get("pattern"), str):
            return listed(node["pattern"])
    return None


def contains(part: SchemaPart) -> Schema:
    """At least one matching item: by position where few items are possible. Elsewhere the keyword stays, for
    whoever asks whether there is a finite array; the back end does not know it.
    """
    node, least = part.node, part.node.get("minContains", 1)
    if least == 0 and "maxContains" not in node:
        return True
    wanted = part.inside(node["contains"], "contains")
    first = _first_items(node)
    rest: dict[str, Schema] = {"minItems": least} if isinstance(least, int) and least > 0 else {}
    if rest and wanted is not True:
        rest["contains"] = _at_one_of(wanted, len(first) + 1)
    if "minContains" in node or "maxContains" in node:
        keyword = "minContains" if "minContains" in node else "maxContains"
        part.give_up(keyword, "counting matches has no exact equivalent")
        return rest or True
    if wanted is False:
        return for_type("array", part.types, False)
    items = node.get("items", True)
    if wanted is True or (isinstance(items, dict) and key_of(items) == key_of(node["contains"])):
        return {"minItems": 1}
    longest = node.get("maxItems")
    if isinstance(longest, int) and longest <= _MAX_POSITIONS:
        return for_type("array", part.types, _at_one_of(wanted, longest))
    part.give_up("contains", "has no exact equivalent without a small maxItems")
    return rest


def _first_items(node: dict[str, Any]) -> list[Any]:
    """The schemas of the first items, in the words of any draft."""
    return list_of(node.get("prefixItems")) or list_of(node.get("items"))


def _at_one_of(wanted: Schema, num_positions: int) -> Schema:
    """Arrays with such an item at one of the first positions."""
    return any_of(
        {"minItems": index + 1, "prefixItems": [*[True] * index, wanted]} for index in range(num_positions)
    )


def unevaluated_items(part: SchemaPart) -> Schema:
    """Where nothing else evaluates items, they are what follows prefixItems."""
    node = part.node
    if not _EVALUATING.isdisjoint(node):
        return part.give_up("unevaluatedItems", "which items are evaluated depends on the value")
    rest_is_known = "additionalItems" in node if isinstance(node.get("items"), list) else "items" in node
    if rest_is_known:
        return True
    first = _first_items(node)
    rest = part.inside(node["unevaluatedItems"], "unevaluatedItems")
    return {"prefixItems": [True] * len(first), "items": rest} if first else {"items": rest}
