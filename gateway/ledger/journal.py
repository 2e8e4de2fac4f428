"""What is open, in a file that outlives this process: what a killed gateway has answered is in the ledger.

A request is written down when it is accepted, with room for what is told of it; that is overwritten in place
before its chunk leaves; and its row is added when it has ended, until the database has it. The kernel keeps
what was written when the process is killed (not when the machine loses power). Each process has a file of its
own and holds a lock on it, so that the next one to start sees whose owner is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gateway.limits.reservation import Holds
from gateway.pipeline.ports import INTERRUPTED, FinishedRequest, Progress

_log = logging.getLogger(__name__)

_SUFFIX = ".open"
# From this size on the file is written anew with what is still needed.
_COMPACT_BYTES = 4 << 20
# Length of what follows it, and whether that is a whole row.
_HEAD = struct.Struct("<IB")
# Prompt, cached prompt, completion and candidate tokens, the outcome's place in _OUTCOMES, and whether it is
# settled with the limits.
_PROGRESS = struct.Struct("<IIIIBB")
_OUTCOMES = {INTERRUPTED: 0, "stop": 1, "length": 2, "tool_calls": 3, "budget": 4}


class Kept(msgspec.Struct):
    """A request, and what it holds of the limits if it is not settled."""

    request: FinishedRequest
    holds: Holds | None = None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Kept).decode


class OpenRequest:
    """A request in the journal that has not ended, or is not settled with the limits."""

    __slots__ = ("_journal", "_kept", "_told", "entry_id", "has_ended", "is_settled", "offset")

    def __init__(self, journal: Journal, kept: Kept) -> None:
        self.entry_id = kept.request.entry_id
        # Of the record in the file; -1 while it is not there.
        self.offset = -1
        self.has_ended = self.is_settled = False
        self._journal = journal
        self._kept = kept
        self._told = Progress()

    def told(self, progress: Progress) -> None:
        """What the next chunk tells, before it leaves."""
        if progress != self._told:
            self._told = progress
            self._journal.overwrite(self)

    def extended(self) -> None:
        """It holds more of the limits."""
        self._journal.add(self)

    def settled(self) -> None:
        """It holds nothing of the limits any more."""
        self.is_settled = True
        self._journal.overwrite(self)

    @property
    def record(self) -> bytes:
        """As it stands in the file."""
        payload = self.progress + _encode(self._kept)
        return _HEAD.pack(len(payload), 0) + payload

    @property
    def progress(self) -> bytes:
        """What is told of it, as it stands behind the record's head."""
        *tokens, outcome = self._told
        return _PROGRESS.pack(*tokens, _OUTCOMES.get(outcome, 0), self.is_settled)


class Journal:
    """The file of this process. Where it cannot be written, requests go on and are missing in it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / f"{os.getpid()}-{secrets.token_hex(4)}{_SUFFIX}"
        # Requests that are open, and rows that the database does not have yet, by entry.
        self._open: dict[str, OpenRequest] = {}
        self._rows: dict[str, bytes] = {}
        # The event loop adds, the ledger's thread forgets.
        self._lock = threading.Lock()
        self._is_failing = False
        self._file, self._end = _create(self._path), 0

    def begin(self, request: FinishedRequest, holds: Holds) -> OpenRequest:
        """Writes down a request that is accepted; what is known of it is what an interruption leaves."""
        entry = OpenRequest(self, Kept(request, holds))
        self.add(entry)
        return entry

    def add(self, entry: OpenRequest) -> None:
        """Writes all that is known of a request; what was written of it before counts no more."""
        with self._lock:
            if self._end > _COMPACT_BYTES:
                self._compact()
            self._open[entry.entry_id] = entry
            entry.offset = self._append(entry.record)

    def overwrite(self, entry: OpenRequest) -> None:
        """Writes what is told of a request over what was: once for every chunk, and without the lock, since
        only the event loop moves records.
        """
        if entry.offset >= 0:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, entry.progress, entry.offset + _HEAD.size)
        if entry.has_ended and entry.is_settled:
            with self._lock:
                self._open.pop(entry.entry_id, None)

    def end(self, request: FinishedRequest) -> None:
        """Keeps the row of a request that has ended until the database has it."""
        row = _encode(Kept(request))
        row = _HEAD.pack(len(row), 1) + row
        with self._lock:
            entry = self._open.get(request.entry_id)
            if entry is not None:
                entry.has_ended = True
                if entry.is_settled:
                    del self._open[request.entry_id]
            self._rows[request.entry_id] = row
            self._append(row)

    def forget(self, entry_ids: list[str]) -> None:
        """The database has them."""
        with self._lock:
            for entry_id in entry_ids:
                self._rows.pop(entry_id, None)

    def close(self) -> None:
        """The file stays if the database lacks something that is in it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            if not self._open and not self._rows:
                remove(self._path)

    def _append(self, record: bytes) -> int:
        offset = self._end
        try:
            written = os.pwrite(self._file, record, offset)
        except OSError as error:
            written, failure = 0, str(error)
        else:
            failure = "the disk is full"
        if written < len(record):
            if not self._is_failing:
                self._is_failing = True
                _log.error("ledger: %s cannot be written, a kill would lose entries: %s", self._path, failure)
            return -1
        self._is_failing = False
        self._end += written
        return offset

    def _compact(self) -> None:
        """Goes on with a new file that has what is still needed."""
        new, old = _new_path(self._path), self._file
        try:
            self._file = _create(new)
        except OSError as error:
            _log.error("ledger: %s cannot be written anew: %s", self._path, error)
            return
        self._end = 0
        for entry in self._open.values():
            entry.offset = self._append(entry.record)
        # A row counts more than what is before it.
        for row in self._rows.values():
            self._append(row)
        new.rename(self._path)
        os.close(old)


def left_behind(folder: Path) -> Iterator[tuple[Path, list[Kept]]]:
    """What processes that are gone have left, file by file; whoever has taken a file in removes it."""
    for path in sorted(folder.glob(f"*{_SUFFIX}")):
        try:
            file = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield path, _read(path)
        except BlockingIOError:
            # Its owner lives, or another gateway takes it in.
            continue
        finally:
            os.close(file)


def _read(path: Path) -> list[Kept]:
    data, ended_unix_ms = path.read_bytes(), path.stat().st_mtime_ns // 1_000_000
    found: dict[str, Kept] = {}
    start = 0
    while start + _HEAD.size <= len(data):
        length, is_row = _HEAD.unpack_from(data, start)
        body = data[start + _HEAD.size : start + _HEAD.size + length]
        start += _HEAD.size + length
        if not length or len(body) < length:
            # Its owner was killed while it wrote.
            break
        kept = _decode(body if is_row else body[_PROGRESS.size :])
        entry_id = kept.request.entry_id
        if not is_row:
            found[entry_id] = _interrupted(kept, body, ended_unix_ms)
        elif entry_id in found:
            found[entry_id].request = kept.request
        else:
            found[entry_id] = kept
    return list(found.values())


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
    return Kept(request, None if is_settled else kept.holds)


def remove(path: Path) -> None:
    """Removes a file whose requests are in the ledger, or in another journal."""
    path.unlink(missing_ok=True)
    _new_path(path).unlink(missing_ok=True)


def _new_path(path: Path) -> Path:
    return path.with_suffix(".new")


def _create(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
