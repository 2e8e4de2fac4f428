"""Models of huggingface.co, or of a server that plays it (HF_ENDPOINT), by huggingface_hub and its cache.

What was downloaded is verified once by the digests that the hub gives: the SHA-256 of large files, git's hash
of small ones.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from checkpoint.gguf_parts import part_names
from runtime.errors import ConfigError

# Patterns of the files that serving needs; other weight formats (pickles, ONNX, ...) are not downloaded.
_TOKENIZER_PATTERNS = ["*.json", "*.jinja", "*.model", "tokenizer*"]
_PATTERNS = [*_TOKENIZER_PATTERNS, "*.safetensors", "*.txt"]
_REPOSITORY = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
_HUB_ID = re.compile(_REPOSITORY)
_REFERENCE = re.compile(rf"hf:(?P<repository>{_REPOSITORY})(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[^:]+))?")
_LARGE_DIGEST, _SMALL_DIGEST = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
# Beside what is verified, in the cache of huggingface_hub: names of files that were.
_VERIFIED = "millrace-verified"


class HubReference(NamedTuple):
    """A model of the hub: hf:owner/name[@revision][:file], or owner/name."""

    repository: str
    revision: str | None = None
    file: str | None = None


def hub_reference(name: str) -> HubReference | None:
    """What a name stands for, where it could be that of a model of the hub; this repository's are not."""
    if match := _REFERENCE.fullmatch(name):
        return HubReference(**match.groupdict())
    if _HUB_ID.fullmatch(name) and not name.startswith("models/"):
        return HubReference(name)
    return None


def downloaded(name: str, reference: HubReference, key: str, *, weights: bool) -> Path:
    """The model's folder or file, downloaded where the cache does not have it, and verified. Without
    `weights` tokenizer and configuration alone. Raises ConfigError naming `key`.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    repository, revision, file = reference
    try:
        if file is not None:
            parts = [Path(hf_hub_download(repository, part, revision=revision)) for part in part_names(file)]
            found = parts[0]
        else:
            patterns = _PATTERNS if weights else _TOKENIZER_PATTERNS
            found = Path(snapshot_download(repository, revision=revision, allow_patterns=patterns))
            if not (found / "config.json").is_file():
                _refuse_unnamed(name, reference, key)
    except LocalEntryNotFoundError as error:
        raise ConfigError(
            f"{key} = {name!r}: no directory of that name here, and huggingface.co cannot be reached to "
            "download it; without internet, copy the checkpoint to this machine and give its directory"
        ) from error
    except (HfHubHTTPError, EntryNotFoundError) as error:
        raise ConfigError(
            f"{key} = {name!r}: huggingface.co refused the download: {error}; check the name, and set "
            "HF_TOKEN for a gated model"
        ) from error
    # The last where nobody says what the user's directory is.
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"{key} = {name!r}: there is no such directory, and the download failed: {error}; set HF_HOME "
            "to a directory that can be written, or give the directory of a checkpoint in Hugging Face format"
        ) from error
    for each in parts if file is not None else sorted(found.rglob("*")):
        _verify(each, f"{key} = {name!r}")
    return found


def _refuse_unnamed(name: str, reference: HubReference, key: str) -> None:
    """Raises ConfigError with the GGUF files of a repository that has nothing else."""
    from huggingface_hub import HfApi

    files = HfApi().list_repo_files(reference.repository, revision=reference.revision)
    if found := sorted(each for each in files if each.endswith(".gguf")):
        at = f"@{reference.revision}" if reference.revision else ""
        raise ConfigError(
            f"{key} = {name!r}: it has GGUF files; name one, as hf:{reference.repository}{at}:{found[0]}"
            + (f" (there are {', '.join(found)})" if len(found) > 1 else "")
        )


def _verify(file: Path, what: str) -> None:
    """Raises ConfigError for a file that is not what the hub says that it is, which is deleted. The cache
    keeps files under their digests, and links to them.
    """
    kept = file.resolve()
    if not file.is_symlink() or not kept.is_file():
        return
    # What speaks HTTP is imported by those who fetch.
    from checkpoint.download import digest

    seen = kept.parent.parent / _VERIFIED / kept.name
    if seen.exists():
        return
    if _LARGE_DIGEST.fullmatch(kept.name):
        found = digest(kept)
    elif _SMALL_DIGEST.fullmatch(kept.name):
        header = f"blob {kept.stat().st_size}\0".encode()
        found = digest(kept, lambda: hashlib.sha1(header, usedforsecurity=False))
    else:
        return
    if found != kept.name:
        file.unlink()
        kept.unlink()
        raise ConfigError(
            f"{what}: {file.name} has the digest {found} and not {kept.name}, as the hub says; it is "
            "deleted: start again, and ask whoever keeps that server if it stays so"
        )
    seen.parent.mkdir(exist_ok=True)
    seen.touch()
