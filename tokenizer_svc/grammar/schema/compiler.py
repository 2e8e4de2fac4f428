"""One schema in, one schema that llguidance enforces out, with the report."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

import jsonschema_rs
import msgspec

from contract.grammar import EnforcementReport, KeywordStatus
from tokenizer_svc.grammar.schema.back_end_numbers import BOUNDS, EXCLUSIVE, NOT_FINITE, ROUNDED, with_bounds
from tokenizer_svc.grammar.schema.back_end_patterns import PATTERNS, with_patterns
from tokenizer_svc.grammar.schema.context import Context, SchemaLocation, TooLarge
from tokenizer_svc.grammar.schema.document import SchemaDocument
from tokenizer_svc.grammar.schema.finished import Contents, with_change, without_rounded
from tokenizer_svc.grammar.schema.negative import negative
from tokenizer_svc.grammar.schema.positive import positive
from tokenizer_svc.grammar.schema.shapes import ALL_TYPES, Schema
from tokenizer_svc.grammar.schema.wide import as_lark

# White space in an answer: a space or none after a colon; after a comma a space, one line break with an
# indentation, or none. Models that write JSON in lines end their lists early where they may not; where more
# is allowed, weak ones get lost in it. The separators say it, because white space that may stand between any
# two parts is repeated without end by the library of other engines (llguidance 1.7).
LAYOUT = {
    "whitespace_flexible": False,
    "item_separator": r",(\x20|\n\x20{0,32})?",
    "key_separator": r":\x20?",
}

_META = jsonschema_rs.Draft202012Validator({"$ref": "https://json-schema.org/draft/2020-12/schema"})
# Keywords whose values have the same shape in every draft; elsewhere older forms are understood.
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("enum", "allOf", "anyOf", "oneOf")
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "maxProperties")
_SHAPED = frozenset({*_MAPS, *_LISTS, *_SIZES, *BOUNDS, "pattern", "multipleOf", "required"})
# Those whose values are passed over where they are of another shape.
_PASSED_OVER = frozenset(
    {"minProperties", "minContains", "maxContains", "uniqueItems", "prefixItems", "format"}
)


class SchemaRefused(Exception):
    """The schema cannot be enforced as asked; the message names keyword and path."""

    def __init__(self, message: str, enforcement: EnforcementReport | None = None) -> None:
        super().__init__(message)
        self.enforcement = enforcement


class CompiledSchema(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar for llguidance, and what it enforces of the schema that was asked for."""

    # A schema, or where this is not empty, Lark.
    schema: Schema
    lark: str = ""
    enforcement: EnforcementReport
    # JSON pointers of what its definitions were made from, by their names.
    locations: Mapping[str, str]

    @property
    def grammar(self) -> dict[str, Any]:
        """As a grammar without its name."""
        return {"lark_grammar": self.lark} if self.lark else {"json_schema": self.schema}


def compile_schema(
    schema: Any, *, strict: bool, max_depth: int, left_out: Mapping[str, str] | None = None
) -> CompiledSchema:
    """Raises SchemaRefused for what is no schema, and when strict and not everything can be enforced.

    `left_out` has the paths of keywords that shall not be enforced, with the reason that the report gives.
    """
    if not isinstance(schema, dict | bool):
        raise SchemaRefused("a JSON schema is an object or a boolean")
    try:
        with _no_collections():
            context, rewritten, contents, lark = _rewritten(schema, max_depth, left_out)
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
    return CompiledSchema(
        schema=_assembled(rewritten, context.definitions, contents),
        lark=lark,
        enforcement=report,
        locations=context.locations(),
    )


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Rewriting makes many objects, hardly any of them in cycles. To look for these goes through all that the
    process has: 30 ms in one of some hundred schemas, where nothing is frozen.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _rewritten(
    schema: Any, max_depth: int, left_out: Mapping[str, str] | None
) -> tuple[Context, Schema, Contents, str]:
    document = SchemaDocument(schema, max_depth=max_depth)
    misshapen = _misshapen(schema)
    place = SchemaLocation("", document.base)
    context = Context(document, positive=positive, negative=negative, left_out=left_out)
    rewritten = context.positive(schema, place, ALL_TYPES)
    contents = Contents(rewritten, context.definitions)
    lark = None
    if contents.is_rounded or contents.is_wide:
        exact = Context(document, positive=positive, negative=negative, left_out=left_out, keeps_numbers=True)
        lark = as_lark(exact.positive(schema, place, ALL_TYPES), exact.definitions, LAYOUT)
        context = context if lark is None else exact
    if contents.is_rounded:
        rewritten = with_change(rewritten, without_rounded)
        for name, definition in context.definitions.items():
            context.definitions[name] = with_change(definition, without_rounded)
        if not context.approximated and not lark:
            context.approximate("enum", place, ROUNDED)
    endless = document.endless_reference()
    if endless:
        raise SchemaRefused(f"$ref {endless!r} leads back to itself without end; give it something to match")
    for keyword, path, note in misshapen:
        context.unenforced.setdefault((keyword, path), KeywordStatus(keyword, path, note))
    return context, rewritten, contents, lark or ""


