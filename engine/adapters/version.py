"""Which adapter a folder holds: the digest of its files, wherever they lie. The standard library alone.

The engine's front names an adapter so before any core reads it, and our core reads no other files under that
version. Two folders with the same files are one adapter.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from runtime.errors import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Stamp = tuple[tuple[int, int, int, int], ...]
_CHUNK_BYTES = 1 << 20


class AdapterError(ConfigError):
    """The adapter cannot be served; the message names the folder, what of it is at fault and the remedy."""


def version_of(folder: str | Path) -> str:
    """Digest of an adapter's files; reads all of them. Raises AdapterError."""
    if "\0" in str(folder):
        raise AdapterError("it holds a NUL character; give the folder that PEFT saved, as the engine sees it")
    digest = blake2b(digest_size=16, person=b"millrace-lora")
    try:
        before = stamp_of(folder)
        for name in (CONFIG, WEIGHTS):
            with Path(folder, name).open("rb") as file:
                digest.update(len(name).to_bytes(4, "little"))
                digest.update(Path(folder, name).stat().st_size.to_bytes(8, "little"))
                while chunk := file.read(_CHUNK_BYTES):
                    digest.update(chunk)
        if stamp_of(folder) == before:
            return digest.hexdigest()
    except FileNotFoundError as error:
        raise AdapterError(
            f"{folder}: there is no {CONFIG} beside an {WEIGHTS}; give the folder that PEFT saved, as "
            "safetensors, by a path that engines see"
        ) from error
    except OSError as error:
        raise AdapterError(f"{folder}: {error}; give a folder that the engine may read") from error
    raise AdapterError(f"{folder} changed while it was read; add the adapter when its files are whole")


def stamp_of(folder: str | Path) -> Stamp:
    """What changes with an adapter's files. Raises OSError."""
    found = [Path(folder, name).stat() for name in (CONFIG, WEIGHTS)]
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in found)
