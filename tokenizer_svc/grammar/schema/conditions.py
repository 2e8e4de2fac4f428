"""Conditional keywords as unions of cases."""

from __future__ import annotations

from typing import Any

from tokenizer_svc.grammar.schema.context import Context, Place
from tokenizer_svc.grammar.schema.shapes import Schema, all_of, any_of, for_type


def conditional(context: Context, node: dict[str, Any], place: Place, types: frozenset[str]) -> Schema:
    """if/then/else: (if and then) or (not if and else); a part that is not there is true."""
    then = context.positive(node["then"], place.at("then"), types) if "then" in node else True
    otherwise = context.positive(node["else"], place.at("else"), types) if "else" in node else True
    if then is True and otherwise is True:
        return True
    condition = place.at("if")
    if then is True:
        return any_of([context.positive(node["if"], condition, types), otherwise])
    negated = context.negative(node["if"], condition, types)
    if otherwise is True:
        return any_of([then, negated])
    met = context.positive(node["if"], condition, types)
    return any_of([all_of([met, then]), all_of([negated, otherwise])])


def dependencies(
    context: Context, keyword: str, value: Any, place: Place, types: frozenset[str]
) -> list[Schema]:
    """Each: the property is absent, or it is there and so is what it asks for."""
    if not isinstance(value, dict):
        return [context.give_up(keyword, place, "must be an object")]
    results = []
    for name, wanted in value.items():
        if isinstance(wanted, list):
            present: Schema = {"required": list(dict.fromkeys([name, *wanted]))}
        else:
            asked = context.positive(wanted, place.at(keyword, name), types)
            present = all_of([{"required": [name]}, asked])
        results.append(for_type("object", types, any_of([{"properties": {name: False}}, present])))
    return results
