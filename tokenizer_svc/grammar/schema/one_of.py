"""oneOf: a union where the branches exclude each other, and where they do not, each without the others."""

from __future__ import annotations

from tokenizer_svc.grammar.schema.beside import beside
from tokenizer_svc.grammar.schema.context import SchemaPart
from tokenizer_svc.grammar.schema.disjoint import Located, View, disjoint
from tokenizer_svc.grammar.schema.shapes import Schema, all_of, any_of, key_of

# Keywords that are no plain constraints of the values around a union.
_UNIONS = frozenset({"oneOf", "anyOf", "not", "if", "then", "else"})


def one_of(part: SchemaPart) -> None:
    """Writes the equivalent anyOf into `out`, in oneOf's place among the keywords."""
    value = part.node["oneOf"]
    if not isinstance(value, list) or not value:
        part.give_up("oneOf", "must be a list of schemas")
        return
    places = [part.place.at("oneOf", index) for index in range(len(value))]
    branches = [part.beside(each, "oneOf", index) for index, each in enumerate(value)]
    live = [index for index, branch in enumerate(branches) if branch is not False]
    # The keywords beside oneOf hold for each of its branches.
    around = ({key: each for key, each in part.node.items() if key not in _UNIONS}, part.place)
    options = []
    for index in live:
        given = View()
        given.add(part.context, value[index], places[index])
        given.add(part.context, *around)
        others = [
            beside(part.context, value[other], places[other], part.types, given)
            for other in live
            if other != index and not _apart(part, index, other, around)
        ]
        options.append(all_of([branches[index], _all_of_unions(others)]))
    union = any_of(options)
    if isinstance(union, dict) and set(union) == {"anyOf"} and "anyOf" not in part.node:
        part.out["anyOf"] = union["anyOf"]
    else:
        part.extra.append(union)


def _all_of_unions(unions: list[Schema]) -> Schema:
    """Their intersection, with the options that all of them share taken out: each would multiply."""
    if len(unions) < 2 or not all(isinstance(each, dict) and set(each) == {"anyOf"} for each in unions):
        return all_of(unions)
    keyed = [{key_of(option): option for option in union["anyOf"]} for union in unions]
    shared = set(keyed[0]).intersection(*keyed[1:])
    if not shared:
        return all_of(unions)
    rest = all_of(any_of(option for key, option in each.items() if key not in shared) for each in keyed)
    return any_of([*(keyed[0][key] for key in keyed[0] if key in shared), rest])


def _apart(part: SchemaPart, one: int, other: int, around: Located) -> bool:
    branches = part.node["oneOf"]
    first, second = min(one, other), max(one, other)
    places = [part.place.at("oneOf", index) for index in (first, second)]
    key = (places[0].path, second)
    known = part.context.apart.get(key)
    if known is None:
        left, right = (branches[first], places[0]), (branches[second], places[1])
        known = part.context.apart[key] = disjoint(part.context, left, right, part.types, around=around)
    return known
