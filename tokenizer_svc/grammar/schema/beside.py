"""The complement of a schema for values that are known to match another: branches of oneOf.

Two branches often share most of their constraints. Ways of not matching that the known schema rules out are
left away, which keeps the union small, and exact where the shared part has no complement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from msgspec import structs

from tokenizer_svc.grammar.schema.context import Context, SchemaLocation, SchemaPart
from tokenizer_svc.grammar.schema.disjoint import Located, View, disjoint
from tokenizer_svc.grammar.schema.negative import (
    KEYWORDS,
    Complement,
    additional,
    complement,
    items,
    reference,
    required,
    typed,
)
from tokenizer_svc.grammar.schema.shapes import ALL_TYPES, Schema, all_of, any_of, same

# References followed while negating beside something known.
_MAX_FOLLOWED = 8


def beside(context: Context, node: Any, place: SchemaLocation, types: frozenset[str], given: View) -> Schema:
    """A schema that, among values of `types` that match `given`, admits those that `node` does not."""
    types &= given.types(context)
    keywords: dict[str, Complement] = {}
    for keyword, value in node.items() if isinstance(node, dict) else ():
        if keyword in _WITH_GIVEN:
            keywords[keyword] = partial(_WITH_GIVEN[keyword], given=given)
        elif keyword in KEYWORDS and not _ruled_out(given, node, keyword, value):
            keywords[keyword] = KEYWORDS[keyword]
    return complement(context, node, place, types, keywords)


def _ruled_out(given: View, node: dict[str, Any], keyword: str, value: Any) -> bool:
    """Whether the very same constraint is known to hold. In draft 4 a flag beside it may change a bound."""
    flag = node.get("exclusive" + keyword.capitalize())
    return keyword in _SCALARS and not isinstance(flag, bool) and given.states(keyword, value)


def _required_given(part: SchemaPart, given: View) -> Schema:
    missing = [name for name in part.node["required"] if name not in given.required()]
    return required(structs.replace(part, node={"required": missing}))


def _properties_given(part: SchemaPart, given: View) -> Schema:
    options = []
    context = part.context
    for name, rule in part.node["properties"].items():
        inside = part.place.at("properties", name)
        known = given.property(name)
        if any(_implies(context, each, (rule, inside)) for each in known):
            continue
        if any(disjoint(context, each, (rule, inside)) for each in known):
            outside: Schema = True
        else:
            inner = View()
            for each in known:
                inner.add(context, *each)
            outside = beside(context, rule, inside, ALL_TYPES, inner)
        if outside is not False:
            options.append({"type": "object", "properties": {name: outside}, "required": [name]})
    return any_of(options)


def _implies(context: Context, known: Located, rule: Located) -> bool:
    """Whether every value that matches `known` matches `rule`, as far as that is easy to see."""
    node, place = rule
    if known[0] is False or node is True or node == {}:
        return True
    if known[1].base == place.base and same(known[0], node):
        return True
    if isinstance(node, dict) and isinstance(node.get("$ref"), str) and isinstance(known[0], dict):
        reference = known[0].get("$ref")
        one = context.resolve(node["$ref"], place)
        other = context.resolve(reference, known[1]) if isinstance(reference, str) else None
        has_rules = any(key in KEYWORDS or key == "type" for key in node if key != "$ref")
        return one is not None and other is not None and one.node is other.node and not has_rules
    return False


def _additional_given(part: SchemaPart, given: View) -> Schema:
    node, names = part.node, given.names()
    if names is not None and names <= set(node.get("properties", {})):
        return False
    if given.states_all(node, ("additionalProperties", "properties", "patternProperties")):
        return False
    if names is not None and node["additionalProperties"] is False and not node.get("patternProperties"):
        # Only the names that `given` admits can be there.
        more = sorted(names - set(node.get("properties", {})))
        return any_of(typed("object", part.types, {"required": [name]}) for name in more)
    return additional(part)


def _items_given(part: SchemaPart, given: View) -> Schema:
    known = given.states_all(part.node, ("items", "prefixItems", "additionalItems"))
    return False if known else items(part)


def _reference_given(part: SchemaPart, given: View) -> Schema:
    context = part.context
    target = context.resolve(part.node["$ref"], part.place)
    if target is None:
        return reference(part)
    if any(rule is target.node for rule in given.rules):
        return False
    # Written out, because the complement holds only beside `given`.
    if context.depth_of_given >= _MAX_FOLLOWED:
        return reference(part)
    context.depth_of_given += 1
    try:
        return beside(context, target.node, SchemaLocation(target.path, target.base), part.types, given)
    finally:
        context.depth_of_given -= 1


def _all_given(part: SchemaPart, given: View) -> Schema:
    return any_of(_each_given(part, "allOf", given))


def _any_given(part: SchemaPart, given: View) -> Schema:
    known = given.states("anyOf", part.node["anyOf"])
    return False if known else all_of(_each_given(part, "anyOf", given))


def _each_given(part: SchemaPart, keyword: str, given: View) -> Iterator[Schema]:
    for index, each in enumerate(part.node[keyword]):
        yield beside(part.context, each, part.place.at(keyword, index), part.types, given)


_WITH_GIVEN: dict[str, Callable[..., Schema]] = {
    "required": _required_given,
    "properties": _properties_given,
    "additionalProperties": _additional_given,
    "items": _items_given,
    "allOf": _all_given,
    "anyOf": _any_given,
    "$ref": _reference_given,
}
# Keywords whose complement is ruled out where the very same one is known to hold. What the others say also
# depends on what stands beside them.
_SCALARS = (
    KEYWORDS.keys()
    - _WITH_GIVEN.keys()
    - {"prefixItems", "contains", "unevaluatedItems", "unevaluatedProperties", "if"}
)
