"""Numbers that the back end rounds when it writes them: a constant of more digits would be another one."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from tokenizer_svc.grammar.schema.shapes import Schema, all_of, any_of, type_of_value

ROUNDED = "a number of more than 15 digits would be rounded"
_MAX_DIGITS = 15
# Whole numbers up to here are floating-point numbers; so are few digits times small powers of ten.
_MAX_WHOLE = 2**53
_MAX_EXPONENT = 22


def is_rounded(value: Any) -> bool:
    """Whether a JSON value holds a number that the back end cannot write as it is."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return abs(value) > _MAX_WHOLE and not _is_short(Decimal(value))
    if isinstance(value, float):
        return not _is_short(Decimal(repr(value)))
    if isinstance(value, list):
        return any(map(is_rounded, value))
    return isinstance(value, dict) and any(map(is_rounded, value.values()))


def _is_short(number: Decimal) -> bool:
    if not number.is_finite():
        # Refused elsewhere, by its name.
        return True
    _, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    length = len(text.rstrip("0"))
    return length <= _MAX_DIGITS and abs(int(exponent) + len(text) - length) <= _MAX_EXPONENT


def without_rounded(schema: Schema) -> tuple[Schema, bool]:
    """The finished schema with types in place of listed values that would be others; whether it had any."""
    if isinstance(schema, list):
        parts = [without_rounded(each) for each in schema]
        return [part for part, _ in parts], any(found for _, found in parts)
    if not isinstance(schema, dict):
        return schema, False
    written: dict[str, Any] = {}
    instead: list[Schema] = []
    any_found = False
    for key, value in schema.items():
        values = [value] if key == "const" else value if key == "enum" else ()
        if any(map(is_rounded, values)):
            kept = [each for each in values if not is_rounded(each)]
            types = {type_of_value(each) for each in values if is_rounded(each)}
            names = sorted("number" if each in ("integer", "fraction") else each for each in types)
            instead.append(any_of([{"enum": kept} if kept else False, {"type": sorted(set(names))}]))
            any_found = True
        elif key in ("properties", "patternProperties", "$defs"):
            written[key] = {}
            for name, each in value.items():
                written[key][name], found = without_rounded(each)
                any_found |= found
        elif isinstance(value, dict | list) and key not in ("enum", "const", "required", "x-guidance"):
            written[key], found = without_rounded(value)
            any_found |= found
        else:
            written[key] = value
    if not instead:
        return written, any_found
    aside = {key: written.pop(key) for key in ("$defs", "x-guidance") if key in written}
    whole = all_of([written, *instead])
    return {**(whole if isinstance(whole, dict) else {}), **aside}, True
