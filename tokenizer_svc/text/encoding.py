"""Text to token ids: exact, not twice for the same message, and never a control token of a client's making.

The template's own text may contain control tokens such as <|im_start|>; the texts it is given may contain
only their spelling. A secret marker, drawn when the process starts, is put inside every such spelling before
the template runs, and where a text ends in the beginning of one, so that nothing can be completed across two
texts. After rendering, only unmarked spellings are control tokens: for encoding they are replaced by secret
names that a second tokenizer knows, and the markers are removed. A conversation without such spellings is
never touched and is encoded by the ordinary tokenizer.

Added tokens split a text before anything else looks at it, so the text from one added token to the next is
encoded independently of what stands before and after. Long prompts are therefore cut at control tokens and
the ids of each piece are kept: a history of many turns costs only its new ones.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from tokenizers import Encoding, Tokenizer

from contract.formats import THINK_CLOSE, THINK_OPEN
from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.types import Truncation

# Markup that some checkpoints declare special although output and history carry it as text.
KNOWN_MARKUP = frozenset({THINK_OPEN, THINK_CLOSE, "<tool_call>", "</tool_call>"})
# Below this, encoding at once is as fast as looking pieces up.
_MIN_CACHED_CHARACTERS = 2048


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


class TurnCache:
    """Ids of turns, least recently used dropped first. Keys carry the tenant and its salt, so that nothing is
    told apart by timing across tenants, or across salts of one. Safe under threads."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._entries: OrderedDict[tuple[str, str], list[int]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def get(self, tenant: str, turn: str) -> list[int] | None:
        """The ids, or None."""
        with self._lock:
            ids = self._entries.get((tenant, turn))
            if ids is not None:
                self._entries.move_to_end((tenant, turn))
            return ids

    def put(self, tenant: str, turn: str, ids: list[int]) -> None:
        """Keeps `ids` unless they alone exceed a quarter of the capacity."""
        if len(ids) > self._capacity // 4:
            return
        with self._lock:
            previous = self._entries.pop((tenant, turn), None)
            self._size += len(ids) - len(previous or ())
            self._entries[tenant, turn] = ids
            while self._size > self._capacity:
                _, dropped = self._entries.popitem(last=False)
                self._size -= len(dropped)


class FittedText(NamedTuple):
    """A text, or a pair, within a limit."""

    kept: list[int]
    # All that there were.
    ids: list[int]
    # Where the second text begins, if the tokenizer tells them apart; else 0.
    second_start: int


