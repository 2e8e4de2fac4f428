"""Divisors that the back end would not come to an end with, or takes for others.

It tells multiples by an automaton whose states are remainders, and divisors that hold together by that of
their least common multiple: 1,000,003 takes seconds, 7,919 and 7,907 together never end. A common multiple
beyond 32 bits it cuts off.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, NamedTuple

from tokenizer_svc.grammar.schema.finished import schemas_in
from tokenizer_svc.grammar.schema.shapes import NUMBERS, Schema, list_of, types_of_keyword

_REFERENCE = "#/$defs/"
# 100,003 take a quarter of a second, 390,625 a whole one; powers of two are cheaper.
_MAX_REMAINDERS = 1 << 17
_MAX_DIGITS = 2**32 - 1


class _Divisor(NamedTuple):
    """`digits` divided by ten to the power of `places`."""

    digits: int
    places: int

    @property
    def num_remainders(self) -> int:
        """Zeros at the end are told as such."""
        rest = self.digits
        while rest % 10 == 0:
            rest //= 10
        return rest

    def common(self, other: _Divisor) -> _Divisor:
        """The least common multiple, with as many places as the library has."""
        places = max(self.places, other.places)
        scaled = (each.digits * 10 ** (places - each.places) for each in (self, other))
        return _Divisor(math.lcm(*scaled), places)


# This one divides everything.
_NONE = _Divisor(1, 0)


def unwritable_divisors(schema: Schema) -> str:
    """Why the divisors of a finished schema cannot be told, or ""; of the first part that has an error."""
    divisors, pending = _Divisors(schema), [schema] if isinstance(schema, dict) else []
    while pending:
        node = pending.pop()
        divisor = divisors.together(node)
        if divisor.num_remainders > _MAX_REMAINDERS:
            return (
                f"multiples have too many remainders to tell: {divisor.num_remainders} for the divisors "
                f"that hold together; the limit is {_MAX_REMAINDERS}"
            )
        if divisor.digits > _MAX_DIGITS:
            return f"the least common multiple of the divisors that hold together is beyond {_MAX_DIGITS}"
        pending += schemas_in(node)
    return ""


class _Divisors:
    def __init__(self, schema: Schema) -> None:
        self._definitions: dict[str, Schema] = schema.get("$defs", {}) if isinstance(schema, dict) else {}
        # By the node's id: the least common multiple of the divisors for its values. Open: none.
        self._known: dict[int, _Divisor] = {}

    def together(self, node: Any) -> _Divisor:
        if not isinstance(node, dict):
            return _NONE
        known = self._known.get(id(node))
        if known is not None:
            return known
        self._known[id(node)] = _NONE
        value, reference = node.get("multipleOf"), node.get("$ref")
        # Automata of alternatives run side by side, which multiplies their states as well.
        inner = (*list_of(node.get("allOf")), *list_of(node.get("anyOf")))
        parts = [self.together(each) for each in inner]
        if isinstance(reference, str) and reference.startswith(_REFERENCE):
            parts.append(self.together(self._definitions.get(reference.removeprefix(_REFERENCE))))
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            parts.append(_divisor(value))
        result = _NONE
        if "type" not in node or not NUMBERS.isdisjoint(types_of_keyword(node["type"])):
            for each in parts:
                result = result.common(each) if _NONE not in (result, each) else max(result, each)
        self._known[id(node)] = result
        return result


def _divisor(value: float) -> _Divisor:
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    number = int("".join(map(str, digits)))
    whole = int(exponent) >= 0
    return _Divisor(number * 10 ** int(exponent), 0) if whole else _Divisor(number, -int(exponent))
