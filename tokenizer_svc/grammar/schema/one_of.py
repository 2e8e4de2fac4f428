"""oneOf: a union where the branches exclude each other, and where they do not, each without the others."""

from __future__ import annotations

from typing import Any

from tokenizer_svc.grammar.schema.context import Context, Place
from tokenizer_svc.grammar.schema.disjoint import View, disjoint
from tokenizer_svc.grammar.schema.negative import negative
from tokenizer_svc.grammar.schema.shapes import Schema, all_of, any_of


def one_of(
    context: Context,
    value: Any,
    place: Place,
    types: frozenset[str],
    out: dict[str, Schema],
    extra: list[Schema],
) -> None:
    """Writes the equivalent anyOf into `out`, in oneOf's place among the keywords."""
    if not isinstance(value, list) or not value:
        context.give_up("oneOf", place, "must be a list of schemas")
        return
    places = [place.at("oneOf", index) for index in range(len(value))]
    branches = [
        context.positive(each, inside, types) for each, inside in zip(value, places, strict=True)
    ]
    live = [index for index, branch in enumerate(branches) if branch is not False]
    options = []
    for index in live:
        given = View()
        given.add(context, value[index], places[index])
        others = [
            negative(context, value[other], places[other], types, given)
            for other in live
            if other != index and not _apart(context, value, places, types, index, other)
        ]
        options.append(all_of([branches[index], *others]))
    union = any_of(options)
    if isinstance(union, dict) and set(union) == {"anyOf"} and "anyOf" not in out:
        out["anyOf"] = union["anyOf"]
    else:
        extra.append(union)


def _apart(
    context: Context, value: list[Any], places: list[Place], types: frozenset[str], one: int, other: int
) -> bool:
    first, second = min(one, other), max(one, other)
    key = (places[first].path, second)
    known = context.apart.get(key)
    if known is None:
        known = disjoint(context, (value[first], places[first]), (value[second], places[second]), types)
        context.apart[key] = known
    return known
