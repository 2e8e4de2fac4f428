"""Lark as its source, so that a grammar can be written again in another alphabet.

Whether a grammar is well-formed the library says before it is read here; what is understood here is the part
of its Lark that describes texts. Used by `tokenizer_svc.grammar.led_input`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

_TOKEN = re.compile(
    r"""
      (?P<skip>(?:\#|//)[^\n]*|[ \t]+)
    | (?P<newline>\r?\n)
    | (?P<string>"(?:\\.|[^"\\])*"i?)
    | (?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    | (?P<rule>!?[_?]?[a-z][_a-z0-9\-]*)
    | (?P<terminal>_?[A-Z][_A-Z0-9\-]*)
    | (?P<number>[+-]?[0-9]+(?:\.[0-9]+)?)
    | (?P<directive>%[a-z]+)
    | (?P<special><[^<>\s]+>)
    | (?P<reference>@[a-zA-Z0-9_\-]+)
    | (?P<sign>->|\.\.|::|.)
    """,
    re.VERBOSE | re.DOTALL,
)
# Definitions of Lark's library `common` that the back end knows, as regular expressions.
_EXPONENT = r"[eE][+-]?[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"(?:{_DECIMAL}(?:{_EXPONENT})?|[0-9]+{_EXPONENT})"
COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:[0-9]+|{_FLOAT})",
    "SIGNED_NUMBER": f"[+-]?(?:[0-9]+|{_FLOAT})",
    "ESCAPED_STRING": r'"(?:[^"\\]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"\#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+(?:[^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}
# Levels of brackets that are read.
_MAX_DEPTH = 64


class NotWritable(Exception):
    """The grammar uses what cannot be led inside of a call; the message names it."""


@dataclass(frozen=True)
class Text:
    """A literal text."""

    text: str
    ignores_case: bool = False


@dataclass(frozen=True)
class Pattern:
    """A regular expression between its slashes, and its flags."""

    body: str
    flags: str = ""


@dataclass(frozen=True)
class Name:
    """A rule, or a terminal."""

    name: str
    is_rule: bool


@dataclass(frozen=True)
class Bracketed:
    """Alternatives in brackets; optional ones where the brackets are square."""

    inner: Choice
    is_optional: bool = False


Atom: TypeAlias = Text | Pattern | Name | Bracketed


@dataclass(frozen=True)
class Item:
    """An atom, whether it is negated, and how often it is there: "", an operator or bounds."""

    atom: Atom
    is_negated: bool = False
    repeated: str = ""

    @property
    def may_be_absent(self) -> bool:
        """Whether no repetition is one of those that are allowed."""
        return self.repeated in ("*", "?") or self.repeated.startswith(("{0", "{,"))


# Alternatives, each of parts that must hold at once (`&`), each of items in a row.
Choice: TypeAlias = tuple[tuple[tuple[Item, ...], ...], ...]


@dataclass(frozen=True)
class Definition:
    """A rule or terminal. Attributes are "lazy" and such, with their values."""

    name: Name
    body: Choice
    attributes: tuple[tuple[str, Text | Pattern | Name | str], ...] = ()


@dataclass(frozen=True)
class LarkSource:
    """A grammar: its definitions, those of `common` among them, and what may stand between lexemes."""

    definitions: tuple[Definition, ...]
    ignored: tuple[Choice, ...] = ()


def read_lark(text: str) -> LarkSource:
    """The grammar; raises NotWritable."""
    return _LarkReader(text).source()


_Kind = Literal["skip", "newline", "string", "regex", "rule", "terminal", "number", "directive", "special",
                "reference", "sign", "end"]  # fmt: skip


@dataclass(frozen=True)
class _LarkToken:
    kind: str
    text: str


def _tokens(text: str) -> Iterator[_LarkToken]:
    for found in _TOKEN.finditer(text):
        kind = str(found.lastgroup)
        if kind != "skip":
            yield _LarkToken(kind, found[0])
    yield _LarkToken("newline", "\n")
    yield _LarkToken("end", "")


@dataclass
class _LarkReader:
    text: str
    place: int = 0
    depth: int = 0
    tokens: list[_LarkToken] = field(default_factory=list)

    def source(self) -> LarkSource:
        self.tokens = list(_tokens(self.text))
        definitions: list[Definition] = []
        ignored: list[Choice] = []
        while self._now.kind != "end":
            token = self._now
            if token.kind == "newline":
                self.place += 1
            elif token.kind in ("rule", "terminal"):
                definitions.append(self._definition())
            elif self._takes("%ignore"):
                ignored.append(self._choice())
            elif self._takes("%import"):
                definitions += self._imported()
            else:
                raise NotWritable(f"{token.text[:20]!r} is not led inside of a call")
        return LarkSource(tuple(definitions), tuple(ignored))

    @property
    def _now(self) -> _LarkToken:
        return self.tokens[min(self.place, len(self.tokens) - 1)]

    def _take(self) -> _LarkToken:
        token = self._now
        self.place += 1
        return token

    def _takes(self, text: str) -> bool:
        if self._now.kind in ("sign", "directive") and self._now.text == text:
            self.place += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._takes(text):
            raise NotWritable(f"{self._now.text[:20]!r} is not led inside of a call")

    def _imported(self) -> list[Definition]:
        library, names = self._take().text, []
        if self._takes("."):
            names = [self._take().text]
        elif self._takes("("):
            while not self._takes(")"):
                names.append(self._take().text)
                self._takes(",")
        alias = self._take().text if self._takes("->") else ""
        unknown = [name for name in names if name not in COMMON]
        if library != "common" or unknown or not names:
            raise NotWritable(f"%import {'.'.join([library, *unknown][:2])} is not known")
        return [
            Definition(Name(alias or name, is_rule=False), ((((Item(Pattern(COMMON[name])),)),),))
            for name in names
        ]

    def _definition(self) -> Definition:
        name = self._name(self._take())
        if self._takes("."):
            # A priority, which the back end reads and does not mind.
            self.place += 1
        attributes = []
        if self._takes("["):
            while not self._takes("]"):
                key, value = self._take().text, ""
                attributes.append((key, self._value() if self._takes("=") else value))
                self._takes(",")
        self._expect(":")
        return Definition(name, self._choice(), tuple(attributes))

    def _value(self) -> Text | Pattern | Name | str:
        if self._now.kind == "number":
            return self._take().text
        atom = self._atom()
        if isinstance(atom, Bracketed):
            raise NotWritable("a group as an attribute's value is not led inside of a call")
        return atom

    def _choice(self) -> Choice:
        alternatives = [self._alternative()]
        while self._goes_on():
            alternatives.append(self._alternative())
        return tuple(alternatives)

    def _goes_on(self) -> bool:
        """Whether another alternative follows, which may begin a line."""
        before = self.place
        while self._now.kind == "newline":
            self.place += 1
        if self._takes("|"):
            return True
        # Brackets hold several lines.
        if not (self.depth and self._now.text in (")", "]")):
            self.place = before
        return False

    def _alternative(self) -> tuple[tuple[Item, ...], ...]:
        parts = [self._row()]
        while self._takes("&"):
            parts.append(self._row())
        if self._takes("->"):
            self.place += 1
        return tuple(parts)

    def _row(self) -> tuple[Item, ...]:
        items = []
        while self._now.kind not in ("newline", "end") and self._now.text not in ("|", "&", "->", ")", "]"):
            items.append(self._item())
        return tuple(items)

    def _item(self) -> Item:
        is_negated = self._takes("~")
        atom = self._atom()
        if self._takes("~"):
            least = self._take().text
            most = self._take().text if self._takes("..") else least
            return Item(atom, is_negated, f"{{{least},{most}}}")
        if self._now.text in ("*", "+", "?"):
            return Item(atom, is_negated, self._take().text)
        if self._takes("{"):
            bounds = ""
            while not self._takes("}"):
                if self._now.kind not in ("number", "sign"):
                    raise NotWritable("rules with parameters are not led inside of a call")
                bounds += self._take().text
            return Item(atom, is_negated, f"{{{bounds}}}")
        return Item(atom, is_negated)

    def _atom(self) -> Atom:
        token = self._take()
        match token.kind:
            case "string":
                text = _text(token.text)
                if self._takes(".."):
                    return _range(text, _text(self._take().text))
                return text
            case "regex":
                body, _, flags = token.text[1:].rpartition("/")
                return Pattern(body, flags)
            case "rule" | "terminal":
                return self._name(token)
            case "sign" if token.text in ("(", "["):
                return self._group("]" if token.text == "[" else ")")
        raise NotWritable(f"{token.text[:20]!r} is not led inside of a call")

    def _group(self, close: str) -> Bracketed:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise NotWritable(f"it is nested deeper than {_MAX_DEPTH} levels")
        inner = self._choice()
        self._expect(close)
        self.depth -= 1
        return Bracketed(inner, is_optional=close == "]")

    @staticmethod
    def _name(token: _LarkToken) -> Name:
        return Name(token.text.lstrip("!?"), is_rule=token.kind == "rule")


def _text(token: str) -> Text:
    ignores_case = token.endswith("i")
    try:
        text = json.loads(token.removesuffix("i"))
    except ValueError as error:
        raise NotWritable(f"the text {token[:20]} is not one of JSON") from error
    return Text(str(text), ignores_case)


def _range(first: Text, last: Text) -> Pattern:
    escaped = [f"\\x{{{ord(each.text):x}}}" for each in (first, last) if len(each.text) == 1]
    if len(escaped) != 2:
        raise NotWritable("a range is not of two characters")
    return Pattern(f"[{escaped[0]}-{escaped[1]}]")
