"""Files of packed weights, one for each model as it was packed, in a folder that engines of a machine share.

A file is eight bytes that name its form, then pieces (parts of weights, arrays, the pickled record) with a
checksum each, an index of them, and where the index is. It appears under its name as a whole, by a rename,
after it is on disk; who writes holds a lock on the unfinished file, so what a killed process left is known by
having none, and the next who writes removes it. A file's time of modification is that of its last use: what
was not used for longest makes room.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from shutil import disk_usage
from typing import NamedTuple

import msgspec

SUFFIX = ".packed"
_FORM = b"mrpw-1\n\0"
# Behind the index: where it begins, its bytes, their checksum, and the form once more.
_END = struct.Struct("<QQI8s")
_UNFINISHED = ".writing-"
_PIECE_BYTES = 8 << 20
# What of the file system is left free: a part of it, and of a large one no more than so many bytes.
_FREE_SHARE = 0.05
_FREE_BYTES = 2 << 30


class WeightsDamagedError(Exception):
    """A file is not what was written under its name."""


class NotKeptError(Exception):
    """A model is not kept; the message says why, and the remedy."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes in a file, and their CRC-32."""

    offset: int
    num_bytes: int
    checksum: int


class KeptWeight(msgspec.Struct, frozen=True, array_like=True):
    """A packed weight: its struct, whose addresses say nothing here, and the parts that these lead to."""

    described: bytes
    parts: dict[str, Piece]


class CheckpointFile(msgspec.Struct, frozen=True, array_like=True):
    """A file that weights were read from: its name below the checkpoint, and what tells it from others."""

    name: str
    num_bytes: int
    changed_ns: tuple[int, int]
    digest: bytes = b""


class KeptIndex(msgspec.Struct, frozen=True):
    """What is in a file."""

    fingerprint: str
    # For people: the checkpoint and what was asked for.
    model: str
    files: tuple[CheckpointFile, ...]
    # Real paths of those from which tables are mapped, to their names.
    mapped: dict[str, str]
    weights: tuple[KeptWeight, ...]
    arrays: tuple[Piece, ...]
    pickled: Piece


class KeptFile(NamedTuple):
    """A file of the folder."""

    used_s: float
    num_bytes: int
    path: Path


class PieceWriter:
    """Appends pieces to an unfinished file."""

    def __init__(self, file: BufferedWriter) -> None:
        self._file = file
        file.write(_FORM)
        self._offset = len(_FORM)

    def add(self, data: memoryview | bytes) -> Piece:
        """Where `data` is now. Raises OSError."""
        begin, checksum, view = self._offset, 0, memoryview(data).cast("B")
        for first in range(0, len(view), _PIECE_BYTES):
            part = view[first : first + _PIECE_BYTES]
            checksum = zlib.crc32(part, checksum)
            self._file.write(part)
        self._offset += len(view)
        return Piece(begin, len(view), checksum)

    def finish(self, index: KeptIndex) -> None:
        """Adds the index."""
        where = self.add(msgspec.msgpack.encode(index))
        self._file.write(_END.pack(where.offset, where.num_bytes, where.checksum, _FORM))


class PieceReader:
    """Reads a file's pieces; several threads may. Raises WeightsDamagedError where one is not as written."""

    def __init__(self, path: Path) -> None:
        """Raises OSError where it is not there, and WeightsDamagedError where its index is not whole."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            status = os.fstat(self._descriptor)
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & 0o022:
                raise WeightsDamagedError("others than its owner could have written to it")
            self.index = self._read_index(status.st_size)
        except BaseException:
            self.close()
            raise

    def _read_index(self, size: int) -> KeptIndex:
        if size < len(_FORM) + _END.size:
            raise WeightsDamagedError(f"it ends after {size} bytes")
        offset, num_bytes, checksum, form = _END.unpack(
            os.pread(self._descriptor, _END.size, size - _END.size)
        )
        if form != _FORM or offset + num_bytes + _END.size != size:
            raise WeightsDamagedError("it is cut short, or not of this form")
        room = bytearray(num_bytes)
        self.read(Piece(offset, num_bytes, checksum), memoryview(room))
        try:
            return msgspec.msgpack.decode(room, type=KeptIndex)
        except msgspec.MsgspecError as error:
            raise WeightsDamagedError(f"its index says nothing: {error}") from error

    def read(self, piece: Piece, room: memoryview) -> None:
        """Fills `room`, which has the piece's bytes."""
        checksum, done = 0, 0
        while done < piece.num_bytes:
            part = room[done : done + _PIECE_BYTES]
            count = os.preadv(self._descriptor, [part], piece.offset + done)
            if not count:
                raise WeightsDamagedError(f"it ends before byte {piece.offset + piece.num_bytes}")
            checksum = zlib.crc32(part[:count], checksum)
            done += count
        if checksum != piece.checksum:
            raise WeightsDamagedError(f"bytes from {piece.offset} on have another checksum than was written")

    def close(self) -> None:
        """Ends reading."""
        os.close(self._descriptor)


