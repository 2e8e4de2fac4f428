"""Conditions over finite cases: which properties are there, and which of a few values they have.

Several conditions on one object multiply when each is written as a union of its own. Most ask only whether
properties are there or equal to listed values; then the object has few cases, in each of which every
condition is decided, and the union of the cases is small and free of contradictions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from tokenizer_svc.grammar.schema.context import Context, SchemaLocation
from tokenizer_svc.grammar.schema.document import Draft
from tokenizer_svc.grammar.schema.shapes import ALL_TYPES, Schema, all_of, any_of, key_of, type_of_value

_MAX_CASES = 96
_MAX_VALUES = 40

ABSENT, OTHER = "absent", "other"
# States of a property in a case: ABSENT, OTHER or the key of a listed value.
Known = dict[str, str]
# True, False, or the name of a property that has to be known first.
Verdict = bool | str
Test = Callable[[Known], Verdict]


# Possible cells of properties, and what else holds then.
_Leaf = tuple[dict[str, frozenset[str]], tuple[Schema, ...]]


class _TooMany(Exception):
    pass


class Rule(NamedTuple):
    """A condition and what follows; `then` and `otherwise` are made when a case needs them, once."""

    test: Test
    then: Callable[[], Schema]
    otherwise: Callable[[], Schema]


class Cases:
    """Collects rules about the properties of one object, and writes them as a union of cases."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._values: dict[str, dict[str, Any]] = {}
        self._rules: list[Rule] = []
        self._num_leaves = 0

    def take(self, node: dict[str, Any], place: SchemaLocation) -> set[str]:
        """Adds the conditions of a schema that ask for no more than presence and listed values; their
        keywords.
        """
        taken: set[str] = set()
        draft = self._context.document.draft
        if "if" in node and draft >= Draft.DRAFT7 and ("then" in node or "else" in node):
            test = self.test(node["if"], place.at("if"))
            if test is not None:
                branches = (self._asked(node.get(key, True), place.at(key)) for key in ("then", "else"))
                self._rules.append(Rule(test, *branches))
                taken |= {"if", "then", "else"} & set(node)
        if "not" in node and (test := self.test(node["not"], place.at("not"))) is not None:
            self._require(_negated(test))
            taken.add("not")
        if isinstance(node.get("oneOf"), list):
            tests = [self.test(each, place.at("oneOf", index)) for index, each in enumerate(node["oneOf"])]
            known = [test for test in tests if test is not None]
            if known and len(known) == len(tests):
                self._require(partial(_exactly_one, known))
                taken.add("oneOf")
        for keyword, since in _DEPENDENCIES.items():
            if isinstance(node.get(keyword), dict) and draft >= since:
                self._take_dependencies(node[keyword], place.at(keyword))
                taken.add(keyword)
        return taken

    def _take_dependencies(self, value: dict[str, Any], place: SchemaLocation) -> None:
        for name, wanted in value.items():
            rule = {"required": wanted} if isinstance(wanted, list) else wanted
            test = self.test(rule, place.at(name))
            if test is not None:
                self._require(partial(_any, [_negated(_present(name)), test]))
            else:
                self._rules.append(Rule(_present(name), self._asked(rule, place.at(name)), lambda: True))

    def _asked(self, node: Any, place: SchemaLocation) -> Callable[[], Schema]:
        return cache(partial(self._context.positive, node, place, frozenset({"object"})))

    def _require(self, test: Test) -> None:
        self._rules.append(Rule(test, lambda: True, lambda: False))

    @property
    def num_rules(self) -> int:
        """Rules so far."""
        return len(self._rules)

    def test(self, node: Any, place: SchemaLocation, depth: int = 0) -> Test | None:
        """The condition as a decision over properties; None when it is more than that."""
        if isinstance(node, bool):
            return lambda known: node
        if not isinstance(node, dict) or depth > 8:
            return None
        tests: list[Test] = []
        for keyword, value in node.items():
            found = self._keyword(keyword, value, node, place, depth)
            if found is None:
                return None
            tests += found
        return lambda known: _all(tests, known)

    def _keyword(
        self, keyword: str, value: Any, node: dict[str, Any], place: SchemaLocation, depth: int
    ) -> list[Test] | None:
        found: list[Test | None] = []
        match keyword:
            case "required" if isinstance(value, list):
                found = [_present(name) for name in value]
            case "properties" if isinstance(value, dict):
                found = [
                    self._property(name, rule, place.at("properties", name), depth)
                    for name, rule in value.items()
                ]
            case "allOf" | "anyOf" if isinstance(value, list):
                parts = [self.test(each, place, depth + 1) for each in value]
                if any(part is None for part in parts):
                    return None
                join = _all if keyword == "allOf" else _any
                found = [lambda known: join([part for part in parts if part is not None], known)]
            case "not":
                inner = self.test(value, place, depth + 1)
                found = [None if inner is None else _negated(inner)]
            case "type" if value in ("object", ["object"]):
                pass
            case _ if keyword in _ANNOTATIONS:
                pass
            case _:
                return None
        return None if any(each is None for each in found) else [each for each in found if each is not None]

    def _property(self, name: str, rule: Any, place: SchemaLocation, depth: int) -> Test | None:
        """The property is absent, or its value is (or is not) one of a list."""
        if isinstance(rule, bool):
            return (lambda known: True) if rule else _negated(_present(name))
        if not isinstance(rule, dict):
            return None
        constraints = {key: value for key, value in rule.items() if key not in _ANNOTATIONS}
        if set(constraints) == {"not"}:
            inner = self._property(name, constraints["not"], place, depth + 1)
            if inner is None:
                return None
            present, negated = _present(name), _negated(inner)
            return lambda known: _any([_negated(present), negated], known)
        values = [constraints["const"]] if "const" in constraints else constraints.get("enum")
        if not isinstance(values, list) or not set(constraints) <= {"const", "enum", "type"}:
            return None
        types = self._context.types_of(rule, place)
        keys = {key_of(value): value for value in values if type_of_value(value) in types}
        listed = self._values.setdefault(name, {})
        listed.update(keys)
        return lambda known: (known[name] == ABSENT or known[name] in keys) if name in known else name

    def union(self) -> Schema | None:
        """The cases, or None when they are too many."""
        if sum(map(len, self._values.values())) > _MAX_VALUES:
            return None
        try:
            leaves = self._split({}, self._rules, ())
        except _TooMany:
            return None
        return any_of(all_of([self._described(cells), *outcome]) for cells, outcome in leaves)

    def _split(self, known: Known, open_rules: list[Rule], decided: tuple[Schema, ...]) -> list[_Leaf]:
        remaining: list[Rule] = []
        # Not "" for none: that is a name, too.
        asked: str | None = None
        for rule in open_rules:
            verdict = rule.test(known)
            if isinstance(verdict, str):
                asked = verdict if asked is None else asked
                remaining.append(rule)
                continue
            outcome = rule.then() if verdict else rule.otherwise()
            if outcome is False:
                return []
            if outcome is not True:
                decided = (*decided, outcome)
        if asked is None:
            self._num_leaves += 1
            if self._num_leaves > _MAX_CASES * 8:
                raise _TooMany
            return [({}, decided)]
        # Values of the asked property that lead to the same further cases are one case.
        groups: list[tuple[set[str], list[_Leaf]]] = []
        for cell in [ABSENT, *self._values.get(asked, {}), OTHER]:
            leaves = self._split({**known, asked: cell}, remaining, decided)
            for cells, others in groups:
                if _same_leaves(leaves, others):
                    cells.add(cell)
                    break
            else:
                groups.append(({cell}, leaves))
        if len(groups) == 1:
            return groups[0][1]
        merged = [
            ({asked: frozenset(cells), **others}, outcome)
            for cells, leaves in groups
            for others, outcome in leaves
        ]
        if len(merged) > _MAX_CASES:
            raise _TooMany
        return merged

    def _described(self, cells: dict[str, frozenset[str]]) -> Schema:
        properties: dict[str, Schema] = {}
        required = []
        for name, possible in cells.items():
            listed = self._values.get(name, {})
            if ABSENT not in possible:
                required.append(name)
            if possible == {ABSENT}:
                properties[name] = False
            elif OTHER not in possible:
                properties[name] = {"enum": [value for key, value in listed.items() if key in possible]}
            else:
                excluded = [value for key, value in listed.items() if key not in possible]
                if excluded:
                    outside = self._context.negative({"enum": excluded}, SchemaLocation("", ""), ALL_TYPES)
                    properties[name] = outside
        schema: dict[str, Schema] = {"type": "object"}
        schema |= {"properties": properties} if properties else {}
        schema |= {"required": required} if required else {}
        return schema


