"""Where a checkpoint is: a directory in Hugging Face format, a GGUF file, or a model of huggingface.co."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from runtime.errors import ConfigError

# Patterns of the files that serving needs; other weight formats (pickles, ONNX, ...) are not downloaded.
_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "tokenizer*"]
_PATTERNS = [*_TOKENIZER_PATTERNS, "*.safetensors", "*.txt"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")


def find(name: str, key: str = "model.path", *, weights: bool = True) -> Path:
    """A GGUF file (also the only one in a directory), or else a directory: a hub id is downloaded unless the
    local cache has it, without `weights` tokenizer and configuration alone. Raises ConfigError naming `key`.
    """
    path = Path(name)
    if path.is_dir():
        return _gguf_inside(path, key) or path
    if is_gguf(path) and path.is_file():
        return path
    if not is_hub_id(name):
        raise ConfigError(
            f"{key} = {name!r}: there is no such directory, and it is not a hub id (owner/name); give "
            "the directory of a checkpoint in Hugging Face format, or a GGUF file"
        )
    return _download(name, key, weights=weights)


def expanded(name: str) -> Path:
    """A path whose beginning "~" is the user's directory, where there is one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_hub_id(name: str) -> bool:
    """Whether `name` could be that of a model of huggingface.co; this repository's are not."""
    return _HUB_ID.fullmatch(name) is not None and not name.startswith("models/")


def is_gguf(path: Path) -> bool:
    """Whether a checkpoint is a GGUF file and not a folder."""
    return path.suffix == ".gguf"


def folder_of(checkpoint: Path) -> Path:
    """Where the files beside the weights are, such as tokenizer.json."""
    return checkpoint.parent if is_gguf(checkpoint) else checkpoint


def tokenizer_file(checkpoint: Path) -> Path:
    """What holds the tokenizer of a checkpoint that `find` found. Raises ConfigError where nothing does."""
    folder = folder_of(checkpoint)
    if (folder / "tokenizer.json").is_file():
        return folder / "tokenizer.json"
    if is_gguf(checkpoint):
        return checkpoint
    if (folder / "tokenizer.model").is_file():
        return folder / "tokenizer.model"
    raise ConfigError(
        f"model.path: {folder} has neither tokenizer.json nor tokenizer.model; copy them there, with "
        "tokenizer_config.json, from the original checkpoint"
    )


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no file. Raises ConfigError."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is expected")
    return value


def _gguf_inside(folder: Path, key: str) -> Path | None:
    """The only GGUF model in a folder without safetensors; its first file when it is split."""
    if any(folder.glob("*.safetensors")):
        return None
    files = sorted(file for file in folder.glob("*.gguf") if not _LATER_PART.search(file.name))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{key} = {str(folder)!r} holds several GGUF files ({names}); name one of them")
    return files[0] if files else None


def _download(hub_id: str, key: str, *, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_PATTERNS if weights else _TOKENIZER_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{key} = {hub_id!r}: no directory of that name here, and huggingface.co cannot be reached to "
            "download it; without internet, copy the checkpoint to this machine and give its directory"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{key} = {hub_id!r}: huggingface.co refused the download: {error}; check the name, and set "
            "HF_TOKEN for a gated model"
        ) from error
    # The last where nobody says what the user's directory is.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{key} = {hub_id!r}: there is no such directory, and the download failed: {error}; set HF_HOME "
            "to a directory that can be written, or give the directory of a checkpoint in Hugging Face format"
        ) from error
