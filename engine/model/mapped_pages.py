"""Pages of a mapped checkpoint file: they count as the process's memory while it maps them, though the system
has them anyway, and can be let go once what they hold was copied.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kernels.host import advise

if TYPE_CHECKING:
    from torch import Tensor

# Bytes of a file that are read until their pages are given back.
STRIDE_BYTES = 64 << 20
_MAPS = Path("/proc/self/maps")


class MappedPages:
    """Tensors that lie in a file's mapping. Nobody writes to them, and the mapping outlives this."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._held_bytes = 0

    def read(self, tensor: Tensor) -> None:
        """A tensor is about to be read. Those before it are let go now and then; who reads one once more has
        its pages from the system again, unchanged.
        """
        if self._held_bytes >= STRIDE_BYTES:
            self.let_go()
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin:
            self._ranges.append((begin, end - begin))
            self._held_bytes += end - begin

    def let_go(self) -> None:
        """Of everything that was read so far. Does nothing where the system does not tell what lies in files:
        of other memory the contents would be lost.
        """
        self._held_bytes = 0
        files = _mapped_files()
        if not files or not hasattr(mmap, "MADV_DONTNEED"):
            return
        for begin, size in self._ranges:
            if any(start <= begin and begin + size <= end for start, end, _, _ in files):
                advise(begin, size, mmap.MADV_DONTNEED)


# Marks that tell a file from another one that has taken its name, or from itself after it was written to:
# device, number, bytes, and nanoseconds of the last change.
FileVersion = tuple[int, int, int, int]


@dataclass(frozen=True)
class FilePart:
    """What lies in a file from an offset on."""

    path: str
    offset: int
    version: FileVersion


def version_of(status: os.stat_result) -> FileVersion:
    """Of an open file, or of one that a path leads to."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_of(address: int, num_bytes: int) -> FilePart | None:
    """Where something at an address lies in a file, if that is all inside one mapping of a large file,
    to which its path still leads.
    """
    where = _place_of(address, num_bytes)
    if where is None:
        return None
    try:
        found = FilePart(*where, version_of(os.stat(where[0])))
    except OSError:
        # Deleted, perhaps as another one was put in its place; or the system writes the path in its own way.
        return None
    # The path led to the file before and after it was asked about.
    return found if _place_of(address, num_bytes) == where else None


def _place_of(address: int, num_bytes: int) -> tuple[str, int] | None:
    """Path, with a word behind it where the file is deleted, and offset."""
    for start, end, offset, path in _mapped_files():
        if start <= address and address + num_bytes <= end:
            return path, address - start + offset
    return None


def _mapped_files() -> list[tuple[int, int, int, str]]:
    """Start, end, offset and path of large files' mappings; none where the system does not tell."""
    if not _MAPS.exists():
        return []
    found = []
    # Paths are any bytes, and lines end with this one alone.
    for line in os.fsdecode(_MAPS.read_bytes()).removesuffix("\n").split("\n"):
        area, _, offset, _, inode, *path = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in area.split("-"))
        if inode != "0" and end - start >= STRIDE_BYTES // 16:
            found.append((start, end, int(offset, 16), path[0] if path else ""))
    return found
