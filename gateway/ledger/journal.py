"""What is open, in a file that outlives this process: what a killed gateway has answered is in the ledger.

A request is written down when it is accepted, with space for its progress, which is overwritten in place
before its chunk leaves; and its row is added when it has ended, until the database has it. The kernel keeps
what was written when the process is killed (not when the machine loses power). Each process has a file of its
own and holds a lock on it, so that others see whose owner is gone.

A file has its space from the beginning: a disk that is full later takes none of it. Where it is full at the
start, the space behind what a process that is gone has left is used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway.limits.limiter import Charges
from gateway.pipeline.ports import INTERRUPTED, FinishedRequest, Progress

_log = logging.getLogger(__name__)

_SUFFIX = ".open"
# From this size on the file is written anew with what is still needed.
_COMPACT_BYTES = 4 << 20
# Room that a file has at least.
_ROOM_BYTES = 8 << 20
# How often a file that could not be made is tried again.
_RETRY_S = 1.0
# Passes by itself; whatever else keeps a file from being made is a matter of configuration.
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
# Head of a file: how many requests its owner could not write down, and the database does not have.
_MISSING = struct.Struct("<I")
# Length of what follows it, and whether that is a whole row.
_HEAD = struct.Struct("<IB")
# Prompt, cached prompt, completion and candidate tokens, the outcome's place in _OUTCOMES, and whether it is
# settled with the limits.
_PROGRESS = struct.Struct("<IIIIBB")
_OUTCOMES = {INTERRUPTED: 0, "stop": 1, "length": 2, "tool_calls": 3, "budget": 4}


class Kept(msgspec.Struct):
    """A request, and what it holds of the limits if it is not settled."""

    request: FinishedRequest
    # Files of earlier versions have it under this name.
    charges: Charges | None = msgspec.field(default=None, name="holds")


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Kept).decode


class JournalEntry:
    """A request in the journal that has not ended, or is not settled with the limits."""

    __slots__ = ("_journal", "_kept", "_recorded", "entry_id", "has_ended", "is_settled", "offset")

    def __init__(self, journal: Journal, kept: Kept) -> None:
        self.entry_id = kept.request.entry_id
        # Where the record begins in the file; -1 while it is not there.
        self.offset = -1
        self.has_ended = self.is_settled = False
        self._journal = journal
        self._kept = kept
        self._recorded = Progress()

    def record(self, progress: Progress) -> None:
        """See OpenEntry."""
        if progress != self._recorded:
            self._recorded = progress
            self._journal.overwrite(self)

    def extended(self) -> None:
        """It holds more of the limits."""
        self._journal.add(self)

    def settled(self) -> None:
        """It holds nothing of the limits any more."""
        self.is_settled = True
        self._journal.overwrite(self)

    @property
    def encoded(self) -> bytes:
        """As it stands in the file."""
        payload = self.progress + _encode(self._kept)
        return _HEAD.pack(len(payload), 0) + payload

    @property
    def progress(self) -> bytes:
        """Its progress, as it stands behind the record's head."""
        *tokens, outcome = self._recorded
        return _PROGRESS.pack(*tokens, _OUTCOMES.get(outcome, 0), self.is_settled)


