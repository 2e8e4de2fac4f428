"""Rules for the argument of a tool whose text follows a grammar: Lark, or a regular expression.

They stand among the rules of the calls, under names of their own. What does not lead back to itself becomes
one lexeme, which is any row of its parts: the back end takes lexemes as long as they can be and looks one
byte ahead, which does not tell an escape from the next one, or a text from the mark behind it. Where rules do
lead back, such places are looked for and refused. Used by `tokenizer_svc.grammar.tools`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import llguidance

from tokenizer_svc.grammar.input_alphabets import Alphabet, AsItIs, InJson, first_bytes, second_bytes
from tokenizer_svc.grammar.lark_source import (
    Atom,
    Bracketed,
    Choice,
    Definition,
    Item,
    Name,
    NotWritable,
    Pattern,
    Text,
    read_lark,
)

_START = Name("start", is_rule=True)
_ANYTHING = Pattern("(?s:.+)")
_BACKSLASH = ord("\\")


def as_lark(syntax: str, grammar: str) -> str:
    """The grammar as Lark that stands for itself."""
    return (
        grammar if syntax == "lark" else f"start: INPUT\nINPUT: /{llguidance.regex_to_lark(grammar, '')}/\n"
    )


class LedInput:
    """One argument's text. `symbol` stands for it and for `close`, a text which ends it; with `in_json` what
    comes before `close` is escaped, else nothing is. An empty `close` is a control token's, which no text
    has.
    """

    def __init__(self, lark: str, index: int, *, in_json: bool, close: str) -> None:
        """Raises NotWritable for what cannot be led inside of a call."""
        source = read_lark(lark)
        self._prefix = f"input_{index}"
        self._in_json = in_json
        self._alphabet: Alphabet = InJson() if in_json else AsItIs()
        self._close = close
        self._definitions = {each.name: each for each in source.definitions}
        self._reached = self._names_below(_START)
        self._kept = frozenset(self._recursive())
        self._skip = ""
        # Lark of terminals, which probes need as well; further ones by their bodies.
        self._terminals: list[str] = []
        self._cut: dict[str, str] = {}
        if source.ignored:
            skipped = " | ".join(f"({self._choice(each)})" for each in source.ignored)
            self._skip = f"{self._prefix}_skip".upper()
            self._terminals.append(f"{self._skip}: ({skipped})+")
        for name in self._reached:
            if name in self._definitions and name not in self._kept:
                self._terminals.append(f"{self._name(name)}: {self._body(self._definitions[name])}")
        self.rules: list[str] = []
        self.symbol = self._with_rules() if _START in self._kept else self._as_lexeme()
        self.rules += [*self._terminals, *(f"{name}: {body}" for body, name in self._cut.items())]

    def _as_lexeme(self) -> str:
        text = self._name(_START)
        symbol = f"{self._prefix}_text"
        if not self._close:
            self.rules = [f"{symbol}: {self._not_empty(f'({text})')}"]
        elif self._in_json:
            self.rules = [f"{symbol.upper()}: {text} {_plain(self._close)}"]
            return symbol.upper()
        else:
            self.rules = [f"{symbol}[lazy]: {self._without_close(f'({text})')} {_plain(self._close)}"]
        return symbol

    def _with_rules(self) -> str:
        lexemes = dict.fromkeys(self._lexemes())
        self._check_ends([self._atom(each) for each in lexemes] + ([self._skip] if self._skip else []))
        self.rules = [
            f"{self._name(name)}: {self._choice(self._definitions[name].body, in_rule=True)}"
            for name in self._reached
            if name in self._kept
        ]
        return f"{self._name(_START)} {_plain(self._close) if self._close else ''}"

    def _recursive(self) -> Iterator[Name]:
        """The rules that lead back to themselves, or to rules that do."""
        waits_for = {
            name: {each for each in _names_in(self._definitions[name].body) if each in self._definitions}
            for name in self._reached
            if name in self._definitions
        }
        users: defaultdict[Name, list[Name]] = defaultdict(list)
        for name, below in waits_for.items():
            for each in below:
                users[each].append(name)
        ready = [name for name, below in waits_for.items() if not below]
        while ready:
            done = ready.pop()
            for user in users[done]:
                waits_for[user].discard(done)
                if not waits_for[user]:
                    ready.append(user)
        return (name for name, below in waits_for.items() if below)

    def _names_below(self, name: Name) -> dict[Name, None]:
        """The names that a definition comes to, itself among them."""
        found: dict[Name, None] = {name: None}
        pending = [name]
        while pending:
            definition = self._definitions.get(pending.pop())
            for each in _names_in(definition.body) if definition is not None else ():
                if each not in found:
                    found[each] = None
                    pending.append(each)
        return found

    def _lexemes(self) -> Iterator[Atom]:
        """What is a lexeme of the rules that stay rules."""

        def inside(choice: Choice) -> Iterator[Atom]:
            for atom in _atoms_in(choice):
                if isinstance(atom, Bracketed):
                    yield from inside(atom.inner)
                elif atom not in self._kept:
                    yield atom

        for name in self._kept:
            yield from inside(self._definitions[name].body)

    def _name(self, name: Name) -> str:
        own = f"{self._prefix}_{'r' if name.is_rule else 't'}_{name.name}"
        return own if name in self._kept else own.upper()

    def _body(self, definition: Definition) -> str:
        """The body of a terminal, or of a rule that becomes one."""
        body = self._choice(definition.body, skips=definition.name.is_rule)
        is_lazy = False
        for key, value in definition.attributes:
            match key:
                case "lazy":
                    is_lazy = True
                case "suffix" if isinstance(value, Text | Pattern | Name):
                    is_lazy, body = True, f"({body}) {self._atom(value)}"
                case "capture" | "temperature":
                    pass
                case _:
                    raise NotWritable(f"the attribute {key} of a rule is not led inside of a call")
        if not is_lazy:
            return body
        longer = f"(({body}) {self._alphabet.pattern(_ANYTHING)})"
        return f"({body}) & {self._alphabet.complement(longer)}"

    def _choice(self, choice: Choice, *, in_rule: bool = False, skips: bool = False) -> str:
        return " | ".join(
            " & ".join(
                " ".join(self._item(item, in_rule=in_rule, skips=skips) for item in row) for row in parts
            )
            for parts in choice
        )

    def _item(self, item: Item, *, in_rule: bool, skips: bool) -> str:
        atom = item.atom
        if isinstance(atom, Bracketed):
            opens, closes = "[]" if atom.is_optional else "()"
            written = f"{opens}{self._choice(atom.inner, in_rule=in_rule, skips=skips)}{closes}"
        elif isinstance(atom, Name) and atom.is_rule and (atom in self._kept or not in_rule):
            written = self._name(atom)
        elif in_rule:
            written = self._lexeme(atom)
        else:
            written = f"({self._atom(atom)} {self._skip}?)" if skips and self._skip else self._atom(atom)
        return (self._alphabet.complement(written) if item.is_negated else written) + item.repeated

    def _atom(self, atom: Atom) -> str:
        match atom:
            case Text():
                return self._alphabet.text(atom)
            case Pattern():
                return self._alphabet.pattern(atom)
            case Name():
                return self._name(atom)
            case Bracketed():
                return f"({self._choice(atom.inner)})"

    def _lexeme(self, atom: Atom) -> str:
        """A lexeme among rules, without what would end the argument, and what may be skipped behind it."""
        symbol = self._atom(atom)
        if symbol == '""':
            return symbol
        if not self._in_json:
            symbol = self._without_close(symbol)
        symbol = self._not_empty(symbol)
        # A rule that became a terminal has its own.
        is_rule = isinstance(atom, Name) and atom.is_rule
        return f"({symbol} {self._skip}?)" if self._skip and not is_rule else symbol

    def _not_empty(self, symbol: str) -> str:
        """The same as a lexeme, which no empty text is."""
        if not self._matches(f'({symbol} "x") & "x"'):
            return symbol if symbol.strip("()").isidentifier() or symbol[0] in '"/' else self._named(symbol)
        return self._named(f"{symbol} & {self._alphabet.pattern(_ANYTHING)}") + "?"

    def _without_close(self, symbol: str) -> str:
        mark = _pattern(self._close)
        if not self._close or not self._matches(f"({symbol}) & /(?s:.*){mark}(?s:.*)/"):
            return symbol if not symbol.startswith("(") else self._named(symbol)
        return self._named(f"({symbol}) & ~/(?s:.*){mark}(?s:.*)/ & /(?s:.*)/")

    def _named(self, body: str) -> str:
        return self._cut.setdefault(body, f"{self._prefix}_cut_{len(self._cut)}".upper())

    def _matches(self, terminal: str) -> bool:
        """Whether any text matches the body of a terminal."""
        return bool(first_bytes(self._probe(terminal)))

    def _probe(self, terminal: str) -> str:
        cut = (f"{name}: {body}" for body, name in self._cut.items())
        return "\n".join(["start: PROBE", f"PROBE: {terminal}", *self._terminals, *cut, ""])

    def _check_ends(self, symbols: list[str]) -> None:
        """Raises NotWritable where a lexeme may go on with the first byte of what follows, but not with the
        rest: it would be taken for a part of the lexeme, and there would be no way on.
        """
        if not self._in_json:
            for symbol in symbols if self._close else ():
                if self._goes_on(symbol, _pattern(self._close[0])):
                    raise NotWritable(
                        f"a part of it may hold the {self._close[0]!r} with which the mark behind the text "
                        "begins, so that its end would not be seen; rules that lead back to themselves need "
                        "parts that end by themselves"
                    )
            return
        begins = frozenset("".join(second_bytes(self._probe(each), _BACKSLASH) for each in symbols))
        for symbol in symbols if begins else ():
            if self._goes_on(symbol, r"\\"):
                on = {each for each in begins if self._goes_on(symbol, r"\\" + re.escape(each))}
                if begins - on:
                    raise NotWritable(
                        "a part of it may go on with an escape of JSON, and another one may begin with one; "
                        "rules that lead back to themselves need parts that end by themselves"
                    )

    def _goes_on(self, symbol: str, pattern: str) -> bool:
        return self._matches(f"({symbol}) & (({symbol}) /{pattern}(?s:.*)/)")


def _atoms_in(choice: Choice) -> Iterator[Atom]:
    return (item.atom for parts in choice for row in parts for item in row)


def _names_in(choice: Choice) -> Iterator[Name]:
    for atom in _atoms_in(choice):
        if isinstance(atom, Bracketed):
            yield from _names_in(atom.inner)
        elif isinstance(atom, Name):
            yield atom


def _plain(text: str) -> str:
    return AsItIs().text(Text(text))


def _pattern(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", "n")
