"""What has no finite value: it is refused by its place, or where it may be left out, it cannot be written.

The judgement is that of the compiled rules, so it holds for each keyword and front end alike.
"""

from __future__ import annotations

import re
from typing import Any

from tokenizer_svc.grammar.backend import Backend, Grammar, serialize
from tokenizer_svc.grammar.schema.finished import with_change
from tokenizer_svc.grammar.schema.repair import MAX_REPAIRS, repair, without_definition
from tokenizer_svc.grammar.schema.shapes import Schema, all_of

_REFERENCE = re.compile(r'"#/\$defs/(\w+)"')
_DEFINITION = "json-schema:///#/$defs/"


class Endless(Exception):
    """No finite text matches the grammar of this name; `rules` are the compiled rules that never end, those
    of a schema by the names of its definitions.
    """

    def __init__(self, grammar: str, rules: list[str]) -> None:
        super().__init__(grammar, rules)
        self.grammar, self.rules = grammar, rules


def without_endless(grammars: list[Grammar], backend: Backend) -> bool:
    """Takes definitions without a finite value out of the schemas; whether there were any.

    Raises Endless where a whole schema has none, and where a rule of a grammar in text has none.
    """
    changed = False
    for grammar in grammars:
        if "json_schema" in grammar:
            changed |= _without_endless_definitions(grammar, backend)
        elif grammar["name"] not in ("tool_calls", "reasoning"):
            rules, _ = backend.endless_rules(grammar)
            if rules:
                raise Endless(grammar["name"], _as_written(rules))
    return changed


def needing_first_items(grammars: list[Grammar], backend: Backend) -> bool:
    """Takes `contains` out of the schemas, where it is left for this and not known to the back end; whether
    it was there. Raises Endless where arrays have to contain what never ends.
    """
    changed = False
    for grammar in grammars:
        schema = grammar.get("json_schema")
        plain = with_change(schema, without_contains)
        if plain is not schema:
            begun = {**grammar, "json_schema": with_change(schema, _begun)}
            for _ in range(MAX_REPAIRS):
                if not _without_endless_definitions(begun, backend):
                    break
            grammar["json_schema"] = plain
            changed = True
    return changed


def _without_endless_definitions(grammar: Grammar, backend: Backend) -> bool:
    schema: Schema = grammar["json_schema"]
    if not _leads_back(schema.get("$defs", {})):
        return False
    rules, error = backend.endless_rules(grammar)
    better = repair(schema, error) if error and not rules else None
    if better not in (None, schema):
        grammar["json_schema"] = better
        return True
    names = [rule.removeprefix(_DEFINITION) for rule in rules if rule.startswith(_DEFINITION)]
    if "start" in rules:
        raise Endless(grammar["name"], names)
    for name in names:
        schema = without_definition(schema, name)
    grammar["json_schema"] = schema
    return bool(names)


def _leads_back(definitions: dict[str, Schema]) -> bool:
    """Whether a definition may refer to itself, by others or not; only there is something without end."""
    references = {name: set(_REFERENCE.findall(serialize([each]))) for name, each in definitions.items()}
    while leaves := {name for name, needed in references.items() if needed.isdisjoint(references)}:
        for name in leaves:
            del references[name]
    return bool(references)


def _as_written(rules: list[str]) -> list[str]:
    """Names as the grammar has them, the start last: the library numbers those that it makes, and adds an
    underscore to what it refers to before it is defined.
    """
    named = [rule for rule in rules if "#" not in rule and rule.removesuffix("_") not in {*rules} - {rule}]
    return sorted(named, key="start".__eq__)


def without_contains(node: dict[str, Any]) -> Schema:
    """A node of a finished schema without what the back end does not know, see `needing_first_items`."""
    return {key: value for key, value in node.items() if key != "contains"} if "contains" in node else node


def _begun(node: dict[str, Any]) -> Schema:
    return all_of([without_contains(node), node["contains"]]) if "contains" in node else node
