"""A schema document: which draft it speaks, and what its references point to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, NamedTuple
from urllib.parse import quote, unquote, urldefrag, urljoin

import jsonschema_rs

# Keywords whose values are data, not schemas.
_DATA = frozenset({"enum", "const", "default", "examples", "example"})
_CONTAINERS = (dict, list)
_BASE = "http://schema.invalid/"


class Draft(IntEnum):
    """Versions of JSON Schema, in order."""

    DRAFT4 = 4
    DRAFT6 = 6
    DRAFT7 = 7
    DRAFT2019_09 = 2019
    DRAFT2020_12 = 2020


DRAFTS = {
    "http://json-schema.org/draft-04/schema": Draft.DRAFT4,
    "http://json-schema.org/draft-06/schema": Draft.DRAFT6,
    "http://json-schema.org/draft-07/schema": Draft.DRAFT7,
    "https://json-schema.org/draft/2019-09/schema": Draft.DRAFT2019_09,
    "https://json-schema.org/draft/2020-12/schema": Draft.DRAFT2020_12,
}


# These judge independently of the back end.
VALIDATORS: dict[Draft, Any] = {
    Draft.DRAFT4: jsonschema_rs.Draft4Validator,
    Draft.DRAFT6: jsonschema_rs.Draft6Validator,
    Draft.DRAFT7: jsonschema_rs.Draft7Validator,
    Draft.DRAFT2019_09: jsonschema_rs.Draft201909Validator,
    Draft.DRAFT2020_12: jsonschema_rs.Draft202012Validator,
}
# First drafts of keywords that older ones do not have; there they are annotations.
SINCE = {
    "contains": Draft.DRAFT6,
    "propertyNames": Draft.DRAFT6,
    "if": Draft.DRAFT7,
    "dependentRequired": Draft.DRAFT2019_09,
    "dependentSchemas": Draft.DRAFT2019_09,
    "unevaluatedProperties": Draft.DRAFT2019_09,
    "unevaluatedItems": Draft.DRAFT2019_09,
    "prefixItems": Draft.DRAFT2020_12,
    "$dynamicRef": Draft.DRAFT2020_12,
    "$recursiveRef": Draft.DRAFT2019_09,
}
# Keywords whose schemas judge the same value.
_BY_NAMES = ("dependentSchemas", "dependencies")
_SAME_LEVEL = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", *_BY_NAMES)
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_LEADING_ON = frozenset({*_REFERENCES, *_SAME_LEVEL})
_WHOLE = "http://schema.invalid/whole"


class RefTarget(NamedTuple):
    """What a reference resolves to: the schema, where it is, and the base of references inside it."""

    node: Any
    path: str
    base: str


class SchemaDocument:
    """Resolves references within one schema. Remote documents are not fetched."""

    def __init__(self, root: Any, *, max_depth: int) -> None:
        self.root = root
        declared = root.get("$schema") if isinstance(root, dict) else None
        name = declared.rstrip("#") if isinstance(declared, str) else ""
        name = name.replace("https://json-schema.org/draft-", "http://json-schema.org/draft-")
        # The third is read as the fourth.
        self.draft = DRAFTS.get(name.replace("draft-03", "draft-04"), Draft.DRAFT2020_12)
        self.base = self.base_of(root, _BASE)
        whole = RefTarget(root, "", self.base)
        self._resources: dict[str, RefTarget] = {_BASE: whole, self.base: whole}
        self._anchors: dict[tuple[str, str], RefTarget] = {}
        # Every reference that was resolved, by the base it stands under.
        self._found: dict[tuple[str, str], RefTarget | None] = {}
        # Identifiers inside the schema are looked for when a reference needs them.
        self._is_indexed = False
        # For the validator; made when it is needed.
        self._registry: Any = None
        _check_depth(root, max_depth)

    def base_of(self, node: Any, base: str) -> str:
        """The base of references inside `node`, which stands where `base` applies."""
        if isinstance(node, dict) and ("$id" in node or "id" in node):
            identifier = node.get("$id", node.get("id") if self.draft is Draft.DRAFT4 else None)
            if isinstance(identifier, str) and not identifier.startswith("#"):
                return urldefrag(urljoin(base, identifier)).url
        return base

    def resolve(self, reference: str, base: str) -> RefTarget | None:
        """The target; None for what points outside the schema, or to nothing."""
        key = (base, reference)
        if key not in self._found:
            self._found[key] = self._resolve(reference, base)
        return self._found[key]

    def is_one_resource(self) -> bool:
        """Whether no part has an identifier of its own, so that a dynamic reference has one target."""
        if not self._is_indexed:
            self._is_indexed = True
            self._index(self.root, "", _BASE)
        return self._resources.keys() <= {_BASE, self.base}

    def endless_reference(self) -> str:
        """A resolved reference that leads back to itself without going into a property or item; else "".

        Such a schema says nothing about any value.
        """
        state: dict[int, bool] = {}
        found = list(self._found.items())
        return next((key[1] for key, target in found if target and self._loops(target, state)), "")

    def _loops(self, target: RefTarget, state: dict[int, bool]) -> bool:
        """Whether the target leads to one that is open; `state` has them by id: open, or known not to."""
        node = target.node
        if not isinstance(node, dict) or _LEADING_ON.isdisjoint(node):
            return False
        if id(node) in state:
            return state[id(node)]
        state[id(node)] = True
        found = any(self._loops(each, state) for each in self._same_level(target))
        state[id(node)] = False
        return found

    def _same_level(self, target: RefTarget) -> Iterator[RefTarget]:
        """The schemas that judge the same value as the target does."""
        node, path = target.node, target.path
        for keyword in _REFERENCES:
            is_known = keyword == "$ref" or (self.draft >= SINCE[keyword] and self.is_one_resource())
            referred = node.get(keyword) if is_known else None
            if isinstance(referred, str) and (leading := self.resolve(referred, target.base)):
                yield leading
        for keyword in _SAME_LEVEL:
            value = node.get(keyword)
            if keyword in _BY_NAMES and isinstance(value, dict):
                value = list(value.values())
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):
                    yield RefTarget(each, f"{path}/{keyword}", self.base_of(each, target.base))

    def matcher(self, path: str) -> Callable[[Any], bool] | None:
        """Decides whether a value matches the schema at `path`; None when a validator cannot be made."""
        try:
            if self._registry is None:
                self._registry = jsonschema_rs.Registry([(_WHOLE, self.root)])
            target = {"$ref": f"{_WHOLE}#{quote(path)}"}
            validator = VALIDATORS[self.draft](target, registry=self._registry, validate_formats=True)
            return validator.is_valid  # type: ignore[no-any-return]
        except (ValueError, jsonschema_rs.ReferencingError):
            return None

    def _resolve(self, reference: str, base: str) -> RefTarget | None:
        # A fragment alone stays in the resource, whatever scheme its address has.
        local = not reference or reference.startswith("#")
        url, fragment = (base, reference[1:]) if local else urldefrag(urljoin(base, reference))
        fragment = unquote(fragment)
        is_anchor = bool(fragment) and not fragment.startswith("/")
        if not self._is_indexed and (url not in self._resources or is_anchor):
            self._is_indexed = True
            self._index(self.root, "", _BASE)
        resource = self._resources.get(url) or self._resources.get(url.rstrip("#"))
        if resource is None or not fragment or fragment == "/":
            return resource
        if is_anchor:
            return self._anchors.get((resource.base, fragment))
        node, path, inner = resource.node, resource.path, resource.base
        for part in fragment[1:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdigit() and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
            path = f"{path}/{part}"
            inner = self.base_of(node, inner)
        return RefTarget(node, path, inner)

    def _index(self, node: Any, path: str, base: str) -> None:
        if isinstance(node, list):
            for index, each in enumerate(node):
                if isinstance(each, dict | list):
                    self._index(each, f"{path}/{index}", base)
            return
        inner = self.base_of(node, base)
        if inner != base:
            self._resources.setdefault(inner, RefTarget(node, path, inner))
        for keyword in ("$anchor", "$dynamicAnchor", "$id", "id"):
            value = node.get(keyword)
            if isinstance(value, str):
                name = value[1:] if value.startswith("#") else value if keyword.endswith("nchor") else ""
                if name:
                    self._anchors.setdefault((inner, name), RefTarget(node, path, inner))
        for key, value in node.items():
            if isinstance(value, dict | list) and key not in _DATA:
                self._index(value, f"{path}/{key}", inner)


def _check_depth(root: Any, max_depth: int) -> None:
    """Raises RecursionError for what is nested more deeply, wherever it stands."""
    level = [root] if isinstance(root, _CONTAINERS) else []
    for _ in range(max_depth + 1):
        level = [
            each
            for node in level
            for each in (node.values() if isinstance(node, dict) else node)
            if isinstance(each, _CONTAINERS)
        ]
        if not level:
            return
    raise RecursionError("the schema is nested too deeply")
