"""Grammars of arguments that a format writes one by one, not as one JSON object.

Each is led by its own schema: texts stand between marks as they are, what is no text is JSON. Used by
`tokenizer_svc.grammar.tools`, which knows what stands around the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from contract.argument_types import kinds_of, target_of
from contract.formats import BracedForm, TaggedForm
from contract.grammar import KeywordStatus

# Keywords that say nothing of values, or that hold by the way in which a text is written.
_HELD = frozenset({"type", "enum", "const", "minLength", "maxLength", "nullable", "$ref", "anyOf", "oneOf"})
_SILENT = frozenset({"title", "description", "default", "examples", "deprecated", "$comment", "$schema"})
_IN_BRACES = frozenset({"items", "properties", "required", "additionalProperties", "$defs", "definitions"})
_TEXT = frozenset({"string"})
# Bounds of a text's length that are held.
_MAX_LENGTH = 1000
# References are followed so far.
_MAX_REFERENCES = 16
_WHY = "the model's format writes this value as plain text"

# Lark of a value that is JSON by a schema, at a place of the tool's schema; see `tools`.
JsonRule = Callable[[Any, str], str]
Literal = Callable[[str], str]


class PlainArguments:
    """The arguments of one tool: rules of Lark, and what they do not enforce."""

    def __init__(
        self,
        index: int,
        schema: dict[str, Any],
        json_rule: JsonRule,
        literal: Literal,
        shared: dict[str, str],
    ) -> None:
        """`shared` are symbols of texts by how these are written, for all tools."""
        self._index = index
        self._root = schema
        self._json = json_rule
        self._literal = literal
        self._shared = shared
        self._by_reference: dict[str, str] = {}
        self._num_names = 0
        self.rules: list[str] = []
        # Keywords of texts that nothing enforces.
        self.unenforced: list[KeywordStatus] = []
        object_ = schema if "properties" in schema else (target_of(schema, schema) or schema)
        self._properties: dict[str, Any] = object_.get("properties") or {}
        self._required = _required(object_)
        # Nothing is said of the arguments, and there may be some.
        self._is_free = not self._properties and schema.get("additionalProperties") is not False

    def tagged(self, form: TaggedForm) -> str:
        """The rule of all arguments between marks, each on a line."""
        if self._is_free:
            return self._rule(f"({self._tagged_item(self._key(), {}, '', form)})*")
        items = []
        for key, schema in self._properties.items():
            item = self._tagged_item(self._literal(key), schema, f"/properties/{_pointer(key)}", form)
            items.append(item if key in self._required else f"({item})?")
        return self._rule(" ".join(items))

    def _tagged_item(self, key: str, schema: Any, path: str, form: TaggedForm) -> str:
        kinds, value = self._tagged_value(schema, path, form)
        return tagged_argument(key, kinds, value, form, self._literal)

    def _tagged_value(self, schema: Any, path: str, form: TaggedForm) -> tuple[tuple[str, ...], str]:
        """(whether it is a text: "true", "false", or either; the rule of the value and what closes it)."""
        kinds = kinds_of(schema, self._root)
        if kinds and not kinds & _TEXT:
            return ("false",), f"{self._json(schema, path)} {self._literal(form.pad + form.value_close)}"
        self._note(schema, path)
        found = self._resolved(schema)
        words = ("true",) if kinds == _TEXT else ("true", "false")
        values = _values(found)
        if values is None:
            return words, self._text(found, form.pad + form.value_close)
        texts = (self._literal(value if isinstance(value, str) else _json(value)) for value in values)
        return words, f"({' | '.join(texts)}) {self._literal(form.pad + form.value_close)}"

    def _resolved(self, schema: Any) -> Any:
        """The schema with what it refers to."""
        for _ in range(_MAX_REFERENCES):
            target = target_of(schema, self._root) if isinstance(schema, dict) else None
            if not isinstance(target, dict):
                break
            schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
        return schema

    def pythonic(self) -> str:
        """The rule of arguments as Python writes them; JSON's values are taken for Python's."""
        if self._is_free:
            item = self._rule(f'{self._key()} "=" {self._json({}, "")}')
            return self._rule(f'({item} (", " {item})*)?')
        items = {
            key: f"{self._literal(key + '=')} {self._json(schema, f'/properties/{_pointer(key)}')}"
            for key, schema in self._properties.items()
        }
        return self._separated(items, self._required, ", ")

    def braced(self, form: BracedForm) -> str:
        """The rule of arguments in braces, by their keys, as the templates sort them."""
        if self._is_free:
            item = self._rule(f'{self._key()} ":" {self._braced_value({}, form, "")}')
            return self._rule(f'({item} ("," {item})*)?')
        return self._members(self._properties, self._required, form, "")

    def _members(self, properties: Mapping[str, Any], required: Any, form: BracedForm, path: str) -> str:
        items = {
            key: f"{self._literal(key + ':')} "
            + self._braced_value(properties[key], form, f"{path}/properties/{_pointer(key)}")
            for key in sorted(properties)
        }
        return self._separated(items, frozenset(required), ",")

    def _braced_value(self, schema: Any, form: BracedForm, path: str) -> str:
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(reference, str):
            if reference not in self._by_reference:
                name = self._by_reference[reference] = self._name()
                made = self._braced_value(target_of(schema, self._root) or {}, form, path)
                self.rules.append(f"{name}: {made}")
            return self._by_reference[reference]
        self._note(schema, path, _IN_BRACES)
        quote = self._literal(form.quote)
        values = _values(schema)
        if values is not None:
            texts = [
                f"{quote} {self._literal(value)} {quote}"
                if isinstance(value, str)
                else self._literal(_json(value))
                for value in values
            ]
            return self._rule(" | ".join(texts))
        alternatives = [
            self._braced_value(part, form, path)
            for word in ("anyOf", "oneOf")
            for part in (schema.get(word) or () if isinstance(schema, dict) else ())
        ]
        if alternatives:
            return self._rule(" | ".join(alternatives))
        kinds = kinds_of(schema, self._root) or frozenset({"string", "number", "boolean", "null"})
        return self._rule(" | ".join(self._of_kind(kind, schema, form, path) for kind in sorted(kinds)))

    def _of_kind(self, kind: str, schema: Any, form: BracedForm, path: str) -> str:
        quote = self._literal(form.quote)
        if kind == "string":
            return f"{quote} {self._text(schema, form.quote)}"
        if kind == "array":
            item = self._braced_value(schema.get("items", {}), form, f"{path}/items")
            return f'"[" ({item} ("," {item})*)? "]"'
        if kind == "object":
            properties = schema.get("properties") or {}
            return f'"{{" {self._members(properties, _required(schema), form, path)} "}}"'
        return self._json({**schema, "type": kind} if isinstance(schema, dict) else {"type": kind}, path)

    def _key(self) -> str:
        """The name of an argument of which the schema says nothing."""
        name = self._name().upper()
        self.rules.append(f"{name}: /[a-zA-Z_][a-zA-Z0-9_]*/")
        return name

    def _separated(self, items: Mapping[str, str], required: frozenset[str], separator: str) -> str:
        """Items in their order with a separator between those that are there."""
        keys = list(items)
        rest = ""
        alternatives: list[str] = []
        between = self._literal(separator)
        for key in reversed(keys):
            first = f"{items[key]} {rest}"
            # What begins behind a required one is none.
            alternatives = [first] if key in required else [first, *alternatives]
            item = f"{between} {items[key]}"
            rest = self._rule(f"{item if key in required else f'({item})?'} {rest}")
        if not required:
            alternatives.append("")
        return self._rule(" | ".join(alternatives)) if keys else ""

    def _text(self, schema: Any, close: str) -> str:
        """Any text up to its closing mark, of a length that the schema allows, and the mark."""
        least, most = (_length(schema, word) for word in ("minLength", "maxLength"))
        length = f"{{{least or 0},{'' if most is None else most}}}" if least or most is not None else "*"
        key = f"{length} {close}"
        if key not in self._shared:
            self._shared[key] = self._new_text(length, close, is_optional=not least)
        return self._shared[key]

    def _new_text(self, length: str, close: str, *, is_optional: bool) -> str:
        mark, name = self._literal(close), self._name()
        if not mark.startswith("<["):
            self.rules.append(f"{name}[lazy]: /(?s:.{length})/ {mark}")
            return name
        escaped = re.escape(close).replace("/", r"\/")
        self.rules.append(f"{name.upper()}: /(?s:.{length})/ & /(?s:.+)/ & ~/(?s:.*{escaped}.*)/")
        return f"{name.upper()}{'?' if is_optional else ''} {mark}"

    def _rule(self, body: str) -> str:
        if not body.strip():
            return ""
        name = self._name()
        self.rules.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        self._num_names += 1
        return f"part_{self._index}_{self._num_names}"

    def _note(self, schema: Any, path: str, also: frozenset[str] = frozenset()) -> None:
        """Puts down which keywords of a text do not hold."""
        schema = self._resolved(schema)
        for keyword in schema if isinstance(schema, dict) else ():
            too_long = keyword in ("minLength", "maxLength") and _length(schema, keyword) is None
            if too_long or keyword not in _HELD | _SILENT | also:
                self.unenforced.append(KeywordStatus(keyword, f"{path}/{keyword}", _WHY))
            elif keyword in ("anyOf", "oneOf") and not also:
                for index, part in enumerate(schema[keyword]):
                    self._note(part, f"{path}/{keyword}/{index}")


def tagged_argument(key: str, kinds: tuple[str, ...], value: str, form: TaggedForm, literal: Literal) -> str:
    """One argument between marks, on a line; `value` holds the mark behind it."""
    kind = f"{literal(form.kind)} ({' | '.join(map(literal, kinds))})" if form.kind else ""
    between = f'"\\n"? {literal(form.value_open)}' if form.value_open else ""
    opens = f"{literal(form.key_open)} {key} {kind} {literal(form.key_close)}"
    return f'{opens} {between} {literal(form.pad)} {value} "\\n"?'


def _required(schema: dict[str, Any]) -> frozenset[str]:
    listed = schema.get("required")
    properties = schema.get("properties") or {}
    return frozenset(key for key in properties if isinstance(listed, list) and key in listed)


def _length(schema: Any, keyword: str) -> int | None:
    """A bound that can be held; None without one."""
    value = schema.get(keyword) if isinstance(schema, dict) else None
    return int(value) if isinstance(value, int | float) and 0 <= value <= _MAX_LENGTH else None


def _values(schema: Any) -> list[Any] | None:
    if not isinstance(schema, dict):
        return None
    listed = schema.get("enum")
    if isinstance(listed, list):
        return listed
    return [schema["const"]] if "const" in schema else None


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _pointer(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")
