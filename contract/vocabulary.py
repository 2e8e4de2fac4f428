"""How the bytes of tokens become text."""

from __future__ import annotations

from enum import StrEnum


class DecoderKind(StrEnum):
    """How token bytes join to text: they are concatenated, and what a tokenizer puts in front is dropped."""

    BYTE_LEVEL = "byte_level"
    # One leading space of the whole text is dropped.
    SENTENCEPIECE = "sentencepiece"
    # All spaces of the first token are dropped.
    METASPACE = "metaspace"
