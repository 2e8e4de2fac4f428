"""Text to token ids: exact, off the event loop where it is long, and not twice for the same turn.

Added tokens split a text before anything else looks at it, so the text from one added token to the next is
encoded independently of what stands before and after. Long prompts are therefore cut at control tokens and
the ids of each piece are kept: a history of many turns costs only its new ones.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import msgspec
from tokenizers import Tokenizer

from tokenizer_svc.text.checkpoint import Checkpoint
from tokenizer_svc.text.control import ControlTokens, ProtectedEncoder, ids_of, secret_text
from tokenizer_svc.types import Truncation

# Below this, encoding at once is as fast as looking pieces up.
_MIN_CACHED_CHARACTERS = 2048


class Encoded(msgspec.Struct, frozen=True):
    """Token ids, and how many of them came from the turn cache."""

    token_ids: list[int]
    num_cached: int = 0


class TurnCache:
    """Ids of turns, least recently used dropped first. Keys carry the tenant, so that nothing is told apart
    by timing across tenants. Safe under threads."""

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

    def encode_rendered(self, rendered: str, *, tenant: str) -> Encoded:
        """What a template wrote, markers included."""
        if len(rendered) >= _MIN_CACHED_CHARACTERS:
            return self._encode_turns(rendered, tenant)
        if self._control.mark in rendered:
            return Encoded(self._protected.encode(rendered))
        return Encoded(ids_of(self._tokenizer, rendered))

    def _encode_turns(self, rendered: str, tenant: str) -> Encoded:
        turns = self._split(rendered)
        found = [self._cache.get(tenant, turn) for turn in turns]
        num_cached = sum(len(ids) for ids in found if ids is not None)
        missing = [index for index, ids in enumerate(found) if ids is None]
        for index, ids in zip(missing, self._encode_all([turns[each] for each in missing]), strict=True):
            found[index] = ids
            self._cache.put(tenant, turns[index], ids)
        return Encoded([token_id for ids in found for token_id in ids or ()], num_cached)

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
