"""What the rewriting of one schema shares: the document, definitions made so far, problems found."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from contract.grammar import KeywordStatus
from tokenizer_svc.grammar.schema.back_end_numbers import (
    BEYOND,
    BOUNDS,
    MOVED,
    ROUNDED,
    is_beyond,
    is_moved,
    is_rounded,
)
from tokenizer_svc.grammar.schema.document import RefTarget, SchemaDocument
from tokenizer_svc.grammar.schema.shapes import ALL_TYPES, Schema, list_of, type_of_value, types_of_keyword

# Rewriting may multiply; beyond this many nodes the schema is refused.
MAX_NODES = 60_000
_MAX_LOOK = 8
_NUMERIC = frozenset({"const", "enum", *BOUNDS})
# Keywords beside `type` that tell which types a value may have.
_NARROWING = frozenset({"const", "enum", "$ref", "allOf", "anyOf", "oneOf"})


class TooLarge(Exception):
    """The rewritten schema has too many nodes."""


class SchemaLocation(msgspec.Struct, eq=False, gc=False):
    """Where a schema stands: its JSON pointer, and the base of references in it.

    Few pointers are ever asked for, so they are put together when they are.
    """

    _pointer: str | None
    base: str
    # For a pointer that is not put together: the place around it, and the steps from there.
    _around: SchemaLocation | None = None
    _steps: tuple[str | int, ...] = ()

    def at(self, *keys: str | int) -> SchemaLocation:
        """The place of a sub-schema."""
        return SchemaLocation(None, self.base, self, keys)

    def under(self, base: str) -> SchemaLocation:
        """The same place where other references apply."""
        return self if base == self.base else SchemaLocation(None, base, self)

    @property
    def path(self) -> str:
        """The JSON pointer."""
        if self._pointer is None:
            steps: list[tuple[str | int, ...]] = []
            place = self
            while place._pointer is None and place._around is not None:
                steps.append(place._steps)
                place = place._around
            keys = (str(key) for part in reversed(steps) for key in part)
            escaped = (key.replace("~", "~0").replace("/", "~1") for key in keys)
            self._pointer = "/".join((place._pointer or "", *escaped))
        return self._pointer


class _Met(msgspec.Struct):
    """Where a keyword stands first, and how often it occurs."""

    path: str
    count: int = 1


# (schema, place, types that can occur here) → schema for the back end.
Rewrite = Callable[[Any, SchemaLocation, frozenset[str]], Schema]


# The same with the context, as the functions are written that rewrite.
Rewriter = Callable[["Context", Any, SchemaLocation, frozenset[str]], Schema]


class Context:
    """Everything that the rewriting functions share."""

    def __init__(
        self,
        document: SchemaDocument,
        *,
        positive: Rewriter,
        negative: Rewriter,
        left_out: Mapping[str, str] | None = None,
        keeps_numbers: bool = False,
    ) -> None:
        """`keeps_numbers`: those that the back end would round stay as they are, and are not noted."""
        self.document = document
        self._keeps_numbers = keeps_numbers
        # Paths of keywords that are left out, with the note that the report shall have.
        self._left_out = left_out or {}
        # Finished and open definitions by name; open ones are None.
        self.definitions: dict[str, Schema] = {}
        self.unenforced: dict[tuple[str, str], KeywordStatus] = {}
        self.approximated: dict[tuple[str, str], KeywordStatus] = {}
        self.keywords: dict[str, _Met] = {}
        self._names: dict[tuple[str, str, frozenset[str]], str] = {}
        self._open: set[str] = set()
        # By the node's id, with the node: an id is another node's once that is gone.
        self._types: dict[int, tuple[dict[str, Any], frozenset[str]]] = {}
        # Which branches of oneOf exclude each other: (path of the first, index of the second).
        self.apart: dict[tuple[str, int], bool] = {}
        # References followed while negating beside something known.
        self.depth_of_given = 0
        self._num_nodes = 0
        self._positive, self._negative = positive, negative

    def positive(self, node: Any, place: SchemaLocation, types: frozenset[str]) -> Schema:
        """The schema for the back end. Only values of `types` can occur here."""
        return self._positive(self, node, place, types)

    def negative(self, node: Any, place: SchemaLocation, types: frozenset[str]) -> Schema:
        """A schema that, among values of `types`, admits those that `node` does not."""
        return self._negative(self, node, place, types)

    def count(self) -> None:
        """Counts one rewritten node; raises TooLarge."""
        self._num_nodes += 1
        if self._num_nodes > MAX_NODES:
            raise TooLarge(f"rewriting the schema needs more than {MAX_NODES} parts")

    def met(self, keyword: str, place: SchemaLocation) -> None:
        """Notes that a constraint was seen."""
        known = self.keywords.get(keyword)
        if known is None:
            self.keywords[keyword] = _Met(f"{place.path}/{keyword}")
        else:
            known.count += 1

    def give_up(self, keyword: str, place: SchemaLocation, note: str) -> Schema:
        """Leaves `keyword` out: everything is accepted in its place, and the report says so."""
        path = f"{place.path}/{keyword}"
        self.unenforced.setdefault((keyword, path), KeywordStatus(keyword, path, note))
        return True

    def unwritable(self, node: dict[str, Any], place: SchemaLocation) -> set[str]:
        """The node's keywords that are to be left out, which the report says then; and what cannot be told
        without them.
        """
        if not self._left_out:
            return set()
        paths = {keyword: f"{place.path}/{keyword}" for keyword in node}
        notes = {keyword: self._left_out[path] for keyword, path in paths.items() if path in self._left_out}
        if "patternProperties" in notes:
            # Names that match are no others.
            others = ("additionalProperties", "unevaluatedProperties")
            beside = [keyword for keyword in others if keyword in node]
            notes.update(dict.fromkeys(beside, "patternProperties beside it is not enforced"))
        for keyword, note in notes.items():
            self.give_up(keyword, place, note)
        return set(notes)

    def approximate(self, keyword: str, place: SchemaLocation, note: str) -> None:
        """Notes that not the same is accepted as `keyword` says."""
        path = f"{place.path}/{keyword}"
        self.approximated.setdefault((keyword, path), KeywordStatus(keyword, path, note))

    def look_for_rounded(self, node: dict[str, Any], place: SchemaLocation) -> None:
        """Notes listed values and bounds that the back end would change, or has no numbers for."""
        if self._keeps_numbers or _NUMERIC.isdisjoint(node):
            return
        for keyword in ("const", "enum"):
            if keyword in node and is_rounded(node[keyword]):
                self.approximate(keyword, place, ROUNDED)
        for keyword in BOUNDS:
            if keyword in node and is_beyond(keyword, node[keyword]):
                self.give_up(keyword, place, BEYOND)
            elif keyword in node and is_moved(keyword, node[keyword]):
                self.approximate(keyword, place, MOVED)

    def resolve(self, reference: str, place: SchemaLocation) -> RefTarget | None:
        """The target; None when there is none."""
        return self.document.resolve(reference, place.base)

    def enter(self, node: Any, place: SchemaLocation) -> SchemaLocation:
        """`place` with the base that applies inside `node`."""
        return place.under(self.document.base_of(node, place.base))

    def conjuncts(self, node: dict[str, Any], place: SchemaLocation) -> list[tuple[Any, SchemaLocation]]:
        """Schemas that hold besides, in an entered place: the members of allOf, and what $ref leads to."""
        parts = [(each, place.at("allOf", index)) for index, each in enumerate(list_of(node.get("allOf")))]
        target = self.resolve(node["$ref"], place) if isinstance(node.get("$ref"), str) else None
        if target is not None:
            parts.append((target.node, SchemaLocation(target.path, target.base)))
        return parts

    def define(self, target: RefTarget, kind: str, types: frozenset[str], rewrite: Rewrite) -> str:
        """Name of the definition that holds the rewritten target; rewritten once per kind and types."""
        key = (kind, target.path, types)
        name = self._names.get(key)
        if name is None:
            name = f"{kind}{len(self._names)}"
            self._names[key] = name
            self._open.add(name)
            self.definitions[name] = None
            self.definitions[name] = rewrite(target.node, SchemaLocation(target.path, target.base), types)
            self._open.discard(name)
        return name

    def locations(self) -> dict[str, str]:
        """JSON pointers of what the definitions were made from, by their names."""
        return {name: path for (_, path, _), name in self._names.items()}

    def finished(self) -> dict[str, Schema]:
        """The definitions that are rewritten already."""
        return {name: each for name, each in self.definitions.items() if name not in self._open}

    def is_defining(self, target: RefTarget, kind: str, types: frozenset[str]) -> bool:
        """Whether the target is being rewritten at the moment."""
        return self._names.get((kind, target.path, types)) in self._open

    def types_of(self, node: Any, place: SchemaLocation, depth: int = 0) -> frozenset[str]:
        """Types that values of the schema can have; never too few."""
        if node is False:
            return frozenset()
        if not isinstance(node, dict) or depth > _MAX_LOOK:
            return ALL_TYPES
        if _NARROWING.isdisjoint(node):
            return types_of_keyword(node["type"]) if "type" in node else ALL_TYPES
        known = self._types.get(id(node))
        if known is not None:
            return known[1]
        types = self._look(node, self.enter(node, place), depth)
        # Cut short by depth, the answer is still right but larger; only complete ones are kept.
        if depth == 0:
            self._types[id(node)] = (node, types)
        return types

    def _look(self, node: dict[str, Any], place: SchemaLocation, depth: int) -> frozenset[str]:
        types = types_of_keyword(node["type"]) if "type" in node else ALL_TYPES
        if "const" in node:
            types &= {type_of_value(node["const"])}
        if isinstance(node.get("enum"), list):
            types &= {type_of_value(value) for value in node["enum"]}
        for each, inside in self.conjuncts(node, place):
            types &= self.types_of(each, inside, depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if isinstance(node.get(keyword), list):
                branches = enumerate(node[keyword])
                found = (self.types_of(each, place.at(keyword, index), depth + 1) for index, each in branches)
                types &= frozenset().union(*found)
        return types


class SchemaPart(msgspec.Struct):
    """A schema object while it is rewritten keyword by keyword, for values of `types`."""

    context: Context
    node: dict[str, Any]
    place: SchemaLocation
    types: frozenset[str]
    # The keywords that are written so far, and schemas that hold besides.
    out: dict[str, Schema] = {}
    extra: list[Schema] = []

    def met(self, keyword: str) -> None:
        """See Context."""
        self.context.met(keyword, self.place)

    def give_up(self, keyword: str, note: str) -> Schema:
        """See Context."""
        return self.context.give_up(keyword, self.place, note)

    def inside(self, node: Any, *steps: str | int) -> Schema:
        """The schema of an item or property, which stands at these steps from here."""
        return self.context.positive(node, self.place.at(*steps), ALL_TYPES)

    def beside(self, node: Any, *steps: str | int) -> Schema:
        """The schema of the same value, which stands there."""
        return self.context.positive(node, self.place.at(*steps), self.types)

    def outside(self, node: Any, *steps: str | int) -> Schema:
        """What the item or property at these steps is where it breaks its schema."""
        return self.context.negative(node, self.place.at(*steps), ALL_TYPES)

    def unlike(self, node: Any, *steps: str | int) -> Schema:
        """The same value where it breaks the schema that stands there."""
        return self.context.negative(node, self.place.at(*steps), self.types)