class PackedFolder:
    """The folder, and the bound on what is in it. Safe to use from several processes."""

    def __init__(self, root: Path, max_bytes: int) -> None:
        self.root = root
        self.max_bytes = max_bytes

    def all(self) -> list[KeptFile]:
        """Every file, those that were not used for longest first."""
        return sorted(self._found(SUFFIX))

    def use(self, path: Path) -> None:
        """A file is of use now."""
        with contextlib.suppress(OSError):
            os.utime(path)

    def remove(self, path: Path) -> None:
        """Of which nothing can be used. Raises nothing: what cannot be deleted is found damaged again."""
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)

    def clear(self) -> int:
        """Removes every file, and what killed processes left. Returns the bytes that are free now."""
        removed = 0
        with self._locked():
            self._remove_abandoned()
            for kept in self.all():
                kept.path.unlink(missing_ok=True)
                removed += kept.num_bytes
        return removed

    @contextmanager
    def written(self, name: str, num_bytes: int) -> Iterator[PieceWriter]:
        """A file of about so many bytes, there under its name when the context ends without an error.

        Raises NotKeptError, or OSError where the folder cannot be written; and leaves nothing then.
        """
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished = self.root / f"{_UNFINISHED}{secrets.token_hex(4)}-{name}"
        with self._locked():
            self._make_room(num_bytes)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield PieceWriter(file)
                file.flush()
                os.fsync(file.fileno())
                unfinished.rename(self.root / name)
            folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except BaseException:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            raise

    def _make_room(self, num_bytes: int) -> None:
        if num_bytes > self.max_bytes:
            raise NotKeptError(
                f"it takes {num_bytes} bytes packed, and engine.packed_weights.max_bytes is "
                f"{self.max_bytes}; raise it to keep this model"
            )
        self._remove_abandoned()
        files = self.all()
        total = sum(kept.num_bytes for kept in files)
        usage = disk_usage(self.root)
        left_free = min(int(_FREE_SHARE * usage.total), _FREE_BYTES)
        free = usage.free - left_free
        for kept in files:
            if total + num_bytes <= self.max_bytes and num_bytes <= free:
                break
            kept.path.unlink(missing_ok=True)
            total -= kept.num_bytes
            free += kept.num_bytes
        if num_bytes > free:
            raise NotKeptError(
                f"it takes {num_bytes} bytes packed, and {self.root} has {max(free, 0)} beside "
                f"the {left_free} that are left free; make room there, or name another folder as "
                "engine.packed_weights.path"
            )

    def _remove_abandoned(self) -> None:
        for kept in self._found(""):
            if not kept.path.name.startswith(_UNFINISHED):
                continue
            with contextlib.suppress(OSError), kept.path.open("rb") as file:
                # Who writes it holds this.
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kept.path.unlink(missing_ok=True)

    def _found(self, suffix: str) -> Iterator[KeptFile]:
        with contextlib.suppress(OSError), os.scandir(self.root) as found:
            for each in found:
                is_unfinished = each.name.startswith(_UNFINISHED)
                if not each.name.endswith(SUFFIX) or (suffix and is_unfinished):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                    yield KeptFile(status.st_mtime, status.st_size, Path(each.path))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self.root.is_dir():
            yield
            return
        with (self.root / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
