"""Finds the checkpoint that is to be served: a directory, the bundled model, or a download from the hub."""

from __future__ import annotations

from pathlib import Path

from checkpoint.files import expanded, find, is_remote, tokenizer_file
from checkpoint.known import known_models
from runtime.errors import ConfigError
from services.supervisor.config import ROOT


def resolve(model: str, *, weights: bool = True) -> Path:
    """The checkpoint `model`: a directory or GGUF file, one inside this repository, or a hub id that is
    downloaded.

    `weights=False` fetches tokenizer and configuration only. Raises ConfigError with what was tried.
    """
    for candidate in (expanded(model), ROOT / model):
        if candidate.is_dir() or (candidate.suffix == ".gguf" and candidate.is_file()):
            return _checked(candidate.resolve(), model)
    if is_remote(model):
        return _checked(find(model, weights=weights), model)
    # The same place when this is the working directory.
    tried = dict.fromkeys((str(expanded(model).absolute()), str(ROOT / model)))
    raise ConfigError(
        f"model {model!r}: there is no such directory (tried {' and '.join(tried)}); "
        "give a directory in Hugging Face format, a GGUF file, a known name "
        f"({', '.join(known_models())}), or a hub id such as Qwen/Qwen3-0.6B"
    )


def _checked(path: Path, model: str) -> Path:
    """What has a configuration and a tokenizer, as far as the names of files say."""
    if path.is_dir() and not (path / "config.json").is_file() and not any(path.glob("*.gguf")):
        raise ConfigError(
            f"model {model!r}: {path} has no config.json; give a checkpoint in Hugging Face format"
        )
    tokenizer_file(find(str(path)))
    return path
