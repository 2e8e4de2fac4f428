"""The working folder of a run, which outlives it when it is interrupted, and the key of what lies there."""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from checkpoint.files import is_gguf
from engine.model.gguf_file import split_files
from runtime.errors import ConfigError

_KEY_CHARS = 12


def model_digest(checkpoint: Path) -> str:
    """SHA-256 of a checkpoint's configuration and weights, with the names of their files."""
    if is_gguf(checkpoint):
        files = split_files(checkpoint)
    else:
        files = sorted((*checkpoint.glob("*.safetensors"), checkpoint / "config.json"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            digest.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def run_key(parts: Mapping[str, object]) -> str:
    """What decides the numbers of a result, as one name."""
    told = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(told.encode()).hexdigest()[:_KEY_CHARS]


def check_out(out: Path) -> None:
    """Raises ConfigError where a result would have no place."""
    if out.exists():
        raise ConfigError(f"--out {out}: it is there already; remove it, or name another folder")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"--out {out}: {out.absolute().parent} is no folder; make it first")


@contextmanager
def working_folder(out: Path, key: str) -> Iterator[Path]:
    """The folder beside `out` of this key, held by one process; what an interrupted run left is still there.
    Raises ConfigError where another process has it.
    """
    folder = out.absolute().parent / f".{out.name}.{key}"
    folder.mkdir(exist_ok=True)
    lock = folder / ".lock"
    with lock.open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"{folder}: another process makes {out}; wait for it") from error
        yield folder


def publish(folder: Path, result: Path, out: Path) -> None:
    """Makes a whole result appear, and deletes the working folder. Raises ConfigError if `out` is there."""
    try:
        result.rename(out)
    except OSError as error:
        raise ConfigError(f"--out {out}: {error.strerror}; the result is whole in {result}") from error
    shutil.rmtree(folder, ignore_errors=True)