class Journal:
    """The file of this process. Where it cannot be written, requests go on, and it counts what it lacks."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        # Requests that are open, and rows that the database does not have yet, by entry.
        self._open: dict[str, JournalEntry] = {}
        self._rows: dict[str, bytes] = {}
        # Entries that could not be written into the file.
        self._missing: set[str] = set()
        # The event loop adds, the ledger's thread forgets.
        self._lock = threading.Lock()
        self._is_failing = False
        # Where this process began to write in the file of another one; 0 in its own.
        self._borrowed_from = self._borrowed_missing = 0
        # From this end on a new file is tried, not before a moment in monotonic seconds.
        self._compact_at, self._retry_at_s = _COMPACT_BYTES, 0.0
        try:
            self._file, self._end = _write_anew(self._path, b""), _MISSING.size
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._file, self._end, self._compact_at = -1, 0, -1
            self._cannot_write(error)
            self._borrow(folder)

    def begin(self, request: FinishedRequest, charges: Charges) -> JournalEntry:
        """Writes down a request that is accepted; what is known of it is what an interruption leaves."""
        entry = JournalEntry(self, Kept(request, charges))
        self.add(entry)
        return entry

    def add(self, entry: JournalEntry) -> None:
        """Writes all that is known of a request; what was written of it before counts no more."""
        with self._lock:
            if self._end > self._compact_at and time.monotonic() >= self._retry_at_s:
                self._compact()
            self._open[entry.entry_id] = entry
            # One that is there stays, where there is no space for another.
            entry.offset = max(entry.offset, self._append(entry, entry.encoded))

    def overwrite(self, entry: JournalEntry) -> None:
        """Writes a request's progress over its earlier one."""
        with self._lock:
            if entry.offset >= 0:
                with contextlib.suppress(OSError):
                    os.pwrite(self._file, entry.progress, entry.offset + _HEAD.size)
            if entry.has_ended and entry.is_settled:
                self._open.pop(entry.entry_id, None)

    def end(self, request: FinishedRequest) -> None:
        """Keeps the row of a request that has ended until the database has it."""
        row = _encode(Kept(request))
        row = _HEAD.pack(len(row), 1) + row
        with self._lock:
            entry = self._open.get(request.entry_id)
            self._rows[request.entry_id] = row
            self._append(entry or JournalEntry(self, Kept(request)), row)
            if entry is not None:
                entry.has_ended = True
                if entry.is_settled:
                    del self._open[request.entry_id]

    def forget(self, entry_ids: list[str]) -> None:
        """The database has them."""
        with self._lock:
            for entry_id in entry_ids:
                self._rows.pop(entry_id, None)
                self._note_missing(entry_id, is_missing=False)

    def make_room(self) -> None:
        """Gives a borrowed file back, or makes the one that could not be made, when the disk has space."""
        with self._lock:
            if self._file < 0 or self._borrowed_from:
                self._compact()

    def close(self) -> None:
        """The file stays if the database lacks something that is in it."""
        if self._file < 0:
            return
        is_done = not self._open and not self._rows
        if is_done and self._borrowed_from:
            self._give_back()
        else:
            os.close(self._file)
            if is_done:
                _remove(self._path)
        self._file = -1

    def _append(self, entry: JournalEntry, record: bytes) -> int:
        """Offset of a record of this request; -1 where there is no space for it."""
        offset = self._end
        try:
            written = os.pwrite(self._file, record, offset)
            failure = OSError("the disk is full")
        except OSError as error:
            written, failure = 0, error
        if written < len(record):
            self._cannot_write(failure)
            self._note_missing(entry.entry_id, is_missing=entry.offset < 0)
            return -1
        self._is_failing = False
        self._end += written
        self._note_missing(entry.entry_id, is_missing=False)
        return offset

    def _cannot_write(self, error: OSError) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.error("ledger: %s cannot be written, a kill would lose entries: %s", self._path, error)

    def _note_missing(self, entry_id: str, *, is_missing: bool) -> None:
        if is_missing is (entry_id in self._missing):
            return
        (self._missing.add if is_missing else self._missing.remove)(entry_id)
        with contextlib.suppress(OSError):
            os.pwrite(self._file, _MISSING.pack(self._borrowed_missing + len(self._missing)), 0)

    def _compact(self) -> None:
        """Goes on with a new file that has what is still needed."""
        # A row counts more than what is before it.
        records = [*(entry.encoded for entry in self._open.values()), *self._rows.values()]
        try:
            new = _write_anew(self._path, b"".join(records))
        except OSError as error:
            self._retry_at_s = time.monotonic() + _RETRY_S
            self._cannot_write(error)
            return
        self._end = _MISSING.size
        for entry, record in zip(self._open.values(), records, strict=False):
            entry.offset = self._end
            self._end += len(record)
        self._end += sum(map(len, self._rows.values()))
        if self._borrowed_from:
            self._give_back()
        elif self._file >= 0:
            os.close(self._file)
        self._file = new
        self._missing.clear()
        self._is_failing = False
        # Where most is needed, not every time.
        self._compact_at = max(_COMPACT_BYTES, 2 * self._end)

    def _borrow(self, folder: Path) -> None:
        left = next(left_behind(folder), None)
        if left is not None:
            self._file, self._end = left.file, left.end
            self._borrowed_from, self._borrowed_missing = left.end, left.num_missing

    def _give_back(self) -> None:
        """The file of another process is again as that one has left it."""
        with contextlib.suppress(OSError):
            os.pwrite(self._file, _MISSING.pack(self._borrowed_missing), 0)
            os.ftruncate(self._file, self._borrowed_from)
        os.close(self._file)
        self._borrowed_from = self._borrowed_missing = 0


