"""Patterns that the back end cannot read, as automata: complements, look-aheads, anchors inside of groups.

A pattern becomes an expression with intersection and complement; its derivatives (Brzozowski 1964) are the
states of a deterministic automaton, which is written back as a plain pattern. A text is taken to be followed
by a mark, which $ looks for. What needs too many states has no form.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

from tokenizer_svc.grammar.schema.regex_tree import (
    Anchor,
    Branch,
    Category,
    Class,
    Dot,
    Group,
    Item,
    Items,
    LookAhead,
    Repeat,
    escaped,
    parse,
    walk,
)

# Ranges of code points, ascending and apart. Surrogates are no characters.
Ranges = tuple[tuple[int, int], ...]


class _NoForm(Exception):
    pass


class Node(tuple[Any, ...]):
    """An expression: ("set", ranges), ("cat", left, right), ("or", parts), ("and", parts), ("not", one),
    ("star", one) or ("eps",).

    Equal expressions are the same object, so that comparing large ones costs nothing.
    """

    number: int
    # Whether it matches the empty text.
    nullable: bool

    def __hash__(self) -> int:
        return self.number

    def __eq__(self, other: object) -> bool:
        return self is other


_SIGMA: Ranges = ((0, 0xD7FF), (0xE000, 0x10FFFF))
_END = 0x110000
_MAX_NODES = 8_000

_table: dict[tuple[Any, ...], Node] = {}


def _node(kind: str, *parts: Any) -> Node:
    inner = parts[0] if kind in ("or", "and") else () if kind == "set" else parts
    key = (kind, parts[0]) if kind == "set" else (kind, *(part.number for part in inner))
    found = _table.get(key)
    if found is None:
        if len(_table) > _MAX_NODES:
            raise _NoForm
        found = Node((kind, *parts))
        found.number = len(_table)
        join = all if kind in ("cat", "and") else any
        found.nullable = kind in ("eps", "star") or join(part.nullable for part in inner)
        if kind in ("set", "not"):
            found.nullable = kind == "not" and not parts[0].nullable
        _table[key] = found
    return found


_EPSILON = _node("eps")
_NOTHING = _node("set", ())
_ALL = _node("star", _node("set", (*_SIGMA, (_END, _END))))
_AT_END = _node("cat", _node("set", ((_END, _END),)), _ALL)
_CONSTANTS = dict(_table)

_MAX_STATES = 100
_MAX_STEPS = 10_000
_MAX_LENGTH = 20_000
_MAX_REPEAT = 64

_DIGITS: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = (
    (0x09, 0x0D), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
    (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF),
)  # fmt: skip
_CATEGORIES = {"DIGIT": _DIGITS, "WORD": _WORD, "SPACE": _SPACE}


def plain(pattern: str) -> str | None:
    """The same language without look-aheads and inner anchors; None when there is no small form."""
    return _rewritten(pattern, complement=False)


def outside(pattern: str) -> str | None:
    """A pattern of all texts that `pattern` does not match; None when there is no small form."""
    return _rewritten(pattern, complement=True)


@lru_cache(maxsize=256)
def _rewritten(pattern: str, *, complement: bool) -> str | None:
    try:
        tree = parse(pattern)
        if tree.has_flags:
            return None
        character: Node = _node("set", _SIGMA)
        later = _cat(character, _cat(_star(character), _sequence(tree.items, _ALL, False)))
        found = _or((_sequence(tree.items, _ALL, True), later))
        whole = _cat(_star(character), _node("set", ((_END, _END),)))
        text = _pattern_of(_and((whole, _not(found) if complement else found)))
    except (_NoForm, re.error, RecursionError, OverflowError):
        return None
    finally:
        _table.clear()
        _table.update(_CONSTANTS)
    return text if text is not None and len(text) <= _MAX_LENGTH else None


def _sequence(items: Items, then: Node, first: bool | None, ends: bool = True) -> Node:
    """The items one after the other, and then `then`, which look-aheads see.

    `first` tells whether this is the beginning of the text; None when it may be. Unless it `ends`, $ fails.
    """
    known = []
    for item in items:
        known.append(first)
        first = _first_after(item, first)
    for item, is_first in zip(reversed(items), reversed(known), strict=True):
        then = _item(item, then, is_first, ends)
    return then


def _first_after(item: Item, first: bool | None) -> bool | None:
    """Whether the place after an item can still be the beginning of the text."""
    match item:
        case _ if first is False:
            return False
        case Anchor() | LookAhead():
            return first
        case Class() | Dot():
            return False
        case Repeat(least=least, min_width=min_width) if least and min_width:
            return False
    return None


def _item(item: Item, then: Node, first: bool | None, ends: bool) -> Node:
    result: Node | None = None
    match item:
        case Group(items):
            result = _sequence(items, then, first, ends)
        case Branch(branches):
            result = _or(tuple(_sequence(branch, then, first, ends) for branch in branches))
        case LookAhead(items, negated):
            ahead = _sequence(items, _ALL, first)
            result = _and((_not(ahead) if negated else ahead, then))
        case Repeat():
            result = _repeat(item, then, first, ends)
        case Anchor("end"):
            result = _and((_AT_END, then)) if ends else _NOTHING
        case Anchor("begin") if first is not None:
            result = then if first else _NOTHING
        case _:
            result = _cat(_node("set", _characters(item)), then)
    return result


def _repeat(repeat: Repeat, then: Node, first: bool | None, ends: bool) -> Node:
    least, most, items = repeat.least, repeat.most, repeat.items
    if least > _MAX_REPEAT or (most is not None and most > _MAX_REPEAT):
        raise _NoForm
    if first is not False and (most is None or most > 1):
        # Only the first round can be at the beginning.
        if Anchor("begin") in walk(items):
            raise _NoForm
        first = None
    if most is None:
        if any(isinstance(item, LookAhead) for item in walk(items)):
            raise _NoForm
        rounds = _star(_sequence(items, _EPSILON, first, False))
        # A round that stands at the end is the last one that takes anything.
        last = _sequence(items, then, first, ends) if ends and Anchor("end") in walk(items) else _NOTHING
        then = _cat(rounds, _or((then, last)))
    else:
        after = then
        for _ in range(most - least):
            then = _or((after, _sequence(items, then, first, ends)))
    for _ in range(least):
        then = _sequence(items, then, first, ends)
    return then


def _characters(item: Item) -> Ranges:
    match item:
        case Dot():
            return _without(((0x0A, 0x0A),))
        case Class(parts, negated):
            ranges: list[tuple[int, int]] = []
            for part in parts:
                ranges += _category(part) if isinstance(part, str) else (part,)
            joined = _joined(ranges)
            return _without(joined) if negated else joined
    raise _NoForm


def _category(name: Category) -> Ranges:
    known = _CATEGORIES[name.removeprefix("NOT_")]
    return _without(known) if name.startswith("NOT_") else known


def _joined(ranges: Sequence[tuple[int, int]]) -> Ranges:
    joined: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return tuple(joined)


def _without(ranges: Ranges) -> Ranges:
    left: list[tuple[int, int]] = []
    for low, high in _SIGMA:
        at = low
        for first, last in ranges:
            if last < at or first > high:
                continue
            if first > at:
                left.append((at, first - 1))
            at = last + 1
        if at <= high:
            left.append((at, high))
    return tuple(left)


def _cat(left: Node, right: Node) -> Node:
    if _NOTHING in (left, right):
        return _NOTHING
    if left == _EPSILON:
        return right
    if right == _EPSILON:
        return left
    if left[0] == "cat":
        return _node("cat", left[1], _cat(left[2], right))
    return _node("cat", left, right)


def _or(parts: tuple[Node, ...]) -> Node:
    return _flat("or", parts, neutral=_NOTHING, absorbing=_ALL)


def _and(parts: tuple[Node, ...]) -> Node:
    return _flat("and", parts, neutral=_ALL, absorbing=_NOTHING)


def _flat(kind: str, parts: tuple[Node, ...], *, neutral: Node, absorbing: Node) -> Node:
    flat = {each for part in parts for each in (part[1] if part[0] == kind else (part,))} - {neutral}
    if absorbing in flat:
        return absorbing
    if len(flat) < 2:
        return flat.pop() if flat else neutral
    return _node(kind, tuple(sorted(flat, key=attrgetter("number"))))


def _not(node: Node) -> Node:
    if node[0] == "not":
        return node[1]  # type: ignore[no-any-return]
    return _ALL if node == _NOTHING else _NOTHING if node == _ALL else _node("not", node)


def _star(node: Node) -> Node:
    return node if node[0] == "star" else _EPSILON if node in (_EPSILON, _NOTHING) else _node("star", node)


class _Derivatives:
    """Derivatives with a limit on the work that they take; raises _NoForm beyond it."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Node] = {}

    def of(self, node: Node, character: int) -> Node:
        """What has to follow after `character`."""
        known = self._known.get((node.number, character))
        if known is not None:
            return known
        if len(self._known) >= _MAX_STEPS:
            raise _NoForm
        result = self._known[node.number, character] = self._of(node, character)
        return result

    def _of(self, node: Node, character: int) -> Node:
        result = _NOTHING
        match node[0]:
            case "set" if any(low <= character <= high for low, high in node[1]):
                result = _EPSILON
            case "cat":
                result = _cat(self.of(node[1], character), node[2])
                if node[1].nullable:
                    result = _or((result, self.of(node[2], character)))
            case "or":
                result = _or(tuple(self.of(each, character) for each in node[1]))
            case "and":
                result = _and(tuple(self.of(each, character) for each in node[1]))
            case "not":
                result = _not(self.of(node[1], character))
            case "star":
                result = _cat(self.of(node[1], character), node)
        return result


