"""Patterns for what the back end has no keyword for: strings outside a set, look-aheads, formats."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from tokenizer_svc.grammar.schema.automata import outside
from tokenizer_svc.grammar.schema.regex_tree import (
    Anchor,
    Branch,
    Class,
    Group,
    Item,
    Items,
    Repeat,
    escaped,
    parse,
)

# Formats that llguidance enforces itself.
BACKEND_FORMATS = frozenset(
    {"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"}
)

_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY = rf"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2])-[0-9]{{2}}|[0-9]{{4}}-02-(?:[01][0-9]|2[0-8])|{_LEAP}-02-29)"
# At most 63 characters, and no hyphens in the third and fourth place: those are spelled names (xn--…), of
# which few spellings are right.
_LABEL = (
    r"[A-Za-z0-9](?:[A-Za-z0-9]|[A-Za-z0-9\-][A-Za-z0-9](?:[A-Za-z0-9\-]{0,59}[A-Za-z0-9])?"
    r"|[A-Za-z0-9\-]-[A-Za-z0-9](?:[A-Za-z0-9\-]{0,58}[A-Za-z0-9])?)?"
)
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
# What must hold besides, because it is more lenient: days of February, leap seconds at any time of any day,
# names of any length.
FORMAT_LIMITS: dict[str, dict[str, Any]] = {
    "date": {"pattern": f"^{_DAY}$"},
    "time": {"pattern": "^[0-9]{2}:[0-9]{2}:[0-5]"},
    "date-time": {"pattern": f"^{_DAY}.[0-9]{{2}}:[0-9]{{2}}:[0-5]"},
    "hostname": {"pattern": f"^{_HOST}$", "maxLength": 253},
    "email": {"pattern": rf"^[^@]{{1,64}}@(?:{_HOST}|\[.*)$", "maxLength": 254},
}
# Formats of the specification without a grammar; every other name is an annotation.
OTHER_FORMATS = frozenset({"idn-email", "idn-hostname", "iri", "iri-reference", "regex"})

_HEX = r"%[0-9A-Fa-f]{2}"
_NAME = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=]|{_HEX})"
_PCHAR = rf"(?:[A-Za-z0-9\-._~!$&'()*+,;=:@]|{_HEX})"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
# Addresses in brackets (IPv6) are left out.
_AUTHORITY = rf"//(?:(?:{_NAME}|:)*@)?{_NAME}*(?::[0-9]*)?(?:/{_PCHAR}*)*"
_ABSOLUTE = rf"/(?:{_PCHAR}+(?:/{_PCHAR}*)*)?"
_AFTER_SCHEME = rf"(?:{_AUTHORITY}|{_ABSOLUTE}|(?:{_PCHAR}+(?:/{_PCHAR}*)*)?)"
# The first segment without a scheme has no colon.
_RELATIVE = rf"(?:{_AUTHORITY}|{_ABSOLUTE}|(?:(?:{_NAME}|@)+(?:/{_PCHAR}*)*)?)"
_POINTER = r"(?:/(?:[^/~]|~[01])*)*"
_VARIABLE = rf"(?:[A-Za-z0-9_]|{_HEX})(?:\.?(?:[A-Za-z0-9_]|{_HEX}))*(?::[1-9][0-9]{{0,3}}|\*)?"

# Formats of the specification that llguidance does not know, as patterns (RFC 3986, 6901, 6570).
STANDARD_FORMATS = {
    "uri-reference": rf"^(?:[A-Za-z][A-Za-z0-9+\-.]*:{_AFTER_SCHEME}|{_RELATIVE}){_TAIL}$",
    "json-pointer": rf"^{_POINTER}$",
    "relative-json-pointer": rf"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    "uri-template": rf"^(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~\u00A0-\uD7FF\uF900-\uFDCF\uFDF0-\uFFEF"
    rf"𐀀-🿽]|{_HEX}"
    rf"|\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\}})*$",
}

_ANY = "(?s:.)"


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
        escaped(character) + _outside(node[character])  # type: ignore[arg-type]
        for character in following
    ]
    return "(?:" + "|".join(options) + ")"


def _escape_in_class(character: str) -> str:
    return "\\" + character if character in "\\]^-[&~" else escaped(character)


_BEGIN, _END = "\ue000", "\ue001"
_MAX_LISTED = 64


def listed(pattern: str) -> list[str] | None:
    """The strings that a pattern matches when they are few, such as ^(on|off)$; None otherwise."""
    try:
        found = _texts(parse(pattern).items)
    except (re.error, RecursionError, OverflowError):
        return None
    texts = []
    for text in found or ():
        if not (text.startswith(_BEGIN) and text.endswith(_END) and len(text) > 1):
            return None
        inner = text[1:-1]
        if _BEGIN in inner or _END in inner:
            return None
        texts.append(inner)
    return sorted(set(texts)) if found is not None else None


def _texts(items: Items) -> list[str] | None:
    texts = [""]
    for item in items:
        choices = _choices(item)
        if choices is None or len(texts) * len(choices) > _MAX_LISTED:
            return None
        texts = [text + choice for text in texts for choice in choices]
    return texts


def _choices(item: Item) -> list[str] | None:
    choices: list[str] | None = None
    match item:
        case Anchor(at):
            choices = [_BEGIN if at == "begin" else _END]
        case Group(items):
            choices = _texts(items)
        case Branch(branches):
            parts = [_texts(branch) for branch in branches]
            if all(part is not None for part in parts):
                choices = [text for part in parts for text in part or ()]
        case Class(members, negated=False):
            codes = [
                member[0] for member in members if not isinstance(member, str) and member[0] == member[1]
            ]
            choices = [chr(code) for code in codes] if len(codes) == len(members) else None
        case Repeat(items, least=0, most=1, greedy=True):
            once = _texts(items)
            choices = ["", *once] if once is not None else None
    return choices


_LOOKAHEAD = re.compile(r"\(\?([=!])")


def split_lookaheads(pattern: str) -> list[str] | None:
    """Patterns that all have to match, for one whose look-aheads stand right after ^.

    None when the pattern has look-arounds elsewhere, or a negative one without a small complement.
    """
    if not re.search(r"\(\?(?:=|!|<=|<!)", pattern):
        return [pattern]
    if not pattern.startswith("^"):
        return None
    parts: list[str] = []
    rest = pattern[1:]
    while (match := _LOOKAHEAD.match(rest)) is not None:
        end = _closing(rest)
        if end < 0:
            return None
        ahead = f"^(?:{rest[3:end]})"
        part = outside(ahead) if match.group(1) == "!" else ahead
        if part is None:
            return None
        parts.append(part)
        rest = rest[end + 1 :]
    parts.append("^" + rest)
    if any(re.search(r"\(\?(?:=|!|<=|<!)", part) for part in parts):
        return None
    return parts


# An escape, a class, and parentheses that stand outside of both.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\\\]])*\]|[()]", re.DOTALL)


def _closing(text: str) -> int:
    """Index of the parenthesis that closes the first one; -1 when there is none."""
    depth = 0
    for piece in _PIECE.finditer(text):
        depth += {"(": 1, ")": -1}.get(piece[0], 0)
        if depth == 0 and piece[0] == ")":
            return piece.start()
    return -1
