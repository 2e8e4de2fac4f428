"""Keeps text that a client wrote from becoming control tokens.

The template's own text may contain control tokens such as <|im_start|>; the texts it is given may contain
only their spelling. A secret marker, drawn when the process starts, is put inside every such spelling before
the template runs, and where a text ends in the beginning of one, so that nothing can be completed across two
texts. After rendering, only unmarked spellings are control tokens: for encoding they are replaced by secret
names that a second tokenizer knows, and the markers are removed. A conversation without such spellings is
never touched and is encoded by the ordinary tokenizer.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from typing import Any

from tokenizers import Tokenizer

# Markup that some checkpoints declare special although output and history carry it as text.
KNOWN_MARKUP = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})


def secret_text() -> str:
    """What no text holds. Private-use characters have no case and are no white space, so templates pass them
    through.
    """
    return "".join(chr(0x100000 + secrets.randbelow(0xFFFE)) for _ in range(10))


def ids_of(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> list[int]:
    """Ids of one text. Other threads go on meanwhile, which the library's `encode` does not allow: it holds
    the interpreter's lock until it is done.
    """
    (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


class ControlTokens:
    """The spellings to protect, of one tokenizer with the templates it is used with.

    `control`: declared special. `markup`: added tokens that templates write but history may carry as well.
    """

    def __init__(self, added_tokens: list[dict[str, Any]], template_texts: Collection[str]) -> None:
        template_text = "\n".join(template_texts)
        visible = [token for token in added_tokens if not token["content"].isspace()]
        control = {token["content"] for token in visible if token["special"]} - KNOWN_MARKUP
        markup = {
            token["content"]
            for token in visible
            if token["content"] not in control
            and (token["content"] in template_text or token["content"] in KNOWN_MARKUP)
        }
        self.mark = secret_text()
        self.control = frozenset(control)
        self.markup = frozenset(markup)
        self._control_pattern = _alternatives(control)
        self._all_pattern = _alternatives(control | markup)
        self._beginnings = _Beginnings(control)
        self._all_beginnings = _Beginnings(control | markup)

    def protect(self, text: str, *, allow_markup: bool) -> str:
        """`text` with the marker inside every spelling of a control token (and of markup, unless allowed)."""
        pattern = self._control_pattern if allow_markup else self._all_pattern
        if pattern is None or not text:
            return text
        if pattern.search(text):
            # A spelling may overlap another one, or hold it: the marker goes into each.
            starts = re.compile(f"(?=(?:{pattern.pattern}))(.)", re.DOTALL)
            text = starts.sub(lambda match: match.group(1) + self.mark, text)
        beginnings = self._beginnings if allow_markup else self._all_beginnings
        return text + self.mark if beginnings.end(text) else text

    def protect_value(self, value: Any, *, allow_markup: bool) -> Any:
        """The same for every text in a JSON value, keys included."""
        if isinstance(value, str):
            return self.protect(value, allow_markup=allow_markup)
        if isinstance(value, list):
            return [self.protect_value(each, allow_markup=allow_markup) for each in value]
        if isinstance(value, dict):
            return {
                self.protect(key, allow_markup=allow_markup): self.protect_value(
                    each, allow_markup=allow_markup
                )
                for key, each in value.items()
            }
        return value


class ProtectedEncoder:
    """Encodes rendered text in which markers occur; agrees with the ordinary tokenizer where none do."""

    def __init__(self, tokenizer_json: str, mark: str) -> None:
        description = json.loads(tokenizer_json)
        self._mark = mark
        ordinary = Tokenizer.from_str(tokenizer_json)
        name_of = {token["content"]: secret_text() for token in description["added_tokens"]}
        ids: dict[str, int] = ordinary.get_vocab(with_added_tokens=True)
        original = {name: ids[content] for content, name in name_of.items()}
        for token in description["added_tokens"]:
            token["content"] = name_of[token["content"]]
        description["post_processor"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(description))
        self._name_of = name_of
        self._pattern = _alternatives(name_of)
        # Ids of the secret names, which follow the vocabulary, to the ids of the tokens they stand for.
        self._original_ids = {
            renamed: token_id
            for name, token_id in original.items()
            if (renamed := self._tokenizer.token_to_id(name)) is not None
        }
        # Ids that the model itself gives, and must not.
        self._forbidden_ids = frozenset(original.values()) - self._original_ids.keys()

    def encode(self, rendered: str) -> list[int]:
        """Ids of the text without markers; only unmarked spellings became control tokens."""
        text = rendered
        if self._pattern is not None:
            text = self._pattern.sub(lambda match: self._name_of[match.group()], text)
        text = text.replace(self._mark, "")
        encoded = ids_of(self._tokenizer, text)
        if not self._forbidden_ids.isdisjoint(encoded):
            return self._without_vocabulary_hits(text)
        return [self._original_ids.get(token_id, token_id) for token_id in encoded]

    def _without_vocabulary_hits(self, text: str) -> list[int]:
        # Unigram and whole-word models may hold control tokens in the model itself, beside the added tokens:
        # their spelling is cut in two, so that the model cannot see it whole.
        ids: list[int] = []
        start = 0
        for match in self._pattern.finditer(text) if self._pattern is not None else ():
            ids += self._encode_part(text[start : match.start() + 1])
            start = match.start() + 1
        return ids + self._encode_part(text[start:])

    def _encode_part(self, text: str) -> list[int]:
        return [self._original_ids.get(token_id, token_id) for token_id in ids_of(self._tokenizer, text)]


def _alternatives(texts: Collection[str]) -> re.Pattern[str] | None:
    # Longest first: the same choice as the tokenizer's leftmost-longest automaton.
    ordered = sorted((text for text in texts if text), key=lambda text: (-len(text), text))
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


class _Beginnings:
    """All that some spelling begins with, short of the whole."""

    def __init__(self, texts: Collection[str]) -> None:
        self._texts = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        self._longest = max(map(len, self._texts), default=0)
        self._first = frozenset(text[0] for text in self._texts)

    def end(self, text: str) -> bool:
        """Whether `text` ends with one."""
        tail = text[-self._longest :] if self._longest else ""
        return any(
            tail[start:] in self._texts
            for character in self._first
            if character in tail
            for start in range(len(tail))
            if tail[start] == character
        )