def _edges(node: Node) -> set[int]:
    """Code points at which some set in the expression begins, or has just ended."""
    found: set[int] = set()
    # Expressions share their parts: each is looked at once.
    seen = {node}
    pending = [node]
    while pending:
        kind, *parts = pending.pop()
        if kind == "set":
            for low, high in parts[0]:
                found.update((low, high + 1))
            continue
        for each in parts[0] if kind in ("or", "and") else parts:
            if each not in seen:
                seen.add(each)
                pending.append(each)
    return found


def _pattern_of(start: Node) -> str | None:
    """The automaton of `start` over texts, by elimination of states; accepting before the end mark."""
    derivatives = _Derivatives()
    numbers = {start: 0}
    pending = [start]
    arrows: dict[tuple[int, int], list[tuple[int, int]]] = {}
    accepting = set()
    while pending:
        state = pending.pop()
        number = numbers[state]
        if derivatives.of(state, _END).nullable:
            accepting.add(number)
        cuts = {low for low, _ in _SIGMA} | {high + 1 for _, high in _SIGMA} | _edges(state)
        points = sorted(cut for cut in cuts if cut <= 0x110000)
        for low, following in pairwise(points):
            if 0xD800 <= low <= 0xDFFF:
                continue
            target = derivatives.of(state, low)
            if target == _NOTHING:
                continue
            if target not in numbers:
                if len(numbers) >= _MAX_STATES:
                    raise _NoForm
                numbers[target] = len(numbers)
                pending.append(target)
            arrows.setdefault((number, numbers[target]), []).append((low, following - 1))
    return _eliminated(len(numbers), {pair: _class(ranges) for pair, ranges in arrows.items()}, accepting)