class Left:
    """What a process that is gone has left. Its file is locked until `remove` or `release`."""

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self.file = file
        status = os.fstat(file)
        data = os.pread(file, status.st_size, 0)
        # Requests of which nothing is known.
        (self.num_missing,) = _MISSING.unpack_from(data) if len(data) >= _MISSING.size else (0,)
        self.kept, self.end = _read(data, status.st_mtime_ns // 1_000_000)

    def remove(self) -> None:
        """Its requests are in the ledger."""
        _remove(self._path)
        self.release()

    def release(self) -> None:
        """Leaves it to be taken in later, or by another process."""
        os.close(self.file)


def left_behind(folder: Path) -> Iterator[Left]:
    """What processes that are gone have left, file by file."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Its owner lives, or another gateway takes it in.
            os.close(file)
            continue
        if os.fstat(file).st_nlink:
            yield Left(path, file)
        else:
            # Another gateway has taken it in, or its owner has a new one.
            os.close(file)


def _read(data: bytes, ended_unix_ms: int) -> tuple[list[Kept], int]:
    """What a file says, and where that ends."""
    found: dict[str, Kept] = {}
    start = _MISSING.size
    while start + _HEAD.size <= len(data):
        length, is_row = _HEAD.unpack_from(data, start)
        body = data[start + _HEAD.size : start + _HEAD.size + length]
        if not length or len(body) < length:
            # The rest is space, or its owner was killed while it wrote.
            break
        start += _HEAD.size + length
        kept = _decode(body if is_row else body[_PROGRESS.size :])
        entry_id = kept.request.entry_id
        if not is_row:
            found[entry_id] = _interrupted(kept, body, ended_unix_ms)
        elif entry_id in found:
            found[entry_id].request = kept.request
        else:
            found[entry_id] = kept
    return list(found.values()), start


def _interrupted(kept: Kept, progress: bytes, ended_unix_ms: int) -> Kept:
    prompt, cached, completion, candidates, outcome, is_settled = _PROGRESS.unpack_from(progress)
    request = msgspec.structs.replace(
        kept.request,
        ended_unix_ms=ended_unix_ms,
        # It held the moment of its beginning.
        duration_ms=float(max(0, ended_unix_ms - kept.request.ended_unix_ms)),
        outcome=tuple(_OUTCOMES)[outcome],
        prompt_tokens=prompt,
        cached_prompt_tokens=cached,
        completion_tokens=completion,
        candidate_tokens=candidates,
    )
    return Kept(request, None if is_settled else kept.charges)


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    _new_path(path).unlink(missing_ok=True)


def _new_path(path: Path) -> Path:
    return path.with_suffix(".new")


def _write_anew(path: Path, records: bytes) -> int:
    """A locked file with these records and space for as many again, in place of what is at `path`."""
    new = _new_path(path)
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Before others can see it.
        fcntl.flock(file, fcntl.LOCK_EX)
        os.posix_fallocate(file, 0, max(_ROOM_BYTES, 2 * len(records)))
        os.pwrite(file, records, _MISSING.size)
        new.rename(path)
    except OSError:
        os.close(file)
        new.unlink(missing_ok=True)
        raise
    return file
