"""Ends a guided answer validly before its token limit cuts it off.

A grammar with unbounded strings or arrays lets a model ramble until the limit, and what is cut is not valid.
So near the limit a short end is looked for: a copy of the matcher is walked by taking, step after step, what
the grammar forces, else what closes most, until the grammar is complete. While the end found leaves room to
spare, nothing happens. When the room is nearly used up, the sequence is made to follow that end, token by
token: an end of n tokens that begins with n tokens left always completes.

All of it is a function of the grammar, the tokens so far and the limit: no clock, no other sequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

import llguidance
import llguidance.numpy
import numpy as np
from numpy.typing import NDArray

from contract.formats import THINK_CLOSE, THINK_OPEN

# Longer ends are not looked for, in tokens.
MAX_END = 1024
# Steps in a row that close nothing, before a walk is given up.
MAX_WANDERING = 96
# Up to so many tokens, an end is looked for from the first token on.
SHORT_LIMIT = 128
# Separates the parts of addresses, dates and the like.
_PUNCTUATION = tuple(bytes([code]) for code in b"@.:/-+_#=&,;|()[]{}<>!?$%*~^'` ")
_CLOSES_TEXT = re.compile(rb'"[\]}]*')
_CLOSES = re.compile(rb"[\]}]+")
_SEPARATES = (b',"', b",", b":")
# A word where the vocabulary has it as one token, else what it begins with.
_WORDS = (b"null", b"true", b"false")
_VALUES = (
    *(b'""', b"[]", b"{}"),
    *(word[:length] for word in _WORDS for length in range(len(word), 0, -1)),
    *(b'"', b"[", b"{", b".", b"-"),
)
_THOUGHTS, _THOUGHTS_END = THINK_OPEN.encode(), THINK_CLOSE.encode()
# Varies from digit to digit, so that a number comes to any multiple and away from zero.
_DIGITS = (b"1", b"0", b"5", b"2", b"3", b"4", b"6", b"7", b"8", b"9")


@dataclass(frozen=True)
class ClosingMark:
    """What is known of the end since an output position."""

    position: int
    # An end is looked for again when so many tokens are left.
    next_check: int
    # Tokens from `position` on that have to follow; empty while the sequence is free.
    end: tuple[int, ...] = ()


def first_mark(limit: int) -> ClosingMark:
    """Before the first token; `limit` is the number of output tokens."""
    return ClosingMark(0, max(3 * limit // 4, min(limit, SHORT_LIMIT)))


def margin(limit: int) -> int:
    """Tokens to spare at which the end begins: what one more token may lengthen the end by, without taking
    much of a small limit.
    """
    return 2 + min(30, limit // 16)


class _Candidates:
    """Tokens to try in order against a mask."""

    def __init__(self, ids: Sequence[int]) -> None:
        self._ids = np.array(ids, np.int64)
        self._words, self._shifts = self._ids >> 5, (self._ids & 31).astype(np.int32)

    def first(self, mask: NDArray[np.int32], without: Set[int] = frozenset()) -> int | None:
        """The first one that mask [W] allows, and that is not among `without`."""
        found = self._ids[np.flatnonzero((mask[self._words] >> self._shifts) & 1)]
        return next((token for token in found.tolist() if token not in without), None)


class _Walk:
    """One search for an end."""

    def __init__(
        self, matcher: llguidance.LLMatcher, limit: int, quoted: bool, escaped: bool, punctuates: bool
    ) -> None:
        self.matcher, self.limit = matcher, limit
        self.quoted, self.escaped = quoted, escaped
        self.punctuates = punctuates
        self.end: list[int] = []
        self.before: NDArray[np.int32] | None = None
        self.tried: set[int] = set()
        self.num_digits = self.num_wandered = 0

    def read(self, text: bytes) -> None:
        """Takes in a token's text."""
        self.quoted, self.escaped = _lexed(text, self.quoted, self.escaped)
        self.num_digits = self.num_digits + 1 if text in _DIGITS else 0


