"""Patterns as the back end must be told them where it reads them otherwise than ECMA-262, as schemas mean it.

Its classes know set operations (`[a[b]]`, `&&`, `~~`), its `\\s` is Unicode's. And a class that holds every
control character takes all escapes of a JSON string with them, `\\"` and `\\\\` included, whether it holds
quote and backslash or not (llguidance 1.9): those classes are left without U+0000.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_SPACES = "\\t-\\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_NO_SPACES = (
    "\\x00-\\x08\\x0e-\\x1f!-\u009f\u00a1-\u167f\u1681-\u1fff\u200b-\u2027\u202a-\u202e\u2030-\u205e"
    "\u2060-\u2fff\u3001-\ufefe\uff00-\U0010ffff"
)
# One item of a class, or one end of a range.
_ITEM = re.compile(
    r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|[ux]\{[0-9A-Fa-f]+\}|c[A-Za-z]|[pP](?:\{[^}]*\}|[A-Za-z])|.)|[^\\]",
    re.DOTALL,
)
_NAMED = {"n": 10, "t": 9, "r": 13, "f": 12, "v": 11, "b": 8, "0": 0}
_SET_ESCAPES = "dDwWsSpP"
_QUOTE, _BACKSLASH = 0x22, 0x5C
# A class, one that nobody closes or of nothing or of all, U+0000, and escapes.
_PIECE = re.compile(
    r"\[(?P<body>\^?+(?!\])(?:\\.|[^\\\]])+)\]|(?P<odd>\[)|(?P<nul>\\(?:x00|u0000|[ux]\{0+\}|0)|\x00)"
    r"|\\c(?P<control>[A-Za-z])|\\.",
    re.DOTALL,
)
# Keywords with patterns.
PATTERNS = frozenset({"pattern", "patternProperties"})
_NEVER = "[^\\x00-\U0010ffff]"


def with_patterns(node: dict[str, Any]) -> dict[str, Any]:
    """A node of the finished schema with its patterns written for the back end."""
    if "pattern" not in node and "patternProperties" not in node:
        return node
    written = dict(node)
    pattern, named = node.get("pattern"), node.get("patternProperties")
    if isinstance(pattern, str):
        written["pattern"] = back_end_pattern(pattern)
    if isinstance(named, dict):
        written["patternProperties"] = {back_end_pattern(name): each for name, each in named.items()}
    return written


@lru_cache(4096)
def back_end_pattern(pattern: str) -> str:
    """One pattern. What cannot be read here is left to the back end's judgement."""
    if "[" not in pattern and "\\" not in pattern:
        return pattern
    if any(piece["odd"] for piece in _PIECE.finditer(pattern)):
        return pattern

    def written(piece: re.Match[str]) -> str:
        if piece["body"]:
            return _class(piece["body"])
        if piece["nul"] and "[" in pattern:
            # Beside a class a U+0000 of its own would make it one of every control character again.
            return _NEVER
        if piece["control"]:
            return f"\\x{ord(piece['control']) % 32:02X}"
        return {"\\s": f"[{_SPACES}]", "\\S": f"[^{_SPACES}]"}.get(piece[0], piece[0])

    return _PIECE.sub(written, pattern)


def _class(body: str) -> str:
    negated = body.startswith("^")
    items = _ITEM.findall(body[1:] if negated else body)
    ranges: list[tuple[int, int]] = []
    sets: list[str] = []
    index = 0
    while index < len(items):
        item = items[index]
        after = items[index + 2] if items[index + 1 : index + 2] == ["-"] and index + 2 < len(items) else None
        if _is_set(item) or (after is not None and _is_set(after)):
            # A hyphen between a set and anything is itself.
            alone = [item] if after is None else [item, "-", after]
            sets += filter(_is_set, alone)
            ranges += [(_code(each), _code(each)) for each in alone if not _is_set(each)]
            index += len(alone)
        else:
            ranges.append((_code(item), _code(item if after is None else after)))
            index += 1 if after is None else 3
    return _written(ranges, sets, negated=negated)


def _is_set(item: str) -> bool:
    return item[0] == "\\" and item[1:2] in _SET_ESCAPES


def _written(ranges: list[tuple[int, int]], sets: list[str], *, negated: bool) -> str:
    def holds(code: int) -> bool:
        return any(low <= code <= high for low, high in ranges) or any(
            # Nothing is known of the characters that have a property: the safe choice is taken.
            each[1] in "DWS" or (negated and each[1] in "pP")
            for each in sets
        )

    if negated and (holds(_QUOTE) or holds(_BACKSLASH)):
        ranges = [*ranges, (0, 0)]
    elif not negated and not (holds(_QUOTE) and holds(_BACKSLASH)):
        ranges = [(1 if low == 0 < high else low, high) for low, high in ranges]
    parts = [{"\\s": _SPACES, "\\S": _NO_SPACES}.get(each, each) for each in sets]
    parts += [
        _character(low) if low == high else f"{_character(low)}-{_character(high)}" for low, high in ranges
    ]
    return ("[^" if negated else "[") + "".join(parts) + "]"


def _code(item: str) -> int:
    if item[0] != "\\":
        return ord(item)
    kind, rest = item[1], item[2:].strip("{}")
    if kind in "xu" and rest:
        return int(rest, 16)
    if kind == "c" and rest:
        return ord(rest) % 32
    return _NAMED.get(kind, ord(kind))


def _character(code: int) -> str:
    if code < 0x20 or code == 0x7F or 0xD800 <= code < 0xE000:
        return f"\\x{code:02X}" if code < 0x80 else f"\\u{code:04X}"
    return f"\\{chr(code)}" if chr(code) in "\\]^-[&~" else chr(code)
