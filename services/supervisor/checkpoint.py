"""Finds the checkpoint that is to be served: a directory, the bundled model, or a download from the hub."""

from __future__ import annotations

import re
from pathlib import Path

from services import hub
from services.errors import ConfigError
from services.supervisor.config import ROOT

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve(model: str, *, weights: bool = True) -> Path:
    """The checkpoint `model`: a directory or GGUF file, one inside this repository, or a hub id that is
    downloaded.

    `weights=False` fetches tokenizer and configuration only. Raises ConfigError with what was tried.
    """
    for candidate in (Path(model).expanduser(), ROOT / model):
        if candidate.is_dir():
            return _checked(candidate.resolve(), model)
        if candidate.suffix == ".gguf" and candidate.is_file():
            return _with_tokenizer(candidate.resolve(), model)
    if _HUB_ID.fullmatch(model) and not model.startswith("models/"):
        return _checked(hub.download(model, weights=weights), model)
    # The same place when this is the working directory.
    tried = dict.fromkeys((str(Path(model).expanduser().absolute()), str(ROOT / model)))
    raise ConfigError(
        f"model {model!r}: there is no such directory (tried {' and '.join(tried)}); "
        "give a directory in Hugging Face format, or a hub id such as Qwen/Qwen3-0.6B"
    )


def _checked(directory: Path, model: str) -> Path:
    if any(directory.glob("*.gguf")):
        return _with_tokenizer(directory, model)
    if not (directory / "config.json").is_file():
        raise ConfigError(
            f"model {model!r}: {directory} has no config.json; give a checkpoint in Hugging Face format"
        )
    return directory


def _with_tokenizer(path: Path, model: str) -> Path:
    """A GGUF file, or a folder with one, beside which the tokenizer must lie."""
    folder = path.parent if path.is_file() else path
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model {model!r}: {folder} has no tokenizer.json; copy tokenizer.json and tokenizer_config.json "
            "of the original checkpoint there: the tokenizer inside a GGUF file is not used"
        )
    return path
