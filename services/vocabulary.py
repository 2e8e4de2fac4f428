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
    """tokenizer.json with the tokens that only tokenizer_config.json declares.

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
    added: list[dict[str, Any]] = description.setdefault("added_tokens", [])
    known = {token["content"] for token in added} | _model_tokens(description.get("model", {}))
    missing = [
        {
            "id": int(token_id),
            "content": token["content"],
            "single_word": token.get("single_word", False),
            "lstrip": token.get("lstrip", False),
            "rstrip": token.get("rstrip", False),
            "normalized": token.get("normalized", not token.get("special", False)),
            "special": token.get("special", False),
        }
        for token_id, token in sorted(declared.items(), key=lambda item: int(item[0]))
        if token["content"] not in known
    ]
    if not missing:
        return text
    added += missing
    return json.dumps(description, ensure_ascii=False)


def _model_tokens(model: dict[str, Any]) -> set[str]:
    vocabulary = model.get("vocab", ())
    # Unigram models list pairs of a token and its score.
    return {each if isinstance(each, str) else each[0] for each in vocabulary}
