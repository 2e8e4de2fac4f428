"""Bounds of what one grammar may cost, which the tokenizer service tries grammars with and the engine follows
them with: a grammar is accepted only if it also runs.
"""

from __future__ import annotations

from collections.abc import Mapping

# Arguments of llguidance's LLParserLimits. One mask costs all answers of a step their time. With the
# library's own fuel (1,000,000 and 200,000) the first mask of (a{1000}){1000} takes a second; the most that
# schemas of MaskBench need is between 50,000 and 100,000, for the first mask as for later ones of what a
# model wrote. Each optional property takes four items: 2,000, its own, are 500.
PARSER_LIMITS: Mapping[str, int] = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "max_items_in_row": 4_096,
}
