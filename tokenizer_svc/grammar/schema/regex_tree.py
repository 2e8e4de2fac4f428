"""A pattern as a tree: the one place that knows the parser of Python's `re`, which is private to it.

No library is better: `interegular` reads some look-aheads only, `greenery` neither them nor anchors,
bindings of ECMA-262 engines (`regress`) show no tree, and `hypothesis` itself reads patterns as is done here.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from re import _constants as sre  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Literal, TypeAlias, get_args

# Names of the classes \d, \w, \s, \D, \W and \S.
Category: TypeAlias = Literal["DIGIT", "WORD", "SPACE", "NOT_DIGIT", "NOT_WORD", "NOT_SPACE"]


@dataclass(frozen=True)
class Class:
    """One character of (or, negated, not of) ranges of code points, both ends included, and categories."""

    parts: tuple[tuple[int, int] | Category, ...]
    negated: bool = False


@dataclass(frozen=True)
class Dot:
    """Any character that ends no line."""


@dataclass(frozen=True)
class Anchor:
    """^ or $."""

    at: Literal["begin", "end"]


@dataclass(frozen=True)
class Group:
    """A group of its own, capturing or not."""

    items: Items


@dataclass(frozen=True)
class Branch:
    """One of several."""

    branches: tuple[Items, ...]


@dataclass(frozen=True)
class LookAhead:
    """(?=…), or (?!…)."""

    items: Items
    negated: bool


@dataclass(frozen=True)
class Repeat:
    """`least` to `most` rounds, any number when that is None. A round has `min_width` characters or more."""

    items: Items
    least: int
    most: int | None
    greedy: bool
    min_width: int


@dataclass(frozen=True)
class Other:
    """What has no meaning here: references to groups, look-behinds, \\b, flags, possessive repetitions, …"""

    name: str


Item: TypeAlias = Class | Dot | Anchor | Group | Branch | LookAhead | Repeat | Other
Items: TypeAlias = tuple[Item, ...]

_CATEGORIES: dict[Any, Category] = {getattr(sre, f"CATEGORY_{name}"): name for name in get_args(Category)}
_ANCHORS = {sre.AT_BEGINNING: Anchor("begin"), sre.AT_END: Anchor("end")}


@dataclass(frozen=True)
class Tree:
    """A whole pattern. Flags are those that it sets for all of itself, such as (?i)."""

    items: Items
    has_flags: bool


def parse(pattern: str) -> Tree:
    """Python's reading of the pattern; raises re.error, and RecursionError for deep ones.

    It warns of classes that it may read as ECMA-262's v mode does one day ([[a], [a--b]); as long as it does
    not, it reads them as they are meant here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        parsed = _parser.parse(pattern)
    return Tree(_items(parsed), bool(parsed.state.flags & ~int(re.UNICODE)))


def escaped(character: str) -> str:
    """One character as a literal in a pattern."""
    if character.isascii() and (character.isalnum() or character in " _"):
        return character
    if ord(character) < 0x20 or character == "\x7f":
        return f"\\x{ord(character):02X}"
    return f"\\{character}" if character.isascii() else character


def walk(items: Items) -> Iterator[Item]:
    """All items, and those inside of them."""
    for item in items:
        yield item
        match item:
            case Group() | LookAhead() | Repeat():
                yield from walk(item.items)
            case Branch():
                for branch in item.branches:
                    yield from walk(branch)


def _items(parsed: Any) -> Items:
    return tuple([_item(operation, argument) for operation, argument in parsed.data])


def _item(operation: Any, argument: Any) -> Item:
    item: Item = Other(str(operation))
    match operation:
        case sre.LITERAL:
            item = Class(((argument, argument),))
        case sre.NOT_LITERAL:
            item = Class(((argument, argument),), negated=True)
        case sre.ANY:
            item = Dot()
        case sre.IN:
            item = _class(argument)
        case sre.AT:
            item = _ANCHORS.get(argument, item)
        case sre.SUBPATTERN:
            _, added_flags, removed_flags, inner = argument
            if not added_flags and not removed_flags:
                item = Group(_items(inner))
        case sre.BRANCH:
            item = Branch(tuple([_items(branch) for branch in argument[1]]))
        case sre.ASSERT | sre.ASSERT_NOT:
            direction, inner = argument
            if direction == 1:
                item = LookAhead(_items(inner), negated=operation == sre.ASSERT_NOT)
        case sre.MAX_REPEAT | sre.MIN_REPEAT:
            least, most, inner = argument
            item = Repeat(
                items=_items(inner),
                least=least,
                most=None if most == sre.MAXREPEAT else most,
                greedy=operation == sre.MAX_REPEAT,
                min_width=inner.getwidth()[0],
            )
    return item


def _class(members: list[tuple[Any, Any]]) -> Class | Other:
    parts: list[tuple[int, int] | Category] = []
    negated = False
    for kind, value in members:
        match kind:
            case sre.NEGATE:
                negated = True
            case sre.LITERAL:
                parts.append((value, value))
            case sre.RANGE:
                parts.append((value[0], value[1]))
            case sre.CATEGORY if value in _CATEGORIES:
                parts.append(_CATEGORIES[value])
            case _:
                return Other(str(kind))
    return Class(tuple(parts), negated)
