"""Answers of the tokenizer service to domain types."""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.tokenizer.v1 import tokenizer_pb2

from contract.proto.grammar import grammar, report
from contract.vocabulary import DecoderKind
from gateway.text.vocabulary import Vocabulary
from gateway.types.prepared import Prepared

_DECODERS = {tokenizer_pb2.DecoderKind.Value(f"DECODER_KIND_{kind.name}"): kind for kind in DecoderKind} | {
    tokenizer_pb2.DECODER_KIND_UNSPECIFIED: DecoderKind.BYTE_LEVEL
}


def prepared(message: tokenizer_pb2.PrepareResponse) -> Prepared:
    """What the tokenizer service made of a request."""
    return Prepared(
        token_ids=tuple(message.token_ids),
        grammar=grammar(message.grammar) if message.HasField("grammar") else None,
        enforcement=report(message.enforcement) if message.HasField("enforcement") else None,
        vocabulary_fingerprint=message.vocabulary_fingerprint,
        assistant_prefix=message.assistant_prefix,
    )


def vocabulary(message: tokenizer_pb2.GetVocabularyResponse) -> Vocabulary:
    """What decoding needs."""
    config: dict[str, Any] = {}
    if message.generation_config_json:
        config = msgspec.json.decode(message.generation_config_json, type=dict[str, Any])
    return Vocabulary(
        fingerprint=message.fingerprint,
        decoder=_DECODERS[message.decoder],
        tokens=tuple(message.tokens),
        special_ids=frozenset(message.special_ids),
        byte_ids=frozenset(message.byte_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        tool_call_format=message.tool_call_format,
        reasoning_format=message.reasoning_format,
        generation_config=config,
    )
