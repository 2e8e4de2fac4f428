"""One schema in, one schema that llguidance enforces out, with the report."""

from __future__ import annotations

from typing import Any

import msgspec

from tokenizer_svc.types import EnforcementReport


class SchemaRefused(Exception):
    """The schema cannot be enforced as asked; the message names keyword and path."""

    def __init__(self, message: str, enforcement: EnforcementReport | None = None) -> None:
        super().__init__(message)
        self.enforcement = enforcement


class CompiledSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema for llguidance, and what it enforces of the one that was asked for."""

    schema: Any
    enforcement: EnforcementReport


def compile_schema(schema: Any, *, strict: bool, max_depth: int) -> CompiledSchema:
    """Raises SchemaRefused when strict and not everything can be enforced exactly."""
    if not isinstance(schema, dict | bool):
        raise SchemaRefused("a JSON schema is an object or a boolean")
    return CompiledSchema(schema=schema, enforcement=EnforcementReport())
