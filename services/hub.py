"""Checkpoints of huggingface.co."""

from __future__ import annotations

from pathlib import Path

from services.errors import ConfigError

# What serving needs; other weight formats (pickles, ONNX, ...) are not downloaded.
_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "tokenizer*"]
_PATTERNS = [*_TOKENIZER_PATTERNS, "*.safetensors", "*.txt"]


def download(hub_id: str, *, weights: bool) -> Path:
    """The folder of a model, from the local cache where it is there; without `weights` tokenizer and
    configuration alone. Raises ConfigError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_PATTERNS if weights else _TOKENIZER_PATTERNS))
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"model.path {hub_id!r}: no directory of that name here, and huggingface.co cannot be reached to "
            "download it; without internet, copy the checkpoint to this machine and give its directory"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"model.path {hub_id!r}: huggingface.co refused the download: {error}; check the name, and set "
            "HF_TOKEN for a gated model"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.path {hub_id!r}: there is no such directory, and the download failed: {error}; give the "
            "directory of a checkpoint in Hugging Face format"
        ) from error
