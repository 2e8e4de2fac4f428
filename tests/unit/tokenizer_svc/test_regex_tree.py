"""Python's private parser of patterns is still the one that the adapter was written for."""

from __future__ import annotations

import ast
import platform
import re

import pytest

from tests.architecture.sources import PACKAGES, python_sources
from tokenizer_svc.grammar.schema.regex_tree import (
    Anchor,
    Branch,
    Class,
    Dot,
    Group,
    Item,
    LookAhead,
    Other,
    Repeat,
    parse,
)

# The parser of 3.11 to 3.13 gives these.
_CHANGED = (
    f"Python {platform.python_version()} reads patterns otherwise than 3.11 to 3.13 did: look at re._parser "
    "and re._constants, and adapt tokenizer_svc/grammar/schema/regex_tree.py"
)
_OPERATIONS = (
    "LITERAL", "NOT_LITERAL", "ANY", "IN", "AT", "SUBPATTERN", "BRANCH", "ASSERT", "ASSERT_NOT", "MAX_REPEAT",
    "MIN_REPEAT", "NEGATE", "RANGE", "CATEGORY", "AT_BEGINNING", "AT_END", "CATEGORY_DIGIT", "CATEGORY_WORD",
    "CATEGORY_SPACE", "CATEGORY_NOT_DIGIT", "CATEGORY_NOT_WORD", "CATEGORY_NOT_SPACE",
)  # fmt: skip


def letter(text: str) -> Class:
    return Class(((ord(text), ord(text)),))


A, B = letter("a"), letter("b")

TREES: dict[str, tuple[Item, ...]] = {
    "": (),
    "^a$": (Anchor("begin"), A, Anchor("end")),
    ".": (Dot(),),
    "[^a]": (Class(((97, 97),), negated=True),),
    "[^ab]": (Class(((97, 97), (98, 98)), negated=True),),
    r"[a-f\d\S]": (Class(((97, 102), "DIGIT", "NOT_SPACE")),),
    r"\D\s\w\W": (Class(("NOT_DIGIT",)), Class(("SPACE",)), Class(("WORD",)), Class(("NOT_WORD",))),
    "(a)(?:b)": (Group((A,)), B),
    "(?P<name>a)": (Group((A,)),),
    "a|b": (Class(((97, 97), (98, 98))),),
    "(ab|)": (Group((Branch(((A, B), ())),)),),
    "(?=a)(?!b)": (LookAhead((A,), negated=False), LookAhead((B,), negated=True)),
    "a*": (Repeat((A,), 0, None, greedy=True, min_width=1),),
    "(?:ab){2,}?": (Repeat((A, B), 2, None, greedy=False, min_width=2),),
    "a{3}": (Repeat((A,), 3, 3, greedy=True, min_width=1),),
    "(?:a?)?": (Repeat((Repeat((A,), 0, 1, greedy=True, min_width=1),), 0, 1, greedy=True, min_width=0),),
    r"(a)\1": (Group((A,)), Other("GROUPREF")),
    "(?<=a)": (Other("ASSERT"),),
    "(?<!a)": (Other("ASSERT_NOT"),),
    r"\ba\Z": (Other("AT"), A, Other("AT")),
    "(?i:a)": (Other("SUBPATTERN"),),
    "a*+": (Other("POSSESSIVE_REPEAT"),),
    "(?>a)": (Other("ATOMIC_GROUP"),),
}


@pytest.mark.parametrize("pattern", TREES)
def test_the_parser_gives_what_the_adapter_reads(pattern: str) -> None:
    tree = parse(pattern)
    assert tree.items == TREES[pattern], _CHANGED
    assert not tree.has_flags, _CHANGED


@pytest.mark.parametrize(("pattern", "has_flags"), [("(?i)a", True), ("(?s)a", True), ("(?u)a", False)])
def test_flags_of_the_whole_pattern_are_told(pattern: str, has_flags: bool) -> None:
    assert parse(pattern).has_flags == has_flags, _CHANGED


@pytest.mark.parametrize("pattern", ["(", "a**", "[b-a]", r"\1"])
def test_what_is_no_pattern_is_an_error(pattern: str) -> None:
    with pytest.raises(re.error):
        parse(pattern)


def test_the_parsers_surface_is_the_one_that_is_known() -> None:
    from re import _constants, _parser  # type: ignore[attr-defined]

    missing = [name for name in _OPERATIONS if not hasattr(_constants, name)]
    assert not missing, f"{_CHANGED}; missing: {missing}"
    assert [str(getattr(_constants, name)) for name in _OPERATIONS] == list(_OPERATIONS), _CHANGED
    parsed = _parser.parse("(?:ab)*")
    (((operation, (least, most, inner))),) = parsed.data
    assert (operation, least, most) == (_constants.MAX_REPEAT, 0, _constants.MAXREPEAT), _CHANGED
    assert most > 2**31, _CHANGED
    assert inner.getwidth()[0] == 2, _CHANGED
    assert parsed.state.flags == re.UNICODE, _CHANGED


def test_only_the_adapter_knows_the_private_parser() -> None:
    users = {
        source.name
        for source in python_sources(*PACKAGES)
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.ImportFrom) and node.module == "re")
        or (
            isinstance(node, ast.Import)
            and any(alias.name.startswith(("re.", "sre_")) for alias in node.names)
        )
    }
    assert users <= {"tokenizer_svc/grammar/schema/regex_tree.py"}