def _misshapen(schema: Any) -> list[tuple[str, str, str]]:
    """Keywords, places and why: what constrains nothing because its value is of the wrong type.

    Refuses those that nothing can be made of.
    """
    found = []
    for error in _META.iter_errors(schema):
        keywords = [step for step in error.instance_path if isinstance(step, str)]
        keyword, path = keywords[-1] if keywords else "", "/" + "/".join(map(str, error.instance_path))
        if keyword in _PASSED_OVER:
            found.append((keyword, path, error.message))
        elif keyword in _SHAPED:
            *above, _ = error.instance_path
            node = reduce(getitem, above, schema)
            value = node[keyword] if isinstance(node, dict) else None
            if isinstance(value, float) and not math.isfinite(value):
                raise SchemaRefused(f"{NOT_FINITE}, not so at {path}")
            if not isinstance(value, bool) or keyword not in EXCLUSIVE:
                raise SchemaRefused(f"the schema is malformed: {error.message} at {path}")
            # As draft 4 has them.
            if value and EXCLUSIVE[keyword] not in node:
                found.append((keyword, path, f"there is no {EXCLUSIVE[keyword]} beside it"))
    return found


def _malformed(schema: Any) -> str:
    try:
        jsonschema_rs.meta.validate(schema)
    except jsonschema_rs.ValidationError as error:
        return f"{error.message} at /{'/'.join(map(str, error.instance_path))}"
    except (ValueError, jsonschema_rs.ReferencingError) as error:
        return str(error)
    return "a keyword has a value of the wrong type"


def _assembled(schema: Schema, definitions: dict[str, Schema], contents: Contents) -> Schema:
    """The whole for the back end: with the definitions that it needs, and keywords as they must be told."""
    if schema is False:
        raise SchemaRefused("no value matches the schema")
    if schema is True:
        schema = {}
    if contents.references:
        schema = {**schema, "$defs": {name: definitions[name] for name in sorted(contents.references)}}
    schema = {**schema, "x-guidance": LAYOUT}
    has_bounds = not contents.keywords.isdisjoint(BOUNDS)
    has_patterns = not contents.keywords.isdisjoint(PATTERNS)
    if has_bounds or has_patterns:

        def told(node: dict[str, Any]) -> dict[str, Any]:
            node = with_bounds(node, has_fractions=contents.has_fractions) if has_bounds else node
            return with_patterns(node) if has_patterns else node

        return with_change(schema, told)
    return schema


def _report(context: Context) -> EnforcementReport:
    missing = {*context.unenforced, *context.approximated}
    enforced = []
    for keyword, met in context.keywords.items():
        if (keyword, met.path) not in missing:
            note = f"and {met.count - 1} more" if met.count > 1 else ""
            enforced.append(KeywordStatus(keyword, met.path, note))
    return EnforcementReport(
        enforced=tuple(enforced),
        approximated=tuple(context.approximated.values()),
        unenforced=tuple(context.unenforced.values()),
    )
