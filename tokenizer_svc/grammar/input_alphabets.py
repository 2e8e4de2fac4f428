"""The alphabets in which the text of a call's argument stands: as it is, or escaped inside of JSON.

Escaping maps every character to a word of its own, and no word begins another. So it keeps unions, rows,
repetitions, intersections, and which text is the longest: a grammar whose literals and classes are written
in the other alphabet describes exactly the escaped texts of the grammar before. Only the complement is that
of all escaped texts. Used by `tokenizer_svc.grammar.led_input`.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from functools import cache, lru_cache
from typing import TypeAlias

from llguidance import LLMatcher, LLTokenizer

from tokenizer_svc.grammar.lark_source import NotWritable, Pattern, Text

# Characters that JSON escapes, and the one way in which they are written here.
_ESCAPED = {
    character: json.dumps(character)[1:-1] for character in ('"', "\\", *map(chr, range(0x20)))
}  # fmt: skip
# All others, as a class or inside of one.
_PLAIN = r'[^"\\\x00-\x1f]'
_NAMED = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_META = frozenset("\\.+*?()|[]{}^$#&-~/")
_NUMBER = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]+)\})")
_SET = re.compile(r"\\(?:[dDsSwW]|[pP](?:\{[^}]*\}|[A-Za-z]))")
_GROUP = re.compile(r"\((?:\?(?:P?<(?P<name>[^>]*)>|(?P<flags>[a-zA-Z-]*)(?P<end>[:)])))?")
_REPEATED = re.compile(r"(?:[*+?]|\{[0-9]*,?[0-9]*\})\??")
# Flags that change which characters match, and those that change nothing here.
_CHANGING, _IDLE = frozenset("is"), frozenset("muU")

_Flags: TypeAlias = frozenset[str]


class Alphabet(ABC):
    """How texts, patterns and complements are written as Lark."""

    @abstractmethod
    def text(self, text: Text) -> str:
        """The symbol of a literal text."""

    @abstractmethod
    def pattern(self, pattern: Pattern) -> str:
        """The symbol of a regular expression; raises NotWritable."""

    @abstractmethod
    def complement(self, symbol: str) -> str:
        """The symbol of every other text, for a definition of a terminal."""


class AsItIs(Alphabet):
    """Texts stand between marks without escapes."""

    def text(self, text: Text) -> str:
        return _lark_text(text.text) + ("i" if text.ignores_case else "")

    def pattern(self, pattern: Pattern) -> str:
        return f"/{pattern.body}/{pattern.flags}"

    def complement(self, symbol: str) -> str:
        return f"~{symbol}"


class InJson(Alphabet):
    """Texts stand in JSON, whose escapes are the shortest."""

    def text(self, text: Text) -> str:
        if not text.ignores_case:
            return _lark_text("".join(_ESCAPED.get(each, each) for each in text.text))
        return self.pattern(Pattern("".join(map(_literal, text.text)), "i"))

    def pattern(self, pattern: Pattern) -> str:
        return f"/{_Escaping(pattern).written()}/"

    def complement(self, symbol: str) -> str:
        return f"(/(?:{_escapes_or(_PLAIN, frozenset(_ESCAPED))})*/ & ~{symbol})"


class _Escaping:
    """Reads one regular expression in the syntax of Rust and writes that of its escaped texts."""

    def __init__(self, pattern: Pattern) -> None:
        self._body = pattern.body
        self._place = 0
        # Flags of the groups that are open.
        self._flags: list[_Flags] = [self._changed(frozenset(), pattern.flags)]

    def written(self) -> str:
        """The expression; raises NotWritable."""
        parts = []
        while self._place < len(self._body):
            parts.append(self._part())
        return "".join(parts)

    def _part(self) -> str:
        body, character = self._body, self._body[self._place]
        match character:
            case "(":
                written = self._group()
            case ")" if len(self._flags) > 1:
                self._flags.pop()
                written = self._read(1)
            case "|":
                written = self._read(1)
            case "^" | "$":
                raise NotWritable(f"the anchor {character} in a pattern is not led inside of a call")
            case "[":
                written = self._class(self._read(_class_length(body, self._place)))
            case ".":
                written = self._class(self._read(1))
            case "\\":
                written = self._escape()
            case _:
                found = _REPEATED.match(body, self._place)
                written = self._character(self._read(1)) if found is None else self._read(len(found[0]))
        return written

    def _read(self, length: int) -> str:
        text = self._body[self._place : self._place + length]
        self._place += length
        return text

    def _group(self) -> str:
        found = _GROUP.match(self._body, self._place)
        if found is None:
            raise NotWritable(f"{self._body[self._place :][:8]!r} in a pattern is not led inside of a call")
        self._read(len(found[0]))
        flags = self._changed(self._flags[-1], found["flags"] or "")
        if found["end"] == ")":
            self._flags[-1] = flags
            return ""
        self._flags.append(flags)
        return "(?:"

    @staticmethod
    def _changed(flags: _Flags, change: str) -> _Flags:
        on, _, off = change.partition("-")
        for flag in (*on, *off):
            if flag not in _CHANGING | _IDLE or (flag == "u" and flag in off):
                raise NotWritable(f"the flag {flag} of a pattern is not led inside of a call")
        return (flags | _CHANGING.intersection(on)) - set(off)

    def _escape(self) -> str:
        number, named = _NUMBER.match(self._body, self._place), _SET.match(self._body, self._place)
        if number is not None:
            self._read(len(number[0]))
            return self._character(chr(int(next(filter(None, number.groups())), 16)))
        if named is not None:
            return self._class(self._read(len(named[0])))
        escape = self._read(2)[1:]
        if escape in _NAMED:
            return self._character(_NAMED[escape])
        if escape.isalnum() or escape in "<>":
            raise NotWritable(f"\\{escape} in a pattern is not led inside of a call")
        return self._character(escape)

    def _character(self, character: str) -> str:
        if character in _ESCAPED:
            return f"(?:{_quoted(_ESCAPED[character])})"
        return self._cased(_literal(character))

    def _cased(self, unit: str) -> str:
        return f"(?i:{unit})" if "i" in self._flags[-1] else unit

    def _class(self, unit: str) -> str:
        """What matches one character of several: `unit` as it is written."""
        found = _members(unit, "".join(sorted(self._flags[-1])))
        escaped = found.intersection(_ESCAPED)
        if found <= escaped:
            return f"(?:{_escapes_or('', escaped)})"
        plain = self._cased(_PLAIN if unit == "." else f'[{unit}&&[^"\\\\\\x00-\\x1f]]')
        return f"(?:{_escapes_or(plain, escaped)})"


@cache
def _bytes_alone() -> LLTokenizer:
    return LLTokenizer("byte")


@lru_cache(1024)
def _members(unit: str, flags: str) -> frozenset[str]:
    """The characters of ASCII that the class has, as the library reads it; "\x80" stands for any others."""
    inner = f"(?{flags}:{unit})" if flags else unit
    mask = first_bytes(f"start: UNIT\nUNIT: /{inner}/\n")
    if not mask:
        raise NotWritable(f"the class {unit[:40]!r} in a pattern matches nothing")
    others = frozenset("\x80") if mask >> 0x80 & ((1 << 0x80) - 1) else frozenset()
    return frozenset(chr(code) for code in range(0x80) if mask >> code & 1) | others


def first_bytes(lark: str) -> int:
    """The bytes that may come first, one bit each; 0 where nothing matches."""
    matcher = _matcher(lark)
    mask = 0 if matcher is None else int.from_bytes(matcher.compute_bitmask(), "little")
    return 0 if matcher is None or matcher.is_error() else mask & ((1 << 0x100) - 1)


def second_bytes(lark: str, first: int) -> str:
    """The characters of ASCII that may follow this first byte."""
    matcher = _matcher(lark)
    if matcher is None or not matcher.try_consume_tokens([first]):
        return ""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    return "".join(chr(code) for code in range(0x80) if mask >> code & 1)


def _matcher(lark: str) -> LLMatcher | None:
    """A matcher that takes bytes; None of a grammar that nothing matches."""
    grammar = json.dumps({"grammars": [{"name": "probe", "lark_grammar": lark}]})
    matcher = LLMatcher(_bytes_alone(), grammar, log_level=0)
    return None if matcher.is_error() else matcher


def _class_length(body: str, start: int) -> int:
    """The length of a class with the classes in it."""
    depth, place = 0, start
    while place < len(body):
        character = body[place]
        if character == "\\":
            place += 1
        elif character == "[":
            depth += 1
            # A bracket that comes first is one of the characters.
            place += len(re.match(r"\^?(?:-+|\]?)", body[place + 1 :])[0])  # type: ignore[index]
        elif character == "]":
            depth -= 1
            if not depth:
                return place + 1 - start
        place += 1
    raise NotWritable(f"nobody closes the class {body[start:][:20]!r} in a pattern")


def _escapes_or(plain: str, characters: frozenset[str]) -> str:
    """Alternatives: what is written as it is, and the escapes of these characters."""
    short = "".join(_quoted(_ESCAPED[each][1]) for each in sorted(characters) if len(_ESCAPED[each]) == 2)
    long = [_ESCAPED[each][4:] for each in sorted(characters) if len(_ESCAPED[each]) > 2]
    parts = [plain] if plain else []
    if short:
        parts.append(rf"\\[{short}]")
    if long:
        parts.append(rf"\\u00(?:{'|'.join(long)})")
    return "|".join(parts)


def _quoted(text: str) -> str:
    return "".join(map(_literal, text))


def _literal(character: str) -> str:
    if character in _META:
        return "\\" + character
    return f"\\x{ord(character):02x}" if character < " " or character == "\x7f" else character


def _lark_text(text: str) -> str:
    # The library cannot read a DEL that is not escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