def _eliminated(num_states: int, arrows: dict[tuple[int, int], str], accepting: set[int]) -> str | None:
    begin, end = -1, -2
    arrows = {**arrows, (begin, 0): "", **{(state, end): "" for state in accepting}}
    left = set(range(num_states))
    while left:
        sources = {state: [a for a, b in arrows if b == state != a] for state in left}
        targets = {state: [b for a, b in arrows if a == state != b] for state in left}
        state = min(left, key=lambda each: (len(sources[each]) * len(targets[each]), each))
        left.discard(state)
        loop = arrows.pop((state, state), None)
        again = f"{_group(loop)}*" if loop else ""
        for source in sources[state]:
            for target in targets[state]:
                way = arrows[source, state] + again + arrows[state, target]
                known = arrows.get((source, target))
                arrows[source, target] = way if known is None else _either(known, way)
                if len(arrows[source, target]) > _MAX_LENGTH:
                    raise _NoForm
        arrows = {pair: text for pair, text in arrows.items() if state not in pair}
    whole = arrows.get((begin, end))
    return None if whole is None else f"^{whole}$"


def _either(one: str, other: str) -> str:
    if one == other:
        return one
    if not one or not other:
        return f"{_group(one or other)}?"
    return f"(?:{one}|{other})"


def _group(text: str) -> str:
    single = (
        len(text) == 1 or (len(text) == 2 and text[0] == "\\") or re.fullmatch(r"\[(?:\\.|[^\\\]])*\]", text)
    )
    return text if single else f"(?:{text})"


def _class(ranges: Sequence[tuple[int, int]]) -> str:
    joined = _joined(ranges)
    if len(joined) == 1 and joined[0][0] == joined[0][1]:
        return escaped(chr(joined[0][0]))
    parts = (
        escaped(chr(low)) if low == high else f"{escaped(chr(low))}-{escaped(chr(high))}"
        for low, high in (piece for each in joined for piece in _apart_from_surrogates(each))
    )
    return "[" + "".join(parts) + "]"


def _apart_from_surrogates(each: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    low, high = each
    if low <= 0xD7FF and high >= 0xE000:
        return ((low, 0xD7FF), (0xE000, high))
    return (each,)
