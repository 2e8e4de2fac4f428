"""GBNF, the EBNF dialect of llama.cpp, to Lark."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import gbnf_to_lark as _convert

from tokenizer_svc.grammar.request import GrammarRefused

_FIELD = "response_format.ebnf"

# Literals and classes, which are left as they are; then comments, then the break before an alternative.
_KEPT = r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])'
_COMMENTS = re.compile(_KEPT + r"|#[^\n]*", re.DOTALL)
_BREAKS = re.compile(_KEPT + r"|\s*\n\s*(?=\|)", re.DOTALL)


def gbnf_to_lark(text: str) -> str:
    """The same grammar as Lark; `root` becomes `start`. Raises GrammarRefused with line and place.

    An alternative may begin a line, which the library's reader does not know.
    """
    text = _COMMENTS.sub(lambda found: found[1] or "", text)
    text = _BREAKS.sub(lambda found: found[1] or " ", text)
    try:
        return str(_convert(text))
    except RecursionError as error:
        raise GrammarRefused("the EBNF grammar is nested too deeply", _FIELD) from error
    except Exception as error:
        message = f"the EBNF grammar cannot be read: {str(error) or type(error).__name__}"
        raise GrammarRefused(message, _FIELD) from error
