"""Identity of a checkpoint's vocabulary, computed the same way by the tokenizer service and the engine."""

from __future__ import annotations

import hashlib
from pathlib import Path

# The first of these that exists identifies the vocabulary.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def checkpoint_fingerprint(path: str | Path) -> str:
    """SHA-256 of the checkpoint's tokenizer file, lower-case hex.

    Raises FileNotFoundError when the directory has none of tokenizer.json, tokenizer.model and vocab.json.
    """
    directory = Path(path)
    for name in _TOKENIZER_FILES:
        file = directory / name
        if file.is_file():
            return hashlib.sha256(file.read_bytes()).hexdigest()
    raise FileNotFoundError(f"{directory}: no tokenizer file ({', '.join(_TOKENIZER_FILES)})")
