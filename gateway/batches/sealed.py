"""Content at rest: files in chunks that are encrypted one by one, each by its file's own key.

A chunk is bound to its number and to whether it is the last one (as in STREAM: Hoang, Reyhanitabar, Rogaway,
Vizár 2015): a file whose chunks were altered, left out, put elsewhere or cut off cannot be read. Any chunk is
read without those before it, so lines are read where they stand, and nothing plain reaches a disk.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from gateway.store.seal import OVERHEAD_BYTES, RowSeal, SealBroken

CHUNK_BYTES = 64 * 1024
SEALED_BYTES = CHUNK_BYTES + OVERHEAD_BYTES
_SETTING = "gateway.batches.key_file"


class ContentKeys:
    """The deployment's keys for files and batches. Each file has a key of its own, derived from them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys

    def of(self, id_: str) -> RowSeal:
        """What encrypts one file, or the results of one batch."""
        return RowSeal(self._keys, what=f"the content of {id_}", setting=_SETTING)

    def of_rows(self) -> RowSeal:
        """What encrypts rows of the database."""
        return RowSeal(self._keys, what="files and batches", setting=_SETTING)


def needed(keys: ContentKeys | None) -> ContentKeys:
    """The keys that something was encrypted with; raises SealBroken where there are none any more."""
    if keys is None:
        raise SealBroken(
            f"it is encrypted, and {_SETTING} names no key; name the one that it was written with"
        )
    return keys


class SealingPieces:
    """Encrypts bytes as they come."""

    def __init__(self, seal: RowSeal) -> None:
        self._seal = seal
        self._rest = bytearray()
        self._number = 0

    def take(self, piece: bytes) -> bytes:
        """What can be written now that these bytes are there, too."""
        self._rest += piece
        whole = []
        # What may be the last chunk waits.
        while len(self._rest) > CHUNK_BYTES:
            whole.append(self._next(bytes(memoryview(self._rest)[:CHUNK_BYTES]), is_last=False))
            del self._rest[:CHUNK_BYTES]
        return b"".join(whole)

    def end(self) -> bytes:
        """The last chunk, which an empty file has, too."""
        return self._next(bytes(self._rest), is_last=True)

    def _next(self, plain: bytes, *, is_last: bool) -> bytes:
        sealed = self._seal.seal(_place(self._number, is_last=is_last), plain)
        self._number += 1
        return sealed


def opened(pieces: Iterable[bytes], seal: RowSeal) -> Iterator[bytes]:
    """Decrypts bytes as they come; raises SealBroken at the first chunk that is not as it was written."""
    rest, number = bytearray(), 0
    for piece in pieces:
        rest += piece
        while len(rest) > SEALED_BYTES:
            yield seal.open(_place(number, is_last=False), bytes(memoryview(rest)[:SEALED_BYTES]))
            del rest[:SEALED_BYTES]
            number += 1
    yield seal.open(_place(number, is_last=True), bytes(rest))


def _place(number: int, *, is_last: bool) -> str:
    return f"{number}/{'last' if is_last else 'more'}"


def open_sealed(path: Path, seal: RowSeal) -> BinaryIO:
    """An encrypted file, to be read and sought in as if it were plain; what is read raises SealBroken."""
    return cast(BinaryIO, io.BufferedReader(_SealedFile(path, seal), CHUNK_BYTES))


class _SealedFile(io.RawIOBase):
    """Holds one chunk."""

    def __init__(self, path: Path, seal: RowSeal) -> None:
        self._file = path.open("rb", buffering=0)
        self._seal = seal
        self._num_chunks = max(1, -(-os.fstat(self._file.fileno()).st_size // SEALED_BYTES))
        self._position = 0
        self._number, self._plain = -1, b""

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seekable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """See io.RawIOBase; not from the end."""
        if whence == os.SEEK_END:
            raise io.UnsupportedOperation("the end of an encrypted file is known when it was read")
        self._position = offset + (self._position if whence == os.SEEK_CUR else 0)
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """See io.RawIOBase."""
        number, start = divmod(self._position, CHUNK_BYTES)
        if number >= self._num_chunks:
            return 0
        if number != self._number:
            sealed = os.pread(self._file.fileno(), SEALED_BYTES, number * SEALED_BYTES)
            is_last = number == self._num_chunks - 1
            self._plain = self._seal.open(_place(number, is_last=is_last), sealed)
            self._number = number
        part = memoryview(self._plain)[start : start + len(buffer)]
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def close(self) -> None:
        """See io.RawIOBase."""
        if not self.closed:
            self._file.close()
        super().close()
