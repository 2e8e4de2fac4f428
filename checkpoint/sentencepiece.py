"""SentencePiece's tokenizer.model, for checkpoints without tokenizer.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from millrace.tokenizer.internal.v1.sentencepiece_pb2 import SentencePieceModel
from tokenizers import Tokenizer

from checkpoint.files import read_json
from checkpoint.pieces import PieceKind, Pieces, Prefix, surround
from checkpoint.pieces import converted as converted_pieces
from runtime.errors import ConfigError

_UNIGRAM, _BPE = 1, 2
# Ids of a model that names none.
_DEFAULT_IDS = {"bos": 1, "eos": 2, "pad": -1}


def read(path: Path) -> SentencePieceModel:
    """The model in the file. Raises ConfigError, as everything here without the file's name."""
    model = SentencePieceModel()
    try:
        model.ParseFromString(path.read_bytes())
    except (OSError, DecodeError) as error:
        raise ConfigError(f"not a SentencePiece model: {error}; copy or download it again") from error
    if not model.pieces:
        raise ConfigError("not a SentencePiece model: it has no pieces; copy or download it again")
    return model


def config(model: SentencePieceModel, folder: Path) -> dict[str, Any]:
    """What the model, and files of old checkpoints, say under the keys of tokenizer_config.json."""
    found: dict[str, Any] = {}
    for name in _DEFAULT_IDS:
        token_id = _special_id(model, name)
        if token_id is not None:
            found[f"{name}_token"] = model.pieces[token_id].piece
    for each in model.pieces:
        if each.type == PieceKind.UNKNOWN:
            found["unk_token"] = each.piece
    added = read_json(folder / "added_tokens.json") or {}
    found["added_tokens_decoder"] = {token_id: {"content": content} for content, token_id in added.items()}
    return found | (read_json(folder / "special_tokens_map.json") or {})


def _special_id(model: SentencePieceModel, name: str) -> int | None:
    """The id of a token that the model names; None where it has none."""
    token_id = _optional(model.trainer_spec, f"{name}_id", _DEFAULT_IDS[name])
    return token_id if 0 <= token_id < len(model.pieces) else None


def converted(model: SentencePieceModel, config: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer under the `config` of its checkpoint. Raises ConfigError for what is not supported."""
    spec, normalizer = model.trainer_spec, model.normalizer_spec
    kind = spec.model_type or _UNIGRAM
    prepends, drops, escapes = (
        _optional(normalizer, name, True)
        for name in ("add_dummy_prefix", "remove_extra_whitespaces", "escape_whitespaces")
    )
    if kind not in (_UNIGRAM, _BPE):
        raise ConfigError(f"trainer_spec.model_type = {kind} is not supported, only unigram and BPE")
    if spec.treat_whitespace_as_suffix or not escapes:
        raise ConfigError(
            "trainer_spec.treat_whitespace_as_suffix and normalizer_spec.escape_whitespaces = false are not "
            "supported; copy a tokenizer.json of the model there"
        )
    # Checkpoints since transformers 4.31 say by this key where their model saw spaces.
    prefix: Prefix = "each" if config.get("legacy", True) else "first"
    pieces = Pieces(
        texts=[each.piece for each in model.pieces],
        scores=[each.score for each in model.pieces],
        kinds=[each.type or PieceKind.NORMAL for each in model.pieces],
        is_unigram=kind == _UNIGRAM,
        charsmap=normalizer.precompiled_charsmap,
        prefix=prefix if prepends else "none",
        drops_spaces=drops,
    )
    front, end = (
        _special_id(model, name) if config.get(f"add_{name}_token", by_default) else None
        for name, by_default in (("bos", True), ("eos", False))
    )
    try:
        tokenizer = converted_pieces(pieces)
        surround(tokenizer, pieces.texts, front, end)
    # The library's own errors have no type.
    except Exception as error:
        raise ConfigError(f"not a vocabulary that can be used: {error}") from error
    return tokenizer


def _optional(message: Any, name: str, otherwise: Any) -> Any:
    """A field that may be absent, which means `otherwise`."""
    return getattr(message, name) if message.HasField(name) else otherwise
