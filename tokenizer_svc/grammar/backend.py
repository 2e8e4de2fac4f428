"""llguidance behind one small face: serialize grammars, and check that the engine will accept them."""

from __future__ import annotations

import json
from typing import Any

import llguidance
from llguidance import LLMatcher

from tokenizer_svc.grammar.schema.back_end_patterns import back_end_pattern, for_back_end

# One named grammar: {"name", "lark_grammar"} or {"name", "json_schema"}.
Grammar = dict[str, Any]


class Backend:
    """Checks grammars against the vocabulary that they will run with."""

    def __init__(self, tokenizer_json: str, eos_token_ids: tuple[int, ...]) -> None:
        eos = list(eos_token_ids) or None
        self._tokenizer = llguidance.LLTokenizer(tokenizer_json, eos_token=eos)

        added = json.loads(tokenizer_json).get("added_tokens", ())
        # Added tokens that grammars can only name by id: the library does not match them as text.
        self.named_tokens: dict[str, int] = {
            token["content"]: token["id"] for token in added if self._tokenizer.is_special_token(token["id"])
        }

    def error(self, grammar: str) -> str:
        """Why `grammar` cannot be used, or ""."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if not matcher.is_error() and ("$ref" in grammar or "lark_grammar" in grammar):
            # Rules that only refer to each other are well-formed and still have no way to begin.
            matcher.compute_bitmask()
        return str(matcher.get_error()) if matcher.is_error() else ""


def serialize(grammars: list[Grammar]) -> str:
    """The payload that engines build matchers from; the first grammar is the start.

    Raises ValueError for numbers that are not finite.
    """
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def string_schema_is_empty(parts: list[Any]) -> bool:
    """Whether the library proves that no string matches all `parts` (schemas of strings)."""
    try:
        grammar = LLMatcher.grammar_from_json_schema({"type": "string", "allOf": for_back_end(parts)})
    except ValueError:
        return False
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return bool(failed) and messages[0].startswith("Unsatisfiable")


def pattern_is_readable(pattern: str) -> bool:
    """Whether the library takes the pattern."""
    schema = {"type": "string", "pattern": back_end_pattern(pattern)}
    grammar = LLMatcher.grammar_from_json_schema(schema)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return not failed or messages[0].startswith("Unsatisfiable")
