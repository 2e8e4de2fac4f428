"""Input of batches: lines by their offsets, and what keeps one from being a request.

A file is read once from its beginning to its end, a line at a time, into an index on the disk; lines are read
again from where they stand when their turn comes. Memory does not grow with the number of lines.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import sqlite3
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from contract.errors import MillraceError, Reason, invalid, unsupported
from gateway.batches.types import Problem
from gateway.http.body import decode
from gateway.http.utf8 import check_utf8, half_pair

MAX_CUSTOM_ID = 256
# Offset, length, fault, the earlier line that a duplicate repeats, number of the line.
_ENTRY = struct.Struct("<QIBII")
_READ_TOGETHER = 256
_SKIP_BYTES = 1 << 20
# Lines whose ids are put down at a time.
_IDS_TOGETHER = 1000
# Pages of the table of ids that are kept in memory, in KiB.
_IDS_CACHE_KIB = 8 * 1024
# Faulty lines that a batch without a good one names.
_NAMED = 10


class Fault(IntEnum):
    """What is wrong with a line before anybody tried it; the numbers stand in indexes."""

    NONE = 0
    # Its own words tell what.
    MALFORMED = 1
    TOO_LONG = 2
    DUPLICATE = 3


class LineBody(msgspec.Struct, frozen=True):
    """A line."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Peek(msgspec.Struct, frozen=True):
    """What a batch must know of a request's body; a field of another type is the endpoint's to refuse."""

    stream: Any = None
    background: Any = None


@dataclass(frozen=True)
class LineEntry:
    """Where a line stands; `position` counts entries of the index from 0, `line` lines of the file from 1."""

    position: int
    offset: int
    length: int
    fault: Fault
    first_line: int
    line: int


_lines_of = msgspec.json.Decoder(LineBody)
_peek = msgspec.json.Decoder(Peek).decode
# None of it can be written as UTF-8, which results are.
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_named = msgspec.json.Decoder(dict[str, Any]).decode


def check_line(data: bytes, endpoint: str) -> LineBody:
    """A line as a request; raises MALFORMED_BODY, INVALID_ARGUMENT or UNSUPPORTED_FIELD."""
    try:
        check_utf8(data)
        line = _lines_of.decode(data)
    except msgspec.ValidationError as error:
        raise _misshapen(data, error) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise half_pair(data) or MillraceError(
            Reason.MALFORMED_BODY, f"the line is not JSON: {error}; write one JSON object a line"
        ) from error
    if not 0 < len(line.custom_id) <= MAX_CUSTOM_ID:
        raise invalid("custom_id", f"it has {len(line.custom_id)} characters; use 1 to {MAX_CUSTOM_ID}")
    if line.method != "POST":
        raise invalid("method", f"{line.method[:20]!r} is not POST")
    if line.url != endpoint:
        raise invalid("url", f"{line.url[:80]!r} is not the batch's endpoint {endpoint}")
    if bytes(memoryview(line.body)[:1]) != b"{":
        raise invalid("body", "it is no JSON object")
    seen = _peek(line.body)
    if seen.stream:
        raise unsupported("body.stream", "leave it out", "a line's answer is whole")
    if seen.background:
        raise unsupported("body.background", "leave it out", "a line runs without a connection anyway")
    return line


def _misshapen(data: bytes, error: msgspec.ValidationError) -> MillraceError:
    try:
        decode(_lines_of, data)
    except MillraceError as told:
        if told.field:
            return told
    form = '{"custom_id", "method": "POST", "url", "body"}'
    return MillraceError(Reason.INVALID_ARGUMENT, f"{error}; a line is {form}")