class TextEncoder:
    """All ways from text to ids of one checkpoint. Safe under threads."""

    def __init__(self, checkpoint: Checkpoint, control: ControlTokens, *, turn_cache_tokens: int) -> None:
        self._tokenizer = Tokenizer.from_str(checkpoint.tokenizer_json)
        self._control = control
        self._front = _front_tokens(self._tokenizer)
        self._protected = ProtectedEncoder(checkpoint.tokenizer_json, control.mark)
        self._cache = TurnCache(turn_cache_tokens)
        # Stands in no text, as nobody knows it.
        self._edge = secret_text()
        self._cuts = _cut_tokens(checkpoint.description, "\n".join(checkpoint.templates.values()))

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A plain prompt. Spellings of control tokens are control tokens: the caller writes the prompt."""
        return ids_of(self._tokenizer, text, add_special_tokens=add_special_tokens)

    def encode_each(
        self, texts: Sequence[tuple[str, str | None]], most: int | None, *, keeps_end: bool
    ) -> list[FittedText]:
        """`encode_fitting` of many texts and pairs in one call of the library; those alone that are too long
        are looked at once more.
        """
        inputs: list[Any] = [text if pair is None else (text, pair) for text, pair in texts]
        found = []
        for (text, pair), whole in zip(texts, self._tokenizer.encode_batch_fast(inputs), strict=True):
            ids = whole.ids
            if most is None or len(ids) <= most:
                start = 0 if pair is None else _second_start(whole.type_ids)
                found.append(FittedText(ids, ids, start))
            else:
                found.append(self.encode_fitting(text, pair, most, keeps_end=keeps_end))
        return found

    def encode_fitting(
        self,
        text: str,
        pair: str | None,
        most: int | None,
        *,
        keeps_end: bool,
        add_special_tokens: bool = True,
    ) -> FittedText:
        """A text, or two together, cut to `most` tokens with those that the tokenizer puts around them. Of a
        pair the longer text loses its tokens first, one by one, as transformers' "longest_first" has it.
        """
        texts = [text] if pair is None else [text, pair]
        parts = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        lengths = [len(part.ids) for part in parts]
        around = self._tokenizer.num_special_tokens_to_add(pair is not None) if add_special_tokens else 0
        whole = self._joined(parts, add_special_tokens)
        if most is None or sum(lengths) + around <= most:
            return FittedText(whole.ids, whole.ids, _second_start(whole.type_ids))
        fitted = _longest_first(lengths, max(0, most - around))
        for part, length in zip(parts, fitted, strict=True):
            if length < len(part.ids):
                part.truncate(length, direction="left" if keeps_end else "right")
        cut = self._joined(parts, add_special_tokens)
        return FittedText(cut.ids[:most], whole.ids, _second_start(cut.type_ids))

    def _joined(self, parts: list[Encoding], add_special_tokens: bool) -> Encoding:
        first, *second = parts
        return self._tokenizer.post_process(first, second[0] if second else None, add_special_tokens)

    def truncated(self, ids: list[int], max_tokens: int | None, truncation: Truncation) -> list[int]:
        """At most `max_tokens` ids from the end that is kept.

        What the tokenizer puts in front of every text (such as BOS) stays in front.
        """
        if max_tokens is None or len(ids) <= max_tokens:
            return ids
        if truncation is Truncation.KEEP_START:
            return ids[:max_tokens]
        front = self._front if ids[: len(self._front)] == self._front else []
        num_kept = max(0, max_tokens - len(front))
        return (front + ids[len(ids) - num_kept :])[:max_tokens]

    def encode_rendered(self, rendered: str, *, tenant: str) -> list[int]:
        """What a template wrote, markers included."""
        if len(rendered) >= _MIN_CACHED_CHARACTERS:
            return self._encode_turns(rendered, tenant)
        if self._control.mark in rendered:
            return self._protected.encode(rendered)
        return ids_of(self._tokenizer, rendered)

    def _encode_turns(self, rendered: str, tenant: str) -> list[int]:
        turns = self._split(rendered)
        found = [self._cache.get(tenant, turn) for turn in turns]
        missing = [index for index, ids in enumerate(found) if ids is None]
        for index, ids in zip(missing, self._encode_all([turns[each] for each in missing]), strict=True):
            found[index] = ids
            self._cache.put(tenant, turns[index], ids)
        return [token_id for ids in found for token_id in ids or ()]

    def _encode_all(self, turns: list[str]) -> list[list[int]]:
        marked = [self._control.mark in turn for turn in turns]
        plain = [turn for turn, is_marked in zip(turns, marked, strict=True) if not is_marked]
        encoded = iter(self._tokenizer.encode_batch_fast(plain, add_special_tokens=False))
        return [
            self._protected.encode(turn) if is_marked else next(encoded).ids
            for turn, is_marked in zip(turns, marked, strict=True)
        ]

    def _split(self, text: str) -> list[str]:
        """Pieces that each begin with a control token, except perhaps the first."""
        for cut in self._cuts:
            text = text.replace(cut, self._edge + cut)
        return [piece for piece in text.split(self._edge) if piece]


def _longest_first(lengths: list[int], most: int) -> list[int]:
    """Lengths of a text, or of two, that lose what is too much from the longer one, as `tokenizers` does
    it.
    """
    if len(lengths) == 1:
        return [min(lengths[0], most)]
    shorter = min(lengths)
    longer = max(shorter, most - shorter)
    if shorter + longer > most:
        shorter, longer = most // 2, most - most // 2
    return [longer, shorter] if lengths[0] > lengths[1] else [shorter, longer]


def _second_start(type_ids: list[int]) -> int:
    """Index of the first token of type 1; 0 where there is none."""
    return type_ids.index(1) if 1 in type_ids else 0


def _front_tokens(tokenizer: Tokenizer) -> list[int]:
    """Ids that the tokenizer puts before the ids of every text."""
    plain = tokenizer.encode("x", add_special_tokens=False).ids
    whole = tokenizer.encode("x", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return list(whole[:start])
    return []


def _cut_tokens(description: dict[str, Any], template_text: str) -> tuple[str, ...]:
    """Special tokens that templates write and at which a text may be cut without changing any id.

    They must be matched in the raw text, wherever they stand and whatever stands around them, and no other
    added token may cover part of one or swallow what surrounds it.
    """
    added = description.get("added_tokens", ())
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return ()
    contents = [token["content"] for token in added]
    return tuple(
        token["content"]
        for token in added
        if token["special"]
        and token["content"] in template_text
        and not (token["normalized"] or token["single_word"])
        and not any(token["content"] != other and _may_overlap(token["content"], other) for other in contents)
    )


def _may_overlap(token: str, other: str) -> bool:
    """Whether an occurrence of `other` could cover part of an occurrence of `token`."""
    if token in other or other in token:
        return True
    longest = min(len(token), len(other))
    return any(token.endswith(other[:n]) or other.endswith(token[:n]) for n in range(1, longest))
