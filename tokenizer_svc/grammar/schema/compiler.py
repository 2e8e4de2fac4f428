"""One schema in, one schema that llguidance enforces out, with the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jsonschema_rs
import msgspec

from tokenizer_svc.grammar.schema.back_end_numbers import (
    BOUNDS,
    ROUNDED,
    is_rounded,
    with_bounds,
    without_rounded,
)
from tokenizer_svc.grammar.schema.back_end_patterns import PATTERNS, for_back_end
from tokenizer_svc.grammar.schema.context import Context, Place, TooLarge
from tokenizer_svc.grammar.schema.document import Document
from tokenizer_svc.grammar.schema.negative import negative
from tokenizer_svc.grammar.schema.positive import positive
from tokenizer_svc.grammar.schema.shapes import ALL_TYPES, Schema
from tokenizer_svc.types import EnforcementReport, KeywordStatus

# White space in an answer: a space after a colon or comma, or none. Wherever more is allowed, a name's
# closing quote alone is a token to be drawn, which no model has seen without its colon, and a weak one gets
# lost.
LAYOUT = {"whitespace_flexible": False, "item_separator": r",\x20?", "key_separator": r":\x20?"}

_META = jsonschema_rs.Draft202012Validator({"$ref": "https://json-schema.org/draft/2020-12/schema"})
# Keywords whose values have the same shape in every draft; elsewhere older forms are understood.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("enum", "allOf", "anyOf", "oneOf")
_SHAPED = frozenset(
    {*_MAPS, *_LISTS, "pattern", "multipleOf", "minLength", "maxLength", "minItems", "maxItems"}
)


class SchemaRefused(Exception):
    """The schema cannot be enforced as asked; the message names keyword and path."""

    def __init__(self, message: str, enforcement: EnforcementReport | None = None) -> None:
        super().__init__(message)
        self.enforcement = enforcement


class CompiledSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A schema for llguidance, and what it enforces of the one that was asked for."""

    schema: Schema
    enforcement: EnforcementReport


def compile_schema(
    schema: Any, *, strict: bool, max_depth: int, left_out: Mapping[str, str] | None = None
) -> CompiledSchema:
    """Raises SchemaRefused for what is no schema, and when strict and not everything can be enforced.

    `left_out` has the paths of keywords that shall not be enforced, with the reason that the report gives.
    """
    if not isinstance(schema, dict | bool):
        raise SchemaRefused("a JSON schema is an object or a boolean")
    try:
        document = Document(schema, max_depth=max_depth)
        _check_shapes(schema)
        context = Context(document, left_out)
        context.positive = lambda *a: positive(context, *a)
        context.negative = lambda *a: negative(context, *a)
        rewritten = context.positive(schema, Place("", document.base), ALL_TYPES)
        used = _used_words([rewritten, *context.definitions.values()])
        if used.is_rounded:
            rewritten, _ = without_rounded(rewritten)
            for name, definition in context.definitions.items():
                context.definitions[name], _ = without_rounded(definition)
            if not context.approximated:
                context.approximate("enum", Place("", document.base), ROUNDED)
        endless = document.endless_reference()
        if endless:
            raise SchemaRefused(
                f"$ref {endless!r} leads back to itself without end; give it something to match"
            )
    except TooLarge as error:
        raise SchemaRefused(str(error)) from error
    except RecursionError as error:
        raise SchemaRefused("the schema is nested too deeply, or refers to itself without end") from error
    except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        # Keywords with values of the wrong type; what is well-formed does not come here.
        raise SchemaRefused(f"the schema is malformed: {_malformed(schema)}") from error
    report = _report(context)
    if strict and not report.exact:
        status = (report.unenforced + report.approximated)[0]
        more = len(report.unenforced) + len(report.approximated) - 1
        raise SchemaRefused(
            f"{status.keyword} at {status.path} cannot be enforced exactly: {status.note}"
            + (f" (and {more} more)" if more else "")
            + "; change the schema, or set strict to false and check the answer",
            report,
        )
    schema = _assembled(rewritten, context.definitions)
    if not used.words.isdisjoint(BOUNDS):
        schema = with_bounds(schema)
    if not used.words.isdisjoint(PATTERNS):
        schema = for_back_end(schema)
    return CompiledSchema(schema=schema, enforcement=report)


class _Used(NamedTuple):
    """What finished schemas hold: keywords (and properties' names), and whether a listed value is rounded."""

    words: set[str]
    is_rounded: bool


def _used_words(schemas: Iterable[Schema]) -> _Used:
    """One look at large schemas instead of a copy for each thing that most of them have nothing of."""
    words: set[str] = set()
    rounded = False
    pending: list[Any] = list(schemas)
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            words.update(node)
            if "enum" in node or "const" in node:
                rounded = rounded or is_rounded([node.get("enum"), node.get("const")])
            pending += [each for each in node.values() if isinstance(each, dict | list)]
        elif isinstance(node, list):
            pending += [each for each in node if isinstance(each, dict | list)]
    return _Used(words, rounded)


def _check_shapes(schema: Any) -> None:
    """Refuses keywords that would otherwise be passed over because their value is of the wrong type."""
    for error in _META.iter_errors(schema):
        keywords = [step for step in error.instance_path if isinstance(step, str)]
        if keywords and keywords[-1] in _SHAPED:
            where = "/".join(map(str, error.instance_path))
            raise SchemaRefused(f"the schema is malformed: {error.message} at /{where}")


def _malformed(schema: Any) -> str:
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        return f"{error.message} at /{'/'.join(map(str, error.instance_path))}"
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        return str(error)
    return "a keyword has a value of the wrong type"


def _assembled(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    if schema is False:
        raise SchemaRefused("no value matches the schema")
    if schema is True:
        schema = {}
    used = _used(schema, definitions)
    if used:
        schema = {**schema, "$defs": {name: definitions[name] for name in sorted(used)}}
    return {**schema, "x-guidance": LAYOUT}


def _used(schema: Schema, definitions: dict[str, Schema]) -> set[str]:
    used: set[str] = set()
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            reference = node.get("$ref")
            if isinstance(reference, str) and reference.startswith("#/$defs/"):
                name = reference.removeprefix("#/$defs/")
                if name not in used:
                    used.add(name)
                    pending.append(definitions[name])
            pending.extend(node.values())
        elif isinstance(node, list):
            pending.extend(node)
    return used


def _report(context: Context) -> EnforcementReport:
    missing = {*context.unenforced, *context.approximated}
    enforced = []
    for keyword, (path, count) in context.keywords.items():
        if (keyword, path) not in missing:
            note = f"and {count - 1} more" if count > 1 else ""
            enforced.append(KeywordStatus(keyword, path, note))
    return EnforcementReport(
        enforced=tuple(enforced),
        approximated=tuple(context.approximated.values()),
        unenforced=tuple(context.unenforced.values()),
    )
