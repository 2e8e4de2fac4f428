"""GBNF, the EBNF dialect of llama.cpp, to Lark."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import GbnfToLarkError
from llguidance.gbnf_to_lark import gbnf_to_lark as _convert

# Literals and classes, which are left as they are; then comments, then the break before an alternative.
_KEPT = r'("(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])'
_COMMENTS = re.compile(_KEPT + r"|#[^\n]*", re.DOTALL)
_BREAKS = re.compile(_KEPT + r"|\s*\n\s*(?=\|)", re.DOTALL)


class GbnfError(Exception):
    """The grammar cannot be read; the message gives line and place."""


def gbnf_to_lark(text: str) -> str:
    """The same grammar as Lark; `root` becomes `start`. Raises GbnfError.

    An alternative may begin a line, which the library's reader does not know.
    """
    text = _COMMENTS.sub(lambda found: found[1] or "", text)
    text = _BREAKS.sub(lambda found: found[1] or " ", text)
    try:
        return str(_convert(text))
    except GbnfToLarkError as error:
        raise GbnfError(f"the EBNF grammar cannot be read: {error}") from error
    except RecursionError as error:
        raise GbnfError("the EBNF grammar is nested too deeply") from error
    except Exception as error:
        raise GbnfError(f"the EBNF grammar cannot be read: {error or type(error).__name__}") from error
