"""The bytes of files: in a folder that all gateways share, or in object storage (`objects`).

What is stored is opaque here; `sealed` encrypts it where the deployment has a key for it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from contract.errors import MillraceError, Reason
from gateway.batches.sealed import ContentKeys, SealingPieces

# Space that passes by itself when somebody deletes something.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
PIECE_BYTES = 256 * 1024
# Called now and then while something takes long; raises InterruptedError to end it.
Beat = Callable[[], None]


def disk_full(error: OSError, folder: Path) -> MillraceError:
    """What to tell whoever wanted to write."""
    return MillraceError(
        Reason.STORE_UNAVAILABLE,
        f"files cannot be written now: {error.strerror or error}; try again when the operator has made room "
        f"for gateway.batches.directory",
        metadata={"free_bytes": str(free_bytes(folder))},
        retry_after_s=60.0,
    )


def free_bytes(folder: Path) -> int:
    """Room that the folder's disk has for us; raises OSError."""
    return shutil.disk_usage(folder).free


def check_room(folder: Path, least_bytes: int) -> None:
    """Raises OSError as for a full disk where less is free. It names the limit and not what is free, which
    changes all the time: who waits is told the same as long as the same holds.
    """
    if free_bytes(folder) < least_bytes:
        problem = f"less is free than gateway.batches.min_free_bytes = {least_bytes}"
        raise OSError(errno.ENOSPC, problem)


class ContentStorage(Protocol):
    """Where files are once they are whole. Ids are ours; nothing here may be called from the event loop.
    Everything raises STORE_UNAVAILABLE where the storage cannot be used now.
    """

    def publish(self, id_: str, source: Path, beat: Beat) -> None:
        """Takes a file's bytes from `source`, which stays as it is; doing it again changes nothing."""
        ...

    def fetch(self, id_: str, folder: Path, beat: Beat) -> Path:
        """A local path with a file's bytes, in `folder` if need be; raises FileNotFoundError."""
        ...

    def pieces(self, id_: str) -> Iterator[bytes]:
        """A file's bytes, some at a time; raises FileNotFoundError before the first."""
        ...

    def delete(self, id_: str) -> None:
        """Removes a file's bytes, if they are there."""
        ...


class DirectoryStorage:
    """Files in a folder, readable to the gateways' user alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_private(folder)

    def publish(self, id_: str, source: Path, beat: Beat) -> None:
        """See ContentStorage."""
        target = self.folder / id_
        if target.exists():
            return
        part = self.folder / f".{id_}-{secrets.token_hex(4)}"
        try:
            try:
                os.link(source, part)
            except OSError as error:
                if error.errno not in (errno.EXDEV, errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                    raise
                with source.open("rb") as file:
                    write_file(part, _pieces(file), beat)
            part.rename(target)
        finally:
            part.unlink(missing_ok=True)
        sync_folder(self.folder)

    def fetch(self, id_: str, folder: Path, beat: Beat) -> Path:
        """See ContentStorage."""
        path = self.folder / id_
        path.stat()
        return path

    def pieces(self, id_: str) -> Iterator[bytes]:
        """See ContentStorage."""
        return _pieces((self.folder / id_).open("rb"))

    def delete(self, id_: str) -> None:
        """See ContentStorage."""
        (self.folder / id_).unlink(missing_ok=True)


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def write_file(path: Path, pieces: Iterator[bytes], beat: Beat) -> int:
    """Writes a private file, which is on the disk then; its bytes. Raises OSError."""
    num_bytes = 0
    with open(path, "wb", opener=_private) as file:
        for piece in pieces:
            beat()
            num_bytes += file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return num_bytes


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def make_private(folder: Path) -> None:
    """Makes a folder that nobody else may look into."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


def sync_folder(folder: Path) -> None:
    """Has a folder's names outlive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Upload:
    """A file that is being written: it is there when it is whole, and gone when it is not."""

    def __init__(self, folder: Path, keys: ContentKeys | None = None) -> None:
        make_private(folder)
        self.id = f"file-{secrets.token_hex(16)}"
        self.path = folder / f"{secrets.token_hex(16)}.part"
        # Of what was sent; encrypted it is more.
        self.num_bytes = 0
        self.is_sealed = keys is not None
        self._sealing = None if keys is None else SealingPieces(keys.of(self.id))
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def write(self, piece: bytes) -> None:
        """Appends; raises OSError."""
        self._append(piece if self._sealing is None else self._sealing.take(piece))
        self.num_bytes += len(piece)

    def _append(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._file, view) :]

    def complete(self) -> None:
        """All of it is on the disk; raises OSError."""
        if self._sealing is not None:
            self._append(self._sealing.end())
        os.fsync(self._file)

    def discard(self) -> None:
        """Removes it; once it was published this takes away its other name alone."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.path.unlink(missing_ok=True)
