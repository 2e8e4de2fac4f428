"""A checkpoint's vocabulary and its identity, read the same way by the tokenizer service and the engine."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

# The first of these that exists identifies the vocabulary.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def checkpoint_fingerprint(path: str | Path) -> str:
    """SHA-256 of the checkpoint's tokenizer file, lower-case hex. That of a GGUF file lies beside it.

    Raises FileNotFoundError when the directory has none of tokenizer.json, tokenizer.model and vocab.json.
    """
    directory = Path(path)
    if directory.suffix == ".gguf":
        directory = directory.parent
    for name in _TOKENIZER_FILES:
        file = directory / name
        if file.is_file():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    raise FileNotFoundError(f"{directory}: no tokenizer file ({', '.join(_TOKENIZER_FILES)})")


def whole_tokenizer_json(path: str | Path) -> str:
    """tokenizer.json with the added tokens as tokenizer_config.json declares them, which has the last word.

    Raises OSError or ValueError for files that cannot be read.
    """
    directory = Path(path)
    text = (directory / "tokenizer.json").read_text(encoding="utf-8")
    config_file = directory / "tokenizer_config.json"
    if not config_file.is_file():
        return text
    declared = json.loads(config_file.read_text(encoding="utf-8")).get("added_tokens_decoder", {})
    if not declared:
        return text
    description = json.loads(text)
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