def name_of(data: bytes) -> str | None:
    """How a line that is no request names itself, if it does."""
    try:
        found = _named(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        try:
            # Half of a surrogate pair, which is no text, may stand elsewhere in it.
            found = json.loads(data.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError):
            return None
    name = found.get("custom_id") if isinstance(found, dict) else None
    if not isinstance(name, str) or len(name) > MAX_CUSTOM_ID:
        return None
    return None if _HALF_PAIR.search(name) else name


class LineIds:
    """Which custom ids there were, in a table on the disk, by their hashes."""

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        # A table that a killed process leaves says nothing of names that could be guessed.
        self._secret = secrets.token_bytes(16)
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", f"cache_size=-{_IDS_CACHE_KIB}"):
            self._database.execute(f"PRAGMA {pragma}")
        self._database.execute("CREATE TABLE ids (id BLOB PRIMARY KEY, line INTEGER) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def first_line(self, custom_id: str, line: int) -> int:
        """The earlier line with this id; 0 where this is the first. Raises OSError for a full disk."""
        name = custom_id.encode()
        key = hashlib.blake2b(name, digest_size=16, key=self._secret).digest()
        try:
            added = self._database.execute("INSERT OR IGNORE INTO ids VALUES (?, ?)", (key, line))
            if added.rowcount:
                return 0
            (first,) = self._database.execute("SELECT line FROM ids WHERE id = ?", (key,)).fetchone()
        except sqlite3.OperationalError as error:
            raise OSError(28, str(error)) from error
        return int(first)

    def close(self) -> None:
        """Removes it."""
        self._database.close()
        self._path.unlink(missing_ok=True)


class BadInput(Exception):
    """The file as a whole is no input of a batch."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(problems)
        self.problems = problems


def index_lines(
    source: BinaryIO,
    folder: Path,
    endpoint: str,
    *,
    max_lines: int,
    max_line_bytes: int,
    goes_on: Callable[[int], bool] = lambda num_lines: True,
) -> int:
    """Writes the index of a file's lines into a folder; how many there are, white space not counted.

    Raises BadInput for a file without a line that could be a request, or with too many; OSError where the
    disk is full. `goes_on` is asked now and then, and ends it by InterruptedError.
    """
    part, faulty, num_good = folder / "index.part", list[Problem](), 0
    ids = LineIds(folder / "ids")
    try:
        with part.open("wb") as index:
            num_entries = 0
            for number, offset, data, length in _lines(source, max_line_bytes):
                if num_entries == max_lines:
                    raise BadInput(_too_many(max_lines, number))
                if num_entries % _IDS_TOGETHER == 0 and not goes_on(num_entries):
                    raise InterruptedError
                fault, first, told = _judge(data, number, endpoint, ids, max_line_bytes)
                index.write(_ENTRY.pack(offset, min(length, 2**32 - 1), fault, first, number))
                num_entries += 1
                num_good += told is None or _is_object(data, told)
                if told and len(faulty) < _NAMED:
                    faulty.append(told)
            index.flush()
            os.fsync(index.fileno())
    finally:
        ids.close()
    if not num_entries:
        raise BadInput(
            Problem(
                "empty_file",
                "the input has no line (line 1 is its end); write one JSON object a line",
                "input_file_id",
                1,
            )
        )
    if not num_good:
        raise BadInput(*faulty)
    part.rename(folder / "index")
    return num_entries


def _too_many(limit: int, line: int) -> Problem:
    message = f"line {line}: a batch has at most {limit} lines (gateway.batches.max_lines); split the file"
    return Problem("too_many_lines", message, "input_file_id", line)


def _judge(
    data: bytes | None, number: int, endpoint: str, ids: LineIds, max_line_bytes: int
) -> tuple[Fault, int, Problem | None]:
    if data is None:
        return Fault.TOO_LONG, 0, _problem(too_long(max_line_bytes), number)
    try:
        line = check_line(data, endpoint)
    except MillraceError as error:
        return Fault.MALFORMED, 0, _problem(error, number)
    first = ids.first_line(line.custom_id, number)
    return (Fault.DUPLICATE, first, None) if first else (Fault.NONE, 0, None)


def _is_object(data: bytes | None, told: Problem) -> bool:
    """Whether a faulty line is one of JSONL all the same, or may be one that is too long to be read."""
    if data is None:
        return True
    return told.code != Reason.MALFORMED_BODY.openai_code and data.lstrip().startswith(b"{")


def _problem(error: MillraceError, number: int) -> Problem:
    return Problem(error.reason.openai_code, f"line {number}: {error.message}", error.field, number)


def too_long(max_line_bytes: int) -> MillraceError:
    """Of a line that nobody has read."""
    return MillraceError(
        Reason.REQUEST_TOO_LARGE,
        f"the line is longer than the limit of {max_line_bytes} bytes (gateway.max_body_bytes); send less",
        metadata={"limit_bytes": str(max_line_bytes)},
    )


def duplicate(custom_id: str, first_line: int) -> MillraceError:
    """Of a line whose name an earlier one has."""
    return invalid("custom_id", f"{custom_id!r} is that of line {first_line}, too; every line needs its own")


def request_of(data: bytes, entry: LineEntry, endpoint: str, max_line_bytes: int) -> LineBody:
    """A line as a request; raises what keeps it from being one, by its entry, too."""
    if entry.fault is Fault.TOO_LONG:
        raise too_long(max_line_bytes)
    line = check_line(data, endpoint)
    if entry.fault is Fault.DUPLICATE:
        raise duplicate(line.custom_id, entry.first_line)
    return line


def _lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, int, bytes | None, int]]:
    """Number, offset, bytes and length of each line that is no white space; no bytes of too long ones."""
    number = offset = 0
    while data := file.readline(max_bytes + 1):
        number += 1
        length, is_long = len(data), len(data.rstrip(b"\r\n")) > max_bytes
        rest = data
        while not rest.endswith(b"\n") and (rest := file.readline(_SKIP_BYTES)):
            length, is_long = length + len(rest), is_long or rest != b"\n"
        if is_long:
            yield number, offset, None, length
        else:
            # Some editors put a mark before a text.
            text = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
            if text.strip():
                yield number, offset + len(data) - len(text), text, len(text)
        offset += length


class LineIndex:
    """The entries of an index from its beginning, but for those that are done."""

    def __init__(self, path: Path, is_done: Callable[[int], bool]) -> None:
        self._file = path.open("rb")
        self._is_done = is_done
        self._position = 0
        self._entries: Iterator[LineEntry] = iter(())

    def next(self) -> LineEntry | None:
        """The next one; None at the end."""
        while True:
            for entry in self._entries:
                if not self._is_done(entry.position):
                    return entry
            data = self._file.read(_ENTRY.size * _READ_TOGETHER)
            if not data:
                return None
            start = self._position
            self._position += len(data) // _ENTRY.size
            self._entries = iter(
                [
                    LineEntry(start + index, offset, length, Fault(fault), first, line)
                    for index, (offset, length, fault, first, line) in enumerate(_ENTRY.iter_unpack(data))
                ]
            )

    def close(self) -> None:
        """Ends it."""
        self._file.close()


def read_line(source: BinaryIO, entry: LineEntry) -> bytes:
    """The bytes of a line; raises OSError."""
    source.seek(entry.offset)
    return source.read(entry.length)
