"""Where a checkpoint is: a directory in Hugging Face format, a GGUF file, a name that is known, or a model of
huggingface.co.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoint.gguf_parts import is_later_part, part_names
from checkpoint.hub import downloaded, hub_reference
from checkpoint.known import fetched, known_models
from runtime.errors import ConfigError


def find(name: str, key: str = "model.path", *, weights: bool = True) -> Path:
    """A GGUF file (the first one of a model that is split; also of the only one in a directory), or else a
    directory. What is known by one name, or is a
    model of the hub, is downloaded unless the local cache has it; without `weights` of the latter tokenizer
    and configuration alone. Raises ConfigError naming `key`.
    """
    path = Path(name)
    if path.is_dir():
        return _gguf_inside(path, key) or path
    if is_gguf(path) and path.is_file():
        return path.with_name(part_names(path.name)[0])
    if name in known_models():
        return fetched(name, key)
    reference = hub_reference(name)
    if reference is None:
        raise ConfigError(
            f"{key} = {name!r}: there is no such directory, and it is neither a known name "
            f"({', '.join(known_models())}) nor a hub id (owner/name); give the directory of a checkpoint in "
            "Hugging Face format, or a GGUF file"
        )
    return downloaded(name, reference, key, weights=weights)


def expanded(name: str) -> Path:
    """A path whose beginning "~" is the user's directory, where there is one."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_remote(name: str) -> bool:
    """Whether `name` could be that of what is fetched: a known model, or one of huggingface.co."""
    return name in known_models() or hub_reference(name) is not None


def told_name(name: str, found: Path) -> str:
    """What clients call a checkpoint that was asked for by a name, unless they are told otherwise."""
    if name in known_models():
        return name
    reference, is_here = hub_reference(name), found.exists() and "snapshots" not in found.parts
    return found.name if reference is None or is_here else reference.repository


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
    files = sorted(file for file in folder.glob("*.gguf") if not is_later_part(file.name))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ConfigError(f"{key} = {str(folder)!r} holds several GGUF files ({names}); name one of them")
    return files[0] if files else None
