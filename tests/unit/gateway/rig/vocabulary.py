"""A byte-level vocabulary: ids 0 to 255 are the bytes, then a few words and control symbols."""

from __future__ import annotations

import hashlib
import re

WORDS = (b" the", b" gateway", b"<tool_call>", b"</tool_call>", b"<think>", b"</think>", b"\xf0\x9f\x99\x82")
CONTROLS = (b"<|end|>", b"<|start|>")
TOKENS = (*(bytes([value]) for value in range(256)), *WORDS, *CONTROLS)
END_ID = TOKENS.index(b"<|end|>")
SPECIAL_IDS = (END_ID, TOKENS.index(b"<|start|>"))
_TAGS = {tag: TOKENS.index(tag.encode()) for tag in ("<think>", "</think>")}
FINGERPRINT = hashlib.sha256(b"".join(TOKENS)).hexdigest()


def written(text: str) -> list[int]:
    """What a model writes: the tags of thoughts as their tokens, the rest byte by byte."""
    pieces = re.split("(</?think>)", text)
    return [each for piece in pieces for each in ([_TAGS[piece]] if piece in _TAGS else encode(piece))]


def encode(text: str) -> list[int]:
    """One id per UTF-8 byte."""
    return list(text.encode())
