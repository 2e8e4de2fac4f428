"""Regular expressions for what the back end has no keyword for: strings outside a set, look-aheads, formats."""

from __future__ import annotations

import re
from collections.abc import Iterable

# Formats that llguidance enforces itself.
BACKEND_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)

_UNRESERVED = r"[A-Za-z0-9\-._~!$&'()*+,;=:@]"
_PCHAR = rf"(?:{_UNRESERVED}|%[0-9A-Fa-f]{{2}})"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_AUTHORITY = r"//(?:[A-Za-z0-9\-._~!$&'()*+,;=:@\[\]]|%[0-9A-Fa-f]{2})*"
_RELATIVE = rf"(?:{_AUTHORITY}(?:/{_PCHAR}*)*|/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?|(?:{_PCHAR}+(?:/{_PCHAR}*)*)?)"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"

# Formats of the specification that llguidance does not know, as patterns (RFC 3986, 6901, 6570).
STANDARD_FORMATS = {
    "uri-reference": rf"^(?:[A-Za-z][A-Za-z0-9+\-.]*:)?{_RELATIVE}{_TAIL}$",
    "json-pointer": rf"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-template": r"^(?:[^\x00-\x20\"'<>\\^`{|}%]|%[0-9A-Fa-f]{2}|\{[+#./;?&=,!@|]?"
    r"[A-Za-z0-9_.%]+(?::[1-9][0-9]{0,3}|\*)?(?:,[A-Za-z0-9_.%]+(?::[1-9][0-9]{0,3}|\*)?)*\})*$",
}

_ANY = "(?s:.)"


def escape(text: str) -> str:
    """`text` as a literal in a pattern."""
    return "".join(_escape(character) for character in text)


def _escape(character: str) -> str:
    if character.isascii() and (character.isalnum() or character in " _"):
        return character
    if ord(character) < 0x20 or character == "\x7f":
        return f"\\x{ord(character):02X}"
    return f"\\{character}" if character.isascii() else character


def only(texts: Iterable[str]) -> str:
    """A pattern that matches exactly these strings."""
    return "^(?:" + "|".join(escape(text) for text in sorted(texts)) + ")$"


def excluding(texts: Iterable[str]) -> str:
    """A pattern that matches every string but these."""
    root: dict[str, dict[str, object]] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})  # type: ignore[assignment]
        node[""] = {}
    return f"^{_outside(root)}$"


def _outside(node: dict[str, dict[str, object]]) -> str:
    # All continuations that do not end where a text ends: nothing, a character no text has here, or on.
    following = [character for character in node if character]
    if not following:
        return f"{_ANY}+" if "" in node else f"{_ANY}*"
    options = [] if "" in node else [""]
    options.append("[^" + "".join(map(_escape_in_class, following)) + f"]{_ANY}*")
    options += [
        escape(character) + _outside(node[character])  # type: ignore[arg-type]
        for character in following
    ]
    return "(?:" + "|".join(options) + ")"


def _escape_in_class(character: str) -> str:
    return "\\" + character if character in "\\]^-[&~" else _escape(character)


_LOOKAHEAD = re.compile(r"\(\?([=!])")


def split_lookaheads(pattern: str) -> list[str] | None:
    """Patterns that all have to match, for one that only has positive look-aheads right after ^.

    None when the pattern has look-arounds elsewhere, or negative ones.
    """
    if not re.search(r"\(\?(?:=|!|<=|<!)", pattern):
        return [pattern]
    if not pattern.startswith("^"):
        return None
    parts: list[str] = []
    rest = pattern[1:]
    while (match := _LOOKAHEAD.match(rest)) is not None:
        if match.group(1) == "!":
            return None
        end = _closing(rest)
        if end < 0:
            return None
        parts.append("^(?:" + rest[3:end] + ")")
        rest = rest[end + 1 :]
    parts.append("^" + rest)
    if any(re.search(r"\(\?(?:=|!|<=|<!)", part) for part in parts):
        return None
    return parts


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the first one; -1 when there is none."""
    depth = 0
    in_class = False
    index = 0
    while index < len(text):
        character = text[index]
        if character == "\\":
            index += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            if text[index + 1 : index + 2] == "^":
                index += 1
            if text[index + 1 : index + 2] == "]":
                index += 1
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
            if depth == 0:
                return index
        index += 1
    return -1
