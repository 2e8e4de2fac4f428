"""The tokenizer as grammars see it: added tokens that are not special count as their text.

The grammar library takes every added token that is written `<...>` for a control token, which no text of a
grammar matches: a model whose `</tool_call>` is such a token could not write it in a string. Whoever builds
the library's tokenizer uses this text, so that the service and the engines mask the same tokens.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import pre_tokenizers


def grammar_tokenizer_json(text: str) -> str:
    """tokenizer.json with the added tokens that are not special among the vocabulary's own, with their ids.

    Tokens whose ids the vocabulary's format has no room for stay as they are.
    """
    description = json.loads(text)
    added: list[dict[str, Any]] = description.get("added_tokens") or []
    model = description["model"]
    if "vocab" not in model or not any(map(_is_hidden, added)):
        return text
    write = _bytes_as_text if '"ByteLevel"' in json.dumps(description.get("decoder")) else _with_marked_spaces
    kept = []
    for token in added:
        # All of them: those that are no part of the vocabulary have the ids after it.
        content = write(token["content"]) if _is_hidden(token) else token["content"]
        if not _put(model["vocab"], content, token["id"]) or not _is_hidden(token):
            kept.append(token)
    return json.dumps({**description, "added_tokens": kept}, ensure_ascii=False)


def is_tag(text: str) -> bool:
    """Whether an added token of this text is a control token for the library, special or not."""
    return text.startswith("<") and text.endswith(">")


def _is_hidden(token: dict[str, Any]) -> bool:
    """Whether the library takes an added token for a control token, although it is none."""
    return not token.get("special") and is_tag(token["content"])


def _put(vocabulary: Any, content: str, token_id: int) -> bool:
    """Puts a token into a vocabulary, a map to ids or a list of pieces with scores; whether it has its id."""
    if isinstance(vocabulary, dict):
        return bool(vocabulary.setdefault(content, token_id) == token_id)
    if token_id == len(vocabulary):
        # A logarithm of its probability: no text is encoded by it.
        vocabulary.append([content, -1e4])
    return token_id < len(vocabulary) and bool(vocabulary[token_id][0] == content)


def _bytes_as_text(text: str) -> str:
    """A text as byte-level vocabularies write it, one character for each byte."""
    writer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in writer.pre_tokenize_str(text))


def _with_marked_spaces(text: str) -> str:
    """A text as other vocabularies write it."""
    return text.replace(" ", "▁")
