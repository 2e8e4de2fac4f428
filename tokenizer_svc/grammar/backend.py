"""llguidance behind one small face: serialize grammars, and check that the engine will accept them."""

from __future__ import annotations

import json
import time
from typing import Any

import llguidance
import msgspec
from llguidance import LLMatcher, LLParserLimits

from checkpoint.grammar_tokens import grammar_tokenizer_json, is_tag
from contract.grammar_cost import PARSER_LIMITS
from tokenizer_svc.grammar.rules import LOG_LEVEL, endless_rules, logged
from tokenizer_svc.grammar.schema.back_end_patterns import back_end_pattern, with_patterns

# One named grammar: {"name", "lark_grammar"} or {"name", "json_schema"}.
Grammar = dict[str, Any]
# Processor time that an engine may need to begin with a grammar: all its answers wait meanwhile.
_MAX_START_S = 0.4
# Begins the library's error where no value can match.
_UNSATISFIABLE = "Unsatisfiable"


class Backend:
    """Checks grammars against the vocabulary that they will run with."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...]) -> None:
        eos = list(eos_token_ids) or None
        self._tokenizer = llguidance.LLTokenizer(grammar_tokenizer_json(tokenizer_json), eos_token=eos)

        added = json.loads(tokenizer_json).get("added_tokens", ())
        # Control tokens, and others that a format of calls or thoughts may mean by their texts. Models write
        # the token, so grammars name its id.
        self.named_tokens: dict[str, int] = {
            token["content"]: token["id"]
            for token in added
            if token.get("special") or is_tag(token["content"])
        }

        # The same by their first character, with the lengths that there are.
        self._names: dict[str, tuple[set[int], set[str]]] = {}
        for name in self.named_tokens:
            lengths, names = self._names.setdefault(name[0], (set(), set()))
            lengths.add(len(name))
            names.add(name)

    def spells_named_token(self, grammar: str) -> bool:
        """Whether the text of a named token stands in `grammar`, as it is or escaped."""
        text = grammar.replace("\\", "")
        for first, (lengths, names) in self._names.items():
            place = text.find(first)
            while place >= 0:
                if any(text[place : place + length] in names for length in lengths):
                    return True
                place = text.find(first, place + 1)
        return False

    def error(self, grammar: str) -> str:
        """Why `grammar` cannot be used, or ""."""
        start_s = time.thread_time()
        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            self._begin(matcher)
        if matcher.is_error():
            return str(matcher.get_error())
        if time.thread_time() - start_s > _MAX_START_S:
            return (
                f"its first token takes more than {_MAX_START_S * 1e3:.0f} ms of the processor, and all "
                "other answers would wait for it; repeat and list less in it"
            )
        return ""

    def endless_rules(self, grammar: Grammar) -> tuple[list[str], str]:
        """The rules of a grammar that derive no finite text ("start" is among them where nothing does), and
        why it cannot be compiled, or "". It must not refer to other grammars.
        """
        limits = LLParserLimits(**PARSER_LIMITS)
        with logged() as log:
            matcher = LLMatcher(self._tokenizer, serialize([grammar]), log_level=LOG_LEVEL, limits=limits)
        return endless_rules(log[0]), str(matcher.get_error())

    def _begin(self, matcher: LLMatcher) -> None:
        """Takes the first token. Rules that only refer to each other are well-formed and still have no way to
        begin, and some expressions run out of bounds only there.
        """
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        for token in self._tokenizer.eos_tokens:
            allowed &= ~(1 << token)
        if allowed and not matcher.is_error():
            matcher.try_consume_tokens([allowed.bit_length() - 1])


def serialize(grammars: list[Grammar]) -> str:
    """The payload that engines build matchers from; the first grammar is the start.

    Raises ValueError for numbers that are not finite, UnicodeEncodeError for half surrogate pairs.
    """
    text = msgspec.json.encode({"grammars": grammars}).decode()
    # Numbers that are not finite are written as null there; types are called "null".
    if text.count("null") > text.count('"null"'):
        json.dumps(grammars, allow_nan=False)
    return text


def string_schema_is_empty(parts: list[Any]) -> bool:
    """Whether the library proves that no string matches all `parts` (schemas of strings)."""
    schema = {"type": "string", "allOf": list(map(with_patterns, parts))}
    return _says(schema).startswith(_UNSATISFIABLE)


def pattern_is_readable(pattern: str) -> bool:
    """Whether the library takes the pattern."""
    said = _says({"type": "string", "pattern": back_end_pattern(pattern)})
    return not said or said.startswith(_UNSATISFIABLE)


def _says(schema: dict[str, Any]) -> str:
    """What the library says against a schema, or ""."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema)
    except ValueError as error:
        return str(error) or type(error).__name__
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0] if failed else ""
