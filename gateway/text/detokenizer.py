"""Incremental detokenization that equals decoding the whole list of ids at once.

Token bytes are joined before they are read as UTF-8, so that a character split over tokens appears when its
last byte does. Bytes that can never become a character turn into U+FFFD, one per maximal invalid part
(Unicode 16, section 3.9; the same rule as Rust's `from_utf8_lossy`, which Hugging Face's byte-level decoder
applies).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from contract.pooling import PooledModel
from contract.vocabulary import DecoderKind

# The vocabulary that the gateway decodes with: token id to bytes, and which ids are never shown.


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What exact incremental decoding needs. Index of `tokens` is the token id."""

    fingerprint: str
    decoder: DecoderKind
    tokens: tuple[bytes, ...]
    special_ids: frozenset[int] = frozenset()
    # Tokens that stand for one byte beside tokens that are whole text: a run of them that is not valid UTF-8
    # shows one U+FFFD per byte.
    byte_ids: frozenset[int] = frozenset()
    eos_token_ids: tuple[int, ...] = ()
    # Names of formats, "" when the model has none.
    tool_call_format: str = ""
    reasoning_format: str = ""
    # The checkpoint's generation_config.json, decoded.
    generation_config: dict[str, object] = {}
    # Who recommends a sampling option in it, where that is not the file itself.
    sampling_sources: dict[str, str] = {}
    # Where the model pools what it reads, and generates nothing.
    pooled: PooledModel | None = None
    # A chat template reads how hard to think.
    takes_effort: bool = False

    @property
    def size(self) -> int:
        """Number of ids, holes included."""
        return len(self.tokens)

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, as it is shown in log-probabilities; invalid bytes become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; empty for an id outside the vocabulary."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else b""


_UTF8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class TokenTexts:
    """Per-vocabulary cache of tokens that are whole characters by themselves: the common case of decoding.

    An entry is None when the token's bytes need their neighbours. Special tokens are "".
    """

    def __init__(self, vocabulary: Vocabulary, *, shown_ids: frozenset[int] = frozenset()) -> None:
        self.vocabulary = vocabulary
        self.hidden = vocabulary.special_ids - shown_ids
        # Byte tokens have no text alone, ASCII included: how a byte is shown depends on the bytes around it.
        self._texts: dict[int, str | None] = dict.fromkeys(vocabulary.byte_ids - self.hidden)

    def raw(self, token_id: int) -> bytes:
        """The token's bytes, empty when it is hidden."""
        return b"" if token_id in self.hidden else self.vocabulary.token_bytes(token_id)

    def alone(self, token_id: int) -> str | None:
        """The token's text when its bytes are whole characters, None otherwise."""
        try:
            return self._texts[token_id]
        except KeyError:
            self._texts[token_id] = text = _whole(self.raw(token_id))
            return text


def _whole(raw: bytes) -> str | None:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return None


class ByteLevelDetokenizer:
    """Concatenates bytes and holds back an unfinished character."""

    __slots__ = ("_decoder", "_pending", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = _UTF8("replace")
        self._pending = False

    def feed(self, token_ids: Iterable[int]) -> str:
        """Text that is certain after these ids; may be empty."""
        pieces = []
        for token_id in token_ids:
            if not self._pending:
                text = self._texts.alone(token_id)
                if text is not None:
                    pieces.append(text)
                    continue
            pieces.append(self._decoder.decode(self._texts.raw(token_id)))
            self._pending = bool(self._decoder.getstate()[0])
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def copy(self) -> ByteLevelDetokenizer:
        """One that goes on from here."""
        other = ByteLevelDetokenizer(self._texts)
        other._decoder.setstate(self._decoder.getstate())
        other._pending = self._pending
        return other

    def finish(self) -> str:
        """What was held back; an incomplete character becomes U+FFFD."""
        self._pending = False
        return self._decoder.decode(b"", final=True)


class PieceDetokenizer:
    """Of SentencePiece-style vocabularies: drops spaces in front of the text; byte tokens are text as soon as
    they are characters, so that at most three wait for a fourth.

    Hugging Face's ByteFallback decodes a run of them as a whole or, when it is not valid UTF-8, shows one
    U+FFFD per byte. Nothing of a run could be streamed before its end: here, what is valid at its
    beginning is shown, and each byte from the first invalid one on becomes U+FFFD.
    """

    __slots__ = ("_front", "_is_invalid", "_run", "_texts")

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        # Bytes of the present run that wait, and whether it had an invalid one.
        self._run = bytearray()
        self._is_invalid = False
        # Which spaces are dropped of what comes first; None once something has come.
        self._front: DecoderKind | None = texts.vocabulary.decoder

    def feed(self, token_ids: Iterable[int]) -> str:
        """See ByteLevelDetokenizer."""
        pieces = []
        for token_id in token_ids:
            text = self._texts.alone(token_id)
            if text is None:
                pieces.append(self._go_on(self._texts.raw(token_id)))
            elif text:
                pieces.append(self._end_run())
                if self._front is DecoderKind.METASPACE:
                    text, self._front = text.replace(" ", ""), None
                pieces.append(text)
        return self._without_leading_space("".join(pieces))

    def copy(self) -> PieceDetokenizer:
        """See ByteLevelDetokenizer."""
        other = PieceDetokenizer(self._texts)
        other._run[:], other._is_invalid, other._front = self._run, self._is_invalid, self._front
        return other

    def finish(self) -> str:
        """See ByteLevelDetokenizer."""
        return self._without_leading_space(self._end_run())

    def _go_on(self, raw: bytes) -> str:
        if self._front is DecoderKind.METASPACE:
            self._front = None
        self._run += raw
        text = ""
        if not self._is_invalid:
            try:
                text, num_read = codecs.utf_8_decode(self._run, "strict", False)
            except UnicodeDecodeError as error:
                num_read, self._is_invalid = error.start, True
                text = self._run[:num_read].decode()
            del self._run[:num_read]
        return text + self._give_up() if self._is_invalid else text

    def _give_up(self) -> str:
        num_bytes = len(self._run)
        self._run.clear()
        return _REPLACEMENT * num_bytes

    def _end_run(self) -> str:
        self._is_invalid = False
        return self._give_up()

    def _without_leading_space(self, text: str) -> str:
        if self._front is not DecoderKind.SENTENCEPIECE or not text:
            return text
        self._front = None
        return text.removeprefix(" ")


Detokenizer: TypeAlias = ByteLevelDetokenizer | PieceDetokenizer


def detokenizer(texts: TokenTexts) -> Detokenizer:
    """A fresh detokenizer of the kind that the vocabulary asks for."""
    vocabulary = texts.vocabulary
    if vocabulary.decoder is DecoderKind.BYTE_LEVEL and not vocabulary.byte_ids:
        return ByteLevelDetokenizer(texts)
    return PieceDetokenizer(texts)


def decode(texts: TokenTexts, token_ids: Iterable[int]) -> str:
    """Text of a whole list of ids."""
    decoder = detokenizer(texts)
    return decoder.feed(token_ids) + decoder.finish()
