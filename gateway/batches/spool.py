"""Results of a batch while it runs, and how far they are: what a killed gateway has answered stays answered.

Results are appended to two files, in the order in which they come, and reach the disk before the record that
says so. Whoever goes on cuts the files to what the record says. A line is done once the record names it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gateway.batches.types import LineOutcome
from gateway.store.seal import RowSeal, SealBroken

# Position of a line, its file, what became of it, where its result ends in the file; and a checksum of these.
_RECORD = struct.Struct("<IBBQ")
_SUM = struct.Struct("<I")
_SIZE = _RECORD.size + _SUM.size
_READ_TOGETHER = 4096
# Length of an encrypted result, before it.
_LENGTH = struct.Struct("<I")
NAMES = ("output", "errors")


class SpoolBusy(Exception):
    """Another process writes it."""


@dataclass(frozen=True)
class Written:
    """A result to be written."""

    position: int
    outcome: LineOutcome
    # Index in NAMES.
    file: int
    data: bytes


class Spool:
    """The results of one batch. Not for the event loop."""

    def __init__(self, folder: Path, num_lines: int, seal: RowSeal | None = None) -> None:
        """Results are encrypted where there is a `seal`. Raises SpoolBusy while another process has it open,
        and OSError.
        """
        self.folder = folder
        self._seal = seal
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        self._files: list[int] = []
        self.counts = [0] * len(LineOutcome)
        self.ends = [0, 0]
        self._done = bytearray((num_lines + 7) // 8)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            flags = os.O_RDWR | os.O_CREAT
            self._files = [os.open(folder / name, flags, 0o600) for name in (*NAMES, "progress")]
            self._end = self._recover()
        except BlockingIOError as error:
            self.close()
            raise SpoolBusy from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives it to others."""
        files, self._files = self._files, []
        lock, self._lock = self._lock, -1
        for file in (*files, *([lock] if lock >= 0 else ())):
            os.close(file)

    def is_done(self, position: int) -> bool:
        """Whether a line has its result."""
        return bool(self._done[position >> 3] & 1 << (position & 7))

    def _recover(self) -> int:
        progress, valid = self._files[-1], 0
        while data := os.pread(progress, _SIZE * _READ_TOGETHER, valid):
            for start in range(0, len(data) - _SIZE + 1, _SIZE):
                record = data[start : start + _RECORD.size]
                (told,) = _SUM.unpack_from(data, start + _RECORD.size)
                if told != zlib.crc32(record):
                    break
                self._note(*_RECORD.unpack(record))
                valid += _SIZE
            else:
                if len(data) == _SIZE * _READ_TOGETHER:
                    continue
            break
        for file, end in zip(self._files, (*self.ends, valid), strict=True):
            os.ftruncate(file, end)
        return valid

    def _note(self, position: int, file: int, outcome: int, end: int) -> None:
        self._done[position >> 3] |= 1 << (position & 7)
        self.counts[outcome] += 1
        self.ends[file] = end

    def commit(self, results: Sequence[Written]) -> None:
        """Appends results, all or none, and returns when they outlive this process and its machine. Raises
        OSError, where the disk is full, too.
        """
        fresh = {result.position: result for result in results if not self.is_done(result.position)}
        ends, records = list(self.ends), list[tuple[int, int, int, int]]()
        pieces: list[list[bytes]] = [[], []]
        for result in fresh.values():
            data = self._kept(result, ends[result.file])
            pieces[result.file].append(data)
            ends[result.file] += len(data)
            records.append((result.position, result.file, result.outcome, ends[result.file]))
        *files, progress = self._files
        try:
            for file, start, each in zip(files, self.ends, pieces, strict=True):
                if each:
                    _write_at(file, b"".join(each), start)
                    os.fsync(file)
            lines = [_RECORD.pack(*record) for record in records]
            told = b"".join([line + _SUM.pack(zlib.crc32(line)) for line in lines])
            _write_at(progress, told, self._end)
            os.fsync(progress)
        except OSError:
            for file, end in zip(self._files, (*self.ends, self._end), strict=True):
                os.ftruncate(file, end)
            raise
        self._end += len(told)
        for record in records:
            self._note(*record)

    def _kept(self, result: Written, start: int) -> bytes:
        """A result as it stands in its file from `start` on, and may be read nowhere else."""
        if self._seal is None:
            return result.data
        sealed = self._seal.seal(_place(result.file, start), result.data)
        return _LENGTH.pack(len(sealed)) + sealed

    def results(self, file: int) -> Iterator[bytes]:
        """The results of one of NAMES, decrypted, in the order in which they came; raises SealBroken."""
        assert self._seal is not None, "a plain file is what it is"
        start = 0
        with (self.folder / NAMES[file]).open("rb") as source:
            while start < self.ends[file]:
                head = source.read(_LENGTH.size)
                sealed = source.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else b""
                yield self._seal.open(_place(file, start), sealed)
                start += _LENGTH.size + len(sealed)
        if start != self.ends[file]:
            raise SealBroken(f"{source.name} was altered")


def _write_at(file: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _place(file: int, start: int) -> str:
    return f"{NAMES[file]}/{start}"
