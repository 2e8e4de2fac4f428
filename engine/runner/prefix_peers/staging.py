"""Memory in which an engine of the same machine leaves blocks for another: a ring of slots in a file of
/dev/shm that the receiver makes for one pull, and the sender finds by a name that nobody can guess.

Engines of different machines have no such file in common, and blocks come in messages. A block has the slot
of its index, modulo their number, once the receiver has taken what was there. Where it has not, the block
goes in a message, too, so that nobody waits for anybody.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import secrets
import stat
import struct
from pathlib import Path

FOLDER = Path("/dev/shm")
# Of one pull, and of all that are under way.
MOST_BYTES, MOST_BYTES_TOGETHER = 16 << 20, 64 << 20
_PREFIX = "millrace-blocks-"
_NAME = re.compile(rf"{_PREFIX}[0-9a-f]{{32}}")
# How many blocks were taken; slots begin behind it.
_HEADER = struct.Struct("<Q")
_FIRST = mmap.PAGESIZE


class _Ring:
    def __init__(self, fd: int, num_slots: int, num_bytes: int) -> None:
        self._map = mmap.mmap(fd, _FIRST + num_slots * num_bytes)
        self.num_slots, self._num_bytes = num_slots, num_bytes

    def _slot(self, index: int) -> slice:
        first = _FIRST + index % self.num_slots * self._num_bytes
        return slice(first, first + self._num_bytes)

    def close(self) -> None:
        """Gives the memory back."""
        self._map.close()


class BlockStaging(_Ring):
    """The receiver's side, of one pull. It reads slots only that the sender has filled."""

    def __init__(self, fd: int, path: Path, num_slots: int, num_bytes: int) -> None:
        super().__init__(fd, num_slots, num_bytes)
        self._fd, self._path = fd, path
        self.total_bytes = num_slots * num_bytes

    @classmethod
    def make(cls, num_blocks: int, num_bytes: int) -> BlockStaging | None:
        """For blocks of so many bytes; None where there is no such memory, or not enough."""
        num_slots = min(num_blocks, MOST_BYTES // num_bytes)
        if not num_slots:
            return None
        path = FOLDER / f"{_PREFIX}{secrets.token_hex(16)}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            # Held as long as the file is in use: what a killed engine left behind has no owner.
            fcntl.flock(fd, fcntl.LOCK_EX)
            os.posix_fallocate(fd, 0, _FIRST)
            os.ftruncate(fd, _FIRST + num_slots * num_bytes)
            return cls(fd, path, num_slots, num_bytes)
        except OSError:
            path.unlink()
            os.close(fd)
            return None

    @property
    def name(self) -> str:
        """By which the sender finds it."""
        return self._path.name

    def take(self, index: int) -> bytes:
        """A copy of the block, whose slot is free from then on."""
        data = self._map[self._slot(index)]
        _HEADER.pack_into(self._map, 0, index + 1)
        # The sender has it open by now; so nothing is left behind, whoever is killed.
        self._unlink()
        return data

    def skip(self, index: int) -> None:
        """The block came in a message."""
        _HEADER.pack_into(self._map, 0, index + 1)

    def close(self) -> None:
        """Gives the memory back, when the sender has, too."""
        super().close()
        self._unlink()
        os.close(self._fd)

    def _unlink(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class StagedBlocks(_Ring):
    """The sender's side."""

    @classmethod
    def open(cls, name: str, num_bytes: int) -> StagedBlocks | None:
        """Another engine's memory for blocks of so many bytes; None where it is not of this machine, or the
        system has not so much left: that is seen here, because a write to what is not there would be the end.
        """
        if not _NAME.fullmatch(name):
            return None
        try:
            fd = os.open(FOLDER / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            num_slots, rest = divmod(found.st_size - _FIRST, num_bytes)
            is_ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not is_ours or num_slots < 1 or rest:
                return None
            os.posix_fallocate(fd, 0, found.st_size)
            return cls(fd, num_slots, num_bytes)
        except OSError:
            return None
        finally:
            os.close(fd)

    def put(self, index: int, block: bytes) -> bool:
        """Leaves a block in its slot; False where another one is there that was not taken."""
        if index >= self.num_slots + _HEADER.unpack_from(self._map, 0)[0]:
            return False
        self._map[self._slot(index)] = block
        return True


def remove_leftovers() -> None:
    """Removes the files of engines that were killed."""
    for path in FOLDER.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)
