"""Numbers that the back end takes for others: constants of many digits, and bounds.

It reads numbers as floating-point ones, so a constant of more digits would be another one and a bound beyond
2^53 is moved; whole numbers have 64 bits. And an exclusive whole bound is admitted where the other bound is
less than 1 away (llguidance 1.9: 0 for `exclusiveMinimum: 0, maximum: 0.3`).
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

ROUNDED = "a number of more than 15 digits would be rounded"
_MAX_DIGITS = 15
# Whole numbers up to here are floating-point numbers; so are few digits times small powers of ten.
_MAX_WHOLE = 2**53
_MAX_EXPONENT = 22
# The largest floating-point number below 2^63, and the largest whole number that the back end reads.
_LARGEST, _LARGEST_WHOLE = 2**63 - 1024, 2**63 - 1
# Stands for "more than 0": smaller numbers have too many places for the back end's expressions.
_SMALLEST = 1e-30
BOUNDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
# What `true` turns into an exclusive bound in draft 4.
EXCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_BOUNDED = frozenset(BOUNDS)
NOT_FINITE = "the schema has a number beyond 1.8e308, or NaN; numbers must be finite"
MOVED = "the bound is moved to the next number that the back end has"
BEYOND = "no number of 64 bits is there"


def is_rounded(value: Any) -> bool:
    """Whether a JSON value holds a number that the back end cannot write as it is."""
    if isinstance(value, str | bool):
        return False
    if isinstance(value, int):
        return abs(value) > _MAX_WHOLE and not _is_short(Decimal(value))
    if isinstance(value, float):
        return not _is_short(Decimal(repr(value)))
    if isinstance(value, list):
        return any(map(is_rounded, value))
    return isinstance(value, dict) and any(map(is_rounded, value.values()))


def is_wide(value: Any) -> bool:
    """Whether a bound or divisor is one that the back end would take for another."""
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and _MAX_WHOLE <= abs(value) < math.inf
    )


def _is_short(number: Decimal) -> bool:
    if not number.is_finite():
        # Refused elsewhere, by its name.
        return True
    _, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    length = len(text.rstrip("0"))
    return length <= _MAX_DIGITS and abs(int(exponent) + len(text) - length) <= _MAX_EXPONENT


def is_beyond(keyword: str, value: Any) -> bool:
    """Whether a bound leaves none of the numbers that the back end can write."""
    if keyword not in BOUNDS or isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if not abs(value) < math.inf:
        return False
    return bool(-BOUNDS[keyword] * value < -_LARGEST)


def is_moved(keyword: str, value: Any) -> bool:
    """Whether `with_bounds` leaves out numbers beside a bound, or admits some beyond it."""
    if not is_wide(value):
        return False
    is_exact = abs(value) <= _LARGEST and int(float(value)) == value
    return keyword.startswith("exclusive") or not is_exact


def with_bounds(node: dict[str, Any], *, has_fractions: bool) -> dict[str, Any]:
    """A node of the finished schema with bounds that the back end keeps: none admits more than was asked for.

    A bound that is no floating-point number is moved inwards to the next one, which leaves out at most 1,023
    whole numbers next to it; those beyond 64 bits are left out. `has_fractions` tells whether a bound of the
    whole schema is no whole number.
    """
    if _BOUNDED.isdisjoint(node):
        return node
    written = dict(node)
    types = written.get("type", "number")
    may_be_fraction = types == "number" or (isinstance(types, list) and "number" in types)
    for key, inwards in BOUNDS.items():
        value = written.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf:
            del written[key]
            other = "minimum" if inwards > 0 else "maximum"
            flagged = written.get("exclusive" + other.capitalize()) is True
            if is_beyond(key, value):
                continue
            name, bound = key, value
            if abs(value) >= _MAX_WHOLE:
                name, bound = other, _moved(value, inwards, may_be_fraction, flagged or key != other)
            elif has_fractions and may_be_fraction and value == int(value) and (flagged or key != other):
                name, bound = (
                    other,
                    math.nextafter(value, inwards * math.inf) if value else inwards * _SMALLEST,
                )
            known = written.get(name)
            if known is not None:
                bound = max(known, bound) if inwards > 0 else min(known, bound)
            written[name] = bound
    return written


def _moved(value: float, inwards: int, may_be_fraction: bool, exclusive: bool) -> int:
    """The outermost number that the back end reads as it is, on the inner side of a large bound."""
    whole = int(value)
    if -inwards * whole >= _LARGEST_WHOLE + (1 if exclusive else 0):
        # Beyond what can be written: the largest there is. Of the most negative ones some have no expression.
        return _LARGEST_WHOLE if inwards < 0 and not may_be_fraction else -inwards * _LARGEST
    bound = float(whole)
    while inwards * (int(bound) - whole) < (1 if exclusive else 0):
        bound = math.nextafter(bound, inwards * math.inf)
    return int(max(-_LARGEST, min(_LARGEST, bound)))
