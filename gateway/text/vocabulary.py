"""The vocabulary that the gateway decodes with: token id to bytes, and which ids are never shown."""

from __future__ import annotations

import msgspec

from contract.vocabulary import DecoderKind


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
