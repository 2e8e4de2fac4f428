"""Arguments that a format writes as plain text become JSON of the type that the tool's schema asks for."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from typing import Any

from contract.argument_types import JSON_TYPES, kinds_of, property_of
from contract.chat import Tool

_TEXT = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}


class ToolTypes:
    """JSON types of the arguments of a request's tools."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool.parameters_json for tool in tools}
        # Names of those whose calls may also be read where no grammar leads them.
        self.not_strict = tuple(tool.name for tool in tools if not tool.strict)
        self._schemas: dict[str, Any] = {}

    def knows(self, name: str) -> bool:
        """Whether there is such a tool; with no tools at all, every name passes."""
        return not self._tools or name in self._tools

    def kinds(self, name: str, key: str) -> frozenset[str]:
        """What the argument may be; empty: anything."""
        if name not in self._schemas:
            self._schemas[name] = _schema(self._tools.get(name, ""))
        root = self._schemas[name]
        return kinds_of(property_of(root, root, key), root)

    def written(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Arguments as JSON text; texts of what shall be none are read. Raises ValueError for values that
        JSON does not have.
        """
        typed = {
            key: json.loads(typed_value(value, self.kinds(name, key))) if isinstance(value, str) else value
            for key, value in arguments.items()
        }
        said = json.dumps(typed, ensure_ascii=False, allow_nan=False)
        # Escapes may write the halves of a surrogate pair; one alone is no text.
        return said.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def is_text(kinds: frozenset[str]) -> bool:
    """Whether a value of these types can be nothing but a text."""
    return kinds == _TEXT


def typed_value(text: str, kinds: frozenset[str]) -> str:
    """JSON text of the first of the types that `text` is; a text where it is none of them."""
    written = text.strip()
    if not is_text(kinds) and _fits(written, kinds):
        return written
    if not is_text(kinds):
        said = _literal(written)
        if said and _fits(said, kinds):
            return said
    return json.dumps(text, ensure_ascii=False)


def _fits(text: str, kinds: frozenset[str]) -> bool:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    kind = JSON_TYPES[type(value)]
    if not kinds:
        return kind != "string"
    others = kinds - _TEXT
    whole = isinstance(value, float) and value.is_integer() and "integer" in others
    return kind in others or (kind == "integer" and "number" in others) or whole


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _literal(text: str) -> str:
    """JSON text of a value as Python writes it (True, None, {'a': 1}), and with it Qwen's templates; "" where
    it is none, or JSON has no such value, as with sets, bytes and halves of a surrogate pair.
    """
    if text in _WORDS:
        return _WORDS[text]
    if text[:1] not in ("{", "["):
        return ""
    try:
        said = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
        said.encode()
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""
    return said


def _schema(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except ValueError:
        return {}
