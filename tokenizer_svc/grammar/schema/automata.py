"""Patterns that the back end cannot read, as automata: complements, look-aheads, anchors inside of groups.

A pattern becomes an expression with intersection and complement; its derivatives (Brzozowski 1964) are the
states of a deterministic automaton, which is written back as a plain pattern. A text is taken to be followed
by a mark, which $ looks for. What needs too many states has no form.
"""

from __future__ import annotations

import re
import re._parser as sre_parse  # type: ignore[import-not-found]
import warnings
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

# Ranges of code points, ascending and apart. Surrogates are no characters.
Ranges = tuple[tuple[int, int], ...]


def parse(pattern: str) -> Any:
    """Python's reading of the pattern; raises re.error. It warns of classes that it may read as ECMA-262's v
    mode does one day ([[a], [a--b]); as long as it does not, it reads them as they are meant here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return sre_parse.parse(pattern)


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
        parsed = parse(pattern)
        if parsed.state.flags & ~int(re.UNICODE):
            return None
        character: Node = _node("set", _SIGMA)
        later = _cat(character, _cat(_star(character), _sequence(parsed.data, _ALL, False)))
        found = _or((_sequence(parsed.data, _ALL, True), later))
        whole = _cat(_star(character), _node("set", ((_END, _END),)))
        text = _pattern_of(_and((whole, _not(found) if complement else found)))
    except (_NoForm, re.error, RecursionError, OverflowError):
        return None
    finally:
        _table.clear()
        _table.update(_CONSTANTS)
    return text if text is not None and len(text) <= _MAX_LENGTH else None


def _sequence(items: Sequence[tuple[Any, Any]], then: Node, first: bool | None, ends: bool = True) -> Node:
    """The items one after the other, and then `then`, which look-aheads see.

    `first` tells whether this is the beginning of the text; None when it may be. Unless it `ends`, $ fails.
    """
    known = []
    for operation, argument in items:
        known.append(first)
        first = _first_after(str(operation), argument, first)
    for (operation, argument), is_first in zip(reversed(list(items)), reversed(known), strict=True):
        then = _item(str(operation), argument, then, is_first, ends)
    return then


def _first_after(operation: str, argument: Any, first: bool | None) -> bool | None:
    """Whether the place after an item can still be the beginning of the text."""
    if first is False or operation in ("AT", "ASSERT", "ASSERT_NOT"):
        return first
    if operation in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        return False
    if operation in ("MAX_REPEAT", "MIN_REPEAT"):
        return False if argument[0] and argument[2].getwidth()[0] else None
    return None


def _item(operation: str, argument: Any, then: Node, first: bool | None, ends: bool) -> Node:
    result: Node | None = None
    match operation:
        case "SUBPATTERN" if not argument[1] and not argument[2]:
            result = _sequence(argument[3].data, then, first, ends)
        case "BRANCH":
            result = _or(tuple(_sequence(part.data, then, first, ends) for part in argument[1]))
        case "ASSERT" if argument[0] == 1:
            result = _and((_sequence(argument[1].data, _ALL, first), then))
        case "ASSERT_NOT" if argument[0] == 1:
            result = _and((_not(_sequence(argument[1].data, _ALL, first)), then))
        case "MAX_REPEAT" | "MIN_REPEAT":
            result = _repeat(argument[0], argument[1], argument[2].data, then, first, ends)
        case "AT" if str(argument) == "AT_END":
            result = _and((_AT_END, then)) if ends else _NOTHING
        case "AT" if str(argument) == "AT_BEGINNING" and first is not None:
            result = then if first else _NOTHING
        case _:
            result = _cat(_node("set", _characters(operation, argument)), then)
    return result


def _repeat(
    least: int, most: Any, items: Sequence[tuple[Any, Any]], then: Node, first: bool | None, ends: bool
) -> Node:
    endless = most == sre_parse.MAXREPEAT
    if least > _MAX_REPEAT or (not endless and most > _MAX_REPEAT):
        raise _NoForm
    if first is not False and (endless or most > 1):
        # Only the first round can be at the beginning.
        if "AT_BEGINNING" in repr(items):
            raise _NoForm
        first = None
    if endless:
        if "ASSERT" in repr(items):
            raise _NoForm
        rounds = _star(_sequence(items, _EPSILON, first, False))
        # A round that stands at the end is the last one that takes anything.
        last = _sequence(items, then, first, ends) if ends and "AT_END" in repr(items) else _NOTHING
        then = _cat(rounds, _or((then, last)))
    else:
        after = then
        for _ in range(most - least):
            then = _or((after, _sequence(items, then, first, ends)))
    for _ in range(least):
        then = _sequence(items, then, first, ends)
    return then


def _characters(operation: str, argument: Any) -> Ranges:
    match operation:
        case "LITERAL":
            return ((argument, argument),)
        case "NOT_LITERAL":
            return _without(((argument, argument),))
        case "ANY":
            return _without(((0x0A, 0x0A),))
        case "IN":
            ranges: list[tuple[int, int]] = []
            for kind, value in argument:
                if str(kind) != "NEGATE":
                    ranges += _class_part(str(kind), value)
            joined = _joined(ranges)
            return _without(joined) if str(argument[0][0]) == "NEGATE" else joined
    raise _NoForm


def _class_part(kind: str, value: Any) -> Ranges:
    match kind:
        case "LITERAL":
            return ((value, value),)
        case "RANGE":
            return ((value[0], value[1]),)
        case "CATEGORY":
            name = str(value).removeprefix("CATEGORY_")
            known = _CATEGORIES.get(name.removeprefix("NOT_"))
            if known is not None:
                return _without(known) if name.startswith("NOT_") else known
    raise _NoForm


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


def _number(node: Node) -> int:
    return node.number


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
    flat = {each for part in parts for each in (part[1] if part[0] == "or" else (part,))} - {_NOTHING}
    if _ALL in flat:
        return _ALL
    if not flat:
        return _NOTHING
    return flat.pop() if len(flat) == 1 else _node("or", tuple(sorted(flat, key=_number)))


def _and(parts: tuple[Node, ...]) -> Node:
    flat = {each for part in parts for each in (part[1] if part[0] == "and" else (part,))} - {_ALL}
    if _NOTHING in flat:
        return _NOTHING
    if not flat:
        return _ALL
    return flat.pop() if len(flat) == 1 else _node("and", tuple(sorted(flat, key=_number)))


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
        return _escaped(joined[0][0])
    parts = (
        _escaped(low) if low == high else f"{_escaped(low)}-{_escaped(high)}"
        for low, high in (piece for each in joined for piece in _apart_from_surrogates(each))
    )
    return "[" + "".join(parts) + "]"


def _apart_from_surrogates(each: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    low, high = each
    if low <= 0xD7FF and high >= 0xE000:
        return ((low, 0xD7FF), (0xE000, high))
    return (each,)


def _escaped(code: int) -> str:
    character = chr(code)
    if code < 0x20 or code == 0x7F:
        return f"\\x{code:02X}"
    return character if not character.isascii() or character.isalnum() else f"\\{character}"
