"""Conditional keywords as unions of cases."""

from __future__ import annotations

from tokenizer_svc.grammar.schema.context import SchemaPart
from tokenizer_svc.grammar.schema.shapes import Schema, all_of, any_of, for_type


def conditional(part: SchemaPart) -> Schema:
    """if/then/else: (if and then) or (not if and else); a part that is not there is true."""
    node = part.node
    then = part.beside(node["then"], "then") if "then" in node else True
    otherwise = part.beside(node["else"], "else") if "else" in node else True
    if then is True and otherwise is True:
        return True
    if then is True:
        return any_of([part.beside(node["if"], "if"), otherwise])
    negated = part.unlike(node["if"], "if")
    if otherwise is True:
        return any_of([then, negated])
    return any_of([all_of([part.beside(node["if"], "if"), then]), all_of([negated, otherwise])])


def dependencies(part: SchemaPart, keyword: str) -> list[Schema]:
    """Each: the property is absent, or it is there and so is what it asks for."""
    value = part.node[keyword]
    if not isinstance(value, dict):
        return [part.give_up(keyword, "must be an object")]
    results = []
    for name, wanted in value.items():
        if isinstance(wanted, list):
            present: Schema = {"required": list(dict.fromkeys([name, *wanted]))}
        else:
            present = all_of([{"required": [name]}, part.beside(wanted, keyword, name)])
        results.append(for_type("object", part.types, any_of([{"properties": {name: False}}, present])))
    return results
