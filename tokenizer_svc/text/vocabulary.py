"""The vocabulary as bytes: what exact incremental detokenization needs.

Byte-level tokenizers write each byte as one printable character; SentencePiece-style ones write a space as ▁
and bytes outside their alphabet as <0xNN>. Both are undone here, once, so that joining token bytes gives the
model's text whatever the cut.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from contract.vocabulary import DecoderKind
from runtime.errors import ConfigError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of every token by id; ids without a token are empty."""

    fingerprint: str
    decoder: DecoderKind
    tokens: list[bytes]
    special_ids: tuple[int, ...]
    # Tokens that stand for one byte beside tokens that are whole text (<0xNN>).
    byte_ids: frozenset[int] = frozenset()


def byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes stand for themselves, the rest are shifted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    shifted = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + index): byte for index, byte in enumerate(shifted)})
    return table


def build_vocabulary(
    description: dict[str, Any], ids: dict[str, int], fingerprint: str
) -> TokenizerVocabulary:
    """From the parsed tokenizer.json and the tokenizer's own token → id table.

    Raises ConfigError for a decoder whose tokens' bytes are unknown. WordPiece loses what its
    normalizer takes away; nothing is generated with it.
    """
    steps = _decoder_steps(description.get("decoder"))
    kinds = {step["type"] for step in steps}
    added = {token["content"]: token for token in description.get("added_tokens", ())}
    special = {ids[content] for content, token in added.items() if token["special"] and content in ids}
    tokens = [b""] * (max(ids.values(), default=-1) + 1)
    byte_ids: frozenset[int] = frozenset()
    if kinds and kinds <= {"ByteLevel", "Fuse"}:
        table = byte_of_character()
        kind = DecoderKind.BYTE_LEVEL
        for text, token_id in ids.items():
            tokens[token_id] = text.encode() if text in added else _byte_level_bytes(text, table)
    elif kinds == {"WordPiece"}:
        prefix, kind = steps[0].get("prefix", "##"), DecoderKind.METASPACE
        for text, token_id in ids.items():
            tokens[token_id] = (text if text in added else _word_piece(text, prefix)).encode()
    elif replaced := _replacements(steps):
        byte_fallback = "ByteFallback" in kinds
        for text, token_id in ids.items():
            # Control tokens keep their spelling: they are never shown, and parsers look for it.
            tokens[token_id] = (
                text.encode() if token_id in special else _piece_bytes(text, replaced, byte_fallback)
            )
        if byte_fallback:
            spelled = {token_id for text, token_id in ids.items() if _BYTE_TOKEN.fullmatch(text)}
            byte_ids = frozenset(spelled - special)
        kind = _spaces_in_front(steps)
    else:
        raise ConfigError(
            f"tokenizer.json: decoder {sorted(kinds) or 'missing'} is not supported; "
            "byte-level, SentencePiece-style and WordPiece tokenizers are"
        )
    return TokenizerVocabulary(
        fingerprint=fingerprint,
        decoder=kind,
        tokens=tokens,
        special_ids=tuple(sorted(special)),
        byte_ids=byte_ids,
    )


def _decoder_steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for each in decoder["decoders"] for step in _decoder_steps(each)]
    return [decoder]


def _replacements(steps: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of a text in tokens and what it stands for; empty where no token says where spaces are.

    Raises ConfigError for a step that has no meaning here: leaving it out would change the model's text.
    """
    found: list[tuple[str, str]] = []
    fused = False
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                found.append((old, new))
            case {"type": "Metaspace"} if not fused:
                found.append((step["replacement"], " "))
            case {"type": "Strip", "content": " ", "start": 0 | 1, "stop": 0} if fused:
                pass
            case {"type": "ByteFallback"} if not fused:
                pass
            case {"type": "Fuse"}:
                fused = True
            case _:
                raise ConfigError(
                    f"tokenizer.json: the decoder's step {step} is not supported; byte-level and "
                    "SentencePiece-style tokenizers are"
                )
    return found if any(new == " " for _, new in found) else []


def _spaces_in_front(steps: list[dict[str, Any]]) -> DecoderKind:
    for step in steps:
        if step["type"] == "Strip" and step["start"] > 0:
            return DecoderKind.SENTENCEPIECE
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return DecoderKind.METASPACE
    return DecoderKind.BYTE_LEVEL


def _word_piece(text: str, prefix: str) -> str:
    # Words begin with a space of their own; what goes on with one says so.
    return text.removeprefix(prefix) if text.startswith(prefix) else f" {text}"


def _byte_level_bytes(text: str, table: dict[str, int]) -> bytes:
    # A token with a character outside the alphabet is a raw addition to the vocabulary and stands for itself.
    try:
        return bytes([table[character] for character in text])
    except KeyError:
        return text.encode()


def _piece_bytes(text: str, replaced: list[tuple[str, str]], byte_fallback: bool) -> bytes:
    match = _BYTE_TOKEN.fullmatch(text) if byte_fallback else None
    if match:
        return bytes((int(match.group(1), 16),))
    for old, new in replaced:
        text = text.replace(old, new)
    return text.encode()