class EndFinder:
    """Finds short ends of texts; knows one vocabulary."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._width = -(-vocab_size // 32)
        ids = range(min(vocab_size, tokenizer.vocab_size))
        texts = [bytes(tokenizer.decode_bytes([token])) for token in ids]
        self._thoughts_end = (texts.index(_THOUGHTS_END),) if _THOUGHTS_END in texts else ()
        self._texts = [b"" if tokenizer.is_special_token(token) else text for token, text in enumerate(texts)]
        by_text: dict[bytes, int] = {}
        for token, text in enumerate(self._texts):
            by_text.setdefault(text, token)
        self._stops = _Candidates(tokenizer.eos_tokens)
        self._closers = {True: self._matching(_CLOSES_TEXT), False: self._matching(_CLOSES)}
        self._separators = _Candidates([by_text[text] for text in _SEPARATES if text in by_text])
        self._values = _Candidates([by_text[text] for text in _VALUES if text in by_text])
        digits = [by_text[text] for text in _DIGITS if text in by_text]
        self._punctuation = _Candidates([by_text[text] for text in _PUNCTUATION if text in by_text])
        shifts = range(max(1, len(digits)))
        self._digits = [_Candidates(digits[shift:] + digits[:shift]) for shift in shifts]
        # Longer texts come further; escapes and white space may lead nowhere.
        self._reach = np.full(32 * self._width, -2, np.int32)
        for token, text in enumerate(self._texts):
            if text:
                self._reach[token] = -1 if b"\\" in text or not text.strip() else len(text)

    def find(
        self, matcher: llguidance.LLMatcher, output: Sequence[int], limit: int
    ) -> tuple[int, ...] | None:
        """Tokens that complete the grammar after `output`, where `matcher` stands, or None when no end of at
        most `limit` tokens was found.
        """
        text = bytes(self._tokenizer.decode_bytes(list(output)))
        quoted, escaped = _lexed(text.rpartition(_THOUGHTS_END)[2], False, False)
        limit = min(limit, MAX_END)
        # Far with each token; then by way of every punctuation mark. Text that is not JSON may hold any
        # number of quotes.
        tries: list[tuple[tuple[bool, bool, bool], tuple[int, ...]]] = [
            ((quoted, escaped, False), ()),
            ((quoted, escaped, True), ()),
            ((not quoted, False, True), ()),
        ]
        if self._thoughts_end and _THOUGHTS_END not in text:
            # Thoughts end first. Where none was begun by the model, the prompt may have begun some.
            tries.insert(0 if text.startswith(_THOUGHTS) else 3, ((False, False, False), self._thoughts_end))
        for start, first in tries:
            walk = _Walk(matcher.deep_copy(), limit, *start)
            walk.end += first
            if walk.matcher.try_consume_tokens(walk.end) == len(first) and self._ends(walk):
                return tuple(walk.end)
        return None

    def _ends(self, walk: _Walk) -> bool:
        """Walks to the end of the grammar; whether there is one within the limit."""
        matcher = walk.matcher
        masks = np.zeros((1, self._width), np.int32)
        while not matcher.is_stopped():
            tokens = list(matcher.compute_ff_tokens())
            if not tokens:
                llguidance.numpy.fill_next_token_bitmask(matcher, masks, 0)
                stop = self._stops.first(masks[0])
                if stop is not None:
                    walk.end.append(stop)
                    break
                token = self._choose(masks[0], walk)
                if token is None:
                    return False
                tokens = [token]
                walk.before = masks[0].copy()
            walk.end += tokens
            if len(walk.end) > walk.limit or not matcher.consume_tokens(tokens):
                return False
            for token in tokens:
                walk.read(self._texts[token])
        return not matcher.is_error() and len(walk.end) <= walk.limit

    def _choose(self, mask: NDArray[np.int32], walk: _Walk) -> int | None:
        """The token that comes closest to the end, by its looks."""
        tries = [self._closers[walk.quoted]]
        if not walk.quoted:
            tries += [self._separators, self._digits[walk.num_digits % len(self._digits)], self._values]
        for candidates in tries:
            token = candidates.first(mask)
            if token is not None:
                walk.num_wandered = 0
                return token
        walk.num_wandered += 1
        if walk.num_wandered > MAX_WANDERING:
            return None
        if walk.punctuates:
            token = self._punctuation.first(mask, walk.tried)
            if token is not None:
                walk.tried.add(token)
                return token
        # Tokens that have just become possible come first, because they lead on: an address may have its @
        # after the first letter.
        fresh = mask if walk.before is None else mask & ~walk.before
        for words in (fresh, mask):
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            if allowed.size:
                best = int(allowed[np.argmax(self._reach[allowed])])
                if self._reach[best] > -2:
                    return best
        return None

    def _matching(self, pattern: re.Pattern[bytes]) -> _Candidates:
        found = [token for token, text in enumerate(self._texts) if pattern.fullmatch(text)]
        return _Candidates(sorted(found, key=lambda token: -len(self._texts[token])))


def _lexed(text: bytes, quoted: bool, escaped: bool) -> tuple[bool, bool]:
    """Whether JSON text is inside a string after `text`, and just after a backslash there."""
    if escaped:
        text, escaped = text[1:], not text
    for match in re.finditer(rb'\\.?|"', text, re.DOTALL):
        found = match.group()
        if found == b'"':
            quoted = not quoted
        elif quoted:
            escaped = len(found) == 1
    return quoted, escaped