class Gathered:
    """Keywords and members of allOf that `union` stands for."""

    def __init__(self) -> None:
        self.keywords: set[str] = set()
        self.members: set[int] = set()
        self.union: Schema = True


def gather(context: Context, node: dict[str, Any], place: SchemaLocation) -> Gathered:
    """Takes the conditions of an object's schema, and of its allOf, that are decided by finite cases."""
    cases, taken = Cases(context), Gathered()
    taken.keywords = cases.take(node, place)
    for index, each in enumerate(node.get("allOf", ())):
        if isinstance(each, dict) and not set(each) - _CONDITIONAL - _ANNOTATIONS:
            keywords = cases.take(each, place.at("allOf", index))
            if keywords >= set(each) - _ANNOTATIONS:
                taken.members.add(index)
            elif keywords:
                # Half of it cannot be taken: leave everything to the general way.
                return Gathered()
    if cases.num_rules < 2 and "oneOf" not in taken.keywords:
        return Gathered()
    taken.union = cases.union()
    return Gathered() if taken.union is None else taken


def _exactly_one(tests: list[Test], known: Known) -> Verdict:
    asked: str | None = None
    matched = 0
    for test in tests:
        verdict = test(known)
        if isinstance(verdict, str):
            asked = verdict if asked is None else asked
        else:
            matched += verdict
    if matched > 1:
        return False
    return asked if asked is not None else matched == 1


