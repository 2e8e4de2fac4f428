"""A checkpoint's vocabulary and its identity, read the same way by the tokenizer service and the engine.

It is that of tokenizer.json, also of one beside a GGUF file. Where there is none, a GGUF file's own tokenizer
or SentencePiece's tokenizer.model is converted.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from checkpoint import gguf_tokenizer
from checkpoint.files import find, folder_of, is_gguf, read_json, tokenizer_file
from runtime.errors import ConfigError

_ADDED_TOKENS = "added_tokens_decoder"


class TokenizerFiles(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint's files say of its tokenizer."""

    # As tokenizer.json, with the added tokens as the configuration declares them, which has the last word.
    tokenizer_json: str
    # tokenizer_config.json, over what a GGUF file or tokenizer.model says of the same keys.
    config: dict[str, Any]
    # Those that a GGUF file names beside eos_token.
    eos_token_ids: tuple[int, ...] = ()


def checkpoint_fingerprint(path: str | Path) -> str:
    """SHA-256 of what holds the checkpoint's tokenizer, lower-case hex. Raises ConfigError."""
    file = tokenizer_file(find(str(path)))
    if is_gguf(file):
        return gguf_tokenizer.fingerprint(file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def read_tokenizer(path: str | Path) -> TokenizerFiles:
    """Converts what is no tokenizer.json. Raises ConfigError that names the file at fault."""
    checkpoint = find(str(path))
    folder, file = folder_of(checkpoint), tokenizer_file(checkpoint)
    config: dict[str, Any] = {}
    eos_token_ids: tuple[int, ...] = ()
    if is_gguf(checkpoint):
        metadata = gguf_tokenizer.read(checkpoint)
        config, eos_token_ids = gguf_tokenizer.config(metadata), gguf_tokenizer.eos_token_ids(metadata)
    declared = read_json(folder / "tokenizer_config.json") or {}
    try:
        if is_gguf(file):
            text = gguf_tokenizer.converted(metadata).to_str()
        elif file.suffix == ".model":
            # Protobuf is imported by those who have such a file.
            from checkpoint import sentencepiece

            model = sentencepiece.read(file)
            config = sentencepiece.config(model, folder)
            text = sentencepiece.converted(model, config | declared).to_str()
        else:
            text = file.read_text(encoding="utf-8")
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; copy or download it again") from error
    config |= declared
    return TokenizerFiles(
        tokenizer_json=_with_added(text, config.get(_ADDED_TOKENS, {}), file),
        config=config,
        eos_token_ids=eos_token_ids,
    )


def whole_tokenizer_json(path: str | Path) -> str:
    """See `TokenizerFiles.tokenizer_json`. Raises ConfigError."""
    return read_tokenizer(path).tokenizer_json


def _with_added(text: str, declared: dict[str, Any], file: Path) -> str:
    """tokenizer.json with the added tokens that `declared` has by id."""
    if not declared:
        return text
    try:
        description = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}: not a tokenizer: {error}") from error
    tokens: dict[str, dict[str, Any]] = {
        token["content"]: token for token in description.get("added_tokens") or ()
    }
    changed = False
    for token_id, token in sorted(declared.items(), key=lambda item: int(item[0])):
        content = token["content"]
        known = tokens.get(content)
        whole = {
            "id": known["id"] if known else int(token_id),
            "content": content,
            "single_word": token.get("single_word", False),
            "lstrip": token.get("lstrip", False),
            "rstrip": token.get("rstrip", False),
            "normalized": token.get("normalized", not token.get("special", False)),
            "special": token.get("special", False),
        }
        if known != whole:
            tokens[content] = whole
            changed = True
    if not changed:
        return text
    description["added_tokens"] = sorted(tokens.values(), key=lambda token: int(token["id"]))
    return json.dumps(description, ensure_ascii=False)
