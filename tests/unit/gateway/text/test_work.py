"""The work of every parser is linear in what it gets, at any cut: characters looked at are counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from contract.formats import REASONING
from gateway.text.delta import TextDelta
from gateway.text.harmony import HarmonyParser
from gateway.text.reasoning import ContentParser, TextParser, ThinkParser
from gateway.text.tool_calls import PARSERS, marks
from gateway.text.tool_calls.values import ToolTypes
from tests.contract.call_corpus import FAMILIES, TOOLS, turn

# Pieces of a flood; work that grows with their square is four times as much for twice as many.
NUM_PIECES = 250


class Counted(str):
    """A text that counts what its methods look at and copy."""

    work = 0

    def __add__(self, other: str) -> Counted:
        Counted.work += len(self) + len(other)
        return Counted(str.__add__(self, other))

    def __radd__(self, other: str) -> Counted:
        Counted.work += len(self) + len(other)
        return Counted(str.__add__(other, self))

    def __getitem__(self, key: Any) -> Counted:
        found = str.__getitem__(self, key)
        Counted.work += len(found)
        return Counted(found)

    def __iter__(self) -> Iterator[str]:
        Counted.work += len(self)
        return str.__iter__(self)

    def find(self, sub: str, start: Any = 0, *rest: Any) -> int:
        Counted.work += len(self) - start
        return str.find(self, sub, start, *rest)

    def startswith(self, prefix: Any, *rest: Any) -> bool:
        Counted.work += len(prefix)
        return str.startswith(self, prefix, *rest)

    def endswith(self, suffix: Any, *rest: Any) -> bool:
        Counted.work += len(suffix)
        return str.endswith(self, suffix, *rest)


def _counting(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def counted(self: Counted, *given: Any) -> Any:
        Counted.work += len(self)
        found = method(self, *given)
        if isinstance(found, tuple):
            return tuple(Counted(each) for each in found)
        return Counted(found) if isinstance(found, str) else found

    return counted


for _name in (
    *("lstrip", "rstrip", "strip", "partition", "rpartition", "removeprefix", "removesuffix"),
    *("__contains__", "isspace", "join", "replace"),
):
    setattr(Counted, _name, _counting(_name))


def parser_of(name: str) -> TextParser:
    parser: TextParser = PARSERS[name](str, ToolTypes(TOOLS))
    if name == "harmony":
        return HarmonyParser(parser, calls_tools=True)
    reasoning = FAMILIES[name].reasoning
    return ThinkParser(parser, opened=False, form=REASONING[reasoning]) if reasoning else parser


def work_of(parser: TextParser, pieces: Iterable[str]) -> int:
    Counted.work = 0
    for piece in pieces:
        parser.feed(Counted(piece), TextDelta())
    parser.finish(TextDelta())
    return Counted.work


def floods(name: str) -> Iterator[str]:
    """What models write over and over: white space, and the format's own parts."""
    yield from (" ", "\n", "\r\n", "{", "]", "a", '"', "\\")
    yield from marks(name)
    yield from (mark[:-1] for mark in marks(name))


def is_linear(name: str, before: str, flood: str, behind: str, cut: int) -> bool:
    def work(num_pieces: int) -> int:
        pieces = [flood] * num_pieces if not cut else _cut(flood * num_pieces, cut)
        return work_of(parser_of(name), [before, *pieces, behind])

    once = work(NUM_PIECES)
    return work(2 * NUM_PIECES) < 2.5 * once + 2_500


def _cut(text: str, length: int) -> list[str]:
    return [text[start : start + length] for start in range(0, len(text), length)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_flood_anywhere_in_an_answer_costs_its_length(name: str) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("get_weather", {"text": "a b", "count": 1, "items": ["c"]})]
    text = turn(name, calls if FAMILIES[name].single else calls * 2)
    places = {0, len(text), *range(0, len(text), max(1, len(text) // 24))}
    for mark in ("{", "}", ">", "]", ","):
        places |= {index + 1 for index, each in enumerate(text) if each == mark}
    for flood in (" ", "\n"):
        for at in sorted(places):
            assert is_linear(name, text[:at], flood, text[at:], 0), (text[:at], flood)


@pytest.mark.parametrize("cut", [0, 1 << 20])
@pytest.mark.parametrize("name", FAMILIES)
def test_parts_of_the_format_over_and_over_cost_their_length(name: str, cut: int) -> None:
    opens = next(iter(marks(name)), "")
    for flood in floods(name):
        for before in dict.fromkeys(("", opens)):
            assert is_linear(name, before, flood, "", cut), (before, flood)


@pytest.mark.parametrize("form", REASONING)
@pytest.mark.parametrize("flood", ["\n", " ", "x", "<", "</"])
def test_thoughts_and_tagged_answers_cost_their_length(form: str, flood: str) -> None:
    tags = REASONING[form]

    def work(before: str, num_pieces: int) -> int:
        parser = (
            HarmonyParser(ContentParser(), calls_tools=False)
            if form == "harmony"
            else ThinkParser(ContentParser(), opened=False, form=tags)
        )
        return work_of(parser, [before, *[flood] * num_pieces])

    for before in ("", tags.open, tags.open + tags.close, tags.open + tags.close + tags.answer_open):
        for behind in ("", tags.answer_close):
            once = work(before + behind, NUM_PIECES)
            assert work(before + behind, 2 * NUM_PIECES) < 2.5 * once + 2_500
