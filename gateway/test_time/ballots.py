"""What an answer says, in a form in which equal answers are equal."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from hashlib import sha256
from typing import Any

import msgspec
import regex

from contract.errors import invalid
from gateway.text.delta import ToolCallDelta
from gateway.types.deliberation import ScorerSpec

# Characters of an answer's end that are looked at: an answer says last what it says.
_LOOKED_AT = 16 * 1024
# Longest vote.
_MAX_VOTE = 200
# A client's pattern may take so long on one answer: it runs between others' requests.
_PATTERN_S = 0.005
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_FENCE = re.compile(r"```(?:json)?\s*|```")


def compiled(spec: ScorerSpec, field: str) -> Any:
    """The pattern of a spec; raises INVALID_ARGUMENT below `field` for none, None where it needs none."""
    if spec.type != "regex":
        return None
    try:
        return regex.compile(spec.pattern)
    except (regex.error, RecursionError, OverflowError) as error:
        raise invalid(f"{field}.pattern", f"it is no regular expression: {error}") from error


def vote(spec: ScorerSpec, pattern: Any, text: str, calls: list[ToolCallDelta]) -> str | None:
    """What an answer votes for; None where it says nothing of the kind. Calls of tools are an answer."""
    if calls:
        return _cut(json.dumps([[call.name, _plain(call.arguments)] for call in calls], sort_keys=True))
    text = text[-_LOOKED_AT:]
    match spec.type:
        case "boxed":
            found = boxed(text)
        case "number":
            found = last_number(text)
        case "json":
            found = json_value(text)
        case "regex":
            found = _group(searched(pattern, text))
        case _:
            found = boxed(text) or json_value(text) or last_number(text) or " ".join(text.split()).lower()
    return _cut(found) if found else None


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} holds; a number in it as numbers are written."""
    _, begins, rest = text.rpartition("\\boxed{")
    if not begins:
        return None
    depth = 1
    for index, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if not depth:
            inside = rest[:index].strip()
            return number(inside) or inside
    return None


def last_number(text: str) -> str | None:
    """The last number in a text, written in one way: 1,000.50 and 1000.5 are the same."""
    found = _NUMBER.findall(text)
    return number(found[-1]) if found else None


def number(text: str) -> str | None:
    """A number in one way of writing it; None for anything else."""
    if not _NUMBER.fullmatch(text):
        return None
    value = Decimal(text.replace(",", "")).normalize()
    return f"{value:f}" if -30 < value.adjusted() < 30 else str(value)


def json_value(text: str) -> str | None:
    """JSON that an answer is, also between fences, with its keys in order; None for a text of other kinds."""
    stripped = _FENCE.sub("", text).strip()
    if not stripped.startswith(("{", "[")):
        return None
    try:
        return json.dumps(msgspec.json.decode(stripped), sort_keys=True, ensure_ascii=False)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def searched(pattern: Any, text: str) -> Any:
    """The last match of a client's pattern; None for none, and for one that takes too long."""
    try:
        last = None
        for match in pattern.finditer(text[-_LOOKED_AT:], timeout=_PATTERN_S):
            last = match
        return last
    except TimeoutError:
        return None


def _group(match: Any) -> str | None:
    if match is None:
        return None
    groups = match.groups()
    found = (groups[0] if groups else match.group()) or ""
    return number(found.strip()) or found.strip()


def _plain(arguments: str) -> Any:
    try:
        return msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError, ValueError):
        return arguments


def _cut(text: str) -> str:
    """Longer answers are told apart by their digests."""
    if len(text) <= _MAX_VOTE:
        return text
    return f"{text[:_MAX_VOTE]}... ({sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]})"