def _same_leaves(one: list[_Leaf], other: list[_Leaf]) -> bool:
    return len(one) == len(other) and all(
        first[0] == second[0]
        and len(first[1]) == len(second[1])
        and all(a is b for a, b in zip(first[1], second[1], strict=True))
        for first, second in zip(one, other, strict=True)
    )


_CONDITIONAL = frozenset(
    {"if", "then", "else", "not", "oneOf", "dependencies", "dependentRequired", "dependentSchemas"}
)
_DEPENDENCIES = {
    "dependencies": Draft.DRAFT4,
    "dependentRequired": Draft.DRAFT2019_09,
    "dependentSchemas": Draft.DRAFT2019_09,
}
_ANNOTATIONS = frozenset({"title", "description", "$comment", "default", "examples", "readOnly", "writeOnly"})


def _present(name: str) -> Test:
    return lambda known: known[name] != ABSENT if name in known else name


def _negated(test: Test) -> Test:
    def result(known: Known) -> Verdict:
        verdict = test(known)
        return verdict if isinstance(verdict, str) else not verdict

    return result


def _all(tests: list[Test], known: Known) -> Verdict:
    return _decided(tests, known, by=False)


def _any(tests: list[Test], known: Known) -> Verdict:
    return _decided(tests, known, by=True)


def _decided(tests: list[Test], known: Known, *, by: bool) -> Verdict:
    """What one verdict of `by` decides; else the property that is to be known first, if there is one."""
    asked: Verdict = not by
    for test in tests:
        verdict = test(known)
        if verdict is by:
            return by
        if isinstance(verdict, str) and not isinstance(asked, str):
            asked = verdict
    return asked
